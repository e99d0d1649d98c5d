"""Whether a rollout records the turns that the template writes, tried at start.

Each shape of turn is taken from the template itself: its rendering of the whole conversation minus the generation
prompt is what a model of this template samples. The engine's stop is applied to it, the environment answers, and the
recorded ids are compared with the rendering of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_mt.chat.delta import SAID, SHOWN, SHOWN_AGAIN, Delta
from verl_mt.chat.differences import common_prefix
from verl_mt.chat.probe import CALL_ID, NAME, THOUGHT, Problem, caller, result, said, schema, user
from verl_mt.chat.render import ENDLESS
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError

_CAUSE = "P26"
_SHOWN_TOKENS = 12


class Replays(Protocol):
    """What of a `ChatTemplate` is needed here."""

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    def full_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str: ...

    def encode_text(self, text: str, *, neutral: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def delta_ids(
        self, messages: Sequence[Message], *, history: Sequence[Message], last_ids: Sequence[int]
    ) -> Delta: ...


@dataclass(frozen=True)
class _Shape:
    """A turn and what answers it."""

    name: str
    before: list[Message]
    turn: Message
    answer: list[Message]
    words: tuple[str, ...] = (SAID,)
    """Markers of the turn, in the order in which they are sampled; a rendering without one of them says nothing."""


def turn_problems(chat: Replays, reasoning_key: str) -> dict[str, Problem]:
    """Shapes whose recorded ids are not the template's: `answer` and `call` (the engine stops inside the turn, or a
    tool result does not follow it), `user_turn`. A shape that the template cannot write is left out.

    Args:
        reasoning_key: the key of a message from which the template takes its reasoning.
    """
    found: dict[str, Problem] = {}
    for shape in _shapes(reasoning_key):
        calls = bool(shape.turn.get("tool_calls"))
        try:
            stopped, text = _compare(chat, shape)
        except TemplateError as error:
            if error.cause == ENDLESS:
                break  # each other shape may take as long
            continue
        if text:
            key = "call" if calls else "answer" if stopped else "user_turn"
            found.setdefault(key, Problem(_CAUSE, f"{shape.name}: {text}"))
    return found


def _shapes(reasoning_key: str) -> Iterator[_Shape]:
    asked, more = [user()], [user(SHOWN)]
    thought, inline = {reasoning_key: THOUGHT}, f"<think>\n{THOUGHT}\n</think>\n\n"
    once, twice = caller(1), caller(2)
    first, second = result(SHOWN, CALL_ID), result(SHOWN_AGAIN, f"{CALL_ID[:-1]}2")
    call, reasoned = (f"{NAME}0", SAID), (THOUGHT, SAID)
    talked: list[Message] = [*asked, {"role": "assistant", "content": "Earlier."}, user("More?")]
    called: list[Message] = [*asked, caller(1), result("Found.", CALL_ID)]
    yield _Shape("a plain answer", asked, said(), more)
    yield _Shape("an answer with reasoning", asked, {**said(), **thought}, more, reasoned)
    yield _Shape("an answer with reasoning in its text", asked, {**said(), "content": inline + SAID}, more, reasoned)
    yield _Shape("an empty answer", asked, {**said(), "content": ""}, more, ())
    yield _Shape("an answer after a user turn", talked, said(), more)
    yield _Shape("an answer after a tool result", called, said(), more)
    yield _Shape("a call", asked, once, [first], call)
    yield _Shape("two calls", asked, twice, [first, second], (f"{NAME}0", f"{NAME}1", SAID))
    yield _Shape("a call with reasoning", asked, {**once, **thought}, [first], (THOUGHT, *call))
    yield _Shape("a call with text", asked, {**once, "content": THOUGHT}, [first], (THOUGHT, *call))
    yield _Shape("a call after a tool result", called, once, [first], call)


def _compare(chat: Replays, shape: _Shape) -> tuple[bool, str]:
    """Whether the engine stops inside the turn, and what differs; empty where nothing does or nothing can be said.

    Raises:
        TemplateError: the template cannot write the shape.
    """
    tools = None
    try:
        prompt = chat.full_text(shape.before, tools, add_generation_prompt=True)
    except TemplateError as error:
        if error.cause != "P24":
            raise
        tools = [schema()]
        prompt = chat.full_text(shape.before, tools, add_generation_prompt=True)
    written = chat.full_text([*shape.before, shape.turn], tools)
    after = chat.full_text([*shape.before, shape.turn, *shape.answer], tools, add_generation_prompt=True)
    shown = [after.find(str(m["content"])) for m in shape.answer]
    if min(shown) < 0 or any(word not in written or after.rfind(word) > min(shown) for word in shape.words):
        return False, ""
    # A finished turn may begin in another way than the generation prompt: there it begins with its first words.
    whole = written.startswith(prompt)
    if not whole and not shape.words:
        return False, ""
    begin = len(prompt) if whole else min(written.rfind(word) for word in shape.words)
    ids = chat.encode_text(written[begin:].rstrip(), neutral=False)
    if not ids:
        return False, ""  # an empty answer without an end
    stop = next((i + 1 for i, token in enumerate(ids) if token in chat.stop_token_ids), len(ids))
    missed = [word for word in shape.words if word not in chat.decode(ids[:stop])]
    if missed == [f"{NAME}1"]:
        return False, ""  # a model that stops after each call
    if missed:
        return True, (
            f"the engine stops at {chat.decode(ids[stop - 1 : stop])!r} (id {ids[stop - 1]}), token {stop - 1} of the "
            f"turn, but the template's turn goes on: {_shown(chat, ids, max(0, stop - _SHOWN_TOKENS // 2))}"
        )
    delta = chat.delta_ids(shape.answer, history=[*shape.before, shape.turn], last_ids=ids[stop - 1 : stop]).ids
    rendered, head = chat.encode_text(after, neutral=False), prompt + chat.decode(ids[:stop])
    if whole and after.startswith(head):
        # No merge over the border: what is sampled is kept as it was sampled.
        start = len(chat.encode_text(head, neutral=False))
    else:
        start = len(rendered) - len(delta)  # history is written in another way, what follows must be the same
    if rendered[start:] == delta:
        return False, ""
    # A template without an end of turn: the white space behind it is left out where the sampled stop token stands.
    if ids[stop - 1] not in chat.stop_token_ids and chat.decode(rendered[start:]).strip() == chat.decode(delta).strip():
        return False, ""
    at = common_prefix(delta, rendered[start:])
    return False, (
        f"behind the turn a rollout records {_shown(chat, delta, at)}, and the template writes "
        f"{_shown(chat, rendered[start:], at)} (first difference: token {at} behind the turn)"
    )


def _shown(chat: Replays, ids: Sequence[int], start: int) -> str:
    """Some ids and their text."""
    some = list(ids[start : start + _SHOWN_TOKENS])
    return f"{some} {chat.decode(some)!r}"
