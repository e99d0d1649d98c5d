"""What `build.py` hands from the config to the pieces."""

from __future__ import annotations

import pytest

from verl_mt import engines
from verl_mt.config.compose import compose
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.trainer.build_rollout import build_chat, build_runner, build_tools

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def test_tools_and_interactions_have_deadlines_of_their_own(monkeypatch):
    monkeypatch.setattr(engines, "build", lambda *_, **__: ScriptedEngine([]))
    config = compose([f"{MULTI_TURN}.tool_timeout_s=3", f"{MULTI_TURN}.interaction_timeout_s=7"])
    runner = build_runner(config, build_chat(config), build_tools(config), None)
    assert runner.tools is not None
    assert (runner.tools.limits.timeout_s, runner.interaction_timeout_s) == (3, 7)


@pytest.mark.slow
def test_no_more_conversations_of_a_step_begin_than_the_local_engine_decodes(monkeypatch):
    monkeypatch.setattr(engines, "build", lambda *_, **__: ScriptedEngine([]))
    for name, seats in (("local", 5), ("sglang", None)):
        config = compose([f"actor_rollout_ref.rollout.{key}" for key in (f"name={name}", "max_num_seqs=5")])
        assert build_runner(config, build_chat(config), build_tools(config), None).seats == seats
