"""Values of a script inside our overrides.

`${oc.env:NAME}` is the shell's variable NAME, and text that only a shell can compute is a variable whose name holds it.

Of expansions that are more than a variable and its default (`${MODEL##*/}`, `${N:?needed}`, `${RATES[1]}`), an item
of an array and a cut of a value that the script sets are put in. Any other is left to the shell,
together with the assignment
that it reads, since the command that is printed stands without the script.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Callable

Piece = tuple[str, str]
"""(kind, text): `plain`; `expands` and `quoted`, where variables are put in; `array`."""
Word = list[Piece]

_KEPT = "VERL_MT_SHELL_"
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")
_PARTS = re.compile(r"([A-Za-z_]\w*|\d)(?:\[([^\]]+)\])?((?:##?|%%?|:|//?|\^\^?|,,?|\?|\+|-|=|@).*)?", re.DOTALL)
_LENGTH = re.compile(r"#([A-Za-z_]\w*)(\[[@*]\])?")


def kept(text: str, otherwise: str | None = None) -> str:
    """What only a shell can compute, `$(pwd)`, as a variable whose name holds the text; `shell_text` reads it.

    Args:
        otherwise: what it gives where none of its variables is set outside; None = not known.
    """
    default = "" if otherwise is None or re.search(r"[${},'\"]", otherwise) else f",{otherwise}"
    return f"${{oc.env:{_KEPT}{text.encode().hex()}{default}}}"


def without_variables(value: str) -> str | None:
    """A value where none of its variables is set outside; None where one has no default."""
    plain = _VARIABLE.sub(lambda found: found[0] if found[2] is None else found[2], value)
    return None if "${" in plain else plain


def shell_text(name: str) -> str | None:
    """The text that `kept` has put into a variable's name; None for a variable of the user's."""
    return bytes.fromhex(name.removeprefix(_KEPT)).decode() if name.startswith(_KEPT) else None


def for_shell(value: str) -> str:
    """A value with its variables as a shell writes them."""

    def text(found: re.Match[str]) -> str:
        computed = shell_text(found[1])
        if computed is not None:
            return computed
        return f"${{{found[1]}}}" if found[2] is None else f"${{{found[1]}:-{found[2]}}}"

    while (plain := _VARIABLE.sub(text, value)) != value:  # a default may hold another variable
        value = plain
    return value


def is_known(value: str) -> bool:
    """Whether a value needs no shell."""
    return "${oc.env:" not in value


def expansion(
    inner: str, variables: dict[str, str], arrays: dict[str, list[str]], fill: Callable[[str], str]
) -> str | None:
    """What stands for `${inner}`.

    Args:
        fill: puts variables into a pattern, a place or an alternative.

    Returns:
        the value, or what leaves it to the shell; None where it is no expansion of one word.
    """
    if (length := _LENGTH.fullmatch(inner)) is not None:
        return _length(inner, length[1], length[2], variables, arrays)
    found = _PARTS.fullmatch(inner)
    if found is None:
        return None
    name, place, how = found[1], found[2], found[3] or ""
    if place == "*" and not how and name in arrays:
        return " ".join(arrays[name])
    if place in ("@", "*") or (place is not None and name not in arrays):
        return None
    value = variables.get(name)
    if place is not None:
        value = _item(arrays[name], fill(place if "$" in place else variables.get(place, place)))
        if value is None:
            return None
    if not how:
        return value
    return _applied(name, value, how, fill)


def _length(
    inner: str, name: str, of_array: str | None, variables: dict[str, str], arrays: dict[str, list[str]]
) -> str:
    if of_array and name in arrays:
        return str(len(arrays[name]))
    value = variables.get(name)
    if value is not None and is_known(value):
        return str(len(value))
    return _left_to_shell(name, value, f"#{name}") if not of_array else kept(f"${{{inner}}}")


def _item(items: list[str], place: str) -> str | None:
    """An item; a place behind the last is empty, as in a shell. None where the place is not known here."""
    if re.fullmatch(r"-?\d+", place) is None:
        return None
    return items[int(place)] if -len(items) <= int(place) < len(items) else ""


def _applied(name: str, value: str | None, how: str, fill: Callable[[str], str]) -> str:
    """A value behind what is written after its name; None = the script does not set it."""
    if value is not None and is_known(value):
        needed = re.fullmatch(r"(:?)\?.*|(:?)[-=](.*)", how, re.DOTALL)
        if needed is not None and (value or not (needed[1] or needed[2])):
            return value
        if needed is not None and needed[3] is not None:
            return fill(needed[3].replace('"', ""))
        if (other := re.fullmatch(r"(:?)\+(.*)", how, re.DOTALL)) is not None:
            return fill(other[2].replace('"', "")) if value or not other[1] else ""
        cut = re.fullmatch(r"(##?|%%?)([^\\'\"]*)", how)
        pattern = fill(cut[2]) if cut is not None else ""
        if cut is not None and is_known(pattern):
            return _cut(value, cut[1], pattern)
    # What is put in for the shell is read in a command of its own, where the pattern's variables are not set either.
    return _left_to_shell(name, value, name + for_shell(fill(how)))


def _cut(value: str, how: str, pattern: str) -> str:
    """`#` and `%` take the shortest beginning or end that a pattern fits, `##` and `%%` the longest."""
    lengths = range(len(value) + 1) if len(how) == 1 else range(len(value), -1, -1)
    for length in lengths:
        part = value[:length] if how[0] == "#" else value[len(value) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return value[length:] if how[0] == "#" else value[: len(value) - length]
    return value


def _left_to_shell(name: str, value: str | None, text: str) -> str:
    """`${text}` for the shell, behind the assignment of what it reads."""
    if value is None:
        return kept(f"${{{text}}}")
    own = f"_{name}" if name.isdigit() else name
    text = re.sub(rf"^(#?){name}", rf"\g<1>{own}", text)
    if is_known(value):
        return kept(f'$({own}={shlex.quote(value)}; printf %s "${{{text}}}")')
    plain = re.sub(r'[\\"`]|\$(?!\{oc\.env:)', r"\\\g<0>", value)
    return kept(f'$({own}="{for_shell(plain)}"; printf %s "${{{text}}}")')
