"""The same texts, read by SGLang's own parsers: a model that is trained with ours is served with theirs.

Cases that theirs read otherwise (a closing tag inside a string) are left out.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_parser_grammars import ONE, SCHEMA, V3, coder

from verl_mt.chat.parsers import get_parser

TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": SCHEMA}}]
TYPED = coder(i="3", s="3", b="true", n="2.5", l='["é", {"a": [1]}]', o='{"a": "b"}')
PAIRS = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    for key, value in (("i", "3"), ("s", "3"), ("b", "true"), ("l", '["é"]'), ("o", '{"a": 1}'))
)
FENCED = V3 % '{"i": 1, "s": "two\\nlines"}'
CASES = [
    ("qwen25", ONE["hermes"]),
    ("qwen25", f"{ONE['hermes']}\n{ONE['hermes']}"),
    ("llama3", ONE["llama3_json"]),
    ("qwen3_coder", ONE["qwen3_coder"]),
    ("qwen3_coder", TYPED),
    ("qwen3_coder", f"{TYPED}\n{ONE['qwen3_coder']}"),
    ("step3p5", ONE["qwen3_coder"]),
    ("mistral", ONE["mistral"]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"i": 1}, "id": "abc123def"}]'),
    ("deepseekv3", f"<｜tool▁calls▁begin｜>{FENCED}\n{FENCED}<｜tool▁calls▁end｜>"),
    ("deepseekv31", ONE["deepseek_v3"]),
    ("deepseekv32", ONE["deepseek_v32"]),
    ("deepseekv4", ONE["deepseek_v32"].replace("function_calls", "tool_calls")),
    ("kimi_k2", ONE["kimi_k2"]),
    ("glm45", ONE["glm45"]),
    ("glm45", f"<tool_call>f\n{PAIRS}</tool_call>"),
    ("glm47", f"<tool_call>f{PAIRS}</tool_call>".replace("\n", "")),
    ("gpt-oss", ONE["gpt_oss"]),
]


@pytest.mark.sglang
@pytest.mark.parametrize(("name", "text"), CASES)
def test_sglangs_parser_of_that_name_reads_the_same_calls(name, text):
    parsing = pytest.importorskip("sglang.srt.function_call.function_call_parser")
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    theirs = parsing.FunctionCallParser([protocol.Tool.model_validate(tool) for tool in TOOLS], name)
    _, calls = theirs.parse_non_stream(text)
    read: list[tuple[str, dict[str, Any]]] = [(call.name, json.loads(call.parameters)) for call in calls]
    ours = get_parser(name).parse(text, TOOLS)
    assert read and read == [(call.name, call.arguments) for call in ours.calls] and ours.malformed == []
