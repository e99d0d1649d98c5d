"""Finished conversations as training records."""

from __future__ import annotations

import pytest
from chat_toys import CHATML, assistant, char_tokenizer, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.chat import ChatTemplate
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
