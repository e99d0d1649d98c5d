"""No silent key: what a user sets and nobody reads ends the start; who reads what is in the run directory."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from command_lab import NO_VALIDATION, SMALL, small_trainer

from verl_mt.config.compose import compose
from verl_mt.config.reads import recording
from verl_mt.config.schema import leaves
from verl_mt.errors import ConfigError
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.build_data import notes
from verl_mt.trainer.config_reads import ALLOWED, LATER, readers

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
OWN = ("actor_rollout_ref.model.path=verl_mt://tiny", "data.train_files=verl_mt.tiny.problems:rows")
"""Own model and own data: nothing of the default task, so no tools and no validation."""
IDLE = {
    "reward.overlong_buffer.len=64": "reward.overlong_buffer.enable",
    "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable",
    f"{ROLLOUT}.multi_turn.tool_timeout_s=5": f"{ROLLOUT}.tool_kwargs.tools_config_file",
    "data.val_max_samples=8": "data.val_files",
}


@pytest.mark.parametrize("override", IDLE)
def test_a_key_that_nothing_reads_ends_the_start_and_leaves_no_directory(tmp_path, override):
    with pytest.raises(ConfigError) as raised:
        build_trainer(
            compose(
                [*OWN, "data.train_max_samples=16", override, "trainer.logger=[]",
                 f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.experiment_name=idle"]
            )
        )  # fmt: skip
    said = str(raised.value)
    assert f"{override.partition('=')[0]}=" in said
    assert "is read by nothing in this run" in said
    assert IDLE[override] in said
    assert "experiment_name" not in said
    assert not (tmp_path / "run").exists()


def test_who_gives_the_switch_as_well_has_said_that_the_key_is_to_rest(tmp_path):
    off = ("reward.overlong_buffer.enable=False", "reward.overlong_buffer.len=64", "data.val_files=null")
    small_trainer(tmp_path / "run", *off, "trainer.export_at_end=False").close()


QUIET = ("actor_rollout_ref.actor.use_kl_loss=False", "actor_rollout_ref.actor.kl_loss_type=k1")


def test_the_default_value_of_an_idle_key_and_keys_of_launch_scripts_pass(tmp_path):
    trainer = small_trainer(tmp_path / "run", *NO_VALIDATION, "reward.overlong_buffer.len=128", *QUIET)
    trainer.close()
    written = json.loads((tmp_path / "run" / "config_reads.json").read_text())
    assert list(written) == list(leaves())
    assert written["actor_rollout_ref.rollout.multi_turn.tool_timeout_s"] == ["verl_mt.tools.limits"]
    assert written["reward.overlong_buffer.len"] == []
    assert set(ALLOWED) <= set(written)


@pytest.mark.parametrize(
    ("mode", "idle"), [("vanilla", []), ("gspo", ["clip_ratio_c"]), ("gpg", ["clip_ratio_c", "clip_ratio"])]
)
def test_a_clip_range_that_the_loss_does_not_read_has_no_reader_and_is_said(mode, idle):
    actor = "actor_rollout_ref.actor"
    config = compose(
        [*OWN, f"{actor}.policy_loss.loss_mode={mode}", f"{actor}.clip_ratio_c=10", f"{actor}.clip_ratio=0.3"]
    )
    with recording(config) as reads:
        found = readers(reads)
    assert [name for name in ("clip_ratio_c", "clip_ratio") if not found[f"{actor}.{name}"]] == idle
    prompts = SimpleNamespace(num_filtered=0, num_truncated=0, rows=list)
    said = [text for text in notes(config, prompts) if "clip_ratio" in text]
    assert sorted(text.split()[0] for text in said) == sorted(f"actor.{name}" for name in idle)


@pytest.mark.parametrize(
    ("key", "switch"),
    [
        ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.use_kl_loss=True"),
        ("actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.lora_rank=4"),
        ("critic.optim.lr", "algorithm.adv_estimator=gae"),
    ],
)
def test_workers_of_other_processes_are_not_said_to_read_what_is_switched_off(key, switch):
    for more, expected in (((), []), ((switch,), ["verl_mt.workers"])):
        config = compose([*OWN, "trainer.placement=ray", *more])
        with recording(config) as reads:
            assert readers(reads)[key] == expected


def test_what_is_said_to_be_read_later_is_read_then_and_nothing_else(tmp_path):
    """Two steps with updates, a validation and a checkpoint."""
    several = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.logger=[]")
    config = compose([*SMALL, *several, f"trainer.default_local_dir={tmp_path / 'run'}"])
    with recording(config) as run:
        trainer = build_trainer(config)
        at_start = json.loads((tmp_path / "run" / "config_reads.json").read_text())
        with recording(config) as later:
            trainer.fit()
    for module, keys in LATER.items():
        for key in keys:
            read = any(reader.startswith(module) for reader in run[key])
            assert read, f"{module} does not read {key}, {run[key]} do: correct LATER"
    forgotten = [key for key in leaves() if later[key] and not at_start[key]]
    assert forgotten == [], "read by a step and not known at start: add them to LATER"
