"""Learning with four SGLang replicas beside four ranks on two Ray nodes, and what is required of it.

    python benchmarks/replicas.py [--steps N] [--target 0.85] [--run FOLDER] [key=value ...]

Starts a Ray cluster of two nodes on this machine (two ranks on each, a replica beside each rank), and trains the
default task until `val/accuracy` is the target, or for as many steps as the task has. Then it reads what the run wrote,
and prints a line per requirement, each with its figures, the bound, and `ok` or `MISSED`:

- learned: `val/accuracy` reached the target;
- log-probs: between what a replica said of a token and what the trainer computes of it, at each token of each step;
- balance: each replica's share of the sampled tokens, by the rollout rows, which name the replica of each turn;
- first turns: `rollout/first_turn_hit_rate` in each step, computed from the rows once more;
- trainer: what this process reads and writes while new weights travel to the replicas, in files, pipes (/proc/self/io)
  and connections (TCP_INFO), and how much Ray's object stores grow meanwhile, as a share of the weights.

The exit status is 1 where one was missed. Needs SGLang (docs/sglang.md) and Ray, Linux; no GPU.
The last line: `replicas: N of M requirements met; accuracy A after S steps, T s per step`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

NODES, RANKS_PER_NODE = 2, 2
NODE = {"num_cpus": RANKS_PER_NODE + 1, "object_store_memory": 300 * 1024 * 1024}
MAX_DIFFERENCE, MIN_SHARE, MIN_HIT_RATE, MAX_PASSING = 1e-3, 0.2, 0.9, 0.25
_LOOK_S, _LOOKS = 0.02, 10


@dataclass
class Moved:
    """Bytes that this process and Ray's object stores saw while weights were pushed, one entry per push."""

    through_us: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    """The most that the stores held at a time, beyond what was in them before."""

    def around(self, push: Callable[[int], None]) -> Callable[[int], None]:
        """`push`, counted."""

        def counted(version: int) -> None:
            # Looking at the stores moves bytes itself, as many at each look: they are taken off.
            start = read_and_written()
            store = max(held_in_stores() for _ in range(_LOOKS))
            before = read_and_written()
            of_a_look = (before - start) / _LOOKS
            most, over = [store], threading.Event()

            def watch() -> None:
                while not over.wait(_LOOK_S):
                    most.append(held_in_stores())

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                push(version)
            finally:
                over.set()
                watcher.join()
            self.through_us.append(max(0, round(read_and_written() - before - of_a_look * (len(most) - 1))))
            self.stored.append(max(*most, held_in_stores()) - store)

        return counted


def read_and_written() -> int:
    """Bytes of files and pipes by this process since it began, and of the TCP connections that it has now, whose send
    and receive calls /proc/self/io leaves out."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"]) + sum(map(of_connection, os.listdir("/proc/self/fd")))


def of_connection(descriptor: str) -> int:
    """Bytes that a TCP connection carried both ways; 0 of anything else."""
    try:
        connection = socket.socket(fileno=int(descriptor))
    except OSError:  # no socket, or closed meanwhile
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    except OSError:
        return 0
    finally:
        connection.detach()  # it is somebody else's
    if len(info) < 136:  # it listens, or is not of TCP
        return 0
    acknowledged, received = struct.unpack_from("<QQ", info, 120)
    return acknowledged + received


def held_in_stores() -> int:
    """Bytes of the objects in the object stores of the cluster's nodes."""
    import ray
    from ray._private.internal_api import node_stats

    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [node_stats(n["NodeManagerAddress"], n["NodeManagerPort"], include_memory_info=False) for n in nodes]
    return sum(stats.store_stats.object_store_bytes_used for stats in found)


def train(folder: Path, args: argparse.Namespace) -> tuple[Moved, int]:
    """One run. Returns what was counted, and the bytes of the weights."""
    from verl_mt.config.compose import compose
    from verl_mt.trainer.build import build_trainer

    words = ["trainer.placement=ray", f"trainer.nnodes={NODES}", f"trainer.n_workers_per_node={RANKS_PER_NODE}"]
    words += [
        "trainer.test_freq=10",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.save_freq=-1",
        "trainer.export_at_end=False",
    ]
    words += ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.engine_timeout_s=300"]
    words += [f"trainer.default_local_dir={folder}", "trainer.export_at_end=False"]
    words += [f"trainer.total_training_steps={args.steps}"] if args.steps is not None else []
    trainer = build_trainer(compose([*words, *args.overrides]))
    moved = Moved()
    trainer.weights.push = moved.around(trainer.weights.push)  # type: ignore[method-assign]
    validate = trainer.validate

    def until_good_enough() -> dict[str, float]:
        metrics = validate()
        if metrics.get("val/accuracy", 0.0) >= args.target and trainer.step_number:
            trainer.source.plan = replace(trainer.plan, total_steps=trainer.step_number)
        return metrics

    trainer.validate = until_good_enough  # type: ignore[method-assign]
    num_bytes = sum(p.numel() * p.element_size() for p in trainer.workers.policy_module.parameters())
    trainer.fit()
    return moved, num_bytes


