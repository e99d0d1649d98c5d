"""Prompts that a group shares, computed once: training passes with and without.

    python benchmarks/prefix_sharing.py [--threads 1] [--size tiny] [--repetitions 3]

A pass is forward and backward of log-probs and entropies over all micro-batches of a batch (16,384 tokens each), packed
in both cases; `use_remove_padding=False` has a way of its own to share, shown beside. Batches, each at groups of 8 and
of 16 samples, 128 rows:

- `default task`: the rollouts of a step of the default task, whose prompts all begin with one system message of tools;
- `long prompts`: a system message of 300 tokens and questions of 150 to 250 (documents, examples, many tools),
  responses log-normal with median 100 and sigma 0.7, cut at 512;
- `nothing common`: prompts of 200 to 300 tokens that only a group's own samples have in common, the same responses.

"Tokens" are those that go through the model, over those without sharing. The ways take turns, the smallest time of each
counts, and the gradients are compared. The last lines are the speed-ups.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

from provenance import add_out, write_rows


def long_prompts(groups: int, size: int, *, system: int) -> Any:
    """See above."""
    from training_work import made_batch

    rng = random.Random(4)
    span = (150, 250) if system else (200, 300)
    responses = [[min(512, int(rng.lognormvariate(4.6, 0.7)) + 1) for _ in range(size)] for _ in range(groups)]
    return made_batch([rng.randint(*span) for _ in range(groups)], responses, system=system)


def tokens_through(batch: Any, parts: Any, *, share: bool) -> int:
    """Tokens of packed passes."""
    from verl_mt.data import batch as columns
    from verl_mt.modeling.packing import PackedRows

    total = 0
    for part in parts:
        wanted = batch[columns.LOSS_MASK][part]
        row_N, position_N = wanted.nonzero(as_tuple=True)
        total += PackedRows(batch[columns.INPUT_IDS][part], row_N, position_N - 1, share=share).input_ids_1T.numel()
    return total


def compare(name: str, model: Any, batch: Any, repetitions: int) -> dict[str, Any]:
    """One table; returns its row."""
    import torch
    from training_work import gradients, train, worst_difference

    from verl_mt.data import batch as columns
    from verl_mt.modeling.passes import Passes
    from verl_mt.workers.micro_batch import split_rows

    batch = batch[batch[columns.LOSS_MASK].any(1)]
    sizes = (batch[columns.ATTENTION_MASK].sum(1), batch[columns.PROMPT_INDEX], torch.arange(len(batch)))
    packed, padded = (split_rows(*sizes, max_tokens=16384, max_rows=None, packed=p) for p in (True, False))
    ways = {
        "packed, not shared": (packed, Passes(packed=True, share_prefixes=False)),
        "packed, shared": (packed, Passes(packed=True, share_prefixes=True)),
        "padded, shared": (padded, Passes(packed=False, share_prefixes=True)),
    }
    train(model, batch, packed[:1], ways["packed, shared"][1])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    differences = []
    for _ in range(repetitions):
        for way, (parts, passes) in ways.items():
            seconds[way].append(train(model, batch, parts, passes))
            if way == "packed, not shared":
                plain = gradients(model)
            else:
                differences.append(worst_difference(model, plain))
    best = {way: min(times) for way, times in seconds.items()}
    left = tokens_through(batch, packed, share=True) / tokens_through(batch, packed, share=False)
    print(f"{name}: {len(batch)} rows, {int(batch[columns.ATTENTION_MASK].sum())} tokens; shared: {left:.2f} of them")
    for way in ways:
        print(f"  {way:<19} {best[way]:.2f} s of {[round(s, 2) for s in seconds[way]]}")
    print(f"  gradients differ by {max(differences):.1e} at most", flush=True)
    gain = best["packed, not shared"] / best["packed, shared"]
    return {"batch": name, "tokens left": left, "not shared / shared": gain, "s": seconds}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="tiny", help="of the model, see models.py")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[8, 16])
    add_out(parser)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    import torch
    from models import make_model
    from training_work import rollouts_of_the_default_task

    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}, model {args.size}")
    model = make_model(args.size, max_positions=4096).to(args.device)
    found = []
    for size in args.group_sizes:
        groups = max(1, args.rows // size)
        settings = [f"data.train_batch_size={groups}", f"actor_rollout_ref.rollout.n={size}"]
        batches = {
            "default task": rollouts_of_the_default_task(settings),
            "long prompts": long_prompts(groups, size, system=300),
            "nothing common": long_prompts(groups, size, system=0),
        }
        found += [compare(f"{name}, group {size}", model, b, args.repetitions) for name, b in batches.items()]
    write_rows(args.out, found)
    for row in found:
        left, gain = row["tokens left"], row["not shared / shared"]
        print(f"{row['batch']}: tokens {left:.2f}, not shared / shared = {gain:.2f}")


if __name__ == "__main__":
    main()
