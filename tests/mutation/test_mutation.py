"""The tool plants the bugs that it names, sees them die or survive, and its lists fit today's code."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import children
import pytest
from campaign import Mutants, choose_tests
from children import Job, run_jobs
from live_code import live_functions, swap
from mutants import Mutant, StaleMutantError, changed_codes
from operators import mutants_of
from reach import ReachMap, TestReach

HERE = Path(__file__).resolve().parent

TOY = textwrap.dedent('''
    """A module."""
    import functools

    def keep(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)
        return inner

    @keep
    def bound(a: int, b: int = 3) -> bool:
        """Says 1 < 2."""
        if a < b and not a != 0:
            raise ValueError(f"{a + b} is not {1}")
        return a > -1
''')


def edits(source: str, function: str = "f") -> set[str]:
    """New texts of the mutants."""
    return {mutant.new for mutant in mutants_of("toy.py", source) if mutant.function == function}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return a <= b", "return a > b"}),
        ("return a is not None", {"return a is None"}),
        ("return a not in b", {"return a in b"}),
        ("return (a) + (b)", {"return (a) - (b)"}),
        ("return a * b", {"return a / b"}),
        ("return a and b", {"return a or b"}),
        ("return not (a)", {"return  (a)"}),
        ("return -a", {"return a"}),
        ("return 0", {"return 1"}),
        ("return 7", {"return 8"}),
        ("return True", {"return False"}),
        ("return a.sum(dim=b)", {"return a.mean(dim=b)"}),
        (
            "return g(a, dim=-1, keepdim=True)",
            {"return g(a, dim=-2, keepdim=True)", "return g(a, dim=-1, keepdim=False)"},
        ),
        ("return min(a, b)", {"return max(a, b)"}),
        ("return a.clamp(min=b)", {"return a.clamp(max=b)"}),
        ("return a.detach()", {"return a"}),
        ("return g(a, b)", {"return g(b, a)"}),
        ("return a[:b]", {"return a[:b - 1]"}),
        ("return a[b:]", {"return a[b + 1:]"}),
        ("return a[1:]", {"return a[0:]"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass", "a -= b"}),
        ("g(a)", {"pass"}),
        ("if a: return b", {"if not a: return b"}),
        ("assert a < b", set()),
        ("raise ValueError(a + 1)", set()),
        ("log.info(a + 1)", set()),
        ("return f'{a + 1}'", set()),
        ("return 'a' + b", set()),
        ("a: tuple[1] = b", set()),
    ],
)
def test_operators_make_these_edits_and_no_others(line: str, expected: set[str]):
    assert edits(f"def f(a, b, c):\n    {line}\n") == expected


def test_names_need_no_lines_and_count_occurrences():
    source = "def f(a):\n    if a:\n        return 0\n    return 0\n\nclass C:\n    def f(self):\n        return 0\n"
    first, second = [m for m in mutants_of("toy.py", source) if m.function == "f" and m.old == "return 0"]
    assert (first.occurrence, second.occurrence) == (1, 2)
    moved = "# more lines\n\n" + source
    assert second.apply(moved) == "# more lines\n\n" + source.replace("    return 0\n\nclass", "    return 1\n\nclass")
    assert first.diff(source) == "-        return 0\n+        return 1"


@pytest.mark.parametrize(
    "mutant",
    [
        Mutant("toy.py", "gone", "return", "return not"),
        Mutant("toy.py", "bound", "a <= b", "a >= b"),
        Mutant("toy.py", "bound", "a < b", "a > b", occurrence=2),
        Mutant("toy.py", "bound", "a < b", "a < <"),
        Mutant("toy.py", "bound", "a < b", "a  <  b"),
    ],
)
def test_what_no_longer_applies_is_an_error(mutant: Mutant):
    with pytest.raises(StaleMutantError, match=r"toy\.py::"):
        changed_codes(mutant, TOY, "toy.py")


@pytest.mark.slow
def test_code_is_swapped_behind_a_decorator(tmp_path: Path):
    path = tmp_path / "swapped_toy.py"
    path.write_text(TOY)
    names: dict = {"__name__": "swapped_toy"}
    exec(compile(TOY, str(path), "exec"), names)
    bound = names["bound"]
    assert bound(5) and not bound(-3)
    mutant = Mutant("swapped_toy.py", "bound", "a > -1", "a < -1")
    assert swap(changed_codes(mutant, TOY, str(path)), live_functions(str(tmp_path))) == 1
    assert bound is names["bound"] and not bound(5) and inspect.unwrap(bound)(5) is False


@pytest.mark.slow
def test_the_lists_apply_to_the_code_and_the_draw_depends_on_the_seed_alone():
    mutants = Mutants()
    assert mutants.check() == []
    assert len(mutants.planted) == len({m.name for m in mutants.planted}) >= 12
    few = functools.partial(Mutants, targets=["verl_mt/algorithms/*.py"])
    drawn = few().draw("a seed", 30)
    assert drawn == few().draw("a seed", 30) and len(set(drawn)) == 30
    assert set(drawn) != set(few().draw("another seed", 30))
    stale = Mutant(drawn[0].file, drawn[0].function, "no such text", "pass", proof="none")
    without_proof = Mutant(*drawn[1].key)
    wrong = Mutants(equivalent=[stale, without_proof]).check()
    assert len(wrong) == 2 and "no such text" in wrong[0] and "give a proof" in wrong[1]
    assert not set(drawn[:5]) & set(few(equivalent=drawn[:5]).draw("a seed", 30))


@pytest.mark.slow
def test_a_fork_that_spins_or_dies_ends_by_its_limit():
    def spin(folder: Path) -> dict:
        while True:
            pass

    jobs = [
        Job("spins", spin, cpu_limit_s=0.5),
        Job("dies", lambda folder: os._exit(3), cpu_limit_s=60),
        Job("returns", lambda folder: {"folder": str(folder)}, cpu_limit_s=60),
    ]
    done = {one.job.name: one for one in run_jobs(jobs, workers=2)}
    assert done["spins"].cause == "cpu limit" and done["spins"].result is None
    assert done["dies"].cause == "exit status 3" and done["dies"].result is None
    assert done["returns"].result and not Path(done["returns"].result["folder"]).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("step", "cause"), [(1, ""), (0, "idle")], ids=["works", "waits"])
def test_a_fork_whose_processes_left_it_with_their_time_is_not_idle(monkeypatch, step, cause):
    """A browser's end makes the sum of all processes smaller, although the fork works on."""
    looks = itertools.chain([90.0], itertools.count(1, step))
    monkeypatch.setattr(children, "_tree_cpu_s", lambda pid: next(looks))
    monkeypatch.setattr(children, "CHECK_EVERY_S", 0.1)
    job = Job("sleeps", lambda folder: time.sleep(0.5) or {}, cpu_limit_s=1000, idle_s=0.25)
    (done,) = run_jobs([job], workers=1)
    assert done.cause == cause


