"""A vLLM server without a vLLM: what it is asked, and which one is refused."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from verl_mt.engines.base import Receiver
from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster.replicas import open_files
from verl_mt.extensions.cluster.vllm import server as server_module
from verl_mt.extensions.cluster.vllm.branch import VLLMBranch
from verl_mt.extensions.cluster.vllm.engine import VLLMEngine
from verl_mt.extensions.cluster.vllm.options import VLLMOptions
from verl_mt.extensions.cluster.vllm.publisher import Broadcaster
from verl_mt.extensions.cluster.vllm.server import VLLMServer

URL = "http://somewhere:8000"
WORKER = {
    "interrupted": False, "device": "cpu", "model": "/model", "architectures": ["Qwen3ForCausalLM"], "dtype": "float32",
    "max_model_len": 512, "max_num_seqs": 8, "logprobs_mode": "processed_logprobs", "chunked_prefill": False,
    "nccl": {"NCCL_CUMEM_ENABLE": None, "NCCL_NVLS_ENABLE": None}, "arguments": {"kv_cache_dtype": "auto"},
}  # fmt: skip
PATHS = [path for paths in server_module._CALLS.values() for path in paths]


class Server:
    """On paper: `changes` of what its worker says, calls that it lacks."""

    def __init__(self, changes=(), lacks=(), paused=False, version="default", workers=1):
        self.worker, self.lacks, self.paused, self.version = {**WORKER, **dict(changes)}, lacks, paused, version
        self.asked, self.workers = [], workers

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or "null")
        self.asked.append((path, dict(request.url.params), body))
        if path == "/collective_rpc":
            if "worker" in self.lacks:
                return httpx.Response(500, text="Worker has no attribute 'verl_mt_attach'")
            return httpx.Response(200, json={"results": [self.worker] * self.workers})
        answers = {
            "/version": {"version": "0.32.0"},
            "/openapi.json": {"paths": {path: {} for path in PATHS if path not in self.lacks}},
            "/is_paused": {"is_paused": self.paused},
            "/weight_info": {"weight_version": self.version},
            "/inference/v1/generate": {
                "choices": [
                    {
                        "token_ids": [7, 3], "finish_reason": "stop", "stop_reason": 3,
                        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]},
                        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
                    }
                ],
                "usage": {"prompt_tokens_details": {"cached_tokens": 32}},
            },
        }  # fmt: skip
        return httpx.Response(200, json=answers.get(path, {"success": True}))

    def paths(self):
        return [path for path, _, _ in self.asked]


def over(server, **options) -> VLLMServer:
    made = VLLMServer(URL, VLLMOptions("/model", options.pop("max_model_len", 512), **options))
    made._alone = lambda: httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(server))

    async def post(asked, by):
        async with made._alone() as http:
            return await http.post(asked.path, json=asked.body, params=asked.query)

    made._post = post
    return made


def test_a_server_that_fits_is_taken_and_a_pause_of_somebody_is_ended():
    server = Server(paused=True, version="7", workers=2)
    client = over(server)
    asyncio.run(client.start(9.0))
    assert (client.num_ranks, client.on_gpu, client.pristine, client.takes) == (
        2,
        False,
        False,
        8,
    ) and "/resume" in server.paths()
    fresh = over(Server())
    asyncio.run(fresh.start(9.0))
    assert fresh.pristine and not over(Server({"interrupted": True})).local


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (
            {"lacks": ["/pause", "/resume"]},
            {},
            r"lacks the calls /pause, /resume: start the server with VLLM_SERVER_DEV",
        ),
        ({"lacks": ["/inference/v1/generate"]}, {}, r"lacks .*: start the server with --enable-scale-out"),
        (
            {"lacks": ["worker"]},
            {},
            r"--worker-extension-cls verl_mt\S+ServerWorker, with verl_mt on its PYTHONPATH.*attrib",
        ),
        ({"changes": {"logprobs_mode": "raw_logprobs"}}, {}, "Start it with --logprobs-mode processed_logprobs"),
        ({}, {"dtype": "bfloat16"}, "runs with --dtype float32. Start it with --dtype bfloat16"),
        ({}, {"max_model_len": 900}, "takes sequences of 512 tokens, too few for 900 .*--max-model-len 900"),
        ({"changes": {"arguments": {"quantization": "fp8"}}}, {}, "started with quantization=fp8: .*rounded"),
        (
            {"changes": {"arguments": {"load_format": "dummy"}}},
            {},
            "load_format=dummy: .*sample the first step",
        ),
        ({"changes": {"arguments": {"data_parallel_size": 2}}}, {}, "data_parallel_size=2: one engine is one replica"),
        ({"changes": {"chunked_prefill": True}}, {}, "Start it with --no-enable-chunked-prefill"),
        ({"changes": {"device": "cuda"}}, {}, "other NCCL settings .*NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0"),
        ({"changes": {"model": "/other"}}, {}, "was started with another model: '/other'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_what_to_do(server, options, message):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(over(Server(**server), **options).start(9.0))


def test_a_gpu_with_the_nccl_settings_that_you_gave_both_sides_is_taken(monkeypatch):
    for name in WORKER["nccl"]:
        monkeypatch.setenv(name, "1")
    same = dict.fromkeys(WORKER["nccl"], "1")
    asyncio.run(over(Server({"device": "cuda", "nccl": same})).start(9.0))


def test_a_gpu_whose_weights_come_as_files_may_have_any_nccl_settings():
    client = over(Server({"device": "cuda", "chunked_prefill": True}), transport="disk")
    asyncio.run(client.start(9.0))
    assert client.on_gpu


def test_a_request_goes_in_as_ids_and_its_answer_has_ids_log_probs_and_versions():
    server = Server()
    body = {"rid": "r", "input_ids": [5, 6], "return_logprob": True, "sampling_params": {
        "max_new_tokens": 2, "temperature": 0.7, "top_k": -1, "seed": None, "stop": ["x"], "stop_token_ids": [3],
    }}  # fmt: skip
    meta = asyncio.run(over(server).generate(body))["meta_info"]
    assert meta["output_token_logprobs"] == [(-0.5, 7), (-1.5, 3)] and meta["cached_tokens"] == 32
    assert meta["finish_reason"] == {"type": "stop", "matched": 3} and meta["weight_versions"][0]["version"] == "4"
    (_, _, sent), sampling = server.asked[0], server.asked[0][2]["sampling_params"]
    assert (sent["request_id"], sent["token_ids"]) == ("r", [5, 6])
    assert sampling["ignore_eos"] and sampling["detokenize"] and sampling["max_tokens"] == 2 and "seed" not in sampling


def test_the_counters_of_tokens_tell_whether_a_server_gets_on(monkeypatch):
    text = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 12.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e9
"""

    async def get(self, url, headers, timeout_s):
        assert url == f"{URL}/metrics"
        return httpx.Response(status, text=text)

    monkeypatch.setattr(open_files.Connections, "get", get)
    client, status = VLLMServer(URL, VLLMOptions("/model", 512)), 200
    seen = asyncio.run(client.progress())
    assert [line.rpartition(" ")[2] for line in seen] == ["7.0", "12.0"]
    status = 404
    assert asyncio.run(client.progress()) is None


