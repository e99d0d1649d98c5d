"""An OpenAI-compatible server on loopback that says what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Line = str | int | tuple[int, dict[str, str]] | Callable[[dict[str, Any]], "str | int"]
"""A reply; an HTTP status, with headers or without; or what makes one of them from the request."""


class JudgeServer:
    """Says its lines in order, the last one for ever; every request waits for `wait()` before it is answered."""

    def __init__(self, *lines: Line, wait: Callable[[], object] = lambda: None, finish: str = "stop"):
        self.lines, self.wait, self.finish = list(lines), wait, finish
        self.requests: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers, data = judge.answer(self.headers.get("Authorization"), body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Tests print nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None:
                """A client that has given up is no error."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, key: str | None, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        with self.lock:
            self.requests.append({"key": key, **body})
            line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.wait()
        with self.lock:
            self.at_once -= 1
        if callable(line):
            line = line(body)
        if isinstance(line, int | tuple):
            status, headers = (line, {}) if isinstance(line, int) else line
            return status, headers, json.dumps({"error": {"message": "not now"}}).encode()
        choice = {"index": 0, "message": {"role": "assistant", "content": line}, "finish_reason": self.finish}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return 200, {}, json.dumps(reply).encode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
