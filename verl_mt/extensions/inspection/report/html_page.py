"""The page in one file (markup, style, scripts, charting library and the runs' blocks), or served over HTTP, on this
machine only, of runs that are still being written."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import importlib.util
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError, DataError
from verl_mt.extensions.inspection.report.collect import Contents
from verl_mt.extensions.inspection.report.sweep import collector

logger = logging.getLogger(__name__)

_PAGE = Path(__file__).parent / "page"
_SCRIPTS = (
    "dom.js", "codec.js", "store.js", "charts.js", "table.js", "reading.js", "conversation.js", "timeline.js",
    "diff.js", "prompts.js", "sweep.js", "app.js",
)  # fmt: skip
_HOST = "127.0.0.1"
_MAX_AGE_S = 2.0
"""A manifest younger than this is served again."""


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
    # In a file all data stands in the page, and nothing in it can load anything; served, it asks this server only.
    source = "'none'" if contents is not None else "'self'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}' blob:; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {source}; base-uri 'none'; form-action 'none'"
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


class ReportServer(ThreadingHTTPServer):
    """Serves the page, `manifest.json` (what there is now) and `blob/<id>`, all under a token: every user of a machine
    reaches its loopback.

    Args:
        paths: run directories, or one folder that holds them.
        port: 0 = a free one; `url` says which.

    Raises:
        DataError: one of the paths is no run directory.
        ConfigError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str], *, port: int = 0, max_rollouts: int = 20_000):
        self._collector = collector(paths, max_rollouts)
        self._lock = threading.Lock()
        self._contents = self._collector.contents()
        self._blocks = dict(self._contents.blocks)
        self._read_at = time.monotonic()
        self.root = f"/{secrets.token_urlsafe(16)}/"
        self.page = "".join(build_page(None, title="verl_mt report")).encode()
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}. Leave it out to get a free one") from error

    @property
    def url(self) -> str:
        """With the token."""
        return f"http://{_HOST}:{self.server_port}{self.root}"

    def contents(self) -> Contents:
        """What the runs hold now; what they held before where they cannot be read at this moment. Runs in the thread of
        a request. Waits for another request that reads the runs."""
        with self._lock:
            if time.monotonic() - self._read_at > _MAX_AGE_S:
                try:
                    self._contents = self._collector.contents()
                    self._blocks |= self._contents.blocks
                except (DataError, OSError) as error:
                    logger.warning("the runs cannot be read now: %s", error)
                self._read_at = time.monotonic()
            return self._contents

    def block(self, name: str) -> bytes | None:
        """The bytes of a block that any manifest of this server named."""
        return self._blocks.get(name)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        # A page of another site that resolves its own name to this machine sends that name: it gets nothing.
        if self.headers.get("Host", "").rpartition(":")[0] not in (_HOST, "localhost"):
            self._send(b"this server answers on loopback only", "text/plain", HTTPStatus.FORBIDDEN)
            return
        root, path = self.path[: len(self.server.root)], self.path[len(self.server.root) :]
        if not secrets.compare_digest(root.encode(), self.server.root.encode()):
            self._send(b"open the whole address that the command printed", "text/plain", HTTPStatus.FORBIDDEN)
        elif path == "":
            self._send(self.server.page, "text/html; charset=utf-8")
        elif path == "manifest.json":
            self._send(json.dumps(self.server.contents().manifest).encode(), "application/json")
        elif path.startswith("blob/") and (found := self.server.block(path[5:])) is not None:
            self._send(found, "application/octet-stream", cache="max-age=31536000, immutable")
        else:
            self._send(b"not here", "text/plain", HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, *, cache: str = "no-store") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", cache)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def serve(paths: Sequence[str], *, port: int, max_rollouts: int) -> int:
    """Serve until Ctrl-C."""
    with ReportServer(paths, port=port, max_rollouts=max_rollouts) as server:
        print(f"the report is at {server.url} (this machine only; Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0
