"""Ids from text: both forms of verl's delta method, without their errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import before_release
from toy_chat import END, ToyChat, assistant, chatml, decode, encode, user

from verl_mt.chat import load_chat
from verl_mt.chat.text_delta import turn_ids
from verl_mt.errors import TemplateError

HISTORY = [user("Hi"), assistant("A1"), user("U2")]


def think_on_last_turn(messages, tools=None, **kw):
    """Like Qwen3: old reasoning is dropped, the last turn gets a think block in a fixed layout."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    out = []
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            found = re.match(r"<think>\s*(.*?)\s*</think>\s*", m["content"], re.DOTALL)
            rest = m["content"][found.end() :] if found else m["content"]
            block = f"<think>\n{found[1] if found else ''}\n</think>\n\n" if i > last else ""
            m = {**m, "content": block + rest}
        out.append(m)
    return chatml(out, tools, **kw)


def prefilled(messages, tools=None, *, add_generation_prompt=False):
    """Like QwQ: the generation prompt opens the reasoning, finished turns show none of it."""
    bare = [{**m, "content": m["content"].split("</think>")[-1].lstrip("\n")} for m in messages]
    return chatml(bare, tools, add_generation_prompt=add_generation_prompt) + (
        "<think>\n" if add_generation_prompt else ""
    )


@pytest.mark.cap("V4", "V8", "V13", "P1")
@pytest.mark.parametrize("method", ["prev_curr", "fixed_base", "auto"])
def test_a_turn_is_its_text_and_its_end_without_the_separator(method):
    ids = turn_ids(ToyChat(), HISTORY, assistant("A2"), method=method)
    assert ids == encode("A2<|im_end|>")
    assert len(ids) == 3


@pytest.mark.cap("P19")
@pytest.mark.parametrize("method", ["prev_curr", "fixed_base", "auto"])
def test_a_turn_that_was_cut_gets_no_end(method):
    assert turn_ids(ToyChat(), HISTORY, assistant("A2 "), method=method, complete=False) == encode("A2 ")


@pytest.mark.cap("P6", "V8")
def test_text_that_the_template_adds_to_the_turn_is_never_taken_for_the_models():
    chat = ToyChat(think_on_last_turn)
    for method in ("prev_curr", "fixed_base"):
        with pytest.raises(TemplateError, match=r"rewrites the turn|to the turn"):
            turn_ids(chat, HISTORY, assistant("A2"), method=method)
    assert turn_ids(chat, HISTORY, assistant("A2")) == encode("A2<|im_end|>")


@pytest.mark.cap("P8")
def test_reasoning_keeps_the_layout_that_the_model_wrote():
    text = "<think>x</think> y"
    assert turn_ids(ToyChat(think_on_last_turn), HISTORY, assistant(text)) == encode(text + "<|im_end|>")


@pytest.mark.cap("P7")
def test_a_prefilled_think_tag_is_prompt_and_the_turn_begins_behind_it():
    chat, text = ToyChat(prefilled), "user asked</think>\n\n4"
    for method in ("prev_curr", "fixed_base"):
        with pytest.raises(TemplateError, match="rewrites the prompt"):
            turn_ids(chat, HISTORY, assistant(text), method=method)
    assert turn_ids(chat, HISTORY, assistant(text)) == encode(text + "<|im_end|>")


def test_a_history_that_is_rewritten_by_the_new_message_falls_back_to_the_fixed_base():
    def rewrites(messages, tools=None, **kw):
        old = len(messages) > 3 and messages[-1]["role"] == "assistant"
        return chatml(messages, tools, **kw).replace("A1", "A one" if old else "A1")

    chat = ToyChat(rewrites)
    with pytest.raises(TemplateError, match="prev_curr: the template rewrites the prompt"):
        turn_ids(chat, HISTORY, assistant("A2"), method="prev_curr")
    assert turn_ids(chat, HISTORY, assistant("A2")) == encode("A2<|im_end|>")


