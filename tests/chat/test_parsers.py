"""Tool parsers: the reference rows, reasoning, malformed calls, and parse(render(x)) == x."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_mt.chat.parsers import HermesParser, SearchR1Parser, ToolParser, base, get_parser, json_calls, tool_parsers
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall
from verl_mt.errors import PluginError
from verl_mt.extensions.rare_parsers import bare_json

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
SEARCH_X = ToolCall("search", {"query": "x"})
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def hermes(text: str, **kwargs) -> ParsedTurn:
    return get_parser("hermes").parse(text, **kwargs)


# ---------------------------------------------------------------- hermes


def test_plain_answer_is_content_only():
    assert hermes("plain answer") == ParsedTurn("plain answer")


def test_text_before_a_call_is_content_without_end_marker_and_separator():
    turn = hermes(f"Let me search.\n{CALL}<|im_end|>")
    assert turn == ParsedTurn("Let me search.", actions=[SEARCH_X])


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "", "<|endoftext|>", "<|im_end|><|endoftext|>"])
def test_end_markers_are_stripped_from_the_end_only(ending):
    assert hermes(f"say <|im_end|> now{ending}").content == "say <|im_end|> now"


def test_two_calls_keep_their_order_and_leave_no_content():
    a, b = '{"name": "a", "arguments": {}}', '{"name": "b", "arguments": {"k": 1}}'
    text = f"<tool_call>{a}</tool_call>\n<tool_call>{b}</tool_call>"
    assert hermes(text) == ParsedTurn("", actions=[ToolCall("a", {}), ToolCall("b", {"k": 1})])


def test_text_between_and_after_calls_is_not_lost():
    turn = hermes(f"first\n{CALL}\nthen\n{CALL}\nlast")
    assert turn.calls == [SEARCH_X, SEARCH_X]
    assert [line for line in turn.content.splitlines() if line] == ["first", "then", "last"]


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        ('{"name": "search", "arguments": {"query": x}}', "search", "not valid JSON"),
        ('{"name": "search"}', "search", '"arguments" is missing'),
        ('{"name": "search", "arguments": [1]}', "search", "must be an object; it is a list"),
        ('{"name": "search", "arguments": 3}', "search", "must be an object; it is a number"),
        ('{"name": "search", "arguments": "[1]"}', "search", "must be an object; it is a list"),
        ('{"name": "search", "arguments": "{bad"}', "search", "string that is not valid JSON"),
        ('{"name": "search", "arguments": {"a": NaN}}', "search", "NaN is not a JSON value"),
        ('{"name": "search", "arguments": {"a": 1e999}}', "search", "too large"),
        ('{"name": "search", "arguments": {"a": "\\ud800"}}', "search", "surrogate"),
        ('{"name": "search", "arguments": {"a": ' + "9" * 5000 + "}}", "search", "not valid JSON"),
        ('{"arguments": {}}', None, '"name" must be the name of a tool'),
        ('{"name": 3, "arguments": {}}', None, "it is a number"),
        ('[{"name": "search", "arguments": {}}]', "search", "the call is a list"),
        (
            '{"name": "search", "arguments": {}}}',
            "search",
            "behind the JSON object it should be closed, but it says '}",
        ),
        ("[" * 100_000, None, "nested too deeply"),
        ("", None, "not valid JSON"),
    ],
)
def test_a_malformed_call_tells_the_model_what_is_wrong_and_keeps_its_raw_text(body, name, says):
    raw = f"<tool_call>\n{body}\n</tool_call>"
    turn = hermes(f"Now:\n{raw}<|im_end|>")
    assert turn.calls == []
    assert turn.content == f"Now:\n{raw}"
    (bad,) = turn.malformed
    assert bad.text == raw and bad.name == name and says in bad.error
    assert "<tool_call>" not in bad.error and len(bad.error) < 400


def test_an_unclosed_call_is_malformed_and_its_text_stays():
    for rest in ('\n{"name": "search", "arguments": {}}', '\n{"name": "search", "argu', ""):
        text = f"<tool_call>{rest}"
        turn = hermes(f"a {text}")
        assert turn.calls == [] and turn.content == f"a {text}"
        assert "not closed" in turn.malformed[0].error


def test_a_broken_call_does_not_hide_the_next_one():
    for broken in ("<tool_call>{bad}</tool_call>", "<tool_call>{bad", '<tool_call>{"name": "f", "arguments": {}}'):
        turn = hermes(f"{broken}\n{CALL}")
        assert turn.calls == [SEARCH_X]
        assert len(turn.malformed) == 1 and broken in turn.content


def test_calls_that_can_and_cannot_be_read_stay_in_the_order_written():
    turn = hermes(f"<tool_call>\n{{bad}}\n</tool_call>\n{CALL}\n<tool_call>\n[]\n</tool_call>\n{CALL}")
    assert [type(action) for action in turn.actions] == [MalformedCall, ToolCall, MalformedCall, ToolCall]
    assert turn.calls == [SEARCH_X, SEARCH_X]
    assert ["{bad}" in bad.text for bad in turn.malformed] == [True, False]
    one = '{"name": "search", "parameters": {"query": "x"}}'
    mixed = llama(f'[{{"name": "search", "parameters": 3}}, {one}]', TOOLS)
    assert [type(action) for action in mixed.actions] == [MalformedCall, ToolCall]
    named = turn.with_ids("call_7_")
    assert [getattr(action, "id", None) for action in named.actions] == [None, "call_7_1", None, "call_7_3"]
    assert (named.content, replace(turn.calls[0], id="mine")) == (turn.content, replace(SEARCH_X, id="mine"))


def test_arguments_given_as_a_json_string_are_decoded():
    assert hermes(r'<tool_call>{"name": "f", "arguments": "{\"k\": 1}"}</tool_call>').calls == [ToolCall("f", {"k": 1})]


@pytest.mark.parametrize("arguments", ["null", '""', '"null"', "{}", '"{}"', '" "'])
def test_null_arguments_are_no_arguments(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert hermes(text).calls == [ToolCall("f", {})]


def test_a_closing_tag_inside_a_string_argument_does_not_end_the_call():
    query = "how to parse </tool_call> and <tool_call> and <think>"
    text = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': {'q': query}})}\n</tool_call>"
    assert hermes(text) == ParsedTurn("", actions=[ToolCall("f", {"q": query})])


def test_every_parser_exists_under_its_names():
    assert isinstance(get_parser("qwen"), HermesParser)
    assert set(tool_parsers) >= {"hermes", "qwen", "llama3_json", "search_r1"}
    assert isinstance(get_parser("verl_mt.chat.parsers.HermesParser"), HermesParser)
    assert isinstance(get_parser("verl_mt.chat.parsers.hermes.HermesParser"), HermesParser)


def test_a_parser_of_an_extension_has_its_documented_paths():
    from verl_mt.chat.parsers import Llama3JsonParser

    for path in ("verl_mt.chat.parsers.Llama3JsonParser", "verl_mt.chat.parsers.llama3_json.Llama3JsonParser"):
        assert type(get_parser(path)) is tool_parsers["llama3_json"] is Llama3JsonParser
    with pytest.raises(PluginError, match="has no 'LlamaParser'"):
        get_parser("verl_mt.chat.parsers.LlamaParser")


@pytest.mark.parametrize("name", ["Qwen", "HERMES", "hermes"])
def test_a_name_may_be_written_in_capitals(name):
    assert isinstance(get_parser(name), HermesParser)
    assert isinstance(get_parser("Search-R1"), SearchR1Parser)


def test_an_unknown_parser_is_refused_with_the_names_that_exist():
    with pytest.raises(PluginError, match=r"hermess.*did you mean 'hermes'.*hermes, kimi_k2, llama3_json, mis"):
        get_parser("hermess")
    with pytest.raises(PluginError, match="expected a subclass"):
        get_parser("json.dumps")
    with pytest.raises(PluginError, match="typo"):
        get_parser("hermes", typo=1)


def test_a_parser_of_ones_own_needs_only_find_calls():
    with pytest.raises(NotImplementedError, match="find_calls"):
        ToolParser().parse("x")


# ---------------------------------------------------------------- reasoning


def test_a_call_inside_reasoning_is_not_executed():
    turn = hermes(f"<think>maybe {CALL}</think>final")
    assert turn == ParsedTurn("final", reasoning=f"maybe {CALL}")


def test_a_call_after_reasoning_is_executed():
    turn = hermes(f"<think>\nI should look.\n</think>\n\n{CALL}<|im_end|>")
    assert turn == ParsedTurn("", reasoning="I should look.", actions=[SEARCH_X])


def test_reasoning_that_the_generation_prompt_began():
    turn = hermes(f"maybe {CALL}\n</think>\n\nfinal", in_reasoning=True)
    assert turn == ParsedTurn("final", reasoning=f"maybe {CALL}")


@pytest.mark.parametrize("call", [CALL, "<tool_call>{broken", "<tool_call>"])
def test_a_closing_think_tag_that_nothing_opened_ends_a_reasoning(call):
    turn = hermes(f"maybe {call}\n</think>\n\nfinal")
    assert turn == ParsedTurn("final", reasoning=f"maybe {call}")


@pytest.mark.parametrize("parser", sorted(set(tool_parsers) - {"gpt_oss", "mistral", "seed_oss"}))
def test_unclosed_reasoning_means_no_calls(parser):
    text = f"I wonder {CALL} <search>q</search>\n" + '{"name": "search", "parameters": {}}'
    for turn in (
        get_parser(parser).parse(f"<think>{text}"),
        get_parser(parser).parse(text, in_reasoning=True),
    ):
        assert turn.calls == [] and turn.content == "" and turn.reasoning == text


def test_an_empty_reasoning_block_is_told_from_none():
    assert hermes("<think>\n\n</think>\n\nHi").reasoning == ""
    assert hermes("Hi").reasoning is None
    assert hermes("<think>\n\n</think>\n\nHi").content == "Hi"


def test_tags_of_reasoning_inside_arguments_do_not_start_or_end_a_reasoning():
    for tag in ("<think>", "</think>", "<think>x</think>"):
        call = ToolCall("f", {"q": tag})
        text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': call.arguments})}</tool_call>"
        assert hermes(text) == ParsedTurn("", actions=[call])


def test_several_reasoning_blocks_are_joined_and_the_text_between_stays():
    turn = hermes(f"<think>a</think>one <think>{CALL}</think>two\n{CALL}")
    assert turn == ParsedTurn("one two", reasoning=f"a\n{CALL}", actions=[SEARCH_X])


# ---------------------------------------------------------------- llama3_json


def llama(text: str, tools=()) -> ParsedTurn:
    return get_parser("llama3_json").parse(text, tools)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "search", "parameters": {"query": "x"}}<|eot_id|>',
        '<|python_tag|>{"name": "search", "parameters": {"query": "x"}}<|eom_id|>',
        '{"type": "function", "name": "search", "parameters": {"query": "x"}}',
        '{"name": "search", "arguments": {"query": "x"}}',
        '{"name": "search", "parameters": "{\\"query\\": \\"x\\"}"}',
        '[{"name": "search", "parameters": {"query": "x"}}]',
    ],
)
def test_llama_calls_are_bare_json(text):
    assert llama(text) == ParsedTurn("", actions=[SEARCH_X])


def test_llama_calls_may_follow_each_other_or_text():
    one = '{"name": "search", "parameters": {"query": "x"}}'
    assert llama(f"{one}; {one}").calls == [SEARCH_X, SEARCH_X]
    assert llama(f"{one};{one}").content == ""
    assert llama(f"[{one}, {one}]").calls == [SEARCH_X, SEARCH_X]
    assert llama(f"Let me look.\n{one}") == ParsedTurn("Let me look.", actions=[SEARCH_X])
    assert llama(f"<|python_tag|>{one}<|python_tag|>{one}").calls == [SEARCH_X, SEARCH_X]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 4}',
        '{"name": "Bob", "age": 3}',
        "[1, 2]",
        '{"name": "Bob',
        'as in {"name": "f", "parameters": {}}',
        "{x}",
    ],
)
def test_json_that_is_an_answer_is_not_a_llama_call(text):
    assert llama(text, TOOLS) == ParsedTurn(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": "search", "parameters": {"query": }}', "not valid JSON"),
        ('{"name": "search", "parameters": [1]}', "must be an object"),
        ('{"name": "search", "query": "x"}', '"parameters" is missing'),
        ('{"name": "search", "query', "not valid JSON"),
        ('<|python_tag|>search.call(query="x")', "not valid JSON"),
        ('<|python_tag|>{"answer": 4}', '"name" must be'),
        ('<|python_tag|>print(1)\n{"name": "x"', "not valid JSON"),
    ],
)
def test_a_malformed_llama_call_is_reported_and_kept(text, says):
    turn = llama(text, TOOLS)
    assert turn.calls == [] and turn.content == text
    assert says in turn.malformed[0].error and turn.malformed[0].text == text


@pytest.mark.parametrize("separator", ["\n", " ", ";", "; ", "<|python_tag|>", ""])
@pytest.mark.parametrize(
    "broken",
    [
        '{"name": "search", "parameters": {',
        '{"name": "search", "parameters": {"query": x}}',
        '{"name": "search", "parameters": {"query": "y"}',
        '{"name": "search", "parameters": {"query": {"name": "search", "parameters": {}}, bad}}',
        '<|python_tag|>{"name": "search", "parameters": {"query": }}',
    ],
)
def test_a_broken_llama_call_does_not_hide_the_next_one(broken, separator):
    turn = llama(f'{broken}{separator}{{"name": "search", "parameters": {{"query": "x"}}}}', TOOLS)
    assert [type(action) for action in turn.actions] == [MalformedCall, ToolCall] and turn.calls == [SEARCH_X]
    assert broken in turn.content


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_a_llama_call_with_a_refused_number_ends_before_the_next_call(value):
    broken = f'{{"name": "search", "parameters": {{"query": {value}'
    for tag in ("", "<|python_tag|>"):
        (alone,) = llama(tag + broken, TOOLS).actions
        assert (alone.text, alone.name) == (tag + broken, "search")
        for separator in ("\n", "; "):
            text = f'{tag}{broken}{separator}{{"name": "search", "parameters": {{"query": "x"}}}}'
            bad, call = llama(text, TOOLS).actions
            assert (bad.text, call) == (f"{tag}{broken}{separator}", SEARCH_X)


def test_the_search_behind_a_broken_llama_call_only_moves_forward(monkeypatch):
    """Each search begins behind the previous candidate. Otherwise parsing would not end."""
    starts: list[int] = []

    def first_match(pattern, text, start):
        if pattern is bare_json._LLAMA_NEXT:
            assert not starts or start > starts[-1]
            starts.append(start)
        return base.first_match(pattern, text, start)

    monkeypatch.setattr(bare_json, "first_match", first_match)
    other = '\n{"name": "other"'
    text = '{"name": "search", "parameters": {"query": x' + 2 * other
    (bad,) = llama(text, TOOLS).actions
    breaks = text.index("x")
    candidates = [breaks + 2, breaks + 2 + len(other)]
    assert bad.text == text and starts == [breaks, *(place + 1 for place in candidates)]


def test_a_llama_call_in_the_middle_of_a_line_must_name_a_tool_that_exists():
    one = '{"name": "search", "parameters": {"query": "x"}}'
    for tools in (TOOLS, ()):
        assert llama(f"Here it is: {one}. More?", tools).calls == [SEARCH_X]
        assert llama('Here: {"name": "f"}, {"name": "f", "parameters": 3}', tools).actions == []
    assert llama(one.replace("search", "other").join(["Say ", "."]), TOOLS).actions == []


# ---------------------------------------------------------------- search_r1


def r1(text: str, **kwargs) -> ParsedTurn:
    return get_parser("search_r1").parse(text, **kwargs)


@pytest.mark.cap("C50")
@pytest.mark.parametrize(
    ("text", "query", "answer"),
    [
        ("<think>x</think><search> who </search>", "who", None),
        ("<answer>42</answer>", None, "42"),
        ("<search>a</search><answer>b</answer>", "a", None),
        ("<answer>b</answer><search>a</search>", None, "b"),
        ("<answer>multi\nline</answer>", None, "multi\nline"),
        ("<think><search>no</search></think><search>yes</search>", "yes", None),
    ],
)
def test_search_r1_first_action_wins(text, query, answer):
    turn = r1(text)
    assert turn.calls == ([ToolCall("search", {"query": query})] if query is not None else [])
    assert turn.malformed == []
    if answer is not None:
        assert f"<answer>{answer}</answer>" in turn.content


@pytest.mark.cap("C51")
@pytest.mark.parametrize("text", ["<search>a</answer>", "", "just talk", "<search>a"])
def test_search_r1_turn_without_an_action_gets_a_hint(text):
    turn = r1(text)
    assert turn.calls == [] and turn.content == text
    assert "no valid action" in turn.malformed[0].error
    assert get_parser("search_r1", hint=None).parse(text).malformed == []


def test_search_r1_stops_after_its_closing_tags_and_its_tool_can_be_renamed():
    parser = get_parser("search_r1", tool_name="retrieve", argument="q")
    assert parser.stop_strings == ("</search>", "</answer>")
    assert parser.parse("<search>a</search>").calls == [ToolCall("retrieve", {"q": "a"})]
    assert get_parser("hermes").stop_strings == ()


# ---------------------------------------------------------------- laws

_words = st.text(max_size=20)
_tricky = st.sampled_from(
    ["</tool_call>", "<tool_call>", "<think>", "</think>", '"}}', "\\", "\n", "é漢🙂", "<|im_end|>"]
)
_strings = st.one_of(_words, st.lists(st.one_of(_words, _tricky), max_size=3).map("".join))
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _strings),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_strings, inner, max_size=3)),
    max_leaves=6,
)
_calls = st.builds(
    ToolCall, st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.dictionaries(_strings, _values, max_size=3)
)
_plain = st.text(st.characters(blacklist_characters="<{[", blacklist_categories=["Cs"]), max_size=30).filter(
    lambda text: text == text.strip()
)


def render(content: str, calls: list[ToolCall], *, ascii_only: bool) -> str:
    parts = [content] if content else []
    for call in calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=ascii_only)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


@pytest.mark.slow
@given(content=_plain, calls=st.lists(_calls, max_size=3), reasoning=st.none() | _plain, ascii_only=st.booleans())
@settings(max_examples=80, deadline=None)
@example(content="", calls=[ToolCall("f", {"</tool_call>": "</think>"})], reasoning="a", ascii_only=False)
def test_parsing_what_was_rendered_the_hermes_way_gives_it_back(content, calls, reasoning, ascii_only):
    text = render(content, calls, ascii_only=ascii_only)
    thought = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
    turn = hermes(thought + text + "<|im_end|>")
    assert turn == ParsedTurn(content, reasoning, calls)
    if reasoning is not None:
        assert hermes(f"{reasoning}\n</think>\n\n{text}", in_reasoning=True) == turn


_fragments = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {}}', '{"name": "f"', "\n", "hi",
     "<search>", "</search>", "<answer>", "</answer>", "<|python_tag|>", ";", "{", "}", "[", "<|im_end|>", " ",
     "<function=search>", "<parameter=q>", "</parameter>", "</function>", "<seed:tool_call>", "</seed:tool_call>",
     "search", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
     "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
     "<｜tool▁calls▁end｜>", "```json\n", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">',
     '<｜DSML｜parameter name="q" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>",
     "</｜DSML｜function_calls>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
     "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|start|>", "assistant",
     "<|channel|>", "analysis", "commentary to=functions.f", "<|message|>", "<|call|>", "<|end|>", "final",
     "Action: f\n", "Action Input: ", "Observation:", "Final Answer:"]
)  # fmt: skip


@pytest.mark.slow
@given(text=st.lists(_fragments, max_size=14).map("".join), in_reasoning=st.booleans())
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("parser", sorted(tool_parsers))
def test_no_text_of_a_model_makes_a_parser_raise_or_lose_a_malformed_call(parser, text, in_reasoning):
    turn = get_parser(parser).parse(text, TOOLS, in_reasoning=in_reasoning)
    for bad in turn.malformed:
        assert bad.text in turn.content and bad.error
    if in_reasoning and "</think>" not in text and parser not in ("gpt_oss", "mistral", "seed_oss"):
        assert turn.calls == [] and turn.content == ""


def test_a_list_of_which_one_item_is_no_call_is_an_answer():
    text = '[{"name": "f", "parameters": {}}, 5]'
    turn = get_parser("llama3_json").parse(text, [])
    assert not turn.calls and not turn.malformed and turn.content == text


# ---------------------------------------------------------------- what all parsers share


class Searched:
    """A pattern of one character that counts its searches."""

    def __init__(self, character: str):
        self.pattern, self.starts = re.compile(character), []

    def search(self, text, start):
        self.starts.append(start)
        return self.pattern.search(text, start)


def test_an_answer_is_remembered_up_to_the_place_that_it_names():
    text, found = base.IndexedText("..x..x."), Searched("x")
    places = [base.first_match(found, text, start).start() for start in (0, 0, 1, 2, 3, 1)]
    assert places == [2, 2, 2, 2, 5, 2] and found.starts == [0, 3, 1]
    nothing = Searched("y")
    assert [base.first_match(nothing, text, start) for start in (1, 1, 6, 0)] == [None] * 4
    assert nothing.starts == [1, 0]


def test_places_of_a_tag_are_found_between_two_bounds():
    text = base.IndexedText("aXbXX")
    assert [text.find("X", start) for start in range(6)] == [1, 1, 3, 3, 4, -1]
    assert [text.find("X", 0, end) for end in range(4)] == [-1, -1, 1, 1]
    assert text.find("XX", 2) == 3 and text.find("XX", 2, 5) == 3 and text.find("XX", 2, 4) == -1
    assert text.find("aX") == 0 and text.find("Y") == -1 and base.IndexedText("aaa").find("aa", 1) == 1


@pytest.mark.parametrize(
    ("text", "position", "end"),
    [("b>", 0, 2), ("a>b>", 0, 0), ("a>b>", 1, 4), (".b>a>", 0, 3), (".a>b>", 0, 1), ("...", 0, 3), ("b>.", 1, 3)],
)
def test_a_broken_call_ends_behind_its_closing_tag_or_before_the_next_opening_one(text, position, end):
    assert base.end_of_broken(text, position, "a>", "b>") == end
    assert base.end_of_broken(".|.", 0, "|", "|") == 1


def test_an_error_shows_thirty_characters_up_to_the_next_tag():
    digits = "0123456789" * 4
    assert base.found_instead(digits, 1) == f"it says {digits[1:31]!r}"
    assert base.found_instead("ab [x]", 0) == "it says 'ab'" and base.found_instead("ab<x>", 1) == "it says 'b'"
    assert base.found_instead("a <x>", 1) == base.found_instead("a[x", 1) == "another tag stands"
    assert base.found_instead("ab", 2) == base.found_instead("ab", 3) == "the text ends"


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("</think>x", "x", ""),
        ("ab</think>x", "x", "ab"),
        ("\n\na\n</think>\n\nx\n", "x\n", "a"),
        ("a<think>b</think>c", "ac", "b"),
        (" \n<think>b</think>c", "c", "b"),
        ("a<think>b</think> <think>c</think>d", "a d", "b\nc"),
        ("<think>a</think>b</think>c", "b</think>c", "a"),
        ("<think></think>", "", ""),
        ("<think>", "", ""),
        ("a<think>b", "a", "b"),
        ("", "", None),
    ],
)
def test_reasoning_is_cut_out_and_the_rest_is_content(text, content, reasoning):
    assert hermes(text) == ParsedTurn(content, reasoning)


def test_reasoning_that_was_begun_may_end_at_once():
    assert hermes("</think>x", in_reasoning=True) == ParsedTurn("x", "")
    assert hermes("a</think>b<think>c</think>d", in_reasoning=True) == ParsedTurn("bd", "a\nc")
    assert hermes("a", in_reasoning=True) == ParsedTurn("", "a")


def test_end_markers_are_the_grammars_or_the_ones_that_are_given():
    parser = get_parser("hermes", end_markers=["", "<e>"])
    assert [parser.parse(text).content for text in ("<e>", "x <e> <e>\n", "x<|im_end|>", "x ")] == [
        "", "x ", "x<|im_end|>", "x ",
    ]  # fmt: skip
    assert hermes("<|im_end|>").content == "" and hermes("x<e>").content == "x<e>"


MIXED = '[{"name": "search", "parameters": 3}, {"name": "search", "parameters": {"query": "x"}}]'


def test_a_list_with_one_call_that_cannot_be_read_keeps_its_text_and_runs_the_other():
    turn = llama(f"Now.\n{MIXED}", TOOLS)
    assert turn.content == f"Now.\n{MIXED}" and turn.calls == [SEARCH_X] and len(turn.malformed) == 1
    runs = get_parser("llama3_json", runs_calls_in_unclosed_reasoning=True)
    begun = runs.parse(f"<think>a\n{MIXED}", TOOLS)
    assert (begun.reasoning, begun.content, begun.calls) == ("a", MIXED, [SEARCH_X])


def limited(most: int, name: str = "hermes") -> ToolParser:
    parser = get_parser(name, runs_calls_in_unclosed_reasoning=True)
    parser.max_calls = most
    return parser


def test_the_calls_that_a_turn_may_hold_are_run_and_the_rest_is_one_error():
    one = '{"name": "search", "parameters": {"query": "x"}}'
    for text, rest in ((f"[{one}, {one}, {one}]", 0), (f"{one}\n[{one}, {one}]", len(one) + 1)):
        turn = limited(2, "llama3_json").parse(text, TOOLS)
        assert turn.calls == [SEARCH_X, SEARCH_X] and [bad.text for bad in turn.malformed] == [text[rest:]]
        assert turn.content == text[rest:]
    assert limited(2).parse(f"{CALL}{CALL}").malformed == [] and limited(3).parse(CALL * 3).calls == [SEARCH_X] * 3


def test_too_many_calls_in_front_of_a_closing_think_tag_were_a_thought():
    assert limited(1).parse(f"{CALL}{CALL}</think>final") == ParsedTurn("final", f"{CALL}{CALL}")
    turn = limited(1).parse(f"<think>a</think>{CALL}{CALL}</think>final")
    assert (turn.reasoning, turn.calls, turn.content) == ("a", [SEARCH_X], f"{CALL}</think>final")
    assert limited(0).parse(f"{CALL}</think>final") == ParsedTurn("final", CALL)


def test_a_call_is_looked_for_behind_as_many_broken_ones_as_a_turn_may_hold():
    bad = "<tool_call>x</tool_call>"
    assert limited(2).parse(f"<think>a{bad}b{CALL}").calls == [SEARCH_X]
    assert limited(1).parse(f"<think>a{bad}b{CALL}") == ParsedTurn("", f"a{bad}b{CALL}")


def test_only_the_first_of_two_calls_keeps_an_id_that_both_have():
    actions = [
        ToolCall("f", {}, "a"),
        ToolCall("g", {}, "a"),
        ToolCall("h", {}),
        ToolCall("i", {}, "b"),
        ToolCall("j", {}),
    ]
    assert [call.id for call in base._without_double_ids(actions)] == ["a", "", "", "b", ""]


@pytest.mark.parametrize(
    ("pieces", "content"),
    [
        (["a\n", None, "b"], "ab"),
        (["a\n\n", None, " \n", None, "b\n"], "a\nb\n"),
        ([None, "\n", None, "b"], "b"),
        ([None, "a\n", None], "a"),
        (["\n"], "\n"),
        ([None, "\n"], ""),
        (["a\n", "b\n"], "a\nb\n"),
    ],
)
def test_the_separator_before_a_call_and_blanks_behind_it_are_no_content(pieces, content):
    assert base._join(pieces, ("\n",)) == content


# ---------------------------------------------------------------- values of JSON


def test_long_values_are_read_whole():
    text = "x" * 300
    for value in ({"a": text}, [text], text, {text: 1}, int("1" * 300), [int("1" * 300)]):
        written = json.dumps(value)
        assert json_calls.decode_json(f"..{written} rest", 2) == (value, 2 + len(written))
        assert json_calls.decode_json(written, 0) == (value, len(written))


def test_a_text_of_one_value_may_have_blanks_around_it_and_nothing_else():
    assert json_calls.decode_whole(" \n[1] ") == [1] and json_calls.decode_whole("1") == 1
    for text, at in (("[1]x", 4), (" [1] x", 4), ("1 2", 2)):
        with pytest.raises(json_calls.BadJSON, match=f"^extra text at character {at}$"):
            json_calls.decode_whole(text)


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ('[{"a": [1], "b": x', {0: 17, 1: 17}),
        ("[[1], x", {0: 6}),
        ('{"a": "[", x', {0: 11}),
        ('{"a": NaN} [', {0: None}),
        ('[{"a": NaN}, [', {0: None, 13: None}),
        ("[" * 100_000, dict.fromkeys(range(500))),
    ],
)
def test_values_around_a_broken_place_are_known_to_be_broken(text, noted):
    indexed = base.IndexedText(text)
    with pytest.raises(json_calls.BadJSON):
        bare_json._decode_llama(indexed, 0)
    assert {place: at for place, (_, at) in indexed.unreadable.items()} == noted


@pytest.mark.parametrize(
    "text",
    [
        "{x}",
        '{"a": x',
        '[1,\n{"a": x',
        'Say {"name": "f", "parameters": {bad',
        'Say {"name": "f" x',
        'Say {"name": "search", "parameters": {"a": {"name": "search" x',
        '{"a": [1]\n{"b": 2}',
    ],
)
def test_broken_json_that_is_no_call_is_passed_over_in_texts_of_both_kinds(text):
    assert llama(text, TOOLS) == ParsedTurn(text)
    assert get_parser("llama3_json").find_calls(text, 0, TOOLS) is None


def test_a_call_inside_a_broken_list_is_an_error_of_its_own():
    text = '[1,\n{"name": "search", "parameters": x'
    (bad,) = llama(text, TOOLS).actions
    assert (bad.text, bad.name) == (text[4:], "search") and "Expecting value at character 34" in bad.error
    named = '{"name": "search", "parameters": {}}'
    assert llama(f'{{"a": x\n{named}', TOOLS).calls == [ToolCall("search", {})]


def test_a_list_of_mistral_calls_may_hold_as_many_as_a_turn():
    calls = ", ".join(['{"name": "search", "arguments": {"query": "x"}}'] * 3)
    assert limited(3, "mistral").parse(f"[TOOL_CALLS][{calls}]").actions == [SEARCH_X] * 3
    turn = limited(2, "mistral").parse(f"[TOOL_CALLS][{calls}]")
    assert turn.calls == [SEARCH_X] * 2 and [bad.text for bad in turn.malformed] == [f"[TOOL_CALLS][{calls}]"]
