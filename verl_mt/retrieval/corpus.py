"""Passages from a JSON Lines file, as Search-R1 and FlashRAG write them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from verl_mt.errors import DataError

Passage = dict[str, Any]
"""`contents` (text; its first line is the title), usually `id`, and whatever else the file has."""


def read_corpus(path: str | Path) -> list[Passage]:
    """All passages of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        DataError: no such file, no passage in it, or a line that is none; names file and line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"no corpus {str(path)!r} (looked at {file.absolute()})")
    passages = []
    with _open(file) as lines:
        for number, line in _lines(lines, file):
            try:
                passage = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: not JSON: {error}") from error
            if not isinstance(passage, dict) or not isinstance(passage.get("contents"), str):
                raise DataError(
                    f"{file}, line {number}: expected an object with the text 'contents' (its first line is the "
                    f"title), got {line.strip()[:80]!r}"
                )
            passages.append(passage)
    if not passages:
        raise DataError(f"{file}: no passages in it")
    return passages


def _open(file: Path) -> IO[str]:
    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8")


def _lines(lines: IO[str], file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise DataError(f"{file}, after line {number}: cannot be read: {error}") from error
