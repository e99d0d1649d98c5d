"""From the config to SGLang's arguments, and what is refused on the way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl_mt import engines
from verl_mt.config.actor import ModelConfig
from verl_mt.config.checks import check
from verl_mt.config.compose import compose
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.sglang import cpu_platform
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang import options as options_module
from verl_mt.extensions.cluster.sglang.options import SGLangOptions, check_launched, require_sglang

pytestmark = pytest.mark.slow  # commands, servers, many configurations


def options_of(model=None, max_model_len=384, **rollout):
    config = ActorRolloutRefConfig(model=model or ModelConfig(), rollout=RolloutConfig(name="sglang", **rollout))
    return SGLangOptions.from_config(config, end_token_ids=[1, 2], max_model_len=max_model_len, seed=3)


def test_on_a_cpu_attention_is_torchs_and_the_cache_holds_what_can_be_in_use_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = options_of(max_num_seqs=10).engine_arguments()
    assert (arguments["device"], arguments["attention_backend"], arguments["dtype"]) == (
        "cpu",
        "torch_native",
        "float32",
    )
    assert arguments["max_total_tokens"] == 10 * arguments["context_length"] > 10 * 384
    assert arguments["max_running_requests"] == 10
    assert "mem_fraction_static" not in arguments


def test_on_a_gpu_the_memory_share_and_its_release_are_passed_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = ModelConfig(dtype="bfloat16", revision="v2", trust_remote_code=True)
    options = options_of(model, gpu_memory_utilization=0.7, tensor_model_parallel_size=2)
    arguments = options.engine_arguments()
    expected = {"mem_fraction_static": 0.7, "enable_memory_saver": True, "tp_size": 2, "dtype": "bfloat16"}
    assert expected.items() <= arguments.items()
    assert {"revision": "v2", "trust_remote_code": True}.items() <= arguments.items()
    assert "device" not in arguments and "max_total_tokens" not in arguments
    assert options_of(free_cache_engine=False).engine_arguments()["enable_memory_saver"] is False


def test_float32_on_a_gpu_takes_the_attention_that_has_kernels_for_it_unless_another_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert options_of().engine_arguments()["attention_backend"] == "triton"
    assert "attention_backend" not in options_of(model=ModelConfig(dtype="bfloat16")).engine_arguments()
    own = options_of(engine_kwargs={"attention_backend": "flex_attention"}).engine_arguments()
    assert own["attention_backend"] == "flex_attention"


def test_data_parallelism_inside_sglang_is_refused_because_it_takes_no_weights():
    with pytest.raises(ConfigError, match=r"engine_kwargs\.dp_size=2: SGLang refuses new weights.*placement=ray"):
        options_of(engine_kwargs={"dp_size": 2})
    assert options_of(engine_kwargs={"dp_size": 1}).engine_arguments()["dp_size"] == 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("load_format", "dummy", "random weights"),
        ("load_format", "flash_rl", "rounded weights"),
        ("quantization", "fp8", "rounded weights"),
        ("kv_cache_dtype", "fp8_e5m2", "rounded weights or caches"),
        ("speculative_algorithm", "NEXTN", "its draft model would get no new weights"),
        ("enable_deterministic_inference", True, "the samples of a prompt would be alike"),
        ("rl_on_policy_target", "fsdp", "the samples of a prompt would be alike"),
        ("preferred_sampling_params", {"logit_bias": {"3": 1}}, "rules that the trainer does not know"),
        ("json_model_override_args", {"num_hidden_layers": 1}, "another one than the trainer's"),
        ("skip_tokenizer_init", True, "no stop strings"),
    ],
)
def test_arguments_that_change_sampling_are_refused(name, value, reason):
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{name}=.*: .*{reason}.*\. Remove {name}$"):
        options_of(engine_kwargs={name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("api_key", "abc"), ("admin_api_key", "abc"), ("grpc_port", 50051), ("tokenizer_worker_num", 2)]
)
def test_arguments_that_leave_a_launched_server_without_its_key_are_refused_and_not_shown(name, value):
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{name} is set: .*Remove {name}, or start") as caught:
        options_of(launch_servers=1, engine_kwargs={name: value})
    assert str(value) not in str(caught.value).replace(name, "")
    assert options_of(engine_kwargs={name: value}).engine_arguments()[name] == value
    options_of(launch_servers=1, engine_kwargs={"tokenizer_worker_num": 1})


def test_arguments_at_their_defaults_and_those_of_speed_pass():
    passed = {"load_format": "safetensors", "quantization": None, "kv_cache_dtype": "auto", "chunked_prefill_size": 64}
    arguments = options_of(engine_kwargs={**passed, "enable_deterministic_inference": False}).engine_arguments()
    assert arguments["load_format"] == "safetensors" and arguments["chunked_prefill_size"] == 64


def test_log_probs_before_the_temperature_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "True")
    with pytest.raises(ConfigError, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB is set.*Unset it"):
        options_of()
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    options_of()


def test_engines_beside_ranks_need_a_size_that_divides_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(engine_module, "require_sglang", lambda: None)
    words = ["trainer.placement=ray", "trainer.n_workers_per_node=3", "actor_rollout_ref.rollout.name=sglang"]
    with pytest.raises(ConfigError, match=r"size=2 does not divide trainer\.n_workers_per_node=3"):
        compose([*words, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"])
    config = compose([*words, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"])
    engines.check(config.actor_rollout_ref, config.trainer)


def test_a_server_of_this_machine_is_refused_where_ranks_are_on_others():
    words = ["trainer.placement=ray", "actor_rollout_ref.rollout.name=sglang"]
    words += ["actor_rollout_ref.rollout.servers=[http://localhost:1,http://10.0.0.7:1]"]
    config = compose([*words, "trainer.nnodes=2"])
    with pytest.raises(ConfigError, match=r"servers: http://localhost:1 is another machine to each of .*nnodes=2"):
        engines.check(config.actor_rollout_ref, config.trainer)
    config = compose(words)
    engines.check(config.actor_rollout_ref, config.trainer)
    config = compose([*words, "actor_rollout_ref.rollout.weight_transport=tensors"])
    with pytest.raises(ConfigError, match=r"http://10\.0\.0\.7:1 cannot open this machine's memory"):
        engines.check(config.actor_rollout_ref, config.trainer)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("placement=servers",), "placement=servers: .*servers names none"),
        (("placement=separate",), r"placement=separate: .*nnodes is 0"),
        (("placement=colocated", "nnodes=1"), "placement=colocated and .*nnodes contradict"),
        (("nnodes=1", "launch_servers=2"), r"nnodes and \.launch_servers contradict"),
        (("placement=colocated", "launch_servers=2"), "placement=colocated and .*launch_servers contradict"),
        (
            ("nnodes=1", "trainer:placement=ray", "weight_transport=copy"),
            "weight_transport=copy is for engines beside the ranks",
        ),
        (("nnodes=1", "servers=[http://a:1]"), "placement=servers and .*nnodes contradict"),
        (("nnodes=1",), r"placement=separate needs trainer\.placement=ray"),
        (("nnodes=1", "n_workers_per_node=3", "tensor_model_parallel_size=2"), "size=2 does not divide .*per_node=3"),
    ],
)
def test_placements_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        compose(["actor_rollout_ref.rollout.name=sglang", *(_key(word) for word in words)])


def _key(word):
    return word.replace(":", ".") if word.startswith("trainer:") else f"actor_rollout_ref.rollout.{word}"


def test_engine_kwargs_are_passed_as_they_are_except_what_other_keys_decide():
    options = options_of(engine_kwargs={"max_total_tokens": 99, "schedule_policy": "lpm"})
    assert {"max_total_tokens": 99, "schedule_policy": "lpm"}.items() <= options.engine_arguments().items()
    with pytest.raises(ConfigError, match="engine_kwargs: dtype, model_path come from other keys"):
        options_of(engine_kwargs={"model_path": "x", "dtype": "float16"})
    with pytest.raises(
        ConfigError, match="enable_lora, lora_target_modules, max_lora_rank, max_loras_per_batch come fr"
    ):
        options_of(
            engine_kwargs={
                "max_lora_rank": 8,
                "lora_target_modules": ["all"],
                "max_loras_per_batch": 1,
                "enable_lora": True,
            }
        )
    with pytest.raises(ConfigError, match="max_model_len"):
        options_of(max_model_len=None)


def test_the_command_line_of_a_launched_server_says_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = options_of(engine_kwargs={"chunked_prefill_size": 64}).command_line()
    assert words[words.index("--chunked-prefill-size") + 1] == "64"
    assert words[words.index("--device") + 1] == "cpu"
    assert "--sleep-on-idle" in words and "--trust-remote-code" not in words and "--enable-metrics" not in words


def test_launched_servers_have_gpus_of_their_own_and_more_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def gpus_of(**more):
        options = options_of(launch_servers=3, tensor_model_parallel_size=2, **more)
        lines = [options.command_line(number) for number in range(3)]
        return [words[words.index("--base-gpu-id") + 1] for words in lines]

    assert gpus_of() == ["2", "4", "6"] and gpus_of(engine_kwargs={"base_gpu_id": 0}) == ["0", "2", "4"]
    for number, device, more, needed in (
        (4, "auto", {}, 9), (5, "cpu", {}, 10), (5, "cuda", {"base_gpu_id": 0}, 10), (4, "cpu", {}, None),
        (4, "cuda", {"base_gpu_id": 0}, None),
    ):  # fmt: skip
        rollout = RolloutConfig(launch_servers=number, tensor_model_parallel_size=2, engine_kwargs=more)
        if needed is None:
            check_launched(rollout, device)
            continue
        with pytest.raises(ConfigError, match=rf"launch_servers={number} .*needs {needed} GPUs.* which has 8"):
            check_launched(rollout, device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--base-gpu-id" not in options_of(launch_servers=2).command_line(1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["servers=[host:1]"], "'host:1' is no URL"),
        (["servers=[http://a:1,http://b:1,http://a:1/]"], "servers names http://a:1 2 times: .*Name it once"),
        (["servers=[http://h:1]", "launch_servers=2"], "placement=servers and .*launch_servers contradict"),
        (["servers=[http://h:1]", "tensor_model_parallel_size=2"], "set the options of those"),
        (["servers=[http://h:1]", "gpu_memory_utilization=0.9"], "set the options of those"),
        (["weight_transport=broadcast"], "needs servers"),
        (["weight_sync_dir=/shared"], "unless .*weight_transport=disk"),
        (["name=local", "servers=[http://h:1]"], "unless .*rollout.name=sglang"),
        (["name=local", "weight_transport=disk"], "unless .*rollout.name=sglang"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, message):
    words = [f"actor_rollout_ref.rollout.{word}" for word in ["name=sglang", *overrides]]
    with pytest.raises(ConfigError, match=message):
        check(compose(words))


def test_without_sglang_or_its_cpu_platform_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(options_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"SGLang is not installed here.*install-sglang-cpu\.sh"):
        require_sglang()
    installed = SimpleNamespace(origin="sglang/__init__.py")
    monkeypatch.setattr(options_module.importlib.util, "find_spec", lambda name: installed)
    monkeypatch.setattr(options_module, "entry_points", lambda group: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="the CPU platform that installing verl_mt registers"):
        require_sglang()


def test_the_cpu_platform_steps_aside_for_a_gpu_and_for_sglangs_own_cpu_kernels(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_platform.activate() == "verl_mt.extensions.cluster.sglang.cpu_platform_class.TorchCpuPlatform"
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu_platform.activate() is None
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_platform.activate() is None
