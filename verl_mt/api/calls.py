"""The calls: `train`, `evaluate_model`, `fine_tune`, `examine`. Each builds what its command would, and runs that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_mt.api.arguments import CallArguments
from verl_mt.api.runs import Evaluation, Examination, Run, evaluated
from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.environments.seeds import SEEDS
from verl_mt.errors import ConfigError
from verl_mt.plugins import extension_function, objects_given


def train(
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    *,
    tools: Any = None,
    environment: Any = None,
    reward: Any = None,
    interaction: Any = None,
    validation: Any = None,
    **keys: Any,
) -> Run:
    """Train a model, with functions and objects in the place of names, what `python -m verl_mt.trainer` does::

        run = verl_mt.train("Qwen/Qwen3-1.7B", rows, tools=[look_up], reward=score, total_training_steps=60)

    Args:
        model: a folder or a hub name. None = the configuration's (without one, the shipped model).
        data: the training rows: dicts, a `datasets.Dataset`, a data frame, a function (num_rows, seed, split) -> rows,
            or a file's path. A row has `prompt` (a text, or messages) and what the reward reads (`ground_truth`).
        tools: functions with type hints and a docstring, `BaseTool` classes or objects, or a YAML file.
        environment: an `Environment` class, or what an adapter takes (docs/environments.md); {"path": ..., "config":
            {...}}, or a mapping name -> one of these, of which each row picks one. Without `data` its rows are seeds.
        reward: what `reward.path` may name: a function, a class or an object. Several are summed.
        interaction: a `BaseInteraction` class or object, or a YAML file.
        validation: rows as `data`, for the accuracy. None = the configuration's (none, where `data` is given alone).
        keys: keys of the configuration, by their last parts (`total_training_steps=60`, `rollout__n=8`). Objects where
            a key names code (`adv_estimator=my_estimator`). And `overrides=`, a list of Hydra words or a mapping, and
            `config_name=`, `config_dir=`, a YAML file to start from, as the command's flags.

    Returns:
        The finished run. An unfinished one in the same directory with the same configuration goes on.

    Raises:
        VerlMTError: bad input, or a run that cannot go on, what was done so far is in the run's directory.
        KeyboardInterrupt: Ctrl-C (or the notebook's stop button), once a checkpoint is written: the same call goes on
            from it, and `verl_mt.Run(folder)` is what there is. Pressed twice: at once.
    """
    given = CallArguments()
    plugins = (tools, environment, reward, interaction)
    with _composed(given, keys, model=model, data=data, validation=validation, plugins=plugins) as config:
        if config.trainer.dry_run:
            raise ConfigError("trainer.dry_run: verl_mt.examine(...) takes the same arguments and returns its findings")
        from verl_mt.trainer.restarts import run_to_the_end  # when the config is known to be right: torch takes seconds

        trainer = run_to_the_end(config)
    folder = trainer.log.run.path
    if trainer.exit_status:
        raise KeyboardInterrupt(
            f"stopped after step {trainer.step_number}. The same call goes on from there, and "
            f"verl_mt.Run({str(folder)!r}) is the run so far"
        )
    return Run(folder, objects=given.objects)


def examine(
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    *,
    tools: Any = None,
    environment: Any = None,
    reward: Any = None,
    interaction: Any = None,
    validation: Any = None,
    **keys: Any,
) -> Examination:
    """What is wrong with a run, before it begins: `python -m verl_mt.doctor`, for the arguments of `train`.

    Args:
        keys: as `train` takes them, and `demos=`, finished conversations to play and score, as the command's flag: rows
            with `messages`, a `datasets.Dataset` or a data frame of them, or a file.

    Returns:
        The findings. `print` shows the list.

    Raises:
        VerlMTError: a configuration that does not compose.
    """
    given, keys, plugins = CallArguments(), dict(keys), (tools, environment, reward, interaction)
    demos = keys.pop("demos", None)
    named = None if demos is None else given.conversations(demos, "demos")
    with _composed(given, keys, model=model, data=data, validation=validation, plugins=plugins) as config:
        return Examination(extension_function("examine")(config, demos=named))


def evaluate_model(
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    *,
    tools: Any = None,
    environment: Any = None,
    reward: Any = None,
    interaction: Any = None,
    n: int | None = None,
    **keys: Any,
) -> Evaluation:
    """Accuracy and pass@k of a model on rows, with tools, limits and a reward as in training, what
    `python -m verl_mt.evaluate` does::

        before = verl_mt.evaluate_model("Qwen/Qwen3-1.7B", held_out, tools=[look_up], reward=score, n=8)

    Args:
        model, data, tools, environment, reward, interaction, keys: as `train` takes them. `data` are the rows to
            sample.
        n: samples per prompt. None = the configuration's (1).

    Raises:
        VerlMTError: bad input, or not one conversation survived.
    """
    given = CallArguments()
    _plug_in(given, tools, environment, reward, interaction)
    data = SEEDS if data is None and environment is not None else data
    return evaluated(given, data, keys, n=n, model=None if model is None else os.fspath(model))


def fine_tune(
    model: str | os.PathLike[str],
    data: Any,
    out: str | os.PathLike[str],
    *,
    tools: Any = None,
    environment: Any = None,
    reward: Any = None,
    validation: Any = None,
    **keys: Any,
) -> Run:
    """A cold start: supervised training on conversations, what `python -m verl_mt.sft` does::

        cold = verl_mt.fine_tune("Qwen/Qwen3-1.7B", demos, "runs/cold", tools=[look_up])
        run = verl_mt.train(cold.model, rows, tools=[look_up], reward=score)

    Args:
        model: a folder or a hub name.
        data: rows with `messages`, a `datasets.Dataset` or a data frame of them, a file, or a run directory, whose
            rollouts are trained on.
        out: the run directory.
        tools, environment: those of the run to come: the conversations are shown their tools.
        reward: with `validation`.
        validation: prompts as `train` takes them: the accuracy is measured by rollouts, not the loss alone.
        keys: as `train` takes them, and `val_data=` (conversations held out, whose loss is reported), `min_reward=` (of
            rollouts), `stop_at_accuracy=`, as the command's flags.

    Raises:
        VerlMTError: bad input.
        KeyboardInterrupt: Ctrl-C, once a checkpoint is written.
    """
    given, keys = CallArguments(), dict(keys)
    base, overrides = keys.pop("config_name", None), keys.pop("overrides", ())
    flags = {name: keys.pop(name, None) for name in ("val_data", "min_reward", "stop_at_accuracy")}
    given.key("actor_rollout_ref.model.path", os.fspath(model))
    if validation is not None:
        given.key("data.val_files", given.rows("data.val_files", validation))
    _plug_in(given, tools, environment, reward, None)
    given.keys(keys)
    given.overrides(overrides)
    demos = given.conversations(data, "demos")
    held_out = None if flags["val_data"] is None else given.conversations(flags["val_data"], "held_out")
    with objects_given(given.objects):
        named = [] if base is None else ["--config-name", os.fspath(base)]
        folder = Path(out).expanduser()
        flags["val_data"] = held_out
        status = extension_function("fine_tune")(demos, [*named, *given.words], folder, **flags)
    if status:
        raise KeyboardInterrupt(f"stopped. The same call goes on, and verl_mt.Run({str(folder)!r}) is the run so far")
    return Run(folder, objects=given.objects)


@contextmanager
def _composed(
    given: CallArguments,
    keys: Mapping[str, Any],
    *,
    model: Any,
    data: Any,
    validation: Any,
    plugins: tuple[Any, Any, Any, Any],
) -> Iterator[Config]:
    """The configuration of a call's arguments; while it is open, its objects can be loaded."""
    keys = dict(keys)
    base, folder, overrides = (keys.pop(name, None) for name in ("config_name", "config_dir", "overrides"))
    if model is not None:
        given.key("actor_rollout_ref.model.path", os.fspath(model))
    if data is None and plugins[1] is not None and base is None:
        data, validation = SEEDS, SEEDS if validation is None else validation
    if data is not None:
        given.key("data.train_files", given.rows("data.train_files", data))
        if validation is None and model is None and base is None:
            given.key("data.val_files", None)  # the shipped task's, which have nothing to do with these rows
    if validation is not None:
        given.key("data.val_files", given.rows("data.val_files", validation))
    _plug_in(given, *plugins)
    given.keys(keys)
    given.overrides(overrides or ())
    with objects_given(given.objects):
        yield compose(given.words, config_name=base, config_dir=folder)


def _plug_in(given: CallArguments, tools: Any, environment: Any, reward: Any, interaction: Any) -> None:
    if tools is not None or environment is not None:  # without them the shipped task's, which an environment replaces
        given.tools([] if tools is None else tools)
    if environment is not None:
        given.environment(environment)
    if interaction is not None:
        given.interaction(interaction)
    if reward is not None:
        given.reward(reward)
