"""What a turn that repeats the marks of its grammar costs, and what becomes of its calls."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from counted_work import parser_work

from verl_mt.chat.parsers import ToolParser, get_parser, tool_parsers
from verl_mt.chat.parsers.base import IndexedText
from verl_mt.chat.parsers.json_calls import BadJSON, decode_json
from verl_mt.extensions.rare_parsers import bare_json

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "parser_cost.py"
_SPEC = importlib.util.spec_from_file_location("parser_cost", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
cost: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cost)

KNOWN_TO_BE_SLOW = {
    "llama3_json": ["[\n", '{"a":\n', "[1,\n"],
    "react": ["\nAction:", "Action: f\nAction Input: ```\n"],
}


def turn_of(parser: str, text: str, length: int) -> str:
    return text * (length // len(text)) + ("\nFinal Answer: x" if parser == "react" else "")


@pytest.mark.slow  # long texts
@pytest.mark.parametrize("parser", sorted(tool_parsers))
def test_a_turn_of_many_marks_is_read_in_the_time_of_its_length(parser, monkeypatch):
    """Four times the characters cost about four times as much; sixteen times, where the reading is quadratic."""
    work, read = parser_work(monkeypatch), get_parser(parser).parse
    for text in KNOWN_TO_BE_SLOW.get(parser, []) + cost.repeated_texts(parser):
        short, long = (work.of(read, turn_of(parser, text, length), cost.TOOLS) for length in (500, 2_000))
        assert long < 6 * short, text


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


def test_a_pattern_is_searched_once_up_to_the_place_that_it_found_or_never_again():
    asked: list[int] = []

    class Pattern:
        def search(self, text, start):
            asked.append(start)
            return re.compile("c").search(text, start)

    text, pattern = IndexedText("ab" * 50 + "c" + "d" * 50), Pattern()
    assert [text.first_match(pattern, start).start() for start in (0, 50, 100)] == [100] * 3 and asked == [0]
    assert [text.first_match(pattern, start) for start in (101, 102, 150)] == [None] * 3 and asked == [0, 101]


def test_nested_llama_values_that_break_at_one_place_are_read_once(monkeypatch):
    read: list[int] = []

    def noted(text: str, start: int) -> tuple[Any, int]:
        read.append(start)
        return decode_json(text, start)

    monkeypatch.setattr(bare_json, "decode_json", noted)
    parser = get_parser("llama3_json")
    line = '{"a":\n'
    assert parser.parse(line * 50).content == line * 50 and read == [0]
    text = IndexedText(line * 2 + "x")
    assert parser.find_calls(text, 0, ()) is None
    assert text.unreadable == dict.fromkeys((0, len(line)), ("Expecting value", 2 * len(line)))
    read.clear()
    assert parser.find_calls(text, 0, ()) is None and read == []


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
