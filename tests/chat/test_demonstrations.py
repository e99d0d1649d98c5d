"""Finished conversations as training records."""

from __future__ import annotations

import pytest
from chat_toys import CHATML, assistant, byte_tokenizer, call, char_tokenizer, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.chat import ChatTemplate, demonstrations
from verl_mt.chat.demonstrations import demonstration
from verl_mt.errors import DataError


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(char_tokenizer(CHATML))


def trained_text(chat: ChatTemplate, record) -> str:
    return chat.decode([i for i, m in zip(record.token_ids, record.loss_mask) if m])


def test_what_the_assistant_says_and_its_end_of_turn_are_trained_and_nothing_else(chat):
    record = demonstration(chat, [user("Hi"), assistant("A1"), user("U2"), assistant("A2")])
    assert trained_text(chat, record) == "A1<|im_end|>A2<|im_end|>"
    assert [(t.kind, t.turn) for t in record.turns] == [
        ("prompt", 0), ("assistant", 1), ("observation", 1), ("assistant", 2),
    ]  # fmt: skip
    assert record.has_log_probs is False and record.loss_mask == record.sampled


WORDS = st.text("ab 1\n", min_size=1, max_size=6).filter(lambda s: s.strip() == s and s)


@pytest.mark.slow
@given(st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_the_ids_are_those_of_the_whole_conversation(turns):
    chat = ChatTemplate(char_tokenizer(CHATML))
    messages = [m for said, answer, _ in turns for m in (user(said), assistant(answer))]
    weighted = [
        {**m, "weight": int(turns[i // 2][2])} if m["role"] == "assistant" else m for i, m in enumerate(messages)
    ]
    record = demonstration(chat, weighted)
    record.check()
    assert record.token_ids == chat.full_ids(messages, None)[: len(record.token_ids)]
    assert record.token_ids[-1] in chat.end_token_ids
    kept = [f"{answer}<|im_end|>" for _, answer, weight in turns if weight]
    assert trained_text(chat, record) == "".join(kept)


def test_messages_after_the_last_answer_are_left_out(chat):
    short, long = [user("Hi"), assistant("A")], [user("Hi"), assistant("A"), user("never answered")]
    assert demonstration(chat, long) == demonstration(chat, short)


def test_adjacent_answers_are_two_turns(chat):
    record = demonstration(chat, [user("Hi"), {**assistant("A1"), "weight": 0}, assistant("A2")])
    assert trained_text(chat, record) == "A2<|im_end|>"
    assert [t.kind for t in record.turns].count("assistant") == 2


@pytest.mark.parametrize(
    "messages, text",
    [
        ([user("Hi")], "no assistant message"),
        ([assistant("A"), user("Hi"), assistant("B")], "begins with an assistant message"),
        ([user("Hi"), {**assistant("A"), "weight": 0.5}], r"messages\[1\].weight is 0.5, must be 0 or 1"),
        ([tool("r")], "no assistant message"),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused(chat, messages, text):
    with pytest.raises(DataError, match=text):
        demonstration(chat, messages)


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def qwen3(shared_data) -> ChatTemplate:
    template = (shared_data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    return ChatTemplate(byte_tokenizer(CHATML, eos="<|im_end|>"), chat_template=template)


def test_qwen3_keeps_the_empty_think_block_that_its_template_writes(qwen3):
    asks = call("f", {"x": "y"}, "c1")
    messages = [user("q"), assistant("", asks), tool("4", "c1"), assistant("A2"), user("r"), assistant("A3")]
    record = demonstration(qwen3, messages, [TOOL])
    called = '<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call>'
    assert trained_text(qwen3, record) == "".join(f"{EMPTY_THOUGHT}{said}<|im_end|>" for said in (called, "A2", "A3"))
    # The first turn as a rollout shows and samples it, and as the template writes the conversation that ends there.
    prompt, first = record.turns[0].end, record.turns[1].end
    assert record.token_ids[:prompt] == qwen3.prompt_ids(messages[:1], [TOOL])
    assert qwen3.decode(record.token_ids[:first]) + "\n" == qwen3.full_text(messages[:2], [TOOL])
    # What follows it is what a rollout appends: the template drops the blocks of old turns, the record does not.
    result = qwen3.delta_ids(
        messages[2:3], history=messages[:2], tools=[TOOL], last_ids=record.token_ids[first - 1 : first]
    )
    assert record.token_ids[first : record.turns[2].end] == result.ids


def test_without_thinking_the_empty_block_belongs_to_the_prompt(qwen3):
    chat = qwen3.with_kwargs({"enable_thinking": False})
    record = demonstration(chat, [user("q"), assistant("A1"), user("r"), assistant("A2")])
    assert trained_text(chat, record) == "A1<|im_end|>A2<|im_end|>"
    assert chat.decode(record.token_ids).count(f"<|im_start|>assistant\n{EMPTY_THOUGHT}A") == 2
    assert record.token_ids[: record.turns[0].end] == chat.prompt_ids([user("q")])


@pytest.mark.parametrize(("value", "weight"), [(None, 1), (0, 0), (1, 1), (0.0, 0), (True, 1)])
def test_a_weight_is_zero_or_one(value, weight):
    assert demonstrations._weight({"weight": value}, 3) == weight and demonstrations._weight({}, 0) == 1
    with pytest.raises(DataError, match=r"^messages\[3\].weight is 2, must be 0 or 1$"):
        demonstrations._weight({"weight": 2}, 3)


def test_a_stream_is_cut_into_its_turns_again():
    record = demonstrations._record([1, 2, 3, 4, 5, 6, 7], [0, 1, 1, 1, 0, 1, 1], [2, 1, 2], [1, 0, 1])
    assert [(t.kind, t.turn, t.start, t.end) for t in record.turns] == [
        ("prompt", 0, 0, 1), ("assistant", 1, 1, 3), ("assistant", 2, 3, 4), ("observation", 2, 4, 5),
        ("assistant", 3, 5, 7),
    ]  # fmt: skip
    assert record.loss_mask == [0, 1, 1, 0, 0, 1, 1] and record.sampled == [0, 1, 1, 1, 0, 1, 1]
    first = demonstrations._record([1], [1], [1], [1])
    assert [(t.kind, t.start, t.end) for t in first.turns if t.end > t.start] == [("assistant", 0, 1)]


def test_the_template_of_a_tokenizer_is_made_once_for_each_set_of_variables(chat):
    template = demonstrations._template
    assert template(chat, None) is template(chat, {}) is chat
    other = template(chat, {"a": 1})
    assert other is not chat and other.template_kwargs == {"a": 1} and template(other, {"a": 1}) is other
    tokenizer = char_tokenizer(CHATML)
    made = template(tokenizer, None)
    assert template(tokenizer, {}) is made and template(tokenizer, {"a": 1}) is not made
    assert template(tokenizer, {"a": 1}) is template(tokenizer, {"a": 1})
