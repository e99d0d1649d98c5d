"""What one rank of 8, 64 and 1,024 exchanges in a step, counted without the others.

    python benchmarks/fake_ranks.py [--ranks 8 64 1024] [--layers 2]

The policy is sharded as in training, over torch's fake process group: collectives return at once, and nothing is sent.
A step of M passes over one row each is counted, then the gathering of all weights for the engines. The formulas are
those of docs/scaling.md, "Data moved per step". P is the number of parameters, b the bytes of one. Layers have the
shapes of a model of 0.6 billion parameters.

The bytes are those that a ring sends and receives. Sizes that N does not divide are padded, so a rank of 1,024 moves a
little more than the formula says. The largest N is counted with `fsdp_size=8`, too. The last line, for the largest N:
`a rank of N: gathered / formula = A, reduced / formula = B, to engines / formula = E, C calls per pass`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from provenance import add_out, write_rows

PASSES, VOCAB, WIDTH = 2, 2048, 1024


@dataclass
class Moved:
    """Bytes and calls of one rank, by the kind of collective."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


def counting(moved: Moved) -> Any:
    """A context in which the collectives of this process are counted into `moved`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.name().partition("::")[2].partition(".")[0]
            if name == "_allgather_base_":
                moved.calls["gather"] += 1
                moved.num_bytes["gather"] += args[0].nbytes - args[1].nbytes
            elif name == "all_gather_into_tensor":  # of DTensor.full_tensor
                moved.calls["gather"] += 1
                moved.num_bytes["gather"] += result.nbytes - args[0].nbytes
            elif name == "_reduce_scatter_base_":
                moved.calls["reduce"] += 1
                moved.num_bytes["reduce"] += args[1].nbytes - args[0].nbytes
            elif name == "allreduce_":
                moved.calls["sum"] += 1
                moved.num_bytes["sum"] += sum(tensor.nbytes for tensor in args[0])
            return result

    return Mode()


def count(size: int, layers: int, shard: int | None = None) -> dict[str, float]:
    """A step of rank 0 of `size`.

    Args:
        size: number of ranks.
        layers: decoder layers of the model.
        shard: ranks that hold the policy together (`actor.fsdp_size`); None = all.
    """
    import torch
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verl_mt.modeling.passes import Passes, use_passes
    from verl_mt.workers import sharding

    class OneOfMany(sharding.Ranks):
        """The others say what this one says."""

        def gather(self, value: Any) -> list[Any]:
            return [value] * self.size

    torch.manual_seed(0)
    sharding._mesh.cache_clear()
    sharding._patient = lambda mesh: mesh  # a fake group has no time limit
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    in_layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    use_passes(model, Passes(packed=True, share_prefixes=False))
    policy = sharding.ShardedPolicy(model, OneOfMany(0, size), device_type="cpu", shard=shard)
    ids, step, to_engines = torch.arange(8).reshape(1, 8), Moved(), Moved()

    def train(*, last: bool) -> None:
        output = sharding.score(policy, ids, torch.ones_like(ids), wanted_BT=ids > 2, temperature=1.0)
        sharding.expect_backward(policy, last=last)
        output.log_probs_BT.sum().backward()

    train(last=True)  # the first one also tries whether the model packs rows
    with counting(step):
        for number in range(PASSES):
            train(last=number == PASSES - 1)
    with counting(to_engines):
        for parameter in policy.parameters():
            sharding.whole(parameter.detach())
    kept = sum(parameter.to_local().nbytes for parameter in policy.parameters())
    dist.destroy_process_group()
    group = size if shard is None else shard
    others, b = (group - 1) / group, 2
    return {
        "ranks": size,
        "fsdp_size": group,
        "parameters": numbers,
        "gathered": step.num_bytes["gather"],
        "gathered / formula": step.num_bytes["gather"] / (PASSES * b * (in_layers + numbers) * others),
        "reduced": step.num_bytes["reduce"],
        "reduced / formula": step.num_bytes["reduce"] / (PASSES * 4 * numbers * others),
        "summed over groups": step.num_bytes["sum"],
        "to engines / formula": to_engines.num_bytes["gather"] / (b * numbers * others),
        "calls per pass": (step.calls["gather"] + step.calls["reduce"]) / PASSES,
        "kept / P b": kept / (b * numbers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--layers", type=int, default=2)
    add_out(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size, shard in [*((size, None) for size in args.ranks), (max(args.ranks), 8)]:
        rows.append(row := count(size, args.layers, shard))
        shown = ", ".join(f"{name} {value:,.4g}" for name, value in row.items())
        print(shown, flush=True)
    write_rows(args.out, rows)
    last = rows[len(args.ranks) - 1]
    print(
        f"a rank of {last['ranks']:,}: gathered / formula = {last['gathered / formula']:.3f}, reduced / formula = "
        f"{last['reduced / formula']:.3f}, to engines / formula = {last['to engines / formula']:.3f}, "
        f"{last['calls per pass']:g} calls per pass"
    )


if __name__ == "__main__":
    main()
