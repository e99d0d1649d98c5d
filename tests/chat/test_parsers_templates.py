"""parse(render(x)) == x, where published chat templates do the rendering and tokenizers the spelling."""

from __future__ import annotations

import functools
import json
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from conformance_table import OWN_VOCABULARY, generic_template
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tables import one_of_each
from transformers import AutoTokenizer

from verl_mt.chat import ChatTemplate
from verl_mt.chat.parsers import get_parser
from verl_mt.data.conversation import ParsedTurn, ToolCall

pytestmark = pytest.mark.slow  # published templates, commands, many configurations

PROPERTIES: dict[str, Any] = {
    "q": {"type": "string", "description": "What to look for."},
    "n": {"type": "integer", "description": "How many."},
    "x": {"type": "number", "description": "How far."},
    "b": {"type": "boolean", "description": "Whether."},
    "o": {"type": "object", "description": "Options.", "properties": {}},
    "items": {"type": "array", "description": "Several.", "items": {"type": "string"}},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "Perhaps."},
}
LOOKUP = {
    "name": "lookup",
    "description": "Looks a thing up.",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOLS = [{"type": "function", "function": LOOKUP}]
USER = {"role": "user", "content": "Please look it up."}

TAGS = (
    "</tool_call>", "<tool_call>", "</parameter>", "<parameter=q>", "</function>", "</arg_value>", "<arg_key>", "```",
    "<think>", "</think>", "[ARGS]", "[TOOL_CALLS]", "</｜DSML｜parameter>", '"}', "\n", "é漢🙂", "\\n", "&<'", "{{",
)  # fmt: skip
# Some tokenizers write NFC whatever they are given; a model cannot sample anything else there.
_strings = (
    st.lists(st.one_of(st.text(max_size=8), st.sampled_from(TAGS)), max_size=3)
    .map("".join)
    .map(lambda text: unicodedata.normalize("NFC", text))
)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), _strings),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_strings, inner, max_size=2)),
    max_leaves=4,
)
_typed = st.fixed_dictionaries(
    {},
    optional={
        "q": _strings,
        "n": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "o": st.dictionaries(_strings, _values, max_size=2),
        "items": st.lists(_values, max_size=2),
        "maybe": st.none() | st.integers(),
    },
)
_texts = st.sampled_from(["", "Let me look.", "a\n\nb", "Über 漢 <b>x</b>"])
_thoughts = st.sampled_from(
    ["I need it.", 'Or <tool_call>{"name": "lookup", "arguments": {}}</tool_call>?', "<tool_call>\n<function=lookup>"]
)


@dataclass(frozen=True)
class Grammar:
    """What `parser` reads and `template` writes."""

    parser: str
    template: str
    free_keys: bool = True
    """Arguments may have any name: they are written as JSON."""
    reasons: bool = False
    """The template shows `reasoning_content`."""
    as_python: bool = False
    """Lists (or objects too) are written as Python writes them: their strings end as early as plain ones."""


