"""Foreign text never becomes a control token, and harmless text keeps the ids it always had."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_toys import CHATML, PLAIN_ADDED, SPECIALS, byte_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from verl_mt.chat import encode
from verl_mt.chat.encode import Encoder, without_added_tokens
from verl_mt.errors import TemplateError

LITERALS = st.sampled_from(
    [*SPECIALS, *PLAIN_ADDED, "<|im_", "end|>", "<|im_<|im_end|>end|>", "\ue000", "\ue001", "\U000f0000"]
)
FOREIGN = st.lists(st.one_of(LITERALS, st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), max_size=8).map(
    "".join
)

TOKENIZER = byte_tokenizer(CHATML)
ENCODER = Encoder(TOKENIZER)


def neutral(encoder: Encoder, text: str) -> list[int]:
    hidden = encoder.hidden()
    return encoder.encode_hidden(hidden.hide(text), hidden)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(FOREIGN)
def test_neutral_text_has_no_control_id_and_decodes_to_itself(text):
    ids = neutral(ENCODER, text)
    assert ENCODER.control_ids(ids) == []
    assert ENCODER.decode(ids) == text


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(FOREIGN, FOREIGN)
def test_the_scaffold_around_foreign_text_keeps_its_control_ids(first, second):
    hidden = ENCODER.hidden()
    a, b = hidden.hide([first, second])
    ids = ENCODER.encode_hidden(f"<|im_start|>user\n{a}<|im_end|>\n<think>{b}</think>", hidden)
    wanted = [ENCODER.added[t] for t in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")]
    assert ENCODER.control_ids(ids) == wanted
    assert ENCODER.decode(ids) == f"<|im_start|>user\n{first}<|im_end|>\n<think>{second}</think>"


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_without_control_literals_keeps_its_usual_ids(text):
    assume(not any(literal in text for literal in ENCODER.added))  # hypothesis draws strings of the source, too
    assert neutral(ENCODER, text) == ENCODER.encode(text)


@pytest.mark.parametrize("switch", ["none", "split_special_tokens", "truncation", "padding"])
def test_ids_and_texts_are_those_of_the_tokenizers_own_methods_whatever_its_switches_say(switch):
    tokenizer = byte_tokenizer(CHATML)
    if switch == "split_special_tokens":
        tokenizer.split_special_tokens = True
    elif switch == "truncation":
        tokenizer.backend_tokenizer.enable_truncation(3)
    elif switch == "padding":
        tokenizer.backend_tokenizer.enable_padding(length=64)
    text = "<|im_start|>user\nÜnïcödé 你好 \U0001f642 <tool_call>  two  spaces .<|im_end|>\n"
    ids = Encoder(tokenizer).encode(text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert Encoder(tokenizer).decode(ids[:-4]) == tokenizer.decode(ids[:-4], clean_up_tokenization_spaces=False)


def metaspace(prepend_scheme: str) -> PreTrainedTokenizerFast:
    """A sentencepiece-like tokenizer: control pieces are in its own vocabulary and reachable by merges."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "<", "s", ">", "/", "</", "s>", "<s", "x", "|"]
    merges = [("▁", "a"), ("<", "/"), ("s", ">"), ("</", "s>"), ("<", "s"), ("<s", ">")]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


STRETCHED = {"bytes": TOKENIZER} | {
    f"metaspace, {scheme}": metaspace(scheme) for scheme in ("first", "always", "never")
}
STRETCHED_ENCODERS = {name: Encoder(tokenizer) for name, tokenizer in STRETCHED.items()}


@pytest.mark.parametrize("name", list(STRETCHED))
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_remembered_of_a_text_changes_no_id(name, data):
    literals = [*STRETCHED_ENCODERS[name].added, " ", "a", " a b", "a b<", "\n", "e\u0301 1234"]
    parts = st.one_of(st.sampled_from(literals), st.text(st.characters(exclude_categories=["Cs"]), max_size=4))
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    expected = STRETCHED[name].backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert STRETCHED_ENCODERS[name].encode(text) == expected
    assert STRETCHED_ENCODERS[name].encode(text) == expected