def judge(folder: Path, args: argparse.Namespace, moved: Moved, num_bytes: int) -> bool:
    """Reads the run's files, and prints what was required and what came of it. Returns whether all was met."""
    from provenance import write_rows

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = {line["step"]: line["val/accuracy"] for line in lines if "val/accuracy" in line}
    steps = [line for line in lines if "time/step_s" in line]
    last = max(accuracies)
    passing, stored = max(moved.through_us) / num_bytes, max(moved.stored) / num_bytes
    met = [
        verdict(
            f"learned: val/accuracy {', '.join(f'{a:.3f} ({step})' for step, a in accuracies.items())} (after steps)",
            f">= {args.target}",
            accuracies[last] >= args.target,
        ),
        *judge_rows(folder, steps),
        verdict(
            f"trainer: in the worst of {len(moved.stored)} updates {passing:.3f} of {num_bytes / 1e6:.1f} MB of "
            f"weights went through its descriptors, {stored:.3f} were in object stores; weights/trainer_bytes "
            f"{max(step['weights/trainer_bytes'] for step in steps):.0f}",
            f"< {MAX_PASSING}",
            max(passing, stored) < MAX_PASSING,
        ),
    ]
    write_rows(args.out, [{"weights, bytes": num_bytes, **vars(moved)}, *lines])
    print(
        f"replicas: {sum(met)} of {len(met)} requirements met; accuracy {accuracies[last]:.3f} after {last} steps, "
        f"{median(step['time/step_s'] for step in steps):.1f} s per step",
        flush=True,
    )
    return all(met)


def judge_rows(folder: Path, steps: list[dict[str, Any]]) -> Iterator[bool]:
    """What the rollout rows say: log-probs, who sampled how much, and what first turns found in the caches."""
    from verl_mt.diagnostics.step_metrics import first_turn_hit_rate, tokens_by_replica

    tokens: Counter[str] = Counter()
    smallest, worst, compared, rates = 1.0, 0.0, 0, []
    size = NODES * RANKS_PER_NODE
    for trajectories, differences in rows_by_step(folder):
        of_step = tokens_by_replica(trajectories)
        tokens += of_step
        smallest = min(smallest, min(of_step.values()) / of_step.total() if len(of_step) == size else 0.0)
        worst, compared = max([worst, *differences]), compared + len(differences)
        rates.append(first_turn_hit_rate(trajectories)["rollout/first_turn_hit_rate"])
    shares = ", ".join(f"{name} {count / tokens.total():.3f}" for name, count in sorted(tokens.items(), key=str))
    yield verdict(
        f"log-probs: at {compared} trained tokens of {len(rates)} steps they differ by {worst:.1e} at most, at all "
        f"sampled ones by {max(step['rollout/logprob_diff_max'] for step in steps):.1e}",
        f"< {MAX_DIFFERENCE}",
        max([worst, *(step["rollout/logprob_diff_max"] for step in steps)]) < MAX_DIFFERENCE and compared > 0,
    )
    yield verdict(
        f"balance: {shares} of {tokens.total()} sampled tokens, {smallest:.3f} at least in any step",
        f">= {MIN_SHARE} over the run",
        len(tokens) == size and min(tokens.values()) / tokens.total() >= MIN_SHARE,
    )
    yield verdict(
        f"first turns: {min(rates):.3f} to {max(rates):.3f} of what prompts share was found in caches",
        f">= {MIN_HIT_RATE} in each step",
        min(rates) >= MIN_HIT_RATE,
    )


def rows_by_step(folder: Path) -> Iterator[tuple[list[Any], list[float]]]:
    """Of each step: its trajectories, and |replica's log-prob - trainer's| of each sampled token that was trained."""
    from verl_mt.data.row_files import read_rows, row_files
    from verl_mt.data.run_files import row_to_trajectory

    for file in (file for file in row_files(folder) if file.split == "train"):
        rows = list(read_rows(file.path))
        differences = [
            abs(by_engine - by_trainer)
            for row in rows
            for record in row["records"]
            if record["old_log_probs"]
            for by_engine, by_trainer, sampled in zip(
                record["rollout_log_probs"], record["old_log_probs"], record["sampled"]
            )
            if sampled and by_trainer is not None
        ]
        yield [row_to_trajectory(row) for row in rows], differences


def verdict(found: str, bound: str, met: bool) -> bool:
    """One line."""
    print(f"{'ok    ' if met else 'MISSED'} {found}; required {bound}", flush=True)
    return met


def main() -> int:
    """Parse, run, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="at most; default: as many as the task has (60)")
    parser.add_argument("--target", type=float, default=0.85, help="accuracy at which the run ends")
    parser.add_argument("--run", type=Path, help="keep the run's files in this folder")
    parser.add_argument("overrides", nargs="*", help="key=value of the trainer")
    from provenance import add_out

    add_out(parser)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="replicas_") as scratch:
        folder = (args.run or Path(scratch) / "run").resolve()
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            for _ in range(NODES - 1):
                cluster.add_node(**NODE)
            cluster.wait_for_nodes()
            os.environ["RAY_ADDRESS"] = cluster.address
            moved, num_bytes = train(folder, args)
        finally:
            ray.shutdown()
            cluster.shutdown()
        return 0 if judge(folder, args, moved, num_bytes) else 1


if __name__ == "__main__":
    sys.exit(main())
