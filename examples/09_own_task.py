"""A task of your own in one call: tool, reward and rows are Python, and there is no YAML. Half a minute of CPU time.

    python examples/09_own_task.py

The shipped model has only ever seen a calculator, so the tool keeps that name; the question is new to the model.
"""

import random
import re

import verl_mt


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to compute
    """
    return str(sum(map(int, re.findall(r"[+-]?\d+", expression))))


def score(solution_str, ground_truth):
    return float(solution_str.strip().endswith(f"#### {ground_truth}"))


def row(a, b):
    return {"prompt": f"Ada has {a} maps and gets {b} more. How many maps does Ada have?", "ground_truth": a + b}


rows = random.Random(0).sample([row(a, b) for a in range(2, 60) for b in range(2, 60)], 1064)
run = verl_mt.train(
    "verl_mt://tiny", rows[64:], validation=rows[:64], tools=[calculator], reward=score, system="Answer as #### N.",
    total_training_steps=20, train_batch_size=8, response_length=128, rollout__name="local", actor__optim__lr=3e-4,
)  # fmt: skip
print(run)
