"""The rows of a run, ready to roll out: loaded, rendered, counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.policy_loss import idle_clips
from verl_mt.config.reads import given_keys
from verl_mt.config.schema import Config, DataConfig
from verl_mt.data.dataset import load_rows
from verl_mt.data.sampler import RowSampler, build_sampler
from verl_mt.rollout.limits import is_multi_turn
from verl_mt.rollout.prompts import Prompt, PromptBuilder
from verl_mt.tools.registry import ToolSet


@dataclass(frozen=True)
class RunData:
    """Training rows in their order, and validation prompts."""

    sampler: RowSampler
    prompts: PromptBuilder
    val_prompts: list[Prompt]
    counts: dict[str, float]
    """`data/filtered_prompts` and `data/truncated_prompts` of the training rows, `val/...` of the validation rows."""


def load_data(config: Config, chat: ChatTemplate, tools: ToolSet | None) -> RunData:
    """Everything that `data.*` names.

    Raises:
        DataError: names the key, or the file, row and column.
    """
    data = config.data
    prompts = build_prompts(config, chat, tools)
    train = load_rows(
        data.train_files, split="train", num_rows=data.train_max_samples, seed=data.seed, **_columns(data)
    )
    for source in train:
        source.rows = prompts.keep(source.rows)
    filtered, truncated = prompts.num_filtered, prompts.num_truncated
    sampler = build_sampler(data, train, seed=data.seed)
    val_prompts = load_val_prompts(config, prompts)
    counts: dict[str, float] = {"data/filtered_prompts": filtered, "data/truncated_prompts": truncated}
    if val_prompts:
        counts["val/filtered_prompts"] = prompts.num_filtered - filtered
        counts["val/truncated_prompts"] = prompts.num_truncated - truncated
    return RunData(sampler, prompts, val_prompts, counts)


def build_prompts(config: Config, chat: ChatTemplate, tools: ToolSet | None) -> PromptBuilder:
    """What turns rows into prompts."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    length = data.max_prompt_length
    single_turn = rollout.multi_turn.enable is False
    return PromptBuilder(chat, tools, length, data.filter_overlong_prompts, data.truncation, single_turn)


def load_val_prompts(config: Config, prompts: PromptBuilder) -> list[Prompt]:
    """The prompts of `data.val_files`; empty where there are none."""
    data = config.data
    if data.val_files is None:
        return []
    sources = load_rows(
        data.val_files, split="val", num_rows=data.val_max_samples, seed=data.val_seed, **_columns(data)
    )
    return [p for source in sources for p in map(prompts.build, prompts.keep(source.rows)) if p is not None]


def _columns(data: DataConfig) -> dict[str, Any]:
    return {"prompt_key": data.prompt_key, "label_key": data.label_key}


def notes(config: Config, prompts: PromptBuilder) -> Iterator[str]:
    """What a person should know before the first step, a line each."""
    rollout = config.actor_rollout_ref.rollout
    tools, interaction = rollout.tool_kwargs.tools_config_file, rollout.interaction_config_file
    if prompts.num_filtered:
        yield f"{prompts.num_filtered} prompt(s) longer than {prompts.max_prompt_length} tokens left out"
    if prompts.num_truncated:
        yield f"{prompts.num_truncated} prompt(s) cut to {prompts.max_prompt_length} tokens ({prompts.truncation})"
    actor_and_ref = config.actor_rollout_ref
    if actor_and_ref.model.lora_rank and actor_and_ref.ref.offload:
        # verl's launch scripts set both.
        yield "ref.offload has nothing to move: with low-rank adapters the reference policy is the actor's frozen base"
    if "kl_coef" in config.algorithm.kl_ctrl and not config.algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.kl_coef is not read: algorithm.use_kl_in_reward is False"
    if config.algorithm.use_kl_in_reward and actor_and_ref.actor.use_kl_loss:
        yield "use_kl_in_reward and use_kl_loss: the reference policy holds twice, in the reward and in the loss"
    for name in idle_clips(actor_and_ref.actor.policy_loss):
        # Said, not refused: verl's launch scripts give all of them with every loss.
        if f"actor_rollout_ref.actor.{name}" in given_keys(config):
            yield f"actor.{name} is not read: {actor_and_ref.actor.policy_loss['loss_mode']} has no such bound"
    # Common in verl's data, whose rows serve runs with and without an interaction: said, not refused.
    named = sum("name" in row.interaction_kwargs for row in prompts.rows())
    if named and not interaction:
        yield f"{named} row(s) name an interaction (interaction_kwargs.name): ignored, without interaction_config_file"
    if is_multi_turn(config) and not tools and not interaction:
        yield (
            "multi_turn.enable is True, but neither tools nor an interaction are configured: "
            "every trajectory is one assistant turn"
        )
