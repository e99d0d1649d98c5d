"""The processes that run SGLang: how they are started and ended, what is said to them, and what runs in them.

`python -m verl_mt.engines.sglang.processes FD engine` holds one engine. It has the process to itself, because
`Engine.shutdown()` kills every child of its caller. FD is one end of a socket pair. The first frame holds the engine's
arguments; the answer is `ready` or `failed`. After that each frame asks for one call, and calls run concurrently. When
the other end closes, the engine is shut down and the process ends.

`python -m verl_mt.engines.sglang.processes FD server ARGS` is an HTTP server. FD is the reading end of a pipe, which
holds the server's API key. When its writing end closes (the starter ended, however it ended), so does the server.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError, EngineError
from verl_mt.extensions.cluster.replicas.buckets import Buckets, payload
from verl_mt.extensions.cluster.replicas.processes import ChildProcess, encode, read_blocking, read_frame
from verl_mt.extensions.cluster.versions import SGLANG

_MODULE = "verl_mt.engines.sglang.processes"
_ROOT = str(Path(__file__).resolve().parents[3])
"""Where `import verl_mt` finds the package, whatever directory the process starts in."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:\s*\w*\s*", re.IGNORECASE)
_INPUT_CLASSES = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "load_lora_adapter_from_tensors": "LoadLoRAAdapterFromTensorsReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}
"""Name of a call, as of the HTTP server's endpoint and the tokenizer manager's method, and its argument's class."""
_SENT = {
    "init_weights_update_group": (
        "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend",
    ),
    "load_lora_adapter_from_tensors": (
        "lora_name", "config_dict", "serialized_named_tensors", "lora_id", "load_format",
    ),
    "pause_generation": ("mode",),
    "release_memory_occupation": ("tags",),
    "resume_memory_occupation": ("tags",),
    "unload_lora_adapter": ("lora_name", "lora_id"),
    "update_weight_version": ("new_version",),
    "update_weights_from_disk": ("model_path", "weight_version", "load_format"),
    "update_weights_from_distributed": (
        "names", "dtypes", "shapes", "group_name", "load_format", "flush_cache", "weight_version",
    ),
    "update_weights_from_tensor": ("serialized_named_tensors", "load_format", "flush_cache", "weight_version"),
}  # fmt: skip
"""Name of a call -> what is sent with it."""

_ADAPTER = "policy"
"""What SGLang calls the adapter of a policy with base weights."""
_KEEP = "set actor_rollout_ref.rollout.engine_kwargs={load_format: auto}, and the engine keeps those of the files"
_IS_WEIGHT = re.compile(r"(weight|bias)$")
"""The names of an SGLang model's parameters that each update replaces. Buffers have other names."""
CHECKSUMS = {"action": "checksum"}
"""Asks SGLang for checksums of the weights of its model."""
_PLAIN_CALLS = {"abort_request": "AbortReq", "flush_cache": "FlushCacheReqInput"}
"""Calls whose method takes plain arguments, and the classes that SGLang has for them."""


def child(
    descriptor: int, words: list[str], environment: Mapping[str, str] | None = None, *, memory_saver: bool = False
) -> ChildProcess:
    """`python -m` this module.

    Args:
        descriptor: that the process inherits; its first argument.
        words: further arguments.
        environment: variables of the process, beside ours.
        memory_saver: the engine gives its memory back while training runs (SGLang's `enable_memory_saver`).
    """
    command = [sys.executable, "-W", "ignore", "-m", _MODULE, str(descriptor), *words]
    return ChildProcess(command, descriptor, _environment(memory_saver) | dict(environment or {}), "SGLang")


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables, without torch's option `expandable_segments`: SGLang's memory saver refuses to start with it
    under its old name (PYTORCH_CUDA_ALLOC_CONF), and frees nothing with it under the new one (PYTORCH_ALLOC_CONF)."""
    others = {name: value for name, value in environment.items() if name not in _ALLOCATOR}
    kept = {name: _EXPANDABLE.sub("", environment[name]).strip(", ") for name in _ALLOCATOR if name in environment}
    return others | {name: value for name, value in kept.items() if value}


def _environment(memory_saver: bool = False) -> dict[str, str]:
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **(without_expandable_segments(os.environ) if memory_saver else os.environ),
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        # The few positions beyond the model's own are never computed: a turn ends at max_model_len.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Whatever the machine says on which it runs: log-probs are those behind the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    }
    import torch  # not at the top: the child, which runs this file too, leaves it to SGLang

    if not torch.cuda.is_available():
        # A second thread per operator on a core that others use makes SGLang several times slower, not faster.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def reserve_port() -> socket.socket:
    """Holds a port of 127.0.0.1 that nobody else gets while a server loads, which takes it last: the kernel hands out
    higher ones, and who looks for a free one finds it bound. The server can bind it too, as it reuses addresses."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, max(min(first_given, 22_000), 10_064)), 64):  # SGLang's own are above
        reserved = socket.socket()
        try:
            reserved.bind(("127.0.0.1", port))
        except OSError:
            reserved.close()
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reserved
    raise EngineError("64 ports of this machine below 22000 were tried for an SGLang server, and all are taken")


