"""Publishing new weights to a real SGLang engine, against copying as many bytes within memory.

    python benchmarks/weight_sync.py [--size medium] [--repetitions 5] [--bucket-megabytes 256 16]

What is timed is what a training step waits for: `engine.apply(update)` from the policy's tensors to an engine that
answers with them (pause, begin, buckets, end, go on; for `disk` also writing the files). Beside it, in turns: `copy_`
of every tensor into memory that is already there, which is one read and one write of the same bytes. Ways:

- tensors: the colocated engine, through shared memory;
- broadcast: an HTTP server, through a process group (gloo, over loopback; NCCL where both are on GPUs);
- disk: the colocated engine, from a Hugging Face folder.

After the last update of each way, greedy log-probs of the engine are compared with the policy's. Needs SGLang
(docs/sglang.md); no GPU. The last line: `weight sync / memory copy: tensors R, broadcast R, disk R`, medians.

    python benchmarks/weight_sync.py --replicas [--size medium] [--repetitions 20]

On Ray instead, each in a trainer of its own: one rank with a replica beside it, four ranks with a replica beside each,
and one rank with three separate engines. Counted is what leaves rank 0 through connections (`ss`), and the CPU time of
ranks and engines during the updates, less what they take when idle. It does not stand for the traffic of the memory,
which nothing counts where there are no hardware counters: ranks gather through sockets, and a paused SGLang spins, so
that an engine's time is at least that of the slowest rank. So the four ranks also give, in turns, to all four replicas
and to one of them alone: they gather the same, and what differs is the other three replicas. The last lines:
`replica of four / replica of one: engine R, rank R; sent by rank 0 to three engines: S times the weights`, and
`four replicas / one of them, the same ranks: R`, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import SIZES, make_model, save
from provenance import add_out, write_rows

LENGTH = 256
_IDLE_S = 5.0


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

    from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
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


def cpu_seconds(pids: list[int], groups: list[int]) -> tuple[float, float]:
    """Of these processes, and of all processes in these groups, since they began."""
    of_pids = of_groups = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        of_pids += seconds if int(entry.name) in pids else 0
        of_groups += seconds if int(fields[2]) in groups else 0
    return of_pids, of_groups


def sent_by(pid: int) -> int:
    """Bytes that left a process through the TCP connections that it has now."""
    lines = subprocess.run(["ss", "-tinpHO"], check=True, capture_output=True, text=True).stdout.splitlines()
    own = [line for line in lines if re.search(rf"\bpid={pid},", line)]
    return sum(int(found[1]) for line in own if (found := re.search(r"\bbytes_sent:(\d+)", line)))


def four_against_one(trainer: Any, repetitions: int) -> float:
    """Seconds of an update of all replicas, over those of an update of the first alone, by the same ranks, in turns."""
    from verl_mt.extensions.cluster.replicas.weight_sender import send_to_all
    from verl_mt.workers.weight_sync import weight_update_for

    engine, seconds = trainer.engine, {1: [], 4: []}

    async def publish(number: int) -> None:
        members = [(replica.sender, replica.serving) for replica in engine._replicas[:number]]
        update = weight_update_for(engine.capabilities, trainer.workers, 1)
        begun = time.perf_counter()
        told = await send_to_all(members, update)
        seconds[number].append(time.perf_counter() - begun)
        if any(told):
            raise SystemExit(f"an engine did not take the weights: {told}")

    for _ in range(repetitions):
        for number in seconds:
            trainer.stream.call(publish(number))
    one, four = statistics.median(seconds[1]), statistics.median(seconds[4])
    print(
        f"  the same ranks: four replicas {1e3 * four:.0f} ms, one of them {1e3 * one:.0f} ms; ratio {four / one:.2f}"
    )
    return four / one


def measure_on_ray(title: str, words: list[str], num_bytes: int, repetitions: int) -> tuple[float, float, float, float]:
    """Builds a trainer, and pushes its weights.

    Returns:
        Per update: CPU seconds of an engine, CPU seconds of a rank, how many times the weights left rank 0; and
        `four_against_one`, where there are four ranks with four replicas.
    """
    from verl_mt.config.compose import compose
    from verl_mt.trainer.build import build_trainer

    trainer = build_trainer(compose(words))
    try:
        ranks, engines = trainer.workers.worker_pids, trainer.engine.pids
        for version in (1, 2):  # the first ones allocate, and connect
            trainer.weights.push(version)
        before, begun = cpu_seconds(ranks, engines), time.perf_counter()
        time.sleep(_IDLE_S)
        idle = [(b - a) / (time.perf_counter() - begun) for a, b in zip(before, cpu_seconds(ranks, engines))]
        before, sent, begun = cpu_seconds(ranks, engines), sent_by(ranks[0]), time.perf_counter()
        for version in range(3, 3 + repetitions):
            trainer.weights.push(version)
        seconds = time.perf_counter() - begun
        used = [b - a - i * seconds for a, b, i in zip(before, cpu_seconds(ranks, engines), idle)]
        times = (sent_by(ranks[0]) - sent) / repetitions / num_bytes
        same = four_against_one(trainer, repetitions) if len(engines) == len(ranks) == 4 else math.nan
    finally:
        trainer.close()
    of_rank, of_engine = used[0] / repetitions / len(ranks), used[1] / repetitions / len(engines)
    print(
        f"{title}: {len(engines)} engine(s), {1e3 * seconds / repetitions:.0f} ms per update; CPU ms of an engine "
        f"{1e3 * of_engine:.0f}, of a rank {1e3 * of_rank:.0f}; rank 0 sent {times:.2f} times the weights",
        flush=True,
    )
    return of_engine, of_rank, times, same


def on_ray(args: argparse.Namespace) -> None:
    """The three placements."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix="weight_sync_"))
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        model = make_model(args.size)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        print(f"{num_bytes / 1e6:.0f} MB of float32 weights, load {os.getloadavg()[0]:.1f}", flush=True)
        rollout = "actor_rollout_ref.rollout."
        common = ["trainer.placement=ray", "trainer.device=cpu", "trainer.num_threads=1", "trainer.logger=[console]"]
        common += [f"actor_rollout_ref.model.path={save(model, folder / 'model')}", "data.val_files=null"]
        common += [rollout + "name=sglang", rollout + "engine_timeout_s=300", rollout + "max_num_seqs=16"]

        def case(number: int, title: str, *words: str) -> tuple[float, float, float, float]:
            place = f"trainer.default_local_dir={folder / str(number)}"
            return measure_on_ray(title, [*common, place, *words], num_bytes, args.repetitions)

        one = case(1, "one rank, a replica beside it", "trainer.n_workers_per_node=1")
        four = case(2, "four ranks, a replica beside each", "trainer.n_workers_per_node=4")
        apart = ["trainer.n_workers_per_node=1", rollout + "nnodes=1", rollout + "n_workers_per_node=3"]
        three = case(3, "one rank, separate engines", *apart)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    names = ("engine, CPU s", "rank, CPU s", "sent, times the weights", "four replicas / one")
    cases = {"one": one, "four": four, "three apart": three}
    write_rows(
        args.out,
        [{"case": case, **{name: x for name, x in zip(names, of) if not math.isnan(x)}} for case, of in cases.items()],
    )
    print(
        f"replica of four / replica of one: engine {four[0] / one[0]:.2f}, rank {four[1] / one[1]:.2f}; "
        f"sent by rank 0 to three engines: {three[2]:.2f} times the weights"
    )
    print(f"four replicas / one of them, the same ranks: {four[3]:.2f}")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="medium")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--replicas", action="store_true", help="on Ray: beside ranks, and separate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-megabytes", type=int, nargs="+", default=[256, 16], help="for tensors; first counts")
    add_out(parser)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    on_ray(args) if args.replicas else from_here(args)


def from_here(args: argparse.Namespace) -> None:
    """From a policy in this process, the three ways."""
    import torch

    from verl_mt.engines.base import Disk, TensorBuckets
    from verl_mt.extensions.cluster.sglang.options import SGLangOptions
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
    write_rows(args.out, [{"way": way, "bytes": num_bytes, "s": of} for way, of in seconds.items()])
    tensor, broadcast, files = (ratio(seconds, name) for name in (next(iter(buckets)), "broadcast", "disk"))
    print(f"weight sync / memory copy: tensors {tensor:.2f}, broadcast {broadcast:.2f}, disk {files:.2f}")


if __name__ == "__main__":
    main()
