"""What a rollout leaves behind: trajectories made of records (`verl_mt.data.ledger`), in groups."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_mt.data.conversation import Message
from verl_mt.data.ledger import TrajectoryRecord, TurnSpan, total

MAX_REWARD = 1e15
"""Batches hold rewards in float32, which ends at 3.4e38: up to here the squares of a batch add up to less."""


def is_trainable(reward: float) -> bool:
    """Whether a number can be a reward: finite, and so is what a batch in float32 computes of it."""
    return abs(reward) <= MAX_REWARD


class Status(enum.StrEnum):
    """The fate of a trajectory as training sees it."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended by a length or context limit. Trained on like any other unless configured otherwise."""
    ABORTED = "aborted"
    """The engine went away (then it was retried), or a service that the reward asks. Never trained on."""
    FAILED = "failed"
    """User code (reward, interaction, scheduler) raised. Never trained on, counted."""


class StopReason(enum.StrEnum):
    """Why a trajectory ended. Exactly one per trajectory."""

    FINISHED = "finished"
    """The model ended its turn without a tool call and no interaction wanted to go on."""
    INTERACTION = "interaction"
    """The interaction said the conversation is over."""
    ENVIRONMENT = "environment"
    """The environment said that the episode is over (`done`)."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """No assistant turn remains. A tool call in the last turn is not executed."""
    MAX_USER_TURNS = "max_user_turns"
    """The interaction wanted another turn and none remains."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The model called again after it was told that `max_tool_calls` are used up. Those calls were not run."""
    MAX_TOKENS_PER_TURN = "max_tokens_per_turn"
    """A turn was cut at `max_tokens_per_turn`. Its tools are not run."""
    RESPONSE_LENGTH = "response_length"
    """Everything after the first prompt reached `response_length` in the middle of a turn."""
    MAX_MODEL_LEN = "max_model_len"
    """The model's context was full in the middle of a turn."""
    CONTEXT_FULL = "context_full"
    """The next observation, generation prompt and one more token do not fit. It is in `messages` only."""
    TIME_LIMIT = "time_limit"
    """`max_seconds` of the trajectory were over. The tokens sampled so far are kept."""
    SCHEDULER = "scheduler"
    """A scheduler's `check_finished` or a custom generate function ended it."""
    TRUNCATED = "truncated"
    """A custom generate function said so, without one of the limits above having been hit."""
    ABORTED = "aborted"
    """A custom generate function gave the sample up."""
    ERROR = "error"
    """User code raised."""
    ENGINE = "engine"
    """The engine went away and retries were used up."""
    REWARD_UNAVAILABLE = "reward_unavailable"
    """A service that the reward asks (a judge) was down: nobody knows what the conversation was worth."""

    @property
    def status(self) -> Status:
        """The one place where a stop reason becomes a `Status`."""
        return _STATUS.get(self, Status.COMPLETED)


_STATUS = {
    StopReason.MAX_TOKENS_PER_TURN: Status.TRUNCATED,
    StopReason.RESPONSE_LENGTH: Status.TRUNCATED,
    StopReason.MAX_MODEL_LEN: Status.TRUNCATED,
    StopReason.CONTEXT_FULL: Status.TRUNCATED,
    StopReason.TIME_LIMIT: Status.TRUNCATED,
    StopReason.TRUNCATED: Status.TRUNCATED,
    StopReason.ABORTED: Status.ABORTED,
    StopReason.ERROR: Status.FAILED,
    StopReason.ENGINE: Status.ABORTED,
    StopReason.REWARD_UNAVAILABLE: Status.ABORTED,
}


@dataclass(frozen=True)
class TimeSpan:
    """A phase of a trajectory's life on the monotonic clock of its process: `[start_s, end_s)`."""

    phase: Literal["queue", "prefill", "decode", "tool", "reward", "interaction"]
    start_s: float
    end_s: float
    turn: int
    name: str = ""
    """The tool, where the phase is `tool`."""


