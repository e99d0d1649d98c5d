"""Each grammar by hand: its forms, what is malformed in it, what is not a call, and the names that it goes by."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from verl_mt.chat.parsers import aliases, get_parser, tool_parsers
from verl_mt.chat.parsers.base import IndexedText
from verl_mt.data.conversation import OpenAIFunctionToolSchema, ParsedTurn, ToolCall
from verl_mt.errors import PluginError

TYPES: dict[str, Any] = {
    "i": {"type": "integer"},
    "s": {"type": "string"},
    "b": {"type": "boolean"},
    "n": {"type": "number"},
    "l": {"type": "array"},
    "o": {"type": "object"},
}
SCHEMA = {"type": "object", "properties": TYPES}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ask", "parameters": {"properties": {"query": {"type": "string"}}}}},
]
F = ToolCall("f", {"i": 1, "s": "x"})
ONE = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"i": 1, "s": "x"}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"i": 1, "s": "x"}}',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=s>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=i>1</parameter>\n<parameter=s>x</parameter>\n</function>\n"
    "</seed:tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"i": 1, "s": "x"}',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"i": 1, "s": "x"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="i" string="false">1'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="s" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"i": 1, "s": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "glm45": "<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
    "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"i": 1, "s": "x"}<|call|>',
    "react": 'Action: f\nAction Input: {"i": 1, "s": "x"}\n',
}
"""One call of `f` in every grammar that has arguments."""
BROKEN = {parser: text.replace('{"i": 1, "s": "x"}', '{"i": x}') for parser, text in ONE.items()} | {
    parser: ONE[parser].replace(*key)
    for parser, key in (
        ("qwen3_coder", ("=s>", "=i>")),
        ("seed_oss", ("=s>", "=i>")),
        ("glm45", (">s<", ">i<")),
        ("deepseek_v32", ('name="s"', 'name="i"')),
    )
}
"""The same call with invalid JSON. Where values stand between tags: the argument `i` twice."""
THINK = {"mistral": ("[THINK]", "[/THINK]"), "seed_oss": ("<seed:think>", "</seed:think>")}
THINK["gpt_oss"] = ("<|channel|>analysis<|message|>", "<|end|>")


def parse(parser: str, text: str, **kwargs: Any) -> ParsedTurn:
    return get_parser(parser).parse(text, TOOLS, **kwargs)


def bare(turn: ParsedTurn) -> list[ToolCall]:
    assert turn.malformed == []
    return [ToolCall(call.name, call.arguments) for call in turn.calls]


# ---------------------------------------------------------------- every grammar


@pytest.mark.parametrize("parser", sorted(ONE))
def test_none_one_and_three_calls_are_read_in_order(parser):
    assert parse(parser, "It is 51.") == ParsedTurn("It is 51.")
    assert bare(parse(parser, ONE[parser])) == [F]
    separator = ";" if parser == "llama3_json" else "\n"
    three = parse(parser, separator.join([ONE[parser]] * 3))
    assert bare(three) == [F, F, F]
    if parser != "react":
        assert three.content == ""
    ids = [call.id for call in three.with_ids("call_1_").calls]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("parser", sorted(ONE))
def test_a_call_inside_reasoning_is_a_thought(parser):
    opening, closing = THINK.get(parser, ("<think>", "</think>"))
    quoted = (
        'maybe <|tool_call_begin|> or to=functions.f {"i": 2}' if parser == "gpt_oss" else f"maybe\n{ONE[parser]}\n"
    )
    turn = parse(parser, f"{opening}{quoted}{closing}\n\n{ONE[parser]}")
    assert bare(turn) == [F] and turn.reasoning == quoted.strip("\n")
    thought = get_parser(parser, runs_calls_in_unclosed_reasoning=False)
    lost = thought.parse(f"{opening}{quoted}", TOOLS)
    assert lost.actions == [] and lost.content == "" and lost.reasoning == quoted.strip("\n")
    assert parse(parser, f"{quoted}{closing}\n{ONE[parser]}", in_reasoning=True).reasoning == quoted.strip("\n")


@pytest.mark.parametrize("parser", sorted(set(ONE) - {"react"}))
def test_text_around_a_call_is_content(parser):
    text = "<|channel|>commentary<|message|>I look.<|end|>" if parser == "gpt_oss" else "I look.\n"
    turn = parse(parser, text + ONE[parser])
    assert bare(turn) == [F] and turn.content.strip() == "I look."
    if parser not in ("gpt_oss", "llama3_json"):
        assert parse(parser, f"{ONE[parser]} And then.").content == " And then."


@pytest.mark.parametrize("parser", sorted(set(ONE) - {"react", "llama3_json"}))
def test_a_call_that_is_cut_short_is_an_error_that_the_model_sees(parser):
    """At every character: the call is whole, or malformed with its raw text kept, or not begun."""
    whole = ONE[parser]
    begun = False
    for end in range(1, len(whole)):
        turn = parse(parser, whole[:end])
        assert len(turn.actions) <= 1
        begun = begun or bool(turn.actions)
        if turn.malformed:
            (bad,) = turn.malformed
            assert bad.text in turn.content and "was not run" in bad.error and len(bad.error) < 400
            assert not any(tag in bad.error for tag in ("<|", "<｜", "</", "[TOOL"))
        elif turn.calls:
            assert bare(turn) == [F] or whole[:end].endswith("<|message|>")  # harmony: a body may be empty
        else:
            assert not begun, whole[:end]


@pytest.mark.parametrize("parser", sorted(set(ONE) - {"react", "llama3_json", "gpt_oss"}))
def test_a_broken_call_does_not_hide_the_next_one(parser):
    cut = {"mistral": '[TOOL_CALLS]f[ARGS]{"i": 1, '}.get(parser, ONE[parser][:-30])
    turn = parse(parser, f"{cut}\n{ONE[parser]}")
    assert [type(action).__name__ for action in turn.actions] == ["MalformedCall", "ToolCall"]
    assert turn.calls[0].arguments == F.arguments and cut.strip() in turn.content


@pytest.mark.parametrize("parser", sorted(BROKEN))
def test_a_malformed_call_keeps_its_text_and_tool_name_and_names_the_problem(parser):
    (bad,) = parse(parser, BROKEN[parser]).actions
    twice = {"glm45": "argument", "qwen3_coder": "parameter", "seed_oss": "parameter", "deepseek_v32": "parameter"}
    where = {"hermes": ("it is", 34), "llama3_json": ("it is", 35), "react": ("the input is", 7)}
    subject, at = where.get(parser, ("the arguments are", 7))
    problem = f"{subject} not valid JSON (Expecting value at character {at})"
    if parser in twice:
        problem = f"the {twice[parser]} 'i' appears twice"
    assert (bad.text.strip(), bad.name) == (BROKEN[parser].strip(), "f")
    assert bad.error.startswith(f"The tool call was not run: {problem}. Write ")


@pytest.mark.parametrize(("parser", "key"), [("hermes", "arguments"), ("llama3_json", "parameters")])
def test_advice_about_json_names_the_arguments_key_of_the_grammar(parser, key):
    (bad,) = parse(parser, BROKEN[parser]).actions
    advice = f'Write one JSON object with the keys "name" (a string) and "{key}" (an object), and close it.'
    assert bad.error.endswith(f". {advice}")


@pytest.mark.parametrize("parser", sorted(set(ONE) - {"react"}))
def test_text_behind_the_call_limit_is_kept_once(parser):
    """The first call beyond the limit is malformed."""
    reader = get_parser(parser)
    reader.max_calls = 1
    separator = ";" if parser == "llama3_json" else "\n"
    turn = reader.parse(separator.join([ONE[parser], BROKEN[parser], ONE[parser]]), TOOLS)
    call, told = turn.actions
    assert (call.name, call.arguments) == ("f", F.arguments)
    rest = separator.join([BROKEN[parser], ONE[parser]])
    assert turn.content == told.text == "\n" * (parser == "gpt_oss") + rest
    assert told.error == (
        "The tool call was not run: one turn may hold 1 calls, and this turn goes on behind them. "
        "Write fewer calls at once, and read their results before you go on."
    )


@pytest.mark.parametrize("parser", sorted(set(ONE) - {"gpt_oss"}))
def test_calls_are_found_in_a_plain_string_as_in_an_indexed_text(parser):
    reader = get_parser(parser)
    for text in (ONE[parser], BROKEN[parser], ONE[parser][:-30], f"{BROKEN[parser]}\n{ONE[parser]}"):
        found = reader.find_calls(text, 0, TOOLS)
        assert found == reader.find_calls(IndexedText(text), 0, TOOLS) and (found is None or found.start == 0)


@pytest.mark.parametrize("parser", sorted(set(ONE) - {"llama3_json"}))
def test_schemas_may_be_objects_or_dicts_in_either_shape(parser):
    objects = [OpenAIFunctionToolSchema.model_validate(tool) for tool in TOOLS]
    for tools in (objects, [tool["function"] for tool in TOOLS]):
        assert get_parser(parser).parse(ONE[parser], tools).calls[0].arguments == F.arguments


def test_names_of_other_libraries_are_accepted():
    for alias, name in aliases().items():
        assert type(get_parser(alias)) is tool_parsers[name]
    for given, name in (("gpt-oss", "gpt_oss"), ("Qwen3-Coder", "qwen3_coder"), ("deepseek-v3", "deepseek_v3")):
        assert type(get_parser(given)) is tool_parsers[name]
    with pytest.raises(PluginError, match="did you mean 'qwen3_coder'"):
        get_parser("qwen3coder")


def test_parsers_need_no_torch_no_tokenizer_and_no_server():
    code = (
        "import sys, verl_mt.chat.parsers as p; p.get_parser('gpt-oss').parse('x'); "
        "print([m for m in ('torch', 'transformers', 'sglang', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- qwen3_coder


def coder(**arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def test_qwen3_coder_arguments_are_typed_by_the_schema():
    turn = parse("qwen3_coder", coder(i="3", s="3", b="true", n="2.0", l="[1, 2]", o='{"a": 1}'))
    assert turn.calls == [ToolCall("f", {"i": 3, "s": "3", "b": True, "n": 2, "l": [1, 2], "o": {"a": 1}})]
    assert repr(turn.calls[0].arguments["n"]) == "2.0"  # a template writes it again as the model did
    assert parse("qwen3_coder", coder(i="abc", s="null", b="None", l="['a', None]", o="{'a': True}")).calls[
        0
    ].arguments == {
        "i": "abc",
        "s": None,
        "b": None,
        "l": ["a", None],
        "o": {"a": True},
    }


def test_a_value_may_hold_every_closing_tag_but_the_whole_end_of_a_call():
    for text in ("a</parameter>b", "</parameter>", "x\n</parameter>\ny", "</function>", "</tool_call>",
                 "x <parameter=>", "say <parameter=q> here", "a\n</parameter> <parameter=", "\n\nfoo\n\n", "",
                 "</parameter></function></tool_call>"):  # fmt: skip
        assert bare(parse("qwen3_coder", coder(s=text, i="1"))) == [ToolCall("f", {"s": text, "i": 1})], text


def test_qwen3_coder_tags_may_share_a_line_and_the_outer_ones_be_missing():
    assert bare(parse("qwen3_coder", "<tool_call><function=f><parameter=s>a</parameter></function></tool_call>")) == [
        ToolCall("f", {"s": "a"})
    ]
    inner = "<function=f>\n<parameter=s>\na\n</parameter>\n</function>"
    for text in (inner, f"{inner}\n</tool_call>", f"Now.\n{inner}"):
        turn = parse("qwen3_coder", text)
        assert bare(turn) == [ToolCall("f", {"s": "a"})] and turn.content in ("", "Now.")
    assert bare(parse("qwen3_coder", f"<tool_call>{inner}{inner}</tool_call>")) == [ToolCall("f", {"s": "a"})] * 2
    assert parse("qwen3_coder", "Use <function=f> here").actions == []


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ("<function=f>\n<parameter=s>\na\n</function>\n", "'s' is not closed"),
        ("<function=f>\nhello</function>", "a parameter tag should come"),
        ("<function=f><parameter=s>a</parameter><parameter=s>b</parameter></function>", "appears twice"),
        ('{"name": "f", "arguments": {}}', "a function tag with a name should come"),
        ("<function=>\n</function>", "a function tag with a name"),
        ("<function=f></function> and more", "its closing tag should come where it says 'and more"),
        ("", "a function tag with a name"),
    ],
)
def test_a_malformed_qwen3_coder_call_says_what_is_wrong(inside, says):
    raw = f"<tool_call>\n{inside}\n</tool_call>"
    turn = parse("qwen3_coder", f"Now:\n{raw}")
    assert turn.calls == [] and turn.content == f"Now:\n{raw}" and says in turn.malformed[0].error


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("<function=f>\n<parameter=s>\na\n", "the parameter 's' is not closed"),
        ("<function=f>\n<parameter=s>\na\n</function>", "the parameter 's' is not closed"),
        (
            "<function=f>\n<parameter=i>\n1\n</parameter>\n<parameter=i>\n2\n</parameter>\n",
            "the parameter 'i' appears twice",
        ),
    ],
)
def test_a_broken_function_without_outer_tags_ends_before_the_next_one(bad, problem):
    turn = parse("qwen3_coder", f"{bad}<function=f>\n<parameter=s>\nb\n</parameter>\n</function>")
    first, second = turn.actions
    assert (first.text, first.name, second) == (bad, "f", ToolCall("f", {"s": "b"}))
    assert first.error.startswith(f"The tool call was not run: {problem}. ") and turn.content == bad
    (alone,) = parse("qwen3_coder", bad).actions
    assert (alone.text, alone.error) == (first.text, first.error)


# ---------------------------------------------------------------- closing tags that are missing

OPEN = {
    "qwen3_coder": ("<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>", "<parameter={}>\n{}", "\n</parameter>"),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n{}\n</function>\n</seed:tool_call>", "<parameter={}>{}", "</parameter>",
    ),
    "glm45": ("<tool_call>f\n{}\n</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}", "</arg_value>"),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        '<｜DSML｜parameter name="{}" string="true">{}', "</｜DSML｜parameter>",
    ),
}  # fmt: skip
"""A call around its arguments, an argument without its closing tag, and that tag."""


MISSING = "a parameter tag should come where "


@pytest.mark.parametrize(
    ("parser", "opened", "closing", "closed", "cut"),
    [
        (
            "hermes",
            '<tool_call>{"name": x',
            "</tool_call>",
            "it is not valid JSON (Expecting value at character 10)",
            "Expecting value at character 10",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f>",
            "</tool_call>",
            f"{MISSING}another tag stands",
            f"{MISSING}the text ends",
        ),
        (
            "seed_oss",
            "<seed:tool_call><function=f>",
            "</seed:tool_call>",
            f"{MISSING}another tag stands",
            f"{MISSING}the text ends",
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>i</arg_key>x",
            "</tool_call>",
            "a key and its value should come where another tag stands",
            "a key and its value should come where another tag stands",
        ),
    ],
)
def test_only_a_call_without_its_closing_tag_is_called_not_closed(parser, opened, closing, closed, cut):
    for text, problem in ((opened + closing, closed), (opened, f"it is not closed ({cut})")):
        (bad,) = parse(parser, text).actions
        assert bad.text == text and bad.error.startswith(f"The tool call was not run: {problem}. Write ")


@pytest.mark.parametrize("between", ["\n", ""])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["schema", "no schema"])
@pytest.mark.parametrize("parser", sorted(OPEN))
def test_the_opening_of_the_next_argument_ends_a_value_that_is_not_closed(parser, tools, between):
    call, argument, close = OPEN[parser]
    inner = between.join([argument.format("s", "two words"), argument.format("query", "y") + close])
    schema = {"properties": {"s": {"type": "string"}, "query": {"type": "string"}}}
    turn = get_parser(parser).parse(call.format(inner), tools and [{"name": "f", "parameters": schema}])
    if parser == "qwen3_coder" and not between:  # its values stand on lines: in the middle of one it is in doubt
        assert turn.calls == [] and "'s' is not closed" in turn.malformed[0].error
    else:
        assert bare(turn) == [ToolCall("f", {"s": "two words", "query": "y"})]


@pytest.mark.parametrize("parser", sorted(OPEN))
def test_an_argument_is_never_swallowed_by_the_one_before_it(parser):
    """Whatever is missing, and whichever the keys: two values are read, or the model is told."""
    call, argument, close = OPEN[parser]
    for first, second in (("s", "i"), ("s", "unknown"), ("unknown", "s"), ("s", "s"), ("i", "s")):
        for cut in range(len(close) + 1):
            inner = f"{argument.format(first, 'a')}{close[:cut]}\n{argument.format(second, '3')}{close}"
            turn = parse(parser, call.format(inner))
            for found in turn.calls:
                assert "3" not in str(found.arguments[first]), (inner, found)
            assert len(turn.actions) == 1
    opening = argument.split("{")[0]
    turn = parse(parser, call.format(f"{argument.format('s', 'a')}\n{opening}\n3{close}"))
    assert turn.calls == [] or "3" not in str(turn.calls[0].arguments["s"])


# ---------------------------------------------------------------- glm45


def test_glm_values_are_raw_strings_or_json_with_or_without_line_ends():
    arguments = (
        "<arg_key>s</arg_key><arg_value> a</arg_value>b\n</arg_value><arg_key>l</arg_key><arg_value>[1]</arg_value>"
    )
    text = f"<tool_call>f{arguments}</tool_call>"
    assert bare(parse("glm45", text)) == [ToolCall("f", {"s": " a</arg_value>b\n", "l": [1]})]
    assert bare(parse("glm45", "<tool_call>f\n</tool_call>")) == [ToolCall("f", {})]
    assert parse("glm45", "<tool_call>ask<arg_key>query</arg_key><arg_value>null</arg_value></tool_call>").calls == [
        ToolCall("ask", {"query": "null"})
    ]


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ('{"name": "f", "arguments": {}}', "the name of a tool and its arguments should come"),
        ("f<arg_key>s</arg_key>", "a key and its value should come"),
        ("f<arg_key>s</arg_key><arg_value>a", "'s' is not closed"),
        ("f" + "<arg_key>s</arg_key><arg_value>a</arg_value>" * 2, "appears twice"),
        ("", "the name of a tool"),
    ],
)
def test_a_malformed_glm_call_says_what_is_wrong(inside, says):
    turn = parse("glm45", f"<tool_call>{inside}</tool_call><|observation|>")
    assert turn.calls == [] and says in turn.malformed[0].error and inside in turn.content


# ---------------------------------------------------------------- mistral


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"i": 1, "s": "x"}, "id": "abc123def"}]</s>', ["abc123def"]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"i": 1, "s": "x"}}]', [""]),
        ('[TOOL_CALLS]{"name": "f", "arguments": {"i": 1, "s": "x"}}', [""]),
        ('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"i": 1, "s": "x"}</s>', ["abc123def"]),
        ('[TOOL_CALLS]f{"i": 1, "s": "x"}', [""]),
        ('[TOOL_CALLS]f[CALL_ID]a[ARGS]{"i": 1, "s": "x"}[TOOL_CALLS]f[CALL_ID]a[ARGS]{"i": 1, "s": "x"}', ["a", ""]),
    ],
)
def test_mistral_forms_and_ids(text, ids):
    turn = parse("mistral", text)
    assert bare(turn) == [F] * len(ids) and [call.id for call in turn.calls] == ids and turn.content == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[TOOL_CALLS][]", "the list of calls is empty"),
        ('[TOOL_CALLS][{"name": "f"}]', '"arguments" is missing'),
        ('[TOOL_CALLS][{"name": "f", ', "not valid JSON"),
        ("[TOOL_CALLS]f[ARGS][1]", "must be an object; they are a list"),
        ("[TOOL_CALLS]f[ARGS]", "not valid JSON"),
        ("[TOOL_CALLS] I call it", "the name of a tool and its arguments should come"),
        ("[TOOL_CALLS]", "the name of a tool and its arguments should come"),
    ],
)
def test_a_malformed_mistral_call_says_what_is_wrong(text, says):
    turn = parse("mistral", text)
    assert turn.calls == [] and turn.content == text and says in turn.malformed[0].error
    assert turn.malformed[0].text == text


# ---------------------------------------------------------------- deepseek, kimi

V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>"


def test_deepseek_v3_writes_a_fence_and_a_closing_tag_inside_a_string_is_harmless():
    one = V3 % '{"s": "```json\\n<｜tool▁call▁end｜>"}'
    for text in (f"<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜>", f"{one}{one}"):
        turn = parse("deepseek_r1", f"I look.{text}<｜end▁of▁sentence｜>")
        assert bare(turn) == [ToolCall("f", {"s": "```json\n<｜tool▁call▁end｜>"})] * 2 and turn.content == "I look."


@pytest.mark.parametrize(
    ("parser", "text", "says"),
    [
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "there is no call in it"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "not set apart"),
        ("deepseek_v3", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "the name of the tool is missing"),
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} x<｜tool▁call▁end｜>",
            "should be closed behind its arguments, but it says 'x'",
        ),
        ("deepseek_v3", V3 % "[1]", "must be an object; they are a list"),
        ("deepseek_v32", '<｜DSML｜invoke name="f">x</｜DSML｜invoke>', "a parameter tag should come"),
        ("deepseek_v32", "<｜DSML｜invoke></｜DSML｜invoke>", "no name"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>", "not set apart"),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>3<|tool_call_end|>", "they are a number"),
    ],
)
def test_a_malformed_call_in_a_section_says_what_is_wrong(parser, text, says):
    turn = parse(parser, text)
    assert turn.calls == [] and turn.content == text and says in turn.malformed[0].error


def test_an_invoke_tag_that_closes_itself_is_a_call_without_arguments():
    for name, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
        long = '<｜DSML｜invoke name="ask">\n<｜DSML｜parameter name="query" string="true">x</｜DSML｜parameter>\n'
        short = '<｜DSML｜invoke name="{}"/>\n'
        text = f"Now.\n\n<｜DSML｜{tag}>\n{short.format('f')}{long}</｜DSML｜invoke>\n{short.format('g')}"
        turn = parse(name, f"{text}</｜DSML｜{tag}>")
        assert bare(turn) == [ToolCall("f", {}), ToolCall("ask", {"query": "x"}), ToolCall("g", {})]
        assert turn.content == "Now."
    assert bare(parse("deepseek_v32", '<｜DSML｜invoke name="f">\n{"i": 1, "s": "x"}\n</｜DSML｜invoke>')) == [F]


@pytest.mark.parametrize(
    ("parser", "runs"), [("glm45", True), ("kimi_k2", True), ("hermes", False), ("deepseek_v3", False)]
)
def test_a_call_in_an_unclosed_thought_is_run_for_the_families_that_sglang_runs_it_for(parser, runs):
    for text, begun in ((f"<think>I look.\n{ONE[parser]}", False), (f"I look.\n{ONE[parser]}", True)):
        turn = parse(parser, text, in_reasoning=begun)
        assert bare(turn) == [F] * runs and turn.content == ""
        assert turn.reasoning == ("I look." if runs else f"I look.\n{ONE[parser]}")
        chosen = get_parser(parser, runs_calls_in_unclosed_reasoning=not runs).parse(text, TOOLS, in_reasoning=begun)
        assert bare(chosen) == [F] * (not runs)
    closed = parse(parser, f"<think>I look.\n{ONE[parser]}</think>It is 51.")
    assert closed.actions == [] and closed.content == "It is 51."
    unread = parse(parser, f"<think>A call begins with {ONE[parser][:12]}")
    assert unread.actions == [] and unread.content == ""


def test_kimi_ids_are_the_models_own_and_names_may_hold_dots_and_dashes():
    body = "<|tool_call_argument_begin|>{}<|tool_call_end|>"
    turn = parse("kimi_k2", f"<|tool_call_begin|>functions.a-b.c:12{body}<|tool_call_begin|>plain{body}")
    assert turn.calls == [ToolCall("a-b.c", {}, "functions.a-b.c:12"), ToolCall("plain", {})]


# ---------------------------------------------------------------- gpt_oss


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"i": 1, "s": "x"}<|call|>',
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
        '{"i": 1, "s": "x"}',
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis to=functions.f code<|message|>"
        '{"i": 1, "s": "x"}<|call|>',
    ],
)
def test_harmony_calls_have_a_recipient_in_any_place_of_the_header(text):
    turn = parse("gpt_oss", text)
    assert bare(turn) == [F] and (turn.content, turn.reasoning) == ("", "hm")


def test_harmony_channels_become_reasoning_and_content():
    final = "<|channel|>final<|message|>It is 51.<|return|>"
    assert parse("gpt_oss", final) == ParsedTurn("It is 51.")
    assert parse("gpt_oss", f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{final}") == ParsedTurn(
        "It is 51.", "a"
    )
    assert parse("gpt_oss", "Just text.<|return|>") == ParsedTurn("Just text.")
    tricky = '<|channel|>commentary to=functions.f<|message|>{"s": "<|call|><|end|><|start|>assistant"}<|call|>'
    assert bare(parse("gpt_oss", tricky)) == [ToolCall("f", {"s": "<|call|><|end|><|start|>assistant"})]
    assert bare(parse("gpt_oss", "<|channel|>commentary to=functions.f<|message|><|call|>")) == [ToolCall("f", {})]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{bad<|call|>", "not valid JSON"),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "must be an object"),
        ("<|channel|>commentary to=functions.f<|message|>{} x<|call|>", "should be closed behind its arguments"),
        ("<|channel|>commentary to=functions.f", "no body"),
    ],
)
def test_a_malformed_harmony_call_says_what_is_wrong(text, says):
    turn = parse("gpt_oss", text)
    assert turn.calls == [] and says in turn.malformed[0].error and turn.malformed[0].text in turn.content
