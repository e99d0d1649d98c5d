"""Tokenization cost of a long conversation: per-turn deltas against rendering everything again before each turn.

    python benchmarks/chat_delta.py [--turns 30] [--repeats 5] [--model PATH --chat-template FILE]

A conversation in which the model calls a tool in every turn and each tool result has about 300 tokens. Both ways
produce the engine's input before each turn; both are timed in the same process, alternating, and the smallest time of
each counts. Without --model it takes the tokenizers and templates of the reference data where that folder is present
(VERL_MT_TEST_DATA, or `shared/data` beside the checkout), else the model that is shipped with verl_mt.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from provenance import add_out, write_rows
from rich.console import Console
from rich.table import Table

from verl_mt.chat import ChatTemplate, load_chat
from verl_mt.config_paths import TINY_MODEL
from verl_mt.data.conversation import Message
from verl_mt.errors import VerlMTError

DATA = Path(os.environ.get("VERL_MT_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PAIRS = {
    "qwen2.5": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "llama3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "gpt-oss": "openai-gpt-oss-120b",
}
RESULT_LINES = 16
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up in the catalogue.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}

Turn = tuple[Message, list[int], Message]
"""The assistant's message, its sampled ids, and the tool's answer."""


def make_turns(chat: ChatTemplate, num_turns: int) -> list[Turn]:
    """Tool calls and results; the sampled ids are canonical, which does not matter to the cost."""
    end = min(chat.stop_token_ids)
    turns = []
    for k in range(num_turns):
        call = {
            "id": f"call{k:05d}",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"word": f"w{k}"}},
        }
        written = f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "w{k}"}}}}\n</tool_call>'
        lines = [
            f"{k}.{i}: entry {i * k} of the catalogue, shelf {i}, about {i + k} pages" for i in range(RESULT_LINES)
        ]
        answer = {"role": "tool", "content": "\n".join(lines), "tool_call_id": call["id"], "name": "look_up"}
        ids = [*chat.encode_text(written, neutral=False), end]
        turns.append(({"role": "assistant", "content": "", "tool_calls": [call]}, ids, answer))
    return turns


def render_every_turn(chat: ChatTemplate, prompt: list[Message], turns: list[Turn]) -> tuple[float, int]:
    """Seconds for the whole conversation when every request is rendered and encoded from its start; final length."""
    begun = time.perf_counter()
    history = list(prompt)
    ids = chat.prompt_ids(history, [TOOL])
    for message, _, answer in turns:
        history += [message, answer]
        ids = chat.prompt_ids(history, [TOOL])
    return time.perf_counter() - begun, len(ids)


def append_deltas(chat: ChatTemplate, prompt: list[Message], turns: list[Turn]) -> tuple[float, int]:
    """Seconds when sampled ids are kept and only what follows them is rendered and encoded; final length."""
    begun = time.perf_counter()
    history = list(prompt)
    ids = chat.prompt_ids(history, [TOOL])
    for message, sampled, answer in turns:
        ids += sampled
        history.append(message)
        ids += chat.delta_ids([answer], history=history, tools=[TOOL], last_ids=sampled).ids
        history.append(answer)
    return time.perf_counter() - begun, len(ids)


def measure(load: Callable[[], ChatTemplate], num_turns: int, repeats: int) -> tuple[float, float, int]:
    """`(full_s, delta_s, tokens)`; the smallest of `repeats`. Probes of the template are done before."""
    prompt: list[Message] = [{"role": "user", "content": "Look up every word of the list, one after the other."}]

    def once(way: Callable[[ChatTemplate, list[Message], list[Turn]], tuple[float, int]]) -> tuple[float, int]:
        chat = load()  # another one each time: a chat remembers what it has rendered and encoded
        turns = make_turns(chat, num_turns)
        append_deltas(chat, prompt, turns[:2])
        return way(chat, prompt, turns)

    pairs = [(once(append_deltas), once(render_every_turn)) for _ in range(repeats)]
    return min(full for _, (full, _) in pairs), min(delta for (delta, _), _ in pairs), pairs[0][0][1]


def find_chats(model: str | None, template: str | None) -> dict[str, Callable[[], ChatTemplate]]:
    if model is not None:
        return {model: lambda: load_chat(model, custom_chat_template=template)}
    if not DATA.is_dir():
        return {TINY_MODEL: lambda: load_chat(TINY_MODEL)}
    return {
        name: partial(
            load_chat,
            str(DATA / "tokenizers" / name),
            custom_chat_template=str(DATA / "templates" / f"{template_name}.jinja"),
        )
        for name, template_name in PAIRS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--chat-template")
    add_out(parser)
    args = parser.parse_args()
    try:
        chats = find_chats(args.model, args.chat_template)
    except VerlMTError as error:
        raise SystemExit(f"error: {error}") from error
    table = Table("template", "tokens", "every turn again, ms", "deltas, ms", "ratio", title=f"{args.turns} tool turns")
    rows: list[dict[str, Any]] = []
    for name, load in chats.items():
        full_s, delta_s, tokens = measure(load, args.turns, args.repeats)
        ratio = full_s / delta_s
        rows.append(
            {"template": name, "tokens": tokens, "every turn again, s": full_s, "deltas, s": delta_s, "ratio": ratio}
        )
        table.add_row(name, str(tokens), f"{full_s * 1e3:.0f}", f"{delta_s * 1e3:.0f}", f"{ratio:.1f}")
    Console().print(table)
    write_rows(args.out, rows)
    ratios = [row["ratio"] for row in rows]
    print(f"chat delta: {min(ratios):.1f} to {max(ratios):.1f} times cheaper than rendering every turn again")


if __name__ == "__main__":
    main()
