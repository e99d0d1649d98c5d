"""The sanity check on streams whose mismatches are known, with pinned numbers of the toy ChatML."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from conformance_table import generic_template
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_chat import END, ToyChat, assistant, chatml, decode, encode, stream, user

from verl_mt.chat import load_chat, replay
from verl_mt.chat.sanity import (
    WARNING,
    Cause,
    Comparison,
    Finding,
    Mismatch,
    SanityMode,
    SanityMonitor,
    _known_texts,
    brief_text,
    check,
    combine,
    parse_mode,
    render_failure,
    warning_text,
)
from verl_mt.errors import ConfigError, TemplateError

STRICT, IGNORE, OFF = SanityMode.STRICT, SanityMode.IGNORE_STRIPPABLE, SanityMode.OFF
U1, GEN = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
U2 = "\n<|im_start|>user\nU2<|im_end|>\n" + GEN
TWO_TURNS = [user("Hi"), assistant("A1"), user("U2"), assistant("A2")]


def strip_old_think(messages, tools=None, **kw):
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    kept = [
        {**m, "content": re.sub(r"<think>.*?</think>\s*", "", m["content"], flags=re.DOTALL)}
        if m["role"] == "assistant" and i < last
        else m
        for i, m in enumerate(messages)
    ]
    return chatml(kept, tools, **kw)


def run(chat, messages, parts, mode=STRICT, tools=None, **kw):
    token_ids, sampled = stream(*parts)
    return check(chat, messages=messages, tools=tools, token_ids=token_ids, sampled=sampled, mode=mode, **kw)


@pytest.mark.cap("V6")
@pytest.mark.parametrize("mode", SanityMode)
def test_two_turns_of_the_toy_chatml_are_clean_in_every_mode(mode):
    parts = (U1 + GEN, "A1<|im_end|>", U2, "A2<|im_end|>")
    token_ids, sampled = stream(*parts)
    assert (len(token_ids), sum(sampled)) == (49, 6)
    assert run(ToyChat(), TWO_TURNS, parts, mode) is None


def test_a_dangling_user_message_is_behind_the_last_sampled_token_and_not_looked_at():
    messages = [user("Hi"), assistant("A1"), user("U2")]
    assert run(ToyChat(strip_old_think), messages, (U1 + GEN, "A1<|im_end|>", U2)) is None
    assert run(ToyChat(strip_old_think), messages, (U1 + GEN, "A1<|im_end|>")) is None


def test_a_stream_without_sampled_tokens_is_not_rendered():
    chat = ToyChat()
    assert run(chat, [user("Hi")], (U1 + GEN,)) is None
    assert chat.renders == 0


@pytest.mark.cap("V7")
@pytest.mark.parametrize("value", ["off", "disable", False])
def test_off_renders_nothing(value):
    chat = ToyChat()
    parts = ("other prompt", "A1<|im_end|>")
    assert run(chat, TWO_TURNS, parts, parse_mode(value)) is None
    assert chat.renders == 0


@pytest.mark.cap("V7")
def test_modes_are_read_and_anything_else_is_refused():
    assert parse_mode("strict") is STRICT
    assert parse_mode("ignore_strippable") is IGNORE
    for value in ("STRICT", True, None, 0, "none", 1.5, []):
        with pytest.raises(ConfigError, match="tokenization_sanity_check_mode"):
            parse_mode(value)


@pytest.mark.cap("V7", "P5")
def test_dropped_old_reasoning_is_found_in_both_modes_and_named():
    messages = [user("Hi"), assistant("<think>r1</think>\n\nA1"), user("U2"), assistant("A2")]
    parts = (U1 + GEN, "<think>r1</think>\n\nA1<|im_end|>", U2, "A2<|im_end|>")
    for mode in (STRICT, IGNORE):
        finding = run(ToyChat(strip_old_think), messages, parts, mode)
        assert finding.cause is Cause.STRIPPED_REASONING
        assert finding.causes == (Cause.STRIPPED_REASONING,)
        assert finding.spans[0].recorded == "<think>r1</think>\n\n"
        assert finding.spans[0].rendered == ""
        assert finding.in_budget
        assert "A1" in finding.recorded and "A1" in finding.rendered
    assert run(ToyChat(strip_old_think), messages, parts, OFF) is None


def test_a_finding_shows_six_tokens_before_and_behind_the_difference():
    messages = [user("Hi"), assistant("<think>r1</think>\n\nA1"), user("U2"), assistant("A2")]
    parts = (U1 + GEN, "<think>r1</think>\n\nA1<|im_end|>", U2, "A2<|im_end|>")
    inside = run(ToyChat(strip_old_think), messages, parts)
    assert inside.start == len(encode(U1 + GEN))
    assert inside.recorded == "stant\n<think>r1</think>\n\nA1<|im_end|>\n<|im_start|>u"
    assert inside.rendered == "stant\nA1<|im_end|>\n<|im_start|>u"
    first = run(ToyChat(), [user("Hi"), assistant("A1")], (U1.replace("Hi", "Ho") + GEN, "A1<|im_end|>"))
    assert (first.start, first.recorded) == (7, "user\nHo<|im_end|>\n<|im_start|>ass")
    near = run(ToyChat(), [user("Hi"), assistant("A1")], ("<|im_start|>x" + U1[13:] + GEN, "A1<|im_end|>"))
    assert (near.start, near.recorded, near.rendered) == (1, "<|im_start|>xser\nHi", "<|im_start|>user\nHi")


@pytest.mark.cap("P7")
def test_prefilled_reasoning_that_the_rendering_drops_is_stripped_reasoning():
    messages = [user("Hi"), assistant("A1"), user("U2"), assistant("A2")]
    parts = (U1 + GEN + "<think>\n", "r1</think>\n\nA1<|im_end|>", U2, "A2<|im_end|>")
    assert run(ToyChat(), messages, parts).causes == (Cause.STRIPPED_REASONING,)


EMPTY = "<think>\n\n</think>\n\n"


def empty_block_in_the_last_turn(messages, tools=None, *, add_generation_prompt=False):
    """Qwen3 with `enable_thinking=False`: the generation prompt begins with it, and so does the last finished turn."""
    shown = [*messages[:-1], *({**m, "content": EMPTY + m["content"]} for m in messages[-1:] if m["role"] != "user")]
    shown += [m for m in messages[-1:] if m["role"] == "user"]
    return chatml(shown, tools, add_generation_prompt=add_generation_prompt) + EMPTY * add_generation_prompt


NOT_THINKING = (U1 + GEN + EMPTY, "A1<|im_end|>", U2 + EMPTY, "A2<|im_end|>")


@pytest.mark.cap("P5", "V6", "V7")
@pytest.mark.parametrize("mode", [STRICT, IGNORE])
def test_an_empty_think_block_of_the_generation_prompt_has_its_own_cause_and_is_no_mismatch(mode, caplog):
    finding = run(ToyChat(empty_block_in_the_last_turn), TWO_TURNS, NOT_THINKING, mode)
    (span,) = finding.spans
    assert (span.cause, span.recorded, span.rendered) == (Cause.GENERATION_PROMPT, EMPTY, "")
    assert stream(*NOT_THINKING)[0][span.start : span.end] == encode(EMPTY)
    assert (finding.in_budget, finding.counted) == (False, ())
    assert finding.to_row()["counted"] == []
    monitor = SanityMonitor(mode, max_mismatch_rate=0.0)
    with caplog.at_level(logging.INFO):
        monitor.observe(finding)
        monitor.observe(finding)
    (logged,) = caplog.records
    assert logged.levelno == logging.INFO and "generation_prompt" in logged.getMessage()
    assert monitor.metrics() == {"sanity/mismatch_rate": 0.0, "sanity/generation_prompt": 2.0}
    assert run(ToyChat(empty_block_in_the_last_turn), TWO_TURNS[:2], NOT_THINKING[:2], mode) is None


@pytest.mark.cap("P5")
@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "google-gemma-4-31B-it", "deepseek-ai-DeepSeek-V3.2", "SmolLM3-ort"]
)
def test_published_templates_without_thinking_show_no_mismatch(shared_data, name):
    chat = generic_template(shared_data / "templates" / f"{name}.jinja").with_kwargs({"enable_thinking": False})
    end, messages, steps = min(chat.stop_token_ids), [user("Hi")], []
    for text in ("A1", "A2", "A3"):
        steps.append({"type": "sample", "ids": [*chat.encode_text(text, neutral=False), end]})
        messages += [assistant(text), user("Go on")]
        steps.append({"type": "env", "messages": messages[-1:]})
    ids, sampled = replay(chat, messages[:1], None, steps)
    finding = check(chat, messages=messages, tools=None, token_ids=ids, sampled=sampled, mode=STRICT)
    assert finding is None or finding.causes == (Cause.GENERATION_PROMPT,)
    assert (finding is None) == (name == "SmolLM3-ort")


@pytest.mark.cap("P2", "P5")
def test_behind_an_empty_think_block_everything_else_is_still_compared():
    chat = ToyChat(empty_block_in_the_last_turn)
    odd = [user("Hi"), assistant("Hello"), user("U2"), assistant("A2")]
    parts = (NOT_THINKING[0], encode("Hello<|im_end|>", merge=False), *NOT_THINKING[2:])
    retokenized = run(chat, odd, parts)
    assert retokenized.causes == (Cause.GENERATION_PROMPT, Cause.RETOKENIZED)
    assert (retokenized.cause, retokenized.counted) == (Cause.RETOKENIZED, (Cause.RETOKENIZED,))
    other = run(chat, [user("Hi"), assistant("B1"), *TWO_TURNS[2:]], NOT_THINKING)
    assert (other.cause, other.in_budget) == (Cause.REWRITES_HISTORY, True)
    assert other.causes == (Cause.GENERATION_PROMPT, Cause.REWRITES_HISTORY)
    whole = combine([run(chat, TWO_TURNS, NOT_THINKING), retokenized])
    assert (whole.cause, whole.record) == (Cause.RETOKENIZED, 1)


PREFILL = GEN + "<think>\n"


def keeps_the_last_answer_whole(messages, tools=None, *, add_generation_prompt=False):
    """QwQ: the generation prompt opens the reasoning, finished turns do not show that; old ones show none of it."""
    bare = [{**m, "content": m["content"].split("</think>")[-1].lstrip("\n")} for m in messages[:-1]]
    text = chatml([*bare, *messages[-1:]], tools, add_generation_prompt=add_generation_prompt)
    return text + ("<think>\n" if add_generation_prompt else "")


def shows_no_reasoning(messages, tools=None, *, add_generation_prompt=False):
    """R1: as QwQ, and the last answer shows none either."""
    bare = [{**m, "content": m["content"].split("</think>")[-1]} for m in messages]
    return chatml(bare, tools, add_generation_prompt=add_generation_prompt) + (
        "<think>\n" if add_generation_prompt else ""
    )


@pytest.mark.cap("P7")
@pytest.mark.parametrize("template", [keeps_the_last_answer_whole, shows_no_reasoning])
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_a_prefilled_think_is_no_mismatch_in_the_last_turn(template, end):
    for written in ("r1</think>\n\nA1", "r1</think>A1", "r1 goes on and", "</think>\n\nA1", "r1</think>"):
        messages = [user("Hi"), assistant(written)]
        assert run(ToyChat(template), messages, (U1 + PREFILL, written + end), stop_length=not end) is None


@pytest.mark.cap("P5", "P7")
@pytest.mark.parametrize("template", [keeps_the_last_answer_whole, shows_no_reasoning])
def test_behind_a_prefilled_think_old_reasoning_that_disappears_is_the_only_finding(template):
    messages = [user("Hi"), assistant("r1</think>\n\nA1"), user("U2"), assistant("r2</think>\n\nA2")]
    parts = (U1 + PREFILL, "r1</think>\n\nA1<|im_end|>", U2 + "<think>\n", "r2</think>\n\nA2<|im_end|>")
    finding = run(ToyChat(template), messages, parts)
    assert finding.causes == (Cause.STRIPPED_REASONING,) and finding.in_budget
    (span,) = finding.spans
    assert span.end <= len(stream(*parts[:2])[0])
    assert "r1" in span.recorded and "r1" not in span.rendered


@pytest.mark.cap("P2", "P7")
def test_behind_a_prefilled_think_everything_else_is_still_compared():
    chat = ToyChat(keeps_the_last_answer_whole)
    other = run(chat, [user("Hi"), assistant("r1</think>\n\nA2")], (U1 + PREFILL, "r1</think>\n\nA1<|im_end|>"))
    assert other.cause is Cause.REWRITES_HISTORY
    odd = encode("r1</think>\n\nHello<|im_end|>", merge=False)
    retokenized = run(chat, [user("Hi"), assistant("r1</think>\n\nHello")], (U1 + PREFILL, odd))
    assert (retokenized.causes, retokenized.in_budget) == ((Cause.RETOKENIZED,), False)


def cut(prompt, how, limit):
    """`data.truncation`: ids of a prompt that is longer than `limit`."""
    ids = encode(prompt)
    head = {"left": 0, "right": limit, "middle": limit // 2}[how]
    return [*ids[:head], *(ids[head - limit :] if limit > head else [])]


LONG = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nWhat is it, please?<|im_end|>\n"
ASKED = [{"role": "system", "content": "You are helpful."}, user("What is it, please?")]


@pytest.mark.parametrize("template", [chatml, keeps_the_last_answer_whole])
@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_a_prompt_that_was_cut_is_truncation_and_not_against_the_budget(template, how):
    chat = ToyChat(template)
    for limit in (4, 20, 40, 60):
        prompt = cut(LONG + chat.generation_prompt_text, how, limit)
        one = run(chat, [*ASKED, assistant("A1")], (prompt, "A1<|im_end|>"), prompt_truncated=True)
        assert (one.causes, one.in_budget) == ((Cause.TRUNCATION,), False)
        assert run(chat, [*ASKED, assistant("A1")], (prompt, "A1<|im_end|>")).in_budget
        json.dumps(one.to_row())
    ids = cut(LONG + GEN, "left", 30)
    lost = run(ToyChat(), [*ASKED, assistant("A1")], (ids, "A1<|im_end|>"), prompt_truncated=True).spans[0].rendered
    assert encode(lost) + ids == encode(LONG + GEN)


@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_behind_a_cut_prompt_everything_else_is_still_compared(how):
    prompt = cut(LONG + GEN, how, 30)
    messages = [*ASKED, assistant("<think>r1</think>\n\nA1"), user("U2"), assistant("A2")]
    parts = (prompt, "<think>r1</think>\n\nA1<|im_end|>", U2, "A2<|im_end|>")
    clean = run(ToyChat(), messages, parts, prompt_truncated=True)
    assert (clean.causes, clean.in_budget) == ((Cause.TRUNCATION,), False)
    finding = run(ToyChat(strip_old_think), messages, parts, prompt_truncated=True)
    assert finding.causes == (Cause.TRUNCATION, Cause.STRIPPED_REASONING)
    assert (finding.cause, finding.in_budget) == (Cause.STRIPPED_REASONING, True)


@pytest.mark.parametrize("last", ["", "A", "A2"])
def test_a_cut_prompt_is_found_before_last_turns_of_any_length(last):
    prompt = cut(LONG + GEN, "left", 30)
    parts = (prompt, "A1<|im_end|>", U2, f"{last}<|im_end|>")
    messages = [*ASKED, assistant("A1"), user("U2"), assistant(last)]
    finding = run(ToyChat(), messages, parts, prompt_truncated=True)
    (span,) = finding.spans
    assert (span.cause, span.recorded, finding.in_budget) == (Cause.TRUNCATION, "", False)
    assert encode(span.rendered) + prompt == encode(LONG + GEN)


def test_a_cut_prompt_that_the_finished_conversation_writes_in_another_way_blames_no_one():
    def moves(messages, tools=None, **kw):
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = [{**m, "content": f"[T] {m['content']}"} if i == last else m for i, m in enumerate(messages)]
        return chatml(shown, tools, **kw)

    prompt = cut("<|im_start|>user\n[T] What is it, please?<|im_end|>\n" + GEN, "right", 20)
    messages = [user("What is it, please?"), assistant("A1"), user("U2"), assistant("A2")]
    parts = (prompt, "A1<|im_end|>", U2.replace("U2", "[T] U2"), "A2<|im_end|>")
    finding = run(ToyChat(moves), messages, parts, prompt_truncated=True)
    assert (finding.causes, finding.in_budget) == ((Cause.TRUNCATION,), False)


@pytest.mark.slow
@pytest.mark.cap("P7")
@pytest.mark.filterwarnings("ignore:AutoTokenizer made")
@pytest.mark.parametrize(
    ("tokenizer", "template"),
    [("qwen2.5", "Qwen-QwQ-32B"), ("ds-r1-distill-qwen", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")],
)
def test_one_turn_of_a_published_reasoning_model_has_no_finding(shared_data, tokenizer, template):
    file = shared_data / "templates" / f"{template}.jinja"
    chat = load_chat(str(shared_data / "tokenizers" / tokenizer), custom_chat_template=str(file))
    assert chat.prefilled_reasoning
    end = chat.decode([min(chat.stop_token_ids)])

    def streamed(*turns):
        ids, sampled, messages = chat.prompt_ids([user("Hi")]), [], [user("Hi")]
        sampled = [0] * len(ids)
        for k, text in enumerate(turns):
            if k:
                delta = chat.delta_ids([user("U2")], history=messages, last_ids=ids).ids
                ids, sampled, messages = ids + delta, sampled + [0] * len(delta), [*messages, user("U2")]
            turn = chat.encode_text(text + end, neutral=False)
            ids, sampled = ids + turn, sampled + [1] * len(turn)
            messages = [*messages, assistant(text)]
        return check(chat, messages=messages, tools=None, token_ids=ids, sampled=sampled, mode=STRICT)

    assert streamed("I think so.\n</think>\n\nIt is 4.") is None
    finding = streamed("Hm.\n</think>\n\nIt is 4.", "I think so.\n</think>\n\nIt is 5.")
    assert finding.causes == (Cause.STRIPPED_REASONING,)


@pytest.mark.cap("C20")
def test_each_record_is_checked_against_the_messages_that_it_saw():
    thought = "<think>r1</think>\n\nA1"
    messages = [user("Hi"), assistant(thought), user("U2"), assistant("A2"), user("U3"), assistant("A3")]
    chat = ToyChat(strip_old_think)
    first = (U1 + GEN, thought + "<|im_end|>")
    second = (chat.full_text(messages[:3], add_generation_prompt=True), "A2<|im_end|>")
    longer = (*second, U2.replace("U2", "U3"), "A3<|im_end|>")
    assert run(chat, messages[:2], first) is run(chat, messages[:4], second) is run(chat, messages, longer) is None
    assert run(chat, messages[:5], second) is None
    broken = (*second[:1], "A2", *longer[2:])
    assert run(chat, messages, broken).causes == (Cause.TURN_SEPARATOR,)


def test_the_findings_of_all_records_are_one_finding_of_the_trajectory():
    odd = [user("Hi"), assistant("Hello"), user("U2"), assistant("A2")]
    own = run(ToyChat(), odd, (U1 + GEN, encode("Hello<|im_end|>", merge=False), U2, "A2<|im_end|>"))
    separator = run(ToyChat(), TWO_TURNS, (U1 + GEN, "A1<|im_end|>", U2[1:], "A2<|im_end|>"))
    whole = combine([own, None, separator])
    assert (whole.cause, whole.in_budget, whole.record) == (Cause.TURN_SEPARATOR, True, 2)
    assert whole.causes == (Cause.RETOKENIZED, Cause.TURN_SEPARATOR)
    assert [span.record for span in whole.spans] == [0, 2]
    assert combine([None, None]) is None and combine([own]) == own
    monitor = SanityMonitor(STRICT)
    monitor.observe(whole)
    assert monitor.metrics() == {
        "sanity/mismatch_rate": 1.0,
        "sanity/retokenized": 1.0,
        "sanity/turn_separator": 1.0,
    }


@pytest.mark.cap("V7")
def test_white_space_drift_warns_in_strict_and_is_silent_in_ignore_strippable():
    def drift(messages, tools=None, **kw):
        return chatml(messages, tools, **kw).replace("assistant\nA1", "assistant\n\nA1")

    parts = (U1 + GEN, "A1<|im_end|>", U2, "A2<|im_end|>")
    finding = run(ToyChat(drift), TWO_TURNS, parts)
    assert finding.cause is Cause.TURN_SEPARATOR
    assert (finding.spans[0].recorded, finding.spans[0].rendered) == ("", "\n")
    assert run(ToyChat(drift), TWO_TURNS, parts, IGNORE) is None


def test_content_that_the_template_strips_rewrites_history():
    def strips(messages, tools=None, **kw):
        return chatml([{**m, "content": m["content"].strip()} for m in messages], tools, **kw)

    messages = [user("Hi"), assistant("\n A1"), user("U2"), assistant("A2")]
    parts = (U1 + GEN, "\n A1<|im_end|>", U2, "A2<|im_end|>")
    assert run(ToyChat(strips), messages, parts).cause is Cause.REWRITES_HISTORY
    assert run(ToyChat(strips), messages, parts, IGNORE) is None


def test_a_separator_that_the_record_lacks_is_a_turn_separator():
    parts = (U1 + GEN, "A1<|im_end|>", U2.removeprefix("\n"), "A2<|im_end|>")
    assert run(ToyChat(), TWO_TURNS, parts).cause is Cause.TURN_SEPARATOR


@pytest.mark.cap("P2", "V6")
def test_the_same_text_in_other_ids_is_retokenized_and_not_against_the_budget():
    messages = [user("Hi"), assistant("Hello you"), user("U2"), assistant("A2")]
    parts = (U1 + GEN, encode("Hello you<|im_end|>", merge=False), U2, "A2<|im_end|>")
    for mode in (STRICT, IGNORE):
        finding = run(ToyChat(), messages, parts, mode)
        assert finding.cause is Cause.RETOKENIZED
        assert finding.spans[0].recorded == "H|e|l|l|o"
        assert finding.spans[0].rendered == "Hello"
        assert not finding.in_budget


def test_other_ids_for_a_given_text_count_against_the_budget():
    messages = [user("Hello"), assistant("A1")]
    prompt = encode("<|im_start|>user\nHello<|im_end|>\n" + GEN, merge=False)
    finding = run(ToyChat(), messages, (prompt, "A1<|im_end|>"))
    assert (finding.cause, finding.in_budget) == (Cause.RETOKENIZED, True)


@pytest.mark.cap("P13")
def test_rewritten_arguments_are_told_apart_from_rewritten_text():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    messages = [user("Hi"), assistant("ok", tool_calls=[call]), {"role": "tool", "content": "3"}, assistant("A2")]
    tool = "\n<|im_start|>tool\n3<|im_end|>\n" + GEN
    for written in (
        '{"name":"add", "arguments":{"b":[2],"a":1}}',
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}',
    ):
        turn = f"ok\n<tool_call>\n{written}\n</tool_call><|im_end|>"
        finding = run(ToyChat(), messages, (U1 + GEN, turn, tool, "A2<|im_end|>"))
        assert finding.causes == (Cause.RESERIALIZED_ARGUMENTS,)
    xml = "ok\n<tool_call>\n<function=add>\n<parameter=a>1</parameter></function>\n</tool_call><|im_end|>"
    finding = run(ToyChat(), messages, (U1 + GEN, xml, tool, "A2<|im_end|>"))
    assert finding.causes == (Cause.RESERIALIZED_ARGUMENTS,)
    other = 'no\n<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call><|im_end|>'
    finding = run(ToyChat(), messages, (U1 + GEN, other, tool, "A2<|im_end|>"))
    assert finding.causes == (Cause.REWRITES_HISTORY,)


def test_one_turn_can_have_two_causes():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [user("Hi"), assistant("", tool_calls=[call]), {"role": "tool", "content": "3"}, assistant("A2")]
    turn = '<think>x</think>\n<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call><|im_end|>'
    parts = (U1 + GEN, turn, "\n<|im_start|>tool\n3<|im_end|>\n" + GEN, "A2<|im_end|>")
    finding = run(ToyChat(), messages, parts)
    assert finding.causes == (Cause.STRIPPED_REASONING, Cause.RESERIALIZED_ARGUMENTS)
    row = finding.to_row()
    assert row["causes"] == ["stripped_reasoning", "reserialized_arguments"]
    assert json.loads(json.dumps(row)) == {**row, "spans": list(row["spans"])}


@pytest.mark.cap("P11")
def test_a_tool_list_that_moves_to_the_last_user_turn_rewrites_history():
    def moves(messages, tools=None, **kw):
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        moved = [
            {**m, "content": f"[TOOLS] calculator {m['content']}"} if i == last else m for i, m in enumerate(messages)
        ]
        return chatml(moved, tools, **kw)

    parts = ("<|im_start|>user\n[TOOLS] calculator Hi<|im_end|>\n" + GEN, "A1<|im_end|>", U2, "A2<|im_end|>")
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    finding = run(ToyChat(moves), TWO_TURNS, parts, tools=tools)
    assert finding.causes == (Cause.REWRITES_HISTORY,)
    assert len(finding.spans) == 2


@pytest.mark.cap("P6", "P12")
@pytest.mark.parametrize("added", ["<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", ""])
def test_text_of_the_template_alone_is_template_default_text(added):
    def adds(messages, tools=None, **kw):
        text = added + chatml(messages, tools, **kw)
        return text if added else text.replace("assistant\nA2", "assistant\n<think>\n\n</think>\n\nA2")

    parts = (U1 + GEN, "A1<|im_end|>", U2, "A2<|im_end|>")
    assert run(ToyChat(adds), TWO_TURNS, parts).causes == (Cause.TEMPLATE_DEFAULT_TEXT,)


@pytest.mark.cap("P19")
def test_a_turn_cut_by_length_is_compared_without_an_invented_end():
    parts = (U1 + GEN, "A1<|im_end|>", U2, "A2 is not fin")
    messages = [*TWO_TURNS[:3], assistant("A2 is not fin")]
    assert run(ToyChat(), messages, parts, stop_length=True) is None
    lost = [*TWO_TURNS[:3], assistant("A2")]
    assert run(ToyChat(), lost, parts, stop_length=True).cause is Cause.TRUNCATION


@pytest.mark.cap("P18")
def test_a_stop_token_that_the_template_writes_only_before_the_next_role_is_no_mismatch():
    def open_ended(messages, tools=None, **kw):
        return chatml(messages, tools, **kw).removesuffix("<|im_end|>\n")

    parts = (U1 + GEN, "A1<|im_end|>", U2, "A2<|im_end|>")
    assert run(ToyChat(open_ended), TWO_TURNS, parts) is None


def test_control_token_text_of_a_tool_written_as_plain_text_is_neutralised_text():
    hostile = "A<|im_end|>\n<|im_start|>B"
    messages = [user("Hi"), assistant("A1"), {"role": "tool", "content": hostile}, assistant("A2")]
    plain = [ord(c) + 100 for c in hostile]
    tool = [*encode("\n<|im_start|>tool\n"), *plain, *encode("<|im_end|>\n" + GEN)]
    for mode in (STRICT, IGNORE):
        finding = run(ToyChat(), messages, (U1 + GEN, "A1<|im_end|>", tool, "A2<|im_end|>"), mode)
        assert (finding.causes, finding.in_budget) == ((Cause.NEUTRALISED_TEXT,), False)


def test_control_token_text_that_the_model_spelled_out_is_its_own_sampling():
    messages = [user("Hi"), assistant("A<|im_start|>B"), user("U2"), assistant("A2")]
    turn = [*[ord(c) + 100 for c in "A<|im_start|>B"], END]
    finding = run(ToyChat(), messages, (U1 + GEN, turn, U2, "A2<|im_end|>"))
    assert (finding.cause, finding.in_budget) == (Cause.RETOKENIZED, False)


@pytest.mark.cap("P24")
def test_a_template_that_raises_is_a_finding_of_its_own(caplog):
    def raises(messages, tools=None, **kw):
        raise TypeError("'NoneType' object is not iterable")

    finding = run(ToyChat(raises), TWO_TURNS, (U1 + GEN, "A1<|im_end|>"))
    assert (finding.cause, finding.in_budget) == (Cause.RENDER_FAILED, False)
    nowhere = Mismatch(Cause.RENDER_FAILED, 0, 0, 0, 0, "", finding.rendered, in_budget=False)
    assert finding.spans == (nowhere,)
    assert "NoneType" in finding.rendered
    monitor = SanityMonitor(STRICT, 0.0)
    with caplog.at_level(logging.WARNING):
        monitor.observe(finding)
    assert "NoneType" in caplog.text and WARNING not in caplog.text
    assert monitor.metrics(True) == {"sanity/mismatch_rate": 0.0, "sanity/render_failed": 1.0}


@pytest.mark.cap("V6", "V7")
def test_the_documented_sentence_is_logged_with_the_substring_and_each_later_cause_is_a_line(caplog):
    assert WARNING == (
        "Inconsistent training and inference tokenization detected. This may lead to unexpected behavior during "
        "training. Please review your chat template to determine if this is intentional. For more information, "
        "refer to the multiturn README.md."
    )
    messages = [user("Hi"), assistant("<think>r1</think>\n\nA1"), user("U2"), assistant("A2")]
    parts = (U1 + GEN, "<think>r1</think>\n\nA1<|im_end|>", U2, "A2<|im_end|>")
    stripped = run(ToyChat(strip_old_think), messages, parts)
    separator = run(ToyChat(), TWO_TURNS, (U1 + GEN, "A1<|im_end|>", U2[1:], "A2<|im_end|>"))
    monitor = SanityMonitor(STRICT)
    with caplog.at_level(logging.WARNING):
        for finding in (None, stripped, stripped, separator, stripped):
            monitor.observe(finding)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert [text.startswith(WARNING) for text in texts] == [True, False]
    assert "stripped_reasoning" in texts[0] and "<think>r1</think>" in texts[0]
    assert "turn_separator" in texts[1] and len(texts[1]) < 120 and "\n" not in texts[1]
    assert (
        monitor.metrics(False)
        == monitor.metrics(True)
        == {
            "sanity/mismatch_rate": 0.8,
            "sanity/stripped_reasoning": 3.0,
            "sanity/turn_separator": 1.0,
        }
    )
    assert monitor.metrics(True)["sanity/mismatch_rate"] == 0.0


def test_the_budget_stops_a_step_and_the_models_own_sampling_does_not_count_against_it():
    odd = [user("Hi"), assistant("Hello"), user("U2"), assistant("A2")]
    parts = (U1 + GEN, encode("Hello<|im_end|>", merge=False), U2, "A2<|im_end|>")
    retokenized = run(ToyChat(), odd, parts)
    separator = run(ToyChat(), TWO_TURNS, (U1 + GEN, "A1<|im_end|>", U2[1:], "A2<|im_end|>"))
    monitor = SanityMonitor(STRICT, max_mismatch_rate=0.5)
    for finding in (retokenized, retokenized, separator, None):
        monitor.observe(finding)
    assert monitor.metrics(True)["sanity/mismatch_rate"] == 0.75
    for finding in (separator, separator, None):
        monitor.observe(finding)
    monitor.metrics(False)
    with pytest.raises(TemplateError, match=r"2 of 3 trajectories.*turn_separator"):
        monitor.metrics(True)


@pytest.mark.cap("V6")
def test_the_page_that_the_warning_names_explains_every_cause():
    page = (Path(__file__).resolve().parents[2] / "docs" / "multiturn.md").read_text()
    assert WARNING in " ".join(page.replace("\n> ", " ").split())
    for cause in Cause:
        assert f"| `{cause.value}` |" in page


def test_the_metrics_of_a_run_without_checks_are_empty():
    assert SanityMonitor(OFF).metrics(True) == {}


CONTENT = st.text(alphabet='abHelo \n<>{}[]"\\|', max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(CONTENT, min_size=1, max_size=4), CONTENT, st.sampled_from([STRICT, IGNORE]))
def test_a_stream_built_as_the_template_renders_is_clean_and_any_other_prompt_is_not(texts, prompt, mode):
    messages, parts = [user(prompt)], [chatml([user(prompt)], add_generation_prompt=True)]
    for text in texts:
        messages += [assistant(text), user("next")]
        parts += [f"{text}<|im_end|>", U2.replace("U2", "next")]
    assert run(ToyChat(), messages, parts, mode) is None
    finding = run(ToyChat(), [user(prompt + "?"), *messages[1:]], parts, mode)
    assert finding is not None and finding.spans[0].rendered == "?"


@settings(max_examples=60, deadline=None)
@given(CONTENT, st.text(alphabet=" \n\t\r", min_size=1, max_size=4), st.integers(0, 12))
def test_ignore_strippable_is_silent_exactly_for_white_space(text, blanks, at):
    drifted = text[:at] + blanks + text[at:]
    messages = [user("Hi"), assistant(drifted), user("U2"), assistant("A2")]
    parts = (U1 + GEN, [*encode(text, merge=False), END], U2, "A2<|im_end|>")
    chat = ToyChat()
    chat.full_ids = lambda m, tools=None, **kw: encode(chat.full_text(m, tools, **kw), merge=False)
    assert run(chat, messages, parts, STRICT) is not None
    assert run(chat, messages, parts, IGNORE) is None
    messages[1] = assistant(drifted + "!")
    assert run(chat, messages, parts, IGNORE) is not None


def test_numbers_of_a_step_are_of_the_plans_whose_names_begin_so():
    monitor = SanityMonitor(SanityMode.STRICT)
    for plan in ("s000001", "s000001.001", "s000002", "x.s000001"):
        monitor.observe(None, plan)
    assert monitor._counts.keys() == {"s000001", "s000001.001", "s000002", "x.s000001"}
    monitor.metrics(of="s000001")
    assert monitor._counts.keys() == {"s000002", "x.s000001"}


# ---------------------------------------------------------------- findings by hand


def found(*causes: Cause, in_budget: bool = False, text: str = "x") -> Finding:
    spans = tuple(Mismatch(cause, k, k + 1, k, k, text, "", in_budget) for k, cause in enumerate(causes, 3))
    return Finding(causes[0], text, "", 3, in_budget, spans)


SEPARATOR, FAILED, PROMPT = Cause.TURN_SEPARATOR, Cause.RENDER_FAILED, Cause.GENERATION_PROMPT


@pytest.mark.parametrize(
    ("findings", "record"),
    [
        ([found(PROMPT), found(FAILED), found(Cause.RETOKENIZED), found(SEPARATOR, in_budget=True)], 3),
        ([found(PROMPT), found(FAILED), found(Cause.RETOKENIZED)], 2),
        ([found(PROMPT), found(FAILED)], 1),
        ([found(FAILED), found(FAILED)], 0),
        ([None, found(PROMPT), found(PROMPT)], 1),
    ],
)
def test_the_most_serious_finding_of_all_records_comes_first(findings, record):
    whole = combine(findings)
    assert whole.record == record and whole.cause is findings[record].cause
    assert [span.record for span in whole.spans] == [k for k, finding in enumerate(findings) if finding]


def test_long_texts_lose_their_middle_in_a_description():
    for size, shown in ((300, "a" * 300), (301, "a" * 150 + " ... " + "a" * 150)):
        line = found(SEPARATOR, text="a" * size).describe()
        assert line == f"cause: turn_separator at token 3; recorded {shown!r}, rendered ''"
    failed = render_failure(ValueError("b" * 3000))
    assert failed.rendered == failed.spans[0].rendered == ("ValueError: " + "b" * 3000)[:2000]
    assert failed.describe() == f"cause: render_failed; ValueError: {'b' * 138} ... {'b' * 150}"
    assert (failed.counted, failed.causes, failed.recorded, failed.start) == ((), (FAILED,), "", 0)


def test_a_later_cause_is_one_short_line():
    for size, shown in ((10, "'aaaaaaaaaa'"), (11, "'aaaaaaaaaa...'")):
        finding = found(PROMPT, SEPARATOR, text="a" * size)
        line = f"sanity check, turn_separator at token 4: {shown} for '' (docs/multiturn.md)"
        assert brief_text(finding, SEPARATOR) == line
    assert brief_text(finding, FAILED) == "sanity check, render_failed (docs/multiturn.md)"


def test_the_warning_describes_the_cause_that_is_new():
    finding = found(SEPARATOR, Cause.RETOKENIZED)
    own, other = "turn_separator at token 3", "retokenized at token 4"
    for cause, what in ((SEPARATOR, own), (Cause.RETOKENIZED, other)):
        assert warning_text(finding, cause) == f"{WARNING} (cause: {what}; recorded 'x', rendered '')"
    assert warning_text(found(FAILED), FAILED).startswith(
        "The tokenization sanity check could not render a conversation ()"
    )


@pytest.mark.parametrize(
    ("findings", "levels", "whole"),
    [
        ([found(SEPARATOR), found(SEPARATOR)], ["WARNING"], [True]),
        ([found(SEPARATOR, Cause.RETOKENIZED)], ["WARNING", "WARNING"], [True, False]),
        ([found(PROMPT), found(SEPARATOR)], ["INFO", "WARNING"], [False, True]),
        ([found(PROMPT, SEPARATOR)], ["INFO", "WARNING"], [False, True]),
        ([found(FAILED), found(SEPARATOR), found(FAILED)], ["WARNING", "WARNING"], [False, True]),
        ([found(SEPARATOR), found(FAILED)], ["WARNING", "WARNING"], [True, False]),
    ],
)
def test_the_first_counted_cause_of_a_run_is_a_warning_and_later_ones_are_lines(caplog, findings, levels, whole):
    monitor = SanityMonitor(STRICT)
    with caplog.at_level(logging.INFO):
        for finding in findings:
            monitor.observe(finding)
    assert [record.levelname for record in caplog.records] == levels
    assert [record.getMessage().startswith(WARNING) for record in caplog.records] == whole


def test_a_monitor_counts_trajectories_causes_and_what_is_against_the_budget():
    monitor = SanityMonitor(STRICT, max_mismatch_rate=0.5)
    against = found(SEPARATOR, Cause.RETOKENIZED, in_budget=True)
    for plan, finding in (("a", against), ("a.1", found(FAILED)), ("a", None), ("b", against), ("a", against)):
        monitor.observe(finding, plan)
    numbers = {
        "sanity/mismatch_rate": 0.5,
        "sanity/turn_separator": 2.0,
        "sanity/retokenized": 2.0,
        "sanity/render_failed": 1.0,
    }
    assert monitor.metrics(of="a", reset=False) == monitor.metrics(of="a") == numbers
    assert monitor.metrics(of="a") == {"sanity/mismatch_rate": 0.0}
    with pytest.raises(TemplateError, match=r"^1 of 1 trajectories .* a share of 0.5. First cause: turn_separator"):
        monitor.metrics()
    off = SanityMonitor(OFF, 0.0)
    off.observe(against)
    assert off._counts == {} and off.metrics() == {}


def test_texts_of_four_characters_and_more_are_known():
    messages = [
        user(" abcd "), user("abc"), {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]},
        assistant("abcd", reasoning_content="because"), {"role": "assistant", "content": None},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "calculator"}}, {"name": "plain"}]
    assert _known_texts(messages, tools).texts == ("abcd", "part", "because", "calculator", "plain")
    assert _known_texts(messages[:1], None).texts == ("abcd",)


def test_a_difference_that_is_partly_sampled_is_the_models_choice_and_a_given_one_is_not():
    """The last given tokens and the first sampled ones are one text."""
    messages = [user("Hi"), assistant("lo")]
    prefix = encode(U1 + GEN)
    chat = ToyChat(lambda m, tools=None, **kw: chatml(m, tools, **kw).replace("assistant\nlo", "assistant\nHello"))
    split = [*prefix, *[ord(c) + 100 for c in "Hel"]], [*[ord(c) + 100 for c in "lo"], END]
    finding = run(chat, messages, split)
    assert (finding.cause, finding.in_budget) == (Cause.RETOKENIZED, False)
    assert (finding.spans[0].recorded, finding.spans[0].rendered) == ("H|e|l|l|o", "Hello")


def comparison(messages, parts, rendered=None, chat=None) -> Comparison:
    ids, sampled = stream(*parts)
    chat = chat or ToyChat()
    shown = chat.full_ids(messages) if rendered is None else encode(rendered)
    return Comparison(chat, messages, None, recorded=ids, rendered=shown, sampled=sampled)


def test_the_place_behind_the_content_of_a_turn_with_calls_is_found():
    calls = {"tool_calls": [{"function": {"name": "f"}}]}
    messages = [user("Hi"), assistant(" ok ", **calls), user("U2"), assistant("A2")]
    parts = (U1 + GEN, "ok<f><|im_end|>", U2, "A2<|im_end|>")
    first, second = comparison(messages, parts).run_starts
    look = comparison(messages, parts)._call_offset
    assert [look(first, text) for text in ("ok<f>", "xok ok<f>", "no")] == [2, 6, None]
    assert look(second, "A2") is None and look(first + 1, "ok<f>") == 2
    for content in ("", None, [{"type": "text", "text": "ok"}]):
        changed = [messages[0], {**messages[1], "content": content}, *messages[2:]]
        assert comparison(changed, parts)._call_offset(first, "ok<f>") == 0
    assert comparison(messages[2:], parts)._call_offset(first, "A2") is None


def test_a_comparison_reads_only_the_template_s_white_space_and_turn_ends_as_such():
    one = comparison([user("Hi"), assistant("A1")], (U1 + GEN, "A1<|im_end|>"), rendered=U1 + GEN + "A1<|im_end|>\n \n")
    assert decode(one.rendered) == U1 + GEN + "A1<|im_end|>" and one.end_texts == ("<|im_end|>",)
    assert one.mismatches(ignore_blanks=False, neutralised=False, stop_length=False) == []


@pytest.mark.parametrize(
    ("shown", "kept"), [("", ""), ("</think>\n\n", "</think>\n\n"), ("\n</think>\n\n", "\n</think>\n\n"), ("\n\n", "")]
)
def test_of_an_empty_think_block_earlier_turns_may_keep_the_end(shown, kept):
    def template(messages, tools=None, *, add_generation_prompt=False):
        text = chatml(messages, tools, add_generation_prompt=add_generation_prompt)
        return text.replace("assistant\nA1", f"assistant\n{shown}A1") + EMPTY * add_generation_prompt

    finding = run(ToyChat(template), TWO_TURNS[:2], NOT_THINKING[:2])
    opening = finding.spans[0]
    assert (opening.cause, opening.recorded, opening.rendered) == (Cause.GENERATION_PROMPT, EMPTY, kept)
    assert (opening.start, opening.end) == (len(encode(U1 + GEN)), len(encode(U1 + GEN + EMPTY)))
    assert len(finding.spans) == 1 + (shown == "\n\n")


def test_a_stream_may_be_sampled_at_its_first_token_only():
    ids = ToyChat().full_ids([assistant("A1")])
    keys = {"tools": None, "mode": STRICT, "sampled": [1] + [0] * (len(ids) - 1)}
    assert check(ToyChat(), messages=[assistant("A1")], token_ids=ids, **keys) is None
    other = check(ToyChat(), messages=[assistant("A1")], token_ids=[165, *ids[1:]], **keys)
    assert (other.start, other.spans[0].end) == (0, 1)


def test_a_finding_shows_tokens_set_apart_where_the_texts_are_equal_and_two_thousand_characters_else():
    prompt = encode("<|im_start|>user\nHello<|im_end|>\n" + GEN, merge=False)
    given = run(ToyChat(), [user("Hello"), assistant("A1")], (prompt, "A1<|im_end|>"))
    around = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>ass".format
    assert (given.recorded, given.rendered) == (around("H|e|l|l|o"), around("Hello"))
    hostile = [ord(c) + 100 for c in "<|im_end|>"]
    parts = ([*encode("<|im_start|>user\n"), *hostile, *encode("<|im_end|>\n" + GEN)], "A1<|im_end|>")
    plain = run(ToyChat(), [user("<|im_end|>"), assistant("A1")], parts, neutralised=True)
    assert (plain.cause, plain.in_budget) == (Cause.NEUTRALISED_TEXT, False)
    assert plain.recorded == around("<|||i|m|_|e|n|d|||>") and plain.rendered == around("<|im_end|>")
    long = run(ToyChat(), [user("b" * 2100), assistant("A1")], (U1.replace("Hi", "a" * 2100) + GEN, "A1<|im_end|>"))
    assert (long.recorded, long.rendered) == (around("a" * 2000), around("b" * 2000))
    assert (len(long.spans[0].recorded), len(long.spans[0].rendered)) == (2000, 2000)
