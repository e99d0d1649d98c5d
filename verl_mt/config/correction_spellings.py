"""Rollout corrections in the spellings of verl, slime and ms-swift: keys of `algorithm.rollout_correction`.

A bound that implies its switch (slime's `--tis-clip` without `--use-tis`) is settled once all items are known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl_mt.config.spelling import ACTOR, DROP, Always, Rename

CORRECTION = "algorithm.rollout_correction."
_IS, _UPPER = CORRECTION + "rollout_is", CORRECTION + "rollout_is_threshold"
_LOWER, _DELTA = CORRECTION + "rollout_is_threshold_lower", CORRECTION + "off_policy_sequence_mask_delta"
_SLIME_DELTA = 1e-4


def _bound(value: Any) -> Any:
    """verl's first spelling writes off as -1."""
    return DROP if value in (None, -1, -1.0) else value


def _bypass(value: Any) -> Any:
    return "always" if value else DROP


def _swift_mode(mode: Any) -> Any:
    """ms-swift's `sequence` is the geometric mean over it; its masks keep the ratio of what they leave."""
    if mode is None:
        return DROP
    level, _, kind = str(mode).rpartition("_")
    levels = {"token": "token", "sequence": "geometric"}
    if level not in levels or kind not in ("truncate", "mask"):
        raise ValueError("expected token_truncate, token_mask, sequence_truncate or sequence_mask")
    made: dict[str, Any] = {"rollout_is": levels[level]}
    return made if kind == "truncate" else made | {"rollout_rs": levels[level], "rollout_rs_threshold_lower": 0.0}


VERL: dict[str, Rename] = {
    CORRECTION + "bypass_mode": Rename(ACTOR + "use_sampler_log_probs", _bypass),
    CORRECTION + "bypass_old_logprob_for_rollout": Rename(ACTOR + "use_sampler_log_probs", _bypass),
    ACTOR + "tis_clip": Rename(_UPPER, _bound),
    ACTOR + "tis_imp_ratio_cap": Rename(_UPPER, _bound),
}

SLIME: dict[str, Rename] = {
    "use_tis": Rename(_IS, lambda on: "token" if on else None),
    "tis_clip": Rename(_UPPER),
    "tis_clip_low": Rename(_LOWER),
    "use_opsm": Rename(_DELTA, lambda on: _SLIME_DELTA if on else None),
    "opsm_delta": Rename(_DELTA),
}

SWIFT: dict[str, Rename] = {
    "rollout_importance_sampling_mode": Rename("algorithm.rollout_correction", _swift_mode),
    "rollout_importance_sampling_threshold": Rename(_UPPER),
    "off_policy_sequence_mask_delta": Rename(_DELTA),
}

_CISPO = (
    "a policy gradient weighted by the bounded ratio to the sampler is policy_loss.loss_mode=cispo with "
    "actor.use_sampler_log_probs=always"
)

VERL_ALWAYS: dict[str, Always] = {
    CORRECTION + "use_pure_rollout_correction": Always((False,), _CISPO),
    CORRECTION + "loss_type": Always(("ppo_clip",), _CISPO),
}

_SWITCHED_ON_BY_ITS_BOUND = (ACTOR + "tis_clip", ACTOR + "tis_imp_ratio_cap", "tis_clip", "tis_clip_low")


def settle(items: list[Any]) -> list[Any]:
    """Truncated importance sampling given by its bound alone is switched on; `use_tis=False` and `use_opsm=False`
    switch off what their bounds say, and `use_opsm` alone means slime's default bound."""
    bounds = [item for item in items if item.spelling in _SWITCHED_ON_BY_ITS_BOUND]
    if any(item.spelling == "use_tis" and item.value is None for item in items):
        items = [item for item in items if item not in bounds]
    elif bounds and not any(item.key == _IS for item in items):
        items = [*items, replace(bounds[0], key=_IS, value="token")]
    opsm = next((item for item in items if item.spelling == "use_opsm"), None)
    given = [item for item in items if item.spelling == "opsm_delta"]
    if opsm is not None and given:
        items = [item for item in items if (item not in given if opsm.value is None else item is not opsm)]
    return items
