"""The benchmark's own actions, played through session, parser and tools: does our score say what its state says?

    python recipes/tau2_retail/replay.py             # the actions: 114 tasks
    python recipes/tau2_retail/replay.py --remove    # each without one of its actions

The score must be 1 exactly where the benchmark's tools alone, called with the same actions, leave the database of the
task's solution. The exit status is 1 where a score differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl_mt.config_paths import TINY_MODEL
from verl_mt.data.dataset import DataRow
from verl_mt.data.trajectory import Trajectory
from verl_mt.extensions.environments.replay import call_text, replay_tasks, report_differences
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

    def turns_of(row: DataRow) -> list[str]:
        calls = [call_text(a["name"], a["arguments"]) for a in solution(row.raw["id"], remove=remove)]
        return [*calls, *["Done."] * 9]

    return replay_tasks("tau2_retail", model, [row_of(task_id) for task_id in ids], turns_of)


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
    played = partial(differences, remove=args.remove, model=args.model)
    return report_differences(lambda: list(tasks())[:: args.every], played)


if __name__ == "__main__":
    sys.exit(main())
