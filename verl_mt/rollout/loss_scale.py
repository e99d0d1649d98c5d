"""Which tokens of a finished trajectory are trained: ms-swift's `loss_scale`, as a mask.

A loss scale cuts the text of an assistant message into pieces and gives each a weight. Here only whether a weight is 0
matters: the policy gradient has its own weights. By default bits are cleared, never set; `all` sets them, on request.

Names may be joined: `last_round+ignore_empty_think`.

`apply_loss_scale` has the last word on a finished trajectory's mask; `train_prompt_assistants` sets, on request, the
bits of messages that nobody sampled.
"""

from __future__ import annotations

import enum
import inspect
import json
import logging
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_mt.chat.prompt_messages import assistant_spans
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import ConfigError, PluginError, UserCodeError
from verl_mt.plugins import Registry, load_object
from verl_mt.rollout.token_text import first_token_at

logger = logging.getLogger(__name__)

CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.loss_scale"


class ContextType(enum.StrEnum):
    """What a piece of text is."""

    RESPONSE = "response"
    """What stands in an assistant message."""
    SUFFIX = "suffix"
    """The end of turn that the model sampled."""
    OTHER = "other"
    """Everything else. Only the strategy `all` trains it."""


class LossScale:
    """Base of loss scales: weight 1 for all of a response, unless patterns say otherwise.

    Example:
        >>> class NoObservations(LossScale):
        ...     patterns = {"Observation:": [1.0, 0.0], "Final Answer:": [1.0, 1.0]}
        >>> loss_scales["no_observations"] = NoObservations
    """

    patterns: Mapping[str, Sequence[float]] = {}
    """A literal with two weights: for itself, and for what follows it up to the next such literal. Or a regular
    expression with one weight: for what it matches."""
    loss_scale_config: str | None = None
    """A JSON file with such patterns, beside the file that defines the class."""

    def __init__(self, base_strategy: str = "default") -> None:
        self.base_strategy = base_strategy
        if self.loss_scale_config is not None:
            self.patterns = _read_patterns(self.loss_scale_config, type(self))

    def get_loss_scale(
        self, context: str, context_type: ContextType = ContextType.RESPONSE, is_last_round: bool = False, **kwargs: Any
    ) -> tuple[list[str], list[float]]:
        """Pieces of `context`, and their weights. A subclass may also take `(context, **kwargs)`, ms-swift's form now.

        Args:
            context: the text.
            context_type: what it is. Only responses and their ends of turn are asked for.
            is_last_round: whether it belongs to the last assistant message.

        Returns:
            Pieces that joined are `context`, and as many weights.
        """
        if context_type is ContextType.RESPONSE and self.patterns:
            return split_by_patterns(context, self.patterns)
        return [context], [1.0]


ConfigLossScale = LossScale
"""ms-swift's name of a scale with a file of patterns."""


class LastRound(LossScale):
    """The last assistant message only, its end of turn included."""

    def get_loss_scale(
        self, context: str, context_type: ContextType = ContextType.RESPONSE, is_last_round: bool = False, **kwargs: Any
    ) -> tuple[list[str], list[float]]:
        return [context], [float(is_last_round)]


class TrainAll(LossScale):
    """Every token, prompts and observations too (see `apply_loss_scale`)."""


class React(LossScale):
    """ReAct texts: what the environment wrote behind `Observation:` is not trained."""

    patterns = {
        "Action:": [2.0, 2.0],
        "Action Input:": [2.0, 2.0],
        "Thought:": [1.0, 1.0],
        "Final Answer:": [1.0, 1.0],
        "Observation:": [2.0, 0.0],
    }


class Hermes(LossScale):
    """Tool calls weigh more. As a mask it is `default`."""

    patterns = {r"<tool_call>.+?</tool_call>": [2.0]}


class IgnoreEmptyThink(LossScale):
    """An empty reasoning block is not trained."""

    patterns = {r"<think>\s*</think>\s*": [0.0]}


class IgnoreThinkPrefix(LossScale):
    """The opening of a reasoning block is not trained."""

    patterns = {r"\A<think>\n?": [0.0]}


loss_scales: Registry[Any] = Registry(
    "loss scale",
    {
        "default": LossScale,
        "last_round": LastRound,
        "all": TrainAll,
        "react": React,
        "hermes": Hermes,
        "ignore_empty_think": IgnoreEmptyThink,
        "ignore_think_prefix": IgnoreThinkPrefix,
    },
)


class Joined(LossScale):
    """Several scales: patterns are applied together. A text that one weighs 0 is 0."""

    def __init__(self, parts: Sequence[LossScale]):
        self.parts = list(parts)
        self.patterns = {}
        for part in parts:
            self.patterns = {**self.patterns, **part.patterns}

    def get_loss_scale(
        self, context: str, context_type: ContextType = ContextType.RESPONSE, is_last_round: bool = False, **kwargs: Any
    ) -> tuple[list[str], list[float]]:
        for part in self.parts:
            weights = _ask(part, context, context_type, is_last_round, kwargs.get("query"))[1]
            if not part.patterns and not any(weights):
                return [context], [0.0]
        return super().get_loss_scale(context, context_type, is_last_round, **kwargs)


