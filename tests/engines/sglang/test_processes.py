"""The processes that are started: they end with their children and tell how they ended; an SGLang that nobody could
work with is refused before anything is loaded."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from live import processes_of_group

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.replicas.processes import ChildProcess, ProcessGroup
from verl_mt.extensions.cluster.sglang import clients, processes
from verl_mt.extensions.cluster.sglang.clients import ColocatedClient, LaunchedServer
from verl_mt.extensions.cluster.sglang.options import SGLangOptions

CLASSES = [*processes._INPUT_CLASSES.values(), *processes._PLAIN_CALLS.values()]
CALLS = [*processes._INPUT_CLASSES, *processes._PLAIN_CALLS]


@pytest.mark.parametrize(("kind", "call"), list(zip(CLASSES, CALLS)))
def test_every_call_that_is_missing_is_named(kind, call, monkeypatch):
    monkeypatch.setattr(processes, "_SENT", {})
    with_all = SimpleNamespace(**dict.fromkeys(CLASSES))
    manager = type("Manager", (), dict.fromkeys(CALLS))
    processes.require_calls("0.5.23", with_all, manager)
    for structs, methods in (([c for c in CLASSES if c != kind], CALLS), (CLASSES, [c for c in CALLS if c != call])):
        with pytest.raises(ConfigError, match=f"SGLang 0.4.9, .* lacks the calls {call}. Install 0.5.23"):
            processes.require_calls(
                "0.4.9", SimpleNamespace(**dict.fromkeys(structs)), type("Manager", (), dict.fromkeys(methods))
            )


def test_what_a_call_does_not_take_any_more_is_named():
    def takes(*parts):
        parameters = [inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY) for part in parts]
        return type("Input", (), {"__signature__": inspect.Signature(parameters)})

    kinds = {kind: takes(*processes._SENT.get(name, ())) for name, kind in processes._INPUT_CLASSES.items()}
    manager = type("Manager", (), dict.fromkeys(CALLS))
    kinds |= dict.fromkeys(processes._PLAIN_CALLS.values())
    processes.require_calls("0.5.22", SimpleNamespace(**kinds), manager)
    for name, parts in processes._SENT.items():
        kind = processes._INPUT_CLASSES[name]
        left = {**kinds, kind: takes(*parts[:-1])}
        with pytest.raises(
            ConfigError, match=rf"SGLang 9\.0, .* lacks the calls {name}\({parts[-1]}=\). Install 0\.5\.23"
        ):
            processes.require_calls("9.0", SimpleNamespace(**left), manager)


def fake_sglang(folder: Path, body: str, without: str = "") -> None:
    """A package `sglang` in `folder` with all calls but one."""
    managers = folder / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text(body)
    takes = {kind: ", ".join(processes._SENT.get(name, ())) for name, kind in processes._INPUT_CLASSES.items()}
    classes = [
        f"class {name}:\n    def __init__(self, {takes.get(name, '')}): ...\n" for name in CLASSES if name != without
    ]
    (managers / "io_struct.py").write_text("".join(classes))
    methods = "".join(f"    {name} = None\n" for name in CALLS)
    (managers / "tokenizer_manager.py").write_text(f"class TokenizerManager:\n{methods}")


@pytest.mark.slow
def test_an_old_sglang_is_one_clear_error_at_the_start(tmp_path, monkeypatch, run_async):
    fake_sglang(tmp_path, '__version__ = "0.4.9"\n', without="BeginWeightUpdateReqInput")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def go():
        client = ColocatedClient({"tp_size": 1})
        try:
            with pytest.raises(ConfigError) as caught:
                await client.start(50.0)
        finally:
            await client.stop()
        return str(caught.value)

    text = run_async(go())
    assert "SGLang 0.4.9, which is installed here, lacks the calls begin_weight_update" in text
    assert "exit code 2" in text and "Traceback" not in text
    log = Path(text.rpartition("log ")[2])
    assert log.is_file(), "the error names it"
    log.unlink()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments : true", None),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments:True, roundup_power2_divisions:[256:1,512:2]", "roundup_power2_divisions:[256:1,512:2]"),
        ("expandable_segments:False,max_split_size_mb:64", "max_split_size_mb:64"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_engine_that_gives_its_memory_back_has_no_expandable_segments(name, given, kept, monkeypatch):
    monkeypatch.setenv(name, given)
    assert processes._environment(memory_saver=True).get(name) == kept
    assert processes._environment(memory_saver=False)[name] == given


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("PYTORCH_CUDA_ALLOC_CONF", marks=pytest.mark.release),
        pytest.param("PYTORCH_ALLOC_CONF", marks=pytest.mark.slow),
    ],
)
def test_a_colocated_engine_starts_without_expandable_segments(name, tmp_path, monkeypatch, run_async):
    engine = f"def Engine(**arguments):\n    raise RuntimeError('allocator: ' + str(os.environ.get({name!r})))\n"
    fake_sglang(tmp_path, f"import os\n__version__ = '0.5.23'\n{engine}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(name, "expandable_segments:True")

    async def go(saves):
        client = ColocatedClient({"tp_size": 1, "enable_memory_saver": saves})
        try:
            with pytest.raises(ConfigError) as caught:
                await client.start(50.0)
        finally:
            await client.stop()
        Path(str(caught.value).partition("log ")[2].partition(";")[0]).unlink()
        return str(caught.value)

    assert "allocator: None" in run_async(go(True))
    assert "allocator: expandable_segments:True" in run_async(go(False))


def process_of(module: str, descriptor: int, *words: str) -> ChildProcess:
    return ChildProcess([sys.executable, "-m", module, str(descriptor), *words], descriptor, os.environ)


PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if sys.argv[2] == "raise":
    try:
        raise RuntimeError("first")
    except RuntimeError:
        raise ValueError("no memory left")
os.read(int(sys.argv[1]), 1)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A module that starts a child and then waits for its descriptor to close."""
    (tmp_path / "program_with_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    descriptors, processes = [], []

    def start(how: str) -> tuple[ChildProcess, int]:
        reading, writing = os.pipe()
        process = process_of("program_with_child", reading, how)
        os.close(reading)
        descriptors.append(writing)
        processes.append(process)
        while "child" not in process.log.read_text():
            time.sleep(0.01)
        return process, writing

    yield start
    for process in processes:
        process.end(0.0)
    for descriptor in descriptors:
        os.close(descriptor)


def reap(process: ChildProcess) -> None:
    """As whoever adopts it does, for its killer is not its parent: a zombie is waited for, in vain."""
    threading.Thread(target=process._popen.wait, daemon=True).start()


@pytest.mark.slow
def test_the_process_and_its_child_are_gone_and_so_is_the_log(start):
    process, _ = start("wait")
    assert len(processes_of_group(process.pid)) == 2 and not process.ended
    assert "is running" in process.describe()
    process.end(0.0)
    process.end(0.0)
    assert process.ended and not processes_of_group(process.pid) and not process.log.exists()
    assert "killed by signal 9" in process.describe()


@pytest.mark.slow
def test_a_process_that_fails_leaves_its_last_exception_and_its_child_does_not_outlive_it(start):
    process, _ = start("raise")
    while not process.ended:
        time.sleep(0.01)
    assert processes_of_group(process.pid)
    process.end(0.0, keep_log=True)
    text = process.describe()
    assert "exit code 1" in text and text.endswith("ValueError: no memory left") and "first" not in text
    assert not processes_of_group(process.pid)
    Path(process.log).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wait", "raise"])
def test_what_a_killed_holder_left_is_ended_by_who_comes_next_with_or_without_its_leader(start, how):
    process, _ = start(how)
    group = pickle.loads(pickle.dumps(ProcessGroup.of(process)))
    if how == "raise":
        process._popen.wait()
    else:
        reap(process)
    os.killpg(process.pid, signal.SIGSTOP)  # it hangs: nothing but SIGKILL ends it
    assert processes_of_group(process.pid)
    group.end()
    assert not processes_of_group(process.pid)
    group.end()


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"machine": "another"}, {"begun": "1"}])
def test_a_group_of_the_same_number_on_another_machine_or_of_another_time_is_left_alone(start, other):
    process, _ = start("wait")
    replace(ProcessGroup.of(process), **other).end()
    assert len(processes_of_group(process.pid)) == 2


