"""Flags of slime's and ms-swift's launch scripts beside those of their multi-turn documents: optimizer, LoRA, logging,
and Megatron's description of a model, which is in its `config.json` here.

`slime_spellings` and `swift_spellings` take them into their tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl_mt.config.spelling import ACTOR, MODEL, ROLLOUT, Always, Rename

_LOG = "it changes a log only"
_SPEED = "only speed or memory depends on it"
_MODEL = "the model's config.json says it"
_NO_DROPOUT = "with dropout the policy that is trained would be another one than the one that sampled"
_SHARDED = "FSDP2 shards weights, gradients and optimizer state over the ranks (docs/scaling.md)"
_RANK, _ALPHA, _SWIFT_RANK, _SWIFT_ALPHA = MODEL + "lora_rank", MODEL + "lora_alpha", 8, 32
_COEF, _USE_KL = ACTOR + "kl_loss_coef", ACTOR + "use_kl_loss"
_ONE_RANK = "a sequence lives on one rank, and models are not split by layers or heads while training"


def _list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _trackers(value: Any) -> Any:
    names = [value] if isinstance(value, str) else list(value)
    known = {"wandb", "tensorboard", "mlflow", "none"}
    if other := sorted(set(names) - known):
        raise ValueError(f"{', '.join(other)}: expected wandb, tensorboard, mlflow or none; see trainer.logger")
    return ["console", *(name for name in names if name != "none")]


def _switch(logger: str) -> Any:
    return lambda on: ["console", logger] if on else ["console"]


def _decay(value: Any) -> Any:
    if value not in ("constant", "cosine", "linear"):
        raise ValueError("expected constant, cosine or linear")
    return value


def _no_warmup(value: Any) -> int:
    if value in (0, 0.0, None):
        return 0
    raise ValueError("give actor_rollout_ref.actor.optim.lr_warmup_steps in optimizer steps (ratio x total steps)")


def _aggregation(value: Any) -> Any:
    names = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean"}
    if value not in names:
        raise ValueError(f"expected {', '.join(names)}; see actor_rollout_ref.actor.loss_agg_mode and .policy_loss")
    return names[value]


def _level(value: Any) -> Any:
    levels = {"token": "vanilla", "sequence": "gspo"}
    if value not in levels:
        raise ValueError("expected token or sequence (which is gspo)")
    return levels[value]


def _scaled(value: Any) -> bool:
    if value in ("group", "none", True, False):
        return value in ("group", True)
    raise ValueError("expected group or none: advantages are scaled within their groups")


def _attention(value: Any) -> Any:
    return "flash_attention_2" if value in ("flash_attn", "flash_attention") else value


def _adapters(value: Any) -> int:
    if value not in ("full", "lora"):
        raise ValueError("expected full or lora")
    return _SWIFT_RANK if value == "lora" else 0


SLIME_RENAMES: dict[str, Rename] = {
    "lr_decay_style": Rename(ACTOR + "optim.lr_scheduler_type", _decay),
    "lr_warmup_iters": Rename(ACTOR + "optim.lr_warmup_steps"),
    "clip_grad": Rename(ACTOR + "grad_clip"),
    "rollout_stop": Rename(ROLLOUT + "stop", _list),
    "rollout_stop_token_ids": Rename(ROLLOUT + "stop_token_ids", _list),
    "rollout_seed": Rename("data.seed"),
    "use_wandb": Rename("trainer.logger", _switch("wandb")),
    "use_tensorboard": Rename("trainer.logger", _switch("tensorboard")),
    "wandb_project": Rename("trainer.project_name"),
    "wandb_group": Rename("trainer.experiment_name"),
    "apply_chat_template_kwargs": Rename(MODEL + "template_kwargs"),
}

SLIME_ALWAYS: dict[str, Always] = {
    "optimizer": Always(("adam",), "the optimizer is AdamW"),
    "attention_dropout": Always((0, 0.0), _NO_DROPOUT),
    "hidden_dropout": Always((0, 0.0), _NO_DROPOUT),
    "bf16": Always(None, "the weights' type is actor_rollout_ref.model.dtype"),
    "attention_backend": Always(None, "attention is actor_rollout_ref.model.attn_implementation"),
    "tensor_model_parallel_size": Always((1,), _ONE_RANK),
    "pipeline_model_parallel_size": Always((1,), _ONE_RANK),
    "context_parallel_size": Always((1,), _ONE_RANK),
    "expert_model_parallel_size": Always((1,), _ONE_RANK),
    "expert_tensor_parallel_size": Always((1,), _ONE_RANK),
    "sequence_parallel": Always(None, _SPEED),
    "optimizer_cpu_offload": Always(None, _SHARDED),
    "overlap_cpu_optimizer_d2h_h2d": Always(None, _SPEED),
    "use_precision_aware_optimizer": Always(None, _SPEED),
    "accumulate_allreduce_grads_in_fp32": Always(None, "gradients are reduced in float32"),
    "attention_softmax_in_fp32": Always(None, "transformers computes it so"),
    "recompute_granularity": Always(None, "it is actor_rollout_ref.model.enable_gradient_checkpointing"),
    "recompute_method": Always(None, _SPEED),
    "recompute_num_layers": Always(None, _SPEED),
    "num_gpus_per_node": Always(None, "ranks are trainer.n_workers_per_node"),
    "update_weight_buffer_size": Always(None, "it is rollout.update_weights_bucket_megabytes"),
    "disable_wandb_random_suffix": Always(None, _LOG),
} | {
    name: Always(None, _MODEL)
    for name in (
        "swiglu", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "group_query_attention", "use_rotary_position_embeddings", "disable_bias_linear", "add_qkv_bias",
        "normalization", "norm_epsilon", "rotary_base", "vocab_size", "kv_channels", "qk_layernorm",
        "untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "max_position_embeddings",
    )
}  # fmt: skip

SLIME_REFUSED: dict[str, str] = {
    "kl_coef": "a penalty in the reward is algorithm.use_kl_in_reward with algorithm.kl_ctrl.kl_coef",
    "eval_max_response_len": "validation has the limits of training (actor_rollout_ref.rollout.response_length)",
    "rollout_num_gpus": "engines elsewhere are actor_rollout_ref.rollout.launch_servers, or .servers",
    "adam_beta1": "use actor_rollout_ref.actor.optim.betas=[b1,b2]",
    "adam_beta2": "use actor_rollout_ref.actor.optim.betas=[b1,b2]",
    "num_steps_per_rollout": "use actor_rollout_ref.actor.ppo_mini_batch_size, which counts prompts",
    "sglang_router_ip": "servers are actor_rollout_ref.rollout.servers=[http://host:port]",
    "sglang_router_port": "servers are actor_rollout_ref.rollout.servers=[http://host:port]",
    "wandb_key": "a secret comes from the environment: WANDB_API_KEY",
    "use_critic": "algorithm.adv_estimator=gae brings a critic",
}

SLIME_SWITCHES = frozenset(
    {
        "use_wandb", "use_tensorboard", "bf16", "sequence_parallel", "optimizer_cpu_offload", "swiglu",
        "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer", "accumulate_allreduce_grads_in_fp32",
        "attention_softmax_in_fp32", "group_query_attention", "use_rotary_position_embeddings", "disable_bias_linear",
        "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "disable_wandb_random_suffix",
        "use_critic",
    }
)  # fmt: skip

SWIFT_RENAMES: dict[str, Rename] = {
    "torch_dtype": Rename(MODEL + "dtype"),
    "attn_impl": Rename(MODEL + "attn_implementation", _attention),
    "gradient_checkpointing": Rename(MODEL + "enable_gradient_checkpointing"),
    "train_type": Rename(_RANK, _adapters),
    "tuner_type": Rename(_RANK, _adapters),
    "lora_rank": Rename(_RANK),
    "lora_alpha": Rename(_ALPHA),
    "target_modules": Rename(MODEL + "lora_target_modules", _list),
    "warmup_steps": Rename(ACTOR + "optim.lr_warmup_steps"),
    "warmup_ratio": Rename(ACTOR + "optim.lr_warmup_steps", _no_warmup),
    "lr_scheduler_type": Rename(ACTOR + "optim.lr_scheduler_type", _decay),
    "num_iterations": Rename(ACTOR + "ppo_epochs"),
    "loss_type": Rename(ACTOR + "loss_agg_mode", _aggregation),
    "importance_sampling_level": Rename(ACTOR + "policy_loss.loss_mode", _level),
    "beta": Rename(_COEF),
    "scale_rewards": Rename("algorithm.norm_adv_by_std_in_grpo", _scaled),
    "report_to": Rename("trainer.logger", _trackers),
    "run_name": Rename("trainer.experiment_name"),
    "stop_words": Rename(ROLLOUT + "stop", _list),
}

SWIFT_ALWAYS: dict[str, Always] = {
    "deepspeed": Always(None, _SHARDED),
    "lora_dropout": Always((0, 0.0), _NO_DROPOUT),
    "repetition_penalty": Always((1, 1.0), "log-probs are of the model's own distribution"),
    "split_dataset_ratio": Always((0, 0.0), "validation data is data.val_files"),
    "log_completions": Always(None, "every trajectory is in rollouts/*.jsonl"),
    "use_hf": Always(None, "models are local folders or names on the Hugging Face hub"),
    "logging_steps": Always(None, "every step is logged"),
    "dataloader_num_workers": Always(None, _SPEED),
    "dataset_num_proc": Always(None, _SPEED),
    "load_from_cache_file": Always(None, _SPEED),
    "vllm_enforce_eager": Always(None, "it is vLLM's; with SGLang use engine_kwargs.disable_cuda_graph"),
    "vllm_enable_prefix_caching": Always((True,), "each sequence keeps its cache across its turns"),
    "sleep_level": Always(None, "it is actor_rollout_ref.rollout.free_cache_engine"),
    "offload_optimizer": Always(None, _SPEED),
    "offload_model": Always(None, _SPEED),
    "gc_collect_after_offload": Always(None, _SPEED),
    "move_model_batches": Always(None, _SPEED),
    "vllm_limit_mm_per_prompt": Always(None, "a row's images are counted by data, not by the engine"),
    "eval_strategy": Always(None, "it is trainer.test_freq"),
    "save_strategy": Always(None, "it is trainer.save_freq"),
    "save_only_model": Always((False,), "a checkpoint always holds everything that a resumed run needs"),
    "ddp_backend": Always(None, _SPEED),
}

SWIFT_REFUSED: dict[str, str] = {
    "per_device_eval_batch_size": "use data.val_batch_size, which counts prompts",
    "generation_batch_size": "it counts samples; use data.train_batch_size, which counts prompts",
    "steps_per_generation": "use actor_rollout_ref.actor.ppo_mini_batch_size",
    "delta": "use actor_rollout_ref.actor.clip_ratio_c, which bounds negative advantages",
    "reward_model_plugin": "a reward model is a server that reward.path asks",
    "vllm_data_parallel_size": "use actor_rollout_ref.rollout.launch_servers",
    "adapters": "a run starts with new adapters; merge older ones into actor_rollout_ref.model.path",
    "resume_from_checkpoint": "use trainer.resume_mode=resume_path and trainer.resume_from_path",
    "model_type": "the model's config.json says it",
    "async_generate": "every rollout is by the weights of its own step",
    "teacher_model": "distillation is not offered",
    "use_gym_env": "environments are schedulers: actor_rollout_ref.rollout.multi_turn.scheduler=gym_scheduler",
}


def settle(items: list[Any]) -> list[Any]:
    """ms-swift's `--beta` switches the KL loss; `--train_type lora` brings its rank and alpha where none is given."""
    beta = next((item for item in items if item.spelling == "beta"), None)
    if beta is not None and not any(item.key == _USE_KL for item in items):
        items = [*items, replace(beta, key=_USE_KL, value=bool(beta.value))]
    kinds = [item for item in items if item.spelling in ("train_type", "tuner_type")]
    adapters = [item for item in kinds if item.value]
    ranks = [item for item in items if item.key == _RANK and item not in kinds]
    if kinds and ranks:
        # Beside `full` a rank has no meaning, as in ms-swift.
        items = [item for item in items if item not in (kinds if adapters else ranks)]
    if adapters and not any(item.key == _ALPHA for item in items):
        items = [*items, replace(adapters[0], key=_ALPHA, value=_SWIFT_ALPHA)]
    return items
