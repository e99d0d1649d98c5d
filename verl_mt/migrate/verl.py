"""verl's command: `python -m verl.trainer.main_ppo` with Hydra's words, and the YAML file that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pyarrow import parquet

from verl_mt.migrate.launch import ENV, Launch

_ACTOR = "actor_rollout_ref.actor"

VERL_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.filter_overlong_prompts": False,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "trainer.logger": ["console", "wandb"],
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.n_workers_per_node": 8,
}
"""What verl does where a command says nothing and verl_mt does something else, written out so that a command that is
carried over does what it did. `docs/migrating_from_verl.md` shows the table."""


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


def with_counterparts(words: Sequence[str], content: dict[str, Any]) -> tuple[list[str], list[str]]:
    """verl's words with those that have a counterpart of another name put in their place, and what that changes.

    Args:
        content: what the YAML file sets that the command names.
    """
    kept, said = [], []
    values = {**_flat(content), **{key.lstrip("+"): text for key, _, text in (w.partition("=") for w in words)}}
    if "actor_rollout_ref.rollout.over_sample_rate" in values:
        rate = str(values["actor_rollout_ref.rollout.over_sample_rate"])
        if not (_is_number(rate) and float(rate) == 0):
            said.append(
                f"actor_rollout_ref.rollout.over_sample_rate={rate}: every prompt that was issued is trained here; "
                "there the slowest share of a step is left out"
            )
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "actor_rollout_ref.rollout.name" and value.startswith("vllm"):
            kept.append(f"{key}=sglang")
            said.append(
                f"{key}={value} -> sglang: the engine for real work here; it samples, nothing that is learned changes"
            )
        elif key == "actor_rollout_ref.rollout.trace.backend" and value in ("mlflow", "weave"):
            said.append(f"{key}={value}: not offered, left out; otel sends spans to any collector of OpenTelemetry")
        elif key == "actor_rollout_ref.rollout.trace.token2text":
            said.append(f"{key}={value}: left out; the texts are in rollouts/*.jsonl")
        elif key == "actor_rollout_ref.rollout.over_sample_rate" and _is_number(value):
            continue
        elif key.endswith(".optim.lr_warmup_steps_ratio") and _is_number(value) and (known := _num_steps(values)):
            total, how = known
            updates = _updates(values, key.partition(".optim.")[0])
            steps = int(float(value) * total) * updates
            kept.append(f"{key.removesuffix('_ratio')}={steps}")
            each = f", {updates} updates each" if updates > 1 else ""
            said.append(f"{word} -> {steps} optimizer steps: the ratio of {total} steps ({how}){each}")
        elif key == "trainer.device" and value == "npu":
            said.append(f"{word}: left out; the device is found where the run starts")
        else:
            kept.append(word)
    return kept, said


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def _whole(values: dict[str, Any], key: str, default: int) -> int | None:
    text = str(values.get(key, default))
    return int(text) if text.isdigit() else None


def _num_steps(values: dict[str, Any]) -> tuple[int, str] | None:
    """How many steps verl trains, and from what that is known; None where it is not."""
    total = str(values.get("trainer.total_training_steps"))
    if total.isdigit():
        return int(total), f"trainer.total_training_steps={total}"
    epochs, batch = _whole(values, "trainer.total_epochs", 30), _whole(values, "data.train_batch_size", 1024)
    rows = _num_rows(values)
    if not epochs or not batch or rows is None or rows < batch:
        return None
    return epochs * (rows // batch), f"{epochs} epochs of {rows} rows by {batch}; prompts that are too long are in it"


def _updates(values: dict[str, Any], part: str) -> int:
    """Optimizer steps of one step: verl counts its warm-up in steps."""
    batch = _whole(values, "data.train_batch_size", 1024)
    mini = _whole(values, f"{part}.ppo_mini_batch_size", _whole(values, f"{_ACTOR}.ppo_mini_batch_size", 256) or 256)
    epochs = _whole(values, f"{part}.ppo_epochs", 1)
    return max(1, batch // mini) * epochs if batch and mini and epochs else 1


def _num_rows(values: dict[str, Any]) -> int | None:
    """Training rows, where the files are on this machine or the command says how many it takes."""
    files = values.get("data.train_files")
    if isinstance(files, str):
        text = ENV.sub(lambda m: os.environ.get(m[1]) or m[2] or m[0], files)
        try:
            files = OverridesParser.create().parse_override(f"files={text}").value()
        except HydraException:
            return None
    paths = [Path(str(name)).expanduser() for name in (files if isinstance(files, list) else [files])]
    if not all(path.is_file() and path.suffix in (".parquet", ".jsonl") for path in paths):
        return None
    rows = sum(
        parquet.read_metadata(path).num_rows
        if path.suffix == ".parquet"
        else sum(bool(line.strip()) for line in path.read_bytes().splitlines())
        for path in paths
    )
    most = _whole(values, "data.train_max_samples", -1)
    return rows if most is None else min(rows, most)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[\d.]+(?:e-?\d+)?", text) is not None
