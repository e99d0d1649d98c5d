"""A process that we start, and that ends with us, by its id, together with all of its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

_ROOT = str(Path(__file__).resolve().parents[3])
"""Where `import verl_mt` finds the package, whatever directory the process starts in."""
_TAIL_LINES = 15
_DYING_S = 5.0
"""How long killed processes may take to disappear. Where nothing reaps orphans they never do."""


class OwnProcess:
    """`python -m module descriptor *words` in a process group of its own, its output in a file.

    A terminal's Ctrl-C does not reach it.
    """

    def __init__(self, module: str, descriptor: int, words: list[str]):
        self._ending = threading.Lock()
        self._is_over = False
        with tempfile.NamedTemporaryFile(prefix="verl_mt-sglang-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self._popen = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module, str(descriptor), *words],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """Whether the process itself is no more. Its children may be."""
        return self._popen.poll() is not None

    def describe(self) -> str:
        """How it ended, and if it wrote about an exception, the end of that."""
        code = self._popen.poll()
        how = "is running" if code is None else f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        last = "\n  ".join(lines[starts[-1] :][-_TAIL_LINES:]) if starts else ""
        return f"process {self.pid}: {how}; log {self.log}" + (f"; last exception:\n  {last}" if last else "")

    def end(self, wait_s: float, *, keep_log: bool = False) -> None:
        """Give it `wait_s` seconds to end by itself, then kill it; kill what it left behind. Blocks; idempotent."""
        with self._ending:
            if self._is_over:
                return
            self._is_over = True
            deadline = time.monotonic() + wait_s
            while not self.ended and time.monotonic() < deadline:
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                # The group exists as long as it has a member, so its id cannot have been given to anyone else.
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
            self._wait_for_group()
            if not keep_log:
                self.log.unlink(missing_ok=True)

    def _wait_for_group(self) -> None:
        """Until what was killed is gone, and has given its memory back."""
        deadline = time.monotonic() + _DYING_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)


def _environment() -> dict[str, str]:
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        # The few positions beyond the model's own are never computed: a turn ends at max_model_len.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if not torch.cuda.is_available():
        # A second thread per operator on a core that others use makes SGLang several times slower, not faster.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
