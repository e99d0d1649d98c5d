"""Training without padding: tokens per second of packed passes over those of padded ones.

    python benchmarks/packing.py [--threads 1] [--size tiny] [--repetitions 3] [--rollouts RUN/rollouts/step_*]

A pass is forward and backward of log-probs and entropies over all micro-batches of a batch, 16,384 tokens each. No
prefix is shared, neither here nor there (prefix_sharing.py measures that). Batches:

- `default task`: the rollouts of a step of the default task, 16 prompts x 8 samples (or those of `--rollouts`);
- `long tail`: 48 rows, prompts of 60 to 120 tokens, responses log-normal with median 150 and sigma 1, cut at 2,048.

Padded passes take rows as they come, or sorted by length, which is the best that padding can do. "Padding" is padded
over real tokens; "of it" is the speed-up over that ratio: 1 means that all that padding costs is gained. The ways take
turns, the smallest time of each counts, and the gradients are compared. The last lines are the speed-ups.
"""

from __future__ import annotations

import argparse
import glob
import os
import random
from pathlib import Path
from typing import Any

from provenance import add_out, write_rows


def long_tail(rows: int) -> Any:
    """See above."""
    from training_work import made_batch

    rng = random.Random(3)
    groups = max(1, rows // 8)
    responses = [
        [min(2048, int(rng.lognormvariate(5.0, 1.0)) + 1) for _ in range(rows // groups)] for _ in range(groups)
    ]
    return made_batch([rng.randint(60, 120) for _ in range(groups)], responses)


def compare(name: str, model: Any, batch: Any, max_tokens: int, repetitions: int) -> list[dict[str, Any]]:
    """One table; returns a row for each way."""
    import torch
    from training_work import gradients, in_order, padded_tokens, train, worst_difference

    from verl_mt.data import batch as columns
    from verl_mt.modeling.passes import PLAIN, Passes
    from verl_mt.workers.micro_batch import split_rows

    rows, lengths = torch.arange(len(batch)), batch[columns.ATTENTION_MASK].sum(1)
    real = int(lengths.sum())
    sizes = (lengths, batch[columns.PROMPT_INDEX], rows)
    packed = split_rows(*sizes, max_tokens=max_tokens, max_rows=None, packed=True)
    ways = {
        "padded, as they come": (in_order(batch, max_tokens), PLAIN),
        "padded, sorted": (split_rows(*sizes, max_tokens=max_tokens, max_rows=None), PLAIN),
        "packed": (packed, Passes(packed=True, share_prefixes=False)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    differences = []
    for _ in range(repetitions):
        for way, (parts, passes) in ways.items():
            seconds[way].append(train(model, batch, parts, passes))
            if way == "padded, as they come":
                plain = gradients(model)
        differences.append(worst_difference(model, plain))
    best = {way: min(times) for way, times in seconds.items()}
    print(f"{name}: {len(batch)} rows of {int(lengths.min())} to {int(lengths.max())} tokens, {real} tokens in all")
    rows_of_ways = []
    for way, (parts, _) in ways.items():
        print(
            f"  {way:<21} {real / best[way]:7.0f} tokens/s, {best[way]:.2f} s of {[round(s, 2) for s in seconds[way]]}"
        )
        if way != "packed":
            padding, gain = padded_tokens(batch, parts) / real, best[way] / best["packed"]
            row = {"batch": name, "way": way, "tokens": real, "padding": padding, "packed / padded": gain}
            rows_of_ways.append({**row, "padded, s": seconds[way], "packed, s": seconds["packed"]})
    print(f"  gradients differ by {max(differences):.1e} at most", flush=True)
    return rows_of_ways


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="tiny", help="of the model, see models.py")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--rollouts", nargs="*", default=[], help="rollout rows of a run instead of the default task's")
    parser.add_argument("--prompts", type=int, default=16, help="of the default task's step, 8 samples each")
    parser.add_argument("--rows", type=int, default=48, help="of the long tail")
    add_out(parser)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    import torch
    from models import make_model
    from training_work import batch_of_rows, rollouts_of_the_default_task

    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}, model {args.size}")
    model = make_model(args.size, max_positions=4096).to(args.device)
    files = [Path(name) for pattern in args.rollouts for name in sorted(glob.glob(pattern))]
    task = (
        batch_of_rows(files)
        if args.rollouts
        else rollouts_of_the_default_task([f"data.train_batch_size={args.prompts}"])
    )
    found = compare("default task", model, task, args.max_tokens, args.repetitions)
    found += compare("long tail", model, long_tail(args.rows), args.max_tokens, args.repetitions)
    write_rows(args.out, found)
    for row in found:
        padding, gain = row["padding"], row["packed / padded"]
        said = f"padding {padding:.2f}, packed / padded = {gain:.2f}, of it {gain / padding:.2f}"
        print(f"{row['batch']}, {row['way']}: {said}")


if __name__ == "__main__":
    main()
