"""Environments with a planted leak each, and healthy ones that look like it."""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import json
import locale
import logging
import os
import random
import sqlite3
import tempfile
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

from verl_mt import Environment


class Base(Environment):
    """Notes in a list."""

    def reset(self, seed: int, **row: Any) -> str:
        self.notes: list[str] = []
        self.seed = seed
        return f"Seed {seed}: write 4 and 5 and 6."

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        self.notes.append(str(word))
        return " ".join(self.notes)

    def erase(self) -> str:
        """Erase the last."""
        return self.notes.pop() if self.notes else "nothing"

    def score(self) -> float:
        return float(len(self.notes))


# ---- leaks


class ClassAttribute(Base):
    notes: ClassVar[list[str]] = []  # type: ignore[misc]

    def reset(self, seed: int, **row: Any) -> str:
        return "go"


class ClassCounter(Base):
    written = 0

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        ClassCounter.written += 1
        return str(ClassCounter.written)


_NOTES: dict[int, list[str]] = {}


class ModuleGlobal(Base):
    def reset(self, seed: int, **row: Any) -> str:
        self.notes = _NOTES.setdefault(seed, [])
        return "go"


class MutatedDefault(Base):
    def __init__(self, notes: list[str] = []):  # noqa: B006
        self.kept = notes

    def reset(self, seed: int, **row: Any) -> str:
        self.notes = self.kept
        return "go"


class _Database(Base):
    def _path(self) -> str:
        raise NotImplementedError

    def reset(self, seed: int, **row: Any) -> str:
        self.database = sqlite3.connect(self._path(), timeout=30, isolation_level=None)
        self.database.execute("create table if not exists notes (word text)")
        return "go"

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        self.database.execute("insert into notes values (?)", (str(word),))
        return str(self.database.execute("select count(*) from notes").fetchone()[0])

    def erase(self) -> str:
        """Erase all."""
        self.database.execute("delete from notes")
        return "erased"

    def score(self) -> float:
        return float(self.database.execute("select count(*) from notes").fetchone()[0])

    def close(self) -> None:
        if hasattr(self, "database"):
            self.database.close()


class SharedDatabase(_Database):
    def _path(self) -> str:
        return str(Path(tempfile.gettempdir()) / "shop.db")


class DatabaseInMemory(_Database):
    def _path(self) -> str:
        return "file:shop?mode=memory&cache=shared"

    def reset(self, seed: int, **row: Any) -> str:
        self.database = sqlite3.connect(self._path(), uri=True, timeout=30, isolation_level=None)
        self.database.execute("create table if not exists notes (word text)")
        DatabaseInMemory.keeps = sqlite3.connect(self._path(), uri=True, check_same_thread=False)
        return "go"


class TempFolder(Base):
    def reset(self, seed: int, **row: Any) -> str:
        self.folder = Path(tempfile.gettempdir()) / "work"
        self.folder.mkdir(exist_ok=True)
        return f"files: {len(list(self.folder.iterdir()))}"

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        (self.folder / f"{word}-{self.folder.stat().st_nlink}").touch()
        return str(sorted(p.name for p in self.folder.iterdir()))

    def erase(self) -> str:
        """List."""
        return str(sorted(p.name for p in self.folder.iterdir()))

    def score(self) -> float:
        return 0.0


class WorkingFolder(Base):
    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        with Path("maze_notes.txt").open("a") as file:
            file.write(f"{word}\n")
        return Path("maze_notes.txt").read_text()


class CachedSession(Base):
    session: str | None = None

    def reset(self, seed: int, **row: Any) -> str:
        super().reset(seed)
        if CachedSession.session is None:
            CachedSession.session = f"session of {seed}"
        return CachedSession.session


@functools.lru_cache
def _menu(seed: int) -> list[str]:
    return [str(seed)]


class CachedFunction(Base):
    def reset(self, seed: int, **row: Any) -> str:
        self.notes = _menu(seed)
        return "go"


class GlobalRandom(Base):
    def reset(self, seed: int, **row: Any) -> str:
        random.seed(seed)
        return super().reset(seed)

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        return str(random.randint(0, 1_000_000))


class ProcessEnvironment(Base):
    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        os.environ["NOTES"] = os.environ.get("NOTES", "") + str(word)
        return os.environ["NOTES"]


class DoneForAll(Base):
    def erase(self) -> str:
        """End."""
        type(self).done = True
        return "over"


