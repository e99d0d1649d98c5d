"""A message that the template writes nowhere is refused; what templates leave out on purpose is not."""

from __future__ import annotations

import pytest
from chat_toys import CHATML, assistant, byte_tokenizer, call, tool, user

from verl_mt.chat import ChatTemplate
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
