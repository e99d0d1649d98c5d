"""Sees a training collapse in the metrics of its steps, and says so in words.

A *sign* is one watched number that has left the range in which runs learn: the mean over the last `window` steps is
compared with the best such mean before it. Signs are told together, with what the reward did meanwhile, because it is
the combination that has a cause: tool use that falls while the reward rises is another illness than tool use that falls
with it. The thresholds and their reasons are in docs/diagnostics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from verl_mt.extensions.inspection.config import GuardThresholds

REWARD, SPREAD = "reward/mean", "reward/std"
TOOL_USE, TURNS, ENTROPY = "tools/use_rate", "turns/mean", "rollout/entropy"
FLAT, SOLVED, TRUNCATED = "group/zero_variance", "group/solve_all", "response/clip_ratio"
SAMPLER_KL = "rollout/sampler_kl"
_WATCHED = (REWARD, SPREAD, TOOL_USE, TURNS, ENTROPY, FLAT, SOLVED, TRUNCATED, SAMPLER_KL)

MAX_HISTORY = 1000
"""Steps that are remembered; what a number was before them counts no more."""
_ENTROPY_MARGIN = 0.1
"""Nats: twice next to nothing is still next to nothing."""
_FLAT_MARGIN = 0.3
_REWARD_MARGIN = 0.1
"""In standard deviations: a smaller change of the reward is none."""
_NEAR_BEST = 0.1
"""The last window that is off the best one by less than this share of the whole change is where it began."""

Direction = Literal["rose", "fell", "stayed"]


@dataclass(frozen=True)
class Sign:
    """One number out of its range."""

    name: str
    text: str
    """In words, without what the reward did."""
    before: float
    now: float
    since: int
    """The last step at which it was still as it should be; the current step for a number that has no such past."""


@dataclass(frozen=True)
class Verdict:
    """What the guard thinks of the run after a step."""

    signs: tuple[Sign, ...] = ()
    """All that are present."""
    new: tuple[Sign, ...] = ()
    """Those that were not, the last `window` steps."""
    words: str = ""
    """One sentence about `signs`; empty where there is none."""
    reward: Direction = "stayed"
    """What the reward did since the first of them began."""

    @property
    def last_good_step(self) -> int:
        """The step after which it began."""
        return min(sign.since for sign in self.signs)

    @property
    def metrics(self) -> dict[str, float]:
        """`collapse/signs` and 1 for each that is present."""
        return {"collapse/signs": float(len(self.signs)), **{f"collapse/{sign.name}": 1.0 for sign in self.signs}}


@dataclass(frozen=True)
class _Change:
    """A window's mean against the best one before it."""

    before: float
    now: float
    since: int
    index: int
    """Where in the history the earlier window ends."""


