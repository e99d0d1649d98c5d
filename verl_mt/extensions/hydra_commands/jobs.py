"""A job of a sweep: its process, the files that it leaves, and the table of all jobs."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from verl_mt.config.normalize import literal
from verl_mt.errors import VerlMTError

OBJECTIVE = "VERL_MT_OBJECTIVE"
"""Variable of the environment: the metric of a job that a sweeper such as Optuna gets."""
SECRETS = "VERL_MT_SWEEP_SECRETS"
"""Variable of the environment, for the processes of launchers: overrides with secrets, which Hydra does not see."""
_JOBS = "jobs.jsonl"
"""In a sweep's directory: a line for each job that ended, or was skipped."""
_ERRORS = "stderr.log"
"""In a failed job's folder: what its process wrote to stderr. The report of a sweep shows its last error."""
_MAX_WHY = 200
"""Characters of a failure in the table."""
_PR_SET_PDEATHSIG = 1


class JobFailedError(VerlMTError):
    """A job of a sweep failed, or has no value of the metric that is optimized."""


class Job:
    """What Hydra's launchers call for each job. They may pickle it: secrets are in the environment.

    Args:
        start: the command, with its files.
        words: the overrides that all jobs have, secrets replaced.
        fixed: keys of the overrides that all jobs have.
    """

    def __init__(self, start: list[str], words: list[str], fixed: list[str]) -> None:
        self.start, self.words, self.fixed = start, words, set(fixed)

    def __call__(self, tree: DictConfig) -> float | None:
        """Runs in a launcher's process, and waits for the job's own.

        Raises:
            JobFailedError: it failed, or lacks the metric of `VERL_MT_OBJECTIVE`.
            SystemExit: it was interrupted.
        """
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        own = [word for word in hydra.overrides.task if word.partition("=")[0].lstrip("+~") not in self.fixed]
        secrets = json.loads(os.environ.get(SECRETS, "{}"))
        words = [*(secrets.get(word, word) for word in self.words), *own]
        began = time.monotonic()
        place = literal(str(folder))
        words += [f"trainer.default_local_dir={place}", f"hydra.run.dir={place}", "hydra.mode=RUN"]
        with _claimed(folder) as errors:
            status = None
            if not (folder / "FINISHED").exists():
                status = _run([*self.start, *words], errors, folder / _ERRORS, hydra.runtime.cwd)
        line = {
            "folder": folder.name if folder.parent == Path(hydra.sweep.dir) else str(folder),
            "status": "skipped" if status is None else "failed" if status else "finished",
            "exit_status": status or 0,
            "seconds": round(time.monotonic() - began, 1),
            "overrides": own,
            "ended": time.time(),
        }
        objective, failure = None, f"{_ending(status)}: {_last_line(folder / _ERRORS)}" if status else ""
        if not status and (metric := os.environ.get(OBJECTIVE)):
            try:
                objective = line["objective"] = last_value(folder, metric)
            except JobFailedError as error:
                line["status"], failure = "failed", str(error)
        if line["status"] == "failed":
            line["why"] = failure
        with (Path(hydra.sweep.dir) / _JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if line["status"] == "failed":
            raise JobFailedError(f"{folder}: {failure}")
        return objective


def last_value(folder: Path, metric: str) -> float:
    """The last value of a metric in a run's `metrics.jsonl`.

    Raises:
        JobFailedError: there is none.
    """
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    values = [line[metric] for line in lines if isinstance(line.get(metric), int | float)]
    if not values:
        names = sorted({name for line in lines for name in line})
        close = difflib.get_close_matches(metric, names, n=1, cutoff=0.0)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise JobFailedError(f"{OBJECTIVE}={metric}: {file} has no such metric{hint}")
    return float(values[-1])


def ended(folder: Path, since: float) -> list[dict[str, Any]]:
    """The jobs of a sweep that ended, or were skipped, since a moment."""
    file = folder / _JOBS
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [line for line in lines if line["ended"] >= since]


def table(folder: Path, lines: list[dict[str, Any]]) -> str:
    """Results of the jobs, one line each."""
    count = Counter(line["status"] for line in lines)
    head = ", ".join(f"{count[status]} {status}" for status in ("finished", "skipped", "failed"))
    rows = [
        f"  {line['status']:8}  {line['folder']}  ({line.get('why') or str(line['seconds']) + ' s'})" for line in lines
    ]
    place = os.path.relpath(folder)
    return "\n".join([f"sweep {place}: {head}", *rows, f"compare them: python -m verl_mt.report {shlex.quote(place)}"])


def _last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    text = lines[-1] if lines else "nothing on stderr"
    return text if len(text) <= _MAX_WHY else f"{text[:_MAX_WHY]}…"


def _ending(status: int) -> str:
    """An exit status in words; a negative one is a signal's."""
    return f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[BinaryIO]:
    """Inside, no other process runs the job of this folder. Gives an empty file for its stderr.

    The job inherits the lock with its stderr: if the sweep is killed and the job is not, the same command waits for it.
    """
    path = folder.with_name(f".{folder.name}.stderr")  # the run wants its directory empty
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another process runs this job. Waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            break
        file.close()  # it was that process's file
    try:
        file.truncate(0)
        yield file
    finally:
        path.unlink(missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_UN)  # also for what the job may have left running
        file.close()


def _run(words: list[str], errors: BinaryIO, kept: Path, cwd: str) -> int:
    """The exit status of a process. Waits for it; signals to this process go to it.

    Args:
        words: the command.
        errors: gets its stderr.
        kept: a copy of that if it fails.
        cwd: where it starts. `hydra.job.chdir` has changed the launcher's directory, and the job changes its own.

    Raises:
        SystemExit: this process was asked to stop.
    """
    kept.unlink(missing_ok=True)
    # A session of its own: Ctrl-C reaches it once, from here.
    process = subprocess.Popen(words, start_new_session=True, preexec_fn=_die_with_parent, stderr=errors, cwd=cwd)
    with _forwarded(process) as received:
        status = process.wait()
    if status:
        shutil.copyfile(errors.name, kept)
    if received:
        raise SystemExit(128 + received[0])
    return status


@contextlib.contextmanager
def _forwarded(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM go to the process; gives those that came."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield received
        return
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> None:
    """Runs in the new process. A sweep that is killed leaves no job behind that holds its folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
