"""mkdocs' hooks of the site: files outside of `docs/` that pages link to get a page too.

`README.md` is the first page. A Markdown file elsewhere becomes `pages/<path>.md`, code becomes `source/<path>.md`, a
folder a list of what is in it, a picture is copied. Links are rewritten to them; those on GitHub stay as they are.
"""

from __future__ import annotations

import ast
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


def on_config(config: Any) -> Any:
    """Leave out entries of the navigation whose page is not there."""
    config.nav = _existing(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file that a page links to, and for those that these link to."""
    _FILES.clear()
    for file in files.documentation_pages():
        _FILES[file.src_uri] = DOCS / file.src_uri
    _FILES["index.md"] = REPO / "README.md"
    files.append(File.generated(config, "index.md", content=(REPO / "README.md").read_text()))
    waiting = list(_FILES.values()) + [REPO / path for path in _nav_files(config.nav)]
    for path in waiting:
        if path not in _FILES.values():
            _add(path, files, config)
        if path.suffix == ".md":
            waiting += [t for t in _targets(path) if t not in waiting and not t.is_relative_to(DOCS)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the pages that were made."""
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


def _nav_files(entries: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        value = next(iter(entry.values()))
        if isinstance(value, list):
            found += _nav_files(value)
        elif value.startswith("pages/"):
            found.append(value.removeprefix("pages/"))
    return found


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
        uri, made = f"source/{name}.md", {"content": _source(path, name)}
    _FILES[uri] = path
    files.append(File.generated(config, uri, **made))


def _source(path: Path, name: str) -> str:
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{_HIDDEN}# {path.name}\n\n`{name}`\n\n`````{language}\n{path.read_text()}\n`````\n"


def _folder(path: Path, name: str) -> str:
    rows = []
    for file in sorted(path.rglob("*.py")):
        words = (ast.get_docstring(ast.parse(file.read_text())) or "").strip().partition("\n")[0]
        rows.append(f"| `{file.relative_to(path).as_posix()}` | {words.replace('|', '&#124;')} |")
    return f"{_HIDDEN}# {name}/\n\n| file | |\n|---|---|\n" + "\n".join(rows) + "\n"
