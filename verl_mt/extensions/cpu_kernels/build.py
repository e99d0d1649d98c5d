"""Compile `kernels.cpp` once for a machine, and load it.

The library lies in `$XDG_CACHE_HOME/verl_mt/kernels/NAME` (else `~/.cache/...`). NAME is a hash of the source, the
compiler, its flags, the processor's features and torch's version. Beside the library a manifest says what it was built
for and the hash of its bytes: one that does not agree is built again. Processes that start together build under a lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl_mt.errors import VerlMTError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# None of these lets the compiler change the order of a sum.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp")
_COMPILERS = ("c++", "g++", "clang++")
_LONGEST_S = 300.0


class KernelsError(VerlMTError):
    """The kernels cannot be built or used here; says why and what to do."""


@dataclass(frozen=True)
class Built:
    """The compiled kernels."""

    code: ctypes.CDLL
    name: str
    """A hash of what decides their bits: source, compiler, flags, processor, torch."""


def build() -> Built:
    """The kernels of this machine, from the cache or compiled now. Waits for another process that compiles them.

    Raises:
        KernelsError: no compiler, it failed, or the cache folder cannot be used.
    """
    compiler = _compiler()
    built_for = _built_for(compiler)
    name = hashlib.sha256(json.dumps(built_for, sort_keys=True).encode()).hexdigest()[:32]
    folder = _cache_folder() / name
    library = folder / "kernels.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(folder)
        with _locked(folder / "lock"):
            if not _is_good(library, built_for):
                _compile(compiler, library, built_for)
        return Built(ctypes.CDLL(str(library)), name)
    except OSError as error:
        raise KernelsError(
            f"the folder of compiled kernels {folder} cannot be used: {error}. Set XDG_CACHE_HOME to another one"
        ) from error


def _compiler() -> list[str]:
    """`$CXX`, or the first of the usual names that is there."""
    try:
        words = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise KernelsError(f"CXX={os.environ['CXX']} is no command ({error}): correct it or unset CXX") from error
    if words:
        if shutil.which(words[0]) is None:
            raise KernelsError(f"the compiler {words[0]} (CXX) is not there: install it or unset CXX")
        return words
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise KernelsError(f"no C++ compiler ({', '.join(_COMPILERS)}): install one, for example `apt install g++`")


def _built_for(compiler: list[str]) -> dict[str, str]:
    """All that decides the bits of the library."""
    try:
        asked = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsError(f"{compiler[0]} --version failed: {error}. Set CXX to another compiler") from error
    return {
        "source": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        "compiler": " ".join([*compiler, *FLAGS]),
        "version": asked.stdout,
        "machine": platform.machine(),
        "features": _features(),
        "torch": torch.__version__,
    }


def _features() -> str:
    """What the processor can do, sorted; its name where the system does not list features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    # `flags` on x86, `Features` on Arm; the model decides what -march=native tunes for.
    kept = [line.partition(":") for line in lines if line.split(":")[0].strip().lower() in ("flags", "features")]
    models = {line.strip() for line in lines if line.split(":")[0].strip().lower() in ("model", "cpu part")}
    return " ".join([*sorted(models), *sorted({word for _, _, words in kept for word in words.split()})])


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl_mt" / "kernels"
    except RuntimeError as error:  # `~` of a user without a home
        raise KernelsError(f"there is no cache folder: {error}. Set XDG_CACHE_HOME") from error


def _require_own(folder: Path) -> None:
    """Code is loaded from it: nobody else may write there."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelsError(
            f"the folder of compiled kernels {folder} belongs to another user or others may write to it: remove it, or "
            "set XDG_CACHE_HOME to another folder"
        )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock; waits for the process that holds it."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _manifest(library: Path) -> Path:
    return library.with_name("built_for.json")


def _is_good(library: Path, built_for: dict[str, str]) -> bool:
    """Whether the library is there, whole, and of this machine."""
    try:
        kept = json.loads(_manifest(library).read_bytes())
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):  # not there, or cut off: it is built again
        return False
    return bool(kept == {**built_for, "library": digest})


def _compile(compiler: list[str], library: Path, built_for: dict[str, str]) -> None:
    """Compile into a temporary file and rename it, so that a killed build leaves nothing that counts."""
    log.info("compiling the CPU kernels with %s, once for this machine", compiler[0])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        target = Path(folder) / library.name
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S)
        except subprocess.TimeoutExpired as error:
            raise KernelsError(f"{compiler[0]} did not finish within {_LONGEST_S:g} s") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise KernelsError(f"{compiler[0]} failed: {' '.join(lines[:1]) or 'it said nothing'}")
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        target.replace(library)
    _manifest(library).write_text(json.dumps({**built_for, "library": digest}), encoding="utf-8")
    log.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - start, library)
