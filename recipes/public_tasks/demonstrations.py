"""Demonstrations of reasoning_gym's arithmetic for a model that calls a calculator: the cold start of `run_tiny.sh`.

    python recipes/public_tasks/demonstrations.py --family '{task: products, max_digits: 2}' --out demos.jsonl

The questions are of seeds that neither training nor validation has (`verl_mt.environments.seeds`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

FIRST_SEED = 500_000_000
_EXPRESSION = re.compile(r": ([\d+*/(). -]+?)\s*(?:=|\.|$)")


def conversation(question: str, answer: str, system: str) -> dict[str, Any]:
    """A row: one call of the calculator with the question's expression, then the answer.

    Raises:
        ValueError: the question has no expression behind a colon.
    """
    found = _EXPRESSION.search(question)
    if found is None:
        raise ValueError(f"no expression in {question!r}. Choose a family whose questions have one, as products")
    arguments = {"expression": found[1].replace(" ", "")}
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": answer},
            {"role": "assistant", "content": f"#### {answer}"},
        ]
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, help="{task: NAME, ...}, as rollout.environment.config")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--system", default="Answer as #### N.")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    try:
        import reasoning_gym
    except ImportError:
        print("error: reasoning_gym is not installed: pip install reasoning-gym", file=sys.stderr)
        return 2
    settings = yaml.safe_load(args.family)
    settings.pop("answer_pattern", None)
    tasks = reasoning_gym.create_dataset(settings.pop("task"), seed=FIRST_SEED, size=args.count, **settings)
    try:
        rows = [conversation(task["question"], task["answer"], args.system) for task in tasks]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} conversations -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
