"""A server that is not the one that the configuration describes is refused with one clear error."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.sglang import server_check
from verl_mt.extensions.cluster.sglang.clients import HttpClient
from verl_mt.extensions.cluster.sglang.options import SGLangOptions
from verl_mt.extensions.cluster.versions import SGLANG

URL = "http://somewhere:30000"


def folder(tmp_path, name, **changes):
    path = tmp_path / name
    path.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 96, **changes}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def ask(wanted, model_info, server_info=None, paths=server_check._CALLS, status=200, listed=True, **more):
    replies = {
        "/model_info": model_info,
        "/server_info": server_info or {"context_length": 4096},
        "/openapi.json": {"paths": {path: {} for path in paths}},
    }

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "OPTIONS" or (request.url.path == "/openapi.json" and not listed):
            return httpx.Response(405 if request.url.path in paths else 404)
        return httpx.Response(status, json=replies[request.url.path])

    async def go():
        async with httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(handler)) as http:
            return await server_check.check_server(http, HttpClient, SGLangOptions(wanted, 384), **more)

    return asyncio.run(go())


def test_the_same_model_is_taken_by_its_path_by_its_config_or_by_its_architecture(tmp_path):
    wanted, copy = folder(tmp_path, "a"), folder(tmp_path, "b")
    for info in (
        {"model_path": wanted},
        {"model_path": copy},
        {"model_path": "/on/another/machine", "architectures": ["Qwen3ForCausalLM"]},
    ):
        assert ask(wanted, info) == info | {"device": None, "tp_size": None, "max_running_requests": None}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"hidden_size": 64}, "hidden_size 64 instead of 96"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"vocab_size": 99}, "vocab_size 99 instead of 512"),
    ],
)
def test_a_server_that_was_started_with_another_model_is_refused(tmp_path, other, what):
    wanted, served = folder(tmp_path, "a"), folder(tmp_path, "b", **other)
    with pytest.raises(ConfigError, match=f"{URL} was started with another model: .*{what}"):
        ask(wanted, {"model_path": served})


def test_another_architecture_on_another_machine_is_refused_and_so_is_what_cannot_be_told(tmp_path):
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        ask(folder(tmp_path, "a"), {"model_path": "/elsewhere", "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="cannot be told from here"):
        ask("Qwen/some-model", {"model_path": "Qwen/another-model"})


def test_a_server_that_lacks_a_call_or_room_or_a_tokenizer_is_refused(tmp_path):
    wanted = folder(tmp_path, "a")
    info = {"model_path": wanted}
    old = [call for call in server_check._CALLS if call != "/begin_weight_update"]
    for listed in (True, False):
        with pytest.raises(ConfigError, match="lacks the calls /begin_weight_update: "):
            ask(wanted, info, paths=old, listed=listed)
    assert ask(wanted, info, listed=False)["model_path"] == wanted
    with pytest.raises(ConfigError, match=r"at most 250 tokens of input, .* of 384 .*--context-length 390"):
        ask(wanted, info, {"context_length": 4096, "max_req_input_len": 250})
    with pytest.raises(ConfigError, match="skip-tokenizer-init"):
        ask(wanted, info, {"context_length": 4096, "skip_tokenizer_init": True})


@pytest.mark.parametrize("version", ["0.5.20", "0.4.10.post2", "0.5.9"])
def test_a_server_that_is_too_old_is_refused_by_its_version(tmp_path, version):
    wanted = folder(tmp_path, "a")
    oldest, newest = re.escape(SGLANG.oldest), re.escape(SGLANG.newest)
    with pytest.raises(
        ConfigError, match=rf"{URL} runs SGLang {version}, .*needs {oldest} to {newest}. Install {newest}"
    ):
        ask(wanted, {"model_path": wanted}, {"context_length": 4096, "version": version}, paths=("/generate",))


def test_a_version_that_is_newer_than_the_tested_ones_is_said(tmp_path, caplog):
    wanted = folder(tmp_path, "a")
    newer = ("0.6.0", "1.0", "0.0.0.dev0+g1234567")
    for version in (SGLANG.newest, SGLANG.oldest, f"{SGLANG.newest}+cpu", None, *newer):
        ask(wanted, {"model_path": wanted}, {"context_length": 4096, "version": version})
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(" runs SGLang ")[2] for text in said] == [
        f"{version}; verl_mt is tested with {SGLANG} (docs/sglang.md)" for version in newer
    ]
    assert all(URL in text for text in said)


def test_random_weights_are_refused_but_in_a_server_that_is_sent_its_weights_before_it_is_asked(tmp_path):
    wanted = folder(tmp_path, "a")
    random = {"context_length": 4096, "load_format": "dummy"}
    with pytest.raises(ConfigError, match=r"--load-format dummy: .* random weights"):
        ask(wanted, {"model_path": wanted}, random)
    assert ask(wanted, {"model_path": wanted}, random, empty=True)["model_path"] == wanted
    (post,) = HttpClient.posts("update_weights_from_disk", {"model_path": "folder", "weight_version": "1"})
    assert post.body == {"model_path": "folder", "weight_version": "1", "load_format": "auto"}


def test_something_that_is_no_sglang_server_or_wants_a_key_is_refused(tmp_path):
    wanted = folder(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"answers with status 404. Is that SGLang 0\.5\.23"):
        ask(wanted, {}, status=404)
    with pytest.raises(ConfigError, match="SGLANG_API_KEY"):
        ask(wanted, {}, status=401)


def test_a_server_that_does_not_answer_is_named(run_async):
    async def go():
        client = HttpClient("http://127.0.0.1:9", SGLangOptions("verl_mt://tiny", 384))
        try:
            with pytest.raises(ConfigError, match=r"servers: http://127\.0\.0\.1:9 does not answer \(ConnectError"):
                await client.start(600.0)
        finally:
            await client.stop()

    run_async(go())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        # Weights that somebody has sent it meanwhile do not help: it loads the model's files in the same format.
        ("load_format", "dummy", "random weights"),
        ("quantization", "fp8", "rounded weights"),
        ("kv_cache_dtype", "fp8_e4m3", "rounded weights or caches"),
        ("speculative_algorithm", "EAGLE", "draft model"),
        ("enable_deterministic_inference", True, "the samples of a prompt would be alike"),
        ("skip_tokenizer_init", True, "stop strings"),
    ],
)
def test_a_server_that_samples_from_another_distribution_is_refused(name, value, reason, tmp_path):
    wanted, flag = folder(tmp_path, "a"), "--" + name.replace("_", "-")
    info = {"model_path": wanted, "weight_version": "7"}
    with pytest.raises(
        ConfigError, match=rf"30000 was started with {flag} {value}: .*{reason}.*Start it without {flag}"
    ):
        ask(wanted, info, {"context_length": 4096, name: value})
    plain = {
        "load_format": "auto",
        "kv_cache_dtype": "bfloat16",
        "quantization": None,
        "json_model_override_args": "{}",
    }
    ask(wanted, info, {"context_length": 4096, **plain, "enable_deterministic_inference": False})
