"""Conversations whose model says turns that you write: the session, the parser and the tools are those of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import GenerationRequest
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.trainer.inference import Inference


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as a model with the parser `hermes` writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def replay(config: Config, turns_of: Callable[[DataRow], Sequence[str]]) -> list[Trajectory]:
    """Play each row of `data.val_files` once.

    Args:
        config: of the run. Its model gives tokenizer and chat template. No weights are loaded.
        turns_of: row -> what the model says, turn by turn.

    Returns:
        The scored trajectories, in the order of the rows.

    Raises:
        VerlMTError: what a run with this configuration would refuse.
    """
    texts: dict[str, Sequence[str]] = {}

    def turn(request: GenerationRequest) -> ScriptedTurn:
        trajectory, _, number = request.request_id.split("/")
        said = texts[trajectory.rpartition(".")[0]][int(number) - 1]
        ids = [*policy.chat.encode_text(said, neutral=False), end]
        return ScriptedTurn(ids, said)

    engine = ScriptedEngine(turn)
    with Inference(config, engine=engine) as policy:
        prompts, end = policy.prompts(), min(policy.chat.stop_token_ids)
        texts |= {f"replay.{place:05d}": turns_of(prompt.row) for place, prompt in enumerate(prompts)}
        groups = policy.roll_out(prompts, name="replay")
    return [group.trajectories[0] for group in groups]
