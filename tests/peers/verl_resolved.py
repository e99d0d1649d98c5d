"""What verl itself resolves of a launch script, and the same numbers of a configuration of ours.

The script is run by bash with stand-ins for the programs that it starts; the words that reach `python` are composed by
plain Hydra over verl's own YAML files.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config

_MAINS = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
_STARTED = ("pip", "hf", "huggingface-cli", "ray", "docker", "sleep", "nvidia-smi", "curl", "git")


def words_of(text: str, cwd: Path, folder: Path, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """The words of every `python` that a shell starts for a script.

    Args:
        cwd: where the script is started.
        folder: empty; takes the stand-ins.
        variables: of the shell, beside HOME.
    """
    for name in ("python", "python3"):
        (folder / name).write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$(mktemp "$WORDS/words.XXXXXX")"\n')
        (folder / name).chmod(0o755)
    for name in _STARTED:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    for name in ("ray", "uv"):  # they hand their last words on to a python
        found = 'while [ $# -gt 0 ]; do case "$1" in python*) exec "$@";; esac; shift; done'
        (folder / name).write_text(f"#!/bin/bash\n{found}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/home/someone", "WORDS": str(folder), **(variables or {})}
    subprocess.run(["bash", "-c", text], cwd=cwd, env=env, capture_output=True, check=False)
    return [file.read_text().split("\0")[:-1] for file in sorted(folder.glob("words.*"))]


def split(words: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """The folder and the name of the YAML file, and the overrides behind `-m module`."""
    rest = list(words[2:])
    flags = {w.lstrip("-").partition("=")[0]: w.partition("=")[2] for w in rest if w.startswith("--")}
    return flags.get("config-path"), flags.get("config-name"), [w for w in rest if not w.startswith("--")]


@contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def verl_composes(script: Path, root: Path, folder: Path, variables: Mapping[str, str] | None = None) -> DictConfig:
    """verl's own configuration of a script, before interpolations are resolved.

    Args:
        root: a checkout of verl, or its part that is there.
        folder: empty; takes the stand-ins.
        variables: of the shell.
    """
    text = f"set -- ; function ulimit() {{ :; }}; source {script}"
    (words,) = [w for w in words_of(text, root, folder, variables) if w[0] == "-m" and w[1] in _MAINS]
    path, name, overrides = split(words)
    base = root / "verl/trainer/config"
    # Its files name verl's folder in the search path, from the root of the checkout.
    with _in(root), initialize_config_dir(str((base.parent / path) if path else base), version_base=None):
        return hydra_compose(name or "ppo_trainer", overrides)


def verl_resolves(script: Path, root: Path, folder: Path, variables: Mapping[str, str] | None = None) -> DictConfig:
    """verl's own configuration of a script. See `verl_composes` for the arguments."""
    tree = verl_composes(script, root, folder, variables)
    OmegaConf.resolve(tree)
    return tree


def _updates(tree: DictConfig) -> int:
    actor = tree.actor_rollout_ref.actor
    return tree.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs


def we_resolve(command: str, root: Path, folder: Path, variables: Mapping[str, str] | None = None) -> Config:
    """Our configuration of the command that `migrate` prints, run by a shell where the script would be."""
    (words,) = [w for w in words_of(command, root, folder, variables) if w[:2] == ["-m", "verl_mt.trainer"]]
    path, name, overrides = split(words)
    with _in(root):
        return compose(overrides, name, path)


