"""No silent key: what a user has set and nobody reads is refused at start; who reads what is written down.

`config_reads.json` of the run directory has, for every key, the modules that read it while the run was put together,
or that will read it later (`LATER`). It says who could have noticed a value, not that the value made a difference.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl_mt.config.algorithm_checks import PER_TOKEN
from verl_mt.config.policy_losses import read_policy_loss
from verl_mt.config.reads import KeyReads, given_keys, recording
from verl_mt.config.schema import Config, leaves
from verl_mt.data.run_files import writing
from verl_mt.errors import ConfigError

FILE = "config_reads.json"
T = TypeVar("T")

_MODEL, _ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{name}." for name in ("model", "actor", "rollout", "ref"))

LATER: dict[str, tuple[str, ...]] = {
    "verl_mt.workers": tuple(
        _ACTOR + name
        for name in (
            "optim.lr_warmup_steps", "optim.lr_scheduler_type", "optim.min_lr_ratio", "ppo_micro_batch_size",
            "ppo_max_token_len", "shuffle", "loss_agg_mode", "entropy_coeff", "grad_clip", "skip_zero_advantage",
            "use_sampler_log_probs", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
        )
    ),
    "verl_mt.trainer.advantage_step": ("algorithm.norm_adv_by_std_in_grpo",),
    "verl_mt.trainer.ppo_trainer": ("trainer.val_before_train", "trainer.val_only"),
}  # fmt: skip
"""Room or module -> keys that it reads when a step needs them, whatever the configuration."""

_LATER_IF: tuple[tuple[Callable[[Config], bool], str, tuple[str, ...]], ...] = (
    (
        lambda c: c.actor_rollout_ref.actor.use_kl_loss,
        "verl_mt.workers",
        (_ACTOR + "kl_loss_coef", _ACTOR + "kl_loss_type", _REF),
    ),
    (lambda c: c.trainer.placement == "ray", "verl_mt.workers", (_MODEL, _ACTOR)),
    (lambda c: c.algorithm.adv_estimator == "gae", "verl_mt.workers", ("critic.",)),
    (
        lambda c: c.algorithm.adv_estimator in PER_TOKEN,
        "verl_mt.trainer.advantage_step",
        ("algorithm.gamma", "algorithm.lam"),
    ),
    (lambda c: c.algorithm.use_kl_in_reward, "verl_mt.trainer.advantage_step", ("algorithm.kl_", _REF)),
    (lambda c: c.algorithm.filter_groups.enable, "verl_mt.trainer.dynamic_sampling", ("algorithm.filter_groups.",)),
    (lambda c: _function_of_ones_own(c) is not None, "code of your own (args)", ("data.", _ROLLOUT, "reward.")),
)
"""(when, room or module, keys or beginnings of keys)."""

_ECHO = {"verl_mt.rollout.generate.args"}
"""Hands everything on to generate and reward functions of one's own: a use only where there is one."""


@dataclass(frozen=True)
class _Need:
    """What a key is for."""

    start: str
    """The beginning of the keys."""
    who: str
    switches: tuple[str, ...]
    """Who has given one of these has said that the keys are to rest: verl's launch scripts set
    `use_kl_loss=False kl_loss_type=low_var_kl`, and `data.val_files=null` switches a validation off."""


