"""`python -m verl_mt.sft`: a cold start by supervised training on multi-turn conversations, or on your own rollouts.

    python -m verl_mt.sft --data demos.jsonl --out runs/cold actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
    python -m verl_mt.sft --data runs/tiny --min-reward 1 --out runs/again       # what it did right, once more
    python -m verl_mt.sft --data demos.jsonl --out runs/cold --config-path conf --config-name my_run
    python -m verl_mt.trainer --config-path conf --config-name my_run actor_rollout_ref.model.path=runs/cold/hf

A row has `messages` (and `tools`, which must be those of the run's tools file), or is a rollout that a run has written:
those are trained with the very ids that were sampled. The loss is the mean negative log-likelihood of what assistants
said, over the same template, masks and workers as RL. One optimizer step per `data.train_batch_size` conversations.
Ctrl-C writes the model as it is; with `trainer.save_freq` there are checkpoints in between, and the same command goes
on from the newest one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_mt.config.checks import refuse_idle_keys
from verl_mt.config.compose import config_of_command
from verl_mt.config.normalize import normalize_overrides, raise_problems, split_argv
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError, VerlMTError

DEFAULTS = (
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "actor_rollout_ref.actor.ppo_mini_batch_size=null",
    "trainer.total_epochs=1",
    "trainer.total_training_steps=null",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)
"""This command's own: what a configuration says of them is meant for RL. The command line may say otherwise."""
_READ = (
    "actor_rollout_ref.model.",
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.actor.ppo_max_token_len",
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.tool_kwargs.tools_config_file",
    "data.train_batch_size",
    "data.shuffle",
    "data.seed",
    "external_plugins",
    "trainer.deterministic",
    "trainer.device",
    "trainer.n_workers_per_node",
    "trainer.nnodes",
    "trainer.num_threads",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.placement",
    "trainer.save_freq",
    "trainer.seed",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
)
"""Keys that mean something here; any other is refused, not ignored."""
_READ_BY_ROLLOUTS = (
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in (
            "agent_function_path",
            "custom_generate_",
            "dtype",
            "engine_",
            "free_cache_engine",
            "gpu_memory_utilization",
            "interaction_config_file",
            "launch_servers",
            "max_",
            "mode",
            "multi_turn.",
            "n_workers_per_node",
            "name",
            "nnodes",
            "placement",
            "request_timeout_s",
            "response_length",
            "servers",
            "stop",
            "tensor_model_parallel_size",
            "update_weights_bucket_megabytes",
            "val_kwargs.",
            "weight_",
        )
    ),
    "data.filter_overlong_prompts",
    "data.label_key",
    "data.max_prompt_length",
    "data.prompt_key",
    "data.truncation",
    "data.val_",
    "reward.",
)
"""With `--rollouts` these do, too."""
_AGG = "actor_rollout_ref.actor.loss_agg_mode"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input (one line on stderr), 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_mt.sft",
        usage="%(prog)s --data FILE --out FOLDER [flags] [key=value ...]",
        description=__doc__.split("\n")[0],
        epilog=f"keys: {', '.join(key.rstrip('.') for key in _READ)}",
        allow_abbrev=False,
    )
    parser.add_argument("--data", required=True, help="parquet or JSONL file, or a run directory (its rollouts)")
    parser.add_argument("--val-data", help="the same, held out: its loss is reported, nothing is trained on it")
    parser.add_argument("--min-reward", type=float, help="of rollouts: train only on those with at least this reward")
    parser.add_argument(
        "--rollouts",
        action="store_true",
        help="measure the accuracy, too: sample the run's validation prompts (data.val_files) before the first step, "
        "every trainer.test_freq steps and at the end",
    )
    parser.add_argument("--stop-at-accuracy", type=float, help="with --rollouts: end when so many of them are right")
    parser.add_argument("--out", required=True, help="a new folder for config.yaml, metrics.jsonl and hf/")
    parser.add_argument("--config-name", "-cn", help="the run's YAML file (a name without .yaml, or a path)")
    parser.add_argument("--config-path", "-cp", help="folder of that file (default: the shipped config/)")
    parser.add_argument("--config-dir", "-cd", help="one more folder to search")
    args, words = parser.parse_known_args(argv)
    for flag in ("--config-name", "--config-path", "--config-dir"):
        value = getattr(args, flag[2:].replace("-", "_"))
        words = [flag, value, *words] if value is not None else words
    try:
        if args.stop_at_accuracy is not None and not (args.rollouts and 0 < args.stop_at_accuracy <= 1):
            raise ConfigError(f"--stop-at-accuracy {args.stop_at_accuracy}: a share in (0, 1], and it needs --rollouts")
        config = _config(args.data, words, rollouts=args.rollouts)
        if config is None:
            return 0
        from verl_mt.trainer import supervised  # after the config is known to be right: torch takes seconds

        if args.stop_at_accuracy is not None and config.trainer.test_freq <= 0:
            raise ConfigError("--stop-at-accuracy: trainer.test_freq=N says every how many steps it is measured")
        plan = supervised.Plan(
            args.data,
            Path(args.out).expanduser(),
            args.val_data,
            args.min_reward,
            args.rollouts,
            args.stop_at_accuracy,
        )
        return supervised.train(config, plan)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _config(data: str, words: list[str], *, rollouts: bool = False) -> Config | None:
    """The configuration of a command line; None where printing it was all that was asked for (`--cfg job`)."""
    flags, overrides = split_argv(words)
    read = (*_READ, *_READ_BY_ROLLOUTS) if rollouts else _READ
    _, outcome = normalize_overrides(overrides)
    raise_problems(outcome.problems)
    idle = [item.spelling for item in outcome.items if not item.key.startswith(read)]
    if idle:
        raise ConfigError(
            f"supervised training reads no {', '.join(idle)}; it reads {', '.join(key.rstrip('._') for key in read)}"
        )
    quoted = "'" + data.replace("'", "\\'") + "'"
    given = [*flags, *DEFAULTS, f"data.train_files={quoted}", *overrides]
    config = config_of_command(given, "ppo_trainer", "verl_mt.sft")
    if config is not None:
        refuse_idle_keys(config, among=read)
        _leave_out_rl(config, keeps_agg=any(item.key == _AGG for item in outcome.items))
    return config


def _leave_out_rl(config: Config, *, keeps_agg: bool) -> None:
    """What the file of a run says of its policy loss, its mini-batches and its advantages is meant for RL."""
    given, actor = config.actor_rollout_ref.actor, type(config.actor_rollout_ref.actor)()
    for name in ("optim", "ppo_max_token_len", "ppo_micro_batch_size", "grad_clip"):
        setattr(actor, name, getattr(given, name))
    actor.loss_agg_mode = given.loss_agg_mode if keeps_agg else "token-mean"
    config.actor_rollout_ref.actor = actor
    config.algorithm = type(config.algorithm)()


if __name__ == "__main__":
    sys.exit(main())
