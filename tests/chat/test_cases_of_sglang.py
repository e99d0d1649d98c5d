"""SGLang's own cases for its parsers, read from its test files, run through ours: text in, calls and thoughts out.

Its test classes run as they are; stand-ins take the place of the modules that they import. Cases that read a stream
piece by piece, or make a grammar for constrained decoding, are left out: a turn is parsed here when it is complete.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import sys
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from reference_data import SHARED_DATA

from verl_mt.chat.parsers import get_parser

FOLDER = SHARED_DATA.parent / "peers" / "sglang" / "2026-08"
PARSERS = {
    "DeepSeekV3Detector": "deepseekv3",
    "DeepSeekV32Detector": "deepseekv32",
    "DeepSeekV4Detector": "deepseekv4",
    "Glm4MoeDetector": "glm45",
    "Glm47MoeDetector": "glm47",
    "GptOssDetector": "gpt-oss",
    "KimiK2Detector": "kimi_k2",
    "Llama32Detector": "llama3",
    "MistralDetector": "mistral",
    "Qwen25Detector": "qwen25",
    "Qwen3CoderDetector": "qwen3_coder",
}
"""Their detectors of tool calls, and the name of ours; other grammars have no parser here."""
THINKERS = {
    "BaseReasoningFormatDetector": ("hermes", False),
    "DeepSeekR1Detector": ("deepseek_r1", True),
    "Glm45Detector": ("glm45", False),
    "KimiK2Detector": ("kimi_k2", False),
    "Nemotron3Detector": ("qwen3_coder", False),
    "Qwen3Detector": ("qwen3", False),
}
"""Their detectors of reasoning, the name of the parser that does it here, and whether a turn begins in a thought."""
_UNKNOWN_TOOL = (
    "they drop a call of a tool that does not exist; here the model is told, and it counts as the model's failure"
)
_QUOTES = "GLM's template writes strings without quotes, so quotes are a part of the string; they take them off"
_NO_CALL = "what stands behind the tag is no call: only a call that can be run ends a thought here"
_BACKSLASH_N = "they take a backslash and an n between two tags for a line end; here such a call is malformed"
DIFFERENCES = {
    "TestGlm4MoeDetector.test_invalid_tool_call": _UNKNOWN_TOOL,
    "TestGlm47MoeDetector.test_invalid_tool_call": _UNKNOWN_TOOL,
    "TestGlm4MoeDetector.test_quoted_string_invalid_python_escape_no_warning": _QUOTES,
    "TestGlm47MoeDetector.test_quoted_string_invalid_python_escape_no_warning": _QUOTES,
    "TestGlm4MoeDetector.test_array_argument_with_escaped_json": _BACKSLASH_N,
    "TestGlm45Detector.test_detect_and_parse_multiple_tool_calls_find": _NO_CALL,
    "TestGlm45Detector.test_forced_reasoning_mode": _NO_CALL,
}
"""Cases that are read otherwise here, and why."""


class _Anything:
    """A stand-in for what no case of ours needs; using it skips the case."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        raise unittest.SkipTest(f"{type(self).__name__}.{name} has no counterpart here")


