"""ms-swift's flags: as `--flag value` on our command line, or as `flag=value`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verl_mt.config import correction_spellings, launch_spellings
from verl_mt.config.spelling import ACTOR, MODEL, ROLLOUT, Always, Rename


def _mode(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return "async" if value else "sync"


def _one_reward(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError("one reward scores a trajectory; write one that calls the others, and returns their numbers")
    return names[0]


RENAMES: dict[str, Rename] = {
    "model": Rename(MODEL + "path"),
    "dataset": Rename("data.train_files"),
    "val_dataset": Rename("data.val_files"),
    "max_length": Rename("data.max_prompt_length"),
    "max_completion_length": Rename(ROLLOUT + "response_length"),
    "num_generations": Rename(ROLLOUT + "n"),
    "temperature": Rename(ROLLOUT + "temperature"),
    "top_p": Rename(ROLLOUT + "top_p"),
    "top_k": Rename(ROLLOUT + "top_k"),
    "multi_turn_scheduler": Rename(ROLLOUT + "multi_turn.scheduler"),
    "max_turns": Rename(ROLLOUT + "multi_turn.max_assistant_turns"),
    "multi_turns": Rename(ROLLOUT + "multi_turn.max_assistant_turns"),
    "loss_scale": Rename(ROLLOUT + "multi_turn.loss_scale"),
    "use_async_engine": Rename(ROLLOUT + "mode", _mode),
    "vllm_use_async_engine": Rename(ROLLOUT + "mode", _mode),
    "vllm_max_model_len": Rename(ROLLOUT + "max_model_len"),
    "vllm_gpu_memory_utilization": Rename(ROLLOUT + "gpu_memory_utilization"),
    "vllm_tensor_parallel_size": Rename(ROLLOUT + "tensor_model_parallel_size"),
    "reward_funcs": Rename("reward.path", _one_reward),
    "learning_rate": Rename(ACTOR + "optim.lr"),
    "epsilon": Rename(ACTOR + "clip_ratio"),
    "epsilon_high": Rename(ACTOR + "clip_ratio_high"),
    "max_grad_norm": Rename(ACTOR + "grad_clip"),
    "num_train_epochs": Rename("trainer.total_epochs"),
    "max_steps": Rename("trainer.total_training_steps"),
    "eval_steps": Rename("trainer.test_freq"),
    "save_steps": Rename("trainer.save_freq"),
    "save_total_limit": Rename("trainer.max_actor_ckpt_to_keep"),
    "output_dir": Rename("trainer.default_local_dir"),
    "dynamic_sample": Rename("algorithm.filter_groups.enable"),
    "max_resample_times": Rename("algorithm.filter_groups.max_num_gen_batches", lambda times: times + 1),
    "overlong_filter": Rename("algorithm.filter_overlong"),
    "soft_cache_length": Rename("reward.overlong_buffer.len"),
}
RENAMES |= correction_spellings.SWIFT | launch_spellings.SWIFT_RENAMES

_ENGINE = "the engine is actor_rollout_ref.rollout.name (sglang, or local in this process)"

ALWAYS: dict[str, Always] = {
    "rlhf_type": Always(("grpo",), "algorithm.adv_estimator names the algorithm"),
    "vllm_server_pass_dataset": Always((True,), "a scheduler always gets the other columns in infer_request.data_dict"),
    "use_vllm": Always((True,), _ENGINE),
    "vllm_mode": Always(
        ("colocate",),
        "the engine lives beside the actor; for servers set actor_rollout_ref.rollout.launch_servers, or .servers",
    ),
} | launch_spellings.SWIFT_ALWAYS

REFUSED: dict[str, str] = {
    "vllm_server_host": "use actor_rollout_ref.rollout.servers=[http://host:port]",
    "vllm_server_port": "use actor_rollout_ref.rollout.servers=[http://host:port]",
    "vllm_server_base_url": "use actor_rollout_ref.rollout.servers=[URL]",
    "per_device_train_batch_size": "it counts samples of a rank; use data.train_batch_size, which counts prompts",
    "gradient_accumulation_steps": "batches are cut by tokens (actor_rollout_ref.actor.ppo_max_token_len); a step's "
    "size is data.train_batch_size and actor_rollout_ref.actor.ppo_mini_batch_size",
    "reward_weights": "one reward scores a trajectory; it may return several numbers beside its score",
    "system": "the system message stands in the rows",
} | launch_spellings.SWIFT_REFUSED


def with_flags_as_overrides(argv: Sequence[str]) -> list[str]:
    """`--max_turns 3` as `max_turns=3`, `--external_plugins a.py b.py` as a list; a flag without a value is True.

    What is no flag of ms-swift's stays as it is.
    """
    words, known = list(argv), {*RENAMES, *ALWAYS, *REFUSED, "external_plugins"}
    out: list[str] = []
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key not in known:
            out.append(word)
            continue
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("-") and "=" not in words[0]:
            values.append(words.pop(0))
        text = "True" if not values else values[0] if len(values) == 1 else json.dumps(values)
        out.append(f"{key}={text}")
    return out
