"""verl's other name of `verl_mt.utils.hdfs_io`, with what brings a file to this machine: here it has to be on it."""

from __future__ import annotations

import os
from typing import Any

from verl_mt.extensions.compat.utils.hdfs_io import copy, exists, makedirs

__all__ = ["copy", "copy_to_local", "exists", "makedirs"]


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """The path itself, with `~` written out.

    Raises:
        ConfigError: the path is one of HDFS.
        FileNotFoundError: there is nothing.
    """
    path = os.path.expanduser(src)
    if not exists(path):
        raise FileNotFoundError(f"{path}: no such file or folder")
    return path
