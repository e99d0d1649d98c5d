"""What a locked-in interpreter may use: its limits, what it can read, its environment."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from verl_mt.errors import PluginError

_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
_ASK = (
    "import json, sys, sysconfig; "
    "print(json.dumps([list(sys.version_info[:2]), sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, "
    "*(sysconfig.get_path(p) for p in ('stdlib', 'platstdlib', 'purelib', 'platlib'))]))"
)
_ASK_S = 60.0


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one interpreter."""

    timeout_s: float = 10.0
    """Wall-clock time of one call in seconds; the process is killed after it."""
    memory_mb: int = 512
    """Address space of the process in MiB: an allocation beyond it raises MemoryError in the code."""
    disk_mb: int = 16
    """All files in its folder together in MiB."""
    output_kb: int = 64
    """Printed text that is kept of one call in KiB, half from its start and half from its end. A process that prints
    256 times as much is killed."""

    def rlimits(self) -> dict[str, int]:
        """Names and values for `resource.setrlimit`. NPROC is a second line: the filter already refuses processes."""
        mib = 1024 * 1024
        return {
            "RLIMIT_AS": self.memory_mb * mib,
            "RLIMIT_FSIZE": self.disk_mb * mib,
            "RLIMIT_NOFILE": 128,
            "RLIMIT_NPROC": 0,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


def environment(folder: str) -> dict[str, str]:
    """The whole environment: of this process's own only where its libraries are, so no key or token that it holds."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return {
        **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",  # the order of a set must not change from run to run
        # Numerical libraries start no threads, which they would not get.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
    }


def readable_paths(python: str, extra: tuple[str, ...] = ()) -> list[str]:
    """What the code may read beside its own folder: the interpreter's libraries, the system's, and `extra`.

    Runs in the caller's thread. Waits for a process of `python`.

    Raises:
        PluginError: `python` does not start or is too old, or a path of `extra` does not exist.
    """
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], env=environment("/"), capture_output=True, text=True, timeout=_ASK_S, check=True
        )
        version, *prefixes, stdlib, platstdlib, purelib, platlib = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", None) or error
        raise PluginError(f"python: {python!r} does not start: {str(detail).strip()[-300:]}") from error
    if tuple(version) < (3, 9):
        raise PluginError(f"python: {python!r} is Python {version[0]}.{version[1]}, but 3.9 or newer is needed")
    found = {stdlib, platstdlib, purelib, platlib, *_SYSTEM}
    found |= {path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path)}
    found |= {str(Path(prefix) / name) for prefix in prefixes for name in ("lib", "lib64")}
    for path in extra:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise PluginError(f"readable: {path!r} is not an existing absolute path")
    return sorted(found) + list(extra)
