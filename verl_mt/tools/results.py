"""What a tool call leaves behind: the result, its normal form, its length limit."""

from __future__ import annotations

import json
import math
import numbers
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_mt.data.conversation import MalformedCall, Message, ToolCall
from verl_mt.data.trajectory import MAX_REWARD, is_trainable
from verl_mt.errors import value_text
from verl_mt.tools.schemas import ToolResponse

Failure = Literal["model", "tool", "infrastructure"]
"""Whose fault: the model's (bad call), the tool's (raised, timed out), the infrastructure's (engine gone)."""
Keep = Literal["head", "tail", "both"]

EVENTS = (
    "calls",
    "errors",
    "timeouts",
    "loop_blocked",
    "model_errors",
    "over_budget",
    "truncated",
    "retries",
    "media_dropped",
)
"""What is counted of a tool; its other counters (`latency_s`, its own metrics) are sums over its calls."""

CountTokens = Callable[[str], Sized]
"""text -> its token ids; only their number is used."""

MAX_CHARACTERS_PER_TOKEN = 16
"""Far above what text has (about 4): only runs of one character come near it, and those are slow to tokenize."""

CUT_MARKER = "...(truncated)..."
"""Stands in the cut; a cut at one end has dots only on the side of the text that was kept."""


@dataclass(frozen=True)
class ToolResult:
    """One call's answer, as the model gets it."""

    name: str
    """The tool; for a call that named none, or an unknown one, what the model wrote."""
    call_id: str
    text: str
    failure: Failure | None = None
    step_reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the tool returned as its metrics."""
    media: list[dict[str, Any]] = field(default_factory=list)
    """Images and videos, as parts of a message."""

    def to_message(self) -> Message:
        """The tool message; its content is text, or a list of parts (media first) where there are images or videos."""
        content: Any = self.text
        if self.media:
            content = [*self.media, *([{"type": "text", "text": self.text}] if self.text else [])]
        return {"role": "tool", "content": content, "tool_call_id": self.call_id, "name": self.name}

    def to_row(self, call: ToolCall | MalformedCall, *, turn: int, latency_s: float) -> dict[str, Any]:
        """The entry of `Trajectory.tool_calls`; the answer itself is a message."""
        row = {"turn": turn, "name": self.name, "call_id": self.call_id, "failure": self.failure}
        row |= {"latency_s": latency_s, "step_reward": self.step_reward}
        if isinstance(call, MalformedCall):
            return row | {"arguments": None, "written": call.text}
        return row | {"arguments": call.arguments}


async def timed_call(call: Callable[..., Awaitable[ToolResult]], *args: Any) -> tuple[ToolResult, float]:
    """The result of `call(*args)`, and the seconds that it took."""
    begun = time.monotonic()
    return await call(*args), time.monotonic() - begun


def normalize(returned: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """The (response, step reward, metrics) that `execute` meant.

    A response alone, a pair or a triple; the response a ToolResponse, a str, a dict or list (shown as JSON), or
    anything else (shown as `str`); reward None = 0, metrics None = {}.

    Raises:
        TypeError: a tuple of another length, a reward that is not a number, metrics that are not a mapping.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"execute must return (response, step_reward, metrics), got a tuple of {len(parts)}")
    response, reward, metrics = (*parts, None, None)[:3]
    return _as_response(response), as_reward(reward), _as_metrics(metrics)


def _as_response(response: Any) -> ToolResponse:
    if isinstance(response, ToolResponse):
        if response.text is None or isinstance(response.text, str):
            return response
        return ToolResponse(text=_shown(response.text), image=response.image, video=response.video)
    if isinstance(response, dict | list):
        response = json.dumps(response, ensure_ascii=False, default=_shown)
    return ToolResponse(text=response if isinstance(response, str) else _shown(response))


def _shown(value: Any) -> str:
    """`str` without the memory address of a default repr: another one in each process would be another prompt."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value))


def split_media(
    images: Sequence[Any], videos: Sequence[Any], taken: Collection[str]
) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Parts of a message for what the model sees (`taken`: `images`, `videos`), and how many images and videos it does
    not see."""
    parts = [{"type": "image", "image": image} for image in images if "images" in taken]
    parts += [{"type": "video", "video": video} for video in videos if "videos" in taken]
    return parts, (len(images) * ("images" not in taken), len(videos) * ("videos" not in taken))


