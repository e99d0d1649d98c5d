"""vLLM's engine without a vLLM: what is refused, what its process is started with, and how weights lie in memory."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_mt import engines
from verl_mt.config.compose import compose
from verl_mt.data.requests import GenerationRequest, SamplingParams
from verl_mt.engines.base import EngineSetup, Receiver
from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.versions import VLLM
from verl_mt.extensions.cluster.vllm import client, options, publisher
from verl_mt.extensions.cluster.vllm.client import VLLMClient, VLLMTurn, environment_of
from verl_mt.extensions.cluster.vllm.engine import VLLMEngine
from verl_mt.extensions.cluster.vllm.publisher import Broadcaster, FileBuckets, FilePublisher

ROLLOUT = "actor_rollout_ref.rollout."


@pytest.fixture
def with_vllm(monkeypatch):
    """Every Python has the tested version."""
    monkeypatch.setattr(options, "_found", lambda python: {"version": VLLM.newest, "arguments": []})


def check(*words: str) -> None:
    config = compose([ROLLOUT + "name=vllm", *words])
    engines.check(config.actor_rollout_ref, config.trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.deterministic=True"], "trainer.deterministic needs rollout.name=local"),
        (
            [ROLLOUT + "servers=[http://a:1]", ROLLOUT + "weight_transport=tensors"],
            "weight_transport=tensors: http://a:1 cannot open this machine's memory. Use broadcast or disk",
        ),
        (
            [ROLLOUT + "servers=[http://localhost:1]", "trainer.placement=ray", "trainer.nnodes=2"],
            "servers: http://localhost:1 is another machine to each of",
        ),
        ([ROLLOUT + "temperature=2.5"], r"rollout.temperature=2.5: vLLM takes at most 2\."),
        ([ROLLOUT + "val_kwargs.temperature=3"], r"val_kwargs.temperature=3.*: vLLM takes at most 2\."),
        ([ROLLOUT + "engine_kwargs={max_model_len: 9}"], "max_model_len come from other keys"),
        (
            [
                ROLLOUT
                + "engine_kwargs={enable_lora: true, max_lora_rank: 8, max_loras: 1, lora_target_modules: [q_proj]}"
            ],
            "enable_lora, lora_target_modules, max_lora_rank, max_loras come from other keys",
        ),
        (
            [ROLLOUT + "engine_kwargs={quantization: fp8}"],
            "quantization=fp8: .* rounded weights .* Remove quantization",
        ),
        ([ROLLOUT + "engine_kwargs={kv_cache_dtype: fp8}"], "kv_cache_dtype=fp8: .* rounded caches"),
        ([ROLLOUT + "engine_kwargs={load_format: dummy}"], "load_format=dummy: .* other weights than the trainer's"),
        ([ROLLOUT + "engine_kwargs={skip_tokenizer_init: True}"], "skip_tokenizer_init=True: .* no stop strings"),
        ([ROLLOUT + "engine_kwargs={logits_processors: [a.b]}"], "logits_processors=.* by rules that the trainer"),
        (
            [ROLLOUT + "engine_kwargs={pipeline_parallel_size: 2}"],
            "pipeline_parallel_size=2: one engine is one replica",
        ),
        ([ROLLOUT + "temperature=0.001"], r"rollout.temperature=0.001: vLLM would sample at 0\.01"),
        ([ROLLOUT + "python=/no/such/python"], "rollout.python=/no/such/python: there is no such program"),
        (["trainer.device=cuda"], "free_cache_engine=True: vLLM engines keep their GPU memory"),
        (
            ["trainer.device=cuda", ROLLOUT + "free_cache_engine=False", ROLLOUT + "weight_transport=tensors"],
            "weight_transport=tensors: weights reach vLLM through main memory",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_loads(with_vllm, words, message):
    with pytest.raises(ConfigError, match=message):
        check(*words)


def test_a_configuration_that_it_can_serve_passes(with_vllm):
    check(
        ROLLOUT + f"python={sys.executable}",
        ROLLOUT + "engine_kwargs={max_num_batched_tokens: 8192, load_format: auto, data_parallel_size: 1}",
        ROLLOUT + "val_kwargs.temperature=0",
    )


def test_a_python_without_vllm_is_refused_by_name(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any installed package
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"{python} has no vLLM\. Install it .*docs/vllm\.md.*rollout\.python"):
        check(ROLLOUT + f"python={python}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no program", "it does not run as a Python"),
        ('#!/bin/sh\necho "$@"', "has no vLLM"),
    ],
)
def test_a_program_that_is_no_python_is_refused(tmp_path, text, message):
    program = tmp_path / "python"
    program.write_text(text)
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        check(ROLLOUT + f"python={program}")


def test_vllm_is_looked_for_where_the_engines_process_finds_it(tmp_path, monkeypatch):
    found = tmp_path / "vllm-0.32.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options._found.cache_clear()
    try:
        check()
    finally:
        options._found.cache_clear()


def test_a_relative_python_is_found_from_any_folder(with_vllm, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    config = compose([ROLLOUT + "name=vllm", ROLLOUT + "python=bin/python"]).actor_rollout_ref
    assert options.python_of(keys_of(config.rollout)) == str(tmp_path / "bin" / "python"), "the link, not its target"


def test_a_python_that_another_machine_lacks_is_named():
    async def go():
        await VLLMClient({"python": "/no/python", "engine": {"tensor_parallel_size": 1}}).start(9.0)

    with pytest.raises(ConfigError, match=r"rollout\.python=/no/python: it does not run on .* on every machine"):
        asyncio.run(go())


def test_an_untested_version_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(options, "_found", lambda python: {"version": "0.99.1", "arguments": []})
    check(ROLLOUT + f"python={sys.executable}")
    assert f"has vLLM 0.99.1; verl_mt is tested with {VLLM} (docs/vllm.md)" in caplog.text


def test_a_version_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(options, "_found", lambda python: {"version": "0.31.0", "arguments": []})
    with pytest.raises(
        ConfigError, match=rf"rollout\.python: .* has vLLM 0\.31\.0, which is too old: .* Install {VLLM.newest}"
    ):
        check(ROLLOUT + f"python={sys.executable}")


def test_memory_of_gpus_that_only_the_ranks_have_is_not_freed_either(with_vllm):
    config = compose([ROLLOUT + "name=vllm"]).actor_rollout_ref
    host = SimpleNamespace(name="rank 0", rank=0, num_ranks=1, on_gpu=True, devices=("0",))
    setup = EngineSetup(
        config,
        None,
        end_token_ids=frozenset(),
        decode=None,
        max_model_len=9,
        deterministic=False,
        seed=0,
        hosts=(host,),
    )
    with pytest.raises(ConfigError, match="free_cache_engine=True: vLLM engines keep their GPU memory"):
        engines.build(setup)


def test_the_configuration_in_vllms_terms(with_vllm):
    words = ["name=vllm", "max_num_seqs=7", "dtype=bfloat16", "engine_kwargs={block_size: 64, enforce_eager: null}"]
    setup = EngineSetup(
        compose([ROLLOUT + word for word in words]).actor_rollout_ref,
        None,
        end_token_ids=frozenset({3}),
        decode=None,
        max_model_len=4321,
        deterministic=False,
        seed=5,
    )
    engine = engines.build(setup)
    assert engine.capabilities.transports == {"disk", "tensor_buckets"} and engine.capabilities.overlaps_training
    given = engine._options.arguments(2)
    assert given["python"] == sys.executable
    expected = {
        "max_num_seqs": 7, "dtype": "bfloat16", "max_model_len": 4321, "seed": 7, "block_size": 64,
        "logprobs_mode": "processed_logprobs", "tensor_parallel_size": 1, "enable_prefix_caching": True,
    }  # fmt: skip
    assert expected.items() <= given["engine"].items()
    if not torch.cuda.is_available():
        # vLLM dies on a CPU where a prompt with a seed is computed in parts, so all of it fits into a step.
        assert given["engine"]["enable_chunked_prefill"] is False
        assert given["engine"]["max_num_batched_tokens"] == 4321 and "enforce_eager" not in given["engine"]


def test_another_python_gets_none_of_the_variables_of_this_one(monkeypatch):
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "9")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    other, same = environment_of("/opt/vllm/bin/python", eager=True), environment_of(sys.executable, eager=True)
    assert "PYTHONPATH" not in other and "VIRTUAL_ENV" not in other and same["PYTHONPATH"] == "9"
    assert other["PATH"].startswith("/opt/vllm/bin:") and other["PATH"].endswith(os.environ["PATH"])
    assert other["VLLM_CPU_KVCACHE_SPACE"] == "9", "the user's"
    assert other["VLLM_NO_USAGE_STATS"] == "1" and other["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_a_request_carries_its_seed():
    sampling = SamplingParams(max_new_tokens=5, seed=11)
    request = GenerationRequest([1, 2], sampling, request_id="a", session_id="s")
    body = VLLMTurn(request, 100, frozenset({3})).body("rid")
    assert body["sampling_params"]["seed"] == 11 and body["sampling_params"]["stop_token_ids"] == [3]


def test_what_runs_in_vllms_process_imports_nothing_else():
    """Its interpreter may have none of the library's packages."""
    tree = ast.parse(Path(client._PROCESS).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in names}
    assert "vllm" in roots and roots - {"vllm", "torch"} <= sys.stdlib_module_names


