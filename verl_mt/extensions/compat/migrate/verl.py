"""verl's command: `python -m verl.trainer.main_ppo` with Hydra's words, and the YAML file that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_mt.config.hydra_source import read_yaml
from verl_mt.extensions.compat.aliases.engine_arguments import ENGINE, engine_named, is_of_one_engine
from verl_mt.extensions.compat.aliases.families import families
from verl_mt.extensions.compat.migrate.launch import ENV, Launch

_ACTOR = "actor_rollout_ref.actor"
_OF_UPDATES = {"ppo_mini_batch_size": 256, "ppo_epochs": 1}
"""What says how many optimizer steps a step has -> verl's default; the critic's own are the actor's."""

VERL_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.filter_overlong_prompts": False,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.shuffle": False,
    "actor_rollout_ref.model.dtype": "bfloat16",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "trainer.logger": ["console", "wandb"],
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.n_workers_per_node": 8,
}
"""What verl does where a command says nothing and verl_mt does something else, written out so that a command that is
carried over does what it did. `docs/migrating_from_verl.md` shows the table."""


_IN_AGENT_LOOPS = {"max_parallel_calls": 1, "max_tool_response_length": 256}
"""Of `rollout.multi_turn`: defaults that verl's agent loops read (rollout.mode=async); its sync one does not."""
_LEFT_OUT = {
    "actor_rollout_ref.rollout.expert_parallel_size": "an engine is not split by experts",
    "actor_rollout_ref.rollout.data_parallel_size": "there are as many engines as the ranks allow",
    "actor_rollout_ref.actor.checkpoint.": "a checkpoint holds everything that a resumed run needs",
    "critic.checkpoint.": "a checkpoint holds everything that a resumed run needs",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_actor_ckpt_to_keep says how many checkpoints stay",
    "trainer.rollout_data_dir": "every trajectory is in rollouts/ of the run directory",
    "trainer.validation_data_dir": "every trajectory is in rollouts/ of the run directory",
    "global_profiler.": "kernels are not profiled; where a step's time goes is in its metrics",
    "trainer.profile_steps": "kernels are not profiled; where a step's time goes is in its metrics",
    "ray_init.": "start Ray as you need it before the run",
    "ray_kwargs.": "start Ray as you need it before the run",
}
"""Beginnings of keys of which nothing that is learned depends -> why they are not carried over."""
_TRACKERS = ("console", "file", "tensorboard", "wandb", "mlflow")
_READ_BY = {"algorithm.lam": ("gae",), "algorithm.gamma": ("gae", "reinforce_plus_plus")}
"""Key -> the estimators that read it, in both."""
_CLIPPED = (None, "vanilla", "gspo", "cispo", "clip_cov")
"""Losses that read a clip range, in both."""


MAINS = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
"""Modules that are started with `ppo_trainer`'s keys. DAPO's has `algorithm.filter_groups` and the penalty on overlong
responses, which are off unless a command says otherwise."""


def read_verl(words: list[str], name: str, launch: Launch) -> None:
    takes_value = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
    while words:
        word = words.pop(0)
        if word.startswith("-") and "=" not in word:
            launch.flags += [word, words.pop(0)] if word in takes_value and words else [word]
        elif word.startswith("-"):
            launch.flags.append(word)
        else:
            launch.overrides.append(word)
    if any("megatron" in flag for flag in launch.flags):
        why = families()["verl"].rows["actor_rollout_ref.actor.megatron"].why
        launch.refused.append(f"{' '.join(launch.flags)}: {why}")


def default_rollout_mode(folders: Iterable[Path]) -> str:
    """`rollout.mode` where nothing sets it: of the checkout of verl that is in the first of these folders to have one.
    Without any it is `async`, as in verl since 0.7."""
    files = (folder / "verl/trainer/config/rollout/rollout.yaml" for folder in folders)
    file = next((file for file in files if file.is_file()), None)
    return "async" if file is None else str((read_yaml(file) or {}).get("mode", "async"))


