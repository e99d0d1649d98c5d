"""What a chat template can render, found out once at start by rendering small conversations with markers in them.

A template that cannot do something says so in many ways: it raises, drops the message, drops the call, escapes the
name, encodes the arguments twice. Each is looked for in the text, not trusted to an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from verl_mt.chat.delta import ASKED, FILLER_NAME, SAID, SHOWN, SHOWN_AGAIN, DeltaRenderer
from verl_mt.chat.differences import common_prefix
from verl_mt.chat.render import ENDLESS, CallShape, Renderer, normalise, probing
from verl_mt.data.conversation import REASONING_KEYS, Message
from verl_mt.errors import TemplateError

REASONING = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<reasoning>", "</reasoning>"),
)
"""How templates open and close a reasoning block."""

Reasoning = Literal["kept", "dropped_after_user", "ignored"]
THOUGHT = "Zqxjkvthought"
NAME = "zqxjkvname"
CALL_ID = "zqxjkv001"


@dataclass(frozen=True)
class Problem:
    """Why one shape of conversation is refused."""

    cause: str
    """The number of the pitfall in docs/templates.md, such as `P16`."""
    text: str

    @classmethod
    def of(cls, error: TemplateError, default: str) -> Problem:
        """The problem that an error reports."""
        return cls(error.cause or default, str(error).removesuffix(f" [{error.cause}]"))


@dataclass(frozen=True)
class TemplateCapabilities:
    """What one template, with one set of template kwargs, can do.

    `problems` holds the shapes that are refused: `prompt`, `system`, `user_turn`, `tools` (the schemas in the
    prompt), `no_tools` (a prompt without any), `tool_call`, `parallel_calls`, `text_with_call`, `tool_result`; `answer`
    and `call` where a sampled turn is not recorded as the template writes it (`verl_mt.chat.turn_replay`).
    """

    problems: Mapping[str, Problem] = field(default_factory=dict)
    roles: frozenset[str] = frozenset()
    """Roles whose content reaches the model."""
    arguments: Literal["dict", "string"] | None = None
    """How call arguments are passed to the template; None: it writes no calls from messages (sampled ones are kept)."""
    short_call_ids: bool = False
    """Call ids must be nine letters or digits; others are mapped."""
    append_only: bool = False
    """Measured: what a rollout records of three plain turns (`replay`) is what the template makes of their messages."""
    rewritten: str = ""
    """Where the two first differ; empty for an append-only template."""
    rewrites_calls: bool = False
    """Turns with calls, or their results, are written in another way once the conversation has gone on."""
    drops_reasoning: bool = False
    """Old reasoning disappears from a full rendering once a user turn follows. A rollout keeps what was sampled."""
    reasoning_key: str = "reasoning_content"
    """The key of a message from which the template takes its reasoning: the first of `REASONING_KEYS` that it shows."""
    reasoning_content: Reasoning = "ignored"
    """What happens to that key of earlier turns."""
    merges_tool_messages: bool = False
    """Adjacent tool messages share one turn, so they must be in one delta."""
    uses_clock: bool = False
    """The prompt holds the date: it is rendered once per trajectory."""
    rewrites_prompt: bool = False
    """Tools or system text move to the last user turn of a full rendering; a rollout leaves them where they were."""

    @property
    def history(self) -> tuple[str, ...]:
        """What a full rendering writes in another way than a rollout records it, in words; empty: it only appends."""
        dropped = self.drops_reasoning or self.reasoning_content == "dropped_after_user"
        found = (
            (not self.append_only, f"three plain turns come back changed ({self.rewritten})"),
            (dropped, "reasoning of earlier turns is dropped"),
            (self.rewrites_calls, "turns with tool calls come back changed"),
            (self.rewrites_prompt, "tools move to the last user turn"),
        )
        return tuple(text for holds, text in found if holds)

    def supports(self, shape: str) -> bool:
        return shape not in self.problems

    @property
    def tools(self) -> bool:
        return self.supports("tools") and self.supports("tool_result")

    @property
    def tool_calls(self) -> bool:
        return self.supports("tool_call")

    @property
    def parallel_calls(self) -> bool:
        return self.supports("parallel_calls")


@probing()
def generation_prompt(renderer: Renderer, pattern: re.Pattern[str] | None) -> tuple[str, bool]:
    """What the template adds after a user's turn, and whether it adds something else when nothing is to be sampled.

    Raises:
        TemplateError: the template cannot render a single user message.
    """
    tools = None
    try:
        bare = renderer.text([user()], tools, add_generation_prompt=False)
    except TemplateError as error:
        if error.cause != "P24":
            raise
        tools = [schema()]
        bare = renderer.text([user()], tools, add_generation_prompt=False)
    with_prompt = renderer.text([user()], tools, add_generation_prompt=True)
    if with_prompt.startswith(bare):
        return with_prompt[len(bare) :], False
    common = common_prefix(bare, with_prompt)
    for match in pattern.finditer(with_prompt) if pattern else ():
        if match.start() < common < match.end():
            common = match.start()
    return with_prompt[common:], True


def opens_reasoning(prompt: str) -> bool:
    """Whether the text ends inside a reasoning block."""
    return any(prompt.rfind(start) > prompt.rfind(end) for start, end in REASONING if start in prompt)


@probing()
def call_shape(renderer: Renderer) -> tuple[CallShape, Problem | None]:
    """The first way of writing a tool call that comes out whole; a problem if none does. Raises a TemplateError where
    the template does not end: other ways would not help."""
    first: Problem | None = None
    for flat, arguments, short in product((False, True), ("dict", "string"), (False, True)):
        shape = CallShape(arguments, short, flat)  # type: ignore[arg-type]
        problem = _try_call(renderer, shape, CALL_ID if short else "call_1")
        if problem is None:
            return shape, None
        if problem.cause == ENDLESS:
            raise TemplateError(problem.text, cause=ENDLESS)
        first = first or problem
    return CallShape(), first


def _try_call(renderer: Renderer, shape: CallShape, call_id: str) -> Problem | None:
    text: str | None = None
    messages = normalise([user(), caller(1, call_id=call_id), result(SHOWN, call_id)], shape)
    try:
        text = _render(renderer, messages)
    except TemplateError as error:
        # A template without a tool role may still write calls.
        try:
            text = _render(renderer, messages[:2])
        except TemplateError:
            return Problem.of(error, "P13")
    if NAME + "0" not in text or SAID not in text:
        return Problem("P16", "tool calls of earlier turns are left out of the text")
    around = text[max(0, text.index(NAME + "0") - 40) : text.index(SAID) + 40]
    if "&#34;" in around or "&quot;" in around:
        return Problem("P13", "the template writes the call with HTML escapes")
    if '\\"' in around:
        return Problem("P13", "the template encodes the arguments twice")
    return None


@probing()
def probe(
    renderer: Renderer, delta: DeltaRenderer | TemplateError, shape: CallShape, call: Problem | None
) -> TemplateCapabilities:
    """Find out all but `append_only`, which takes a whole chat. About thirty small renderings."""
    problems: dict[str, Problem] = {}
    _probe_prompt(renderer, problems)
    if isinstance(delta, TemplateError):
        problems["user_turn"] = problems["tool_result"] = Problem.of(delta, "P10")
    else:
        _probe_turn(delta, "user_turn", user(SHOWN), problems)
        _probe_turn(delta, "tool_result", result(SHOWN), problems)
    if call is not None:
        problems["tool_call"] = call
    _probe_calls(renderer, shape, problems)
    roles = {"user", "assistant"} if "prompt" not in problems and "user_turn" not in problems else {"user"}
    roles |= {
        role for role, shape_name in (("system", "system"), ("tool", "tool_result")) if shape_name not in problems
    }
    inline, key, kept = _probe_reasoning(renderer, shape, problems)
    rewrites = _rewrites_prompt(renderer, problems)
    return TemplateCapabilities(
        problems=problems,
        roles=frozenset(roles),
        arguments=None if call is not None else shape.arguments,
        short_call_ids=shape.short_ids,
        rewrites_calls=_rewrites_calls(renderer, shape, problems),
        drops_reasoning=inline,
        reasoning_key=key,
        reasoning_content=kept,
        merges_tool_messages=_merges(delta, problems),
        uses_clock="strftime_now" in renderer.source(None),
        rewrites_prompt=rewrites,
    )


def _probe_prompt(renderer: Renderer, problems: dict[str, Problem]) -> None:
    checks: list[tuple[str, list[Message], list[dict[str, Any]] | None, str]] = [
        ("no_tools", [user()], None, ASKED),
        ("system", [{"role": "system", "content": SAID}, user()], None, SAID),
        ("tools", [user()], [schema()], NAME),
    ]
    for shape, messages, tools, wanted in checks:
        try:
            text = (
                _render(renderer, messages)
                if shape == "system"
                else renderer.text(messages, tools, add_generation_prompt=True)
            )
        except TemplateError as error:
            problems[shape] = Problem.of(error, "P10")
            continue
        if wanted not in text:
            problems[shape] = Problem("P16", f"the template leaves {shape} out of the prompt without a word")
    if "no_tools" in problems and "tools" in problems:
        problems["prompt"] = problems["no_tools"]


def _probe_turn(delta: DeltaRenderer, shape: str, message: Message, problems: dict[str, Problem]) -> None:
    try:
        body = delta.render([message], caller(1) if shape == "tool_result" else said(), add_generation_prompt=True).body
    except TemplateError as error:
        problems[shape] = Problem.of(error, "P16" if shape == "tool_result" else "P10")
        return
    if SHOWN not in body:
        problems[shape] = Problem("P16", f"the template drops messages of role {message['role']} without a word")


def _probe_calls(renderer: Renderer, shape: CallShape, problems: dict[str, Problem]) -> None:
    if "tool_call" in problems:
        problems["parallel_calls"] = problems["text_with_call"] = problems["tool_call"]
        return
    answers = [result(SHOWN, CALL_ID), result(SHOWN_AGAIN, CALL_ID[:-1] + "2")]
    cases = {
        "parallel_calls": ([caller(2), *answers], (NAME + "0", NAME + "1")),
        "text_with_call": ([{**caller(1), "content": THOUGHT}, answers[0]], (NAME + "0", THOUGHT)),
    }
    for name, (messages, wanted) in cases.items():
        try:
            if "tool_result" in problems:
                messages = messages[:1]
            text = _render(renderer, normalise([user(), *messages], shape))
        except TemplateError as error:
            problems[name] = Problem("P16", str(error))
            continue
        if not all(w in text for w in wanted):
            problems[name] = Problem("P16", "part of the turn is left out without a word")


def _probe_reasoning(renderer: Renderer, shape: CallShape, problems: dict[str, Problem]) -> tuple[bool, str, Reasoning]:
    """Does inline reasoning vanish after a user turn; the key that the template takes reasoning from, and what happens
    to it.

    A plain turn may lose its reasoning at once (Kimi K2 keeps that of turns with calls only, until an answer follows),
    so a turn with a call is tried too; where the template cannot write one, an empty block in the place of the
    reasoning tells.
    """

    def seen(*turns: Message) -> bool:
        try:
            return THOUGHT in _render(renderer, normalise([user(), *turns], shape))
        except TemplateError:
            return False

    inline: Message = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"}
    vanishes = not seen(inline, user(SHOWN))
    with_calls = "tool_call" not in problems and "tool_result" not in problems
    for key in REASONING_KEYS:
        plain: Message = {**said(), key: THOUGHT}
        if seen(plain, user(SHOWN)):
            return vanishes, key, "kept"
        if seen(plain) or (with_calls and seen({**caller(1), key: THOUGHT}, result(SHOWN, CALL_ID))):
            return vanishes, key, "dropped_after_user"
        read = re.search(rf"\w\.{key}\b|get\(['\"]{key}['\"]|\[['\"]{key}['\"]\]", renderer.source(None))
        if read and _writes_empty_reasoning(renderer):
            return vanishes, key, "dropped_after_user"
    return vanishes, REASONING_KEYS[0], "ignored"


def _writes_empty_reasoning(renderer: Renderer) -> bool:
    """Whether an earlier turn gets an empty block where its reasoning would stand."""
    try:
        text = _render(renderer, [user(), said(), user(SHOWN)])
    except TemplateError:
        return False
    return any(re.search(rf"{re.escape(start)}\s*{re.escape(end)}", text) for start, end in REASONING)


def _rewrites_calls(renderer: Renderer, shape: CallShape, problems: dict[str, Problem]) -> bool:
    if "tool_call" in problems or "tool_result" in problems:
        return False
    talk = normalise([user(), caller(1), result(SHOWN, CALL_ID), said(), user(SHOWN)], shape)
    before = ""
    for end in range(2, len(talk) + 1):
        try:
            text = _render(renderer, talk[:end])
        except TemplateError:
            return True
        if not text.startswith(before):
            return True
        before = text
    return False


def _merges(delta: DeltaRenderer | TemplateError, problems: dict[str, Problem]) -> bool:
    """Whether two results in one delta give another text than one after the other."""
    if isinstance(delta, TemplateError) or "tool_result" in problems:
        return False
    turn = caller(2)
    first, second = result(SHOWN, CALL_ID), result(SHOWN_AGAIN, CALL_ID[:-1] + "2")
    try:
        both = delta.render([first, second], turn, add_generation_prompt=False).body
        one = delta.render([first], caller(1), add_generation_prompt=False).body
        other = delta.render([second], {**turn, "tool_calls": turn["tool_calls"][1:]}, add_generation_prompt=False).body
    except TemplateError:
        return False
    between = both[both.find(SHOWN) : both.find(SHOWN_AGAIN)]
    return both != one + other and not any(start in between for start in delta.starts)


def _rewrites_prompt(renderer: Renderer, problems: dict[str, Problem]) -> bool:
    if "tools" in problems:
        return False
    try:
        short = renderer.text([user()], [schema()], add_generation_prompt=False)
        long = renderer.text([user(), said(), user(SHOWN)], [schema()], add_generation_prompt=False)
    except TemplateError:
        return False
    return NAME in short and NAME not in long[: long.find(SAID)]


def _render(renderer: Renderer, messages: list[Message]) -> str:
    """Without tools where that works, else with one."""
    try:
        return renderer.text(messages, None, add_generation_prompt=False)
    except TemplateError as error:
        if error.cause != "P24":
            raise
        return renderer.text(messages, [schema()], add_generation_prompt=False)


def user(content: str = ASKED) -> Message:
    return {"role": "user", "content": content}


def said() -> Message:
    return {"role": "assistant", "content": SAID}


def caller(count: int, call_id: str = CALL_ID) -> Message:
    ids = [call_id if i == 0 else f"{call_id[:-1]}{i + 1}" for i in range(count)]
    functions = [{"name": f"{NAME}{i}", "arguments": {"query": SAID}} for i in range(count)]
    calls = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, call_id: str = CALL_ID) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": f"{NAME}0"}


def schema() -> dict[str, Any]:
    """A tool schema with every key that templates look at."""
    query = {"type": "string", "description": "What to look for."}
    parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
    function = {"name": NAME, "description": "Looks something up.", "parameters": parameters}
    return json.loads(json.dumps({"type": "function", "function": function}))


__all__ = [
    "FILLER_NAME",
    "Problem",
    "TemplateCapabilities",
    "call_shape",
    "generation_prompt",
    "opens_reasoning",
    "probe",
]
