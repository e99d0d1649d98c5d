"""verl's spellings: which key each one means here, which are always so here, and which are refused and why.

Four tables of data and the converters they need; `normalize.py` applies them to command lines and YAML files alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from verl_mt.config import correction_spellings, critic_spellings
from verl_mt.config import slime_spellings as slime
from verl_mt.config import swift_spellings as swift
from verl_mt.config.spelling import ACTOR, DROP, MODEL, REF, ROLLOUT, Always, Rename

__all__ = ["ACTOR", "DROP", "MODEL", "REF", "ROLLOUT", "Always", "Rename"]


def _warmup_ratio(value: Any) -> int:
    if value in (0, 0.0, None):
        return 0
    raise ValueError("give lr_warmup_steps in optimizer steps (ratio x total steps)")


def _truncate_side(value: Any) -> str:
    kept = {"left": "head", "right": "tail", "middle": "both"}
    if value not in kept:
        raise ValueError(f"expected left, right or middle, got {value!r}")
    return kept[value]


def _do_sample(value: Any) -> Any:
    """False is greedy; True adds nothing to the temperature."""
    return DROP if value else 0.0


VLLM = (
    "vLLM is not an engine of verl_mt: exact ids, log-probs and weight versions are built and tested for one engine "
    "for real work, SGLang. Use rollout.name=sglang (beside the actor, or as servers, docs/sglang.md), or local, which "
    "samples in this process"
)
MEGATRON = (
    "Megatron is not offered: models are trained as Hugging Face modules. Instead, trainer.placement=ray "
    "trainer.n_workers_per_node=8 shards weights, gradients and optimizer state over 8 ranks with FSDP2, and "
    "rollout.tensor_model_parallel_size splits the engine (docs/scaling.md)"
)


def _engine(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("vllm"):
        raise ValueError(VLLM)
    if value in ("hf", "trtllm"):
        raise ValueError(f"{value} is not an engine of verl_mt; use sglang (real work) or local (this process)")
    return value


def _top_k(value: Any) -> Any:
    return -1 if value == 0 else value


def _warmup_steps(value: Any) -> Any:
    return 0 if value == -1 else value


def _as_list(value: Any) -> Any:
    """One string is a list of one; a list that a shell's quotes left as text is read as JSON."""
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            raise ValueError("neither a name nor a list of names") from None
    return [value]


def _trace(value: Any) -> Any:
    if value in ("weave", "mlflow"):
        raise ValueError(f"{value} is not offered; otel sends spans to any collector of OpenTelemetry")
    return value


def _none_if_false(value: Any) -> Any:
    return None if value is False else value


def _dtype(value: Any) -> Any:
    return (
        {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(value, value)
        if isinstance(value, str)
        else value
    )


def _estimator(value: Any) -> Any:
    return {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}.get(value, value) if isinstance(value, str) else value


def _sanity_mode(value: Any) -> Any:
    return "off" if value in (False, "disable") else value


OVERLONG_BUFFER = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)

