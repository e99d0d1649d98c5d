"""From a name to an object: dotted paths, file paths, registered names. One mechanism for every plug-in.

Forms that `load_object` takes:

- a registered name, where the caller passes a registry: `math_tip_trick`
- a dotted path: `my_package.my_module.MyTool` or `my_package.my_module:MyTool`
- a file and a name: `/path/to/my_tools.py:MyTool` (or relative to the working directory)
- `object:name`: an object of a Python call (`objects_given`), which has no path
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from verl_mt.errors import PluginError, error_text
from verl_mt.extension_points import extra_of, own
from verl_mt.extension_points import find as find_entry_point
from verl_mt.extension_points import known as known_entry_points
from verl_mt.import_paths import read_table

T = TypeVar("T")

OBJECT = "object:"
"""Begins the name of an object that a Python call passes instead of a path."""

log = logging.getLogger(__name__)


class Registry(dict[str, T], Generic[T]):
    """A dict of named plug-ins of one kind; assignment registers: `rewards['mine'] = MyReward`.

    A value may be a dotted path as text, which is imported when it is asked for by its name (`registry[name]`, `find`,
    `load_object`): so the core names adapters that it never imports.

    Raises:
        PluginError: on assigning another object to a name that is taken (assigning the same object again,
            or one of the same qualified name from a re-imported file, is fine).
    """

    def __init__(self, kind: str, items: Mapping[str, T | str] | None = None, *, group: str | None = None):
        """Args:
        kind: one of them in a word, for errors.
        items: what stands in it from the start.
        group: a group of entry points (`verl_mt.trackers`), whose names it has too.
        """
        super().__init__(cast("dict[str, T]", {**(items or {}), **(own(group) if group else {})}))
        self.kind = kind
        self._group = group

    def names(self) -> list[str]:
        """Every name: those that are registered, and those that installed packages bring."""
        return list(dict.fromkeys((*self, *(known_entry_points(self._group) if self._group else ()))))

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if super().__contains__(name):
            return True
        if self._group is None or names_code(name):
            return False
        path = find_entry_point(self._group, name)
        if path is not None:
            super().__setitem__(name, cast("T", _load_entry_point(self._group, name, path, f"{self.kind} {name}")))
        return path is not None

    def __setitem__(self, name: str, value: T) -> None:
        old = self.get(name)
        if old is not None and old is not value and identity(old) != identity(value):
            raise PluginError(
                f"{self.kind} {name!r} is already registered as {identity(old)}. "
                f"Got {identity(value)}. Choose another name, or delete the old one first."
            )
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> T:
        value = super().__getitem__(name)
        if not isinstance(value, str):
            return value
        return cast("T", _load_entry_point(self._group, name, value, f"{self.kind} {name}"))

    def find(self, name: str) -> T:
        """The plug-in of that name.

        Raises:
            PluginError: unknown name; lists what exists.
        """
        if name in self:
            return self[name]
        raise PluginError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """The text of an error: no plug-in has the name, and these exist."""
        names = self.names()
        missing = self._group is not None and not read_table()
        return f"unknown {self.kind} {name!r}{suggest(name, names)}. Registered: {listing(names)}" + (
            ". Others come with verl_mt/extensions, which is not installed here: install the whole package verl_mt"
            if missing
            else ""
        )


def names_code(value: Any) -> bool:
    """Whether a config's value is a dotted path or `file.py:name`, and no registered name."""
    return isinstance(value, str) and ("." in value or ":" in value)


def suggest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


_FILE_MODULE = "verl_mt_plugin_"
"""Begins the names of modules that are files of the user's."""


def listing(names: Iterable[str]) -> str:
    """Sorted names for an error text."""
    return ", ".join(sorted(names)) or "(none)"


_given: dict[str, Any] = {}
"""Name -> object, of the calls that go on in this process."""


@contextmanager
def objects_given(objects: Mapping[str, Any]) -> Iterator[None]:
    """While open, `load_object` finds these objects by their names, `object:name`.

    Raises:
        PluginError: another call that goes on in this process has given another object of one of these names.
    """
    taken = [name for name, value in objects.items() if _given.get(name, value) is not value]
    if taken:
        raise PluginError(f"another call in this process still uses {listing(taken)}: wait for its end")
    new = [name for name in objects if name not in _given]
    _given.update(objects)
    try:
        yield
    finally:
        for name in new:
            del _given[name]


def objects_in(value: Any) -> dict[str, Any]:
    """What the `object:name` in a value of the configuration stand for, at any depth.

    Raises:
        PluginError: nobody has given it here.
    """
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return {name: found for part in parts for name, found in objects_in(part).items()}
    is_name = isinstance(value, str) and value.startswith(OBJECT)
    return {value: given_object(value, "the configuration")} if is_name else {}


def give_objects(objects: Mapping[str, Any]) -> None:
    """The same for the rest of this process: of a rank, which learns the objects of the call."""
    _given.update(objects)


def given_object(path: str, what: str) -> Any:
    """The object `object:name` of a call that goes on.

    Raises:
        PluginError: none of that name was given here.
    """
    if path not in _given:
        raise PluginError(
            f"{what}: {path!r} stands for an object of a Python call, and this process has no such object: repeat the "
            "call with the same objects (docs/python_api.md). A command finds only objects of a module or a file"
        )
    return _given[path]


