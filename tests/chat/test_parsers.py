"""Tool parsers: the reference rows, reasoning, malformed calls, and parse(render(x)) == x."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_mt.chat.parsers import HermesParser, SearchR1Parser, ToolParser, base, get_parser, json_calls, tool_parsers
from verl_mt.data.conversation import MalformedCall, ParsedTurn, ToolCall
from verl_mt.errors import PluginError

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
    with pytest.deprecated_call(match="use verl_mt.chat.parsers.HermesParser"):
        assert isinstance(get_parser("verl_mt.chat.parsers.hermes.HermesParser"), HermesParser)


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
        if pattern is json_calls._LLAMA_NEXT:
            assert not starts or start > starts[-1]
            starts.append(start)
        return base.first_match(pattern, text, start)

    monkeypatch.setattr(json_calls, "first_match", first_match)
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
