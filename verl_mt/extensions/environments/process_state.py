"""The state of a process that an episode may change: shared settings, threads and open files."""

from __future__ import annotations

import builtins
import contextlib
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Patched = dict[tuple[str, str], Any]
"""(module, name) -> function."""
_GRACE_S = 1.0
"""Seconds that a thread or a connection has for its end."""
_OURS = ("environment ", "close of environment ", "MainThread")


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def _set_environ(found: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(found)


def _set_filters(found: list[Any]) -> None:
    warnings.filters[:] = found  # type: ignore[index]


def _set_path(found: list[str]) -> None:
    sys.path[:] = found


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the working directory": (os.getcwd, os.chdir),
    "the umask": (_umask, os.umask),
    "environment variables": (lambda: dict(os.environ), _set_environ),
    "the locale": (lambda: locale.setlocale(locale.LC_ALL), lambda found: locale.setlocale(locale.LC_ALL, found)),
    "the filters of warnings": (lambda: list(warnings.filters), _set_filters),
    "sys.path": (lambda: list(sys.path), _set_path),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the switch interval of threads": (sys.getswitchinterval, sys.setswitchinterval),
    "the default timeout of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the garbage collector": (gc.isenabled, lambda found: gc.enable() if found else gc.disable()),
    "the level of the root logger": (lambda: logging.root.level, logging.root.setLevel),
    "sys.stdout": (lambda: sys.stdout, lambda found: setattr(sys, "stdout", found)),
    "sys.stderr": (lambda: sys.stderr, lambda found: setattr(sys, "stderr", found)),
    "the time zone": (lambda: time.tzname, lambda found: time.tzset()),
    "the profiler of threads": (threading.getprofile, threading.setprofile),
    "signal handlers": (lambda: [signal.getsignal(number) for number in signal.valid_signals()], lambda found: None),
}
"""Name of a setting -> functions that read and set it."""


@dataclass
class ProcessState:
    """The shared state of a process."""

    settings: dict[str, Any] = field(default_factory=lambda: {name: get() for name, (get, _) in _SETTINGS.items()})
    functions: Patched = field(default_factory=lambda: _functions())
    generators: dict[str, Any] = field(default_factory=lambda: _generators())
    counts: dict[str, int] = field(default_factory=lambda: _counts())

    def restore(self) -> None:
        """Set settings and functions back to this state. Loaded modules stay loaded.

        Draws from each shared generator, so that seeding it again is a change.
        """
        for name, (_, put) in _SETTINGS.items():
            with contextlib.suppress(OSError, ValueError, locale.Error):
                put(self.settings[name])
        for (module, name), function in self.functions.items():
            if getattr(sys.modules.get(module), name, None) is not function:
                setattr(sys.modules[module], name, function)
        random.random()
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.random()
        if (torch := sys.modules.get("torch")) is not None:
            torch.rand(())

    def changes(self, before: ProcessState, episodes: int) -> tuple[list[str], list[str]]:
        """Compare this state with an earlier one.

        Args:
            before: the state before the episodes.
            episodes: their number. One more thread or file for all of them, as of a pool, is no change.

        Returns:
            (changed state, shared state that is only used).
        """
        changed = [name for name in _SETTINGS if not _same(before.settings[name], self.settings[name])]
        changed = [_named(name, before.settings[name], self.settings[name]) for name in changed]
        for place, function in before.functions.items():
            if place in self.functions and self.functions[place] is not function:
                changed.append(f"{'.'.join(place)}, which was replaced")
        used: list[str] = []
        for name, state in before.generators.items():
            if name in self.generators and self.generators[name] != state:
                (changed if name == "torch" else used).append(f"the generator of {name}, which all code shares")
        for name, count in self.counts.items():
            if (more := count - before.counts[name]) > episodes // 2:
                changed.append(f"{more} more {name} after {episodes} closed episodes")
        return changed, used


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _named(what: str, before: Any, now: Any) -> str:
    if isinstance(before, dict):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        return f"{what} ({', '.join(names[:5])})"
    return f"{what} ({before!r:.60} before, {now!r:.60} after)" if isinstance(before, str | int | float) else what


def _functions() -> Patched:
    """Functions and classes of the standard library's modules."""
    found: Patched = {}
    for name, module in list(sys.modules.items()):
        if module is not builtins and name.partition(".")[0] not in sys.stdlib_module_names:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
                found[name, attribute] = value
    return found


def _generators() -> dict[str, Any]:
    """States of random number generators that all code of a process shares."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = repr(numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().tolist()
    return found


def _counts() -> dict[str, int]:
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(_OURS)]
    loggers = [logging.root, *(x for x in logging.Logger.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    files = Path("/proc/self/fd")
    return {
        "threads": len(threads),
        "handlers of loggers": sum(len(logger.handlers) for logger in loggers),
        "child processes": len(children.read_text().split()) if children.exists() else 0,
        "open files or connections": len(list(files.iterdir())) if files.exists() else 0,
    }


def settled(before: ProcessState, episodes: int) -> ProcessState:
    """The state after threads and connections have had time to end."""
    ends = time.monotonic() + _GRACE_S
    while True:
        gc.collect()
        found = ProcessState()
        if time.monotonic() >= ends or not any(n > before.counts[k] for k, n in found.counts.items()):
            return found
        time.sleep(_GRACE_S / 20)
