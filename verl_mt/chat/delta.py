"""The text between two assistant turns, rendered from a context of two messages instead of the whole history.

A user's turn is rendered after `user, assistant`; a tool's after `user, assistant with the calls it answers`. The
assistant's words are a marker, the rendering is cut behind it at the end of the turn, and what follows the cut is
the delta. Its cost does not depend on how long the conversation is, and nothing of the history is rewritten by it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from verl_mt.chat.differences import common_prefix
from verl_mt.chat.encode import Hidden, strings_in
from verl_mt.chat.render import ENDLESS, CallShape, Renderer, normalise, normalise_call, probing
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError

ASKED = "Zqxjkvasked"
SAID = "Zqxjkvsaid"
SHOWN = "Zqxjkvshown"
SHOWN_AGAIN = "Zqxjkvtwice"
FILLER_NAME = "tool"


@dataclass(frozen=True)
class Delta:
    """What the environment adds to a recorded stream.

    Example: `ids` of a user turn after `...<|im_end|>` begin with the newline that the template puts behind it.
    """

    ids: list[int]
    inserted_end: int
    """How many leading ids end a turn that was cut before it ended itself (0 or 1); mask 0 like the rest."""


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends an assistant turn before a message of one role."""

    closing: str
    """Everything from the assistant's last words up to and including the end token."""
    token: str
    """The end token's text; empty where the template writes none (the sampled stop token stands alone then)."""
    opens_next: bool = False
    """The end token is the first token of what follows (GLM stops at the next role's header)."""
    final: str = ""
    """The token that ends the turn where nothing follows, if that is another one (gpt-oss: `<|return|>`)."""


@dataclass(frozen=True)
class DeltaText:
    """`end` closes the assistant's turn, `body` is everything the template writes after it."""

    end: TurnEnd
    body: str


@dataclass(frozen=True)
class _Base:
    """One way to write the assistant turn that the environment answers."""

    label: str
    assistant: Message
    env: list[Message]


