"""The run's tools are really called, with made-up arguments: which fail, which are slow, whose schema is not the one
that their code reads."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from verl_mt.data.trajectory import Trajectory
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, not_looked_at, warning
from verl_mt.extensions.inspection.doctor.scripted import Talk, called, example_arguments, said
from verl_mt.extensions.inspection.doctor.sources import keys_read, method, uses_whole
from verl_mt.plugins import listing
from verl_mt.rollout.prompts import Prompt

ANSWER = "The answer is 1.\n#### 1"
_MOST_TOOLS = 8
"""That are called, beside the first one."""
_SLOW_S = 2.0
_UNREACHABLE = re.compile(r"(?i)\bconnection\b|refused|timed out|timeout|unreachable|name resolution|\b50[234]\b")
"""What a server that is down is told by; such texts may hold the arguments, as a part of its address."""
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


def talk_of(subject: Subject, prompt: Prompt, *, tool: int = 0, other: bool = False) -> Talk:
    """A call, where there is a tool, and then an answer."""
    chat = subject.known_chat
    can_call = bool(prompt.tools) and subject.rollout.agent_function_path is None
    call = called(chat, prompt.tools[tool], other=other) if can_call else None
    return Talk(prompt, [*([call] if call else []), said(chat, ANSWER)])


def tool_trouble(subject: Subject, found: Sequence[Trajectory]) -> Iterator[Finding]:
    """What is wrong with the tools that the prompts offer.

    Args:
        found: conversations that called the first tool of their prompt.
    """
    prompt = next((p for p in subject.prompts if p.tools), None)
    played = list(found)
    if prompt is not None and subject.rollout.agent_function_path is None:
        others = [talk_of(subject, prompt, tool=i) for i in range(1, min(len(prompt.tools), _MOST_TOOLS + 1))]
        played += subject.open_stage().play(others, samples=2, unlimited=True) if others else []
    counted: Counter[str] = Counter()
    for trajectory in played:
        counted.update({k: v for k, v in trajectory.counters.items() if k.startswith("tools/")})
    for name in subject.tools.names if subject.tools is not None else ():
        broken, calls = counted[f"tools/{name}/errors"], counted[f"tools/{name}/calls"]
        if broken:
            answer = next(a for t in played if t.counters.get(f"tools/{name}/errors") for a in _answers([t]))
            yield _failing_tool(subject, name, f"{broken:.0f} of {calls:.0f}", answer)
        times = [c["latency_s"] for t in played for c in t.tool_calls if c["name"] == name and c["latency_s"]]
        if times and min(times) > _SLOW_S:
            yield warning(
                f"tool {name} is slow: a call takes {min(times):.1f} s, and conversations wait for each of their calls",
                "make it faster, keep its answers in a cache, or let others be sampled meanwhile "
                "(trainer.max_staleness, docs/asynchronous.md)",
            )
    yield from _schemas(subject, prompt)
    if [t for t in found if t.stop_reason == "context_full"]:
        yield warning(
            "the result of the first tool call does not fit into the response: such a conversation ends there",
            "raise actor_rollout_ref.rollout.response_length or max_model_len, or lower "
            "multi_turn.max_tool_response_tokens",
        )


def _failing_tool(subject: Subject, name: str, share: str, answer: str) -> Finding:
    """A tool that may refuse what was made up, and one that fails whatever it is asked, are not the same."""
    asked, number = next(
        (p, i) for p in subject.prompts for i, tool in enumerate(p.tools) if tool["function"]["name"] == name
    )
    first, second = (example_arguments(asked.tools[number], other=other) for other in (False, True))
    talk = talk_of(subject, asked, tool=number, other=True)
    again = _answers(subject.open_stage().play([talk], unlimited=True))
    if first != second and again[0] != answer and not _UNREACHABLE.search(answer):
        return not_looked_at(
            f"tool {name}: calls with made-up arguments failed, {first} with {answer[:200]}; --demos FILE calls it "
            "with your arguments"
        )
    return warning(
        f"tool {name}: {share} calls failed{'' if first == second else ', whatever the arguments'}: {answer[:200]}",
        "start the server that it asks, or repair it: a model cannot learn to use a tool that always fails",
    )


def _answers(played: Sequence[Trajectory]) -> list[str]:
    """What the tools said."""
    found = [str(m.get("content")) for trajectory in played for m in trajectory.messages if m["role"] == "tool"]
    return [_ADDRESS.sub("", text) for text in found] or [""]


def _schemas(subject: Subject, prompt: Prompt | None) -> Iterator[Finding]:
    """What a schema shows is what the code reads."""
    tools = prompt.tools if prompt is not None else []
    for schema in tools:
        function = schema["function"]
        if not str(function.get("description") or "").strip() and len(tools) > 1:
            yield warning(
                f"tool {function['name']} has no description: a model does not know when to call it",
                "write a docstring, or function.description in its schema",
            )
        shown = set((function.get("parameters") or {}).get("properties") or {})
        known = subject.tools is not None and function["name"] in subject.tools
        read = _read(subject.tools[function["name"]]) if subject.tools is not None and known else set()
        if read and shown and not read & shown:
            yield warning(
                f"tool {function['name']}: its schema has {listing(sorted(shown))}, and its execute reads "
                f"{listing(sorted(read))} of the parameters: a call that fits the schema brings nothing",
                "use the same names in the schema and in execute",
            )


def _read(tool: Any) -> set[str]:
    """Keys that `execute` takes from its parameters; empty where it hands them on as a whole, too."""
    tree = method(tool, "execute")
    if not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) or len(tree.args.args) < 3:
        return set()
    name = tree.args.args[2].arg
    return set() if uses_whole(tree, name) else keys_read(tree, name)
