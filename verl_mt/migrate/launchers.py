"""Which words of a script start a training elsewhere, and their flags as overrides of ours."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from verl_mt.config.normalize import split_argv
from verl_mt.config.redact import is_secret_name
from verl_mt.config.spelling_tables import families
from verl_mt.migrate.shell import Command, Script, shell_text
from verl_mt.plugins import suggest

Library = Literal["verl", "ms-swift", "slime"]

_HERE = ("127.0.0.1", "localhost", "0.0.0.0")
_TRACKERS = ("wandb", "tensorboard", "mlflow", "none")
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
    started: list[str] = field(default_factory=list)
    """Names of the commands that were read: `swift rollout`, `swift rlhf`."""
    wants_server: bool = False
    """Its trainer asks a rollout server that another command starts."""
    functions: list[str] = field(default_factory=list)
    """Definitions of the script's own functions that the shell needs for it."""


def find_launch(script: Script) -> Launch:
    """The launch commands of a script; several (a rollout server and its trainer) become one.

    A script without one has `framework` None.
    """
    launch = Launch(notes=list(script.notes))
    for command in script.commands:
        _take(command, launch)
    names = re.findall(r"oc\.env:(\w+)", " ".join([*launch.overrides, *launch.flags, *launch.env.values()]))
    computed = " ".join(text for name in names if (text := shell_text(name)))
    launch.functions = [body for name, body in script.functions.items() if re.search(rf"\b{name}\b", computed)]
    if launch.framework is not None:
        _take_env(script.exported, launch)
    if launch.wants_server and "swift rollout" not in launch.started:
        launch.refused.append(
            "--vllm_mode server: a `swift rollout` command elsewhere starts the server, and says which scheduler runs "
            "there; give both commands in one text"
        )
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
    launch.started.append(name)
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
    for key in [*_swift_batch(given, launch), *_swift_server(given, launch)]:
        del given[key]
    _swift_trackers(given, launch)
    count = _rows_wanted(given)
    if count is not None:
        launch.added.append(f"data.train_max_samples={count} # the number behind the data set's name")
    _swift_warmup(given, count, launch)
    for key, values in given.items():
        if key not in known:
            launch.refused.append(f"--{key}: no counterpart{suggest(key, known)}")
            continue
        _, [word, *_] = split_argv([f"--{key}", *values])
        _replace(word if parses(word) else _override(key, values), launch)
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


def _swift_warmup(given: dict[str, list[str]], rows: str | None, launch: Launch) -> None:
    """`--warmup_ratio` in optimizer steps, where it is known how many there are."""
    try:
        ratio = float(given["warmup_ratio"][0])
        epochs = float(given.get("num_train_epochs", [SWIFT_DEFAULTS["num_train_epochs"]])[0])
        iterations = int(given.get("num_iterations", ["1"])[0])
    except (KeyError, IndexError, ValueError):
        return  # not given, or a variable of the shell
    sizes = dict(word.partition(" ")[0].split("=", 1) for word in launch.added)
    batch = sizes.get("data.train_batch_size")
    if ratio == 0 or "warmup_steps" in given:
        return
    del given["warmup_ratio"]
    if rows is None or batch is None or "max_steps" in given:
        launch.notes.append(
            f"--warmup_ratio {ratio:g}: set actor_rollout_ref.actor.optim.lr_warmup_steps to that share of the "
            "optimizer steps; how many there are depends on the rows, which the command does not count"
        )
        return
    mini = sizes.get("actor_rollout_ref.actor.ppo_mini_batch_size", batch)
    steps = int(int(rows) * epochs) // int(batch) * (int(batch) // int(mini)) * iterations
    why = f"{ratio:g} of {steps} optimizer steps"
    launch.added.append(f"actor_rollout_ref.actor.optim.lr_warmup_steps={math.ceil(ratio * steps)} # {why}")


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


def _slime(words: list[str], name: str, launch: Launch) -> None:
    known = families()["slime"].rows
    if name == "train_async.py":
        launch.notes.append("train_async.py: here a step trains on rollouts by its own weights")
    given = {flag.removeprefix("--").replace("-", "_"): values for flag, values in _by_flag(words)}
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
            word = f"{name}=[{','.join(values)}]" if whole else _override(name, values)
            more = []
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
