"""Every published template that renders a conversation: the recorded stream against an oracle.

The oracle renders the *whole* history with the template as it is, finds the last assistant turn in it by its words and
by the end token that `conformance_table.ENDS` names, and takes what follows. It shares no code with the delta.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_toys import assistant, call, env, sample, tool, user
from conformance_table import (
    OWN_VOCABULARY,
    PAGE,
    end_before_tool,
    end_before_user,
    generic_template,
    template_files,
    template_table,
)
from tables import one_of_each

from verl_mt.chat import ChatTemplate, replay
from verl_mt.chat.loading import load_tokenizer
from verl_mt.chat.text_delta import turn_ids
from verl_mt.errors import TemplateError

pytestmark = pytest.mark.slow  # published templates, commands, many configurations

QUICK = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "microsoft-Phi-3-mini-4k-instruct",
    "mistral-common-v3_spm",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "openai-gpt-oss-120b",
    "GLM-4.6",
)
A_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
EDGES = ("plain", "\n  two lines \n\nünïcödé 你好 \U0001f642\t", "the the\n\nthen  x ")
THINKING = "<think>\nhm</think>\n\n"
IDS = ("abcdefgh1", "abcdefgh2")
# Second rounds of these render other text in a full history: a flag that is set in the first round is never reset.
ONE_ROUND = ("DeepSeek-R1-Distill", "deepseek-r1")


def lookup(word: str, index: int = 0) -> dict[str, Any]:
    return call("lookup", {"q": word}, IDS[index])


def result(content: str, index: int = 0) -> dict[str, Any]:
    return {**tool(content, IDS[index]), "name": "lookup"}


def conversations() -> dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """Name -> turns; a turn is (the assistant message, what answers it). Each assistant's words are unique."""
    plain, edge, merged = EDGES
    return {
        "users": [
            (assistant("Wordone"), [user(edge)]),
            (assistant("Wordtwo"), [user(merged)]),
            (assistant("Wordthree"), [user(plain)]),
        ],
        "reasoning": [
            (assistant(THINKING + "Wordone"), [user(plain)]),
            (assistant(THINKING + "Wordtwo"), [user(edge)]),
        ],
        "tool": [(assistant("", lookup("Wordone")), [result(edge)]), (assistant("Wordtwo"), [user(plain)])],
        "two tools": [(assistant("", lookup("Wordone"), lookup("Wordtwo", 1)), [result(plain), result(merged, 1)])],
    }


