"""A warm start gives what a real start gives."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
from command_lab import FEW, SMALL, environment
from tables import before_release

pytestmark = pytest.mark.slow  # every one starts processes

PATH = os.environ.get("PYTHONPATH", str(warm_start.REPO))
DESCRIBE_PROCESS = """
import gc, json, multiprocessing.process, os, signal, sys, tempfile, threading
def described(stream):
    names = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through")
    return [repr(stream), type(stream.buffer).__name__, stream.seekable(), *(getattr(stream, name) for name in names)]
print(json.dumps({
    "words": [sys.argv, sys.orig_argv, sys.executable, repr(sys.flags), sys.warnoptions],
    "path": sys.path,
    "streams": [described(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": {s: repr(signal.getsignal(s)).split(" at 0x")[0] for s in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "folders": [os.getcwd(), tempfile.gettempdir(), multiprocessing.process.ORIGINAL_DIR],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "environment": dict(os.environ),
    "main": {name: repr(value).split(" at 0x")[0] for name, value in vars().items() if name.startswith("__")},
    "garbage": [gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit()],
    "threads": [os.listdir("/proc/self/task") == [str(os.getpid())], repr(threading.enumerate()).split(" ")[0]],
    "input": sys.stdin.read(),
}))
"""


def words_of(folder: Path, kind: str, program: str) -> list[str]:
    """Ways to start a program."""
    (folder / "programs").mkdir(exist_ok=True)
    (folder / "programs" / "script.py").write_text(program)
    (folder / "module_of_test.py").write_text(program)
    plain = {
        "-c": ["-c", program], "-m": ["-m", "module_of_test"], "script": ["./programs/script.py"],
        "-W": ["-W", "ignore", "-W", "error::ImportWarning", "-c", program],
    }  # fmt: skip
    return [sys.executable, *plain[kind], "--option", "value"]


@pytest.fixture
def foreground() -> Iterator[None]:
    """A process that a shell starts in the background ignores Ctrl-C, and so do real starts of it. Forks never do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", ["-c", "-m", "script", "-W"])
def test_a_fork_looks_like_a_new_interpreter(foreground, tmp_path, kind):
    words = words_of(tmp_path, kind, DESCRIBE_PROCESS)
    (tmp_path / "input").write_text("some input\n")
    warm_start.server()  # sets a variable
    seen = {}
    for name, start in (("warm", warm_start.Popen), ("real", subprocess.Popen)):
        with open(tmp_path / "input") as given, open(tmp_path / name, "w") as out:
            started = start(
                words, cwd=tmp_path, stdin=given, stdout=out, stderr=subprocess.PIPE, start_new_session=kind == "-c",
                pass_fds=(out.fileno(),) if kind == "-m" else (),
                env={**os.environ, "PYTHONPATH": f"{PATH}:programs", "ONE": "1"},
            )  # fmt: skip
            assert started.communicate() == (None, b"") and started.returncode == 0
            assert not getattr(started, "why_real", None)
        seen[name] = json.loads((tmp_path / name).read_text())
    for process in seen.values():  # set by imports, which a real start has still to do
        process["environment"] = {**warm_start.server().set_at_import, **process["environment"]}
    assert seen["warm"] == seen["real"]


ENDINGS = {
    "nothing": ("print('out'); print('err', file=__import__('sys').stderr)", 0),
    "status": ("import sys; sys.exit(3)", 3),
    "large status": ("import sys; sys.exit(300)", 44),
    "text": ("import sys; sys.exit('text')", 1),
    "traceback": ("def f():\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        raise ValueError\nf()", 1),
    "syntax": ("x = 1\ny = (", 1),
    "import": ("import module_that_is_nowhere", 1),
    "own hook": ("import sys\nsys.excepthook = lambda *a: print(a[0], a[2].tb_lineno)\n\nraise ValueError", 1),
    "Ctrl-C": ("raise KeyboardInterrupt", -signal.SIGINT),
    "_exit": ("import os; print('lost', end=''); os._exit(4)", 4),
    "abort": ("import os; os.abort()", -signal.SIGABRT),
    "kill": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "atexit": ("import atexit; atexit.register(print, 'last'); atexit.register(int, 'no number'); print('first')", 0),
    "thread": ("import threading as t, time\nt.Thread(target=lambda: (time.sleep(.2), print('joined'))).start()", 0),
    "full disk": ("import sys; sys.stdout = open('/dev/full', 'w'); print('x')", 120),
    "fork": ("import os\nif os.fork() == 0: os._exit(0)\nos.wait(); print('parent')", 0),
    "spawn": (
        "import multiprocessing as m, os\n"
        "if __name__ == '__main__': p = m.get_context('spawn').Process(target=os.mkdir, args=('x',)); p.start();"
        " p.join(); print(p.exitcode); os.rmdir('x')",
        0,
    ),
}


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_status_output_and_traceback_are_those_of_a_real_start(tmp_path, kind, ending):
    program, status = ENDINGS[ending]
    words = words_of(tmp_path, kind, program)
    warm, real = (run(words, cwd=tmp_path, capture_output=True, text=True) for run in (warm_start.run, subprocess.run))
    without_ids = [re.sub(r"0x[0-9a-f]+", "0x", text) for text in (warm.stderr, real.stderr)]
    assert (warm.returncode, warm.stdout, without_ids[0]) == (real.returncode, real.stdout, without_ids[1])
    assert warm.returncode == status


def test_an_option_about_warnings_is_obeyed():
    program = "import warnings; warnings.warn('said'); warnings.warn('raised', BytesWarning)"
    words = [sys.executable, "-W", "ignore::UserWarning", "-W", "error::BytesWarning", "-c", program]
    warm, real = (run(words, capture_output=True, text=True) for run in (warm_start.run, subprocess.run))
    assert (warm.returncode, warm.stderr) == (real.returncode, real.stderr)
    assert warm.returncode == 1 and "BytesWarning: raised" in warm.stderr and "said" not in warm.stderr


def test_one_whose_fate_is_shared_ends_with_who_asked_for_it():
    request = {
        "words": [sys.executable, "-c", LOOP], "options": [], "cwd": os.getcwd(), "environment": dict(os.environ),
        "first_entry": os.getcwd(), "new_session": False, "process_group": -1, "pass_fds": [], "fate_shared": True,
    }  # fmt: skip
    with open(os.devnull, "r+b") as nothing:
        pid, status = warm_start.ask(warm_start.ADDRESS, request, [nothing.fileno()] * 3)
    assert warm_start.parent_of(pid) == os.getpid() != warm_start.server().process.pid
    assert warm_start.parent_of(os.getpid()) == os.getppid()
    end = os.pidfd_open(pid)
    assert not select.select([end], [], [], 0.1)[0]
    status.close()
    select.select([end], [], [])
    os.close(end)


def test_a_module_that_is_not_there_is_named(tmp_path):
    words = [sys.executable, "-m", "module_that_is_nowhere"]
    warm, real = (run(words, cwd=tmp_path, capture_output=True, text=True) for run in (warm_start.run, subprocess.run))
    assert (warm.returncode, warm.stderr) == (real.returncode, real.stderr)


LOOP = """
import time
try:
    print("begun", flush=True)
    while True:
        time.sleep(0.02)  # Python does not notice a signal that comes just before one long sleep begins
finally:
    print("cleaned", flush=True)
"""


@pytest.mark.parametrize(("number", "out"), [(signal.SIGINT, "cleaned\n"), (signal.SIGTERM, ""), (signal.SIGKILL, "")])
def test_a_signal_reaches_the_fork_and_its_status_the_test(number, out):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with warm_start.Popen([sys.executable, "-c", LOOP], **pipes) as process:
        assert process.stdout.readline() == "begun\n" and process.poll() is None
        process.send_signal(number)
        assert process.communicate()[0] == out
    assert process.returncode == -number


def test_a_process_is_a_zombie_until_it_is_waited_for():
    """So a signal to a process that has just ended is no error, and hits no other."""
    with warm_start.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b""
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode in (0, -signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_timeout_kills_and_a_failed_check_raises():
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        warm_start.run([sys.executable, "-c", LOOP], timeout=1, capture_output=True)
    assert caught.value.stdout in (b"begun\n", None), "None: on a busy machine it had said nothing yet"
    with pytest.raises(subprocess.CalledProcessError, match="status 7"):
        warm_start.run([sys.executable, "-c", "raise SystemExit(7)"], check=True)


def test_two_at_once_end_in_any_order_and_draw_other_numbers():
    program = "import random, numpy, torch; input(); print(random.random(), numpy.random.rand(), torch.initial_seed())"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first, second = (warm_start.Popen([sys.executable, "-c", program], **pipes) for _ in range(2))
    later = second.communicate("\n")[0].split()
    assert second.returncode == 0 and first.poll() is None
    numbers = [*first.communicate("\n")[0].split(), *later]
    assert first.returncode == 0 and len(set(numbers)) == 6


def test_the_server_has_set_up_nothing():
    program = """
import logging, sys, torch
from hydra.core.global_hydra import GlobalHydra
print(logging.root.handlers, logging.root.level, GlobalHydra.instance().is_initialized(), torch.is_grad_enabled())
print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype())
print([name for name in sys.modules if name.endswith("__main__")], torch.cuda.is_initialized())
"""
    done = warm_start.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[] 30 False True\n1 False torch.float32\n['__main__'] False\n" and done.returncode == 0


def why_real(*words: str, **kwargs: Any) -> str | None:
    with warm_start.Popen([sys.executable, *words], **kwargs) as process:
        return process.why_real


def test_what_a_fork_cannot_repeat_is_a_real_start(tmp_path):
    def with_variables(**changes: str) -> str | None:
        return why_real("-c", "", env={**os.environ, **changes})

    before = warm_start.counts()
    assert with_variables(COLUMNS="99", MY_OWN="1", ONEDNN_PRIMITIVE_CACHE_CAPACITY="7") is None
    assert with_variables(HF_HUB_OFFLINE="0") == "HF_HUB_OFFLINE is read at import"
    assert with_variables(OMP_NUM_THREADS="2") == "OMP_NUM_THREADS is read at import"
    assert with_variables(PYTHONWARNINGS="error") == "PYTHONWARNINGS is read at import"
    assert warm_start.counts() - before == {
        "": 1, **{f"{name} is read at import": 1 for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONWARNINGS")}
    }  # fmt: skip
    assert why_real("-c", "", env={}).endswith("is read at import")

    (tmp_path / "rich").mkdir()  # a folder of data
    assert why_real("-c", "", cwd=tmp_path) is None
    (tmp_path / "rich" / "__init__.py").touch()
    assert why_real("-m", "this", cwd=tmp_path, stdout=subprocess.DEVNULL).endswith("before the imported rich")
    (tmp_path / "script.py").touch()
    assert why_real(str(tmp_path / "script.py")).endswith("before the imported rich")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "sitecustomize.py").touch()
    assert with_variables(PYTHONPATH=f"{PATH}:{tmp_path}/more").endswith("runs at the start of Python")


def test_a_fork_would_have_ignored_what_a_real_start_reads():
    """Without the real start the fork's constant is the one of the server."""
    program = "import huggingface_hub.constants as c; print(c.HF_HUB_OFFLINE)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    done = warm_start.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("words", [["true"], ["-u", "x.py"], ["-"], []])
def test_words_that_no_fork_runs_are_refused(words):
    with pytest.raises(ValueError, match="use subprocess"):
        warm_start.run(words if words == ["true"] else [sys.executable, *words])


def test_an_argument_that_needs_an_exec_is_refused():
    with pytest.raises(ValueError, match="a fork has no preexec_fn: use subprocess"):
        warm_start.run([sys.executable, "-c", ""], preexec_fn=os.getpid)


@pytest.fixture
def small_server(monkeypatch):
    """One that has imported next to nothing."""

    def start(*imported: str) -> warm_start.Server:
        monkeypatch.setattr(warm_start, "START_ENVIRONMENT", dict(os.environ))  # other tests have imported verl_mt
        monkeypatch.setenv(warm_start.ADDRESS, "")
        made = warm_start.Server(imported)
        monkeypatch.setattr(warm_start, "_servers", {(os.getpid(), warm_start.ADDRESS): made})
        return made

    return start


def test_a_server_with_a_thread_does_not_fork(tmp_path, monkeypatch, small_server):
    (tmp_path / "with_thread.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    small_server("with_thread")
    with pytest.raises(RuntimeError, match="2 threads are running"):
        warm_start.run([sys.executable, "-c", ""])


def test_a_server_that_cannot_import_says_why(small_server):
    with pytest.raises(RuntimeError, match="No module named 'nowhere'"):
        small_server("nowhere")


def test_the_end_of_the_server_is_an_error_and_not_a_status(small_server):
    server = small_server("json")
    with warm_start.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n"
        server.process.kill()
        with pytest.raises(RuntimeError, match="the server of warm starts"):
            process.wait()
        os.kill(process.pid, signal.SIGKILL)
        process.returncode = -signal.SIGKILL  # nobody can know


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import warm_start
print(warm_start.Server(["json"]).process.pid, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        server = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    select.select([server], [], [])  # until it has ended
    os.close(server)


RUN = (*SMALL, *FEW, "trainer.deterministic=True", "trainer.total_training_steps=1", "trainer.default_local_dir=run")
COMMANDS = (
    ("verl_mt.trainer", *RUN, "data.train_batch_size=0"),
    ("verl_mt.trainer", *RUN),
    ("verl_mt.evaluate", "--run", "run", "--n", "2", "--out", "answers"),
    ("verl_mt.export", "--checkpoint", "run", "--out", "exported"),
)


@pytest.mark.parametrize(
    ("commands", "expected"), [(COMMANDS[1:2], [0]), before_release(COMMANDS, [2, 0, 0, 0])], ids=["one", "all"]
)
def test_commands_do_the_same_as_real_starts(tmp_path, commands, expected):
    """A real start also has other hashes: what depends on the order of a set differs here."""
    statuses = []
    for command in commands:
        seen = {}
        for name, start in (("warm", warm_start.Popen), ("real", subprocess.Popen)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with start([sys.executable, "-m", *command], cwd=folder, env=environment(), **pipes) as process:
                printed = [without_numbers(text.replace(str(folder), "")) for text in process.communicate()]
            assert getattr(process, "why_real", None) is None
            files = {without_numbers(str(file.relative_to(folder))) for file in folder.rglob("*")}
            exact = ("metrics.json", "metrics.jsonl", "model.safetensors", "prompt_log.jsonl", "config.yaml")
            contents = {
                str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
                for file in folder.rglob("*")
                if file.name in exact
            }
            seen[name] = {"status": process.returncode, "printed": printed, "files": files, "contents": contents}
        assert seen["warm"] == seen["real"], command
        statuses.append(process.returncode)
    assert statuses == expected and len(contents) > 2


def without_numbers(text: str) -> str:
    """Without times, speeds, free memory, the columns that they move, the lines that they order, and progress bars,
    which a busy machine refreshes more often."""
    text = re.sub(r"[^\r\n]*\|[^\r\n|]*it/s\][\r\n]*", "", text)
    text = re.sub(r"(rollouts spent|held by|most in one step).*", "", text)
    return re.sub(r"[\d.]+[a-z]*|[─━ ]+", "#", text)