def test_a_template_without_a_system_role_has_a_fixed_base_without_one():
    def no_system(messages, tools=None, **kw):
        if messages[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return chatml(messages, tools, **kw)

    assert turn_ids(ToyChat(no_system), HISTORY, assistant("A2"), method="fixed_base") == encode("A2<|im_end|>")


def test_parsed_tool_calls_are_taken_as_the_template_writes_them():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ids = turn_ids(ToyChat(), HISTORY, assistant("ok", tool_calls=[call]))
    assert decode(ids) == 'ok\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert turn_ids(ToyChat(), HISTORY, assistant("ok", tool_calls=[call]), complete=False) == ids[:-1]


def test_an_end_of_turn_in_the_engines_text_is_not_doubled():
    assert turn_ids(ToyChat(), HISTORY, assistant("A2<|im_end|>")) == encode("A2<|im_end|>")


@pytest.mark.cap("P3")
def test_a_merge_across_the_generation_prompt_is_not_followed():
    class Merging(ToyChat):
        def encode_text(self, text, *, neutral=False):
            pieces = text.split("\n\n")
            ids = encode(pieces[0])
            for piece in pieces[1:]:
                ids += [ord("\x7f") + 100, *encode(piece)]
            return ids

        def decode(self, ids):
            return decode(ids).replace("\x7f", "\n\n")

    assert turn_ids(Merging(), HISTORY, assistant("\n4")) == encode("\n4<|im_end|>")


def test_a_turn_is_encoded_where_the_tokenizer_drops_white_space_behind_control_tokens():
    """As Phi-3: the newline behind the end of turn is lost."""

    class Swallowing(ToyChat):
        def encode_text(self, text, *, neutral=False):
            return encode(re.sub(r"(<\|im_\w+\|>)\s+", r"\1", text))

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = assistant("ok", tool_calls=[call])
    for method in ("prev_curr", "fixed_base", "auto"):
        ids = turn_ids(Swallowing(), HISTORY, said, method=method)
        assert decode(ids) == 'ok\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        assert turn_ids(Swallowing(), HISTORY, said, method=method, complete=False) == ids[:-1]


def test_engine_text_that_would_lose_its_white_space_is_refused():
    class Stripping(ToyChat):
        def encode_text(self, text, *, neutral=False):
            return encode(text.replace(" ", ""))

    with pytest.raises(TemplateError, match="as_written: the tokenizer cannot write 'two words' behind "):
        turn_ids(Stripping(), HISTORY, assistant("two words"))


def test_an_unknown_method_is_refused():
    with pytest.raises(TemplateError, match="unknown delta method 'slice'"):
        turn_ids(ToyChat(), HISTORY, assistant("A2"), method="slice")


@settings(max_examples=80, deadline=None)
@given(
    st.text(alphabet="aHelo \n<>/thinkA1é中", max_size=20),
    st.sampled_from([chatml, think_on_last_turn, prefilled]),
    st.booleans(),
)
def test_the_ids_of_a_turn_decode_to_the_engines_text_and_one_end(text, template, complete):
    ids = turn_ids(ToyChat(template), HISTORY, assistant(text), complete=complete)
    assert decode(ids) == text + ("<|im_end|>" if complete else "")
    assert ids.count(END) == complete


@pytest.mark.slow
@pytest.mark.cap("V4", "P3", "P4", "P7")
@pytest.mark.filterwarnings("ignore:AutoTokenizer made")
@pytest.mark.parametrize(
    ("tokenizer", "template"),
    [
        ("qwen3", "Qwen-Qwen3-0.6B"),
        before_release("qwen2.5", "Qwen-QwQ-32B"),
        ("llama3.1", "meta-llama-Llama-3.1-8B-Instruct"),
        ("mistral-7b-v3", "mistral-common-v3"),
        before_release("phi-3-mini", "microsoft-Phi-3-mini-4k-instruct"),
        ("gpt-oss", "openai-gpt-oss-120b"),
        before_release("ds-r1-distill-qwen", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
    ],
)
def test_published_templates_give_the_text_and_one_end_behind_the_prompt(shared_data, tokenizer, template):
    file = shared_data / "templates" / f"{template}.jinja"
    chat = load_chat(str(shared_data / "tokenizers" / tokenizer), custom_chat_template=str(file))
    prompt = chat.prompt_ids(HISTORY)
    for text in ("It is 4.", "\n4", " 4 ", "<think>x</think> y", "", "é中"):
        cut = turn_ids(chat, HISTORY, assistant(text), complete=False)
        whole = turn_ids(chat, HISTORY, assistant(text))
        assert text == chat.decode(cut) or chat.decode(prompt + cut) == chat.decode(prompt) + text
        assert whole[:-1] == cut and whole[-1] in chat.end_token_ids


def test_a_turn_that_the_template_or_tokenizer_changes_is_told_with_the_place():
    def shouts(messages, tools=None, **kw):
        return chatml(messages, tools, **kw).replace("A2 and more", "A2 AND MORE")

    with pytest.raises(TemplateError) as caught:
        turn_ids(ToyChat(shouts), HISTORY, assistant("A2 and more"), method="prev_curr")
    assert str(caught.value) == (
        "no ids for an assistant turn from its text; prev_curr: the template rewrites the turn: the model wrote "
        "'and more' where the template has 'AND MORE<|im_end|>\\n'"
    )

    def adds(messages, tools=None, *, add_generation_prompt=False):
        text = chatml(messages, tools, add_generation_prompt=add_generation_prompt)
        return text if add_generation_prompt else text + "more"

    with pytest.raises(TemplateError, match=r"adds '<\|im_end\|>\\nmore' to the turn. The model did not write that"):
        turn_ids(ToyChat(adds), HISTORY, assistant("A2"), method="prev_curr")


def test_a_message_from_elsewhere_is_taken_as_the_template_writes_it():
    empty = "<think>\n\n</think>\n\n"
    chat = ToyChat(think_on_last_turn)
    assert decode(turn_ids(chat, HISTORY, assistant("A2"), raw=False)) == f"{empty}A2<|im_end|>"
    call = {"function": {"name": "f", "arguments": {}}}
    written = decode(turn_ids(chat, HISTORY, assistant("", tool_calls=[call])))
    assert written == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    kept = decode(turn_ids(chat, HISTORY, assistant("", tool_calls=[call], reasoning_content="r")))
    assert kept == f"{empty}\n{written}"
    no_end = turn_ids(chat, HISTORY, assistant("A2"), raw=False, complete=False)
    assert decode(no_end) == f"{empty}A2"
