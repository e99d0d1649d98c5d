"""Make the model that `run_boxes.sh` trains: supervised training on searches, stopped early.

    python recipes/search/tiny/make_checkpoint.py          # writes recipes/search/tiny/checkpoint

It begins with the shipped calculator model: that one writes tool calls and copies digits already. Demonstrations come
from the boxes of the `warm_start` split, which nothing else uses; so do the questions whose accuracy ends the training.
One thread: the same machine and versions give the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tiny"))  # the calculator's recipe

import torch
from box_demonstrations import demonstration, prompt_messages, render
from solver import Decoder
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM
from world import Question, boxes, questions

from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.retrieval.lexical import BM25Index
from verl_mt.rewards.exact_match import compute_score
from verl_mt.tools.search_client import NO_RESULTS, format_documents

BATCH = 16
PROMPT_WEIGHT = 0.1
"""Weight of tokens that are not the assistant's in the loss."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_EVAL_BATCH = 200


def main() -> None:
    """See the module."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    begin_with = resolve_model_path(TINY_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(begin_with)
    model = Qwen3ForCausalLM.from_pretrained(begin_with, dtype=torch.float32)
    step = warm_start(model, tokenizer, args)
    model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(Path(begin_with) / name, args.out / name)
    print(f"stopped after {step} steps; written to {args.out}")


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> int:
    """Supervised training until the greedy accuracy reaches `args.stop_at`; returns the steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 20, max(0.0, (args.planned_steps - s) / (args.planned_steps - 20)))
    )
    exam = Exam(args.seed + 2, args.eval_questions)
    batches = _batches(tokenizer, questions(args.seed + 3, "warm_start"))
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
            greedy, searched = exam.accuracy(model, tokenizer)
            print(
                f"step {step}, {time.monotonic() - started:.0f} s, loss {loss.item():.3f}: "
                f"greedy accuracy {greedy:.3f}, right passage {searched:.3f}",
                flush=True,
            )
            if greedy >= args.stop_at:
                return step
    return args.steps


class Exam:
    """Unseen questions of the `warm_start` split, answered with real BM25 over all boxes of that split."""

    def __init__(self, seed: int, num_questions: int):
        self.questions = list(itertools.islice(questions(seed, "warm_start"), num_questions))
        self.passages = [{"contents": box.passage} for box in boxes(seed * 1000, "warm_start")]
        self.index = BM25Index(self.passages)

    def search(self, query: str) -> str:
        """What the search tool answers with topk 1."""
        (hits,) = self.index.search([query], topk=1)
        return format_documents([self.passages[position]["contents"] for position, _ in hits]) or NO_RESULTS

    @torch.no_grad()
    def accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, float]:
        """Shares of questions answered right, and of those whose search found the right passage; greedy."""
        model.eval()
        before, after = _frame(tokenizer)
        unused = torch.Generator()  # greedy
        right = found = 0
        for at in range(0, len(self.questions), _EVAL_BATCH):
            asked = self.questions[at : at + _EVAL_BATCH]
            prompts = [render(tokenizer, prompt_messages(q), add_generation_prompt=True) for q in asked]
            decoder = Decoder(model, len(asked), tokenizer.pad_token_id, tokenizer.eos_token_id)
            first = decoder.turn(_encode(tokenizer, prompts), 0.0, unused)
            queries = [_query(tokenizer.decode(turn)) for turn in first]
            seen = [None if query is None else self.search(query) for query in queries]
            observed = _encode(tokenizer, ["" if text is None else before + text + after for text in seen])
            second = decoder.turn(observed, 0.0, unused) if any(observed) else first
            for question, text, turn in zip(asked, seen, second):
                final = tokenizer.decode(turn, skip_special_tokens=True)
                right += compute_score(final, question.answer) == 1.0
                found += text is not None and f"Title: box {question.box.number})" in text
        return right / len(self.questions), found / len(self.questions)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) if text else [] for text in texts]


def _query(text: str) -> str | None:
    """The query of a well-formed call that ended its turn, else None."""
    found = _CALL.search(text)
    try:
        call = json.loads(found.group(1)) if found else None
        return str(call["arguments"]["query"]) if call and call["name"] == "search" else None
    except (ValueError, KeyError, TypeError):
        return None


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes before and after a tool's text, from the end-of-turn token on."""
    messages = demonstration(next(questions(0, "warm_start")))[:4]
    mark = messages[3]["content"] = "\ue000"
    rendered = render(tokenizer, messages, add_generation_prompt=True)
    turn = render(tokenizer, messages[:3])
    before, after = rendered[len(turn.rstrip("\n")) :].split(mark)
    return before, after


def _batches(
    tokenizer: PreTrainedTokenizerBase, asked: Iterator[Question]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless right-padded ids and loss weights, both [B, T]."""
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    while True:
        rows = _encode(tokenizer, [render(tokenizer, demonstration(next(asked))) for _ in range(BATCH)])
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="most steps of supervised training")
    parser.add_argument("--planned-steps", type=int, default=600, help="where the learning rate would reach 0")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--stop-at", type=float, default=0.25, help="greedy accuracy that ends the training")
    parser.add_argument("--eval-from", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=1)
    parser.add_argument("--eval-questions", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
