"""Inference engines: exact ids in, exact ids and log-probs out.

`base.py` is the contract. `local` samples in this process from the actor's own module, `scripted` replays fixed turns.
Extensions bring others; a dotted path or `file.py:Name` is an engine of the user's (docs/your_own_engine.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mt.config.rollout import ENGINES, RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig, Config, TrainerConfig
from verl_mt.engines.base import MEDIA, TRANSPORTS, Capabilities, EngineSetup, InferenceEngine
from verl_mt.errors import ConfigError, PluginError, VerlMTError, error_text, value_text
from verl_mt.plugins import listing, load_object

__all__ = [
    "build",
    "check",
    "check_overlap",
    "lives_beside_ranks",
    "packages_of",
    "rank_environment",
    "samples_from_policy",
]

_KEY = "actor_rollout_ref.rollout.name"
_INSTEAD = "use an engine that can (sglang, or local with a model of text)"


def check(config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
    """Whether the engine that is named exists, and can do what is configured. Nothing is loaded yet but its code.

    Raises:
        PluginError: there is no such engine.
        ConfigError: it does not go with the rest of the configuration.
    """
    name, dtype = config.rollout.name, config.model.dtype
    engine = _find(name)
    if getattr(engine, "samples_from_policy", False):
        if config.rollout.dtype not in (None, dtype):
            raise ConfigError(
                f"actor_rollout_ref.rollout.dtype is {config.rollout.dtype}: {_KEY}={name} samples with the actor's "
                f"own weights, which are {dtype}. Leave it null, or change actor_rollout_ref.model.dtype"
            )
        if config.actor.param_offload and trainer.placement == "inline":
            raise ConfigError(
                f"actor_rollout_ref.actor.param_offload=True offloads the weights during rollouts, and {_KEY}={name} "
                "samples with the actor's weights: remove it, or use a separate engine (sglang)"
            )
        if trainer.placement == "ray" and trainer.steps_ahead:
            raise ConfigError(
                f"trainer.max_staleness={trainer.max_staleness}: {_KEY}={name} with trainer.placement=ray samples in "
                "the trainer's process from a copy of the policy, which cannot change while it does: use sglang, "
                "trainer.placement=inline, or max_staleness=0"
            )
        if trainer.placement == "ray" and trainer.device == "cuda":
            raise ConfigError(
                f"{_KEY}={name} with trainer.placement=ray samples on the CPU, from a copy of the policy in the "
                "trainer's process: use sglang, or trainer.device=cpu"
            )
    if trainer.steps_ahead and not getattr(engine, "overlaps_training", False):
        raise ConfigError(
            f"trainer.max_staleness={trainer.max_staleness}, but {_KEY}={name} does not say that it samples while the "
            f"policy is trained (overlaps_training = True, engines/base.py); {_INSTEAD}, or set max_staleness=0"
        )
    if isinstance(engine, type) and issubclass(engine, InferenceEngine):
        engine.check_config(config, trainer)


def samples_from_policy(name: str) -> bool:
    """Whether this engine samples from the actor's own module, so that nobody needs to send it weights."""
    return getattr(_find(name), "samples_from_policy", False)


def lives_beside_ranks(name: str) -> bool:
    """Whether this engine has a replica on the devices of each rank, or each few, of a worker group."""
    return getattr(_find(name), "lives_beside_ranks", False)


def packages_of(name: str) -> tuple[str, ...]:
    """Distributions that this engine imports."""
    packages: tuple[str, ...] = getattr(_find(name), "packages", ())
    return packages


def rank_environment(rollout: RolloutConfig) -> Mapping[str, str]:
    """See `InferenceEngine.rank_environment`."""
    engine = _find(rollout.name)
    is_class = isinstance(engine, type) and issubclass(engine, InferenceEngine)
    return engine.rank_environment(rollout) if is_class else {}


def build(setup: EngineSetup) -> InferenceEngine:
    """The engine that the config names.

    Raises:
        PluginError: there is no such engine; one of the user's raised when it was made, or does not say what it can do.
        ConfigError: it does not take an option, or cannot be deterministic and is to be.
    """
    name = setup.config.rollout.name
    made = _find(name)
    make = made.from_setup if isinstance(made, type) and issubclass(made, InferenceEngine) else made
    try:
        engine = make(setup)
    except (VerlMTError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if name in ENGINES:
            raise
        text = error_text(error, named=True)
        raise PluginError(f"{_KEY}={name}: making it from an EngineSetup (engines/base.py) failed: {text}") from error
    if not isinstance(engine, InferenceEngine):
        raise PluginError(f"{_KEY}={name} made {type(engine).__name__}, expected an InferenceEngine (engines/base.py)")
    _check_capabilities(name, getattr(engine, "capabilities", None))
    if setup.deterministic and not engine.capabilities.deterministic:
        raise ConfigError(
            f"trainer.deterministic needs an engine that gives the same bits whatever the timing, which {_KEY}={name} "
            "does not (its capabilities.deterministic is False). Use local"
        )
    return engine


def check_overlap(engine: InferenceEngine, config: Config) -> None:
    """Whether the engine can sample while the policy is trained.

    Raises:
        ConfigError: it cannot; says what to set.
    """
    can, name, max_staleness = engine.capabilities, config.actor_rollout_ref.rollout.name, config.trainer.max_staleness
    if can.overlaps_training and engine.samples_from_policy and "in_place" in can.transports:
        raise ConfigError(
            f"{_KEY}={name}: its capabilities have overlaps_training and the transport in_place, but a policy that is "
            "trained meanwhile is sampled from a copy, which gets its weights by tensor_buckets (engines/base.py)"
        )
    if can.overlaps_training and not can.returns_token_ids:
        raise ConfigError(
            f"trainer.max_staleness={max_staleness}, but {_KEY}={name} returns text: how probable its tokens were to "
            "the weights that sampled them is not known. Use an engine that returns token ids (sglang, local), or set "
            "max_staleness=0"
        )
    if can.overlaps_training and not can.frees_memory:
        return
    why, instead = "", _INSTEAD
    if can.frees_memory:
        why = ": it frees its memory for training meanwhile"
        instead = (
            "use separate devices (actor_rollout_ref.rollout.nnodes or servers), or keep the engine's memory "
            "(rollout.free_cache_engine=False)"
        )
    raise ConfigError(
        f"trainer.max_staleness={max_staleness}, but {_KEY}={name} does not sample while the policy is trained{why}; "
        f"{instead}, or set max_staleness=0"
    )


def _check_capabilities(name: str, can: Any) -> None:
    if not isinstance(can, Capabilities):
        raise PluginError(
            f"{_KEY}={name}: its `capabilities` must be a Capabilities (engines/base.py), got {value_text(can, 80)}. "
            "Set it in the constructor"
        )
    for field, known in (("transports", TRANSPORTS), ("media", MEDIA)):
        unknown = set(getattr(can, field)) - set(known)
        if unknown:
            raise PluginError(
                f"{_KEY}={name}: capabilities.{field} names {listing(map(str, unknown))}. There is: {listing(known)}"
            )


def _find(name: str) -> Any:
    """A class of engines, or a function of an `EngineSetup`. Loaded when it is chosen: who only needs the contract or a
    script loads neither transformers nor a client."""
    found = load_object(name, what=_KEY, registry=ENGINES)
    if isinstance(found, type) and not issubclass(found, InferenceEngine):
        raise PluginError(f"{_KEY}={name}: {found.__name__} is no InferenceEngine (engines/base.py)")
    if not callable(found):
        raise PluginError(f"{_KEY}={name} is {found!r}, expected the class of an InferenceEngine, or a function")
    return found
