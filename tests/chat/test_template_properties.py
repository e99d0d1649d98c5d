"""Laws of a recorded stream over random conversations."""

from __future__ import annotations

import warnings

import pytest
from chat_toys import CHATML, HEADER_ENDS, TOOL_CHATML, assistant, byte_tokenizer, call, env, sample, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encode import FOREIGN

from verl_mt.chat import ChatTemplate, replay

pytestmark = pytest.mark.slow  # every property draws conversations

CHATS = {
    "chatml": ChatTemplate(byte_tokenizer(CHATML, eos="<|im_end|>")),
    "tools": ChatTemplate(byte_tokenizer(TOOL_CHATML)),
    "header ends": ChatTemplate(byte_tokenizer(HEADER_ENDS)),
    "rstrip": ChatTemplate(byte_tokenizer(CHATML, eos="<|im_end|>", rstrip=("<|im_end|>", "<|im_start|>"))),
}


@st.composite
def conversations(draw):
    """A template, a prompt, and steps whose sampled ids are whatever a model may sample."""
    chat = CHATS[draw(st.sampled_from(sorted(CHATS)))]
    size = len(chat.tokenizer)
    ends = sorted(chat.end_token_ids)
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.integers(0, size - 1).filter(lambda i: i not in ends), max_size=6))
        ids += draw(st.sampled_from([[], *[[e] for e in ends]]))
        ids = ids or [0]
        num_calls = draw(st.integers(0, 2))
        calls = [call("f", {"a": i}, f"c{i}") for i in range(num_calls)]
        steps.append(sample(ids, assistant(draw(FOREIGN), *calls)))
        if num_calls:
            steps.append(env(*[tool(draw(FOREIGN), f"c{i}") for i in range(num_calls)]))
        if not num_calls or draw(st.booleans()):
            steps.append(env(user(draw(FOREIGN))))
    return chat, [user(draw(FOREIGN))], steps


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_what_was_recorded_is_never_changed_by_what_follows(talk):
    chat, prompt, steps = talk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before: tuple[list[int], list[int]] = ([], [])
        for end in [i + 1 for i, s in enumerate(steps) if s["type"] == "sample"]:
            ids, mask = replay(chat, prompt, None, steps[:end])
            assert ids[: len(before[0])] == before[0]
            assert mask[: len(before[1])] == before[1]
            before = (ids, mask)


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_the_mask_is_one_exactly_on_the_sampled_ids(talk):
    chat, prompt, steps = talk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids, mask = replay(chat, prompt, None, steps)
    assert [i for i, m in zip(ids, mask) if m] == [i for s in steps if s["type"] == "sample" for i in s["ids"]]


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_foreign_text_adds_no_control_ids_to_a_delta(talk):
    """The control ids of every delta are those that the same delta has with harmless content."""
    chat, prompt, steps = talk

    def harmless(step):
        return env(*[{**m, "content": "x"} for m in step["messages"]]) if step["type"] == "env" else step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids, mask = replay(chat, prompt, None, steps)
        plain, plain_mask = replay(chat, prompt, None, [harmless(s) for s in steps])

    def given_control(ids, mask):
        return chat._encoder.control_ids(i for i, m in zip(ids, mask) if not m)

    assert given_control(ids, mask) == given_control(plain, plain_mask)


@settings(max_examples=60, deadline=None)
@given(FOREIGN)
def test_foreign_text_stands_in_the_delta_letter_by_letter(text):
    chat = CHATS["chatml"]
    end = chat.tokenizer.eos_token_id
    delta = chat.delta_ids([user(text)], history=[user("q"), assistant("a")], last_ids=[end])
    assert chat.decode(delta.ids) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1), min_size=2, max_size=4
    )
)
def test_canonical_samples_of_an_append_only_template_give_the_full_rendering(texts):
    chat = CHATS["chatml"]
    end = chat.tokenizer.eos_token_id
    messages, steps = [user(texts[0])], []
    for text in texts[1:]:
        ids = [*chat.encode_text(text, neutral=False), end]
        steps += [sample(ids, assistant(text)), env(user(text))]
    messages += [m for s in steps for m in (s.get("messages") or [s["message"]])]
    ids, _ = replay(chat, [user(texts[0])], None, steps)
    assert chat.decode(ids) == chat.full_text(messages)
    # The content of a turn is encoded apart from its header, as the model samples it.
    assert ids[: len(chat.prompt_ids([user(texts[0])]))] == chat.prompt_ids([user(texts[0])])
