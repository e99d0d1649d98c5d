"""The real retrieval server as a process of its own, on a free port."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path


class RetrievalProcess:
    """`python -m verl_mt.retrieval` for the length of a `with` block.

    Args:
        corpus: its corpus.
    """

    def __init__(self, corpus: Path, *arguments: str):
        self._words = ["-m", "verl_mt.retrieval", "--corpus", str(corpus), "--port", "0", *arguments]
        self.url = ""

    def __enter__(self) -> RetrievalProcess:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self._process = subprocess.Popen([sys.executable, *self._words], stdout=self._log, stderr=subprocess.STDOUT)
        while "ready: " not in (said := Path(self._log.name).read_text()):
            if self._process.poll() is not None:
                raise RuntimeError(f"the retrieval server did not start: {said}")
            time.sleep(0.05)
        self.url = said.split("ready: ")[1].split()[0]
        return self

    def __exit__(self, *args: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()
