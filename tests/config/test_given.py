"""Which keys somebody has set is known, whoever set them and however."""

from __future__ import annotations

import pytest
import yaml

from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import compose, config_from_mapping, config_to_yaml, to_config
from verl_mt.config.schema import Config, explicit_keys, is_as_checked


@pytest.mark.slow
def test_given_is_what_the_command_line_and_ones_own_file_set_by_whatever_name(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [ppo_trainer, _self_]\ndata:\n  val_seed: 7\ncustom_reward_function:\n  path: gsm8k\n")
    config = compose(["reward.kwargs.format_score=0.1", "trainer.seed=0"], config_name=str(own))
    assert explicit_keys(config) == {"data.val_seed", "reward.path", "reward.kwargs", "trainer.seed"}
    assert explicit_keys(compose(["data.val_seed=7"])) == {"data.val_seed"}
    assert explicit_keys(Config()) == frozenset()
    assert config == compose(["reward.kwargs.format_score=0.1"], config_name=str(own))


def test_given_is_what_was_changed_in_python_too():
    config = compose(["trainer.seed=3"])
    assert is_as_checked(config)
    config.trainer.test_freq = 5
    assert explicit_keys(config) == {"trainer.seed", "trainer.test_freq"}
    assert not is_as_checked(config)
    made = Config()
    made.reward.overlong_buffer.len = 7
    assert explicit_keys(made) == {"reward.overlong_buffer.len"}


@pytest.mark.slow
def test_what_a_run_has_written_gives_nothing_but_the_overrides_on_top(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [tiny, _self_]\ndata:\n  val_files: null\n  val_seed: 7\n")
    first = compose(config_name=str(own))
    reject_unused_keys(first)
    file = tmp_path / "config.yaml"
    file.write_text(config_to_yaml(first))
    for again in (
        compose(["trainer.seed=1"], str(file)),
        config_from_mapping(yaml.safe_load(file.read_text()), ["trainer.seed=1"]),
    ):
        assert explicit_keys(again) == {"trainer.seed"}
        reject_unused_keys(again)
    assert explicit_keys(to_config(yaml.safe_load(file.read_text()))) == frozenset()
    assert explicit_keys(to_config({"trainer": {"seed": 1}, "reward.kwargs.a": 2})) == {"trainer.seed", "reward.kwargs"}
