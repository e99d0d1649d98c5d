"""The environments of a run: each class with its configuration, checked before anything is sampled."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mt.config.rollout import EnvironmentConfig
from verl_mt.environments.base import RESERVED, Environment
from verl_mt.errors import ConfigError, DataError, PluginError, VerlMTError, error_text, value_text
from verl_mt.extension_points import find as find_entry_point
from verl_mt.plugins import Registry, code_place, extension_function, listing, load_object, suggest
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.function_tool import from_json, rich_arguments, schema_of
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, as_tool_schema
from verl_mt.tools.toolset import ToolEntry, ToolSet, without_nulls
from verl_mt.user_code import UserCode

KEY = "actor_rollout_ref.rollout.environment"
COLUMN = "environment"
"""Of a row that names one of `rollout.environment.named`, or changes the configuration of its environment."""
DEFAULT = "default"
"""The name of `rollout.environment.path`."""

environments: Registry[Any] = Registry("environment", group="verl_mt.environments")
"""`environments['maze'] = Maze` registers a class by name."""


class EnvironmentTool(BaseTool):
    """One tool of an environment: finds the trajectory's object and runs the call there."""

    runs_inline = True  # it waits for the environment's own thread or loop

    def __init__(self, schema: OpenAIFunctionToolSchema, cls: type[Environment]):
        self.in_order, self.repeatable = cls.in_order, cls.repeatable
        super().__init__({}, schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any = None, **kwargs: Any
    ) -> Any:
        """Runs on the rollout's loop. Waits for the environment."""
        session = agent_data and agent_data._environment
        if session is None:
            raise PluginError(f"{self.name} is a tool of an environment, and this conversation has none")
        return await session.run_tool(self.name, parameters)


