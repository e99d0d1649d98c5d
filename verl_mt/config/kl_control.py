"""What `algorithm.kl_ctrl` may hold: the weight of the KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_mt.config.knob import Section, check_knob, knob
from verl_mt.errors import ConfigError
from verl_mt.plugins import suggest

KEY = "algorithm.kl_ctrl"


@dataclass
class KLControlOptions(Section):
    """The mapping with its defaults, verl's."""

    type: str = knob("fixed", "Constant, or held near a target.", choices=("fixed", "adaptive"))
    kl_coef: float = knob(0.001, "The weight, at the start.", min=0)
    target_kl: float = knob(0.1, "adaptive: the mean penalty per token that is aimed at.", min=1e-9)
    horizon: float = knob(10000.0, "adaptive: trajectories over which the weight moves.", min=1)


def read_kl_control(given: Mapping[str, Any]) -> KLControlOptions:
    """The mapping of a configuration, checked.

    Raises:
        ConfigError: an unknown key, a value that cannot be, or a key that a constant weight does not read.
    """
    known = {item.name: item for item in fields(KLControlOptions)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{KEY}.{name}: unknown key{suggest(str(name), known)}. Known: {', '.join(known)}")
        check_knob(f"{KEY}.{name}", value, known[name].metadata)
        if name != "type" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{KEY}.{name}: got {value!r}, expected a number")
    options = KLControlOptions(**given)
    if options.type == "adaptive" and options.kl_coef == 0:
        raise ConfigError(f"{KEY}.kl_coef is 0 with type=adaptive: 0 times anything stays 0; give a start, e.g. 0.001")
    return options
