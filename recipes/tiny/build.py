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
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from demonstrations import Message, demonstrations, render
from solver import solve
from supervised import add_arguments, batches_of, train
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
    unseen = list(itertools.islice(generate(args.seed + 2, "warm_start"), args.eval_problems))

    def examine() -> tuple[float, str]:
        report = solve(model, tokenizer, unseen, temperature=1.0)
        return report.accuracy, str(report)

    texts = (render(tokenizer, conversation) for conversation in demonstrations(seed=args.seed + 3))
    return train(model, batches_of(tokenizer, texts, BATCH), examine, args, warmup=30)


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
    add_arguments(parser)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.set_defaults(steps=600, planned_steps=1200, lr=3e-3, stop_at=0.52, eval_from=150, eval_every=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
