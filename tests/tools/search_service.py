"""A search service under a test's control: real HTTP on a free port, one thread per request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


class SearchService:
    """Answers with what `behave(body)` returns (status, JSON or bytes, headers); keeps what it was asked.

    Args:
        behave: default: one passage per query that repeats it.
    """

    def __init__(self, behave: Callable[[dict[str, Any]], Answer] | None = None):
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        behave = behave or (lambda body: (200, answered(*body["queries"])))
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with service._lock:
                    service.bodies.append(body)
                    service.headers.append({k.lower(): v for k, v in self.headers.items()})
                    service._now += 1
                    service.most_at_once = max(service.most_at_once, service._now)
                try:
                    status, content, headers = (*behave(body), {})[:3]
                finally:
                    with service._lock:
                        service._now -= 1
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 64

            def handle_error(self, *args: Any) -> None: ...

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/retrieve"

    def __enter__(self) -> SearchService:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def found(*contents: str, scores: bool = False) -> dict[str, Any]:
    """The answer to one query."""
    documents = [{"id": str(k), "contents": text} for k, text in enumerate(contents)]
    return {"result": [[{"document": d, "score": 1.0} for d in documents] if scores else documents]}


def answered(*queries: str) -> dict[str, Any]:
    """The answer to each of several queries: a passage that repeats it."""
    return {"result": [found(f"About {q}\nIt is {q}.")["result"][0] for q in queries]}
