"""ms-swift's commands: `swift rollout` and `swift rlhf`."""

from __future__ import annotations

import re

from verl_mt.config.normalize import split_argv
from verl_mt.config.spelling_tables import families
from verl_mt.migrate.launch import Launch, by_flag, override, parses, replace
from verl_mt.plugins import suggest

_HERE = ("127.0.0.1", "localhost", "0.0.0.0")

_TRACKERS = ("wandb", "tensorboard", "mlflow", "none")

SWIFT_DEFAULTS = {
    "beta": "0.04",
    "temperature": "0.9",
    "lr_scheduler_type": "cosine",
    "loss_type": "grpo",
    "num_train_epochs": "3",
    "num_generations": "8",
    "max_completion_length": "512",
}
"""What `swift rlhf --rlhf_type grpo` does where a command says nothing and verl_mt does something else; its learning
rate is 1e-4 for adapters and 1e-5 for a whole model."""


def read_swift(words: list[str], name: str, launch: Launch) -> None:
    known = families()["ms-swift"].rows
    given = {flag.removeprefix("--").replace("-", "_"): values for flag, values in by_flag(words)}
    if name.split()[0] == "megatron":
        launch.refused.append(f"{name}: models are trained as Hugging Face modules, not by Megatron")
    for key in [*_swift_batch(given, launch), *_swift_server(given, launch)]:
        del given[key]
    _swift_trackers(given, launch)
    count = _rows_wanted(given)
    if count is not None:
        launch.added.append(f"data.train_max_samples={count} # the number behind the data set's name")
    _swift_warmup(given, launch)
    for key, values in given.items():
        if key not in known:
            launch.refused.append(f"--{key}: no counterpart{suggest(key, known)}")
            continue
        _, [word, *_] = split_argv([f"--{key}", *values])
        replace(word if parses(word) else override(key, values), launch)
    if name.endswith("rlhf") and given.get("rlhf_type", ["grpo"]) == ["grpo"]:
        _swift_defaults(given, launch)


def _swift_defaults(given: dict[str, list[str]], launch: Launch) -> None:
    """What the command leaves to ms-swift."""
    kinds = given.get("train_type") or given.get("tuner_type")
    kind = kinds[0] if kinds else None
    if kind is None:
        launch.added.append("train_type=lora # ms-swift trains adapters unless it is told otherwise")
    defaults = {**SWIFT_DEFAULTS, "learning_rate": "1e-5" if kind == "full" else "1e-4"}
    if "max_steps" in given:
        del defaults["num_train_epochs"]
    launch.added += [f"{key}={value} # ms-swift's default" for key, value in defaults.items() if key not in given]
    if not {"top_p", "top_k"} & given.keys():
        launch.notes.append(
            "ms-swift samples with top_p 0.9 and top_k 50 unless it is told otherwise; training here needs the full "
            "distribution, and samples from it"
        )


def _swift_server(given: dict[str, list[str]], launch: Launch) -> list[str]:
    """A rollout server of the script's own becomes one that the run launches; the flags that are settled by it."""
    if given.get("vllm_mode") != ["server"]:
        return []
    launch.wants_server = True
    hosts = given.get("vllm_server_host", ["127.0.0.1"])
    if "vllm_server_base_url" in given or not hosts or any(host not in _HERE for host in hosts):
        return []  # the reader names the servers
    launch.added.append("actor_rollout_ref.rollout.launch_servers=1 # --vllm_mode server: the run starts its own")
    return [key for key in ("vllm_mode", "vllm_server_host", "vllm_server_port") if key in given]


def _swift_warmup(given: dict[str, list[str]], launch: Launch) -> None:
    """`--warmup_steps` counts where both are given."""
    if "warmup_ratio" in given and given.get("warmup_steps", ["0"]) != ["0"]:
        [ratio] = given.pop("warmup_ratio")
        launch.dropped.append(f"--warmup_ratio {ratio}: --warmup_steps is given, and counts")


def _swift_trackers(given: dict[str, list[str]], launch: Launch) -> None:
    """Trackers that are not offered are left out, and said."""
    names = given.get("report_to", [])
    for name in [n for n in names if n not in _TRACKERS]:
        launch.dropped.append(f"--report_to {name}: not offered; every number is in metrics.jsonl")
    if names:
        given["report_to"] = [n for n in names if n in _TRACKERS] or ["none"]


def _swift_batch(given: dict[str, list[str]], launch: Launch) -> list[str]:
    """Prompts per step, where the numbers that ms-swift multiplies are there; the flags that are settled by it."""
    keys = [
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
    ]
    known = [k for k in (*keys, "num_generations") if k in given]
    ranks = next((w.partition(" ")[0].partition("=")[2] for w in launch.added if "NPROC_PER_NODE" in w), "1")
    if not set(known) & set(keys) or not ranks.isdigit() or not all(given[k] and given[k][0].isdigit() for k in known):
        return []
    number = {k: int(given[k][0]) for k in known}
    device, accumulated = (number.get(k, 1) for k in keys[:2])
    n = number.get("num_generations", int(SWIFT_DEFAULTS["num_generations"]))
    steps = number.get("steps_per_generation", accumulated)
    samples = number.get("generation_batch_size", device * int(ranks) * steps)
    trained = device * int(ranks) * accumulated
    if samples % n or trained % n or samples % trained:
        return []
    how = "accumulated" if steps == accumulated else "steps per generation"
    why = f"{device} per device x {steps} {how} x {ranks} ranks / {n} generations"
    launch.added.append(f"data.train_batch_size={samples // n} # {why}")
    if trained != samples:
        why = f"{device} per device x {accumulated} accumulated x {ranks} ranks / {n} generations"
        launch.added.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={trained // n} # {why}")
    return [k for k in keys if k in given]


def _rows_wanted(given: dict[str, list[str]]) -> str | None:
    """ms-swift's `--dataset name#500`: so many of its rows. The number is taken off."""
    values = given.get("dataset", [])
    if len(values) != 1 or not (found := re.fullmatch(r"(.+)#(\d+)", values[0])):
        return None
    given["dataset"] = [found.group(1)]
    return found.group(2)
