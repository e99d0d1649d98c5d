"""What the tables cannot say: values that change, flags that mean something together, and flags as overrides.

A converter has the name by which a row calls it. It gets the value as it was written and returns ours, or `DROP` where
the value adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_mt.config.normalize import COMMAND_LINE, Item
from verl_mt.extensions.compat.aliases import engine_arguments, swift_settle
from verl_mt.extensions.compat.aliases.families import DROP, Alias, Family
from verl_mt.extensions.compat.aliases.swift_settle import LOSSES as SWIFT_LOSSES
from verl_mt.extensions.compat.aliases.table import read_table
from verl_mt.extensions.compat.translate import Translation

MODEL, ACTOR = "actor_rollout_ref.model.", "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."
SWIFT_RANK, SWIFT_ALPHA = 8, 32
SLIME_DELTA = 1e-4
_SWIFT_UNKNOWN = {
    "toolbench": "it compares calls with those of ms-swift's own preparation of its data sets",
    "math": "it compares texts by rules of ms-swift's evaluator; accuracy compares answers",
}
"""Registered rewards of ms-swift that are not offered -> why."""

_ARGUMENTS_AND_TOOLS = ("multi_turn.tool_argument_types", "tool_kwargs.tools_config_file")

Converter = Callable[[Any], Any]


def _one_of(values: dict[Any, Any], expected: str) -> Converter:
    """These values and no others."""

    def convert(value: Any) -> Any:
        try:
            return values[value]
        except (KeyError, TypeError):  # a list has no hash
            raise ValueError(expected.format(value)) from None

    return convert


def _instead(values: dict[Any, Any]) -> Converter:
    """These values have another name here; the others are left as they are."""
    return lambda value: values.get(value, value) if isinstance(value, str) else value


def _if_on(on: Any, off: Any = DROP) -> Converter:
    return lambda value: on if value else off


# ----------------------------------------------------------------------------------------------------------------------
# Values


truncate_side = _one_of(
    {"left": "head", "right": "tail", "middle": "both"}, "expected left, right or middle, got {0!r}"
)
loss_of_level = _one_of(
    {"token": DROP, "sequence": "gspo", "sequence_token": "gspo"},
    "expected token, or sequence or sequence_token (which are gspo: all tokens of a trajectory have one advantage)",
)
adapter_rank = _one_of({"full": 0, "lora": SWIFT_RANK}, "expected full or lora")
decay = _one_of(
    {name: name for name in ("constant", "cosine", "linear")}
    | {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    "expected constant, cosine or linear",
)
scaled = _one_of(
    {"group": "group", True: "group", "none": "none", False: "none", "batch": "batch", "gdpo": "gdpo"},
    "expected group, none, batch or gdpo",
)
swift_loss = _one_of(
    {name: name for name in SWIFT_LOSSES},
    f"expected {', '.join(SWIFT_LOSSES)}; a custom loss is a function, actor_rollout_ref.actor.policy_loss",
)
cut_left = _one_of(
    {"left": "left", "delete": "error"}, "expected left or delete: other prompts than those have no place in a rollout"
)

apart_if_server = _one_of({"colocate": DROP, "server": "servers"}, "expected colocate or server")

dtype = _instead({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
estimator = _instead({"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"})
attention = _instead({"flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2"})

rollout_only, train_only = _if_on("rollout_only"), _if_on("train_only")
with_wandb, with_tensorboard = (_if_on(["console", name], ["console"]) for name in ("wandb", "tensorboard"))
token_or_null = _if_on("token", None)
slime_delta = _if_on(SLIME_DELTA, None)
always_if_true = _if_on("always")
false_if_on, token_mean_if_on = _if_on(False), _if_on("token-mean")
no_gb_if_on = _if_on(0)
vllm_or_local = _if_on("vllm", "local")
greedy_unless_sampled = _if_on(DROP, 0.0)  # sampling adds nothing to the temperature


def stored_dtype(value: Any) -> Any:
    """verl's `model_dtype`: of the weights that the optimizer updates, which are always float32 here."""
    value = dtype(value)
    return DROP if value == "float32" else value


