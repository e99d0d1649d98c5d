"""Checks of the keys that compat's rollout drivers and debug data read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_mt.config.declare import conflicts
from verl_mt.config.extended import ConfigSections
from verl_mt.config.schema import Config

_ROLLOUT = "actor_rollout_ref.rollout"


def _problems(config: Config) -> Iterator[str]:
    yield from _problems_of_drivers(config)
    trainer = config.trainer
    saved, trains_only = trainer.debug_rollout_data, trainer.debug_mode == "train_only"
    is_run = saved is not None and trains_only and Path(saved).expanduser().is_dir()
    if saved is not None and "{rollout_id}" not in saved and not is_run:
        yield (
            f"trainer.debug_rollout_data is {saved!r}: write {{rollout_id}} into it, or with "
            "trainer.debug_mode=train_only name a run directory, whose rollout rows are read then"
        )
    if trains_only and (saved is None or trainer.val_only):
        yield (
            "trainer.debug_mode=train_only trains on saved rollouts and samples nothing: it needs "
            "trainer.debug_rollout_data, and does not go with trainer.val_only"
        )


def _problems_of_drivers(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, interaction = rollout.multi_turn, rollout.interaction_config_file
    function = rollout.custom_generate_function_path
    one_turn = {f"{_ROLLOUT}.multi_turn.enable": "False" if turns.enable is False else None}
    if function is not None:
        key = f"{_ROLLOUT}.custom_generate_function_path={function}"
        decided_by_it = {
            f"{_ROLLOUT}.interaction_config_file": interaction,
            f"{_ROLLOUT}.multi_turn.scheduler": turns.scheduler,
            f"{_ROLLOUT}.multi_turn.use_inference_chat_template": turns.use_inference_chat_template,
            f"{_ROLLOUT}.multi_turn.loss_scale": turns.loss_scale,
            f"{_ROLLOUT}.multi_turn.train_prompt_assistants": turns.train_prompt_assistants,
            **one_turn,
        }
        yield from conflicts(decided_by_it, key, "the function decides what the model is answered and what is trained")
        if rollout.mode == "sync":
            yield (
                f"{_ROLLOUT}.mode=sync waits until every conversation asks for a turn, which agents that wait for each "
                "other never do: use mode=async with a custom generate function"
            )
    if turns.scheduler is not None:
        given = {f"{_ROLLOUT}.interaction_config_file": interaction, **one_turn}
        why = "a scheduler takes several turns, and decides itself what the model is answered"
        yield from conflicts(given, f"{_ROLLOUT}.multi_turn.scheduler={turns.scheduler}", why)


SECTIONS = ConfigSections({}, problems=_problems)
