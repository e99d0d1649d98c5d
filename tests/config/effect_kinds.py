"""An entry of `key_effects.py`, and the circumstances under which keys matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import effect_parts as parts
from effect_probes import Probe

RO, AC, MO = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
MT = f"{RO}.multi_turn"
TINY_ROWS = "verl_mt.tiny.problems:rows"
OWN = (f"{MO}.path=verl_mt://tiny", f"data.train_files={TINY_ROWS}")
"""No tools, no validation: nothing of the default task."""
VALIDATES = (f"data.val_files={TINY_ROWS}", "trainer.val_before_train=True")
NOT_VALIDATED = ("data.val_files=null",)
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", *NOT_VALIDATED)
OFF_POLICY = (f"{AC}.ppo_epochs=4", f"{AC}.optim.lr=1e-2", *NOT_VALIDATED)
"""Ratios far from 1."""
MINI = (f"{AC}.ppo_mini_batch_size=1", *NOT_VALIDATED)
KL = (f"{AC}.use_kl_loss=True", f"{AC}.kl_loss_coef=0.5", f"{AC}.optim.lr=3e-2", *NOT_VALIDATED)
NO_TOOLS = f"{RO}.tool_kwargs.tools_config_file=null"
GENERATES = (f"{RO}.custom_generate_function_path=effect_parts:generate", NO_TOOLS)
BROKEN_HUB = (f"{MO}.path=nobody/none",)


@dataclass(frozen=True)
class Effect:
    """One key."""

    value: str | Callable[[], str]
    """Another value than the default, as an override writes it."""
    what: str
    """What is different."""
    probe: Probe
    context: tuple[str | Callable[[], str], ...] = ()
    """Overrides of both sides."""
    base: str | None = None
    """The value on the other side; None = as the context leaves it."""
    refused: str = ""
    """What is said where one of the sides, or both, are refused."""
    quick: bool = False


def tool(name: str) -> Callable[[], str]:
    return lambda: f"{RO}.tool_kwargs.tools_config_file={parts.tools_file(name)}"


def user(name: str) -> Callable[[], str]:
    return lambda: f"{RO}.interaction_config_file={parts.interaction_file(name)}"
