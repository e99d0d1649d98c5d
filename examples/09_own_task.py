"""A task of your own in one call: tool, reward and rows are Python, there is no YAML. About a minute on two cores.

    python examples/09_own_task.py [STEPS]

The shipped model has only ever seen a calculator, so the tool keeps that name. This kind of question is new to it.
"""

# --8<-- [start:quick]
import random
import re
import sys

import verl_mt


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to compute
    """
    return str(sum(int(number) for number in re.findall(r"[+-]?\d+", expression)))


def score(solution_str, ground_truth):
    return float(solution_str.strip().endswith(f"#### {ground_truth}"))


def row(a, b):
    return {"prompt": f"Ada read {a} pages on Monday and {b} on Friday. How many pages in all?", "ground_truth": a + b}


rows = random.Random(0).sample([row(a, b) for a in range(2, 60) for b in range(2, 60)], 1064)
run = verl_mt.train(
    "verl_mt://tiny",
    rows[64:],
    validation=rows[:64],
    tools=[calculator],
    reward=score,
    system="Answer as #### N.",
    total_training_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20,
    rollout__name="local",
    rollout__n=8,
    train_batch_size=8,
    actor__optim__lr=3e-4,
    response_length=128,
)
print(run)
