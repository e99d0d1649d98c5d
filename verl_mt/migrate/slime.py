"""slime's command: `python train.py`."""

from __future__ import annotations

import re

from verl_mt.config.normalize import split_argv
from verl_mt.config.spelling_tables import families
from verl_mt.migrate.launch import Launch, by_flag, override, parses
from verl_mt.plugins import suggest

SLIME_DEFAULTS = {
    "n_samples_per_prompt": "1",
    "lr": "1e-6",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
}
"""The same of slime, whose loss is a mean over samples unless `--calculate-per-token-loss`."""

_SLIME_DROPPED = {
    "tensor_model_parallel_size": "FSDP2 shards the model over the ranks; no result depends on it",
    "context_parallel_size": "a sequence lives on one rank; no result depends on it",
    "use_distributed_optimizer": "FSDP2 shards the optimizer's state",
    "wandb_key": "a secret; set WANDB_API_KEY in the environment that the run starts in",
    "wandb_team": "WANDB_ENTITY in the environment says it",
    "wandb_host": "WANDB_BASE_URL in the environment says it",
}


def read_slime(words: list[str], name: str, launch: Launch) -> None:
    known = families()["slime"].rows
    if name == "train_async.py":
        launch.notes.append("train_async.py: here a step trains on rollouts by its own weights")
    given = {flag.removeprefix("--").replace("-", "_"): values for flag, values in by_flag(words)}
    for key in _slime_settled(given, launch):
        del given[key]
    loss = "actor_rollout_ref.actor.loss_agg_mode"
    if given.pop("calculate_per_token_loss", None) is not None:
        launch.added.append(f"{loss}=token-mean # --calculate-per-token-loss")
        given[loss] = []
    for key, value in SLIME_DEFAULTS.items():
        if key not in given:
            launch.added.append(f"{key}={value} # slime's default")
    given.pop(loss, None)
    for key, values in given.items():
        if key == "eval_prompt_data" and len(values) > 1:
            values = ["[" + ",".join(values[1::2]) + "]"]  # slime gives a name before each file
        flag = "--" + key.replace("_", "-")
        if key not in known and not key.startswith("sglang_"):
            launch.refused.append(f"{flag}: no counterpart{suggest(key, known)}")
            continue
        _, [word, *more] = split_argv([flag, *values])
        if more and key.startswith("sglang_"):  # a list: --sglang-cuda-graph-bs 1 2 4
            name = "actor_rollout_ref.rollout.engine_kwargs." + key.removeprefix("sglang_")
            whole = all(re.fullmatch(r"-?\d+", value) for value in values)
            word = f"{name}=[{','.join(values)}]" if whole else override(name, values)
            more = []
        launch.overrides.append(override(key, values) if more or not parses(word) else word)


def _slime_settled(given: dict[str, list[str]], launch: Launch) -> list[str]:
    """Flags that mean something together with others; those that are settled by it."""
    settled = []
    first = {key: values[0] for key, values in given.items() if values}
    if "colocate" in given and "rollout_num_gpus" in given:
        launch.dropped.append("--rollout-num-gpus: with --colocate engines have the actor's GPUs")
        settled.append("rollout_num_gpus")
    if "load" in first and first["load"] == first.get("save"):
        launch.dropped.append("--load: the same command goes on from its newest checkpoint")
        settled.append("load")
    if "ref_load" in first and first["ref_load"].startswith(first.get("hf_checkpoint", "\n").rstrip("/")):
        launch.dropped.append("--ref-load: the reference policy is the model that training starts from")
        settled.append("ref_load")
    for key, why in _SLIME_DROPPED.items():
        if key in given:
            flag = " ".join(["--" + key.replace("_", "-"), *([] if key == "wandb_key" else given[key])])
            launch.dropped.append(f"{flag}: {why}")
            settled.append(key)
    if "eval_max_response_len" in given:
        launch.notes.append("--eval-max-response-len: validation has the limits of training (rollout.response_length)")
        settled.append("eval_max_response_len")
    if first.get("kl_coef") in ("0", "0.0", "0.00"):
        launch.dropped.append("--kl-coef 0: no penalty in the reward")
        settled.append("kl_coef")
    batch, n = (
        first.get("global_batch_size", ""),
        first.get("n_samples_per_prompt", SLIME_DEFAULTS["n_samples_per_prompt"]),
    )
    if batch.isdigit() and n.isdigit() and int(batch) % int(n) == 0:
        why = f"global batch of {batch} samples / {n} samples per prompt"
        launch.added.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={int(batch) // int(n)} # {why}")
        settled.append("global_batch_size")
    if betas := [key for key in ("adam_beta1", "adam_beta2") if key in first]:
        values = [first.get("adam_beta1", "0.9"), first.get("adam_beta2", "0.999")]
        launch.added.append(f"actor_rollout_ref.actor.optim.betas=[{','.join(values)}] # --adam-beta1, --adam-beta2")
        settled += betas
    return settled
