"""What several of ms-swift's flags mean together: rewards and their weights, advantages, the loss, lengths.

`settle` gets what a command or a file sets, each value under the flag's name, and puts ours in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from verl_mt.config.normalize import Item, Outcome, Problem

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
LOSS_MODE = ACTOR + "policy_loss.loss_mode"
NOT_SHARED = ("reward_funcs", "num_generations", "max_completion_length", "scale_rewards", "kl_in_reward", "beta")
"""Flags that no other library has: a command with one of them is ms-swift's."""
LOSSES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "fipo": "token-mean",
    "real": "seq-mean-token-mean",
}
"""ms-swift's losses -> how each makes one number of its tokens."""
_OWN_OPTIONS = {
    "sapo": ("tau_pos", "tau_neg"),
    "real": ("real_tau",),
    "fipo": ("fipo_decay_rate", "fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold"),
}
"""Loss -> the flags that only it reads."""
_PART_OPTIONS = {
    "cosine": (
        "cosine_max_len", "cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct",
        "cosine_max_len_value_correct",
    ),
    "repetition": ("repetition_n_grams", "repetition_max_penalty"),
}  # fmt: skip
"""Registered reward -> the flags that are its arguments."""


class _Flags:
    """The values of one command by the names of the flags."""

    def __init__(self, outcome: Outcome, where: str):
        self.outcome, self.where = outcome, where
        self._by_name = {item.alias: item for item in outcome.items}
        self.overlong: dict[str, float] = {}
        """The weight of the penalty on length, where there is one."""
        self.only_swifts = any(name in self._by_name for name in NOT_SHARED)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str, default: Any = None) -> Any:
        item = self._by_name.get(name)
        return default if item is None else item.value

    def take(self, *names: str) -> dict[str, Any]:
        """Their values. The caller replaces them, which settles them."""
        found = {name: self._by_name.pop(name).value for name in names if name in self._by_name}
        self.outcome.items = [item for item in self.outcome.items if item.alias not in found]
        return found

    def put(self, key: str, value: Any, name: str) -> None:
        """Set one of our keys; `name` is the flag that it comes from."""
        self.outcome.items.append(Item(key, value, name))

    def leave(self, names: Collection[str], why: str) -> None:
        """Flags that set nothing beside the others."""
        for name, value in self.take(*names).items():
            self.outcome.notes.append(f"{name}={value} ({self.where}) has nothing to set: {why}")

    def refuse(self, text: str) -> None:
        self.outcome.problems.append(Problem(f"{text} ({self.where})"))

    def note(self, text: str) -> None:
        self.outcome.notes.append(text)


def settle(outcome: Outcome, where: str) -> None:
    """Put our keys in the place of flags that mean something together; what cannot be is a problem of the outcome."""
    flags = _Flags(outcome, where)
    rules: tuple[Callable[[_Flags], None], ...] = (
        _advantages, _kl, _rewards, _loss, _lengths, _room, _prompts, _engine,
    )  # fmt: skip
    for rule in rules:
        rule(flags)


def _advantages(flags: _Flags) -> None:
    """How rewards are compared, and scaled: each estimator has its own default there."""
    kind = flags.get("advantage_estimator", "grpo") if flags.only_swifts else "grpo"
    scaled = flags.take("scale_rewards").get("scale_rewards")
    if flags.get("loss_type") == "real":
        scaled = "none"  # whatever is given; of an advantage its sign counts
    if kind == "reinforce_plus_plus":
        flags.take("advantage_estimator")
        flags.put("algorithm.adv_estimator", "reinforce_plus_plus_baseline", "advantage_estimator")
    usual = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}.get(kind)
    if scaled is None or (scaled == usual and kind != "grpo"):
        return
    if kind == "grpo" and scaled in ("group", "none"):
        flags.put("algorithm.norm_adv_by_std_in_grpo", scaled == "group", "scale_rewards")
    elif kind == "grpo" and scaled == "gdpo":
        flags.take("advantage_estimator")
        flags.put("algorithm.adv_estimator", "gdpo", "scale_rewards")
        flags.put("algorithm.gdpo_reward_weights", {"score": 1.0}, "scale_rewards")
    else:
        flags.refuse(
            f"scale_rewards={scaled} with advantage_estimator={kind}: not offered; grpo goes with group, none or gdpo, "
            "rloo with none, reinforce_plus_plus with batch"
        )


