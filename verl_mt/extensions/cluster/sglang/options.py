"""What an SGLang engine is started with, from the config to SGLang's own arguments."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Self

import torch

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.replicas.broadcaster import NCCL_ALIKE
from verl_mt.extensions.cluster.replicas.options import KEY, ReplicaOptions

_OURS = (
    "model_path", "tokenizer_path", "revision", "dtype", "tp_size", "context_length", "weight_version", "enable_lora",
    "max_lora_rank", "lora_target_modules", "max_loras_per_batch",
)  # fmt: skip
_DATA_PARALLEL = ("dp_size", "data_parallel_size", "dp")
_WITHOUT_KEY = ("admin_api_key", "api_key", "grpc_port", "tokenizer_worker_num")
_RAW_LOG_PROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
_ROUNDED = "the engine would sample from rounded weights or caches, which no test of verl_mt has run"
_QUANTIZED_FORMATS = ("bitsandbytes", "expert_pack", "flash_rl")
_PLAIN_CACHES = ("auto", "bf16", "bfloat16", "float16", "float32")
_REFUSED = {
    _ROUNDED: ("quantization", "quantize_and_serve", "rl_quant_profile", "modelopt_quant"),
    "its draft model would get no new weights, and no test of verl_mt has run it": ("speculative_algorithm",),
    "requests carry no seed, and SGLang gives all of them the same one: the samples of a prompt would be alike": (
        "enable_deterministic_inference",
        "rl_on_policy_target",
    ),
    "the engine would sample by rules that the trainer does not know": (
        "preferred_sampling_params",
        "enable_watermark",
        "dllm_algorithm",
    ),
    "the engine's model would be another one than the trainer's": ("json_model_override_args",),
    "the engine would find no stop strings": ("skip_tokenizer_init",),
}
"""What is wrong -> names of SGLang's arguments."""
_SLACK = 8
"""SGLang cuts a turn one token before its context is full; with a few more positions `max_model_len` decides."""


@dataclass(frozen=True)
class SGLangOptions(ReplicaOptions):
    """The config in SGLang's terms."""

    @classmethod
    def from_config(cls, config: ActorRolloutRefConfig, **more: Any) -> Self:
        """Raises:
        ConfigError: engine arguments that other keys decide, or no length.
        """
        check_rollout(config.rollout)
        return super().from_config(config, **more)

    def engine_arguments(self) -> dict[str, Any]:
        """`sglang.srt.server_args.ServerArgs`, as keyword arguments."""
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "tokenizer_path": self.tokenizer_path,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "tp_size": self.tensor_parallel_size,
            "context_length": self.max_model_len + _SLACK,
            "max_running_requests": self.max_num_seqs,
            "random_seed": self.seed,
            "weight_version": "0",
            "log_level": "warning",
            "enable_metrics": False,
        }
        if self.on_gpu:
            arguments |= {
                "mem_fraction_static": self.memory_share,
                "enable_memory_saver": self.free_cache and self.takes_turns,
            }
            if self.dtype == "float32":
                # What SGLang takes by itself, FlashAttention or FlashInfer, has kernels for 16 bits only.
                arguments["attention_backend"] = "triton"
        else:
            arguments |= {
                "device": "cpu",
                "attention_backend": "torch_native",
                # An idle engine would otherwise poll with most of a core.
                "sleep_on_idle": True,
                # SGLang sizes its cache by the machine's memory, which is everyone's here: only what can be in use.
                "max_total_tokens": self.max_num_seqs * (self.max_model_len + _SLACK),
            }
        if self.adapters is not None:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": self.adapters.rank,
                "lora_target_modules": list(self.adapters.targets),
                "max_loras_per_batch": 1,
            } | ({} if self.on_gpu else {"lora_backend": "torch_native"})
        return {name: value for name, value in (arguments | self.engine_kwargs).items() if value is not None}

    def merges_adapters(self, rank: int) -> str:
        """Launched servers take calls by HTTP alone, which have none that replaces an adapter in use."""
        if self.num_launched and not self.hosts:
            return "launch_servers without Ray starts HTTP servers, which replace no adapter that requests use"
        return super().merges_adapters(rank)

    def merges_layers(self, targets: Collection[str]) -> str:
        """It stacks q, k and v, and gate and up. Of the parts it fills in k_proj and up_proj alone."""
        if not {"q_proj", "v_proj"} <= set(targets) and not {"q_proj", "k_proj", "v_proj"}.isdisjoint(targets):
            return "SGLang takes adapters of q_proj, k_proj or v_proj only where q_proj and v_proj both have one"
        if "up_proj" in targets and "gate_proj" not in targets:
            return "SGLang takes adapters of up_proj only beside those of gate_proj"
        return ""

    def command_line(self, number: int = 0) -> list[str]:
        """The same for `python -m sglang.launch_server`; each launched server (by `number`) has separate GPUs."""
        arguments = self.engine_arguments()
        if self.on_gpu:
            # The last ones of the machine, unless it was said from where: the first one trains.
            own = torch.cuda.device_count() - self.num_launched * self.tensor_parallel_size
            first = arguments.get("base_gpu_id", max(0, own))
            arguments["base_gpu_id"] = first + number * self.tensor_parallel_size
        words = []
        for name, value in arguments.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                words.append(flag)
            elif value is not False:
                words += [flag, value if isinstance(value, str) else json.dumps(value)]
        return words


