"""From messages to text: normalised messages, one call into the template, and an error that names the cause.

Nothing here changes the caller's messages: what a template needs in another shape is copied first.
"""

from __future__ import annotations

import _thread
import ctypes
import hashlib
import json
import marshal
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jinja2

from verl_mt.bounds import MAX_TEMPLATE_CHARACTERS
from verl_mt.chat.encode import Remembered
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError

ArgumentShape = Literal["dict", "string"]
ENDLESS = "P25"
"""The pitfall of a template that does not end."""
_LIMIT_S = 3.0
_MOST_KEPT, _LONGEST_KEPT = 4 << 20, 64 << 10
"""Characters of texts, and bytes of what they were rendered from, that are remembered, and those of one text."""
Key = tuple[str, bytes]
"""A template, and what it was rendered from."""
_CHANGES = re.compile("strftime_now|random|lipsum")
"""What a template may use that is not the same in each rendering."""
"""Processor time that one rendering may take. A conversation of a million tokens takes a tenth of it."""
_NEXT_LIMIT_S = 0.05
"""The same for probes once one ran into it: they render a template thirty times. It doubles with each that ends."""
_RAISED_BY_TEMPLATES = (
    TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
_WALL_FACTOR = 5.0
_LOOK_S = 0.05
_AGAIN_S = 0.05
"""Processor time after which it is interrupted again: what it runs may have caught the first."""


@dataclass(frozen=True)
class CallShape:
    """How this template wants a tool call written."""

    arguments: ArgumentShape = "dict"
    """`function.arguments` as a dict, or as a JSON string."""
    short_ids: bool = False
    """Call ids must be nine ASCII letters or digits (Mistral)."""
    flat: bool = False
    """Name and arguments are read from the call itself, not from its `function`."""


class _OutOfTime(BaseException):
    """Raised inside a rendering by the watch. No `except Exception` on the way may keep it."""


@dataclass(eq=False)
class _Rendering:
    """One that is going on."""

    thread: int
    ends_at: float
    """On its thread's clock."""
    clock: Callable[[], float]
    interrupted: bool = False


class _Watch:
    """Ends renderings that would not end by themselves: a sandbox bounds what a template reaches, not how long it runs.

    A thread looks after the ones that are going on, and raises `_OutOfTime` inside the thread of one whose time is up.
    It exists only while templates are rendered; a rendering itself costs two entries into a set more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Rendering] = set()
        self._is_looking = False

    def run(self, render: Callable[[], str], limit_s: float) -> str:
        """What `render` returns. Runs in the caller's thread.

        Raises:
            _OutOfTime: it used more than `limit_s` seconds of processor time.
        """
        # An exception that another thread sends, or a signal's handler raises, arrives between two bytecodes: also when
        # the rendering has returned, and inside `finally`. CPython looks for one only behind the call of `discard`
        # there, so that the watch sends nothing more; what it had sent before is taken back under the lock, once more
        # where the first try was interrupted itself.
        thread = threading.get_ident()
        clock, factor = _clock_of(thread)
        rendering = _Rendering(thread, clock() + factor * limit_s, clock)
        try:
            try:
                self._begin(rendering)
                return render()
            finally:
                self._running.discard(rendering)
                self._end(rendering)
        except BaseException:
            self._end(rendering)  # Ctrl-C, a signal or the watch itself may have come in the middle of the first
            raise

    def _begin(self, rendering: _Rendering) -> None:
        """Runs in the thread that renders. Starts the watching thread."""
        with self._lock:
            self._running.add(rendering)
            if not self._is_looking:
                _thread.start_new_thread(self._look, ())  # a signal in `Thread.start` breaks what that waits for
                self._is_looking = True

    def _end(self, rendering: _Rendering) -> None:
        """Runs in the thread that renders."""
        with self._lock:
            if rendering.interrupted:
                _take_back()

    def _look(self) -> None:
        """Runs in the watching thread, until no rendering goes on."""
        try:
            time.sleep(_LOOK_S)
            while self._look_once():
                time.sleep(_LOOK_S)
        except BaseException:
            self._is_looking = False  # the next rendering begins another
            raise

    def _look_once(self) -> bool:
        """Whether any goes on. Runs in the watching thread. Interrupts the threads whose time is up."""
        with self._lock:
            running = list(self._running)
            self._is_looking = bool(running)
            for rendering in running:
                now = rendering.clock()
                if now > rendering.ends_at:
                    rendering.interrupted = True
                    rendering.ends_at = now + _AGAIN_S
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(rendering.thread), ctypes.py_object(_OutOfTime)
                    )
            return self._is_looking


def _take_back() -> None:
    """What was sent to this thread and has not arrived must not arrive later. Runs in the thread that renders.

    Sending None would do, but CPython 3.11 then looks for an exception at each call and loop ever after, and hangs
    where `sys.settrace` traces a call. So another one takes the place of the first, and arrives here.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_OutOfTime))
        while True:
            pass
    except _OutOfTime:
        pass


