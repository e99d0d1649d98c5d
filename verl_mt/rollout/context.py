"""What all conversations of a run share (`SessionContext`), the limits of each (`Limits`), and how errors name one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from verl_mt.chat.parsers.base import ToolParser
from verl_mt.chat.sanity import SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.rollout import RolloutConfig
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.engines.base import InferenceEngine
from verl_mt.errors import DeadlineError, VerlMTError, error_text
from verl_mt.rollout.loss_scale import LossScale
from verl_mt.tools.results import Keep

_log = logging.getLogger(__name__)
_TURNS_OF_TIME = 10
"""Without `rollout.max_seconds`, user code that drives a conversation may take as long as this many requests."""


@dataclass(frozen=True)
class Limits:
    """The limits of one trajectory: turns, tokens, seconds. The smallest wins, and each has its own stop reason.

    See `actor_rollout_ref.rollout` for each field; None = no limit of its own.
    """

    response_length: int
    """Everything after the first prompt, observations included, in tokens."""
    max_model_len: int
    """Longest sequence in tokens."""
    max_tokens_per_turn: int | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_seconds: float | None = None
    request_timeout_s: float = 600.0
    max_text_tokens: int = 512
    """Of a text that the environment says; the config's `max_tool_response_tokens`."""
    keep_text: Keep = "both"

    @classmethod
    def from_config(cls, rollout: RolloutConfig, max_prompt_length: int) -> Limits:
        """Those of a run whose prompts have at most `max_prompt_length` tokens; without several turns there is one
        assistant turn."""
        multi_turn = rollout.multi_turn
        return cls(
            response_length=rollout.response_length,
            max_model_len=rollout.max_model_len or max_prompt_length + rollout.response_length,
            max_tokens_per_turn=rollout.max_tokens_per_turn,
            max_assistant_turns=multi_turn.max_assistant_turns if is_multi_turn(rollout) else 1,
            max_user_turns=multi_turn.max_user_turns,
            max_seconds=rollout.max_seconds,
            request_timeout_s=rollout.request_timeout_s,
            max_text_tokens=multi_turn.max_tool_response_tokens,
            keep_text=multi_turn.tool_response_keep,  # type: ignore[arg-type]
        )

    @property
    def conversation_s(self) -> float:
        """Seconds that user code has for driving a whole conversation."""
        return self.max_seconds or _TURNS_OF_TIME * self.request_timeout_s

    def room(self, num_tokens: int, num_response_tokens: int) -> tuple[int, StopReason]:
        """Tokens that still fit, and what is hit when they are used up.

        Args:
            num_tokens: of the record, prompt included.
            num_response_tokens: after the first prompt, over all records.
        """
        in_response = self.response_length - num_response_tokens
        in_model = self.max_model_len - num_tokens
        if in_response <= in_model:
            return in_response, StopReason.RESPONSE_LENGTH
        return in_model, StopReason.MAX_MODEL_LEN

    def next_turn(self, num_tokens: int, num_response_tokens: int) -> tuple[int, StopReason]:
        """Like `room`, for one assistant turn: `max_tokens_per_turn` counts too."""
        room, reason = self.room(num_tokens, num_response_tokens)
        if self.max_tokens_per_turn is not None and self.max_tokens_per_turn <= room:
            return self.max_tokens_per_turn, StopReason.MAX_TOKENS_PER_TURN
        return room, reason


@dataclass(frozen=True)
class SessionContext:
    """What all conversations of a run share."""

    chat: ChatTemplate
    engine: InferenceEngine
    limits: Limits
    parser: ToolParser | None
    sampling: SamplingParams
    """`max_new_tokens` and `seed` are set per turn."""
    sanity: SanityMonitor
    use_inference_chat_template: bool = False
    deterministic: bool = False
    seed: int = 0
    loss_scale: LossScale | None = None
    """None = every sampled token is trained."""
    train_prompt_assistants: bool = False
    """Assistant messages of the data set's prompt are trained too."""


def is_multi_turn(rollout: RolloutConfig) -> bool:
    """The one switch: `multi_turn.enable`, or (null) whether anything is configured that can answer the model."""
    if rollout.multi_turn.enable is not None:
        return rollout.multi_turn.enable
    return bool(
        rollout.tool_kwargs.tools_config_file
        or rollout.interaction_config_file
        or rollout.environment.is_configured
        or rollout.agent_function_path
        or rollout.custom_generate_function_path
        or rollout.multi_turn.scheduler
    )


@cache
def warn_of_deadline(deadline_s: float) -> None:
    """Once in a process: on a machine that is slow most conversations may end so, and the scores say nothing."""
    _log.warning(
        "the engine did not finish a turn within %g s (actor_rollout_ref.rollout.request_timeout_s; SGLang and vLLM: "
        "sampled nothing for that long). The conversation ends there, truncated; `stop/time_limit` counts such. Raise "
        "the key where the engine is slow but well, or have fewer conversations at once (rollout.max_concurrent)",
        deadline_s,
    )


def deadline_error(trajectory: Trajectory, what: str) -> DeadlineError:
    """A deadline fired in a run that promises the same bits every time."""
    return DeadlineError(
        f"{trajectory.trajectory_id} (row {trajectory.row_index + 1}, turn {trajectory.num_turns}): {what} was over, "
        "and with trainer.deterministic=True no deadline may fire; raise it, or switch determinism off"
    )


def session_error(trajectory: Trajectory, error: BaseException) -> str:
    """One line that names trajectory, row and turn."""
    text = error_text(error, named=not isinstance(error, VerlMTError))
    return f"{trajectory.trajectory_id} (row {trajectory.row_index + 1}, turn {trajectory.num_turns}): {text}"
