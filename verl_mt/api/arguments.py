"""Arguments of a call: Python names of keys and Python objects, as the words of a command and the objects they name.

A call builds the configuration that a command would: `train(total_training_steps=20)` is
`trainer.total_training_steps=20`. What has no path, a function of a notebook or a list of rows, gets a name,
`object:score`, which stands where a path would; while the call goes on, `plugins.load_object` finds the object by it.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow

from verl_mt.config.normalize import Item, as_overrides
from verl_mt.config.short_names import keys_meant, other_names, suggest_key
from verl_mt.data.dataset import drop_nulls
from verl_mt.errors import ConfigError, DataError, PluginError, UnknownKeyError, value_text
from verl_mt.interactions.base import BaseInteraction
from verl_mt.plugins import OBJECT
from verl_mt.rewards.contract import RESERVED_PARTS
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.function_tool import FunctionTool, function_tool

ROLLOUT = "actor_rollout_ref.rollout"
TAKES_OBJECTS = (
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    f"{ROLLOUT}.agent_function_path",
    f"{ROLLOUT}.custom_generate_function_path",
    f"{ROLLOUT}.environment.path",
    f"{ROLLOUT}.multi_turn.loss_scale",
    f"{ROLLOUT}.multi_turn.scheduler",
    f"{ROLLOUT}.multi_turn.scheduler_kwargs.env",
    f"{ROLLOUT}.multi_turn.tool_parser",
    f"{ROLLOUT}.name",
    "algorithm.adv_estimator",
    "data.sampler",
    "data.train_files",
    "data.val_files",
    "reward.kwargs.rewards",
    "reward.path",
    "trainer.logger",
)
"""Keys whose value names code: an object may stand there itself."""


@dataclass
class CallArguments:
    """The words of a command, and the objects that they name."""

    words: list[str] = field(default_factory=list)
    """Overrides in Hydra's grammar."""
    objects: dict[str, Any] = field(default_factory=dict)
    """`object:name` -> object."""

    def key(self, key: str, value: Any) -> None:
        """Set a key; its value may be, or hold, objects where it names code."""
        self.words += as_overrides([Item(key, self._plain(key, value), key)])

    def keys(self, keys: Mapping[str, Any]) -> None:
        """Set keys by their Python names (`full_key`)."""
        for name, value in keys.items():
            self.key(full_key(name), value)

    def overrides(self, given: Mapping[str, Any] | Sequence[str]) -> None:
        """Hydra words as they are, or a mapping dotted key -> value."""
        if isinstance(given, Mapping):
            self.keys(given)
        elif isinstance(given, str):
            raise ConfigError(f"overrides is the text {given!r}. Expected a list of them, or a mapping key -> value")
        else:
            self.words += given

    def rows(self, key: str, data: Any) -> Any:
        """What `data.train_files` or `data.val_files` says of rows; the caller sets it. Of a path, or what else the key
        holds, itself; of rows, a data set, or a function (num_rows, seed, split) -> rows a name."""
        path = os.fspath(data) if isinstance(data, os.PathLike) else data
        if _is_spec(path):
            return self._plain(key, path)
        split = key.removeprefix("data.").removesuffix("_files")
        rows = _rows(path, key)
        if isinstance(rows, _Rows):  # all of them: what the shipped task takes of its generator is not meant for them
            self.key(f"data.{split}_max_samples", -1)
        return self.name(rows, "validation" if split == "val" else "data")

    def conversations(self, data: Any, name: str) -> str:
        """The path of a file of conversations or of a run directory, or the name of the caller's rows."""
        if isinstance(data, str | os.PathLike):
            return os.fspath(data)
        return self.name(_rows(data, name, data_source=None), name)

    def tools(self, tools: Any) -> None:
        """Set the tools: functions, `BaseTool` classes or objects, dotted paths, entries as in YAML, mixed; or a file;
        an empty list for none."""
        entries = self._entries(tools, "tools", _as_tool)
        self.key(f"{ROLLOUT}.tool_kwargs.tools_config_file", entries)

    def interaction(self, interaction: Any) -> None:
        """Set the interactions: `BaseInteraction` classes or objects, dotted paths, entries as in YAML, one or several;
        or a file; an empty list for none."""
        entries = self._entries(interaction, "interaction", _as_interaction)
        self.key(f"{ROLLOUT}.interaction_config_file", entries)

    def environment(self, environment: Any) -> None:
        """Set the environment: a class, a path, a mapping with `path` and `config` as in YAML, or a mapping name ->
        one of them, of which each row picks one."""
        key = f"{ROLLOUT}.environment"
        if not isinstance(environment, Mapping):
            self.key(f"{key}.path", self._class(environment))
        elif "path" in environment:
            self.keys({f"{key}.{name}": self._class(v) if name == "path" else v for name, v in environment.items()})
        else:
            self.key(f"{key}.named", {str(name): self._named(given) for name, given in environment.items()})

    def _named(self, given: Any) -> Any:
        is_mapping = isinstance(given, Mapping) and "path" in given
        return {**given, "path": self._class(given["path"])} if is_mapping else self._class(given)

    def _class(self, given: Any) -> str:
        if isinstance(given, str | os.PathLike):
            return os.fspath(given)
        if isinstance(given, type) or callable(given):
            return self.name(given)
        raise PluginError(
            f"environment: {value_text(given, 80)} is no class. Every trajectory makes its own object: pass the class, "
            "and its arguments as {'path': Maze, 'config': {...}}"
        )

    def reward(self, reward: Any) -> None:
        """Set the reward: a function, a class, an object, whatever `reward.path` takes; a list of them is summed."""
        if isinstance(reward, list | tuple):
            self.key("reward.path", "weighted_sum")
            self.key("reward.kwargs.rewards", [self._part(part) for part in reward])
        else:
            self.key("reward.path", reward)

    def _part(self, reward: Any) -> str:
        """One of several rewards: its name is a number of the metrics, beside those that every run has."""
        if isinstance(reward, str):
            return reward
        name = _name_of(reward)
        return self.name(reward, f"{name}_reward" if name in RESERVED_PARTS else name)

    def name(self, value: Any, name: str | None = None) -> str:
        """The name under which `load_object` finds an object; the same object has one."""
        for known, given in self.objects.items():
            if given is value:
                return known
        wanted = OBJECT + (name or _name_of(value))
        found, number = wanted, 2
        while found in self.objects:
            found, number = f"{wanted}_{number}", number + 1
        self.objects[found] = value
        return found

    def _plain(self, key: str, value: Any) -> Any:
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            value = value.item()  # a number of numpy or torch
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, Mapping):
            return {str(k): self._plain(f"{key}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(key, v) for v in value]
        if key not in TAKES_OBJECTS:
            raise ConfigError(
                f"{key} is {value_text(value, 80)}: it takes plain values (texts, numbers, lists, mappings). What code "
                "needs besides, give it yourself: functools.partial(f, client=client), or an object of its class"
            )
        return self.name(value)

    def _entries(self, given: Any, key: str, as_code: Callable[[Any], Any]) -> str | None:
        """The value of a key that names a file of declarations."""
        if isinstance(given, str | os.PathLike) and os.fspath(given).endswith((".yaml", ".yml")):
            return os.fspath(given)
        items = list(given) if isinstance(given, list | tuple) else [given]
        entries = [self._entry(item, as_code) for item in items]
        names = [str(entry["class_name"]).removeprefix(OBJECT).rpartition(".")[2] for entry in entries]
        return self.name(entries, f"{key}({', '.join(names)})") if entries else None

    def _entry(self, item: Any, as_code: Callable[[Any], Any]) -> dict[str, Any]:
        entry = dict(item) if isinstance(item, Mapping) else {"class_name": item}
        code = entry.get("class_name")
        if not isinstance(code, str):
            entry["class_name"] = self.name(as_code(code), _name_of(code))
        return entry


def full_key(name: str) -> str:
    """The dotted key of a Python name: the key itself (`trainer__total_training_steps`), or a short name of it
    (`total_training_steps`, `rollout__n`; `verl_mt.config.short_names` has the rule).

    Raises:
        UnknownKeyError: no key, or several; names them.
    """
    dotted = name.replace("__", ".").strip(".")
    found = keys_meant(dotted)
    if len(found) == 1:
        return found[0]
    if found:
        full = " or ".join(key.replace(".", "__") for key in found)
        raise UnknownKeyError(f"{name} may mean {' or '.join(found)}: write {full}")
    if "." in dotted or dotted in other_names():
        return dotted  # another library's name of one of our keys, or none at all: the composition says which
    raise UnknownKeyError(f"{name}: no such argument, and no key of the configuration ends so{suggest_key(dotted)}")


def _name_of(value: Any) -> str:
    if isinstance(value, FunctionTool):
        return str(value.name)
    if isinstance(value, functools.partial):
        return _name_of(value.func)
    name = getattr(value, "__name__", None) or type(value).__name__
    return name.strip("<>")


def _as_tool(tool: Any) -> Any:
    """What `class_name` of an entry may name."""
    if isinstance(tool, BaseTool) or (isinstance(tool, type) and issubclass(tool, BaseTool)):
        return tool
    if isinstance(tool, type) or not callable(tool):
        raise PluginError(
            f"tools: {value_text(tool, 80)} is no tool. Give functions with type hints, BaseTool classes or objects, "
            "dotted paths, or a YAML file"
        )
    return function_tool(tool)


def _as_interaction(interaction: Any) -> Any:
    is_class = isinstance(interaction, type) and issubclass(interaction, BaseInteraction)
    if is_class or isinstance(interaction, BaseInteraction):
        return interaction
    raise PluginError(
        f"interaction: {value_text(interaction, 80)} is no BaseInteraction. Give a class or an object of one, a dotted "
        "path, or a YAML file"
    )


def _is_spec(data: Any) -> bool:
    """Whether it is what a command could say: a path, several, or a mapping name -> {path, weight}."""
    if isinstance(data, Mapping):
        return all(_is_spec(v) or isinstance(v, int | float | Mapping) for v in data.values())
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(v, str | os.PathLike) or (_is_entry(v)) for v in data)
    return isinstance(data, str)


def _is_entry(value: Any) -> bool:
    return isinstance(value, Mapping) and "path" in value and set(value) <= {"path", "weight", "name"}


def _rows(data: Any, key: str, data_source: str | None = "data") -> Callable[..., Any]:
    """Rows as the loader asks for them; those that do not say where they are from get `data_source`."""
    if callable(data) and not hasattr(data, "column_names"):
        return data
    if isinstance(data, Mapping):  # datasets.DatasetDict among them
        raise DataError(f"{key}: got a mapping of {', '.join(map(str, data))}. Give one part, such as data['train']")
    if type(data).__module__.partition(".")[0] == "pandas":
        data = pyarrow.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "to_pylist"):
        return _Rows(data.to_pylist(), _Reader(key, data_source, is_table=True))
    if isinstance(data, Iterator):
        raise DataError(f"{key}: got a {type(data).__name__}, which can be read only once. Give list(...) of it")
    if not isinstance(data, Iterable):
        raise DataError(f"{key}: got {value_text(data, 80)}. Expected rows (dicts), a data set, or a file's path")
    reader = _Reader(key, data_source, is_table=hasattr(data, "column_names"))
    return _Rows(data, reader) if hasattr(data, "__len__") else _Stream(data, reader)


