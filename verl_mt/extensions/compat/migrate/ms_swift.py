"""ms-swift's commands: `swift rollout` and `swift rlhf`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from verl_mt.extensions.compat.aliases.families import families
from verl_mt.extensions.compat.migrate.launch import ENV, Launch, by_flag, override, parses, replace
from verl_mt.extensions.compat.translate import translate_flags
from verl_mt.plugins import suggest

_HERE = ("127.0.0.1", "localhost", "0.0.0.0")
_TRACKERS = ("wandb", "tensorboard", "mlflow", "none")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
_OLDER = {
    "multi_turn_func": "multi_turn_scheduler",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "max_model_len": "vllm_max_model_len",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "lmdeploy_session_len": "vllm_max_model_len",
    "log_completions_to_file": "log_completions",
    "max_new_tokens": "max_completion_length",
    "reward_func": "reward_funcs",
    "rescale_reward": "scale_rewards",
}
"""Names of earlier versions, and those of `swift rollout` -> today's."""
_PLACES = ("num_infer_workers", "vllm_device", "lmdeploy_device", "lmdeploy_cache_max_entry_count", "tp")
"""Of earlier versions: on which devices engines live."""
_UPDATES_BETWEEN = 500
"""Between two checkpoints, and two validations, where a command says nothing."""
_SAMPLES = {"top_p": "1.0", "top_k": "-1", "min_p": "0.0", "repetition_penalty": "1.0"}
_SEES_IMAGES = re.compile(r"vl(?![a-z])|omni|vision|llava|internvl|ovis|minicpm-?v|pixtral|gemma-?3", re.IGNORECASE)
_PROMPT_LENGTH = 8192

SWIFT_DEFAULTS = {
    "beta": "0.04",
    "temperature": "0.9",
    "lr_scheduler_type": "cosine",
    "loss_type": "grpo",
    "num_train_epochs": "3",
    "num_generations": "8",
    "max_completion_length": "512",
    "weight_decay": "0.1",
    "truncation_strategy": "left",
    "gradient_checkpointing": "true",
    "torch_dtype": "bfloat16",
}
"""What `swift rlhf --rlhf_type grpo` does where a command says nothing and verl_mt does something else; its learning
rate is 1e-4 for adapters and 1e-5 for a whole model."""

_Given = dict[str, list[str]]
"""Flag -> its values as they were written."""


def read_swift(words: list[str], name: str, launch: Launch) -> None:
    """Take over one command of a script."""
    given: _Given = {flag.removeprefix("--").replace("-", "_"): values for flag, values in by_flag(words)}
    given = {_OLDER.get(key, key): values for key, values in given.items()}
    if words and not words[0].startswith("-"):
        launch.refused.append(f"{name} {words[0]}: its settings stand in a file; give them as flags")
    if name.split()[0] == "megatron":
        launch.refused.append(f"{name}: models are trained as Hugging Face modules, not by Megatron")
    if name.endswith("rollout"):
        _rollout_server(given, launch)
    if name.endswith("rlhf"):
        _settle(given, launch)
    _take_flags(given, launch)


def _settle(given: _Given, launch: Launch) -> None:
    """What the training command's flags mean together."""
    grpo = given.get("rlhf_type", ["grpo"]) == ["grpo"]
    for number, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if number in given and given.pop(number) in ([], ["true"]) and "torch_dtype" not in given:
            given["torch_dtype"] = [dtype]
    if "gym_env" in given and "use_gym_env" not in given:
        given["use_gym_env"] = ["true"]
    _variables_in_batch(given, launch)
    updates = _batch(given, launch)
    _server(given, launch)
    if _one(given, "use_vllm") == "false":
        del given["use_vllm"]
        launch.dropped.append("--use_vllm false: its trainer samples by itself there, here an engine does")
    _trackers(given, launch)
    _rows(given, launch)
    _warmup(given, launch)
    _counted_in_updates(given, updates, launch)
    _prompt_length(given, launch)
    _schedule(given, launch)
    _sampling(given, launch)
    _changed(given, launch)
    if grpo:
        _defaults(given, launch)


