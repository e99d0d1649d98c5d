"""Make the model that `run_boxes.sh` trains: supervised training on searches, stopped early.

    python recipes/search/tiny/make_checkpoint.py          # writes recipes/search/tiny/checkpoint

It begins with the shipped calculator model: that one writes tool calls and copies digits already. Demonstrations come
from the boxes of the `warm_start` split, which nothing else uses; so do the questions whose accuracy, sampled at T = 1,
ends the training. One thread: the same machine and versions give the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tiny"))  # the calculator's recipe

import torch
from box_demonstrations import demonstration, prompt_messages, render
from solver import Decoder, observation_frame, parse_call
from supervised import add_arguments, batches_of, train
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM
from world import boxes, questions

from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.retrieval.lexical import BM25Index
from verl_mt.rewards.exact_match import compute_score
from verl_mt.tools.search_client import NO_RESULTS, format_documents

BATCH = 16
_EVAL_BATCH = 250


def main() -> None:
    """See the module."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    begin_with = resolve_model_path(TINY_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(begin_with)
    model = Qwen3ForCausalLM.from_pretrained(begin_with, dtype=torch.float32)
    exam = Exam(args.seed + 2, args.eval_problems)

    def examine() -> tuple[float, str]:
        right, found = exam.accuracy(model, tokenizer)
        return right, f"accuracy {right:.3f}, right passage {found:.3f}"

    texts = (render(tokenizer, demonstration(question)) for question in questions(args.seed + 3, "warm_start"))
    step = train(model, batches_of(tokenizer, texts, BATCH), examine, args, warmup=20)
    model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(Path(begin_with) / name, args.out / name)
    print(f"stopped after {step} steps; written to {args.out}")
    print("greedy accuracy {:.3f}, right passage {:.3f}".format(*exam.accuracy(model, tokenizer, temperature=0.0)))


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
    def accuracy(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float = 1.0
    ) -> tuple[float, float]:
        """Shares of questions answered right, and of those whose search found the right passage."""
        model.eval()
        rendered = partial(render, tokenizer)
        before, after = observation_frame(demonstration(self.questions[0]), rendered)
        generator = torch.Generator().manual_seed(0)
        right = found = 0
        for at in range(0, len(self.questions), _EVAL_BATCH):
            asked = self.questions[at : at + _EVAL_BATCH]
            prompts = [rendered(prompt_messages(q), add_generation_prompt=True) for q in asked]
            decoder = Decoder(model, len(asked), tokenizer.pad_token_id, tokenizer.eos_token_id)
            first = decoder.turn(_encode(tokenizer, prompts), temperature, generator)
            queries = [parse_call(str(tokenizer.decode(turn)), "search", "query") for turn in first]
            seen = [None if query is None else self.search(query) for query in queries]
            observed = _encode(tokenizer, ["" if text is None else before + text + after for text in seen])
            second = decoder.turn(observed, temperature, generator) if any(observed) else first
            for question, text, turn in zip(asked, seen, second):
                final = tokenizer.decode(turn, skip_special_tokens=True)
                right += compute_score(final, question.answer) == 1.0
                found += text is not None and f"Title: box {question.box.number})" in text
        return right / len(self.questions), found / len(self.questions)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) if text else [] for text in texts]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "checkpoint")
    add_arguments(parser)
    parser.set_defaults(steps=200, planned_steps=600, lr=2e-3, stop_at=0.25, eval_from=44, eval_every=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
