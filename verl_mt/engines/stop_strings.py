"""Finding stop strings while a turn is being sampled, without decoding the whole turn at every token."""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

_LONGEST_CHARACTER = 8
"""Tokens after which text that still looks incomplete is taken to be invalid bytes, not half a character."""


class StopStrings:
    """Watches one turn; costs the same at every token.

    A window of the last few ids is decoded twice, with and without the newest ones; the difference is the new text.
    The window moves on only where the text is complete: a character may take several tokens.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...]):
        self._decode = decode
        self._stops = stops
        self._keep = max(len(s) for s in stops) - 1
        self._window: list[int] = []
        self._num_old = 0
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Add one sampled id; True when the decoded turn now contains a stop string."""
        self._window.append(token_id)
        old = self._decode(self._window[: self._num_old]) if self._num_old else ""
        new = self._decode(self._window)[len(old) :]
        text = self._tail + new
        if any(stop in text for stop in self._stops):
            return True
        complete = bool(new) and not new.endswith("\ufffd")
        if complete or len(self._window) - self._num_old > _LONGEST_CHARACTER:
            self._tail = text[-self._keep :] if self._keep else ""
            self._window = self._window[self._num_old :]
            self._num_old = len(self._window)
        return False
