"""Memory of one rank for a long row, when 1, 2 and 4 ranks share it (`actor.ulysses_sequence_parallel_size`).

    python benchmarks/sequence_parallel.py [--tokens 8192] [--sizes 1 2 4] [--size small] [--no-checkpointing]

One training pass (log-probs, entropies, backward) over one row, on ranks that are processes on this machine, joined by
gloo. Every number of ranks has processes of its own. "Kept" are the bytes that autograd keeps for the backward pass,
counted tensor by tensor, each storage once; "peak" is the largest resident memory of a rank above what it had before
the pass (Linux, VmHWM). Both are the largest over the ranks; the ratio to one rank counts. "Formula" is what
docs/scaling.md says of the layers, without logits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
from typing import Any

import torch
from models import VOCAB, make_model
from provenance import add_out, write_rows


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def kept_bytes(storages: dict[int, int], model: Any) -> int:
    local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    own = {tensor.untyped_storage().data_ptr() for tensor in local}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def run(rank: int, size: int, port: int, args: argparse.Namespace, results: Any) -> None:
    import torch.distributed as dist

    from verl_mt.modeling.passes import choose_passes, use_passes
    from verl_mt.workers.sharding import Ranks, ShardedPolicy, score

    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    model = make_model(args.size, max_positions=args.tokens)
    use_passes(model, choose_passes(model))
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    module: Any = model
    if size > 1:
        module = ShardedPolicy(model, Ranks(rank, size, sequence=size), device_type="cpu")
    module.train()
    ids = torch.randint(1, VOCAB, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    wanted = torch.ones_like(ids).bool()
    wanted[:, 0] = False

    def one_pass(row: torch.Tensor, want: torch.Tensor) -> dict[int, int]:
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = score(module, row, torch.ones_like(row), wanted_BT=want, temperature=1.0, with_entropy=True)
        kept = dict(storages)
        (output.log_probs_BT.sum() / row.numel()).backward()
        return kept

    one_pass(ids[:, :64], wanted[:, :64])  # gradients and buffers are there now
    before = resident("VmRSS")
    kept = one_pass(ids, wanted)
    results.put((rank, kept_bytes(kept, model), resident("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, args: argparse.Namespace) -> tuple[int, int]:
    """(kept, peak), in bytes, the largest of the ranks."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=run, args=(rank, size, port, args, results)) for rank in range(size)]
    for process in processes:
        process.start()
    found = [results.get(timeout=args.timeout) for _ in processes]
    for process in processes:
        process.join()
    return max(kept for _, kept, _ in found), max(peak for _, _, peak in found)


def formula(size: int, args: argparse.Namespace) -> float:
    """Bytes that docs/scaling.md says a rank keeps: with checkpointing each layer's input, else about 16 numbers per
    token and hidden unit in each layer."""
    config = make_model(args.size).config
    per_layer = 1 if args.checkpointing else 16
    return 4 * args.tokens / size * config.hidden_size * config.num_hidden_layers * per_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="ranks that share it")
    parser.add_argument("--size", default="small", help="of benchmarks/models.py")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one number of ranks")
    add_out(parser)
    args = parser.parse_args()
    found = {size: measure(size, args) for size in args.sizes}
    write_rows(args.out, [{"ranks": size, "kept": kept, "peak": peak} for size, (kept, peak) in found.items()])
    first = found[args.sizes[0]]
    for size, (kept, peak) in found.items():
        print(
            f"{size} rank(s): kept {kept / 1e6:,.0f} MB (formula {formula(size, args) / 1e6:,.0f}), "
            f"peak {peak / 1e6:,.0f} MB"
        )
    ratios = ", ".join(
        f"{size} ranks {kept / first[0]:.2f}, {peak / first[1]:.2f}" for size, (kept, peak) in found.items()
    )
    print(f"a row of {args.tokens} tokens, kept and peak of a rank / of {args.sizes[0]}: {ratios}")


if __name__ == "__main__":
    main()