_IDS = itertools.count(1)


class Numbers(Base):
    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        return f"order {next(_IDS)}"


class OneObject(Base):
    only: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.only = cls.only or super().__new__(cls)
        return cls.only


class ScoreOfAll(Base):
    total = 0.0

    def score(self) -> float:
        ScoreOfAll.total += len(self.notes) + 1
        return ScoreOfAll.total


class SharedState(Base):
    places: ClassVar[dict[str, int]] = {}

    def erase(self) -> str:
        """Move."""
        self.places["x"] = self.places.get("x", 0) + 1
        return "moved"

    def state(self) -> dict[str, int]:
        return dict(self.places)


class SharedBoard(Base):
    """The board is made once, and all play on it."""

    board: ClassVar[list[list[int]]] = [[0] * 3 for _ in range(3)]

    def erase(self) -> str:
        """Mark."""
        row = self.board[self.seed % 3]
        row[0] += 1
        return json.dumps(self.board)


class SharedBuffer(Base):
    """All objects write into one buffer."""

    buffer: ClassVar[list[str]] = []

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        self.buffer.append(str(word))
        time.sleep(0.001)
        return self.buffer.pop(0) + str(len(self.buffer))

    def erase(self) -> str:
        """Keep."""
        self.buffer.append("kept")
        return str(self.buffer)


class _Counts(BaseHTTPRequestHandler):
    count = 0

    def do_GET(self) -> None:
        _Counts.count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(_Counts.count).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


class SharedServer(Base):
    """Of the process that checks: all children ask it."""

    port = 0

    @classmethod
    def tool_schemas(cls, **config: Any) -> None:
        server = HTTPServer(("127.0.0.1", 0), _Counts)
        cls.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        with urlopen(f"http://127.0.0.1:{self.port}/") as answer:
            return answer.read().decode()


class ShallowFork(Base):
    def fork(self) -> ShallowFork:
        return copy.copy(self)


class EmptyFork(Base):
    def fork(self) -> EmptyFork:
        other = EmptyFork()
        other.reset(self.seed)
        return other


class ClosesWhatIsMissing(Base):
    def reset(self, seed: int, **row: Any) -> str:
        self.client = open(os.devnull)  # noqa: SIM115
        return super().reset(seed)

    def close(self) -> None:
        self.client.close()  # there is none where reset has failed


class Unseeded(Base):
    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        return str(random.SystemRandom().random())


class WritesNumbers(Base):
    """For leaks in what `write` says."""

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        return str(self._said(word))

    def _said(self, word: int) -> Any:
        raise NotImplementedError


_OF_THREAD: dict[int, list[str]] = {}


class KeyedByThread(WritesNumbers):
    def _said(self, word: int) -> Any:
        notes = _OF_THREAD.setdefault(threading.get_ident(), [])
        notes.append(str(word))
        return notes


_SHARED: contextvars.ContextVar[list[str]] = contextvars.ContextVar("shared", default=[])  # noqa: B039


class ContextVariable(WritesNumbers):
    def _said(self, word: int) -> Any:
        _SHARED.get().append(str(word))
        return _SHARED.get()


class SharedLock(Base):
    """The next one waits until this one is closed."""

    lock: ClassVar[threading.Lock] = threading.Lock()

    def reset(self, seed: int, **row: Any) -> str:
        self.lock.acquire()
        return super().reset(seed)

    def close(self) -> None:
        if self.lock.locked():
            self.lock.release()


def _numbers() -> Any:
    yield from range(1, 1_000_000)


class SharedGenerator(WritesNumbers):
    numbers = _numbers()

    def _said(self, word: int) -> Any:
        return next(self.numbers)


class ClosesForAll(WritesNumbers):
    """The one that ends first closes what all use."""

    closed = False

    def _said(self, word: int) -> Any:
        return "closed" if ClosesForAll.closed else word

    def close(self) -> None:
        ClosesForAll.closed = True


class DrawnAtImport(WritesNumbers):
    secret = random.SystemRandom().randint(0, 10**9)

    def _said(self, word: int) -> Any:
        return self.secret


class OrderOfASet(WritesNumbers):
    def _said(self, word: int) -> Any:
        return list({"lamp", "pen", "book", "cup", "ink", "key"})


class WorkingDirectory(Base):
    def reset(self, seed: int, **row: Any) -> str:
        os.chdir(tempfile.gettempdir())
        return super().reset(seed)


