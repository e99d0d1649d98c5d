"""Policy losses, and the mapping `actor_rollout_ref.actor.policy_loss` that chooses one.

A loss is a subclass of `PolicyLoss` and says what the rest of the library must know of it. No other code knows losses
by name. Three are here. Extensions and other packages add theirs with entry points of the group
`verl_mt.policy_losses`.

The classes load without torch, since every configuration is checked with them. Their formulas need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from verl_mt.config.declare import Condition, Section, ValueOf, check_option, option, read_options
from verl_mt.errors import ConfigError
from verl_mt.plugins import Registry, names_code, suggest

if TYPE_CHECKING:
    from torch import Tensor

KEY = "actor_rollout_ref.actor.policy_loss"


class PolicyLoss(Section):
    """A policy loss with its options. Make the subclass a dataclass if it has options: its fields are keys of
    `policy_loss`.

    Set the attributes below where your loss differs. The defaults fit a loss of single tokens like PPO's.
    """

    formula: str
    """Path of (log_probs, old_log_probs, advantages, mask, **arguments) -> (loss [B, T], means for the log). It gets
    those arguments that it takes by name: the options, `clip_low`, `clip_high`, `clip_c`, and what `over_mini_batch`
    returned."""
    clips: tuple[str, ...] = ()
    """Which of `clip_low`, `clip_high` and `clip_c` formula and `over_mini_batch` read."""
    aggregation: str = "token-mean"
    """How its paper makes one number of the tokens' losses: `loss_agg_mode` if you set none."""
    depends_on: Literal["token", "others", "trajectory"] = "token"
    """What the loss of a token depends on.

    `token`: on this token alone. `others`: on other tokens too. `trajectory`: on the ratio of its whole trajectory, so
    that all rows of a trajectory pass together, and a weight or mask of a single token would make it another ratio."""
    beside_advantage: bool = False
    """It has a term beside the advantage. Rows whose advantages are all 0 have a gradient too. Such a term may have a
    kink at ratio 1, so until the weights change, ratios are exactly 1: a rounding of the old log-probs would make a
    gradient of full size."""
    slope_known: bool = True
    """At ratio 1 its slope does not depend on the log-probs, so it is known before they are."""

    @property
    def options(self) -> dict[str, Any]:
        """Its own keys of `policy_loss`, defaults filled in."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def check(self, actor: Any) -> None:
        """Check its options against each other and the actor's keys.

        Args:
            actor: the section `actor_rollout_ref.actor`.

        Raises:
            ConfigError: they contradict each other.
        """

    def problems(self, config: Any, key: str) -> Iterator[str]:
        self.check(config.actor_rollout_ref.actor)
        return iter(())

    def over_mini_batch(self, whole: Any, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
        """Look at the whole mini-batch before it is split, so that no split changes the loss. Collective.

        Args:
            whole: a `verl_mt.workers.loss.WholeMiniBatch`.
            clip_low, clip_high: the clip range.

        Returns:
            Further arguments of the formula, a row for each row of `whole`.
        """
        return {}


@dataclass
class CustomLoss(PolicyLoss):
    """Your function, by its path. Nothing is known of it, so it may do all that costs time to allow for."""

    formula: str
    arguments: dict[str, Any]
    clips = ("clip_low", "clip_high", "clip_c")
    depends_on = "others"
    beside_advantage = True
    slope_known = False

    @property
    def options(self) -> dict[str, Any]:
        return self.arguments


class Vanilla(PolicyLoss):
    """PPO's clip, with the dual clip."""

    formula = "verl_mt.algorithms.losses.ppo_clip_loss"
    clips = ("clip_low", "clip_high", "clip_c")


class Gspo(PolicyLoss):
    """PPO's clip with one ratio for the trajectory."""

    formula = "verl_mt.algorithms.losses.gspo_loss"
    clips = ("clip_low", "clip_high")
    aggregation = "seq-mean-token-mean"  # arXiv:2507.18071, eq. 5
    depends_on = "trajectory"

    def over_mini_batch(self, whole: Any, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
        """The log ratio of trajectories that have several records."""
        found_N = whole.split_ratios(whole.sampled_NT, whole.old_NT) if whole.torn else None
        return {} if found_N is None else {"log_ratio_B": found_N}


class Cispo(PolicyLoss):
    """REINFORCE weighted by a clipped ratio."""

    formula = "verl_mt.algorithms.losses.cispo_loss"
    clips = ("clip_low", "clip_high")


POLICY_LOSSES: Registry[type[PolicyLoss]] = Registry(
    "policy loss", {"vanilla": Vanilla, "gspo": Gspo, "cispo": Cispo}, group="verl_mt.policy_losses"
)
"""Value of `policy_loss.loss_mode` -> its class, or the path of the class until `POLICY_LOSSES[name]` loads it."""


@dataclass
class LossChoice(Section):
    """What the mapping holds whatever the loss is. Its other keys are the options of the chosen one."""

    loss_mode: str = option("vanilla", "The loss.", choices=POLICY_LOSSES, plugin=True)

    @classmethod
    def read(cls, given: Mapping[str, Any], key: str) -> PolicyLoss:
        return read_policy_loss(given)


def reads(*arguments: str) -> Condition:
    """The chosen loss reads one of these of `clip_low`, `clip_high` and `clip_c`."""
    key = f"{KEY}.loss_mode"

    def holds(value_of: ValueOf) -> bool:
        mode = value_of(key)  # the other losses are loaded for a reader only
        return names_code(mode) or (mode in POLICY_LOSSES and not set(arguments).isdisjoint(POLICY_LOSSES[mode].clips))

    def text() -> str:
        readers = [name for name in POLICY_LOSSES.names() if set(arguments) & set(POLICY_LOSSES.find(name).clips)]
        return f"{key}={' or '.join(readers)}"

    return Condition((key,), holds, text)


def loss_mode(given: Mapping[str, Any]) -> str:
    """The `loss_mode` of the mapping, or its default."""
    mode: str = given.get("loss_mode", LossChoice.loss_mode)
    return mode


def read_policy_loss(given: Mapping[str, Any]) -> PolicyLoss:
    """The loss that the mapping of a configuration chooses, its options checked.

    Raises:
        ConfigError: an unknown key, a value that cannot be, or a key that the chosen loss does not read.
    """
    name, options = loss_mode(given), {key: value for key, value in given.items() if key != "loss_mode"}
    if names_code(name):
        return CustomLoss(name, options)
    check_option(f"{KEY}.loss_mode", name, fields(LossChoice)[0].metadata)
    loss = POLICY_LOSSES[name]
    if not options:
        return read_options(loss, options, KEY)
    known = {mode: [item.name for item in fields(POLICY_LOSSES.find(mode))] for mode in POLICY_LOSSES.names()}
    for key, value in options.items():
        readers = [mode for mode, names in known.items() if key in names]
        if not readers:
            every = ["loss_mode", *(key for names in known.values() for key in names)]
            raise ConfigError(f"{KEY}.{key}: unknown key{suggest(str(key), every)}. Known: {', '.join(every)}")
        if name not in readers:
            raise ConfigError(
                f"{KEY}.{key} is {value}, which only loss_mode={' or '.join(readers)} reads. It is {name}: leave it out"
            )
    return read_options(loss, options, KEY)
