"""One round: which mutants, which tests for each, the forks, and the table."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from children import Done, Job, run_jobs
from live_code import CodeKey, fork_ranks_from_here, install_import_hook, live_functions, swap
from mutants import Mutant, StaleMutantError, changed_codes, functions, read_list
from operators import mutants_of
from reach import ReachMap, use_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGETS = (
    "verl_mt/algorithms/*.py", "verl_mt/workers/*.py", "verl_mt/data/*.py", "verl_mt/chat/**/*.py",
    "verl_mt/rollout/session.py", "verl_mt/extensions/toolbox/editing/session.py", "verl_mt/rollout/stream.py",
    "verl_mt/extensions/rare_losses/*.py", "verl_mt/extensions/rare_parsers/*.py",
    "verl_mt/extensions/cluster/rollout_workers/dealer.py",
    "verl_mt/extensions/asynchronous/in_flight.py", "verl_mt/trainer/spool.py", "verl_mt/trainer/dynamic_sampling.py",
    "verl_mt/trainer/restarts.py", "verl_mt/extensions/inspection/prompt_log.py",
)  # fmt: skip
CHEAP_S = 1.0
"""Tests that cost more come last."""
LIMIT_FACTOR, LIMIT_MORE_S = 10.0, 40.0
"""A mutant may use so many times the CPU seconds of its tests, and so many more."""


@dataclass
class Mutants:
    """The lists beside this file, and the code that is drawn from."""

    root: Path = ROOT
    planted: list[Mutant] = field(default_factory=lambda: read_list(HERE / "planted.json"))
    equivalent: list[Mutant] = field(default_factory=lambda: read_list(HERE / "equivalent.json"))
    excluded: list[dict[str, str]] = field(default_factory=lambda: json.loads((HERE / "excluded.json").read_text()))
    targets: Sequence[str] = TARGETS

    def source(self, mutant: Mutant) -> str:
        """Of its file.

        Raises:
            StaleMutantError: the file is gone.
        """
        path = self.root / mutant.file
        if not path.is_file():
            raise StaleMutantError(f"{mutant.label}: no such file. Update or remove the entry.")
        return path.read_text()

    def check(self) -> list[str]:
        """What is wrong with the lists; empty if nothing."""
        wrong = []
        for mutant in (*self.planted, *self.equivalent):
            try:
                changed_codes(mutant, self.source(mutant), mutant.file)
            except StaleMutantError as error:
                wrong.append(str(error))
        wrong += [f"{m.label}: give a proof of one line" for m in self.equivalent if len(m.proof.splitlines()) != 1]
        wrong += [f"{m.label}: a planted mutant needs a name" for m in self.planted if not m.name]
        for entry in self.excluded:
            path = self.root / entry["file"]
            known = functions(path.read_text()) if path.is_file() else {}
            if not known or not entry["reason"] or entry["function"] not in ("*", *known):
                wrong.append(f"excluded.json: {entry}: no such file or function, or no reason")
        return wrong

    def files(self) -> list[str]:
        """That mutants are drawn from."""
        found = {path for pattern in self.targets for path in self.root.glob(pattern)}
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def traced_files(self) -> list[str]:
        """Those of the planted mutants too."""
        return sorted({*self.files(), *(mutant.file for mutant in self.planted)})

    @functools.cached_property
    def _all(self) -> list[Mutant]:
        return [mutant for file in self.files() for mutant in mutants_of(file, (self.root / file).read_text())]

    def all(self) -> list[Mutant]:
        """Every mutant of the target files."""
        return self._all

    def is_excluded(self, mutant: Mutant) -> bool:
        """By the list of functions that no test of the quick and slow stages can reach."""
        return any(
            mutant.file == entry["file"] and entry["function"] in ("*", mutant.function) for entry in self.excluded
        )

    def draw(self, seed: str, count: int, under: str = "") -> list[Mutant]:
        """At random without replacement, from files whose path begins with `under`; no equivalent or excluded ones."""
        equivalent = {mutant.key for mutant in self.equivalent}
        able = [m for m in self.all() if m.file.startswith(under) and not self.is_excluded(m)]
        order = [m for m in able if m.key not in equivalent]
        random.Random(seed).shuffle(order)
        chosen: list[Mutant] = []
        for mutant in order:
            if len(chosen) == count:
                break
            try:
                changed_codes(mutant, self.source(mutant), mutant.file)
            except StaleMutantError:
                continue  # same bytecode, or a closure's variables: no mutant that could be run
            chosen.append(mutant)
        return chosen


@dataclass
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    state: str
    """"killed", "timeout" (killed by its limit), "survived", "not reached" or "broken" (the tests fail without it)."""
    suite: str = ""
    """That killed it: quick or slow."""
    killer: str = ""
    """Node id."""
    tests: int = 0
    """How many ran it."""
    cpu_s: float = 0.0

    @property
    def dead(self) -> bool:
        return self.state in ("killed", "timeout")

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        own = {name: getattr(self, name) for name in ("state", "suite", "killer", "tests", "cpu_s")}
        return {**self.mutant.as_json(), **own}


def choose_tests(mutant: Mutant, reach: ReachMap, known: Iterable[str]) -> list[str]:
    """Node ids in the order in which they run: the folder concerned first, cheap ones first, files kept together.

    Tests of the same files come after those that reached the function: several may check a value that is computed once.
    """
    known = set(known)
    reached = [name for name in reach.reaching(f"{mutant.file}::{mutant.function}") if name in known]
    parts = mutant.file.split("/")
    folder, stem = f"tests/{parts[1]}/", f"/test_{parts[-1].removesuffix('.py')}.py"

    def order(group: list[str]) -> list[str]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in group:
            by_file[name.partition("::")[0]].append(name)
        cost = {file: sum(reach.tests[name].cpu_s for name in names) for file, names in by_file.items()}
        files = sorted(by_file, key=lambda file: (not file.endswith(stem), not file.startswith(folder), cost[file]))
        return [name for file in files for name in by_file[file]]

    cheap = [name for name in reached if reach.tests[name].cpu_s < CHEAP_S]
    dear = sorted((name for name in reached if name not in set(cheap)), key=lambda name: reach.tests[name].cpu_s)
    files, taken = {name.partition("::")[0] for name in reached}, set(reached)
    beside = [
        name
        for name, entry in reach.tests.items()
        if name.partition("::")[0] in files and name not in taken and name in known and entry.passed
        and entry.cpu_s < CHEAP_S
    ]  # fmt: skip
    return [*order(cheap), *order(beside), *dear]


class Round:
    """Runs mutants in forks of this process.

    Args:
        items: collected tests.
        reach: of these tests.
        root: the repository.
        workers: forks at once.
    """

    def __init__(self, items: Sequence[pytest.Item], reach: ReachMap, root: Path, workers: int):
        self.items = {item.nodeid: item for item in items}
        self._reach, self._root, self._workers = reach, root, workers
        self._live: dict[CodeKey, list[Any]] = live_functions(str(root))

    def run(self, mutants: Sequence[Mutant], suite: str, names: set[str]) -> Iterator[Verdict]:
        """Verdicts in the order in which they come; of the tests in `names`."""
        jobs, chosen = [], {}
        for number, mutant in enumerate(mutants):
            tests = choose_tests(mutant, self._reach, names)
            if not tests:
                yield Verdict(mutant, "not reached")
                continue
            limit = LIMIT_MORE_S + LIMIT_FACTOR * sum(self._reach.tests[name].cpu_s for name in tests)
            chosen[str(number)] = mutant, tests
            jobs.append(Job(str(number), functools.partial(self._try, mutant, tests), limit))
        for done in run_jobs(jobs, self._workers):
            mutant, tests = chosen[done.job.name]
            yield self._verdict(done, mutant, suite, len(tests))

    def _verdict(self, done: Done, mutant: Mutant, suite: str, tests: int) -> Verdict:
        if done.result is None:
            state = "timeout" if done.cause in ("cpu limit", "idle") else "killed"
            return Verdict(mutant, state, suite, f"({done.cause})", tests, round(done.cpu_s, 2))
        if error := done.result.get("error"):
            raise RuntimeError(f"{mutant.label}: {error}")
        killer = done.result["failed"]
        state = "killed" if killer else "survived"
        return Verdict(mutant, state, suite if killer else "", killer, done.result["ran"], round(done.cpu_s, 2))

    def _try(self, mutant: Mutant, names: Sequence[str], folder: Path) -> dict[str, Any]:
        """In the fork: plant the bug and run the tests until one fails."""
        path, source = self._root / mutant.file, (self._root / mutant.file).read_text()
        changed = folder / "mutant.py"
        changed.write_text(mutant.apply(source))
        plan = {"module": mutant.module, "path": str(path), "source": str(changed)}
        (folder / "plan.json").write_text(json.dumps(plan))
        install_import_hook(**plan)
        swapped = swap(changed_codes(mutant, source, str(path)), self._live)
        if not swapped and mutant.module in sys.modules:
            return {"error": "no function of the imported module took the new code"}
        fork_ranks_from_here()
        return self.run_tests(names, folder)

    def run_tests(self, names: Sequence[str], folder: Path) -> dict[str, Any]:
        """Run them in this order, up to the first failure."""
        items = [self.items[name] for name in names]
        config, watch = items[0].config, _Watch()
        use_folder(config, folder)
        config.pluginmanager.register(watch)
        for number, (item, following) in enumerate(zip(items, [*items[1:], None])):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if watch.failed:
                return {"failed": watch.failed, "ran": number + 1}
        return {"failed": "", "ran": len(items)}

    def control(self, verdicts: Iterable[Verdict], say: Callable[[str], None]) -> list[str]:
        """Run each killing test without a mutant. Returns those that fail."""
        killers = sorted({v.killer for v in verdicts if v.dead and v.killer in self.items})
        files: dict[str, list[str]] = defaultdict(list)
        for name in killers:
            files[name.partition("::")[0]].append(name)
        jobs = [Job(file, functools.partial(self._control_one, names), 36000.0) for file, names in files.items()]
        wrong = []
        for done in run_jobs(jobs, self._workers):
            if done.result is None:
                raise RuntimeError(f"control of {done.job.name} ended early ({done.cause}):\n{done.output}")
            wrong += done.result["failed"]
        say(f"control: {len(killers)} killing tests without a mutant, {len(wrong)} fail")
        return wrong

    def _control_one(self, names: Sequence[str], folder: Path) -> dict[str, Any]:
        (folder / "plan.json").write_text(json.dumps({"module": "", "path": "", "source": "/dev/null"}))
        failed = [self.run_tests([name], folder)["failed"] for name in names]
        return {"failed": [name for name in failed if name]}


class _Watch:
    """Of pytest's reports: the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Failures of fixtures count."""
        if report.failed and not self.failed:
            self.failed = report.nodeid