class DeltaRenderer:
    """Renders deltas of one template.

    Args:
        starts: control literals of the generation prompt.
        known_ends: control literals that are known to end a turn (eos).
    """

    @probing()
    def __init__(
        self,
        renderer: Renderer,
        pattern: re.Pattern[str] | None,
        *,
        starts: Collection[str],
        known_ends: Collection[str],
        shape: CallShape,
    ):
        self._renderer = renderer
        self._pattern = pattern
        self.starts = frozenset(starts)
        self._known = frozenset(known_ends)
        self._header_ends = False
        self._shape = shape
        self._ends: dict[tuple[str, ...], TurnEnd] = {}
        self._first_good: dict[tuple[Any, ...], str] = {}
        self._tools: list[list[Any] | None] = [None, [], [_SOME_TOOL]]  # some templates fail without a tool list
        user_end = self._end_of("user", _Base("said", {"role": "assistant", "content": SAID}, []), None)
        self._header_ends = user_end.opens_next
        if user_end.token and not user_end.opens_next:
            self._known |= {user_end.token}
        self.user_end = user_end

    def render(
        self,
        env: Sequence[Message],
        assistant: Message,
        *,
        add_generation_prompt: bool,
        template: str | None = None,
        hidden: Hidden | None = None,
    ) -> DeltaText:
        """The text that follows `assistant` when the adjacent messages `env` arrive.

        Args:
            env: new messages; several tool results that answer one turn belong in one call. May be empty: then only
                what stands between two assistant turns comes back.
            assistant: the turn that was sampled; only names and ids of its calls are used.
            hidden: filled with the control literals of all foreign text.

        Raises:
            TemplateError: the template cannot write these messages after an assistant turn.
        """
        parts: dict[str, Any] = {"env": normalise(env, self._shape), "calls": list(assistant.get("tool_calls") or [])}
        if hidden is not None:
            parts = hidden.hide(parts)
        said = SAID
        while any(said in s for s in strings_in(parts)):
            said += "x"
        first_error: TemplateError | None = None
        shape_key = (env[0]["role"] if env else "", len(parts["calls"]), len(env), template)
        # The whole history would cost its length every turn, and templates rewrite it (they drop old reasoning). Two
        # messages are enough for the text between turns, but which two a template accepts is not known: results may
        # have to name their call, calls to have an answer each. The way that worked is tried first the next time.
        bases = list(self._bases(parts["env"], parts["calls"], said))
        good = self._first_good.get(shape_key)
        for base in sorted(bases, key=lambda b: b.label != good):
            if base.label == "said" and first_error is not None:
                break  # the template has words for calls and refused these; without them it would write another turn
            try:
                text = self._text([base.assistant, *base.env], add_generation_prompt, template)
            except TemplateError as error:
                if error.cause == ENDLESS:
                    raise  # each other way may take as long
                first_error = first_error or error
                continue
            if said in text:
                self._first_good[shape_key] = base.label
                return self._cut(text[text.rindex(said) + len(said) :], base, template, said)
        raise first_error or TemplateError(
            "the template does not show the assistant turn that the new messages answer", cause="P15"
        )

    def end_before(self, role: str) -> TurnEnd | None:
        """How a turn ends before a message of that role; None where the template cannot write one there."""
        try:
            return self.render(
                [{"role": role, "content": SHOWN}], {"role": "assistant"}, add_generation_prompt=True
            ).end
        except TemplateError:
            return None

    def _text(self, messages: Sequence[Message], gen: bool, template: str | None) -> str:
        asked = {"role": "user", "content": ASKED}
        first_error: TemplateError | None = None
        for tools in self._tools:
            try:
                text = self._renderer.text([asked, *messages], tools, add_generation_prompt=gen, template=template)
            except TemplateError as error:
                first_error = first_error or error
                if error.cause != "P24":
                    break
            else:
                self._tools = [tools, *(t for t in self._tools if t is not tools)]
                return text
        assert first_error is not None
        raise first_error

    def _cut(self, tail: str, base: _Base, template: str | None, said: str) -> DeltaText:
        role = base.env[0]["role"] if base.env else "user"
        key = (role, base.label, str(len(base.assistant.get("tool_calls", ()))), template or "")
        if key not in self._ends:
            self._ends[key] = self._end_of(role, base, template, said)
        end = self._ends[key]
        if not tail.startswith(end.closing):  # another content after all (calls with text): found again, not kept
            end = self._end_of(role, base, template, said)
        if not base.env and end.opens_next:
            end = TurnEnd("", "")
        if not tail.startswith(end.closing):
            raise TemplateError(
                f"the template ends an assistant turn with {end.closing!r} in one place and {tail[:80]!r} in another",
                cause="P18",
            )
        return DeltaText(end, tail[len(end.closing) :])

    def _end_of(self, role: str, base: _Base, template: str | None, said: str = SAID) -> TurnEnd:
        """Find the end of a turn with a marker in place of the environment's content."""
        env = [{**(base.env[0] if base.env else {}), "role": role, "content": SHOWN}]
        leading = [m for m in base.env if m["role"] == role] or env
        env += [{**m, "role": role, "content": SHOWN_AGAIN} for m in leading[1:]]
        alone = _after(self._text([base.assistant], False, template), said)
        following = _after(self._text([base.assistant, *env], True, template), said)
        shown = following.find(SHOWN)
        end = find_end(
            following[:shown] if shown >= 0 else following,
            alone,
            self._pattern,
            starts=self.starts,
            known=self._known,
            header_ends=self._header_ends,
        )
        between = following[shown : following.find(SHOWN_AGAIN)] if SHOWN_AGAIN in following else ""
        if end.token and end.token not in self._known and end.token in between:
            return replace(end, opens_next=True)  # repeated before each result: it opens the result
        return end

    def _bases(self, env: list[Message], calls: list[Any], said: str) -> Iterator[_Base]:
        plain = {"role": "assistant", "content": said}
        results = []
        for m in env:
            if m["role"] != "tool":
                break
            results.append(m)
        if results:
            real = [self._call(c, said, i) for i, c in enumerate(calls)]
            # Beside results that name their call, one that names none answers what could not be read as a call.
            by_place = [] if any(m.get("tool_call_id") for m in results) else real
            answered = [self._answered(m, real, by_place[i : i + 1], said, i) for i, m in enumerate(results)]
            real += [c for c in answered if c not in real]
            filled = [
                {**m, "tool_call_id": m.get("tool_call_id") or c["id"], "name": m.get("name") or c["function"]["name"]}
                for m, c in zip(results, answered)
            ] + env[len(results) :]
            ways = {"real": real, "answered": answered, "one": answered[:1]}
            for label, tool_calls in ways.items():
                if tool_calls:
                    turn = {"role": "assistant", "content": "", "tool_calls": tool_calls}
                    yield _Base(label, turn, env)
                    yield _Base(label + " filled", turn, filled)
        yield _Base("said", plain, env)

    def _call(self, call: Any, said: str, index: int) -> dict[str, Any]:
        """A call with its own name and id, and a marker for its arguments: no template repeats those later."""
        name = (call.get("function") or call).get("name") or FILLER_NAME
        out = {"id": call.get("id") or f"call{index:05d}", "function": {"name": name, "arguments": {"query": said}}}
        return normalise_call(out, self._shape)

    def _answered(
        self, result: Message, real: list[dict[str, Any]], at_place: list[dict[str, Any]], said: str, index: int
    ) -> dict[str, Any]:
        """The call that a tool message answers: by id, by place, or a placeholder for a malformed one."""
        call_id = result.get("tool_call_id")
        for call in real:
            if call_id and call["id"] == call_id:
                return call
        if at_place:
            return at_place[0]
        return self._call({"id": call_id, "name": result.get("name")}, said, index)