def load_loss_scale(name: str) -> LossScale:
    """The loss scale that the config names: a registered name, several joined by `+`, or a dotted path.

    Raises:
        PluginError: nothing there (lists what exists), or no loss scale.
    """
    parts = [_load_one(part.strip()) for part in name.split("+")]
    return parts[0] if len(parts) == 1 else Joined(parts)


def trains_everything(scale: LossScale) -> bool:
    """Whether it is the strategy `all`, alone or among others."""
    return isinstance(scale, TrainAll) or (isinstance(scale, Joined) and any(map(trains_everything, scale.parts)))


def zero_stretches(
    scale: LossScale, text: str, kind: ContextType, *, last: bool, messages: Sequence[Any]
) -> list[tuple[int, int]]:
    """Half-open ranges of characters with weight 0.

    Raises:
        UserCodeError: pieces that joined are not the text, or not as many weights.
    """
    name = type(scale).__name__
    pieces, weights = _ask(scale, text, kind, last, _last_query(messages))
    if len(pieces) != len(weights):
        raise UserCodeError(f"loss scale {name} returned {len(pieces)} pieces and {len(weights)} weights")
    if "".join(pieces) != text:
        raise UserCodeError(
            f"loss scale {name} returned pieces that joined are not the text: {len(''.join(pieces))} characters for "
            f"{len(text)}"
        )
    edge = 0
    stretches: list[tuple[int, int]] = []
    for piece, weight in zip(pieces, weights):
        if not isinstance(weight, numbers.Real):
            raise UserCodeError(f"loss scale {name} returned the weight {weight!r}, expected a number")
        if weight not in (0, 1):
            _say_once(name)
        if weight == 0 and piece:
            stretches.append((edge, edge + len(piece)))
        edge += len(piece)
    return stretches


def _ask(scale: LossScale, text: str, kind: ContextType, last: bool, query: str | None) -> tuple[Any, Any]:
    """The scale's answer, in ms-swift's older form of the method or in today's."""
    parameters = list(inspect.signature(scale.get_loss_scale).parameters.values())
    if (
        any(p.name == "context_type" for p in parameters)
        or sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) > 2
    ):
        return scale.get_loss_scale(text, kind, last, query=query)
    # Today's: the base strategy has decided which contexts are asked for, and only they are.
    base = getattr(scale, "base_strategy", "default")
    if base == "last_round" and not last:
        return [text], [0.0]
    takes = {p.name for p in parameters}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    offered = {"query": query, "context_type": kind, "is_last_round": last}
    taken: dict[str, Any] = {k: v for k, v in offered.items() if any_name or k in takes}
    return scale.get_loss_scale(text, **taken)


def split_by_patterns(text: str, patterns: Mapping[str, Sequence[float]]) -> tuple[list[str], list[float]]:
    """Cut a text at its patterns. See `LossScale.patterns`. Text outside of all has weight 1."""
    keys = [k for k, weights in patterns.items() if len(weights) == 2]
    if keys:
        longest_first = sorted(keys, key=lambda k: -len(k))
        return _cut(text, re.compile("|".join(map(re.escape, longest_first))), lambda m: patterns[m.group()])
    expressions = list(patterns)
    joined = re.compile("|".join(f"(?P<p{n}>{e})" for n, e in enumerate(expressions)), re.DOTALL)
    return _cut(text, joined, lambda m: patterns[expressions[int(str(m.lastgroup)[1:])]])


def _cut(
    text: str, pattern: re.Pattern[str], weights_of: Callable[[re.Match[str]], Sequence[float]]
) -> tuple[list[str], list[float]]:
    """Two weights are for a match and for what follows it; one is for the match."""
    pieces: list[str] = []
    weights: list[float] = []
    edge, body = 0, 1.0
    for match in pattern.finditer(text):
        own = weights_of(match)
        for piece, weight in ((text[edge : match.start()], body), (match.group(), own[0])):
            if piece:
                pieces.append(piece)
                weights.append(weight)
        edge, body = match.end(), own[1] if len(own) == 2 else 1.0
    if text[edge:] or not pieces:
        pieces.append(text[edge:])
        weights.append(body)
    return pieces, weights


def _load_one(name: str) -> LossScale:
    kind = load_object(name, what=CONFIG_KEY, registry=loss_scales)
    if isinstance(kind, Mapping):
        scale = LossScale()
        scale.patterns = _checked(kind, name)
        return scale
    if isinstance(kind, type) and issubclass(kind, LossScale):
        scale = kind()
        _checked(scale.patterns, name)
        return scale
    if isinstance(kind, LossScale):
        return kind
    raise PluginError(f"{CONFIG_KEY}: {name} is neither a LossScale nor a dict of patterns, got {kind!r:.100}")


