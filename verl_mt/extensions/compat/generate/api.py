"""SGLang's `/generate` as a generate function sees it: what it may ask for, and what it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.data.requests import FinishReason, SamplingParams
from verl_mt.data.user_values import WrongValue, count_of, ids_of, stops_of
from verl_mt.errors import EngineError, LedgerError, value_text
from verl_mt.plugins import suggest
from verl_mt.rollout.session import RolloutSession

_KNOWN = (
    "text", "input_ids", "sampling_params", "return_logprob", "return_text_in_logprobs", "logprob_start_len", "stream",
    "rid",
)  # fmt: skip
_FORMAT_ONLY = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
    "sampling_seed": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "stop_regex": (None,),
    "logit_bias": (None,),
    "custom_params": (None,),
}
"""SGLang's other sampling parameters, with the values at which they do nothing."""


@dataclass(frozen=True)
class TurnSampling:
    """The sampling parameters of one request."""

    sampling: SamplingParams
    max_new_tokens: int | None
    """None = whatever fits."""
    skip_special_tokens: bool
    trim_stop: bool

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, base: SamplingParams) -> TurnSampling:
        """Read SGLang's dict.

        Args:
            base: of the run. What shapes the distribution must agree with it: log-probs are trained at its temperature.

        Raises:
            LedgerError: a parameter that is not offered, or another distribution than the run's.
        """
        if given is not None and not isinstance(given, Mapping):
            raise LedgerError(f"sampling_params must be a dict, got {value_text(given)}")
        given = dict(given or {})
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = given.pop(name, None)
            if value is not None and value != getattr(base, name):
                raise LedgerError(
                    f"sampling_params.{name} is {value}, but this rollout samples with {getattr(base, name)}. Set it "
                    "in actor_rollout_ref.rollout (or val_kwargs), where the trainer sees it too"
                )
        for name, values in _NEUTRAL.items():
            value = given.pop(name, values[0])
            if value not in values:
                raise LedgerError(f"sampling_params.{name} is {value!r}: not offered, leave it out")
        limit, stop = given.pop("max_new_tokens", None), given.pop("stop", None) or None
        try:
            limit = None if limit is None else count_of(limit, "sampling_params.max_new_tokens")
            stops = stops_of(stop, "sampling_params.stop")
            stop_ids = ids_of(given.pop("stop_token_ids", None) or [], "sampling_params.stop_token_ids")
        except WrongValue as error:
            raise LedgerError(str(error)) from None
        skip, keep = bool(given.pop("skip_special_tokens", True)), bool(given.pop("no_stop_trim", False))
        given.pop("spaces_between_special_tokens", None)
        if given:
            name = next(iter(given))
            known = ["temperature", "max_new_tokens", "stop", "stop_token_ids", *_NEUTRAL, *_FORMAT_ONLY]
            raise LedgerError(f"unknown sampling parameter {name!r}{suggest(name, known)}")
        sampling = replace(
            base,
            stop=tuple(dict.fromkeys([*base.stop, *stops])),
            stop_token_ids=tuple(dict.fromkeys([*base.stop_token_ids, *stop_ids])),
        )
        return cls(sampling, limit, skip, not keep)


@dataclass(frozen=True)
class EngineRequest:
    """A payload for `/generate`, understood."""

    text: str | None
    ids: list[int] | None
    turn: TurnSampling
    return_logprob: bool
    return_text: bool

    @classmethod
    def parse(cls, payload: Mapping[str, Any], base: SamplingParams) -> EngineRequest:
        """Read SGLang's payload; `base` is how the run samples.

        Raises:
            LedgerError: neither text nor ids, or an option that is not offered.
        """
        if not isinstance(payload, Mapping):
            raise LedgerError(f"payload of /generate: expected a dict, got {value_text(payload)}")
        unknown = [k for k, v in payload.items() if k not in _KNOWN and v not in (None, False)]
        if unknown:
            raise LedgerError(f"payload of /generate: {', '.join(unknown)} not offered. There is {', '.join(_KNOWN)}")
        if payload.get("stream"):
            raise LedgerError("payload of /generate: stream is not offered. The reply comes when the turn is over")
        text, ids = payload.get("text"), payload.get("input_ids")
        if (text is None) == (ids is None):
            raise LedgerError("payload of /generate: give either text or input_ids")
        if text is not None and not isinstance(text, str):
            raise LedgerError(
                f"payload of /generate: text must be one text, got {type(text).__name__}. Render messages first "
                "(data.apply_chat_template=True gives sample.prompt rendered)"
            )
        if ids is not None:
            try:
                ids = ids_of(ids, "input_ids")
            except WrongValue as error:
                raise LedgerError(f"payload of /generate: input_ids must be the ids of one request; {error}") from None
        turn = TurnSampling.parse(payload.get("sampling_params"), base)
        wants = (bool(payload.get("return_logprob")), bool(payload.get("return_text_in_logprobs")))
        return cls(text, ids, turn, *wants)


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
    finish = _finish(session, turn, ids, finish_reason)
    meta: dict[str, Any] = {
        "id": f"{session.trajectory.trajectory_id}/{session.attempt}/{session.trajectory.num_turns}",
        "finish_reason": finish,
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
    return {"text": _text(session.context.chat, turn, ids, finish.get("matched")), "output_ids": ids, "meta_info": meta}


def empty_reply(finish_reason: dict[str, Any], prompt_tokens: int = 0) -> dict[str, Any]:
    """The reply where nothing was sampled: the engine went away, the time is over, or no token was left."""
    meta = {"finish_reason": finish_reason, "prompt_tokens": prompt_tokens, "completion_tokens": 0, "cached_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta | {"output_token_logprobs": []}}


def abort_reply(message: str) -> dict[str, Any]:
    return empty_reply({"type": "abort", "message": message})


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


def _text(chat: ChatTemplate, turn: TurnSampling, ids: list[int], matched: int | str | None) -> str:
    """The turn's text, looked at as `sampling_params` ask for."""
    if turn.trim_stop and isinstance(matched, int):
        ids = ids[:-1]
    if turn.skip_special_tokens:
        text = chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    else:
        text = chat.decode(ids)
    if turn.trim_stop and isinstance(matched, str):
        text = text[: text.index(matched)]
    return text
