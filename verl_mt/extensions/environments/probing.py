"""Answers of an environment to fixed actions, in separate processes: the material of `env check`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_mt.environments.base import Environment
from verl_mt.environments.kinds import Kind, build_kind
from verl_mt.environments.session import EnvironmentSession
from verl_mt.errors import PluginError, ToolCallError, UserCodeError, error_text
from verl_mt.extensions.environments.process_state import ProcessState, settled
from verl_mt.tools.results import normalize
from verl_mt.tools.toolset import ToolSet

Action = tuple[str, Any]
"""(tool, its arguments), or ("", the text of a reply)."""
Trace = tuple[str, ...]
"""The texts of an episode: prompt, the answer to each action, and at the end score and state."""

_CHILD_S = 300.0
"""Deadline of a process in seconds."""
_MARK = "\ntraces of a new interpreter: "
_WORD = re.compile(r"\[\w+\]|\w+")


@dataclass(frozen=True)
class Script:
    """One episode: a row and its actions."""

    row: Mapping[str, Any]
    actions: Sequence[Action]


@dataclass
class Played:
    """The traces of episodes in one process."""

    traces: list[Trace]
    seconds: list[float] = field(default_factory=list)
    """Duration of each constructor with its reset."""


class ChildFailed(PluginError):
    """A process of a check died, hung or raised."""


class Child:
    """Runs `work` in a forked process, where no other episode has run.

    Args:
        work: called in the child. Its result is sent to this process.
        folder: the child's folder for temporary files. None = a new one, which is removed.
    """

    def __init__(self, work: Callable[[], Any], folder: Path | None = None):
        context = multiprocessing.get_context("fork")
        self._stack = contextlib.ExitStack()
        new = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        place = folder or Path(self._stack.enter_context(new))
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(work, theirs, str(place)))
        self._process.start()
        theirs.close()

    def result(self) -> Any:
        """The result of `work`. Waits for the child.

        Raises:
            ChildFailed: the child raised, died, or did not end in time.
        """
        with self._stack:
            try:
                if not self._connection.poll(_CHILD_S):
                    raise ChildFailed(f"a process of the check did not end within {_CHILD_S:g} s")
                failed, value = self._connection.recv()
            except EOFError:
                self._process.join()
                raise ChildFailed(f"a process of the check died with status {self._process.exitcode}") from None
            finally:
                self._process.kill()
                self._process.join()
        if failed:
            raise ChildFailed(value)
        return value


def in_child(work: Callable[[], Any], folder: Path | None = None) -> Any:
    """`Child(work, folder).result()`."""
    return Child(work, folder).result()


def _child(work: Callable[[], Any], connection: Any, folder: str) -> None:
    """Runs in the child."""
    gc.freeze()  # what the parent had made is not looked at by each collection, which would copy all of its pages
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        connection.send((False, work()))
    except BaseException as error:
        connection.send((True, error_text(error, named=True)))
    connection.close()
    os._exit(0)  # does not wait for threads that hang


class ProbedSession(EnvironmentSession):
    """A session that also shows its object, state and copies."""

    @property
    def environment(self) -> Environment | None:
        """The object. None before it is made."""
        return self._environment

    @property
    def closing_error(self) -> BaseException | None:
        """The exception that `close` raised."""
        closing = self._closing
        return closing.exception() if closing is not None and closing.done() and not closing.cancelled() else None

    async def state(self) -> Any:
        """The result of `state()`. Raises `UserCodeError`."""
        state = self._environment.state  # type: ignore[union-attr]
        return await self._checked(state, state, {})

    async def fork(self) -> ProbedSession:
        """A session of the object that `fork()` returned. Raises `UserCodeError`."""
        fork = self._environment.fork  # type: ignore[union-attr]
        copied = ProbedSession(self.kind, f"{self.trajectory_id} fork")
        copied._environment, copied.over = await self._checked(fork, fork, {}), self.over
        return copied


def find_actions(kind: Kind, row: Mapping[str, Any], count: int, seed: int) -> list[Action]:
    """Actions for an episode of this row, with arguments drawn from the schemas and from what the environment says."""
    rng, tools, seen = random.Random(seed), ToolSet(kind.entries), [" 1 2 3"]
    names = [*tools.names, *([""] if kind.replies else [])]

    async def explore() -> list[Action]:
        session, actions = ProbedSession(kind, "explore"), []
        try:
            seen.append(str(await session.start(row)))
            for number in range(count if names else 0):
                name = names[number % len(names)]
                words = _WORD.findall(" ".join(seen))
                schema = tools.schemas([name])[0]["function"].get("parameters") or {} if name else {}
                action = (name, _value(schema, rng, words) if name else rng.choice(words))
                actions.append(action)
                seen.append(await act(session, action))
        except UserCodeError:
            pass  # the compared episodes report it
        finally:
            with contextlib.suppress(UserCodeError):
                await session.close()
        return actions

    return asyncio.run(explore())


def play(kind: Kind, scripts: Sequence[Script], *, at_once: str = "") -> Played:
    """Play scripts in this process.

    Args:
        kind: the environment.
        scripts: the episodes.
        at_once: "" = one after the other. `turns` = all alive, one action of each in turn. `threads` = all alive,
            each without a wait for the others.
    """
    return asyncio.run(_play(kind, scripts, at_once))


async def _play(kind: Kind, scripts: Sequence[Script], at_once: str) -> Played:
    if not at_once:
        return await _one_after_the_other(kind, scripts)
    episodes = [_Episode(kind, script, number) for number, script in enumerate(scripts)]
    if at_once == "turns":
        live = [episode.steps() for episode in episodes]
        while live:
            still = []
            for steps in live:
                with contextlib.suppress(StopAsyncIteration):
                    await anext(steps)
                    still.append(steps)
            live = still
    else:

        async def whole(episode: _Episode) -> None:
            async for _ in episode.steps():
                pass

        await asyncio.gather(*map(whole, episodes))
    return Played([tuple(episode.trace) for episode in episodes])


async def _one_after_the_other(kind: Kind, scripts: Sequence[Script]) -> Played:
    """Each object is freed before the next one is made, which may get its address and its thread's number."""
    played = Played([])
    for number, script in enumerate(scripts):
        episode = _Episode(kind, script, number)
        async for _ in episode.steps():
            pass
        played.traces.append(tuple(episode.trace))
        played.seconds += [span.end_s - span.start_s for span in episode.session.time_spans if span.turn == 0]
        del episode
        gc.collect()
    return played


