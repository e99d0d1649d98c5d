"""Runs training in forked children and kills them with SIGKILL at chosen events. Started by test_resume.py.

    python kill_lab.py FOLDER NUM_KILLS SEED

An event is a point where a child reports and waits: inside a tool call, between the files of a checkpoint, before a
line of metrics, in the middle of an update. The parent lets it go on, or kills it there. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import torch

from verl_mt.config.compose import compose
from verl_mt.data import run_files
from verl_mt.tools.calculator import Calculator
from verl_mt.trainer import checkpoint, tracking
from verl_mt.trainer.build import build_trainer
from verl_mt.workers.actor import ActorWorker

STEPS = 5
OVERRIDES = [
    "data.train_batch_size=2",
    "data.train_max_samples=16",
    "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.response_length=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=2",
    "trainer.deterministic=True",
    "trainer.num_threads=1",
    "trainer.logger=[]",
]


class Reporter:
    """The child's end: report an event, wait for leave to go on."""

    def __init__(self, to_parent: int, from_parent: int):
        self._out, self._in, self._lock = to_parent, from_parent, threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            os.write(self._out, name[:1].encode())
            os.read(self._in, 1)

    def before(self, owner: object, name: str, event: str) -> None:
        """Report `event` at the beginning of every call of `owner.name`."""
        original = getattr(owner, name)

        def reporting(*args, **kwargs):
            self(event)
            return original(*args, **kwargs)

        setattr(owner, name, reporting)


def train(folder: Path, report: Reporter) -> None:
    report.before(checkpoint, "_sync", "checkpoint")
    report.before(tracking, "append_metrics", "metrics")
    report.before(run_files.os, "replace", "file")
    report.before(ActorWorker, "_step", "update")
    original = Calculator.execute

    async def execute(self, *args, **kwargs):
        report("tool")
        return await original(self, *args, **kwargs)

    Calculator.execute = execute
    build_trainer(compose([*OVERRIDES, f"trainer.default_local_dir={folder}"])).fit()


def run_child(folder: Path, kill_at: int | None) -> tuple[bool, int, str]:
    """(finished, events seen, last event). `kill_at` counts events from 1."""
    up, down = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(up[0])
        os.close(down[1])
        try:
            train(folder, Reporter(up[1], down[0]))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(up[1])
    os.close(down[0])
    seen, last = 0, ""
    while event := os.read(up[0], 1):
        seen, last = seen + 1, event.decode()
        if seen == kill_at:
            os.kill(pid, signal.SIGKILL)
            break
        os.write(down[1], b".")
    _, status = os.waitpid(pid, 0)
    os.close(up[0])
    os.close(down[1])
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a child failed after {seen} events ({last})")
    return os.WIFEXITED(status), seen, last


def same(one: object, other: object) -> bool:
    """Equal, bit for bit, whatever is nested in what."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(
        (one == other) if not hasattr(one, "tobytes") else one.tobytes() == other.tobytes()
    )


def differences(reference: Path, other: Path) -> list[str]:
    """What the two finished runs do not have in common."""
    found = []
    last = f"checkpoints/step_{STEPS:06d}"
    one, two = checkpoint.load(reference / last), checkpoint.load(other / last)
    found += [key for key in one if not same(one[key], two[key])]
    for name in ("metrics.jsonl", "hf/model.safetensors"):
        if (reference / name).read_bytes() != (other / name).read_bytes():
            found.append(name)
    return found


def main() -> None:
    folder, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    torch.set_num_threads(1)
    reference = folder / "reference"
    _, num_events, _ = run_child(reference, None)
    kills: Counter[str] = Counter()
    different: dict[str, list[str]] = {}
    number = 0
    while sum(kills.values()) < num_kills:
        number += 1
        run, finished = folder / f"killed-{number}", False
        while not finished:
            go_on = sum(kills.values()) >= num_kills
            finished, _, last = run_child(run, None if go_on else rng.randint(1, max(2, num_events // 3)))
            if not finished:
                kills[last] += 1
        different[run.name] = differences(reference, run)
    print(json.dumps({"events": num_events, "kills": kills, "runs": number, "different": different}))


if __name__ == "__main__":
    main()
