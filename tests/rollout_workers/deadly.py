"""A plug-in whose tool, reward or last words end their own process, once for each file that a test puts down."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl_mt.rewards import arithmetic
from verl_mt.tools.calculator import Calculator

FOLDER = "DEADLY_FOLDER"


def die(phase: str) -> None:
    """If the test wants one process to end here, and no other has yet."""
    try:
        Path(os.environ[FOLDER], phase).unlink()
    except FileNotFoundError:
        return
    os._exit(137)  # as SIGKILL ends a process: no handler runs and no buffer is written


class DeadlyCalculator(Calculator):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        die("tool")
        return await super().execute(instance_id, parameters, **kwargs)


def compute_score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    die("reward")
    return arithmetic.compute_score(solution_str, ground_truth, extra_info)


_send_bytes = Connection.send_bytes


def _torn(self: Connection, buf: bytes, offset: int = 0, size: int | None = None) -> None:
    """Ends the process when half of a group is sent."""
    if b"TrajectoryGroup" in buf and Path(os.environ[FOLDER], "sending").exists():
        os.write(self.fileno(), len(buf).to_bytes(4, "big") + buf[: len(buf) // 2])
        die("sending")
    _send_bytes(self, buf, offset, size)


Connection.send_bytes = _torn  # type: ignore[method-assign]
