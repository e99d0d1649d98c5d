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
one boundary wraps them in `UserCodeError`, which names the tool or function, the row and the turn.
"""

from __future__ import annotations


class VerlMTError(Exception):
    """Base of all errors that verl_mt raises on purpose."""

    exit_status: int = 2
    """Of a command that it ends."""


class ConfigError(VerlMTError):
    """A configuration key, value or combination that cannot work."""


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

    Its text is written for the model: it is fed back as the tool's answer.
    """

    timed_out: bool = False
    """What the call asked for was stopped by the clock: counted as a timeout too."""


class UserCodeError(VerlMTError):
    """Code of a plug-in raised. The original exception is the `__cause__`."""


class CollapseError(VerlMTError):
    """The collapse guard saw the run go wrong and stopped it (`trainer.collapse_guard`). Its state is saved."""

    exit_status = 3


class WorkerError(VerlMTError):
    """A worker process died or failed; the run stops, and the same command resumes it from its last checkpoint."""


class LedgerError(VerlMTError, ValueError):
    """Tokens, masks or log-probs that do not fit the trajectory they are appended to."""


class EngineError(VerlMTError):
    """The inference engine refused or failed."""


class EngineGoneError(EngineError):
    """The engine died or was closed; the trajectory is aborted and may be retried."""


class DeadlineError(EngineError):
    """The engine did not answer before the request's deadline."""