@dataclass(frozen=True, eq=False)
class Kind:
    """One environment class with its configuration."""

    name: str
    """In the configuration: a name of `named`, or `default`."""
    cls: type[Environment]
    config: dict[str, Any]
    timeout_s: float
    code: UserCode
    """Runs its objects' methods."""
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Tool -> the function of the class; empty where `tool_schemas` says what the tools are."""
    entries: list[ToolEntry] = field(default_factory=list)

    @property
    def title(self) -> str:
        return self.cls.__name__

    @property
    def replies(self) -> bool:
        return hasattr(self.cls, "reply")

    @property
    def scores(self) -> bool:
        return hasattr(self.cls, "score")

    def converted(self, tool: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a method as its type hints say.

        Raises:
            ToolCallError: a value that its type refuses.
        """
        return from_json(rich_arguments(self.methods[tool]), parameters)

    def config_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of the constructor for a row. Parquet gives every row's `config` the keys of all rows: nulls are
        left out."""
        own = row.get(COLUMN)
        changed = own.get("config") or {} if isinstance(own, Mapping) else {}
        config = {**self.config, **without_nulls(changed)}
        return {name: row[name] for name in _named(self.cls) if name in row and name not in config} | config

    def columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of `reset` for a row: all columns, or those that it names."""
        parameters = _parameters(self.cls.reset)
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(row)
        return {p.name: row[p.name] for p in parameters if p.name in row}

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Before anything is sampled: the row has what the constructor and `reset` want.

        Raises:
            DataError: it has not; names class and line.
        """
        try:
            _check_config(self.cls, self.config_of(row), f"column {COLUMN}: config")
        except ConfigError as error:
            raise DataError(str(error)) from None
        for function, given in ((self.cls.__init__, self.config_of(row)), (self.cls.reset, row)):
            for name in _required(function):
                if name not in given:
                    config = f", or set {KEY}.config.{name}" if function is self.cls.__init__ else ""
                    raise DataError(
                        f"{place_of(self.cls, function)} wants {name!r}, which the row has not. Add the column "
                        f"{name}{config}, or give it a default. Columns: {listing(map(str, row))}"
                    )


class EnvironmentTools(ToolSet):
    """The tools of a run with environments: a row may use the configured ones and those of its environment.

    As a `ToolSet` it holds the configured ones and those of `rollout.environment.path`.

    Args:
        tools: the configured ones.
        kinds: name -> environment.

    Raises:
        PluginError: two tools of one name.
    """

    def __init__(self, tools: ToolSet, kinds: Mapping[str, Kind]):
        self.kinds = dict(kinds)
        self._sets = {name: ToolSet([*tools.entries, *kind.entries]) for name, kind in kinds.items()}
        super().__init__((self._sets[DEFAULT] if DEFAULT in kinds else tools).entries)

    @property
    def limit(self) -> int | None:
        """Objects alive at once; None = no limit."""
        return min((kind.cls.limit for kind in self.kinds.values() if kind.cls.limit is not None), default=None)

    @property
    def any_tools(self) -> bool:
        """Whether some row has a tool."""
        return any(map(len, (self, *self._sets.values())))

    def kind_of(self, row: Mapping[str, Any]) -> Kind:
        """The environment of a row.

        Raises:
            DataError: its column `environment` names none, or is no name.
        """
        given = row.get(COLUMN)
        if given is not None and not isinstance(given, str | Mapping):
            raise DataError(f"column {COLUMN} must be a name, or {{name: ..., config: ...}}, got {value_text(given)}")
        mapping = given if isinstance(given, Mapping) else {"name": given}
        if unknown := [key for key in mapping if key not in ("name", "config")]:
            raise DataError(f"column {COLUMN}: unknown key {unknown[0]!r}. Known: name, config")
        if not isinstance(config := mapping.get("config"), Mapping | None):
            raise DataError(f"column {COLUMN}: config must be a mapping of arguments, got {value_text(config)}")
        name = mapping.get("name") or DEFAULT
        if name not in self.kinds:
            close = suggest(str(name), self.kinds).removesuffix("?")
            told = f"names {name!r}{close}" if mapping.get("name") else "is empty, and there is no default"
            raise DataError(f"column {COLUMN} {told}. Name one of {KEY}.named: {listing(self.kinds)}")
        return self.kinds[name]

    def of_row(self, extra_info: Mapping[str, Any], row: Mapping[str, Any]) -> ToolSet:
        kind = self.kind_of(row)
        kind.check_row(row)
        return self._sets[kind.name].of_row(extra_info, row)


def build_environments(config: EnvironmentConfig, tools: ToolSet | None, timeout_s: float) -> EnvironmentTools | None:
    """The environments that a run names, with the tools beside them; None where it names none.

    Args:
        config: which.
        tools: of the run; None = none.
        timeout_s: deadline of each call that is no tool call.

    Raises:
        ConfigError, PluginError: a class cannot be an environment; names class and line.
    """
    wanted: dict[str, Any] = {}
    if config.path is not None:
        wanted[DEFAULT] = {"path": config.path, "config": config.config}
    for name, given in config.named.items():
        wanted[name] = given if isinstance(given, Mapping) else {"path": given}
        if name == DEFAULT or set(wanted[name]) - {"path", "config"} or "path" not in wanted[name]:
            raise ConfigError(
                f"{KEY}.named.{name}: got {value_text(given)}. Expected a path, or {{path: ..., config: ...}}, under "
                f"another name than {DEFAULT!r}"
            )
    if not wanted:
        return None
    kinds = {
        name: build_kind(item["path"], dict(item.get("config") or {}), name=name, timeout_s=timeout_s)
        for name, item in wanted.items()
    }
    return EnvironmentTools(ToolSet() if tools is None else tools, kinds)


def build_kind(path: str, config: dict[str, Any], *, name: str = DEFAULT, timeout_s: float = 60.0) -> Kind:
    """An environment class with its tools.

    Args:
        path: registered name, dotted path, `file.py:Name`, or `object:name`.
        config: keywords of the constructor.
        name: in the configuration.
        timeout_s: deadline of each call that is no tool call.

    Raises:
        PluginError: it is no environment, or one of its methods cannot be a tool; names class and line.
        ConfigError: the constructor takes no such keyword.
    """
    where = f"{KEY}.path" if name == DEFAULT else f"{KEY}.named.{name}"
    cls = load_object(path, what=where, registry=environments)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        cls = _adapted(cls, where, path)
    _check_class(cls)
    _check_config(cls, config, f"{KEY}.config" if name == DEFAULT else f"{where}.config")
    try:
        schemas = cls.tool_schemas(**config)
    except VerlMTError:
        raise
    except Exception as error:
        raise PluginError(f"{place_of(cls, cls.tool_schemas)} raised {error_text(error, named=True)}") from error
    methods: dict[str, Callable[..., Any]] = {}
    if schemas is None:
        methods = dict(_tool_methods(cls))
        made = [(schema_of(method, place_of(cls, method)), place_of(cls, method)) for method in methods.values()]
    else:
        made = [(as_tool_schema(schema, f"{cls.__name__}.tool_schemas"), cls.__name__) for schema in schemas]
    entries = [ToolEntry.of(EnvironmentTool(schema, cls), where=place) for schema, place in made]
    ToolSet(entries)  # no two of one name
    return Kind(
        name, cls, config, timeout_s, UserCode(cls, Environment, f"environment {cls.__name__}"), methods, entries
    )


def _adapted(found: Any, where: str, path: str) -> type[Environment]:
    """An environment around a class of another library.

    Raises:
        PluginError: no adapter takes it.
    """
    known = find_entry_point("verl_mt.functions", "as_environment") is not None
    adapted: type[Environment] | None = extension_function("as_environment")(found) if known else None
    if adapted is None:
        raise PluginError(
            f"{where}: {path} is {value_text(found, 80)}, no environment. Write a subclass of verl_mt.Environment, or "
            "name an adapter (docs/environments.md)"
        )
    return adapted


def place_of(cls: type, function: Any = None) -> str:
    """`file.py:12 (Maze.move)`, for errors."""
    plain = inspect.unwrap(getattr(function, "__func__", function if function is not None else cls))
    name = cls.__name__ if function is None else f"{cls.__name__}.{getattr(plain, '__name__', function)}"
    try:
        return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]} ({name})"
    except (TypeError, OSError):  # of a notebook's cell that is gone, or written in C
        return code_place(cls) if function is None else f"{code_place(cls)}.{getattr(plain, '__name__', function)}"


def _tool_methods(cls: type[Environment]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods in the order written, those of the first base class first."""
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        if owner not in Environment.__mro__:
            found |= {n: v for n, v in vars(owner).items() if not n.startswith("_") and n not in RESERVED}
    for name, value in found.items():
        if isinstance(value, types.FunctionType):
            yield name, types.MethodType(value, cls)  # shown without `self`
        elif isinstance(value, staticmethod | classmethod) or hasattr(value, "__wrapped__"):  # or `lru_cache`
            raise PluginError(
                f"{place_of(cls, value)}: a {type(value).__name__} sees no trajectory. Write a method, or begin its "
                "name with an underscore if it is no tool"
            )


