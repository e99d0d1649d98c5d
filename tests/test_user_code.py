"""Calling plug-in code: it can neither block nor outlive what waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from hostile import EXCEPTIONS

from verl_mt import plugins
from verl_mt.plugins import import_file
from verl_mt.user_code import CallTimeout, UserCode, in_daemon_thread, user_code_of


class Base:
    async def hello(self):
        return threading.current_thread().name


class Plugin(Base):
    runs_inline = False

    def __init__(self):
        self.loops = []

    async def loop(self):
        self.loops.append(asyncio.get_running_loop())

    async def thread(self):
        return threading.current_thread().name

    def sync(self, *args, **kwargs):
        return threading.current_thread().name, args, kwargs

    def returns_awaitable(self):
        return self.thread()

    async def late(self, seconds):
        time.sleep(seconds)

    async def own_timeout(self):
        raise TimeoutError("the socket's")

    async def exits(self):
        sys.exit(3)

    async def cancels_itself(self):
        raise asyncio.CancelledError

    async def context(self):
        return variable.get()


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outer")


def call(plugin, method, /, *args, timeout_s=2.0, **kwargs):
    code = user_code_of(plugin, Base, "plug-in")
    return asyncio.run(code.call(method, args, kwargs, timeout_s=timeout_s))


def test_async_code_has_one_loop_of_its_own_for_life():
    plugin = Plugin()
    call(plugin, "loop")
    call(plugin, "loop")  # asyncio.run made another loop for the caller
    assert plugin.loops[0] is plugin.loops[1]
    assert call(plugin, "thread") == "plug-in"


def test_sync_code_runs_in_a_thread_and_gets_its_arguments():
    name, args, kwargs = call(Plugin(), "sync", 1, seconds=5, method="x")
    assert name == "plug-in" and args == (1,) and kwargs == {"seconds": 5, "method": "x"}
    assert call(Plugin(), "returns_awaitable") == "plug-in"


def test_a_sync_function_around_an_async_one_runs_in_a_thread_too():
    """The usual decorator: it ends the coroutine itself, which a running loop does not allow."""

    async def score():
        return 1.0

    @functools.wraps(score)
    def wrapper():
        return asyncio.run(score())

    code = UserCode(object(), Base, "wrapped")
    assert asyncio.run(code.run(wrapper, (), {}, timeout_s=5.0)) == 1.0


def test_inherited_methods_and_inline_plugins_need_no_thread():
    plugin = Plugin()
    assert call(plugin, "hello") == threading.current_thread().name
    plugin.runs_inline = True
    assert call(plugin, "thread") == threading.current_thread().name


@pytest.mark.parametrize("inline", [False, True])
def test_the_user_s_own_exceptions_stay_what_they_are(inline):
    plugin = Plugin()
    plugin.runs_inline = inline
    with pytest.raises(TimeoutError, match="the socket's"):
        call(plugin, "own_timeout")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        call(plugin, "exits")
    with pytest.raises(RuntimeError, match="CancelledError"):
        call(plugin, "cancels_itself")


def test_the_caller_s_context_is_visible():
    async def main(code):
        variable.set("inner")
        return await code.call("context", (), {}, timeout_s=2)

    assert asyncio.run(main(UserCode(Plugin(), Base, "plug-in"))) == "inner"


@pytest.mark.slow
def test_a_blocked_loop_is_replaced(caplog):
    plugin = Plugin()
    call(plugin, "loop")
    with pytest.raises(CallTimeout):
        call(plugin, "late", 1.0, timeout_s=0.05)
    assert "blocks its event loop" in caplog.text
    call(plugin, "loop")
    assert plugin.loops[0] is not plugin.loops[1]


def test_cancelling_the_caller_cancels_the_call():
    class Waits(Base):
        begun, ended = threading.Event(), threading.Event()

        async def wait(self):
            self.begun.set()
            try:
                await asyncio.sleep(1e6)
            finally:
                self.ended.set()

    plugin = Waits()

    async def main():
        task = asyncio.create_task(user_code_of(plugin, Base, "p").call("wait", (), {}, timeout_s=60))
        assert await asyncio.to_thread(plugin.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert plugin.ended.wait(60)


def test_a_copy_of_a_used_plugin_works():
    plugin = Plugin()
    call(plugin, "thread")
    assert call(copy.deepcopy(plugin), "thread") == "plug-in"


def test_in_daemon_thread_gives_value_or_exception():
    assert asyncio.run(in_daemon_thread(lambda x: x + 1, 1)) == 2
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(lambda: 1 / 0))


def in_float64(fails=False):
    torch.set_default_dtype(torch.float64)
    if fails:
        raise ZeroDivisionError
    return torch.get_default_dtype()


async def later_in_float64(fails=False):
    return in_float64(fails)


@pytest.mark.parametrize("function", [in_float64, later_in_float64])
@pytest.mark.parametrize("fails", [False, True])
def test_torch_s_default_dtype_is_float32_again_after_code_that_changed_it(function, fails, caplog, monkeypatch):
    monkeypatch.setattr(plugins, "_CHANGED_DTYPE", set())
    code = UserCode(Plugin(), Base, "plug-in")
    try:
        found = asyncio.run(code.run(function, (), {"fails": fails}, timeout_s=60))
        assert found == torch.float64 and not fails
    except ZeroDivisionError:
        assert fails
    after = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert after == torch.float32
    assert f"{function.__name__} set torch's default dtype to torch.float64" in caplog.text
    caplog.clear()
    asyncio.run(code.run(function, (), {}, timeout_s=60))
    assert torch.get_default_dtype() == torch.float32 and not caplog.text, "it is told once"


def test_a_file_that_changes_torch_s_default_dtype_when_it_is_imported_does_not_keep_it(tmp_path, caplog):
    file = tmp_path / "wide.py"
    file.write_text("import torch\ntorch.set_default_dtype(torch.float64)\n")
    import_file(file)
    after = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert after == torch.float32 and "wide.py set torch's default dtype" in caplog.text


@pytest.mark.slow
def test_code_that_hangs_forever_does_not_keep_the_process_alive():
    script = textwrap.dedent("""
        import asyncio, threading
        from verl_mt.user_code import CallTimeout, UserCode

        class Hangs:
            def sync(self):
                threading.Event().wait()
            async def blocking(self):
                threading.Event().wait()

        async def main():
            code = UserCode(Hangs(), object, "hangs")
            for method in ("sync", "blocking"):
                try:
                    await code.call(method, (), {}, timeout_s=0.05)
                except CallTimeout:
                    print("timeout")

        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split() == ["timeout", "timeout"] and "Traceback" not in done.stderr


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class ThirdBlocks(Base):
    """Every third call blocks its loop; the others return at once, or after a moment in which they wait."""

    def __init__(self, waits: bool, release: threading.Event, nested: bool = False):
        self.waits, self.release, self.nested = waits, release, nested
        self.late: list[threading.Event] | None = None
        """Where it is given, a call that blocks goes on when it has failed."""
        self.begun: list[int] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def work(self, number):
        self.begun.append(number)
        self.loops.add(asyncio.get_running_loop())
        if number % 3 == 2:
            over = self.late[number] if self.late else self.release
            await (asyncio.gather(self.block(over)) if self.nested else self.block(over))
        if self.waits:
            await asyncio.sleep(0.01)
        return number

    async def block(self, over):
        over.wait(60)


