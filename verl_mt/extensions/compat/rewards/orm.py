"""ms-swift's outcome rewards: `__call__(completions, **kwargs) -> list[float]`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_mt.data.trajectory import Status, StopReason
from verl_mt.extensions.compat.rewards.batches import BatchReward, as_list
from verl_mt.plugins import listing
from verl_mt.rewards.adapters import messages_of, parameter_names
from verl_mt.rewards.contract import InvalidScore, RewardInput, RunState


class OrmArguments:
    """What stands in for the trainer's arguments, which ms-swift hands to its rewards.

    Args:
        values: `reward.kwargs.args`: name -> value.
    """

    def __init__(self, values: Mapping[str, Any] | None = None):
        vars(self).update(values or {})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r}: ms-swift's arguments are not handed to rewards. Give those that this one reads in "
            f"reward.kwargs.args, for example {{{name}: ...}}"
        )


class _OutcomeReward:
    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    @classmethod
    def from_reward_kwargs(cls, /, **kwargs: Any) -> Any:
        """One with `reward.kwargs`; `args`, which ms-swift's trainer hands to its rewards, is an `OrmArguments`."""
        given = kwargs.get("args")
        if _takes(cls, "args") if given is None else isinstance(given, Mapping):
            kwargs["args"] = OrmArguments(given)
        return cls(**kwargs)


class ORM(_OutcomeReward):
    """Base of ms-swift's outcome rewards. Subclassing it is not required.

    Example:
        >>> class Short(ORM):
        ...     def __call__(self, completions, **kwargs):
        ...         return [1.0 if len(text) < 100 else 0.0 for text in completions]
    """

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(completions, **kwargs)")


class AsyncORM(_OutcomeReward):
    """Base of ms-swift's outcome rewards whose `__call__` is async; subclassing it is not required."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} must implement async __call__(completions, **kwargs)")


def _takes(kind: type, name: str) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


class SwiftReward(BatchReward):
    """ms-swift's `__call__(completions, **kwargs) -> list[float]`: the whole batch in one call.

    `completions` are the texts of the last assistant turns; `kwargs` hold, as lists of the batch's length, the columns
    of the rows, `messages`, `is_truncated`, `finish_reason` (length or stop), `rollout_infos`, `request_id` (the
    trajectory's id), `prompt_id`, `response_token_ids` (one list of ids; in a run of several turns one for each
    assistant message), `solution` and `ground_truth` (where the rows have no such column); and for the whole batch
    `trajectory_inputs`: trajectory id -> its records in order, and `trainer_state` (`TrainerState`).
    """

    signature = "__call__(completions, **kwargs)"
    filled = ("completions", "messages")

    @classmethod
    def recognize(cls, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A function with `completions`."""
        call = _documented_call(function)
        return call if "completions" in parameter_names(call) else None

    async def _score_batch(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        columns = swift_columns(items)
        missing = self._required - columns.keys() - {"completions"}
        if missing:
            raise InvalidScore(
                f"needs the column {', '.join(sorted(missing))}. "
                f"The rows have {', '.join(sorted(items[0].row)) or 'none'}"
            )
        offered = {name: column for name, column in columns.items() if name not in self.kwargs}
        values = await self._call([item.completion for item in items], **offered)
        return as_list(values, len(items))


class TrainerState:
    """`trainer_state` of ms-swift's rewards, under transformers' names.

    Attributes:
        global_step: optimizer updates before this batch was sampled, 0 in the first step.
        max_steps: of the whole run; 0 where nothing is trained.
        num_train_epochs: `trainer.total_epochs`.
        is_world_process_zero, is_local_process_zero: True: rewards are asked once, in the trainer's process.
    """

    is_world_process_zero = True
    is_local_process_zero = True

    def __init__(self, run: RunState):
        self.global_step = run.step * run.updates_per_step
        self.max_steps = run.total_steps * run.updates_per_step
        self.num_train_epochs = run.total_epochs

    def __getattr__(self, name: str) -> Any:
        known = [*vars(self), "is_world_process_zero", "is_local_process_zero"]
        raise AttributeError(f"trainer_state has no {name!r}. It has {listing(known)}")


def swift_columns(items: Sequence[RewardInput]) -> dict[str, Any]:
    """The keyword arguments of an ms-swift reward for a batch, which all come from one rollout."""
    names = list(dict.fromkeys(name for item in items for name in item.row))
    columns: dict[str, Any] = {
        "solution": [item.ground_truth for item in items],
        "ground_truth": [item.ground_truth for item in items],
    }
    columns.update({name: [item.row.get(name) for item in items] for name in names if name != "completions"})
    messages = [messages_of(item) for item in items]
    infos = [dict(item.extra_info.get("rollout_infos") or {}) for item in items]
    ids = [str(item.extra_info.get("trajectory_id", position)) for position, item in enumerate(items)]
    columns["messages"] = messages
    columns["is_truncated"] = [_is_truncated(item) for item in items]
    columns["finish_reason"] = ["length" if cut else "stop" for cut in columns["is_truncated"]]
    columns["rollout_infos"] = infos
    columns["request_id"] = ids
    columns["prompt_id"] = [item.prompt_id for item in items]
    columns["response_token_ids"] = [_response_ids(item) for item in items]
    columns["trainer_state"] = TrainerState(items[0].run if items else RunState())
    columns["trajectory_inputs"] = {
        ids[k]: [
            {**_columns_of(item), "rollout_infos": infos[k], "request_id": ids[k], **record}
            for record in item.extra_info.get("trajectory_inputs") or [{"messages": messages[k]}]
        ]
        for k, item in enumerate(items)
    }
    return columns


def _response_ids(item: RewardInput) -> list[Any]:
    """Copies, like all that a reward may edit."""
    each = [list(ids) for ids in item.message_ids]
    return each if item.several_turns or len(each) > 1 else [i for ids in each for i in ids]


def _columns_of(item: RewardInput) -> dict[str, Any]:
    """The row's columns, with the ground truth where they have none of that name."""
    return {"solution": item.ground_truth, "ground_truth": item.ground_truth, **item.row}


def _is_truncated(item: RewardInput) -> bool:
    reason = item.extra_info.get("stop_reason")
    return reason is not None and reason in set(StopReason) and StopReason(reason).status is Status.TRUNCATED


def _documented_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """ms-swift's document writes `def __call__(completions, **kwargs)` without `self`; such a class works too."""
    call = vars(type(function)).get("__call__")
    if inspect.isfunction(call) and next(iter(inspect.signature(call).parameters), None) == "completions":
        return call
    return function
