"""The pages a reader opens: finished, and every link leads somewhere."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import pytest

from verl_mt.config.policy_losses import POLICY_LOSSES
from verl_mt.config.schema import AlgorithmConfig

REPO = Path(__file__).resolve().parents[1]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
PLACEHOLDER = re.compile(r"\bCURVE_\w*|\bHONESTY\b|\bTODO\b|\bTBD\b|\bFIXME\b")
LINK = re.compile(r"!?\[[^\]\[]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|\b(?:src|href)=\"([^\"]+)\"")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())


def without_code(text: str) -> str:
    """Fenced blocks and code spans blanked: what looks like a link there is none."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def relative_links(text: str) -> list[str]:
    found = [a or b for a, b in LINK.findall(without_code(text))]
    return [link for link in found if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


@pages
def test_no_placeholder_is_left(page):
    assert PLACEHOLDER.findall(page.read_text()) == []


@pages
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    broken = []
    for link in relative_links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(REPO):
            broken.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert broken == []


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def test_the_readme_counts_estimators_and_losses_as_the_code_does():
    text = " ".join((REPO / "README.md").read_text().split())
    (estimators, losses) = re.search(r"a critic, GRPO and (\w+) other estimators, (\w+) policy losses", text).groups()
    (known,) = (f.metadata["choices"] for f in fields(AlgorithmConfig) if f.name == "adv_estimator")
    assert {"gae", "grpo"} < set(known)
    assert NUMBERS.index(estimators) == len(known) - 2
    assert NUMBERS.index(losses) == len(POLICY_LOSSES)


def test_the_readmes_figures_of_the_default_task_are_those_that_were_measured():
    kept = json.loads((REPO / "benchmarks" / "measured" / "tiny_five_seeds.json").read_text())
    ends = [row["end"] for row in kept["rows"]]
    mean = {key: fmean(row[key] for row in kept["rows"]) for key in ("start", "end", "start_greedy", "end_greedy")}
    text = " ".join((REPO / "README.md").read_text().split())
    percent = {key: f"{100 * value:.0f} %" for key, value in mean.items()}
    assert f"solves {percent['start']} when sampling at T = 1 and {percent['start_greedy']} greedily" in text
    assert f"After 60 GRPO steps it solves {percent['end']} and {percent['end_greedy']}" in text
    assert f"sampled {100 * min(ends):.1f} to {100 * max(ends):.1f} %" in text
    assert len(ends) == 5 and f"at commit {kept['commit']}" in text
    results = (REPO / "benchmarks" / "RESULTS.md").read_text()
    assert f"{mean['start']:.3f} to {mean['end']:.3f} ± " in results and f"{kept['commit']}, {kept['date']}" in results


def test_links_are_found_in_text_and_not_in_code():
    text = 'see [a](x.md#y), ![b](<i.svg> "t"), [web](https://h/), <img src="p.png">\n`[c](no.md)`\n```\n[d](no)\n```\n'
    assert relative_links(text) == ["x.md#y", "i.svg", "p.png"]


@pytest.mark.sglang
def test_sglang_knows_the_arguments_that_the_pages_name():
    from sglang.srt.server_args import ServerArgs

    given = [block for page in PAGES for block in re.findall(r"engine_kwargs=\{([^}]*)\}", page.read_text())]
    names = {pair.split(":")[0].strip() for block in given for pair in block.split(",")} - {"name"}
    assert {"chunked_prefill_size", "enable_metrics"} <= names
    assert [name for name in sorted(names) if not hasattr(ServerArgs, name)] == []
