"""Which parser reads the calls of which template, and what a run says where the configured one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance_table import generic_template, template_files
from toys import CHATML, toy_tokenizer

from verl_mt.chat import ChatTemplate, parser_fit
from verl_mt.chat.parser_fit import WrittenCall, require_parser, suggest_parser, written_call
from verl_mt.chat.parsers import HermesParser, get_parser
from verl_mt.data.conversation import Message
from verl_mt.errors import TemplateError

SUGGESTED = {
    "hermes": "Bielik MiMo-VL NousResearch Qwen-Qwen2.5 Qwen-Qwen3-0.6B Qwen-QwQ Qwen2.5-Instruct Qwen3-ort Reka",
    "qwen3_coder": "NVIDIA Qwen-Qwen3-Coder Qwen3-Coder Qwen3.5 stepfun StepFun3.5",
    "seed_oss": "ByteDance-Seed",
    "llama3_json": "meta-llama",
    "mistral": "mistral-common Mistral-Small mistralai unsloth-mistral",
    "deepseek_v3": "deepseek-ai-DeepSeek-V3.1",
    "deepseek_v32": "deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4",
    "kimi_k2": "moonshotai-Kimi-K2",
    "glm45": "GLM",
    "gpt_oss": "openai-gpt-oss gpt-oss-ort",
}
"""Beginnings of the names of templates; every other one writes no calls, or in a grammar of its own."""
APERTUS_LIKE = (
    CHATML.replace("<tool_call>", "<|calls|>").replace("</tool_call>", "<|done|>").replace('"name"', '"tool"')
)
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},
}


def expected(stem: str) -> str | None:
    found = [(len(part), name) for name, parts in SUGGESTED.items() for part in parts.split() if stem.startswith(part)]
    return max(found)[1] if found else None


def template(data: Path, stem: str) -> ChatTemplate:
    return generic_template(data / "templates" / f"{stem}.jinja")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stem", ["Qwen-QwQ-32B", "Qwen3.5-4B", "GLM-4.7-Flash", "deepseek-ai-DeepSeek-V3.2", "openai-gpt-oss-120b"]
)
def test_the_parser_that_fits_a_published_template_is_found(shared_data, stem):
    chat = template(shared_data, stem)
    assert suggest_parser(chat) == expected(stem)
    assert require_parser(chat, expected(stem), get_parser(expected(stem))) is None


@pytest.mark.slow
def test_every_published_template_gets_the_parser_of_its_grammar(shared_data):
    found = {}
    for file in template_files(shared_data):
        try:
            found[file.stem] = suggest_parser(generic_template(file))
        except TemplateError:
            found[file.stem] = None
    assert found == {stem: expected(stem) for stem in found}


@pytest.mark.slow
def test_a_parser_that_cannot_read_the_templates_calls_is_refused_by_the_name_of_the_one_that_can(shared_data):
    chat = template(shared_data, "Qwen3-Coder")
    with pytest.raises(
        TemplateError, match=r"tool_parser=hermes cannot read .*<function=.*set .*tool_parser=qwen3_coder"
    ):
        require_parser(chat, "hermes", get_parser("hermes"))
    with pytest.raises(TemplateError, match=r"tool_parser=qwen25 .*verl_mt\.chat\.parsers\.HermesParser"):
        require_parser(chat, "qwen25", get_parser("qwen25"))


def test_a_parser_of_ones_own_and_a_grammar_that_no_template_writes_are_not_refused(shared_data):
    chat = template(shared_data, "Qwen3-Coder")
    note = require_parser(chat, "my_package.MyParser", HermesParser())
    assert note is not None and "qwen3_coder can" in note
    for name in ("react", "search_r1"):
        assert require_parser(chat, name, get_parser(name)) is None


def test_where_no_parser_reads_the_calls_there_is_a_note_and_where_none_are_written_nothing_is_said(shared_data):
    unknown = ChatTemplate(toy_tokenizer(APERTUS_LIKE))
    assert suggest_parser(unknown) is None
    assert "No parser that comes with verl_mt can" in (require_parser(unknown, "hermes", get_parser("hermes")) or "")
    silent = template(shared_data, "HuggingFaceTB-SmolLM3-3B")
    assert written_call(silent) is None and require_parser(silent, "hermes", get_parser("hermes")) is None


def test_an_empty_call_of_the_grammar_in_the_wrong_tags_does_not_fit(shared_data):
    """Bare JSON is llama's grammar, but the tags of another one around it would stay in the text."""
    written = written_call(template(shared_data, "Qwen-Qwen2.5-7B-Instruct"))
    assert written is not None and not written.in_reasoning
    assert not written.read_by(get_parser("llama3_json")) and written.read_by(get_parser("qwen"))


@pytest.mark.parametrize(
    ("stem", "parser", "text", "shown"),
    [
        (
            "moonshotai-Kimi-K2",
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "## Return of functions.find:7",
        ),
        (
            "Mistral-Small-3.2-24B-Instruct-2506",
            "mistral",
            "[TOOL_CALLS]find[CALL_ID]abc123def[ARGS]{}",
            "[TOOL_RESULTS]abc123def[TOOL_CONTENT]",
        ),
    ],
)
def test_a_result_is_shown_under_the_id_that_the_model_gave_its_call(shared_data, stem, parser, text, shown):
    chat = template(shared_data, stem)
    turn = get_parser(parser).parse(text).with_ids("call_1_")
    (call,) = turn.calls
    asked: list[Message] = [{"role": "user", "content": "Find it."}]
    said: Message = {"role": "assistant", "content": turn.content, "tool_calls": [call.to_message()]}
    result: Message = {"role": "tool", "content": "Found.", "tool_call_id": call.id, "name": "find"}
    sampled = chat.encode_text(text, neutral=False)
    delta = chat.delta_ids([result], history=[*asked, said], tools=[TOOL], last_ids=sampled)
    assert shown in chat.decode(delta.ids)


def test_a_parser_is_named_by_the_package_or_by_its_own_module():
    assert parser_fit._path_of(HermesParser) == "verl_mt.chat.parsers.HermesParser"
    assert parser_fit._path_of(WrittenCall) == "verl_mt.chat.parser_fit.WrittenCall"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("{call}", True),
        ("\n{call} \n", True),
        ("x{call}", False),
        ("{call}{call}", False),
        ("{call}<tool_call>x</tool_call>", False),
        ("", False),
        ("<think>{call}</think>", False),
    ],
)
def test_a_written_call_is_read_where_it_is_the_only_one_and_nothing_is_left(text, read):
    body = json.dumps({"name": "zqxjkvlookup", "arguments": {"query": 'two\n"words"', "count": 3}})
    written = text.replace("{call}", f"<tool_call>{body}</tool_call>")
    assert WrittenCall(written, False).read_by(HermesParser()) is read
    assert not WrittenCall(written, True).read_by(HermesParser())
    assert WrittenCall(f"a</think>{written}", True).read_by(HermesParser()) is read
    other = written.replace("3}", "4}")
    assert other == written or not WrittenCall(other, False).read_by(HermesParser())


def test_the_text_of_a_model_ends_before_the_last_end_of_turn():
    chat = ChatTemplate(toy_tokenizer(CHATML))
    end = chat.decode([min(chat.stop_token_ids)])
    for text, kept in ((f"a {end}\n", "a"), (f"a{end}b{end}", f"a{end}b"), ("a \n", "a"), ("", ""), (end, "")):
        assert parser_fit._model_text(chat, text) == kept
