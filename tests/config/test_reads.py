"""Who reads a key is recorded while it is wanted, and costs nothing otherwise."""

from __future__ import annotations

import copy

from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.config.knob import Section
from verl_mt.config.reads import given_keys, recording
from verl_mt.config.schema import Config
from verl_mt.rollout.context import Limits


def test_a_read_is_noted_with_the_module_that_made_it():
    config = Config()
    with recording(config) as reads:
        Limits.from_config(config)
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


def test_given_is_what_the_command_line_and_ones_own_file_set_by_whatever_name(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [ppo_trainer, _self_]\ndata:\n  val_seed: 7\ncustom_reward_function:\n  path: gsm8k\n")
    config = compose(["reward.kwargs.format_score=0.1", "trainer.seed=0"], config_name=str(own))
    assert given_keys(config) == {"data.val_seed", "reward.path", "reward.kwargs", "trainer.seed"}
    assert given_keys(compose(["data.val_seed=7"])) == {"data.val_seed"}
    assert given_keys(Config()) == frozenset()
    assert config == compose(["reward.kwargs.format_score=0.1"], config_name=str(own))
