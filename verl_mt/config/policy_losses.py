"""The policy losses, one record each, and the mapping `actor_rollout_ref.actor.policy_loss` that chooses among them.

To add a loss: write its function (verl_mt/algorithms/losses.py has those of the field), add its record to
`POLICY_LOSSES`, a row to docs/algorithms.md and a test. Its name, its options and their bounds, what is refused beside
it, how its tokens become one number and what the workers compute for it all come from the record. A user's own loss,
named by its path, gets a record too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl_mt.config.declare import Condition, Section, ValueOf, check_option, only, option
from verl_mt.errors import ConfigError
from verl_mt.plugins import Registry, names_code, suggest

KEY = "actor_rollout_ref.actor.policy_loss"


@dataclass(frozen=True)
class PolicyLoss:
    """All that the rest of the library knows of a policy loss."""

    function: str
    """Path of (log_probs, old_log_probs, advantages, mask, **arguments) -> (loss [B, T], means for the log). Of the
    arguments below (options, clip ranges, what `over_mini_batch` returned) it gets those that it takes by name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys of `policy_loss` that only this loss has: name -> option. The defaults are those of the paper."""
    problem: Callable[[Mapping[str, Any]], str | None] = lambda options: None
    """What is wrong with its options together, after the name of the section; None = nothing."""
    clips: tuple[str, ...] = ()
    """Which of the arguments `clip_low`, `clip_high` and `clip_c` it reads."""
    aggregation: str = "token-mean"
    """How its paper makes one number of the tokens' losses: what `loss_agg_mode` is where it is not given."""
    over_mini_batch: str | None = None
    """Path of a function that looks at the whole mini-batch before it is split (`workers.loss.WholeMiniBatch`), with
    options and clip ranges by name, and returns further arguments of `function`, a row for each of its rows."""
    looks_ahead: bool = False
    """What it makes of a token depends on the tokens after it in its row."""
    by_trajectory: bool = False
    """One ratio for all tokens of a trajectory: rows of one trajectory belong together, and a weight or mask for a
    single token would make it another ratio."""
    moves_without_advantage: bool = False
    """It has a term beside the advantage: rows whose advantages are all 0 have a gradient too."""
    kinked: bool = False
    """It may have a kink at ratio 1, where a rounding of the old log-probs would make a gradient of full size."""
    slope_known: bool = True
    """At ratio 1 its slope is the same whatever the log-probs are, so it is known before they are."""
    is_users: bool = False
    """A function of the user's: what it returns is checked, and what it raises is reported with its name."""

    @classmethod
    def of_user(cls, path: str) -> PolicyLoss:
        """A loss that nothing is known of: it may do all that costs time to allow for."""
        return cls(
            path,
            clips=("clip_low", "clip_high", "clip_c"),
            moves_without_advantage=True,
            kinked=True,
            slope_known=False,
            is_users=True,
        )

    @property
    def by_token(self) -> bool:
        """The loss of a token depends on nothing but this token: any single one can be trained with it."""
        return self.over_mini_batch is None and not self.looks_ahead and not self.is_users


@dataclass(frozen=True)
class ChosenLoss:
    """What a configuration says of its loss."""

    name: str
    loss: PolicyLoss
    options: dict[str, Any]
    """Defaults filled in; of a user's loss what was given."""


def _clip_cov_bounds(options: Mapping[str, Any]) -> str | None:
    lower, upper = options["clip_cov_lb"], options["clip_cov_ub"]
    return None if lower <= upper else f".clip_cov_lb ({lower}) is above clip_cov_ub ({upper})"


_BOTH_SIDES = ("clip_low", "clip_high")
_LOSSES, _WORKERS = "verl_mt.algorithms", "verl_mt.workers.loss"  # paths: this room imports neither

POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    {
        "vanilla": PolicyLoss(f"{_LOSSES}.losses.ppo_clip_loss", clips=(*_BOTH_SIDES, "clip_c")),
        "gspo": PolicyLoss(
            f"{_LOSSES}.losses.gspo_loss",
            clips=_BOTH_SIDES,
            aggregation="seq-mean-token-mean",  # arXiv:2507.18071, eq. 5
            over_mini_batch=f"{_WORKERS}.trajectory_ratios",
            by_trajectory=True,
        ),
        "cispo": PolicyLoss(f"{_LOSSES}.losses.cispo_loss", clips=_BOTH_SIDES),
        "sapo": PolicyLoss(
            f"{_LOSSES}.losses.sapo_loss",
            options={
                "tau_pos": option(1.0, "SAPO: sharpness of the gate on positive advantages.", min=1e-6),
                "tau_neg": option(1.05, "SAPO: the same on the others.", min=1e-6),
            },
            aggregation="seq-mean-token-mean",  # arXiv:2511.20347
        ),
        "fipo": PolicyLoss(
            f"{_LOSSES}.future_kl.fipo_loss",
            options={
                "fipo_half_life": option(32.0, "FIPO: tokens over which a future token's part halves.", min=1e-6),
                "fipo_weight_low": option(1.0, "FIPO: smallest weight of a token.", min=0, max=1),
                "fipo_weight_high": option(1.2, "FIPO: largest weight of a token.", min=1),
                "fipo_safety_ratio": option(
                    4.0,
                    "FIPO: above it a token of negative advantage weighs at most 1; 0 = off. Unused from "
                    "`clip_ratio_c` on, where the dual clip leaves such a token no gradient.",
                ),
            },
            clips=(*_BOTH_SIDES, "clip_c"),
            looks_ahead=True,
        ),
        "real": PolicyLoss(
            f"{_LOSSES}.contrast.real_loss",
            options={
                "real_tau": option(0.5, "REAL: temperature of the scores; slopes are at most its inverse.", min=1e-6)
            },
            aggregation="seq-mean-token-mean",
            over_mini_batch=f"{_WORKERS}.group_contrast",
            by_trajectory=True,
            moves_without_advantage=True,  # an advantage of 0 is a negative sample
        ),
        "gpg": PolicyLoss(f"{_LOSSES}.losses.gpg_loss"),
        "clip_cov": PolicyLoss(
            f"{_LOSSES}.covariance.clip_cov_loss",
            options={
                "clip_cov_ratio": option(0.0002, "Clip-Cov: share of the tokens that are left out.", min=0, max=1),
                "clip_cov_lb": option(1.0, "Clip-Cov: smallest covariance of a candidate."),
                "clip_cov_ub": option(5.0, "Clip-Cov: largest covariance of a candidate."),
            },
            problem=_clip_cov_bounds,
            clips=_BOTH_SIDES,
            over_mini_batch=f"{_WORKERS}.tokens_to_leave_out",
        ),
        "kl_cov": PolicyLoss(
            f"{_LOSSES}.covariance.kl_cov_loss",
            options={
                "kl_cov_ratio": option(0.0002, "KL-Cov: share of the tokens that are held back.", min=0, max=1),
                "ppo_kl_coef": option(0.1, "KL-Cov: weight of their penalty.", min=0),
            },
            over_mini_batch=f"{_WORKERS}.tokens_to_hold_back",
            moves_without_advantage=True,  # its penalty |log ratio|, which is also what has the kink
            kinked=True,
        ),
    },
    group="verl_mt.policy_losses",
)
"""Value of `policy_loss.loss_mode` -> its record."""


@dataclass
class LossChoice(Section):
    """What the mapping holds whatever the loss is; its other keys are the options of the chosen one."""

    loss_mode: str = option("vanilla", "The loss.", choices=POLICY_LOSSES, plugin=True)


@dataclass(frozen=True)
class ReadsClip(Condition):
    """The chosen loss reads one of the arguments `clip_low`, `clip_high` and `clip_c`."""

    arguments: tuple[str, ...]

    def _choice(self) -> Condition:
        # Made when it is asked for: the table may have got another loss.
        readers = [name for name, loss in POLICY_LOSSES.items() if set(self.arguments) & set(loss.clips)]
        return only(f"{KEY}.loss_mode", *readers, why="which has no such bound")

    def __str__(self) -> str:
        return str(self._choice())

    def holds(self, value_of: ValueOf) -> bool:
        return self._choice().holds(value_of)

    def missing(self, value_of: ValueOf) -> str:
        return self._choice().missing(value_of)


def read_policy_loss(given: Mapping[str, Any]) -> ChosenLoss:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown key, a value that cannot be, or a key that the chosen loss does not read.
    """
    (choice,) = fields(LossChoice)
    name = given.get("loss_mode", choice.default)
    options = {key: value for key, value in given.items() if key != "loss_mode"}
    if names_code(name):
        return ChosenLoss(name, PolicyLoss.of_user(name), options)
    check_option(f"{KEY}.loss_mode", name, {**choice.metadata, "choices": POLICY_LOSSES})
    loss = POLICY_LOSSES[name]
    for key, value in options.items():
        readers = {mode: other.options[key] for mode, other in POLICY_LOSSES.items() if key in other.options}
        if not readers:
            known = ["loss_mode", *(option for other in POLICY_LOSSES.values() for option in other.options)]
            raise ConfigError(f"{KEY}.{key}: unknown key{suggest(str(key), known)}. Known: {', '.join(known)}")
        if name not in readers:
            raise ConfigError(
                f"{KEY}.{key} is {value}, which only loss_mode={' or '.join(readers)} reads; it is {name}: leave it out"
            )
        check_option(f"{KEY}.{key}", value, readers[name].metadata)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{KEY}.{key}: got {value!r}, expected a number")
    options = {key: options.get(key, option.default) for key, option in loss.options.items()}
    if (problem := loss.problem(options)) is not None:
        raise ConfigError(f"{KEY}{problem}")
    return ChosenLoss(name, loss, options)
