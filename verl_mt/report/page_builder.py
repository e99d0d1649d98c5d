"""Puts the page together: markup, style, scripts, the charting library and the runs' blocks, in one file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import importlib.util
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError
from verl_mt.report.collect import Contents

_PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("dom.js", "codec.js", "store.js", "charts.js", "table.js", "conversation.js", "timeline.js", "app.js")


def charting_library() -> bytes:
    """plotly.js, gzipped, from the package `plotly` (which is not imported).

    Raises:
        ConfigError: it is not installed.
    """
    found = importlib.util.find_spec("plotly")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    for place in places:
        script = Path(place) / "package_data" / "plotly.min.js"
        if script.is_file():
            return _packed(script)
    raise ConfigError("the report draws its curves with plotly, which is not installed: pip install 'verl_mt[report]'")


@cache
def _packed(script: Path) -> bytes:
    return gzip.compress(script.read_bytes(), 6, mtime=0)


def build_page(contents: Contents | None, *, title: str) -> Iterator[str]:
    """The page in pieces; with `contents` None it fetches manifest and blocks from where it came from."""
    script = "\n".join((_PAGE / name).read_text() for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        (
            f"default-src 'none'; script-src 'sha256-{digest}' blob:; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {'none' if contents is not None else 'self'}; base-uri 'none'; form-action 'none'"
        )
        .replace("connect-src none", "connect-src 'none'")
        .replace("connect-src self", "connect-src 'self'")
    )
    markup = (_PAGE / "index.html").read_text()
    before, _, after = markup.partition("{{data}}")
    filled = {"policy": policy, "title": html.escape(title), "style": (_PAGE / "style.css").read_text()}
    for name, text in filled.items():
        before = before.replace("{{" + name + "}}", text)
    yield before
    yield _block("plotly", charting_library())
    if contents is not None:
        yield f'<script type="application/json" id="manifest">{_json_in_html(contents.manifest)}</script>\n'
        for name, packed in contents.blocks.items():
            yield _block(f"b-{name}", packed)
    yield after.replace("{{script}}", script)


def _block(name: str, packed: bytes) -> str:
    """Base64 in a script element that no browser runs."""
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>\n'


def _json_in_html(value: Mapping[str, Any]) -> str:
    """JSON in which nothing can end a script element or begin a comment in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
