"""Log-probs behind a large vocabulary: memory and time of forward and backward, against all logits at once.

    python benchmarks/log_prob_memory.py [--threads 1] [--shapes 2048x32000 2048x151936 8192x151936] [--hidden 128]

From given hidden states to the gradients of hidden states and head. Ways, each in a process of its own per repetition,
in turns, so that the largest memory a process ever had (Linux, VmHWM) is that way's:

- `naive`: logits, `log_softmax`, `gather`, as in most trainers;
- `recomputed`: verl_mt's, logits in tiles, made again in the backward pass;
- `known derivative`: verl_mt's where the loss's derivative is known beforehand (PPO at ratio 1): gradients are made on
  the way forward.

"Peak" is memory above inputs, weights and the gradients of both (on CUDA by torch's own count). The least that is
possible keeps one number per token. "Logits" is one copy of all logits, for scale. A shape whose naive way needs more
memory than is free (three and a half copies of its logits) is measured for `naive` at a quarter of its tokens, or a
quarter of that, and multiplied: peak and time are linear in tokens, and the table says so.

Ratios of times are of CPU seconds, the smallest of the repetitions. --tiles shows how time depends on the tile.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from typing import Any

from provenance import add_out, write_rows

WAYS = ("naive", "recomputed", "known derivative")
_M_MMAP_THRESHOLD = -3
"""Of malloc.h (glibc)."""


def peak_bytes(device: str) -> int:
    """The most memory so far."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def measure(way: str, tokens: int, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    """One forward and backward pass in this process."""
    import torch

    from verl_mt.modeling import head_log_probs as ours

    # Freed memory goes back at once, so that what one tensor left is not counted as room for the next.
    ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(args.threads)
    if args.tile:
        ours.TILE["cpu"] = ours.TILE["cuda"] = args.tile
        ours.LOGITS_AT_ONCE = args.tile if way == "known derivative" else ours.LOGITS_AT_ONCE
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    head = torch.nn.Linear(args.hidden, vocabulary, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(std=args.hidden**-0.5, generator=generator)
    head.to(args.device)
    hidden = torch.randn(tokens, args.hidden, generator=generator).to(args.device, dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(args.device)
    slope = torch.randn(tokens, generator=generator).to(args.device)
    # Their memory is there before the count begins, for every way.
    spare = [torch.ones_like(head.weight), torch.ones_like(hidden)]
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()
    before = peak_bytes(args.device)
    del spare
    start, cpu = time.perf_counter(), time.process_time()
    if way == "naive":
        log_probs = head(hidden).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    else:
        expected = (lambda: slope) if way == "known derivative" else None
        log_probs, _ = ours.head_log_probs(head, hidden, targets, expected=expected)
    (log_probs * slope).sum().backward()
    if args.device == "cuda":
        torch.cuda.synchronize()
    cpu = time.perf_counter() - start if args.device == "cuda" else time.process_time() - cpu
    assert head.weight.grad is not None and hidden.grad is not None
    return {
        "peak": peak_bytes(args.device) - before,
        "seconds": cpu,
        "check": float(head.weight.grad.double().abs().sum() + hidden.grad.double().abs().sum()),
    }


def in_own_process(way: str, tokens: int, vocabulary: int, args: argparse.Namespace, tile: int = 0) -> dict[str, float]:
    """The smallest of the repetitions is taken by the caller."""
    options = [
        f"--threads={args.threads}",
        f"--hidden={args.hidden}",
        f"--dtype={args.dtype}",
        f"--device={args.device}",
    ]
    command = [sys.executable, __file__, f"--one={way}", f"--shapes={tokens}x{vocabulary}", f"--tile={tile}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def free_bytes(device: str) -> int:
    """Memory that a process could have now."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    from verl_mt.extensions.inspection.doctor.resources import available_memory

    return int(available_memory())


def compare(tokens: int, vocabulary: int, args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """One table; returns its last line."""
    logits, share = tokens * vocabulary * 4, 1
    while share < 64 and 3.5 * logits / share > free_bytes(args.device) and tokens % (4 * share) == 0:
        share *= 4
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.repetitions):
        for way in WAYS:
            results[way].append(in_own_process(way, tokens // share if way == "naive" else tokens, vocabulary, args))
    best: dict[str, Any] = {}
    print(f"{tokens} tokens x {vocabulary}, hidden {args.hidden}, {args.dtype}; logits {logits / 1e6:.0f} MB")
    for way, found in results.items():
        scale = share if way == "naive" else 1
        best[way] = {k: min(r[k] for r in found) * scale for k in ("peak", "seconds")}
        note = f" (measured at {tokens // share} tokens, times {share})" if scale > 1 else ""
        times = [round(r["seconds"] * scale, 2) for r in found]
        print(f"  {way:<17} peak {best[way]['peak'] / 1e6:8.1f} MB, {best[way]['seconds']:.2f} s of {times}{note}")
    print(f"  least possible    peak {tokens * 4 / 1e6:8.1f} MB", flush=True)
    if share == 1:
        sums = [found[0]["check"] for found in results.values()]
        assert max(sums) - min(sums) < 1e-3 * max(sums), f"the ways disagree: {sums}"
    parts = [
        f"{way}: {best[way]['peak'] / best['naive']['peak']:.1%} of naive's memory, "
        f"{best['naive']['seconds'] / best[way]['seconds']:.2f} of its speed"
        for way in WAYS[1:]
    ]
    shape = {"tokens": tokens, "vocabulary": vocabulary, "hidden": args.hidden}
    rows = [{**shape, "way": way, "peak, bytes": best[way]["peak"], "CPU s": best[way]["seconds"]} for way in WAYS]
    return f"{tokens} x {vocabulary}: " + "; ".join(parts), rows


def over_tiles(args: argparse.Namespace) -> None:
    """Time and memory by the size of a tile, for the first shape."""
    tokens, vocabulary = map(int, args.shapes[0].split("x"))
    naive = in_own_process("naive", tokens, vocabulary, args)
    print(f"{tokens} x {vocabulary}, naive {naive['seconds']:.2f} s; logits in a tile:")
    for power in args.tiles:
        for way in WAYS[1:]:
            found = [in_own_process(way, tokens, vocabulary, args, 2**power) for _ in range(args.repetitions)]
            seconds, peak = (min(r[k] for r in found) for k in ("seconds", "peak"))
            print(f"  2^{power} {way:<17} {naive['seconds'] / seconds:.2f} of naive's speed, {peak / 1e6:.0f} MB")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--shapes", nargs="+", default=["2048x32000", "2048x151936", "8192x151936"], help="tokens x vocabulary"
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[], help="powers of two: logits in a tile, first shape only"
    )
    parser.add_argument("--tile", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args()
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch finds no CUDA device")
    elif not os.path.exists("/proc/self/status"):
        sys.exit("a process's largest memory is read from /proc, which Linux has")
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    if args.one:
        print(json.dumps(measure(args.one, *shapes[0], args)))
        return
    if args.tiles:
        over_tiles(args)
        return
    print(f"{args.threads} thread(s), load {os.getloadavg()[0]:.1f}, {free_bytes(args.device) / 1e9:.1f} GB free")
    found = [compare(tokens, vocabulary, args) for tokens, vocabulary in shapes]
    write_rows(args.out, [row for _, rows in found for row in rows])
    print("\n".join(line for line, _ in found))


if __name__ == "__main__":
    main()