@dataclass
class _Record:
    """Their data classes: whatever keys they are given."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def as_schema(self) -> dict[str, Any]:
        return {"type": "function", "function": dict(self.__dict__["function"].__dict__)}


@dataclass
class _Result:
    normal_text: str = ""
    calls: list[Any] = field(default_factory=list)
    reasoning_text: str = ""


def _reads_calls(name: str) -> type:
    def detect_and_parse(self: Any, text: str, tools: list[Any]) -> _Result:
        turn = get_parser(PARSERS[name]).parse(text, [tool.as_schema() for tool in tools])
        calls = [_Record(name=c.name, parameters=json.dumps(c.arguments, ensure_ascii=False)) for c in turn.calls]
        return _Result(turn.content.strip() if calls else turn.content, calls)

    return type(name, (_Anything,), {"detect_and_parse": detect_and_parse})


def _reads_thoughts(name: str) -> type:
    parser, begun = THINKERS[name]

    def init(self: Any, *tags: str, force_reasoning: bool = begun, **others: Any) -> None:
        self.begun = force_reasoning
        if any(others.get(key) for key in ("continue_final_message", "force_nonempty_content")):
            raise unittest.SkipTest("an option of the server's answer")

    def detect_and_parse(self: Any, text: str) -> _Result:
        """The reasoning, and all that is not reasoning: the text behind it with its calls."""
        reader = get_parser(parser)
        turn = reader.parse(text.removeprefix("<think>") if self.begun else text, in_reasoning=self.begun)
        rest = text[text.find(turn.reasoning) + len(turn.reasoning) :] if turn.reasoning else text
        return _Result(rest.removeprefix("</think>"), reasoning_text=turn.reasoning or "")

    return type(name, (_Anything,), {"__init__": init, "detect_and_parse": detect_and_parse})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Whatever is imported from SGLang, or from the grammar compiler that its cases use."""

    def __init__(self, reasoning: bool):
        made = {name: _reads_thoughts(name) for name in THINKERS} if reasoning else {}
        made = made or {name: _reads_calls(name) for name in PARSERS}
        self.made: dict[str, Any] = made | {"CustomTestCase": unittest.TestCase, "StreamingParseResult": _Result}
        self.made |= dict.fromkeys(("Tool", "Function"), _Record) | dict.fromkeys(
            ("get_tokenizer", "register_cpu_ci"), lambda *args, **kwargs: None
        )

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("sglang", "xgrammar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        def stand_in(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self.made.get(name) or type(name, (_Anything,), {})

        module.__getattr__ = stand_in  # type: ignore[method-assign]


def _cases(file: str) -> Iterator[tuple[str, str]]:
    """Class and method of every case that parses a complete text."""
    if not (FOLDER / file).is_file():
        return
    for group in ast.parse((FOLDER / file).read_text(encoding="utf-8")).body:
        for method in group.body if isinstance(group, ast.ClassDef) else ():
            used = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
            if isinstance(method, ast.FunctionDef) and method.name.startswith("test_") and "detect_and_parse" in used:
                yield group.name, method.name  # type: ignore[union-attr]


def _run(file: str, group: str, name: str) -> unittest.TestResult:
    finder = _StandIns(reasoning="reasoning" in file)
    ours = {key: module for key, module in sys.modules.items() if key.partition(".")[0] not in ("sglang", "xgrammar")}
    with mock.patch.dict(sys.modules, ours, clear=True), mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]):
        space: dict[str, Any] = {"__name__": "cases_of_sglang"}
        exec(compile((FOLDER / file).read_text(encoding="utf-8"), file, "exec"), space)
        result = unittest.TestResult()
        space[group](name).run(result)
    return result


CALLS = list(_cases("test_function_call_parser.py"))
THOUGHTS = list(_cases("test_reasoning_parser.py"))
ABSENT = "SGLang's parser tests are not here"


@pytest.mark.slow  # each compiles the whole file again
@pytest.mark.skipif(not CALLS, reason=ABSENT)
@pytest.mark.parametrize(
    ("file", "group", "name"),
    [("test_function_call_parser.py", *case) for case in CALLS]
    + [("test_reasoning_parser.py", *case) for case in THOUGHTS],
    ids=lambda text: text.removeprefix("test_"),
)
def test_a_case_of_sglang_is_read_the_same_here(file, group, name):
    result = _run(file, group, name)
    problems = [text for _, text in (*result.failures, *result.errors)]
    if result.skipped:
        pytest.skip(result.skipped[0][1])
    reason = DIFFERENCES.get(f"{group}.{name}")
    if reason is not None:
        assert problems, f"it is read the same by now; take it from the list of differences ({reason})"
    else:
        assert not problems, "\n".join(problems)


@pytest.mark.skipif(not CALLS, reason=ABSENT)
def test_every_listed_difference_is_one_of_their_cases():
    assert set(DIFFERENCES) <= {f"{group}.{name}" for group, name in (*CALLS, *THOUGHTS)}
