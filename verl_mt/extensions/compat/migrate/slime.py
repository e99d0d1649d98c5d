"""slime's command: `python train.py`.

Most flags are one row of `aliases/slime.txt`. Here stands what several flags mean together, and what slime does where
its command says nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from verl_mt.config.hydra_source import read_yaml
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases.families import families
from verl_mt.extensions.compat.migrate.launch import ENV, Launch, by_flag, override, parses
from verl_mt.extensions.compat.migrate.shell_values import without_variables
from verl_mt.extensions.compat.migrate.slime_layout import settle_layout
from verl_mt.extensions.compat.rewards.rm_hub import check_rm_type
from verl_mt.extensions.compat.translate import translate_flags
from verl_mt.plugins import suggest

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LONGEST_PROMPT, SHORTEST_BOUND = 8192, 2048
"""slime leaves no row out for its prompt; a bound that there has to be here is between these, as passes allow."""
LONGEST_RESPONSE = 24576
"""Of all turns together, which slime does not bound: with the prompt, the 32768 tokens of most models."""
NO_LAST_EPOCH = 1_000_000
"""`--num-rollout` alone ends a run."""
_ROLLOUTS = "slime.rollout."
_OWN_ROLLOUT = {"sglang_rollout.generate_rollout", "sglang_rollout"}
_ASYNC_ROLLOUT = "fully_async_rollout.generate_rollout_fully_async"
_SFT = "supervised training is python -m verl_mt.sft"
_OWN_LOSS = "a custom loss is actor_rollout_ref.actor.policy_loss (docs/your_own_algorithm.md)"
_DISTILLS = "distillation from a teacher's log-probs is not offered; a custom reward in reward.path can call a teacher"
_SLICED = re.compile(r"(?P<file>.+)@\[(?P<first>\d*):(?P<last>\d*)\]")
_QUANTIZED = re.compile(r"[-_](?:fp8|int4|int8|w4a16|nvfp4|mxfp4|awq|gptq)$", re.IGNORECASE)
_FULL = re.compile(r"[-_](?:bf16|fp16|hf)$", re.IGNORECASE)
_MEGATRON = re.compile(r"[-_](?:torch[-_]dist|mcore|megatron)$")


class Flags:
    """The flags of a command that nothing has settled yet, and the notes on the others."""

    def __init__(self, words: list[str], launch: Launch):
        self.left = {flag.removeprefix("--").replace("-", "_"): values for flag, values in by_flag(words)}
        self.launch = launch
        self.context_parallel = self.whole("context_parallel_size") or 1

    def __contains__(self, key: str) -> bool:
        return key in self.left

    def first(self, key: str) -> str | None:
        """Its first value; None where it is not set or has none."""
        return next(iter(self.left.get(key, [])), None)

    def pop(self, key: str) -> str | None:
        found = self.first(key)
        self.left.pop(key, None)
        return found

    def number(self, key: str) -> float | None:
        """Of a variable its default, which is noted; None where it is not set, or only a shell knows it."""
        text = self.first(key)
        plain = None if text is None else without_variables(text)
        try:
            number = None if plain is None else float(plain)
        except ValueError:
            return None
        if number is not None and plain != text:
            note = f"{flag_of(key)} {text}: numbers that are computed from it here take {plain}"
            self.launch.notes += [] if note in self.launch.notes else [note]
        return number

    def whole(self, key: str) -> int | None:
        number = self.number(key)
        return None if number is None or number != int(number) else int(number)

    def drop(self, key: str, why: str) -> None:
        """It has nothing to set here."""
        if key in self.left:
            shown = [] if key == "wandb_key" else self.left.pop(key)
            self.left.pop(key, None)
            self.launch.dropped.append(f"{' '.join([flag_of(key), *shown])}: {why}")

    def change(self, key: str, why: str) -> None:
        """It means something else here."""
        if key in self.left:
            self.launch.changed.append(f"{' '.join([flag_of(key), *self.left.pop(key)])}: {why}")

    def add(self, word: str, why: str) -> None:
        self.launch.added.append(f"{word} # {why}")

    def refuse(self, key: str, why: str) -> None:
        self.launch.refused.append(f"{' '.join([flag_of(key), *self.left.pop(key, [])])}: {why}")


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def read_slime(words: list[str], name: str, launch: Launch) -> None:
    flags = Flags(words, launch)
    if _is_something_else(flags) or settle_layout(flags):
        return
    if name == "train_async.py":
        launch.changed.append(
            "train_async.py: there a step trains on rollouts of the step before; here on those by its own weights, or "
            "by those of at most one before with trainer.max_staleness=1 and engines on separate devices"
        )
    for settle in (_own_settings, _model, _batches, _engines, _validation, _lengths, _data, _saving, _schedule, _loss):
        settle(flags)
    _reward(flags)
    _rest(flags)


def _is_something_else(flags: Flags) -> bool:
    """A command that does not train by reinforcement, or by a custom loop: the one reason is enough."""
    path = flags.first("rollout_function_path") or ""
    own = path.removeprefix(_ROLLOUTS)
    if flags.first("loss_type") == "sft_loss" or own.startswith(("sft_rollout", "cpt_rollout")):
        flags.launch.refused.append(f"--loss-type sft_loss: {_SFT}")
    elif flags.first("loss_type") == "custom_loss" or "custom_loss_function_path" in flags:
        flags.refuse("custom_loss_function_path", _OWN_LOSS)
    elif "use_opd" in flags or "opd_type" in flags:
        flags.launch.refused.append(f"--use-opd: {_DISTILLS}")
    elif path.startswith(_ROLLOUTS) and own in _OWN_ROLLOUT:
        flags.left.pop("rollout_function_path")
    elif path.endswith(_ASYNC_ROLLOUT):
        flags.change("rollout_function_path", "its rollouts are by older weights; here each is by its step's")
    elif flags.first("loss_type") not in (None, "policy_loss"):
        flags.refuse("loss_type", f"expected policy_loss; {_OWN_LOSS}")
    flags.left.pop("loss_type", None)
    return bool(flags.launch.refused)


def _own_settings(flags: Flags) -> None:
    """`--custom-config-path`: a file of attributes of `args`; those that are flags of slime count as such."""
    path = flags.first("custom_config_path")
    if path is None:
        return
    file = Path(path)
    if not file.is_file():
        flags.refuse(
            "custom_config_path",
            "the file is not here, so that it is not known what it sets; run this where it lies, or write its lines "
            f"as {ROLLOUT}.custom_generate_kwargs={{name:value,...}}",
        )
        return
    flags.pop("custom_config_path")
    known = families()["slime"].rows
    for key, value in (read_yaml(file) or {}).items():
        if key in known and not known[key].switch:
            flags.left[key] = [str(v) for v in value] if isinstance(value, list) else [str(value)]
        elif key in known:
            flags.left.pop(key, None)
            if value:
                flags.left[key] = []
        else:
            flags.launch.overrides.append(f"++{ROLLOUT}.custom_generate_kwargs.{key}={_literal(value)}")


def _literal(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return str(value)
    if value is None:
        return "null"
    return override("x", [str(v) for v in value] if isinstance(value, list) else [str(value)]).partition("=")[2]


def _model(flags: Flags) -> None:
    """Weights are started from `--ref-load`, which is Megatron's form of a folder that stands beside it; the HF
    checkpoint gives the tokenizer, the shape, and what engines are built from."""
    hf, ref = ((flags.first(key) or "").rstrip("/") for key in ("hf_checkpoint", "ref_load"))
    stem = _MEGATRON.sub("", ref)
    base = _QUANTIZED.sub("", hf)
    if ref and hf and (ref.startswith(hf) or _name(stem) in (_name(hf), _FULL.sub("", _name(hf)))):
        flags.drop("ref_load", "the reference policy is the model that training starts from")
    elif ref and hf and stem != ref:
        flags.left["hf_checkpoint"] = [stem]
        if base != hf and _name(base) == _name(stem):
            why = f"engines sample with quantized weights there; here with the actor's own, and the model is {stem}"
            flags.launch.changed.append(f"--hf-checkpoint {hf}: {why}, of which --ref-load was made")
        else:
            why = f"weights are started from it: the model is {stem}, of which it was made, with the tokenizer of {hf}"
            flags.launch.changed.append(f"--ref-load {ref}: {why}")
            flags.launch.overrides.append(override("actor_rollout_ref.model.tokenizer_path", [hf]))
        flags.left.pop("ref_load")
    elif base != hf:
        flags.refuse("hf_checkpoint", "its weights are quantized, and cannot be trained; give the folder of the others")
    flags.add(
        "actor_rollout_ref.model.dtype=bfloat16", "slime's passes and engines; the optimizer keeps float32 weights"
    )
    load, save = ((flags.first(key) or "").rstrip("/") for key in ("load", "save"))
    if load and (load == save or (save and _name(load) == _name(save))):
        flags.drop("load", "the same command goes on from its newest checkpoint")
    elif load and load in (hf, ref):
        flags.drop("load", "it is the model that training starts from")


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _batches(flags: Flags) -> None:
    """Optimizer steps count samples there and prompts here."""
    n = flags.whole("n_samples_per_prompt") if "n_samples_per_prompt" in flags else 1
    if "n_samples_per_prompt" not in flags:
        flags.add(f"{ROLLOUT}.n=1", "slime's default")
    batch, steps, samples = (
        flags.whole(key) for key in ("rollout_batch_size", "num_steps_per_rollout", "global_batch_size")
    )
    mini = f"{ACTOR}.ppo_mini_batch_size"
    if steps and batch and n and batch % steps == 0:
        flags.add(f"{mini}={batch // steps}", f"{batch} prompts in {steps} optimizer steps")
        flags.left.pop("num_steps_per_rollout")
        if samples == batch * n // steps:
            flags.left.pop("global_batch_size")
    elif samples and n and samples % n == 0:
        flags.add(f"{mini}={samples // n}", f"global batch of {samples} samples / {n} samples per prompt")
        flags.left.pop("global_batch_size")
    elif not {"num_steps_per_rollout", "global_batch_size"} & flags.left.keys():
        flags.launch.changed.append(
            "neither --global-batch-size nor --num-steps-per-rollout: here a rollout is one optimizer step; there it "
            "depends on the number of devices"
        )
    if "dynamic_sampling_filter_path" in flags:
        flags.add("algorithm.filter_groups.max_num_gen_batches=0", "slime samples until the batch is full")
    flags.change("over_sampling_batch_size", "here as many further prompts are sampled as are missing, none too many")
    if "partial_rollout" in flags:
        flags.drop("mask_offpolicy_in_partial_rollout", "nothing is sampled by two policies here")
    flags.change(
        "partial_rollout",
        "every rollout is finished before its step here, and so by one policy; with data.over_sample and "
        "trainer.max_staleness unfinished ones go on for the next steps",
    )


def _engines(flags: Flags) -> None:
    if ENV.search(flags.first("actor_num_gpus_per_node") or ""):
        flags.add("trainer.placement=ray", "several ranks need it")
    if "colocate" in flags:
        flags.drop("rollout_num_gpus", "with --colocate engines have the actor's GPUs")
    flags.change("rollout_num_gpus", "the engine lives beside the actor here (colocated); it samples the same")
    flags.change("deterministic_mode", "runs are repeated bit for bit with the engine local (trainer.deterministic)")
    for key in [key for key in flags.left if key.startswith("sglang_speculative_")]:
        flags.drop(key, "the engine samples without a draft model; only speed depends on it")
    flags.change("sglang_enable_deterministic_inference", "samples are by chance: the engine's requests carry no seed")
    for key in [key for key in flags.left if key.startswith(("sglang_router_", "router_"))]:
        if key not in ("sglang_router_ip", "sglang_router_port"):
            flags.drop(key, "there is no router here")
    if "rollout_max_context_len" in flags:
        flags.drop("sglang_context_length", "--rollout-max-context-len bounds a sequence")
    flags.drop("sglang_server_concurrency", "it is actor_rollout_ref.rollout.max_concurrent, and all of a step here")


def _lengths(flags: Flags) -> None:
    """A generate function asks for `--rollout-max-response-len` tokens in each of its turns; without one there is one
    turn. Lengths that slime does not bound have a bound here, which a pass of `--max-tokens-per-gpu` holds."""
    context = flags.whole("rollout_max_context_len") or flags.whole("sglang_context_length")
    response = flags.whole("rollout_max_response_len")
    prompt, in_pass = flags.whole("rollout_max_prompt_len"), _tokens_of_a_pass(flags)
    several = "custom_generate_function_path" in flags
    if prompt is None:
        prompt = LONGEST_PROMPT
        if in_pass is not None and response is not None:
            prompt = max(SHORTEST_BOUND, min(prompt, in_pass // 4 if several else in_pass - response))
        prompt = context - 1 if context else prompt
        why = "slime's default" if context else "slime leaves none out; longer prompts are left out here, and counted"
        flags.add(f"data.max_prompt_length={prompt}", why)
        if several and not context:
            flags.launch.changed.append(f"data.max_prompt_length={prompt}: {why}")
    if response is None:
        return
    everything = response
    if several:
        flags.left.pop("rollout_max_response_len")
        flags.launch.overrides.append(f"{ROLLOUT}.max_tokens_per_turn={response}")
        everything = context or max(2 * response, LONGEST_RESPONSE if in_pass is None else in_pass - prompt)
        why = "--rollout-max-response-len bounds each turn"
        flags.add(
            f"{ROLLOUT}.response_length={everything}", f"{why}; all turns together have the context" if context else why
        )
        if not context:
            flags.launch.changed.append(
                f"{ROLLOUT}.response_length={everything}: all turns together have no bound there; here a conversation "
                "ends where a pass is full"
            )
    longest = context or prompt + everything
    if in_pass is not None and in_pass < longest:
        flags.add(f"{ACTOR}.ppo_max_token_len={longest}", "a pass holds the longest sequence; only memory differs")
    elif in_pass is not None:
        flags.add(f"{ACTOR}.ppo_max_token_len={in_pass}", "--max-tokens-per-gpu, of all ranks that share a sequence")


def _tokens_of_a_pass(flags: Flags) -> int | None:
    """Of `--max-tokens-per-gpu`, which counts on each of the ranks that share a sequence."""
    tokens, ranks = flags.whole("max_tokens_per_gpu"), flags.context_parallel
    if tokens is None:
        if "max_tokens_per_gpu" not in flags:
            flags.add(f"{ACTOR}.ppo_micro_batch_size={flags.whole('micro_batch_size') or 1}", "slime's default")
        return None
    flags.left.pop("max_tokens_per_gpu")
    return tokens * ranks


def _data(flags: Flags) -> None:
    if "input_key" not in flags:
        flags.add("data.prompt_key=input", "slime's default")
    if "rollout_shuffle" not in flags:
        flags.add("data.shuffle=False", "slime's default")
    if "apply_chat_template" not in flags:
        if "custom_generate_function_path" in flags:
            flags.launch.overrides.append("data.apply_chat_template=False")
        else:
            flags.launch.refused.append(
                "without --apply-chat-template the prompt column is a text that is sent as it is; here messages are "
                "always rendered: add the flag where the rows hold messages"
            )
    file = _SLICED.fullmatch(flags.first("prompt_data") or "")
    if file is not None and file["first"] in ("", "0") and file["last"]:
        flags.left["prompt_data"] = [file["file"]]
        flags.launch.overrides.append(f"data.train_max_samples={file['last']}")
    elif file is not None:
        flags.refuse("prompt_data", "rows from the middle of a file; write them to a separate file")
    media = flags.first("multimodal_keys")
    template = flags.first("apply_chat_template_kwargs")
    if template is not None and template.startswith("{") and (made := _mapping(template)) is not None:
        flags.left.pop("apply_chat_template_kwargs")
        for name, value in made.items():
            flags.launch.overrides.append(f"++actor_rollout_ref.model.template_kwargs.{name}={_literal(value)}")
    if media is not None and _is_json(media, ({"image": "images"}, {"video": "videos"})):
        flags.drop("multimodal_keys", "it is the column that images are in")


def _mapping(text: str) -> dict[str, Any] | None:
    """Of JSON."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _is_json(text: str, values: tuple[Any, ...]) -> bool:
    try:
        return json.loads(text) in values
    except json.JSONDecodeError:
        return False


