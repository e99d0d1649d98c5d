"""Two-turn episodes for the build: sample, run the calculator, sample again, with the KV cache kept in between."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from demonstrations import Message, demonstration, prompt_messages, render
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from verl_mt.errors import ToolCallError
from verl_mt.rewards.arithmetic import compute_score
from verl_mt.tiny.problems import Problem
from verl_mt.tools.calculator import calculate

MAX_TOKENS_PER_TURN = 48
_BATCH = 250

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Episode:
    """What became of one problem."""

    correct: bool
    called: bool
    truncated: bool
    num_sampled_tokens: int


@dataclass(frozen=True)
class Report:
    """Means over episodes; `num_prompt_tokens` is the mean length of the first prompt."""

    accuracy: float
    accuracy_by_operations: dict[int, float]
    calls_per_episode: float
    truncated: float
    num_sampled_tokens: float
    num_prompt_tokens: float

    def __str__(self) -> str:
        by_operations = " ".join(f"{n}-op {a:.3f}" for n, a in self.accuracy_by_operations.items())
        return (
            f"accuracy {self.accuracy:.3f} ({by_operations}), {self.calls_per_episode:.2f} calls per episode, "
            f"{self.truncated:.1%} truncated, {self.num_sampled_tokens:.1f} sampled and "
            f"{self.num_prompt_tokens:.1f} prompt tokens"
        )


class Decoder:
    """A batch of conversations as one KV cache; holes left by padding are masked, positions do not count them."""

    def __init__(self, model: PreTrainedModel, num_rows: int, pad_id: int, end_id: int) -> None:
        self.model, self.pad_id, self.end_id = model, pad_id, end_id
        self.cache = DynamicCache(config=model.config)
        self.mask_BT = torch.zeros(num_rows, 0, dtype=torch.long)

    def feed(self, rows: list[list[int]]) -> torch.Tensor:
        """Append `rows` (they may differ in length, also 0); returns the logits after each row's last token, [B, V]."""
        width = max(map(len, rows))
        ids_BT = torch.tensor([row + [self.pad_id] * (width - len(row)) for row in rows])
        new_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        positions_BT = (self.mask_BT.sum(1, keepdim=True) + new_BT.cumsum(1) - 1).clamp(min=0)
        self.mask_BT = torch.cat([self.mask_BT, new_BT], dim=1)
        logits_BTV = self.model(
            input_ids=ids_BT, attention_mask=self.mask_BT, position_ids=positions_BT, past_key_values=self.cache
        ).logits
        last_B = (new_BT.sum(1) - 1).clamp(min=0)
        return logits_BTV[torch.arange(len(rows)), last_B]

    def turn(self, rows: list[list[int]], temperature: float, generator: torch.Generator) -> list[list[int]]:
        """Feed `rows` and sample one turn for every row that is not empty."""
        logits_BV = self.feed(rows)
        turns: list[list[int]] = [[] for _ in rows]
        live = [bool(row) for row in rows]
        for _ in range(MAX_TOKENS_PER_TURN):
            if temperature == 0:
                ids_B = logits_BV.argmax(-1)
            else:
                ids_B = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)[:, 0]
            for b, token in enumerate(ids_B.tolist()):
                if live[b]:
                    turns[b].append(token)
            # The end of turn is fed too: the observation that follows stands after it.
            logits_BV = self.feed([[turn[-1]] if on else [] for turn, on in zip(turns, live)])
            live = [on and turn[-1] != self.end_id for turn, on in zip(turns, live)]
            if not any(live):
                break
        return turns


def tool_text(expression: str) -> str:
    """What the calculator answers; its errors are text that the model reads."""
    try:
        return calculate(expression)
    except ToolCallError as error:
        return f"Error: {error}"


def parse_call(text: str, tool: str, argument: str) -> str | None:
    """The argument of a well-formed call of the tool, else None."""
    found = _CALL.search(text)
    try:
        call = json.loads(found.group(1)) if found else None
        return str(call["arguments"][argument]) if call and call["name"] == tool else None
    except (ValueError, KeyError, TypeError):
        return None


@torch.no_grad()
def solve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    temperature: float,
    seed: int = 0,
) -> Report:
    """Let the model solve `problems`; temperature 0 is greedy."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    episodes: list[Episode] = []
    texts = [render(tokenizer, prompt_messages(problem), add_generation_prompt=True) for problem in problems]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for at in range(0, len(problems), _BATCH):
        episodes += _episodes(
            model, tokenizer, problems[at : at + _BATCH], prompts[at : at + _BATCH], temperature, generator
        )
    return Report(
        accuracy=_mean(e.correct for e in episodes),
        accuracy_by_operations={
            n: _mean(e.correct for e, p in zip(episodes, problems) if p.num_operations == n)
            for n in sorted({p.num_operations for p in problems})
        },
        calls_per_episode=_mean(e.called for e in episodes),
        truncated=_mean(e.truncated for e in episodes),
        num_sampled_tokens=_mean(e.num_sampled_tokens for e in episodes),
        num_prompt_tokens=_mean(len(p) for p in prompts),
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _episodes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    prompts: list[list[int]],
    temperature: float,
    generator: torch.Generator,
) -> list[Episode]:
    """One batch of conversations, from prompt to score."""
    decoder = Decoder(model, len(problems), tokenizer.pad_token_id, tokenizer.eos_token_id)
    first = decoder.turn(prompts, temperature, generator)
    texts = [str(tokenizer.decode(turn)) for turn in first]
    ended = [turn[-1] == tokenizer.eos_token_id for turn in first]
    expressions = [parse_call(text, "calculator", "expression") if end else None for text, end in zip(texts, ended)]
    before, after = observation_frame(demonstration(Problem("", "1", 1, 0)), partial(render, tokenizer))
    observations = [
        [] if e is None else tokenizer.encode(before + tool_text(e) + after, add_special_tokens=False)
        for e in expressions
    ]
    second = decoder.turn(observations, temperature, generator) if any(observations) else [[] for _ in first]
    episodes = []
    for problem, turns, expression in zip(problems, zip(first, second), expressions):
        last = turns[1] or turns[0]
        final = tokenizer.decode(last, skip_special_tokens=True)
        episodes.append(
            Episode(
                correct=compute_score(final, problem.answer)["score"] == 1.0,
                called=expression is not None,
                truncated=last[-1] != tokenizer.eos_token_id,
                num_sampled_tokens=len(turns[0]) + len(turns[1]),
            )
        )
    return episodes


def observation_frame(conversation: list[Message], rendered: Callable[..., str]) -> tuple[str, str]:
    """What the template writes before and after a tool's text, from the end-of-turn token on.

    Args:
        conversation: its fourth message is a tool's.
        rendered: (messages, add_generation_prompt=False) -> the text.
    """
    messages = [dict(message) for message in conversation[:4]]
    mark = messages[3]["content"] = "\ue000"
    turn = rendered(messages[:3])
    before, after = rendered(messages, add_generation_prompt=True)[len(turn.rstrip("\n")) :].split(mark)
    return before, after
