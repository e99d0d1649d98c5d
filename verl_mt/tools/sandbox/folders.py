"""Where interpreters put their files: one folder per process of ours, which is gone after it, however it ended."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from functools import lru_cache
from pathlib import Path

_PREFIX = "verl_mt_sandbox_"
_YOUNG_S = 60.0
"""A folder that is younger may not have been locked yet."""


def new_folder() -> str:
    """An empty folder for one interpreter."""
    return tempfile.mkdtemp(dir=_home(os.getpid()))


def remove_folder(folder: str) -> None:
    """Remove it with all that is in it, also what its owner may not look into."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.isdir(folder):
        return
    for path, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(child := os.path.join(path, name)):
                os.chmod(child, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@lru_cache(maxsize=1)
def _home(pid: int) -> str:
    """This process's folder, locked for as long as the process lives; a fork makes its own."""
    _sweep(Path(tempfile.gettempdir()))
    home = tempfile.mkdtemp(prefix=_PREFIX)
    fcntl.flock(os.open(home, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(remove_folder, home)
    return home


def _sweep(folder: Path) -> None:
    """Remove what processes left behind that were killed: nobody holds the lock any more."""
    for home in folder.glob(f"{_PREFIX}*"):
        try:
            if time.time() - home.stat().st_mtime < _YOUNG_S:
                continue
            handle = os.open(home, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:
            continue  # another process's, or gone already
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(str(home))
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