_OF_VALIDATION = (
    "n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len",
    "eval_max_prompt_len", "eval_max_context_len", "eval_min_new_tokens", "eval_input_key", "eval_label_key",
    "eval_tool_key", "eval_reward_key", "eval_function_path", "eval_prompt_data", "eval_config",
    "skip_eval_before_train",
)  # fmt: skip
_SAMPLED_AS = ("temperature", "top_p", "top_k")


def _validation(flags: Flags) -> None:
    """Nothing is learned from it: what cannot be said here is listed, and never refused."""
    if "eval_interval" not in flags or not {"eval_prompt_data", "eval_config"} & set(flags.left):
        for key in ("eval_interval", *_OF_VALIDATION):
            flags.drop(key, "nothing is validated without --eval-interval and data for it")
        return
    if "eval_config" in flags:
        flags.left.pop("eval_prompt_data", None)
        _validation_file(flags)
    for key in ("eval_input_key", "eval_label_key", "eval_tool_key"):
        if flags.first(key) == flags.first(key.removeprefix("eval_")):
            flags.left.pop(key, None)
        flags.change(key, "validation rows have the columns of training here")
    for key in ("eval_max_prompt_len", "eval_max_context_len", "eval_max_response_len"):
        if flags.first(key) == flags.first(key.replace("eval_", "rollout_")):
            flags.left.pop(key, None)
        flags.change(key, "validation has the limits of training (rollout.response_length)")
    flags.change("eval_function_path", "validation samples as training does")
    flags.change("eval_min_new_tokens", "an answer may be as short as the model likes")
    flags.drop("eval_reward_key", "validation shows every number of a reward")
    files = flags.left.pop("eval_prompt_data", [])
    if files:
        files = files[1::2] if len(files) > 1 else files  # a name before each file
        sliced = [_SLICED.fullmatch(file) for file in files]
        if any(sliced):
            flags.launch.changed.append(f"--eval-prompt-data {' '.join(files)}: validation has all rows of its files")
        paths = [found["file"] if found else file for file, found in zip(files, sliced)]
        shown = ",".join(override("", [path]).removeprefix("=") for path in paths)
        flags.launch.overrides.append(f"data.val_files=[{shown}]")
        for name in _SAMPLED_AS:
            if f"eval_{name}" not in flags and f"rollout_{name}" in flags:
                value = flags.first(f"rollout_{name}")
                flags.add(f"{ROLLOUT}.val_kwargs.{name}={value}", "validation samples as training does")
        flags.add(f"{ROLLOUT}.val_kwargs.greedy_too=False", "slime validates once")


