"""Giving a real SGLang engine new weights, against copying as many bytes within memory.

    python benchmarks/weight_sync.py [--size medium] [--repetitions 5] [--bucket-megabytes 256 16]

What is timed is what a training step waits for: `engine.apply(update)` from the policy's tensors to an engine that
answers with them (pause, begin, buckets, end, go on; for `disk` also writing the files). Beside it, in turns: `copy_`
of every tensor into memory that is already there, which is one read and one write of the same bytes. Ways:

- tensors: the colocated engine, through shared memory;
- broadcast: an HTTP server, through a process group (gloo, over loopback; NCCL where both are on GPUs);
- disk: the colocated engine, from a Hugging Face folder.

After the last update of each way, greedy log-probs of the engine are compared with the policy's. Needs SGLang
(docs/sglang.md); no GPU. The last line: `weight sync / memory copy: tensors R, broadcast R, disk R`, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import SIZES, make_model, save

LENGTH = 256


def copy_seconds(model: Any, targets: list[Any]) -> float:
    """One plain copy of all weights."""
    from verl_mt.modeling.weights import named_weights

    begun = time.perf_counter()
    for (_, tensor), target in zip(named_weights(model), targets):
        target.copy_(tensor.detach())
    return time.perf_counter() - begun


def change(model: Any, seed: int) -> None:
    """Other weights, so that an update that does nothing shows."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape[-1]))


async def worst_difference(engine: Any, model: Any) -> float:
    """Largest difference of log-probs between the engine and the model, over 32 greedy tokens."""
    import torch

    from verl_mt.data.requests import GenerationRequest, SamplingParams

    prompt = list(range(5, 69))
    sampling = SamplingParams(max_new_tokens=32, temperature=0.0)
    output = await engine.generate(GenerationRequest(prompt, sampling, f"probe-{time.monotonic()}", "probe"))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])
    return float((expected[:, 0] - torch.tensor(output.log_probs)).abs().max())


async def measure(
    title: str, options: Any, model: Any, updates: dict[str, Callable[[int], Any]], repetitions: int
) -> dict[str, list[float]]:
    """Starts an engine; for each way, `repetitions` updates and as many plain copies, in turns.

    Returns:
        Seconds by way, and by `way, copy`.
    """
    import torch

    from verl_mt.engines.sglang.engine import SGLangEngine
    from verl_mt.modeling.weights import named_weights

    engine = SGLangEngine(options)
    targets = [torch.zeros_like(tensor) for _, tensor in named_weights(model)]
    seconds: dict[str, list[float]] = {}
    try:
        begun = time.perf_counter()
        await engine.start()
        print(f"{title}: started in {time.perf_counter() - begun:.0f} s", flush=True)
        version = 0
        for name, make in updates.items():
            change(model, seed=version)
            for _ in range(repetitions + 1):
                version += 1
                seconds.setdefault(f"{name}, copy", []).append(copy_seconds(model, targets))
                begun = time.perf_counter()
                await engine.apply(make(version))
                seconds.setdefault(name, []).append(time.perf_counter() - begun)
            if (worst := await worst_difference(engine, model)) > 1e-3:
                raise SystemExit(f"{name}: log-probs differ by {worst:.1e}; the engine does not have the new weights")
            show(name, seconds, sum(target.numel() * target.element_size() for target in targets))
    finally:
        await engine.close()
    return seconds


def show(name: str, seconds: dict[str, list[float]], num_bytes: int) -> None:
    """One line; the first update, which allocates, is shown by itself."""
    first, *others = seconds[name]
    spread, median = ", ".join(f"{1e3 * s:.0f}" for s in others), statistics.median(others)
    rate = num_bytes / median / 1e9
    print(
        f"  {name:<26} {1e3 * median:7.1f} ms of [{spread}], the first {1e3 * first:.0f}; {rate:.2f} GB/s; "
        f"copy {1e3 * statistics.median(seconds[f'{name}, copy'][1:]):.1f} ms; ratio {ratio(seconds, name):.2f}",
        flush=True,
    )


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Of medians, first ones left out."""
    return statistics.median(seconds[name][1:]) / statistics.median(seconds[f"{name}, copy"][1:])


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="medium")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-megabytes", type=int, nargs="+", default=[256, 16], help="for tensors; first counts")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    import torch

    from verl_mt.engines.base import Disk, TensorBuckets
    from verl_mt.engines.sglang.options import SGLangOptions
    from verl_mt.workers.weight_sync import LiveWeights

    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp(prefix="weight_sync_"))
    try:
        model = make_model(args.size)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        load = os.getloadavg()[0]
        print(f"{num_bytes / 1e6:.0f} MB of float32 weights, {args.threads} thread(s), load {load:.1f}", flush=True)
        options = SGLangOptions(model_path=save(model, folder / "model"), max_model_len=LENGTH, max_num_seqs=16)

        def tensors(megabytes: int) -> Callable[[int], Any]:
            return lambda version: TensorBuckets(version, LiveWeights(model), megabytes << 20)

        def disk(version: int) -> Any:
            model.save_pretrained(folder / "update")
            return Disk(version, str(folder / "update"))

        buckets = {f"tensors, {m} MB buckets": tensors(m) for m in args.bucket_megabytes}
        seconds = asyncio.run(measure("colocated", options, model, {**buckets, "disk": disk}, args.repetitions))
        server = replace(options, num_launched=1, transport="broadcast")
        ways = {"broadcast": tensors(args.bucket_megabytes[0])}
        seconds |= asyncio.run(measure("server", server, model, ways, args.repetitions))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tensor, broadcast, files = (ratio(seconds, name) for name in (next(iter(buckets)), "broadcast", "disk"))
    print(f"weight sync / memory copy: tensors {tensor:.2f}, broadcast {broadcast:.2f}, disk {files:.2f}")


if __name__ == "__main__":
    main()
