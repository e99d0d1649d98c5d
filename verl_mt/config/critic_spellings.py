"""The critic in verl's and slime's spellings."""

from __future__ import annotations

from verl_mt.config.spelling import ACTOR, Always, Rename

CRITIC = "critic."
_PASSES = "passes for values are split like those of the update; only speed and memory depend on it"
_FSDP = "Hugging Face modules, sharded with FSDP2 over the ranks of trainer.placement=ray; there is no Megatron"
_AS_ACTOR = "the critic follows the actor's"
_STAYS = "the critic's parameters and optimizer state stay on the device"

VERL: dict[str, Rename] = {
    CRITIC + "ppo_micro_batch_size_per_gpu": Rename(CRITIC + "ppo_micro_batch_size"),
    CRITIC + "ppo_max_token_len_per_gpu": Rename(CRITIC + "ppo_max_token_len"),
    CRITIC + "optim.clip_grad": Rename(CRITIC + "grad_clip"),
    CRITIC + "optim.warmup_style": Rename(CRITIC + "optim.lr_scheduler_type"),
}

SLIME: dict[str, Rename] = {
    "gamma": Rename("algorithm.gamma"),
    "lambd": Rename("algorithm.lam"),
    "value_clip": Rename(CRITIC + "cliprange_value"),
    "critic_lr": Rename(CRITIC + "optim.lr"),
    "critic_lr_warmup_iters": Rename(CRITIC + "optim.lr_warmup_steps"),
    "critic_load": Rename(CRITIC + "model.path"),
    "num_critic_only_steps": Rename("trainer.critic_warmup"),
}

VERL_ALWAYS: dict[str, Always] = {
    CRITIC + "enable": Always((False, None), "the estimator decides: gae has a critic, the others have none"),
    CRITIC + "strategy": Always(("fsdp", "fsdp2"), _FSDP),
    CRITIC + "rollout_n": Always(None, "rows are counted, whatever their number per prompt"),
    CRITIC + "use_dynamic_bsz": Always(
        None, "batches are by tokens (ppo_max_token_len) unless ppo_micro_batch_size is set; only speed depends on it"
    ),
    CRITIC + "forward_micro_batch_size": Always(None, _PASSES),
    CRITIC + "forward_micro_batch_size_per_gpu": Always(None, _PASSES),
    CRITIC + "forward_max_token_len_per_gpu": Always(None, _PASSES),
    CRITIC + "shuffle": Always(None, f"{_AS_ACTOR}: {ACTOR}shuffle"),
    CRITIC + "ulysses_sequence_parallel_size": Always((1,), "a sequence lives on one rank"),
    CRITIC + "optim.total_training_steps": Always((-1, None), "the schedule runs over the run's own steps"),
    CRITIC + "optim.optimizer": Always(("AdamW",), "the optimizer is AdamW"),
    CRITIC + "model.tokenizer_path": Always(None, "the critic reads the policy's tokens"),
    CRITIC + "model.use_remove_padding": Always((True,), "padding never enters a result"),
    CRITIC + "model.use_shm": Always((False,), "the model is read where it is"),
    CRITIC + "model.enable_gradient_checkpointing": Always(None, f"{_AS_ACTOR}; only memory depends on it"),
    CRITIC + "model.trust_remote_code": Always(None, _AS_ACTOR),
    CRITIC + "model.external_lib": Always((None,), "use external_plugins"),
    CRITIC + "model.lora_rank": Always((0,), "a critic of its own trains all weights; share_trunk trains a head"),
    CRITIC + "model.fsdp_config.param_offload": Always((False,), _STAYS),
    CRITIC + "model.fsdp_config.optimizer_offload": Always((False,), _STAYS),
    CRITIC + "model.fsdp_config.offload_policy": Always((False,), _STAYS),
    CRITIC + "model.fsdp_config.fsdp_size": Always((-1,), "all ranks shard together"),
    CRITIC + "model.fsdp_config.forward_prefetch": Always(None, "only speed depends on it"),
    CRITIC + "model.fsdp_config.reshard_after_forward": Always(None, "only speed depends on it"),
    CRITIC + "checkpoint.save_contents": Always(None, "a checkpoint holds everything that a resumed run needs"),
    CRITIC + "checkpoint.load_contents": Always(None, "a resumed run needs all of it"),
    "trainer.max_critic_ckpt_to_keep": Always(None, "a checkpoint holds actor and critic: max_actor_ckpt_to_keep"),
}

VERL_REFUSED: dict[str, str] = {
    "critic.megatron": "there is no Megatron; " + _FSDP,
    "critic.model.override_config": "edit the model's config.json",
}
