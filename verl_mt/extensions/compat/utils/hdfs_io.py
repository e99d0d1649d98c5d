"""verl's file helpers under their name: for local paths. HDFS itself is not offered."""

from __future__ import annotations

import os
import shutil
from typing import Any

from verl_mt.errors import ConfigError

__all__ = ["copy", "exists", "makedirs"]


def exists(path: str, **kwargs: Any) -> bool:
    """Whether there is a file or folder.

    Raises:
        ConfigError: the path is one of HDFS.
    """
    return os.path.exists(_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """`os.makedirs`.

    Raises:
        ConfigError: the path is one of HDFS.
        FileExistsError: it is there, and `exist_ok` is False.
    """
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> Any:
    """Copy a file, or a folder with everything in it, whose content goes into `dst`; a folder that is there is filled.

    Returns:
        What `shutil.copy` or `shutil.copytree` does: the new path.

    Raises:
        ConfigError: a path is one of HDFS.
        OSError: `src` cannot be read or `dst` not be written.
    """
    source, target = _local(src), _local(dst)
    if os.path.isdir(source):
        return shutil.copytree(source, target, **{"dirs_exist_ok": True, **kwargs})
    return shutil.copy(source, target, **kwargs)


def _local(path: str) -> str:
    text = os.fspath(path)
    if text.startswith("hdfs://"):
        raise ConfigError(
            f"{text}: HDFS is not offered. Give a local folder, and copy it with `hdfs dfs -put` afterwards"
        )
    return text