def _kl(flags: _Flags) -> None:
    """`beta` is the weight of the KL and, by not being 0, its switch; where it enters depends on the estimator."""
    if "beta" not in flags or f"{ACTOR}use_kl_loss" in flags:
        return
    in_reward = flags.take("kl_in_reward").get("kl_in_reward")
    kinds = [item.value for item in flags.outcome.items if item.key == "algorithm.adv_estimator"]
    if in_reward is None:
        in_reward = any(kind in ("rloo", "reinforce_plus_plus_baseline") for kind in kinds)
    (beta,) = flags.take("beta").values()
    # Of a sum over tokens with an estimator that looks at one reward per trajectory nothing else is left than k1's.
    if in_reward and beta:
        flags.put("algorithm.use_kl_in_reward", True, "beta")
        flags.put("algorithm.kl_ctrl", {"type": "fixed", "kl_coef": beta}, "beta")
        flags.put("algorithm.kl_penalty", "k1", "beta")
    else:
        flags.put(f"{ACTOR}kl_loss_coef", beta, "beta")
        flags.put(f"{ACTOR}use_kl_loss", bool(beta), "beta")


def _rewards(flags: _Flags) -> None:
    """One reward by its name, several as their weighted sum; a penalty on length is DAPO's own."""
    if "reward_funcs" not in flags:
        return
    options = {name: flags.take(*keys) for name, keys in _PART_OPTIONS.items()}
    taken = flags.take("reward_funcs", "reward_weights", "soft_cache_length", "soft_max_length")
    names = list(taken["reward_funcs"])
    if "use_gym_env" in flags:
        names += ["gym"] if flags.take("use_gym_env")["use_gym_env"] == "gym" else []
    weights = taken.get("reward_weights")
    weights = [1.0] * len(names) if weights is None else weights if isinstance(weights, list) else [weights]
    if len(weights) != len(names) or not all(isinstance(w, int | float) for w in weights):
        flags.refuse(f"reward_weights={weights}: expected a number for each of {', '.join(names)}")
        return
    weight_of = dict(zip(names, map(float, weights)))
    _soft_overlong(flags, taken, weight_of)
    for name, given in options.items():
        if given and name not in weight_of:
            flags.note(f"{', '.join(given)} ({flags.where}) has nothing to set: reward_funcs does not name {name}")
    if not weight_of:
        return  # refused
    own = {name: _arguments(name, given, flags) for name, given in options.items() if name in weight_of}
    own = {name: arguments for name, arguments in own.items() if arguments}
    _name_rewards(flags, weight_of, own)


def _soft_overlong(flags: _Flags, taken: dict[str, Any], weight_of: dict[str, float]) -> None:
    """`soft_overlong` ends at the longest completion; here it is `reward.overlong_buffer`, which does."""
    cache = taken.get("soft_cache_length")
    weight = weight_of.pop("soft_overlong", None)
    if weight is None:
        if cache is not None:
            flags.put("reward.overlong_buffer.len", cache, "soft_cache_length")
        return
    longest = flags.get("max_completion_length")
    end = taken.get("soft_max_length", longest)
    if cache is None:
        flags.refuse("reward_funcs=soft_overlong needs soft_cache_length")
    elif end != longest:
        flags.refuse(
            f"soft_max_length={end} is not max_completion_length={longest}: the penalty (reward.overlong_buffer) "
            "ends at the longest response"
        )
    elif not weight_of:
        flags.refuse("reward_funcs=soft_overlong alone: a penalty on length needs a reward beside it")
    else:
        flags.put("reward.overlong_buffer.enable", True, "reward_funcs")
        flags.put("reward.overlong_buffer.len", cache, "soft_cache_length")
        # GDPO weighs every number by itself, this one too.
        flags.put("reward.overlong_buffer.penalty_factor", 1.0 if _by_parts(flags) else weight, "reward_funcs")
        flags.overlong = {"overlong": weight}


