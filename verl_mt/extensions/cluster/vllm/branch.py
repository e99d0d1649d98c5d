"""vLLM's replicas as a rollout worker asks them."""

from __future__ import annotations

from verl_mt.extensions.cluster.replicas.branch import BorrowingEngine
from verl_mt.extensions.cluster.replicas.clients import Client, Endpoint
from verl_mt.extensions.cluster.vllm.engine import VLLMEngine
from verl_mt.extensions.cluster.vllm.server import VLLMServer


class VLLMBranch(BorrowingEngine, VLLMEngine):
    """See `BorrowingEngine`."""

    def _connect(self, endpoint: Endpoint) -> Client:
        return VLLMServer(endpoint.url, self._options, dict(endpoint.headers))