@pytest.mark.slow
def test_an_engine_begins_when_the_one_that_had_its_devices_is_gone(start, run_async, monkeypatch):
    process, _ = start("wait")
    reap(process)
    left: list[int] = []

    class Begins(ChildProcess):
        def __init__(self, *args, **more):
            left.extend(processes_of_group(process.pid))
            super().__init__(*args, **more)

    monkeypatch.setattr(processes, "ChildProcess", Begins)

    async def go():
        client = ColocatedClient({"tp_size": 1})
        assert (await client.launch(earlier=ProcessGroup.of(process))).pid == client.pid
        client.give_up("not wanted")
        await client.stop()

    run_async(go())
    assert left == [] and process.ended


@pytest.mark.slow
def test_it_does_not_belong_to_our_terminal(start):
    process, _ = start("wait")
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)


@pytest.mark.slow
def test_watching_a_launched_server_leaves_no_waiting_tasks_behind(start, run_async):
    async def go():
        server = LaunchedServer(SGLangOptions(model_path="none", max_model_len=8))
        server._process, _ = start("wait")
        watching = asyncio.ensure_future(server.wait_gone())
        before = len(asyncio.all_tasks())
        await asyncio.sleep(4 * clients._POLL_S)
        after = len(asyncio.all_tasks())
        server._process.end(0.0, keep_log=True)
        reason = await watching
        await server.stop()
        server._process.log.unlink()
        return before, after, reason

    before, after, reason = run_async(go())
    assert after <= before + 1, "one wait at a time, however long the run"
    assert "killed by signal 9" in reason


