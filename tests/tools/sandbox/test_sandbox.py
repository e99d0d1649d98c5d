"""Model-written code stays inside: real attempts to get out, in a real locked-in process."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from verl_mt.errors import PluginError
from verl_mt.extensions.toolbox.sandbox import Sandbox, SandboxLimits, folders

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")


WRITE_ANSWER = """
import os
for handle in range(3, 9999):  # as many as this process may have open
    try:
        os.write(handle, b'{}\\n')
    except OSError:
        pass
"""
"""Writes an answer of its own to every pipe it finds."""


HOLD = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
kept = []

def hold(how, megabytes):
    handle = os.open(".", os.O_RDWR | os.O_TMPFILE) if how == "tmpfile" else os.open("f", os.O_RDWR | os.O_CREAT)
    os.write(handle, bytes(megabytes * 2**20))
    if how != "tmpfile":
        os.unlink("f")
    if how == "mapped":
        assert libc.mmap(None, 4096, 1, 1, handle, 0) != 2**64 - 1
        os.close(handle)
"""
"""Files that are in no folder any more, but still there."""


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(SandboxLimits(timeout_s=600.0, memory_mb=256, disk_mb=2, output_kb=8), keeps_state=True)


@pytest.fixture(scope="module")
def interpreter(sandbox):
    os.environ["VERL_MT_TEST_SECRET"] = "hunter2"
    interpreter = sandbox.open()
    yield interpreter
    interpreter.close()
    del os.environ["VERL_MT_TEST_SECRET"]


def test_a_loopback_connection_fails(interpreter):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # from outside it works
        result = interpreter.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")
    assert result.ending == "raised" and "PermissionError" in result.output


def test_two_interpreters_cannot_talk_through_record_locks(sandbox, interpreter):
    beginning = """
        import fcntl, os, struct
        handle = os.open(os.__file__, os.O_RDONLY)
        def lock(how, place, kind=fcntl.F_RDLCK):
            asked = struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)
            return struct.unpack("hhqqi4x", fcntl.fcntl(handle, how, asked))[0]
    """
    other = sandbox.open()
    try:
        setting = "for place in (3, 7, 11):\n    lock(fcntl.F_SETLK, place), lock(fcntl.F_OFD_SETLK, place)"
        asking = "[place for place in range(13) if lock(fcntl.F_GETLK, place, fcntl.F_WRLCK) != fcntl.F_UNLCK]"
        assert interpreter.run(textwrap.dedent(beginning) + setting).ending == "ok"
        assert other.run(textwrap.dedent(beginning) + asking).output.strip() == "[]"
    finally:
        other.close()


def test_a_database_in_a_file_needs_no_locks(interpreter):
    code = """
        import sqlite3
        with sqlite3.connect("a.db") as database:
            database.execute("create table t (x)")
            database.execute("insert into t values (42)")
        sqlite3.connect("a.db").execute("select x from t").fetchone()
    """
    assert interpreter.run(textwrap.dedent(code)).output.strip() == "(42,)"


def test_a_fork_bomb_starts_no_process(interpreter):
    before = len(os.listdir("/proc"))
    result = interpreter.run("import os\nwhile True:\n    os.fork()")
    assert result.ending == "raised" and "PermissionError" in result.output
    assert len(os.listdir("/proc")) < before + 20
    assert "PermissionError" in interpreter.run("import subprocess\nsubprocess.run(['true'])").output
    assert "can't start new thread" in interpreter.run("import threading\nthreading.Thread().start()").output


