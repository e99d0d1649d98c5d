"""`python -m verl_mt.evaluate`: accuracy and pass@k of a model on a data file, or a conversation with it.

    python -m verl_mt.evaluate runs/tiny                       # a run's export, its own tools and data
    python -m verl_mt.evaluate --model PATH --data FILE.parquet --n 4 --out eval/ [Hydra overrides]
    python -m verl_mt.evaluate experiment=gsm8k_tool_grpo --model PATH
    python -m verl_mt.evaluate --config-path . --config-name my_run --n 8    # before training: is it learnable?
    python -m verl_mt.evaluate runs/tiny --chat                # talk to it; its tools really run

The same tools, interactions, limits and reward as in training: what counts is the config, not this command. Validation
sampling (`actor_rollout_ref.rollout.val_kwargs`) is used; `...val_kwargs.temperature=0` is greedy.

With `--out`, an evaluation that was ended goes on where it was with the same command, unless the configuration or a
file that it names has changed meanwhile, or it is deterministic (`trainer.deterministic`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.config_paths import TINY_MODEL
from verl_mt.data.run_origin import require_trust
from verl_mt.errors import ConfigError, VerlMTError

_READ = (
    "actor_rollout_ref.model.",
    "actor_rollout_ref.rollout.custom_generate_",
    "actor_rollout_ref.rollout.multi_turn.",
    "reward.",
)
"""Beginnings of the keys that mean the same here as in training, whatever the data: without effect, they are refused
as there."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input or where not one trajectory survived (one line on stderr), 130 for
    Ctrl-C."""
    usage = "%(prog)s [RUN] [flags] [key=value ...]\n\nRUN: a run directory, its config.yaml and its hf/ export."
    parser = argparse.ArgumentParser("python -m verl_mt.evaluate", usage, __doc__.split("\n")[0])
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the old form of RUN
    parser.add_argument("--trust", action="store_true", help="run the code that another user's config.yaml names")
    parser.add_argument("--config", "--config-name", "-cn", help="YAML file to start from, instead of a run's")
    parser.add_argument("--config-path", "-cp", help="folder of that file, as for the trainer")
    parser.add_argument("--model", help="local folder or hub name")
    parser.add_argument("--data", help="parquet or JSONL file, or module:function; default: data.val_files")
    parser.add_argument("--n", type=int, help="samples per prompt")
    parser.add_argument("--out", help="folder for metrics.json and rollouts.jsonl")
    parser.add_argument("--chat", action="store_true", help="talk to the model instead")
    parser.add_argument("--system", help="--chat: the system message; default: that of the first row of the data")
    args, overrides = parser.parse_known_args(argv)
    try:
        config = config_of(args, overrides)
        from verl_mt.trainer import inference  # after the config is known to be right: torch takes seconds

        return inference.chat(config, args.system) if args.chat else inference.evaluate(config, args.out)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def config_of(args: argparse.Namespace, overrides: list[str]) -> Config:
    """The configuration that the command's own arguments and its overrides give.

    Raises:
        ConfigError: what they say cannot be.
    """
    if flags := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(
            f"unknown flag {' '.join(flags)}. Evaluation takes one configuration: key=value, and the flags that --help "
            "lists. For sweeps and the other flags of Hydra, use python -m verl_mt.trainer"
        )
    words = [word for word in overrides if "=" not in word and not word.startswith("~")]
    runs, overrides = [*filter(None, [args.run]), *words], [word for word in overrides if word not in words]
    if len(runs) > 1:
        raise ConfigError(f"name one run, not {len(runs)}: {' '.join(runs)}")
    args.run = next(iter(runs), None)
    if args.n is not None and args.n < 1:
        raise ConfigError(f"--n is {args.n}, must be at least 1")
    for flag, needed in ("config_path", "--config"), ("trust", "RUN"), ("system", "--chat"):
        if getattr(args, flag) and not getattr(args, needed.strip("-").lower()):
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect without {needed}. Add it, or leave it out")
    if args.run and args.config:
        raise ConfigError(f"{args.run} brings its own config.yaml: give it or --config, not both")
    if args.run:
        folder = Path(args.run)
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder} has no config.yaml. Name a run directory such as runs/tiny")
        if not args.model and not (folder / "hf").is_dir():
            raise ConfigError(f"{folder} has no hf/ export (the run is not over). Name a model with --model")
        require_trust(folder, trust=args.trust)
    # As in training: with an own model and own data nothing of the default task is inherited.
    general = args.model and args.model != TINY_MODEL and args.data
    base = str(Path(args.run) / "config.yaml") if args.run else args.config or ("ppo_trainer" if general else None)
    model = args.model or (str(Path(args.run) / "hf") if args.run else None)
    named = {
        "actor_rollout_ref.model.path": model,
        "data.val_files": args.data,
        "data.val_max_samples": -1 if args.data and ":" not in args.data else None,
        "actor_rollout_ref.rollout.val_kwargs.n": args.n,
    }
    # Ours first: an override of the user's own wins.
    words = [*(f"{k}={_quoted(v)}" for k, v in named.items() if v is not None), *overrides]
    config = compose(words, config_name=base, config_dir=args.config_path)
    reject_unused_keys(config, among=_READ)
    return config


def _quoted(value: Any) -> str:
    """A value as Hydra reads it back: a path may hold spaces, commas or '='."""
    return str(value) if not isinstance(value, str) else "'" + value.replace("'", "\\'") + "'"


if __name__ == "__main__":
    sys.exit(main())
