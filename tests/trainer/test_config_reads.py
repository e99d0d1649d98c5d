"""No silent key: a run refuses a key that is set and means nothing, and reads every key that means something.

A recording notes which module reads which key. Modules of `verl_mt.config` (checks, YAML, copies) do not count: they
read every key.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from command_lab import NO_VALIDATION, SMALL, small_trainer

from verl_mt.config.checks import means_nothing
from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.config.declare import Section
from verl_mt.config.schema import Config, leaves
from verl_mt.errors import ConfigError
from verl_mt.rollout.context import Limits
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.build_data import notes

NO_USE = ("verl_mt.config.", "dataclasses", "copy", "pprint")
ROLLOUT = "actor_rollout_ref.rollout"
OWN = ("actor_rollout_ref.model.path=verl_mt://tiny", "data.train_files=verl_mt.tiny.problems:rows")
"""Own model and own data: nothing of the default task, so no tools and no validation."""
NOT_READ_BY_A_RUN = {
    "algorithm.rollout_correction",  # by `correction_of`, in config/, for the actor
    "trainer.experiment_name",  # names the directory, which the test sets
    "trainer.dry_run",  # for the command
    "trainer.max_restarts",  # for workers in other processes
    "actor_rollout_ref.actor.fsdp_size",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
}
IDLE = {
    "reward.overlong_buffer.len=64": "reward.overlong_buffer.enable",
    "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable",
    f"{ROLLOUT}.multi_turn.tool_timeout_s=5.0": f"{ROLLOUT}.tool_kwargs.tools_config_file",
    "data.val_max_samples=8": "data.val_files",
}


@contextlib.contextmanager
def recording(config: Config) -> Iterator[dict[str, set[str]]]:
    """Dotted key -> the modules that read it, of all threads of this process. Copies of `config` are not watched."""
    found: dict[str, set[str]] = {key: set() for key in leaves()}
    prefixes = dict(prefixes_of(config, ""))

    def watched(section: Section, name: str) -> Any:
        if not name.startswith("_"):
            frame: FrameType | None = sys._getframe(1)
            # Inside a property of the section: the caller of the property reads the keys behind it.
            while frame is not None and (frame.f_locals.get("self") is section or frame.f_code is watched.__code__):
                frame = frame.f_back
            reader = "" if frame is None else frame.f_globals.get("__name__", "")
            key = f"{prefixes.get(id(section), '?')}{name}"
            if key in found and not reader.startswith(NO_USE):
                found[key].add(reader)
        return object.__getattribute__(section, name)

    Section.__getattribute__ = watched
    try:
        yield found
    finally:
        del Section.__getattribute__


def prefixes_of(section: Section, prefix: str) -> Iterator[tuple[int, str]]:
    yield id(section), prefix
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if isinstance(value, Section):
            yield from prefixes_of(value, f"{prefix}{item.name}.")


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
    assert f"{override} has no effect unless" in said
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
    assert not (tmp_path / "run" / "config_reads.json").exists()


@pytest.mark.parametrize(
    ("mode", "idle"), [("vanilla", []), ("gspo", ["clip_ratio_c"]), ("gpg", ["clip_ratio_c", "clip_ratio"])]
)
@pytest.mark.slow
def test_a_clip_range_that_the_loss_does_not_read_means_nothing_and_is_said(mode, idle):
    actor = "actor_rollout_ref.actor"
    config = compose(
        [*OWN, f"{actor}.policy_loss.loss_mode={mode}", f"{actor}.clip_ratio_c=10", f"{actor}.clip_ratio=0.3"]
    )
    unused = means_nothing(config)
    assert [name for name in ("clip_ratio_c", "clip_ratio") if f"{actor}.{name}" in unused] == idle
    prompts = SimpleNamespace(num_filtered=0, num_truncated=0, num_bad=0, num_unseen=0, num_control=0, rows=list)
    said = [text for text in notes(config, prompts) if "clip_ratio" in text]
    assert sorted(text.split()[0] for text in said) == sorted(f"actor.{name}" for name in idle)


@pytest.mark.slow
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
def test_a_key_means_something_once_its_switch_is_on(key, switch):
    for more, unused in (((), True), ((switch,), False)):
        assert (key in means_nothing(compose([*OWN, "trainer.placement=ray", *more]))) is unused


@pytest.mark.slow
def test_a_run_reads_every_key_that_means_something(tmp_path):
    """Two steps with updates, a validation and a checkpoint."""
    several = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.logger=[]", "trainer.total_training_steps=2")
    several += ("actor_rollout_ref.rollout.n=2", "data.val_max_samples=1")
    config = compose([*SMALL, *several, f"trainer.default_local_dir={tmp_path / 'run'}"])
    with recording(config) as found:
        build_trainer(config).fit()
    unread = {key for key, readers in found.items() if not readers} - means_nothing(config)
    assert unread <= NOT_READ_BY_A_RUN, f"mean something and are read by nothing: {unread}"
    assert "verl_mt.tools.limits" in found["actor_rollout_ref.rollout.multi_turn.tool_timeout_s"]


def test_a_read_is_noted_with_the_module_that_made_it():
    config = Config()
    with recording(config) as found:
        Limits.from_config(config.actor_rollout_ref.rollout, max_prompt_length=8)
        assert config.trainer.seed == 0 == Config().data.seed
    assert "verl_mt.rollout.context" in found["actor_rollout_ref.rollout.response_length"]
    assert found["trainer.seed"] == {__name__}
    assert found["data.seed"] == set(), "of another configuration"


def test_copies_yaml_and_checks_are_no_use_of_a_key():
    config = Config()
    with recording(config) as found:
        config_to_yaml(config)
        assert copy.deepcopy(config).trainer.seed == 0
    assert found["trainer.seed"] == set()
    assert "__getattribute__" not in vars(Section)
