"""The benchmark's own solutions, played through session, parser and tools: does our score say what its checker says?

    python recipes/bfcl/replay.py             # the solutions: 800 tasks
    python recipes/bfcl/replay.py --remove    # each without one of its calls

With `--remove` the score must be that of the benchmark's checker for the same calls, task by task. The exit status is 1
where a score differs.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from verl_mt.config_paths import TINY_MODEL
from verl_mt.data.dataset import DataRow
from verl_mt.data.trajectory import Trajectory
from verl_mt.extensions.environments.bfcl import BFCL, CATEGORIES, row_of, tasks
from verl_mt.extensions.environments.replay import call_text, replay_tasks, report_differences

Solution = list[list[str]]
"""Turn of the user -> calls, as Python writes them."""


def solution(task_id: str, *, remove: bool = False) -> Solution:
    """The benchmark's solution of a task; without one call, which the id chooses."""
    turns: Solution = [list(calls) for calls in tasks()[task_id]["ground_truth"]]
    if remove:
        places = [(turn, k) for turn, calls in enumerate(turns) for k in range(len(calls))]
        turn, k = random.Random(task_id).choice(places)
        del turns[turn][k]
    return turns


def accepted(task_id: str, turns: Solution, name: str) -> bool:
    """What the benchmark's checker says of these calls, without our session. It keeps its services by `name`."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    task, steps = tasks()[task_id], [[[call] for call in calls] for calls in turns]
    return bool(multi_turn_checker(steps, task["ground_truth"], task, "multi_turn", name)["valid"])


def said(turns: Solution) -> list[str]:
    """What a model says that makes one call a turn, and then tells the user that it is done."""
    schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in BFCL.tool_schemas()}
    texts = []
    for calls in turns:
        for call in calls:
            written = ast.parse(call, mode="eval").body
            name = written.func.id
            order = list(schemas[name]["properties"])
            given = [(order[k], value) for k, value in enumerate(written.args)]
            given += [(word.arg, word.value) for word in written.keywords]
            texts.append(call_text(name, {key: ast.literal_eval(value) for key, value in given}))
        texts.append("Done.")
    return texts


def play(ids: Sequence[str], *, remove: bool, model: str = TINY_MODEL) -> list[Trajectory]:
    """The solutions of these tasks, through our session."""

    def turns_of(row: DataRow) -> list[str]:
        return said(solution(row.raw["id"], remove=remove))

    return replay_tasks("bfcl", model, [row_of(task_id) for task_id in ids], turns_of)


def differences(ids: Sequence[str], *, remove: bool, model: str = TINY_MODEL) -> tuple[Counter[str], list[str]]:
    """(counts, lines about tasks whose score is not the checker's)."""
    counts: Counter[str] = Counter()
    wrong = []
    for task_id, trajectory in zip(ids, play(ids, remove=remove, model=model), strict=True):
        expected = accepted(task_id, solution(task_id, remove=remove), f"alone_{remove}")
        counts["accepted" if expected else "rejected"] += 1
        counts["reward 1"] += trajectory.reward == 1.0
        if trajectory.reward != float(expected):
            why = trajectory.error or trajectory.stop_reason
            wrong.append(f"{task_id}: reward {trajectory.reward}, the checker says {expected}: {why}")
    return counts, wrong


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remove", action="store_true", help="leave one call of each solution out")
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=CATEGORIES)
    parser.add_argument("--every", type=int, default=1, help="play every Nth task only")
    parser.add_argument("--model", default=TINY_MODEL, help="whose tokenizer and chat template are used")
    args = parser.parse_args(argv)

    def chosen() -> list[str]:
        prefixes = tuple(f"multi_turn_{category}_" for category in args.categories)
        return [task_id for task_id in tasks() if task_id.startswith(prefixes)][:: args.every]

    return report_differences(chosen, partial(differences, remove=args.remove, model=args.model))


if __name__ == "__main__":
    sys.exit(main())
