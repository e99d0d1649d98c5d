"""How large and how deep texts and messages from outside may be: what a model, a server, a file or user code sends.

One module, so that a reader sees all limits at once. Each is far above what honest use needs. What is above it is cut
or refused where it arrives, before anything slower than linear looks at it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Of nested lists and mappings."""
MAX_INTEGER_BITS = 14_000
"""4,214 digits. Python refuses to print or read an integer of more than 4,300."""

MAX_FRAME_BYTES = 16 * 2**20
"""Of one message of an MCP server, and of one answer of it over HTTP. An image of 10 MB fits."""

MAX_BODY_BYTES = 16 * 2**20
"""Of an answer of a search service, unpacked, and of a request to an agent's endpoint."""
MAX_YAML_BYTES = 2_000_000
MAX_YAML_VALUES = 100_000
"""Of a configuration, and of a file that declares tools, interactions or servers: its size, and its values where
anchors are written out."""

MAX_SCRIPT_CHARACTERS = 100_000
"""Of a launch script that is migrated, and of each file that it reads with `source`."""
MAX_SCRIPT_WORK = 20_000_000
"""Characters that a launch script's variables, arrays and sequences become while it is read."""
MAX_SCRIPT_BRANCHES = 200
"""Of a launch script: branches in one another, or one after the other in one `if` or `case`."""

MAX_TEMPLATE_CHARACTERS = 500_000
"""Of a chat template, which is compiled at load; the longest in use have 20,000."""

MAX_SCHEMA_VALUES = 20_000
MAX_SCHEMA_CHARACTERS = 1_000_000
"""Of a tool's JSON Schema: values at any depth, letters of all its texts."""

MAX_ARGUMENT_VALUES = 10_000
MAX_ARGUMENT_CHARACTERS = 1_000_000
"""Of the arguments of one tool call."""
MAX_CHECK_STEPS = 10_000
"""Keywords of a schema that are applied to values of one call: about half a second at most."""

MAX_TEXT_CHARACTERS = 2_000
"""Of the text of a foreign exception on its way to a log or a file."""
MAX_PAGE_CHARACTERS = 20_000
"""Of a traceback, of an error of verl_mt (it may list many mistakes), of anything that is logged."""

_UNPRINTABLE = re.compile(
    # Control characters but tab and newline, lone surrogates, and what turns the direction of text.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """A text of others as it may reach a terminal or a file: cut in its middle, control characters escaped.

    Args:
        limit: characters that are kept of it.
    """
    if len(text) > limit:
        head = limit * 3 // 4
        text = f"{text[:head]} ... ({len(text) - limit} characters left out) ... {text[head - limit :]}"
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
