"""What a rollout leaves behind: trajectories made of records, in groups.

A record with two assistant turns around one tool answer, P0 the first prompt (generation prompt included), A0 and A1
sampled, E0 the tool's answer as the template renders it (the next generation prompt included)::

    token_ids         = P0             + A0            + E0             + A1
    sampled           = [0] * len(P0)  + [1] * len(A0) + [0] * len(E0)  + [1] * len(A1)
    loss_mask         = sampled, minus what a user cleared
    rollout_log_probs = [0.0]*len(P0)  + lp(A0)        + [0.0]*len(E0)  + lp(A1)
    policy_versions   = [-1]*len(P0)   + version(A0)   + [-1]*len(E0)   + version(A1)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_mt.data.conversation import Message
from verl_mt.data.media import MediaInput
from verl_mt.errors import LedgerError

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
    """Ended by a length or context limit; trained on like any other unless configured otherwise."""
    ABORTED = "aborted"
    """The engine went away (then it was retried), or a service that the reward asks; never trained on."""
    FAILED = "failed"
    """User code (reward, interaction, scheduler) raised; never trained on, counted."""


class StopReason(enum.StrEnum):
    """Why a trajectory ended. Exactly one per trajectory."""

    FINISHED = "finished"
    """The model ended its turn without a tool call and no interaction wanted to go on."""
    INTERACTION = "interaction"
    """The interaction said the conversation is over."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    """No assistant turn remains; a tool call in the last turn is not executed."""
    MAX_USER_TURNS = "max_user_turns"
    """The interaction wanted another turn and none remains."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The model called again after it was told that `max_tool_calls` are used up; those calls were not run."""
    MAX_TOKENS_PER_TURN = "max_tokens_per_turn"
    """A turn was cut at `max_tokens_per_turn`; its tools are not run."""
    RESPONSE_LENGTH = "response_length"
    """Everything after the first prompt reached `response_length` in the middle of a turn."""
    MAX_MODEL_LEN = "max_model_len"
    """The model's context was full in the middle of a turn."""
    CONTEXT_FULL = "context_full"
    """The next observation, generation prompt and one more token do not fit; it is in `messages` only."""
    TIME_LIMIT = "time_limit"
    """`max_seconds` of the trajectory were over; the tokens sampled so far are kept."""
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

SpanKind = Literal["prompt", "assistant", "observation"]


@dataclass(frozen=True)
class TurnSpan:
    """Tokens `[start, end)` of a record that belong to one step of the conversation."""

    kind: SpanKind
    start: int
    end: int
    turn: int
    """The assistant turn: 0 for the prompt, k for the k-th assistant turn and for the observation that follows it."""


