"""Ids of an assistant turn of which only the text is known.

An engine that returns ids needs none of this: sampled ids stand as they are. For one that yields only text, verl's
documentation of multi-turn rollouts renders the conversation twice and tokenizes the difference:

- `prev_curr`: the history with the generation prompt, and the history with the new message;
- `fixed_base`: the same behind one system and one user message, where no old reasoning can be dropped.

Corrected here: the first rendering must really be the beginning of the second (never a slice by length alone); the
difference must hold the engine's text as it came; the mask belongs to the difference only; what the template writes
after the end of the turn (a newline) is no part of it; a turn cut by length has no end; and the prefilled beginning
of a turn (`<think>`) is prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from verl_mt.chat.differences import common_prefix, end_of_last_turn, without_empty_reasoning
from verl_mt.data.conversation import Message, reasoning_of
from verl_mt.errors import TemplateError

DeltaMethod = Literal["prev_curr", "fixed_base", "auto"]

_BASES: tuple[tuple[Message, ...], ...] = (
    ({"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "I am a user."}),
    ({"role": "user", "content": "I am a user."},),  # templates without a system role
)
_MARKER = "Zqxjkvturn"
_ANCHOR_CHARS = 64
"""How much text before the turn is encoded with it; a tokenizer looks back over one word at most."""


class RendersTurns(Protocol):
    """What of a `ChatTemplate` is needed here."""

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    def full_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str: ...

    def encode_text(self, text: str, *, neutral: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class _Turn:
    """`before` is the rendered text up to the turn, `text` is the model's, `closing` the template's."""

    before: str
    text: str
    closing: str


def turn_ids(
    chat: RendersTurns,
    history: Sequence[Message],
    message: Message,
    *,
    method: DeltaMethod = "auto",
    tools: Sequence[dict[str, Any]] | None = None,
    complete: bool = True,
    raw: bool = True,
) -> list[int]:
    """The ids of an assistant turn, its end-of-turn token included, every one with mask 1.

    Args:
        history: the messages before the turn.
        message: the turn, best with the engine's text as its `content` and nothing parsed out of it.
        method: `auto` tries `prev_curr`, then `fixed_base`; if the template rewrites the turn in both, the
            engine's text is encoded as it is, with the end of turn that the template writes elsewhere.
        tools: the schemas that the prompt showed.
        raw: `content` is the engine's text, and the result is compared with it. Where calls were parsed out of it, the
            template's writing is taken without an empty reasoning block, which the engine did not write. False: a
            message from elsewhere; the template's own writing is taken whole.
        complete: False for a turn cut by a limit or from outside: it has no end of turn, and none is invented.

    Returns:
        ids to append right after the recorded prompt; the separator after the end of turn is not among them.

    Raises:
        TemplateError: the template gives no usable difference; says why, method by method.
    """
    text = _raw_text(message) if raw else None
    ways: dict[str, Callable[[], _Turn]] = {
        "prev_curr": lambda: _difference(chat, history, message, tools, text),
        "fixed_base": lambda: _first_base(lambda base: _difference(chat, base, message, None, text)),
    }
    if method != "auto" and method not in ways:
        raise TemplateError(f"unknown delta method {method!r}. Use prev_curr, fixed_base or auto")
    if method != "auto":
        ways = {method: ways[method]}
    elif text is not None:
        ways["as_written"] = lambda: _as_written(chat, text)
    refused: list[str] = []
    for name, way in ways.items():
        try:
            turn = way()
            if raw and text is None and reasoning_of(message) is None:
                turn = replace(turn, text=without_empty_reasoning(turn.text))
            return _encode(chat, turn, complete)
        except TemplateError as error:
            refused.append(f"{name}: {error}")
    raise TemplateError("no ids for an assistant turn from its text; " + "; ".join(refused))


def _raw_text(message: Message) -> str | None:
    """The engine's text, where nothing was parsed out of it."""
    content = message.get("content")
    parsed = message.get("tool_calls") or reasoning_of(message)
    return content if isinstance(content, str) and not parsed else None


