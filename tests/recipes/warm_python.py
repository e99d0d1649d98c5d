"""Shell scripts whose `python` is a warm start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import warm_start

_CHANGED = {name: os.environ.get(name) for name in ("PATH", "PWD", "OLDPWD", "SHLVL", "_")}
"""What a shell and this module change, as it is in the tests."""
_PYTHON = f"""#!{sys.executable} -S
import os, signal, sys
sys.path.insert(0, {str(Path(warm_start.__file__).parent)!r})
import warm_start
for name, value in {_CHANGED!r}.items():
    os.environ.pop(name, None) if value is None else os.environ.update({{name: value}})
process = warm_start.Popen([sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: process.terminate())
sys.exit(process.wait())
"""


def warm_python(folder: Path) -> dict[str, str]:
    """The environment of a script: the `python` that it finds is this one, as a fork of the server that imported."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(_PYTHON)
    python.chmod(0o755)
    warm_start.server()
    return {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
