"""Messages to ids, ids to messages: prompts, per-turn deltas, tool parsers, the sanity check."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_mt.chat.demonstrations import replay
    from verl_mt.chat.loading import load_chat
    from verl_mt.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "load_chat", "replay"]

_HOME = {
    "ChatTemplate": "verl_mt.chat.template",
    "load_chat": "verl_mt.chat.loading",
    "replay": "verl_mt.chat.demonstrations",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the tool parsers of this package must not cost a tokenizer library."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