RENAMES: dict[str, Rename] = {
    "data.max_response_length": Rename(ROLLOUT + "response_length"),
    "data.tool_config_path": Rename(ROLLOUT + "tool_kwargs.tools_config_file"),
    "data.trust_remote_code": Rename(MODEL + "trust_remote_code"),
    ROLLOUT + "prompt_length": Rename("data.max_prompt_length"),
    ROLLOUT + "multi_turn": Rename(ROLLOUT + "multi_turn.enable"),
    ROLLOUT + "multi_turn.tool_config_path": Rename(ROLLOUT + "tool_kwargs.tools_config_file"),
    ROLLOUT + "multi_turn.interaction_config_path": Rename(ROLLOUT + "interaction_config_file"),
    ROLLOUT + "multi_turn.max_turns": Rename(ROLLOUT + "multi_turn.max_assistant_turns"),
    ROLLOUT + "multi_turn.format": Rename(ROLLOUT + "multi_turn.tool_parser"),
    ROLLOUT + "multi_turn.max_tool_response_length": Rename(
        ROLLOUT + "multi_turn.max_tool_response_tokens",
        note="it counts characters; as many tokens never cut more than that did. To be exact, set the token limit",
    ),
    ROLLOUT + "multi_turn.tool_response_truncate_side": Rename(
        ROLLOUT + "multi_turn.tool_response_keep",
        _truncate_side,
        note="left keeps the head, right the tail, middle both",
    ),
    ROLLOUT + "val_kwargs.do_sample": Rename(ROLLOUT + "val_kwargs.temperature", _do_sample),
    MODEL + "target_modules": Rename(MODEL + "lora_target_modules", _as_list),
    ACTOR + "tau_pos": Rename(ACTOR + "policy_loss.tau_pos"),
    ACTOR + "tau_neg": Rename(ACTOR + "policy_loss.tau_neg"),
    ACTOR + "ppo_micro_batch_size_per_gpu": Rename(ACTOR + "ppo_micro_batch_size"),
    ACTOR + "ppo_max_token_len_per_gpu": Rename(ACTOR + "ppo_max_token_len"),
    ACTOR + "optim.lr_warmup_steps_ratio": Rename(ACTOR + "optim.lr_warmup_steps", _warmup_ratio),
    critic_spellings.CRITIC + "optim.lr_warmup_steps_ratio": Rename(
        critic_spellings.CRITIC + "optim.lr_warmup_steps", _warmup_ratio
    ),
    ACTOR + "optim.warmup_style": Rename(ACTOR + "optim.lr_scheduler_type"),
    ACTOR + "optim.clip_grad": Rename(ACTOR + "grad_clip"),
    ACTOR + "fsdp_config.model_dtype": Rename(MODEL + "dtype", _dtype),
    REF + "log_prob_max_token_len_per_gpu": Rename(REF + "log_prob_max_token_len"),
    ACTOR + "fsdp_config.optimizer_offload": Rename(ACTOR + "optimizer_offload"),
    REF + "fsdp_config.param_offload": Rename(REF + "offload"),
    "custom_reward_function.path": Rename("reward.path"),
    "custom_reward_function.name": Rename("reward.name"),
    "custom_reward_function.reward_kwargs": Rename("reward.kwargs"),
    "reward.custom_reward_function.path": Rename("reward.path"),
    "reward.custom_reward_function.name": Rename("reward.name"),
    "reward.custom_reward_function.reward_kwargs": Rename("reward.kwargs"),
    "trainer.n_gpus_per_node": Rename("trainer.n_workers_per_node"),
}
RENAMES |= {old + ".max_resp_len": Rename(ROLLOUT + "response_length") for old in OVERLONG_BUFFER}
RENAMES |= correction_spellings.VERL | critic_spellings.VERL | slime.RENAMES | swift.RENAMES

PREFIX_RENAMES: dict[str, str] = {
    "data.apply_chat_template_kwargs": MODEL + "template_kwargs",
    "custom_reward_function.reward_kwargs": "reward.kwargs",
    "reward.custom_reward_function.reward_kwargs": "reward.kwargs",
    **dict.fromkeys(OVERLONG_BUFFER, "reward.overlong_buffer"),
    ROLLOUT + "engine_kwargs.sglang": ROLLOUT + "engine_kwargs",
}
"""Mappings with free keys: `data.apply_chat_template_kwargs.enable_thinking` and the like."""

CONVERT: dict[str, Callable[[Any], Any]] = {
    ROLLOUT + "name": _engine,
    ROLLOUT + "top_k": _top_k,
    ROLLOUT + "val_kwargs.top_k": _top_k,
    ROLLOUT + "stop": _as_list,
    ROLLOUT + "dtype": _dtype,
    ROLLOUT + "trace.backend": _trace,
    ROLLOUT + "multi_turn.tokenization_sanity_check_mode": _sanity_mode,
    MODEL + "dtype": _dtype,
    MODEL + "lora_target_modules": _as_list,
    ACTOR + "optim.lr_warmup_steps": _warmup_steps,
    critic_spellings.CRITIC + "optim.lr_warmup_steps": _warmup_steps,
    "algorithm.adv_estimator": _estimator,
    "trainer.logger": _as_list,
    "trainer.resume_from_path": _none_if_false,
    "external_plugins": _as_list,
}
"""Values of our own keys that have another spelling (or a better refusal)."""

_TOKENS = "sequences are batched by tokens (ppo_max_token_len); only speed depends on it"
_FSDP = "Hugging Face modules, sharded with FSDP2 over the ranks of trainer.placement=ray; there is no Megatron"
_MANAGERS = ("naive", "batch", "dapo")
_MANAGED = "the function's parameters say whether it gets batches; DAPO's penalty is reward.overlong_buffer"
_SPEED = "only speed or memory depends on it, and there is nothing to set here"
_NO_OFFLOAD = "parameters and activations stay on the device"