def null_if_false(value: Any) -> Any:
    return None if value is False else value


def async_or_sync(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return "async" if value else "sync"


gym_reward = _if_on("gym")


def gym_env(value: Any) -> dict[str, Any]:
    return {"env": value}


def thinking(value: Any) -> dict[str, bool]:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return {"enable_thinking": value}


def plus_one(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise ValueError("expected a number")
    return value + 1


def bound(value: Any) -> Any:
    """verl writes no bound as -1."""
    return DROP if value in (None, -1, -1.0) else value


def warmup_steps(value: Any) -> Any:
    return 0 if value == -1 else value


def list_of_one(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_list(value: Any) -> Any:
    """One string is a list of one; a list that a shell's quotes left as text is read as JSON."""
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            raise ValueError("neither a name nor a list of names") from None
    return [value]


def rewards_by_name(value: Any) -> Any:
    """One name, or a list of them, which `settle_swift` adds up."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("expected names of rewards")
    for name in names:
        if name in _SWIFT_UNKNOWN:
            raise ValueError(f"{name} is not offered: {_SWIFT_UNKNOWN[name]}. Register a reward of that name")
    return names


def weights(value: Any) -> list[float]:
    try:
        return [float(number) for number in list_of_one(value)]
    except (TypeError, ValueError):
        raise ValueError("expected numbers") from None


def system_text(value: Any) -> Any:
    """ms-swift reads a backslash and an n as the end of a line."""
    return value.replace("\\n", "\n") if isinstance(value, str) else value


def columns(value: Any) -> dict[str, str]:
    """JSON, or a mapping: the file's names -> ours."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError("expected JSON, name in the file -> name") from None
    if not isinstance(value, dict) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ValueError("expected name in the file -> name")
    return value


def mapping(value: Any) -> Any:
    """Arguments of the engine: a mapping, or JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError("expected JSON, argument -> value") from None
    if not isinstance(value, dict):
        raise ValueError("expected arguments with their values")
    return value


def trackers(value: Any) -> list[str]:
    known = ("wandb", "tensorboard", "mlflow", "none")
    names = list_of_one(value)
    if other := [str(name) for name in names if name not in known]:
        raise ValueError(f"{', '.join(sorted(other))}: expected wandb, tensorboard, mlflow or none. See trainer.logger")
    return ["console", *(name for name in names if name != "none")]


def trace_backend(value: Any) -> Any:
    if value in ("weave", "mlflow"):
        raise ValueError(f"{value} is not offered. otel sends spans to any collector of OpenTelemetry")
    return value


def sampler_path(value: Any) -> Any:
    """verl's `pkg://package.module` and `file://samplers.py`, as far as the class's name, which stands apart there."""
    return DROP if value is None else str(value).removeprefix("pkg://").removeprefix("file://")


def in_order(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, list) else value


def engine(value: Any) -> Any:
    if value == "sglang_async":
        return "sglang"
    if value == "vllm_async":
        return "vllm"
    if value in ("hf", "trtllm"):
        raise ValueError(f"{value} is not an engine of verl_mt. Use sglang or vllm (real work) or local (this process)")
    return value


def slime_estimator(value: Any) -> Any:
    if value == "gspo":
        raise ValueError(
            "GSPO is a loss here, over GRPO's advantages: actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
        )
    return "gae" if value == "ppo" else value


def group_filter(path: Any) -> Any:
    if path is None:
        return DROP
    if str(path).rpartition(".")[2] != "check_reward_nonzero_std":
        raise ValueError(
            "only check_reward_nonzero_std has a counterpart: groups whose rewards are all equal are replaced "
            "(algorithm.filter_groups.enable=True). Another filter is algorithm.filter_groups.metric"
        )
    return True


def swift_correction(mode: Any) -> Any:
    """ms-swift's `sequence` is the geometric mean over it; its masks keep the ratio of what they leave."""
    if mode is None:
        return DROP
    level, _, kind = str(mode).rpartition("_")
    levels = {"token": "token", "sequence": "geometric"}
    if level not in levels or kind not in ("truncate", "mask"):
        raise ValueError("expected token_truncate, token_mask, sequence_truncate or sequence_mask")
    made: dict[str, Any] = {"rollout_is": levels[level]}
    return made if kind == "truncate" else made | {"rollout_rs": levels[level], "rollout_rs_threshold_lower": 0.0}


def equal_weights(value: Any) -> Any:
    """verl names GDPO's rewards in a list; they weigh the same unless another one says how much."""
    return DROP if value is None else {str(name): 1.0 for name in list_of_one(value)}


# ----------------------------------------------------------------------------------------------------------------------
# Settings that mean something together: known only once everything that a command or a file sets is there


def settle_verl(outcome: Translation, where: str) -> None:
    _leave_critic(outcome, where)
    _name_sampler(outcome)
    _compute_in_bfloat16(outcome, where)
    _hand_on_arguments(outcome, where)
    _score_whole_responses(outcome, where)
    _place_ranks_on_ray(outcome, where, "trainer.n_gpus_per_node")
    outcome.items = _truncated_sampling(outcome.items)
    engine_arguments.settle(outcome, where)


def settle_slime(outcome: Translation, where: str) -> None:
    _place_ranks_on_ray(outcome, where, "actor_num_gpus_per_node")
    outcome.items = _off_policy_mask(_truncated_sampling(outcome.items))
    _prompt_as_it_is(outcome, where)
    _reward_by_its_rule(outcome, where)


def settle_swift(outcome: Translation, where: str) -> None:
    swift_settle.settle(outcome, where)
    outcome.items = _low_rank_adapters(outcome.items)


def _compute_in_bfloat16(outcome: Translation, where: str) -> None:
    """verl's passes are in bfloat16 where nothing is set; only its later releases have a key for it."""
    key = f"{MODEL}dtype"
    if where == COMMAND_LINE or not outcome.is_whole or any(item.key == key for item in outcome.items):
        return
    outcome.items.append(Item(key, "bfloat16", "actor_rollout_ref.actor.fsdp_config.dtype"))
    outcome.notes.append(f"{where} -> {key}=bfloat16: verl's passes are in bfloat16 where nothing is set")


def _hand_on_arguments(outcome: Translation, where: str) -> None:
    """verl hands a tool what the model wrote, whatever its type: its tools make text of a number themselves."""
    key, tools = (f"actor_rollout_ref.rollout.{name}" for name in _ARGUMENTS_AND_TOOLS)
    named = [item for item in outcome.items if item.key == tools != item.alias and item.value is not None]
    if not named or any(item.key == key for item in outcome.items):
        return
    outcome.items.append(Item(key, "convert", named[0].alias))
    why = "an argument of another simple type reaches the tool there"
    outcome.notes.append(f"{named[0].alias} ({where}) -> also {key}=convert: {why}")


def _score_whole_responses(outcome: Translation, where: str) -> None:
    """verl's functions, which stand in files, read tool results and user turns too."""
    key = "reward.solution_str"
    named = [item for item in outcome.items if item.alias.endswith("custom_reward_function.path")]
    named = [item for item in named if item.value is not None and not str(item.value).isidentifier()]
    if not named or any(item.key == key for item in outcome.items):
        return
    outcome.items.append(Item(key, "response", named[0].alias))
    outcome.notes.append(f"{named[0].alias} ({where}) -> also {key}=response: solution_str has tool results there")


def _place_ranks_on_ray(outcome: Translation, where: str, alias: str) -> None:
    """More than one GPU per node always means Ray workers to them; to us only where the command says so."""
    if any(item.key == "trainer.placement" for item in outcome.items):
        return
    for item in [item for item in outcome.items if item.alias == alias]:
        if isinstance(item.value, int) and item.value > 1:
            outcome.items.append(Item("trainer.placement", "ray", alias))
            outcome.notes.append(f"{alias}={item.value} ({where}) -> also trainer.placement=ray: several ranks need it")


def _prompt_as_it_is(outcome: Translation, where: str) -> None:
    """slime's command renders prompts only with `--apply-chat-template`; a generate function gets the column as it
    is without it."""
    given = {item.key for item in outcome.items}
    names = {item.alias for item in outcome.items}
    generates = "actor_rollout_ref.rollout.custom_generate_function_path" in given
    if "prompt_data" in names and generates and "data.apply_chat_template" not in given:
        outcome.items.append(Item("data.apply_chat_template", False, "prompt_data"))
        outcome.notes.append(
            f"prompt_data ({where}) without apply_chat_template -> also data.apply_chat_template=False: the function "
            "gets the column as it is"
        )


def _reward_by_its_rule(outcome: Translation, where: str) -> None:
    """`--rm-type` names a rule; all rules are one reward here."""
    given = {item.key for item in outcome.items}
    if any(item.alias == "rm_type" for item in outcome.items) and "reward.path" not in given:
        outcome.items.append(Item("reward.path", "rm_hub", "rm_type"))
        outcome.notes.append(f"rm_type ({where}) -> also reward.path=rm_hub, which scores by it")


def _name_sampler(outcome: Translation) -> None:
    """A module and the class in it are two keys there and one here."""
    places = [item for item in outcome.items if item.alias == "data.sampler.class_path"]
    names = [item for item in outcome.items if item.alias == "data.sampler.class_name" and item.value is not None]
    if places and names:
        place = str(places[0].value)
        joined = f"{place}{':' if place.endswith('.py') else '.'}{names[0].value}"
        kept = [item for item in outcome.items if item not in (*places, *names)]
        outcome.items = [*kept, replace(names[0], value=joined)]


def _leave_critic(outcome: Translation, where: str) -> None:
    """Their commands give a critic's settings beside an estimator that has none; there nothing reads them."""
    estimator = ["gae", *(item.value for item in outcome.items if item.key == "algorithm.adv_estimator")][-1]
    if estimator == "gae" or "${" in str(estimator):
        return
    left = [item for item in outcome.items if item.key.startswith("critic.")]
    outcome.items = [item for item in outcome.items if item not in left]
    outcome.notes += [f"{item.alias} ({where}) has nothing to set: {estimator} has no critic" for item in left]


def _truncated_sampling(items: list[Item]) -> list[Item]:
    """A bound alone switches truncated importance sampling on, as it does there; `use_tis=False` switches off what
    its bounds say."""
    named = (ACTOR + "tis_clip", ACTOR + "tis_imp_ratio_cap", "tis_clip", "tis_clip_low")
    bounds = [item for item in items if item.alias in named]
    if any(item.alias == "use_tis" and item.value is None for item in items):
        return [item for item in items if item not in bounds]
    if bounds and not any(item.key == CORRECTION + "rollout_is" for item in items):
        return [*items, replace(bounds[0], key=CORRECTION + "rollout_is", value="token")]
    return items


def _off_policy_mask(items: list[Item]) -> list[Item]:
    """`use_opsm` alone means slime's own bound, and both flags set the same key: one of them gives way."""
    switch = next((item for item in items if item.alias == "use_opsm"), None)
    bounds = [item for item in items if item.alias == "opsm_delta"]
    if switch is None or not bounds:
        return items
    return [item for item in items if (item not in bounds if switch.value is None else item is not switch)]


def _low_rank_adapters(items: list[Item]) -> list[Item]:
    """`--train_type lora` brings ms-swift's rank and alpha where none is set; beside `full` a rank means nothing."""
    kinds = [item for item in items if item.alias in ("train_type", "tuner_type")]
    # The kind of training and a rank are two names of our one key, lora_rank: without this they would be a conflict.
    ranks = [item for item in items if item.key == MODEL + "lora_rank" and item not in kinds]
    adapters = [item for item in kinds if item.value]
    if kinds and ranks:
        items = [item for item in items if item not in (kinds if adapters else ranks)]
    if adapters and not any(item.key == MODEL + "lora_alpha" for item in items):
        items = [*items, replace(adapters[0], key=MODEL + "lora_alpha", value=SWIFT_ALPHA)]
    return items


# ----------------------------------------------------------------------------------------------------------------------
# Flags


def slime_flags(argv: Sequence[str], rows: Mapping[str, Alias]) -> list[str]:
    """slime's `--rollout-batch-size 32` as `rollout_batch_size=32`; a switch (`--use-tis`) is True. All else stays."""
    words = list(argv)
    out: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        row = rows.get(key)
        if word.startswith("--sglang-") and row is None:
            # slime hands these to the engine under SGLang's own names.
            text = value if equals else "True" if not words or words[0].startswith("--") else words.pop(0)
            out.append(f"actor_rollout_ref.rollout.engine_kwargs.{key.removeprefix('sglang_')}={text}")
        elif not word.startswith("--") or "." in key or row is None:
            out.append(word)
        elif equals:
            out.append(f"{key}={value}")
        else:
            out.append(f"{key}={'True' if row.switch or not words else words.pop(0)}")
    return out


def swift_flags(argv: Sequence[str], rows: Mapping[str, Alias]) -> list[str]:
    """`--max_turns 3` as `max_turns=3`, `--external_plugins a.py b.py` as a list; a flag without a value is True.

    What is no flag of ms-swift's stays as it is.
    """
    words = list(argv)
    out: list[str] = []
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key not in rows:
            out.append(word)
            continue
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("-") and "=" not in words[0]:
            values.append(words.pop(0))
        text = "True" if not values else values[0] if len(values) == 1 else json.dumps(values)
        out.append(f"{key}={text}")
    return out


def _rows(name: str) -> dict[str, Alias]:
    return read_table(Path(__file__).with_name(name), globals())


def _defaults(name: str) -> dict[str, tuple[Any, ...]]:
    """`key | value, ...` a line, the values in JSON."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" | ", 1) for line in lines if line and not line.startswith("#")]
    return {key: tuple(json.loads(f"[{values}]")) for key, values in pairs}


_VERL = _rows("verl.txt")


def verl_page() -> list[str]:
    """What the page of all keys says of verl's names, line by line."""
    rows = [row for row in _VERL.values() if row.name != row.to]
    lines = [
        "## verl's aliases",
        "",
        "Read as keys of verl_mt ([migrating from verl](migrating_from_verl.md)). So are the names of",
        "[slime](migrating_from_slime.md) and [ms-swift](migrating_from_ms_swift.md).",
        "",
        "| verl | here | |",
        "|---|---|---|",
    ]
    for row in rows:
        if row.meaning == "renamed":
            below = ".*" if row.covers_below else ""
            lines.append(f"| `{row.name}{below}` | `{row.to}{below}` | {row.why} |")
    lines += [
        "",
        "Accepted where the value agrees with what always happens here; each is named in one printed line:",
        "",
    ]
    lines += ["| verl | accepted values | why |", "|---|---|---|"]
    for row in rows:
        if row.meaning == "fixed":
            shown = [value if isinstance(value, str) else json.dumps(value) for value in row.values or ()]
            accepted = "any" if row.values is None else ", ".join(f"`{value}`" for value in shown)
            lines.append(f"| `{row.name}` | {accepted} | {row.why} |")
    lines += ["", "Refused, with everything below them:", "", "| verl | reason |", "|---|---|"]
    return [*lines, *(f"| `{row.name}` | {row.why} |" for row in rows if row.meaning == "refused")]


VERL = Family(
    _VERL,
    settle_verl,
    defaults=_defaults("verl_defaults.txt"),
    class_prefix="verl.",
    config_folder="verl/trainer/config",
    missing_files={"megatron": _VERL["actor_rollout_ref.actor.megatron"].why},
)
SLIME = Family(_rows("slime.txt"), settle_slime, slime_flags)
MS_SWIFT = Family(_rows("ms_swift.txt"), settle_swift, swift_flags)
TRL = Family(_rows("trl.txt"))