GRAMMARS = (
    Grammar("hermes", "Qwen-Qwen2.5-7B-Instruct"),
    Grammar("qwen", "Qwen-Qwen3-0.6B", reasons=True),
    Grammar("hermes", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    Grammar("llama3_json", "meta-llama-Llama-3.1-8B-Instruct"),
    Grammar("llama3", "meta-llama-Llama-3.2-3B-Instruct"),
    Grammar("qwen3_coder", "Qwen3-Coder", free_keys=False),
    Grammar("qwen3-coder", "Qwen-Qwen3-Coder-30B-A3B-Instruct", free_keys=False, as_python=True),
    Grammar("qwen3_coder", "Qwen3.5-4B", free_keys=False, reasons=True),
    Grammar("qwen3_coder", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", free_keys=False, reasons=True),
    Grammar("qwen3_coder", "stepfun-ai-Step-3.5-Flash", free_keys=False, reasons=True),
    Grammar("seed_oss", "ByteDance-Seed-OSS", free_keys=False, as_python=True),
    Grammar("mistral", "mistral-common-v3_spm"),
    Grammar("mistral", "mistral-common-v7_spm"),
    Grammar("mistral", "mistralai-Mistral-Nemo-Instruct-2407"),
    Grammar("mistral", "mistral-common-v13"),
    Grammar("mistral", "Mistral-Small-3.2-24B-Instruct-2506"),
    Grammar("mistral", "mistralai-Ministral-3-14B-Reasoning-2512"),
    Grammar("deepseekv31", "deepseek-ai-DeepSeek-V3.1"),
    Grammar("deepseekv32", "deepseek-ai-DeepSeek-V3.2", free_keys=False),
    Grammar("deepseekv4", "deepseek-ai-DeepSeek-V4", free_keys=False),
    Grammar("kimi_k2", "moonshotai-Kimi-K2"),
    Grammar("glm45", "GLM-4.6", free_keys=False, reasons=True),
    Grammar("glm47", "GLM-4.7-Flash", free_keys=False, reasons=True),
    Grammar("glm45", "GLM-5.2", free_keys=False, reasons=True),
    Grammar("gpt-oss", "openai-gpt-oss-120b"),
)
VOCABULARIES = {**OWN_VOCABULARY, "Qwen3-Coder": "qwen3", "Qwen3.5-4B": "qwen3"}


@functools.cache
def chat_of(data: Path, template: str, vocabulary: str | None = None) -> ChatTemplate:
    file = data / "templates" / f"{template}.jinja"
    if vocabulary is None:
        return generic_template(file)
    return ChatTemplate(AutoTokenizer.from_pretrained(data / "tokenizers" / vocabulary), chat_template=file.read_text())


def sampled_text(chat: ChatTemplate, message: dict[str, Any]) -> str:
    """What a model samples for this turn: the template's text behind the generation prompt, through ids and back."""
    prompt = chat.full_text([USER], TOOLS, add_generation_prompt=True)
    full = chat.full_text([USER, message], TOOLS)
    # GLM and DeepSeek write another opening around an empty thought than the generation prompt has.
    for opening in ("", "<think>", "<think>\n", "<think></think>", "\n"):
        before = prompt.removesuffix(opening)
        if full.startswith(before):
            break
    assert full.startswith(before), (prompt[-60:], full[len(prompt) - 60 :])
    ids = chat.encode_text(full[len(before) :], neutral=False)
    ends = [i for i, token in enumerate(ids) if token in chat.end_token_ids]
    return chat.turn_text(ids[: ends[-1] + 1] if ends else ids)


def assistant(content: str, calls: list[ToolCall], reasoning: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{**call.to_message(), "id": f"abcdefgh{i}"} for i, call in enumerate(calls)]
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def without_ids(turn: ParsedTurn) -> list[tuple[str, dict[str, Any]]]:
    assert turn.malformed == []
    return [(call.name, call.arguments) for call in turn.calls]


def calls_for(grammar: Grammar, most: int) -> st.SearchStrategy[list[ToolCall]]:
    arguments = st.dictionaries(_strings, _values, max_size=3) | _typed if grammar.free_keys else _typed
    return st.lists(st.builds(ToolCall, st.just("lookup"), arguments), max_size=most)


def ambiguous(chat: ChatTemplate, grammar: Grammar, calls: list[ToolCall]) -> bool:
    """Whether a value cannot be told from the grammar around it, by anybody."""
    strings = [value for call in calls for value in strings_in(call.arguments)]
    control = [chat.decode([token]) for token in chat.end_token_ids]
    if any(literal in s for s in strings for literal in control):
        return True  # whoever samples it ends the turn
    if grammar.free_keys:
        return False
    whole = (
        "</parameter>\n<parameter=",
        "</parameter><parameter=",
        "</parameter>\n</function>",
        "</parameter></function>",
    )
    texts = (
        strings if grammar.as_python else [s for call in calls for s in call.arguments.values() if isinstance(s, str)]
    )
    whole = (*whole, "</arg_value><arg_key>", "</arg_value></tool_call>", "</arg_value>\n</tool_call>")
    followed = any(part in s.replace(" ", "") for s in texts for part in whole)
    # A value that begins the way that the grammar goes on, after the tag that ends it.
    after = any(s.rstrip().endswith(("</arg_value>", "</parameter>", "</｜DSML｜parameter>")) for s in texts)
    # The opening of an argument ends a value; where that is in doubt the call is malformed.
    opened = any(part in s for s in texts for part in ("<parameter=", "<arg_key>"))
    return followed or after or opened or "null" in texts


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for pair in value.items() for one in pair for s in strings_in(one)]
    return [s for one in value for s in strings_in(one)] if isinstance(value, list) else []


def check_round_trip(chat: ChatTemplate, grammar: Grammar, data: st.DataObject) -> None:
    can = chat.capabilities
    calls = data.draw(calls_for(grammar, 3 if can.parallel_calls else 1))
    content = data.draw(_texts if can.supports("text_with_call") or not calls else st.just(""))
    if grammar.parser == "gpt-oss" and calls:
        content = ""  # its template takes the text beside a call for the thought
    assume(not ambiguous(chat, grammar, calls) and (calls or content))
    reasoning = data.draw(_thoughts) if grammar.reasons else None
    text = sampled_text(chat, assistant(content, calls, reasoning))
    begun = chat.prefilled_reasoning and not text.lstrip().startswith(("<think>", "</think>"))
    turn = get_parser(grammar.parser).parse(text, TOOLS, in_reasoning=begun)
    assert without_ids(turn) == [(call.name, call.arguments) for call in calls]
    # Before the text a template may write a space, behind text alone a line end; nothing between text and call is lost.
    assert (turn.content if calls else turn.content.rstrip()).lstrip() == content
    assert (turn.reasoning or "").strip() == (reasoning or "").strip()
    if calls:
        again = [replace(call, id="") for call in turn.calls]
        assert (
            sampled_text(chat, assistant(turn.content.lstrip(), again, turn.reasoning if grammar.reasons else None))
            == text
        )


QUICK = list({type(get_parser(grammar.parser)): grammar for grammar in GRAMMARS}.values())
"""One template of every grammar."""


@pytest.mark.parametrize("grammar", QUICK, ids=lambda g: g.template)
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_turns_come_back_as_they_were(shared_data, grammar, data):
    check_round_trip(chat_of(shared_data, grammar.template), grammar, data)


@pytest.mark.slow
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.template)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_turns_of_every_template_come_back_as_they_were(shared_data, grammar, data):
    check_round_trip(chat_of(shared_data, grammar.template), grammar, data)


