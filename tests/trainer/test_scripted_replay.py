"""What the local engine said, said again by a script: the same conversations, the same batch."""

from __future__ import annotations

import pytest
import torch

from verl_mt.config.compose import compose
from verl_mt.data import batch as columns
from verl_mt.data.requests import GenerationRequest
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.trainer.inference import Inference

CONFIG = (
    "data.val_max_samples=12",
    "actor_rollout_ref.rollout.interaction_config_file=interaction_configs/checker.yaml",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns=1",
    "trainer.num_threads=1",
)


def roll_out(policy):
    groups = policy.roll_out(policy.prompts(), n=2)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return trajectories, columns.build_batch(trajectories, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.cap("C15")
def test_a_script_of_what_the_local_engine_said_gives_the_same_batch():
    config = compose(list(CONFIG))
    script: dict[str, list[ScriptedTurn]] = {}
    with Inference(config) as policy:
        engine = policy.runner.context.engine
        sample = engine.generate

        async def recording(request: GenerationRequest):
            said = await sample(request)
            turn = ScriptedTurn(
                said.token_ids, None, said.finish_reason, said.log_probs, version_spans=said.version_spans
            )
            script.setdefault(request.session_id, []).append(turn)
            return said

        engine.generate = recording
        expected, batch = roll_out(policy)
    with Inference(config, engine=ScriptedEngine(script)) as policy:
        found, again = roll_out(policy)

    assert any(m["role"] == "tool" for t in expected for m in t.messages)
    assert any(sum(m["role"] == "user" for m in t.messages) > 1 for t in expected)
    assert batch is not None and again is not None and set(batch.keys()) == set(again.keys())
    for name in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        if name in columns.ID_COLUMNS:
            assert batch[name] == again[name]
        else:
            assert torch.equal(batch[name], again[name]), name
    for one, other in zip(expected, found, strict=True):
        assert (one.messages, one.stop_reason, one.reward) == (other.messages, other.stop_reason, other.reward)
