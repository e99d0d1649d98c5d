"""Which words of a script start a training elsewhere, and their flags as overrides of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from verl_mt.config.normalize import split_argv
from verl_mt.config.redact import is_secret_name
from verl_mt.config.spelling_tables import families
from verl_mt.migrate.shell import Command, Script
from verl_mt.plugins import suggest

Library = Literal["verl", "ms-swift", "slime"]

_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")
_OTHERS = {
    "verl.trainer.fsdp_sft_trainer": "supervised training is python -m verl_mt.sft",
    "verl.trainer.sft_trainer": "supervised training is python -m verl_mt.sft",
    "verl.trainer.main_generation": "sampling is python -m verl_mt.evaluate",
    "verl.trainer.main_eval": "evaluation is python -m verl_mt.evaluate",
    "verl.model_merger": "a checkpoint becomes a model by python -m verl_mt.export",
    "swift sft": "supervised training is python -m verl_mt.sft",
    "swift infer": "sampling is python -m verl_mt.evaluate",
    "swift eval": "evaluation is python -m verl_mt.evaluate",
    "swift export": "a checkpoint becomes a model by python -m verl_mt.export",
}
_ENV_DROPPED = {
    "VLLM_": "vLLM is not an engine of verl_mt",
    "CUDA_DEVICE_MAX_CONNECTIONS": "Megatron asks for it",
    "NVTE_": "Transformer Engine is not used",
    "MASTER_ADDR": "Ray finds its machines itself",
    "MASTER_PORT": "Ray finds its machines itself",
    "NODE_RANK": "Ray finds its machines itself",
    "NNODES": "machines are trainer.nnodes",
    "HYDRA_FULL_ERROR": "VERL_MT_TRACEBACK=1 shows tracebacks",
}
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


@dataclass
class Launch:
    """The launch commands of one script, as words for `python -m verl_mt.trainer`."""

    framework: Library | None = None
    env: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)
    """What stands before the command: `ray job submit ... --`."""
    flags: list[str] = field(default_factory=list)
    """Hydra's flags, with their values."""
    overrides: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """Overrides that the other library's defaults stand for, with the reason behind ` # `."""
    dropped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_launch(script: Script) -> Launch:
    """The launch commands of a script; several (a rollout server and its trainer) become one.

    A script without one has `framework` None.
    """
    launch = Launch(notes=list(script.notes))
    for command in script.commands:
        _take(command, launch)
    for word in [w for w in launch.overrides if "$(" in w or "`" in w]:
        launch.overrides.remove(word)
        launch.refused.append(f"{word}: the shell computes it; write its value out")
    if launch.framework is not None:
        _take_env(script.exported, launch)
    return launch


def _take(command: Command, launch: Launch) -> None:
    words = [w for w in command.words if w not in ("nohup", "exec", "time", "&")]
    wrapper: list[str] = []
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        cut = words.index("--") + 1
        wrapper, words = words[:cut], words[cut:]
    found = _which(words)
    if found is None:
        return
    library, name, rest = found
    if name in _OTHERS or (library == "verl" and name != "verl.trainer.main_ppo"):
        launch.refused.append(f"{name}: {_OTHERS.get(name, 'only verl.trainer.main_ppo has a counterpart')}")
        return
    if launch.framework not in (None, library):
        launch.refused.append(f"{name}: the script starts {launch.framework} too; give one command at a time")
        return
    launch.framework = library
    launch.wrapper = wrapper or launch.wrapper
    _take_env(command.env, launch)
    {"verl": _verl, "ms-swift": _swift, "slime": _slime}[library](rest, name, launch)


def _which(words: Sequence[str]) -> tuple[Library, str, list[str]] | None:
    """(library, what is started, its words)."""
    if not words:
        return None
    if re.fullmatch(r"(?:.*/)?(?:swift|megatron)", words[0]) and len(words) > 1:
        name = " ".join([words[0].rpartition("/")[2], words[1]])
        return "ms-swift", name, list(words[2:])
    if not _PYTHON.fullmatch(words[0]):
        return None
    rest = [w for w in words[1:] if w not in ("-u", "-O")]
    if rest[:1] == ["-m"] and len(rest) > 1:
        started = re.match(r"verl\.|recipe\.|slime\.", rest[1])
        return ("verl", rest[1], rest[2:]) if started else None
    if rest and re.fullmatch(r"(?:.*/)?train(?:_async)?\.py", rest[0]):
        return "slime", rest[0].rpartition("/")[2], rest[1:]
    return None


def _take_env(env: dict[str, str], launch: Launch) -> None:
    for name, value in env.items():
        reason = next((why for prefix, why in _ENV_DROPPED.items() if name.startswith(prefix)), None)
        if name == "NPROC_PER_NODE":
            launch.added.append(f"trainer.n_workers_per_node={value} # NPROC_PER_NODE")
            if value != "1":
                launch.added.append("trainer.placement=ray # several ranks need it")
        elif reason is not None:
            launch.dropped.append(f"{name}: {reason}")
        elif is_secret_name(name):
            launch.dropped.append(f"{name}: a secret; set it in the environment that the run starts in")
        else:
            launch.env[name] = value