@dataclass
class CollapseGuard:
    """Watches the metrics of the steps in order; `observe` once for each."""

    thresholds: GuardThresholds = field(default_factory=GuardThresholds)
    _history: list[dict[str, float]] = field(default_factory=list)
    _held: dict[str, int] = field(default_factory=dict)
    """Sign -> the last step at which it was present."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Take in a step; numbers that it did not measure, or that are not finite, are not judged."""
        taken = {name: float(metrics[name]) for name in _WATCHED if math.isfinite(metrics.get(name, math.nan))}
        self._history = [*self._history, {"step": float(step), **taken}][-MAX_HISTORY:]
        signs = tuple(self._signs())
        window = self.thresholds.window
        new = tuple(s for s in signs if step - self._held.get(s.name, -math.inf) > window)
        # A number that was not measured has not come back into its range.
        unknown = {name for name in self._held if self._mean(_KEYS[name], len(self._history) - 1) is None}
        held = self._held | dict.fromkeys([*unknown, *(sign.name for sign in signs)], step)
        self._held = {name: at for name, at in held.items() if step - at <= window}
        return Verdict(signs, new, *self._words(step, signs)) if signs else Verdict()

    def rolled_back(self, to_step: int) -> None:
        """The policy is that of an earlier step again: what came after it is forgotten."""
        self._history = [entry for entry in self._history if entry["step"] <= to_step]
        self._held = {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge as if nothing had happened."""
        return {"history": [dict(entry) for entry in self._history], "held": dict(self._held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history = [dict(entry) for entry in state.get("history", [])]
        self._held = dict(state.get("held", {}))

    def _signs(self) -> Iterator[Sign]:
        for name, rule in _RULES.items():
            threshold = getattr(self.thresholds, name)
            if threshold is None:
                continue
            change = self._change(rule.key, rule.worse)
            if change is not None and rule.holds(self, change, threshold):
                text = rule.text.format(before=change.before, now=change.now)
                yield Sign(name, text, change.before, change.now, change.since)
        now = self._mean(SAMPLER_KL, len(self._history) - 1)
        limit = self.thresholds.sampler_kl
        if limit is not None and now is not None and now >= limit:
            step = int(self._history[-1]["step"])
            yield Sign("sampler_kl", f"the KL from sampler to trainer is {now:.3g}", limit, now, step)

    def pays_off(self, change: _Change) -> bool:
        """Whether the reward rose meanwhile: then the model has found something better, and nothing collapses."""
        return self._reward_since(change.index)[0] == "rose"

    def _change(self, key: str, worse: Direction) -> _Change | None:
        """The last window of a number against the best that does not overlap it; None before there are two."""
        # Against the best of all, not the one before: a decline over a hundred steps is small from window to window.
        window, last = self.thresholds.window, len(self._history) - 1
        now = self._mean(key, last)
        earlier = [(k, m) for k in range(window - 1, last - window + 1) if (m := self._mean(key, k)) is not None]
        if now is None or not earlier:
            return None
        best = (max if worse == "fell" else min)(mean for _, mean in earlier)
        # Many windows may be nearly as good as the best; the trouble began after the last of them.
        near = [k for k, mean in earlier if abs(mean - best) <= _NEAR_BEST * abs(best - now)]
        return _Change(best, now, int(self._history[near[-1]]["step"]), near[-1])

    def _mean(self, key: str, end: int) -> float | None:
        """Over the window that ends at this place of the history; None where most of it was not measured."""
        window = self.thresholds.window
        values = [entry[key] for entry in self._history[max(0, end - window + 1) : end + 1] if key in entry]
        return fmean(values) if 2 * len(values) > window else None

    def _spread(self) -> float:
        """Standard deviation of the rewards of a step, the mean over the steps before the last window."""
        earlier = self._history[: -self.thresholds.window] or self._history
        return fmean([entry[SPREAD] for entry in earlier if SPREAD in entry] or [0.0])

    def _reward_since(self, index: int) -> tuple[Direction, float, float]:
        """What the reward did since the window that ends there: (direction, before, now)."""
        before, now = self._mean(REWARD, index), self._mean(REWARD, len(self._history) - 1)
        if before is None or now is None:
            return "stayed", math.nan, math.nan
        margin = _REWARD_MARGIN * self._spread()
        return ("rose" if now > before + margin else "fell" if now < before - margin else "stayed"), before, now

    def _words(self, step: int, signs: tuple[Sign, ...]) -> tuple[str, Direction]:
        """The sentence, and what the reward did."""
        told = [s.text if s.since == step else f"{s.text} within {step - s.since} steps" for s in signs]
        names = {sign.name for sign in signs}
        index = next((k for k, entry in enumerate(self._history) if entry["step"] >= signs[0].since), 0)
        direction, before, now = self._reward_since(index)
        meanwhile = {
            "rose": f", while the reward rose from {before:.2f} to {now:.2f}",
            "fell": "" if "reward_drop" in names else f", and the reward fell from {before:.2f} to {now:.2f}",
            "stayed": "" if math.isnan(now) else f", while the reward stayed at {now:.2f}",
        }[direction]
        hint = next(hint for needed, reward, hint in _HINTS if needed <= names and direction in reward)
        listed = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
        return f"{listed}{meanwhile}: {hint}", direction


def _went_flat(guard: CollapseGuard, change: _Change, threshold: float) -> bool:
    """Not where the groups are flat because they are solved, or at the best reward of the run."""
    if change.now < threshold or change.now - change.before < _FLAT_MARGIN:
        return False
    solved = guard._mean(SOLVED, len(guard._history) - 1) or 0.0
    reward = guard._change(REWARD, "fell")
    below_best = reward is not None and reward.before - reward.now > _REWARD_MARGIN * guard._spread()
    return solved < change.now / 2 and below_best


def _reward_fell(guard: CollapseGuard, change: _Change, threshold: float) -> bool:
    spread = guard._spread()
    return spread > 0 and change.before - change.now >= threshold * spread


@dataclass(frozen=True)
class _Rule:
    """When a change of one number is a sign."""

    key: str
    worse: Direction
    text: str
    holds: Callable[[CollapseGuard, _Change, float], bool]
    """(guard, change, threshold)"""


_RULES = {
    "tool_use_drop": _Rule(
        TOOL_USE, "fell", "tool use fell from {before:.2f} to {now:.2f}",
        lambda guard, change, least: change.before - change.now >= least,
    ),
    "turns_drop": _Rule(
        TURNS, "fell", "turns per conversation fell from {before:.2f} to {now:.2f}",
        lambda guard, change, share: change.now <= (1 - share) * change.before and not guard.pays_off(change),
    ),
    "turns_rise": _Rule(
        TURNS, "rose", "turns per conversation rose from {before:.2f} to {now:.2f}",
        lambda guard, change, share: change.now >= (1 + share) * change.before and not guard.pays_off(change),
    ),
    "entropy_rise": _Rule(
        ENTROPY, "rose", "entropy rose from {before:.2f} to {now:.2f}",
        lambda guard, change, factor: (
            change.now >= factor * change.before and change.now - change.before >= _ENTROPY_MARGIN
        ),
    ),
    "entropy_drop": _Rule(
        ENTROPY, "fell", "entropy fell from {before:.2g} to {now:.2g}",
        lambda guard, change, factor: change.now <= factor * change.before and not guard.pays_off(change),
    ),
    "truncation_rise": _Rule(
        TRUNCATED, "rose", "conversations cut by a length limit rose from {before:.2f} to {now:.2f}",
        lambda guard, change, least: change.now - change.before >= least,
    ),
    "flat_groups": _Rule(
        FLAT, "rose", "groups whose samples all score alike rose from {before:.2f} to {now:.2f}", _went_flat,
    ),
    "reward_drop": _Rule(REWARD, "fell", "the reward fell from {before:.2f} to {now:.2f}", _reward_fell),
}  # fmt: skip

_KEYS = {name: rule.key for name, rule in _RULES.items()} | {"sampler_kl": SAMPLER_KL}

_ANY: tuple[Direction, ...] = ("rose", "fell", "stayed")
_HINTS: tuple[tuple[set[str], tuple[Direction, ...], str], ...] = (
    ({"sampler_kl"}, _ANY,
     "the sampler may no longer run the policy that is trained; look at the weight sync, dtype and temperature, and "
     "with trainer.max_staleness at how old tokens are (docs/asynchronous.md)"),
    ({"tool_use_drop", "truncation_rise"}, ("rose",),
     "the reward may be paid for length, and without tools; read rollouts that were cut"),
    ({"tool_use_drop"}, ("rose", "stayed"),
     "the reward may be paid without tools (a format reward that is hacked?); compare reward/without_format and "
     "val/accuracy, and read rollouts without a call"),
    ({"truncation_rise"}, ("rose",), "the reward may be paid for length; read rollouts that were cut"),
    ({"entropy_rise"}, _ANY,
     "the policy falls apart; the learning rate or entropy_coeff may be too large"),
    ({"tool_use_drop"}, _ANY,
     "the model loses its calls; look at tools/failure_frequency, and lower the learning rate"),
    ({"truncation_rise"}, _ANY, "turns no longer end; lower the learning rate, or penalise what is too long"),
    ({"entropy_drop"}, _ANY,
     "the policy repeats itself without being right; a larger clip_ratio_high or fresh prompts keep it looking"),
    ({"turns_rise"}, _ANY, "conversations go in circles; a turn_cost or max_tool_calls ends them"),
    ({"turns_drop"}, _ANY, "the model gives up early; read rollouts that end after one turn"),
    ({"reward_drop"}, _ANY, "lower the learning rate, or go back to an earlier checkpoint"),
    (set(), _ANY, "no difference is left to learn from"),
)  # fmt: skip
"""(Signs, what the reward did) -> what may be the matter; the first that fits."""
