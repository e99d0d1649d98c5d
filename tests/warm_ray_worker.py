"""In place of Ray's `setup_worker.py`: a worker is a fork of the server of warm starts (`warm_start.warm_ray`).

The raylet starts this process and accepts the fork as its worker. Both end when one of them ends. Where a fork cannot
repeat a real start, Ray's own script runs, and the worker's log says why.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import warm_start


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    given, words = parser.parse_known_args()
    context = json.loads(given.serialized_runtime_env_context or "{}")
    variables = context.get("env_vars") or {}
    other_python = context.get("command_prefix") or context.get("override_worker_entrypoint")
    answer: str | tuple[int, socket.socket] = "its runtime environment has another Python, or variables of variables"
    if (
        given.language == "PYTHON"
        and not other_python
        and context.get("py_executable", sys.executable) == sys.executable
        and not any("$" in value for value in variables.values())
    ):
        request = {
            "words": [sys.executable, *words], "options": [], "cwd": os.getcwd(), "fate_shared": True,
            "environment": {**os.environ, **variables}, "first_entry": os.path.dirname(words[0]),
            "new_session": False, "process_group": -1, "pass_fds": [],
        }  # fmt: skip
        answer = warm_start.ask(warm_start.ADDRESS, request, [0, 1, 2])
    if not isinstance(answer, str):
        end_with(*answer)
    print(f"no warm start: {answer}", file=sys.stderr, flush=True)  # an exec flushes nothing
    setup = Path(words[0]).with_name("setup_worker.py")
    os.execv(sys.executable, [sys.executable, str(setup), *sys.argv[1:]])


def end_with(pid: int, status: socket.socket) -> NoReturn:
    """Wait for the worker, or for the end of the raylet, with which the server ends the worker."""
    raylet = os.pidfd_open(os.getppid())
    ready, _, _ = select.select([status, raylet], [], [])
    if status not in ready:
        os._exit(1)
    code = os.waitstatus_to_exitcode(warm_start.said(status, b"end "))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
