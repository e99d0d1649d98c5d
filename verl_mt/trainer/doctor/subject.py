"""What the doctor looks at: the configuration, and what its checks have made of it so far."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataSource
from verl_mt.interactions.base import BaseInteraction
from verl_mt.rewards.base import Reward
from verl_mt.rollout.prompts import Prompt
from verl_mt.tools.registry import ToolSet

MAX_ROWS = 16
"""Rows of each entry whose prompts are rendered."""


@dataclass
class Subject:
    """A run that has not begun."""

    config: Config
    chat: ChatTemplate | None = None
    tools: ToolSet | None = None
    reward: Reward | None = None
    interactions: dict[str, BaseInteraction] = field(default_factory=dict)
    module: Any = None
    """The model without weights (`meta` device)."""
    train: list[DataSource] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    """Rendered from the first rows of each training entry."""

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @property
    def known_chat(self) -> ChatTemplate:
        assert self.chat is not None, "a check that needs the template says so"
        return self.chat

    @property
    def num_rows(self) -> int:
        return sum(len(source.rows) for source in self.train)

    @property
    def num_ranks(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_workers_per_node

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens."""
        both = self.config.data.max_prompt_length + self.rollout.response_length
        return min(both, self.rollout.max_model_len or both)

    @property
    def total_steps(self) -> int:
        """As the run would count them."""
        trainer = self.config.trainer
        by_epochs = trainer.total_epochs * self.num_rows // self.config.data.train_batch_size
        wanted = trainer.total_training_steps
        return by_epochs if wanted is None else min(by_epochs, wanted)

    def few(self) -> list[Any]:
        """The first rows of each training entry."""
        return [row for source in self.train for row in source.rows[:MAX_ROWS]]

    def scratch_config(self) -> Config:
        """A copy to change."""
        return copy.deepcopy(self.config)
