"""What every reward is inside: batched, async, one dict of numbers or one failure per trajectory."""

from __future__ import annotations

import contextlib
import logging
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from verl_mt.data.trajectory import MAX_REWARD, is_trainable
from verl_mt.errors import error_text, value_text

if TYPE_CHECKING:
    from verl_mt.data.dataset import DataRow
    from verl_mt.data.trajectory import Trajectory

log = logging.getLogger(__name__)

FailureKind = Literal["raised", "timeout", "invalid", "absent", "unknown_data_source", "unavailable"]
"""`absent`: the reward gave None or NaN; among several rewards that are added up it is left out of the sum.
`unavailable`: a service that the reward asks was down. It says nothing about the trajectory, which is aborted; every
other kind fails it."""


@dataclass(frozen=True)
class RunState:
    """Where its run stands when a trajectory is scored, for rewards that follow a schedule."""

    step: int = 0
    """Finished training steps. 0 in the first one, and where nothing is trained (`python -m verl_mt.evaluate`)."""
    total_steps: int = 0
    """Of the whole run. 0 = unknown."""
    updates_per_step: int = 1
    """Optimizer updates of a full step."""
    total_epochs: int = 0
    """`trainer.total_epochs`. 0 = unknown."""


@dataclass(frozen=True)
class RewardInput:
    """One trajectory to score."""

    data_source: str
    solution_str: str
    """What the model wrote: its assistant turns joined by a newline. Tool and interaction text is not in it."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    """The row's `extra_info`, with `messages`, `turn_scores`, `tool_rewards`, `num_turns` and `assistant_turns` (both
    the assistant turns; functions of verl's signature see `conversation_turns` as `num_turns`), `stop_reason`,
    `rollout_infos` and `trajectory_id`. `trajectory_inputs` (a list) where a trajectory became several records.
    Functions of verl's signatures also find `model_text` (`solution_str`) and `response_text` there."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data set's row, all columns."""
    completion: str = ""
    """The text of the last assistant turn."""
    trajectory: Trajectory | None = None
    """What is scored. None = it is not known here."""
    source: Any = None
    """An object that the rollout driver filled for rewards of the same library. None = there is none."""
    data_row: DataRow | None = None
    """The row with its label and metadata."""
    decode: Callable[[Sequence[int]], str] = str
    """Token ids -> text, control tokens kept."""
    conversation_turns: int | None = None
    """The prompt, each assistant turn and each answer to one (the results of a turn's calls are one answer; so is what
    the interaction says last). None = unknown."""
    prompt_id: str = ""
    """Shared by the samples of one prompt."""
    message_ids: Sequence[Sequence[int]] = ()
    """Token ids of each assistant message that was sampled, in order: text that a loop put into the message included,
    prompts and observations between messages not."""
    several_turns: bool = False
    """Conversations of its run may have several assistant turns."""
    run: RunState = RunState()
    decode_response: Callable[[], str] = str
    """Makes `response_text`."""

    @cached_property
    def response_text(self) -> str:
        """The whole response without special tokens: assistant turns, tool results, what an interaction said, and the
        template's words between them. It is what verl decodes for its reward functions."""
        return self.decode_response()

    @property
    def where(self) -> str:
        """Names the row and the trajectory, for errors."""
        index, trajectory_id = self.extra_info.get("index"), self.extra_info.get("trajectory_id")
        row = "a row without extra_info.index" if index is None else f"row {index}"
        return row if trajectory_id is None else f"{row} (trajectory {trajectory_id})"


@dataclass(frozen=True)
class RewardFailure:
    """A trajectory that could not be scored. The others of its batch are not touched."""

    error: str
    """One sentence: the reward, the row, what happened."""
    traceback: str
    """The user code's traceback. The error itself where there is none (a deadline, a value that is no score)."""
    kind: FailureKind = "raised"


RESERVED_PARTS = ("score", "overlong", "turn_cost", "token_cost")
"""Parts of a reward that come from elsewhere; no reward may have one of these names."""
Scores = dict[str, float]
"""`score` and any further numbers, all finite (`is_trainable`)."""


class Reward:
    """Scores trajectories. A custom reward subclasses this, or is a function (`adapters.py`)."""

    timeout_s: float = 60.0
    """Deadline of one call in seconds. `load_reward` sets `reward.timeout_s`."""

    def bind(self, config: Any, parts: Any) -> None:
        """Called once, before anything is scored.

        Args:
            config: the run's `Config`.
            parts: its `DriverParts`.
        """

    async def score(self, items: Sequence[RewardInput]) -> list[Scores | RewardFailure]:
        """One result per item, in the order of `items`. Never raises for a single bad item."""
        raise NotImplementedError(f"{type(self).__name__} must implement async score(items)")

    def check(self, row: DataRow) -> None:
        """Called at start for the rows of a data file, so that what cannot be scored is found before training.

        Raises:
            ConfigError: this reward cannot score such rows.
        """


class InvalidScore(ValueError):
    """A reward function returned something that is not a score."""

    kind: FailureKind = "invalid"


class NoScore(InvalidScore):
    """It returned None or NaN: it has nothing to say of this trajectory."""

    kind: FailureKind = "absent"


@contextlib.contextmanager
def reading_scores() -> Iterator[None]:
    """What a reward function returned is foreign code too: its `__float__`, `keys` or `tolist` may raise.

    Raises:
        InvalidScore: one of them did.
    """
    try:
        yield
    except (InvalidScore, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise InvalidScore(f"returned what cannot be read as scores: {error_text(error, named=True)}") from error


@reading_scores()
def as_scores(value: Any, label: str) -> Scores:
    """What a reward function returned, as numbers: a number, or a dict with `score` and more.

    Further entries that are no finite numbers are left out, with one warning per reward and key. So is
    what is beyond `MAX_REWARD`.

    Raises:
        NoScore: None, or NaN.
        InvalidScore: no score, or one that is not a finite number.
    """
    parts = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in parts:
        raise InvalidScore(f"returned a dict without 'score'; it has {', '.join(map(str, parts)) or 'no keys'}")
    value_of = {str(name): part for name, part in parts.items()}
    numbers_by_name = {name: _number(part) for name, part in value_of.items()}
    if numbers_by_name["score"] is None:
        got = value_text(parts["score"], 80)
        kind = NoScore if parts["score"] is None or _is_nan(parts["score"]) else InvalidScore
        raise kind(f"returned {got} as the score. Expected a finite number of at most {MAX_REWARD:.2g}")
    for name, number in numbers_by_name.items():
        if number is None and (label, name) not in _warned:
            _warned.add((label, name))
            got = value_text(value_of[name], 80)
            limit = f"{MAX_REWARD:.2g}"
            log.warning("reward %s: %r is no finite number of at most %s and is left out: %s", label, name, limit, got)
    return {name: number for name, number in numbers_by_name.items() if number is not None}


_warned: set[tuple[str, str]] = set()


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # an array or tensor of several elements
            return None
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if is_trainable(number) else None


def _is_nan(value: Any) -> bool:
    return isinstance(value, numbers.Real) and value != value
