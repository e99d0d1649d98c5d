"""Overrides without their secrets."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from verl_mt.config.normalize import literal
from verl_mt.config.redact import redact


def with_hidden(words: Sequence[str]) -> list[str]:
    """The overrides with secrets replaced."""
    hidden = hidden_words(words)
    return [hidden.get(word, word) for word in words]


def hidden_words(words: Sequence[str]) -> dict[str, str]:
    """Override that holds a secret -> the same with the secret replaced."""
    found: dict[str, str] = {}
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:  # said by whoever composes with it
            continue
        path, value = override.key_or_group.split("."), override.value()
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(path), value)
        shown = functools.reduce(operator.getitem, path, redact(nested))
        if shown != value:
            found[word] = f"{override.get_key_element()}={literal(shown)}"
    return found
