"""The site: it builds without a warning, finds what it links to, and needs no network to be read."""

from __future__ import annotations

import functools
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from browsers import browser as browser

REPO = Path(__file__).resolve().parents[1]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=root, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed (pip install 'verl_mt[docs]')")
    out = tmp_path_factory.mktemp("site")
    done = build(REPO, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(params=["concurrency", "data_flow"])
def picture(request, monkeypatch):
    """A script that draws a picture."""
    monkeypatch.syspath_prepend(str(REPO / "docs" / "site"))
    return importlib.import_module(request.param)


def test_the_picture_is_the_one_that_its_script_draws(picture):
    assert picture.OUT.read_text() == picture.draw(), f"run: python docs/site/{picture.__name__}.py"


def test_no_box_of_the_picture_covers_another_or_leaves_it(picture):
    made = picture
    places = [(x - made.BOX / 2, y - made.TALL / 2) for x, y, *_ in made.BOXES.values()]
    assert all(0 <= x <= made.WIDTH - made.BOX and 0 <= y <= made.HEIGHT - made.TALL for x, y in places)
    for k, (x, y) in enumerate(places):
        assert all(abs(x - u) >= made.BOX or abs(y - v) >= made.TALL for u, v in places[k + 1 :])


def test_every_page_is_in_the_navigation():
    elsewhere = [
        REPO / "CONTRIBUTING.md",
        REPO / "AGENTS.md",
        *REPO.glob("recipes/**/README.md"),
        *REPO.glob("benchmarks/*.md"),
    ]
    pages = {page.name for page in (REPO / "docs").glob("*.md")} | {f"pages/{p.relative_to(REPO)}" for p in elsewhere}
    listed = set(re.findall(r": (\S+\.md)$", (REPO / "mkdocs.yml").read_text(), re.MULTILINE))
    assert pages <= listed, sorted(pages - listed)
    assert listed - pages == {"index.md"}


@pytest.mark.slow
@pytest.mark.xdist_group("site")  # which is built once
def test_every_link_and_picture_of_the_site_is_a_file_of_it(site):
    missing = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:|//", link) and page.name != "404.html" and not (page.parent / link).exists():
                missing.append(f"{page.relative_to(site)}: {link}")
    assert missing == []


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_nothing_is_fetched_from_the_network(site):
    text = (site / "index.html").read_text()
    assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]+', text) == []
    assert "fonts.g" not in text


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_code_and_results_outside_of_docs_have_pages(site):
    page = (site / "source/verl_mt/rollout/session.py.html").read_text()
    assert "class RolloutSession" in re.sub(r"<[^>]+>", "", page)
    assert (site / "pages/benchmarks/RESULTS.html").exists()
    assert "ppo_trainer.py" in (site / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_guides_stand_before_tables_in_the_search(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    weight = {doc["location"].partition("#")[0]: doc.get("boost", 1) for doc in index["docs"]}
    tables = {"configuration.html", "verl_keys.html", "compatibility.html", "pages/benchmarks/RESULTS.html"}
    tables |= {page for page in weight if page.startswith("api_")}
    assert len(tables) == 7
    assert {weight[page] for page in tables} == {0.02}
    assert weight["pages/recipes/gsm8k/index.html"] == 0.4
    guides = {page for page in weight if "/" not in page} - tables - {"capabilities.html", "architecture.html"}
    assert len(guides) > 30 and {weight[page] for page in guides} == {1}
    assert index["config"]["fields"]["title"]["boost"] == 30


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_llms_txt_lists_the_navigation_and_its_links_are_markdown(site):
    text = (site / "llms.txt").read_text()
    assert text.startswith("# verl_mt\n\n> ")
    links = dict(re.findall(r"^- \[[^]]+\]\((\S+)\): (.+)$", text, re.MULTILINE))
    listed = re.findall(r": (\S+\.md)$", (REPO / "mkdocs.yml").read_text(), re.MULTILINE)
    assert list(links) == listed
    for uri, headline in links.items():
        assert (site / uri).read_text().lstrip().startswith(f"# {headline}\n"), uri
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
        "Get started", "Tutorials", "How-to", "Explanation", "Reference", "Migration", "Contributing",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_api_reference_shows_signatures_and_docstrings(site):
    page = re.sub(r"<[^>]+>", "", (site / "api_calls.html").read_text())
    assert "verl_mt.train" in page and "total_training_steps" in page and "::: " not in page
    assert "-&gt; Run" in page and "Train a model, with functions and objects" in page


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_a_notebook_is_a_page_of_text_and_code(site):
    page = (site / "source/examples/notebooks/your_own_task.ipynb.html").read_text()
    assert "<strong>2. A reward</strong>" in page
    assert "defscore(solution_str,ground_truth):" in re.sub(r"<[^>]+>|\s", "", page) and '"cells"' not in page


RESULTS = """() => [document.querySelector('.md-search-result__meta').innerText,
    ...[...document.querySelectorAll('.md-search-result__list > .md-search-result__item')].slice(0, 3)
        .map(item => item.querySelector('a').href)]"""


def found(page, query: str) -> list[str]:
    """The pages of the first three results of a query that is typed into the site's search."""
    field = page.locator(".md-search__input")
    field.fill("")
    field.dispatch_event("keyup")
    page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.trim().startsWith('Type')")
    field.fill(query)
    field.dispatch_event("keyup")
    page.wait_for_function("/match|No/.test(document.querySelector('.md-search-result__meta').textContent)")
    before: list[str] = []
    while (now := page.evaluate(RESULTS)) != before:
        before = now
        page.wait_for_timeout(60)
    names = [re.sub(r"^.*?//[^/]+/|\.html.*$", "", link) for link in now[1:]]
    return [re.sub(r"(^|/)index$", r"\1README", name) for name in names]


@pytest.mark.release
@pytest.mark.xdist_group("site")
def test_titles_of_issues_find_the_page_that_answers_them(site, browser):
    questions = yaml.safe_load((Path(__file__).parent / "site_questions" / "issues.yaml").read_text())
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        browser.locator(".md-search__input").click()
        places = []
        for question in questions:
            pages = found(browser, question["title"])
            places.append(next((k for k, name in enumerate(pages) if name in question["pages"]), 3))
        server.shutdown()
    missed = [question["title"] for question, place in zip(questions, places, strict=True) if place]
    assert len(questions) == 60
    assert places.count(0) >= 48 and sum(place < 3 for place in places) >= 55, (places, missed)


BROKEN = ("absent.md", "concepts.md#no-such-heading", "../verl_mt/absent.py")


@pytest.mark.slow
def test_a_broken_link_breaks_the_build(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed (pip install 'verl_mt[docs]')")
    for name in ("verl_mt", "mkdocs.yml"):
        (tmp_path / name).symlink_to(REPO / name)
    (tmp_path / "docs" / "site").mkdir(parents=True)
    for file in (REPO / "docs" / "site").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / "docs" / "site")
    (tmp_path / "README.md").write_text("# Start\n\n[concepts](docs/concepts.md#here)\n")
    page = tmp_path / "docs" / "concepts.md"
    page.write_text("# Concepts\n\n" + " ".join(f"[here]({link})" for link in BROKEN) + "\n\n## Here\n")
    done = build(tmp_path, tmp_path / "out")
    said = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert done.returncode != 0 and len(said) == len(BROKEN), done.stderr
    for link in BROKEN:
        assert any(link.removeprefix("concepts.md#") in line for line in said), link
    page.write_text("# Concepts\n\n## Here\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