@pytest.mark.slow
def test_a_process_that_cannot_import_vllm_is_one_clear_error(tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM of this kind')")

    async def go():
        made = VLLMClient(
            {"python": sys.executable, "engine": {"tensor_parallel_size": 1}}, {"PYTHONPATH": str(tmp_path)}
        )
        try:
            with pytest.raises(ConfigError) as caught:
                await made.start(100.0)
        finally:
            await made.stop()
        return str(caught.value)

    text = asyncio.run(go())
    assert text.startswith("the vLLM engine could not be started") and "no vLLM of this kind" in text
    Path(text.partition("log ")[2].partition(";")[0]).unlink()


def test_weights_lie_in_a_file_as_plain_bytes_and_the_file_goes_with_the_publisher():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5.0) / 7, "c": torch.zeros(0, 4)}
    seen, paths = {}, set()

    def call(name, body, timeout_s):
        assert name == "update_weights_from_tensor"
        data = Path(body["path"]).read_bytes()
        paths.add(body["path"])
        for weight, shape, dtype, start in body["entries"]:
            kind = getattr(torch, dtype)
            size = kind.itemsize * torch.Size(shape).numel()
            part = bytearray(data[start : start + size])
            seen[weight] = torch.frombuffer(part, dtype=kind).view(shape) if size else torch.empty(shape, dtype=kind)
        assert ("weight_version" in body) is ("c" in seen)

    made = FilePublisher({name: tuple(w.shape) for name, w in weights.items()}, "bfloat16", 9.0, address="127.0.0.1")
    assert made.publish(weights.items(), 3, 16, [Receiver(call)]) == [None]
    for name, weight in weights.items():
        assert torch.equal(seen[name], weight.bfloat16()), name
    assert len(paths) == 2 and all(Path(path).stat().st_mode & 0o777 == 0o600 for path in paths)
    made.close()
    assert not any(Path(path).exists() for path in paths)


