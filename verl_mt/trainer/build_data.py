"""The rows of a run, ready to roll out: loaded, rendered, counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.checks import means_nothing
from verl_mt.config.schema import Config, explicit_keys
from verl_mt.data.dataset import Columns, DataSource, Reading, entries_of, load_entry, with_system_text
from verl_mt.data.fingerprint import difference, fingerprint
from verl_mt.data.large_files import SAMPLE_ROWS, LargeRows, open_rows, rows_in_files
from verl_mt.data.sampler import RowSampler, build_sampler
from verl_mt.errors import CheckpointError
from verl_mt.rollout.drivers import has_own_loop
from verl_mt.rollout.prompts import Prompt, PromptBuilder
from verl_mt.tools.registry import ToolSet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """Training rows in their order, and validation prompts."""

    sampler: RowSampler
    prompts: PromptBuilder
    val_prompts: list[Prompt]
    counts: dict[str, float]
    """`data/filtered_prompts`, `data/truncated_prompts` and, where bad rows are left out, `data/bad_rows` of the
    training rows that were loaded; `val/...` of the validation rows."""
    fingerprint: dict[str, list[dict[str, Any]]]
    """`data.train_files` and `data.val_files` -> what is in their rows; see `data.fingerprint`."""


def load_data(config: Config, chat: ChatTemplate, tools: ToolSet | None) -> RunData:
    """Everything that `data.*` names.

    Raises:
        DataError: names the key, or the file, row and column.
    """
    data = config.data
    prompts = build_prompts(config, chat, tools)
    train = open_train_rows(config)
    rows = {"data.train_files": fingerprint(train)}
    for source in train:
        if isinstance(source.rows, LargeRows):
            prompts.num_unseen += len(source.rows)
            prompts.look_at(source.rows[:SAMPLE_ROWS])
        else:
            source.rows = prompts.keep(source.rows)
    of_training = _counts(prompts)
    sampler = build_sampler(data, train, seed=data.seed)
    validation = load_val_rows(config)
    rows["data.val_files"] = fingerprint(validation)
    val_prompts = _rendered(validation, prompts)
    counts = {f"data/{name}": count for name, count in of_training.items()}
    if val_prompts:
        counts |= {f"val/{name}": count - of_training[name] for name, count in _counts(prompts).items()}
    return RunData(sampler, prompts, val_prompts, counts, rows)


def _counts(prompts: PromptBuilder) -> dict[str, float]:
    found: dict[str, float] = {"filtered_prompts": prompts.num_filtered, "truncated_prompts": prompts.num_truncated}
    return found | ({"bad_rows": prompts.num_bad} if prompts.skips_bad else {})


def build_prompts(config: Config, chat: ChatTemplate, tools: ToolSet | None) -> PromptBuilder:
    """What turns rows into prompts."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    length = data.max_prompt_length
    single_turn = rollout.multi_turn.enable is False
    return PromptBuilder(
        chat, tools, length, data.filter_overlong_prompts, data.truncation, single_turn,
        reads_agent_name=not has_own_loop(rollout), skips_bad=data.on_bad_row == "skip",
    )  # fmt: skip


def load_val_prompts(config: Config, prompts: PromptBuilder) -> list[Prompt]:
    """The prompts of `data.val_files`; empty where there are none."""
    return _rendered(load_val_rows(config), prompts)


def open_train_rows(config: Config) -> list[DataSource]:
    """The rows of `data.train_files`; those of large files are read when they are asked for.

    Raises:
        DataError: names the key, or the file, row and column.
    """
    data = config.data
    return open_rows(data.train_files, _reading(config, "train", data.train_max_samples, data.seed), data.eager_rows)


def load_val_rows(config: Config) -> list[DataSource]:
    """The rows of `data.val_files`; empty where there are none. All of them: each validation samples every one."""
    data = config.data
    if data.val_files is None:
        return []
    reading = _reading(config, "val", data.val_max_samples, data.val_seed)
    if many_val_rows(config):
        log.warning(
            "data.val_files hold more than data.eager_rows=%d rows; all of them are loaded and rendered before the "
            "first step, and every validation samples all: data.val_max_samples takes fewer of each file",
            data.eager_rows,
        )
    return [load_entry(entry, reading) for entry in entries_of(data.val_files, "val")]


def many_val_rows(config: Config) -> bool:
    """Whether the files of `data.val_files` hold more rows than a run should load."""
    data = config.data
    entries = entries_of(data.val_files, "val")
    return rows_in_files(entries, data.val_max_samples, data.eager_rows) > data.eager_rows


def _reading(config: Config, split: str, num_rows: int, seed: int) -> Reading:
    columns = with_system_text(columns_of(config))
    return Reading(split, num_rows, seed, columns, keeps_bad=config.data.on_bad_row == "skip")