def check_rollout(rollout: RolloutConfig) -> None:
    """Raises:
    ConfigError: engine arguments that other keys decide, that change sampling, that take no weights or that leave a
        launched server without its key, or an environment with other log-probs.
    """
    taken = sorted(set(rollout.engine_kwargs) & set(_OURS))
    if taken:
        raise ConfigError(
            f"{KEY}.engine_kwargs: {', '.join(taken)} come from other keys (actor_rollout_ref.model.*, "
            f"{KEY}.dtype, .tensor_model_parallel_size, .max_model_len, .lora_updates). Leave them out"
        )
    for name, reason in other_sampling(rollout.engine_kwargs):
        raise ConfigError(f"{KEY}.engine_kwargs.{name}={rollout.engine_kwargs[name]}: {reason}. Remove {name}")
    parallel = [name for name in _DATA_PARALLEL if rollout.engine_kwargs.get(name, 1) != 1]
    if parallel:
        raise ConfigError(
            f"{KEY}.engine_kwargs.{parallel[0]}={rollout.engine_kwargs[parallel[0]]}: SGLang refuses new weights "
            "where it runs several replicas itself. Set trainer.placement=ray for a replica beside each rank, or set "
            f"{KEY}.launch_servers"
        )
    unguarded = [name for name in _WITHOUT_KEY if rollout.engine_kwargs.get(name) not in (None, 1)]
    keys = keys_of(rollout)
    if keys.launch_servers and unguarded:
        raise ConfigError(
            f"{KEY}.engine_kwargs.{unguarded[0]} is set: a launched server answers only requests with the random key "
            f"that verl_mt gives it, and {unguarded[0]} replaces or bypasses that key. Remove {unguarded[0]}, or start "
            f"the servers yourself ({KEY}.servers)"
        )
    if os.environ.get(_RAW_LOG_PROBS, "").lower() in ("1", "true", "yes", "y"):
        raise ConfigError(
            f"{_RAW_LOG_PROBS} is set: SGLang would return log-probs of the logits before the temperature, and the "
            "trainer's are behind it. Unset it"
        )


def other_sampling(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """SGLang's arguments with which it samples from another distribution than the one that is trained, or that no test
    of verl_mt has run: (name, what is wrong).

    Args:
        arguments: of an engine that is to start, or what a server says of itself.
    """
    if arguments.get("load_format") == "dummy":
        yield "load_format", "the engine would sample the first step from random weights"
    if arguments.get("load_format") in _QUANTIZED_FORMATS:
        yield "load_format", _ROUNDED
    if str(arguments.get("kv_cache_dtype") or "auto") not in _PLAIN_CACHES:
        yield "kv_cache_dtype", _ROUNDED
    for reason, names in _REFUSED.items():
        yield from ((name, reason) for name in names if arguments.get(name) not in (None, False, "", "{}", {}))


def check_launched(rollout: RolloutConfig, device: str) -> None:
    """Servers that are started on this machine use other GPUs, behind the one that trains.

    Raises:
        ConfigError: there are not as many.
    """
    gpus, keys = torch.cuda.device_count(), keys_of(rollout)
    if not keys.launch_servers or not gpus:
        return
    trains_there = device != "cpu" and "base_gpu_id" not in rollout.engine_kwargs
    needed = keys.launch_servers * keys.tensor_model_parallel_size + trains_there
    if gpus < needed:
        beside = ", with the one that trains," if trains_there else ""
        raise ConfigError(
            f"{KEY}.launch_servers={keys.launch_servers} with tensor_model_parallel_size="
            f"{keys.tensor_model_parallel_size} needs {needed} GPUs{beside} on this machine, "
            f"which has {gpus}. Launch fewer, start servers on other machines and name them in {KEY}.servers, or say "
            f"which they share: {KEY}.engine_kwargs={{base_gpu_id: 0}}"
        )


def check_devices(rollout: RolloutConfig) -> None:
    """An engine beside the trainer's process lives on this machine.

    Raises:
        ConfigError: it has not as many GPUs.
    """
    keys, gpus = keys_of(rollout), torch.cuda.device_count()
    if keys.placed == "colocated" and 0 < gpus < keys.tensor_model_parallel_size:
        raise ConfigError(
            f"{KEY}.tensor_model_parallel_size={keys.tensor_model_parallel_size}, but this machine has {gpus} GPU(s), "
            f"and an engine with trainer.placement=inline lives on this machine: give at most {gpus}, or name servers "
            "elsewhere (rollout.servers)"
        )


def nccl_environment(engine_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """`NCCL_ALIKE`, and what SGLang sets instead for these arguments."""
    symmetric = bool(engine_kwargs.get("enable_symm_mem"))
    multicast = symmetric or bool(engine_kwargs.get("enable_nccl_nvls"))
    return NCCL_ALIKE | {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}


def require_sglang() -> None:
    """Raises:
    ConfigError: SGLang, or on a machine without GPU the plug-in that it needs there, is not installed.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:  # a folder of that name somewhere on the path is no package
        raise ConfigError(
            f"{KEY}.name=sglang: SGLang is not installed here. On a GPU machine: pip install 'verl_mt[sglang]'; "
            "without a GPU: bash requirements/install-sglang-cpu.sh (docs/sglang.md), or sample with rollout.name=local"
        )
    # An installation of an earlier version has the documented path, which leads there too.
    paths = {f"verl_mt.{package}.sglang.cpu_platform:activate" for package in ("extensions.cluster", "engines")}
    plugins = {entry.value for entry in entry_points(group="sglang.srt.platforms")}
    if not torch.cuda.is_available() and paths.isdisjoint(plugins):
        raise ConfigError(
            f"{KEY}.name=sglang: without a GPU, SGLang needs the CPU platform that installing verl_mt registers. "
            "Run `pip install --no-deps -e .` in the checkout, with the Python that runs this"
        )


def installed() -> str | None:
    """The version of the SGLang that is installed here; None where it does not say."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None