@dataclass
class Trajectory:
    """One conversation from its prompt to its stop reason."""

    trajectory_id: str
    prompt_id: str
    group_id: str
    """Default: the prompt. With several roles prompt + role."""
    episode_id: str
    """Shared by the agents of one episode. Default: the trajectory's own id."""
    data_source: str = ""
    row_index: int = -1
    """Row of the data set, -1 where there is none."""
    messages: list[Message] = field(default_factory=list)
    turn_texts: list[str] = field(default_factory=list)
    """What the model wrote in each assistant turn, reasoning and calls included, without the end-of-turn token."""
    replicas: list[str | None] = field(default_factory=list)
    """Which replica of the engine sampled each assistant turn. Empty where the engine is one."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tool schemas that the prompt showed, as the template got them."""
    records: list[TrajectoryRecord] = field(default_factory=list)
    reward: float | None = None
    """None until scored."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Every number of the reward function's dict, `score` included, and what `reward.turn_cost` and `.token_cost`
    took (negative)."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Per call that the model wrote and the tool executor answered, in order: `turn`, `name`, `call_id`, `arguments`
    (None where they could not be read; `written` is the text then), `failure` (whose: `tools.results.Failure`, or
    None), `latency_s` (waiting for a free slot included), `step_reward`. The answers are in `messages`."""
    tool_rewards: dict[str, list[float]] = field(default_factory=dict)
    """Per tool: the step rewards of `execute` in order, then `calc_reward`."""
    tool_reward_turns: dict[str, list[int]] = field(default_factory=dict)
    """Per tool: the assistant turn of each of its step rewards."""
    turn_scores: list[float] = field(default_factory=list)
    """What the interaction scored, one per interaction turn."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Assistant turn -> the part of `reward` that it earned itself. Empty where `reward` belongs to the whole."""
    trained_version: int | None = None
    """Of the weights that were updated with it: a token is older by the difference of the versions. None where
    none were."""
    greedy_reward: float | None = None
    """Reward of the greedy answer to the same prompt, where one was sampled. NaN if that one failed."""
    stop_reason: StopReason | None = None
    num_turns: int = 0
    """Assistant turns."""
    rounds: list[int] = field(default_factory=list)
    """For each assistant turn, the number of its message among the assistant ones, from 0: turns that went on inside
    one message share it. Empty where every turn is a message (`round_of`)."""
    counters: dict[str, float] = field(default_factory=dict)
    """Counted events: `tools/<name>/calls`, `tools/<name>/errors`, `tools/<name>/latency_s`, `retries`, ..."""
    time_spans: list[TimeSpan] = field(default_factory=list)
    sanity: dict[str, Any] | None = None
    """The tokenization sanity check's finding. None where it was off or found nothing."""
    error: str | None = None
    """The traceback, where the status is FAILED or ABORTED."""
    info: dict[str, Any] = field(default_factory=dict)
    """What plug-ins attach (`rollout_infos`)."""
    extra_fields: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What tools left in `agent_data.extra_fields`, for the reward's `extra_info`. Empty once it is scored: the entries
    may be anything, and a trajectory is written and sent."""
    media: dict[str, list[Any]] = field(default_factory=dict)
    """`images`, `videos` in the order of the messages, where a plug-in replaced those of the row."""
    source: str = ""
    """Name of the row's entry in `data.train_files` or `data.val_files`. With `row_index` it names the row."""
    ground_truth: Any = None
    """What the row says is right, for whoever reads the rollout. The reward asks the row itself."""
    execution_id: str | None = None
    """Trajectories of a batch that share it weigh in the loss as one. None = this one weighs by itself."""
    sample: Any = None
    """The object of another library that its rollout driver got for it. Its `reward` is kept up to date."""

    @property
    def status(self) -> Status:
        return Status.PENDING if self.stop_reason is None else self.stop_reason.status

    @property
    def trainable(self) -> bool:
        """Completed or truncated, with at least one token in the loss."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED) and any(total(r.loss_mask) for r in self.records)

    def round_of(self, turn: int) -> int:
        """Number of the assistant message, from 0, that assistant turn `turn` is in."""
        return self.rounds[turn - 1] if self.rounds else turn - 1

    def message_ranges(self, turns: Iterable[TurnSpan]) -> dict[int, tuple[int, int]]:
        """Number of a message -> its tokens, from the first sampled one to the last, of assistant turns."""
        ranges: dict[int, tuple[int, int]] = {}
        for span in turns:
            number = self.round_of(span.turn)
            ranges[number] = (ranges.get(number, (span.start, 0))[0], span.end)
        return ranges

    @property
    def num_sampled_tokens(self) -> int:
        return sum(total(r.sampled) for r in self.records)


FILTERED = "filtered"
"""Counter of a trajectory that was sampled and scored, and then left out of the batch with its group."""


@dataclass
class TrajectoryGroup:
    """The trajectories whose rewards are compared with each other."""

    group_id: str
    prompt_id: str
    trajectories: list[Trajectory]
    data_source: str = ""
    row_index: int = -1
    source: str = ""
    """The row's entry. With `row_index` it names the row."""
    sealed: bytes | None = field(default=None, repr=False, compare=False)
    """Rollout rows of its trajectories, in their order, as `data.columnar_rows.seal` made them where they were sampled.
    None = whoever writes them makes them."""

    @property
    def filtered(self) -> bool:
        """Nothing of it is trained, because its members all did equally well (dynamic sampling)."""
        return any(FILTERED in t.counters for t in self.trajectories)

    def leave_out(self) -> None:
        """Mark it as `filtered`. Its trajectories' rows say so."""
        for trajectory in self.trajectories:
            trajectory.counters[FILTERED] = 1.0
