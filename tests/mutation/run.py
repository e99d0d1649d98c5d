"""Plant bugs one at a time and list those that no test notices: `python tests/mutation/run.py`.

Neither `mutmut` 3.8 nor `cosmic-ray` 8.7 does this. cosmic-ray writes the bug to the file and starts the test command
again: five CPU seconds of imports for each mutant, one mutant at a time in each copy of the tree, no choice of tests.
mutmut forks one warm process and chooses tests, but it leaves out decorated functions, numbers its mutants by position,
and misses functions that run only in processes that a test starts.

One process imports and collects the tests and computes nothing. A traced run tells which tests run which function.
It is kept in `.pytest_cache/mutation` until code or tests change. Each mutant gets a fork, which swaps the function's
code in place. Processes that its tests start import the mutant too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(CI="true", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
from campaign import ROOT, Mutants, Round, Verdict
from reach import ReachMap, cache_key, trace_suite

GOALS = {"quick": 0.90, "ci": 0.97}
MARKS = {
    "quick": "not sglang and not ray and not slow and not gpu and not release",
    "ci": "not sglang and not ray and not gpu and not release",
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", help="what the draw depends on; the commit's hash by default")
    parser.add_argument("--count", type=int, default=200, help="random mutants")
    parser.add_argument("--suite", choices=GOALS, default="quick", help="ci: survivors meet the slow tests too")
    parser.add_argument("--only", metavar="TEXT", action="append", help="mutants whose line contains it, drawn or not")
    parser.add_argument("--under", metavar="PATH", default="", help="draw from files whose path begins with it")
    parser.add_argument("--no-planted", action="store_true", help="without the named ones")
    parser.add_argument("--workers", type=int, default=2, help="forks at once")
    parser.add_argument("--map", type=Path, help="file with the traced run; made, or completed by tests that it lacks")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("tests", nargs="*", help="folders and files of tests; all by default")
    return parser.parse_args(words)


def say(text: str) -> None:
    """At once."""
    print(text, flush=True)


def chosen_mutants(mutants: Mutants, options: argparse.Namespace) -> list[Any]:
    """Named and drawn ones."""
    if options.only:
        everything = [*mutants.planted, *mutants.all()]
        return [m for m in everything if any(text in m.label for text in options.only)]
    planted = [] if options.no_planted else mutants.planted
    return [*planted, *mutants.draw(options.seed, options.count, options.under)]


class Campaign:
    """A pytest plugin: instead of running the collected tests it runs the round."""

    def __init__(self, options: argparse.Namespace, mutants: Mutants):
        self._options, self._mutants = options, mutants
        self.verdicts: list[Verdict] = []
        self.broken: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """After the collection."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while collecting")
        options, reach = self._options, self._reach(session.items)
        names = {"quick": {i.nodeid for i in session.items if not i.get_closest_marker("slow")}}
        names["slow"] = {i.nodeid for i in session.items} - names["quick"]
        forks = Round(session.items, reach, self._mutants.root, options.workers)
        begin = time.monotonic()
        left = chosen_mutants(self._mutants, options)
        for suite in ("quick", "slow") if options.suite == "ci" else ("quick",):
            now = []
            for verdict in forks.run(left, suite, names[suite]):
                now.append(verdict)
                found = f"[{len(now)}/{len(left)}] {verdict.state} {verdict.killer} {verdict.cpu_s:.1f} s"
                say(f"{found}: {verdict.mutant.label}")
            left = [verdict.mutant for verdict in now if not verdict.dead]
            self._merge(now)
        self.broken = forks.control(self.verdicts, say)
        for verdict in self.verdicts:
            if verdict.killer in self.broken:
                verdict.state = "broken"
        say(f"{len(self.verdicts)} mutants in {time.monotonic() - begin:.0f} s, {options.workers} at once")
        return True

    def _reach(self, items: list[pytest.Item]) -> ReachMap:
        options, root = self._options, self._mutants.root
        kept = root / ".pytest_cache" / "mutation" / f"{cache_key(root, [options.suite, *options.tests])}.json"
        path = options.map or kept
        reach = ReachMap.load(path) if path.is_file() else ReachMap()
        missing = [item for item in items if item.nodeid not in reach.tests]
        if missing:
            say(f"tracing {len(missing)} tests")
            fresh = trace_suite(missing, root, self._mutants.traced_files(), options.workers, say)
            reach.tests.update(fresh.tests)
            reach.save(path)
        for name in (item.nodeid for item in items if not reach.tests[item.nodeid].passed):
            say(f"left out, fails in a traced fork without a mutant: {name}")
        return reach

    def _merge(self, now: list[Verdict]) -> None:
        known = {verdict.mutant.key: verdict for verdict in self.verdicts}
        for verdict in now:
            before = known.get(verdict.mutant.key)
            if before is not None and verdict.state == "not reached":
                verdict.state = before.state
            known[verdict.mutant.key] = verdict
        self.verdicts = list(known.values())


