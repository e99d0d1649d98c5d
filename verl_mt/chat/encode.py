"""From text to ids, exactly, and without letting foreign text become control tokens.

Every tokenizer turns the text `<|im_end|>` into the control token, wherever it stands. Text that arrives during a
rollout must not be able to do that, and the tokenizer's own switch (`split_special_tokens`) covers neither added
tokens that are not "special" (`<tool_call>`, `<think>`) nor a text that also holds the template's own scaffold.

So: each control literal in foreign text is hidden behind one private-use character before the template renders it;
the rendered text is encoded as usual; and every stretch between two control tokens that holds a hidden literal is
encoded again, literal restored, by a twin of the tokenizer that has no added tokens. Text without literals keeps the
ids it always had.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from verl_mt.errors import TemplateError

K = TypeVar("K")
V = TypeVar("V")
_TWINS: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()
_TWIN_LOCK = threading.Lock()
_CHARS_PER_TOKEN = 16
"""More than nearly all texts have."""
_MOST_CHARACTERS, _LONGEST_STRETCH = 2 << 20, 64 << 10
"""Of text whose ids are remembered, and of one stretch of it."""
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class Hidden:
    """The literals of one rendering and the private-use characters that stand for them."""

    def __init__(self, literal_pattern: re.Pattern[str] | None):
        self._pattern = literal_pattern
        self.character_of: dict[str, str] = {}
        self.literal_of: dict[str, str] = {}
        self.foreign = False
        """Foreign text was shown to `hide`, with or without literals in it."""
        self._free: Iterator[str] = iter(())

    def __bool__(self) -> bool:
        return bool(self.literal_of)

    def hide(self, value: Any, beside: Any = ()) -> Any:
        """A copy of a JSON-like value with every control literal in its strings hidden.

        Role and type strings are the program's own and stay. A private-use character that the value, or what is
        rendered `beside` it, already holds is never chosen; so everything of one rendering goes through one call.
        """
        strings = list(strings_in(value))
        self.foreign = self.foreign or bool(strings)
        if self._pattern is None or not any(self._pattern.search(s) for s in strings):
            return value
        taken: set[str] = set().union(*map(set, strings_in([value, beside])))
        self._free = (
            chr(c) for block in _PRIVATE_USE for c in block if chr(c) not in taken and chr(c) not in self.literal_of
        )
        return self._walk(value)

    def show(self, text: str) -> str:
        """The text with its literals restored."""
        return "".join(self.literal_of.get(c, c) for c in text) if self.literal_of else text

    def find(self, text: str) -> bool:
        return any(c in text for c in self.literal_of)

    def unescape(self, text: str) -> str:
        r"""Undo a template's ASCII-only JSON (`\ue000`), which would leave the character unrecognised."""
        for character in self.literal_of:
            escaped = json.dumps(character)[1:-1]
            if escaped in text:
                text = text.replace(escaped, character)
        return text

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            assert self._pattern is not None
            return self._pattern.sub(lambda m: self._character(m.group()), value)
        if isinstance(value, dict):
            return {k: v if k in ("role", "type") else self._walk(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._walk(v) for v in value]
        return value

    def _character(self, literal: str) -> str:
        if literal not in self.character_of:
            character = next(self._free)
            self.character_of[literal] = character
            self.literal_of[character] = literal
        return self.character_of[literal]


class Encoder:
    """A tokenizer's `encode` and `decode` with the guarantees of this module."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        for token in getattr(tokenizer, "all_special_tokens", []):
            self.added.setdefault(token, tokenizer.convert_tokens_to_ids(token))
        self._literal_of_id = {i: t for t, i in self.added.items()}
        self.pattern = compile_literals(self.added)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._normalises = (
            self._backend is not None
            and self._backend.normalizer is not None
            and any(t.normalized for t in self._backend.get_added_tokens_decoder().values())
        )
        self._calls_backend = _only_calls_backend(tokenizer)
        self._stretches = _Stretches(self._backend) if self._calls_backend and _cut_first(self._backend) else None

    def encode(self, text: str) -> list[int]:
        """Ids of trusted text: control literals become control tokens. No BOS is added, none doubled."""
        refuse_surrogates(text)
        if not text:
            return []
        # A backend whose switches somebody turned needs transformers' care.
        backend = self._backend
        if (
            self._calls_backend
            and not (backend.encode_special_tokens or self.tokenizer.split_special_tokens or backend.truncation)
            and backend.padding is None
        ):
            stretches = self._stretches
            return stretches.encode(text) if stretches and stretches.is_current else _ids(backend, [text])[0]
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def surely_longer(self, text: str, limit: int) -> bool:
        """Whether a text has more than `limit` tokens, for certain; found out without encoding much more than those.

        False where all of it would have to be encoded to know.
        """
        # A word that the cut divides has other tokens than it has whole, about as many.
        enough, size = limit + limit // 8 + 64, _CHARS_PER_TOKEN * (limit + 64)
        while size < len(text):
            if len(self.encode(text[:size])) > enough:
                return True
            size *= 4
        return False

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens kept, no spaces cleaned."""
        if self._calls_backend:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def hidden(self) -> Hidden:
        return Hidden(self.pattern)

    def encode_hidden(self, text: str, hidden: Hidden) -> list[int]:
        """Ids of a rendering whose foreign literals were hidden: those become plain text, all else is as usual."""
        text = hidden.unescape(text)
        refuse_surrogates(text)
        if not hidden.find(text) and not (hidden.foreign and self._normalises):
            return self.encode(text)
        if self._backend is None:
            return self._encode_hidden_slow(text, hidden)
        # Control tokens cut the text before it is pre-tokenized, so that ids of a stretch between two of them do not
        # depend on anything outside it: only stretches that hold foreign literals are encoded a second time.
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        out: list[int] = []
        stretch: list[int] = []
        start = 0
        for token, (begin, end) in zip(ids, offsets):
            # An added token that only matched after normalisation came from content, not from the scaffold.
            if self._literal_of_id.get(token) == text[begin:end].strip() != "":
                out += self._stretch(text[start:begin], stretch, hidden, first=start == 0)
                out.append(token)
                stretch, start = [], end
            else:
                stretch.append(token)
        return out + self._stretch(text[start:], stretch, hidden, first=start == 0)

    def control_ids(self, ids: Iterable[int]) -> list[int]:
        """Those of the ids that are added tokens."""
        return [i for i in ids if i in self._literal_of_id]

    def _stretch(self, text: str, ids: list[int], hidden: Hidden, *, first: bool) -> list[int]:
        """Text between two control tokens: its ids as they are, or the twin's where a literal was hidden in it."""
        if not hidden.find(text) and not self._forged(ids):
            return ids
        twin, anchor = twin_of(self.tokenizer, self._backend)
        plain = hidden.show(text)
        if anchor in plain:
            raise TemplateError("text contains this process's random marker. It cannot be encoded")
        # Behind a control token sentencepiece writes no space that it writes at a text's beginning: the marker stands
        # for the control token, and its id goes again.
        out = twin.encode(plain if first else anchor + plain, add_special_tokens=False).ids
        out = out if first else out[1:]
        if self._forged(out):
            raise TemplateError(
                f"the vocabulary of {getattr(self.tokenizer, 'name_or_path', '')!r} turns plain text into the control "
                f"tokens {[self._literal_of_id[i] for i in self.control_ids(out)]}. Use another tokenizer"
            )
        return out

    def _forged(self, ids: Iterable[int]) -> bool:
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return any(i in self._literal_of_id and i != unknown for i in ids)

    def _encode_hidden_slow(self, text: str, hidden: Hidden) -> list[int]:
        """The same for tokenizers in pure Python: literals are cut in two until nothing of them is a control token."""
        pattern = re.compile("([" + "".join(map(re.escape, hidden.literal_of)) + "])")
        out: list[int] = []
        for piece in pattern.split(text):
            out += (
                self._encode_plain_slow(hidden.literal_of[piece]) if piece in hidden.literal_of else self.encode(piece)
            )
        return out

    def _encode_plain_slow(self, literal: str) -> list[int]:
        ids = [i for part in (literal[:1], literal[1:]) for i in self.encode(part)]
        if not self._forged(ids):
            return ids
        if len(literal) < 2:
            raise TemplateError(f"{literal!r} is a control token of one character. It cannot be written as plain text")
        return self.encode(literal[:1]) + self._encode_plain_slow(literal[1:])


class Remembered(Generic[K, V]):
    """What was computed, up to a size. Used by several threads.

    Args:
        most: the size of everything that is remembered; beyond it all is forgotten.
        longest: the size of a single value that is.
    """

    def __init__(self, most: int, longest: int):
        self._most, self._longest, self._size = most, longest, 0
        self.values: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value, if it is remembered."""
        return self.values.get(key)

    def put(self, key: K, value: V, size: int) -> None:
        """Remember a value, unless it is too long."""
        if size > self._longest:
            return
        if self._size + size > self._most:
            self.values.clear()
            self._size = 0
        self._size += size
        self.values[key] = value


class _Stretches:
    """A backend's ids of a text, with what was encoded before remembered by stretch between two added tokens.

    The texts of a conversation repeat: each of a group's samples has the same prompt, and the check of a finished
    conversation renders all of it again. See `_cut_first` for where this gives the backend's own ids.
    """

    def __init__(self, backend: Any):
        self._backend = backend
        self._added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        pattern = compile_literals(self._added)
        self._cuts = re.compile(f"({pattern.pattern})") if pattern else None
        self._known: Remembered[str, list[int]] = Remembered(_MOST_CHARACTERS, _LONGEST_STRETCH)
        self._size = backend.get_vocab_size()

    @property
    def is_current(self) -> bool:
        """No token was added since."""
        return bool(self._backend.get_vocab_size() == self._size)

    def encode(self, text: str) -> list[int]:
        """Runs in any thread."""
        parts = self._cuts.split(text) if self._cuts else [text]
        found = {part: self._known.get(part) for part in parts[::2]}
        if new := [part for part, ids in found.items() if part and ids is None]:
            for part, encoded in zip(new, _ids(self._backend, new)):
                found[part] = encoded
                self._known.put(part, encoded, len(part))
        out: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                out.append(self._added[part])
            else:
                out += found[part] or ()
        return out


def _ids(backend: Any, texts: list[str]) -> list[list[int]]:
    """Offsets cost a third of the encoding, so they are not asked for."""
    return [encoded.ids for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _cut_first(backend: Any) -> bool:
    """Whether a stretch between two added tokens has the same ids alone as in its text.

    The backend cuts a text at its added tokens before all else. Not at those that match after normalisation, or take
    the spaces or the word around them; and `Metaspace` can write a space at a text's beginning that other stretches
    do not get.
    """
    added = backend.get_added_tokens_decoder().values()
    if any(t.lstrip or t.rstrip or t.single_word or t.normalized or not t.content.strip() for t in added):
        return False
    try:
        before = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer is not None else b""
    except Exception:  # written in Python: it has no state, and the library raises nothing more special
        return False
    return b'"prepend_scheme":"first"' not in before and not getattr(backend.model, "dropout", None)


def _only_calls_backend(tokenizer: Any) -> bool:
    """Whether `encode` and `decode` are transformers' own, which hand everything to the backend.

    The backend gives the same ids and texts at once; transformers looks at the type of every id first.
    """
    from transformers import PreTrainedTokenizerFast

    methods = ("encode", "decode", "_encode_plus", "_decode")
    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(getattr(tokenizer, name), "__func__", None) is getattr(PreTrainedTokenizerFast, name)
        for name in methods
    )


def twin_of(tokenizer: Any, backend: Any) -> tuple[Any, str]:
    """The tokenizer without added tokens, and a marker: text after it is encoded as after a control token.

    Built on first need (a second or two for a large vocabulary) and kept as long as the tokenizer lives.
    """
    from tokenizers import AddedToken, Tokenizer

    with _TWIN_LOCK:
        if tokenizer not in _TWINS:
            anchor = f"\U0010fffd{secrets.token_hex(16)}\U0010fffd"
            twin = Tokenizer.from_str(json.dumps(without_added_tokens(json.loads(backend.to_str()))))
            twin.add_special_tokens([AddedToken(anchor, normalized=False, special=True)])
            _TWINS[tokenizer] = (twin, anchor)
        return _TWINS[tokenizer]


def refuse_surrogates(text: str) -> None:
    """Half of a surrogate pair is no character: it has no UTF-8, and so no tokens.

    Raises:
        TemplateError: the text holds one; shows what stands before it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before, half = text[max(0, error.start - 40) : error.start], text[error.start]
        raise TemplateError(
            f"the text holds half of a surrogate pair ({half!r}) behind {before!r}: it is no character and cannot be "
            "tokenized. Remove it where the text is made (text.encode('utf-8', 'replace').decode() does)"
        ) from error


def compile_literals(literals: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds control literals, the longest first."""
    ordered = sorted((t for t in literals if t.strip()), key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizer.json` that can only produce ordinary ids.

    Added tokens go; where one also sits in the model's own vocabulary its entry is renamed to what no text spells,
    and merges that would build it are dropped. Ids stay.
    """
    literals = {t["content"] for t in spec.get("added_tokens", [])}
    spec = {**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    model = dict(spec["model"])
    keep = {model.get("unk_token")}
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {f"\x00{t}\x00" if t in literals and t not in keep else t: i for t, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[f"\x00{t}\x00" if t in literals else t, score] for t, score in vocab]
    made_by_merging = isinstance(vocab, dict) and not literals.isdisjoint(vocab)
    if "merges" in model and made_by_merging:
        pairs = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        model["merges"] = [list(pair) for pair in pairs if not (literals & {pair[0], pair[1], "".join(pair)})]
    spec["model"] = model
    return spec


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from strings_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from strings_in(v)