def _checked(patterns: Mapping[str, Any], name: str) -> Mapping[str, Sequence[float]]:
    lengths = {k: len(v) if isinstance(v, list | tuple) else 0 for k, v in patterns.items()}
    wrong = [k for k, n in lengths.items() if n not in (1, 2)]
    if wrong or (len(set(lengths.values())) > 1 and 2 in lengths.values()):
        raise ConfigError(
            f"{CONFIG_KEY}: {name}: give every pattern a list of two weights (literals), or every one a list of one "
            f"(regular expressions). Got {dict(patterns)!r:.200}"
        )
    return patterns


def _read_patterns(name: str, kind: type) -> Mapping[str, Sequence[float]]:
    beside = Path(inspect.getfile(kind)).parent / name
    path = Path(name) if Path(name).is_absolute() else beside
    if not path.is_file():
        raise PluginError(f"loss scale {kind.__name__}: loss_scale_config {name!r} is no file (looked at {path})")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PluginError(f"loss scale {kind.__name__}: {path}, line {error.lineno}: not JSON: {error.msg}") from error


def _last_query(messages: Sequence[Any]) -> str | None:
    users = [m.get("content") for m in messages if m.get("role") == "user"]
    return users[-1] if users and isinstance(users[-1], str) else None


_said: set[str] = set()


def _say_once(name: str) -> None:
    if name not in _said:
        _said.add(name)
        logger.warning(
            "loss scale %s has weights other than 0 and 1: they only say which tokens are trained, every weight above "
            "0 counts as 1",
            name,
        )


# ---- a finished trajectory's mask


def train_prompt_assistants(
    chat: ChatTemplate, record: TrajectoryRecord, messages: Sequence[Message], tools: Sequence[dict] | None
) -> int:
    """Set the bits of the assistant messages in a record's prompt (unless they say `loss: False`), ends of turn
    included. Nobody sampled them: the update uses the trainer's own log-probs. Returns how many bits were set.

    Raises:
        TemplateError: the prompt does not show them as the template writes them one after the other.
    """
    prompt = record.token_ids[: record.num_prompt_tokens]
    spans = assistant_spans(chat, messages, tools, prompt)
    return record.set_mask(
        [
            p
            for place, (start, end) in spans.items()
            for p in range(start, end)
            if (loss := messages[place].get("loss")) is None or loss  # also numpy's False, and 0
        ]
    )


def apply_loss_scale(scale: LossScale, chat: ChatTemplate, trajectory: Trajectory) -> None:
    """Clear the bits that the scale weighs 0. With `all`, set every bit first.

    Raises:
        UserCodeError: the scale's pieces do not fit the text.
    """
    if type(scale) is LossScale and not scale.patterns:
        return
    before = sum(sum(r.loss_mask) for r in trajectory.records)
    for record in trajectory.records:
        if trains_everything(scale):
            trajectory.counters["trained_given_tokens"] = trajectory.counters.get(
                "trained_given_tokens", 0
            ) + record.set_mask(range(1, len(record.token_ids)))
        for number, (start, end) in trajectory.message_ranges(record.assistant_turns).items():
            last = number == trajectory.round_of(trajectory.num_turns)
            for low, high in _cleared(scale, chat, record.token_ids[start:end], last, trajectory.messages):
                record.clear_mask(list(range(start + low, start + high)))
        if any(record.loss_mask[: record.num_prompt_tokens]) and not trains_everything(scale):
            _scale_prompt(scale, chat, record)
    after = sum(sum(r.loss_mask) for r in trajectory.records)
    if after < before:
        trajectory.counters["masked_tokens"] = trajectory.counters.get("masked_tokens", 0) + before - after


def _cleared(
    scale: LossScale, chat: ChatTemplate, ids: list[int], last: bool, messages: Sequence[Message]
) -> list[tuple[int, int]]:
    """Ranges of tokens with weight 0, the end of turn asked for by itself."""
    body = len(ids) - int(bool(ids) and ids[-1] in chat.end_token_ids)
    said = ids[:body]
    text = chat.decode(said)
    ranges = [
        (first_token_at(chat.decode, said, low), first_token_at(chat.decode, said, high) if high < len(text) else body)
        for low, high in zero_stretches(scale, text, ContextType.RESPONSE, last=last, messages=messages)
    ]
    end = chat.decode(ids[body:])
    if end and zero_stretches(scale, end, ContextType.SUFFIX, last=last, messages=messages):
        ranges.append((body, len(ids)))
    return ranges


def _scale_prompt(scale: LossScale, chat: ChatTemplate, record: TrajectoryRecord) -> None:
    """Assistant messages of the prompt, where they are trained on request: earlier rounds like any other."""
    edge = 0
    mask = record.loss_mask[: record.num_prompt_tokens]
    while 1 in mask[edge:]:
        start = mask.index(1, edge)
        end = mask.index(0, start) if 0 in mask[start:] else len(mask)
        for low, high in _cleared(scale, chat, record.token_ids[start:end], False, []):
            record.clear_mask(list(range(start + low, start + high)))
        edge = end