def test_a_buffer_that_is_too_small_gives_its_file_back():
    def files():
        return [name for name in os.listdir("/dev/shm") if name.startswith("verl_mt_weights_")]

    before = len(files())
    sizes = {"a": 4, "b": 4, "c": 100, "d": 4}
    buckets = FileBuckets({name: (size,) for name, size in sizes.items()}, torch.float32)
    for bucket in buckets.pack([(name, torch.ones(size)) for name, size in sizes.items()], 16):
        assert len(files()) - before <= 2 and Path(buckets.path(bucket.buffer)).exists()
    del bucket
    buckets.close()
    assert len(files()) == before


def test_memory_that_is_not_there_is_an_error_that_says_what_to_do(monkeypatch):
    def full(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publisher.os, "posix_fallocate", full)
    buckets = FileBuckets({"a": (4,)}, torch.float32)
    with pytest.raises(EngineError, match=r"/dev/shm could not be had .*No space.*update_weights_bucket_megabytes"):
        list(buckets.pack([("a", torch.zeros(4))], 100))
    buckets.close()


def test_an_argument_that_vllm_has_not_is_refused_before_anything_starts(monkeypatch):
    found = {"version": VLLM.newest, "arguments": ["enforce_eager", "max_num_batched_tokens"]}
    monkeypatch.setattr(options, "_found", lambda python: found)
    check(ROLLOUT + "engine_kwargs={enforce_eager: True}")
    with pytest.raises(ConfigError, match=r"engine_kwargs\.enforce_eger: vLLM has no such argument; did you mean 'enf"):
        check(ROLLOUT + "engine_kwargs={enforce_eger: True}")