_TOOLS = (f"{_ROLLOUT}tool_kwargs.tools_config_file", f"{_ROLLOUT}interaction_config_file")
_NEEDS = (
    _Need("critic.", "the critic", ("algorithm.adv_estimator",)),
    _Need(_REF, "the reference policy", (f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward")),
    _Need(_ACTOR + "clip_ratio", "another loss", (f"{_ACTOR}policy_loss",)),
    _Need(_ACTOR + "kl_loss_", "the KL term", (f"{_ACTOR}use_kl_loss",)),
    _Need(_MODEL + "lora_", "low-rank adapters", (f"{_MODEL}lora_rank",)),
    _Need(_ROLLOUT + "multi_turn.", "tools or an interaction", (*_TOOLS, f"{_ROLLOUT}multi_turn.enable")),
    _Need(_ROLLOUT + "val_kwargs.", "validation", ("data.val_files",)),
    _Need("data.val_", "validation", ("data.val_files",)),
    _Need("data.apply_chat_template", "a generate function", (f"{_ROLLOUT}custom_generate_function_path",)),
    _Need("reward.overlong_buffer.", "the penalty", ("reward.overlong_buffer.enable",)),
    _Need("algorithm.filter_groups.", "dynamic sampling", ("algorithm.filter_groups.enable",)),
    _Need("algorithm.kl_", "the KL penalty", ("algorithm.use_kl_in_reward",)),
    _Need("algorithm.", "another estimator", ("algorithm.adv_estimator",)),
    _Need("trainer.collapse_guard_", "the guard", ("trainer.collapse_guard",)),
    _Need(_ROLLOUT, "another engine", (f"{_ROLLOUT}name",)),
)

ALLOWED = {
    "trainer.experiment_name": "names the run directory, as trainer.default_local_dir does",
    "trainer.project_name": "is for trackers; verl's launch scripts give it to every run",
    "trainer.dry_run": "is for the command",
    "algorithm.kl_ctrl": "verl's launch scripts give its kl_coef; the start says that it is idle",
    _REF + "log_prob_max_token_len": "verl's launch scripts give it to every run",
    _REF + "offload": "verl's launch scripts give it to every run",
}
"""Keys that may always be set and idle, and why."""

_current: ContextVar[KeyReads | None] = ContextVar("verl_mt_key_reads", default=None)


def reads_recorded(start: Callable[..., T]) -> Callable[..., T]:
    """Decorates what puts a run together from its config, the first argument."""

    @functools.wraps(start)
    def recorded(config: Config, *args: Any, **kwargs: Any) -> T:
        with recording(config) as reads:
            token = _current.set(reads)
            try:
                return start(config, *args, **kwargs)
            finally:
                _current.reset(token)

    return recorded


def refuse_silent_keys() -> dict[str, list[str]]:
    """Call at the end of the start.

    Returns:
        Key -> its readers, those of later steps included.

    Raises:
        ConfigError: keys that the user has set to another value than the default and that nobody reads, though
            nothing the user has set says that they are to rest.
    """
    reads = _current.get()
    assert reads is not None, "the start is recorded"
    config, found, given = reads.config, readers(reads), given_keys(reads.config)
    idle = [
        key
        for key in sorted(given)
        if key in found and not found[key] and key not in ALLOWED and _value(config, key) != leaves()[key].default
    ]
    problems = []
    for key in idle:
        need = next((n for n in _NEEDS if key.startswith(n.start)), None)
        if need is None or not given.intersection(need.switches):
            use = "leave it out" if need is None else f"it is for {need.who} ({' or '.join(need.switches)})"
            problems.append(f"{key}={_value(config, key)!r} is read by nothing in this run: {use}")
    if problems:
        raise ConfigError("\n".join([*problems, "Switch on what they are for, or leave them out"]))
    return found


def readers(reads: KeyReads) -> dict[str, list[str]]:
    """Key -> who read it, or will."""
    found = {key: set(reads[key]) - _ECHO for key in leaves()}
    for module, keys in LATER.items():
        for key in keys:
            found[key].add(module)
    for when, module, starts in _LATER_IF:
        if when(reads.config):
            for key in found:
                if key.startswith(starts):
                    found[key].add(module)
    for key in _not_for_workers(reads.config):
        found[key].discard("verl_mt.workers")
    return {key: sorted(modules) for key, modules in found.items()}


def _not_for_workers(config: Config) -> list[str]:
    """Of what workers may read, the keys that this configuration gives no use."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    keys = [_ACTOR + name for name in read_policy_loss(actor.policy_loss).idle_clips]
    if not actor.use_kl_loss:
        keys += [_ACTOR + "kl_loss_coef", _ACTOR + "kl_loss_type"]
    if not model.lora_rank:
        keys += [_MODEL + "lora_alpha", _MODEL + "lora_target_modules"]
    return keys


def write_reads(folder: Path, found: dict[str, list[str]]) -> None:
    """`config_reads.json`."""
    with writing(folder / FILE):
        (folder / FILE).write_text(json.dumps(found, indent=1) + "\n")


def _function_of_ones_own(config: Config) -> str | None:
    rollout = config.actor_rollout_ref.rollout
    return rollout.custom_generate_function_path or rollout.agent_function_path or config.reward.path


def _value(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
