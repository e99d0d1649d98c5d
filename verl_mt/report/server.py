"""The report over HTTP, on this machine only, of runs that are still being written."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from verl_mt.errors import ConfigError, DataError
from verl_mt.report.collect import Collector, Contents
from verl_mt.report.page_builder import build_page

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_MAX_AGE_S = 2.0
"""A manifest younger than this is served again."""


class ReportServer(ThreadingHTTPServer):
    """Serves `/` (the page), `/manifest.json` (what there is now) and `/blob/<id>`.

    Args:
        paths: run directories.
        port: 0 = a free one; `url` says which.

    Raises:
        DataError: one of the paths is no run directory.
        ConfigError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str], *, port: int = 0, max_rollouts: int = 20_000):
        self._collector = Collector(paths, max_rollouts)
        self._lock = threading.Lock()
        self._contents = self._collector.contents()
        self._blocks = dict(self._contents.blocks)
        self._read_at = time.monotonic()
        self.page = "".join(build_page(None, title="verl_mt report")).encode()
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}; leave it out to get a free one") from error

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}/"

    def contents(self) -> Contents:
        """What the runs hold now; what they held before where they cannot be read at this moment."""
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
        elif self.path == "/":
            self._send(self.server.page, "text/html; charset=utf-8")
        elif self.path == "/manifest.json":
            self._send(json.dumps(self.server.contents().manifest).encode(), "application/json")
        elif self.path.startswith("/blob/") and (found := self.server.block(self.path[6:])) is not None:
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
