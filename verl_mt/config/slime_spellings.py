"""slime's flags: as `--flag value` on our command line, or as `flag=value` with underscores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_mt.config import correction_spellings, critic_spellings, launch_spellings
from verl_mt.config.spelling import ACTOR, DROP, MODEL, ROLLOUT, Always, Rename


def _mode(mode: str) -> Any:
    def convert(value: Any) -> Any:
        return mode if value else DROP

    return convert


def _estimator(value: Any) -> Any:
    if value == "gspo":
        raise ValueError(
            "GSPO is a loss here, over GRPO's advantages: actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
        )
    return {"ppo": "gae"}.get(value, value) if isinstance(value, str) else value


def _group_filter(path: Any) -> Any:
    if path is None:
        return DROP
    if str(path).rpartition(".")[2] != "check_reward_nonzero_std":
        raise ValueError(
            "only check_reward_nonzero_std has a counterpart: groups whose rewards are all equal are replaced "
            "(algorithm.filter_groups.enable=True); another filter is algorithm.filter_groups.metric"
        )
    return True


RENAMES: dict[str, Rename] = {
    "hf_checkpoint": Rename(MODEL + "path"),
    "prompt_data": Rename("data.train_files"),
    "eval_prompt_data": Rename("data.val_files"),
    "input_key": Rename("data.prompt_key"),
    "label_key": Rename("data.label_key"),
    "apply_chat_template": Rename("data.apply_chat_template"),
    "rollout_batch_size": Rename("data.train_batch_size"),
    "rollout_max_prompt_len": Rename("data.max_prompt_length"),
    "rollout_shuffle": Rename("data.shuffle"),
    "n_samples_per_prompt": Rename(ROLLOUT + "n"),
    "rollout_max_response_len": Rename(ROLLOUT + "response_length"),
    "rollout_max_context_len": Rename(ROLLOUT + "max_model_len"),
    "rollout_temperature": Rename(ROLLOUT + "temperature"),
    "rollout_top_p": Rename(ROLLOUT + "top_p"),
    "rollout_top_k": Rename(ROLLOUT + "top_k"),
    "rollout_num_gpus_per_engine": Rename(ROLLOUT + "tensor_model_parallel_size"),
    "sglang_mem_fraction_static": Rename(ROLLOUT + "gpu_memory_utilization"),
    "custom_generate_function_path": Rename(ROLLOUT + "custom_generate_function_path"),
    "custom_rm_path": Rename("reward.path"),
    "n_samples_per_eval_prompt": Rename(ROLLOUT + "val_kwargs.n"),
    "eval_temperature": Rename(ROLLOUT + "val_kwargs.temperature"),
    "eval_top_p": Rename(ROLLOUT + "val_kwargs.top_p"),
    "eval_top_k": Rename(ROLLOUT + "val_kwargs.top_k"),
    "eval_interval": Rename("trainer.test_freq"),
    "num_rollout": Rename("trainer.total_training_steps"),
    "num_epoch": Rename("trainer.total_epochs"),
    "save": Rename("trainer.default_local_dir"),
    "save_interval": Rename("trainer.save_freq"),
    "seed": Rename("trainer.seed"),
    "actor_num_nodes": Rename("trainer.nnodes"),
    "actor_num_gpus_per_node": Rename("trainer.n_workers_per_node"),
    "advantage_estimator": Rename("algorithm.adv_estimator", _estimator),
    "lr": Rename(ACTOR + "optim.lr"),
    "weight_decay": Rename(ACTOR + "optim.weight_decay"),
    "eps_clip": Rename(ACTOR + "clip_ratio"),
    "eps_clip_high": Rename(ACTOR + "clip_ratio_high"),
    "entropy_coef": Rename(ACTOR + "entropy_coeff"),
    "use_kl_loss": Rename(ACTOR + "use_kl_loss"),
    "kl_loss_coef": Rename(ACTOR + "kl_loss_coef"),
    "kl_loss_type": Rename(ACTOR + "kl_loss_type"),
    "max_tokens_per_gpu": Rename(ACTOR + "ppo_max_token_len"),
    "save_debug_rollout_data": Rename("trainer.debug_rollout_data"),
    "trainer.save_debug_rollout_data": Rename("trainer.debug_rollout_data"),
    "debug_rollout_only": Rename("trainer.debug_mode", _mode("rollout_only")),
    "trainer.debug_rollout_only": Rename("trainer.debug_mode", _mode("rollout_only")),
    "debug_train_only": Rename("trainer.debug_mode", _mode("train_only")),
    "dynamic_sampling_filter_path": Rename("algorithm.filter_groups.enable", _group_filter),
}
RENAMES |= correction_spellings.SLIME | launch_spellings.SLIME_RENAMES
RENAMES |= critic_spellings.SLIME

_LOAD = "use trainer.debug_rollout_data=PATH with trainer.debug_mode=train_only"
_SPEED = "only speed or memory depends on it"

ALWAYS: dict[str, Always] = {
    "metadata_key": Always(("metadata",), "the metadata column is called metadata"),
    "colocate": Always(
        (True,), "the engine lives beside the actor; for servers elsewhere name them in rollout.servers"
    ),
    "use_dynamic_batch_size": Always(None, _SPEED),
    "balance_data": Always(None, "it moves sequences between ranks and changes no result"),
    "rollout_skip_special_tokens": Always((False,), "sampling_params.skip_special_tokens decides request by request"),
    "rewards_normalization": Always((True,), "GRPO compares the rewards of a group"),
} | launch_spellings.SLIME_ALWAYS

REFUSED: dict[str, str] = {
    "load_debug_rollout_data": _LOAD,
    "trainer.load_debug_rollout_data": _LOAD,
    "tool_key": "a row's tools are in its metadata (sample.metadata['tools']), or extra_info.tool_selection names them",
    "multimodal_keys": "images and videos are in the columns of these names (docs/multimodal.md)",
    "rm_type": "use reward.path (a registered name, file.py:name or a dotted path), or the rows' data_source",
    "custom_config_path": "use actor_rollout_ref.rollout.custom_generate_kwargs={name:value,...}",
    "global_batch_size": "it counts samples; use actor_rollout_ref.actor.ppo_mini_batch_size, which counts prompts",
    "rollout_function_path": "a whole rollout cannot be replaced; use custom_generate_function_path, or a scheduler",
    "partial_rollout": "every rollout is finished before its step",
    "over_sampling_batch_size": "a step samples as many further prompts as algorithm.filter_groups needs",
    "group_rm": "a reward function whose second parameter is `samples` gets the group",
    "load": "use trainer.resume_mode=resume_path and trainer.resume_from_path, or give the same command again",
    "ref_load": "the reference policy is the model that training starts from",
} | launch_spellings.SLIME_REFUSED


_SWITCHES = launch_spellings.SLIME_SWITCHES | frozenset(
    {
        "apply_chat_template", "balance_data", "colocate", "debug_rollout_only", "debug_train_only", "group_rm",
        "partial_rollout", "rewards_normalization", "rollout_shuffle", "rollout_skip_special_tokens",
        "use_dynamic_batch_size", "use_kl_loss", "use_opsm", "use_tis",
    }
)  # fmt: skip
"""Flags that take no value."""


def with_flags_as_overrides(argv: Sequence[str]) -> list[str]:
    """slime's `--rollout-batch-size 32` as `rollout_batch_size=32`; a switch (`--use-tis`) is True. All else stays."""
    words, known = list(argv), {*RENAMES, *ALWAYS, *REFUSED}
    out: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if word.startswith("--sglang-") and key not in known:
            # slime hands these to the engine under SGLang's own names.
            text = value if equals else "True" if not words or words[0].startswith("--") else words.pop(0)
            out.append(f"{ROLLOUT}engine_kwargs.{key.removeprefix('sglang_')}={text}")
        elif not word.startswith("--") or "." in key or key not in known:
            out.append(word)
        elif equals:
            out.append(f"{key}={value}")
        elif key in _SWITCHES or not words:
            out.append(f"{key}=True")
        else:
            out.append(f"{key}={words.pop(0)}")
    return out