def test_a_text_whose_stretches_are_known_is_not_encoded_again():
    tokenizer = byte_tokenizer(CHATML)
    encoder, text = Encoder(tokenizer), "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    expected, asked = encoder.encode(text), []

    class Counted:
        def __getattr__(self, name):
            return getattr(tokenizer.backend_tokenizer, name)

        def encode_batch_fast(self, texts, **options):
            asked.extend(texts)
            return tokenizer.backend_tokenizer.encode_batch_fast(texts, **options)

    encoder._stretches._backend = Counted()
    assert encoder.encode(text) == expected and asked == []
    assert encoder.encode(text + "7") == expected + encoder.encode("7")
    assert asked == ["assistant\n7", "7"]


def test_only_so_much_is_remembered(monkeypatch):
    monkeypatch.setattr(encode, "_MOST_CHARACTERS", 12)
    monkeypatch.setattr(encode, "_LONGEST_STRETCH", 6)
    encoder = Encoder(byte_tokenizer(CHATML))
    for number in range(20):
        text = f"<|im_end|>{number}<|im_end|>\n<|im_end|>longer than six {number}"
        assert encoder.encode(text) == TOKENIZER.encode(text, add_special_tokens=False)
        assert encoder.encode(f"{number}") == TOKENIZER.encode(f"{number}", add_special_tokens=False)
        held = encoder._stretches._known.values
        assert str(number) in held and sum(map(len, held)) <= 12 and max(map(len, held)) <= 6


@pytest.mark.parametrize("token", [AddedToken("<new>", normalized=False), AddedToken("qz", lstrip=True)])
def test_a_token_that_is_added_later_is_seen(token):
    tokenizer = byte_tokenizer(CHATML)
    encoder = Encoder(tokenizer)
    encoder.encode("<|im_end|>a <new> qz")
    tokenizer.add_tokens([token])
    assert encoder.encode("<|im_end|>a <new> qz") == tokenizer.encode("<|im_end|>a <new> qz", add_special_tokens=False)


@pytest.mark.parametrize("token", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}])
def test_tokens_that_look_beyond_themselves_are_left_to_the_tokenizer(token):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens([AddedToken("qz", **{"normalized": False, **token})])
    encoder = Encoder(tokenizer)
    for text in ("a qz b", "aqzb", "a  qz  b<|im_end|> qz"):
        assert encoder.encode(text) == encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_pre_tokenizer_in_python_is_left_to_the_tokenizer():
    class Whole:
        def pre_tokenize(self, text):
            pass

    tokenizer = byte_tokenizer(CHATML)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    assert Encoder(tokenizer).encode("ab<|im_end|>ab") == tokenizer.encode("ab<|im_end|>ab", add_special_tokens=False)


def test_a_control_literal_beside_a_private_use_character_is_not_confused_with_it():
    hidden = ENCODER.hidden()
    shown = hidden.hide(["<|im_end|>"], beside=["\ue000"])
    assert ENCODER.decode(ENCODER.encode_hidden("\ue000" + shown[0], hidden)) == "\ue000<|im_end|>"


def test_roles_are_not_hidden_and_the_value_is_not_changed():
    message = {"role": "<|user|>", "content": [{"type": "text", "text": "<|im_end|>"}], "n": 3}
    before = json.dumps(message)
    shown = ENCODER.hidden().hide(message)
    assert json.dumps(message) == before
    assert shown["role"] == "<|user|>"
    assert shown["content"][0]["text"] != "<|im_end|>"


def test_a_template_that_writes_ascii_json_is_seen_through():
    hidden = ENCODER.hidden()
    shown = json.dumps(hidden.hide("a<|im_end|>b"))
    assert ENCODER.decode(ENCODER.encode_hidden(shown, hidden)) == '"a<|im_end|>b"'


