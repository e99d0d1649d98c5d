"""A running vLLM server, as seen from the rollout's event loop: vLLM's own HTTP calls, and a worker class."""

from __future__ import annotations

import os
from typing import Any

import httpx

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.replicas.broadcaster import NCCL_ALIKE
from verl_mt.extensions.cluster.replicas.clients import CONNECT_S
from verl_mt.extensions.cluster.replicas.servers import KEY, Post, ServerClient, fetch, require_same_model
from verl_mt.extensions.cluster.versions import VLLM
from verl_mt.extensions.cluster.vllm.arguments import refused_arguments
from verl_mt.extensions.cluster.vllm.options import VLLMOptions

_WORKER = "verl_mt.extensions.cluster.vllm.process.ServerWorker"
_CALLS = {
    "start the server with VLLM_SERVER_DEV_MODE=1": (
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/weight_info",
    ),
    "start the server with --enable-scale-out": ("/inference/v1/generate", "/inference/v1/abort_requests"),
}
"""What to do where a call is missing -> the calls."""
_COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_ABORTED = "generate-tokens-"
"""vLLM puts it before the ids of requests."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids")
"""What SGLang's requests and vLLM's call alike."""


class VLLMServer(ServerClient):
    """One server of vLLM, from when it answers until it does not.

    Args:
        url: `http://host:port`.
        options: what the server must be.
        headers: of each request; None = the key of VLLM_API_KEY, if there is one.
    """

    kind = "vLLM"
    tested = f"vLLM {VLLM.newest}"
    key_variable = "VLLM_API_KEY"
    asks = "/version"

    def __init__(self, url: str, options: VLLMOptions, headers: dict[str, str] | None = None):
        super().__init__(url, headers)
        self._options = options

    @staticmethod
    def posts(name: str, body: dict[str, Any]) -> list[Post]:
        def update(path: str, entries: list[Any]) -> Post:
            return Post("/update_weights", {"update_info": {"path": path, "entries": entries}})

        version = body.get("weight_version")
        named = [] if version is None else [Post("/update_weight_version", {"new_version": version})]
        end = [Post("/finish_weight_update"), Post("/reset_prefix_cache", query={"reset_running_requests": True})]
        match name:
            case "pause_generation":
                return [Post("/pause", query={"mode": "keep"})]
            case "continue_generation":
                return [Post("/resume")]
            case "abort_request":
                return [Post("/inference/v1/abort_requests", {"request_ids": [_ABORTED + body["rid"]]})]
            case "begin_weight_update":
                return [Post("/start_weight_update")]
            case "update_weights_from_tensor" | "update_weights_from_distributed":
                return [update(body.get("path", ""), body["entries"]), *named]
            case "end_weight_update":
                return end
            case "update_weights_from_disk":
                return [Post("/start_weight_update"), update(body["model_path"], []), *named, *end]
            case "init_weights_update_group":
                return [Post("/init_weight_transfer_engine", {"init_info": body})]
            case "destroy_weights_update_group":
                return [Post("/init_weight_transfer_engine", {"init_info": {}})]
        raise ValueError(f"a vLLM server has nothing for {name}")

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        given = body["sampling_params"]
        wanted, stops = given["max_new_tokens"], given.get("stop") or []
        sampling = {name: given[name] for name in _SAMPLING if given.get(name) is not None} | {
            "max_tokens": max(1, wanted),  # 0 = only the cache of the prompt is wanted
            "logprobs": 0 if body.get("return_logprob") else None,
            "ignore_eos": True,  # a turn ends at the ids that the request names, whatever the model's files say
            "detokenize": bool(stops),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        request = {"request_id": body["rid"], "token_ids": body["input_ids"], "sampling_params": sampling}
        answer = await self._generated("/inference/v1/generate", request)
        (turn,) = answer["choices"]
        ids, log_probs = turn["token_ids"][:wanted], (turn["logprobs"] or {}).get("content") or []
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        return {
            "meta_info": {
                "finish_reason": {"type": turn["finish_reason"], "matched": turn["stop_reason"]},
                "output_token_logprobs": [(entry["logprob"], token) for entry, token in zip(log_probs, ids)],
                "weight_versions": turn["weight_versions"] or [],
                "cached_tokens": cached or 0,
            }
        }

    async def progress(self) -> Any:
        """The counters of tokens, which vLLM adds to with each of its steps."""
        try:
            response = await self._connections().calls.get(f"{self.url}/metrics", self._headers, CONNECT_S)
        except httpx.HTTPError:
            return None
        lines = response.text.splitlines() if response.status_code == 200 else []
        return [line for line in lines if line.startswith(_COUNTERS)] or None

    async def _attach(self, http: httpx.AsyncClient) -> None:
        info = await fetch(http, type(self), "/version")
        VLLM.check(info.get("version"), f"{KEY}: {self.url} runs")
        await self._require_calls(http)
        workers = await self._workers(http)
        (worker, *_), options = workers, self._options
        self.num_ranks, self.on_gpu = len(workers), worker["device"] == "cuda"
        self.takes = worker.get("max_num_seqs")  # None = of an older checkout
        require_same_model(self.url, worker["model"], worker["architectures"], options.model_path)
        self._require_settings(worker)
        if (await fetch(http, type(self), "/is_paused"))["is_paused"]:
            # By whoever sent an update that broke off.
            await http.post("/resume")
        version = (await fetch(http, type(self), "/weight_info"))["weight_version"]
        self.pristine = version == "default" and not any(worker["interrupted"] for worker in workers)

    async def _require_calls(self, http: httpx.AsyncClient) -> None:
        response = await http.get("/openapi.json")
        # Where the list is switched off, the next calls show what is there.
        paths = response.json().get("paths", {}) if response.status_code == 200 else None
        for what_to_do, calls in _CALLS.items():
            missing = [call for call in calls if paths is not None and call not in paths]
            if missing:
                raise ConfigError(
                    f"{KEY}: {self.url} lacks the calls {', '.join(missing)}: {what_to_do} (docs/vllm.md)"
                )

    async def _workers(self, http: httpx.AsyncClient) -> list[dict[str, Any]]:
        """What each of the server's workers says."""
        response = await http.post("/collective_rpc", json={"method": "verl_mt_attach"})
        if response.status_code != 200:
            raise ConfigError(
                f"{KEY}: {self.url} does not take weights from verl_mt. Start the server with --worker-extension-cls "
                f"{_WORKER}, with verl_mt on its PYTHONPATH (docs/vllm.md). It says: {response.text.strip()[:300]}"
            )
        return response.json()["results"]

    def _require_settings(self, worker: dict[str, Any]) -> None:
        options = self._options
        wanted = {"logprobs_mode": "processed_logprobs", "dtype": options.dtype}
        for name, value in wanted.items():
            if worker[name] != value:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{KEY}: {self.url} runs with {flag} {worker[name]}. Start it with {flag} {value}")
        if worker["max_model_len"] < options.max_model_len:
            raise ConfigError(
                f"{KEY}: {self.url} takes sequences of {worker['max_model_len']} tokens, too few for "
                f"{options.max_model_len} (prompt and response): start it with --max-model-len "
                f"{options.max_model_len}, or lower data.max_prompt_length, rollout.response_length or "
                "rollout.max_model_len"
            )
        for name, reason in refused_arguments(worker["arguments"]):
            raise ConfigError(f"{KEY}: {self.url} was started with {name}={worker['arguments'][name]}: {reason}")
        if worker["device"] == "cpu" and worker["chunked_prefill"]:
            raise ConfigError(
                f"{KEY}: {self.url} computes prompts in parts. vLLM {VLLM.newest} dies of that on a CPU where requests "
                "have seeds. Start it with --no-enable-chunked-prefill"
            )
        ours = {name: os.environ.get(name, value) for name, value in NCCL_ALIKE.items()}
        if self.on_gpu and worker["nccl"] != ours and options.transport != "disk":
            alike = " ".join(f"{name}={value}" for name, value in ours.items())
            raise ConfigError(
                f"{KEY}: {self.url} has other NCCL settings than the sender of weights ({worker['nccl']}): a broadcast "
                f"may hang. Start it with {alike}, or set rollout.weight_transport=disk"
            )