def theirs(tree: DictConfig) -> dict[str, Any]:
    """What decides what is learned, by verl's own reading of its keys in its workers."""
    data, actor, rollout, algorithm = (
        tree.data,
        tree.actor_rollout_ref.actor,
        tree.actor_rollout_ref.rollout,
        tree.algorithm,
    )
    optim, turns, val = actor.optim, rollout.multi_turn, rollout.val_kwargs
    steps = optim.lr_warmup_steps
    in_agent_loop = turns.tool_config_path and rollout.mode == "async"
    reward = tree.get("custom_reward_function") or tree.reward.custom_reward_function
    return {
        "batch": data.train_batch_size,
        "mini-batch": actor.ppo_mini_batch_size,
        "epochs of a batch": actor.ppo_epochs,
        "order within a batch": actor.shuffle if actor.ppo_mini_batch_size < data.train_batch_size else None,
        "n": rollout.n,
        # fsdp_workers.py: the parameters of passes are in bfloat16 where the FSDP settings name no type.
        "types of passes and engine": (actor.fsdp_config.get("dtype") or "bfloat16", rollout.dtype),
        "estimator": algorithm.adv_estimator,
        "gamma, lambda": (algorithm.gamma, algorithm.lam),
        "scaled by std": algorithm.norm_adv_by_std_in_grpo,
        "learning rate": optim.lr,
        "schedule": optim.get("warmup_style") or optim.get("lr_scheduler_type") or "constant",
        "lowest rate": optim.get("min_lr_ratio") or 0.0,
        "warm-up": steps * _updates(tree) if steps is not None and steps >= 0 else 0,
        "warm-up ratio": 0.0 if steps is not None and steps >= 0 else optim.lr_warmup_steps_ratio,
        "weight decay": optim.weight_decay,
        "betas": list(optim.get("betas") or (0.9, 0.999)),
        "gradient": actor.grad_clip if optim.get("clip_grad") is None else optim.clip_grad,
        "KL in the loss": (actor.kl_loss_coef, actor.kl_loss_type) if actor.use_kl_loss else None,
        "KL in the reward": (algorithm.kl_ctrl.kl_coef, algorithm.kl_penalty) if algorithm.use_kl_in_reward else None,
        "entropy": actor.entropy_coeff,
        "clip": (
            actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            actor.clip_ratio_c,
        ),
        "aggregation": actor.loss_agg_mode,
        "temperature": rollout.temperature,
        "validation": (val.temperature if val.do_sample else 0.0, val.n, val.top_p),
        "lengths": (data.max_prompt_length, data.max_response_length),
        "overlong": (data.filter_overlong_prompts, data.truncation),
        "rows": (data.train_files, data.shuffle, data.get("seed")),
        "turns": (turns.enable, turns.max_assistant_turns, turns.max_user_turns),
        "calls of a turn": turns.max_parallel_calls if in_agent_loop else None,
        "format": turns.format,
        "tools": turns.tool_config_path,
        "interaction": turns.interaction_config_path,
        "sanity check": turns.tokenization_sanity_check_mode,
        "reward": (reward.path, reward.name if reward.path else None),
        "epochs": tree.trainer.total_epochs,
        "steps": tree.trainer.total_training_steps,
        "freq": (tree.trainer.test_freq, tree.trainer.save_freq, tree.trainer.val_before_train),
        "ranks": (tree.trainer.n_gpus_per_node, tree.trainer.nnodes),
    }  # fmt: skip


def ours(config: Config) -> dict[str, Any]:
    """The same of a configuration of ours."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    algorithm, optim, turns, val = config.algorithm, actor.optim, rollout.multi_turn, rollout.val_kwargs
    mini = actor.ppo_mini_batch_size or data.train_batch_size
    tools = rollout.tool_kwargs.tools_config_file
    return {
        "batch": data.train_batch_size,
        "mini-batch": mini,
        "epochs of a batch": actor.ppo_epochs,
        "order within a batch": actor.shuffle if mini < data.train_batch_size else None,
        "n": rollout.n,
        "types of passes and engine": (
            config.actor_rollout_ref.model.dtype,
            rollout.dtype or config.actor_rollout_ref.model.dtype,
        ),
        "estimator": algorithm.adv_estimator,
        "gamma, lambda": (algorithm.gamma, algorithm.lam),
        "scaled by std": algorithm.norm_adv_by_std_in_grpo,
        "learning rate": optim.lr,
        "schedule": optim.lr_scheduler_type,
        "lowest rate": optim.min_lr_ratio,
        "warm-up": optim.lr_warmup_steps,
        "warm-up ratio": optim.lr_warmup_steps_ratio,
        "weight decay": optim.weight_decay,
        "betas": optim.betas,
        "gradient": actor.grad_clip,
        "KL in the loss": (actor.kl_loss_coef, actor.kl_loss_type) if actor.use_kl_loss else None,
        "KL in the reward": (
            (algorithm.kl_ctrl.get("kl_coef", 0.001), algorithm.kl_penalty) if algorithm.use_kl_in_reward else None
        ),
        "entropy": actor.entropy_coeff,
        "clip": (
            actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            actor.clip_ratio_c,
        ),
        "aggregation": actor.loss_agg_mode,
        "temperature": rollout.temperature,
        "validation": (val.temperature, val.n, val.top_p),
        "lengths": (data.max_prompt_length, rollout.response_length),
        "overlong": (data.filter_overlong_prompts, data.truncation),
        "rows": (data.train_files, data.shuffle, None),
        "turns": (turns.enable, turns.max_assistant_turns, turns.max_user_turns),
        "calls of a turn": turns.max_parallel_calls,
        "format": turns.tool_parser,
        "tools": tools,
        "interaction": rollout.interaction_config_file,
        "sanity check": turns.tokenization_sanity_check_mode,
        "reward": (config.reward.path, config.reward.name),
        "epochs": config.trainer.total_epochs,
        "steps": config.trainer.total_training_steps,
        "freq": (config.trainer.test_freq, config.trainer.save_freq, config.trainer.val_before_train),
        "ranks": (config.trainer.n_workers_per_node, config.trainer.nnodes),
    }
