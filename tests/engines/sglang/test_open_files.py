"""Requests over HTTP are counted against the files that a process may open."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_mt.config_paths import resolve_model_path
from verl_mt.extensions.cluster.replicas import open_files

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])}


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, str(HERE / "late_server.py"), "1", resolve_model_path("verl_mt://tiny")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def ask(server: str, *words: str) -> tuple[dict, str]:
    command = [sys.executable, str(HERE / "many_requests.py"), server, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_1500_conversations_are_answered_by_one_server_with_1024_files(server):
    found, _ = ask(server, "1500", "1024", "1024")
    assert found["stopped"] == 1500 and not found["errors"] and found["restarts"] == 0
    assert found["limits"] == [1024, 1024] and 600 < found["most_files"] <= 1024 - 256


@pytest.mark.slow
def test_the_soft_limit_is_raised_to_the_hard_one_at_start(server):
    found, _ = ask(server, "300", "64", "2000")
    assert found["stopped"] == 300 and found["limits"] == [2000, 2000] and found["most_files"] > 256


@pytest.mark.slow
def test_requests_wait_while_other_code_has_all_files_and_the_server_is_not_given_up(server):
    found, said = ask(server, "5", "256", "256", "full")
    assert found["stopped"] == 5 and found["restarts"] == 0
    assert said.count("requests to servers wait for free ones") == 1 and "engine lost" not in said


def test_after_a_minute_without_a_file_the_error_names_the_limit_and_not_the_server(monkeypatch, run_async):
    monkeypatch.setattr(open_files, "_AGAIN_S", 0.01)
    monkeypatch.setattr(open_files, "_PATIENCE_S", 0.03)

    async def no_file(*args, **kwargs):
        raise open_files.httpx.ConnectError("All connection attempts failed") from OSError(errno.EMFILE, "no")

    async def go():
        connections = open_files.Connections(1)
        monkeypatch.setattr(open_files.httpx.AsyncClient, "request", no_file)
        with pytest.raises(open_files.EngineError, match=r"may have \d+ \(`ulimit -n`\).*The server is not the cause"):
            await connections.post("http://127.0.0.1:1/generate", {}, {})
        await connections.close()

    run_async(go())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "no"), True),
        (OSError(errno.ENFILE, "no"), True),
        (OSError(errno.ECONNREFUSED, "no"), False),
        (ExceptionGroup("all", [ValueError(), OSError(errno.EMFILE, "no")]), True),
    ],
)
def test_a_lack_of_files_is_found_wherever_it_hides(error, expected):
    try:
        try:
            raise error
        except Exception as inner:
            raise ConnectionError("failed") from inner
    except ConnectionError as outer:
        assert open_files.out_of_files(outer) is expected
