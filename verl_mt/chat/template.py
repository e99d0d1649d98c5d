"""`ChatTemplate`: messages to ids, for the first prompt and for every delta between two sampled turns.

Sampled ids are never looked at again: the recorded stream is
`prompt_ids + sampled + delta.ids + sampled + ...`, and the engine's next input is exactly that stream.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from verl_mt.chat.delta import Delta, DeltaRenderer
from verl_mt.chat.differences import common_prefix
from verl_mt.chat.encode import Encoder, compile_literals
from verl_mt.chat.probe import (
    Problem,
    TemplateCapabilities,
    call_shape,
    generation_prompt,
    opens_reasoning,
    probe,
    schema,
)
from verl_mt.chat.render import CallShape, Renderer, normalise, probing
from verl_mt.chat.text_delta import turn_ids
from verl_mt.chat.turn_replay import turn_problems
from verl_mt.data.conversation import Message, user_texts
from verl_mt.data.media import MediaInput, describe, parts_of
from verl_mt.errors import DataError, TemplateError

_SHOWN_TOKENS = 12
ALWAYS_ENDS = ("<|return|>", "<|call|>", "<|eom_id|>")
"""Literals that only ever end a turn; templates do not always write them, vocabularies have them."""
HARMONY = ("<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>")
"""The vocabulary of gpt-oss, where `<|end|>` closes a message inside a turn and, in history only, the turn."""


class ChatTemplate:
    """One tokenizer with one chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: a Jinja text instead of the tokenizer's own.
        template_kwargs: variables of the template (`enable_thinking`, `date_string`, ...), the same in every rendering.
        trust_prompts: control-token text in the data set's prompts keeps its control ids. False makes it plain text.
            Text that arrives later never becomes a control token.
        extra_end_ids: further ids that end an assistant turn (the generation config's eos list).
        source: where the template is from, for errors.

    Raises:
        TemplateError: no chat template, or it cannot render a single user message.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        trust_prompts: bool = True,
        extra_end_ids: Iterable[int] = (),
        source: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.trust_prompts = trust_prompts
        self._extra_end_ids = frozenset(extra_end_ids)
        self._chat_template = chat_template
        self._made_with: dict[str, Any] = {
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "trust_prompts": trust_prompts,
            "extra_end_ids": self._extra_end_ids,
            "source": source,
        }
        self._renderer = Renderer(tokenizer, chat_template, self.template_kwargs, source)
        self._encoder = Encoder(tokenizer)
        self._anchor_lengths: dict[str, int] = {}

    def with_kwargs(self, template_kwargs: Mapping[str, Any]) -> Self:
        """The same template with other variables."""
        return type(self)(**{**self._made_with, "template_kwargs": template_kwargs})

    # ---- what the template is

    @property
    def media_kinds(self) -> frozenset[str]:
        """What the model sees beside text: `images`, `videos`. See `ProcessorChat`."""
        return frozenset()

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids that stand for images and videos."""
        return frozenset()

    def media_inputs(self, messages: Sequence[Message], ids: Sequence[int]) -> list[MediaInput]:
        """Model inputs for the images and videos of the messages, whose rendering `ids` are.

        Raises:
            TemplateError: there are any, and the model takes text only.
        """
        self._check_media(messages)
        return []

    def saved_with_model(self, tokenizer: Any) -> Any:
        """What an export writes (`save_pretrained`) beside the weights: the tokenizer, and what else reads inputs."""
        return tokenizer

    @property
    def custom_template(self) -> str | None:
        """The Jinja text that replaces the tokenizer's. None = the tokenizer's own."""
        return self._chat_template

    @property
    def generation_prompt_text(self) -> str:
        """What the template adds before a turn is sampled, prefilled reasoning included."""
        return self._generation_prompt[0]

    @cached_property
    def prefilled_reasoning(self) -> bool:
        """The generation prompt ends inside an open reasoning block: the model's text begins in mid-thought."""
        return opens_reasoning(self.generation_prompt_text)

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends an assistant turn: the template's, the tokenizer's eos, the generation config's.

        Where a template stops at the next role's header (GLM), the headers are in it.
        """
        ends = {*self._extra_end_ids, *self._eos_ids()}
        ends |= {self._encoder.added[t] for t in ALWAYS_ENDS if t in self._encoder.added}
        if isinstance(self._delta, DeltaRenderer):
            for end in (self._delta.user_end, self._delta.end_before("tool")):
                if end is not None:
                    ends |= {self._encoder.added[t] for t in (end.token, end.final) if t}
        return frozenset(ends)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids at which an engine must stop: `end_token_ids` without those that only history uses.

        gpt-oss writes `<|end|>` where it sampled `<|return|>`, and samples `<|end|>` in mid-turn.
        """
        end = self._delta.user_end if isinstance(self._delta, DeltaRenderer) else None
        if end is None or not (end.final or all(t in self._encoder.added for t in HARMONY)):
            return self.end_token_ids
        only_in_history = {self._encoder.added[end.token]} if end.token else set()
        return self.end_token_ids - (only_in_history - self._extra_end_ids)

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """What the template can render, probed once."""
        rewritten = self._rewritten_turns([schema()] if "no_tools" in self._probed.problems else None)
        turns = {} if isinstance(self._delta, TemplateError) else self._turns_not_reproduced
        problems = {**turns, **self._probed.problems}
        return replace(self._probed, problems=problems, append_only=not rewritten, rewritten=rewritten)

    @cached_property
    def _probed(self) -> TemplateCapabilities:
        return probe(self._renderer, self._delta, *self._shape_and_problem)

    def require(self, *, tools: bool, interaction: bool) -> None:
        """Check at start that the template can render what the run needs.

        Raises:
            TemplateError: names the shapes that are refused, their causes, and what to do.
        """
        needed = ["answer", *(["tools", "tool_result", "call"] if tools else ["no_tools"])]
        needed += ["user_turn"] if interaction else []
        problems = self.capabilities.problems
        found = [(shape, problems[shape]) for shape in needed if shape in problems]
        if found:
            text = "; ".join(f"{shape}: {p.text} [{p.cause}]" for shape, p in found)
            raise TemplateError(
                f"this chat template cannot render what the run needs: {text}. Choose a chat model that can, or give "
                "actor_rollout_ref.model.custom_chat_template",
                cause=found[0][1].cause,
            )

    # ---- messages to ids

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of the first prompt, rendered once per trajectory (a template with a clock would change it).

        An empty list of tools means the same as None.

        Raises:
            TemplateError: the template cannot render these messages or tools.
        """
        return self.mixed_prompt_ids(messages, [], tools, add_generation_prompt=add_generation_prompt)

    def surely_longer(self, messages: Sequence[Message], tools: Sequence[Any] | None, limit: int) -> bool:
        """Whether their prompt has more than `limit` tokens, for certain: what is far longer is not encoded to the end.

        Raises:
            TemplateError: the template cannot render these messages or tools.
        """
        return self._encoder.surely_longer(self._full(messages, tools, gen=True), limit)

    def mixed_prompt_ids(
        self,
        messages: Sequence[Message],
        arrived: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        num_foreign: int = 0,
    ) -> list[int]:
        """A prompt followed by messages that arrived since: text of tools and users is never trusted.

        Assistant messages among `arrived` are the model's own turns and are rendered as the template writes them.

        Args:
            num_foreign: the first so many of `arrived` are no turns of the model, whatever their role.
        """
        whole = [*messages, *arrived]
        messages, arrived = self._shown(messages), self._shown(arrived)
        hidden = self._encoder.hidden()
        if self.trust_prompts:
            own = [k >= num_foreign and m["role"] == "assistant" for k, m in enumerate(arrived)]
            foreign = [m for m, is_own in zip(arrived, own) if not is_own]
            safe = iter(hidden.hide(foreign, beside=[*messages, *arrived, *(tools or ())]))
            shown = [*messages, *(m if is_own else next(safe) for m, is_own in zip(arrived, own))]
        else:
            shown = hidden.hide([*messages, *arrived], beside=list(tools or ()))
        text = self._full(shown, tools, add_generation_prompt)
        return self._expanded(self._encoder.encode_hidden(text, hidden), whole)

    def delta_ids(
        self,
        messages: Sequence[Message],
        *,
        history: Sequence[Message],
        tools: Sequence[Any] | None = None,
        last_ids: Sequence[int],
        add_generation_prompt: bool = True,
    ) -> Delta:
        """Ids that follow the recorded ones when the environment answers a sampled turn.

        Args:
            messages: the new adjacent messages, all of them (two tool results answered together share a turn).
            history: all messages before them. The last is the sampled assistant turn.
            tools: the conversation's tools. They are in the prompt already and are not repeated.
            last_ids: the recorded ids or their tail, to see whether the turn ended itself.
            add_generation_prompt: False if nothing is sampled after it.

        Raises:
            TemplateError: the template cannot write these messages there, or drops them.
        """
        new, history = self._shown(messages), self._shown(history[-1:])
        delta = self._delta
        if isinstance(delta, TemplateError):
            raise delta
        for role in sorted({m["role"] for m in messages} & {"tool", "user"}):
            problem = self._turn_problems.get(role)
            if problem is not None:
                raise TemplateError(
                    f"messages of role {role!r} cannot follow a turn: {problem.text}", cause=problem.cause
                )
        hidden = self._encoder.hidden()
        template = self._renderer.source(tools or None)
        strip = not add_generation_prompt and self._generation_prompt[1]
        text = delta.render(
            new,
            history[-1] if history else {"role": "assistant"},
            add_generation_prompt=add_generation_prompt or strip,
            template=template,
            hidden=hidden,
        )
        body = text.body.removesuffix(self.generation_prompt_text) if strip else text.body
        anchor = text.end.token or self._plain_anchor
        ids = self._expanded(self._encoder.encode_hidden(anchor + body, hidden), messages)
        if anchor not in self._anchor_lengths:
            self._anchor_lengths[anchor] = len(self._encoder.encode(anchor))
        skip = self._anchor_lengths[anchor]
        if not text.end.token:
            return Delta(ids[skip:], 0)
        last = last_ids[-1] if last_ids else None
        if last == self._encoder.added[text.end.token]:
            return Delta(ids[skip:], 0)
        ended = last in self.end_token_ids
        if ended and not text.end.opens_next:
            return Delta(ids[skip:], 0)
        return Delta(ids, 0 if ended else 1)

    def replayed(
        self, prompt: Sequence[Message], tools: Sequence[Any] | None, steps: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[int]]:
        """Ids and loss mask of a conversation whose sampled turns are ids already: see `verl_mt.chat.replay`."""
        history: list[Message] = list(prompt)
        token_ids: list[int] = []
        mask: list[int] = []
        sampled_before = False
        for env, sample in _grouped(steps):
            gen = sample is not None or not steps
            if not sampled_before:
                token_ids += self.mixed_prompt_ids(history, env, tools, add_generation_prompt=gen)
            elif env or token_ids[-1] in self.end_token_ids:
                delta = self.delta_ids(
                    env, history=history, tools=tools, last_ids=token_ids[-1:], add_generation_prompt=gen
                )
                if delta.inserted_end:
                    warnings.warn(
                        f"sampled turn {sum(m['role'] == 'assistant' for m in history[len(prompt) :])} lacks its end "
                        "token but is followed by messages: one was inserted with mask 0. A real rollout ends there.",
                        stacklevel=3,
                    )
                token_ids += delta.ids
            mask += [0] * (len(token_ids) - len(mask))
            history += env
            if sample is not None:
                ids = [int(i) for i in sample["ids"]]
                token_ids += ids
                mask += [1] * len(ids)
                sampled_before = True
                history.append(sample.get("message") or {"role": "assistant", "content": self.turn_text(ids)})
        return token_ids, mask

    def full_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The whole conversation as the template writes it today: for checks, never for training."""
        return self._rendered(messages, tools, add_generation_prompt)

    def full_ids(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Ids of `full_text`."""
        return self._encoder.encode(self.full_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode_text(self, text: str, *, neutral: bool) -> list[int]:
        """Ids of a text. `neutral`: control-token text in it becomes plain text."""
        if not neutral:
            return self._encoder.encode(text)
        hidden = self._encoder.hidden()
        return self._encoder.encode_hidden(hidden.hide(text), hidden)

    def control_text(self, messages: Sequence[Message]) -> list[str]:
        """Special tokens that the users' texts of a prompt become, such as `<|im_end|>`. Empty where `trust_prompts` is
        False."""
        if not self.trust_prompts or self._special is None:
            return []
        return list(dict.fromkeys(found for text in user_texts(messages) for found in self._special.findall(text)))

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        known = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {i for i, token in known.items() if token.special} | self.end_token_ids
        return compile_literals(text for text, i in self._encoder.added.items() if i in special)

    def continuation_ids(self, text: str) -> list[int]:
        """Ids of foreign text in the middle of a turn: no control token, and no space that it does not begin with."""
        hidden = self._encoder.hidden()
        shown = hidden.hide(text)
        # Some control tokens swallow white space behind them (Phi-3): there the text is encoded behind a word.
        for lead in (self._plain_anchor, "x\n", "x"):
            before = self._encoder.encode(lead)
            ids = self._encoder.encode_hidden(lead + shown, hidden)
            if ids[: len(before)] == before and self.decode(ids) == self.decode(before) + text:
                return ids[len(before) :]
        return self.encode_text(text, neutral=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens kept."""
        return self._encoder.decode(ids)

    def turn_text(self, sampled_ids: Sequence[int]) -> str:
        """What the model wrote in a turn, without its end token."""
        ids = list(sampled_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self.end_token_ids else ids)

    def _check_media(self, messages: Sequence[Message]) -> None:
        """Refuse what would be rendered as something that the model never sees."""
        for kind, _ in parts_of(messages):
            if f"{kind}s" not in self.media_kinds:
                takes = " and ".join(["text", *sorted(self.media_kinds)])
                raise TemplateError(
                    f"the messages hold {describe(messages)}, but this model takes {takes} only. Use a vision-language "
                    "model (docs/multimodal.md), or leave them out"
                )

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as a template gets them.

        Raises:
            TemplateError: the model does not see what they hold.
        """
        self._check_media(messages)
        return list(messages)

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Ids of the messages' rendering as the model gets them."""
        return ids

    # ---- probes

    def _full(self, messages: Sequence[Message], tools: Sequence[Any] | None, gen: bool) -> str:
        strip = not gen and self._generation_prompt[1]
        text = self._rendered(messages, tools, gen or strip)
        return text.removesuffix(self.generation_prompt_text) if strip else text

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, gen: bool) -> str:
        return self._renderer.text(normalise(messages, self._shape), tools or None, add_generation_prompt=gen)

    @cached_property
    def _generation_prompt(self) -> tuple[str, bool]:
        return generation_prompt(self._renderer, self._encoder.pattern)

    @cached_property
    def _shape_and_problem(self) -> tuple[CallShape, Problem | None]:
        return call_shape(self._renderer)

    @property
    def _shape(self) -> CallShape:
        return self._shape_and_problem[0]

    @cached_property
    def _delta(self) -> DeltaRenderer | TemplateError:
        pattern = self._encoder.pattern
        prompt = self.generation_prompt_text
        ids = {*self._extra_end_ids, *self._eos_ids()}
        try:
            return DeltaRenderer(
                self._renderer,
                pattern,
                starts=pattern.findall(prompt)[:1] if pattern else [],
                known_ends=[t for t, i in self._encoder.added.items() if i in ids],
                shape=self._shape,
            )
        except TemplateError as error:
            return error

    @probing()
    def _rewritten_turns(self, tools: Sequence[Any] | None) -> str:
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
                steps.append({"type": "sample", "ids": turn_ids(self, history, said, tools=tools), "message": said})
                history.append(said)
                if question:
                    history.append({"role": "user", "content": question})
                    steps.append({"type": "env", "messages": history[-1:]})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a turn without an end of its own differs from none
                recorded, _ = self.replayed(history[:1], tools, steps)
            rendered = self.full_ids(history, tools)
        except TemplateError as error:
            return f"it cannot write them: {error}"
        at = common_prefix(recorded, rendered)
        if at == len(recorded):
            return ""
        mine, theirs = (self.decode(ids[at : at + _SHOWN_TOKENS]) for ids in (recorded, rendered))
        return f"at token {at} recorded {mine!r}, rendered {theirs!r}"

    @cached_property
    @probing()
    def _turns_not_reproduced(self) -> dict[str, Problem]:
        return turn_problems(self, self._probed.reasoning_key)

    @cached_property
    def _turn_problems(self) -> dict[str, Problem]:
        problems = self._probed.problems
        shapes = {"user": "user_turn", "tool": "tool_result"}
        return {role: problems[shape] for role, shape in shapes.items() if shape in problems}

    @cached_property
    def _plain_anchor(self) -> str:
        """A control token to encode behind where the template itself writes no end of turn."""
        eos = getattr(self.tokenizer, "eos_token", None)
        return eos if eos in self._encoder.added else next(iter(self._encoder.added), "")

    def _eos_ids(self) -> set[int]:
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return set(eos) if isinstance(eos, (list, tuple)) else set() if eos is None else {eos}


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


__all__ = ["ChatTemplate", "Delta", "Problem", "TemplateCapabilities"]
