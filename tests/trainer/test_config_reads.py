"""No silent key: what a user sets and means nothing ends the start; who reads what is in the run directory.

Who reads a key is recorded while it is wanted, and costs nothing otherwise.
"""

from __future__ import annotations

import copy
import json
import os
from types import SimpleNamespace

import pytest
from command_lab import NO_VALIDATION, SMALL, small_trainer

from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.config.declare import Section
from verl_mt.config.schema import Config, leaves
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.rollout.context import Limits
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.build_data import notes
from verl_mt.trainer.config_reads import readers, reads_recorded, recording, write_reads

ROLLOUT = "actor_rollout_ref.rollout"
OWN = ("actor_rollout_ref.model.path=verl_mt://tiny", "data.train_files=verl_mt.tiny.problems:rows")
"""Own model and own data: nothing of the default task, so no tools and no validation."""
NOT_READ_BY_A_RUN = {"trainer.experiment_name", "trainer.dry_run"}
"""The first names the directory that is given here; the second is for the command."""
IDLE = {
    "reward.overlong_buffer.len=64": "reward.overlong_buffer.enable",
    "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable",
    f"{ROLLOUT}.multi_turn.tool_timeout_s=5.0": f"{ROLLOUT}.tool_kwargs.tools_config_file",
    "data.val_max_samples=8": "data.val_files",
}