def require_same_rows(config: Config, folder: Path, saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Before a run goes on from a checkpoint: its rows are those that the run was started with. A run in a new
    directory may be validated on others: its curve begins there.

    Args:
        folder: the checkpoint.
        saved: the fingerprints in it; None in one that is older than fingerprints.
        now: `RunData.fingerprint`.

    Raises:
        CheckpointError: other rows; says where they differ first.
    """
    trainer = config.trainer
    if saved is None:
        log.warning("%s does not say which rows it was trained on: whether these are the same is not checked", folder)
        return
    trained = [] if trainer.val_only else ["data.train_files"]
    keys = [*trained, "data.val_files"] if trainer.resume_from_path is None else trained
    found = [words for key in keys if (words := difference(key, saved[key], now[key])) is not None]
    if found and trainer.resume_mode == "other_data":
        log.warning("%s was written with other rows, and goes on in these: %s", folder, "; ".join(found))
    elif found:
        raise CheckpointError(
            f"{folder} was written with other rows. {'; '.join(found)}. Give the data that the run was started with, "
            "start a new run (trainer.resume_mode=disable), or go on in these rows with trainer.resume_mode=other_data"
        )


def _rendered(sources: Sequence[DataSource], prompts: PromptBuilder) -> list[Prompt]:
    return [p for source in sources for p in map(prompts.build, prompts.keep(source.rows)) if p is not None]


def columns_of(config: Config) -> Columns:
    """What the configuration says of the rows' columns."""
    data, environment = config.data, config.actor_rollout_ref.rollout.environment
    as_it_is = not data.apply_chat_template
    return Columns(data.prompt_key, data.label_key, as_it_is, data.columns, data.system, environment.is_configured)


def notes(config: Config, prompts: PromptBuilder) -> Iterator[str]:
    """What a person should know before the first step, a line each."""
    rollout = config.actor_rollout_ref.rollout
    tools, interaction = rollout.tool_kwargs.tools_config_file, rollout.interaction_config_file
    if prompts.num_filtered:
        yield f"{prompts.num_filtered} prompt(s) longer than {prompts.max_prompt_length} tokens left out"
    if prompts.num_bad:
        yield f"{prompts.num_bad} row(s) that have no prompt left out (data.on_bad_row=skip)"
    if prompts.num_unseen:
        yield (
            f"{prompts.num_unseen:,} training rows lie in files that are not loaded (more than data.eager_rows="
            f"{config.data.eager_rows:,}): they are read, rendered and checked when they are drawn. An epoch is all of "
            "them. Prompts that are too long are skipped, others drawn in their place, counted in that step "
            "(data/filtered_prompts)"
        )
    if prompts.num_truncated:
        yield f"{prompts.num_truncated} prompt(s) cut to {prompts.max_prompt_length} tokens ({prompts.truncation})"
    if prompts.num_control:
        yield (
            f"{prompts.num_control} prompt(s) hold control tokens in a user's text ({prompts.first_control}): the "
            "model sees the end of a turn there. Take them out of the rows, or set "
            "actor_rollout_ref.model.trust_prompts=False to keep them as plain text"
        )
    actor_and_ref = config.actor_rollout_ref
    if actor_and_ref.model.lora_rank and actor_and_ref.ref.offload:
        # verl's launch scripts set both.
        yield "ref.offload has nothing to move: with low-rank adapters the reference policy is the actor's frozen base"
    if "kl_coef" in config.algorithm.kl_ctrl and not config.algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.kl_coef is not read: algorithm.use_kl_in_reward is False"
    if config.algorithm.use_kl_in_reward and actor_and_ref.actor.use_kl_loss:
        yield "use_kl_in_reward and use_kl_loss: the reference policy holds twice, in the reward and in the loss"
    # Said, not refused: verl's launch scripts give all of them with every loss.
    for key in sorted(explicit_keys(config) & means_nothing(config)):
        if key.startswith("actor_rollout_ref.actor.clip_ratio"):
            name = key.removeprefix("actor_rollout_ref.")
            yield f"{name} is not read: {actor_and_ref.actor.policy_loss['loss_mode']} has no such bound"
    # Common in verl's data, whose rows serve runs with and without an interaction: said, not refused.
    named = sum("name" in row.interaction_kwargs for row in prompts.rows())
    if named and not interaction:
        of_them = " of those looked at" if prompts.num_unseen else ""
        without = "ignored, without interaction_config_file"
        yield f"{named} row(s){of_them} name an interaction (interaction_kwargs.name): {without}"
    turns = rollout.multi_turn
    if turns.enable and not tools and not interaction and not has_own_loop(rollout):
        yield (
            "multi_turn.enable is True, but neither tools nor an interaction are configured: "
            "every trajectory is one assistant turn"
        )
