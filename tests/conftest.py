"""Shared by all tests: no network, one thread, the reference data where it is present."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings
from reference_data import SHARED_DATA

# Properties that say nothing else draw 40 examples; CI draws the same ones every time.
settings.register_profile("verl_mt", max_examples=40, deadline=None, derandomize="CI" in os.environ)
settings.load_profile("verl_mt")

if TYPE_CHECKING:
    from finished_runs import Finished, FinishedRuns

gc.disable()  # until all tests are imported: nothing of that can be freed

REPO = Path(__file__).resolve().parent.parent
HANG_S = 1500


@pytest.hookimpl(optionalhook=True)  # a GPU's machine may have pytest alone
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite on up to four cores; single files and folders in this process, which starts sooner.

    Ray clusters and SGLang engines start one after the other, so who asks for them gets one process: two at once would
    find each other, or no memory.
    """
    if re.search(r"(?<!not )\b(ray|sglang|vllm)\b", config.option.markexpr):
        return 0
    whole = [Path(arg).resolve() for arg in config.args] in ([REPO], [REPO / "tests"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(4, cores) if whole else 0


_text = functools.cache(Path.read_text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A limit ends what hangs and judges nobody's speed: machines that others use too are several times slower.

    CI collects for Ray, SGLang and vLLM only files whose text has such a mark.
    """
    servers = ("ray", "sglang", "vllm")
    for item in items:
        for mark in servers:
            if item.get_closest_marker(mark) and not re.search(rf"mark\.{mark}\b", _text(item.path)):
                raise pytest.UsageError(f"{item.nodeid} is marked {mark}, but its file does not say mark.{mark}")
        if not item.get_closest_marker("timeout") and any(map(item.get_closest_marker, ("slow", *servers))):
            item.add_marker(pytest.mark.timeout(HANG_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ray's workers and SGLang's engines of marked tests are warm starts."""
    for mark, name in (("ray", "warm_ray"), ("sglang", "warm_engines")):
        if item.get_closest_marker(mark):
            getattr(importlib.import_module("warm_start"), name)()


def pytest_collection_finish() -> None:
    """What is imported by now stays: no garbage collection looks through it again, nor after every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20000, 50, 100)


_warm_starts: Counter[str] = Counter()
"""Forks by "", real starts by their reasons."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    if warm_start := sys.modules.get("warm_start"):
        _warm_starts.update(warm_start.counts())
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: sent to the process that reports
        session.config.workeroutput["warm_starts"] = dict(_warm_starts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _warm_starts.update(getattr(node, "workeroutput", {}).get("warm_starts", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A reason that is new explains why the tests have become slow."""
    real = Counter({reason: number for reason, number in _warm_starts.items() if reason})
    if _warm_starts:
        reasons = "; ".join(f"{number} x {reason}" for reason, number in real.most_common(12))
        terminalreporter.write_line(f"warm starts: {_warm_starts['']} forks, {real.total()} real: {reasons or 'none'}")


@pytest.fixture(autouse=True)
def _root_level() -> Iterator[None]:
    """A test that leaves another level behind would break later ones that read the log."""
    root = logging.getLogger()
    before = root.level
    yield
    after = root.level
    root.setLevel(before)
    assert after == before, f"the root logger's level was {before} and is {after}: put it back"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real tokenizers, templates and data sets; tests that need them are skipped where the folder is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"reference data not found at {SHARED_DATA} (set VERL_MT_TEST_DATA)")
    return SHARED_DATA


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """Runs of this session that tests read and do not change (`finished_runs.KINDS`)."""
    from finished_runs import FinishedRuns  # torch, which most tests import later or not at all

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return FinishedRuns(shared / "finished_runs")


@pytest.fixture
def finished(finished_runs: FinishedRuns, tmp_path: Path) -> Iterator[Finished]:
    """`finished(kind)`: a copy of a finished run for this test alone."""
    from finished_runs import copy_run

    yield lambda kind: copy_run(finished_runs.original(kind), tmp_path / f"finished-{kind}")
    finished_runs.require_unchanged()


@pytest.fixture(scope="module")
def warm_workers() -> Iterator[None]:
    """Rollout workers of this machine are warm starts."""
    from types import SimpleNamespace

    import warm_start

    from verl_mt.extensions.cluster.rollout_workers import links

    def begin(words: list[str], **kwargs: Any) -> Any:
        return (warm_start.Popen if words[0] == sys.executable else subprocess.Popen)(words, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": begin}))
        yield
