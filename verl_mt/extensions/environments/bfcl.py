"""BFCL v4, multi-turn: a user's requests to simulated services, scored by the benchmark's own checker.

Tasks, services and checker are those of the package `bfcl-eval`. `recipes/bfcl/README.md` says how to train on it.
"""

from __future__ import annotations

import copy
import itertools
import json
import keyword
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.environments.base import Done, Environment
from verl_mt.errors import DataError, PluginError, ToolCallError, value_text

CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
"""Each category has 200 tasks. Tasks with the same number are variants of each other."""
_TYPES = {"dict": "object", "float": "number"}
"""A type of the benchmark's documents -> its name in JSON Schema."""
_LARGEST = {"exponent": 1000, "precision": 1000}
"""Limits of the calculator's arguments. A call with larger numbers takes minutes and blocks the process."""
_NUMBERS = itertools.count()
_LOCK = threading.Lock()
"""Of the services' modules, whose objects hold results of calls."""


def _folder() -> Path:
    """The package, found without an import: `bfcl_eval` makes folders beside itself when some of its modules load.

    Raises:
        PluginError: the package is not installed.
    """
    found = find_spec("bfcl_eval")
    if found is None or found.origin is None:
        raise PluginError("bfcl-eval is not installed: pip install --no-deps bfcl-eval==2026.3.23")
    return Path(found.origin).parent


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


@cache
def tasks() -> dict[str, dict[str, Any]]:
    """The 800 tasks by their ids (`multi_turn_base_0`): those of the package, with `ground_truth`.

    Raises:
        PluginError: `bfcl-eval` is not installed.
    """
    data, found = _folder() / "data", {}
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category}.json"
        answers = {answer["id"]: answer["ground_truth"] for answer in _json_lines(data / "possible_answer" / name)}
        for task in _json_lines(data / name):
            found[task["id"]] = task | {"ground_truth": answers[task["id"]]}
    return found


@cache
def _functions() -> dict[str, dict[str, Any]]:
    """Service -> function -> its OpenAI schema."""
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    folder = _folder() / "data" / "multi_turn_func_doc"
    used = {service for task in tasks().values() for service in task["involved_classes"]}
    return {
        service: {found["name"]: _schema(found) for found in _json_lines(folder / file)}
        for service, file in MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
        if service in used
    }


def _schema(document: dict[str, Any]) -> dict[str, Any]:
    """A function as the benchmark shows it to models that call tools."""
    function = {name: document[name] for name in ("name", "description")}
    parameters = _typed(document["parameters"])
    if document["name"] == "close_ticket":  # four solutions close ticket_001
        parameters["properties"]["ticket_id"]["type"] = ["integer", "string"]
    return {"type": "function", "function": function | {"parameters": parameters}}


def _typed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_typed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    typed = {key: _typed(value) for key, value in schema.items()}
    if isinstance(kind := typed.get("type"), str):
        typed["type"] = _TYPES.get(kind, kind)
    return typed


def row_of(task_id: str) -> dict[str, Any]:
    """A row of the data set: the task's id, and the functions that it may call and those that its prompt shows.

    Args:
        task_id: a key of `tasks()`.
    """
    task = tasks()[task_id]
    names = [name for service in task["involved_classes"] for name in _functions()[service]]
    later = {name for some in task.get("missed_function", {}).values() for name in some}
    shown = [name for name in names if name not in later]
    extra = {"tool_selection": names} | ({"prompt_tools": shown} if later else {})
    return {"id": task_id, "data_source": f"bfcl_{task_id.rpartition('_')[0]}", "extra_info": extra}


class BFCL(Environment):
    """One task. The model may call the functions of the task's services; a turn without a call brings the user's next
    request. The score is 1 where the benchmark's `multi_turn_checker` accepts all turns, else 0.

    In the category `miss_func` some functions are missing at first, and a later message of the user describes them.
    """

    def __init__(self) -> None:
        self._name = f"verl_mt_{next(_NUMBERS)}"

    @classmethod
    def tool_schemas(cls, **config: Any) -> list[dict[str, Any]]:
        """All functions of all services. The row selects some of them (`row_of`)."""
        return [schema for service in _functions().values() for schema in service.values()]

    def reset(self, id: str, **row: Any) -> list[Message]:
        """The user's first request.

        Raises:
            DataError: no task has this id.
        """
        if id not in tasks():
            raise DataError(f"column id is {value_text(id)}, and BFCL has no such task. Use recipes/bfcl/prepare.py")
        self._task = tasks()[id]
        self._calls: list[list[str]] = [[]]  # of each turn of the user
        self._finished = False
        self._begin(self._name, of_check=False)
        return [dict(message) for message in self._task["question"][0]]

    def call_tool(self, name: str, parameters: dict[str, Any]) -> str:
        """Run a call as the benchmark does.

        Raises:
            ToolCallError: an argument's name is none of Python's, or a number is too large for the calculator.
        """
        for key, value in parameters.items():
            if not key.isidentifier() or keyword.iskeyword(key):
                raise ToolCallError(f"{name} has no argument {key!r:.80}")
            if key in _LARGEST and isinstance(value, int | float) and abs(value) > _LARGEST[key]:
                raise ToolCallError(f"{key} is {value_text(value)}, at most {_LARGEST[key]} is possible")
        call = f"{name}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"
        self._calls[-1].append(call)
        with _LOCK:
            return self._run([call], self._name, of_check=False)[0]

    def reply(self, text: str) -> str:
        """The user's next request. After the last one the episode is over."""
        from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING

        number = len(self._calls)
        if number == len(self._task["question"]):
            self._finished = True
            raise Done("")
        self._calls.append([])
        if missed := self._task.get("missed_function", {}).get(str(number)):
            functions = {name: schema for service in _functions().values() for name, schema in service.items()}
            shown = json.dumps([functions[name]["function"] for name in missed])
            return DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=shown)
        return "\n\n".join(message["content"] for message in self._task["question"][number])

    def score(self) -> dict[str, float]:
        """`score`, and `turns`: how many of the user's turns came."""
        return {"score": float(self._is_right()), "turns": float(len(self._calls))}

    def close(self) -> None:
        """Forget the services of this episode and of its check, which `bfcl_eval` keeps by name."""
        for name, services in self._kept():
            del services[name]

    def _is_right(self) -> bool:
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

        if not self._finished:
            return False
        for name in (self._name, f"{self._name}_ground_truth"):
            self._begin(name, of_check=True)
        steps = [[[call] for call in calls] for calls in self._calls]
        with _LOCK:
            found = multi_turn_checker(steps, self._task["ground_truth"], self._task, "multi_turn", self._name)
        return bool(found["valid"])

    def _begin(self, name: str, *, of_check: bool) -> None:
        """Make the task's services. With a long context they begin with objects of their modules: each gets copies."""
        with _LOCK:
            self._run([], name, of_check=of_check)
            for kept, services in self._kept():
                services[kept] = copy.deepcopy(services[kept])

    def _kept(self) -> list[tuple[str, dict[str, Any]]]:
        """Name of each service of this episode in the module that keeps it, and the names of that module."""
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

        names = vars(multi_turn_utils)
        return [(name, names) for name in list(names) if name.startswith(f"{self._name}_")]

    def _run(self, calls: list[str], name: str, *, of_check: bool) -> list[str]:
        """The benchmark's own texts for calls as Python writes them."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

        task = self._task
        texts, _ = execute_multi_turn_func_call(
            calls,
            task["initial_config"],
            task["involved_classes"],
            name,
            task["id"],
            long_context="long_context" in task["id"],
            is_evaL_run=of_check,
        )
        return [str(text) for text in texts]
