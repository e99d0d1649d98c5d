"""A server over stdio that misbehaves as its tool `act {mode}` is told. Without a library, so it starts at once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def send(**message: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def answer(number: Any, text: str = "here") -> None:
    send(id=number, result={"content": [{"type": "text", "text": text}], "isError": False})


def raw(data: bytes, *, then_answer: bool = False) -> Callable[[Any], None]:
    def act(number: Any) -> None:
        write(data)
        if then_answer:
            answer(number)

    return act


def result(value: Any) -> Callable[[Any], None]:
    return lambda number: send(id=number, result=value)


def error(code: Any, message: Any = "no such page") -> Callable[[Any], None]:
    return lambda number: send(id=number, error={"code": code, "message": message})


def flood(method: str, count: int) -> Callable[[Any], None]:
    def act(number: Any) -> None:
        line = json.dumps({"jsonrpc": "2.0", "method": method, "params": {"level": "info", "data": "x"}}).encode()
        write((line + b"\n") * count)
        answer(number)

    return act


def close(*handles: int) -> Callable[[Any], None]:
    def act(number: Any) -> None:
        for handle in handles:
            os.close(handle)
        time.sleep(1e6)

    return act


def half_a_line(number: Any) -> None:
    write(b'{"jsonrpc": "2.0", "id"')
    os._exit(1)


def answer_to(number: Any) -> Callable[[Any], None]:
    return lambda _: answer(number, "someone else's")


def endless(number: Any) -> None:
    while True:
        write(b"x" * 65536)


def notify_for_ever(number: Any) -> None:
    while True:
        flood("notifications/message", 100)(number)


def loud(number: Any) -> None:
    sys.stderr.write("e" * 20_000_000)
    answer(number)


MODES: dict[str, Callable[[Any], None]] = {
    "here": answer,
    "line that is not UTF-8": raw(b"\xff\xfe\x80 binary\n", then_answer=True),
    "not UTF-8 and no answer": raw(b"\xff\xfe\x80 binary\n"),
    "not UTF-8 inside an answer": lambda n: write(
        b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"\xff"}]}}\n' % n
    ),
    "answer of 50 MB": lambda n: answer(n, "x" * 50_000_000),
    "30 MB without an end of line": raw(b"y" * 30_000_000),
    "endless line": endless,
    "image of 20 MB": lambda n: send(
        id=n, result={"content": [{"type": "image", "data": "A" * 20_000_000, "mimeType": "image/png"}]}
    ),
    "error -32000": error(-32000),
    "error without a message": error(-32603, None),
    "error of another type": error("no", 5),
    "error of 1 MB": error(-32603, "z" * 1_000_000),
    "print": raw(b"debugging here\n", then_answer=True),
    "not JSON": raw(b"{]\n"),
    "JSON list": raw(b"[1, 2]\n"),
    "number": raw(b"7\n"),
    "100,000 brackets": raw(b"[" * 100_000 + b"\n", then_answer=True),
    "deep answer": lambda n: write(
        b'{"jsonrpc":"2.0","id":%d,"result":{"content":[],"structuredContent":' % n
        + b'{"a":' * 5000
        + b"1"
        + b"}" * 5000
        + b"}}\n"
    ),
    "NUL bytes": raw(b"\0" * 1000 + b"\n", then_answer=True),
    "empty lines": raw(b"\n" * 10_000, then_answer=True),
    "answer to nobody": answer_to(987_654),
    "answer to null": answer_to(None),
    "answer to a text": answer_to("seven"),
    "answered twice": lambda n: (answer(n), answer(n, "again")),  # type: ignore[dict-item,func-returns-value]
    "no result": lambda n: send(id=n),
    "result is null": result(None),
    "result is a list": result([]),
    "content is a text": result({"content": "text"}),
    "content of an unknown kind": result({"content": [{"type": "smell", "smell": "x"}]}),
    "content without text": result({"content": [{"type": "text"}]}),
    "text is a number": result({"content": [{"type": "text", "text": 5}]}),
    "lone surrogate": lambda n: answer(n, "\ud800"),
    "escape sequences": lambda n: answer(n, "\x1b]0;pwn\x07\x1b[2J"),
    "structured": result({"content": [], "structuredContent": {"a": "b"}}),
    "error of its own": result({"content": [{"type": "text", "text": "no"}], "isError": True}),
    "5,000 notifications": flood("notifications/message", 5000),
    "unknown notifications": flood("notifications/nothing", 500),
    "notifications for ever": notify_for_ever,
    "request to the client": lambda n: (send(id="s1", method="sampling/createMessage", params={}), answer(n)),  # type: ignore[dict-item,func-returns-value]
    "unknown request": lambda n: (send(id=n, method="nothing/here"), answer(n)),  # type: ignore[dict-item,func-returns-value]
    "progress of nothing": lambda n: (
        send(method="notifications/progress", params={"progressToken": 99, "progress": "x"}),
        answer(n),
    ),  # type: ignore[dict-item,func-returns-value]
    "list has changed": flood("notifications/tools/list_changed", 10),
    "cancels our request": lambda n: send(method="notifications/cancelled", params={"requestId": n}),
    "hangs": lambda n: time.sleep(1e6),
    "no answer": lambda n: None,
    "closes stdout": close(1),
    "closes stdin": close(0),
    "closes both": close(0, 1),
    "ends": lambda n: os._exit(0),
    "crashes": lambda n: os.abort(),
    "ends in a line": half_a_line,
    "20 MB on stderr": loud,
}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "hostile", "version": "1"}
            send(id=number, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            schema = {"type": "object", "properties": {"mode": {"type": "string"}}}
            elsewhere = {
                "type": "object",
                "$ref": sys.argv[1] if len(sys.argv) > 1 else "#/$defs/any",
                "$defs": {"any": {}},
            }
            send(id=number, result={"tools": [{"name": "act", "inputSchema": schema, "outputSchema": elsewhere}]})
        elif method == "tools/call":
            MODES[message["params"]["arguments"]["mode"]](number)
        elif method == "ping":
            send(id=number, result={})
        elif number is not None and method is not None:
            send(id=number, error={"code": -32601, "message": "unknown method"})


if __name__ == "__main__":
    main()
