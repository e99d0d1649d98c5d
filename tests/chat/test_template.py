"""Prompts and deltas of templates made here, and the published ones on their own vocabularies."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from chat_toys import (
    CHATML,
    HEADER_ENDS,
    TOOL_CHATML,
    assistant,
    byte_tokenizer,
    call,
    char_tokenizer,
    tool,
    user,
)

from verl_mt.chat import ChatTemplate, render
from verl_mt.chat.template import _grouped
from verl_mt.errors import DataError, TemplateError


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(byte_tokenizer(TOOL_CHATML, eos="<|im_end|>"))


def one(template: ChatTemplate, literal: str) -> int:
    return template.tokenizer.convert_tokens_to_ids(literal)


def after(template, env, turn, last, **more):
    return template.delta_ids(env, history=[user("q"), turn], last_ids=[last], **more)


def test_a_users_turn_begins_with_what_the_template_puts_behind_the_end_token(chat):
    delta = after(chat, [user("next")], assistant("a"), one(chat, "<|im_end|>"))
    assert chat.decode(delta.ids) == "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    assert delta.inserted_end == 0


@pytest.mark.cap("P3", "P4")
def test_the_delta_is_encoded_as_it_would_be_behind_the_end_token(chat):
    delta = after(chat, [user("\n next")], assistant("a"), one(chat, "<|im_end|>"))
    whole = chat.encode_text("<|im_end|>\n<|im_start|>user\n\n next<|im_end|>\n<|im_start|>assistant\n", neutral=False)
    assert delta.ids == whole[1:]


def test_a_malformed_call_can_be_answered_by_a_tool_message(chat):
    delta = after(chat, [{"role": "tool", "content": "bad JSON"}], assistant("<tool_call>{"), one(chat, "<|im_end|>"))
    assert "<tool_response>\nbad JSON\n</tool_response>" in chat.decode(delta.ids)


def test_tool_results_and_a_user_message_can_come_together(chat):
    turn = assistant("", call("f", {}))
    delta = after(chat, [tool("R"), user("and?")], turn, one(chat, "<|im_end|>"))
    assert chat.decode(delta.ids) == (
        "\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_not_repeated_in_a_delta(chat):
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    delta = after(chat, [user("next")], assistant("a"), one(chat, "<|im_end|>"), tools=tools)
    assert "lookup" in chat.decode(chat.prompt_ids([user("q")], tools))
    assert "lookup" not in chat.decode(delta.ids)


@pytest.mark.cap("P18")
def test_where_the_next_header_ends_the_turn_it_stands_there_once():
    chat = ChatTemplate(byte_tokenizer(HEADER_ENDS))
    header, observation = one(chat, "<|user|>"), one(chat, "<|observation|>")
    assert {header, observation, one(chat, "</s>")} == chat.end_token_ids
    sampled = after(chat, [user("x")], assistant("a"), header)
    assert chat.decode(sampled.ids) == "\nx<|assistant|>"
    other = after(chat, [user("x")], assistant("a"), one(chat, "</s>"))
    assert (chat.decode(other.ids), other.inserted_end) == ("<|user|>\nx<|assistant|>", 0)
    cut = after(chat, [user("x")], assistant("a"), 5)
    assert (chat.decode(cut.ids), cut.inserted_end) == ("<|user|>\nx<|assistant|>", 1)
    answered = after(chat, [tool("R")], assistant("", call("f", {})), observation)
    assert chat.decode(answered.ids) == "\nR<|assistant|>"
    assert chat.turn_text([*chat.encode_text("a", neutral=False), header]) == "a"


def test_a_template_that_writes_nothing_between_turns_takes_a_users_message():
    messages = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    chat = ChatTemplate(byte_tokenizer(messages + "{% if add_generation_prompt %}<|im_start|>{% endif %}"))
    assert chat.decode(after(chat, [user("next")], assistant("a"), 5).ids) == "next<|im_start|>"


def test_a_call_ends_where_other_turns_do_whatever_the_template_writes_behind_it():
    end = "{% endfor %}{{ '<|im_end|>\n' }}"
    source = TOOL_CHATML.replace(end, "{% endfor %}<|im_end|>{% if m.tool_calls %}<|observation|>{% endif %}{{ '\n' }}")
    chat = ChatTemplate(byte_tokenizer(source))
    assert chat.end_token_ids == {one(chat, "<|im_end|>"), one(chat, "</s>")}
    delta = after(chat, [tool("R")], assistant("", call("f", {})), one(chat, "<|im_end|>"))
    assert chat.decode(delta.ids).startswith("<|observation|>\n<|im_start|>user\n<tool_response>\nR")


def test_text_behind_a_call_may_differ_from_call_to_call():
    source = TOOL_CHATML.replace(
        "c.function.name + ' ' + c.function.arguments|tojson", "c.function.arguments|tojson + ' ' + c.function.name"
    )
    assert source != TOOL_CHATML
    chat = ChatTemplate(byte_tokenizer(source, eos="<|im_end|>"))
    shown = "\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    for name in ("search", "add", "search"):
        turn = assistant("", call(name, {"a": 1}))
        ended = after(chat, [tool("R")], turn, one(chat, "<|im_end|>"))
        assert (chat.decode(ended.ids), ended.inserted_end) == (shown, 0)
        cut = after(chat, [tool("R")], turn, 5)
        assert (chat.decode(cut.ids), cut.inserted_end) == ("<|im_end|>" + shown, 1)


def test_an_end_token_that_only_history_uses_is_no_stop_token():
    """As gpt-oss: the last turn ends with another token than earlier turns."""
    end = "('</s>' if loop.last and m.role == 'assistant' else '<|im_end|>') + '\n'"
    tokenizer = byte_tokenizer(CHATML.replace("'<|im_end|>\n'", end))
    chat = ChatTemplate(tokenizer)
    last, earlier = one(chat, "</s>"), one(chat, "<|im_end|>")
    assert chat.end_token_ids == {last, earlier} and chat.stop_token_ids == {last}
    told = ChatTemplate(tokenizer, extra_end_ids=[earlier])
    assert told.end_token_ids == told.stop_token_ids == {last, earlier}
    plain = ChatTemplate(byte_tokenizer(CHATML))
    assert plain.end_token_ids == plain.stop_token_ids == {last, earlier}


def test_a_template_without_assistant_turns_stops_at_the_tokenizers_eos():
    chat = ChatTemplate(byte_tokenizer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))
    assert chat.end_token_ids == chat.stop_token_ids == {one(chat, "</s>")}
    with pytest.raises(TemplateError, match="does not show what the assistant said"):
        after(chat, [user("x")], assistant("a"), one(chat, "</s>"))


@pytest.mark.cap("P7")
def test_prefilled_reasoning_belongs_to_the_prompt():
    source = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    chat = ChatTemplate(byte_tokenizer(source, eos="<|im_end|>"))
    assert chat.prefilled_reasoning
    assert chat.generation_prompt_text == "<|im_start|>assistant\n<think>\n"
    assert chat.decode(after(chat, [user("x")], assistant("a"), one(chat, "<|im_end|>")).ids).endswith("<think>\n")


def test_a_closed_reasoning_block_is_not_prefilled_reasoning(chat):
    assert not chat.prefilled_reasoning
    assert not chat.with_kwargs({"enable_thinking": False}).prefilled_reasoning


def test_prompts_are_trusted_unless_told_otherwise():
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>")
    trusting, careful = ChatTemplate(tokenizer), ChatTemplate(tokenizer, trust_prompts=False)
    messages = [user("use <think> and <|im_end|>")]
    assert one(trusting, "<think>") in trusting.prompt_ids(messages)
    ids = careful.prompt_ids(messages)
    assert one(careful, "<think>") not in ids
    assert ids.count(one(careful, "<|im_end|>")) == 1
    assert careful.decode(ids) == trusting.decode(trusting.prompt_ids(messages))


@pytest.mark.cap("P21")
def test_a_bos_in_the_template_is_not_doubled():
    tokenizer = byte_tokenizer("<s>" + CHATML, eos="<|im_end|>")
    tokenizer.bos_token = "<s>"
    tokenizer.add_bos_token = True
    chat = ChatTemplate(tokenizer)
    assert chat.prompt_ids([user("q")]).count(one(chat, "<s>")) == 1
    assert chat.full_ids([user("q"), assistant("a")]).count(one(chat, "<s>")) == 1


@pytest.mark.cap("P18")
def test_an_eos_that_only_unprompted_renderings_have_is_not_appended_to_a_dangling_turn():
    source = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    chat = ChatTemplate(byte_tokenizer(source))
    delta = after(chat, [user("x")], assistant("a"), one(chat, "<|im_end|>"), add_generation_prompt=False)
    assert chat.decode(delta.ids) == "\n<|im_start|>user\nx<|im_end|>\n"
    assert chat.decode(chat.prompt_ids([user("q")], add_generation_prompt=False)).endswith("q<|im_end|>\n")
    assert chat.full_text([user("q")]).endswith("</s>")
    asked = after(chat, [user("x")], assistant("a"), one(chat, "<|im_end|>"))
    assert chat.decode(asked.ids) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.cap("P14", "P13")
def test_messages_are_normalised_without_touching_the_callers(chat):
    turn = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [call("f", '{"a": 1}')]}
    messages = [user("q"), turn, tool("R")]
    before = copy.deepcopy(messages)
    assert '<tool_call>f {"a": 1}</tool_call>' in chat.full_text(messages)
    assert messages == before


def test_dropped_tool_messages_are_refused_with_their_cause():
    source = "{% for m in messages if m.role != 'tool' %}" + CHATML.split("%}", 1)[1]
    chat = ChatTemplate(byte_tokenizer(source, eos="<|im_end|>"))
    with pytest.raises(TemplateError, match="drops messages of role tool") as caught:
        after(chat, [tool("R")], assistant("", call("f", {})), one(chat, "<|im_end|>"))
    assert caught.value.cause == "P16"
    with pytest.raises(TemplateError, match=r"tool_result.*custom_chat_template") as caught:
        chat.require(tools=True, interaction=False)
    assert caught.value.cause == "P16"
    chat.require(tools=False, interaction=True)


def test_a_tokenizer_without_template_is_refused_at_once():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(tokenizer)


def test_a_named_template_is_chosen_by_the_conversations_tools():
    tokenizer = byte_tokenizer("", eos="<|im_end|>")
    tokenizer.chat_template = {"default": CHATML, "tool_use": "TOOLS" + TOOL_CHATML}
    chat = ChatTemplate(tokenizer)
    assert not chat.full_text([user("q")]).startswith("TOOLS")
    assert chat.full_text([user("q")], [{"type": "function"}]).startswith("TOOLS")
    turn = assistant("", call("f", {}))
    plain = after(chat, [tool("R")], turn, one(chat, "<|im_end|>"))
    with_tools = after(chat, [tool("R")], turn, one(chat, "<|im_end|>"), tools=[{"type": "function"}])
    assert "tool_response" not in chat.decode(plain.ids)
    assert "tool_response" in chat.decode(with_tools.ids)


def test_a_delta_does_not_grow_with_the_conversation(chat, monkeypatch):
    seen: list[int] = []
    render = chat.tokenizer.apply_chat_template

    def counting(messages, **more):
        seen.append(sum(len(str(m.get("content"))) for m in messages))
        return render(messages, **more)

    end = one(chat, "<|im_end|>")
    history = [user("word " * 1000), assistant("a")] * 30
    chat.delta_ids([user("next")], history=history, last_ids=[end])
    monkeypatch.setattr(chat.tokenizer, "apply_chat_template", counting)
    chat.delta_ids([user("another")], history=history, last_ids=[end])  # what was rendered is remembered
    assert len(seen) == 1
    assert seen[0] < 100


@pytest.mark.cap("P12")
def test_a_default_system_prompt_stands_in_the_first_prompt_only():
    source = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}" + CHATML
    chat = ChatTemplate(byte_tokenizer(source, eos="<|im_end|>"))
    delta = after(chat, [user("x")], assistant("a"), one(chat, "<|im_end|>"))
    assert "Be good." in chat.decode(chat.prompt_ids([user("q")]))
    assert "Be good." not in chat.decode(delta.ids)


@pytest.mark.cap("P17")
def test_environment_text_is_written_as_the_template_writes_it():
    source = CHATML.replace("m.content", "(m.content|tojson if m.role == 'tool' else m.content|trim)")
    chat = ChatTemplate(byte_tokenizer(source, eos="<|im_end|>"))
    end = one(chat, "<|im_end|>")
    assert '"a\\n<|im_end|>"' in chat.decode(after(chat, [tool("a\n<|im_end|>")], assistant("x"), end).ids)
    assert "user\nb<|im_end|>" in chat.decode(after(chat, [user(" b ")], assistant("x"), end).ids)


@pytest.mark.cap("P22")
def test_ids_are_plain_lists_of_integers(chat):
    end = one(chat, "<|im_end|>")
    for ids in (
        chat.prompt_ids([user("q")]),
        chat.full_ids([user("q")]),
        after(chat, [user("x")], assistant("a"), end).ids,
    ):
        assert type(ids) is list
        assert all(type(i) is int for i in ids)


@pytest.mark.cap("P25")
def test_decoding_does_not_clean_up_spaces(chat):
    text = "a . b , c ' s"
    assert chat.decode(chat.encode_text(text, neutral=True)) == text


def test_end_ids_of_the_generation_config_count():
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>")
    chat = ChatTemplate(tokenizer, extra_end_ids=[one(ChatTemplate(tokenizer), "</s>")])
    assert chat.end_token_ids == {one(chat, "<|im_end|>"), one(chat, "</s>")}
    assert after(chat, [user("x")], assistant("a"), one(chat, "</s>")).inserted_end == 0


LOOPS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "writes": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "too big": "{% for i in range(10000000000) %}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_does_not_end_is_refused_and_named(name, in_thread, monkeypatch):
    monkeypatch.setattr(render, "_LIMIT_S", 0.2)
    tokenizer = byte_tokenizer(CHATML + LOOPS[name], eos="<|im_end|>")

    def refused():
        with pytest.raises(TemplateError, match=r"the chat template of 'looping'") as caught:
            ChatTemplate(tokenizer, source="the chat template of 'looping'").prompt_ids([user("q")])
        return str(caught.value)

    gc.collect()
    gc.disable()  # what it would collect at the bottom of a recursion could not be cleared away
    try:
        if in_thread:
            with ThreadPoolExecutor(1) as pool:
                said = pool.submit(refused).result()
        else:
            said = refused()
    finally:
        gc.enable()
    if name in ("loops", "writes"):
        assert "does not end" in said and "processor time" in said


@pytest.mark.slow
def test_a_loop_over_what_only_tools_bring_stops_the_probe_too(monkeypatch):
    monkeypatch.setattr(render, "_LIMIT_S", 0.2)
    source = TOOL_CHATML + "{% if tools %}" + LOOPS["loops"] + "{% endif %}"
    chat = ChatTemplate(byte_tokenizer(source, eos="<|im_end|>"))
    assert "does not end" in chat.capabilities.problems["tools"].text
    with pytest.raises(TemplateError, match="does not end"):
        chat.require(tools=True, interaction=False)
    chat.require(tools=False, interaction=True)


def test_a_rendering_that_ends_in_time_is_left_alone(chat, monkeypatch):
    """Also when the watch looks at it at that very moment: what was sent to it does not arrive later."""
    monkeypatch.setattr(render, "_LOOK_S", 0.0)
    for limit_s in (1e-5, 1e-4, 1e-3):
        for _ in range(300):
            with contextlib.suppress(render._OutOfTime):
                assert render._WATCH.run(lambda: "".join(map(str, range(300))), limit_s)
            assert sum(range(2000)) == 1999000
    assert not render._WATCH._running


def test_an_interrupt_at_any_moment_of_a_rendering_leaves_nothing_to_the_watch(monkeypatch):
    """As Ctrl-C or a timer's signal comes: also while a rendering is entered into the set or taken out of it."""
    monkeypatch.setattr(render, "_LOOK_S", 0.001)
    watch = render._Watch()

    armed = False

    def interrupt(*_):
        nonlocal armed
        if armed:  # nobody would catch what is raised behind the block: by a signal at its end, or by a second one,
            armed = False  # of the timer of this turn after a late one of the turn before
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    interrupted = 0
    try:
        for i in range(1500):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + i % 100 * 1e-6)
                while True:
                    watch.run(str, 0.01)
            except KeyboardInterrupt:
                interrupted += 1
                assert not watch._running
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    assert interrupted == 1500
    assert not watch._running
    begun = time.thread_time()
    while time.thread_time() - begun < 0.05:  # past the limit: whatever was left would arrive here
        pass