def media_note(num_images: int, num_videos: int) -> str:
    """What the model is told in place of images and videos that it cannot see; empty where there are none."""
    counted = ((num_images, "image"), (num_videos, "video"))
    kinds = " and ".join(f"{number} {kind}{'s' * (number > 1)}" for number, kind in counted if number)
    return f"[{kinds} cannot be shown: text only]" if kinds else ""


def numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A tool's own metrics as names and numbers for the step's metrics; what is no finite number is left out.

    Characters other than letters, digits and `_ - .` become `_`; a name that is taken gets `metric_` before it.
    """
    found: dict[str, float] = {}
    for key, value in metrics.items():
        number = _as_number(value)
        if number is not None:
            name = re.sub(r"[^\w.-]", "_", str(key))
            name = f"metric_{name}" if name in (*EVENTS, "latency_s", "") else name
            found[name] = found.get(name, 0.0) + number
    return found


def _as_number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except Exception:  # a number of the tool's own, or one too large
        return None
    return number if math.isfinite(number) else None


def as_reward(value: Any) -> float:
    """A finite number; None = 0; of a list, as some tools written for verl return, the sum of its numbers.

    Texts in such a list (the results that verl's search tool collects) are no reward.

    Raises:
        TypeError: anything else; a NaN, or more than `MAX_REWARD`, in one reward would spoil a whole batch.
    """
    if value is None:
        return 0.0
    if isinstance(value, list | tuple):
        return as_reward(sum(as_reward(part) for part in value if not isinstance(part, str)))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"a reward must be a number, got {value_text(value)}") from None
    if not is_trainable(number):
        raise TypeError(f"a reward must be finite and at most {MAX_REWARD:.2g}, got {number}")
    return number


def _as_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is not None and not isinstance(metrics, dict):
        raise TypeError(f"metrics must be a mapping, got {value_text(metrics)}")
    return dict(metrics or {})


def clean_text(text: str, max_tokens: int, keep: Keep, count_tokens: CountTokens) -> tuple[str, bool]:
    """What the model gets of a text that the environment says, a tool's answer or an interaction's: cut, and one that
    can be encoded. (That nothing in it becomes a control token is the matter of whoever encodes it.)

    Returns:
        (text, whether it was cut).
    """
    return truncate(encodable(text), max_tokens, keep, count_tokens)


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: tokenizers refuse them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def truncate(text: str, max_tokens: int, keep: Keep, count_tokens: CountTokens) -> tuple[str, bool]:
    """Cut a text that is longer than `max_tokens`; the marker in its cut place comes on top of the limit.

    Only as much of the text is tokenized as may be kept, so 10 MB cost no more than 10 kB. For the same reason a text
    of more than `MAX_CHARACTERS_PER_TOKEN` characters per allowed token is cut however few tokens it is.

    Returns:
        (text, whether it was cut).
    """
    if len(text) <= MAX_CHARACTERS_PER_TOKEN * max_tokens and len(count_tokens(text)) <= max_tokens:
        return text, False
    if keep == "head":
        fitting = _fitting(text, max_tokens, count_tokens, from_end=False)
        return text[:fitting] + "..." + CUT_MARKER.strip("."), True
    if keep == "tail":
        fitting = _fitting(text, max_tokens, count_tokens, from_end=True)
        return CUT_MARKER.strip(".") + "..." + text[len(text) - fitting :], True
    head = _fitting(text, (max_tokens + 1) // 2, count_tokens, from_end=False)
    tail = min(_fitting(text, max_tokens // 2, count_tokens, from_end=True), len(text) - head)
    return text[:head] + CUT_MARKER + text[len(text) - tail :], True


def _fitting(text: str, budget: int, count_tokens: CountTokens, *, from_end: bool) -> int:
    """How many characters of one end of a text that must be cut are at most `budget` tokens."""
    if budget < 1:
        return 0

    def fits(size: int) -> bool:
        return len(count_tokens(text[len(text) - size :] if from_end else text[:size])) <= budget

    most = min(len(text) - 1, MAX_CHARACTERS_PER_TOKEN * budget)
    size, low = min(most, 4 * budget), 0
    while fits(size):
        low = size
        if size == most:
            return size
        size = min(most, 2 * size)
    high = size
    while high - low > max(1, high // 128):  # exact for short texts, within 1 % for long ones
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
