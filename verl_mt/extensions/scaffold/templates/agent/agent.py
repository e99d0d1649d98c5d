"""The agent of `my_project`: a program that uses the `openai` client. Put yours here.

It needs `pip install "verl_mt[openai]"`. It brings its tool. The shipped model knows only this name and argument.
"""

import json
import re

import openai

CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
"""Shared: making a client takes longer than a request."""

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "What to compute"}},
            "required": ["expression"],
        },
    },
}


async def run(row, base_url, api_key):
    """One conversation. verl_mt records what the policy answers at `base_url`, and trains it.

    Args:
        row: the columns of the row. `prompt` is a list of messages.
        base_url: of this conversation.
        api_key: any text.

    Returns:
        What the reward finds in `extra_info["rollout_infos"]["agent"]`.
    """
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    return {"answer": await solve(client, list(row["prompt"]))}


async def solve(client, messages, max_turns=4):
    """Ask, run the calls, ask again. Returns the last text."""
    for _ in range(max_turns):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def calculate(arguments):
    """The sum or the difference of two whole numbers, or a text that says what is wrong."""
    try:
        found = re.fullmatch(r"(\d{1,9})([+-])(\d{1,9})", json.loads(arguments)["expression"].replace(" ", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        found = None
    if found is None:
        return "Error: write two numbers, such as 3+4"
    return str(int(found[1]) + int(found[2] + found[3]))
