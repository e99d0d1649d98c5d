"""`python -m verl_mt.sft`: train a model on conversations before RL (cold start).

    python -m verl_mt.sft --data demos.jsonl --config-path conf --config-name my_run         # writes runs/my_run-sft
    python -m verl_mt.trainer --config-path conf --config-name my_run actor_rollout_ref.model.path=runs/my_run-sft/hf
    python -m verl_mt.sft --data demos.jsonl --out runs/cold actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
    python -m verl_mt.sft --data runs/tiny --min-reward 1 --out runs/again       # what it did right, once more

A row has `messages` (and `tools`, which must be those of the run's tools file), or is a rollout that a run has written:
those are trained with the very ids that were sampled. The loss is the mean negative log-likelihood of what assistants
said, over the same template, masks and workers as RL. One optimizer step per `data.train_batch_size` conversations.
Where the configuration has validation prompts (`data.val_files`), they are sampled as the trainer samples them: before
the first step, every `trainer.test_freq` steps (or every epoch) and at the end. Ctrl-C ends with a checkpoint, and the
same command goes on from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import Command, config_of_command
from verl_mt.config.normalize import raise_problems
from verl_mt.config.schema import Config, TrainerConfig
from verl_mt.errors import ConfigError, VerlMTError

DEFAULTS = (
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "actor_rollout_ref.actor.ppo_mini_batch_size=null",
    "trainer.total_epochs=1",
    "trainer.total_training_steps=null",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.val_before_train=true",
)
"""This command's own: what a configuration says of them is meant for RL. The command line may say otherwise."""
_LAYOUT = (
    "fsdp_size",
    "ulysses_sequence_parallel_size",
    "optimizer_offload",
    "share_prefixes",
)
"""Of the actor's section: how the ranks hold the policy and share rows."""
_READ = (
    "actor_rollout_ref.model.",
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.actor.ppo_max_token_len",
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.grad_clip",
    *(f"actor_rollout_ref.actor.{name}" for name in _LAYOUT),
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.rollout.environment.",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.tool_kwargs.tools_config_file",
    "data.train_batch_size",
    "data.shuffle",
    "data.seed",
    "data.system",
    "external_plugins",
    "trainer.default_local_dir",
    "trainer.deterministic",
    "trainer.device",
    "trainer.experiment_name",
    "trainer.log_val_generations",
    "trainer.logger",
    "trainer.n_workers_per_node",
    "trainer.nnodes",
    "trainer.num_threads",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.placement",
    "trainer.progress",
    "trainer.project_name",
    "trainer.rollout_rows",
    "trainer.save_freq",
    "trainer.seed",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
    "trainer.worker_timeout_s",
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
            "trace.",
            "update_weights_bucket_megabytes",
            "val_kwargs.",
            "weight_",
        )
    ),
    "actor_rollout_ref.actor.param_offload",
    "data.filter_overlong_prompts",
    "data.label_key",
    "data.max_prompt_length",
    "data.prompt_key",
    "data.truncation",
    "data.val_",
    "reward.",
)
"""With rollouts these do, too."""
_AGG = "actor_rollout_ref.actor.loss_agg_mode"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input (one line on stderr), 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_mt.sft",
        usage="%(prog)s --data FILE [flags] [key=value ...]",
        description=__doc__.split("\n")[0],
        epilog=f"keys: {', '.join(key.rstrip('.') for key in _READ)}; with rollouts also the validation's",
        allow_abbrev=False,
    )
    parser.add_argument("--data", required=True, help="parquet or JSONL file, or a run directory (its rollouts)")
    parser.add_argument("--val-data", help="the same, held out: its loss is reported, nothing is trained on it")
    parser.add_argument("--min-reward", type=float, help="of rollouts: train only on those with at least this reward")
    parser.add_argument(
        "--rollouts",
        action=argparse.BooleanOptionalAction,
        help="measure the accuracy by rollouts of data.val_files; default: where the configuration names such a file",
    )
    parser.add_argument("--stop-at-accuracy", type=float, help="end when this share of the rollouts is right")
    parser.add_argument(
        "--out", help="the run directory, a new folder or one that goes on; default: runs/<experiment of the file>-sft"
    )
    parser.add_argument("--config-name", "-cn", help="the run's YAML file (a name without .yaml, or a path)")
    parser.add_argument("--config-path", "-cp", help="folder of that file (default: the shipped config/)")
    parser.add_argument("--config-dir", "-cd", help="one more folder to search")
    args, words = parser.parse_known_args(argv)
    for flag in ("--config-name", "--config-path", "--config-dir"):
        value = getattr(args, flag[2:].replace("-", "_"))
        words = [flag, value, *words] if value is not None else words
    try:
        config = config_of(args.data, words, rollouts=args.rollouts)
        if config is None:
            return 0
        rollouts = has_rollouts(config, args.rollouts)
        from verl_mt.extensions.supervised import training  # after the config is known to be right: torch takes seconds

        out = None if args.out is None else Path(args.out).expanduser()
        plan = training.Plan(args.data, out, args.val_data, args.min_reward, rollouts, args.stop_at_accuracy)
        return training.train(config, plan)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # before the first step, or pressed twice; once ends with a checkpoint
        print("interrupted", file=sys.stderr)
        return getattr(error, "exit_status", 130)


