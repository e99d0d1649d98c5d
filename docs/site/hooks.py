"""mkdocs' hooks of the site: pages for files outside of `docs/`, ranks in the search, and `llms.txt`.

`README.md` is the first page. A Markdown file elsewhere becomes `pages/<path>.md`, code becomes `source/<path>.md`, a
folder a list of its modules, a picture is copied. Links are rewritten to them. On GitHub they stay unchanged.

`llms.txt` (https://llmstxt.org) lists the pages of the navigation for coding assistants. It links to the Markdown of
each page, which lies beside the page's HTML.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
_PICTURES = {".svg", ".png", ".jpg", ".gif"}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash", ".toml": "toml"}
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\(\s*<?)([^)\s>#]+)(#[^)\s>]*)?(>?[^)]*\))")
_FILES: dict[str, Path] = {}
"""Page of the site -> the file of the repository that it is made from."""
_BEHIND = {
    0.02: (
        "api_", "configuration.md", "verl_keys.md", "compatibility.md", "capabilities.md", "architecture.md",
        "pages/benchmarks/RESULTS.md", "pages/benchmarks/README.md", "pages/CHANGELOG.md", "pages/CONTRIBUTING.md",
        "pages/AGENTS.md",
    ),
    0.4: ("pages/recipes/",),
}  # fmt: skip
"""Weight in the search -> how these pages begin. A guide has 1: it answers questions, where tables name every word."""
_TEXTS: dict[str, str] = {}
"""Page -> its Markdown, as `llms.txt` links to it."""


def on_config(config: Any) -> Any:
    """Leave out entries of the navigation whose page is not there."""
    config.nav = _existing(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file that a page links to, and for those that these link to."""
    _FILES.clear()
    _TEXTS.clear()
    for file in files.documentation_pages():
        _FILES[file.src_uri] = DOCS / file.src_uri
    _FILES["index.md"] = REPO / "README.md"
    files.append(File.generated(config, "index.md", content=(REPO / "README.md").read_text()))
    listed = [uri for _, uri in _pages(config.nav) if uri.startswith("pages/")]
    waiting = list(_FILES.values()) + [_file_of(uri) for uri in listed]
    for path in waiting:
        if path not in _FILES.values():
            _add(path, files, config)
        if path.suffix == ".md":
            waiting += [t for t in _targets(path) if t not in waiting and not t.is_relative_to(DOCS)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the pages that were made, and rank tables and studies behind guides."""
    for weight, pages in _BEHIND.items():
        if page.file.src_uri.startswith(pages):
            page.meta["search"] = {"boost": weight}
    _TEXTS[page.file.src_uri] = text = _linked(markdown, page)
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """A docstring ends a sentence with `::` before code. On the page it is one colon."""
    return html.replace("::</p>\n<div", ":</p>\n<div") if page.file.src_uri.startswith("api_") else html


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, and the Markdown of the pages that it lists."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in config.nav:
        ((name, entries),) = section.items()
        lines += ["", f"## {name}", ""]
        for title, uri in _pages(entries):
            (headline,) = re.findall(r"\A\s*# (.*)", _TEXTS[uri])
            lines.append(f"- [{title}]({uri}): {headline}")
            (site / uri).write_text(_TEXTS[uri])
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _pages(entries: list[Any]) -> list[tuple[str, str]]:
    """Titles and pages of a part of the navigation, in order."""
    found: list[tuple[str, str]] = []
    for entry in entries:
        ((title, value),) = entry.items()
        found += _pages(value) if isinstance(value, list) else [(title, value)]
    return found


def _linked(markdown: str, page: Any) -> str:
    source = _FILES.get(page.file.src_uri)
    if source is None or source.suffix != ".md":
        return markdown
    uris = {path: uri for uri, path in _FILES.items()}

    def rewrite(link: re.Match[str]) -> str:
        target = _resolve(source, link[2])
        if target is None or (target.is_relative_to(DOCS) and source.is_relative_to(DOCS)):
            return link[0]
        uri = uris.get(target)
        if uri is None and target.is_relative_to(DOCS):
            uri = target.relative_to(DOCS).as_posix()
        if uri is None:
            return link[0]
        relative = os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)
        return f"{link[1]}{relative}{link[3] or ''}{link[4]}"

    parts = _CODE.split(markdown)
    return "".join(part if k % 2 else _LINK.sub(rewrite, part) for k, part in enumerate(parts))


def _existing(entries: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        title, value = next(iter(entry.items()))
        if isinstance(value, list):
            value = _existing(value)
        elif value != "index.md" and not _file_of(value).exists():
            continue
        if value:
            kept.append({title: value})
    return kept


def _file_of(uri: str) -> Path:
    return REPO / uri.removeprefix("pages/") if uri.startswith("pages/") else DOCS / uri


def _targets(page: Path) -> list[Path]:
    text = "".join(_CODE.split(page.read_text())[::2])
    found = (_resolve(page, link[2]) for link in _LINK.finditer(text))
    return [target for target in found if target is not None]


def _resolve(page: Path, link: str) -> Path | None:
    """The file that a link leads to; None for one to the web or to nothing."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return None
    target = (page.parent / link).resolve()
    return target if target.exists() and target.is_relative_to(REPO) else None


def _add(path: Path, files: Files, config: Any) -> None:
    name = path.relative_to(REPO).as_posix()
    if path.suffix in _PICTURES:
        uri, made = f"files/{name}", {"abs_src_path": str(path)}
    elif path.suffix == ".md":
        uri, made = f"pages/{name}", {"content": path.read_text()}
    elif path.is_dir():
        uri, made = f"source/{name}/index.md", {"content": _folder(path, name)}
    else:
        uri, made = f"source/{name}.md", {"content": _SHOWN.get(path.suffix, _source)(path, name)}
    _FILES[uri] = path
    files.append(File.generated(config, uri, **made))


def _source(path: Path, name: str) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{_HIDDEN}# {path.name}\n\n`{name}`\n\n`````{language}\n{path.read_text()}\n`````\n"


def _notebook(path: Path, name: str) -> str:
    texts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        texts.append(text if cell["cell_type"] == "markdown" else f"`````python\n{text}\n`````")
    return _HIDDEN + "\n\n".join([*texts, f"This is the notebook `{name}`."]) + "\n"


_SHOWN = {".ipynb": _notebook}
"""Suffix -> the page of such a file. Others are shown as code."""


def _folder(path: Path, name: str) -> str:
    rows = []
    for file in sorted(path.rglob("*.py")):
        words = (ast.get_docstring(ast.parse(file.read_text())) or "").strip().partition("\n")[0]
        rows.append(f"| `{file.relative_to(path).as_posix()}` | {words.replace('|', '&#124;')} |")
    return f"{_HIDDEN}# {name}/\n\n| file | |\n|---|---|\n" + "\n".join(rows) + "\n"