def _arguments(name: str, given: dict[str, Any], flags: _Flags) -> dict[str, Any]:
    made = {key.removeprefix(f"{name}_"): value for key, value in given.items()}
    if name == "cosine" and "max_len" not in made:
        made["max_len"] = flags.get("max_completion_length", 512)  # ms-swift's default
    return made


def _name_rewards(flags: _Flags, weight_of: dict[str, float], own: dict[str, dict[str, Any]]) -> None:
    by_parts = _by_parts(flags)
    names = list(weight_of)
    if len(names) == 1 and weight_of[names[0]] == 1:
        _weigh_parts(flags, {"score": 1.0})
        flags.put("reward.path", names[0], "reward_funcs")
        if own:
            flags.put("reward.kwargs", own[names[0]], "reward_funcs")
        return
    kwargs: dict[str, Any] = {"rewards": names}
    if not by_parts and set(weight_of.values()) != {1.0}:
        kwargs["weights"] = list(weight_of.values())
    if own:
        kwargs["kwargs"] = own
    flags.put("reward.path", "weighted_sum", "reward_funcs")
    flags.put("reward.kwargs", kwargs, "reward_funcs")
    _weigh_parts(flags, weight_of)


def _by_parts(flags: _Flags) -> bool:
    """GDPO: the numbers of a reward are normalised one by one."""
    return any(item.key == "algorithm.adv_estimator" and item.value == "gdpo" for item in flags.outcome.items)


def _weigh_parts(flags: _Flags, weights: dict[str, float]) -> None:
    flags.outcome.items = [
        replace(item, value=weights | flags.overlong) if item.key == "algorithm.gdpo_reward_weights" else item
        for item in flags.outcome.items
    ]


def _loss(flags: _Flags) -> None:
    """The policy loss, its aggregation and its bounds."""
    name = flags.take("loss_type").get("loss_type")
    level = flags.get("importance_sampling_level")
    if name is None:
        if "delta" in flags:
            _two_sided(flags, by_token=level is None)
        return
    flags.put(f"{ACTOR}loss_agg_mode", LOSSES[name], "loss_type")
    if name in ("cispo", "sapo", "fipo", "real"):
        flags.put(LOSS_MODE, name, "loss_type")
        if level is not None:
            flags.refuse(f"loss_type={name} with a ratio of the sequence (importance_sampling_level): not offered")
    for owner, options in _OWN_OPTIONS.items():
        if name != owner:
            flags.leave(options, f"only loss_type={owner} reads it")
    if name == "cispo":
        _cispo_bounds(flags)
    elif name in ("sapo", "real"):
        flags.leave(("epsilon", "epsilon_high", "delta"), f"{name} has no clip")
    elif "delta" in flags:
        _two_sided(flags, by_token=level is None)
    if name == "fipo":
        _fipo_weights(flags)


def _fipo_weights(flags: _Flags) -> None:
    """`fipo_clip_range` and `fipo_clip_high_only` say between which two numbers a weight stays; none = anywhere."""
    given = flags.take("fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold")
    wide, high_only = given.get("fipo_clip_range", 0.2), given.get("fipo_clip_high_only", True)
    if {"fipo_clip_range", "fipo_clip_high_only"} & given.keys() and isinstance(wide, int | float | None):
        low, high = (1.0 if high_only else 1 - wide, 1 + wide) if wide else (0.0, 1e9)
        flags.put(f"{ACTOR}policy_loss.fipo_weight_low", low, "fipo_clip_range")
        flags.put(f"{ACTOR}policy_loss.fipo_weight_high", high, "fipo_clip_range")
    if "fipo_safety_threshold" in given:
        flags.put(
            f"{ACTOR}policy_loss.fipo_safety_ratio", given["fipo_safety_threshold"] or 0.0, "fipo_safety_threshold"
        )


