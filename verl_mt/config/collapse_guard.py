"""What `trainer.collapse_guard_thresholds` may hold. Where each number comes from: docs/diagnostics.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_mt.config.knob import Section, check_knob, knob
from verl_mt.errors import ConfigError
from verl_mt.plugins import suggest

KEY = "trainer.collapse_guard_thresholds"


@dataclass
class GuardThresholds(Section):
    """Means over `window` steps are compared with the best such mean before them; null switches a sign off."""

    window: int = knob(3, "Steps whose mean is compared.", min=1)
    tool_use_drop: float | None = knob(0.3, "Fall of tools/use_rate.", min=0, max=1)
    turns_drop: float | None = knob(
        0.3, "Fall of turns/mean as a share of it; only if the reward has not risen.", min=0
    )
    turns_rise: float | None = knob(0.5, "Its rise as a share of it; only if the reward has not risen.", min=0)
    entropy_rise: float | None = knob(2.0, "rollout/entropy, in times its lowest (and 0.1 above it).", min=1)
    entropy_drop: float | None = knob(
        0.2, "rollout/entropy as a share of its highest; only if the reward has not risen.", min=0, max=1
    )
    flat_groups: float | None = knob(
        0.9, "group/zero_variance, 0.3 above its lowest, where groups are not solved.", min=0, max=1
    )
    truncation_rise: float | None = knob(0.45, "Rise of response/clip_ratio.", min=0, max=1)
    reward_drop: float | None = knob(
        0.7, "Fall of reward/mean, in standard deviations of the rewards of a step.", min=0
    )
    sampler_kl: float | None = knob(0.02, "rollout/sampler_kl.", min=0)


def read_thresholds(given: Mapping[str, Any]) -> GuardThresholds:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown name or a value that cannot be; names the key.
    """
    known = {item.name: item for item in fields(GuardThresholds)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{KEY}.{name}: unknown key{suggest(str(name), known)}. Known: {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "window" and not isinstance(value, int):
            raise ConfigError(f"{KEY}.window: got {value!r}, expected a whole number of steps")
        if not number and not (value is None and name != "window"):
            raise ConfigError(f"{KEY}.{name}: got {value!r}, expected a number, or null to switch the sign off")
        check_knob(f"{KEY}.{name}", value, known[name].metadata)
    return GuardThresholds(**given)
