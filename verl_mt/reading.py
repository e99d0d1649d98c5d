"""Reading files that somebody else may have written, such as those of a shared run directory.

Only regular files are read: reading a FIFO waits for ever. Text that is nested too deeply for a parser is an error like
any other mistake in it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from verl_mt.bounds import MAX_DEPTH, MAX_YAML_BYTES, MAX_YAML_VALUES, excess
from verl_mt.errors import DataError


def require_file(path: str | Path, *, or_device: bool = False) -> None:
    """Refuse what is not a regular file. A path where nothing is passes: opening it says so.

    Args:
        or_device: a character device passes too, such as /dev/null: writing to it does not wait.

    Raises:
        DataError: a directory, a FIFO, a socket or a device is there; names it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or (or_device and stat.S_ISCHR(mode))):
        kind = "directory" if stat.S_ISDIR(mode) else "FIFO" if stat.S_ISFIFO(mode) else "socket or a device"
        raise DataError(f"{path} is a {kind}. A regular file was expected: move it away")


def read_bytes(path: str | Path, limit: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        limit: the most bytes that it may have; None = any number.

    Raises:
        DataError: it is not one, is larger or cannot be read; names it.
    """
    require_file(path)
    try:
        with open(path, "rb") as file:
            if limit is not None and (size := os.fstat(file.fileno()).st_size) > limit:
                raise DataError(f"{path} has {size} bytes, {limit} at most are read. Write a shorter file")
            return file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file in plain containers.

    Raises:
        DataError: it is not a regular file, not YAML, too large or nested too deeply; names it.
    """
    try:
        return parse_yaml(read_bytes(path, MAX_YAML_BYTES).decode(errors="replace"))
    except yaml.YAMLError as error:
        raise DataError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """The value of a YAML text. Its bounds hold for what anchors stand for, written out.

    Args:
        loader: one that makes plain containers only.

    Raises:
        yaml.YAMLError: not YAML, more values or letters than the bounds, or nested too deeply.
    """
    too_much = f"more than {MAX_YAML_BYTES} characters" if len(text) > MAX_YAML_BYTES else ""
    if not too_much:
        try:
            value = yaml.load(text, Loader=loader)
        except RecursionError:
            too_much = f"more than {MAX_DEPTH} levels"
        except ValueError as error:  # a date that does not exist
            raise yaml.YAMLError(str(error)) from error
        else:
            too_much = excess(value, max_values=MAX_YAML_VALUES, max_characters=MAX_YAML_BYTES)
    if too_much:
        raise yaml.YAMLError(f"{too_much}, with anchors written out. Write a shorter file")
    return value


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, where text that is nested too deeply is a mistake like others.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
