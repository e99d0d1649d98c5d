"""An agent that knows nothing of verl_mt becomes the policy: it talks to an OpenAI-compatible URL.

    python examples/08_your_own_agent.py                  # 3 steps of the default task
    python examples/08_your_own_agent.py 60

`solve` is any program that uses the `openai` client; its tools are its own. Each call of `run` is one trajectory: what
the model is shown and says is recorded token by token, and trained. Needs `pip install "verl_mt[openai]"`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

from verl_mt.errors import VerlMTError
from verl_mt.tools.calculator import calculate

CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
"""Shared: making a client costs more than asking it."""

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


async def solve(client: openai.AsyncOpenAI, messages: list[dict[str, Any]], max_turns: int = 4) -> str:
    """The agent: asks, runs what is called, asks again."""
    for _ in range(max_turns):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                result = calculate(json.loads(call.function.arguments)["expression"])
            except (VerlMTError, ValueError, KeyError, TypeError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def run(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, str]:
    """What verl_mt calls: one conversation behind a URL of its own."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    return {"answer": await solve(client, list(row["prompt"]))}


if __name__ == "__main__":
    from verl_mt.config.compose import compose
    from verl_mt.trainer.build import build_trainer

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    config = compose(
        [
            f"actor_rollout_ref.rollout.agent_function_path={__file__}:run",
            "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=null",
            "trainer.experiment_name=your_own_agent",
            f"trainer.total_training_steps={steps}",
            "trainer.test_freq=-1",
            "trainer.resume_mode=disable",
        ]
    )
    build_trainer(config).fit()
