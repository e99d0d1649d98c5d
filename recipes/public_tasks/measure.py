"""Held-out score before and after GRPO on families of reasoning_gym, several seeds each, with intervals.

    python recipes/public_tasks/measure.py --model HuggingFaceTB/SmolLM2-135M-Instruct \\
        --family '{task: spell_backward, max_word_len: 5}' --family '{task: chain_sum, max_terms: 2, max_digits: 2}'

`--family` is a value of `rollout.environment.config`. `{task}` in `--model` is the family's name. Further words are
overrides of every run. The last line of the output is the file with all numbers. After an interruption the same command
goes on. Seeds that are finished are not trained again.

Small families repeat questions. So the table also has the score of held-out questions that no training step had.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import verl_mt
from verl_mt.config.compose import compose
from verl_mt.data.row_files import read_rows, row_files
from verl_mt.errors import VerlMTError
from verl_mt.trainer.inference import measure

Answers = list[tuple[str, float]]
"""Question and score, of each held-out conversation."""

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Number of seeds -> 97.5 % quantile of Student's distribution."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` answers."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return middle - half, middle + half


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval over the seeds; infinite for one seed."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    half = _STUDENT.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The first message of the user."""
    return str(next(message["content"] for message in messages if message["role"] == "user"))


def summary(start: Answers, end: Answers, trained_on: Collection[str]) -> dict[str, Any]:
    """Mean scores of two validations on the same questions.

    Returns:
        `start`, `end`, and the same over the `new` answers to questions that are not in `trained_on`: `start_new`,
        `end_new` (None if there are none).
    """
    found: dict[str, Any] = {}
    for name, answers in (("start", start), ("end", end)):
        new = [score for question, score in answers if question not in trained_on]
        found[name] = statistics.fmean(score for _, score in answers)
        found[f"{name}_new"], found["new"] = (statistics.fmean(new) if new else None), len(new)
    return found


def train_here(words: list[str]) -> dict[str, Any]:
    """Train with verl_mt. Returns the `summary` of the first and the last validation."""
    trained_on: set[str] = set()
    validations: list[Answers] = []
    for file in row_files(verl_mt.train(overrides=words).folder):
        answers = [(question_of(row["messages"]), float(row["reward"] or 0.0)) for row in read_rows(file.path)]
        if file.split == "train":
            trained_on |= {question for question, _ in answers}
        elif file.split == "val":
            validations.append(answers)
    return summary(validations[0], validations[-1], trained_on)


def train_with_trl(words: list[str], folder: Path) -> dict[str, Any]:
    """Train with TRL. Returns the `summary` of verl_mt's validations before and after."""
    from with_trl import train

    trained, trained_on = train(compose(words), folder)
    start, end = (
        [
            (question_of(trajectory.messages), float(trajectory.reward or 0.0))
            for group in measure(compose(words + changed)).groups
            for trajectory in group.trajectories
        ]
        for changed in ([], [f"actor_rollout_ref.model.path={trained}"])
    )
    return summary(start, end, trained_on)


def run(args: argparse.Namespace, family: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train one family with one seed, or read what an earlier call with the same overrides found."""
    task = yaml.safe_load(family)["task"]
    folder = args.out / f"{task}_seed_{seed}{'_trl' if args.trained_by == 'trl' else ''}"
    words = [
        "experiment=public_tasks",
        f"actor_rollout_ref.rollout.environment.config={family}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.test_freq={args.steps}",
        f"trainer.save_freq={args.steps}",
        f"trainer.default_local_dir={folder}",
        f"data.val_max_samples={args.held_out}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={args.model.format(task=task)}",
        *overrides,
    ]
    remembered = args.out / f"{folder.name}.json"
    if remembered.exists():
        earlier = json.loads(remembered.read_text(encoding="utf-8"))
        if earlier["overrides"] == words:
            return dict(earlier["row"])
    begun = time.process_time()
    found = train_with_trl(words, folder) if args.trained_by == "trl" else train_here(words)
    row = {"library": args.trained_by, "family": task, "seed": seed, **found}
    row["cpu_s"] = time.process_time() - begun
    remembered.write_text(json.dumps({"overrides": words, "row": row}, indent=1) + "\n", encoding="utf-8")
    return row


def table(rows: Sequence[dict[str, Any]], held_out: int) -> str:
    """The runs and, for each family, the mean over its seeds, as a Markdown table."""
    lines = ["| family | seed | start | end | new questions: count, start, end | CPU s |", "|---|---|---|---|---|---|"]
    for row in rows:
        ends = ["{:.3f} ({:.3f} to {:.3f})".format(row[key], *wilson(row[key], held_out)) for key in ("start", "end")]
        new = "{new}, {start_new:.3f}, {end_new:.3f}".format(**row) if row["new"] else "0"
        lines.append(f"| {row['family']} | {row['seed']} | {ends[0]} | {ends[1]} | {new} | {row['cpu_s']:.0f} |")
    for name in dict.fromkeys(row["family"] for row in rows):
        of_family = [row for row in rows if row["family"] == name]
        start, gain = (mean_interval(values) for values in (
            [row["start"] for row in of_family], [row["end"] - row["start"] for row in of_family]
        ))  # fmt: skip
        end = statistics.fmean(row["end"] for row in of_family)
        lines.append(f"| **{name}** | mean | {start[0]:.3f} | {end:.3f}, gain {gain[0]:+.3f} ± {gain[1]:.3f} | | |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a hub name")
    parser.add_argument("--family", action="append", required=True, help="{task: NAME, ...}; several times for more")
    parser.add_argument(
        "--library", dest="trained_by", choices=("verl_mt", "trl"), default="verl_mt", help="what trains"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=500, help="questions of each validation")
    parser.add_argument("--out", type=Path, default=Path("runs/public_tasks"))
    args, overrides = parser.parse_known_args(argv)
    rows = []
    try:
        for family in args.family:
            for seed in args.seeds:
                rows.append(run(args, family, seed, overrides))
                print(json.dumps(rows[-1]), flush=True)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(table(rows, args.held_out))
    out = args.out / f"measured_{args.trained_by}.json"
    out.write_text(json.dumps({"held_out": args.held_out, "steps": args.steps, "runs": rows}, indent=1) + "\n")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