def _difference(
    chat: RendersTurns,
    history: Sequence[Message],
    message: Message,
    tools: Sequence[dict[str, Any]] | None,
    text: str | None,
) -> _Turn:
    """What the second rendering adds to the first, split into the model's text (if it is known) and the closing."""
    schemas = list(tools) if tools else None
    prev = chat.full_text(list(history), schemas, add_generation_prompt=True)
    curr = chat.full_text([*history, message], schemas, add_generation_prompt=False)
    if not curr.startswith(prev):
        at = common_prefix(prev, curr)
        raise TemplateError(
            f"the template rewrites the prompt once the turn is there: {prev[at : at + 40]!r} became "
            f"{curr[at : at + 40]!r}"
        )
    delta = curr[len(prev) :]
    if text is None:
        return _Turn(prev, delta, "")
    if not delta.startswith(text):
        at = common_prefix(delta, text)
        raise TemplateError(
            f"the template rewrites the turn: the model wrote {text[at : at + 40]!r} where the template has "
            f"{delta[at : at + 40]!r}"
        )
    return _Turn(prev, text, delta[len(text) :])


def _as_written(chat: RendersTurns, text: str) -> _Turn:
    """The text itself, with what the template writes behind any turn's last words."""

    def behind(base: Sequence[Message]) -> _Turn:
        curr = chat.full_text([*base, {"role": "assistant", "content": _MARKER}], None, add_generation_prompt=False)
        if _MARKER not in curr:
            raise TemplateError("the template does not show what the assistant said")
        prev = chat.full_text(list(base), None, add_generation_prompt=True)
        return _Turn(prev, text, curr.rpartition(_MARKER)[2])

    return _first_base(behind)


def _first_base(way: Callable[[Sequence[Message]], _Turn]) -> _Turn:
    """The result for the first base conversation that the template can render."""
    first_error: TemplateError | None = None
    for base in _BASES:
        try:
            return way(base)
        except TemplateError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _encode(chat: RendersTurns, turn: _Turn, complete: bool) -> list[int]:
    if turn.closing:
        ids, closing = _encode_behind(chat, turn.before, turn.text), chat.encode_text(turn.closing, neutral=False)
    else:
        whole = _encode_behind(chat, turn.before, turn.text, exact=False)
        cut = end_of_last_turn(whole, -1, chat.end_token_ids, lambda i: not chat.decode([i]).strip())
        ids, closing = whole[:cut], whole[cut:]
    odd = [i for i in closing if i not in chat.end_token_ids and chat.decode([i]).strip()]
    if odd:
        raise TemplateError(f"the template adds {chat.decode(closing)!r} to the turn. The model did not write that")
    if ids and ids[-1] in chat.end_token_ids:
        return ids  # the engine's text already held its end of turn
    return ids + [i for i in closing if i in chat.end_token_ids][: int(complete)]


def _encode_behind(chat: RendersTurns, before: str, text: str, *, exact: bool = True) -> list[int]:
    """Ids of `text` as it follows `before`.

    Args:
        exact: False for a text that the template wrote, control text included: white space may be missing, because
            tokenizers exist whose control tokens swallow what follows them (Phi-3).

    Raises:
        TemplateError: no ids behind `before` decode to `text`.
    """
    # Ids of a text alone may be others than behind its prompt (a leading space, a merge across the border), and the
    # model was asked behind the prompt: so the end of the prompt is encoded with it and cut off again.
    anchor = before[-_ANCHOR_CHARS:]
    anchor_ids = list(chat.encode_text(anchor, neutral=False))

    def spells(ids: list[int]) -> bool:
        if not exact and "".join(chat.decode(ids).split()) == "".join(text.split()):
            return True
        return chat.decode(ids) == text or chat.decode(anchor_ids + ids) == chat.decode(anchor_ids) + text

    ids = list(chat.encode_text(anchor + text, neutral=False))
    if ids[: len(anchor_ids)] == anchor_ids and spells(ids[len(anchor_ids) :]):
        return ids[len(anchor_ids) :]
    # The tokenizer merges across the border (a newline after `assistant\n`) or drops text behind it (Phi-3). The
    # model could not: its prompt ended there, so the turn is encoded alone.
    ids = list(chat.encode_text(text, neutral=False))
    if not spells(ids):
        raise TemplateError(f"the tokenizer cannot write {text[:40]!r} behind {anchor[-40:]!r}")
    return ids
