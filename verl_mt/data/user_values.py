"""Values of user code, checked where they come in.

Each function returns the value in its plain form (lists and numbers of numpy and torch become Python's), or raises a
`WrongValue` whose text names the field, what was expected and what was got. The caller adds whose code it was, and
fails the trajectory.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.errors import value_text

MAX_DEPTH = 100
"""Levels of lists and dicts inside each other. Far above what JSON of tools has, far below where recursion ends."""

_TEXTS = ("reasoning_content", "tool_call_id", "name")


class WrongValue(ValueError):
    """A value of the wrong type or shape."""


def bool_of(value: Any, what: str) -> bool:
    """True or False, also as 0 or 1, as a scalar of numpy or torch: a text such as "False" is neither."""
    number = _scalar(value)
    if not isinstance(number, numbers.Integral) or number not in (0, 1):
        raise _wrong(value, what, "True or False")
    return bool(number)


def number_of(value: Any, what: str) -> float:
    """A finite number, also a scalar of numpy or torch."""
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # an array of several elements
            raise _wrong(value, what, "a finite number") from None
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(value, what, "a finite number")
    return number


def text_of(value: Any, what: str) -> str:
    """A text that can be encoded."""
    if not isinstance(value, str):
        raise _wrong(value, what, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise WrongValue(
            f"{what} holds half of a surrogate pair ({value[error.start]!r} at {error.start}), which no tokenizer "
            "takes. Replace it: text.encode('utf-8', 'replace').decode()"
        ) from None
    return value


def stops_of(value: Any, what: str) -> tuple[str, ...]:
    """Strings that end a turn: a text or a list of texts, none of them empty; None for none."""
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong(value, what, "a text or a list of texts, none of them empty")
    return tuple(stops)


def count_of(value: Any, what: str) -> int:
    """A whole number of at least 1."""
    count = _index(value)
    if count is None or count < 1:
        raise _wrong(value, what, "a whole number of at least 1")
    return count


def ids_of(value: Any, what: str) -> list[int]:
    """A flat list of whole numbers."""
    items = _items(value, what, "a list of token ids")
    if set(map(type, items)) <= {int}:  # as good as always, and quick
        return list(items)
    found = []
    for place, item in enumerate(items):
        index = _index(item)
        if index is None:
            raise _wrong(item, f"{what}[{place}]", "a whole number")
        found.append(index)
    return found


def bits_of(value: Any, what: str) -> list[int]:
    """A flat list of 0 and 1 (True, 1.0)."""
    items = _items(value, what, "a list of 0 and 1")
    if set(map(type, items)) <= {int, bool} and set(items) <= {0, 1}:  # as good as always, and quick
        return list(map(int, items))
    found = [_scalar(item) for item in items]
    for place, bit in enumerate(found):
        if not isinstance(bit, numbers.Real) or bit not in (0, 1):
            raise _wrong(items[place], f"{what}[{place}]", "0 or 1")
    return list(map(int, found))


def numbers_of(value: Any, what: str) -> list[float]:
    """A flat list of finite numbers."""
    items = _items(value, what, "a list of numbers")
    if set(map(type, items)) <= {float} and all(map(math.isfinite, items)):  # as good as always, and quick
        return list(items)
    return [number_of(item, f"{what}[{place}]") for place, item in enumerate(items)]


def log_probs_of(value: Any, what: str, num_ids: int, num_trained: int) -> list[float] | None:
    """Numbers, one per id or one per id in the loss, also as one list per turn; None where there are none."""
    if value is None:
        return None
    parts = list(value) if is_nested(value) else [value]
    found = [number for part in parts for number in numbers_of(part, what)]
    if len(found) not in (num_ids, num_trained):
        raise WrongValue(
            f"{what} has {len(found)} entries for {num_ids} response_token_ids ({num_trained} in the loss). Leave it "
            "out, the engine's own are recorded"
        )
    return found


def is_nested(value: Any) -> bool:
    """Whether it is a list that holds lists, as one list per turn; arrays of numpy and torch are lists too."""
    value = _as_list(value)
    return isinstance(value, list | tuple) and any(isinstance(_as_list(item), list | tuple) for item in value)


def messages_of(value: Any, what: str) -> list[Message]:
    """At least one message that a chat template can render.

    `role` is a text, `content` a text or a list of parts; only an assistant's may be None.
    """
    if not isinstance(value, list | tuple) or not value:
        raise _wrong(value, what, "a list of messages with at least one")
    for place, message in enumerate(value):
        _check_message(message, f"{what}[{place}]")
    return value if isinstance(value, list) else list(value)  # the same object: whoever handed it in may append to it


def tools_of(value: Any, what: str) -> list[dict[str, Any]]:
    """Schemas, in whatever shape the chat template shows them."""
    if not isinstance(value, list | tuple):
        raise _wrong(value, what, "a list of tool schemas")
    for place, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise _wrong(tool, f"{what}[{place}]", "a dict such as {'type': 'function', 'function': {'name': ...}}")
        plain_of(tool, f"{what}[{place}]")
    return list(value)


def plain_of(value: Any, what: str) -> Any:
    """The value, if it is data: nested no deeper than `MAX_DEPTH`, and so not inside itself."""
    level = {id(value): value}  # by identity: what holds itself twice does not double with every level
    for _ in range(MAX_DEPTH):
        level = {id(inner): inner for outer in level.values() for inner in _inside(outer)}
        if not level:
            return value
    raise WrongValue(
        f"{what} is nested more than {MAX_DEPTH} levels deep, or holds itself, and cannot be written. Flatten it"
    )


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise _wrong(message, where, "a dict with role and content")
    role, content = message.get("role"), message.get("content")
    text_of(role, f"{where}['role']")
    if isinstance(content, list | tuple):
        for place, part in enumerate(content):
            _check_part(part, f"{where}['content'][{place}]")
    elif content is not None or role != "assistant":
        text_of(content, f"{where}['content']")
    for name in _TEXTS:
        if message.get(name) is not None:
            text_of(message[name], f"{where}[{name!r}]")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise _wrong(calls, f"{where}['tool_calls']", "a list")
    for place, call in enumerate(calls or ()):
        _check_call(call, f"{where}['tool_calls'][{place}]")
    if message.get("loss") is not None:
        bits_of([message["loss"]], f"{where}['loss']")
    if len(message) > 2:  # a text, or parts of texts, cannot be too deep
        plain_of(message, where)


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise _wrong(part, where, "a part such as {'type': 'text', 'text': ...}")
    if part.get("type") == "text":
        text_of(part.get("text"), f"{where}['text']")
    plain_of(part, where)


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(call, where, "{'type': 'function', 'function': {'name': ..., 'arguments': ...}}")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, dict | str):
        raise _wrong(arguments, f"{where}['function']['arguments']", "a dict, or JSON text")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value


def _items(value: Any, what: str, expected: str) -> Sequence[Any]:
    items = _as_list(value)
    if not isinstance(items, list | tuple):
        raise _wrong(value, what, expected)
    return items


def _as_list(value: Any) -> Any:
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _scalar(value: Any) -> Any:
    """What a scalar of numpy or torch holds; anything else as it is."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _index(value: Any) -> int | None:
    """A whole number, also of numpy and torch; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # arrays of several elements and floats have `__index__` too
        return None


def _wrong(value: Any, what: str, expected: str) -> WrongValue:
    return WrongValue(f"{what} must be {expected}, got {value_text(value, 100)}")