def test_the_names_of_arguments_are_read_where_vllm_is_installed(tmp_path, monkeypatch):
    """Without an import of vLLM."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('not to be imported')")
    text = (
        "class EngineArgs:\n    model: str = ''\n    other = 1\nclass AsyncEngineArgs(EngineArgs):\n    more: int = 0\n"
    )
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(text)
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options._found.cache_clear()
    try:
        assert options._found(sys.executable) == {"version": "0.32.0", "arguments": ["model", "more"]}
    finally:
        options._found.cache_clear()


def test_engines_that_are_launched_here_have_gpus_of_their_own_behind_the_one_that_trains(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = options.VLLMOptions("verl_mt://tiny", 9, num_launched=2, tensor_parallel_size=2)
    assert [made.environment(number)["CUDA_VISIBLE_DEVICES"] for number in range(2)] == ["1,2", "3,4"]
    assert [made.arguments(number)["engine"]["seed"] for number in range(2)] == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8,7,6,5")
    assert made.environment(1)["CUDA_VISIBLE_DEVICES"] == "6,5"
    with pytest.raises(ConfigError, match=r"launch_servers=5 .* needs 6 GPUs, with the one that trains"):
        config = compose([ROLLOUT + "name=vllm", ROLLOUT + "launch_servers=5", "trainer.device=cuda"])
        options.check_placement(keys_of(config.actor_rollout_ref.rollout), config.trainer, on_gpu=True)


def test_both_ends_of_a_broadcast_have_the_same_nccl_settings_unless_you_set_them(monkeypatch):
    rollout = compose([ROLLOUT + "name=vllm", ROLLOUT + "launch_servers=2"]).actor_rollout_ref.rollout
    expected = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert VLLMEngine.rank_environment(rollout) == expected
    made = options.VLLMOptions("verl_mt://tiny", 9, num_launched=2)
    assert expected.items() <= made.environment(0).items()
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert made.environment(0)["NCCL_CUMEM_ENABLE"] == "1"
    assert not VLLMEngine.rank_environment(compose([ROLLOUT + "name=vllm"]).actor_rollout_ref.rollout)


def test_a_bucket_of_a_broadcast_is_described_without_its_bytes():
    made = Broadcaster({"a": (2, 3), "b": (4,)}, "float32", 9.0, address="127.0.0.1")
    (bucket,) = made._buckets.pack([("a", torch.ones(2, 3)), ("b", torch.zeros(4))], 1000)
    assert made._body(bucket) == {"entries": [["a", [2, 3], "float32", 0], ["b", [4], "float32", 24]]}
    made.close()