def test_a_rendering_whose_code_swallows_the_interrupt_is_interrupted_again(monkeypatch):
    monkeypatch.setattr(render, "_LOOK_S", 0.001)
    swallowed = []

    def stubborn():
        while True:
            try:
                while True:
                    pass
            except render._OutOfTime:
                swallowed.append(1)
                if len(swallowed) == 3:
                    raise

    with pytest.raises(render._OutOfTime):
        render._Watch().run(stubborn, 0.01)
    assert len(swallowed) == 3


def test_a_debugger_can_trace_a_process_in_which_a_rendering_was_interrupted(monkeypatch):
    """CPython 3.11 hangs at a traced call, deaf to signals, where an interrupt was taken back: so in a fork."""
    monkeypatch.setattr(render, "_LOOK_S", 0.001)

    def endless():
        while True:
            pass

    child = os.fork()
    if child == 0:
        try:
            with contextlib.suppress(render._OutOfTime):
                render._Watch().run(endless, 0.01)
            sys.settrace(lambda *_: None)
            time.sleep((lambda: 0)())
            os._exit(0)
        finally:
            os._exit(1)
    end, status = time.monotonic() + 60, (0, 0)
    while status == (0, 0) and time.monotonic() < end:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    if status == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == (child, 0)


def test_a_time_limit_counts_processor_time_of_the_thread_or_five_times_longer_wall_time(monkeypatch):
    clocks = {"clock_gettime": lambda number: number + 0.5, "monotonic": lambda: 100.0, "sleep": time.sleep}
    thread = threading.get_ident()

    def ends_at(**more):
        monkeypatch.setattr(render, "time", SimpleNamespace(**clocks, **more))
        watch, found = render._Watch(), []
        watch.run(lambda: str(found.extend(r.ends_at for r in watch._running)), 3.0)
        return found

    assert ends_at(pthread_getcpuclockid=lambda asked: 7 if asked == thread else 0) == [7 + 0.5 + 3.0]
    assert ends_at() == [100.0 + 5 * 3.0]


