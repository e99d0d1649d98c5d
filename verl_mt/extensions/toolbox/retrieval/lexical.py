"""Passages of a corpus file, and BM25 over them, in memory (Robertson and Zaragoza 2009; bm25s' Lucene variant)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import bm25s
import numpy as np

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


Hits = list[tuple[int, float]]
"""(position of the passage in the corpus, score), best first."""


class BM25Index:
    """Lexical search: lower case, English stop words left out, no stemming.

    Args:
        passages: the corpus.

    Raises:
        DataError: there is no word in it.
    """

    def __init__(self, passages: Sequence[Passage]):
        tokens = self._tokens([passage["contents"] for passage in passages])
        if not any(tokens):
            raise DataError("the corpus has no word that BM25 could find: only stop words or single characters")
        self._size = len(passages)
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(tokens, show_progress=False)
        self._known = set(self._index.vocab_dict)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """The passages that share a word with the query; of equal scores, the earlier passage first."""
        return [self._one(tokens, topk) for tokens in self._tokens(queries)]

    def _one(self, tokens: list[str], topk: int) -> Hits:
        known = [token for token in tokens if token in self._known]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[: min(topk, self._size)]
        return [(int(position), float(scores[position])) for position in best if scores[position] > 0]

    @staticmethod
    def _tokens(texts: Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
