"""The error tree. Every error that verl_mt raises on purpose is one of these.

::

    VerlMTError
    ├── ConfigError              a key, a value or a combination of keys
    │   └── UnknownKeyError      a key that does not exist (with "did you mean")
    ├── DataError                a data file, a row or a column
    ├── PluginError              a dotted path, a plug-in file or a registered name
    ├── TemplateError            a tokenizer or a chat template that cannot do what is asked
    ├── CheckpointError          a checkpoint or a run directory that cannot be used
    ├── ToolCallError            the MODEL's mistake in a tool call: fed back to it as text
    ├── UserCodeError            a plug-in (reward, interaction, scheduler, ...) raised
    ├── CollapseError            the collapse guard stopped the run, as it was asked to
    ├── WorkerError              a worker process died or failed: the run stops and can be resumed
    ├── LedgerError              tokens, masks or log-probs that do not fit a trajectory
    └── EngineError              the inference engine
        ├── EngineGoneError      it died or was closed: the trajectory is aborted and retried
        └── DeadlineError        it did not answer in time

Error text = what was wrong, what was got, what to do. Plug-in authors raise plain Python exceptions;
one boundary wraps them in `UserCodeError`, which names the tool or function, the row and the turn. What becomes text
there goes through `error_text`, `traceback_text` and `value_text`. They never raise (foreign code's `__str__` may), and
cut and escape (`bounds.printable`). So does the text of every error of the tree.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from verl_mt.bounds import MAX_PAGE_CHARACTERS, MAX_TEXT_CHARACTERS, printable


class VerlMTError(Exception):
    """Base of all errors that verl_mt raises on purpose."""

    exit_status: int = 2
    """Of a command that it ends."""

    def __str__(self) -> str:
        return printable(super().__str__(), MAX_PAGE_CHARACTERS)


class ConfigError(VerlMTError):
    """A configuration key, value or combination that cannot work."""


class NoRoomError(ConfigError):
    """A Ray cluster that has not, or not any more, the machines, CPUs or GPUs that the configuration asks for."""


class UnknownKeyError(ConfigError):
    """A configuration key that does not exist."""


class DataError(VerlMTError):
    """A data file, row or column that cannot be used. Names the file and the row."""


class PluginError(VerlMTError):
    """A dotted path, plug-in file or registered name that does not resolve."""


class TemplateError(VerlMTError):
    """A tokenizer or chat template that cannot do what is asked of it.

    `cause` is the number of the known pitfall (docs/templates.md), or None.
    """

    cause: str | None = None

    def __init__(self, message: str, *, cause: str | None = None):
        super().__init__(f"{message} [{cause}]" if cause else message)
        self.cause = cause


class CheckpointError(VerlMTError):
    """A checkpoint or run directory that cannot be used."""


class ToolCallError(VerlMTError):
    """The model's own mistake in a tool call (bad JSON, unknown tool, wrong arguments).

    Its text is written for the model: it is fed back as the tool's answer, and not cut or escaped before.
    """

    timed_out: bool = False
    """What the call asked for was stopped by the clock: counted as a timeout too."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class UserCodeError(VerlMTError):
    """Code of a plug-in raised. The original exception is the `__cause__`."""


class CollapseError(VerlMTError):
    """The collapse guard saw the run go wrong and stopped it (`trainer.collapse_guard`). Its state is saved."""

    exit_status = 3


class WorkerError(VerlMTError):
    """A worker process died or failed. The run stops, and the same command resumes it from its last checkpoint."""


class LedgerError(VerlMTError, ValueError):
    """Tokens, masks or log-probs that do not fit the trajectory they are appended to."""


class EngineError(VerlMTError):
    """The inference engine refused or failed."""


class EngineGoneError(EngineError):
    """The engine died or was closed. The trajectory is aborted and may be retried."""


class WeightsReplacedError(EngineGoneError):
    """The weights that a conversation was begun by were replaced, and it is to be of one version: it begins again."""


class DeadlineError(EngineError):
    """The engine did not answer before the request's deadline."""


LOSSES = (WorkerError, EngineGoneError)
"""Of processes that died or do not answer. All other errors would most likely come again."""


def error_text(error: BaseException, *, named: bool = False, whole: bool = False) -> str:
    """The text of any exception. Never raises, and can be written as UTF-8.

    Args:
        error: also one whose `__str__` raises. Then the text says so.
        named: with the type's name before it, as in `ValueError: no such row`.
        whole: neither cut nor escaped, for the model.

    Returns:
        `str(error)`. The type's name where that is empty.
    """
    kind, text = type(error).__name__, _text(lambda: str(error))
    if isinstance(text, BaseException):
        return f"{kind} (its text is unknown: __str__ raised {type(text).__name__})"
    if not text:
        return kind
    if not whole:
        text = printable(text, MAX_PAGE_CHARACTERS if isinstance(error, VerlMTError) else MAX_TEXT_CHARACTERS)
    return f"{kind}: {text}" if named else text


def traceback_text(error: BaseException) -> str:
    """The traceback that Python would print, cut in its middle. Never raises, and can be written as UTF-8."""
    text = _text(lambda: "".join(traceback.format_exception(error)))
    if isinstance(text, str):
        return printable(text, MAX_PAGE_CHARACTERS)
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"Traceback (most recent call last):\n{where}{error_text(error, named=True)}\n"


def value_text(value: Any, limit: int = 200) -> str:
    """`repr` of what foreign code returned, cut to `limit` characters. Never raises, and can be written as UTF-8."""
    text = _text(lambda: repr(value))
    if isinstance(text, BaseException):
        return f"a {type(value).__name__} whose __repr__ raised {type(text).__name__}"
    return printable(text if len(text) <= limit else text[: limit - 3] + "...", limit)


def key_text(key: Any) -> str:
    """`str` of a key that foreign code chose, `repr` where that fails. Never raises, and can be written as UTF-8."""
    text = _text(lambda: str(key))
    return text if isinstance(text, str) else value_text(key)


def _text(make: Callable[[], str]) -> str | BaseException:
    try:
        return str.encode(make(), "utf-8", "backslashreplace").decode()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit in a `__str__` is no wish to end the run
        return error
