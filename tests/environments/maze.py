"""An environment for tests of whole runs: notes when its objects are made and closed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl_mt import Environment

LOG = "MAZE_LOG"
"""Environment variable that names the file of the notes."""


class Maze(Environment):
    def __init__(self, size: int = 9, wait_s: float = 0.0):
        self.size, self.wait_s, self.name = size, wait_s, uuid4().hex
        self._note("made")

    def reset(self, seed: int, **row: Any) -> str:
        self.x = random.Random(seed).randint(1, self.size)
        return f"The exit is {self.x} steps to the east."

    def walk(self, steps: int) -> str:
        """Walk to the east.

        Args:
            steps: how far
        """
        self.x -= steps
        self.done = self.x == 0
        return "You are out." if self.done else f"{self.x} to go."

    def reply(self, text: str) -> str:
        time.sleep(self.wait_s)
        return "Walk."

    def score(self) -> float:
        return float(self.done)

    def close(self) -> None:
        self._note("closed")

    def _note(self, word: str) -> None:
        if LOG in os.environ:
            with Path(os.environ[LOG]).open("a") as log:
                log.write(f"{word} {self.name}\n")