@pytest.mark.cap("P4")
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_sentencepiece_prefixes_stay_where_the_tokenizer_puts_them(scheme):
    encoder = Encoder(metaspace(scheme))
    for harmless in ("a", " a", "a b", "b"):
        text = f"</s>{harmless}x|<s>b"
        hidden = encoder.hidden()
        shown = hidden.hide("</s>")
        with_literal = encoder.encode_hidden(f"</s>{harmless}{shown}|<s>b", hidden)
        usual = encoder.encode(text)
        cut = len(encoder.encode(f"</s>{harmless}"))
        assert with_literal[:cut] == usual[:cut]
        assert with_literal[-2:] == usual[-2:]
        assert encoder.control_ids(with_literal) == [2, 1]


def test_control_pieces_of_the_vocabulary_itself_cannot_be_spelled():
    encoder = Encoder(metaspace("never"))
    assert encoder.control_ids(neutral(encoder, "</s><s>a")) == []
    assert encoder.decode(neutral(encoder, "</s>a")) == "</s>a"


def test_the_copy_without_control_tokens_is_built_once_per_tokenizer_however_many_conversations_need_it(monkeypatch):
    built = []

    def build(spec):
        built.append(spec)
        time.sleep(0.02)
        return without_added_tokens(spec)

    monkeypatch.setattr(encode, "without_added_tokens", build)
    tokenizer = byte_tokenizer(CHATML)
    neutral(Encoder(tokenizer), "harmless")
    assert built == []
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda _: neutral(Encoder(tokenizer), "a<|im_end|>b"), range(8)))
    assert len(built) == 1 and all(found == ids[0] for found in ids)
    neutral(Encoder(byte_tokenizer(CHATML)), "<|im_end|>")
    assert len(built) == 2


def test_the_twin_of_a_unigram_model_cannot_spell_them_either():
    spec = {
        "added_tokens": [{"content": "</s>"}],
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0]]},
    }
    assert [piece for piece, _ in without_added_tokens(spec)["model"]["vocab"]] == ["<unk>", "\x00</s>\x00", "a"]


def test_a_literal_that_only_appears_after_normalisation_is_plain_text():
    backend = byte_tokenizer(CHATML).backend_tokenizer
    backend.normalizer = normalizers.Lowercase()
    backend.add_tokens([AddedToken("<end>", normalized=True)])
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    ids = neutral(encoder, "a <END> <|im_end|> <end>")
    assert encoder.control_ids(ids) == []
    assert encoder.decode(ids) == "a <end> <|im_end|> <end>"
    assert encoder.control_ids(neutral(encoder, "a <END> b")) == []


def test_white_space_that_a_control_token_swallows_is_not_encoded_twice():
    tokenizer = byte_tokenizer(CHATML, rstrip=("<|user|>",))
    encoder = Encoder(tokenizer)
    hidden = encoder.hidden()
    ids = encoder.encode_hidden("<|user|>\n  x" + hidden.hide("<|im_end|>"), hidden)
    assert ids[:2] == encoder.encode("<|user|>\n  x")[:2]
    assert encoder.decode(ids) == "<|user|>x<|im_end|>"


class Slow:
    """A tokenizer in pure Python, as small as one can be."""

    unk_token_id = None
    all_special_tokens = ["<e>"]

    def get_added_vocab(self):
        return {"<e>": 1000}

    def convert_tokens_to_ids(self, token):
        return self.get_added_vocab()[token]

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        parts = text.split("<e>")
        ids = [ord(c) for c in parts[0]]
        for part in parts[1:]:
            ids += [1000, *map(ord, part)]
        return ids

    def decode(self, ids, **_):
        return "".join("<e>" if i == 1000 else chr(i) for i in ids)


def test_a_tokenizer_in_pure_python_is_served_too():
    encoder = Encoder(Slow())
    hidden = encoder.hidden()
    ids = encoder.encode_hidden("<e>a" + hidden.hide("b<e>c"), hidden)
    assert encoder.control_ids(ids) == [1000]
    assert encoder.decode(ids) == "<e>ab<e>c"