WATCHED = """
import random, sys, threading, time
import jinja2
from verl_mt.chat import render

render._LOOK_S = 2e-4
sys.setswitchinterval(1e-4)
sys.unraisablehook = lambda *_: None
template = jinja2.Environment().from_string({source!r})
watch, random = render._Watch(), random.Random(1)

def once():
    try:
        watch.run(template.render, random.uniform(0.0005, 0.03))
    except (RecursionError, render._OutOfTime):
        pass

begun = time.monotonic()
while time.monotonic() - begun < 6:
    thread = threading.Thread(target=once)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_looking_after_deep_renderings_never_breaks_the_process():
    """CPython 3.11 ends with a segmentation fault where one thread walks the frames of another that runs: within 3 s
    here, when the watch did."""
    done = subprocess.run([sys.executable, "-c", WATCHED.format(source=LOOPS["calls itself"])], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_one_slow_conversation_takes_no_time_from_the_others(monkeypatch):
    """The short limit after a refusal is for probes alone."""
    monkeypatch.setattr(render, "_LIMIT_S", 0.4)
    monkeypatch.setattr(render, "_NEXT_LIMIT_S", 0.001)
    loop = "{% for m in messages %}{% for i in range(m.content|length) %}{% for j in range(2000) %}{% endfor %}"
    chat = ChatTemplate(byte_tokenizer(CHATML + loop + "{% endfor %}{% endfor %}", eos="<|im_end|>"))
    assert chat.capabilities.append_only
    for _ in range(2):
        with pytest.raises(TemplateError, match="does not end"):
            chat.full_text([user("x" * 99999)])
        assert chat.full_text([user("x" * 50)])
        assert chat.delta_ids([user("x" * 50)], history=[user("q"), assistant("a")], last_ids=[1]).ids


def test_steps_are_grouped_into_what_arrived_and_the_sample_behind_it():
    one, two = {"type": "sample", "ids": [1]}, {"type": "sample", "ids": (2,)}
    a, b = {"type": "env", "messages": [user("a")]}, {"type": "env", "messages": (user("b"),)}
    assert _grouped([]) == [([], None)]
    assert _grouped([one]) == [([], one)]
    assert _grouped([a, b, one, two, a]) == [([user("a"), user("b")], one), ([], two), ([user("a")], None)]
    for wrong in (
        {"type": "env"},
        {"type": "sample", "ids": 3},
        {"type": "x"},
        "text",
        {"type": "env", "messages": "x"},
    ):
        with pytest.raises(DataError, match=r"^steps\[1\]: expected"):
            _grouped([one, wrong])


def test_a_text_in_the_middle_of_a_turn_is_encoded_without_control_tokens(chat):
    for text in ("a", " a", "\n", "", "<|im_end|> x"):
        ids = chat.continuation_ids(text)
        assert chat.decode(ids) == text and chat._encoder.control_ids(ids) == []
    assert chat.turn_text([]) == "" and chat.turn_text([one(chat, "<|im_end|>")]) == ""
    assert chat.turn_text([*chat.encode_text("ab", neutral=False)]) == "ab"


def test_prompts_and_arrived_messages_are_rendered_together_and_only_these_are_neutral(chat):
    arrived = [assistant("<think>"), user("<think>")]
    ids = chat.mixed_prompt_ids([user("<think>")], arrived, add_generation_prompt=False)
    shown = "".join(f"<|im_start|>{m['role']}\n<think><|im_end|>\n" for m in (user(""), *arrived))
    assert chat.decode(ids) == shown and ids.count(one(chat, "<think>")) == 2
    careful = ChatTemplate(chat.tokenizer, trust_prompts=False)
    assert careful.mixed_prompt_ids([user("<think>")], arrived).count(one(chat, "<think>")) == 0
    assert chat.prompt_ids([user("q")], []) == chat.prompt_ids([user("q")], None)
    assert not chat.surely_longer([user("q")], None, 10) and chat.surely_longer([user("q " * 4000)], None, 10)


def test_what_a_run_needs_of_a_template_is_required(chat):
    chat.require(tools=True, interaction=True)
    silent = ChatTemplate(byte_tokenizer(CHATML, eos="<|im_end|>"))
    with pytest.raises(TemplateError, match=r"needs: tools: .* \[P16\]\. Choose") as caught:
        silent.require(tools=True, interaction=True)
    assert caught.value.cause == "P16"
    silent.require(tools=False, interaction=True)


def test_a_replay_inserts_a_lost_end_and_warns_once_for_it(chat):
    end, text = one(chat, "<|im_end|>"), lambda s: chat.encode_text(s, neutral=False)
    steps = [
        {"type": "sample", "ids": [*text("a"), end]},
        {"type": "env", "messages": [user("x")]},
        {"type": "sample", "ids": text("b")},
        {"type": "env", "messages": [user("y")]},
    ]
    with pytest.warns(UserWarning, match="sampled turn 2 lacks its end token"):
        ids, mask = chat.replayed([user("q")], None, steps)
    said = "".join(
        f"<|im_start|>{role}\n{words}<|im_end|>\n"
        for role, words in (("user", "q"), ("assistant", "a"), ("user", "x"), ("assistant", "b"), ("user", "y"))
    )
    assert chat.decode(ids) == said and len(mask) == len(ids)
    assert [chat.decode([i]) for i, m in zip(ids, mask) if m] == ["a", "<|im_end|>", "b"]
    assert chat.replayed([user("q")], None, []) == (prompt := chat.prompt_ids([user("q")]), [0] * len(prompt))
    ended, _ = chat.replayed([user("q")], None, steps[:1])
    assert ended == [*prompt, *text("a"), end]


def test_a_result_belongs_to_the_call_that_it_names_whatever_their_order():
    shows_names = TOOL_CHATML.replace("m.content + '\n</tool", "m.name + '=' + m.content + '\n</tool")
    chat = ChatTemplate(byte_tokenizer(shows_names))
    calls = [
        {"id": f"c{k}", "type": "function", "function": {"name": name, "arguments": {}}}
        for k, name in enumerate(("first", "second", "third"))
    ]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    results = [{"role": "tool", "tool_call_id": f"c{k}", "content": str(k)} for k in (2, 0, 1)]
    text = chat.decode(chat.delta_ids(results, history=history, last_ids=[0]).ids)
    assert re.findall(r"\w+=\d", text) == ["third=2", "first=0", "second=1"]
