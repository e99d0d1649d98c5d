"""A message that the template writes nowhere is refused; what templates leave out on purpose is not."""

from __future__ import annotations

import pytest
from chat_toys import CHATML, assistant, byte_tokenizer, call, tool, user
from toy_chat import ToyChat, chatml, decode

from verl_mt.chat import ChatTemplate, prompt_messages
from verl_mt.chat.demonstrations import demonstration
from verl_mt.chat.prompt_messages import require_traces
from verl_mt.errors import TemplateError

THOUGHT = "<think>\nhm\n</think>\n\nfour"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


@pytest.fixture(scope="module")
def qwen3(shared_data) -> ChatTemplate:
    template = (shared_data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    return ChatTemplate(byte_tokenizer(CHATML, eos="<|im_end|>"), chat_template=template)


@pytest.mark.parametrize(
    "role, meant", [("human", "user"), ("gpt", "assistant"), ("function", "tool"), ("User", "user"), ("asistant", "as")]
)
def test_a_role_that_qwen3_passes_over_is_refused_with_the_one_that_was_meant(qwen3, role, meant):
    with pytest.raises(
        TemplateError, match=f"message 2 .role '{role}'. leaves no trace .*'2 . 2'; did you mean '{meant}"
    ):
        require_traces(qwen3, [user("q"), {"role": role, "content": "2 + 2"}, user("?")])


def test_a_role_that_was_passed_over_once_is_refused_again(qwen3):
    for _ in range(2):
        with pytest.raises(TemplateError, match="did you mean 'user'"):
            require_traces(qwen3, [{"role": "human", "content": [{"type": "text", "text": "2 + 2"}]}])


def test_a_demonstration_whose_question_the_template_passes_over_is_refused(qwen3):
    with pytest.raises(TemplateError, match=r"message 2 \(role 'human'\) leaves no trace"):
        demonstration(qwen3, [system("s"), {"role": "human", "content": "2 + 2"}, assistant("four")])


ORDINARY = {
    "old reasoning": ([system("s"), user("q"), assistant(THOUGHT), user("r")], None),
    "old reasoning of its own": ([user("q"), assistant("four") | {"reasoning_content": "hm"}, user("r")], None),
    "an empty system message": ([system(""), user("q")], None),
    "an answer of white space": ([user("q"), assistant("\n"), user("r")], None),
    "a call and its result": (
        [user("q"), assistant("", call("f", {"x": "y"}, "abcdefgh1")), tool("4", "abcdefgh1")],
        [TOOL],
    ),
    "the same text twice": ([user("q"), assistant("four"), user("q")], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDINARY)
def test_no_published_template_is_refused_an_ordinary_conversation(shared_data, name):
    messages, tools = ORDINARY[name]
    tokenizer, rendered = byte_tokenizer(CHATML, eos="<|im_end|>"), 0
    for file in sorted((shared_data / "templates").glob("*.jinja")):
        if tools and file.stem.startswith(("microsoft-Phi-3", "microsoft-phi-4-ort", "llama-cpp-rwkv")):
            continue  # these show no result of a tool
        try:
            chat = ChatTemplate(tokenizer, chat_template=file.read_text())
            chat.full_text(messages, tools, add_generation_prompt=True)
        except TemplateError:
            continue
        require_traces(chat, messages, tools)
        rendered += 1
    assert rendered > 30


# ---------------------------------------------------------------- on a toy template


def passes_over(messages, tools=None, *, add_generation_prompt=False):
    """Writes what it knows and passes over the role `human`; refuses the role `never`."""
    if any(m["role"] == "never" for m in messages):
        raise TemplateError("never")
    shown = [m if isinstance(m["content"], str) else {**m, "content": m["content"][-1]["text"]} for m in messages]
    return chatml([m for m in shown if m["role"] != "human"], add_generation_prompt=add_generation_prompt)


def test_only_the_message_without_a_trace_is_refused_and_its_text_is_shown():
    long = "12345678901234567890" * 4
    for text, shown in ((long, long[:60]), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\\nb")):
        chat = ToyChat(passes_over)
        with pytest.raises(TemplateError) as caught:
            require_traces(chat, [user("q"), {"role": "human", "content": text}, user("r")])
        assert str(caught.value).startswith(
            f"message 2 (role 'human') leaves no trace in the prompt: the chat template writes nothing for it, so the "
            f"model would never see '{shown}'; did you mean 'user'?. Give it a role"
        )
        assert caught.value.cause == "P16"
    with pytest.raises(TemplateError, match=r"see 'x'\. Give it"):
        require_traces(ToyChat(lambda *_, **__: "same"), [user("x")])


def test_what_was_shown_once_is_not_rendered_again():
    chat = ToyChat(passes_over)
    for messages, tools, renders in (
        ([user("q")], None, 1),
        ([user("other")], [], 0),
        ([user("q")], [TOOL], 1),
        ([user("q"), assistant("a")], None, 1),
        ([user("q"), assistant("")], None, 1),
        ([user("q"), assistant("", call("f", {}))], None, 1),
        ([{"role": "human", "content": " \n"}, user("q")], None, 1),
        ([{"role": "human", "content": [{"type": "image", "text": "x"}]}, user("q")], None, 0),
        ([{"role": "human", "content": None}, user("q")], None, 0),
    ):
        before = chat.renders
        require_traces(chat, messages, tools)
        assert chat.renders - before == renders, messages


def test_a_message_is_dropped_where_the_prompt_is_the_same_whatever_it_says():
    def cuts(messages, tools=None, *, add_generation_prompt=False):
        """Text is cut to two characters, so a marker never shows."""
        shown = [{**m, "content": m["content"][:2]} for m in messages]
        return passes_over(shown, add_generation_prompt=add_generation_prompt) if add_generation_prompt else ""

    chat = ToyChat(cuts)
    require_traces(chat, [user("abc"), user("q")])
    assert prompt_messages._unmarked(chat, [user("abc"), user("q")], None) == [0, 1]
    asked = [user("abc"), {"role": "human", "content": "x"}]
    assert [prompt_messages._is_dropped(chat, asked, place, None) for place in (0, 1)] == [False, True]
    never = [user("abc"), {"role": "never", "content": "x"}]
    assert prompt_messages._unmarked(ToyChat(passes_over), never, None) == [0, 1]
    assert not prompt_messages._is_dropped(ToyChat(passes_over), never, 0, None)


def test_the_tokens_of_assistant_messages_are_their_words_and_their_end():
    chat = ToyChat()
    messages = [assistant("A"), user("q"), assistant("bc"), user("r"), assistant("")]
    ids = chat.full_ids(messages)
    spans = prompt_messages.assistant_spans(chat, messages, None, ids)
    assert {place: decode(ids[a:b]) for place, (a, b) in spans.items()} == {
        0: "<|im_start|>assistant\nA<|im_end|>", 2: "bc<|im_end|>", 4: "<|im_end|>",
    }  # fmt: skip
    assert spans[0][0] == 0
    endless = ToyChat()
    endless.end_token_ids = frozenset()
    assert prompt_messages.assistant_spans(endless, messages[1:3], None, endless.full_ids(messages[1:3])) == {
        1: (spans[2][0] - spans[0][1] - 1, spans[2][1] - spans[0][1])
    }
    with pytest.raises(TemplateError, match="message 2 of the prompt is written in another way"):
        prompt_messages.assistant_spans(chat, messages, None, [*ids[: spans[2][0]], 999, *ids[spans[2][0] + 1 :]])
    assert prompt_messages.assistant_spans(chat, messages[:2], None, ids) == {0: spans[0]}
