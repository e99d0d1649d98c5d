"""The key `actor_rollout_ref.rollout.kernels`."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mt.config.declare import Section, only, option
from verl_mt.config.extended import ConfigSections


@dataclass
class RolloutKeys(Section):
    """What this extension adds to `actor_rollout_ref.rollout`."""

    kernels: str = option(
        "auto",
        "What the local engine, and the update of the model that it samples from, compute with on a CPU: torch = "
        "torch's operators. compiled = kernels that are compiled once on this machine (docs/cpu_kernels.md), an error "
        "where they cannot be used. auto = compiled where possible, and torch in deterministic runs.",
        choices=("auto", "torch", "compiled"),
        when=only("actor_rollout_ref.rollout.name", "local"),
    )


SECTIONS = ConfigSections({"actor_rollout_ref.rollout": RolloutKeys})
