"""What a turn that repeats the marks of its grammar costs, and what becomes of its calls."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from verl_mt.chat.parsers import ToolParser, get_parser, tool_parsers
from verl_mt.chat.parsers.base import IndexedText
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json

pytestmark = pytest.mark.slow  # long texts

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "parser_cost.py"
_SPEC = importlib.util.spec_from_file_location("parser_cost", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
cost: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cost)

KNOWN_TO_BE_SLOW = {
    "llama3_json": ["[\n", '{"a":\n', "[1,\n"],
    "react": ["\nAction:", "Action: f\nAction Input: ```\n"],
}


def assert_linear(parser: str, text: str, length: int) -> None:
    """Four times the characters cost about four times the time; sixteen times, where the reading is quadratic.

    What is read in a tenth of a second is not measured again: looking at every mark from every other one, even at the
    speed of `str.find`, takes several times that."""
    if cost.cpu_seconds(parser, text, length) > 0.1:
        pairs = ([cost.cpu_seconds(parser, text, n) for n in (length, length // 4)] for _ in range(8))
        assert any(long < 9 * short for long, short in pairs), text


@pytest.mark.parametrize("parser", sorted(tool_parsers))
def test_a_turn_of_many_marks_is_read_in_the_time_of_its_length(parser):
    for text in KNOWN_TO_BE_SLOW.get(parser, []) + cost.repeated_texts(parser):
        assert_linear(parser, text, 100_000)


@pytest.mark.parametrize("parser", sorted(set(tool_parsers) - {"react", "search_r1"}))
def test_a_turn_holds_so_many_calls_and_the_model_is_told(parser):
    most = ToolParser.max_calls
    separator = ";" if parser == "llama3_json" else "\n"
    for many in (most, most + 1, 5 * most):
        turn = get_parser(parser).parse(separator.join([cost.CALLS[parser]] * many), cost.TOOLS)
        assert len(turn.calls) == most and turn.malformed[1:] == []
        if many > most:
            (told,) = turn.malformed
            assert f"{most} calls" in told.error and told.text in turn.content and turn.actions[-1] is told


def test_a_list_of_too_many_calls_is_cut_too():
    items = json.dumps([{"name": "f", "arguments": {"n": n}} for n in range(1000)])
    for parser, text in (("mistral", f"[TOOL_CALLS]{items}"), ("llama3_json", items)):
        turn = get_parser(parser).parse(text, cost.TOOLS)
        assert [call.arguments["n"] for call in turn.calls] == list(range(ToolParser.max_calls))
        assert len(turn.malformed) == 1 and turn.content == text


class Counting(ToolParser):
    """Every `!` is a call that cannot be read; counts how often it is asked."""

    asked = 0

    def find_calls(self, text, start, tools):
        self.asked += 1
        place = text.find("!", start)
        return None if place < 0 else get_parser("hermes").find_calls(f"{text[:place]}<tool_call>", place, tools)


def test_a_parser_of_ones_own_is_asked_no_more_often_than_a_turn_may_hold_calls():
    parser = Counting()
    turn = parser.parse("!" * 10_000)
    assert parser.asked <= parser.max_calls + 1 and len(turn.actions) == parser.max_calls + 1


def test_a_string_is_looked_for_once_however_often_it_is_asked_for(monkeypatch):
    text = IndexedText("ab" * 50 + "c")
    assert [text.find("b", start) for start in (0, 2, 99, 100)] == [1, 3, 99, -1]
    assert text.find("b", 0, 1) == -1 and text.find("b", 0, 2) == 1 and text.find("abab", 1) == 2
    places = text._places["b"]
    text.find("b", 7)
    assert text._places["b"] is places


@pytest.mark.parametrize("padding", [0, 200, 250, 256, 1000, 5000])
def test_json_is_read_the_same_whatever_its_length(padding):
    """The decoder sees a window of the text first; what a window cuts is no error of the text."""
    filler = "x" * padding
    for value in (
        {"a": filler, "b": [1.5, -2e-7, True, None]},
        [filler, "é🙂", {}],
        filler,
        {filler: 123456789},
    ):
        written = json.dumps(value)
        assert decode_json(f"..{written} and more {written}", 2) == (value, 2 + len(written))
    for number in ("1" * 300, "12345.5e3", "true"):
        assert decode_json(f"{number} x", 0) == (json.loads(number), len(number))
    with pytest.raises(BadJSON, match=f"at character {padding + 9}$"):
        decode_json(f'..{{"a":"{filler}" x}}', 2)