def report(campaign: Campaign, mutants: Mutants, options: argparse.Namespace) -> int:
    """Print the table. Returns the exit code."""
    verdicts = campaign.verdicts
    alive = [v for v in verdicts if not v.dead]
    for verdict in sorted(alive, key=lambda v: v.mutant):
        say(f"\n{verdict.state}: {verdict.mutant.label}\n{verdict.mutant.diff(mutants.source(verdict.mutant))}")
    say("\nfile                                          killed  timeout  survived  not reached")
    files = sorted({v.mutant.file for v in verdicts})
    for file in files:
        states = Counter(v.state for v in verdicts if v.mutant.file == file)
        row = [states[name] for name in ("killed", "timeout", "survived", "not reached")]
        say(f"{file:44}  {row[0]:6}  {row[1]:7}  {row[2]:8}  {row[3]:11}")
    say(f"drawn from {sum(not mutants.is_excluded(m) for m in mutants.all())} mutants, seed {options.seed};"
        f" {len(mutants.equivalent)} known as equivalent and {sum(map(mutants.is_excluded, mutants.all()))} of excluded"
        " functions are not drawn; tests of the stages ray, sglang, gpu and release do not run")  # fmt: skip
    if options.json:
        facts = {"seed": options.seed, "suite": options.suite, "mutants": [v.as_json() for v in verdicts]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    total = max(1, len(verdicts))
    quick, all_dead = sum(v.dead and v.suite == "quick" for v in verdicts), sum(v.dead for v in verdicts)
    line = f"{quick} of {len(verdicts)} mutants killed by the quick suite ({100 * quick / total:.1f} %)"
    if options.suite == "ci":
        line += f", {all_dead} of {len(verdicts)} by CI ({100 * all_dead / total:.1f} %)"
    say(f"{line}; survivors: {len(alive)}")
    drawn = [v for v in verdicts if not v.mutant.name]
    shares = {"quick": [v.dead and v.suite == "quick" for v in drawn], "ci": [v.dead for v in drawn]}
    reached = all(sum(shares[s]) >= GOALS[s] * len(drawn) for s in {"quick", options.suite})
    named = all(v.dead and v.suite == "quick" for v in verdicts if v.mutant.name)
    return 0 if reached and named and not campaign.broken else 1


def main(words: list[str] | None = None) -> int:
    """The command."""
    options = arguments(words)
    os.chdir(ROOT)
    if options.seed is None:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        options.seed = found.stdout.strip()
    mutants = Mutants()
    if wrong := mutants.check():
        say("\n".join(wrong))
        return 2
    campaign = Campaign(options, mutants)
    code = pytest.main(["-n", "0", "-s", "-q", "-m", MARKS[options.suite], *options.tests], plugins=[campaign])
    if not campaign.verdicts:
        say(f"no mutant was tried; pytest ended with {code}")
        return 2
    return report(campaign, mutants, options)


if __name__ == "__main__":
    sys.exit(main())
