"""From an interaction YAML file to interactions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_mt.config.declarations import load_declarations
from verl_mt.errors import ConfigError, DataError, PluginError
from verl_mt.interactions.base import BaseInteraction, default_name
from verl_mt.plugins import listing, suggest

CONFIG_KEY = "actor_rollout_ref.rollout.interaction_config_file"


def load_interactions(path: str | Path | None, *, config_key: str = CONFIG_KEY) -> dict[str, BaseInteraction]:
    """Make the interactions that a YAML file declares, one object per entry, by name::

        interaction:
          - name: gsm8k        # optional: the class name without "Interaction", lower-cased
            class_name: verl_mt.interactions.gsm8k_interaction.Gsm8kInteraction
            config: {}

    Args:
        path: the file; None = no interactions.
        config_key: where the path came from, for the error.

    Raises:
        ConfigError: the file is absent or has another shape.
        PluginError: a class does not resolve or is no interaction, its constructor raised, or two have one name.
    """
    if path is None:
        return {}
    found: dict[str, BaseInteraction] = {}
    places: dict[str, str] = {}
    for declaration in load_declarations(path, key="interaction", config_key=config_key, fields=("name",)):
        name = declaration.values.get("name")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ConfigError(f"{declaration.where}: name must be a text, got {name!r}; leave it out for the default")
        kind = declaration.load_class(BaseInteraction)
        name = name or default_name(kind.__name__)
        if name in found:
            raise PluginError(
                f"{declaration.where}: an interaction named {name!r} exists already ({places[name]}); "
                "give one of them another `name`"
            )
        found[name] = declaration.build(kind, config={**declaration.config, "name": name})
        places[name] = declaration.where
    return found


def pick_interaction(
    interactions: Mapping[str, BaseInteraction], interaction_kwargs: Mapping[str, Any] | None
) -> BaseInteraction | None:
    """The interaction of one row.

    Args:
        interactions: from `load_interactions`.
        interaction_kwargs: the row's `extra_info.interaction_kwargs`; its `name` picks one.

    Returns:
        The named one; the only one where the row names none; None where none is configured.

    Raises:
        DataError: an unknown name, or none where several are configured.
    """
    if not interactions:
        return None
    if interaction_kwargs is not None and not isinstance(interaction_kwargs, Mapping):
        raise DataError(f"extra_info.interaction_kwargs must be a mapping, got {interaction_kwargs!r}")
    name = (interaction_kwargs or {}).get("name")
    if name is None and len(interactions) == 1:
        return next(iter(interactions.values()))
    if name is None:
        raise DataError(
            f"extra_info.interaction_kwargs names no interaction and several are configured: {listing(interactions)}; "
            "set interaction_kwargs.name"
        )
    if name not in interactions:
        raise DataError(
            f"extra_info.interaction_kwargs.name: unknown interaction {name!r}{suggest(str(name), interactions)}. "
            f"Configured: {listing(interactions)}"
        )
    return interactions[name]