def with_counterparts(
    words: Sequence[str],
    content: dict[str, Any],
    dropped: list[str],
    default_mode: str = "async",
    default_engine: str | None = "vllm",
) -> tuple[list[str], list[str], dict[str, str]]:
    """verl's words with those that have a counterpart of another name put in their place.

    Args:
        content: what the YAML file sets that the command names.
        dropped: takes what sets nothing here.
        default_mode: `rollout.mode` where nothing sets it.
        default_engine: `rollout.name` where nothing sets it; None = a file sets it that is not here.

    Returns:
        the words; what that changes; words among them that mean the same in other units -> how.
    """
    kept: list[str] = []
    said: list[str] = []
    same: dict[str, str] = {}
    values = {**_flat(content), **{key.lstrip("+"): text for key, _, text in (w.partition("=") for w in words)}}
    if "actor_rollout_ref.rollout.over_sample_rate" in values:
        rate = str(values["actor_rollout_ref.rollout.over_sample_rate"])
        if not (_is_number(rate) and float(rate) == 0):
            said.append(
                f"actor_rollout_ref.rollout.over_sample_rate={rate}: every prompt that was issued is trained here; "
                "there the slowest share of a step is left out"
            )
    words = _without_unused(words, values, dropped)
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "actor_rollout_ref.rollout.trace.backend" and value in ("mlflow", "weave"):
            said.append(f"{key}={value}: not offered, left out; otel sends spans to any collector of OpenTelemetry")
        elif key == "actor_rollout_ref.rollout.trace.token2text":
            said.append(f"{key}={value}: left out; `python -m verl_mt.report.rows` prints the texts")
        elif key == "actor_rollout_ref.rollout.over_sample_rate" and _is_number(value):
            continue
        elif key == "trainer.device" and value == "npu":
            said.append(f"{word}: left out; the device is found where the run starts")
        else:
            kept.append(word)
    for part in (_ACTOR, "critic"):
        kept = _warm_up(kept, values, part, said, same)
    kept += (beside := _defaults_beside(values, default_mode) | _of_the_engine(kept, content))
    same |= beside
    engine = values.get(ENGINE, default_engine)
    if ENV.search(str(engine)) and any(is_of_one_engine(word.lstrip("+").partition("=")[0]) for word in kept):
        said.append(f"{ENGINE}={engine}: the command has the arguments of {engine_named(engine) or 'no engine'}")
    if engine_named(engine) == "vllm":
        kept = _keeping_its_memory(kept, values, said)
    return kept, said, same


def _without_unused(words: Sequence[str], values: dict[str, Any], dropped: list[str]) -> list[str]:
    """The words without those that nothing reads, and trackers that are not offered."""
    kept = []
    estimator = values.get("algorithm.adv_estimator", "gae")
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        reason = next((why for begin, why in _LEFT_OUT.items() if key.startswith(begin)), None)
        names = re.findall(r"[\w.:/-]+", value) if key == "trainer.logger" else []
        unknown = [name for name in names if name not in _TRACKERS and name.isidentifier()]
        if reason is not None:
            dropped.append(f"{word}: {reason}")
        elif key in _READ_BY and estimator not in _READ_BY[key] and "${" not in str(estimator):
            dropped.append(f"{word}: {estimator} does not read it")
        elif unknown:
            dropped.append(f"{word}: {', '.join(unknown)} is not offered; every number is in metrics.jsonl")
            kept.append(f"{key}=[{','.join(name for name in names if name not in unknown) or 'console'}]")
        else:
            kept.append(word)
    return kept


def _defaults_beside(values: dict[str, Any], default_mode: str) -> dict[str, str]:
    """Words for verl's defaults that count only beside another key that is set -> why."""
    words, rollout = {}, "actor_rollout_ref.rollout"
    ranks = str(values.get("trainer.n_gpus_per_node", ""))
    if ENV.search(ranks) and "trainer.placement" not in values:
        words["trainer.placement=ray"] = "several ranks need it, and how many there are is said outside"
    clip = values.get(f"{_ACTOR}.clip_ratio", 0.2)
    if str(clip) != "0.2" and values.get(f"{_ACTOR}.policy_loss.loss_mode") in _CLIPPED:
        for name in ("clip_ratio_low", "clip_ratio_high"):
            if f"{_ACTOR}.{name}" not in values:
                words[f"{_ACTOR}.{name}=0.2"] = f"verl's default, which counts there and not clip_ratio={clip}"
    tools = any(
        f"{rollout}.{key}" in values for key in ("multi_turn.tool_config_path", "tool_kwargs.tools_config_file")
    )
    mode = ENV.sub(lambda found: found[2] or "", str(values.get(f"{rollout}.mode", default_mode)))
    why = "verl's default with rollout.mode=async"
    if f"{rollout}.mode" not in values:
        why += ", which verl has since 0.7 where nothing sets it"
    if tools and mode == "async":
        for name, value in _IN_AGENT_LOOPS.items():
            if f"{rollout}.multi_turn.{name}" not in values:
                words[f"{rollout}.multi_turn.{name}={value}"] = why
    return words


