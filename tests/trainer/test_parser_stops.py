"""A grammar that ends its turns by a string has the engine stop there, without a word in the config."""

from __future__ import annotations

import pytest

from verl_mt.config.compose import config_from_mapping
from verl_mt.trainer.build_rollout import training_sampling, validation_sampling


def config_with(parser: str, tools: str | None = "tools.yaml", stop: tuple[str, ...] = ()):
    rollout = {
        "tool_kwargs": {"tools_config_file": tools},
        "multi_turn": {"tool_parser": parser},
        "stop": list(stop),
    }
    return config_from_mapping({"actor_rollout_ref": {"rollout": rollout}})


@pytest.mark.parametrize(
    ("parser", "stops"), [("react", ("Observation:",)), ("search_r1", ("</search>", "</answer>")), ("hermes", ())]
)
def test_training_and_validation_stop_where_the_parsers_grammar_does(parser, stops):
    config = config_with(parser)
    assert training_sampling(config).stop == validation_sampling(config).stop == stops


def test_stops_of_the_config_come_first_and_none_stands_twice():
    assert training_sampling(config_with("react", stop=("END", "Observation:"))).stop == ("END", "Observation:")
    assert training_sampling(config_with("react", tools=None, stop=("END",))).stop == ("END",)