def _take_flags(given: _Given, launch: Launch) -> None:
    known = families()["ms-swift"].rows.keys() | {"advantage_estimator"}  # a name that it has in common with slime
    for key, values in given.items():
        if key == "reward_model":  # a name that it has in common with verl
            launch.refused.append(
                f"--reward_model {' '.join(values)}: a reward model is a server that reward.path asks"
            )
        elif key in _PLACES:
            launch.dropped.append(f"--{key} {' '.join(values)}: engines live on the ranks' own devices")
        elif key not in known:
            launch.refused.append(f"--{key}: no counterpart{suggest(key, known)}")
        else:
            word, *_ = translate_flags([f"--{key}", *values])
            replace(word if parses(word) else override(key, values), launch)


def _defaults(given: _Given, launch: Launch) -> None:
    """What the command leaves to ms-swift."""
    kind = _one(given, "tuner_type") or _one(given, "train_type")
    if kind is None:
        launch.added.append("train_type=lora # ms-swift trains adapters unless it is told otherwise")
    defaults = {**SWIFT_DEFAULTS, "learning_rate": "1e-5" if kind == "full" else "1e-4"}
    reasons = {"torch_dtype": "ms-swift takes the type of the model's files, which is this one nearly always"}
    if _SEES_IMAGES.search(_one(given, "model") or ""):
        defaults["truncation_strategy"] = "delete"
        reasons["truncation_strategy"] = "a prompt with images cannot be cut"
    if "max_steps" in given:
        given.pop("num_train_epochs", None)
        defaults["num_train_epochs"], reasons["num_train_epochs"] = "1000000", "--max_steps alone ends the run"
    if _one(given, "loss_type") not in ("cispo", "sapo", "real") and _one(given, "importance_sampling_level") in (
        None,
        "token",
    ):
        defaults["delta"] = "null"  # no dual clip
    launch.added += [
        f"{key}={value} # {reasons.get(key, DEFAULT)}" for key, value in defaults.items() if key not in given
    ]
    if _one(given, "dynamic_sample") == "true" and "max_resample_times" not in given:
        launch.added.append(f"max_resample_times=3 # {DEFAULT}")
    known = [key for key in ("adam_beta1", "adam_beta2") if key in given]  # names that it has in common with slime
    betas = [_one(given, key) or usual for key, usual in (("adam_beta1", "0.9"), ("adam_beta2", "0.95"))]
    why = f"--{known[0]}" if known else DEFAULT
    launch.added.append(f"actor_rollout_ref.actor.optim.betas=[{','.join(betas)}] # {why}")
    for key in known:
        del given[key]
    launch.added.append("data.prompt_key=messages # ms-swift's own column")
    launch.added.append("data.label_key=solution # ms-swift's own column")


DEFAULT = "ms-swift's default"


def _one(given: _Given, key: str) -> str | None:
    values = given.get(key)
    return values[0] if values else None


def _number(given: _Given, key: str) -> int | None:
    """A whole number; of a variable of the shell what it is where nobody sets it."""
    text = _one(given, key)
    found = ENV.fullmatch(text) if text else None
    text = found.group(2) if found else text
    return int(text) if text and text.isdigit() else None


# ----------------------------------------------------------------------------------------------------------------------
# Batches and what is counted in updates


