"""Names of files and folders that are not complete yet: `.NAME.RANDOM.tmp`, beside the place that they are moved to.

A killed process leaves some. A run removes those in its directory when it starts (`sweep`), an export those beside its
folder (`sweep_beside`). Checkpoints have other names (`trainer/checkpoint.py`), because a reader counts an old
one until the new one is in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX, _ASIDE = ".tmp", ".aside"
_HERE, _EXCHANGE = -100, 2
"""`AT_FDCWD` and `RENAME_EXCHANGE` of renameat2(2)."""


def temporary(final: Path) -> Path:
    """The name of what will be `final`, for the one process that writes there."""
    return final.with_name(f".{final.name}{_SUFFIX}")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """An empty folder beside `final`, locked by this process, and removed when the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=_SUFFIX, dir=final.parent))
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def put_in_place(folder: Path, final: Path) -> None:
    """Move a complete folder to `final`; a reader sees the older one there, or this one.

    Where the file system cannot exchange two folders (NFS), the older one first moves aside; `sweep_beside` moves it
    back if a kill came between the two renames.
    """
    if not final.exists():
        os.rename(folder, final)
    elif not _exchange(folder, final):
        aside = final.with_name(f".{final.name}{_ASIDE}")
        os.rename(final, aside)
        os.rename(folder, final)
        shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove all temporary files and folders in a run directory, whose lock this process holds."""
    for leftover in list(folder.rglob(f".*{_SUFFIX}")):
        remove(leftover)
    for aside in list(folder.rglob(f".*{_ASIDE}")):
        _bring_back(aside)


def sweep_beside(final: Path) -> None:
    """Remove what killed processes left of folders that were to become `final`; a folder of a live process stays."""
    for leftover in final.parent.glob(f".{final.name}.*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process removed it, or holds its lock
            handle = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(leftover)
            finally:
                os.close(handle)
    _bring_back(final.with_name(f".{final.name}{_ASIDE}"))


def _bring_back(aside: Path) -> None:
    final = aside.with_name(aside.name[1 : -len(_ASIDE)])
    if aside.exists() and not final.exists():
        os.rename(aside, final)
    elif aside.exists():
        remove(aside)


def remove(path: Path) -> None:
    """A file, a link or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Linux alone can; False where it cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
