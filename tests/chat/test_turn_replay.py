"""Turns that a template writes are recorded as it writes them, or refused at start."""

from __future__ import annotations

import pytest
from chat_toys import CHATML, HEADER_ENDS, TOOL_CHATML, assistant, byte_tokenizer, call, tool, user
from conformance_table import generic_template, generic_tokenizer, template_files

from verl_mt.chat import ChatTemplate
from verl_mt.chat.turn_replay import _shapes, turn_problems
from verl_mt.errors import TemplateError

TAGGED = (
    "{% macro tag(name) %}{{ '<|open|>' + name + '<|sep|>' }}{% endmacro %}"
    "{% macro end(name) %}{{ '<|close|>' + name + '<|sep|>' }}{% endmacro %}"
    "{% for m in messages %}{{ tag('message ' + m.role) }}"
    "{% if m.role == 'assistant' %}"
    "{{ tag('think') + (m.reasoning_content or '') + end('think') + tag('response') + m.content + end('response') }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ tag('call') + c.function.name + ' ' + c.function.arguments|tojson + end('call') }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ end('message') + '<|end_of_msg|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ tag('message assistant') + tag('think') }}{% endif %}"
)
"""A turn closes with several tokens, and its thought with some of the same (as in Kimi-K3)."""


@pytest.mark.cap("P18")
@pytest.mark.parametrize("eos", ["<|end_of_msg|>", "[EOS]"])
def test_a_turn_that_closes_with_several_tokens_ends_at_the_last_of_them(eos):
    chat = ChatTemplate(generic_tokenizer(TAGGED, eos=eos))
    assert {chat.decode([i]) for i in chat.stop_token_ids} == {"<|end_of_msg|>", eos}
    asked, answers = [user("q")], (user("more"), tool("R"))
    for turn, answer in zip((assistant("a"), assistant("", call("f", {"x": 1}))), answers):
        turn = {**turn, "reasoning_content": "hm"}
        prompt, written = chat.prompt_ids(asked), chat.full_ids([*asked, turn])
        assert written[: len(prompt)] == prompt
        delta = chat.delta_ids([answer], history=[*asked, turn], last_ids=written[-1:]).ids
        assert written + delta == chat.full_ids([*asked, turn, answer], add_generation_prompt=True)
    assert turn_problems(chat, "reasoning_content") == {}


def test_at_least_eight_shapes_are_tried():
    names = [shape.name for shape in _shapes("reasoning_content")]
    assert len(set(names)) == len(names) >= 8


@pytest.mark.parametrize(
    ("source", "eos"),
    [
        (CHATML, "<|im_end|>"),
        (TOOL_CHATML, "<|im_end|>"),
        (HEADER_ENDS, "</s>"),
        (TOOL_CHATML, "</tool_call>"),
        (CHATML.replace("<|im_end|>", ""), "<|im_end|>"),
    ],
    ids=["plain", "tools", "header ends", "stops behind each call", "no end"],
)
def test_turns_of_sound_templates_are_reproduced(source, eos):
    chat = ChatTemplate(byte_tokenizer(source, eos=eos))
    assert turn_problems(chat, "reasoning_content") == {}


FRAME = (
    "{%% for m in messages %%}{{ '<|im_start|>' + m.role }}%s{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant' }}{%% endif %%}"
)
CALLS = "{{ '<tool_call>' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments|tojson }}"
SAME_END = (
    FRAME % "{{ (m.reasoning_content + '<|im_end|>' if m.reasoning_content else '') + m.content + '<|im_end|>' }}"
)
CALL_BEHIND = FRAME % ("{{ m.content + '<|im_end|>' }}{% if m.tool_calls %}" + CALLS + "{{ '<|im_end|>' }}{% endif %}")
ROUNDS = FRAME % "{{ (loop.index|string if m.role == 'user' else '') + m.content + '<|im_end|>' }}"


@pytest.mark.cap("P18")
@pytest.mark.parametrize(
    ("source", "needs", "said"),
    [
        (SAME_END, {}, ["answer: an answer with reasoning: the engine stops at '<|im_end|>' (id ", "token 12 of the"]),
        (CALL_BEHIND, {"tools": True}, ["call: a call: the engine stops at '<|im_end|>' (id ", "token 0 of the turn"]),
        (ROUNDS, {"interaction": True}, ["user_turn: an answer after a user turn", "records [", "and the template w"]),
    ],
    ids=["one end for all", "call behind the end", "numbered rounds"],
)
def test_a_turn_that_is_not_reproduced_is_refused_where_a_run_needs_it(source, needs, said):
    schemas = "{% if tools %}{{ tools|tojson }}{% endif %}"
    chat = ChatTemplate(byte_tokenizer(schemas + source, eos="<|im_end|>"))
    if needs:
        chat.require(tools=False, interaction=False)
    with pytest.raises(TemplateError) as caught:
        chat.require(**{"tools": False, "interaction": False, **needs})
    assert caught.value.cause == "P26"
    for text in said:
        assert text in str(caught.value)


@pytest.mark.slow  # published templates
def test_of_the_published_templates_only_one_does_not_reproduce_its_turns(shared_data):
    """GigaChat3 writes a call behind the token that ends an answer."""
    found = {}
    for file in template_files(shared_data):
        try:
            problems = generic_template(file).capabilities.problems
        except TemplateError:
            continue  # it renders no user message
        found[file.stem] = [shape for shape, problem in problems.items() if problem.cause == "P26"]
    assert {name: shapes for name, shapes in found.items() if shapes} == {"GigaChat3-10B-A1.8B": ["call"]}
