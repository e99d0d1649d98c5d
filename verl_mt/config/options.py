"""What the open mappings of the configuration may hold: the weight of the KL penalty and the corrections against a
sampler that is not quite the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.config.declare import Section, is_set, option, read_options
from verl_mt.config.policy_losses import KEY, POLICY_LOSSES, loss_mode
from verl_mt.errors import ConfigError

KL_CTRL = "algorithm.kl_ctrl"
RC = "algorithm.rollout_correction"
_BOUND = f"{RC}.rollout_rs_threshold"

LEVELS = ("token", "sequence", "geometric")
_BOUNDED_BY_RATIO = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip


@dataclass
class KLControlOptions(Section):
    """The mapping with its defaults, verl's."""

    type: str = option("fixed", "Constant, or held near a target.", choices=("fixed", "adaptive"))
    # verl's launch scripts give it to every run; the start says where it is idle.
    kl_coef: float = option(0.001, "The weight, at the start.", min=0, allow_unused=True)
    target_kl: float = option(0.1, "adaptive: the mean penalty per token that is aimed at.", min=1e-9)
    horizon: float = option(10000.0, "adaptive: trajectories over which the weight moves.", min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type == "adaptive" and self.kl_coef == 0:
            raise ConfigError(f"{KL_CTRL}.kl_coef=0 with type=adaptive: 0 times anything stays 0. Set 0.001")

    def problems(self, config: Any, key: str) -> Iterator[str]:
        if config.algorithm.use_kl_in_reward and self.kl_coef == 0:
            yield f"algorithm.use_kl_in_reward with {key}.kl_coef=0 penalises nothing. Set a weight, or remove it"


def read_kl_control(given: Mapping[str, Any]) -> KLControlOptions:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown key or a value that cannot be.
    """
    return read_options(KLControlOptions, given, KL_CTRL)


@dataclass
class RolloutCorrectionOptions(Section):
    """The mapping with its defaults. With none of its switches set nothing is corrected; a step's metrics say how
    far the sampler is all the same."""

    rollout_is: str | None = option(None, "What a weight is taken over. null = no weights.", choices=(None, *LEVELS))
    rollout_is_threshold: float = option(
        2.0, "Larger weights are cut to it.", min=1e-6, when=is_set("rollout_is") | is_set("rollout_rs")
    )
    rollout_is_threshold_lower: float = option(
        0.0, "Smaller weights are raised to it.", min=0, when=is_set("rollout_is")
    )
    rollout_is_batch_normalize: bool = option(
        False, "Divide the weights by their mean over the batch's tokens.", when=is_set("rollout_is")
    )
    rollout_rs: str | None = option(
        None, "What is left out of the loss. null = nothing.", choices=(None, *LEVELS, *_REJECTIONS)
    )
    rollout_rs_threshold: float | str | None = option(
        None, "Upper bound, or `lower_upper`. null = rollout_is_threshold.", when=is_set("rollout_rs")
    )
    rollout_rs_threshold_lower: float | None = option(
        None, "Lower bound of a ratio. null = 1 / upper.", min=0, when=is_set("rollout_rs")
    )
    rollout_token_veto_threshold: float | None = option(
        None, "A trajectory with a token whose ratio is below is left out. null = off.", min=1e-20, below=1
    )
    off_policy_sequence_mask_delta: float | None = option(
        None, "Trajectories this far (nats per token) from the sampler unlearn nothing. null = off.", min=0
    )

    @property
    def corrects(self) -> bool:
        """A decision is taken from the trainer's log-probs before the first update."""
        return not (self.rollout_is is self.rollout_rs is self.rollout_token_veto_threshold is None)

    @property
    def of_batch(self) -> bool:
        """Such a decision looks at more than its own token, so that it is taken over the whole batch at once."""
        return bool(self.over_batch)

    @property
    def over_batch(self) -> list[str]:
        """What asks for such decisions, as `key=value`."""
        found = {
            "rollout_is": self.rollout_is in ("sequence", "geometric"),
            "rollout_is_batch_normalize": self.rollout_is_batch_normalize,
            "rollout_rs": self.rejection not in (None, "token"),
            "rollout_token_veto_threshold": self.rollout_token_veto_threshold is not None,
        }
        return [f"{RC}.{name}={getattr(self, name)}" for name, of_batch in found.items() if of_batch]

    @property
    def rejection(self) -> str | None:
        """What a rejection looks at: token, seq_sum, seq_mean or seq_max."""
        return None if self.rollout_rs is None else self._rejection().rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """By which estimator it measures: k1 (the ratio itself, with two bounds), k2 or k3."""
        return self._rejection().rpartition("_")[2]

    @property
    def bounds(self) -> tuple[float, float]:
        """(lower, upper) of a rejection; the lower one is 0 and unused with k2 and k3.

        Of k1 they bound the ratio trainer to sampler. The names with `_k1` are given bounds of the inverse, which is
        what the estimate k1 = log(sampler / trainer) measures.
        """
        lower, upper = self.rollout_rs_threshold_lower, self.rollout_rs_threshold
        if isinstance(upper, str):
            lower, upper = (float(part) for part in upper.split("_"))
        upper = self.rollout_is_threshold if upper is None else float(upper)
        if self.estimator != "k1":
            return 0.0, upper
        lower = 1.0 / upper if lower is None else lower
        if self.rollout_rs in _BOUNDED_BY_RATIO:
            return lower, upper
        return 1.0 / upper, (1.0 / lower if lower else math.inf)

    def _rejection(self) -> str:
        return _BOUNDED_BY_RATIO.get(self.rollout_rs or "token", self.rollout_rs or "token_k1")

    def __post_init__(self) -> None:
        super().__post_init__()
        lower, upper = self.rollout_is_threshold_lower, self.rollout_is_threshold
        if self.rollout_is is not None:
            _require_one("weights", "rollout_is_threshold_lower, rollout_is_threshold", lower, upper)
        if self.rollout_rs_threshold is not None or self.rollout_rs is not None:
            self._check_rejection()

    def _check_rejection(self) -> None:
        """Bounds that leave nothing between them, or that an estimator does not have."""
        upper, has_lower = self.rollout_rs_threshold, self.rollout_rs_threshold_lower is not None
        if isinstance(upper, str):
            if has_lower:
                raise ConfigError(f"{_BOUND}={upper} has a lower bound: leave rollout_rs_threshold_lower out")
            try:
                low, high = map(float, upper.split("_"))
            except ValueError:
                raise ConfigError(f"{_BOUND}: got {upper!r}, expected a number, or lower_upper (0.5_2.0)") from None
            if not 0 <= low < high:
                raise ConfigError(f"{_BOUND}={upper}: the lower bound must be at least 0 and below the upper one")
        if self.rollout_rs is None:
            return
        if self.estimator != "k1" and (isinstance(upper, str) or has_lower):
            raise ConfigError(
                f"{RC}.rollout_rs={self.rollout_rs} is never negative and has an upper bound only: give one number"
            )
        if not isinstance(upper, str) and (self.rollout_is_threshold if upper is None else upper) <= 0:
            raise ConfigError(f"{_BOUND}={upper} must be above 0: it would reject everything")
        if self.estimator == "k1":
            names = "rollout_rs_threshold_lower, else 1 / upper, and rollout_rs_threshold, else rollout_is_threshold"
            _require_one(f"ratios of rollout_rs={self.rollout_rs}", names, *self.bounds)

    @property
    def switches(self) -> list[str]:
        """Those that compare the trainer's log-probs with the sampler's before the first update, as `key=value`."""
        names = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")
        return [f"{RC}.{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None]

    def problems(self, config: Any, key: str) -> Iterator[str]:
        actor, given = config.actor_rollout_ref.actor, self.switches
        if given and actor.use_sampler_log_probs == "always":
            yield (
                f"{' and '.join(given)} with actor_rollout_ref.actor.use_sampler_log_probs=always: ratios are taken to "
                "the sampler already, and the trainer's log-probs that a correction compares with it are not "
                "computed. Set use_sampler_log_probs=auto, or remove the correction"
            )
        by_token = [text for text in given if text.endswith("=token") or "=token_k" in text]
        mode = loss_mode(actor.policy_loss)
        if by_token and mode in POLICY_LOSSES and POLICY_LOSSES[mode].depends_on == "trajectory":
            yield (
                f"{' and '.join(by_token)} with {KEY}.loss_mode={mode}: a weight or mask per token would turn the "
                "ratio of a sequence into another one. Use sequence or geometric, or a loss per token"
            )


def _require_one(what: str, names: str, lower: float, upper: float) -> None:
    if not (lower <= 1 <= upper and lower < upper):
        raise ConfigError(
            f"{RC}: {what} are bounded to [{lower:g}, {upper:g}] ({names}), which leaves out 1, where trainer and "
            "sampler agree: the lower bound must be at most 1 and the upper one at least 1 (2 is usual)"
        )


def read_rollout_correction(given: Mapping[str, Any]) -> RolloutCorrectionOptions:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown key, a value that cannot be, or a number whose switch is off.
    """
    return read_options(RolloutCorrectionOptions, given, RC)
