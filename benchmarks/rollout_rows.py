"""What rollout rows cost the trainer's process, sealed in a rollout worker or not.

    python benchmarks/rollout_rows.py [--trajectories 512] [--tokens 2000] [--turns 4] [--repetitions 3] [--folder F]

Made trajectories in groups of 8: a prompt, turns with calls and answers of a tool, random ids and log-probs, and a
batch with advantages and old log-probs, as after an update. Each way writes the step's file through the trainer's own
`RolloutFiles`, its thread included, and is timed in CPU seconds of the whole process; the ways take turns and the
smallest of each counts. "sealed" had its groups sealed before (`columnar_rows.seal`, in a rollout worker); what that
cost there stands beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance import add_out, write_rows

from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryGroup, TrajectoryRecord

WORDS = ["the", "of", "a", "sum", "was", "found", "price", "to", "in", "add", "total", "and", "seven", "items", "cost"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2000, help="of a trajectory")
    parser.add_argument("--turns", type=int, default=4, help="of a trajectory")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to write to; default: the temporary folder")
    add_out(parser)
    args = parser.parse_args()
    rng = random.Random(0)
    groups = [
        TrajectoryGroup(f"p{g}", f"p{g}", [trajectory(rng, g, k, args.tokens, args.turns) for k in range(8)])
        for g in range(max(1, args.trajectories // 8))
    ]
    num_tokens = sum(len(r.token_ids) for g in groups for t in g.trajectories for r in t.records)
    print(f"{len(groups)} groups of 8, {num_tokens:,} tokens, {args.turns} turns, load {os.getloadavg()[0]:.1f}")
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found, sealing, sizes = measure(groups, folder, args.repetitions)
    finally:
        shutil.rmtree(folder)
    for name, seconds in found.items():
        print(
            f"{name}: {1e6 * seconds / num_tokens:.2f} us of CPU a token, {sizes[name] / num_tokens:.1f} bytes a token"
        )
    print(f"sealing, in the worker: {1e6 * sealing / num_tokens:.2f} us of CPU a token")
    rows = [{"way": name, "CPU s": seconds, "bytes": sizes[name]} for name, seconds in found.items()]
    write_rows(
        args.out,
        [{"tokens": num_tokens, **row} for row in [*rows, {"way": "sealing, in the worker", "CPU s": sealing}]],
    )
    print(f"rollout rows: parquet / parquet sealed elsewhere = {found['parquet'] / found['sealed']:.1f} in CPU")


def trajectory(rng: random.Random, group: int, number: int, num_tokens: int, turns: int) -> Trajectory:
    """A conversation with `turns` tool calls; 60 % of its tokens are sampled."""
    record, messages, spans = TrajectoryRecord(), [], []
    part = max(2, num_tokens // (turns + 1) // 2)
    record.append_given(ids(rng, part), kind="prompt", turn=0)
    messages.append({"role": "user", "content": text(rng, part)})
    for turn in range(1, turns + 1):
        sampled = ids(rng, int(1.2 * part))
        # As an engine gives them: float32, in Python's floats.
        log_probs = [rng.randrange(-(2**23), 0) / 2**20 for _ in sampled]
        record.append_sampled(sampled, log_probs, [3] * len(sampled), turn=turn)
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": text(rng, 8)}}}
        messages.append({"role": "assistant", "content": text(rng, part), "tool_calls": [call]})
        record.append_given(ids(rng, int(0.8 * part)), kind="observation", turn=turn)
        messages.append({"role": "tool", "content": text(rng, int(0.8 * part))})
        spans += [
            TimeSpan("decode", turn + 0.1, turn + 0.7, turn),
            TimeSpan("tool", turn + 0.7, turn + 1, turn, "search"),
        ]
    name = f"s000001.{group:05d}.{number:02d}"
    made = Trajectory(name, f"p{group}", f"p{group}", name, "made", group, messages, records=[record], time_spans=spans)
    made.turn_texts = [m["content"] for m in messages if m["role"] == "assistant"]
    made.reward, made.stop_reason, made.num_turns = float(number % 2), StopReason.FINISHED, turns
    return made


def ids(rng: random.Random, count: int) -> list[int]:
    # As in texts: few ids are most of it.
    return [int(150_000 ** rng.random()) for _ in range(count)]


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def measure(
    groups: list[TrajectoryGroup], folder: Path, repetitions: int
) -> tuple[dict[str, float], float, dict[str, int]]:
    """CPU seconds of each way, of sealing, and bytes of each file."""
    import torch

    from verl_mt.data import batch as columns
    from verl_mt.data.columnar_rows import seal
    from verl_mt.trainer.rollout_files import RolloutFiles

    torch.set_num_threads(1)
    batch = columns.build_batch([t for g in groups for t in g.trajectories], pad_token_id=0)
    assert batch is not None
    batch[columns.ADVANTAGES] = torch.randn(len(batch), 1) * batch[columns.LOSS_MASK]
    batch[columns.OLD_LOG_PROBS] = batch[columns.ROLLOUT_LOG_PROBS] + 1e-5 * torch.randn(batch[columns.INPUT_IDS].shape)

    def write(sealed: bool) -> Callable[[], Any]:
        files = RolloutFiles(folder, str)
        files.training(0, groups, None)  # the texts of tokens, once in a run
        files.flush()

        def once() -> None:
            for group, part in zip(groups, parts):
                group.sealed = part if sealed else None
            files.training(1, groups, batch)
            files.flush()

        return once

    seal(groups[0].trajectories)  # imports
    sealing, parts = timed(lambda: [seal(g.trajectories) for g in groups])
    ways = {"parquet": write(False), "sealed": write(True)}
    found = {name: min(timed(way)[0] for _ in range(repetitions)) for name, way in ways.items()}
    size = (folder / "rollouts" / "step_000001.parquet").stat().st_size
    return found, sealing, dict.fromkeys(ways, size)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = call()
    return time.process_time() - begun, result


if __name__ == "__main__":
    main()