def fine_tune(
    data: str,
    words: list[str],
    out: Path,
    *,
    val_data: str | None = None,
    min_reward: float | None = None,
    stop_at_accuracy: float | None = None,
) -> int:
    """The command as a call of Python's: `verl_mt.fine_tune`. Returns the exit status."""
    config = config_of(data, words)
    assert config is not None  # nobody asked to print it
    from verl_mt.extensions.supervised import training

    plan = training.Plan(data, out, val_data, min_reward, has_rollouts(config, None), stop_at_accuracy)
    return training.train(config, plan)


def config_of(data: str, words: list[str], *, rollouts: bool | None = None) -> Config | None:
    """The configuration of a supervised training.

    Args:
        data: what is trained on, for its `config.yaml`.
        words: Hydra's flags and overrides, as the trainer's command takes them.
        rollouts: whether the accuracy is measured; None = where the configuration has `data.val_files`.

    Returns:
        None where printing it was all that was asked for (`--cfg job`).

    Raises:
        UnknownKeyError, ConfigError: everything that is wrong; also an override that means nothing here.
    """
    command = Command(words, "ppo_trainer", "verl_mt.sft")
    plan = command.one_plan()
    raise_problems(plan.composition.problems)
    keys = {item.key: item.alias for item in plan.given.items}
    _refuse_unread(keys, _READ if rollouts is False else (*_READ, *_READ_BY_ROLLOUTS))
    quoted = "'" + data.replace("'", "\\'") + "'"
    given = [*DEFAULTS, f"data.train_files={quoted}", *words]
    config = config_of_command(given, "ppo_trainer", "verl_mt.sft")
    if config is not None:
        read = (*_READ, *_READ_BY_ROLLOUTS) if has_rollouts(config, rollouts) else _READ
        _refuse_unread(keys, read)
        reject_unused_keys(config, among=read)
        _leave_out_rl(config, keeps_agg=_AGG in keys)
        _name_apart(config.trainer, keys | {word.lstrip("+").partition("=")[0]: word for word in command.overrides})
    return config


def has_rollouts(config: Config, wanted: bool | None) -> bool:
    """Whether the accuracy is measured; `wanted` None = where there are prompts for it."""
    return config.data.val_files is not None if wanted is None else wanted


def _refuse_unread(keys: Mapping[str, str], read: tuple[str, ...]) -> None:
    """`keys`: name -> as the user spelled it."""
    idle = {key: alias for key, alias in keys.items() if not key.startswith(read)}
    if not idle:
        return
    without = " without rollouts (data.val_files)" if all(key.startswith(_READ_BY_ROLLOUTS) for key in idle) else ""
    raise ConfigError(
        f"supervised training{without} reads no {', '.join(idle.values())}. It reads "
        f"{', '.join(key.rstrip('._') for key in read)}"
    )


def _name_apart(trainer: TrainerConfig, keys: Collection[str]) -> None:
    """The directory that the file of a run names is the run's: this training has one beside it."""
    if not {"trainer.experiment_name", "trainer.default_local_dir", "hydra.run.dir"} & set(keys):
        trainer.experiment_name += "-sft"
        if trainer.default_local_dir is not None:
            trainer.default_local_dir = trainer.default_local_dir.rstrip("/") + "-sft"


def _leave_out_rl(config: Config, *, keeps_agg: bool) -> None:
    """What the file of a run says of its policy loss, its mini-batches, its advantages and its sampling is meant for
    RL."""
    given, actor = config.actor_rollout_ref.actor, type(config.actor_rollout_ref.actor)()
    for name in ("optim", "ppo_max_token_len", "ppo_micro_batch_size", "grad_clip", *_LAYOUT, "param_offload"):
        setattr(actor, name, getattr(given, name))
    actor.loss_agg_mode = given.loss_agg_mode if keeps_agg else "token-mean"
    config.actor_rollout_ref.actor = actor
    # A policy loss is of log-probs at the temperature that was sampled at. Cross-entropy at that one would give a
    # policy that is as uncertain there as it should be at 1.
    config.actor_rollout_ref.rollout.temperature = 1.0
    config.algorithm = type(config.algorithm)()
    for name in ("debug_mode", "debug_rollout_data", "val_only"):
        setattr(config.trainer, name, getattr(TrainerConfig(), name))


if __name__ == "__main__":
    sys.exit(main())
