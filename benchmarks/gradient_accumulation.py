"""Gradients of many micro-batches of a bfloat16 model, added up in bfloat16 and in float32: how far from exact.

    python benchmarks/gradient_accumulation.py [--micro-batches 8 32 128] [--size tiny]

Every micro-batch is a row of random tokens through the same random model. "Sum" is the distance of what was added up to
the sum of the very same gradients in float64, over that sum's norm: what adding up costs. "Model" is the distance to
the gradient of the same weights in float64: what bfloat16 costs in all. No time is measured.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import VOCAB, make_model
from provenance import add_out, write_rows
from torch import Tensor

from verl_mt.workers.trainable import add_up_in_float32


def rows(count: int, tokens: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(1, VOCAB, (1, tokens), generator=generator)


def gradient(model: Any, ids: list[Tensor], each: Callable[[Any], None] = lambda model: None) -> Tensor:
    """What has been added up behind all micro-batches, float64; `each` is called behind every one of them."""
    for row in ids:
        (model(input_ids=row, labels=row).loss / len(ids)).backward()
        each(model)
    return flat(model)


def flat(model: Any) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measure(model: Any, count: int, tokens: int) -> dict[str, float]:
    """Relative errors of both sums."""
    ids = [*rows(count, tokens)]
    low = copy.deepcopy(model).to(torch.bfloat16)
    in_low, in_float32, alone = (copy.deepcopy(low) for _ in range(3))
    for parameter in in_float32.parameters():
        add_up_in_float32(parameter)
    total: list[Tensor] = []

    def take(model: Any) -> None:
        total[:] = [flat(model) if not total else total[0] + flat(model)]
        model.zero_grad()

    for row in ids:
        (alone(input_ids=row, labels=row).loss / len(ids)).backward()
        take(alone)
    # The weights are the rounded ones in both: what differs is arithmetic.
    exact = gradient(low.to(torch.float64), ids)
    before, after = gradient(in_low, ids), gradient(in_float32, ids)
    return {
        "sum, bfloat16": off(before, total[0]),
        "sum, float32": off(after, total[0]),
        "model, bfloat16": off(before, exact),
        "model, float32": off(after, exact),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64, help="of each micro-batch")
    parser.add_argument("--size", default="tiny", help="of benchmarks/models.py")
    parser.add_argument("--threads", type=int, default=1)
    add_out(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model(args.size)
    measured = []
    for count in args.micro_batches:
        found = measure(model, count, args.tokens)
        measured.append({"micro-batches": count, **found})
        print(
            f"{count} micro-batches: "
            + "; ".join(
                f"{name} {error:.2%}" if error > 1e-4 else f"{name} {error:.0e}" for name, error in found.items()
            )
        )
    write_rows(args.out, measured)
    print(
        f"gradient over {args.micro_batches[-1]} micro-batches: added up in bfloat16 {found['sum, bfloat16']:.2%} off, "
        f"in float32 {found['sum, float32']:.1e}"
    )


if __name__ == "__main__":
    main()