def _of_the_engine(words: Sequence[str], content: dict[str, Any]) -> dict[str, str]:
    """Words for what the YAML file says of the engine and its arguments -> why.

    The engine decides which arguments set something, and command line and file are read apart.
    """
    given, own = _flat(content), {word.lstrip("+").partition("=")[0] for word in words}
    if ENGINE not in own and ENGINE in given and any(is_of_one_engine(key) for key in own):
        return {f"{ENGINE}={given[ENGINE]}": "the YAML file's; the command has arguments of one engine"}
    if ENGINE not in own or ENGINE not in given:
        return {}
    left = {key: value for key, value in given.items() if is_of_one_engine(key) and key not in own and value != {}}
    why = "the YAML file's, which names another engine"
    return {f"{key}={value if isinstance(value, str) else json.dumps(value)}": why for key, value in left.items()}


def _keeping_its_memory(words: list[str], values: dict[str, Any], said: list[str]) -> list[str]:
    """The words with engines that stay in memory, as those of vLLM do here."""
    key, apart = "actor_rollout_ref.rollout.free_cache_engine", "actor_rollout_ref.rollout.nnodes"
    if str(values.get(key, True)).lower() != "true" or str(values.get(apart, 0)) != "0":
        return words
    said.append(
        f"{key}=True -> False: vLLM engines keep their GPU memory while training runs. Choose a "
        "gpu_memory_utilization that leaves memory for training, or rollout.name=sglang"
    )
    return [*(word for word in words if word.lstrip("+").partition("=")[0] != key), f"{key}=False"]


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def _whole(values: dict[str, Any], key: str, default: int) -> int | None:
    text = ENV.sub(lambda m: m[2] or m[0], str(default if values.get(key) is None else values[key]))
    return int(text) if text.isdigit() else None


def _sizes(part: str) -> list[str]:
    return ["data.train_batch_size", *(f"{place}.{name}" for place in (part, _ACTOR) for name in _OF_UPDATES)]


def _updates(values: dict[str, Any], part: str) -> int | None:
    """Optimizer steps of one step of the trainer; None where a size is known to the shell only."""
    batch = _whole(values, "data.train_batch_size", 1024)
    own = {name: values.get(f"{part}.{name}", values.get(f"{_ACTOR}.{name}")) for name in _OF_UPDATES}
    mini, epochs = (_whole(own, name, default) for name, default in _OF_UPDATES.items())
    return max(1, batch // mini) * epochs if batch and mini and epochs else None


def _warm_up(words: list[str], values: dict[str, Any], part: str, said: list[str], same: dict[str, str]) -> list[str]:
    """The words with verl's steps of warm-up as optimizer steps: its schedule moves once a step of the trainer, ours
    with every update. A number of steps counts there beside a ratio."""
    steps, ratio = f"{part}.optim.lr_warmup_steps", f"{part}.optim.lr_warmup_steps_ratio"
    count, updates = _whole(values, steps, -1), _updates(values, part)
    if count is None:
        return words
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in (steps, ratio)]
    if ratio in values:
        kept.append(f"{ratio}=0.0")
        same[kept[-1]] = f"verl's lr_warmup_steps={count} counts, its ratio of {values[ratio]} does not"
    kept.append(f"{steps}={count * (updates or 1)}")
    if count and updates is None:
        said.append(f"{kept[-1]}: steps of the trainer there, optimizer steps here: multiply by those of one step")
    elif count and updates != 1:
        given = " (with the script's own sizes)" if "${" in str([values.get(k) for k in _sizes(part)]) else ""
        same[kept[-1]] = f"{count} steps of verl's trainer with {updates} optimizer steps each{given}"
    return kept


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[\d.]+(?:e-?\d+)?", text) is not None
