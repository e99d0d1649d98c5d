"""The pages a reader opens: finished, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