@dataclass
class TrajectoryRecord:
    """One token stream of a trajectory, with provenance and mask of equal length. See the module's picture."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    """log_softmax(logits / T) by the sampler where `sampled`, 0.0 elsewhere."""
    policy_versions: list[int] = field(default_factory=list)
    """Version of the weights where `sampled`, -1 elsewhere."""
    turns: list[TurnSpan] = field(default_factory=list)
    has_log_probs: bool = True
    """False if the engine gave text only: training then uses the trainer's own old log-probs."""
    messages: list[Message] = field(default_factory=list)
    """What this record has seen, where history was rewritten after it; empty = the trajectory's `messages`."""
    tools: list[dict[str, Any]] | None = None
    """The schemas that its prompt showed, where a later record shows others; None = the trajectory's `tools`."""
    media: list[MediaInput] = field(default_factory=list)
    """Images and videos among its tokens, in order: exactly what the engine was given and the trainer is."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the first prompt, its generation prompt included."""
        return self.turns[0].end if self.turns and self.turns[0].kind == "prompt" else 0

    def append_sampled(self, ids: list[int], log_probs: list[float] | None, versions: list[int], *, turn: int) -> None:
        """Append what the engine produced: sampled 1, mask 1.

        Raises:
            LedgerError: log-probs missing or of another length (names both lengths).
        """
        if log_probs is None and self.has_log_probs and any(self.sampled):
            raise LedgerError("sampled tokens without log-probs after sampled tokens with log-probs")
        if log_probs is None:
            self.has_log_probs = False
            log_probs = [0.0] * len(ids)
        if len(log_probs) != len(ids) or len(versions) != len(ids):
            raise LedgerError(
                f"{len(ids)} sampled ids came with {len(log_probs)} log-probs and {len(versions)} versions; "
                "all three must have the same length"
            )
        self._append(ids, 1, log_probs, versions, "assistant", turn)

    def append_given(self, ids: list[int], *, kind: SpanKind, turn: int) -> None:
        """Append a prompt or an observation: sampled 0, mask 0, log-prob filler 0.0, version -1."""
        self._append(ids, 0, [0.0] * len(ids), [-1] * len(ids), kind, turn)

    def clear_mask(self, positions: list[int]) -> int:
        """Take tokens out of the loss. Returns how many bits were set before."""
        cleared = sum(self.loss_mask[p] for p in positions)
        for p in positions:
            self.loss_mask[p] = 0
        return cleared

    def set_mask(self, positions: Iterable[int]) -> int:
        """Put tokens into the loss, sampled or not: an explicit request of the user. Returns how many of them that
        nobody sampled were not in it before. Placeholders of images and videos stay out: they say nothing."""
        added = 0
        shown = {p for made in self.media for p in range(made.start, made.end)}
        for p in positions:
            if p in shown:
                continue
            added += not self.loss_mask[p] and not self.sampled[p]
            self.loss_mask[p] = 1
        return added

    def cut(self, end: int) -> int:
        """Drop the tokens from position `end` on. Returns how many of them were sampled."""
        dropped = sum(self.sampled[end:])
        for column in (self.token_ids, self.sampled, self.loss_mask, self.rollout_log_probs, self.policy_versions):
            del column[end:]
        self.turns = [replace(span, end=min(span.end, end)) for span in self.turns if span.start < end]
        self.media = [made for made in self.media if made.end <= end]
        return dropped

    def split(self, start: int) -> tuple[TrajectoryRecord, TrajectoryRecord]:
        """Two records that train the same tokens: what comes before position `start` is the prompt of the second."""
        first = replace(self, turns=list(self.turns), messages=list(self.messages), media=list(self.media))
        for name in ("token_ids", "sampled", "loss_mask", "rollout_log_probs", "policy_versions"):
            setattr(first, name, list(getattr(self, name)))
        first.cut(max((p + 1 for p in range(start) if self.sampled[p]), default=start))
        second = TrajectoryRecord(has_log_probs=self.has_log_probs, media=list(self.media))
        turn = first.turns[-1].turn if first.turns else 0
        second.append_given(list(self.token_ids[:start]), kind="prompt", turn=turn)
        second.token_ids += self.token_ids[start:]
        second.sampled += self.sampled[start:]
        second.loss_mask += self.loss_mask[start:]
        second.rollout_log_probs += self.rollout_log_probs[start:]
        second.policy_versions += self.policy_versions[start:]
        second.turns += [span for span in self.turns if span.start >= start]
        return first, second

    def check(self) -> None:
        """Verify the invariants of the module's picture.

        Raises:
            LedgerError: names the invariant and the numbers.
        """
        lengths = {
            name: len(getattr(self, name))
            for name in ("token_ids", "sampled", "loss_mask", "rollout_log_probs", "policy_versions")
        }
        if len(set(lengths.values())) != 1:
            raise LedgerError(f"columns of one record differ in length: {lengths}")
        for p, (s, lp, v) in enumerate(zip(self.sampled, self.rollout_log_probs, self.policy_versions)):
            if not s and (lp != 0.0 or v != -1):
                raise LedgerError(f"position {p} was not sampled but has log-prob {lp} and version {v}")
        edge = 0
        for span in self.turns:
            if span.start != edge or span.end < span.start:
                raise LedgerError(f"turn spans are not contiguous at token {edge}: {span}")
            edge = span.end
        if edge != len(self.token_ids):
            raise LedgerError(f"turn spans cover {edge} of {len(self.token_ids)} tokens")

    def _append(
        self,
        ids: list[int],
        sampled: int,
        log_probs: list[float],
        versions: list[int],
        kind: SpanKind,
        turn: int,
    ) -> None:
        start = len(self.token_ids)
        self.token_ids += ids
        self.sampled += [sampled] * len(ids)
        self.loss_mask += [sampled] * len(ids)
        self.rollout_log_probs += log_probs
        self.policy_versions += versions
        self.turns.append(TurnSpan(kind, start, start + len(ids), turn))


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
    """Default: the prompt; with several roles prompt + role."""
    episode_id: str
    """Shared by the agents of one episode; default: the trajectory's own id."""
    data_source: str = ""
    row_index: int = -1
    """Row of the data set, -1 where there is none."""
    messages: list[Message] = field(default_factory=list)
    turn_texts: list[str] = field(default_factory=list)
    """What the model wrote in each assistant turn, reasoning and calls included, without the end-of-turn token."""
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
    """Assistant turn -> the part of `reward` that it earned itself; empty where `reward` belongs to the whole."""
    greedy_reward: float | None = None
    """Reward of the greedy answer to the same prompt, where one was sampled; NaN if that one failed."""
    stop_reason: StopReason | None = None
    num_turns: int = 0
    """Assistant turns."""
    counters: dict[str, float] = field(default_factory=dict)
    """Counted events: `tools/<name>/calls`, `tools/<name>/errors`, `tools/<name>/latency_s`, `retries`, ..."""
    time_spans: list[TimeSpan] = field(default_factory=list)
    sanity: dict[str, Any] | None = None
    """The tokenization sanity check's finding; None where it was off or found nothing."""
    error: str | None = None
    """The traceback, where the status is FAILED or ABORTED."""
    info: dict[str, Any] = field(default_factory=dict)
    """What plug-ins attach (`rollout_infos`)."""
    media: dict[str, list[Any]] = field(default_factory=dict)
    """`images`, `videos` in the order of the messages, where a plug-in replaced those of the row."""
    source: str = ""
    """Name of the row's entry in `data.train_files` or `data.val_files`; with `row_index` it names the row."""
    sample: Any = None
    """The Sample that a generate function of slime's kind returned for it (`data/slime_sample.py`)."""

    @property
    def status(self) -> Status:
        return Status.PENDING if self.stop_reason is None else self.stop_reason.status

    @property
    def trainable(self) -> bool:
        """Completed or truncated, with at least one token in the loss."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED) and any(any(r.loss_mask) for r in self.records)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(sum(r.sampled) for r in self.records)


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
    """The row's entry; with `row_index` it names the row."""

    @property
    def filtered(self) -> bool:
        """Nothing of it is trained, because its members all did equally well (dynamic sampling)."""
        return any(FILTERED in t.counters for t in self.trajectories)

    def leave_out(self) -> None:
        """Mark it as `filtered`; its trajectories' rows say so."""
        for trajectory in self.trajectories:
            trajectory.counters[FILTERED] = 1.0
