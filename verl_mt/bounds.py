"""How large and how deep texts and messages from outside may be: what a model, a server, a file or user code sends.

One module, so that a reader sees all limits at once. Each is far above what honest use needs. What is above it is cut
or refused where it arrives, before anything slower than linear looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Of nested lists and mappings."""
MAX_INTEGER_BITS = 14_000
"""4,214 digits. Python refuses to print or read an integer of more than 4,300."""

MAX_FRAME_BYTES = 16 * 2**20
"""Of one message of an MCP server, and of one answer of it over HTTP. An image of 10 MB fits."""

MAX_SCHEMA_VALUES = 20_000
MAX_SCHEMA_CHARACTERS = 1_000_000
"""Of a tool's JSON Schema: values at any depth, letters of all its texts."""

MAX_ARGUMENT_VALUES = 10_000
MAX_ARGUMENT_CHARACTERS = 1_000_000
"""Of the arguments of one tool call."""
MAX_CHECK_STEPS = 10_000
"""Keywords of a schema that are applied to values of one call: about half a second at most."""


def excess(value: Any, *, max_values: int, max_characters: int) -> str:
    """What of a JSON value is above a bound, as in "more than 10000 values"; empty where nothing is.

    Its time is bounded too, however large the value is. A part that stands in several places counts each time.

    Args:
        max_values: values at any depth, the whole included.
        max_characters: of all texts and keys together.
    """
    num_values, num_characters = 0, 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        num_values += 1
        if isinstance(item, str):
            num_characters += len(item)
        elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
            return "an integer of more than 4214 digits"
        elif isinstance(item, Mapping | list | tuple):
            if depth == MAX_DEPTH:
                return f"more than {MAX_DEPTH} levels"
            if num_values + len(waiting) + len(item) > max_values:
                return f"more than {max_values} values"
            if isinstance(item, Mapping):
                num_characters += sum(len(key) for key in item if isinstance(key, str))
                item = item.values()
            waiting += [(part, depth + 1) for part in item]
        if num_characters > max_characters:
            return f"more than {max_characters} characters"
    return ""