ALWAYS: dict[str, Always] = {
    "data.return_raw_chat": Always((True,), "rollouts always start from the messages"),
    "data.return_raw_input_ids": Always((False,), "prompt ids are made by the chat template, once"),
    "data.return_full_prompt": Always((False,), "rollout rows hold the messages anyway"),
    "data.return_multi_modal_inputs": Always(None, "images go with their rows wherever there are some"),
    "data.image_key": Always(("images",), "the column is called images (docs/multimodal.md)"),
    "data.video_key": Always(("videos",), "the column is called videos (docs/multimodal.md)"),
    "data.reward_fn_key": Always(("data_source",), "the column data_source picks the reward function"),
    "data.use_shm": Always((False,), "files are read where they are"),
    "data.tokenizer": Always((None,), "the tokenizer is actor_rollout_ref.model.tokenizer_path"),
    "data.validation_shuffle": Always((False,), "validation rows keep their order"),
    "data.dataloader_num_workers": Always(None, _SPEED),
    "data.filter_overlong_prompts_workers": Always(None, _SPEED),
    "model_engine": Always(("dp",), _FSDP),
    "actor_rollout_ref.hybrid_engine": Always((True,), "actor and rollout share one worker group"),
    MODEL + "use_shm": Always((False,), "the model is read where it is"),
    MODEL + "use_liger": Always((False,), "transformers' own kernels are used"),
    MODEL + "use_fused_kernels": Always((False,), "transformers' own kernels are used"),
    MODEL + "enable_activation_offload": Always((False,), _NO_OFFLOAD),
    MODEL + "lora_dropout": Always(
        (0, 0.0), "with dropout the policy that is trained would be another one than the one that sampled"
    ),
    MODEL + "exclude_modules": Always((None,), "lora_target_modules names the layers that get adapters"),
    MODEL + "lora_adapter_path": Always((None,), "a run starts with new adapters; merge older ones into model.path"),
    MODEL + "external_lib": Always((None,), "use external_plugins"),
    ACTOR + "strategy": Always(("fsdp", "fsdp2"), _FSDP),
    ACTOR + "use_dynamic_bsz": Always(
        None,
        "batches are by tokens (ppo_max_token_len) unless ppo_micro_batch_size is set; only speed depends on it",
    ),
    ACTOR + "use_torch_compile": Always(None, _SPEED),
    ACTOR + "entropy_checkpointing": Always(None, _SPEED),
    ACTOR + "entropy_from_logits_with_chunking": Always(None, _SPEED),
    ACTOR + "ulysses_sequence_parallel_size": Always((1,), "a sequence lives on one rank"),
    ACTOR + "optim.total_training_steps": Always((-1, None), "the schedule runs over the run's own steps"),
    ACTOR + "optim.optimizer": Always(("AdamW",), "the optimizer is AdamW"),
    ACTOR + "checkpoint.save_contents": Always(
        (["model", "optimizer", "extra"], ["model", "optimizer", "extra", "hf_model"]),
        "a checkpoint holds all of it",
    ),
    ACTOR + "checkpoint.load_contents": Always((["model", "optimizer", "extra"],), "a resumed run needs all of it"),
    ACTOR + "fsdp_config.param_offload": Always((False,), _NO_OFFLOAD),
    ACTOR + "fsdp_config.offload_policy": Always((False,), _NO_OFFLOAD),
    ACTOR + "fsdp_config.fsdp_size": Always((-1,), "all ranks shard together"),
    ACTOR + "fsdp_config.forward_prefetch": Always(None, _SPEED),
    ACTOR + "fsdp_config.reshard_after_forward": Always(None, _SPEED),
    ACTOR + "fsdp_config.wrap_policy.min_num_params": Always(None, _SPEED),
    REF + "strategy": Always(("fsdp", "fsdp2"), _FSDP),
    REF + "log_prob_micro_batch_size": Always(None, _TOKENS),
    REF + "log_prob_micro_batch_size_per_gpu": Always(None, _TOKENS),
    REF + "log_prob_use_dynamic_bsz": Always(None, _TOKENS),
    REF + "use_torch_compile": Always(None, _SPEED),
    REF + "ulysses_sequence_parallel_size": Always((1,), "a sequence lives on one rank"),
    REF + "fsdp_config.forward_prefetch": Always(None, _SPEED),
    REF + "fsdp_config.reshard_after_forward": Always(None, _SPEED),
    REF + "fsdp_config.wrap_policy.min_num_params": Always(None, _SPEED),
    ROLLOUT + "do_sample": Always((True,), "training samples; greedy would be temperature=0"),
    ROLLOUT + "ignore_eos": Always((False,), "an end-of-turn token ends a turn"),
    ROLLOUT + "over_sample_rate": Always((0, 0.0), "every prompt that was issued is trained"),
    ROLLOUT + "calculate_log_probs": Always(None, "the sampler's log-probs are always recorded"),
    ROLLOUT + "load_format": Always(None, "the engine gets the actor's weights before the first token"),
    ROLLOUT + "layered_summon": Always(None, _SPEED),
    ROLLOUT + "multi_stage_wake_up": Always(None, _SPEED),
    ROLLOUT + "disable_log_stats": Always(None, "it changes a log only"),
    ROLLOUT + "log_prob_micro_batch_size": Always(None, _TOKENS),
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": Always(None, _TOKENS),
    ROLLOUT + "log_prob_use_dynamic_bsz": Always(None, _TOKENS),
    ROLLOUT + "log_prob_max_token_len_per_gpu": Always(None, _TOKENS),
    ROLLOUT + "data_parallel_size": Always((1,), "ranks come from trainer.n_workers_per_node"),
    ROLLOUT + "pipeline_model_parallel_size": Always((1,), "an engine is not split by layers"),
    ROLLOUT + "expert_parallel_size": Always((1,), "an engine is not split by experts"),
    ROLLOUT + "enforce_eager": Always(None, "it is vLLM's; with SGLang use engine_kwargs.disable_cuda_graph"),
    ROLLOUT + "enable_chunked_prefill": Always(
        None, "it is vLLM's; with SGLang use engine_kwargs.chunked_prefill_size"
    ),
    ROLLOUT + "enable_prefix_caching": Always((True,), "each sequence keeps its cache across its turns"),
    ROLLOUT + "agent.num_workers": Always(None, "one event loop drives all conversations; only speed depends on it"),
    ROLLOUT + "agent.default_agent_loop": Always(("tool_agent",), "the tool loop is the loop"),
    "algorithm.use_pf_ppo": Always((False,), "rows are not resampled by reward"),
    "trainer.max_staleness": Always((0,), "every rollout is by the weights of its own step"),
    "reward_model.enable": Always((False,), "the reward is a function"),
    "data.gen_batch_size": Always(None, "a step samples as many further prompts as algorithm.filter_groups needs"),
    "reward_model.reward_manager": Always(_MANAGERS, _MANAGED),
    "reward_model.launch_reward_fn_async": Always(None, "rewards are always computed beside the rollout"),
    "reward.reward_model.enable": Always((False,), "the reward is a function"),
    "reward.reward_manager.name": Always(_MANAGERS, _MANAGED),
    "reward.num_workers": Always(None, _SPEED),
    "trainer.balance_batch": Always(None, "it moves sequences between ranks and changes no result"),
    ROLLOUT + "trace.token2text": Always((False,), "a span carries ids; the texts are in rollouts/*.jsonl"),
    "trainer.rollout_data_dir": Always((None,), "every trajectory is in rollouts/step_*.jsonl of the run directory"),
    "trainer.validation_data_dir": Always((None,), "every trajectory is in the run directory"),
    "trainer.default_hdfs_dir": Always((None,), "checkpoints are local"),
    "trainer.del_local_ckpt_after_load": Always((False,), "checkpoints are kept as max_actor_ckpt_to_keep says"),
    "trainer.esi_redundant_time": Always((0,), "a checkpoint comes every save_freq steps"),
    "trainer.ray_wait_register_center_timeout": Always(None, "there is no register centre to wait for"),
    "trainer.use_legacy_worker_impl": Always(None, "there is one implementation of the workers"),
    "ray_init.num_cpus": Always((None,), "Ray finds the CPUs itself"),
    "ray_kwargs.ray_init.num_cpus": Always((None,), "Ray finds the CPUs itself"),
}
ALWAYS |= {old + ".log": Always(None, "it is always in the metrics (reward/overlong)") for old in OVERLONG_BUFFER}
ALWAYS |= correction_spellings.VERL_ALWAYS | critic_spellings.VERL_ALWAYS | slime.ALWAYS | swift.ALWAYS