@pytest.mark.release
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.template)
@given(data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_turns_come_back_as_they_were(shared_data, grammar, data):
    check_round_trip(chat_of(shared_data, grammar.template), grammar, data)


WITH_VOCABULARY = [grammar for grammar in GRAMMARS if grammar.template in VOCABULARIES]


def kind_of_grammar(grammar: Grammar) -> tuple[str, bool]:
    """Qwen's, Llama's and DeepSeek's vocabularies are byte-level BPE."""
    return grammar.parser, VOCABULARIES[grammar.template] in ("mistral-7b-v3", "phi-3-mini")


@pytest.mark.slow
@pytest.mark.parametrize("grammar", one_of_each(WITH_VOCABULARY, kind_of_grammar), ids=lambda g: g.template)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_turns_come_back_through_the_ids_of_real_vocabularies(shared_data, grammar, data):
    check_round_trip(chat_of(shared_data, grammar.template, VOCABULARIES[grammar.template]), grammar, data)


# ---------------------------------------------------------------- templates that the sandbox or null content rule out


def written_by_jinja(file: Path, message: dict[str, Any]) -> str:
    """The template's own text in Jinja without the sandbox; these templates need a null content, or change a list."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(file.read_text())
    prompt = template.render(messages=[USER], add_generation_prompt=True, bos_token="")
    full = template.render(messages=[USER, message], add_generation_prompt=False, bos_token="")
    before = prompt.removesuffix("<think>\n")
    assert full.startswith(before)
    return full[len(before) :]


@given(
    calls=st.lists(st.builds(ToolCall, st.just("lookup"), st.dictionaries(_strings, _values, max_size=3)), min_size=1)
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("template", ["deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "llama-cpp-deepseek-r1"])
def test_r1_calls_come_back_as_they_were(shared_data, template, calls):
    if template.startswith("deepseek"):
        calls = calls[:2]  # it ends the turn after every call but the first
    message = assistant("", calls) | {"content": None}
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    turn = get_parser("deepseek_r1").parse(written_by_jinja(shared_data / "templates" / f"{template}.jinja", message))
    assert without_ids(turn) == [(call.name, call.arguments) for call in calls] and turn.content == ""


@given(
    calls=st.lists(st.builds(ToolCall, st.just("lookup"), st.dictionaries(_strings, _values, max_size=3)), max_size=3),
    content=_texts,
    reasoning=_thoughts,
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_kimi_thinking_calls_come_back_with_the_ids_that_the_template_gives_them(
    shared_data, calls, content, reasoning
):
    assume(calls)  # a turn without calls is the last of the history there, and history has no thoughts
    text = written_by_jinja(shared_data / "templates" / "Kimi-K2-Thinking.jinja", assistant(content, calls, reasoning))
    turn = get_parser("kimi_k2").parse(text)
    assert without_ids(turn) == [(call.name, call.arguments) for call in calls]
    assert [call.id for call in turn.calls] == [f"functions.lookup:{i}" for i in range(len(calls))]
    assert (turn.content, turn.reasoning) == (content, reasoning)