def _cispo_bounds(flags: _Flags) -> None:
    """ms-swift's CISPO takes `epsilon_high` for the largest ratio itself; ours is its distance from 1."""
    bound = flags.get("epsilon_high", flags.get("epsilon", 0.2))
    flags.take("epsilon", "epsilon_high")
    flags.leave(("delta",), "cispo bounds the ratio by epsilon_high")
    if not isinstance(bound, int | float) or bound < 1:
        flags.refuse(
            f"loss_type=cispo with epsilon_high={bound}: it is the largest ratio there, and below 1 every token's "
            "weight is that constant; give one above 1"
        )
        return
    flags.put(f"{ACTOR}clip_ratio_low", 1.0, "epsilon_high")
    flags.put(f"{ACTOR}clip_ratio_high", float(bound) - 1, "epsilon_high")


def _two_sided(flags: _Flags, *, by_token: bool) -> None:
    """`delta` bounds the ratio where PPO's clip does not: of negative advantages that is the dual clip."""
    delta = flags.get("delta")
    high = flags.get("epsilon_high", flags.get("epsilon", 0.2))
    if delta is None or not isinstance(delta, int | float) or not isinstance(high, int | float):
        return
    if not by_token:
        flags.refuse(f"delta={delta} with a ratio of the sequence: gspo has no such bound")
    elif delta < 1 + high:
        flags.refuse(
            f"delta={delta} is below 1 + epsilon_high: it would bound positive advantages before their clip does"
        )


def _lengths(flags: _Flags) -> None:
    """`max_completion_length` is of each turn in a conversation of several, unless its scope is `total`."""
    if "max_completion_length" not in flags:
        return
    scope = flags.take("completion_length_limit_scope").get("completion_length_limit_scope", "per_round")
    if scope not in ("per_round", "total"):
        flags.refuse(f"completion_length_limit_scope={scope}: expected per_round or total")
    if "multi_turn_scheduler" not in flags or scope == "total":
        return
    (turn,) = flags.take("max_completion_length").values()
    flags.put(f"{ROLLOUT}max_tokens_per_turn", turn, "max_completion_length")
    turns, one = _number(flags.get("max_turns", flags.get("multi_turns"))), _number(turn)
    whole = flags.get("vllm_max_model_len")
    if whole is None and turns is not None and one is not None:
        whole = 2 * turns * one
        flags.note(
            f"max_completion_length={turn} ({flags.where}) is of one turn; there the model's length alone bounds the "
            f"conversation, here it is {ROLLOUT}response_length={whole} tokens, twice what {turns} turns may write"
        )
    if whole is None:
        flags.refuse(
            f"max_completion_length={turn} is of one turn: give vllm_max_model_len or {ROLLOUT}response_length, which "
            "bounds the conversation"
        )
    elif f"{ROLLOUT}response_length" not in flags:
        flags.put(f"{ROLLOUT}response_length", whole, "max_completion_length")


def _room(flags: _Flags) -> None:
    """A forward pass holds the longest sequence; ms-swift has no limit on its tokens."""
    values = {item.key: _number(item.value) for item in flags.outcome.items}
    response, room = values.get(f"{ROLLOUT}response_length"), f"{ACTOR}ppo_max_token_len"
    if response is None or room in values or not flags.only_swifts:
        return
    whole = values.get(f"{ROLLOUT}max_model_len") or (values.get("data.max_prompt_length") or 512) + response
    if whole > 16384:  # the default
        flags.put(room, whole, "max_completion_length")


def _number(value: Any) -> int | None:
    """A whole number, also what stands behind a variable of the shell for when it is not set."""
    found = re.fullmatch(r"\$\{oc\.env:\w+,(\d+)\}", value) if isinstance(value, str) else None
    return int(found[1]) if found else value if isinstance(value, int) else None


def _prompts(flags: _Flags) -> None:
    """`left` cuts prompts that are too long, `delete` leaves them out."""
    if "truncation_strategy" in flags and "data.filter_overlong_prompts" not in flags:
        cut = flags.get("truncation_strategy") != "error"
        flags.put("data.filter_overlong_prompts", not cut, "truncation_strategy")


def _engine(flags: _Flags) -> None:
    """vLLM keeps its memory there unless it is told to sleep, which engines of vLLM do not do here."""
    key = f"{ROLLOUT}free_cache_engine"
    if flags.get("use_vllm") == "vllm" and key not in flags:
        flags.put(key, False, "use_vllm")
        flags.note(f"use_vllm ({flags.where}) -> also {key}=False: vLLM engines keep their memory while training runs")
