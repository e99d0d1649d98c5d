"""The benchmark's own actions, played through session, parser and tools: does our score say what its state says?

    python recipes/tau2_retail/replay.py             # the actions: 114 tasks
    python recipes/tau2_retail/replay.py --remove    # each without one of its actions

The score must be 1 exactly where the benchmark's tools alone, called with the same actions, leave the database of the
task's solution. The exit status is 1 where a score differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mt.config.compose import compose
from verl_mt.config_paths import TINY_MODEL
from verl_mt.data.dataset import DataRow
from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import VerlMTError
from verl_mt.extensions.environments.replay import call_text, replay
from verl_mt.extensions.environments.tau2 import new_database, row_of, run_tool, tasks

Actions = list[dict[str, Any]]


def solution(task_id: str, *, remove: bool = False) -> Actions:
    """The benchmark's actions for a task; without one, which the id chooses."""
    actions: Actions = list(tasks()[task_id]["evaluation_criteria"]["actions"])
    if remove and actions:
        del actions[random.Random(task_id).randrange(len(actions))]
    return actions


def alone(actions: Actions) -> tuple[dict[str, Any], bool]:
    """The database that the benchmark's tools leave, and whether all of them succeed."""
    database = new_database()
    said = [run_tool(database, action["name"], action["arguments"]) for action in actions]
    return database, not any(text.startswith("Error: ") for text in said)


def play(ids: Sequence[str], *, remove: bool, model: str = TINY_MODEL) -> list[Trajectory]:
    """The actions of these tasks, through our session."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row_of(task_id)) + "\n" for task_id in ids))
        words = [
            "experiment=tau2_retail", f"actor_rollout_ref.model.path={model}", f"data.val_files={file}",
            "data.max_prompt_length=100000", "actor_rollout_ref.rollout.response_length=900000",
            "actor_rollout_ref.actor.ppo_max_token_len=1000000", "actor_rollout_ref.rollout.name=local",
            "actor_rollout_ref.rollout.multi_turn.max_tool_response_tokens=100000",
            "actor_rollout_ref.rollout.max_concurrent=16",
        ]  # fmt: skip

        def turns_of(row: DataRow) -> list[str]:
            calls = [call_text(a["name"], a["arguments"]) for a in solution(row.raw["id"], remove=remove)]
            return [*calls, *["Done."] * 9]

        return replay(compose(words), turns_of)


def differences(ids: Sequence[str], *, remove: bool, model: str = TINY_MODEL) -> tuple[Counter[str], list[str]]:
    """(counts, lines about tasks whose score is not the benchmark's)."""
    counts: Counter[str] = Counter()
    wrong = []
    for task_id, trajectory in zip(ids, play(ids, remove=remove, model=model), strict=True):
        wanted, sound = alone(solution(task_id))
        expected = alone(solution(task_id, remove=remove))[0] == wanted
        counts["right" if expected else "wrong"] += 1
        counts["all actions succeed"] += sound
        counts["reward 1"] += trajectory.reward == 1.0
        if trajectory.reward != float(expected):
            why = trajectory.error or trajectory.stop_reason
            wrong.append(f"{task_id}: reward {trajectory.reward}, the benchmark says {expected}: {why}")
    return counts, wrong


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remove", action="store_true", help="leave one action of each task out")
    parser.add_argument("--every", type=int, default=1, help="play every Nth task only")
    parser.add_argument("--model", default=TINY_MODEL, help="whose tokenizer and chat template are used")
    args = parser.parse_args(argv)
    try:
        ids, begun = list(tasks())[:: args.every], time.monotonic()
        counts, wrong = differences(ids, remove=args.remove, model=args.model)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{len(ids)} tasks: {dict(counts)}, {len(wrong)} differ, {time.monotonic() - begun:.0f} s")
    for line in wrong:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
