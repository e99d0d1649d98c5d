"""Requests over HTTP are counted against the files that a process may open."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import EngineGoneError
from verl_mt.extensions.cluster.replicas import open_files
from verl_mt.extensions.cluster.sglang.clients import HttpClient
from verl_mt.extensions.cluster.sglang.options import SGLangOptions

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


def test_files_are_counted_where_none_is_left_to_count_them_with(monkeypatch):
    def no_file(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(open_files.os, "listdir", no_file)
    assert open_files.num_open() == open_files.raise_limit()


def test_the_connections_of_a_process_that_may_open_many_files_are_there_at_once(run_async):
    async def go():
        begun = time.process_time()
        connections = open_files.Connections(16_384)
        assert time.process_time() - begun < 2.0, "the event loop stands still meanwhile"
        await connections.close()

    run_async(go())


def test_each_request_has_a_connection_of_its_own_and_a_lost_one_is_not_sent_again(run_async):
    async def go():
        asked = []

        async def serve(reader, writer):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            if len(asked) < 3:  # the server would keep the connection
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()
                assert await reader.read() == b""
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health"
            connections = open_files.Connections(1)
            before = open_files.num_open()
            for _ in range(2):
                assert (await connections.get(url, {}, 9.0)).text == "ok"
            assert len(asked) == 2 and b"connection: close" in asked[0].lower() and open_files.num_open() <= before + 1
            # The server may have begun with it: sent again, a request would be sampled twice.
            with pytest.raises(open_files.httpx.RemoteProtocolError):
                await connections.get(url, {}, 9.0)
            assert len(asked) == 3
            await connections.close()

    run_async(go())


def test_who_has_left_the_connections_does_not_come_back(run_async):
    async def go():
        server = HttpClient("http://127.0.0.1:1", SGLangOptions("verl_mt://tiny", 100))
        server._connections()
        loop = asyncio.get_running_loop()
        assert loop in open_files._SHARED
        await server.stop()
        with pytest.raises(EngineGoneError, match="closed"):
            await server.progress()
        assert not await server.answers() and loop not in open_files._SHARED

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
