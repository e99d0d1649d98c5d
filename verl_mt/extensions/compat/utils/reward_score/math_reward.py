r"""verl's helpers for answers in `\boxed{...}`."""

from __future__ import annotations

__all__ = ["last_boxed_only_string", "remove_boxed"]

_STARTS = (r"\boxed{", r"\fbox{")


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` of a text with its braces, or the last `\fbox{...}` where there is none; None without
    either, or where its braces do not close. `\boxed x`, without braces, goes on to the next `$`."""
    if r"\boxed " in string:
        return r"\boxed " + string.rpartition(r"\boxed ")[2].partition("$")[0]
    start = next((place for name in _STARTS if (place := string.rfind(name)) >= 0), -1)
    depth = 0
    for place in range(start, len(string)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(string[place], 0)
        if depth == 0 and string[place] == "}":
            return string[start : place + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""What stands in `\boxed{...}` or behind `\boxed `.

    Raises:
        ValueError: the text is neither.
    """
    if s.startswith(r"\boxed "):
        return s.removeprefix(r"\boxed ")
    if s.startswith(r"\boxed{") and s.endswith("}"):
        return s[len(r"\boxed{") : -1]
    raise ValueError(f"{s!r}: expected \\boxed{{...}}")
