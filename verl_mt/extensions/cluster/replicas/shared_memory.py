"""Shared memory of this library's processes in /dev/shm, so that none is left there.

torch and engines remove their own, but not where a process is killed, as an engine is in the end. Each name gets a
marker beside it that says whose it is. A name is removed when its owner has ended and nobody has it mapped: a process
that gives up the last share of torch's memory dies if the name is gone by then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
_MARKER = re.compile(r"verl_mt\.(\d+)\.(\d+)\.(\d+)\.(.+)")
"""Number space of processes, process, when it began in the kernel's ticks, name."""
_OF_ENGINES = ("sglang_loads_", "sgl_shm_", "psm_")
"""SGLang's names, and those of Python's own shared memory, which vLLM's processes use."""


def mark(name: str, pid: int) -> None:
    """A name in /dev/shm belongs to this process."""
    if (ticks := began(pid)) is not None:
        (_FOLDER / f"verl_mt.{_number_space()}.{pid}.{ticks}.{name}").touch(mode=0o600)


def mark_group(leader: int) -> None:
    """The engine's names that processes of this group have mapped belong to its leader."""
    members = [pid for pid in _processes() if _stat(pid)[2:3] == [str(leader)]]
    for path in {path for pid in members for path in _mapped(pid)}:
        if path.parent == _FOLDER and path.name.startswith(_OF_ENGINES):
            mark(path.name, leader)


def sweep(ending: int | None = None) -> None:
    """Remove names whose owners have ended, and those of a process that is about to end (`ending`)."""
    ended: dict[Path, Path] = {}
    for marker in _FOLDER.glob("verl_mt.*"):
        found = _MARKER.fullmatch(marker.name)
        if found is None or not _is_own(marker) or found[1] != _number_space():
            continue
        if int(found[2]) == ending or began(int(found[2])) != found[3]:
            ended[marker] = _FOLDER / found[4]
    in_use = {path for pid in _processes() for path in _mapped(pid)} if ended else set()
    for marker, path in ended.items():
        if path not in in_use:
            path.unlink(missing_ok=True)
            marker.unlink(missing_ok=True)


def began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None = there is none, or it has ended and nobody has waited for it
    yet."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def _stat(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_own(path: Path) -> bool:
    """Of this user."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:  # another process swept it just now
        return False


def _number_space() -> str:
    return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _mapped(pid: int) -> set[Path]:
    """Files in /dev/shm that a process of this user has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {Path(line[at:]) for line in lines if (at := line.find(f"{_FOLDER}/")) >= 0}
