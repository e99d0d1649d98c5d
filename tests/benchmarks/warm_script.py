"""Run a benchmark whose own starts of Python are forks, too (tests/warm_start.py).

A script that it starts runs under this file again, so that the script's rollout workers are forks as well. Of
`python -m` only the process itself is one: `kills.py` finds a trainer's workers by their words.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # as in the process of the tests
warm_start = import_module("warm_start")
_real_popen, _real_spawn, _spawned = subprocess.Popen, util.spawnv_passfds, []


def run(script: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT WORDS...` to its end."""
    warm_start.server()  # before the environment is copied, which tells its address
    command = [sys.executable, __file__, str(script), *words]
    return warm_start.run(command, capture_output=True, text=True, cwd=cwd)


class Popen(subprocess.Popen):
    """A fork for each plain start of Python, the real one for the rest (Ray starts its own processes with `-u`)."""

    def __new__(cls, args: Any, *more: Any, **kwargs: Any) -> Any:
        if args[0] != sys.executable or not (args[1].endswith(".py") or args[1] in ("-m", "-c")):
            return _real_popen(args, *more, **kwargs)
        words = [args[0], *([__file__] if args[1].endswith(".py") else []), *args[1:]]
        environment = {**(kwargs.pop("env", None) or os.environ)}
        if "PYTHONUNBUFFERED" not in os.environ:  # no reason for a real start
            environment.pop("PYTHONUNBUFFERED", None)
        return warm_start.Popen(words, *more, env=environment, **kwargs)


def _spawn(path: bytes, words: Sequence[str | bytes], descriptors: Sequence[int]) -> int:
    """What `multiprocessing` calls for a new interpreter."""
    if "--multiprocessing-fork" not in words:  # the resource tracker, which imports nothing
        return _real_spawn(path, words, descriptors)
    _spawned.append(warm_start.Popen([*map(os.fsdecode, words)], pass_fds=descriptors))
    return _spawned[-1].pid


if __name__ == "__main__":
    subprocess.Popen, util.spawnv_passfds = Popen, _spawn  # type: ignore[misc]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
