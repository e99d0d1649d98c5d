"""The Python tool behind the executor: order, state, failure classes, nothing blocks."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile import deadline_only_for

from verl_mt.data.conversation import ToolCall
from verl_mt.errors import ConfigError
from verl_mt.extensions.toolbox.sandbox import interpreter
from verl_mt.extensions.toolbox.tools.python_tool import PythonTool
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.toolset import ToolSet

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")


@pytest.fixture(scope="module")
def stateless():
    return PythonTool({"timeout_s": 600.0, "concurrency": 2})


@pytest.fixture(scope="module")
def stateful():
    return PythonTool({"timeout_s": 600.0, "keep_state": True})


def code(text: str) -> ToolCall:
    return ToolCall("python", {"code": text}, id="c")


def run(tool: PythonTool, *turns: list[str], **limits):
    """All results of one trajectory, and its counters."""

    async def go():
        session = ToolExecutor(ToolSet([tool]), ToolLimits(**limits), str.split).open("t")
        results = [await session.run([code(c) for c in turn], turn=k) for k, turn in enumerate(turns)]
        await session.close()
        return [r for turn in results for r in turn], session.counters

    return asyncio.run(go())


@pytest.mark.cap("C53")
def test_parallel_calls_are_answered_in_order(stateless, monkeypatch):
    inner, ended = stateless._run, threading.Event()

    def slow_ends_last(state, text):
        if "slow" in text:
            ended.wait()
        result = inner(state, text)
        ended.set()
        return result

    monkeypatch.setattr(stateless, "_run", slow_ends_last)
    results, counters = run(stateless, ["print('slow')", "'fast'"])
    assert [r.text for r in results] == ["slow", "'fast'"]
    assert counters["tools/python/calls"] == 2 and "tools/python/model_errors" not in counters


def test_without_state_every_call_starts_anew(stateless):
    results, _ = run(stateless, ["x = 1\nopen('f', 'w').write('1')"], ["x"], ["open('f')"])
    assert results[0].text == "1" and "NameError" in results[1].text and "FileNotFoundError" in results[2].text


def test_with_state_the_calls_of_a_trajectory_share_variables_in_their_order(stateful):
    results, _ = run(stateful, ["x = [1]", "x.append(2); x", "x.append(3); x"], ["sum(x)"])
    assert [r.text for r in results] == ["(no output)", "[1, 2]", "[1, 2, 3]", "6"]


def test_trajectories_do_not_share_state(stateful):
    run(stateful, ["x = 1"])
    results, _ = run(stateful, ["x"])
    assert "NameError" in results[0].text


def test_an_exception_is_an_answer_and_a_metric_not_an_error(stateless):
    results, counters = run(stateless, ["1/0", "1"])
    assert results[0].failure is None and results[0].text.endswith("ZeroDivisionError: division by zero")
    assert counters["tools/python/exceptions"] == 1 and "tools/python/errors" not in counters


@pytest.mark.slow
def test_code_that_must_be_stopped_is_the_models_mistake_and_shows_what_it_printed(monkeypatch):
    tool = PythonTool({"timeout_s": 0.3, "keep_state": True})
    now, read = [0.0], interpreter._read

    def time_passes_with_output(handle):
        data = read(handle)
        now[0] += 1.0 if b"5!" in data else 0.0
        return data

    monkeypatch.setattr(interpreter, "_read", time_passes_with_output)
    monkeypatch.setattr(interpreter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    results, counters = run(tool, ["x = 5"], ["print(f'here: {x}!')\nwhile True: pass"], ["x"])
    stopped = results[1]
    assert stopped.failure == "model" and stopped.text.startswith("<error>the code was stopped: it did not finish")
    assert "within 0.3 s" in stopped.text and "are lost" in stopped.text and "here: 5!" in stopped.text
    assert "NameError" in results[2].text  # a new interpreter, and the trajectory goes on
    assert counters["tools/python/model_errors"] == counters["tools/python/timeouts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, reason",
    [
        ("for h in range(3, 64):\n    try: os.write(h, b'[' * 4000 + b'\\n')\n    except OSError: pass", "not its own"),
        (
            "for k in range(3):\n    f = open('f', 'wb', 0); f.write(bytes(2**20)); os.unlink('f'); kept += [f]",
            "1 MiB",
        ),
    ],
)
def test_a_forged_answer_and_hidden_files_are_the_models_mistakes(code, reason):
    tool = PythonTool({"timeout_s": 600.0, "keep_state": True, "disk_mb": 1})
    results, counters = run(tool, [f"import os\nkept = []\n{code}\nwhile True: pass"])
    assert results[0].failure == "model" and reason in results[0].text, results[0].text
    assert counters["tools/python/model_errors"] == 1 and "tools/python/errors" not in counters
    assert "tools/python/timeouts" not in counters


@pytest.mark.slow
def test_the_executors_deadline_ends_the_process_too(stateful, monkeypatch):
    deadline_only_for(monkeypatch, lambda *args, **_: "sleep" in str(args))
    opened = recorded(stateful, monkeypatch)
    results, counters = run(stateful, ["1"], ["import time; time.sleep(1e6)"], timeout_s=0.3)
    assert [r.failure for r in results] == [None, "tool"] and counters["tools/python/timeouts"] == 1
    assert len(opened) == 1 and not opened[0].alive and not stateful._states


def recorded(tool, monkeypatch) -> list:
    """The interpreters that the tool opens from now on."""
    opened, inner = [], tool._sandbox.open
    monkeypatch.setattr(tool._sandbox, "open", lambda: opened.append(inner()) or opened[-1])
    return opened


@pytest.mark.slow
def test_an_interpreter_that_was_still_starting_when_its_trajectory_ended_does_not_stay(stateful, monkeypatch):
    opened = recorded(stateful, monkeypatch)
    starting, over, inner = threading.Event(), threading.Event(), stateful._sandbox.open

    def slow():
        starting.set()
        over.wait()
        return inner()

    monkeypatch.setattr(stateful._sandbox, "open", slow)

    async def go():
        session = ToolExecutor(ToolSet([stateful]), ToolLimits(timeout_s=1e4), str.split).open("t")
        call = asyncio.ensure_future(session.run([code("1")], turn=1))
        await asyncio.to_thread(starting.wait)
        call.cancel()
        await asyncio.wait([call])
        closing = asyncio.ensure_future(session.close())
        while stateful._states:
            await asyncio.sleep(0.001)
        assert not opened, "the trajectory is over, and its interpreter still starts"
        over.set()
        await closing

    asyncio.run(go())
    assert len(opened) == 1 and not opened[0].alive and not Path(opened[0].folder).exists()


def test_the_event_loop_never_waits_for_code(stateless, monkeypatch):
    inner, loops, over = stateless._run, [], threading.Event()

    def in_a_thread(state, text):
        loops.append(asyncio._get_running_loop())
        if loops[-1] is None:
            over.wait()
        return inner(state, text)

    monkeypatch.setattr(stateless, "_run", in_a_thread)

    async def go():
        session = ToolExecutor(ToolSet([stateless]), ToolLimits(timeout_s=1e4), str.split).open("t")
        running = asyncio.ensure_future(session.run([code("1"), code("2")], turn=1))
        while len(loops) < 2:
            await asyncio.sleep(0.001)
        over.set()
        results = await running
        await session.close()
        return [r.text for r in results]

    assert asyncio.run(go()) == ["1", "2"]
    assert loops == [None, None], "neither the caller's loop nor the tool's runs the code"


@pytest.mark.slow
@pytest.mark.cap("C52")
def test_no_more_interpreters_run_at_once_than_the_tool_allows(stateless, monkeypatch):
    running, seen, inner, lock = [], [], stateless._run, threading.Lock()
    pair = threading.Barrier(2)

    def counted(state, text):
        with lock:
            running.append(text)
            seen.append(len(running))
        try:
            pair.wait()
            return inner(state, text)
        finally:
            with lock:
                running.pop()

    monkeypatch.setattr(stateless, "_run", counted)
    results, _ = run(stateless, ["1"] * 6)
    assert [r.text for r in results] == ["1"] * 6 and max(seen) == 2


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"unknown key 'timeout'; did you mean 'timeout_s'"):
        PythonTool({"timeout": 3})
    with pytest.raises(ConfigError, match=r"config.memory_mb: Input should be greater than or equal to 64, got 1"):
        PythonTool({"memory_mb": 1})


def test_arguments_of_a_row_that_would_do_nothing_are_refused(stateless):
    with pytest.raises(ValueError, match=r"reads no execute_kwargs, got \['timeout_s'\]"):
        asyncio.run(stateless.execute("i", {"code": "1"}, timeout_s=3))
