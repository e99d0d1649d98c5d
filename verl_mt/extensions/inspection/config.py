"""Keys of the collapse guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.config.declare import Section, is_set, option, read_options
from verl_mt.config.extended import ConfigSections

THRESHOLDS = "trainer.collapse_guard_thresholds"


@dataclass
class GuardThresholds(Section):
    """Means over `window` steps are compared with the best such mean before them; null switches a sign off."""

    window: int = option(3, "Steps whose mean is compared.", min=1)
    tool_use_drop: float | None = option(0.3, "Fall of tools/use_rate.", min=0, max=1)
    turns_drop: float | None = option(
        0.3, "Fall of turns/mean as a share of it, only if the reward has not risen.", min=0
    )
    turns_rise: float | None = option(0.5, "Its rise as a share of it, only if the reward has not risen.", min=0)
    entropy_rise: float | None = option(2.0, "rollout/entropy, in times its lowest (and 0.1 above it).", min=1)
    entropy_drop: float | None = option(
        0.2, "rollout/entropy as a share of its highest, only if the reward has not risen.", min=0, max=1
    )
    flat_groups: float | None = option(
        0.9, "group/zero_variance, 0.3 above its lowest, where groups are not solved.", min=0, max=1
    )
    truncation_rise: float | None = option(0.45, "Rise of response/clip_ratio.", min=0, max=1)
    reward_drop: float | None = option(
        0.7, "Fall of reward/mean, in standard deviations of the rewards of a step.", min=0
    )
    sampler_kl: float | None = option(0.02, "rollout/sampler_kl.", min=0)


def read_thresholds(given: Mapping[str, Any]) -> GuardThresholds:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown name or a value that cannot be; names the key.
    """
    return read_options(GuardThresholds, given, THRESHOLDS)


@dataclass
class TrainerKeys(Section):
    """What this extension adds to `trainer`."""

    collapse_guard: Any = option(
        "warn",
        "What to do when entropy, tool use, turns, truncation, zero-variance groups, reward or the KL to the sampler "
        "say that the run collapses (docs/diagnostics.md): warn. stop = end with a bundle and exit status 3. "
        "rollback = back to the last good checkpoint, at most twice. off.",
        choices=("off", "warn", "stop", "rollback"),
        also={False: "off"},
        may_change=True,
    )
    collapse_guard_thresholds: dict[str, Any] = option(
        {},
        "Its thresholds where they differ from the defaults. null switches a sign off.",
        options=GuardThresholds,
        when=is_set("trainer.collapse_guard"),
        may_change=True,
    )


SECTIONS = ConfigSections({"trainer": TrainerKeys})
