"""What the probe finds in templates made here, each wrong in one way."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from chat_toys import CHATML, HEADER_ENDS, TOOL_CHATML, assistant, byte_tokenizer, call, tool, user
from conformance_table import generic_template

from verl_mt.chat import ChatTemplate, probe
from verl_mt.chat.delta import ASKED, SAID, SHOWN, SHOWN_AGAIN
from verl_mt.chat.probe import Problem, TemplateCapabilities
from verl_mt.chat.render import CallShape
from verl_mt.errors import TemplateError

EOS = "<|im_end|>"


def capabilities(source: str):
    return ChatTemplate(byte_tokenizer(source, eos=EOS)).capabilities


def test_a_template_that_can_do_everything_has_no_problems():
    found = capabilities(TOOL_CHATML)
    assert found.problems == {}
    assert found.roles == {"system", "user", "assistant", "tool"}
    assert (found.append_only, found.merges_tool_messages, found.drops_reasoning) == (True, True, False)
    assert (found.tools, found.tool_calls, found.parallel_calls, found.arguments) == (True, True, True, "dict")


def test_a_frame_for_every_role_writes_no_calls_and_no_schemas():
    found = capabilities(CHATML)
    assert set(found.problems) == {"tools", "tool_call", "parallel_calls", "text_with_call"}
    assert found.arguments is None
    assert not found.merges_tool_messages


@pytest.mark.parametrize("missing", ["c.function.name + ' ' + ", " + ' ' + c.function.arguments|tojson"])
def test_a_call_without_its_name_or_arguments_is_a_problem(missing):
    assert missing in TOOL_CHATML
    found = capabilities(TOOL_CHATML.replace(missing, ""))
    left_out = Problem("P16", "tool calls of earlier turns are left out of the text")
    assert found.problems == dict.fromkeys(("tool_call", "parallel_calls", "text_with_call"), left_out)
    assert found.arguments is None


def test_a_template_without_the_users_question_has_a_prompt_problem():
    """Only the first message is left out."""
    found = capabilities(CHATML.replace("m.content", "('' if loop.first else m.content)"))
    problems = {
        shape: Problem("P16", f"the template leaves {shape} out of the prompt without a word")
        for shape in ("no_tools", "system", "tools")
    }
    calls = dict.fromkeys(("tool_call", "parallel_calls", "text_with_call"), found.problems["tool_call"])
    assert found.problems == {**problems, "prompt": problems["no_tools"], **calls}
    assert found.roles == {"user", "tool"}


@pytest.mark.cap("P13")
def test_arguments_are_given_as_a_string_where_a_dict_comes_out_wrong():
    source = TOOL_CHATML.replace("c.function.arguments|tojson", "c.function.arguments + ''")
    chat = ChatTemplate(byte_tokenizer(source, eos=EOS))
    assert chat.capabilities.arguments == "string"
    assert '{"a": 1}' in chat.full_text([user("q"), assistant("", call("f", {"a": 1}))])


@pytest.mark.cap("P13")
def test_html_escapes_in_a_call_are_seen():
    source = TOOL_CHATML.replace(
        "c.function.name + ' ' + c.function.arguments|tojson",
        "'{\"n\": \"' + c.function.name + '\"' + (c.function.arguments|tojson|safe)",
    )
    found = capabilities(source)
    assert found.arguments == "string" or found.problems["tool_call"].cause == "P13"
    text = ChatTemplate(byte_tokenizer(source, eos=EOS)).full_text([user("q"), assistant("", call("f", {"a": 1}))])
    assert ("&#34;" in text) == ("tool_call" in found.problems)


def test_calls_without_a_function_key_are_written_flat():
    source = TOOL_CHATML.replace("c.function.name", "c.name").replace("c.function.arguments", "c.arguments")
    chat = ChatTemplate(byte_tokenizer(source, eos=EOS))
    assert "tool_call" not in chat.capabilities.problems
    assert 'f {"a": 1}' in chat.full_text([user("q"), assistant("", call("f", {"a": 1}))])


def test_call_ids_of_nine_characters_are_made_where_a_template_insists():
    source = (
        "{% for m in messages if m.tool_calls %}{% if m.tool_calls[0].id|length != 9 %}"
        "{{ raise_exception('ids of nine') }}{% endif %}{% endfor %}"
        + TOOL_CHATML.replace("m.content + '\n</tool", "m.tool_call_id + m.content + '\n</tool")
    )
    chat = ChatTemplate(byte_tokenizer(source, eos=EOS))
    assert chat.capabilities.short_call_ids
    turn = assistant("", call("f", {}, "call_with_a_long_id"))
    delta = chat.delta_ids([tool("R", "call_with_a_long_id")], history=[user("q"), turn], last_ids=[0])
    full = chat.full_text([user("q"), turn, tool("R", "call_with_a_long_id")])
    shown = full[full.index("<tool_response>") :].split("R")[0]
    assert shown in chat.decode(delta.ids)


@pytest.mark.cap("P5", "P6")
def test_a_template_that_rewrites_history_is_not_append_only():
    source = CHATML.replace("m.content +", "(m.content if loop.last else m.content.split('</think>')[-1]) +")
    found = capabilities(source)
    assert found.drops_reasoning
    assert not capabilities(source.replace("m.content if loop.last", "'!' + m.content if loop.last")).append_only


@pytest.mark.cap("P11")
def test_tools_that_move_to_the_last_user_turn_are_seen():
    source = (
        "{% for m in messages %}{% if loop.last and tools %}{{ tools|tojson }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert capabilities(source).rewrites_prompt


@pytest.mark.cap("P20")
def test_a_clock_is_seen():
    assert capabilities("{{ strftime_now('%Y') }}" + CHATML).uses_clock
    assert not capabilities(CHATML).uses_clock


@pytest.mark.cap("P24")
def test_a_template_that_needs_tools_is_served_with_tools_and_refused_without():
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TOOL_CHATML
    chat = ChatTemplate(byte_tokenizer(source, eos=EOS))
    assert chat.capabilities.problems["no_tools"].cause == "P24"
    assert "prompt" not in chat.capabilities.problems
    chat.require(tools=True, interaction=True)
    with pytest.raises(TemplateError, match="P24"):
        chat.require(tools=False, interaction=False)
    delta = chat.delta_ids([user("x")], history=[user("q"), assistant("a")], last_ids=[0])
    assert chat.decode(delta.ids) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.cap("P24")
def test_a_template_that_the_sandbox_forbids_is_named():
    source = "{% for m in messages if m.tool_calls %}{% set _ = messages.append(1) %}{% endfor %}" + TOOL_CHATML
    found = capabilities(source)
    assert found.problems["tool_call"].cause == "P24"
    assert found.problems["tool_result"].cause == "P24"


@pytest.mark.cap("P10")
def test_roles_that_must_alternate_are_served_from_a_context_that_alternates():
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    chat = ChatTemplate(byte_tokenizer(source, eos=EOS))
    assert chat.capabilities.problems["tool_result"].cause == "P10"
    delta = chat.delta_ids([user("x")], history=[user("q"), assistant("a")], last_ids=[0])
    assert "x" in chat.decode(delta.ids)


def test_a_variable_that_the_template_needs_is_named():
    chat = ChatTemplate(byte_tokenizer("{{ functions + '' }}" + CHATML, eos=EOS))
    with pytest.raises(TemplateError, match=r"'functions' is undefined.*template_kwargs"):
        _ = chat.generation_prompt_text
    assert chat.with_kwargs({"functions": "[]"}).generation_prompt_text == "<|im_start|>assistant\n"


def test_the_header_is_the_end_where_nothing_else_is():
    chat = ChatTemplate(byte_tokenizer(HEADER_ENDS))
    assert chat.capabilities.problems.keys() == {"tools"}
    assert chat.stop_token_ids == chat.end_token_ids


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_a_template_drops_is_found_whatever_its_key(key):
    shown = f"('<think>' + m.{key} + '</think>' if m.{key} and loop.last else '') + m.content +"
    found = capabilities(CHATML.replace("m.content +", shown))
    assert (found.reasoning_key, found.reasoning_content) == (key, "dropped_after_user")
    assert "reasoning of earlier turns is dropped" in found.history
    kept = capabilities(CHATML.replace("m.content +", shown.replace(" and loop.last", "")))
    assert (kept.reasoning_key, kept.reasoning_content) == (key, "kept")


def test_reasoning_that_only_turns_with_calls_show_is_found():
    """As Kimi K2: an answer has an empty block, and ends the reasoning of the turns before it."""
    block = (
        "('<think>' + (m.reasoning_content or '' if m.tool_calls and loop.index > loop.length - 2 else '') + '</think>'"
    )
    source = TOOL_CHATML.replace(
        "'\n' + m.content }}", f"'\n' + {block} if m.role == 'assistant' else '') + m.content }}}}"
    )
    assert source != TOOL_CHATML
    found = capabilities(source)
    assert (found.reasoning_key, found.reasoning_content) == ("reasoning_content", "dropped_after_user")


@pytest.mark.parametrize(
    ("template", "key"), [("openai-gpt-oss-120b", "thinking"), ("Kimi-K2-Thinking", "reasoning_content")]
)
def test_published_templates_that_drop_reasoning_are_found(shared_data, template, key):
    found = generic_template(shared_data / "templates" / f"{template}.jinja").capabilities
    assert (found.reasoning_key, found.reasoning_content) == (key, "dropped_after_user")


@pytest.mark.cap("P11")
def test_what_writes_no_tools_does_not_move_them():
    assert not capabilities(CHATML).rewrites_prompt


# ---------------------------------------------------------------- on templates that are functions


class Written:
    """A renderer whose template is a function of messages, tools and the generation prompt."""

    def __init__(self, write, source: str = ""):
        self._write, self._source, self.asked = write, source, []

    def text(self, messages, tools=None, *, add_generation_prompt, template=None):
        self.asked.append(([m["role"] for m in messages], bool(tools), add_generation_prompt))
        return self._write(messages, tools, add_generation_prompt)

    def source(self, tools):
        return self._source


def plain(messages, tools=None, gen=False):
    """Every message as JSON, in brackets."""
    return "".join(f"<{m['role']}>{json.dumps(m)}<e>" for m in messages) + "<assistant>" * gen


def refuses(cause, when=lambda messages, tools: True):
    def write(messages, tools, gen):
        if when(messages, tools):
            raise TemplateError("no", cause=cause)
        return plain(messages, tools, gen)

    return write


TAG = re.compile("<[a-z]+>")


def test_the_generation_prompt_is_what_the_template_adds():
    assert probe.generation_prompt(Written(plain), TAG) == ("<assistant>", False)
    swaps = Written(lambda messages, tools, gen: "a<u>b" + ("<abc>x" if gen else "<aby>"))
    assert probe.generation_prompt(swaps, TAG) == ("<abc>x", True)
    assert probe.generation_prompt(swaps, None) == ("c>x", True)
    ends = Written(lambda messages, tools, gen: "<u>" + ("x" if gen else "y"))
    assert probe.generation_prompt(ends, TAG) == ("x", True)
    needs_tools = Written(refuses("P24", lambda messages, tools: not tools))
    assert probe.generation_prompt(needs_tools, TAG) == ("<assistant>", False)
    assert needs_tools.asked == [(["user"], False, False), (["user"], True, False), (["user"], True, True)]
    with pytest.raises(TemplateError, match="no"):
        probe.generation_prompt(Written(refuses("P10", lambda messages, tools: not tools)), TAG)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<think>", True),
        ("<think></think>", False),
        ("<think></think><think>", True),
        ("</think>", False),
        ("", False),
        ("[THINK]a", True),
        ("<think></think>[THINK]", True),
    ],
)
def test_a_prompt_is_inside_a_reasoning_that_it_did_not_close(prompt, opened):
    assert probe.opens_reasoning(prompt) is opened


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{name}{said}", None),
        ("{said}", "left out"),
        ("{name}", "left out"),
        ("&#34;" + "x" * 35 + "{name}{said}", "HTML escapes"),
        ("&#34;" + "x" * 36 + "{name}{said}", None),
        ("&quot;{name}{said}", "HTML escapes"),
        ("{name}{said}" + "x" * (40 - 5 - 10) + "&#34;", "HTML escapes"),
        ("{name}{said}" + "x" * (41 - 5 - 10) + "&#34;", None),
        ("{name}" + "x" * 90 + "&quot;{said}", "HTML escapes"),
        ('{name}\\"{said}', "arguments twice"),
        ('\\"' + "x" * 38 + "{name}{said}", "arguments twice"),
        ('\\"' + "x" * 39 + "{name}{said}", None),
    ],
)
def test_a_call_that_comes_out_whole_has_no_escapes_near_it(text, problem):
    shown = text.replace("{name}", "zqxjkvname0").replace("{said}", SAID)
    assert len(SAID) == 10
    found = probe._try_call(Written(lambda *_: shown), CallShape(), "call_1")
    assert found is None if problem is None else problem in found.text
    assert found is None or found.cause == ("P16" if problem == "left out" else "P13")


def test_a_template_without_a_tool_role_may_write_calls_and_the_first_problem_counts():
    no_results = refuses("P16", lambda messages, tools: messages[-1]["role"] == "tool")
    assert probe.call_shape(Written(no_results)) == (CallShape(), None)
    shape, problem = probe.call_shape(Written(refuses("P10")))
    assert shape == CallShape() and problem == Problem("P10", "no")
    endless = Written(refuses("P25"))
    with pytest.raises(TemplateError, match="no") as caught:
        probe.call_shape(endless)
    assert caught.value.cause == "P25" and len(endless.asked) == 2
    strings = Written(refuses("P13", lambda m, tools: isinstance(m[1]["tool_calls"][0]["function"]["arguments"], dict)))
    assert probe.call_shape(strings)[1] is not None
    short = Written(refuses("P13", lambda messages, tools: len(messages[1]["tool_calls"][0]["id"]) != 9))
    assert probe.call_shape(short) == (CallShape("dict", True, False), None)


def test_an_error_without_a_cause_gets_the_default_one():
    assert Problem.of(TemplateError("x", cause="P24"), "P10") == Problem("P24", "x")
    assert Problem.of(TemplateError("x"), "P10") == Problem("P10", "x")


def test_a_prompt_is_probed_alone_with_a_system_message_and_with_tools():
    problems: dict[str, Problem] = {}
    probe._probe_prompt(Written(lambda m, tools, gen: plain(m, tools, gen) + json.dumps(tools)), problems)
    assert problems == {}
    probe._probe_prompt(Written(refuses("P10")), problems)
    assert problems == dict.fromkeys(("no_tools", "system", "tools", "prompt"), Problem("P10", "no"))
    problems = {}
    probe._probe_prompt(Written(refuses(None, lambda messages, tools: bool(tools))), problems)
    assert problems == {"tools": Problem("P10", "no")}


def test_turns_with_calls_that_come_back_changed_are_seen():
    assert not probe._rewrites_calls(Written(plain), CallShape(), {})
    changes = Written(lambda messages, tools, gen: plain(messages) + "." * (len(messages) == 3))
    assert probe._rewrites_calls(changes, CallShape(), {})
    assert probe._rewrites_calls(Written(refuses("P10", lambda m, tools: len(m) == 5)), CallShape(), {})
    for shape in ("tool_call", "tool_result"):
        assert not probe._rewrites_calls(changes, CallShape(), {shape: Problem("P", "")})


def test_tools_move_where_a_later_prompt_shows_them_behind_the_first_answer():
    def written(place):
        def write(messages, tools, gen):
            shown = [plain([m]) for m in messages]
            shown.insert(
                {"first": 0, "last": len(shown) - 1, "never": len(shown)}[place], "zqxjkvname" * (place != "never")
            )
            return "".join(shown)

        return Written(write)

    assert [probe._rewrites_prompt(written(place), {}) for place in ("first", "last", "never")] == [False, True, False]
    assert not probe._rewrites_prompt(written("last"), {"tools": Problem("P", "")})
    assert not probe._rewrites_prompt(Written(refuses("P10")), {})


def test_an_empty_block_in_the_place_of_a_reasoning_is_seen():
    for block, seen in (
        ("<think>\n\n</think>", True),
        ("[THINK][/THINK]", True),
        ("<think>x</think>", False),
        ("", False),
    ):
        assert probe._writes_empty_reasoning(Written(lambda *_, block=block: f"a{block}b")) is seen
    assert not probe._writes_empty_reasoning(Written(refuses("P10")))


def test_messages_of_a_probe_have_every_key_that_templates_look_at():
    assert probe.user() == {"role": "user", "content": ASKED} and probe.said() == {"role": "assistant", "content": SAID}
    calls = [
        {"id": f"zqxjkv00{k + 1}", "type": "function",
         "function": {"name": f"zqxjkvname{k}", "arguments": {"query": SAID}}}
        for k in range(2)
    ]  # fmt: skip
    assert probe.caller(2) == {"role": "assistant", "content": "", "tool_calls": calls}
    assert [c["id"] for c in probe.caller(2, "call_1")["tool_calls"]] == ["call_1", "call_2"]
    assert probe.result("x", "y") == {"role": "tool", "content": "x", "tool_call_id": "y", "name": "zqxjkvname0"}
    assert probe.result("x")["tool_call_id"] == "zqxjkv001"
    assert set(probe.schema()["function"]) == {"name", "description", "parameters"}


def test_what_a_full_rendering_changes_is_told_in_words():
    found = TemplateCapabilities(append_only=True)
    assert found.history == ()
    told = "reasoning of earlier turns is dropped"
    assert (
        replace(found, drops_reasoning=True).history
        == replace(found, reasoning_content="dropped_after_user").history
        == (told,)
    )
    every = TemplateCapabilities(rewritten="x", drops_reasoning=True, rewrites_calls=True, rewrites_prompt=True)
    assert every.history == (
        "three plain turns come back changed (x)", told, "turns with tool calls come back changed",
        "tools move to the last user turn",
    )  # fmt: skip
    for shape, name in (("tools", "tools"), ("tool_result", "tools"), ("tool_call", "tool_calls")):
        assert getattr(found, name) and not getattr(replace(found, problems={shape: Problem("P", "")}), name)
    assert found.parallel_calls and not replace(found, problems={"parallel_calls": Problem("P", "")}).parallel_calls


class Between:
    """A delta renderer whose text is a function of the messages that arrive."""

    def __init__(self, write, starts=()):
        self._write, self.starts, self.asked = write, starts, []

    def render(self, env, assistant, *, add_generation_prompt):
        self.asked.append(([m["content"] for m in env], len(assistant.get("tool_calls", ())), add_generation_prompt))
        return SimpleNamespace(body=self._write([m["content"] for m in env], add_generation_prompt))


def test_results_that_share_a_turn_are_merged_and_those_with_headers_are_not():
    shared = Between(lambda shown, gen: "<u>" + "|".join(shown) + "<e>" + "<a>" * gen, ["<u>"])
    assert probe._merges(shared, {})
    assert shared.asked == [([SHOWN, SHOWN_AGAIN], 2, False), ([SHOWN], 1, False), ([SHOWN_AGAIN], 1, False)]
    assert not probe._merges(Between(lambda shown, gen: "".join(f"<u>{text}<e>" for text in shown)), {})
    assert not probe._merges(Between(lambda shown, gen: "<n>" + "".join(f"<u>{text}" for text in shown), ["<u>"]), {})
    assert probe._merges(Between(lambda shown, gen: "<n>" + "".join(f"<u>{text}" for text in shown), ["<n>"]), {})
    assert probe._merges(Between(lambda shown, gen: "<u>" + "|".join(shown)), {})
    assert not probe._merges(shared, {"tool_result": Problem("P", "")})
    assert not probe._merges(TemplateError("x"), {})

    def fails(shown, gen):
        raise TemplateError("no")

    assert not probe._merges(Between(fails), {})


def test_a_turn_that_arrives_is_probed_behind_the_turn_that_it_answers():
    problems: dict[str, Problem] = {}
    shows = Between(lambda shown, gen: "".join(shown))
    probe._probe_turn(shows, "user_turn", probe.user(SHOWN), problems)
    probe._probe_turn(shows, "tool_result", probe.result(SHOWN), problems)
    assert problems == {} and shows.asked == [([SHOWN], 0, True), ([SHOWN], 1, True)]
    probe._probe_turn(Between(lambda shown, gen: ""), "tool_result", probe.result(SHOWN), problems)
    assert problems == {"tool_result": Problem("P16", "the template drops messages of role tool without a word")}

    def fails(shown, gen):
        raise TemplateError("no")

    for shape, cause in (("user_turn", "P10"), ("tool_result", "P16")):
        probe._probe_turn(Between(fails), shape, probe.user(SHOWN), problems)
        assert problems[shape] == Problem(cause, "no")


def test_several_calls_and_text_beside_a_call_must_come_out_whole():
    found: dict[str, Problem] = {}
    probe._probe_calls(Written(plain), CallShape(), found)
    assert found == {}
    part = Problem("P16", "part of the turn is left out without a word")
    for lost, shape in (("zqxjkvname1", "parallel_calls"), ("Zqxjkvthought", "text_with_call")):
        found = {}
        probe._probe_calls(Written(lambda m, tools, gen, lost=lost: plain(m).replace(lost, "")), CallShape(), found)
        assert found == {shape: part}
    found = {}
    probe._probe_calls(Written(refuses(None)), CallShape(), found)
    assert found == dict.fromkeys(("parallel_calls", "text_with_call"), Problem("P16", "no"))
    found = {"tool_call": part}
    probe._probe_calls(Written(plain), CallShape(), found)
    assert found == dict.fromkeys(("tool_call", "parallel_calls", "text_with_call"), part)
    asked = Written(plain)
    probe._probe_calls(asked, CallShape(), {})
    probe._probe_calls(asked, CallShape(), {"tool_result": part})
    turns = [len(roles) for roles, _, _ in asked.asked]
    assert turns == [4, 3, 2, 2]
    ids: list[str] = []
    probe._probe_calls(Written(lambda m, *_: ids.extend(t["tool_call_id"] for t in m[2:]) or ""), CallShape(), {})
    assert ids == ["zqxjkv001", "zqxjkv002", "zqxjkv001"]


def test_a_turn_that_changes_as_soon_as_its_result_comes_is_seen():
    write = Written(lambda messages, tools, gen: plain(messages) + "." * (len(messages) == 2))
    assert probe._rewrites_calls(write, CallShape(), {})


def test_what_becomes_of_reasoning_is_told_from_what_the_template_shows():
    def keeps(key, when=lambda messages: True):
        def write(messages, tools, gen):
            return "".join(m["content"] + m.get(key, "") * when(messages) for m in messages)

        return Written(write)

    def only_last(messages):
        return messages[-1]["role"] != "user"

    def only_calls(messages):
        return only_last(messages) and any("tool_calls" in m for m in messages)

    problem = {"tool_result": Problem("P", "")}
    for key in ("reasoning_content", "thinking", "reasoning"):
        assert probe._probe_reasoning(keeps(key), CallShape(), {}) == (False, key, "kept")
        assert probe._probe_reasoning(keeps(key, only_last), CallShape(), {}) == (False, key, "dropped_after_user")
        assert probe._probe_reasoning(keeps(key, only_calls), CallShape(), {}) == (False, key, "dropped_after_user")
        ignored = (False, "reasoning_content", "ignored")
        assert probe._probe_reasoning(keeps(key, only_calls), CallShape(), problem) == ignored
    assert probe._probe_reasoning(keeps("none"), CallShape(), {}) == (False, "reasoning_content", "ignored")
    drops = Written(lambda messages, tools, gen: messages[-1]["content"])
    assert probe._probe_reasoning(drops, CallShape(), {}) == (True, "reasoning_content", "ignored")
    assert probe._probe_reasoning(Written(refuses("P10")), CallShape(), {}) == (True, "reasoning_content", "ignored")
    for source in ("m.thinking ", "m.get('thinking')", 'm["thinking"]'):
        empty = Written(lambda *_: "<think></think>", source)
        assert probe._probe_reasoning(empty, CallShape(), {}) == (True, "thinking", "dropped_after_user")
