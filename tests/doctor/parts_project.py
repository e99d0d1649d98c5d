"""A small project of somebody's own, as files: SQLite behind a tool, a function as a tool, a simulated user, a reward,
rows in JSONL and Parquet, demonstrations, a configuration, and a model whose template passes over roles that it does
not know (as Qwen3's does)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from doctor_faults import tiny_copy

from verl_mt.config.compose import compose
from verl_mt.extensions.inspection.doctor.checks import CHECKS, examine
from verl_mt.extensions.inspection.doctor.findings import Finding

Row = dict[str, Any]
SYSTEM = "You weigh parts. Use the tools `lookup` and `add_weights`. End with a line 'Answer: N'."
TOOLS = '''
import sqlite3

from verl_mt.errors import ToolCallError
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.function_tool import function_tool


class Lookup(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        with sqlite3.connect(self.config["database"]) as database:
            found = database.execute("select grams from parts where name = ?", (parameters["part"],)).fetchone()
        return (f"{found[0]} g" if found else "no such part"), 0.0, {}


@function_tool
def add_weights(first: int, second: int) -> int:
    """Add two weights.

    Args:
        first: In grams.
        second: In grams.
    """
    return first + second
'''
USER = """
from verl_mt.interactions.base import BaseInteraction


class Customer(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        done = "Answer:" in str(messages[-1]["content"])
        return done, "Thank you." if done else "So what is the answer?", 0.0, {}
"""
REWARD = """
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search(r"Answer: *(\\S+) *$", solution_str)
    return 1.0 if found and found[1] == ground_truth else 0.0
"""
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "The weight of a part.",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "description": "Its name."}},
            "required": ["part"],
        },
    },
}


def rows(first: int, last: int) -> list[Row]:
    return [
        {
            "data_source": "parts",
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What does gear {number} weigh, in g?"},
            ],
            "reward_model": {"ground_truth": str(weight(number))},
            "extra_info": {"index": number, "tools_kwargs": {"lookup": {"create_kwargs": {"user": "Ada"}}}},
        }
        for number in range(first, last)
    ]


def weight(number: int) -> int:
    return 300 + 7 * number


def demonstration(row: Row) -> Row:
    """A call, and then the answer in the words of the system message."""
    part = f"gear {row['extra_info']['index']}"
    call = {"type": "function", "id": "1", "function": {"name": "lookup", "arguments": {"part": part}}}
    answer = row["reward_model"]["ground_truth"]
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{answer} g", "name": "lookup", "tool_call_id": "1"},
        {"role": "assistant", "content": f"It weighs {answer} g.\nAnswer: {answer}"},
    ]
    return {"messages": [*row["prompt"], *said]}


class Project:
    """Its files lie in a folder, which must be the working directory; change them, then `examine`."""

    def __init__(self, folder: Path):
        self.folder = folder
        with sqlite3.connect(folder / "parts.sqlite") as database:
            database.execute("create table parts (name text, grams integer)")
            database.executemany("insert into parts values (?, ?)", [(f"gear {n}", weight(n)) for n in range(40)])
        model = tiny_copy(folder)
        template = (model / "chat_template.jinja").read_text()
        (model / "chat_template.jinja").write_text(
            template.replace("raise_exception('unknown role: ' + message.role)", "''")
        )
        self.write("part_tools.py", TOOLS)
        self.write("customer.py", USER)
        self.write("part_reward.py", REWARD)
        self.write(
            "customer.yaml", yaml.safe_dump({"interaction": [{"class_name": "customer.py:Customer", "config": {}}]})
        )
        self.tools()
        self.rows(rows(0, 24))
        val = pyarrow.Table.from_pylist(rows(30, 36))
        pyarrow.parquet.write_table(val, folder / "val.parquet")
        self.write("demos.jsonl", "".join(json.dumps(demonstration(row)) + "\n" for row in rows(0, 8)))
        self.run = {
            "defaults": ["ppo_trainer", "_self_"],
            "data": {"train_files": "train.jsonl", "val_files": "val.parquet", "train_batch_size": 4},
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "actor": {"optim": {"lr": 2e-4}},
                "rollout": {
                    "name": "local",
                    "n": 4,
                    "response_length": 256,
                    "tool_kwargs": {"tools_config_file": "tools.yaml"},
                    "interaction_config_file": "customer.yaml",
                },
            },
            "reward": {"path": "part_reward.py"},
            "trainer": {"total_epochs": 4, "logger": ["console"], "num_threads": 1},
        }

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text, (name, old)
        self.write(name, text.replace(old, new))

    def tools(self, database: str = "parts.sqlite") -> None:
        lookup = {"class_name": "part_tools.py:Lookup", "config": {"database": database}, "tool_schema": LOOKUP}
        added = {"class_name": "part_tools.py:add_weights", "config": {}}
        self.write("tools.yaml", yaml.safe_dump({"tools": [lookup, added]}))

    def rows(self, made: list[Row]) -> None:
        self.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in made))

    def change_rows(self, change: Callable[[Row], object]) -> None:
        made = rows(0, 24)
        for row in made:
            change(row)
        self.rows(made)

    def examine(self, overrides: list[str], *names: str, demos: str | None = None) -> list[Finding]:
        """Findings of the named checks and those that they need; of all where none is named."""
        self.write("run.yaml", yaml.safe_dump(self.run))
        config = compose(overrides, config_name="run", config_dir=self.folder)
        wanted = set(names)
        for check in reversed(CHECKS):
            wanted |= set(check.needs) if check.name in wanted else set()
        return examine(config, [c for c in CHECKS if not names or c.name in wanted], demos=demos)
