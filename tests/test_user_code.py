"""Calling plug-in code: it can neither block nor outlive what waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import gc
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
from verl_mt.user_code import CallTimeout, LoopBlocked, NotAnException, UserCode, in_daemon_thread, user_code_of


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
    assert "blocked its event loop" in caplog.text
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


class OneBlocks(Base):
    """Nine calls begin, then number 2 blocks their loop until `release`. Later calls return at once."""

    def __init__(self, release: threading.Event, nested: bool = False):
        self.release, self.nested = release, nested
        self.begun: list[int] = []
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def work(self, number):
        self.begun.append(number)
        self.loops.append(asyncio.get_running_loop())
        while len(self.begun) < 9:
            await asyncio.sleep(0.001)
        if number == 2:
            await (asyncio.gather(self.block()) if self.nested else self.block())
        elif number < 9:
            await asyncio.sleep(1e6)
        return number

    async def block(self):
        self.release.wait(60)


async def nine_calls(code):
    calls = [code.call("work", (number,), {}, timeout_s=2.0) for number in range(9)]
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 0.1)
    release = threading.Event()
    yield release
    release.set()


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_call_that_blocks_is_named_and_the_calls_beside_it_fail_as_blocked(quick, caplog, nested):
    plugin = OneBlocks(quick, nested)
    code = UserCode(plugin, Base, "blocked")
    results = asyncio.run(nine_calls(code))
    own = LoopBlocked if nested else CallTimeout  # a task that a call has made is only known to be the object's
    assert [type(r) for r in results] == [LoopBlocked, LoopBlocked, own] + [LoopBlocked] * 6
    who = "code of blocked" if nested else "work of blocked"
    assert {str(r) for r in results} == {f"timed out after 2 s: {who} blocked its event loop"}
    assert caplog.text.count("blocked its event loop") == 1
    assert f"{9 if nested else 8} other calls share that loop" in caplog.text

    assert asyncio.run(code.call("work", (9,), {}, timeout_s=60)) == 9
    assert plugin.loops[-1] is not plugin.loops[0]
    quick.set()
    no_thread_is_left("blocked", besides=1)
    assert sorted(plugin.begun) == list(range(10)), "none is made twice"


@pytest.mark.slow
def test_calls_beside_one_that_blocks_go_on_if_it_ends_and_those_that_failed_before_do_not_begin(quick):
    begun = []

    class Blocks(Base):
        async def work(self, name):
            begun.append(name)
            if name == "blocks":
                quick.wait(60)
            while name == "beside" and not quick.is_set():
                await asyncio.sleep(0.01)
            return name

    async def main():
        code = UserCode(Blocks(), Base, "beside")

        def call(name, timeout_s):
            return asyncio.create_task(code.call("work", (name,), {}, timeout_s=timeout_s))

        assert await call("first", 60) == "first"
        beside = call("beside", 60)
        failed = await asyncio.gather(call("blocks", 1.0), call("behind", 1.0), return_exceptions=True)
        assert [type(error) for error in failed] == [CallTimeout, LoopBlocked]
        assert await call("later", 60) == "later" and not beside.done()
        quick.set()
        return await beside

    assert asyncio.run(main()) == "beside"
    no_thread_is_left("beside")
    assert begun == ["first", "beside", "blocks", "later"]


@pytest.mark.slow
def test_a_call_that_blocks_when_its_caller_is_cancelled_does_not_hold_up_later_ones(quick):
    begun = threading.Event()

    class Blocks(Base):
        async def work(self, blocks):
            if blocks:
                begun.set()
                quick.wait(60)
            return "done"

    async def main():
        code = UserCode(Blocks(), Base, "plug-in")
        blocks = asyncio.create_task(code.call("work", (True,), {}, timeout_s=1e6))
        assert await asyncio.to_thread(begun.wait, 60)
        blocks.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocks
        await asyncio.sleep(0.2)
        return await code.call("work", (False,), {}, timeout_s=60)

    assert asyncio.run(main()) == "done" and not quick.is_set()


@pytest.mark.slow
def test_a_function_and_what_it_returns_to_await_have_one_deadline():
    def function():
        time.sleep(0.5)
        return asyncio.sleep(0.8)

    with pytest.raises(CallTimeout):
        asyncio.run(UserCode(Plugin(), Base, "plug-in").run(function, (), {}, timeout_s=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync", "blocking"])
def test_threads_that_hang_are_bounded(quick, method, monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._MAX_HANGING", 3)
    name = f"hanging {method}"

    class Hangs(Base):
        def sync(self):
            return quick.wait(60)

        async def blocking(self):
            return quick.wait(60)

    code = UserCode(Hangs(), Base, name)
    for _ in range(3):
        with pytest.raises(CallTimeout, match="timed out after"):
            asyncio.run(code.call(method, (), {}, timeout_s=0.05))
    with pytest.raises(CallTimeout, match=f"not started: 3 earlier calls of {name} passed their deadlines"):
        asyncio.run(code.call(method, (), {}, timeout_s=60))
    quick.set()
    no_thread_is_left(name)
    assert asyncio.run(code.call(method, (), {}, timeout_s=60)) is True


def no_thread_is_left(name, besides=0):
    ends = time.monotonic() + 60
    while (left := sum(t.name == name for t in threading.enumerate())) > besides and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.01)
    assert left == besides


@pytest.mark.slow
def test_the_loops_of_calls_that_are_over_end(quick):
    plugin = OneBlocks(quick)
    code = UserCode(plugin, Base, "ending")
    asyncio.run(nine_calls(code))
    assert asyncio.run(code.call("work", (9,), {}, timeout_s=60)) == 9
    quick.set()
    del code
    no_thread_is_left("ending")
    assert len(set(plugin.loops)) == 2 and all(loop.is_closed() for loop in plugin.loops)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_the_plug_in_ends_fails_its_calls_at_once_and_is_replaced():
    class Ends(Base):
        async def work(self, ends):
            if ends:
                asyncio.get_running_loop().call_soon(sys.exit, 3)
                await asyncio.sleep(1e6)
            return "done"

    async def main():
        code = UserCode(Ends(), Base, "plug-in")
        with pytest.raises(NotAnException, match="CancelledError"):
            await code.call("work", (True,), {}, timeout_s=1e6)
        code._loop_thread.join(60)
        return await code.call("work", (False,), {}, timeout_s=60)

    assert asyncio.run(main()) == "done"


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
