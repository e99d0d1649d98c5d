"""The conversations of `my_project`: a question, its answer, and what the user says if the model is wrong.

Put your own here, or name files in `config.yaml`. `user.py` gets `extra_info.interaction_kwargs`.
"""

import random

THINGS = ("maps", "pens", "keys", "shells")
SCRIPT = ["That is wrong. Try again.", "No. Use the calculator."]


def rows(num_rows, seed, split):
    """Make rows. The numbers of `val` are never in `train`.

    Args:
        num_rows: at most this many. -1 = all.
        seed: `data.seed`.
        split: `train` or `val`.
    """
    rng = random.Random(f"{split}/{seed}")
    pairs = [(a, b) for a in range(2, 60) for b in range(2, 60) if ((a + 3 * b) % 10 == 0) == (split == "val")]
    rng.shuffle(pairs)
    return [row(a, b, rng.choice(THINGS)) for a, b in pairs[: None if num_rows < 0 else num_rows]]


def row(a, b, things):
    return {
        "prompt": f"Ada has {a} {things} and gets {b} more. How many {things} does Ada have?",
        "data_source": "my_project",
        "ground_truth": a + b,
        "extra_info": {"interaction_kwargs": {"name": "user", "answer": a + b, "script": SCRIPT}},
    }