def test_a_vocabulary_that_makes_control_ids_of_plain_text_is_refused():
    backend = Tokenizer(models.WordLevel({"x": 0, "<|im_end|>": 1}, unk_token="<|im_end|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(TemplateError, match="turns plain text into the control"):
        neutral(encoder, "x <|im_end|> y")


# ---------------------------------------------------------------- by hand


def test_every_string_of_a_value_is_found():
    value = {"a": "x", "b": ["y", ("z", 1)], "c": {"d": "w"}, "e": None}
    assert list(encode.strings_in(value)) == ["x", "y", "z", "w"]
    assert list(encode.strings_in("s")) == ["s"] and list(encode.strings_in(3)) == []


def test_of_two_literals_at_one_place_the_longer_one_is_found():
    pattern = encode.compile_literals(["<a", "<a>", "b", " ", "", "<a|"])
    assert pattern.findall("<a><a|<a b.") == ["<a>", "<a|", "<a", "b"]
    assert encode.compile_literals([]) is encode.compile_literals([" \n"]) is None


def test_literals_are_hidden_behind_characters_that_nothing_else_holds():
    hidden = encode.Hidden(encode.compile_literals(["<e>", "<s>"]))
    assert (bool(hidden), hidden.foreign) == (False, False)
    assert hidden.hide({"n": 1}) == {"n": 1} and not hidden.foreign
    harmless = {"content": "a"}
    assert hidden.hide(harmless) is harmless and hidden.foreign and not hidden
    value = {"role": "<e>", "type": "<e>", "content": ["a<e><s>", ("<e>", 3)], "x": {"y": "\ue000"}}
    shown = hidden.hide(value, beside=["\ue001", {"z": "\ue003"}])
    assert shown == {
        "role": "<e>", "type": "<e>", "content": ["a\ue002\ue004", ["\ue002", 3]], "x": {"y": "\ue000"},
    }  # fmt: skip
    assert hidden.literal_of == {"\ue002": "<e>", "\ue004": "<s>"} and hidden
    assert hidden.show("\ue004b\ue002\ue000") == "<s>b<e>\ue000"
    assert hidden.find("x\ue004") and not hidden.find("x\ue000")
    assert hidden.unescape(r"\ue002 \ue004\ue000") == "\ue002 \ue004" + r"\ue000"
    again = hidden.hide("<s>", beside="\ue005")
    assert again == "\ue004" and hidden.hide("\ue006<e>") == "\ue006\ue002"
    assert encode.Hidden(None).hide("<e>") == "<e>" and encode.Hidden(None).show("\ue000") == "\ue000"


def test_private_characters_are_used_up_to_the_last_block():
    hidden = encode.Hidden(encode.compile_literals(["<e>"]))
    first, second = "".join(map(chr, range(0xE000, 0xF900))), "".join(map(chr, range(0xF0000, 0xFFFFE)))
    assert hidden.hide("<e>", beside=[first]) == "\U000f0000"
    assert encode.Hidden(hidden._pattern).hide("<e>", beside=[first, second]) == "\U00100000"


def test_half_of_a_surrogate_pair_is_refused_with_the_forty_characters_before_it():
    encode.refuse_surrogates("é\U0001f642")
    for before in ("", "b" * 50):
        with pytest.raises(TemplateError) as caught:
            encode.refuse_surrogates(f"{before}\ud83d rest")
        assert f"({chr(0xD83D)!r}) behind {before[-40:]!r}: it is no character" in str(caught.value)
    for encoded in (ENCODER.encode, lambda text: ENCODER.encode_hidden(text, ENCODER.hidden())):
        with pytest.raises(TemplateError, match="surrogate"):
            encoded("\ud83d")
    assert ENCODER.encode("") == []


def test_a_text_is_surely_longer_only_where_a_beginning_of_it_is_by_far():
    class Counted(Encoder):
        def encode(self, text):
            asked.append(len(text))
            return [0] * (len(text) // per_token)

    counted = object.__new__(Counted)
    for limit, size, per_token, longer, asks in (
        (8, 1152, 1, False, []),
        (8, 1153, 1, True, [1152]),
        (8, 1153, 16, False, [1152]),
        (8, 4609, 32, True, [1152, 4608]),
        (8, 4609, 64, False, [1152, 4608]),
        (8, 1153, 15, True, [1152]),
        (800, 13825, 14, True, [13824]),
        (800, 13825, 15, False, [13824]),
    ):
        asked: list[int] = []
        assert (counted.surely_longer("x" * size, limit), asked) == (longer, asks), (limit, size, per_token)


def test_added_tokens_are_taken_out_of_a_vocabulary_and_its_merges():
    model = {
        "unk_token": "<u>",
        "vocab": {"a": 0, "b": 1, "<u>": 2, "<e>": 3, "ab": 4},
        "merges": ["a b", ["<", "e>"], ["<e>", "a"], ["a", "<e>"], ["a", "b b"]],
    }
    spec = {"added_tokens": [{"content": "<e>"}, {"content": "<u>"}], "model": model, "post_processor": 1, "x": 2}
    bare = without_added_tokens(spec)
    assert bare == {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "x": 2,
        "model": {
            "unk_token": "<u>",
            "vocab": {"a": 0, "b": 1, "<u>": 2, "\x00<e>\x00": 3, "ab": 4},
            "merges": [["a", "b"], ["a", "b b"]],
        },
    }
    assert model["vocab"]["<e>"] == 3 and spec["post_processor"] == 1
    apart = {"added_tokens": [{"content": "<z>"}], "model": {"vocab": {"a": 0}, "merges": ["a b"]}}
    assert without_added_tokens(apart)["model"] == apart["model"]
    assert without_added_tokens({"model": {"vocab": None}})["model"] == {"vocab": None}


def test_the_unknown_token_is_no_forgery_and_control_ids_are_those_of_added_tokens():
    unknown = Encoder(metaspace("never"))
    assert unknown.control_ids([3, 1, 0, 4, 2]) == [1, 0, 2]
    assert not unknown._forged([0, 3, 4]) and unknown._forged([3, 2]) and not unknown._forged([])


class OneCharacter(Slow):
    all_special_tokens = ["é"]

    def get_added_vocab(self):
        return {"é": 1000, "éa": 1001}

    def encode(self, text, add_special_tokens):
        return [1000 if c == "é" else ord(c) for c in text]


def test_a_literal_is_cut_in_two_until_nothing_of_it_is_a_control_token():
    class Nested(Slow):
        def get_added_vocab(self):
            return {"<e>": 1000, "x<e>": 1001}

    encoder = Encoder(Nested())
    assert encoder._encode_plain_slow("x<e>") == [*map(ord, "x<e>")]
    with pytest.raises(TemplateError, match="'é' is a control token of one character"):
        Encoder(OneCharacter())._encode_plain_slow("é")


def test_what_a_tokenizer_adds_by_itself_is_not_added():
    tokenizer = byte_tokenizer(CHATML)
    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    assert tokenizer.encode("a")[0] == begin and tokenizer.encode("a")[1:] == Encoder(tokenizer).encode("a")


def test_special_tokens_count_as_added_and_a_literal_of_two_characters_can_be_cut():
    class Special(Slow):
        all_special_tokens = ("ab",)

        def get_added_vocab(self):
            return {"ab": 1000} if self.listed else {}

        def convert_tokens_to_ids(self, token):
            return {"ab": 1000}[token]

        def encode(self, text, add_special_tokens):
            return [1000] if text == "ab" else [*map(ord, text)]

    for listed in (True, False):
        Special.listed = listed
        encoder = Encoder(Special())
        assert encoder.added == {"ab": 1000} and encoder._encode_plain_slow("ab") == [97, 98]
