"""`ProcessorChat`: the twin of `ChatTemplate` for models that see images and videos.

The template writes one placeholder token per image; here it becomes as many as the image has tokens, and the image's
tensors are told apart for the record. Everything else (deltas, neutralised text, stop tokens) is `ChatTemplate`'s. Only
what arrives is processed: a delta never touches an image that an earlier turn has shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_mt.chat.encode import Hidden, compile_literals
from verl_mt.chat.media_processor import MediaProcessor
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message
from verl_mt.data.media import KINDS, Kind, MediaInput, parts_of
from verl_mt.errors import LedgerError, TemplateError


class ProcessorChat(ChatTemplate):
    """A tokenizer with a chat template, and the processor of what its model sees.

    Args:
        tokenizer: a Hugging Face tokenizer with the placeholder tokens in its vocabulary.
        media: makes tensors of images and videos.
        keys: as `ChatTemplate`'s.

    Raises:
        TemplateError: a placeholder token is not in the vocabulary.
    """

    def __init__(self, tokenizer: Any, *, media: MediaProcessor, **keys: Any):
        super().__init__(tokenizer, **keys)
        self.media = self._made_with["media"] = media
        kinds = [kind for kind in KINDS if f"{kind}s" in media.kinds]
        missing = [media.tokens[kind] for kind in kinds if media.tokens[kind] not in self._encoder.added]
        if missing:
            raise TemplateError(
                f"the placeholder token {missing[0]!r} is not in the tokenizer's vocabulary: this is not the tokenizer "
                "of the model that the image processor belongs to"
            )
        self._kind_of = {self._encoder.added[t]: k for k, t in media.tokens.items() if t in self._encoder.added}

    @property
    def media_kinds(self) -> frozenset[str]:
        return self.media.kinds

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset(self._kind_of)

    def full_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """With as many placeholders as the recorded stream has: one text per token, as it is decoded."""
        hidden = Hidden(compile_literals(self.media.tokens.values()))
        bare = hidden.hide(self._shown(messages), beside=list(tools or ()))
        text = hidden.unescape(self._rendered(bare, tools, add_generation_prompt))
        for kind in KINDS:
            token = self.media.tokens[kind]
            first, *rest = text.split(token)
            inputs = self._inputs(messages, kind, len(rest))
            text = first + "".join(token * made.num_tokens + piece for made, piece in zip(inputs, rest))
        return hidden.show(text)

    def media_inputs(self, messages: Sequence[Message], ids: Sequence[int]) -> list[MediaInput]:
        """What the model is given for the placeholder tokens among `ids`, in their order.

        Args:
            messages: those whose rendering `ids` are; only these are processed.
            ids: made by this chat of these messages; places are counted in them.

        Raises:
            LedgerError: the placeholders among the ids are not those of the messages.
        """
        found: list[MediaInput] = []
        place = 0
        for kind, value in parts_of(messages):
            made, token = self.media(kind, value), self._encoder.added[self.media.tokens[kind]]
            while place < len(ids) and ids[place] not in self._kind_of:
                place += 1
            run = list(ids[place : place + made.num_tokens])
            if run != [token] * made.num_tokens:
                raise LedgerError(
                    f"{kind} {len(found)} takes {made.num_tokens} tokens {self.media.tokens[kind]!r}, but at "
                    f"token {place} there are {run[:4]}..."
                )
            found.append(made.moved(place))
            place += made.num_tokens
        if any(token in self._kind_of for token in ids[place:]):
            raise LedgerError(f"there are placeholder tokens behind the last of {len(found)} images and videos")
        return found

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Images and videos are only marked: templates look at types, never at pixels."""
        return [
            {**m, "content": [_bare_part(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
            for m in super()._shown(messages)
        ]

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Each placeholder as often as its image or video has tokens."""
        if not any(token in self._kind_of for token in ids) and next(parts_of(messages), None) is None:
            return ids
        counts = {
            kind: iter(
                [m.num_tokens for m in self._inputs(messages, kind, sum(self._kind_of.get(i) == kind for i in ids))]
            )
            for kind in KINDS
        }
        out: list[int] = []
        for token in ids:
            kind = self._kind_of.get(token)
            out += [token] if kind is None else [token] * next(counts[kind])
        return out

    def _inputs(self, messages: Sequence[Message], kind: Kind, num_placeholders: int) -> list[MediaInput]:
        values = [value for k, value in parts_of(messages) if k == kind]
        if len(values) != num_placeholders:
            raise TemplateError(
                f"the messages hold {len(values)} {kind}s, but their rendering has {num_placeholders} placeholders "
                f"{self.media.tokens[kind]!r}: the template must write one for each, and no trusted text may hold one"
            )
        return [self.media(kind, value) for value in values]


@dataclass(frozen=True)
class SavedTogether:
    """A tokenizer and the processor of what its model sees, written into one folder."""

    tokenizer: Any
    media: MediaProcessor

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.media.save_pretrained(folder)


def _bare_part(part: Any) -> Any:
    return {"type": part["type"]} if isinstance(part, Mapping) and part.get("type") in KINDS else part