@dataclass(frozen=True)
class _Reader:
    """Makes a row of a run out of a caller's row."""

    key: str
    data_source: str | None
    is_table: bool

    def row(self, row: Any, index: int) -> dict[str, Any]:
        """A copy, without what a table fills in."""
        if not isinstance(row, Mapping):
            raise DataError(
                f"{self.key}, row {index + 1}: expected a mapping column -> value, got {value_text(row, 80)}"
            )
        found = copy.deepcopy(dict(row))
        if self.is_table:
            found = {name: drop_nulls(value) for name, value in found.items()}
        return found if self.data_source is None else {"data_source": self.data_source, **found}


class _Rows:
    """Rows in memory. They are copied now: later changes of the list change no run."""

    def __init__(self, rows: Iterable[Any], reader: _Reader):
        self.rows = [reader.row(row, index) for index, row in enumerate(rows)]

    def __call__(self, *, num_rows: int, seed: int, split: str) -> list[dict[str, Any]]:
        return self.rows if num_rows < 0 else self.rows[:num_rows]


class _Stream:
    """A data set that is read row by row (`datasets.IterableDataset`); it may have no end."""

    def __init__(self, rows: Iterable[Any], reader: _Reader):
        self.rows, self.reader = rows, reader

    def __call__(self, *, num_rows: int, seed: int, split: str) -> Iterator[dict[str, Any]]:
        wanted = islice(self.rows, None if num_rows < 0 else num_rows)
        return (self.reader.row(row, index) for index, row in enumerate(wanted))
