"""What goes to an inference engine and what comes back; and the same as a scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_mt.data.conversation import Message

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one assistant turn. The same meaning in every engine.

    Filters apply in this order: temperature, top-k, top-p, min-p. Log-probs that an engine returns are always
    `log_softmax(logits / T)` over the full vocabulary (T = 0 counts as 1), whatever filter was on.
    """

    max_new_tokens: int
    """At most this many tokens are sampled, the end-of-turn token included."""
    temperature: float = 1.0
    """0 = greedy (ties: the lowest id)."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = off."""
    min_p: float = 0.0
    """Tokens with less than `min_p` times the largest probability are never sampled."""
    seed: int | None = None
    """None = the engine's own stream of random numbers; a number = the same tokens for the same request."""
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded turn contains one of these; the tokens that complete it are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends when one of these is sampled; it is kept, as the turn's last token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"temperature >= 0, 0 < top_p <= 1, 0 <= min_p < 1; got {self.temperature}, {self.top_p}, {self.min_p}"
            )
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be -1 (off) or at least 1, got {self.top_k}")

    def greedy(self) -> SamplingParams:
        """The same turn without chance."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)


@dataclass(frozen=True)
class GenerationRequest:
    """One assistant turn to sample: exact ids in, exact ids out."""

    input_ids: list[int]
    """Everything the model has seen so far, generation prompt included."""
    sampling: SamplingParams
    request_id: str
    session_id: str
    """Same for all turns of one record: an engine may keep the KV cache of a session."""
    deadline_s: float | None = None
    """Seconds from now after which the engine aborts and returns what it has (finish_reason `abort`)."""
    media: dict[str, Any] = field(default_factory=dict)
    """`inputs`: the `MediaInput`s of the record, whose placeholder tokens are in `input_ids`; empty for text."""


@dataclass(frozen=True)
class VersionSpan:
    """`num_tokens` consecutive sampled tokens that came from one version of the weights."""

    version: int
    num_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds that one request spent in each phase, by a monotonic clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class GenerationOutput:
    """What the engine sampled.

    `len(token_ids) == len(log_probs) == sum(span.num_tokens)`. An engine that yields only text
    (`capabilities.returns_token_ids` false) sets `text` and leaves `token_ids` and `log_probs` None.
    """

    token_ids: list[int] | None
    log_probs: list[float] | None
    """log_softmax(logits / T) of each sampled id; None from a text-only engine."""
    finish_reason: FinishReason
    """stop: an end-of-turn token, stop id or stop string (all kept); length: the token limit; abort: cut off."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    """How many of `input_ids` needed no prefill."""
    timings: Timings = Timings()
    text: str | None = None
    replica: str | None = None
    """Which of the engine's replicas sampled it; None from an engine that is one."""


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