def play_anew(path: str, config: Mapping[str, Any], scripts: Sequence[Script], timeout_s: float) -> list[Trace]:
    """Play scripts in a new interpreter. It imports the class again and hashes texts with another seed.

    Args:
        path: as `rollout.environment.path`.
        config: as `rollout.environment.config`.
        scripts: the episodes.
        timeout_s: deadline of each call in seconds.

    Returns:
        The trace of each script.

    Raises:
        ChildFailed: the interpreter ended with an error.
        TypeError: rows or configuration cannot be written as JSON.
    """
    told = json.dumps([path, config, [[script.row, script.actions] for script in scripts], timeout_s])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import _anew; _anew()"], input=told, capture_output=True,
            text=True, timeout=_CHILD_S, env={**os.environ, "PYTHONHASHSEED": seed, "TMPDIR": folder},
        )  # fmt: skip
    if done.returncode != 0:
        raise ChildFailed(f"a new interpreter failed: {done.stderr.strip()[-300:]}")
    return [tuple(trace) for trace in json.loads(done.stdout.rpartition(_MARK)[2])]


def _anew() -> None:
    """Runs in the new interpreter."""
    path, config, scripts, timeout_s = json.load(sys.stdin)
    kind = build_kind(path, config, timeout_s=timeout_s)
    played = [in_child(partial(play, kind, [Script(row, actions)])).traces[0] for row, actions in scripts]
    print(_MARK + json.dumps(played), flush=True)
    os._exit(0)


def what_stays(kind: Kind, scripts: Sequence[Script]) -> tuple[list[str], list[str]]:
    """The process state that episodes change, and the shared state that they only read. Runs in a child.

    The first episode is not counted, because it may import modules.
    """
    new = ProcessState()
    play(kind, scripts[:1])
    new.restore()
    before = settled(new, 1)
    play(kind, scripts[1:])
    return settled(before, len(scripts) - 1).changes(before, len(scripts) - 1)


class _Episode:
    def __init__(self, kind: Kind, script: Script, number: int):
        self.kind, self.script, self.session = kind, script, ProbedSession(kind, f"check {number}")
        self.trace: list[str] = []

    async def steps(self) -> Any:
        """Yields after each action; closes at the end."""
        session, trace = self.session, self.trace
        try:
            trace.append(f"prompt: {await session.start(self.script.row)!r}")
            yield
            for action in self.script.actions:
                if session.over:
                    break
                trace.append(await act(session, action))
                yield
            trace += await ending(session)
        except UserCodeError as error:
            trace.append(f"failed: {error_text(error.__cause__ or error, named=True)}")
        finally:
            try:
                await session.close()
            except UserCodeError as error:
                trace.append(f"close failed: {error_text(error)}")


async def ending(session: ProbedSession) -> list[str]:
    """Score and state of an episode."""
    found = [f"done: {session.over}"]
    if session.kind.scores:
        found.append(f"score: {await session.score()}")
    if hasattr(session.kind.cls, "state"):
        found.append(f"state: {await session.state()!r}")
    return found


async def act(session: EnvironmentSession, action: Action) -> str:
    """The answer to an action, as the model reads it."""
    name, given = action
    try:
        if not name:
            turn = await session.respond([{"role": "assistant", "content": given}])
            return f"reply {given!r}: {turn.text} {turn.score:g}"
        response, reward, _ = normalize(await session.run_tool(name, dict(given)))
        return f"{name}({given}): {response.text} {len(response.image or [])} images, reward {reward:g}"
    except ToolCallError as error:
        return f"{name}({given}): refused: {error_text(error)}"
    except UserCodeError:
        raise
    except Exception as error:
        return f"{name}({given}): raised {error_text(error, named=True)}"


def _value(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str]) -> Any:
    """A value that fits a JSON schema, near to what the environment says."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _value(next((o for o in options if o.get("type") != "null"), options[0]), rng, words)
    kind = schema.get("type")
    kind = next((k for k in kind if k != "null"), "null") if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 7]
        low, high = schema.get("minimum", -1_000_000), schema.get("maximum", 1_000_000)
        return max(low, min(high, rng.choice([*numbers, 0, 1, 2, 3])))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [_value(schema.get("items") or {}, rng, words) for _ in range(rng.randint(1, 2))]
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties") or {}
        wanted = [n for n in properties if n in (schema.get("required") or ()) or rng.random() < 0.5]
        return {name: _value(properties[name], rng, words) for name in wanted}
    return rng.choice(words)


def orders(actions: Sequence[Action], count: int, seed: int) -> Iterator[list[Action]]:
    """The actions in `count` orders. The first order is the original one."""
    rng = random.Random(seed)
    yield list(actions)
    for _ in range(count - 1):
        yield rng.sample(list(actions), len(actions))
