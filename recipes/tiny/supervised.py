"""Supervised training that stops early: what the warm starts of this recipe and of others have in common."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT_WEIGHT = 0.1
"""Weight of tokens that are not the assistant's in the loss: reading them teaches the vocabulary."""

Batch = tuple[torch.Tensor, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `train` reads; a recipe sets its own defaults with `parser.set_defaults`."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="most steps of supervised training")
    parser.add_argument("--planned-steps", type=int, help="where the learning rate would reach 0")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--stop-at", type=float, help="sampled accuracy that ends the training")
    parser.add_argument("--eval-from", type=int)
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--eval-problems", type=int, default=500)


def train(
    model: PreTrainedModel,
    batches: Iterator[Batch],
    examine: Callable[[], tuple[float, str]],
    args: argparse.Namespace,
    *,
    warmup: int,
) -> int:
    """AdamW with a linear schedule until the accuracy reaches `args.stop_at`.

    Args:
        batches: ids and loss weights, both [B, T].
        examine: accuracy, and the text that is printed with it.
        args: see `add_arguments`.
        warmup: steps until the learning rate is reached.

    Returns:
        The steps taken.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.0, (args.planned_steps - s) / (args.planned_steps - warmup)))
    )
    started = time.monotonic()
    for step in range(1, args.steps + 1):
        model.train()
        loss = _loss(model, *next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0 and step >= args.eval_from:
            accuracy, report = examine()
            print(f"step {step}, {time.monotonic() - started:.0f} s, loss {loss.item():.3f}: {report}", flush=True)
            if accuracy >= args.stop_at:
                return step
    return args.steps


def batches_of(tokenizer: PreTrainedTokenizerBase, texts: Iterator[str], size: int) -> Iterator[Batch]:
    """Right-padded ids and loss weights, both [size, T], of endless rendered conversations."""
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    while True:
        rows = [tokenizer.encode(next(texts), add_special_tokens=False) for _ in range(size)]
        width = max(map(len, rows))
        weights = [_weights(row, header, tokenizer.eos_token_id) for row in rows]
        yield (
            torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]),
            torch.tensor([weight + [0.0] * (width - len(weight)) for weight in weights]),
        )


def _weights(ids: list[int], header: list[int], end: int) -> list[float]:
    """1 for the assistant's tokens, end of turn included, `PROMPT_WEIGHT` for the rest."""
    weights, inside = [], False
    for t, token in enumerate(ids):
        inside = inside or ids[t - len(header) : t] == header
        weights.append(1.0 if inside else PROMPT_WEIGHT)
        inside = inside and token != end
    return weights


def _loss(model: PreTrainedModel, ids_BT: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the next-token cross-entropy; right padding needs no attention mask under causality."""
    logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
    losses_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
    return (losses_BT * weights_BT[:, 1:]).sum() / weights_BT[:, 1:].sum()
