"""docs/compatibility.md says what comes of the files when they are tried, and nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import conformance
import pytest
import warm_start
from write_compatibility import COMMITS, NOT_INSTALLED, PAGE, PROVED, REPO, marked_slow

ROW = re.compile(r"^\| `([^`]+)` \| (\S+) (\S+) \| ([^|]*) \| (.*) \|$", re.MULTILINE)


def rows_of(text: str) -> dict[tuple[str, str, str], tuple[str, str]]:
    """(library, revision, file) -> (verdict, reason) of every row of the page."""
    return {(library, revision, file): (verdict, why) for file, library, revision, verdict, why in ROW.findall(text)}


def test_every_row_of_the_page_has_one_of_the_verdicts_and_a_refusal_its_reason():
    rows = rows_of(PAGE.read_text())
    assert {library for library, _, _ in rows} == {"verl", "ms-swift", "slime"} and len(rows) > 200
    assert {verdict for verdict, _ in rows.values()} <= set(conformance.VERDICTS)
    assert not [place for place, (verdict, why) in rows.items() if verdict == "refused" and not why]
    assert len(rows) == len(re.findall(r"(?m)^\| `", PAGE.read_text())), "a row that is not read"


def test_the_page_is_in_the_navigation_and_the_migration_pages_point_to_it():
    assert re.search(r"(?m): compatibility\.md$", (REPO / "mkdocs.yml").read_text())
    for page in sorted((REPO / "docs").glob("migrating*.md")):
        assert "(compatibility.md)" in page.read_text(), page.name


def test_a_file_is_said_to_have_trained_or_run_only_where_a_test_does_it():
    rows = rows_of(PAGE.read_text())
    claimed = {
        place: verdict for place, (verdict, _) in rows.items() if verdict not in ("loads", "composes", "refused")
    }
    assert claimed == {place: verdict for place, (verdict, _, _) in PROVED.items()}
    for verdict, test, said in PROVED.values():
        file, _, name = test.partition("::")
        slow = marked_slow(REPO / "tests" / "peers" / file)
        assert slow.get(name), f"{test}: no slow test of that name"
        assert verdict == "runs" or "trains_two_steps" in name
        assert verdict != "runs after a named edit" or said


@pytest.mark.release  # every row names a slow test of its file, which runs per commit
def test_the_page_is_what_comes_of_the_files_when_they_are_tried():
    sources = conformance.peer("verl", "").parents[0] / "SOURCES.md"
    assert all(commit in sources.read_text() for commit in COMMITS.values())
    script = Path(__file__).with_name("write_compatibility.py")
    done = warm_start.run([sys.executable, str(script), "--print"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written, now = rows_of(PAGE.read_text()), rows_of(done.stdout)
    assert written.keys() == now.keys()
    other_packages = {place for rows in (written, now) for place, (_, why) in rows.items() if NOT_INSTALLED in why}
    changed = {place: (written[place], now[place]) for place in now if written[place] != now[place]}
    assert not changed.keys() - other_packages, f"run: python tests/peers/write_compatibility.py\n{changed}"
