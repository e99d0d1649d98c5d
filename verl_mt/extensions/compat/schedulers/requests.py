"""Requests and answers as a scheduler sees them, under ms-swift's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl_mt.data.conversation import Message


@dataclass
class RolloutInferRequest:
    """The conversation as a scheduler gets it; it edits `messages` to say what is asked next.

    Every request has lists and dicts of its own.
    """

    messages: list[Message]
    """The last one is the model's newest turn in `check_finished` and `step`, its text exactly as it was written."""
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    """The schemas that the prompt shows."""
    objects: dict[str, Any] = field(default_factory=dict)
    data_dict: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    uuid: str | None = None
    """The trajectory's id: the same in all hooks, another one for each sample of a prompt."""


@dataclass
class ChatMessage:
    """What the model said."""

    role: str
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    """Calls that the run's tool parser read; None without tools."""


@dataclass
class ChatCompletionResponseChoice:
    """One sampled turn as a scheduler gets it: a copy, so that editing it changes nothing that was recorded."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    """stop, length, or abort (out of time)."""
    logprobs: dict[str, Any] | None = None
    """`{"content": [{"token": str, "logprob": float}, ...]}`, one entry per token id; None from a text-only engine."""
    messages: list[Message] | None = None
    """A copy of the whole conversation, in the last turn's choice once the trajectory is over."""
    token_ids: list[int] | None = None
    """The sampled ids, the stop token included where one was sampled."""


RolloutResponseChoice = ChatCompletionResponseChoice
"""The older name."""


@dataclass
class ChatCompletionResponse:
    """What `infer_engine.infer_async` returns: one choice."""

    choices: list[ChatCompletionResponseChoice]
    id: str = ""
    """Names the turn; a `RolloutOutput` is matched to what was recorded by it."""
    model: str = ""
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class RequestConfig:
    """How a scheduler's `run` may ask for a turn; `infer_async` refuses other values than the run's own for the rest.

    Log-probs are of logits / temperature over the full vocabulary, so temperature and filters belong to the run.
    """

    max_tokens: int | None = None
    """Fewer tokens than the run's own limits; None = those."""
    stop: list[str] | None = None
    """Strings that end this turn, beside the run's own."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = 1
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    num_beams: int = 1
    best_of: int | None = None
    seed: int | None = None
    """Seeds come from the run (`trainer.seed`)."""
    stream: bool = False
    logprobs: bool = False
    """Log-probs of the sampled ids are always there."""
    top_logprobs: int | None = None
    return_details: bool = False


@dataclass
class UsageInfo:
    """How many tokens a turn took, under ms-swift's names."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


@dataclass
class RolloutOutput:
    """What a scheduler's `run` returns: one record of the trajectory. Everything but `response` is optional."""

    response: ChatCompletionResponse
    """The last turn of this record, as `infer_async` returned it."""
    messages: list[Message] | None = None
    response_token_ids: list[Any] | None = None
    """Ids of the record's turns: a list of lists, or one flat list."""
    response_loss_mask: list[Any] | None = None
    """0 takes an id out of the loss; the same shape."""
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[Any] | None = None
    """Accepted and not needed: what the engine reported is recorded."""
    whole: bool = False
    """It stands for everything that was recorded, in however many records; the default loop's does."""
