"""SGLang's replicas as a rollout worker asks them."""

from __future__ import annotations

from verl_mt.extensions.cluster.replicas.branch import BorrowingEngine
from verl_mt.extensions.cluster.replicas.clients import Client, Endpoint
from verl_mt.extensions.cluster.sglang.clients import HttpClient
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine


class SGLangBranch(BorrowingEngine, SGLangEngine):
    """See `BorrowingEngine`."""

    def _connect(self, endpoint: Endpoint) -> Client:
        return HttpClient(endpoint.url, self._options, dict(endpoint.headers))
