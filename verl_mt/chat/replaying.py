"""`replay`: a whole conversation to ids and mask, without any engine. The rollout's arithmetic as a pure function."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from verl_mt.chat.render import probing
from verl_mt.chat.template import ChatTemplate
from verl_mt.chat.text_delta import turn_ids
from verl_mt.chat.token_diff import common_prefix
from verl_mt.data.conversation import Message
from verl_mt.errors import DataError, TemplateError

_SHOWN_TOKENS = 12
_CACHE: weakref.WeakKeyDictionary[Any, dict[str, ChatTemplate]] = weakref.WeakKeyDictionary()


def replay(
    tokenizer: Any,
    prompt: Sequence[Message],
    tools: Sequence[Any] | None,
    steps: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of a conversation whose sampled turns are given as ids.

    The mask is 1 exactly on sampled ids. The generation prompt stands only before a sample, or at the end if there
    are no steps; adjacent env steps merge; a sample that lacks its end token and is followed by env gets one
    inserted with mask 0 and a warning (a real rollout ends there instead).

    Args:
        tokenizer: a Hugging Face tokenizer, or a `ChatTemplate`.
        prompt: the first messages.
        tools: tool schemas shown in the prompt, or None.
        steps: `{"type": "sample", "ids": [...], "message": {...}}` (the message as parsed; only its tool calls
            matter) or `{"type": "env", "messages": [...]}`.
        template_kwargs: variables of the template.

    Returns:
        `(token_ids, loss_mask)` of equal length, the prompt first.

    Raises:
        TemplateError: the template cannot render the conversation.
        DataError: a step of another shape; names its index.
    """
    template = _template(tokenizer, template_kwargs)
    history: list[Message] = list(prompt)
    token_ids: list[int] = []
    mask: list[int] = []
    sampled_before = False
    for env, sample in _grouped(steps):
        gen = sample is not None or not steps
        if not sampled_before:
            token_ids += template.mixed_prompt_ids(history, env, tools, add_generation_prompt=gen)
        elif env or token_ids[-1] in template.end_token_ids:
            delta = template.delta_ids(
                env, history=history, tools=tools, last_ids=token_ids[-1:], add_generation_prompt=gen
            )
            if delta.inserted_end:
                warnings.warn(
                    f"sampled turn {sum(m['role'] == 'assistant' for m in history[len(prompt) :])} lacks its end token "
                    "but is followed by messages: one was inserted with mask 0. A real rollout ends there.",
                    stacklevel=2,
                )
            token_ids += delta.ids
        mask += [0] * (len(token_ids) - len(mask))
        history += env
        if sample is not None:
            ids = [int(i) for i in sample["ids"]]
            token_ids += ids
            mask += [1] * len(ids)
            sampled_before = True
            history.append(sample.get("message") or {"role": "assistant", "content": template.turn_text(ids)})
    return token_ids, mask


@probing()
def rewritten_turns(template: ChatTemplate, tools: Sequence[Any] | None) -> str:
    """Whether the template only appends, measured: the replay of three plain turns against their rendering.

    Args:
        tools: for a template that renders nothing without any.

    Returns:
        Where the two first differ, or why they cannot be compared; empty where they are equal up to the last end of
        turn.
    """
    history: list[Message] = [{"role": "user", "content": "One?"}]
    steps: list[dict[str, Any]] = []
    try:
        for answer, question in (("Wordone", "Two?"), ("Wordtwo", "Three?"), ("Wordthree", "")):
            said = {"role": "assistant", "content": answer}
            steps.append({"type": "sample", "ids": turn_ids(template, history, said, tools=tools), "message": said})
            history.append(said)
            if question:
                history.append({"role": "user", "content": question})
                steps.append({"type": "env", "messages": history[-1:]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a turn without an end of its own differs from none
            recorded, _ = replay(template, history[:1], tools, steps)
        rendered = template.full_ids(history, tools)
    except TemplateError as error:
        return f"it cannot write them: {error}"
    at = common_prefix(recorded, rendered)
    if at == len(recorded):
        return ""
    mine, theirs = (template.decode(ids[at : at + _SHOWN_TOKENS]) for ids in (recorded, rendered))
    return f"at token {at} recorded {mine!r}, rendered {theirs!r}"


def _grouped(steps: Sequence[Mapping[str, Any]]) -> list[tuple[list[Message], Mapping[str, Any] | None]]:
    """Pairs of (all env messages since the last sample, the next sample or None at the end)."""
    groups: list[tuple[list[Message], Mapping[str, Any] | None]] = []
    env: list[Message] = []
    for index, step in enumerate(steps):
        kind = step.get("type") if isinstance(step, Mapping) else None
        if kind == "env" and isinstance(step.get("messages"), (list, tuple)):
            env += step["messages"]
        elif kind == "sample" and isinstance(step.get("ids"), (list, tuple)):
            groups.append((env, step))
            env = []
        else:
            raise DataError(
                f"steps[{index}]: expected {{'type': 'sample', 'ids': [...]}} or {{'type': 'env', 'messages': [...]}}, "
                f"got {step!r:.200}"
            )
    if env or not steps:
        groups.append((env, None))
    return groups


def _template(tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> ChatTemplate:
    """The tokenizer's ChatTemplate; probes are kept between calls."""
    if isinstance(tokenizer, ChatTemplate):
        if not template_kwargs or dict(template_kwargs) == tokenizer.template_kwargs:
            return tokenizer
        return tokenizer.with_kwargs(template_kwargs)
    key = json.dumps([template_kwargs or {}, getattr(tokenizer, "chat_template", None)], sort_keys=True, default=repr)
    try:
        cache = _CACHE.setdefault(tokenizer, {})
    except TypeError:  # an unhashable tokenizer is only not cached
        cache = {}
    if key not in cache:
        cache[key] = ChatTemplate(tokenizer, template_kwargs=template_kwargs)
    return cache[key]
