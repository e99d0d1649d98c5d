"""How late the event loop of a rollout worker is with thousands of conversations.

    python benchmarks/event_loop_lag.py [--conversations 5000] [--together] [--seconds 30]

One step of the real trainer with one rollout worker, in a process of its own. Conversations of four turns call a tool
three times, which takes 2 to 30 seconds. They are parsed, checked against their full rendering and scored. An engine
replays turns, each after 1 to 4 seconds. All conversations begin at once. With `--together` all calls take equally
long, and all turns: thousands of results come in the same moment. Nothing is trained. `--seconds` is the longest time
of a call.

The worker measures its own loop: a task sleeps for 50 ms at a time and notes how late it wakes up
(`rollout/event_loop_lag_p99_ms`). The last line: `event loop: N conversations, lag p99 L ms, step S s, C CPU s`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from driver_cost import GROUP, TURNS, Replay, Turns, make_turns
from provenance import REPO, add_out, write_rows

from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import Branch
from verl_mt.tools.calculator import Calculator


class LateReplay(Replay):
    """`Replay`, each turn after a while.

    Args:
        turns: see `Replay`.
        between_s: shortest and longest time of a turn in seconds.
        worker: number of the rollout worker that made it.
    """

    def __init__(self, turns: Turns, between_s: tuple[float, float], worker: int = 0):
        super().__init__(turns)
        self._between_s = between_s

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        await asyncio.sleep(random.uniform(*self._between_s))
        return await super().generate(request)

    def branch(self) -> Branch:
        return Branch("event_loop_lag:LateReplay", (self._turns, self._between_s))


class LateCalculator(Calculator):
    """A calculator behind a service; `config` has `shortest_s` and `longest_s`."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """The calculator's answer, later."""
        await asyncio.sleep(random.uniform(self.config["shortest_s"], self.config["longest_s"]))
        return await super().execute(instance_id, parameters, **kwargs)


def tools_file(folder: Path, between_s: tuple[float, float]) -> Path:
    """A tools YAML with the late calculator."""
    told = yaml.safe_load((REPO / "tools_configs" / "calculator.yaml").read_text(encoding="utf-8"))
    told["tools"][0]["class_name"] = f"{Path(__file__).resolve()}:LateCalculator"
    told["tools"][0]["config"] = dict(zip(("shortest_s", "longest_s"), between_s))
    file = folder / "tools.yaml"
    file.write_text(yaml.safe_dump(told), encoding="utf-8")
    return file


def measure(conversations: int, length: int, together: bool, longest_s: float) -> dict[str, float]:
    """One step.

    Args:
        conversations: that live at once.
        length: sampled tokens of each, about.
        together: all turns, and all calls, take the same time.
        longest_s: of a call. A turn takes up to an eighth.
    """
    import event_loop_lag  # this file as a module, which a worker can import, too
    import torch

    from verl_mt.config.compose import compose
    from verl_mt.data import batch as columns
    from verl_mt.trainer.build import build_trainer

    prompts = conversations // GROUP
    shortest = (1 / 3, 1 / 15) if not together else (1.0, 1.0)
    of_turns, of_calls = (longest_s / 8 * shortest[0], longest_s / 8), (longest_s * shortest[1], longest_s)
    with tempfile.TemporaryDirectory() as folder:
        rollout = "actor_rollout_ref.rollout"
        overrides = [
            f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"data.train_max_samples={prompts}", "data.val_files=null", f"{rollout}.n={GROUP}",
            f"{rollout}.response_length={3 * length}", f"{rollout}.num_workers=1", "trainer.total_training_steps=1",
            "trainer.logger=[]", "trainer.num_threads=1", f"trainer.default_local_dir={folder}/run",
            "trainer.export_at_end=False", f"{rollout}.multi_turn.tool_concurrency={conversations}",
            f"{rollout}.multi_turn.tool_timeout_s=300",
            f"{rollout}.tool_kwargs.tools_config_file={tools_file(Path(folder), of_calls)}",
        ]  # fmt: skip
        engine = event_loop_lag.LateReplay(make_turns(length), of_turns)
        trainer = build_trainer(compose(overrides), engine=engine)

        def update(batch: Any) -> dict[str, float]:
            batch[columns.OLD_LOG_PROBS] = batch[columns.ROLLOUT_LOG_PROBS].clone()
            batch[columns.CLIPPED] = torch.zeros_like(batch[columns.ROLLOUT_LOG_PROBS])
            return {}

        trainer.workers.update = update
        begun = time.monotonic()
        metrics = trainer.step()
        seconds = time.monotonic() - begun
        trainer.close()
    assert metrics["tools/calculator/calls"] == prompts * GROUP * (TURNS - 1) and not metrics["rollout/failed"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "conversations": prompts * GROUP,
        "calls": metrics["tools/calculator/calls"],
        "lag p99 in ms": metrics["rollout/event_loop_lag_p99_ms"],
        "seconds of the step": seconds,
        "CPU seconds of the worker": used.ru_utime + used.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=5000)
    parser.add_argument("--length", type=int, default=400, help="sampled tokens of a conversation, about")
    parser.add_argument("--seconds", type=float, default=30.0, help="longest time of a call")
    parser.add_argument("--together", action="store_true", help="all turns and calls take the same time")
    add_out(parser)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    found = measure(args.conversations, args.length, args.together, args.seconds)
    write_rows(args.out, [{"together": args.together, "load": os.getloadavg()[0], **found}])
    print(
        f"event loop: {found['conversations']} conversations, lag p99 {found['lag p99 in ms']:.0f} ms, step "
        f"{found['seconds of the step']:.1f} s, {found['CPU seconds of the worker']:.1f} CPU s"
    )


if __name__ == "__main__":
    main()
