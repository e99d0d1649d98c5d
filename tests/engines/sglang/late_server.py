"""A server on loopback that speaks as much of SGLang's HTTP as a rollout needs. Each answer takes a while.

python late_server.py SECONDS MODEL        prints its port
"""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from verl_mt.extensions.cluster.sglang.server_check import _CALLS

SECONDS, MODEL = float(sys.argv[1]), sys.argv[2]
COUNTS = {"now": 0, "most": 0, "answered": 0}


async def generate(request: Request) -> JSONResponse:
    body = await request.json()
    COUNTS["now"] += 1
    COUNTS["most"] = max(COUNTS["most"], COUNTS["now"])
    await asyncio.sleep(SECONDS)
    COUNTS["now"] -= 1
    COUNTS["answered"] += 1
    meta = {"finish_reason": {"type": "stop", "matched": 3}, "cached_tokens": 0, "weight_version": "0"}
    tokens = [(-0.25, 3, None)] if body["sampling_params"]["max_new_tokens"] else []
    return JSONResponse({"meta_info": {**meta, "output_token_logprobs": tokens}})


async def model_info(request: Request) -> JSONResponse:
    return JSONResponse({"model_path": MODEL, "weight_version": "default"})


async def server_info(request: Request) -> JSONResponse:
    return JSONResponse({"device": "cpu", "tp_size": 1, "max_running_requests": 4000, **COUNTS})


async def calls(request: Request) -> JSONResponse:
    return JSONResponse({"paths": {path: {} for path in _CALLS}})


async def refuse(request: Request) -> JSONResponse:
    return JSONResponse({}, status_code=400)


app = Starlette(
    routes=[
        Route("/generate", generate, methods=["POST"]),
        Route("/model_info", model_info),
        Route("/health", calls),
        Route("/server_info", server_info),
        Route("/openapi.json", calls),
        Route("/end_weight_update", refuse, methods=["POST"]),
    ]
)

if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", backlog=2048)).run(sockets=[listening])
