"""The losses as the configuration knows them: options, and what the workers do for each. The formulas are beside this
file, and are imported when a loss is used: they need torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_mt.config.declare import option
from verl_mt.config.policy_losses import KEY, PolicyLoss
from verl_mt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from verl_mt.config.actor import ActorConfig
    from verl_mt.workers.loss import WholeMiniBatch

_HERE = "verl_mt.extensions.rare_losses"


@dataclass
class Sapo(PolicyLoss):
    """A soft gate on the ratio instead of a clip (arXiv:2511.20347)."""

    formula = f"{_HERE}.single_tokens.sapo_loss"
    aggregation = "seq-mean-token-mean"

    tau_pos: float = option(1.0, "SAPO: sharpness of the gate on positive advantages.", min=1e-6)
    tau_neg: float = option(1.05, "SAPO: the same on the others.", min=1e-6)


class Gpg(PolicyLoss):
    """The policy gradient itself (arXiv:2504.02546)."""

    formula = f"{_HERE}.single_tokens.gpg_loss"


@dataclass
class Fipo(PolicyLoss):
    """PPO's clip, each token weighted by how the tokens after it moved (arXiv:2603.19835)."""

    formula = f"{_HERE}.future_kl.fipo_loss"
    clips = ("clip_low", "clip_high", "clip_c")
    depends_on = "others"

    fipo_half_life: float = option(32.0, "FIPO: tokens over which a future token's part halves.", min=1e-6)
    fipo_weight_low: float = option(1.0, "FIPO: smallest weight of a token.", min=0, max=1)
    fipo_weight_high: float = option(1.2, "FIPO: largest weight of a token.", min=1)
    fipo_safety_ratio: float = option(
        4.0,
        "FIPO: above it a token of negative advantage weighs at most 1. 0 = off. Unused from `clip_ratio_c` on, where "
        "the dual clip leaves such a token no gradient.",
    )

    def check(self, actor: ActorConfig) -> None:
        given, dual = actor.policy_loss.get("fipo_safety_ratio"), actor.clip_ratio_c
        if given and dual is not None and given >= dual:
            raise ConfigError(
                f"{KEY}.fipo_safety_ratio ({given}) is not below clip_ratio_c ({dual}): the dual clip leaves a token "
                "of negative advantage no gradient above its bound, so that no weight is held. Lower "
                "fipo_safety_ratio, raise clip_ratio_c, or set clip_ratio_c=null"
            )


@dataclass
class Real(PolicyLoss):
    """Rewards as labels: which of a group's trajectories did better (arXiv:2602.05630)."""

    formula = f"{_HERE}.contrast.real_loss"
    aggregation = "seq-mean-token-mean"
    depends_on = "trajectory"
    beside_advantage = True  # an advantage of 0 is a negative sample

    real_tau: float = option(0.5, "REAL: temperature of the scores. Slopes are at most its inverse.", min=1e-6)

    def over_mini_batch(self, whole: WholeMiniBatch, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
        from verl_mt.extensions.rare_losses.contrast import group_contrast

        return group_contrast(whole, **self.options)


@dataclass
class ClipCov(PolicyLoss):
    """PPO's clip without a few tokens drawn from those that would lower the entropy (arXiv:2505.22617)."""

    formula = f"{_HERE}.covariance.clip_cov_loss"
    clips = ("clip_low", "clip_high")
    depends_on = "others"

    clip_cov_ratio: float = option(0.0002, "Clip-Cov: share of the tokens that are left out.", min=0, max=1)
    clip_cov_lb: float = option(1.0, "Clip-Cov: smallest covariance of a candidate.")
    clip_cov_ub: float = option(5.0, "Clip-Cov: largest covariance of a candidate.")

    def check(self, actor: ActorConfig) -> None:
        if self.clip_cov_lb > self.clip_cov_ub:
            raise ConfigError(f"{KEY}.clip_cov_lb ({self.clip_cov_lb}) is above clip_cov_ub ({self.clip_cov_ub})")

    def over_mini_batch(self, whole: WholeMiniBatch, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
        from verl_mt.extensions.rare_losses.covariance import tokens_to_leave_out

        return tokens_to_leave_out(whole, **self.options, clip_low=clip_low, clip_high=clip_high)


@dataclass
class KlCov(PolicyLoss):
    """The policy gradient, and a penalty on the tokens that would lower the entropy most (arXiv:2505.22617)."""

    formula = f"{_HERE}.covariance.kl_cov_loss"
    depends_on = "others"
    beside_advantage = True  # its penalty |log ratio|

    kl_cov_ratio: float = option(0.0002, "KL-Cov: share of the tokens that are held back.", min=0, max=1)
    ppo_kl_coef: float = option(0.1, "KL-Cov: weight of their penalty.", min=0)

    def over_mini_batch(self, whole: WholeMiniBatch, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
        from verl_mt.extensions.rare_losses.covariance import tokens_to_hold_back

        return tokens_to_hold_back(whole, kl_cov_ratio=self.kl_cov_ratio)
