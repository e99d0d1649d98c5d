"""Which tests run which functions: one traced run of the suite, in forks of the warm process."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from children import Job, run_jobs
from live_code import Tracer, fork_ranks_from_here

OVERLAY = Path(__file__).parent / "overlay"
IDLE_S = 300.0
"""Tests without a bug end by themselves; some wait a minute for somebody's deadline."""


@dataclass
class TestReach:
    """What one test did in the traced run."""

    __test__ = False

    cpu_s: float
    """Of the test and of processes that it waited for, with tracing."""
    passed: bool
    """Also true of a skipped one."""
    functions: list[str] = field(default_factory=list)
    """`file::qualname`."""


@dataclass
class ReachMap:
    """Of a suite."""

    tests: dict[str, TestReach] = field(default_factory=dict)
    """By node id."""

    @classmethod
    def load(cls, path: Path) -> ReachMap:
        """From `save`."""
        return cls({name: TestReach(**entry) for name, entry in json.loads(path.read_text()).items()})

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({name: asdict(entry) for name, entry in self.tests.items()}))
        beside.replace(path)

    def reaching(self, function: str) -> list[str]:
        """Node ids of tests that passed and ran the function."""
        return [name for name, entry in self.tests.items() if entry.passed and function in entry.functions]


def cache_key(root: Path, words: Sequence[str]) -> str:
    """Of the code and tests as they are now, committed or not."""
    digest = hashlib.sha256(repr((sys.version, *words)).encode())
    for folder in ("verl_mt", "tests", "config", "recipes", "benchmarks"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".yaml") and file.is_file() and "mutation" not in file.parts:
                digest.update(file.as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Recorder:
    """A pytest plugin in the fork: the tracer's label is the test, or the fixture that is being set up for several."""

    def __init__(self, tracer: Tracer):
        self.labels: list[str] = []
        self._numbers: dict[str, int] = {}
        self._tracer, self._stack = tracer, ["start"]
        self.failed: set[str] = set()

    def enter(self, label: str) -> None:
        """From now on functions count for this label."""
        self._stack.append(label)
        self._set()

    def leave(self) -> None:
        """Back to the one before."""
        self._stack.pop()
        self._set()

    def _set(self) -> None:
        label = self._stack[-1]
        if label not in self._numbers:
            self._numbers[label] = len(self.labels)
            self.labels.append(label)
        self._tracer.set_label(self._numbers[label])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """Fixtures of several tests get a label of their own."""
        if fixturedef.scope == "function":
            yield
            return
        self.enter(fixture_label(fixturedef))
        yield
        self.leave()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember failures."""
        if report.failed:
            self.failed.add(report.nodeid)


def fixture_label(fixturedef: Any) -> str:
    """Of a fixture that several tests share."""
    return f"fixture {fixturedef.baseid} {fixturedef.argname}"


def use_folder(config: pytest.Config, folder: Path) -> None:
    """Temporary folders of tests come below it, and subprocesses get the overlay."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._given_basetemp, factory._basetemp = folder / "tmp" / "pytest", None
    os.environ["VERL_MT_MUTATION"] = str(folder / "plan.json")
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{OVERLAY}{os.pathsep}{old}" if old else str(OVERLAY)


def own_caches(root: str) -> list[Any]:
    """`functools.cache` objects of the package and of the tests."""
    gc.unfreeze()
    kind = type(functools.lru_cache(lambda: None))
    found = [thing for thing in gc.get_objects() if type(thing) is kind]
    gc.freeze()
    codes = [(thing, getattr(thing.__wrapped__, "__code__", None)) for thing in found]
    return [thing for thing, code in codes if code is not None and code.co_filename.startswith(root)]


def trace(items: Sequence[pytest.Item], folder: Path, root: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Run the tests traced; runs in a fork. Returns node id -> fields of `TestReach`."""
    (folder / "label").write_bytes(bytes(4))
    (folder / "reached").touch()
    plan = {"trace": str(folder), "root": str(root), "targets": list(targets)}
    (folder / "plan.json").write_text(json.dumps(plan))
    use_folder(items[0].config, folder)
    tracer = Tracer(str(folder), str(root), targets)
    recorder = Recorder(tracer)
    items[0].config.pluginmanager.register(recorder)
    caches, file, costs = own_caches(str(root)), None, {}
    tracer.start()
    fork_ranks_from_here()
    for item, following in zip(items, [*items[1:], None]):
        if item.path != file:
            file = item.path
            for cache in caches:  # so that what a file computes once counts for this file
                cache.cache_clear()
        print(f"\n{item.nodeid}", flush=True)  # the last one is named where the fork is ended
        recorder.enter(item.nodeid)
        begin = sum(os.times()[:4])
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        costs[item.nodeid] = sum(os.times()[:4]) - begin
        recorder.leave()
    return _collected(items, recorder, costs, (folder / "reached").read_text())


def _collected(
    items: Sequence[pytest.Item], recorder: Recorder, costs: dict[str, float], reached: str
) -> dict[str, Any]:
    by_label: dict[str, set[str]] = {}
    for line in reached.splitlines():
        number, _, function = line.partition(" ")
        by_label.setdefault(recorder.labels[int(number)] if recorder.labels else "start", set()).add(function)
    tests = {}
    for item in items:
        functions = set(by_label.get(item.nodeid, ()))
        definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        for fixturedef in {d for found in definitions.values() for d in found}:
            functions |= by_label.get(fixture_label(fixturedef), set())
        entry = TestReach(round(costs[item.nodeid], 4), item.nodeid not in recorder.failed, sorted(functions))
        tests[item.nodeid] = asdict(entry)
    return tests


def trace_suite(
    items: Sequence[pytest.Item], root: Path, targets: Sequence[str], workers: int, say: Callable[[str], None]
) -> ReachMap:
    """In about ten forks, files of a folder together.

    Raises:
        RuntimeError: a fork died.
    """
    parts: list[list[pytest.Item]] = [[]]
    for item in items:
        if len(parts[-1]) > len(items) / (5 * workers) and item.path != parts[-1][-1].path:
            parts.append([])
        parts[-1].append(item)
    jobs = [
        Job(f"trace {number}", functools.partial(_trace_part, part, root, targets), 36000.0, IDLE_S)
        for number, part in enumerate(parts)
    ]
    whole, begin = ReachMap(), time.monotonic()
    for done in run_jobs(jobs, workers):
        if done.result is None:
            raise RuntimeError(f"{done.job.name} ended early ({done.cause}):\n{done.output}")
        whole.tests.update({name: TestReach(**entry) for name, entry in done.result.items()})
        say(f"traced {len(whole.tests)} of {len(items)} tests in {time.monotonic() - begin:.0f} s")
    return whole


def _trace_part(items: Sequence[pytest.Item], root: Path, targets: Sequence[str], folder: Path) -> dict[str, Any]:
    return trace(items, folder, root, targets)