def _verl(words: list[str], name: str, launch: Launch) -> None:
    takes_value = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
    while words:
        word = words.pop(0)
        if word.startswith("-") and "=" not in word:
            launch.flags += [word, words.pop(0)] if word in takes_value and words else [word]
        elif word.startswith("-"):
            launch.flags.append(word)
        else:
            launch.overrides.append(word)


def _swift(words: list[str], name: str, launch: Launch) -> None:
    known = families()["ms-swift"].rows
    given = {flag.removeprefix("--").replace("-", "_"): values for flag, values in _by_flag(words)}
    if name.split()[0] == "megatron":
        launch.refused.append(f"{name}: models are trained as Hugging Face modules, not by Megatron")
    for key in _swift_batch(given, launch):
        del given[key]
    if (count := _rows_wanted(given)) is not None:
        launch.added.append(f"data.train_max_samples={count} # the number behind the data set's name")
    for key, values in given.items():
        if key not in known:
            launch.refused.append(f"--{key}: no counterpart{suggest(key, known)}")
            continue
        _, [word, *_] = split_argv([f"--{key}", *values])
        _replace(word if parses(word) else _override(key, values), launch)
    if name.endswith("rlhf") and not {"train_type", "tuner_type"} & given.keys():
        launch.added.append("train_type=lora # ms-swift trains adapters unless it is told otherwise")


def _swift_batch(given: dict[str, list[str]], launch: Launch) -> list[str]:
    """Prompts per step, where the numbers that ms-swift multiplies are there; the flags that are settled by it."""
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"]
    numbers = [int(given[k][0]) for k in keys if k in given and given[k][0].isdigit()]
    ranks = next((w.partition(" ")[0].partition("=")[2] for w in launch.added if "NPROC_PER_NODE" in w), "1")
    if len(numbers) < 3 or not ranks.isdigit():
        return []
    samples = numbers[0] * numbers[1] * int(ranks)
    if samples % numbers[2]:
        return []
    why = f"{numbers[0]} per device x {numbers[1]} accumulated x {ranks} ranks / {numbers[2]} generations"
    launch.added.append(f"data.train_batch_size={samples // numbers[2]} # {why}")
    return keys[:2]


def _rows_wanted(given: dict[str, list[str]]) -> str | None:
    """ms-swift's `--dataset name#500`: so many of its rows. The number is taken off."""
    values = given.get("dataset", [])
    if len(values) != 1 or not (found := re.fullmatch(r"(.+)#(\d+)", values[0])):
        return None
    given["dataset"] = [found.group(1)]
    return found.group(2)


def _slime(words: list[str], name: str, launch: Launch) -> None:
    known = families()["slime"].rows
    if name == "train_async.py":
        launch.notes.append("train_async.py: here a step trains on rollouts by its own weights")
    given = {flag.removeprefix("--").replace("-", "_"): values for flag, values in _by_flag(words)}
    for key in _slime_settled(given, launch):
        del given[key]
    for key, values in given.items():
        if key == "eval_prompt_data" and len(values) > 1:
            values = ["[" + ",".join(values[1::2]) + "]"]  # slime gives a name before each file
        flag = "--" + key.replace("_", "-")
        if key not in known and not key.startswith("sglang_"):
            launch.refused.append(f"{flag}: no counterpart{suggest(key, known)}")
            continue
        _, [word, *more] = split_argv([flag, *values])
        launch.overrides.append(_override(key, values) if more or not parses(word) else word)


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
    if "ref_load" in first and first["ref_load"].startswith(first.get("hf_checkpoint", "\n")):
        launch.dropped.append("--ref-load: the reference policy is the model that training starts from")
        settled.append("ref_load")
    batch, n = first.get("global_batch_size", ""), first.get("n_samples_per_prompt", "")
    if batch.isdigit() and n.isdigit() and int(batch) % int(n) == 0:
        why = f"global batch of {batch} samples / {n} samples per prompt"
        launch.added.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={int(batch) // int(n)} # {why}")
        settled.append("global_batch_size")
    if betas := [key for key in ("adam_beta1", "adam_beta2") if key in first]:
        values = [first.get("adam_beta1", "0.9"), first.get("adam_beta2", "0.999")]
        launch.added.append(f"actor_rollout_ref.actor.optim.betas=[{','.join(values)}] # --adam-beta1, --adam-beta2")
        settled += betas
    return settled


def _override(key: str, values: Sequence[str]) -> str:
    """`key=value` with quotes that Hydra's grammar needs."""
    quoted = ["'" + value.replace("'", "\\'") + "'" for value in values]
    return f"{key}=True" if not quoted else f"{key}={quoted[0] if len(quoted) == 1 else '[' + ','.join(quoted) + ']'}"


def parses(word: str) -> bool:
    """Whether Hydra's grammar takes the word as an override."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def _by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values behind it; `--a=b` is `--a b`."""
    out: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            out.append((flag, [value] if equals else []))
        elif out:
            out[-1][1].append(word)
    return out


def _replace(word: str, launch: Launch) -> None:
    """A flag of `swift rlhf` counts where `swift rollout` has another value for it."""
    key = word.partition("=")[0]
    old = next((w for w in launch.overrides if w.partition("=")[0] == key), None)
    if old is not None:
        launch.overrides.remove(old)
        if old != word:
            launch.notes.append(f"--{key}: {old.partition('=')[2]} gave way to {word.partition('=')[2]}")
    launch.overrides.append(word)
