"""Rebuild the shipped tiny model: tokenizer, chat template and a warm start by plain supervised training.

    python recipes/tiny/build.py                        # writes verl_mt/tiny/checkpoint
    python recipes/tiny/build.py --out full --steps 600 --planned-steps 600 --stop-at 2   # not stopped early

The training stops at the first evaluation whose sampled accuracy reaches `--stop-at`. That evaluation uses fresh
problems of the `warm_start` split; held-out problems (`val`) are only looked at afterwards, for the printed report.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from demonstrations import Message, demonstrations, render
from solver import solve
from tokenizer import TEMPLATE, VOCAB_SIZE, build_tokenizer
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.tiny.problems import generate

BATCH = 32
PROMPT_WEIGHT = 0.1
"""Weight of tokens that are not the assistant's in the supervised loss: reading them teaches the vocabulary."""

OTHER_TEXTS = (
    "Your answer is not correct. Please check it and try again. Your answer is correct!",
    "Error: this is not an expression, only numbers and parentheses. Error: division by zero. Error: no such tool.",
    "Let us think step by step. First we add the numbers, then we multiply. The result of the call is right, so",
)
"""What tools and checkers may say: the demonstrations' words alone do not fill the vocabulary."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = _rendered(itertools.islice(demonstrations(seed=args.seed), 3000))
    build_tokenizer(itertools.chain(texts, OTHER_TEXTS), args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    torch.manual_seed(args.seed)
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {args.threads} threads", flush=True)

    step = warm_start(model, tokenizer, args)
    save(model, tokenizer, args.out)
    print(f"stopped after {step} steps; written to {args.out}")
    held_out = list(itertools.islice(generate(args.seed + 1, "val"), args.eval_problems * 2))
    for name, temperature in (("sampled, T=1", 1.0), ("greedy", 0.0)):
        print(f"held out, {name}: {solve(model, tokenizer, held_out, temperature=temperature)}", flush=True)


def new_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """About 0.89 million parameters of the Qwen3 architecture, freshly initialised from torch's global seed."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=384,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> int:
    """Supervised training until the sampled accuracy reaches `args.stop_at`; returns the steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 30, max(0.0, (args.planned_steps - s) / (args.planned_steps - 30)))
    )
    unseen = list(itertools.islice(generate(args.seed + 2, "warm_start"), args.eval_problems))
    batches = _batches(tokenizer, demonstrations(seed=args.seed + 3))
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
            report = solve(model, tokenizer, unseen, temperature=1.0)
            print(f"step {step}, {time.monotonic() - started:.0f} s, loss {loss.item():.3f}: {report}", flush=True)
            if report.accuracy >= args.stop_at:
                return step
    return args.steps


def _batches(
    tokenizer: PreTrainedTokenizerBase, conversations: Iterator[list[Message]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless right-padded ids and loss weights, both [B, T]."""
    pad = tokenizer.pad_token_id
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    while True:
        rows = [
            tokenizer.encode(render(tokenizer, next(conversations)), add_special_tokens=False) for _ in range(BATCH)
        ]
        width = max(map(len, rows))
        weights = [_weights(row, header, tokenizer.eos_token_id) for row in rows]
        yield (
            torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
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


def _rendered(conversations: Iterator[list[Message]]) -> Iterator[str]:
    """The texts that the tokenizer learns from; rendering needs no vocabulary."""
    renderer = Qwen2Tokenizer(chat_template=TEMPLATE.read_text())
    for conversation in conversations:
        yield render(renderer, conversation)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write weights, config and generation config beside the tokenizer."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(resolve_model_path(TINY_MODEL)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help="most steps of supervised training")
    parser.add_argument("--planned-steps", type=int, default=1200, help="where the learning rate would reach 0")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--stop-at", type=float, default=0.52, help="sampled accuracy that ends the training")
    parser.add_argument("--eval-from", type=int, default=150)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-problems", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