def _validation_file(flags: Flags) -> None:
    """`--eval-config`: data sets, each with its settings; here all are sampled alike."""
    path = flags.left.pop("eval_config")[0]
    if not Path(path).is_file():
        flags.launch.changed.append(f"--eval-config {path}: the file is not here; name its data in data.val_files")
        for key in ("eval_interval", *_OF_VALIDATION):
            flags.left.pop(key, None)
        return
    content = read_yaml(Path(path)) or {}
    section = content.get("eval", content)
    sets = section.get("datasets") or {}
    rows = [{"name": name, **(row or {})} for name, row in sets.items()] if isinstance(sets, dict) else list(sets)
    rows = [(section.get("defaults") or {}) | row for row in rows]
    if not rows or not all(isinstance(row, dict) and row.get("path") for row in rows):
        raise ConfigError(f"--eval-config {path}: expected eval.datasets, each with name and path")
    flags.left["eval_prompt_data"] = [word for row in rows for word in (str(row.get("name")), str(row["path"]))]
    for key in ("n_samples_per_eval_prompt", "temperature", "top_p", "top_k"):
        flag = key if key.startswith("n_") else f"eval_{key}"
        values = {row[key] for row in rows if key in row}
        if len(values) == 1 and all(key in row for row in rows):
            flags.left[flag] = [str(values.pop())]
        elif values:
            flags.launch.changed.append(f"--eval-config {path}: {key} differs; all data sets are sampled alike here")
    others = {key for row in rows for key in row} - {"name", "path", "n_samples_per_eval_prompt", *_SAMPLED_AS}
    if others:
        named = ", ".join(sorted(others))
        flags.launch.changed.append(f"--eval-config {path}: {named}: validation has what training has here")