def test_the_port_of_a_server_is_kept_for_it_while_it_loads(run_async):
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    servers = [LaunchedServer(SGLangOptions(model_path="none", max_model_len=8)) for _ in range(8)]
    ports = [int(server.url.rpartition(":")[2]) for server in servers]
    assert len(set(ports)) == 8 and all(10_000 <= port < given for port in ports), "not one that connections get"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", ports[0]))
    with socket.create_server(("127.0.0.1", ports[0])) as own:
        assert own.getsockname()[1] == ports[0], "the server itself can take it, as uvicorn does"

    async def close():
        for server in servers:
            await server.stop()

    run_async(close())
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[1]))


@pytest.mark.slow
def test_a_process_that_hangs_after_an_error_tells_it(tmp_path, monkeypatch):
    taken = "[2026-11-25 19:54:35] ERROR:    [Errno 98] address already in use"
    (tmp_path / "hanging.py").write_text(f"import time\nprint({taken!r}, flush=True)\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = process_of("hanging", theirs.fileno())
        try:
            while taken not in process.log.read_text():
                time.sleep(0.02)
            assert process.describe().endswith(f"is running; log {process.log}; the last error there:\n  {taken}")
        finally:
            process.end(0.0)


FORKING = """
import multiprocessing, os, sys, time
from verl_mt.engines.sglang.processes import fork_children
fork_children(int(sys.argv[1]))
multiprocessing.set_start_method("spawn", force=True)  # as SGLang does
began = time.time()
multiprocessing.Process(target=lambda: time.sleep(600 + 0 * began)).start()  # nothing that a new process could be sent
print("child", flush=True)
time.sleep(600)
"""


COPY_OF_A_COPY = """
import multiprocessing, os, sys
from verl_mt.engines.sglang.processes import fork_children
fork_children(int(sys.argv[1]))
number = int(sys.argv[1])
def inner():
    print("open" if os.path.exists(f"/proc/self/fd/{number}") else "closed", flush=True)
def outer():
    assert not os.path.exists(f"/proc/self/fd/{number}"), "the connection"
    os.dup2(os.open("/dev/null", os.O_RDONLY), number)
    child = multiprocessing.Process(target=inner)
    child.start(); child.join()
child = multiprocessing.Process(target=outer)
child.start(); child.join()
"""


@pytest.mark.slow
def test_a_copy_of_a_copy_keeps_the_file_that_got_the_connections_number():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        words = [sys.executable, "-c", COPY_OF_A_COPY, str(number)]
        done = subprocess.run(words, pass_fds=(number,), capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "open\n", done.stderr


@pytest.mark.slow
def test_children_are_copies_that_do_not_keep_the_connection_whose_end_tells_of_a_death(tmp_path, monkeypatch):
    (tmp_path / "forking_program.py").write_text(FORKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = process_of("forking_program", theirs.fileno())
        theirs.close()
        try:
            while "child" not in process.log.read_text():
                assert not process.ended, process.describe()
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
            ours.settimeout(None)
            assert ours.recv(1) == b"" and processes_of_group(process.pid), "the copy lives on"
        finally:
            process.end(0.0)
