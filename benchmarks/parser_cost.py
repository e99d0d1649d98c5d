"""What it costs to parse a turn in which a model repeats the marks of its grammar, by the length of the turn.

    python benchmarks/parser_cost.py [--parser NAME ...] [--kilobytes 10 30 100 300]

For every tool parser: its own tags one by one, in pairs and with broken JSON behind them, whole calls and calls that
are cut, each repeated until the turn has the length. The CPU seconds of the most expensive one count. A turn of 10 kB
that costs the same per byte as one of 300 kB is read in linear time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_mt.chat.parsers import get_parser, tool_parsers

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
_JSON = '{"name": "f", "arguments": {"q": "x", "n": 1}}'
_HERMES = f"<tool_call>\n{_JSON}\n</tool_call>"
_CODER = "<function=f>\n<parameter=q>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>"
CALLS = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen3_coder": f"<tool_call>\n{_CODER}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{_CODER}\n</seed:tool_call>",
    "llama3_json": _JSON,
    "mistral": f"[TOOL_CALLS][{_JSON}]",
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": "x"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">x'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"q": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "glm45": "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>1</arg_value>\n</tool_call>",
    "gpt_oss": '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"q": "x"}<|call|>',
    "react": 'Thought: so\nAction: f\nAction Input: {"q": "x"}\nObservation: y\nFinal Answer: z\n',
    "search_r1": "<search>x</search><answer>y</answer>",
}
"""One call in every grammar."""
MARKS: dict[str, Sequence[str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=q>", "</parameter>"),
    "seed_oss": (
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=q>",
        "</parameter>",
    ),
    "llama3_json": ("<|python_tag|>", "[", "{", '{"a":', "[1,", '{"name": "f", "parameters":', '{"name": "g"', ";"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "```\n",
    ),
    "deepseek_v32": (
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="q">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gpt_oss": (
        "<|start|>",
        "<|channel|>",
        "<|channel|>analysis",
        "commentary to=functions.f",
        "<|message|>",
        "<|end|>",
        "<|call|>",
    ),
    "react": ("Action:", "Action Input:", "Action: f\nAction Input:", "Observation:", "Final Answer:", "```"),
    "search_r1": ("<search>", "</search>", "<answer>", "</answer>"),
}
"""The marks of every grammar, one by one."""


def repeated_texts(parser: str) -> list[str]:
    """What a turn of this grammar is filled with."""
    call = CALLS[parser]
    marks = (*MARKS[parser], "<think>", "</think>", "<|im_end|>")
    behind = ("", "\n", "x", "{", '["', "[\n", '{"name": "f", "arguments": {', "</think>")
    found = {mark + end for mark in marks for end in behind} | {"\n" + mark for mark in marks}
    found |= {a + b for a in marks for b in marks} | {f"{a}x{b}\n" for a in marks for b in marks}
    found |= {call, call + "\n", f"<think>{call}</think>", f"{call}</think>"}
    return sorted(found | {"\n" + call[:end] for end in range(len(call) // 8, len(call), len(call) // 8)})


def cpu_seconds(parser: str, text: str, length: int) -> float:
    """For one turn; ReAct's ends with an answer, for which every action must be looked through."""
    turn = text * (length // len(text)) + ("\nFinal Answer: x" if parser == "react" else "")
    reader = get_parser(parser)
    begun = time.process_time()
    reader.parse(turn, TOOLS)
    return time.process_time() - begun


def worst(parser: str, lengths: Sequence[int]) -> tuple[str, list[float]]:
    """The text that costs most at the longest length, and its CPU seconds at every length."""
    costly = max(repeated_texts(parser), key=lambda text: cpu_seconds(parser, text, lengths[-1]))
    return costly, [min(cpu_seconds(parser, costly, length) for _ in range(3)) for length in lengths]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--parser", action="append", choices=sorted(tool_parsers))
    options.add_argument("--kilobytes", type=int, nargs="+", default=[10, 30, 100, 300])
    from provenance import add_out, write_rows

    add_out(options)
    args = options.parse_args()
    lengths = sorted(kilobytes * 1000 for kilobytes in args.kilobytes)
    table = Table("parser", *(f"{length // 1000} kB" for length in lengths), "per byte", "repeated", title="CPU ms")
    slowest, steepest, rows = 0.0, 0.0, []
    for name in args.parser or sorted(tool_parsers):
        text, seconds = worst(name, lengths)
        rows.append({"parser": name, "bytes": lengths, "CPU s": seconds, "repeated": text})
        growth = (seconds[-1] / lengths[-1]) / (seconds[0] / lengths[0])
        slowest, steepest = max(slowest, seconds[-1]), max(steepest, growth)
        table.add_row(name, *(f"{s * 1e3:.1f}" for s in seconds), f"{growth:.2f}", escape(repr(text)[:44]))
    Console().print(table)
    write_rows(args.out, rows)
    size, base = lengths[-1] // 1000, lengths[0] // 1000
    print(f"parsers: {size} kB in at most {slowest:.2f} s; per byte at most {steepest:.2f} times {base} kB's")


if __name__ == "__main__":
    main()