def _saving(flags: Flags) -> None:
    if "save" not in flags or "save_interval" not in flags:
        flags.drop("save_interval", "without --save nothing is saved but the end")
        flags.add("trainer.save_freq=-1", "slime saves where it is told")
    flags.add("trainer.max_actor_ckpt_to_keep=null", "slime keeps every checkpoint")
    if "num_rollout" in flags:
        flags.drop("num_epoch", "--num-rollout counts where both are set")
        flags.add(f"trainer.total_epochs={NO_LAST_EPOCH}", "--num-rollout alone ends a run")
    if "skip_eval_before_train" in flags:
        flags.left.pop("skip_eval_before_train")
        flags.launch.overrides.append("trainer.val_before_train=False")


def _schedule(flags: Flags) -> None:
    optim = f"{ACTOR}.optim"
    if "lr" not in flags:
        flags.add(f"{optim}.lr=1e-6", "slime's default")
    if "lr_decay_style" not in flags:
        flags.add(f"{optim}.lr_scheduler_type=linear", "Megatron's default")
    if betas := [key for key in ("adam_beta1", "adam_beta2") if key in flags]:
        values = [flags.first("adam_beta1") or "0.9", flags.first("adam_beta2") or "0.999"]
        flags.add(f"{optim}.betas=[{','.join(values)}]", "--adam-beta1, --adam-beta2")
        for key in betas:
            flags.left.pop(key)
    least, peak = flags.number("min_lr"), flags.number("lr") or 1e-6
    if least is not None:
        if flags.first("lr_decay_style") != "constant":
            flags.add(f"{optim}.min_lr_ratio={least / peak:g}", f"--min-lr {least:g} of --lr {peak:g}")
        flags.left.pop("min_lr")
    fraction, steps = flags.number("lr_warmup_fraction"), _optimizer_steps(flags)
    if fraction is not None and (fraction == 0 or steps):
        flags.left.pop("lr_warmup_fraction")
        if fraction:
            why = f"--lr-warmup-fraction {fraction:g} of {steps} optimizer steps"
            flags.add(f"{optim}.lr_warmup_steps={int(fraction * (steps or 0))}", why)
    if flags.whole("lr_decay_iters") == steps and steps:
        flags.left.pop("lr_decay_iters")
    if flags.first("lr_decay_style") == "constant":
        flags.drop("lr_decay_iters", "a constant rate does not decay")