class Umask(Base):
    def reset(self, seed: int, **row: Any) -> str:
        os.umask(0o077)
        return super().reset(seed)


class SetsVariable(Base):
    def reset(self, seed: int, **row: Any) -> str:
        os.environ["SHOP_MODE"] = "test"
        return super().reset(seed)


class WarningFilters(Base):
    def reset(self, seed: int, **row: Any) -> str:
        warnings.simplefilter("error")
        return super().reset(seed)


class Locale(Base):
    def reset(self, seed: int, **row: Any) -> str:
        locale.setlocale(locale.LC_ALL, "C.UTF-8" if locale.setlocale(locale.LC_ALL) == "C" else "C")
        return super().reset(seed)


class Patches(Base):
    def reset(self, seed: int, **row: Any) -> str:
        time.monotonic_ns = lambda: seed  # type: ignore[assignment]
        return super().reset(seed)


class LeavesThreads(Base):
    def reset(self, seed: int, **row: Any) -> str:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return super().reset(seed)


_KEPT: list[Any] = []


class LeavesFiles(Base):
    def reset(self, seed: int, **row: Any) -> str:
        _KEPT.append(tempfile.TemporaryFile())  # noqa: SIM115
        return super().reset(seed)


class LogHandlers(Base):
    def __init__(self) -> None:
        logging.getLogger("shop").addHandler(logging.NullHandler())


class SeedsTorch(Base):
    def reset(self, seed: int, **row: Any) -> str:
        import torch

        torch.manual_seed(seed)
        return super().reset(seed)

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        import torch

        return str(word + int(torch.randint(0, 100, ())))


class SeedsNumpy(WritesNumbers):
    def reset(self, seed: int, **row: Any) -> str:
        import numpy

        numpy.random.seed(seed)
        return super().reset(seed)

    def _said(self, word: int) -> Any:
        import numpy

        return numpy.random.randint(0, 10**6)


class FixedFile(WritesNumbers):
    """Begins each episode with an empty file: only one may live at a time."""

    path = Path(tempfile.gettempdir()) / f"shop-{os.getpid()}.txt"

    def reset(self, seed: int, **row: Any) -> str:
        self.path.write_text("")
        return super().reset(seed)

    def _said(self, word: int) -> Any:
        self.path.write_text(self.path.read_text() + f"{word} ")
        return self.path.read_text()


# ---- healthy


class Plain(Base):
    pass


class SlowToMake(Base):
    def __init__(self) -> None:
        time.sleep(0.3)

    def close(self) -> None:
        return


class OwnDatabase(_Database):
    def _path(self) -> str:
        return ":memory:"


class OwnFolder(TempFolder):
    def reset(self, seed: int, **row: Any) -> str:
        self.folder = Path(tempfile.mkdtemp())
        return "files: 0"


class CountsItself(Base):
    made = 0

    def __init__(self) -> None:
        CountsItself.made += 1


class LoadsOnce(Base):
    words: ClassVar[list[str] | None] = None

    def reset(self, seed: int, **row: Any) -> str:
        if LoadsOnce.words is None:
            LoadsOnce.words = ["lamp", "pen"]
        super().reset(seed)
        return LoadsOnce.words[seed % 2]


class CopiesTheBoard(Base):
    board: ClassVar[list[list[int]]] = [[0] * 3 for _ in range(3)]

    def reset(self, seed: int, **row: Any) -> str:
        super().reset(seed)
        self.own = copy.deepcopy(self.board)
        return "go"

    def erase(self) -> str:
        """Mark."""
        self.own[self.seed % 3][0] += 1
        return json.dumps(self.own)


class OwnRandom(Base):
    def reset(self, seed: int, **row: Any) -> str:
        self.rng = random.Random(seed)
        return super().reset(seed)

    def write(self, word: int) -> str:
        """Write.

        Args:
            word: what
        """
        return str(self.rng.random())


class Asynchronous(Base):
    async def write(self, word: int) -> str:  # type: ignore[override]
        """Write.

        Args:
            word: what
        """
        self.notes.append(str(word))
        return " ".join(self.notes)


class DeepFork(Base):
    def fork(self) -> DeepFork:
        return copy.deepcopy(self)

    def close(self) -> None:
        self.notes = []


class Raises(Base):
    def erase(self) -> str:
        """Fail."""
        raise RuntimeError("cannot")