def extras(name: str) -> dict[str, Any]:
    """What SGLang needs with a call, beside its body. It would read files as its own were read at the start: not at
    all, in an engine that started without weights."""
    return {"load_format": "auto"} if name == "update_weights_from_disk" else {}


def require_calls(version: str, io_struct: Any, manager: type) -> None:
    """Whether this SGLang has all calls that a run will need, asked before the engine is loaded.

    Args:
        version: of SGLang.
        io_struct: its module of requests.
        manager: its class of tokenizer managers.

    Raises:
        ConfigError: names what is missing.
    """
    calls = {**_INPUT_CLASSES, **_PLAIN_CALLS}
    missing = [name for name, kind in calls.items() if not (hasattr(io_struct, kind) and hasattr(manager, name))]
    for name in _SENT.keys() - missing:
        takes = inspect.signature(getattr(io_struct, calls[name])).parameters
        missing += [f"{name}({part}=)" for part in _SENT[name] if part not in takes]
    if missing:
        raise ConfigError(
            f"SGLang {version}, which is installed here, lacks the calls {', '.join(sorted(missing))}. Install "
            f"{SGLANG.newest} ({SGLANG.page})"
        )


def checksums_of(ranks: list[dict[str, Any]] | None) -> dict[str, str]:
    """SGLang's answer to `CHECKSUMS` by rank and name; none where it cannot compute them."""
    return {f"rank {k}: {name}": it for k, rank in enumerate(ranks or ()) for name, it in rank["checksums"].items()}


