"""Conversations whose model says turns that you write: the session, the parser and the tools are those of a run.

The recipes of benchmarks play the benchmarks' own solutions with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import GenerationRequest
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import VerlMTError
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


def replay_tasks(
    experiment: str, model: str, rows: Sequence[Mapping[str, Any]], turns_of: Callable[[DataRow], Sequence[str]]
) -> list[Trajectory]:
    """Play tasks of a benchmark without limits of length.

    Args:
        experiment: a name of the group `experiment`.
        model: whose tokenizer and chat template are used.
        rows: one row for each task.
        turns_of: row -> what the model says, turn by turn.

    Returns:
        The scored trajectories, in the order of the rows.

    Raises:
        VerlMTError: what a run with this configuration would refuse.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        words = [
            f"experiment={experiment}", f"actor_rollout_ref.model.path={model}", f"data.val_files={file}",
            "data.max_prompt_length=100000", "actor_rollout_ref.rollout.response_length=900000",
            "actor_rollout_ref.rollout.max_tokens_per_turn=null", "actor_rollout_ref.actor.ppo_max_token_len=1000000",
            "actor_rollout_ref.rollout.name=local", "actor_rollout_ref.rollout.max_concurrent=16",
            "actor_rollout_ref.rollout.multi_turn.max_tool_response_tokens=100000",
        ]  # fmt: skip
        return replay(compose(words), turns_of)


def report_differences(
    ids: Callable[[], Sequence[str]], differences: Callable[[Sequence[str]], tuple[Counter[str], list[str]]]
) -> int:
    """Print how the scores of tasks compare with those of the benchmark.

    Args:
        ids: returns the ids of the tasks.
        differences: ids -> (counts, one line for each task with another score).

    Returns:
        The exit status: 1 if a score differs.
    """
    try:
        chosen, begun = ids(), time.monotonic()
        counts, wrong = differences(chosen)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{len(chosen)} tasks: {dict(counts)}, {len(wrong)} differ, {time.monotonic() - begun:.0f} s")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


def write_tasks(rows: Callable[[], Sequence[dict[str, Any]]], out: Path) -> int:
    """Write the rows of a benchmark to a Parquet file.

    Args:
        rows: returns the rows.
        out: the file. Its folder is made.

    Returns:
        The exit status.
    """
    try:
        made = rows()
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(made)), out)
    print(f"{len(made)} tasks -> {out}")
    return 0