def nine_calls(code, plugin=None):
    over = [threading.Event() for _ in range(9)]
    if plugin is not None:
        plugin.late = over

    async def one(number):
        try:
            return await code.call("work", (number,), {}, timeout_s=0.6)
        finally:
            over[number].set()

    async def main():
        return await asyncio.gather(*map(one, range(9)), return_exceptions=True)

    return asyncio.run(main())


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 0.1)
    release = threading.Event()
    yield release
    release.set()


@pytest.mark.slow
@pytest.mark.parametrize(("waits", "nested"), [(True, False), slow(False, False), slow(True, True)])
def test_of_nine_calls_of_which_three_block_three_fail_and_none_is_made_twice(quick, caplog, waits, nested):
    plugin = ThirdBlocks(waits, quick, nested=nested)
    code = UserCode(plugin, Base, "plug-in")
    results = nine_calls(code, plugin)
    assert [r if isinstance(r, int) else type(r) for r in results] == [
        n if n % 3 != 2 else CallTimeout for n in range(9)
    ]
    assert sorted(plugin.begun) == list(range(9))
    assert caplog.text.count("blocks its event loop") == 1
    assert nine_calls(code, plugin)[:2] == [0, 1] and len(plugin.loops) > 9  # each call has a loop of its own now


@pytest.mark.slow
def test_calls_that_may_be_repeated_are_made_again_where_another_never_ends(quick):
    plugin = ThirdBlocks(True, quick)
    results = nine_calls(UserCode(plugin, Base, "plug-in", repeatable=True))
    assert [type(r) for r in results].count(CallTimeout) == 3 and results[:2] == [0, 1]
    assert sorted(plugin.begun) == sorted([*range(9), 0, 1]) and not quick.is_set()