def still_random(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is wrong with an engine that has read no files and has got its first update; empty = nothing. SGLang ignores
    a name that it does not know.

    Args:
        before: checksums at the start.
        now: those behind the update.
    """
    same = {name for name, checksum in before.items() if now.get(name) == checksum}
    left = sorted(filter(_IS_WEIGHT.search, same))
    return f"its model has {len(left)} weights that no update sends, such as {left[0]}; {_KEEP}" if left else ""


class EngineHost:
    """Answers frames with the engine."""

    def __init__(self, engine: Any, connection: socket.socket):
        self._engine = engine
        self._connection = connection
        self._random: dict[str, str] = {}
        """Checksums of the weights of an engine that has read no files, by their names in SGLang's model."""
        self._buckets: Buckets | None = None
        """Where adapters lie for SGLang's ranks."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def remember_random(self) -> None:
        """The engine has read no files: note its weights, all of which the first update has to replace.

        Runs on the loop of the engine's process. Waits for SGLang."""
        self._random = await self._checksums()

    async def serve(self) -> None:
        """Until the other end closes. Runs on the loop of the engine's process."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        # Calls overlap: an abort must get through while the request that it ends is being answered.
        while (frame := await read_frame(reader)) is not None:
            task = asyncio.ensure_future(self._answer(*frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, name: str, body: dict[str, Any]) -> None:
        """Runs on the loop of the engine's process. Waits for SGLang."""
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
            adapter = _ADAPTER if _ADAPTER in manager.lora_registry.get_all_adapters() else None
            return {"meta_info": (await self._engine.async_generate(**body, lora_path=adapter))["meta_info"]}
        if name == "progress":
            return {"seen": manager.last_receive_tstamp}
        if name == "abort_request":
            manager.abort_request(**body)
            return {"success": True}
        if name == "load_adapter":
            return await self._load_adapter(**body)
        if name == "flush_cache":
            return {"success": bool((await manager.flush_cache()).success), "message": "requests are running"}
        result = await getattr(manager, name)(getattr(io_struct, _INPUT_CLASSES[name])(**body, **extras(name)))
        if isinstance(result, tuple) and not result[0]:
            return {"success": False, "message": str(result[1])}
        if name in ("end_weight_update", "update_weights_from_disk") and (before := self._random):
            self._random = {}
            if wrong := still_random(before, await self._checksums()):
                return {"success": False, "message": wrong}
        return {"success": True}

    async def _load_adapter(self, adapter: bytes, config: dict[str, Any], weight_version: str) -> dict[str, Any]:
        """A whole update of an engine that has the base weights: this adapter takes the last one's place, also for
        requests in a pause. Runs on the loop of the engine's process. Waits for SGLang."""
        from safetensors.torch import load
        from sglang.srt.managers import io_struct

        manager, tensors = self._engine.tokenizer_manager, load(adapter)
        if self._buckets is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            self._buckets = Buckets(shapes, next(iter(tensors.values())).dtype)
        (bucket,) = self._buckets.pack(tensors.items(), sys.maxsize)
        # Each is opened once: a handle that several ranks share would be gone with the first of them.
        handles = [payload(bucket.buffer, bucket.entries) for _ in range(manager.server_args.tp_size)]
        new = io_struct.LoadLoRAAdapterFromTensorsReqInput(
            lora_name=_ADAPTER,
            config_dict=config,
            serialized_named_tensors=handles,
            load_format="flattened_bucket",
        )
        if (held := manager.lora_registry.get_all_adapters().get(_ADAPTER)) is None:
            results = [await manager.load_lora_adapter_from_tensors(new)]
        else:
            # Under the same id, with which requests began. `unload_lora_adapter` would wait for these to end.
            old = io_struct.UnloadLoRAAdapterReqInput(lora_name=_ADAPTER, lora_id=held.lora_id)
            new.lora_id = held.lora_id
            async with manager.lora_update_lock:
                results = await manager.update_lora_adapter_communicator(old)
                results += await manager.update_lora_adapter_communicator(new)
        wrong = [result.error_message for result in results if not result.success]
        await manager.update_weight_version(io_struct.UpdateWeightVersionReqInput(new_version=weight_version))
        if not wrong and not (await manager.flush_cache()).success:
            wrong = ["the cache could not be emptied"]
        return {"success": not wrong, "message": "; ".join(map(str, wrong))}

    async def _checksums(self) -> dict[str, str]:
        """Of all tensors; see `checksums_of`."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        body = CheckWeightsReqInput(**CHECKSUMS)
        done, _, ranks, _ = await self._engine.tokenizer_manager.check_weights(body)
        return checksums_of(ranks if done else None)


def fork_children(descriptor: int) -> None:
    """SGLang's own processes begin as copies of this one, with all that it has imported; SGLang would have each of them
    import it all again. Not with a GPU, whose state no copy may use.

    Runs in the engine's process, before SGLang starts its own.

    Args:
        descriptor: closed in the copies. Its other end is to learn of this process's end, whatever they do.
    """
    import torch

    if torch.cuda.is_available():
        return
    multiprocessing.set_start_method("fork", force=True)
    # SGLang says "spawn" when it starts an engine.
    multiprocessing.set_start_method = lambda method, force=False: None
    left = [descriptor]  # once: in a copy of a copy the number may be another file's
    os.register_at_fork(after_in_child=lambda: os.close(left.pop()) if left else None)


def take_unpinned_memory() -> None:
    """Where there is no accelerator, SGLang 0.5.23's adapters ask for pinned memory all the same, which torch then
    refuses. Its other modules ask whether there is some.

    Runs in the engine's process, of which SGLang's own are copies.
    """
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    class Unpinned:
        """torch, with tensors in memory as it is."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def tensor(self, *args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            return torch.tensor(*args, **more)

        def zeros(self, *args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            return torch.zeros(*args, **more)

    layers.torch = torch_backend.torch = Unpinned()
    pinned: Any = torch.Tensor
    pinned.pin_memory = lambda tensor, device=None: tensor


def hold_engine(descriptor: int) -> None:
    """Start the engine that the first frame describes, and serve. Runs in the main thread of the engine's process,
    until the trainer closes the socket."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    arguments = read_blocking(connection)
    fork_children(descriptor)
    try:
        import sglang
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        require_calls(sglang.__version__, io_struct, TokenizerManager)
        if arguments.get("enable_lora"):
            take_unpinned_memory()
        engine = sglang.Engine(**arguments)
        host = EngineHost(engine, connection)
        if arguments.get("load_format") == "dummy":
            engine.loop.run_until_complete(host.remember_random())
    except ConfigError as error:
        connection.sendall(encode((0, "failed", str(error))))
        sys.exit(2)
    except BaseException as error:
        connection.sendall(encode((0, "failed", "".join(traceback.format_exception_only(error)))))
        raise
    connection.sendall(encode((0, "ready", {"version": sglang.__version__})))
    try:
        engine.loop.run_until_complete(host.serve())
    finally:
        engine.shutdown()
        # What is left is this process alone, and taking its imports down takes seconds.
        os._exit(0)


def _end_with(descriptor: int) -> None:
    """Runs in a thread of the server's process. Waits for the end of the pipe, then kills the process group."""
    os.read(descriptor, 1)
    # The process was started as the leader of a group of its own: this ends SGLang's processes too.
    os.killpg(os.getpgid(0), signal.SIGKILL)


class Secret(str):
    """A text that SGLang does not show when it logs its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def serve_http(descriptor: int, words: list[str]) -> None:
    """Serve until killed. Runs in the main thread of the server's process."""
    os.set_inheritable(descriptor, False)
    key = Secret(os.read(descriptor, 4096).decode())  # written whole before this process began
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    fork_children(descriptor)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = prepare_server_args(words)
    arguments.api_key = key
    run_server(arguments)


if __name__ == "__main__":
    # SGLang sends pickles over sockets in the folder for temporary files. Only this user may write to them.
    os.umask(os.umask(0o022) | 0o022)
    if sys.argv[2] == "engine":
        hold_engine(int(sys.argv[1]))
    else:
        serve_http(int(sys.argv[1]), sys.argv[3:])