def _batch(given: _Given, launch: Launch) -> int | None:
    """Prompts per step and per update, from the numbers that ms-swift multiplies; the updates of a step, None where
    they are not known.

    There `steps_per_generation` batches of `per_device_train_batch_size` samples are sampled at once on every rank, and
    `gradient_accumulation_steps` of them make an update. Where an update takes several samplings, its weights are the
    same in all of them.
    """
    ranks = _ranks(launch)
    device = _number(given, _BATCH[0]) if _BATCH[0] in given else 1
    accumulated = _number(given, _BATCH[1]) if _BATCH[1] in given else 1
    n = _number(given, "num_generations") if "num_generations" in given else int(SWIFT_DEFAULTS["num_generations"])
    spread = (_number(given, "sequence_parallel_size") or 1) if "sequence_parallel_size" in given else 1
    iterations = (_number(given, "num_iterations") or 1) if "num_iterations" in given else 1
    sizes = {key: given[key] for key in _BATCH if key in given}
    if ranks is None or device is None or accumulated is None or not n:
        _no_batch(given, sizes, launch, "how many ranks, samples or generations there are is a shell's variable")
        return None
    steps = _number(given, "steps_per_generation") if "steps_per_generation" in given else accumulated
    samples = device * ranks * steps if steps is not None else None
    if "generation_batch_size" in given:
        samples = _number(given, "generation_batch_size")
    if samples is None or ranks % spread:
        _no_batch(given, sizes, launch, "a sampling's size is a shell's variable")
        return None
    trained = device * ranks * accumulated // spread
    sampled = max(samples, trained)
    if samples % n or trained % n or sampled % min(samples, trained):
        if not any(key in given for key in _BATCH):  # nor would ms-swift start: it is part of a command
            launch.notes.append("the command does not say how large a batch is: set data.train_batch_size, in prompts")
            return None
        why = (
            f"{trained} samples an update and {samples} a sampling, {n} of a prompt: updates here are of whole prompts"
        )
        _no_batch(given, sizes, launch, why)
        return None
    for key in _BATCH:
        given.pop(key, None)
    shared = f" / {spread} ranks to a sequence" if spread > 1 else ""
    of_update = f"{device} per device x {accumulated} accumulated x {ranks} ranks{shared} / {n} generations"
    of_step = of_update if sampled == trained else f"{samples} samples / {n} generations"
    if sampled != trained and "generation_batch_size" not in given:
        of_step = f"{device} per device x {steps} steps per generation x {ranks} ranks / {n} generations"
    launch.added.append(f"data.train_batch_size={sampled // n} # {of_step}")
    if trained != sampled:
        launch.added.append(f"actor_rollout_ref.actor.ppo_mini_batch_size={trained // n} # {of_update}")
        if _one(given, "loss_type") in ("dapo", "cispo", "fipo"):
            launch.changed.append(
                f"--loss_type {_one(given, 'loss_type')}: tokens are averaged over an update, there over all updates "
                "of a sampling; the gradient is larger here by their number, which AdamW divides out"
            )
    if _one(given, "loss_type") == "real" and _one(given, "beta") not in ("0", "0.0"):
        launch.changed.append("--loss_type real: its KL is averaged over trajectories, there over tokens")
    if _one(given, "loss_type") == "bnpo":
        launch.changed.append("--loss_type bnpo: tokens are averaged over an update, there over each device's batch")
    return sampled // trained * iterations


def _variables_in_batch(given: _Given, launch: Launch) -> None:
    """A batch is counted with what the shell's variables are where nobody sets them, and that is said."""
    sizes = " ".join(value for key in (*_BATCH, "num_generations", "num_iterations") for value in given.get(key, ()))
    ranks = " ".join(word for word in launch.added if "NPROC_PER_NODE" in word or "NNODES" in word)
    if "$" in sizes + ranks:
        launch.notes.append("the batch is that of the shell's variables where nobody sets them")


def _no_batch(given: _Given, sizes: _Given, launch: Launch, why: str) -> None:
    """The sizes that a command gives make no batch."""
    for key in sizes:
        del given[key]
    if sizes:
        named = " ".join(f"--{key} {' '.join(values)}" for key, values in sizes.items())
        launch.refused.append(
            f"{named}: {why}; give data.train_batch_size and actor_rollout_ref.actor.ppo_mini_batch_size in prompts, "
            "or the flags as numbers that fit"
        )


def _ranks(launch: Launch) -> int | None:
    """Processes that train: one unless NPROC_PER_NODE and NNODES say otherwise."""
    words = dict(word.partition(" ")[0].split("=", 1) for word in launch.added)
    total = 1
    for key in ("trainer.n_workers_per_node", "trainer.nnodes"):
        found = ENV.fullmatch(words.get(key, "1"))
        text = found.group(2) if found else words.get(key, "1")
        if not text or not text.isdigit():
            return None
        total *= int(text)
    return total


