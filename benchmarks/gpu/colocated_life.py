"""The life of a colocated engine without the engine: memory that changes hands, and weights by handles of it.

    python benchmarks/gpu/colocated_life.py [--shape 1.5B] [--cycles 200] [--expandable]

Two processes share the device, as a rank and its engine do. A cycle is a step of training: the engine gives its weights
and its cache back, the policy is updated, the engine allocates its weights, gets the new ones in buckets of 512 MiB by
handles (CUDA IPC; on a CPU shared memory), and allocates its cache. Policy, update, buckets and handles are verl_mt's
(`ActorWorker`, `Buckets`). The engine is a process that copies what the handles point to. Its memory lies in regions of
`torch_memory_saver` where that is installed, as SGLang's does, else it is freed and allocated anew.

`--expandable` sets `PYTORCH_CUDA_ALLOC_CONF` and `PYTORCH_ALLOC_CONF` to `expandable_segments:True` for the trainer, as
users do; the engine's process starts without both.

The line at the end has the wrong bytes of all cycles (checksums of every tensor on both sides), the device's memory
in use after the second and after the last cycle, and the seconds of an update beside those of a copy of the same bytes
on the device. The exit status is 1 if a byte was wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BUCKET_BYTES = 512 * 2**20
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Memory:
    """The engine's tensors, which come and go."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str, cache_bytes: int):
        self._shapes, self._device, self._cache_bytes = shapes, device, cache_bytes
        self._saver: Any = None
        if device == "cuda" and importlib.util.find_spec("torch_memory_saver"):
            from torch_memory_saver import torch_memory_saver

            self._saver = torch_memory_saver
        self.tensors: dict[str, dict[str, Any]] = {}
        self.resume("weights")
        self.resume("cache")

    @property
    def kind(self) -> str:
        return "torch_memory_saver" if self._saver else "freed and allocated"

    def resume(self, tag: str) -> None:
        import torch

        if self._saver and tag in self.tensors:
            self._saver.resume(tag)
            return
        shapes = self._shapes if tag == "weights" else {"cache": (self._cache_bytes // 2,)}
        if self._saver:
            with self._saver.region(tag=tag):
                self.tensors[tag] = self._allocated(torch, shapes)
        else:
            self.tensors[tag] = self._allocated(torch, shapes)

    def _allocated(self, torch: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        return {name: torch.empty(shape, dtype=torch.bfloat16, device=self._device) for name, shape in shapes.items()}

    def release(self) -> None:
        import torch

        for tag in ("cache", "weights"):
            if self._saver:
                self._saver.pause(tag)
            else:
                del self.tensors[tag]
        if self._device == "cuda":
            torch.cuda.empty_cache()


def checksums(tensors: Any) -> dict[str, int]:
    """Of each (name, tensor), of its bits: the sum of its 16-bit words and of every third of them."""
    import torch

    found = {}
    for name, tensor in tensors:
        words = tensor.detach().contiguous().view(torch.int16).flatten()
        found[name] = int(words.sum(dtype=torch.int64) * 3 + words[::3].sum(dtype=torch.int64))
    return found


def serve(pipe: Any, shapes: dict[str, tuple[int, ...]], device: str, cache_bytes: int) -> None:
    """The engine's process."""
    import torch

    memory = Memory(shapes, device, cache_bytes)
    pipe.send((memory.kind, {name: os.environ.get(name) for name in ALLOCATOR}))
    while True:
        what, more = pipe.recv()
        if what == "end":
            return
        if what == "release":
            memory.release()
        elif what == "resume":
            memory.resume(more)
        elif what == "bucket":
            opened = pickle.loads(more)
            flat, weights = opened["flattened_tensor"], memory.tensors["weights"]
            for entry in opened["metadata"]:
                part = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
                weights[entry.name].copy_(part)
            del flat, opened
        if device == "cuda":
            torch.cuda.synchronize()
        pipe.send(checksums(memory.tensors["weights"].items()) if what == "checksums" else None)


class Engine:
    """The other process, from this side."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str, cache_bytes: int):
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        kept = {name: os.environ.pop(name) for name in ALLOCATOR if name in os.environ}
        try:
            self._process = context.Process(target=serve, args=(there, shapes, device, cache_bytes), daemon=True)
            self._process.start()
        finally:
            os.environ.update(kept)
        there.close()
        self.kind, self.allocator = self._pipe.recv()

    def __call__(self, what: str, more: Any = None) -> Any:
        self._pipe.send((what, more))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(("end", None))
        self._process.join()


def memory_in_use(device: str) -> float:
    """GB of the device, of all processes; on a CPU of this one."""
    import torch

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return float(total - free) / 1e9
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1e6


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("toy", "0.5B", "1.5B"), default="1.5B")
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4096, help="of an update")
    parser.add_argument("--cache-gb", type=float, default=8.0, help="of the engine's keys and values")
    parser.add_argument("--expandable", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    from provenance import add_out, write_rows

    add_out(parser)
    args = parser.parse_args()
    if args.expandable:  # before torch is loaded
        os.environ.update(dict.fromkeys(ALLOCATOR, "expandable_segments:True"))
    import torch
    from mfu import SHAPES, VOCAB, make_policy, make_update_batch

    from verl_mt.config.actor import ActorConfig
    from verl_mt.extensions.cluster.replicas.buckets import Buckets, payload
    from verl_mt.modeling.passes import choose_passes, use_passes
    from verl_mt.modeling.weights import named_weights
    from verl_mt.workers.actor import ActorWorker

    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --device cpu --shape toy runs the same cycles through shared memory")
    length, vocabulary = min(1024, args.tokens), VOCAB if on_gpu else 1024
    model = make_policy(SHAPES[args.shape], length, args.device, "sdpa", vocabulary)
    use_passes(model, choose_passes(model, share_prefixes=False))
    actor = ActorWorker(model, ActorConfig(skip_zero_advantage=False), temperature=1.0, total_steps=args.cycles + 1)
    batch = make_update_batch(length, args.tokens, vocabulary)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(model)}
    buckets = Buckets(shapes, torch.bfloat16)
    engine = Engine(shapes, args.device, int(args.cache_gb * 1e9))
    wrong, seconds, used = 0, [], {}
    before = checksums(named_weights(model))
    for cycle in range(1, args.cycles + 1):
        engine("release")
        actor.update(batch.clone())
        if on_gpu:
            torch.cuda.empty_cache()
        engine("resume", "weights")
        start = time.perf_counter()
        for bucket in buckets.pack(named_weights(model), limit=BUCKET_BYTES):
            engine("bucket", payload(bucket.buffer, bucket.entries))
        seconds.append(time.perf_counter() - start)
        engine("resume", "cache")
        expected, got = checksums(named_weights(model)), engine("checksums")
        wrong += sum(got[name] != value for name, value in expected.items())
        if expected == before:
            sys.exit("the update changed no weight, so these cycles prove nothing")
        before = expected
        used[cycle] = memory_in_use(args.device)
    copies = []
    weights = [tensor.detach() for _, tensor in named_weights(model)]
    for _ in range(3):
        start = time.perf_counter()
        copied = [tensor.clone() for tensor in weights]
        if on_gpu:
            torch.cuda.synchronize()
        copies.append(time.perf_counter() - start)
        del copied
    second, last = used[min(2, args.cycles)], used[args.cycles]
    update, copy = statistics.median(seconds), min(copies)
    print(
        f"colocated life, {args.shape}, {args.cycles} cycles ({engine.kind}; the engine's allocator settings: "
        f"{', '.join(v for v in engine.allocator.values() if v) or 'none'}): {wrong} wrong tensors, {second:.2f} GB in "
        f"use after cycle 2, {last:.2f} GB after the last, weights {update:.3f} s, a copy {copy:.3f} s, "
        f"ratio {update / copy:.1f}"
    )
    row = {"engine": engine.kind, "cycles": args.cycles, "wrong": wrong, "GB after 2": second, "GB at the end": last}
    write_rows(args.out, [row | {"weights s": update, "copy s": copy}])
    engine.close()
    buckets.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
