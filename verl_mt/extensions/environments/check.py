"""`verl-mt env check PATH`: check that an environment keeps its trajectories apart (docs/environments.md)

`verl-mt env check my.py:Maze` plays sixteen siblings with actions in different orders. Each is compared with the same
episode in a process where nothing else has happened.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from verl_mt.data.conversation import ToolCall
from verl_mt.environments.kinds import EnvironmentTools, Kind, build_kind, place_of
from verl_mt.errors import UserCodeError, VerlMTError, error_text
from verl_mt.extensions.environments.probing import (
    Child,
    ChildFailed,
    Played,
    ProbedSession,
    Script,
    Trace,
    act,
    ending,
    find_actions,
    in_child,
    orders,
    play,
    play_anew,
    what_stays,
)
from verl_mt.tools.agent_data import AgentData
from verl_mt.tools.executor import ToolExecutor
from verl_mt.tools.limits import ToolLimits
from verl_mt.tools.toolset import ToolSet

SIBLINGS = 16
ACTIONS = 8
_DEADLINE_S = 60.0
"""Deadline of a call. The first call may import a large library."""
_SHORT_S = 0.2
_EPISODES = 5
"""Episodes of the look at the state of the process."""
_PROCESSES = 4
"""Processes at the same time."""


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    verdict: Literal["ok", "wrong", "note"]
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:5}  {self.what}: {self.text}"


@dataclass
class Subject:
    """The environment, and its episodes."""

    kind: Kind
    rows: Sequence[Mapping[str, Any]]
    scripts: list[Script] = field(default_factory=list)
    expected: list[Trace] = field(default_factory=list)
    """The trace of each script, played alone in a new process."""
    seconds: list[float] = field(default_factory=list)

    @property
    def place(self) -> str:
        return place_of(self.kind.cls)


def check(path: str, config: Mapping[str, Any] | None = None, rows: Sequence[Mapping[str, Any]] = ()) -> list[Line]:
    """Check an environment.

    Args:
        path: as `rollout.environment.path`.
        config: as `rollout.environment.config`.
        rows: rows of the data set. () = two rows with a seed.

    Returns:
        The lines of the report.

    Raises:
        VerlMTError: the class is no environment, or no episode can begin. Names class and line.
    """
    kind = build_kind(path, dict(config or {}), timeout_s=_DEADLINE_S)
    return check_kind(kind, rows or [{"seed": 1}, {"seed": 2}], path=path)


def check_kind(kind: Kind, rows: Sequence[Mapping[str, Any]], *, path: str | None = None) -> list[Line]:
    """Check an environment that is already built.

    Args:
        kind: the environment.
        rows: rows of the data set.
        path: where a new interpreter finds the class. None = check in copies of this process only.

    Returns:
        The lines of the report.

    Raises:
        VerlMTError: a row lacks a column, or no episode can begin. Names class and line.
    """
    subject = Subject(kind, rows)
    for row in subject.rows:
        kind.check_row(row)
    for number, row in enumerate(subject.rows):
        actions = in_child(partial(find_actions, kind, row, ACTIONS, 0))
        count = len(range(number, SIBLINGS, len(subject.rows)))
        subject.scripts += [Script(row, ordered) for ordered in orders(actions, count, number)]
    lines = [_determinism(subject)]
    if lines[0].verdict == "ok" and path is not None:
        lines[0] = _anew(subject, path) or lines[0]
    is_deterministic = lines[0].verdict != "wrong"
    for what, look in _LOOKS.items():
        lines += _looked(subject, what, look) if is_deterministic else []
    if not is_deterministic:
        lines.append(
            Line("note", "isolation, order, fork", "not looked at: answers that differ anyway cannot be compared")
        )
    return [*lines, *_looked(subject, "process state", _process), *_closing(subject), *_facts(subject)]


def _looked(subject: Subject, what: str, look: Callable[[Subject], Iterator[Line]]) -> list[Line]:
    """The lines of a look. Siblings that share something may wait for each other until their deadline."""
    try:
        return list(look(subject))
    except ChildFailed as error:
        return [Line("wrong", what, f"{subject.place}: {error}. Something is shared, and one waits for another")]


def _alone(subject: Subject, script: Script) -> Trace:
    played: Played = in_child(lambda: play(subject.kind, [script]))
    subject.seconds = subject.seconds or played.seconds
    return played.traces[0]


def _determinism(subject: Subject) -> Line:
    """The same actions in two new processes. Also sets the traces that the other looks compare with."""
    subject.expected = [_alone(subject, script) for script in subject.scripts]
    for script, expected in zip(subject.scripts, subject.expected):
        if found := _difference(expected, _alone(subject, script)):
            text = f"{subject.place}: the same actions in a new process gave {found}. It draws numbers that its seed "
            text += "does not decide, or keeps state outside of the process (a file, a database, a server)"
            return Line("wrong", "determinism", text)
    for trace in subject.expected:
        if failed := [said for said in trace if said.startswith("failed: ")]:
            return Line("wrong", "determinism", f"{subject.place}: an episode {failed[0]}")
    return Line("ok", "determinism", f"{len(subject.scripts)} episodes, each twice, are the same")


def _anew(subject: Subject, path: str) -> Line | None:
    """The same actions in a new interpreter, which imports the class again. None = the traces are equal."""
    some = subject.scripts[: len(subject.rows)]
    try:
        traces = play_anew(path, subject.kind.config, some, subject.kind.timeout_s)
    except (ChildFailed, TypeError, subprocess.TimeoutExpired) as error:
        return Line("note", "determinism", f"in copies of this process. Not looked at in a new one: {error}")
    for expected, got in zip(subject.expected, traces):
        if found := _difference(expected, got):
            text = f"{subject.place}: the same actions in a new interpreter gave {found}. Something that is made at "
            text += "import, the order of a set or hash() of a text decides, or state outside of the process"
            return Line("wrong", "determinism", text)
    return None


def _resets(subject: Subject) -> Iterator[Line]:
    played = in_child(lambda: play(subject.kind, subject.scripts))
    subject.seconds = played.seconds
    yield _compared(subject, "isolation of resets", played.traces, "after other episodes in this process")


def _siblings(subject: Subject) -> Iterator[Line]:
    for at_once, when in (("turns", "beside siblings, action by action"), ("threads", "beside siblings in threads")):
        played = in_child(partial(play, subject.kind, subject.scripts, at_once=at_once))
        line = _compared(subject, "isolation of siblings", played.traces, when)
        if line.verdict == "wrong" or at_once == "threads":
            yield line
            return


def _processes(subject: Subject) -> Iterator[Line]:
    """Processes at the same time, with one folder for temporary files."""
    traces: list[Trace] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for first in range(0, len(subject.scripts), _PROCESSES):
            some = subject.scripts[first : first + _PROCESSES]
            children = [Child(partial(play, subject.kind, [script]), Path(name)) for script in some]
            traces += [child.result().traces[0] for child in children]
    yield _compared(subject, "isolation of processes", traces, "beside other processes")


def _process(subject: Subject) -> Iterator[Line]:
    """Changes that episodes leave in their process."""
    what = "process state"
    changed, used = in_child(partial(what_stays, subject.kind, subject.scripts[:_EPISODES]))
    if changed:
        yield Line("wrong", what, f"{subject.place}: an episode changes {'; '.join(changed)}")
    else:
        yield Line("ok", what, f"{_EPISODES - 1} episodes leave their process as it was")
    if used:
        yield Line("note", what, f"an episode uses {'; '.join(used)}. Make a generator in reset: random.Random(seed)")


def _compared(subject: Subject, what: str, traces: Sequence[Trace], when: str) -> Line:
    for script, expected, got in zip(subject.scripts, subject.expected, traces):
        if found := _difference(expected, got):
            row = json.dumps(dict(script.row), default=str)
            return Line("wrong", what, f"{subject.place}: row {row} {when} gave {found}. Something is shared")
    return Line("ok", what, f"{len(traces)} episodes {when} are as if alone")


def _difference(expected: Trace, got: Trace) -> str | None:
    """The first difference of two traces. None = they are equal."""
    if expected == got:
        return None
    place = next((k for k, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
    told = [f"{trace[place] if place < len(trace) else 'nothing':.300}" for trace in (got, expected)]
    return f"{told[0]!r} instead of {told[1]!r}"


def _order(subject: Subject) -> Iterator[Line]:
    """Calls of one turn, through the tool executor."""
    kind, what = subject.kind, "order of calls"
    if not kind.entries:
        return
    if not kind.cls.in_order:
        yield Line("note", what, "in_order is False: calls of one turn run at the same time")
        return
    script = subject.scripts[0]
    calls = [ToolCall(name, dict(given)) for name, given in script.actions if name]

    async def answers(turns: Sequence[Sequence[ToolCall]]) -> list[str]:
        tools = ToolExecutor(
            EnvironmentTools(ToolSet(), {"default": kind}), ToolLimits(max_parallel_calls=99), str.split
        )
        session, data = ProbedSession(kind, "order"), AgentData()
        data._environment = session
        opened = tools.open("order", agent_data=data)
        try:
            await session.start(script.row)
            return [result.text for k, turn in enumerate(turns) for result in await opened.run(turn, turn=k)]
        finally:
            await opened.close()
            await session.close()

    one = in_child(lambda: asyncio.run(answers([calls])))
    each = in_child(lambda: asyncio.run(answers([[c] for c in calls])))
    if one == each:
        yield Line("ok", what, f"{len(calls)} calls of one turn are answered as in separate turns")
    else:
        yield Line("wrong", what, f"{subject.place}: {len(calls)} calls of one turn gave {one} instead of {each}")


def _run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


def _fork(subject: Subject) -> Iterator[Line]:
    kind = subject.kind
    if not hasattr(kind.cls, "fork"):
        yield Line("note", "fork", "cannot: the class has no fork()")
        return
    whole, other = subject.scripts[0], subject.scripts[-1]
    place = place_of(kind.cls, kind.cls.fork)

    async def played(split: int, number: int | None, of_copy: bool = False) -> Trace:
        """The answers of an object after `split` actions, while a copy of it makes `number` actions (None = no copy).

        With `of_copy`: the answers of another copy instead.
        """
        session = ProbedSession(kind, "fork")
        try:
            await session.start(whole.row)
            for action in whole.actions[:split]:
                await act(session, action)
            played = session
            if number is not None:
                copy, played = await session.fork(), await session.fork() if of_copy else session
                for action in other.actions[:number]:
                    await act(copy, action)
                await copy.close()
            said = [await act(played, action) for action in whole.actions[split:]] + await ending(played)
            if played is not session:
                await played.close()
            return tuple(said)
        finally:
            await session.close()

    found = []
    for split, number in ((1, 1), (2, 2), (3, 3), (len(whole.actions) // 2, len(other.actions))):
        try:
            runs = (partial(played, split, None), partial(played, split, number), partial(played, split, 0, True))
            without, own, copied = (in_child(partial(_run, run)) for run in runs)
        except ChildFailed as error:
            yield Line("wrong", "fork", f"{place}: {error}")
            return
        found.append((_difference(without, own), _difference(without, copied)))
    for shared, _ in found:
        if shared:
            yield Line("wrong", "fork", f"{place} shares state: after its copy had acted, the object gave {shared}")
            return
    for _, other_state in found:
        if other_state:
            yield Line("wrong", "fork", f"{place}: the copy is in another state: it gave {other_state}")
            return
    yield Line("ok", "fork", "a copy acts alone, and as its object would")


_LOOKS: dict[str, Callable[[Subject], Iterator[Line]]] = {
    "isolation of resets": _resets,
    "isolation of siblings": _siblings,
    "isolation of processes": _processes,
    "order of calls": _order,
    "fork": _fork,
}


def _closing(subject: Subject) -> Iterator[Line]:
    """`close` is called exactly once, also after an error, a deadline and a cancellation."""
    kind, what = subject.kind, "closed once"
    if not hasattr(kind.cls, "close"):
        yield Line("note", what, "the class has no close()")
        return
    script, wrong = subject.scripts[0], []
    cases: dict[str, Callable[[], Any]] = {
        "success": lambda: _closes(kind, script),
        "error": lambda: _closes(kind, script, fails=True),
        "timeout": lambda: _closes(kind, script, hangs=True),
        "cancellation, as by SIGTERM": lambda: _closes(kind, script, hangs=True, cancelled=True),
    }
    for case, work in cases.items():
        try:
            count, problem = in_child(work)
        except ChildFailed as error:
            count, problem = 1, str(error)
        if count != 1:
            wrong.append(f"{case}: called {count} times")
        if problem and case != "timeout":  # there it runs in another thread, which not every library can do
            wrong.append(f"{case}: {problem}")
    if wrong:
        yield Line("wrong", what, f"{place_of(kind.cls, kind.cls.close)}: {'; '.join(wrong)}")
    else:
        yield Line("ok", what, f"after {', '.join(cases)}")


def _closes(kind: Kind, script: Script, *, fails: bool = False, hangs: bool = False, cancelled: bool = False) -> Any:
    """Number of calls of `close`, and the error that it raised. Runs in a child process and changes the class there."""
    calls, cls = [], kind.cls
    entered, hold = threading.Event(), threading.Event()
    close, reset = cls.close, cls.reset  # type: ignore[attr-defined]

    def counted(self: Any) -> Any:
        calls.append(1)
        return close(self)

    def broken(self: Any, *args: Any, **row: Any) -> Any:
        if fails:
            raise RuntimeError("env check: this reset fails")
        entered.set()
        hold.wait(5)
        return reset(self, *args, **row)

    cls.close = counted  # type: ignore[attr-defined]
    if fails or hangs:
        broken.__signature__ = inspect.signature(reset)  # type: ignore[attr-defined]
        cls.reset = broken  # type: ignore[method-assign]
    kind = replace(kind, timeout_s=_SHORT_S) if hangs and not cancelled else kind

    session = ProbedSession(kind, "close")

    async def run() -> str:
        async def episode() -> None:
            try:
                await session.start(script.row)
                for action in script.actions:
                    await act(session, action)
            finally:
                await session.close()

        task = asyncio.create_task(episode())
        if cancelled:
            while not (entered.is_set() or task.done()):
                await asyncio.sleep(0.01)
            task.cancel()
            hold.set()
        try:
            await task
        except UserCodeError as error:
            if "close" in str(error).partition(":")[0]:
                return error_text(error)
            with contextlib.suppress(UserCodeError):
                await session.close()
            closing = session.closing_error
            return "" if closing is None else error_text(closing)
        except asyncio.CancelledError:
            closing = session.closing_error
            return "" if closing is None else error_text(closing)
        return ""

    problem = asyncio.run(run())
    never_made = session.environment is None  # within the short deadline
    return 1 if never_made else len(calls), problem


def _facts(subject: Subject) -> Iterator[Line]:
    milliseconds = 1000 * statistics.median(subject.seconds) if subject.seconds else 0.0
    yield Line("note", "cost of a reset", f"{milliseconds:.1f} ms, constructor included (median)")
    yield Line("note", "picklable", in_child(lambda: _pickled(subject)))


def _pickled(subject: Subject) -> str:
    async def run() -> str:
        session = ProbedSession(subject.kind, "pickle")
        try:
            await session.start(subject.rows[0])
            return f"yes, {len(pickle.dumps(session.environment)):,} bytes after a reset"
        except UserCodeError:
            return "not looked at: no episode begins"
        except Exception as error:
            return f"no ({error_text(error, named=True)})"
        finally:
            with contextlib.suppress(UserCodeError):
                await session.close()

    return asyncio.run(run())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 1 = something is wrong, 2 = the class is no environment.
    """
    parser = argparse.ArgumentParser(prog="verl-mt env", description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("command", choices=("check",), help="what to do")
    parser.add_argument("path", metavar="PATH", help="registered name, dotted path or file.py:Name")
    parser.add_argument("--config", default="{}", help="JSON: arguments of the constructor")
    parser.add_argument(
        "--row", action="append", default=[], help="JSON: a row of the data set; several times for more"
    )
    args = parser.parse_args(argv)
    try:
        lines = check(args.path, json.loads(args.config), [json.loads(row) for row in args.row])
    except ValueError as error:
        print(f"error: --config and --row take JSON objects: {error}", file=sys.stderr)
        return 2
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    for line in lines:
        print(line)
    return int(any(line.verdict == "wrong" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
