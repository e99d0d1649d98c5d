"""gpt-oss's turns in a conversation, with its real vocabulary: analysis is the thought that its template takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rollout_support import fixed_session
from transformers import AutoTokenizer

from verl_mt.chat import ChatTemplate
from verl_mt.chat.parsers import get_parser
from verl_mt.engines.scripted import ScriptedEngine

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}},
    },
}
CALL = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}<|call|>'
)
ANSWER = "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>It is 2.<|return|>"


@pytest.fixture
def chat(shared_data):
    template = (shared_data / "templates" / "openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    return ChatTemplate(AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt-oss"), chat_template=template)


@pytest.mark.slow
def test_analysis_becomes_the_key_that_the_template_reads_and_the_turn_renders_as_it_was_sampled(chat):
    asked = [{"role": "user", "content": "1 + 1?"}]
    scripts = [chat.encode_text(text, neutral=False) for text in (CALL, ANSWER)]
    engine = ScriptedEngine([(ids, None, "stop", [-0.1] * len(ids)) for ids in scripts])
    session = fixed_session(engine)
    session.context = replace(session.context, chat=chat, parser=get_parser("gpt-oss"))
    prompt = chat.prompt_ids(asked, [TOOL])
    session.start(prompt, asked, [TOOL])

    async def go():
        called = await session.generate()
        session.extend([{"role": "tool", "content": "2", "tool_call_id": called.parsed.calls[0].id, "name": "add"}])
        return called, await session.generate()

    called, answered = asyncio.run(go())
    assert (called.message["thinking"], called.message["content"]) == ("I add.", "")
    assert [(call.name, call.arguments) for call in called.parsed.calls] == [("add", {"a": 1})]
    assert (answered.message["thinking"], answered.message["content"]) == ("Done.", "It is 2.")
    # The last turn with its thought, letter for letter; of the one before it this template shows no thought.
    assert chat.full_text(session.messages, [TOOL]).endswith(ANSWER)
    assert session.record.token_ids[: len(prompt) + len(scripts[0])] == prompt + scripts[0]
