"""Forks of the warm process that run some of its tests, each in its own session, with limits counted in CPU seconds."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

IDLE_WALL_S = 45.0
IDLE_SHARE = 0.01
"""A child whose processes together use less than this share of a core for IDLE_WALL_S waits for something that does not
come. Cores that others use do not matter: nobody gets less than that."""
CHECK_EVERY_S = 0.5


@dataclass
class Job:
    """One fork."""

    name: str
    work: Callable[[Path], dict[str, Any]]
    """(folder) -> result. Runs in the fork; the folder is removed afterwards."""
    cpu_limit_s: float
    """Of all its processes together."""
    idle_s: float = IDLE_WALL_S
    """A fork that does nothing for longer is ended."""


@dataclass
class Done:
    """How a fork ended."""

    job: Job
    result: dict[str, Any] | None
    """None: it died, or was ended."""
    cause: str
    """Empty, "cpu limit", "idle" or the exit status."""
    cpu_s: float
    output: str
    """The last lines of what it wrote."""


@dataclass
class _Running:
    job: Job
    pid: int
    folder: Path
    cpu_s: float = 0.0
    tree_cpu_s: float = 0.0
    """At the last look."""
    last_look: float = field(default_factory=time.monotonic)
    last_progress: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), 0.0))


def run_jobs(jobs: Iterable[Job], workers: int) -> Iterator[Done]:
    """Run them, `workers` at once, and yield each one's end."""
    waiting, running = iter(jobs), []
    while True:
        while len(running) < workers and (job := next(waiting, None)) is not None:
            running.append(_start(job))
        if not running:
            return
        time.sleep(0.02)
        for one in list(running):
            done = _ended(one)
            if done is not None:
                running.remove(one)
                yield done


def _start(job: Job) -> _Running:
    folder = Path(tempfile.mkdtemp(prefix="mutation-"))
    folder.chmod(0o755)  # tests of a sandbox enter it as another user
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(job, folder)
    return _Running(job, pid, folder)


def _child(job: Job, folder: Path) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        gc.freeze()
        result = job.work(folder)
        (folder / "result.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _kill_descendants(os.getpid())
        os._exit(status)


def _kill_descendants(pid: int) -> None:
    for process in psutil.Process(pid).children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _tree_cpu_s(pid: int) -> float:
    """Of the process, its living descendants and those that they waited for."""
    total = 0.0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for process in tree:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _ended(one: _Running) -> Done | None:
    pid, status, usage = os.wait4(one.pid, os.WNOHANG)
    cause = ""
    if not pid:
        now = time.monotonic()
        since, before = one.last_progress
        if now - one.last_look < CHECK_EVERY_S:
            return None
        one.last_look = now
        tree = _tree_cpu_s(one.pid)
        # A browser's processes take their time along when they end: the sum falls, although the tree works.
        worked = before + max(0.0, tree - one.tree_cpu_s)
        one.tree_cpu_s, one.cpu_s = tree, max(one.cpu_s, tree)
        if worked > IDLE_SHARE * one.job.idle_s:
            one.last_progress = now, 0.0
        elif now - since > one.job.idle_s:
            cause = "idle"
        else:
            one.last_progress = since, worked
        if one.cpu_s > one.job.cpu_limit_s:
            cause = "cpu limit"
        if not cause:
            return None
        _kill_descendants(one.pid)
        os.kill(one.pid, signal.SIGKILL)
        _, status, usage = os.wait4(one.pid, 0)
    file = one.folder / "result.json"
    result = json.loads(file.read_text()) if file.exists() and not cause else None
    if result is None and not cause:
        cause = f"exit status {os.waitstatus_to_exitcode(status)}"
    cpu_s = max(one.cpu_s, usage.ru_utime + usage.ru_stime)
    output = one.folder / "output"
    text = output.read_text(errors="replace")[-3000:] if output.exists() else ""
    shutil.rmtree(one.folder, ignore_errors=True)
    return Done(one.job, result, cause, cpu_s, text)