def _clock_of(thread: int) -> tuple[Callable[[], float], float]:
    """The clock of a thread's processor time, and by how much a limit is longer on it."""
    if not hasattr(time, "pthread_getcpuclockid"):  # a busy machine or other threads may hold it up
        return time.monotonic, _WALL_FACTOR
    number = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(number), 1.0


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.__init__)  # type: ignore[misc]


_PROBING: ContextVar[bool] = ContextVar("probing", default=False)


@contextmanager
def probing() -> Iterator[None]:
    """What is rendered in here tries a template out, so one that does not end is stopped sooner the next time.

    A conversation has its whole limit always: one that takes too long says nothing about the others.
    """
    token = _PROBING.set(True)
    try:
        yield
    finally:
        _PROBING.reset(token)


class Renderer:
    """One template with its variables; `text` is the only place that calls into Jinja."""

    def __init__(
        self, tokenizer: Any, chat_template: str | None, template_kwargs: Mapping[str, Any], source: str | None = None
    ):
        """`source`: where the template is from, for errors; None = the tokenizer's name."""
        self._tokenizer = tokenizer
        name = getattr(tokenizer, "name_or_path", "")
        self._named = source or (f"the chat template of {name!r}" if name else "the chat template")
        self._given = chat_template
        self.template_kwargs = dict(template_kwargs)
        self._probe_limit_s = _LIMIT_S
        # The conversations of a group begin alike, and many tools answer alike.
        self._recent = Remembered[Key, str](_MOST_KEPT, _LONGEST_KEPT) if _renders_itself(tokenizer) else None
        self.source(None)

    def source(self, tools: Sequence[Any] | None) -> str:
        """The Jinja text used for conversations with (or without) tools.

        Raises:
            TemplateError: the tokenizer has no chat template and none was given.
        """
        template = self._given if self._given is not None else getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("tool_use" if tools is not None else "default") or template.get("default")
        if not template:
            name = getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__
            raise TemplateError(
                f"the tokenizer {name!r} has no chat template: base models have none. Use the chat model's folder, "
                "or set actor_rollout_ref.model.custom_chat_template to a Jinja text or file"
            )
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(
                f"{self._named} has {len(template)} characters. Templates may have {MAX_TEMPLATE_CHARACTERS}. Shorten "
                "it, or give actor_rollout_ref.model.custom_chat_template"
            )
        return template

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool,
        template: str | None = None,
    ) -> str:
        """The template's text of these (already normalised) messages.

        Args:
            template: the Jinja text to use; default: the one for `tools`.

        Raises:
            TemplateError: the template is broken or refused; `cause` is the known pitfall.
        """
        messages, tools = list(messages), None if tools is None else list(tools)
        template = template or self.source(tools)
        recent = self._recent
        key = key_of(template, messages, tools, add_generation_prompt) if recent else None
        if recent and key and (known := recent.get(key)) is not None:
            return known
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.template_kwargs,
        )
        limit_s = self._probe_limit_s if _PROBING.get() else _LIMIT_S
        try:
            text = _WATCH.run(render, limit_s)
            self._probe_limit_s = min(_LIMIT_S, 2 * self._probe_limit_s)
            if recent and key:
                recent.put(key, text, len(key[1]) + len(text))
            return text
        except _OutOfTime:
            if _PROBING.get():
                self._probe_limit_s = _NEXT_LIMIT_S
            raise TemplateError(
                f"{self._named} was not rendered after {limit_s:g} s of processor time ({len(messages)} messages): a "
                "loop in it does not end, or nearly so. Correct it, or give "
                "actor_rollout_ref.model.custom_chat_template",
                cause=ENDLESS,
            ) from None
        except jinja2.TemplateSyntaxError as error:
            problem = str(error.message).rstrip(".")
            raise TemplateError(
                f"{self._named}, line {error.lineno}: this is not valid Jinja: {problem}. Correct it, or give "
                "actor_rollout_ref.model.custom_chat_template",
                cause="P24",
            ) from error
        except (jinja2.TemplateError, *_RAISED_BY_TEMPLATES) as error:
            cause, advice = classify(error, messages, tools)
            roles = " ".join(str(m.get("role")) for m in messages)
            raise TemplateError(
                f"{self._named} cannot render the roles [{roles}]"
                f"{'' if tools is None else f' with {len(tools)} tools'}: {type(error).__name__}: {error}. {advice}",
                cause=cause,
            ) from error


