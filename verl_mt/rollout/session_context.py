"""What a conversation is given (`SessionContext`), what a loop sees (`AssistantTurn`), and how its errors read."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mt.chat.parsers.base import ToolParser
from verl_mt.chat.sanity import SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message, ParsedTurn
from verl_mt.data.requests import FinishReason, SamplingParams
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.base import InferenceEngine
from verl_mt.errors import DeadlineError, VerlMTError, error_text
from verl_mt.rollout.limits import Limits
from verl_mt.rollout.loss_scale import LossScale


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


@dataclass(frozen=True)
class AssistantTurn:
    """One sampled turn as a loop sees it."""

    text: str
    """What the model wrote, without its end-of-turn token."""
    message: Message
    parsed: ParsedTurn
    finish_reason: FinishReason


def deadline_error(trajectory: Trajectory, what: str) -> DeadlineError:
    """A deadline fired in a run that promises the same bits every time."""
    return DeadlineError(
        f"{trajectory.trajectory_id} (row {trajectory.row_index}, turn {trajectory.num_turns}): {what} was over, and "
        "with trainer.deterministic=True no deadline may fire; raise it, or switch determinism off"
    )


def session_error(trajectory: Trajectory, error: BaseException) -> str:
    """One line that names trajectory, row and turn."""
    text = error_text(error, named=not isinstance(error, VerlMTError))
    return f"{trajectory.trajectory_id} (row {trajectory.row_index}, turn {trajectory.num_turns}): {text}"