def test_nothing_outside_its_folder_is_written(interpreter, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    attempts = [
        "open({0!r}, 'w')",
        "open({0!r}, 'a')",
        "import os; os.open({0!r}, os.O_RDONLY | os.O_TRUNC)",
        "os.truncate({0!r}, 0)",
        "os.unlink({0!r})",
        "os.rename({0!r}, 'mine')",
        "os.link({0!r}, 'mine')",
        "os.symlink({0!r}, 'link'); open('link', 'w')",
        "os.mkdir({0!r} + '.d')",
        "open('../escaped', 'w')",
        "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
        "os.chown({0!r}, 1, 1)",
    ]
    for attempt in attempts:
        result = interpreter.run(attempt.format(str(victim)))
        assert result.ending == "raised" and ("PermissionError" in result.output or "OSError" in result.output), attempt
    interpreter.run(f"os.chmod({str(victim)!r}, 0); os.utime({str(victim)!r}, (0, 0))")
    assert victim.read_text() == "whole" and victim.stat().st_mtime > 1e9 and victim.stat().st_mode & 0o600 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["victim"]


def test_secrets_of_this_process_and_machine_cannot_be_read(interpreter, tmp_path):
    key = tmp_path / "id_rsa"
    key.write_text("PRIVATE")
    attempts = [
        "import os; print(dict(os.environ))",
        "open(f'/proc/{os.getppid()}/environ').read()",
        "open('/proc/self/maps').read()",
        f"open({str(key)!r}).read()",
        "open('/etc/passwd').read()",
        "os.listdir('/')",
        "os.listdir('..')",
    ]
    outputs = [interpreter.run(attempt).output for attempt in attempts]
    assert all("PermissionError" in output for output in outputs[1:]), outputs
    assert not any("hunter2" in output or "PRIVATE" in output for output in outputs)


def test_no_signal_reaches_another_process(interpreter):
    code = f"import os\nos.kill({os.getpid()}, 0)"
    assert "PermissionError" in interpreter.run(code).output


def test_raw_system_calls_meet_the_same_wall(interpreter):
    calls = "(425, 1, 0), (41, 2, 1, 0), (101, 16, os.getppid(), 0, 0)"  # io_uring_setup, socket, ptrace
    result = interpreter.run(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"[(libc.syscall(*call), ctypes.get_errno()) for call in ({calls})]"
    )
    assert result.output.strip() == "[(-1, 1), (-1, 1), (-1, 1)]"


def test_memory_and_open_files_are_limited_and_the_limits_cannot_be_raised(interpreter):
    assert "MemoryError" in interpreter.run("x = bytearray(300 * 2**20)").output
    assert "Too many open files" in interpreter.run("fs = []\nwhile True: fs.append(open('f', 'w'))").output
    interpreter.run("fs.clear()")
    raising = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert interpreter.run(raising).ending == "raised"


def test_it_is_the_first_to_go_when_memory_is_short(interpreter):
    assert Path(f"/proc/{interpreter._process.pid}/oom_score_adj").read_text().strip() == "1000"


def test_ordinary_code_works_and_its_state_stays(interpreter):
    assert interpreter.run("def square(x):\n    return x * x\nprint('hi')\nsquare(7)").output == "hi\n49\n"
    assert interpreter.run("open('note', 'w').write('kept'); square(3)").output == "9\n"
    assert interpreter.run("import shutil, json\nshutil.copy('note', 'b'); open('b').read()").output == "'kept'\n"
    looping = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5\nasyncio.run(f())"
    assert interpreter.run(looping).output == "5\n"


def test_what_the_model_sees_of_an_exception_is_its_own_code(interpreter):
    result = interpreter.run("def f():\n    return 1 / 0\nf()")
    assert result.ending == "raised"
    assert "return 1 / 0" in result.output and "ZeroDivisionError: division by zero" in result.output
    assert "jail" not in result.output
    assert "SyntaxError" in interpreter.run("def f(:").output
    assert "EOFError" in interpreter.run("input()").output


def test_output_is_kept_at_both_ends_in_bounded_memory(interpreter):
    result = interpreter.run("for k in range(50_000): print(k)")
    assert result.ending == "ok" and len(result.output) < 9 * 1024
    assert result.output.startswith("0\n1\n") and result.output.endswith("49999\n")
    assert "bytes left out" in result.output


def test_code_may_break_its_own_streams_but_not_the_protocol(sandbox):
    interpreter = sandbox.open()
    interpreter.run("import sys\nsys.stdout = None\nsys.stderr = None")
    assert interpreter.run("print('back')").output == "back\n"
    assert interpreter.run("import builtins\ndel builtins.print, builtins.repr\n1").ending == "died"
    interpreter.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, ending, detail",
    [
        ("while True: pass", "timeout", "within 0.2 s"),
        ("import time\ntry: time.sleep(1e6)\nexcept BaseException: time.sleep(1e6)", "timeout", "within 0.2 s"),
        ("import os\nwhile True: os.write(1, bytes(10**6))", "output", "KiB"),
        ("import os\nos._exit(3)", "died", "exit code 3"),
        ("import ctypes\nctypes.string_at(1)", "died", "signal 11"),
        (WRITE_ANSWER.format("junk"), "died", ""),
    ],
)
def test_code_that_does_not_end_well_costs_its_process_only(code, ending, detail):
    timeout_s = 0.2 if ending == "timeout" else 600.0
    sandbox = Sandbox(SandboxLimits(timeout_s=timeout_s, memory_mb=256, disk_mb=2, output_kb=8))
    interpreter = sandbox.open()
    result = interpreter.run(code)
    assert result.ending == ending and detail in result.detail and not interpreter.alive
    interpreter.close()
    assert not os.path.exists(interpreter.folder)


