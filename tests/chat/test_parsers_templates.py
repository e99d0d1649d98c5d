"""parse(render(x)) == x, where published chat templates do the rendering."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_mt.chat.parsers import get_parser
from verl_mt.data.conversation import ParsedTurn, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a thing up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "Please look it up."}

_strings = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["</tool_call>", "<think>", '"}', "\n", "é漢🙂", "\\n", "&<'"])),
    max_size=3,
).map("".join)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), _strings),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_strings, inner, max_size=2)),
    max_leaves=4,
)
_calls = st.builds(ToolCall, st.just("lookup"), st.dictionaries(_strings, _values, max_size=3))


@functools.cache
def renderer(data: Path, template: str):
    """Renders with the template; the vocabulary plays no part in it, so one serves all."""
    loaded = vocabulary(data)
    return functools.partial(
        loaded.apply_chat_template,
        tools=TOOLS,
        tokenize=False,
        chat_template=(data / "templates" / template).read_text(),
        bos_token="<|begin_of_text|>",
    )


@functools.cache
def vocabulary(data: Path):
    return AutoTokenizer.from_pretrained(data / "tokenizers" / "qwen2.5")


def written_by(render, message: dict) -> str:
    """What the template puts after the generation prompt, the end-of-turn marker included."""
    prompt = render([USER], add_generation_prompt=True)
    full = render([USER, message])
    shared = prompt if full.startswith(prompt) else prompt.rstrip("\n")
    assert full.startswith(shared)
    return full[len(shared) :]


def assistant(content: str, calls: list[ToolCall], reasoning: str | None = None) -> dict:
    message: dict = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [call.to_message() for call in calls]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


@given(content=st.sampled_from(["", "Let me look.", "a\n\nb"]), calls=st.lists(_calls, max_size=3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_qwen25_turns_come_back_as_they_were(shared_data, content, calls):
    render = renderer(shared_data, "Qwen-Qwen2.5-7B-Instruct.jinja")
    text = written_by(render, assistant(content, calls))
    assert get_parser("qwen").parse(text) == ParsedTurn(content, None, calls)


@given(
    content=st.sampled_from(["", "Let me look."]),
    calls=st.lists(_calls, max_size=3),
    reasoning=st.sampled_from(["", "I need it.", 'Maybe <tool_call>{"name": "lookup", "arguments": {}}</tool_call>?']),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_qwen3_turns_come_back_with_their_reasoning(shared_data, content, calls, reasoning):
    render = renderer(shared_data, "Qwen-Qwen3-0.6B.jinja")
    text = written_by(render, assistant(content, calls, reasoning))
    assert get_parser("qwen").parse(text) == ParsedTurn(content, reasoning, calls)


@given(calls=st.lists(_calls, min_size=1, max_size=3))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hermes3_calls_come_back_as_they_were(shared_data, calls):
    render = renderer(shared_data, "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja")
    assert get_parser("hermes").parse(written_by(render, assistant("", calls))) == ParsedTurn("", None, calls)


@given(call=_calls)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("version", ["3.1-8B", "3.2-3B"])
def test_llama_calls_come_back_as_they_were(shared_data, version, call):
    render = renderer(shared_data, f"meta-llama-Llama-{version}-Instruct.jinja")
    text = written_by(render, assistant("", [call]))
    assert get_parser("llama3_json").parse(text, TOOLS) == ParsedTurn("", None, [call])
