"""BM25 over all passages, in memory (Robertson and Zaragoza 2009; the Lucene variant of bm25s)."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np

from verl_mt.errors import DataError
from verl_mt.retrieval.corpus import Passage

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
