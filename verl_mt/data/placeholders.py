"""`<image>` and `<video>` in a row's prompt, and the columns that say what they are.

A row with a column `images` or `videos` (verl's and ms-swift's names) marks the places in its texts; a message may also
have a list of parts with `{"type": "image"}` in it. Each place takes the next item of its column.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.media import KINDS, Kind
from verl_mt.errors import DataError

_PLACE = re.compile("<(image|video)>")


def place_media(
    messages: Sequence[Message], columns: Mapping[str, Any], where: str, *, folder: str = ""
) -> list[Message]:
    """The messages with images and videos in their places; as they are where the row has none.

    Args:
        messages: the prompt.
        columns: `images` and `videos`, each one item or a list.
        where: file and row, for errors.
        folder: of the data file; a path that leads nowhere is looked for there too.

    Raises:
        DataError: as many places as items are needed; says both numbers.
    """
    items: dict[Kind, list[Any]] = {kind: _listed(columns.get(f"{kind}s")) for kind in KINDS}
    if not any(items.values()):
        return list(messages)
    wanted = {kind: sum(found == kind for m in messages for found in _places(m)) for kind in KINDS}
    for kind in KINDS:
        if wanted[kind] != len(items[kind]):
            raise DataError(
                f"{where}: {wanted[kind]} places <{kind}> in the text, but {kind}s holds {len(items[kind])} items; "
                "every item needs one place, in order"
            )
    supply = {kind: iter([_portable(item, folder) for item in items[kind]]) for kind in KINDS}
    return [_filled(message, supply) for message in messages]


def has_places(messages: Sequence[Message]) -> bool:
    """Whether there is a place `<image>` or `<video>` in the messages."""
    return any(next(_places(message), None) is not None for message in messages)


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _places(message: Message) -> Iterator[str]:
    for part in _parts(message):
        if not isinstance(part, Mapping):
            continue
        if part.get("type") in KINDS and part.get(part["type"]) is None:
            yield part["type"]
        elif isinstance(part.get("text"), str):
            yield from _PLACE.findall(part["text"])


def _filled(message: Message, supply: Mapping[Kind, Iterator[Any]]) -> Message:
    if next(_places(message), None) is None:
        return message
    parts: list[Any] = []
    for part in _parts(message):
        if part.get("type") in KINDS and part.get(part["type"]) is None:
            parts.append({**part, part["type"]: next(supply[part["type"]])})
        elif isinstance(part.get("text"), str):
            parts += _split(part["text"], supply)
        else:
            parts.append(part)
    return {**message, "content": parts}


def _split(text: str, supply: Mapping[Kind, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Texts and media, alternating: `re.split` puts what a group matched at the odd places."""
    for place, piece in enumerate(_PLACE.split(text)):
        if place % 2:
            kind: Any = piece
            yield {"type": kind, kind: next(supply[kind])}
        elif piece:
            yield {"type": "text", "text": piece}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _portable(value: Any, folder: str) -> Any:
    """Bytes as a data URI, so that messages can be written as JSON; a path beside the data file as its whole path."""
    if isinstance(value, bytes | bytearray):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, Mapping):
        return {key: _portable(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(inner, folder) for inner in value]
    if isinstance(value, str) and "://" not in value and not value.startswith("data:") and folder:
        beside = Path(folder) / value
        return str(beside) if not os.path.exists(value) and beside.exists() else value
    return value