def _counted_in_updates(given: _Given, updates: int | None, launch: Launch) -> None:
    """`max_steps`, `save_steps` and `eval_steps` count updates there and steps here."""
    for key in ("max_steps", "save_steps", "eval_steps"):
        number = _number(given, key)
        if number is None and (_one(given, key) in (None, "-1") or key != "max_steps"):
            continue
        if updates is None:
            launch.changed.append(f"--{key} {_one(given, key)}: it counts updates there, steps here")
        elif updates > 1 and number is not None:
            given[key] = [str(max(1, -(-number // updates)))]
            launch.notes.append(f"--{key} {number}: updates there, of which a step here has {updates}: {given[key][0]}")
    if _one(given, "max_steps") == "-1":
        del given["max_steps"]
    saves = _one(given, "save_strategy")
    if saves == "epoch":
        launch.dropped.append("--save_strategy epoch: set trainer.save_freq to an epoch")
    elif saves == "no":
        launch.added.append("trainer.save_freq=-1 # --save_strategy no")
    if saves in ("no", "epoch"):
        given.pop("save_steps", None)
    if 0 < _fraction(given, "save_steps") < 1 or 0 < _fraction(given, "eval_steps") < 1:
        launch.dropped.append("--save_steps, --eval_steps as a share of the run: give trainer.save_freq and .test_freq")
        given.pop("save_steps", None)
        given.pop("eval_steps", None)
        return
    steps = str(-(-_UPDATES_BETWEEN // (updates or 1)))
    if "save_steps" not in given and saves not in ("no", "epoch"):
        launch.added.append(f"save_steps={steps} # {DEFAULT}: {_UPDATES_BETWEEN} updates")
    if "val_dataset" not in given:
        return
    if "eval_steps" not in given and _one(given, "eval_strategy") in (None, "steps"):
        as_saved = "-1" if saves == "no" else _one(given, "save_steps")
        why = "as often as it saves" if as_saved else f"{_UPDATES_BETWEEN} updates"
        launch.added.append(f"eval_steps={as_saved or steps} # {DEFAULT}: {why}")
    if "eval_on_start" not in given:
        launch.added.append(f"trainer.val_before_train=False # {DEFAULT}")


def _fraction(given: _Given, key: str) -> float:
    try:
        return float(_one(given, key) or 0)
    except ValueError:
        return 0.0


def _schedule(given: _Given, launch: Launch) -> None:
    """`cosine_with_min_lr` has its last rate in `lr_scheduler_kwargs`."""
    text = _one(given, "lr_scheduler_kwargs")
    if text is None:
        return
    rate = re.fullmatch(r"""\s*\{\s*["']?(min_lr|min_lr_rate)["']?\s*:\s*([\d.eE+-]+)\s*\}\s*""", text)
    peak = _fraction(given, "learning_rate")
    if rate is None or (rate[1] == "min_lr" and not peak):
        return
    share = float(rate[2]) / (peak if rate[1] == "min_lr" else 1)
    del given["lr_scheduler_kwargs"]
    launch.added.append(f"actor_rollout_ref.actor.optim.min_lr_ratio={share:g} # lr_scheduler_kwargs {text}")


def _warmup(given: _Given, launch: Launch) -> None:
    """`--warmup_steps` counts where both are set."""
    if "warmup_ratio" in given and given.get("warmup_steps", ["0"]) != ["0"]:
        [ratio] = given.pop("warmup_ratio")
        launch.dropped.append(f"--warmup_ratio {ratio}: --warmup_steps is set, and counts")


def _prompt_length(given: _Given, launch: Launch) -> None:
    """ms-swift takes prompts as long as the model does; here a prompt leaves tokens for an answer."""
    whole = _number(given, "vllm_max_model_len") or launch.model_length
    longest = _number(given, "max_length")
    if "max_length" not in given:
        length = min(_PROMPT_LENGTH, whole - 1) if whole else _PROMPT_LENGTH
        why = "ms-swift takes prompts as long as the model does; longer ones are cut"
        launch.added.append(f"data.max_prompt_length={length} # {why}")
    elif whole is not None and longest is not None and longest >= whole:
        given["max_length"] = [str(whole - 1)]
        launch.notes.append(
            f"--max_length {longest}: {whole - 1}, so that a token fits into --vllm_max_model_len {whole}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Rollout servers


def _rollout_server(given: _Given, launch: Launch) -> None:
    """`swift rollout`: how many engines it has, on which devices."""
    count = _number(given, "vllm_data_parallel_size") or 1
    given.pop("vllm_data_parallel_size", None)
    launch.servers += count
    launch.model_length = _number(given, "vllm_max_model_len")
    launch.server_devices += [d for d in launch.env.pop("CUDA_VISIBLE_DEVICES", "").split(",") if d]


def _server(given: _Given, launch: Launch) -> None:
    """A rollout server of the script's own becomes one that the run launches."""
    if _one(given, "vllm_mode") != "server":
        for key in ("vllm_server_host", "vllm_server_port", "vllm_server_base_url"):
            if key in given:
                launch.dropped.append(f"--{key} {' '.join(given.pop(key))}: without --vllm_mode server nobody asks it")
        return
    launch.wants_server = True
    given["use_vllm"] = ["true"]  # the engine of every `swift rollout`
    hosts = given.get("vllm_server_host", ["127.0.0.1"])
    for key in ("vllm_mode", "vllm_server_host"):
        given.pop(key, None)
    ports = given.pop("vllm_server_port", None) or ["8000"]
    urls = given.pop("vllm_server_base_url", None)
    if urls is None and hosts and all(host in _HERE for host in hosts):
        count = max(launch.servers, 1)
        launch.added.append(
            f"actor_rollout_ref.rollout.launch_servers={count} # --vllm_mode server: the run starts its own"
        )
        _join_devices(launch)
        return
    if urls is None:
        hosts = hosts or [f"server-{k + 1}" for k in range(max(launch.started.count("swift rollout"), 1))]
        ports = ports * len(hosts) if len(ports) == 1 else ports
        urls = [f"http://{host}:{port}" for host, port in zip(hosts, ports)]
    launch.overrides.append(
        override("actor_rollout_ref.rollout.servers", urls)
        if len(urls) > 1
        else f"actor_rollout_ref.rollout.servers=['{urls[0]}']"
    )
    of_servers = (
        "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_max_num_seqs", "vllm_enforce_eager",
        "vllm_limit_mm_per_prompt", "vllm_enable_prefix_caching",
    )  # fmt: skip
    for key in of_servers:
        if key in given:
            launch.dropped.append(f"--{key} {' '.join(given.pop(key))}: the servers have their own")
    theirs = [word for word in launch.overrides if word.partition("=")[0] in of_servers]
    launch.overrides = [word for word in launch.overrides if word not in theirs]
    launch.changed.append(
        f"--vllm_server_host: the servers ({', '.join(urls)}) are vLLM's, started there before the run "
        f"(docs/vllm.md#servers){', with ' + ', '.join(theirs) if theirs else ''}; put their addresses in"
    )


def _join_devices(launch: Launch) -> None:
    """The run has the devices of its trainer and, behind them, those of its servers."""
    own = [d for d in launch.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    more = [d for d in launch.server_devices if d not in own]
    if own and more and not any("$" in d for d in own + more):
        launch.env["CUDA_VISIBLE_DEVICES"] = ",".join(own + more)


# ----------------------------------------------------------------------------------------------------------------------
# Rows, sampling, trackers


def _rows(given: _Given, launch: Launch) -> None:
    """`--dataset name#500` is 500 of its rows. The number is taken off, and so is what names the hub."""
    for key in ("dataset", "val_dataset"):
        if key in given:
            names, found = _names_of(given[key])
            given[key] = names
            limit = "train" if key == "dataset" else "val"
            if len(set(found)) == 1 and found[0] is not None:
                launch.added.append(
                    f"data.{limit}_max_samples={found[0]} # the number behind the data set's name; the first ones"
                )
            elif len(set(found)) > 1:
                launch.changed.append(
                    f"--{key} {' '.join(given[key])}: of these {', '.join(f or 'all' for f in found)} rows are taken "
                    "there; cut the files"
                )
            files = [name for name in names if not name.endswith((".jsonl", ".json", ".parquet"))]
            if files and not all("$" in name for name in files):
                launch.notes.append(
                    f"--{key} {' '.join(files)}: data sets are not read by name: prepare a file with the columns "
                    "messages and solution and the others that the rewards read, and put its path in"
                )
    share = _fraction(given, "split_dataset_ratio")
    if share:
        launch.changed.append(f"--split_dataset_ratio {share:g}: all rows are trained on; validation is data.val_files")
        del given["split_dataset_ratio"]


def _names_of(values: Iterable[str]) -> tuple[list[str], list[str | None]]:
    names, counts = [], list[str | None]()
    for value in values:
        found = re.fullmatch(r"(.+)#(\d+)", value)
        names.append(re.sub(r"^(?:hf|ms)::", "", found[1] if found else value))
        counts.append(found[2] if found else None)
    return names, counts


def _sampling(given: _Given, launch: Launch) -> None:
    """Training draws from the whole distribution."""
    cut = [
        f"--{key} {_one(given, key)}" for key, off in _SAMPLES.items() if key in given and not _same(given[key], off)
    ]
    for key in _SAMPLES:
        given.pop(key, None)
    if cut:
        launch.changed.append(
            f"{', '.join(cut)}: training draws from the whole distribution, which is also the one that the loss is of; "
            "there what is drawn is bent, and the loss does not know"
        )


def _same(values: list[str], text: str) -> bool:
    try:
        return float(values[0]) == float(text) or (text == "-1" and float(values[0]) == 0)
    except (ValueError, IndexError):
        return False


def _changed(given: _Given, launch: Launch) -> None:
    """What has a counterpart that is not quite the same."""
    if _one(given, "sleep_level") not in (None, "0") and _one(given, "use_vllm") == "true":
        launch.changed.append(
            f"--sleep_level {given.pop('sleep_level')[0]}: vLLM engines keep their GPU memory while training runs. "
            "Choose a --vllm_gpu_memory_utilization that leaves memory for training, or "
            "actor_rollout_ref.rollout.name=sglang"
        )
    if _one(given, "async_generate") == "true":
        del given["async_generate"]
        launch.changed.append(
            "--async_generate true: there every rollout is by the weights of the step before; here by those of the "
            "same step, or of at most one before with trainer.max_staleness=1 and engines on separate devices"
        )
    adapters = (_one(given, "tuner_type") or _one(given, "train_type") or "lora") == "lora"
    dropout = _one(given, "lora_dropout")
    if adapters and (dropout is None or _fraction(given, "lora_dropout")):
        given.pop("lora_dropout", None)
        launch.changed.append(
            f"--lora_dropout {dropout or '0.05, its default'}: adapters are trained without dropout, as the policy "
            "that samples has none"
        )
    if _one(given, "template") is not None:
        launch.changed.append(
            f"--template {given.pop('template')[0]}: the model's own chat template writes prompts; another one is "
            "actor_rollout_ref.model.custom_chat_template"
        )
    quantile = _fraction(given, "top_entropy_quantile")
    if 0 < quantile < 1:
        launch.changed.append(
            f"--top_entropy_quantile {quantile:g}: of an update's tokens, there of those of each device's batch"
        )
    _vision(given, launch)
    pixels = launch.env.pop("MAX_PIXELS", None)
    if pixels is not None:
        launch.changed.append(
            f"MAX_PIXELS={pixels}: images are of the size that the model's processor gives them; set max_pixels in its "
            "preprocessor_config.json"
        )


def _vision(given: _Given, launch: Launch) -> None:
    """A vision tower and its projector are trained there only on request; here both or neither."""
    tower, projector = (given.pop(key, ["true"]) == ["false"] for key in ("freeze_vit", "freeze_aligner"))
    launch.added.append(f"actor_rollout_ref.model.freeze_vision={str(not tower).lower()} # --freeze_vit")
    if tower != projector:
        launch.changed.append(
            f"--freeze_vit {str(not tower).lower()} --freeze_aligner {str(not projector).lower()}: the projector is "
            "trained with its tower, or not with it"
        )


def _trackers(given: _Given, launch: Launch) -> None:
    """Trackers that are not offered are left out, and said."""
    names = given.get("report_to", [])
    for name in [n for n in names if n not in _TRACKERS]:
        launch.dropped.append(f"--report_to {name}: not offered; every number is in metrics.jsonl")
    if names:
        given["report_to"] = [n for n in names if n in _TRACKERS] or ["none"]