def test_code_that_fakes_its_answer_does_not_go_on_off_the_clock(sandbox):
    interpreter = sandbox.open()
    forged = WRITE_ANSWER.replace("{}", '{"raised": false}')
    assert interpreter.run(forged + "while True:\n    open('count', 'a').write('x')").ending == "ok"
    state = Path(f"/proc/{interpreter._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert state == "T", "it is stopped until it gets more code"
    interpreter.close()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


FORGED = WRITE_ANSWER.replace("b'{}\\n'", "answer")


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer", ["b'[' * 4000 + b'\\n'", "b'9' * 4000 + b'\\n'", "b'\\xff\\n'", "b'{\"ending\": []}\\n'", "b'x' * 5000"]
)
def test_a_forged_answer_that_cannot_be_read_ends_the_process(sandbox, answer):
    interpreter = sandbox.open()
    result = interpreter.run(f"answer = {answer}{FORGED}while True: pass")
    assert result.ending == "died" and result.detail == "the interpreter's answer was not its own"
    assert not interpreter.alive
    interpreter.close()


def test_code_that_answers_and_prints_for_ever_holds_nobody_up(sandbox):
    interpreter = sandbox.open()
    code = f"answer = b'{{\"raised\": false}}\\n'{FORGED}while True: os.write(1, bytes(65536))"
    assert interpreter.run(code).ending in ("ok", "died")
    interpreter.close()


def test_the_folder_has_a_limit_over_all_its_files(sandbox):
    interpreter = sandbox.open()
    result = interpreter.run("import os\nfor k in range(100):\n    open(f'f{k}', 'wb').write(bytes(2**20))")
    assert result.ending == "disk" and "2 MiB" in result.detail
    interpreter.close()
    assert not os.path.exists(interpreter.folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["open", "tmpfile", "mapped"])
@pytest.mark.parametrize("pause", ["", "; import time; time.sleep(1e6)"])
def test_files_without_a_name_count_while_they_are_held(sandbox, how, pause):
    interpreter = sandbox.open()
    assert interpreter.run(f"{HOLD}\nhold({how!r}, 1)").ending == "ok"
    result = interpreter.run(f"hold({how!r}, 2)" + pause)
    assert result.ending == "disk" and "deleted ones that it still uses included" in result.detail
    assert not interpreter.alive
    interpreter.close()


def test_ordinary_temporary_files_are_counted_once_and_no_longer_than_they_are_there(sandbox):
    interpreter = sandbox.open()
    code = """
        import mmap, os, tempfile
        for k in range(10):
            with tempfile.TemporaryFile() as file:
                file.write(bytes(2**20))
                file.flush()
                with mmap.mmap(file.fileno(), 0) as mapped:
                    assert mapped[5] == 0
        file = tempfile.TemporaryFile()
        os.posix_fallocate(file.fileno(), 0, 2**20)
        file.write(bytes(2**20))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
        open("a", "wb").write(bytes(2**19))
        os.link("a", "b")
        open("a")
    """
    assert interpreter.run(textwrap.dedent(code)).ending == "ok"
    interpreter.close()


def test_moving_files_to_where_they_were_counted_does_not_hide_them(sandbox):
    interpreter = sandbox.open()
    code = """
        import os
        os.makedirs("a/big"), os.mkdir("b")
        here, there, seen = "a/big", "b/big", 0
        for k in range(200_000):
            with open(f"{here}/{k // 16}", "ab") as file:
                file.write(bytes(65536))
            if (now := os.stat("a").st_atime_ns) != seen or k % 3 == 0:  # it was listed
                os.rename(here, there)
                here, there, seen = there, here, now
    """
    assert interpreter.run(textwrap.dedent(code)).ending == "disk"
    written = sum(path.stat().st_size for path in Path(interpreter.folder).rglob("*") if path.is_file())
    assert written < 1024 * 2**20
    interpreter.close()


def test_a_folder_that_cannot_be_looked_into_is_still_removed(sandbox):
    interpreter = sandbox.open()
    interpreter.run("import os\nos.makedirs('a/b'); os.symlink('/etc', 'a/link')\nos.mkdir('c', 0)")
    interpreter.close()
    assert not os.path.exists(interpreter.folder)