def _check_class(cls: type[Environment]) -> None:
    """What a class says wrongly about itself, one error each."""
    if cls.reset is Environment.reset:
        raise PluginError(f"{place_of(cls)} has no reset(self, **row), which begins an episode and returns the prompt")
    if isinstance(done := inspect.getattr_static(cls, "done"), types.FunctionType):
        raise PluginError(f"{place_of(cls, done)}: `done` is a method. Write @property above it, or set self.done")
    for name, expected in (("limit", int | None), ("in_order", bool), ("repeatable", bool)):
        if not isinstance(value := getattr(cls, name), expected) or (
            name == "limit" and value is not None and value < 1
        ):
            place = place_of(cls, value) if callable(value) else place_of(cls)
            raise PluginError(f"{place}: {name!r} is reserved and cannot be {value_text(value, 80)}. Rename it")
    for name, arguments in (("score", 0), ("state", 0), ("fork", 0), ("close", 0), ("reply", 1)):
        method = inspect.getattr_static(cls, name, None)
        if method is None:
            continue
        if not isinstance(method, types.FunctionType) or len(_required(method)) != arguments:
            takes = "no argument" if arguments == 0 else "one argument, the model's text,"
            raise PluginError(
                f"{place_of(cls, method)}: {name!r} is reserved and takes {takes} beside self. Give your tool another "
                f"name. Reserved: {listing(RESERVED)}"
            )
    for name, lines in _written_twice(cls):
        raise PluginError(
            f"{place_of(cls)} has two tools named {name!r}, in its lines {lines[0]} and {lines[1]}: only the second "
            "would be used. Rename one"
        )


def _written_twice(cls: type) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names of plain methods that a class body defines twice, with the numbers of their lines."""
    try:
        source, first = inspect.getsourcelines(cls)
        body = ast.parse(textwrap.dedent("".join(source))).body[0]
    except (TypeError, OSError, SyntaxError):
        return
    seen: dict[str, int] = {}
    for node in getattr(body, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            line = first + node.lineno - 1
            if not node.name.startswith("_") and node.name in seen:
                yield node.name, (seen[node.name], line)
            seen[node.name] = line


def _check_config(cls: type[Environment], config: Mapping[str, Any], key: str) -> None:
    parameters = _parameters(cls.__init__)
    taken = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and cls.__init__ is not object.__init__:
        return
    for name in config:
        if name not in taken:
            raise ConfigError(
                f"{key}.{name}: {place_of(cls)} takes no {name!r}{suggest(str(name), taken).rstrip('?')}. Its "
                f"constructor takes: {listing(taken)}"
            )


@functools.cache
def _parameters(function: Any) -> Sequence[inspect.Parameter]:
    """Those behind `self`."""
    return [] if function is object.__init__ else list(inspect.signature(function).parameters.values())[1:]


def _named(cls: type[Environment]) -> list[str]:
    """Parameters of the constructor that have names."""
    return [p.name for p in _parameters(cls.__init__) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _required(function: Any) -> list[str]:
    """Parameters without a default."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in _parameters(function) if p.default is p.empty and p.kind in plain]
