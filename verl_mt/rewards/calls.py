"""Calling a user's function: off the rollout's loop, always with a deadline, never raising into the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_mt.errors import error_text, traceback_text
from verl_mt.rewards.contract import FailureKind
from verl_mt.user_code import CallTimeout, NotAnException, UserCode


class CallFailed(Exception):
    """A call that raised or was late."""

    def __init__(self, kind: FailureKind, problem: str, traceback_text: str):
        super().__init__(problem)
        self.kind = kind
        self.problem = problem
        self.traceback_text = traceback_text


async def call_with_deadline(
    code: UserCode, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout_s: float
) -> Any:
    """The result of `function(*args, **kwargs)`.

    Raises:
        CallFailed: it raised or was late.
    """
    try:
        return await code.run(function, args, kwargs, timeout_s=timeout_s)
    except CallTimeout:
        raise CallFailed("timeout", f"gave no result within {timeout_s:g} s (reward.timeout_s)", "") from None
    except NotAnException as error:
        raise CallFailed("raised", error_text(error), traceback_text(error.__cause__ or error)) from error
    except Exception as error:
        raise CallFailed("raised", f"raised {error_text(error, named=True)}", traceback_text(error)) from error