def _optimizer_steps(flags: Flags) -> int | None:
    """Of the whole run, where the command says it."""
    rollouts, batch = flags.whole("num_rollout"), flags.whole("rollout_batch_size")
    mini = next((w for w in flags.launch.added if w.startswith(f"{ACTOR}.ppo_mini_batch_size=")), None)
    if rollouts is None or batch is None or mini is None:
        return None
    return rollouts * batch // int(mini.partition("=")[2].partition(" ")[0])


def _loss(flags: Flags) -> None:
    mode = f"{ACTOR}.loss_agg_mode"
    if "calculate_per_token_loss" in flags:
        flags.left.pop("calculate_per_token_loss")
        flags.add(f"{mode}=token-mean", "--calculate-per-token-loss")
    else:
        flags.add(f"{mode}=seq-mean-token-mean", "slime's default")
    estimator = flags.first("advantage_estimator") or "grpo"
    if estimator in ("gspo", "cispo"):
        flags.left["advantage_estimator"] = ["grpo"]
        flags.add(f"++{ACTOR}.policy_loss.loss_mode={estimator}", f"--advantage-estimator {estimator}")
    if "eps_clip_c" not in flags:
        flags.add(f"{ACTOR}.clip_ratio_c=null", "slime clips twice only with --eps-clip-c")
    _critic(flags, estimator)
    if estimator == "ppo" or estimator.startswith("reinforce_plus_plus"):
        if "normalize_advantages" not in flags:
            why = "advantages are always normalized over the batch here, there only with --normalize-advantages"
            flags.launch.refused.append(f"--advantage-estimator {estimator}: {why}")
        flags.drop("normalize_advantages", f"{estimator} does it")
        if (weight := flags.number("kl_coef")) and "ref_load" not in flags:
            flags.left.pop("kl_coef")
            kind = flags.pop("kl_loss_type") or "k1"
            flags.launch.overrides += [
                "algorithm.use_kl_in_reward=True",
                f"++algorithm.kl_ctrl.kl_coef={weight:g}",
                f"algorithm.kl_penalty={kind}",
            ]
    if flags.number("kl_coef") == 0:
        flags.drop("kl_coef", "no penalty in the reward")
    if "use_kl_loss" not in flags:
        for key in ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl"):
            flags.drop(key, "there is no KL loss without --use-kl-loss")
        return
    if "kl_loss_coef" not in flags:
        flags.add(f"{ACTOR}.kl_loss_coef=0.0", "slime's default")
    if "kl_loss_type" not in flags:
        flags.add(f"{ACTOR}.kl_loss_type=k1", "slime's default")