@pytest.mark.slow
def test_a_call_that_was_under_way_beside_one_that_never_ends_is_late_and_not_made_twice(quick, monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._PATIENCE_S", 0.1)
    plugin = ThirdBlocks(True, quick)
    results = nine_calls(UserCode(plugin, Base, "plug-in"))
    assert [type(r) for r in results[:3]] == [CallTimeout] * 3 and results[3:5] == [3, 4]
    assert sorted(plugin.begun) == list(range(9))


@pytest.mark.slow
def test_a_call_gets_the_time_back_that_another_took_which_ended_when_its_deadline_fired(quick, monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 20.0)
    begun = threading.Event()

    class Blocks(Base):
        async def work(self, blocks):
            if blocks:
                await asyncio.sleep(0)  # the other has begun
                begun.set()
                quick.wait(60)
            await asyncio.sleep(0.01)
            return "done"

    async def main():
        code = UserCode(Blocks(), Base, "plug-in")
        held = asyncio.create_task(code.call("work", (False,), {}, timeout_s=0.6))
        await asyncio.sleep(0)
        other = asyncio.create_task(code.call("work", (True,), {}, timeout_s=60))
        assert await asyncio.to_thread(begun.wait, 60)
        await asyncio.sleep(0.8)
        quick.set()
        return await held, await other

    assert asyncio.run(main()) == ("done", "done")


@pytest.mark.slow
def test_calls_that_all_block_one_after_the_other_all_fail(quick, monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 0.5)

    class Blocks(Base):
        async def work(self, number):
            quick.wait(0.9)

    assert [type(r) for r in nine_calls(UserCode(Blocks(), Base, "plug-in"))] == [CallTimeout] * 9


@pytest.mark.slow
def test_the_loops_of_calls_that_are_over_end(quick):
    plugin = ThirdBlocks(False, quick)
    nine_calls(UserCode(plugin, Base, "ending"), plugin)
    ends = time.monotonic() + 60
    while time.monotonic() < ends and any(t.name == "ending" for t in threading.enumerate()):
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "ending"]
    assert all(loop.is_closed() for loop in plugin.loops)


@pytest.mark.parametrize("name", EXCEPTIONS)
@pytest.mark.parametrize("kind", ["inline", "async", "sync"])
def test_whatever_is_raised_comes_back_as_an_exception(kind, name):
    error = EXCEPTIONS[name]

    class Raises(Base):
        runs_inline = kind == "inline"

        async def wrong(self):
            raise error

    class RaisesInThread(Base):
        def wrong(self):
            raise error

    async def main():
        code = UserCode(RaisesInThread() if kind == "sync" else Raises(), Base, "plug-in")
        with pytest.raises(Exception) as caught:
            await code.call("wrong", (), {}, timeout_s=2)
        return caught.value

    found = asyncio.run(main())
    assert isinstance(found, Exception) and error in (found, found.__cause__)
