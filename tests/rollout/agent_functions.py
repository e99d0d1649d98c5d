"""Agents as their authors write them: they know the openai client and nothing of verl_mt."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
SEEN: list[Any] = []
"""What the clients got."""


def client_of(base_url: str, api_key: str, **kwargs: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=kwargs.pop("max_retries", 0), **kwargs)


async def ask(client: openai.AsyncOpenAI, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
    reply = await client.chat.completions.create(model="any", messages=messages, **kwargs)
    SEEN.append(reply)
    return reply


async def calls_tools(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, str]:
    """Ask, run what is called, ask again."""
    client, messages = client_of(base_url, api_key), [{"role": "user", "content": row["prompt"]}]
    while True:
        message = (await ask(client, messages, tools=[TOOL])).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return {"answer": message.content or ""}
        for call in message.tool_calls:
            key = json.loads(call.function.arguments)["key"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"value of {key}<|im_end|>"})


async def two_questions(row: dict[str, Any], base_url: str, api_key: str) -> None:
    client, messages = client_of(base_url, api_key), [{"role": "user", "content": row["prompt"]}]
    first = await ask(client, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "more"},
    ]
    await ask(client, messages)


async def forgets(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """Compacts its history before the second question."""
    client = client_of(base_url, api_key)
    await ask(client, [{"role": "user", "content": row["prompt"]}])
    await ask(client, [{"role": "user", "content": "in short: hello"}])


async def edits(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """Puts other words into the model's mouth."""
    client = client_of(base_url, api_key)
    await ask(client, [{"role": "user", "content": row["prompt"]}])
    history = [{"role": "assistant", "content": "something else"}, {"role": "user", "content": "more"}]
    await ask(client, [{"role": "user", "content": row["prompt"]}, *history])


async def asks_twice(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """The same question again: another sample of the same prompt."""
    client = client_of(base_url, api_key)
    for _ in range(2):
        await ask(client, [{"role": "user", "content": row["prompt"]}])


async def with_sub_agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """A second agent with tools of its own speaks in between."""
    client = client_of(base_url, api_key)
    await ask(client, [{"role": "user", "content": row["prompt"]}])
    await ask(client, [{"role": "system", "content": "sub"}, {"role": "user", "content": "?"}], tools=[TOOL])


async def streams(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Puts the answer together from a stream."""
    client, text, calls, usage = client_of(base_url, api_key), "", [], None
    stream = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": row["prompt"]}], tools=[TOOL], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += [c.function.arguments for c in choice.delta.tool_calls or ()]
            finish = choice.finish_reason
    return {"text": text, "calls": calls, "finish": finish, "tokens": usage.completion_tokens}


async def in_parallel(row: dict[str, Any], base_url: str, api_key: str) -> None:
    client = client_of(base_url, api_key)
    await asyncio.gather(*(ask(client, [{"role": "user", "content": f"{row['prompt']}{k}"}]) for k in range(3)))


async def with_settings(row: dict[str, Any], base_url: str, api_key: str) -> None:
    client = client_of(base_url, api_key)
    settings = {"temperature": 0.2, "seed": 3, "max_tokens": 7, "stop": ["END"], "logprobs": True}
    await ask(client, [{"role": "user", "content": row["prompt"]}], **settings)


async def asks_for(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """Whatever fields the row says."""
    message = {"role": "user", "content": row.get("content", "q")}
    await ask(client_of(base_url, api_key), [message], **row["fields"])


async def never_stops(row: dict[str, Any], base_url: str, api_key: str) -> None:
    await calls_tools(row, base_url, api_key)
    raise AssertionError("the limit comes first")


async def writes_into_its_row(row: dict[str, Any], base_url: str, api_key: str) -> None:
    row["prompt"] += "!"
    await ask(client_of(base_url, api_key), [{"role": "user", "content": row["prompt"]}])


async def asks_nothing(row: dict[str, Any], base_url: str, api_key: str) -> None:
    return None


async def raises(row: dict[str, Any], base_url: str, api_key: str) -> None:
    await ask(client_of(base_url, api_key), [{"role": "user", "content": row["prompt"]}])
    raise RuntimeError("the agent's own mistake")


HANGS = threading.Event()


async def hangs(row: dict[str, Any], base_url: str, api_key: str) -> None:
    await ask(client_of(base_url, api_key), [{"role": "user", "content": row["prompt"]}])
    HANGS.set()
    await asyncio.sleep(1e6)


def plain(row: dict[str, Any], base_url: str, api_key: str) -> str:
    """A blocking agent with the blocking client."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    assert [m.id for m in client.models.list()] == ["policy"]
    reply = client.chat.completions.create(model="any", messages=[{"role": "user", "content": row["prompt"]}])
    return reply.choices[0].message.content


async def retries(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """A client that asks again by itself when a server fails."""
    client = client_of(base_url, api_key, max_retries=1)
    await ask(client, [{"role": "user", "content": row["prompt"]}])


def wrong_signature(row: dict[str, Any]) -> None:
    """Takes no URL."""