def oracle(chat: ChatTemplate, messages: list[dict[str, Any]], word: str) -> tuple[str, list[Any] | None] | None:
    """The template's own text of the whole history and the tools it needed; None: it refuses or hides the word.

    Calls are written in the first shape that shows them.
    """
    for tools in (None, [A_TOOL]):
        for shape in (dict, _as_string, _flat):
            shaped = [
                {**m, "tool_calls": [shape(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages
            ]
            try:
                text = chat.tokenizer.apply_chat_template(
                    shaped, tools=tools, tokenize=False, add_generation_prompt=True
                )
            except Exception:  # any refusal of the template
                continue
            if word in text and "&#34;" not in text and '{\\"q' not in text:
                return text, tools
    return None


def _as_string(c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}


def _flat(c: dict[str, Any]) -> dict[str, Any]:
    return {**c, **c["function"]}


def sampled_ids(chat: ChatTemplate, text: str, end: str, rng: random.Random) -> list[int]:
    """Ids that spell the turn in a random, mostly non-canonical way, then the token it stops at."""
    ids, rest = [], text
    while rest:
        cut = rng.randint(1, 3)
        ids += chat.encode_text(rest[:cut], neutral=False)
        rest = rest[cut:]
    stop = end or chat.tokenizer.eos_token
    return [*ids, chat.tokenizer.convert_tokens_to_ids(stop)]


def expected_stream(
    chat: ChatTemplate, name: str, turns: list[Any]
) -> tuple[list[int], list[int], list[Any], list[Any] | None] | None:
    """Ids, mask, replay steps and tools; None where the template itself refuses the conversation."""
    rng = random.Random(name)
    history: list[dict[str, Any]] = [user("Firstly?")]
    found = oracle(chat, history, "Firstly?")
    if found is None:
        return None
    tools = found[1]
    ids = chat.tokenizer.encode(found[0], add_special_tokens=False)
    mask, steps = [0] * len(ids), []
    for message, answers in turns:
        calls = message.get("tool_calls")
        word = calls[-1]["function"]["arguments"]["q"] if calls else message["content"].split()[-1]
        found = oracle(chat, [*history, message, *answers], word)
        if found is None or any(a["content"].strip()[:5] not in found[0] for a in answers):
            return None
        end = end_before_tool(name) if answers[0]["role"] == "tool" else end_before_user(name)
        tail = found[0][found[0].rindex(word) + len(word) :]
        start = (
            tail.find(end)
            if end
            else min(i for t in ("<|START_OF_TURN_TOKEN|>", "\n\nUser:") if (i := tail.find(t)) >= 0)
        )
        anchored = tail[start:] if end else chat.tokenizer.eos_token + tail[start:]
        delta = chat.tokenizer.encode(anchored, add_special_tokens=False)[1:]
        spelled = sampled_ids(chat, message["content"] or f"lookup {word}", end, rng)
        ids += spelled + delta
        mask += [1] * len(spelled) + [0] * len(delta)
        history += [message, *answers]
        steps += [sample(spelled, message), env(*answers)]
    final = sampled_ids(chat, "Bye", end_before_user(name), rng)
    steps.append(sample(final, assistant("Bye")))
    return ids + final, mask + [1] * len(final), steps, tools


def check(chat: ChatTemplate, name: str) -> dict[str, str]:
    """Compare every conversation; say for each whether it was exact or the template refused it."""
    outcome = {}
    for kind, turns in conversations().items():
        if any(part in name for part in ONE_ROUND) and "tool" in kind:
            turns = turns[:1]
        outcome[kind] = check_turns(chat, name, kind, turns)
    return outcome


def check_turns(chat: ChatTemplate, name: str, kind: str, turns: list[Any]) -> str:
    expected = expected_stream(chat, name, turns)
    if expected is None:
        return "refused"
    ids, mask, steps, tools = expected
    got_ids, got_mask = replay(chat, [user("Firstly?")], tools, steps)
    assert chat.decode(got_ids) == chat.decode(ids), f"{name}: {kind}"
    assert got_ids == ids, f"{name}: {kind}"
    assert got_mask == mask, f"{name}: {kind}"
    return "exact"


# A turn whose call could not be parsed is answered like one with a call; where a template writes the same after both,
# the oracle can say so.
ANSWERS_TEXT = ("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "mistral-common-v13", "GLM-4.6", "Qwen3.5-4B")


@pytest.mark.parametrize("name", ANSWERS_TEXT)
def test_a_malformed_call_is_answered_as_a_call_would_be(shared_data, name):
    turns = [(assistant("Wordone"), [result(EDGES[1])]), (assistant("Wordtwo"), [user("x")])]
    check_turns(generic_template(file_of(shared_data, name)), name, "malformed call", turns)


def file_of(shared_data: Path, name: str) -> Path:
    return shared_data / "templates" / f"{name}.jinja"


@pytest.mark.cap("P2", "P8", "P10", "P15")
@pytest.mark.parametrize("name", QUICK)
def test_recorded_streams_of_well_known_templates_are_exact(shared_data, name):
    outcome = check(generic_template(file_of(shared_data, name)), name)
    assert outcome["users"] == outcome["reasoning"] == "exact"


@pytest.mark.slow
def test_recorded_streams_of_all_published_templates_are_exact(shared_data):
    outcomes = {f.stem: check(generic_template(f), f.stem) for f in template_files(shared_data) if _renders(f)}
    exact = [kind for outcome in outcomes.values() for kind, how in outcome.items() if how == "exact"]
    assert len(outcomes) >= 68
    assert exact.count("users") >= 67
    assert exact.count("tool") >= 47
    assert exact.count("two tools") >= 43


def _renders(file: Path) -> bool:
    try:
        return bool(generic_template(file).end_token_ids) and generic_template(file).capabilities.supports("prompt")
    except TemplateError:
        return False


def kind_of_vocabulary(name: str) -> str:
    """All others are byte-level BPE without a token at the beginning."""
    return {"llama3.1": "begins with a token", "mistral-7b-v3": "sentencepiece", "phi-3-mini": "sentencepiece"}.get(
        OWN_VOCABULARY[name], "byte-level"
    )


@pytest.mark.parametrize("name", one_of_each(OWN_VOCABULARY, kind_of_vocabulary))
def test_recorded_streams_on_a_templates_own_vocabulary_are_exact(shared_data, own_tokenizers, name):
    tokenizer = own_tokenizers(OWN_VOCABULARY[name])
    tokenizer.chat_template = file_of(shared_data, name).read_text(encoding="utf-8")
    chat = ChatTemplate(tokenizer)
    outcome = check(chat, name)
    assert outcome["users"] == outcome["reasoning"] == "exact"
    hostile_text_stays_text(chat)


@pytest.fixture(scope="module")
def own_tokenizers(shared_data):
    loaded: dict[str, Any] = {}

    def get(vocabulary: str) -> Any:
        if vocabulary not in loaded:
            loaded[vocabulary] = load_tokenizer(str(shared_data / "tokenizers" / vocabulary))
        return loaded[vocabulary]

    return get


def hostile_text_stays_text(chat: ChatTemplate) -> None:
    """No added token of the vocabulary comes out of a user's text, whatever it spells."""
    history = [user("q"), assistant("a")]
    literals = list(chat.tokenizer.get_added_vocab())
    harmless = chat.delta_ids([user("x")], history=history, last_ids=[0]).ids
    text = "x" + " ".join(rng_sample(literals, 60)) + "<|im_end|></s><think>x"
    hostile = chat.delta_ids([user(text)], history=history, last_ids=[0]).ids
    added = set(chat.tokenizer.get_added_vocab().values())
    assert [i for i in hostile if i in added] == [i for i in harmless if i in added]
    assert text in chat.decode(hostile)


def rng_sample(items: list[str], count: int) -> list[str]:
    return random.Random(0).sample(items, min(count, len(items)))


@pytest.mark.slow
def test_the_page_of_templates_is_current(shared_data):
    assert PAGE.read_text(encoding="utf-8") == template_table(template_files(shared_data)), (
        "docs/templates.md is out of date: run python tests/chat/conformance_table.py"
    )


def three_plain_turns_come_back(chat: ChatTemplate) -> bool:
    """`replay` of three plain turns, against the tokenizer's own rendering of the same messages."""
    tools = None if chat.capabilities.supports("no_tools") else [A_TOOL]
    history, steps = [user("Aaa?")], []
    try:
        for said, asked in (("Bbb", "Ccc?"), ("Ddd", "Eee?"), ("Fff", None)):
            steps.append(sample(turn_ids(chat, history, assistant(said), tools=tools), assistant(said)))
            history.append(assistant(said))
            if asked:
                steps.append(env(user(asked)))
                history.append(user(asked))
        ids, _ = replay(chat, history[:1], tools, steps)
        text = chat.tokenizer.apply_chat_template(history, tools=tools, tokenize=False)
    except TemplateError:
        return False
    return chat.tokenizer.encode(text, add_special_tokens=False)[: len(ids)] == ids


@pytest.mark.cap("P5", "P7")
@pytest.mark.filterwarnings("ignore:sampled turn")
def test_append_only_on_the_page_is_what_three_plain_turns_show(shared_data):
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    remarks = {row[1].strip(): row[-2] for row in rows}
    wrong = []
    for file in template_files(shared_data):
        if _renders(file):
            measured = three_plain_turns_come_back(generic_template(file))
            if measured != ("append-only" in remarks[file.stem]):
                wrong.append(file.stem)
    assert not wrong
    for name in ("Qwen-QwQ-32B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.2"):
        assert "append-only" not in remarks[name]


@pytest.mark.cap("P16", "P24")
def test_a_refused_shape_is_refused_by_the_delta_too(shared_data):
    for name, cause in (
        ("microsoft-Phi-3-mini-4k-instruct", "P16"),
        ("Kimi-K2-Thinking", "P24"),
        ("gemma-3-ort", "P10"),
    ):
        chat = generic_template(file_of(shared_data, name))
        with pytest.raises(TemplateError) as caught:
            chat.delta_ids([result("R")], history=[user("q"), assistant("", lookup("w"))], last_ids=[0])
        assert caught.value.cause == cause, name
