"""Interactions of a YAML file, under verl's names and with the kinds of errors that its callers expect."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml

from verl_mt.config.declarations import load_declarations
from verl_mt.interactions.base import BaseInteraction, default_name

__all__ = ["get_interaction_class", "initialize_interactions_from_config"]


def get_interaction_class(cls_name: str) -> Any:
    """The class of a dotted path.

    Raises:
        ModuleNotFoundError, AttributeError: there is none.
    """
    module, _, name = cls_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, BaseInteraction]:
    """Name -> interaction; `verl_mt.interactions.session.load_interactions` is what a run uses.

    Raises:
        ConfigError: the file has another shape.
        ModuleNotFoundError, AttributeError: a class does not exist.
        ValueError: two have one name.
    """
    found: dict[str, BaseInteraction] = {}
    if yaml.safe_load(Path(interaction_config_file).read_text(encoding="utf-8")) == {"interaction": []}:
        return found
    key = "interaction_config_file"
    for declaration in load_declarations(interaction_config_file, key="interaction", config_key=key, fields=("name",)):
        kind = get_interaction_class(declaration.class_name)
        name = declaration.values.get("name") or default_name(kind.__name__)
        if name in found:
            raise ValueError(f"Duplicate interaction name {name!r} found: give one of them another name")
        found[name] = kind(config={**declaration.config, "name": name})
    return found
