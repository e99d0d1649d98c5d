"""What `actor_rollout_ref.actor.policy_loss` may hold: the loss and the numbers that only some losses have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_mt.config.knob import Section, check_knob, knob
from verl_mt.errors import ConfigError
from verl_mt.plugins import names_code, suggest

KEY = "actor_rollout_ref.actor.policy_loss"

USED_BY: dict[str, tuple[str, ...]] = {
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "clip_cov_ratio": ("clip_cov",),
    "clip_cov_lb": ("clip_cov",),
    "clip_cov_ub": ("clip_cov",),
    "kl_cov_ratio": ("kl_cov",),
    "ppo_kl_coef": ("kl_cov",),
}
"""Key -> the losses that read it; given with another loss it is refused."""
_OF_SEQUENCES = ("gspo", "sapo")
"""Losses that their papers define as the mean over sequences of each one's mean (arXiv:2507.18071,
arXiv:2511.20347)."""
_WITHOUT_CLIP = ("sapo", "gpg", "kl_cov")


@dataclass
class PolicyLossOptions(Section):
    """The mapping with its defaults, which are those of the papers."""

    loss_mode: str = knob(
        "vanilla", "The loss.", choices=("vanilla", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov"), plugin=True
    )
    tau_pos: float = knob(1.0, "SAPO: sharpness of the gate on positive advantages.", min=1e-6)
    tau_neg: float = knob(1.05, "SAPO: the same on the others.", min=1e-6)
    clip_cov_ratio: float = knob(0.0002, "Clip-Cov: share of the tokens that are left out.", min=0, max=1)
    clip_cov_lb: float = knob(1.0, "Clip-Cov: smallest covariance of a candidate.")
    clip_cov_ub: float = knob(5.0, "Clip-Cov: largest covariance of a candidate.")
    kl_cov_ratio: float = knob(0.0002, "KL-Cov: share of the tokens that are held back.", min=0, max=1)
    ppo_kl_coef: float = knob(0.1, "KL-Cov: weight of their penalty.", min=0)
    own: dict[str, Any] = knob({}, "All other keys, where `loss_mode` is a function of the user's: its arguments.")


def read_policy_loss(given: Mapping[str, Any]) -> PolicyLossOptions:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown key, a value that cannot be, or a key that the chosen loss does not read.
    """
    known = {item.name: item for item in fields(PolicyLossOptions) if item.name != "own"}
    if names_code(given.get("loss_mode")):
        return PolicyLossOptions(given["loss_mode"], own={k: v for k, v in given.items() if k != "loss_mode"})
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{KEY}.{name}: unknown key{suggest(str(name), known)}. Known: {', '.join(known)}")
        check_knob(f"{KEY}.{name}", value, known[name].metadata)
        if name != "loss_mode" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{KEY}.{name}: got {value!r}, expected a number")
    options = PolicyLossOptions(**given)
    for name, modes in USED_BY.items():
        if name in given and options.loss_mode not in modes:
            raise ConfigError(
                f"{KEY}.{name} is {given[name]}, which only loss_mode={' or '.join(modes)} reads; "
                f"it is {options.loss_mode}: leave it out"
            )
    if options.clip_cov_lb > options.clip_cov_ub:
        raise ConfigError(f"{KEY}.clip_cov_lb ({options.clip_cov_lb}) is above clip_cov_ub ({options.clip_cov_ub})")
    return options


def default_aggregation(given: Mapping[str, Any]) -> str:
    """What `actor.loss_agg_mode` is with the loss of this mapping, unless it is given."""
    return "seq-mean-token-mean" if read_policy_loss(given).loss_mode in _OF_SEQUENCES else "token-mean"


def idle_clips(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of `actor.clip_ratio...` that the loss of this mapping does not read."""
    mode = read_policy_loss(given).loss_mode
    if mode == "vanilla" or names_code(mode):
        return ()
    return ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")[0 if mode in _WITHOUT_CLIP else 3 :]