@pytest.mark.slow
def test_an_interpreter_dies_with_the_process_that_started_it_and_its_files_go_with_the_next(tmp_path):
    script = """
        import os, threading
        from verl_mt.tools.sandbox import Sandbox
        interpreter = Sandbox().open()
        print(interpreter._process.pid, flush=True)
        threading.Thread(target=interpreter.run, args=("import time; time.sleep(1e6)",), daemon=True).start()
        os.kill(os.getpid(), 9)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    pid = int(done.stdout)
    while runs(pid):
        time.sleep(0.02)
    (left,) = tmp_path.glob("verl_mt_sandbox_*")
    os.utime(left)
    folders._sweep(tmp_path)
    assert left.exists()  # it is so young that its owner may not have locked it yet
    os.utime(left, (0, 0))
    folders._sweep(tmp_path)
    assert not left.exists()


@pytest.mark.slow
def test_files_of_a_living_process_are_never_swept_and_go_with_it(tmp_path):
    script = """
        import os, sys
        from verl_mt.tools.sandbox import folders
        print(folders.new_folder(), flush=True)
        sys.stdin.readline()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(process.stdout.readline().strip())
    os.utime(folder.parent, (0, 0))
    folders._sweep(tmp_path)
    assert folder.exists()
    process.communicate("go\n")
    assert not folder.parent.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_landlock_it_refuses_to_start_and_says_what_is_missing():
    script = """
        import ctypes, errno, struct
        # A container runtime that does not know landlock_create_ruleset (444): seccomp answers ENOSYS.
        program = b"".join(struct.pack("=HBBI", *i) for i in [
            (0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)])
        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.byref(Program(4, program)), 0, 0) == 0
        from verl_mt.errors import PluginError
        from verl_mt.tools.python_tool import PythonTool
        try:
            PythonTool({})
        except PluginError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert "cannot be isolated on this machine: Landlock is missing (Function not implemented)" in done.stdout
    assert "Linux 5.13" in done.stdout and done.stderr == ""


def test_a_sandbox_with_a_hole_refuses_to_start(monkeypatch):
    from verl_mt.extensions.toolbox.sandbox import interpreter as module

    everything = b"\x06\x00\x00\x00\x00\x00\xff\x7f"  # return ALLOW
    monkeypatch.setattr(module, "build_filter", lambda: everything)
    with pytest.raises(PluginError, match=r"should reach nothing, but ok .*network"):
        Sandbox().verify()


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_a_hole_that_only_older_kernels_have_is_found_there(monkeypatch, tmp_path, version):
    from verl_mt.extensions.toolbox.sandbox import interpreter as module
    from verl_mt.extensions.toolbox.sandbox import seccomp

    older = tmp_path / "jail.py"
    main = 'if __name__ == "__main__":'
    text = Path(module._JAIL).read_text()
    older.write_text(text.replace(main, f"landlock_version = lambda: {version}\n{main}"))
    monkeypatch.setattr(module, "_JAIL", str(older))
    Sandbox().verify()
    monkeypatch.setattr(seccomp, "_OPENING", (*seccomp._OPENING, 3 | os.O_TRUNC))
    with pytest.raises(PluginError, match=r"should reach nothing, but ok .*truncation on open, mode 3"):
        Sandbox().verify()


def test_wrong_settings_are_named(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho '[[3, 8], 1, 2, 3, 4, 5, 6, 7, 8]'\n")
    old.chmod(0o700)
    with pytest.raises(PluginError, match=r"is Python 3\.8, but 3\.9 or newer is needed"):
        Sandbox(python=str(old))
    with pytest.raises(PluginError, match="python: '/no/python' does not start"):
        Sandbox(python="/no/python")
    with pytest.raises(PluginError, match="readable: 'data' is not an existing absolute path"):
        Sandbox(readable=("data",))


def test_other_systems_than_linux_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PluginError, match="on Linux only, and this is darwin"):
        Sandbox()


def test_a_folder_can_be_made_readable(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n")
    interpreter = Sandbox(readable=(str(tmp_path),)).open()
    assert interpreter.run(f"open({str(tmp_path / 'table.csv')!r}).read()").output == "'a,b\\n'\n"
    assert interpreter.run(f"open({str(tmp_path / 'new')!r}, 'w')").ending == "raised"
    interpreter.close()


def test_the_code_sees_the_same_handles_however_many_the_trainer_has_open(sandbox):
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]
    try:
        interpreter = sandbox.open()
    finally:
        for handle in held:
            os.close(handle)
    look = """
import os
found = []
for handle in range(1024):
    try:
        os.fstat(handle)
        found.append(handle)
    except OSError:
        pass
found
"""
    result = interpreter.run(look)
    interpreter.close()
    assert result.ending == "ok" and max(ast.literal_eval(result.output)) < 10, result
