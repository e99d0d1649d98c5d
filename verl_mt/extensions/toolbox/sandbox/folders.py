"""Where interpreters put their files: one folder per verl_mt process, which is gone after it, however it ended.

What lies there was made by model-written code: thousands of levels, links, folders without permissions. So nothing here
recurses, follows a link, or lets such a folder end a run.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import secrets
import stat
import tempfile
import time
from functools import lru_cache
from itertools import islice
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "verl_mt_sandbox_"
_YOUNG_S = 60.0
"""A folder that is younger may not have been locked yet."""
_REMOVE_S = 60.0
"""Deletion takes no longer; the next start goes on with the rest."""
_MAX_FILES = 10_000
_MAX_MAPS = 4 * 1024 * 1024
"""Bytes of a process's list of mappings: some 40,000."""


def new_folder() -> str:
    """An empty folder for one interpreter."""
    return tempfile.mkdtemp(dir=_home(os.getpid()))


def remove_folder(folder: str, ends: float | None = None) -> None:
    """Remove it with all that is in it, also what its owner may not look into; what must stay is said in the log.

    Args:
        ends: of `time.monotonic()`; None = after a minute.
    """
    try:
        failed = _empty(folder, time.monotonic() + _REMOVE_S if ends is None else ends)
        if failed is None:
            os.rmdir(folder)
    except OSError as error:
        failed = error
    if failed is not None and os.path.lexists(folder):
        _say_once(str(failed.strerror or failed), folder)


@lru_cache
def _say_once(reason: str, folder: str) -> None:
    logger.warning(
        "%s, which model-written code left behind, could not be removed (%s); it only takes disk space, so delete it "
        "by hand", folder, reason,
    )  # fmt: skip


def _empty(folder: str, ends: float) -> OSError | None:
    """Delete what is in it; the first error, if there was one. Folders further down are moved up as they are met, so
    that no depth costs a frame, a handle or a long path."""
    top, prefix, moved = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), secrets.token_hex(8), 0
    failed: OSError | None = None
    waiting = ["."]
    try:
        while waiting:
            name = waiting.pop()
            try:
                handle = _enter(name, top)
            except OSError as error:
                failed = failed or error
                continue
            try:
                with os.scandir(handle) as entries:
                    children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
                for child, is_folder in children:
                    if time.monotonic() > ends:
                        return TimeoutError("deleting it takes too long")
                    if not is_folder:
                        os.unlink(child, dir_fd=handle)
                    elif name == ".":
                        waiting.append(child)
                    else:
                        os.close(_enter(child, handle))
                        moved += 1
                        os.rename(child, f"{prefix}{moved}", src_dir_fd=handle, dst_dir_fd=top)
                        waiting.append(f"{prefix}{moved}")
                if name != ".":
                    os.rmdir(name, dir_fd=top)
            except OSError as error:
                failed = failed or error
            finally:
                os.close(handle)
    finally:
        os.close(top)
    return failed


def _enter(name: str, parent: int) -> int:
    """A handle on a folder in `parent`, which its owner may change from now on; never through a link."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)


def too_full(folder: str, pid: int, disk_mb: int) -> str:
    """Why the code that runs as `pid` has too many files; empty if it has not.

    A file counts until nobody holds it: also without a name, as long as the process has it open or mapped. The process
    has to stand still, else it moves files to where they were counted already.
    """
    limit = disk_mb * 1024 * 1024
    try:
        sizes = _named(folder)
    except OSError as error:
        return f"it made a folder that cannot be looked into ({error.strerror})"
    if sizes is None:
        return f"its files are more than {_MAX_FILES}"
    try:
        _add_nameless(sizes, folder, pid, limit)
    except (FileNotFoundError, ProcessLookupError):
        pass  # the process has ended, and what it held is gone
    except OSError as error:
        return f"what it holds open cannot be looked at ({error.strerror})"
    if sum(sizes.values()) > limit:
        return f"its files take more than {disk_mb} MiB, deleted ones that it still uses included"
    return ""


def _named(folder: str) -> dict[int, int] | None:
    """What is in the folder: inode -> size; None where it is too much. It goes down by name and up by `..`: with a path
    for each folder the time would grow with the square of the depth."""
    sizes: dict[int, int] = {}
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        count, inner = _list(handle, sizes)
        levels = [inner]
        while levels and count <= _MAX_FILES:
            if levels[-1]:
                handle = _step(handle, levels[-1].pop())
                more, inner = _list(handle, sizes)
                count += more
                levels.append(inner)
            else:
                levels.pop()
                if levels:
                    handle = _step(handle, "..")
        return sizes if count <= _MAX_FILES else None
    finally:
        os.close(handle)


def _step(handle: int, name: str) -> int:
    other = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
    os.close(handle)
    return other


def _list(handle: int, sizes: dict[int, int]) -> tuple[int, list[str]]:
    """Adds what a folder holds to `sizes`; the number of names, up to one too many, and the folders among them."""
    inner, count = [], 0
    with os.scandir(handle) as entries:
        for entry in islice(entries, _MAX_FILES + 1):
            count += 1
            found = entry.stat(follow_symlinks=False)
            sizes[found.st_ino] = _size(found)
            if stat.S_ISDIR(found.st_mode):
                inner.append(entry.name)
    return count, inner


def _add_nameless(sizes: dict[int, int], folder: str, pid: int, limit: int) -> None:
    """Add the files of the process that are in no folder any more. Of one that is only mapped the kernel tells no size:
    it counts as the largest that it can have."""
    for handle in ("cwd", *(f"fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))):
        held = os.stat(f"/proc/{pid}/{handle}")
        if held.st_nlink == 0 and (stat.S_ISREG(held.st_mode) or stat.S_ISDIR(held.st_mode)):
            sizes[held.st_ino] = _size(held)
    with open(f"/proc/{pid}/maps", "rb") as file:
        maps = file.read(_MAX_MAPS)
    if len(maps) == _MAX_MAPS:
        raise OSError(0, "it has too many mappings")
    for line in maps.splitlines():
        if line.endswith(b" (deleted)"):
            *_, inode, path = line.split(maxsplit=5)
            if path.startswith(os.fsencode(folder) + b"/"):
                sizes.setdefault(int(inode), limit)


def _size(found: os.stat_result) -> int:
    """Some file systems count blocks only when they write them; and blocks may be there beyond the end."""
    return max(found.st_blocks * 512, found.st_size)


@lru_cache(maxsize=1)
def _home(pid: int) -> str:
    """This process's folder, locked for as long as the process lives; a fork makes its own."""
    _sweep(Path(tempfile.gettempdir()))
    home = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
    fcntl.flock(os.open(home, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(remove_folder, home)
    return home


def _sweep(folder: Path) -> None:
    """Remove what processes left behind that were killed: nobody holds the lock any more."""
    ends = time.monotonic() + _REMOVE_S
    for home in folder.glob(f"{_PREFIX}*"):
        try:
            if time.time() - home.stat().st_mtime < _YOUNG_S:
                continue
            handle = os.open(home, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:
            continue  # another user's, or gone already
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(str(home), ends)
        except OSError:
            continue  # its process lives, or this file system has no locks that would tell
        finally:
            os.close(handle)