def key_of(template: str, *rendered: Any) -> Key | None:
    """What stands for everything a template sees; None where its text may be another one each time."""
    if _CHANGES.search(template):
        return None
    try:
        return template, marshal.dumps(rendered, 2)  # by exact types: True is not 1, and a tuple is no list
    except ValueError:  # an object of the user's
        return None


def _renders_itself(tokenizer: Any) -> bool:
    """Whether `apply_chat_template` is transformers' own, which does nothing but render."""
    from transformers import PreTrainedTokenizerBase

    method = getattr(tokenizer, "apply_chat_template", None)
    return getattr(method, "__func__", None) is PreTrainedTokenizerBase.apply_chat_template


def classify(error: Exception, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
    """The known pitfall behind an exception of a template, and what to do about it."""
    text = str(error)
    if isinstance(error, jinja2.exceptions.SecurityError):
        return "P24", "The template changes a list, which the sandbox forbids; give a custom_chat_template."
    if isinstance(error, jinja2.UndefinedError) and re.fullmatch(r"'\w+' is undefined", text):
        return "P24", "The template needs a variable that is not set. Set it in template_kwargs."
    if isinstance(error, jinja2.TemplateRuntimeError) and not isinstance(error, jinja2.UndefinedError):
        return "P24", "The template is written for another Jinja engine; give a custom_chat_template."
    if "not JSON serializable" in text or "not serializable" in text:
        return "P24", "The template serialises what is not JSON; give a custom_chat_template."
    if tools is None and "NoneType" in text and "iterable" in text:
        return (
            "P24",
            "The template only renders conversations with tools; configure tools or give a custom_chat_template.",
        )
    if re.search(r"alternat|after the optional|Unexpected role|No user query|unexpected role|must be at the beg", text):
        return "P10", "The template does not allow this order of roles."
    if any(m.get("tool_calls") for m in messages) and re.search(r"single tool|content|both", text, re.I):
        return "P16", "The template cannot write this shape of tool call."
    if any(m.get("tool_calls") for m in messages) and not any(m["role"] == "tool" for m in messages):
        return "P13", "The template cannot write tool calls."
    if any(m["role"] == "tool" for m in messages):
        return "P16", "The template cannot write tool results."
    return "P10", "The template does not allow these messages."


def normalise(messages: Sequence[Message], shape: CallShape) -> list[Message]:
    """Messages as templates can take them; new dicts wherever something changes.

    Absent or null content becomes an empty string, other nulls and empty `tool_calls` go, arguments and ids take
    the template's shape.
    """
    return [_normalise_one(m, shape) for m in messages]


def _normalise_one(message: Message, shape: CallShape) -> Message:
    out = {k: v for k, v in message.items() if v is not None and not (k == "tool_calls" and not v)}
    out.setdefault("content", "")
    if "tool_calls" in out:
        calls = [normalise_call(c, shape) for c in out["tool_calls"]]
        if any(new is not old for new, old in zip(calls, out["tool_calls"])):
            out["tool_calls"] = calls
    if shape.short_ids and "tool_call_id" in out:
        out["tool_call_id"] = short_id(out["tool_call_id"])
    return _kept(message, out)


def _kept(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    """The dict that stands for `old`: itself where nothing changed (thousands of copies start garbage collections)."""
    unchanged = isinstance(old, dict) and len(old) == len(new) and all(old.get(k) is v for k, v in new.items())
    return old if unchanged else new


def normalise_call(call: Mapping[str, Any], shape: CallShape) -> dict[str, Any]:
    """One tool call in OpenAI's shape, arguments and id as the template wants them."""
    function = (
        dict(call["function"]) if "function" in call else {k: call[k] for k in ("name", "arguments") if k in call}
    )
    function["arguments"] = shape_arguments(function.get("arguments"), shape.arguments)
    out = {k: v for k, v in call.items() if k not in ("name", "arguments", "function") and v is not None}
    out["type"] = out.get("type", "function")
    out["function"] = _kept(call.get("function"), function)
    if shape.flat:
        out |= {k: v for k, v in function.items() if k in ("name", "arguments")}
    if shape.short_ids and out.get("id"):
        out["id"] = short_id(out["id"])
    return _kept(call, out)


def shape_arguments(arguments: Any, wanted: ArgumentShape) -> Any:
    """Arguments as a dict or as a JSON string; a string that is no JSON object stays as it is."""
    if arguments is None:
        arguments = {}
    if wanted == "string":
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def short_id(call_id: str) -> str:
    """Nine letters or digits, the same for the same id."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha1(call_id.encode()).hexdigest()[:9]