def test_calls_are_vllms_own_in_order():
    server = Server()
    client = over(server)

    async def go():
        await client.call("pause_generation", {"mode": "retract"}, 9.0)
        await client.call("begin_weight_update", {}, 9.0)
        entries = [["a", [1], "float32", 0]]
        await client.call("update_weights_from_distributed", {"entries": entries, "weight_version": "3"}, 9.0)
        await client.call("end_weight_update", {}, 9.0)
        await client.call("continue_generation", {}, 9.0)
        await client.call("update_weights_from_disk", {"model_path": "/w", "weight_version": "4"}, 9.0)

    asyncio.run(go())
    assert server.paths() == [
        "/pause", "/start_weight_update", "/update_weights", "/update_weight_version", "/finish_weight_update",
        "/reset_prefix_cache", "/resume", "/start_weight_update", "/update_weights", "/update_weight_version",
        "/finish_weight_update", "/reset_prefix_cache",
    ]  # fmt: skip
    assert server.asked[0][1] == {"mode": "keep"} and server.asked[3][2] == {"new_version": "3"}
    assert server.asked[8][2] == {"update_info": {"path": "/w", "entries": []}}


@pytest.mark.parametrize(("status", "words"), [(500, "no session"), (200, '{"success": false}')])
def test_a_call_that_the_server_refuses_is_an_error_with_its_words(status, words):
    client = over(lambda request: httpx.Response(status, text=words))
    with pytest.raises(EngineError, match=f"refused begin_weight_update: status {status}: {words}"):
        asyncio.run(client.call("begin_weight_update", {}, 9.0))


def test_rollout_workers_ask_servers_themselves_and_far_servers_get_a_broadcast():
    engine = VLLMEngine(VLLMOptions("verl_mt://tiny", 100, servers=(URL,)))
    branch = engine.branch()
    borrowed = VLLMBranch(*branch.args, 0)
    assert branch.path.endswith(":VLLMBranch") and borrowed._replicas[0].name == URL
    receiver = Receiver(print)
    assert engine._publisher_for(over(Server()), receiver, True) == (Broadcaster, ())
    assert engine.capabilities.transports == {"disk", "tensor_buckets", "from_ranks"}
    assert VLLMEngine(VLLMOptions("verl_mt://tiny", 100)).branch() is None