@pytest.mark.parametrize("override", IDLE)
@pytest.mark.slow
def test_a_key_that_nothing_reads_ends_the_start_and_leaves_no_directory(tmp_path, override):
    with pytest.raises(ConfigError) as raised:
        build_trainer(
            compose(
                [*OWN, "data.train_max_samples=16", override, "trainer.logger=[]",
                 f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.experiment_name=idle"]
            )
        )  # fmt: skip
    said = str(raised.value)
    assert f"{override.partition('=')[0]} is {override.partition('=')[2]}, which means something only with" in said
    assert IDLE[override] in said
    assert "experiment_name" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_who_gives_the_switch_as_well_has_said_that_the_key_is_to_rest(tmp_path):
    off = ("reward.overlong_buffer.enable=False", "reward.overlong_buffer.len=64", "data.val_files=null")
    small_trainer(tmp_path / "run", *off, "trainer.export_at_end=False").close()


QUIET = ("actor_rollout_ref.actor.use_kl_loss=False", "actor_rollout_ref.actor.kl_loss_type=k1")


@pytest.mark.slow
def test_the_default_value_of_an_idle_key_and_keys_of_launch_scripts_pass(tmp_path):
    trainer = small_trainer(tmp_path / "run", *NO_VALIDATION, "reward.overlong_buffer.len=128", *QUIET)
    trainer.close()
    written = json.loads((tmp_path / "run" / "config_reads.json").read_text())
    assert list(written) == list(leaves())
    assert written["actor_rollout_ref.rollout.multi_turn.tool_timeout_s"] == ["verl_mt.tools.limits"]
    assert written["reward.overlong_buffer.len"] == []


@pytest.mark.parametrize(
    ("mode", "idle"), [("vanilla", []), ("gspo", ["clip_ratio_c"]), ("gpg", ["clip_ratio_c", "clip_ratio"])]
)
@pytest.mark.slow
def test_a_clip_range_that_the_loss_does_not_read_has_no_reader_and_is_said(mode, idle):
    actor = "actor_rollout_ref.actor"
    config = compose(
        [*OWN, f"{actor}.policy_loss.loss_mode={mode}", f"{actor}.clip_ratio_c=10", f"{actor}.clip_ratio=0.3"]
    )
    with recording(config) as reads:
        found = readers(reads)
    assert [name for name in ("clip_ratio_c", "clip_ratio") if not found[f"{actor}.{name}"]] == idle
    prompts = SimpleNamespace(num_filtered=0, num_truncated=0, num_bad=0, num_unseen=0, num_control=0, rows=list)
    said = [text for text in notes(config, prompts) if "clip_ratio" in text]
    assert sorted(text.split()[0] for text in said) == sorted(f"actor.{name}" for name in idle)


@pytest.mark.parametrize("driver", ["multi_turn.scheduler", "agent_function_path", "custom_generate_function_path"])
def test_several_turns_without_tools_are_one_turn_unless_something_else_answers(driver):
    rollout = "actor_rollout_ref.rollout"
    config, prompts = (
        Config(),
        SimpleNamespace(num_filtered=0, num_truncated=0, num_bad=0, num_unseen=0, num_control=0, rows=list),
    )
    config.actor_rollout_ref.rollout.multi_turn.enable = True
    assert any("every trajectory is one assistant turn" in text for text in notes(config, prompts))
    config = compose([*OWN, f"{rollout}.{driver}=my.code"])
    assert not any("one assistant turn" in text for text in notes(config, prompts))


@pytest.mark.parametrize(
    ("key", "switch"),
    [
        ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.use_kl_loss=True"),
        ("actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.lora_rank=4"),
        ("critic.optim.lr", "algorithm.adv_estimator=gae"),
    ],
)
@pytest.mark.slow
def test_workers_of_other_processes_are_not_said_to_read_what_is_switched_off(key, switch):
    later = "another process" if leaves()[key].read == "start" else "every step"
    for more, expected in (((), []), ((switch,), [later])):
        config = compose([*OWN, "trainer.placement=ray", *more])
        with recording(config) as reads:
            assert readers(reads)[key] == expected


@pytest.mark.slow
def test_what_is_declared_to_be_read_later_is_read_then_and_nothing_else(tmp_path):
    """Two steps with updates, a validation and a checkpoint."""
    several = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.logger=[]", "trainer.total_training_steps=2")
    several += ("actor_rollout_ref.rollout.n=2", "data.val_max_samples=1")
    config = compose([*SMALL, *several, f"trainer.default_local_dir={tmp_path / 'run'}"])
    with recording(config) as run:
        trainer = build_trainer(config)
        at_start = json.loads((tmp_path / "run" / "config_reads.json").read_text())
        with recording(config) as later:
            trainer.fit()
    means = [key for key in leaves() if at_start[key]]
    unread = [key for key in means if not run[key]]
    assert set(unread) <= NOT_READ_BY_A_RUN, f"mean something and are read by nothing: {unread}"
    forgotten = [k for k in means if later[k] and at_start[k] == ["another process"]]
    assert forgotten == [], "read by a step: declare it with read='step'"


def test_a_read_is_noted_with_the_module_that_made_it():
    config = Config()
    with recording(config) as reads:
        Limits.from_config(config.actor_rollout_ref.rollout, max_prompt_length=8)
        assert config.trainer.seed == 0
    assert "verl_mt.rollout.context" in reads["actor_rollout_ref.rollout.response_length"]
    assert reads["trainer.seed"] == [__name__]
    assert reads["trainer.save_freq"] == []


def test_copies_yaml_and_checks_are_no_use_of_a_key():
    config = Config()
    with recording(config) as reads:
        config_to_yaml(config)
        assert copy.deepcopy(config).trainer.seed == 0
    assert reads["trainer.seed"] == []


def test_recordings_may_overlap_and_leave_nothing_behind():
    one, other = Config(), Config()
    with recording(one) as first:
        with recording(other) as second:
            _ = one.data.seed, other.data.val_seed
        _ = one.data.mixing
    assert "__getattribute__" not in vars(Section)
    assert (first["data.seed"], first["data.val_seed"], first["data.mixing"]) == ([__name__], [], [__name__])
    assert (second["data.seed"], second["data.val_seed"]) == ([], [__name__])


@pytest.mark.timeout(60)
def test_what_stands_in_place_of_the_file_keeps_no_start_waiting(tmp_path):
    @reads_recorded
    def start(config):
        write_reads(tmp_path)

    os.mkfifo(tmp_path / "config_reads.json")
    start(compose())
    assert json.loads((tmp_path / "config_reads.json").read_text())
    (tmp_path / "config_reads.json").unlink()
    (tmp_path / "config_reads.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config_reads\.json: a directory is there\. Move it away"):
        start(compose())
