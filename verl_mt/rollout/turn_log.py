"""One structured line per assistant turn, whatever drives the conversation."""

from __future__ import annotations

import logging
import re

from verl_mt.data.conversation import ParsedTurn
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.requests import FinishReason
from verl_mt.data.trajectory import Trajectory

logger = logging.getLogger("verl_mt.turns")
"""Level DEBUG. The line's numbers are attributes of the log record, for handlers that write JSON: see `log_turn`."""


def log_turn(
    trajectory: Trajectory, record: TrajectoryRecord, parsed: ParsedTurn, text: str, finish_reason: FinishReason
) -> None:
    """Write the line of the turn that was recorded last.

    Attributes: `trajectory_id`, `turn`, `action` (names of the calls, else the first tag that is closed, else
    None), `finish_reason`, `sampled_tokens` (of the turn), `response_tokens`, `mask_tokens` (lengths of the two
    columns) and `trained_tokens` of the record so far.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        return
    start, span = record.num_prompt_tokens, record.turns[-1]
    numbers = {
        "trajectory_id": trajectory.trajectory_id,
        "turn": trajectory.num_turns,
        "action": ", ".join(call.name for call in parsed.calls) or first_tag(text),
        "finish_reason": finish_reason,
        "sampled_tokens": span.end - span.start,
        "response_tokens": len(record.token_ids) - start,
        "mask_tokens": len(record.loss_mask) - start,
        "trained_tokens": sum(record.loss_mask),
    }
    logger.debug(
        "%(trajectory_id)s turn %(turn)d: action %(action)s, %(finish_reason)s after %(sampled_tokens)d tokens; "
        "response %(response_tokens)d, mask %(mask_tokens)d, trained %(trained_tokens)d",
        numbers,
        extra=numbers,
    )


def first_tag(text: str) -> str | None:
    """The first tag that the text opens and closes, thoughts aside: `search` in `<search>x</search>`."""
    for closing in re.finditer(r"</(\w+)>", text):
        name = closing.group(1)
        if name != "think" and f"<{name}>" in text[: closing.start()]:
            return name
    return None
