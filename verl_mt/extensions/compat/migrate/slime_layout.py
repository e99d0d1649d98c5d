"""What slime's command says of Megatron: how a computation is laid out, which is dropped, and what changes it."""

from __future__ import annotations

import re
from typing import Protocol

from verl_mt.extensions.compat.migrate.launch import Launch

DROPPED = {
    "tensor_model_parallel_size": "FSDP2 shards the model over the ranks; no result depends on it",
    "context_parallel_size": "a sequence lives on one rank; no result depends on it",
    "expert_model_parallel_size": "FSDP2 shards experts like all weights; no result depends on it",
    "expert_tensor_parallel_size": "FSDP2 shards experts like all weights; no result depends on it",
    "pipeline_model_parallel_size": "FSDP2 shards the model over the ranks; no result depends on it",
    "use_distributed_optimizer": "FSDP2 shards the optimizer's state",
    "wandb_key": "a secret; set WANDB_API_KEY in the environment that the run starts in",
    "wandb_team": "WANDB_ENTITY in the environment says it",
    "wandb_host": "WANDB_BASE_URL in the environment says it",
    "wandb_mode": "WANDB_MODE in the environment says it",
    "wandb_dir": "WANDB_DIR in the environment says it",
    "wandb_run_id": "WANDB_RUN_ID in the environment says it",
}
_NEEDED = {
    "enable_mtp_training": "the layers that predict further tokens are trained",
    "fp8_format": "weights are multiplied in FP8",
    "fp8_recipe": "weights are multiplied in FP8",
    "fp4_format": "weights are multiplied in FP4",
    "use_routing_replay": "experts are chosen again as they were",
    "use_rollout_routing_replay": "experts are chosen as the engine chose them",
    "custom_model_provider_path": "a custom function makes the Megatron model",
    "megatron_config_path": "roles have separate Megatron settings",
}
_NONZERO = {
    "moe_aux_loss_coeff": "a loss balances the experts",
    "moe_z_loss_coeff": "a loss keeps the router's logits small",
    "moe_router_bias_update_rate": "the router's bias is moved besides the gradient",
}


class Given(Protocol):
    """The flags of a command; `migrate.slime.Flags`."""

    launch: Launch
    left: dict[str, list[str]]

    def __contains__(self, key: str) -> bool: ...
    def first(self, key: str) -> str | None: ...
    def number(self, key: str) -> float | None: ...
    def drop(self, key: str, why: str) -> None: ...


def settle_layout(flags: Given) -> bool:
    """Drops what only lays a computation out; True where the command needs Megatron, which is said in one reason."""
    launch = flags.launch
    needs = [f"{why} (--{key.replace('_', '-')})" for key, why in _NEEDED.items() if key in flags]
    needs += [f"{why} (--{key.replace('_', '-')})" for key, why in _NONZERO.items() if flags.number(key)]
    if "moe_router_enable_expert_bias" in flags and "moe_router_bias_update_rate" not in flags:
        needs.append("the router's bias is moved besides the gradient (--moe-router-enable-expert-bias alone)")
    stages, experts = flags.number("pipeline_model_parallel_size"), flags.number("expert_model_parallel_size")
    if (stages or 1) > 1 and ((experts or 1) > 1 or "num_experts" in flags):
        needs.append(
            f"a mixture of experts is split by its layers (--pipeline-model-parallel-size {stages:g}) and its experts: "
            "FSDP2, which gathers a layer's experts on each rank, was not tried with models of that size"
        )
    if re.search(r"FAKE_QAT_FLAG\W+1", " ".join(launch.wrapper)):
        needs.append("weights are rounded to int4 in training (OPEN_TRAINING_INT4_FAKE_QAT_FLAG)")
    if needs:
        launch.refused.append(f"it needs Megatron: {'; '.join(needs)}")
        return True
    _dropout(flags)
    for key in ("recompute_granularity", "gradient_checkpointing"):
        if key not in flags:
            continue
        why = "--" + key.replace("_", "-")
        flags.left.pop("gradient_checkpointing", None)
        launch.added.append(f"actor_rollout_ref.model.enable_gradient_checkpointing=True # {why}")
    parallel = flags.number("context_parallel_size")
    if parallel and parallel > 1 and "custom_generate_function_path" in flags:
        # A generate function may compute a limit from it.
        launch.overrides.append(
            f"++actor_rollout_ref.rollout.custom_generate_kwargs.context_parallel_size={parallel:g}"
        )
    if flags.first("attn_implementation") == "flash_attention_3":
        flags.left["attn_implementation"] = ["flash_attention_2"]
    for key, why in DROPPED.items():
        flags.drop(key, why)
    return False


def _dropout(flags: Given) -> None:
    silent = [key for key in ("attention_dropout", "hidden_dropout") if key not in flags]
    if silent and flags.first("train_backend") != "fsdp":
        named = " and ".join(key.replace("_", " ") for key in silent)
        flags.launch.changed.append(
            f"{named}: Megatron's default is 0.1, and the command does not say 0; there is none here, so that the "
            "policy that is trained is the one that sampled"
        )
