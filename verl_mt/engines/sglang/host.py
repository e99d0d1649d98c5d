"""The process that holds one SGLang engine: `python -m verl_mt.engines.sglang.host FD`.

It has the process to itself, because `Engine.shutdown()` kills every child of its caller. FD is one end of a socket
pair; frames are defined in `frames.py`. The first frame holds the engine's arguments; the answer is `ready` or
`failed`. After that each frame asks for one call, and calls run concurrently. When the other end closes, the engine
is shut down and the process ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import AsyncIterator
from typing import Any

from verl_mt.engines.sglang.frames import encode, read_blocking, read_frame
from verl_mt.errors import ConfigError

_INPUT_CLASSES = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}
"""Name of a call, as of the HTTP server's endpoint and of the tokenizer manager's method, and its argument's class."""


def require_calls(version: str, io_struct: Any, manager: type) -> None:
    """Whether this SGLang has all calls that a run will need, asked before the engine is loaded.

    Args:
        version: of SGLang.
        io_struct: its module of requests.
        manager: its class of tokenizer managers.

    Raises:
        ConfigError: names what is missing.
    """
    calls = {**_INPUT_CLASSES, "abort_request": "AbortReq"}
    missing = [name for name, kind in calls.items() if not (hasattr(io_struct, kind) and hasattr(manager, name))]
    if missing:
        raise ConfigError(
            f"SGLang {version}, which is installed here, lacks the calls {', '.join(missing)}; install 0.5.23 "
            "(docs/sglang.md)"
        )


class Host:
    """Answers frames with the engine."""

    def __init__(self, engine: Any, connection: socket.socket):
        self._engine = engine
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the other end closes."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        async for number, name, body in _frames(reader):
            task = asyncio.ensure_future(self._answer(number, name, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, name: str, body: dict[str, Any]) -> None:
        answer: tuple[int, str, Any]
        try:
            answer = (number, "ok", await self._call(name, body))
        except Exception as error:
            answer = (number, "error", f"{type(error).__name__}: {error}")
        self._writer.write(encode(answer))

    async def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        if name == "generate":
            return {"meta_info": (await self._engine.async_generate(**body))["meta_info"]}
        if name == "abort_request":
            manager.abort_request(**body)
            return {"success": True}
        result = await getattr(manager, name)(getattr(io_struct, _INPUT_CLASSES[name])(**body))
        if isinstance(result, tuple):
            return {"success": bool(result[0]), "message": str(result[1])}
        return {"success": True}


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    while (frame := await read_frame(reader)) is not None:
        yield frame


def main(descriptor: int) -> None:
    """Start the engine that the first frame describes, and serve."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    arguments = read_blocking(connection)
    try:
        import sglang
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        require_calls(sglang.__version__, io_struct, TokenizerManager)
        engine = sglang.Engine(**arguments)
    except ConfigError as error:
        connection.sendall(encode((0, "failed", str(error))))
        sys.exit(2)
    except BaseException as error:
        connection.sendall(encode((0, "failed", "".join(traceback.format_exception_only(error)))))
        raise
    connection.sendall(encode((0, "ready", {"version": sglang.__version__})))
    try:
        engine.loop.run_until_complete(Host(engine, connection).serve())
    finally:
        engine.shutdown()
        # What is left is this process alone, and taking its imports down takes seconds.
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
