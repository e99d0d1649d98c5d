"""Batches like those of training, and a pass over them: what packing.py, prefix_sharing.py and mfu.py share."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from models import VOCAB
from tensordict import TensorDict

from verl_mt.data import batch as columns
from verl_mt.data.row_files import read_rows
from verl_mt.data.run_files import row_to_trajectory
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.passes import Passes, use_passes


def rollouts_of_the_default_task(overrides: Sequence[str] = ()) -> TensorDict:
    """The batch of one step of `python -m verl_mt.trainer`: real conversations of the shipped model with its tool."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "trainer.total_training_steps=1", "data.val_files=null", "trainer.save_freq=-1",
            "trainer.export_at_end=False", "trainer.logger=[]", "data.eager_rows=0", *overrides,
        ]  # fmt: skip
        command = [sys.executable, "-m", "verl_mt.trainer", f"trainer.default_local_dir={folder}", *settings]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            sys.exit(f"the trainer ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        return batch_of_rows(sorted(Path(folder).rglob("rollouts/step_*")))


def batch_of_rows(files: Iterable[Path]) -> TensorDict:
    """The training batch of rollouts that a run has written."""
    trajectories = [row_to_trajectory(row) for file in files for row in read_rows(file)]
    batch = columns.build_batch(trajectories, pad_token_id=0)
    if batch is None:
        sys.exit("the rollout rows hold nothing that is trained")
    return batch


def made_batch(
    prompts: Sequence[int], responses: Sequence[Sequence[int]], *, system: int = 0, sampled: float = 0.6
) -> TensorDict:
    """Random tokens: per prompt its length, and the lengths of what follows it in each sample of its group.

    Args:
        prompts: without the `system` tokens that all prompts begin with.
        responses: one inner list per prompt.
        sampled: share of a response that is trained, in runs of 32 tokens; the rest is what tools say.
    """
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(1, VOCAB), k=count)

    common, rows, masks, owners = tokens(system), [], [], []
    for number, (length, group) in enumerate(zip(prompts, responses, strict=True)):
        prompt = common + tokens(length)
        for size in group:
            rows.append(prompt + tokens(size))
            masks.append([0] * len(prompt) + [int(t % 32 < 32 * sampled) for t in range(size)])
            owners.append(number)
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    return TensorDict(
        {
            columns.INPUT_IDS: torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            columns.ATTENTION_MASK: torch.arange(width) < lengths[:, None],
            columns.LOSS_MASK: torch.tensor([mask + [0] * (width - len(mask)) for mask in masks]).bool(),
            columns.PROMPT_INDEX: torch.tensor(owners),
        },
        batch_size=[len(rows)],
    )


def in_order(batch: TensorDict, max_tokens: int) -> list[torch.Tensor]:
    """Padded micro-batches of rows as they come, rows times the longest row at most `max_tokens`."""
    parts: list[list[int]] = []
    longest = 0
    for row, length in enumerate(batch[columns.ATTENTION_MASK].sum(1).tolist()):
        longest = max(longest, length)
        if not parts or (len(parts[-1]) + 1) * longest > max_tokens:
            parts.append([])
            longest = length
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


def train(model: Any, batch: TensorDict, parts: Sequence[torch.Tensor], passes: Passes) -> float:
    """Seconds of forward and backward over the micro-batches; gradients are left in the model."""
    use_passes(model, passes)
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    for part in parts:
        rows = batch[part].to(model.device)
        output = forward_log_probs(
            model,
            rows[columns.INPUT_IDS],
            rows[columns.ATTENTION_MASK],
            wanted_BT=rows[columns.LOSS_MASK],
            temperature=1.0,
            with_entropy=True,
            entropy_grad=False,
        )
        output.log_probs_BT.sum().backward()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def padded_tokens(batch: TensorDict, parts: Sequence[torch.Tensor]) -> int:
    """Tokens of padded micro-batches, padding included."""
    lengths = batch[columns.ATTENTION_MASK].sum(1)
    return sum(len(part) * int(lengths[part].max()) for part in parts)


def worst_difference(model: Any, before: dict[str, torch.Tensor]) -> float:
    """Largest difference of a gradient, relative to the largest entry of its tensor."""
    now = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return max(float((now[name] - old).abs().max() / old.abs().max().clamp(min=1e-12)) for name, old in before.items())


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
