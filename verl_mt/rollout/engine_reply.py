"""What a generate function is answered: the shape of SGLang's `/generate`."""

from __future__ import annotations

from typing import Any

from verl_mt.data.requests import FinishReason
from verl_mt.errors import EngineError
from verl_mt.rollout.generate_args import TurnSampling
from verl_mt.rollout.session import RolloutSession


def reply_to(
    session: RolloutSession,
    turn: TurnSampling,
    finish_reason: FinishReason,
    *,
    return_logprob: bool,
    return_text: bool = False,
) -> dict[str, Any]:
    """The reply for the turn that the session has just recorded.

    Returns:
        `text`, `output_ids`, and `meta_info` with `finish_reason` (`type`: stop, length, abort), token counts,
        `weight_version`, and with `return_logprob` the `output_token_logprobs`: items [log-prob, id, text], where the
        text is None unless `return_text` asks for it (as in SGLang, and it costs a call of the tokenizer per token).

    Raises:
        EngineError: log-probs are asked for and the engine gave none.
    """
    record = session.record
    span = record.turns[-1]
    ids = record.token_ids[span.start : span.end]
    meta: dict[str, Any] = {
        "id": f"{session.trajectory.trajectory_id}/{session.attempt}/{session.trajectory.num_turns}",
        "finish_reason": _finish(session, turn, ids, finish_reason),
        "prompt_tokens": span.start,
        "completion_tokens": len(ids),
        "weight_version": str(max(record.policy_versions[span.start : span.end], default=-1)),
    }
    if return_logprob:
        if not record.has_log_probs:
            raise EngineError("return_logprob: this engine gives no log-probs")
        texts = [session.context.chat.decode([i]) if return_text else None for i in ids]
        log_probs = record.rollout_log_probs[span.start : span.end]
        meta["output_token_logprobs"] = [list(item) for item in zip(log_probs, ids, texts)]
    return {"text": _text(session, turn, ids, finish_reason), "output_ids": ids, "meta_info": meta}


def abort_reply(message: str) -> dict[str, Any]:
    """The reply where the engine went away or the time is over."""
    meta = {"finish_reason": {"type": "abort", "message": message}, "prompt_tokens": 0, "completion_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta | {"cached_tokens": 0, "output_token_logprobs": []}}


def _finish(session: RolloutSession, turn: TurnSampling, ids: list[int], reason: FinishReason) -> dict[str, Any]:
    if reason == "length":
        return {"type": "length", "length": len(ids)}
    if reason == "abort":
        return {"type": "abort", "message": "the request's time was over"}
    ends = session.context.chat.end_token_ids | set(turn.sampling.stop_token_ids)
    if ids and ids[-1] in ends:
        return {"type": "stop", "matched": ids[-1]}
    text = session.context.chat.decode(ids)
    return {"type": "stop", "matched": next((s for s in turn.sampling.stop if s in text), None)}


def _text(session: RolloutSession, turn: TurnSampling, ids: list[int], reason: FinishReason) -> str:
    """The turn's text, looked at as `sampling_params` ask for."""
    chat = session.context.chat
    matched = _finish(session, turn, ids, reason).get("matched")
    if turn.trim_stop and isinstance(matched, int):
        ids = ids[:-1]
    if turn.skip_special_tokens:
        text = chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    else:
        text = chat.decode(ids)
    if turn.trim_stop and isinstance(matched, str):
        text = text[: text.index(matched)]
    return text