_SOME_TOOL = {
    "type": "function",
    "function": {
        "name": FILLER_NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


def _after(text: str, said: str) -> str:
    if said not in text:
        raise TemplateError("the template does not show what the assistant said", cause="P15")
    return text[text.rindex(said) + len(said) :]


def find_end(
    following: str,
    alone: str,
    pattern: re.Pattern[str] | None,
    *,
    starts: Collection[str],
    known: Collection[str],
    header_ends: bool = False,
) -> TurnEnd:
    """The end of a turn, from two renderings: the cut between sampled and rendered text.

    A *tail* is the text from right after the assistant's last known words. The end of the turn is a control token that
    stands both where the conversation stops there and where it goes on; where the two differ, or nothing stands there,
    the rules below decide, the surest first.

    Args:
        following: the tail with an environment message, up to that message's content.
        alone: the tail of the conversation that stops after the assistant.
        pattern: finds control literals.
        starts: literals of the generation prompt: they start a turn, so they cannot end one.
        known: literals that are known to end a turn.
        header_ends: this template's user header ends the turn before it, so another role's header may too.
    """
    # The common text may end in the middle of a control literal: `<|im_end|>` and `<|im_start|>` share a beginning, and
    # half a token is no place to cut.
    if pattern is None:
        return TurnEnd("", "")
    spans = [m.span() for m in pattern.finditer(following)]
    alone_spans = [m.span() for m in pattern.finditer(alone)]
    common = common_prefix(following, alone)
    for start, end in (*spans, *alone_spans):
        if start < common < end:
            common = start

    def end_at(span: tuple[int, int], **how: bool | str) -> TurnEnd:
        return TurnEnd(following[: span[1]], following[slice(*span)], **how)  # type: ignore[arg-type]

    before_next = list(takewhile(lambda s: following[slice(*s)] not in starts, spans))
    shared = [s for s in before_next if s[1] <= common]
    sure = [s for s in before_next if following[slice(*s)] in known]
    after = _next_to(following, common, spans)
    if after and following[slice(*after)] in starts:
        after = None
    final = _next_to(alone, common, alone_spans)
    if sure:
        return end_at(sure[0])
    if header_ends and after:
        return end_at(after, opens_next=True)
    if shared:
        return end_at(shared[-1])
    if after and final:
        return end_at(after, final=alone[slice(*final)])
    if after:
        return end_at(after, opens_next=True)
    return TurnEnd(following[: spans[0][0]] if spans else "", "")


def _next_to(text: str, position: int, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The control literal at a position, white space before it allowed."""
    return next((s for s in spans if s[0] >= position and not text[position : s[0]].strip()), None)
