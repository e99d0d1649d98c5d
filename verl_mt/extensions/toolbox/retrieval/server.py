"""The HTTP side: Search-R1's protocol, and what is running here.

    POST /retrieve {"queries": ["..."], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": ..., "contents": "Title\\nText"}, "score": 12.3}, ...], ...]}

Without `return_scores` the documents stand there alone. `GET /health` tells passages and method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel, Field

from verl_mt.extensions.toolbox.retrieval.lexical import Hits, Passage


class Index(Protocol):
    """What finds passages."""

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """At most `topk` hits for each query, in the order of the queries."""


class RetrieveRequest(BaseModel):
    """The body of a request."""

    queries: list[str] = Field(min_length=1, max_length=1024)
    topk: int | None = Field(default=None, ge=1, le=1000)
    """None = the server's default."""
    return_scores: bool = False


def make_app(passages: Sequence[Passage], index: Index, *, method: str, default_topk: int = 3) -> FastAPI:
    """The application; run it with uvicorn, or mount it in your application.

    Args:
        passages: what the positions of `index` mean.
        index: finds them.
        method: its name, for `/health`.
        default_topk: for requests that do not say.
    """
    app = FastAPI(title="verl_mt retrieval")

    # Plain functions: they run in worker threads, so that a long search does not hold up the others.
    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        found = index.search(request.queries, request.topk or default_topk)
        return {"result": [[_item(passages, hit, request.return_scores) for hit in hits] for hits in found]}

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "passages": len(passages), "method": method}

    return app


def _item(passages: Sequence[Passage], hit: tuple[int, float], with_score: bool) -> dict[str, Any]:
    position, score = hit
    return {"document": passages[position], "score": score} if with_score else passages[position]
