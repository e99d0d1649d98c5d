r"""How an answer is written: its form, its length, its repetitions. ms-swift's registered names.

format        1.0 for `<think>...</think> <answer>...</answer>` and nothing around it, else 0.0
react_format  1.0 for `<think>...</think> Action: ... Action Input: ...` from the start, else 0.0
repetition    (1 - share of different n-grams of words) * max_penalty (Yeo et al. 2025, arXiv:2502.03373)
cosine        accuracy, scaled by the answer's length along half a cosine (the same paper)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.rewards.math_answer import MathAccuracy
from verl_mt.extensions.compat.rewards.orm import ORM

_THINK_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>\Z", re.DOTALL)
_THINK_ACTION = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:", re.DOTALL)


class Format(ORM):
    """`format`: the thoughts stand in `<think>` tags, behind them the answer in `<answer>` tags, and nothing else."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(_THINK_ANSWER.match(text) is not None) for text in completions]


class ReActFormat(ORM):
    """`react_format`: thoughts in `<think>` tags, then `Action:`, then `Action Input:`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(_THINK_ACTION.match(text) is not None) for text in completions]


class Repetition(ORM):
    """`repetition`: from 0 for a text without repeated n-grams to `max_penalty` for one that repeats a single one.

    Args:
        n_grams: words of an n-gram; a text with fewer words scores 0.
        max_penalty: the score of pure repetition; not positive.

    Raises:
        ConfigError: either is out of range.
    """

    def __init__(self, args: Any = None, n_grams: int = 3, max_penalty: float = -1.0):
        super().__init__(args)
        if n_grams < 1 or max_penalty > 0:
            raise ConfigError(
                f"reward repetition: n_grams must be at least 1 and max_penalty at most 0, got {n_grams}, {max_penalty}"
            )
        self.n_grams, self.max_penalty = n_grams, max_penalty

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self._score(text.lower().split()) for text in completions]

    def _score(self, words: Sequence[str]) -> float:
        grams = [tuple(words[k : k + self.n_grams]) for k in range(len(words) - self.n_grams + 1)]
        return self.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


class Cosine(ORM):
    r"""`cosine`: accuracy scaled by length, so that short right answers pay most and short wrong ones least.

    With t the tokens that the model wrote and T = max_len::

        score = at_max + (at_0 - at_max) * (1 + cos(pi * t / T)) / 2

    where (at_0, at_max) are the two values of right answers, or those of wrong ones.

    Args:
        max_len: T in tokens, normally `rollout.response_length`.
        min_len_value_correct, max_len_value_correct: of a right answer of 0, and of T, tokens.
        min_len_value_wrong, max_len_value_wrong: of a wrong one.

    Raises:
        PluginError: the package math-verify is not installed.
        ConfigError: `max_len` is not positive.
    """

    def __init__(
        self,
        max_len: int,
        args: Any = None,
        min_len_value_correct: float = 1.0,
        max_len_value_correct: float = 0.5,
        min_len_value_wrong: float = -0.5,
        max_len_value_wrong: float = 0.0,
    ):
        super().__init__(args)
        if max_len < 1:
            raise ConfigError(f"reward cosine: max_len must be at least 1 token, got {max_len}")
        self.max_len = max_len
        self._correct = (min_len_value_correct, max_len_value_correct)
        self._wrong = (min_len_value_wrong, max_len_value_wrong)
        self._accuracy = MathAccuracy()

    def __call__(  # type: ignore[override]
        self,
        completions: list[str],
        solution: list[Any],
        response_token_ids: list[list[Any]],
        **kwargs: Any,
    ) -> list[float]:
        right = self._accuracy(completions, solution)
        lengths = [sum(len(i) if isinstance(i, list) else 1 for i in ids) for ids in response_token_ids]  # or by turn
        return [self._score(score >= 1, length) for score, length in zip(right, lengths)]

    def _score(self, right: bool, tokens: int) -> float:
        at_0, at_max = self._correct if right else self._wrong
        return at_max + (at_0 - at_max) * (1 + math.cos(math.pi * tokens / self.max_len)) / 2