def _critic(flags: Flags, estimator: str) -> None:
    """Has the actor's optimizer there."""
    if estimator != "ppo":
        return
    for name in ("betas", "lr", "weight_decay", "lr_scheduler_type", "min_lr_ratio"):
        key = {"lr_scheduler_type": "lr_decay_style"}.get(name, name)
        start = f"{ACTOR}.optim.{name}="
        unsaid = next((word.partition(" # ")[0] for word in flags.launch.added if word.startswith(start)), None)
        said = f"{start}{flags.first(key)}" if key in flags else unsaid
        if said is not None and f"critic_{key}" not in flags:
            flags.add(said.replace(ACTOR, "critic"), "the critic's optimizer is the actor's")
    if "value_clip" not in flags:
        flags.add("critic.cliprange_value=0.2", "slime's default")


def _reward(flags: Flags) -> None:
    if "custom_rm_path" in flags:
        flags.drop("rm_type", "--custom-rm-path scores every sample")
        return
    name = flags.first("rm_type")
    if name is None:
        flags.add("reward.path=rm_hub", "the rows' metadata says by which rule each is scored")
        return
    flags.left.pop("rm_type")
    flags.launch.overrides.append(f"++reward.kwargs.rm_type={_literal(name)}")
    flags.add("reward.path=rm_hub", "the reward of --rm-type")
    if not ENV.search(name):
        try:
            check_rm_type(name)
        except ConfigError as error:
            flags.launch.refused.append(f"--rm-type {name}: {error}")


def _rest(flags: Flags) -> None:
    """What is left means by itself what its row of the table says."""
    known = families()["slime"].rows
    for key, values in flags.left.items():
        flag = flag_of(key)
        if key not in known and not key.startswith("sglang_"):
            flags.launch.refused.append(f"{flag}: no counterpart{suggest(key, known)}")
            continue
        word, *more = translate_flags([flag, *values])
        if more and key.startswith("sglang_"):  # a list: --sglang-cuda-graph-bs 1 2 4
            name = f"{ROLLOUT}.engine_kwargs." + key.removeprefix("sglang_")
            whole = all(re.fullmatch(r"-?\d+", value) for value in values)
            word = f"{name}=[{','.join(values)}]" if whole else override(name, values)
            more = []
        flags.launch.overrides.append(override(key, values) if more or not parses(word) else word)