REFUSED: dict[str, str] = {
    "reward_model": "reward models are not offered; use reward.path (a function, which may call a server)",
    "reward.reward_model": "reward models are not offered; use reward.path (a function, which may call a server)",
    "data.custom_cls": "a data set of your own is a generator: data.train_files=package.module:function",
    "data.datagen": "a data set of your own is a generator: data.train_files=package.module:function",
    "data.sampler.class_path": "use data.sampler=package.module.Class",
    "data.sampler.class_name": "use data.sampler=package.module.Class",
    ACTOR + "megatron": MEGATRON,
    REF + "megatron": MEGATRON,
    ACTOR + "checkpoint": "a checkpoint always holds everything that a resumed run needs",
    ACTOR + "fsdp_config.dtype": "use actor_rollout_ref.model.dtype",
    ROLLOUT + "engine_kwargs.vllm": VLLM,
    ROLLOUT + "agent": "use the tool loop; other loops are schedulers and custom generate functions",
    ROLLOUT + "multi_turn.completion_callback": "other loops are schedulers and custom generate functions",
    ROLLOUT + "max_num_batched_tokens": "it is vLLM's; with SGLang use engine_kwargs.max_prefill_tokens",
    MODEL + "override_config": "edit the model's config.json",
    "hydra": "verl_mt lets Hydra compose only; the run directory is trainer.default_local_dir",
    "ray_init": "start Ray as you need it before the run",
    "ray_kwargs": "start Ray as you need it before the run",
}
"""Key or prefix -> reason. The longest prefix counts."""
REFUSED |= critic_spellings.VERL_REFUSED | slime.REFUSED | swift.REFUSED
