"""What corrections against the sampler, and DAPO's parts, do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mt.config.options import RC, RolloutCorrectionOptions, read_rollout_correction
from verl_mt.config.policy_losses import POLICY_LOSSES
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
"""Estimators whose advantage of a trajectory does not depend on the others of its prompt."""


def corrections(config: Config) -> Iterator[str]:
    """Problems of `algorithm.rollout_correction`, `algorithm.filter_groups` and `reward.overlong_buffer`."""
    yield from _dapo(config)
    try:
        options = read_rollout_correction(config.algorithm.rollout_correction)
    except ConfigError as error:
        yield str(error)
        return
    given = _switches(options)
    actor = config.actor_rollout_ref.actor
    if given and actor.use_sampler_log_probs == "always":
        yield (
            f"{' and '.join(given)} with {_ACTOR}.use_sampler_log_probs=always: ratios are taken to the sampler "
            "already, and the trainer's log-probs that a correction compares with it are not computed; use auto, or "
            "leave the correction out"
        )
    by_token = [text for text in given if text.endswith("=token") or "=token_k" in text]
    loss_mode = actor.policy_loss.get("loss_mode")
    if by_token and loss_mode in POLICY_LOSSES and POLICY_LOSSES[loss_mode].by_trajectory:
        yield (
            f"{' and '.join(by_token)} with {_ACTOR}.policy_loss.loss_mode={loss_mode}: a weight or mask per token "
            "would turn the ratio of a sequence into another one; use sequence or geometric, or a loss per token"
        )
    product = [text for text in given if text.endswith("=sequence") or "=seq_sum" in text]
    agent = config.actor_rollout_ref.rollout.agent_function_path
    if product and agent is not None:
        yield (
            f"{' and '.join(product)} with {_ROLLOUT}.agent_function_path={agent!r}: an agent may hold several "
            "conversations beside each other, which are records of one trajectory, and a product over all of them is "
            "the ratio of none; use token, or geometric (the mean over a trajectory's tokens)"
        )


def _switches(options: RolloutCorrectionOptions) -> list[str]:
    """Those that compare the trainer's log-probs with the sampler's before the first update, as `key=value`."""
    values = {
        "rollout_is": options.rollout_is,
        "rollout_rs": options.rollout_rs,
        "rollout_token_veto_threshold": options.rollout_token_veto_threshold,
    }
    return [f"{RC}.{name}={value}" for name, value in values.items() if value is not None]


def _dapo(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if config.algorithm.filter_groups.enable and estimator in _WITHOUT_GROUPS:
        yield (
            f"algorithm.filter_groups.enable is True with algorithm.adv_estimator={estimator}, which does not compare "
            "the samples of a prompt: a group of equal rewards still trains, and leaving it out would bias the "
            "estimate; use grpo, rloo or another that compares groups, or leave filter_groups out"
        )
    buffer, limit = config.reward.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and buffer.len > limit:
        yield (
            f"reward.overlong_buffer.len is {buffer.len}, more than actor_rollout_ref.rollout.response_length "
            f"({limit}): even an empty response would be penalised; make it smaller"
        )