def test_tests_of_the_folder_and_cheap_ones_run_first():
    reach = ReachMap({
        "tests/trainer/test_run.py::test_a": TestReach(9.0, True, ["verl_mt/data/ledger.py::f"]),
        "tests/trainer/test_step.py::test_a": TestReach(0.1, True, ["verl_mt/data/ledger.py::f"]),
        "tests/data/test_batch.py::test_a": TestReach(0.5, True, ["verl_mt/data/ledger.py::f"]),
        "tests/data/test_batch.py::test_b": TestReach(0.5, True, []),
        "tests/data/test_ledger.py::test_a": TestReach(0.9, True, ["verl_mt/data/ledger.py::f"]),
        "tests/data/test_media.py::test_a": TestReach(0.1, True, []),
        "tests/data/test_fails.py::test_a": TestReach(0.1, False, ["verl_mt/data/ledger.py::f"]),
    })  # fmt: skip
    chosen = choose_tests(Mutant("verl_mt/data/ledger.py", "f", "a", "b"), reach, reach.tests)
    assert chosen == [
        "tests/data/test_ledger.py::test_a", "tests/data/test_batch.py::test_a", "tests/trainer/test_step.py::test_a",
        "tests/data/test_batch.py::test_b", "tests/trainer/test_run.py::test_a",
    ]  # fmt: skip


TOY_ROUND = """
import os, sys
sys.path.insert(0, HERE)
from pathlib import Path
import pytest
from campaign import Mutants, Round
from mutants import Mutant
from reach import trace_suite

ROOT = Path(sys.argv[1])
MUTANTS = [
    Mutant("toy/code.py", "add", "a + b", "a - b"),
    Mutant("toy/code.py", "add", "a + b", "b + a"),
    Mutant("toy/code.py", "in_process", "a + 1", "a + 2"),
    Mutant("toy/code.py", "unused", "return 1", "return 2"),
    Mutant("toy/__init__.py", "of_the_package", "return 1", "return 2"),
    Mutant("toy/code.py", "count", "i += 1", "i += 0"),
]

class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        reach = trace_suite(session.items, ROOT, ["toy/code.py", "toy/__init__.py"], 2, lambda text: None)
        forks = Round(session.items, reach, ROOT, 2)
        for v in sorted(forks.run(MUTANTS, "quick", set(forks.items)), key=lambda v: v.mutant):
            print("VERDICT", v.mutant.function, v.mutant.new, v.state, v.killer, sep="|")
        print("CONTROL", forks.control([], print))
        return True

sys.exit(pytest.main(["-s", "-q", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], sys.argv[1]], plugins=[Plugin()]))
"""

TOY_CODE = """
import sys

def add(a, b):
    return a + b

def in_process(a):
    return a + 1

def unused():
    return 1

def count():
    i = 0
    while i < 3:
        i += 1
    return i
"""

TOY_TESTS = """
import subprocess, sys
import pytest
from toy import of_the_package
from toy.code import add, count

@pytest.fixture(scope="module")
def three():
    return add(1, 2)

def test_of_something_else():
    assert sys.executable

def test_sum(three):
    assert three == 3

def test_a_process():
    words = [sys.executable, "-c", "from toy.code import in_process; print(in_process(4))"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "5\\n"

def test_count():
    assert count() == 3

def test_a_package():
    assert of_the_package() == 1
"""


@pytest.mark.slow
def test_a_round_over_a_toy_project(tmp_path: Path):
    """In-process, through a fixture, in a started process, endless, equivalent and unreached ones."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").write_text("def of_the_package():\n    return 1\n")
    (tmp_path / "toy" / "code.py").write_text(TOY_CODE)
    (tmp_path / "test_toy.py").write_text(TOY_TESTS)
    script = tmp_path / "round.py"
    script.write_text(TOY_ROUND.replace("HERE", repr(str(HERE)), 1))
    limits = "import campaign; campaign.LIMIT_MORE_S = 2.0\n"
    script.write_text(script.read_text().replace("MUTANTS = [", limits + "MUTANTS = [", 1))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("VERDICT")]
    assert {(function, new): (state, killer.rpartition("::")[2]) for function, new, state, killer in lines} == {
        ("add", "a - b"): ("killed", "test_sum"),
        ("add", "b + a"): ("survived", ""),
        ("in_process", "a + 2"): ("killed", "test_a_process"),
        ("unused", "return 2"): ("not reached", ""),
        ("count", "i += 0"): ("timeout", "(cpu limit)"),
        ("of_the_package", "return 2"): ("killed", "test_a_package"),
    }
    assert "CONTROL []" in done.stdout
