"""Messages as templates get them, errors of templates by their cause, and the end of a turn in two renderings."""

from __future__ import annotations

import hashlib
import re
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from chat_toys import byte_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl_mt.chat.delta import TurnEnd, _next_to, find_end
from verl_mt.chat.render import CallShape, Renderer, classify, normalise, normalise_call, shape_arguments, short_id
from verl_mt.errors import TemplateError

DICTS, STRINGS, SHORT, FLAT = CallShape(), CallShape("string"), CallShape(short_ids=True), CallShape(flat=True)
USER, TOOL = {"role": "user", "content": "q"}, {"role": "tool", "content": "r"}
CALLER = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("error", "messages", "tools", "cause", "advice"),
    [
        (jinja2.exceptions.SecurityError("x"), [USER], None, "P24", "changes a list"),
        (jinja2.UndefinedError("'a' is undefined"), [USER], None, "P24", "variable that is not set"),
        (jinja2.UndefinedError("'a' is undefined now"), [USER], None, "P10", "these messages"),
        (jinja2.UndefinedError("'dict' has no attribute 'a'"), [USER], None, "P10", "these messages"),
        (jinja2.TemplateRuntimeError("x"), [USER], None, "P24", "another Jinja engine"),
        (TypeError("Undefined is not JSON serializable"), [USER], None, "P24", "not JSON"),
        (TypeError("x not serializable"), [USER], None, "P24", "not JSON"),
        (TypeError("'NoneType' object is not iterable"), [USER], None, "P24", "only renders conversations with tools"),
        (TypeError("'NoneType' object is not iterable"), [USER], [], "P10", "these messages"),
        (TypeError("NoneType"), [USER], None, "P10", "these messages"),
        (TypeError("iterable"), [USER], None, "P10", "these messages"),
        (jinja2.TemplateError("roles must alternate"), [USER, CALLER], None, "P10", "order of roles"),
        (jinja2.TemplateError("No user query"), [USER], None, "P10", "order of roles"),
        (jinja2.TemplateError("a SINGLE TOOL call"), [USER, CALLER], None, "P16", "this shape of tool call"),
        (jinja2.TemplateError("a single tool call"), [USER, TOOL], None, "P16", "write tool results"),
        (jinja2.TemplateError("x"), [USER, CALLER], None, "P13", "write tool calls"),
        (jinja2.TemplateError("x"), [USER, CALLER, TOOL], None, "P16", "write tool results"),
        (jinja2.TemplateError("x"), [USER, {**CALLER, "tool_calls": []}], None, "P10", "these messages"),
        (ValueError("x"), [], None, "P10", "these messages"),
    ],
)
def test_an_error_of_a_template_has_a_cause_and_an_advice(error, messages, tools, cause, advice):
    found = classify(error, messages, tools)
    assert found[0] == cause and advice in found[1]


@pytest.mark.parametrize(
    ("given", "wanted", "shaped"),
    [
        (None, "dict", {}),
        (None, "string", "{}"),
        ({"a": "é"}, "dict", {"a": "é"}),
        ({"a": "é"}, "string", '{"a": "é"}'),
        ('{"a": 1}', "dict", {"a": 1}),
        ('{"a": 1}', "string", '{"a": 1}'),
        ("[1]", "dict", "[1]"),
        ("no", "dict", "no"),
        ([1], "dict", [1]),
    ],
)
def test_arguments_are_given_as_the_template_wants_them(given, wanted, shaped):
    assert shape_arguments(given, wanted) == shaped


def test_a_short_id_is_nine_letters_or_digits():
    assert short_id("abcDEF123") == "abcDEF123"
    for other in ("abcDEF12", "abcDEF1234", "abc-EF123", "abcDEF12é"):
        assert short_id(other) == hashlib.sha1(other.encode()).hexdigest()[:9]


