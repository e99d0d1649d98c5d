"""Arguments of vLLM that `rollout.engine_kwargs` does not take, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ROLLOUT = "actor_rollout_ref.rollout"
_KEY = f"{_ROLLOUT}.engine_kwargs"
_OURS = (
    "model",
    "tokenizer",
    "revision",
    "trust_remote_code",
    "dtype",
    "tensor_parallel_size",
    "max_model_len",
    "logprobs_mode",
    "weight_transfer_config",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "lora_target_modules",
)
_REFUSED = {
    "the engine would sample from rounded weights or caches, which no test of verl_mt has run": (
        "quantization",
        "quantization_config",
    ),
    "its draft model would get no new weights": ("speculative_config", "spec_method", "spec_model"),
    "the engine would sample by rules that the trainer does not know": (
        "logits_processors",
        "watermark_config",
        "diffusion_config",
    ),
    "the engine's model would be another one than the trainer's": (
        "hf_overrides",
        "hf_config_path",
        "model_class_overrides",
    ),
    "the engine would sample the first step from other weights than the trainer's": ("load_format", "model_weights"),
    "the engine would find no stop strings": ("skip_tokenizer_init",),
    "one engine is one replica, on tensor_model_parallel_size devices of one machine": (
        "data_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ),
}
"""What is wrong -> names of vLLM's arguments."""
_PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32")


def refused_arguments(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of vLLM's arguments with which it samples from another distribution than the one that is
    trained, takes no weights, or that no test of verl_mt has run."""
    for reason, names in _REFUSED.items():
        yield from ((name, reason) for name in names if not _changes_nothing(arguments.get(name)))
    if str(arguments.get("kv_cache_dtype") or "auto") not in _PLAIN_CACHES:
        yield "kv_cache_dtype", "the engine would sample from rounded caches, which no test of verl_mt has run"


def problems_of_arguments(arguments: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `engine_kwargs`: arguments that other keys decide, or that change sampling."""
    taken = sorted(set(arguments) & set(_OURS))
    if taken:
        yield (
            f"{_KEY}: {', '.join(taken)} come from other keys (actor_rollout_ref.model.*, {_ROLLOUT}.dtype, "
            ".tensor_model_parallel_size, .max_model_len, .lora_updates) or from verl_mt. Remove them"
        )
    for name, reason in refused_arguments(arguments):
        yield f"{_KEY}.{name}={arguments[name]}: {reason}. Remove {name}"


def _changes_nothing(value: Any) -> bool:
    """Whether vLLM does the same without the argument."""
    return value in (None, "", {}, [], "auto") or value is False or (value == 1 and value is not True)
