"""Evaluations of several models on the same questions, side by side, with what their difference is worth.

    python recipes/gsm8k/smollm2/compare.py base=eval/base cold=eval/cold_1,eval/cold_2 grpo=eval/grpo --against cold

Each folder is one that `python -m verl_mt.evaluate --out` wrote; several of one model (parts of the data) are joined.
Shown are pass@1 and pass@k for the largest k that every question has samples for, with 95 % intervals over the
questions. Differences are paired: of each question the one model's rate minus the other's, whose mean has a smaller
interval than two means have, for what is hard for one model is hard for the other. `--common` compares on the
questions that were put to every one of the models, where one has answered fewer.

`--problems gsm8k_test.jsonl` shows the table again for the questions whose solution needs at most `--max-calls`
calculations, and for the others: a model trained on the former may forget the latter.

`--keep FOLDER` writes what each model solved to `FOLDER/NAME.json`, without the questions' text; such a file stands in
place of the folders later. Those of measured runs are in `measured/` (../README.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import read_source

from verl_mt.diagnostics.step_metrics import interval_95, pass_at_k
from verl_mt.errors import DataError, VerlMTError

Scores = dict[str, list[float]]
"""Question (`key`) -> score of each of its samples, as `val/accuracy` counts them; a failed conversation counts 0."""


def key(question: str) -> str:
    """What a question is kept under."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def read(folders: str) -> Scores:
    """The samples of one model: folders of `evaluate`, or one file that `--keep` wrote.

    Raises:
        DataError: a folder has no rollouts, or a question is in two of them; the file is none of ours.
    """
    if folders.endswith(".json"):
        return _kept(Path(folders))
    found: Scores = {}
    for folder in folders.split(","):
        part: Scores = defaultdict(list)
        path = Path(folder) / "rollouts.jsonl"
        if not path.is_file():
            raise DataError(f"{path} is not there: give folders that `python -m verl_mt.evaluate --out` wrote")
        with path.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                question = next(m["content"] for m in row["messages"] if m["role"] == "user")
                parts = row["reward_parts"]
                part[key(question)].append(parts.get("first_answer", parts.get("score", 0.0)))
        if twice := found.keys() & part.keys():
            raise DataError(f"{path}: {len(twice)} question(s) are in another folder of this model too")
        found |= part
    return found


def _kept(path: Path) -> Scores:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {question: [float(score) for score in scores] for question, scores in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        what = "give a file that `compare.py --keep` wrote, or folders of evaluate"
        raise DataError(f"{path}: {error}; {what}") from error


def common(models: dict[str, Scores]) -> dict[str, Scores]:
    """Of each model the questions that all of them answered.

    Raises:
        DataError: there is none.
    """
    shared = set.intersection(*(set(samples) for samples in models.values()))
    if not shared:
        raise DataError(f"no question was put to each of {', '.join(models)}")
    return only(models, shared)


def only(models: dict[str, Scores], questions: set[str]) -> dict[str, Scores]:
    """Of each model the samples of these questions."""
    return {name: {q: of for q, of in samples.items() if q in questions} for name, samples in models.items()}


def rates(samples: Scores, k: int) -> dict[str, float]:
    """Question -> chance that one of k samples is right (Chen et al. 2021, arXiv:2107.03374, equation 1)."""
    return {q: pass_at_k(len(of), sum(score >= 1 for score in of), k) for q, of in samples.items()}


def difference(new: dict[str, float], old: dict[str, float]) -> tuple[float, float]:
    """Mean of the questions' differences, and half of its 95 % interval.

    Raises:
        DataError: not the same questions, or only one.
    """
    if new.keys() != old.keys():
        raise DataError(
            f"{len(new.keys() ^ old.keys())} question(s) were put to one of two models only; "
            "--common compares on the others"
        )
    if len(old) < 2:
        raise DataError("one question alone has no interval")
    apart = [new[q] - old[q] for q in old]
    return fmean(apart), 1.96 * stdev(apart) / sqrt(len(apart))


def table(models: dict[str, Scores], against: str) -> str:
    """Markdown: a row per model, and the differences to one of them."""
    most = min(len(of) for samples in models.values() for of in samples.values())
    ks = [1] if most == 1 else [1, most]
    head = ["model", "questions", *(f"pass@{k} (95 %)" for k in ks), *(f"pass@{k} - {against}" for k in ks)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    base = {k: rates(models[against], k) for k in ks}
    for name, samples in models.items():
        cells, own = [name, str(len(samples))], {k: rates(samples, k) for k in ks}
        for k in ks:
            of = list(own[k].values())
            low, high = interval_95(of) or (float("nan"), float("nan"))
            cells.append(f"{fmean(of):.1%} ({low:.1%} to {high:.1%})")
        for k in ks:
            apart = None if name == against else difference(own[k], base[k])
            cells.append("" if apart is None else f"{apart[0]:+.1%} ± {apart[1]:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_length(file: str, max_calls: int) -> dict[str, set[str]]:
    """What the two parts of the problems of a file (JSONL, as published) are called -> their questions.

    Raises:
        DataError: the file is not there, or a row lacks a question or an answer.
    """
    short, long = f"at most {max_calls} calculations", f"more than {max_calls}"
    parts: dict[str, set[str]] = {short: set(), long: set()}
    for _, problem in read_source(file, "test"):
        parts[short if problem["answer"].count("<<") <= max_calls else long].add(key(problem["question"].strip()))
    return parts


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER[,FOLDER] or NAME=FILE.json")
    parser.add_argument("--against", help="the model that the others are compared with; default: the first")
    parser.add_argument("--common", action="store_true", help="only the questions that every model answered")
    parser.add_argument("--problems", metavar="FILE", help="GSM8K's own test file: tables by number of calculations")
    parser.add_argument("--max-calls", type=int, default=2, help="with --problems: where the parts meet; default 2")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write what each model solved to FOLDER/NAME.json")
    args = parser.parse_args(argv)
    try:
        if unnamed := [word for word in args.models if "=" not in word]:
            raise DataError(f"{unnamed[0]}: give NAME=FOLDER")
        models = {name: read(folders) for name, folders in (word.split("=", 1) for word in args.models)}
        against = args.against or next(iter(models))
        if against not in models:
            raise DataError(f"--against {against}: not one of {', '.join(models)}")
        compared = common(models) if args.common else models
        print(table(compared, against))
        for part, questions in by_length(args.problems, args.max_calls).items() if args.problems else ():
            some = only(compared, questions)
            if not all(some.values()):
                raise DataError(f"{args.problems}: no question with {part} was put to each of these models")
            print(f"\n{part}:\n\n{table(some, against)}")
        for name, samples in models.items() if args.keep else ():
            args.keep.mkdir(parents=True, exist_ok=True)
            solved = {question: [int(score >= 1) for score in of] for question, of in samples.items()}
            (args.keep / f"{name}.json").write_text(json.dumps(solved, separators=(",", ":")) + "\n", encoding="utf-8")
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
