"""What a step costs the trainer's own process for each token, with rollout workers and without.

    python benchmarks/driver_cost.py --workers 0 1 2 4 [--tokens 4000000] [--baseline PATH]

A whole step of the real trainer: prompts are drawn, conversations of four turns call the calculator, are parsed,
checked against their full rendering and scored; groups come in, metrics are counted, the batch is built, advantages are
estimated, the batch is packed as it is sent to ranks, and the rollout rows are written. Two things are not there. No
model samples: an engine replays turns that were made beforehand, where the conversation is. And no model trains: an
update packs the batch and fills in the columns that the rows show.

Each way runs in a process of its own; counted are its CPU seconds (all threads, no other process), over the tokens of
all records. `--baseline` is a checkout of another version, without workers: `git worktree add PATH 1d0271a`. `tokens/s`
is how fast a step goes when nothing but this has to be waited for: conversations and trainer on the same cores, which
are printed. The last line: `driver: B us/token (baseline); N workers: W us/token, baseline / it = R; ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
if os.environ.get("DRIVER_COST_OF"):
    sys.path.insert(0, os.environ["DRIVER_COST_OF"])

from provenance import add_out, write_rows  # noqa: E402

from verl_mt.data.requests import GenerationOutput, GenerationRequest, Timings, VersionSpan  # noqa: E402
from verl_mt.engines.base import Capabilities, InferenceEngine, PauseMode, WeightUpdate  # noqa: E402

GROUP, TURNS, VARIANTS = 8, 4, 32
WORDS = ("we", "now", "add", "both", "numbers", "and", "look", "at", "the", "sum", "again", "before", "it", "is")

Turns = Mapping[int, Sequence[tuple[list[int], list[float]]]]


class Replay(InferenceEngine):
    """Says turn k of a conversation in one of several ways, by its seed.

    Args:
        turns: number of the turn, from 1 -> (ids, log-probs) of each way.
        worker: number of the rollout worker that made it.
    """

    def __init__(self, turns: Turns, worker: int = 0):
        said = {"transports": frozenset({"in_place"}), "deterministic": False}
        if "overlaps_training" in {field.name for field in dataclasses.fields(Capabilities)}:
            said["overlaps_training"] = False  # earlier versions
        self.capabilities = Capabilities(**said)  # type: ignore[arg-type]
        self._turns, self._version = turns, 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        await asyncio.sleep(0)
        ways = self._turns[int(request.request_id.rpartition("/")[2])]
        ids, log_probs = ways[(request.sampling.seed or 0) % len(ways)]
        spans = [VersionSpan(self._version, len(ids))]
        return GenerationOutput(list(ids), list(log_probs), "stop", spans, timings=Timings(0.0, 0.0, 0.0))

    async def abort(self, request_id: str) -> None:
        pass

    async def pause(self, mode: PauseMode = "in_place") -> None:
        pass

    async def resume(self) -> None:
        pass

    async def apply(self, update: WeightUpdate) -> None:
        self._version = update.version

    def branch(self) -> Any:
        """For rollout workers."""
        from verl_mt.engines.base import Branch

        return Branch("driver_cost:Replay", (self._turns,))

    def hear(self, news: Any) -> None:
        """The version of the weights."""
        self._version = news

    async def close(self) -> None:
        pass


def make_turns(length: int) -> Turns:
    """Turns that together have about `length` tokens."""
    from verl_mt.config.compose import compose
    from verl_mt.trainer.build_rollout import build_chat

    chat, rng = build_chat(compose([])), random.Random(0)
    end = min(chat.stop_token_ids)
    turns: dict[int, list[tuple[list[int], list[float]]]] = {}
    for turn in range(1, TURNS + 1):
        turns[turn] = []
        for _ in range(VARIANTS):
            words: list[str] = []
            while len(chat.encode_text(" ".join(words), neutral=False)) < length // TURNS - 30:
                words += rng.choices(WORDS, k=10)
            call = json.dumps({"name": "calculator", "arguments": {"expression": f"{rng.randrange(99)}+1"}})
            last = f"\n<tool_call>\n{call}\n</tool_call>" if turn < TURNS else f"\n#### {rng.randrange(99)}"
            ids = [*chat.encode_text(" ".join(words) + last, neutral=False), end]
            turns[turn].append((ids, [-rng.random() for _ in ids]))
    return turns


def measure(num_workers: int | None, num_tokens: int, length: int) -> dict[str, float]:
    """One step, in this process. `num_workers` None = a version that knows of none."""
    import driver_cost  # this file as a module, which a worker can import, too
    import torch

    from verl_mt.config.compose import compose
    from verl_mt.data import batch as columns
    from verl_mt.trainer.build import build_trainer

    prompts = max(1, round(num_tokens / (length + 150) / GROUP))
    with tempfile.TemporaryDirectory() as folder:
        rollout = "actor_rollout_ref.rollout"
        overrides = [
            f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"data.train_max_samples={prompts}", "data.val_files=null", f"{rollout}.n={GROUP}",
            f"{rollout}.response_length={2 * length}", "trainer.total_training_steps=1", "trainer.logger=[]",
            "trainer.num_threads=1", f"trainer.default_local_dir={folder}/run", "trainer.export_at_end=False",
        ]  # fmt: skip
        if num_workers is not None:
            overrides.append(f"{rollout}.num_workers={num_workers}")
        trainer = build_trainer(compose(overrides), engine=driver_cost.Replay(make_turns(length)))
        sent = [
            columns.INPUT_IDS, columns.ATTENTION_MASK, columns.SAMPLED, columns.LOSS_MASK, columns.ROLLOUT_LOG_PROBS,
            columns.ADVANTAGES, columns.TRAJECTORY_INDEX, columns.PROMPT_INDEX, columns.HAS_LOG_PROBS,
        ]  # fmt: skip
        count = 0

        def update(batch: Any) -> dict[str, float]:
            nonlocal count
            count = int(batch[columns.ATTENTION_MASK].sum())
            pickle.dumps(batch.select(*sent), protocol=pickle.HIGHEST_PROTOCOL)
            batch[columns.OLD_LOG_PROBS] = batch[columns.ROLLOUT_LOG_PROBS].clone()
            batch[columns.CLIPPED] = torch.zeros_like(batch[columns.ROLLOUT_LOG_PROBS])
            return {}

        trainer.workers.update = update
        begun, cpu = time.monotonic(), time.process_time()
        metrics = trainer.step()
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
        closed = time.process_time()
        trainer.close()  # rows that are written in the background belong to the step
        cpu += time.process_time() - closed
        assert metrics["tools/calculator/calls"] == prompts * GROUP * (TURNS - 1) and not metrics["rollout/failed"]
    return {"tokens": count, "us": cpu / count * 1e6, "per_s": count / seconds}


def in_a_process(checkout: Path, num_workers: int | None, args: argparse.Namespace) -> dict[str, float]:
    words = ["--measure", "none" if num_workers is None else str(num_workers)]
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    command += ["--tokens", str(args.tokens), "--length", str(args.length)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "DRIVER_COST_OF": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{checkout}, {num_workers} workers:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of rollout workers")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of a step")
    parser.add_argument("--length", type=int, default=1000, help="sampled tokens of a conversation, about")
    parser.add_argument("--baseline", type=Path, help="checkout of another version")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args()
    if args.measure is not None:
        number = None if args.measure == "none" else int(args.measure)
        print(json.dumps(measure(number, args.tokens, args.length)))
        return
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    ways: list[tuple[str, Path, int | None]] = [(f"{n} workers", REPO, n) for n in args.workers]
    if args.baseline is not None:
        ways.insert(0, ("baseline", args.baseline.resolve(), None))
    found: dict[str, float] = {}
    rows = []
    for name, checkout, number in ways:
        one = in_a_process(checkout, number, args)
        found[name] = one["us"]
        rows.append(
            {"way": name, "CPU us per token": one["us"], "tokens per second": one["per_s"], "tokens": one["tokens"]}
        )
        print(
            f"{name}: {one['us']:.2f} CPU us/token of the trainer's process, {one['per_s']:,.0f} tokens/s, "
            f"{one['tokens']:,.0f} tokens",
            flush=True,
        )
    write_rows(args.out, rows)
    base_name, base = next(iter(found.items()))
    rest = [f"{name}: {us:.2f} us/token, {base_name} / it = {base / us:.1f}" for name, us in list(found.items())[1:]]
    print(f"driver: {base:.2f} us/token ({base_name}); " + "; ".join(rest))


if __name__ == "__main__":
    main()