@pytest.mark.parametrize(
    ("call", "shape", "normal"),
    [
        ({"name": "f", "arguments": "{}"}, DICTS, {"type": "function", "function": {"name": "f", "arguments": {}}}),
        ({"id": None, "function": {"name": "f"}}, DICTS,
         {"type": "function", "function": {"name": "f", "arguments": {}}}),
        ({"id": "x", "type": "t", "function": {"name": "f", "arguments": {}, "n": 1}}, STRINGS,
         {"id": "x", "type": "t", "function": {"name": "f", "arguments": "{}", "n": 1}}),
        ({"id": "call", "function": {"name": "f", "arguments": {}}}, SHORT,
         {"id": short_id("call"), "type": "function", "function": {"name": "f", "arguments": {}}}),
        ({"id": "", "function": {"name": "f", "arguments": {}}}, SHORT,
         {"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}),
        ({"function": {"name": "f", "arguments": "{}", "n": 1}}, FLAT,
         {"type": "function", "function": {"name": "f", "arguments": {}, "n": 1}, "name": "f", "arguments": {}}),
    ],
)  # fmt: skip
def test_a_call_is_written_in_one_shape(call, shape, normal):
    assert normalise_call(call, shape) == normal


def test_what_needs_no_change_stays_the_same_object():
    call = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": "x", "tool_calls": [call]}
    assert normalise_call(call, DICTS) is call and normalise([turn], DICTS)[0] is turn
    changed = normalise([turn], STRINGS)[0]
    assert changed["tool_calls"][0]["function"]["arguments"] == '{"a": 1}' and turn["tool_calls"] == [call]
    fresh = normalise_call({**call, "type": None}, DICTS)
    assert fresh == call and fresh["function"] is call["function"]


@pytest.mark.parametrize(
    ("message", "shape", "normal"),
    [
        ({"role": "user"}, DICTS, {"role": "user", "content": ""}),
        ({"role": "user", "content": None, "x": None, "y": 0}, DICTS, {"role": "user", "content": "", "y": 0}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, DICTS, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": ""}, DICTS, {"role": "assistant", "content": ""}),
        ({"role": "tool", "content": "r", "tool_call_id": "call"}, DICTS,
         {"role": "tool", "content": "r", "tool_call_id": "call"}),
        ({"role": "tool", "content": "r", "tool_call_id": "call"}, SHORT,
         {"role": "tool", "content": "r", "tool_call_id": short_id("call")}),
        ({"role": "tool", "content": "r"}, SHORT, {"role": "tool", "content": "r"}),
    ],
)  # fmt: skip
def test_nulls_and_empty_calls_are_left_out_of_a_message(message, shape, normal):
    before = dict(message)
    assert normalise([message], shape) == [normal] and message == before


def refused(error: Exception, **keys: Any) -> TemplateError:
    def apply(*_: Any, **__: Any) -> str:
        raise error

    renderer = Renderer(SimpleNamespace(chat_template="x", apply_chat_template=apply, **keys), None, {})
    with pytest.raises(TemplateError) as caught:
        renderer.text([USER, TOOL], keys.get("tools"), add_generation_prompt=True)
    return caught.value


def test_a_refusal_names_the_template_the_roles_and_the_tools():
    plain = refused(ValueError("no"))
    assert str(plain).startswith("the chat template cannot render the roles [user tool]: ValueError: no. ")
    assert plain.cause == "P16"
    named = refused(KeyError("k"), name_or_path="m/x", tools=[{}])
    assert str(named).startswith(
        "the chat template of 'm/x' cannot render the roles [user tool] with 1 tools: KeyError"
    )
    broken = refused(jinja2.TemplateSyntaxError("bad.", 7))
    assert "the chat template, line 7: this is not valid Jinja: bad. C" in str(broken) and broken.cause == "P24"


def rendered_by(monkeypatch, template: str, **kwargs: Any) -> tuple[Renderer, list[str]]:
    """A renderer, and what its tokenizer has rendered."""
    tokenizer, made = byte_tokenizer(template), []
    render = PreTrainedTokenizerBase.apply_chat_template

    def counted(self, *args, **kwargs):
        made.append(render(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", counted)
    return Renderer(tokenizer, None, kwargs), made


SAYS_ALL = "{{ messages }}{{ tools }}{{ add_generation_prompt }}"


def test_what_was_rendered_is_not_rendered_again(monkeypatch):
    renderer, made = rendered_by(monkeypatch, SAYS_ALL)
    first = renderer.text([USER], [{"a": 1}], add_generation_prompt=True)
    again = renderer.text([dict(USER)], [{"a": 1}], add_generation_prompt=True)
    assert first == again == made[0] and len(made) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [USER, USER],
        [{**USER, "n": 1}],
        [{**USER, "n": True}],
        [{**USER, "n": 1.0}],
        [{**USER, "n": "1"}],
        [{**USER, "n": [1]}],
        [{**USER, "n": (1,)}],
        [{**USER, "n": {1: 2}}],
        [{**USER, "n": {"1": 2}}],
        [dict(reversed(USER.items()))],
        [{**USER, "n": None}],
    ],
    ids=str,
)
def test_what_differs_at_all_is_rendered(monkeypatch, messages):
    renderer, made = rendered_by(monkeypatch, SAYS_ALL)
    others = [[USER], [{**USER, "n": 1}], [{**USER, "n": [1]}], [{**USER, "n": {"1": 2}}]]
    for other in others:
        if str(other) != str(messages):
            renderer.text(other, add_generation_prompt=False)
    before = len(made)
    assert renderer.text(messages, add_generation_prompt=False) == f"{messages}NoneFalse"
    assert renderer.text(messages, [], add_generation_prompt=False) == f"{messages}[]False"
    assert renderer.text(messages, add_generation_prompt=True) == f"{messages}NoneTrue"
    assert renderer.text(messages, add_generation_prompt=True, template="{{ messages }}") == str(messages)
    assert len(made) == before + 4


@pytest.mark.parametrize("template", ["{{ [1, 2] | random }}", "{{ strftime_now('%f') }}", "{{ lipsum(1) }}"])
def test_a_template_whose_text_changes_is_rendered_each_time(monkeypatch, template):
    renderer, made = rendered_by(monkeypatch, template)
    for _ in range(3):
        renderer.text([USER], add_generation_prompt=False)
    assert len(made) == 3


def test_objects_of_the_users_are_rendered_each_time(monkeypatch):
    class Said(str):
        count = 0

        def __str__(self):
            self.count += 1
            return f"call {self.count}"

    renderer, made = rendered_by(monkeypatch, "{{ messages[0].content | string }}")
    said = {"role": "user", "content": Said("x")}
    assert [renderer.text([said], add_generation_prompt=False) for _ in range(2)] == made and len(made) == 2


def test_a_tokenizer_that_renders_in_its_own_way_is_always_asked():
    class Own(PreTrainedTokenizerFast):
        count = 0

        def apply_chat_template(self, *args, **kwargs):
            self.count += 1
            return f"text {self.count}"

    tokenizer = Own(tokenizer_object=byte_tokenizer(SAYS_ALL).backend_tokenizer, chat_template=SAYS_ALL)
    renderer = Renderer(tokenizer, None, {})
    assert renderer.text([USER], add_generation_prompt=False) != renderer.text([USER], add_generation_prompt=False)


def test_only_so_many_characters_are_remembered(monkeypatch):
    monkeypatch.setattr("verl_mt.chat.render._MOST_KEPT", 1000)
    monkeypatch.setattr("verl_mt.chat.render._LONGEST_KEPT", 300)
    renderer, made = rendered_by(monkeypatch, SAYS_ALL)
    for number in range(30):
        renderer.text([{"role": "user", "content": str(number)}], add_generation_prompt=False)
        held = renderer._recent.values
        assert sum(len(key) + len(text) for (_, key), text in held.items()) <= 1000
    before = len(made)
    for _ in range(2):
        renderer.text([{"role": "user", "content": "x" * 300}], add_generation_prompt=False)
    assert len(made) == before + 2


def test_the_template_of_a_conversation_is_chosen_and_called_with_its_variables():
    asked = []
    templates = {"default": "D", "tool_use": "T"}
    tokenizer = SimpleNamespace(
        chat_template=templates, apply_chat_template=lambda *some, **keys: asked.append((some, keys)) or "text"
    )
    renderer = Renderer(tokenizer, None, {"v": 1})
    assert [renderer.source(tools) for tools in (None, [], [{}])] == ["D", "T", "T"]
    assert Renderer(tokenizer, "own", {}).source([{}]) == "own"
    templates.pop("tool_use")
    assert renderer.source([{}]) == "D"
    assert renderer.text((USER,), ({},), add_generation_prompt=True) == "text"
    renderer.text([USER], add_generation_prompt=False, template="given")
    shared = {"tokenize": False, "v": 1}
    assert asked == [
        (([USER],), {"tools": [{}], "chat_template": "D", "add_generation_prompt": True, **shared}),
        (([USER],), {"tools": None, "chat_template": "given", "add_generation_prompt": False, **shared}),
    ]


PATTERN = re.compile("<[a-z]>")


@pytest.mark.parametrize(
    ("following", "alone", "keys", "end"),
    [
        ("<e>\n<u>", "<e>\n", {}, TurnEnd("<e>", "<e>")),
        ("x<e>\n<u>", "x<e>\n", {}, TurnEnd("x<e>", "<e>")),
        ("<e><n>\n<s>", "<e><n>\n", {}, TurnEnd("<e><n>", "<n>")),
        ("<e><n>\n<s>", "<e><n>\n", {"known": {"<e>"}}, TurnEnd("<e>", "<e>")),
        ("<e>\n<u>", "<f>\n", {}, TurnEnd("<e>", "<e>", final="<f>")),
        (" <e>\n<u>", " <f>", {}, TurnEnd(" <e>", "<e>", final="<f>")),
        ("<u>\n", "", {}, TurnEnd("<u>", "<u>", opens_next=True)),
        ("\n<u>", "\n", {}, TurnEnd("\n<u>", "<u>", opens_next=True)),
        ("<s>", "", {}, TurnEnd("", "")),
        ("x<s>", "x", {}, TurnEnd("x", "")),
        ("<s>", "<e>", {}, TurnEnd("", "")),
        ("<e><u>", "<e>", {"header_ends": True}, TurnEnd("<e><u>", "<u>", opens_next=True)),
        ("<e><s>", "<e>", {"header_ends": True}, TurnEnd("<e>", "<e>")),
        ("<s><e>", "<s><e>", {}, TurnEnd("", "")),
        ("plain", "plain", {}, TurnEnd("", "")),
        ("", "", {}, TurnEnd("", "")),
        ("y<e>", "z<e>", {}, TurnEnd("y", "")),
    ],
)
def test_a_turn_ends_at_the_token_that_both_renderings_hold(following, alone, keys, end):
    """`<s>` begins the generation prompt."""
    keys = {"known": (), **keys}
    assert find_end(following, alone, PATTERN, starts={"<s>"}, **keys) == end
    assert find_end(following, alone, None, starts={"<s>"}, **keys) == TurnEnd("", "")


def test_the_token_at_a_place_may_have_white_space_before_it():
    spans = [(0, 3), (5, 8)]
    assert [_next_to("<a>\n <b>", place, spans) for place in (0, 1, 3, 4, 5, 6)] == [
        (0, 3), None, (5, 8), (5, 8), (5, 8), None,
    ]  # fmt: skip
    assert _next_to("<a>x <b>", 3, spans) is None