def load_object(path: str, *, what: str, registry: Registry[Any] | None = None) -> Any:
    """The object that a config names.

    Args:
        path: registered name, dotted path, `file.py:name`, or `object:name`.
        what: what is being loaded, for the error ("tool class of search in tools.yaml").
        registry: registered names tried first.

    Raises:
        PluginError: names `what`, `path`, the part that failed, and what exists instead.
    """
    if not isinstance(path, str) or not path.strip():
        raise PluginError(f"{what}: expected a dotted path, got {path!r}")
    if path.startswith(OBJECT):
        return given_object(path, what)
    if registry is not None and path in registry:
        return registry.find(path)
    if registry is not None and "." not in path and ":" not in path:
        raise PluginError(
            f"{what}: {registry.unknown(path)}. A dotted path (package.module.Name) or file.py:Name also works."
        )
    module_name, _, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name:
        raise PluginError(f"{what}: {path!r} is not a dotted path. Write package.module.Name or file.py:Name")
    module = import_file(module_name, what) if module_name.endswith(".py") else _import_module(module_name, what, path)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [n for n in vars(target) if not n.startswith("_")]
            raise PluginError(f"{what}: {module_name} has no {part!r}{suggest(part, names)} (from {path!r})")
        target = getattr(target, part)
    return target


def extension_function(name: str) -> Any:
    """What an extension does for the core under a name of the group `verl_mt.functions`: `examine`, `report`.

    Raises:
        PluginError: no installed extension does it, or one of its dependencies is missing.
    """
    function = optional_function(name)
    if function is None:
        raise PluginError(f"{name} is done by an extension, and verl_mt/extensions is not installed here")
    return function


def optional_function(name: str) -> Any:
    """The same; None where no installed extension does it.

    Raises:
        PluginError: one of its dependencies is missing.
    """
    path = find_entry_point("verl_mt.functions", name)
    return path and _load_entry_point("verl_mt.functions", name, path, name)


def _load_entry_point(group: str | None, name: str, path: str, what: str) -> Any:
    """Raises:
    PluginError: as `load_object`; of a missing dependency it says which extra brings it.
    """
    try:
        return load_object(path, what=what)
    except PluginError as error:
        extra, cause = extra_of(group, name) if group else None, error.__cause__
        if extra is None or not isinstance(cause, ModuleNotFoundError):
            raise
        raise PluginError(
            f"{what} needs the package {cause.name}, which is not installed: pip install 'verl_mt[{extra}]'"
        ) from cause


def import_file(path: str | Path, what: str = "plug-in file") -> ModuleType:
    """Import a Python file once; the same file is the same module the second time.

    Args:
        path: the file.
        what: the key or the YAML file that names it, for the error.

    Raises:
        PluginError: no such file, or it failed to import (names the file and line).
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"{what}: no file {str(path)!r} (looked at {file})")
    name = _FILE_MODULE + "_".join(file.with_suffix("").parts[1:])
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        text = error_text(error, named=True) + _instead_of(error)
        raise PluginError(f"{what}: {file} failed to import at {_where(error, file)}: {text}") from error
    finally:
        keep_default_dtype(str(file))
    return module


def keep_default_dtype(whose: Any) -> None:
    """After user code: torch's default dtype is the whole process's, and training would go on in another precision, or
    end in an error far from here.

    Args:
        whose: code that has just run: a function, or a text that names it.
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_default_dtype"):  # another thread may be importing it
        return
    found = torch.get_default_dtype()
    if found != torch.float32:
        torch.set_default_dtype(torch.float32)
        name = whose if isinstance(whose, str) else code_place(getattr(whose, "func", whose))
        log.log(
            logging.DEBUG if name in _CHANGED_DTYPE else logging.WARNING,
            "%s set torch's default dtype to %s, which is the whole process's; it is float32 again. Give your tensors "
            "dtype=%s instead",
            name, found, found,
        )  # fmt: skip
        _CHANGED_DTYPE.add(name)


_CHANGED_DTYPE: set[str] = set()
"""Code that was told so."""


def _instead_of(error: BaseException) -> str:
    """What an extension advises about a missing module of this package; "" = it knows none."""
    name = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    advice = optional_function("missing_module") if name.startswith("verl_mt.") else None
    return str(advice(name)) if advice else ""


def import_plugins(paths: Iterable[str]) -> list[ModuleType]:
    """Import `external_plugins`: files or dotted module names, in order."""
    return [
        import_file(p, "external_plugins") if p.endswith(".py") else _import_module(p, "external_plugins", p)
        for p in paths
    ]


def plugin_names(paths: Iterable[str]) -> tuple[str, ...]:
    """The same plug-ins for a process with another working directory: files by their absolute paths."""
    return tuple(str(Path(p).expanduser().resolve()) if p.endswith(".py") else p for p in paths)


def _import_module(name: str, what: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise PluginError(
                f"{what}: no module {error.name!r} (from {path!r}). Is it installed, or missing on PYTHONPATH?"
            ) from error
        raise PluginError(
            f"{what}: importing {name} failed: it needs {error.name!r}, which is not installed{_instead_of(error)}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{what}: importing {name} failed: {error_text(error, named=True)}") from error
    finally:
        keep_default_dtype(name)


def code_place(function: Any) -> str:
    """`file.py:name` of what came from a file that a configuration names, else `module.name`: for errors."""
    module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
    if module.startswith(_FILE_MODULE):
        return f"{getattr(sys.modules.get(module), '__file__', module)}:{name}"
    return f"{module}.{name}"


def identity(value: Any) -> str:
    """`module.name` of a plug-in, for errors; the same for one of a file that was imported again."""
    if isinstance(value, str):
        return value.replace(":", ".")
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', repr(value))}"


def _where(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
    return f"line {lines[-1]}" if lines else "an unknown line"
