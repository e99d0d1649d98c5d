"""Looks at what keys of SGLang do, without SGLang: what would be started, who is asked, how weights would travel."""

from __future__ import annotations

import asyncio
import functools
import http.server
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import effect_parts as parts
import torch
from effect_probes import refused

from verl_mt import engines
from verl_mt.config.compose import compose
from verl_mt.engines.base import Disk
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.config import keys_of
from verl_mt.extensions.cluster.replicas.buckets import Buckets
from verl_mt.extensions.cluster.sglang import engine as engine_module
from verl_mt.extensions.cluster.sglang.options import SGLangOptions
from verl_mt.extensions.cluster.versions import VLLM
from verl_mt.extensions.cluster.vllm import options as vllm_options
from verl_mt.modeling.load import load_causal_lm
from verl_mt.modeling.weights import named_weights
from verl_mt.trainer import build
from verl_mt.workers.weight_sync import weight_update_for

ANSWERS_AFTER_S = 0.4


class _Late(http.server.BaseHTTPRequestHandler):
    """A server that takes its time, and is no SGLang."""

    def do_GET(self) -> None:
        time.sleep(ANSWERS_AFTER_S)
        body = b"{}"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            return  # nobody waits any more

    def log_message(self, *args: object) -> None:
        return


@functools.cache
def late_server() -> str:
    """Its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class _OnGPU(SGLangOptions):
    @property
    def on_gpu(self) -> bool:
        return True


@refused
def sglang(overrides: tuple[str, ...]) -> Any:
    """Engines and their arguments, what a server that is there already is asked, and how weights travel."""
    config = compose(["actor_rollout_ref.rollout.name=sglang", *overrides])
    rollout = config.actor_rollout_ref.rollout
    options = _OnGPU.from_config(
        config.actor_rollout_ref, end_token_ids=[1], max_model_len=rollout.max_model_len or 99, seed=3
    )
    with mock.patch.object(engine_module, "require_sglang"):
        engine = engine_module.SGLangEngine(options)
    clients = [replica._make() for replica in engine._replicas]
    return {
        "engines": [type(client).__name__ for client in clients],
        "started with": [] if options.servers else [options.command_line(k) for k in range(len(clients))],
        "asked": [asyncio.run(_asked(client, replica)) for client, replica in zip(clients, engine._replicas)]
        if options.servers
        else [],
        "gives memory back": engine.capabilities.frees_memory,
        "weights": _weights(config, engine),
    }


@refused
def vllm(overrides: tuple[str, ...]) -> Any:
    """What vLLM's process is started with."""
    config = compose(["actor_rollout_ref.rollout.name=vllm", *overrides])
    with mock.patch.object(vllm_options, "_found", lambda python: {"version": VLLM.newest, "arguments": []}):
        return vllm_options.VLLMOptions.from_config(
            config.actor_rollout_ref, end_token_ids=[1], max_model_len=99, seed=3
        ).arguments()


def hosts(overrides: tuple[str, ...]) -> Any:
    """What is asked of a worker group: ranks of an engine, machines and devices of their own."""
    rollout = compose([*overrides]).actor_rollout_ref.rollout
    return keys_of(rollout).started_on if engines.lives_beside_ranks(rollout.name) else None


async def _asked(client: Any, replica: Any) -> str:
    """What comes of asking a server what it is."""
    try:
        await client.start(replica._timeout_s)
    except ConfigError as error:
        return "it was too slow" if "TimeoutError" in str(error) else "it was asked"
    finally:
        await client.stop()
    return "it serves"


def _weights(config: Any, engine: Any) -> Any:
    """The files, or the number of buckets, in which the shipped model travels."""
    sync = build.weight_sync(
        config,
        SimpleNamespace(runner=SimpleNamespace(context=SimpleNamespace(engine=engine)), call=None),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        parts.folder() / "run",
    )
    policy = _policy()
    update = weight_update_for(engine.capabilities, policy, 1, sync.transport)
    if isinstance(update, Disk):
        return sorted(str(file.relative_to(parts.folder())) for file in Path(update.path).rglob("*"))
    shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(policy)}
    return sum(1 for _ in Buckets(shapes, torch.float32).pack(update.tensors, update.bucket_bytes))


@functools.cache
def _policy() -> Any:
    return load_causal_lm("verl_mt://tiny")
