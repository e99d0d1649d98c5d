"""Calling plug-in code: it can neither block nor outlive what waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import subprocess
import sys
import textwrap
import threading
import time

import pytest

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
        ended = threading.Event()

        async def wait(self):
            try:
                await asyncio.sleep(1e6)
            finally:
                self.ended.set()

    plugin = Waits()

    async def main():
        task = asyncio.create_task(user_code_of(plugin, Base, "p").call("wait", (), {}, timeout_s=60))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert plugin.ended.wait(2)


def test_a_copy_of_a_used_plugin_works():
    plugin = Plugin()
    call(plugin, "thread")
    assert call(copy.deepcopy(plugin), "thread") == "plug-in"


def test_in_daemon_thread_gives_value_or_exception():
    assert asyncio.run(in_daemon_thread(lambda x: x + 1, 1)) == 2
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(lambda: 1 / 0))


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
