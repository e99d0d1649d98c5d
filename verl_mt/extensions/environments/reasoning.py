"""reasoning_gym: about 100 families of generated tasks, each answered in one turn."""

from __future__ import annotations

import re
from typing import Any

from verl_mt.environments.base import Done, Environment
from verl_mt.errors import PluginError

ANSWER = r"<answer>(.*?)</answer>"


class ReasoningGym(Environment):
    """A task of a seed. The score is the family's own, for the text in the last `<answer>`, or for the whole text where
    there is none.

    Args:
        task: the family (`spell_backward`); `reasoning_gym.factory.DATASETS` lists them.
        answer_pattern: a regular expression whose group is the answer, for models that do not write `<answer>`.
        config: the family's own settings (`min_word_len=3`).

    Raises:
        PluginError: `reasoning_gym` is not installed, or `answer_pattern` is no regular expression with one group.
    """

    def __init__(self, task: str, answer_pattern: str = ANSWER, **config: Any):
        try:
            self._answer = re.compile(answer_pattern, re.DOTALL)
        except re.error as error:
            raise PluginError(f"answer_pattern {answer_pattern!r} is no regular expression: {error}") from error
        if self._answer.groups != 1:
            raise PluginError(f"answer_pattern {answer_pattern!r} has {self._answer.groups} groups. It needs one")
        try:
            import reasoning_gym
        except ImportError as error:
            raise PluginError(f"reasoning_gym cannot be imported ({error}): pip install reasoning-gym") from error
        self._make = lambda seed: reasoning_gym.create_dataset(task, seed=seed, size=1, **config)
        self._score = 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """The question of this seed."""
        self._tasks = self._make(seed)
        self._entry = self._tasks[0]
        return str(self._entry["question"])

    def reply(self, text: str) -> str:
        """Score the answer; the episode is over."""
        found = self._answer.findall(text)
        self._score = float(self._tasks.score_answer(answer=(found[-1] if found else text).strip(), entry=self._entry))
        raise Done("")

    def score(self) -> float:
        """Of the answer; 0 where there is none."""
        return self._score
