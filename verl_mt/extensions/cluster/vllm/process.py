"""vLLM in a separate process: only this file runs there, with the interpreter that has vLLM. The user's servers load
it too (`ServerWorker`).

`python process.py FD` imports vLLM and the standard library, nothing of verl_mt. FD is one end of a socket pair. The
first frame holds vLLM's arguments; the answer is `ready` or `failed`. After that each frame asks for one call, and
calls run concurrently. When the other end closes, the engine and the process end. Messages are plain data.

vLLM's own processes start as copies of this one, or run this file again as their main module. So the engine that takes
weights is registered in them too.
"""

from __future__ import annotations

import asyncio
import functools
import glob
import inspect
import json
import mmap
import multiprocessing
import os
import pickle
import re
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm import SamplingParams, TokensPrompt, __version__
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.sampling_params import RequestOutputKind
from vllm.utils.nccl import unpinned_nccl_env
from vllm.v1.engine.async_llm import AsyncLLM

_TRANSFER = "verl_mt"
_LENGTH = struct.Struct(">Q")
"""Before each message: its length."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids")
"""What SGLang's requests and vLLM's call alike."""
_WRITE_DIRECTLY = ("GptOssForCausalLM",)
"""vLLM's classes of models whose `load_weights` writes into some parameters itself."""
_IS_WRITTEN = re.compile("sinks|w(13|2)_(weight|bias)")
"""Which ones."""
_CALLS: dict[type, dict[str, tuple[str, ...]]] = {
    AsyncLLM: {
        "abort": ("request_id",),
        "add_lora": ("lora_request",),
        "finish_weight_update": ("self",),
        "from_engine_args": ("engine_args",),
        "generate": ("prompt", "sampling_params", "request_id", "lora_request"),
        "pause_generation": ("mode", "clear_cache"),
        "reset_prefix_cache": ("reset_running_requests",),
        "resume_generation": ("self",),
        "start_weight_update": ("self",),
        "update_weight_version": ("new_version",),
        "update_weights": ("request",),
    },
    WeightTransferUpdateRequest: {"__init__": ("update_info",)},
}
"""Class -> method -> what it is called with."""
_POLL_S = 0.5
_TOGETHER_S = 120.0
"""How long joining, and the broadcast of one bucket, may take, as at the sender."""


@dataclass
class Group(WeightTransferInitInfo):
    """Who broadcasts weights; the defaults mean nobody."""

    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    group_name: str = ""
    backend: str = "gloo"


@dataclass
class Weights(WeightTransferUpdateInfo):
    """One part of an update."""

    path: str = ""
    """A file whose bytes are the tensors (shared memory), or a folder with safetensors where `entries` is empty. Empty
    for the next broadcast of the group."""
    entries: list[list[Any]] = field(default_factory=list)
    """[name in the checkpoint, shape, torch's name of the dtype, first byte] of each tensor."""


class Transfer(WeightTransferEngine[Group, Weights]):
    """Loads weights from memory that another process shares, from files or from a broadcast, as vLLM loads a
    checkpoint: packed copies are made again. Runs in vLLM's workers."""

    init_info_cls = Group
    update_info_cls = Weights
    _group: dist.ProcessGroup | None = None
    _on_gpu = False

    def init_transfer_engine(self, init_info: Group) -> None:
        """Leave the last group, and join this one if it is one. Waits for the other members."""
        self.shutdown()
        if not init_info.world_size:
            return
        rank, name = init_info.rank_offset + self.parallel_config.rank, init_info.group_name
        until = timedelta(seconds=_TOGETHER_S)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, None, is_master=False, timeout=until)
        # As the sender does, with the same names in the store. What vLLM has set for NCCL is for its own groups.
        with unpinned_nccl_env():
            self._group, _ = dist.distributed_c10d._new_process_group_helper(
                init_info.world_size,
                rank,
                [],
                dist.distributed_c10d.Backend(init_info.backend),
                dist.PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type]
                timeout=until,
            )
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {k: k for k in range(init_info.world_size)}
        self._on_gpu = init_info.backend == "nccl"

    def start_weight_update(self) -> None:
        """Layers take checkpoint tensors again."""
        if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
            # Of an update that broke off. Its part of the weights is not to count as a part of this one.
            finalize_layerwise_reload(self.model, self.model_config)
        if not torch.accelerator.is_available():
            _pack_experts(self.model)
        self._own = {name for name, _ in self.model.named_parameters()}
        self._loaded: set[str] = set()
        initialize_layerwise_reload(self.model)
        if type(self.model).__name__ in _WRITE_DIRECTLY:
            _take_direct_writes(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, which waits for an accelerator also where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Weights) -> None:
        """Copies out of the memory: vLLM keeps the tensors that it gets until a layer is complete."""
        if not update_info.path:
            self._load(self._broadcast(update_info.entries))
            return
        if not update_info.entries:
            files = sorted(glob.glob(os.path.join(glob.escape(update_info.path), "*.safetensors")))
            if not files:
                raise ValueError(f"{update_info.path} holds no *.safetensors")
            self._load(safetensors_weights_iterator(files, False))
            return
        with open(update_info.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as shared:
            weights = [_copied(shared, *entry) for entry in update_info.entries]
        self._load(weights)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaded = self.model.load_weights(weights)
        self._loaded |= self._own if loaded is None else loaded  # a model that does not say which

    def _broadcast(self, entries: list[list[Any]]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the next broadcast. Waits for the sender."""
        if self._group is None:
            raise ValueError("weights are broadcast, and this engine is in no group")
        ends = [start + torch.Size(shape).numel() * getattr(torch, kind).itemsize for _, shape, kind, start in entries]
        device = self.device if self._on_gpu else torch.device("cpu")
        buffer = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        self._group.broadcast(buffer, 0).wait()
        return [
            (name, buffer[start:end].view(getattr(torch, kind)).view(shape))
            for (name, shape, kind, start), end in zip(entries, ends)
        ]

    def finish_weight_update(self) -> None:
        """What was not processed layer by layer is processed now. An output layer that has the embedding's tensor loads
        none itself: on a CPU its packed copy would stay the old one. An engine that has read no files has got all of
        its weights by now: vLLM asks the same of a checkpoint."""
        left = sorted(self._own - self._loaded)
        if left and self.vllm_config.load_config.load_format == "dummy":
            raise ValueError(
                f"its model has {len(left)} weights that no update sends, such as {left[0]}. Set "
                "actor_rollout_ref.rollout.engine_kwargs={load_format: auto}, and the engine keeps those of the files"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _take_direct_writes(model: torch.nn.Module) -> None:
    """Experts and sinks of GPT-OSS are written into their parameters, past vLLM's loaders of an update. The parameters
    would have no memory and the layers would count as not loaded: give both."""
    for layer in model.modules():
        if any(_IS_WRITTEN.fullmatch(name) for name, _ in layer.named_parameters(recurse=False)):
            info = get_layerwise_info(layer)
            materialize_layer(layer, info)
            info.load_numel = 1


def _pack_experts(model: torch.nn.Module) -> None:
    """Have an update pack the experts of a mixture for the kernel on a CPU: vLLM 0.32 does it only when it starts, and
    the kernel would read the update's tensors as packed ones. Idempotent."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = functools.partial(
                _process_and_pack, method, method.process_weights_after_loading
            )


def _process_and_pack(method: Any, process: Callable[[Any], None], layer: Any) -> None:
    process(layer)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _copied(shared: mmap.mmap, name: str, shape: list[int], dtype: str, start: int) -> tuple[str, torch.Tensor]:
    kind, count = getattr(torch, dtype), torch.Size(shape).numel()
    if not count:
        return name, torch.empty(shape, dtype=kind)
    return name, torch.frombuffer(bytearray(shared[start : start + kind.itemsize * count]), dtype=kind).view(shape)


WeightTransferEngineFactory.register_engine(_TRANSFER, Transfer)


class ServerWorker:
    """What `vllm serve --worker-extension-cls` adds to each worker of a server of the user's."""

    def verl_mt_attach(self) -> dict[str, Any]:
        """Get ready for the weights of a new sender. Returns what the worker is, as plain data."""
        worker: Any = self
        config, interrupted = worker.vllm_config, worker._weight_update_active
        worker._weight_update_active = False
        if not isinstance(worker.weight_transfer_engine, Transfer):
            transfer = WeightTransferConfig(backend=_TRANSFER)
            model = worker.model_runner.get_model()
            worker.weight_transfer_engine = Transfer(transfer, config, worker.device, model)
        worker.weight_transfer_engine.shutdown()
        model, parallel = config.model_config, config.parallel_config
        return {
            "interrupted": interrupted,
            "device": worker.device.type,
            "model": model.model,
            "architectures": list(model.architectures),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "logprobs_mode": str(model.logprobs_mode),
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "nccl": {name: os.environ.get(name) for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")},
            "arguments": {
                "quantization": model.quantization,
                "kv_cache_dtype": config.cache_config.cache_dtype,
                # All others hold the files' weights.
                "load_format": "dummy" if config.load_config.load_format == "dummy" else "auto",
                "speculative_config": str(config.speculative_config or ""),
                "logits_processors": [str(processor) for processor in model.logits_processors or ()],
                "skip_tokenizer_init": model.skip_tokenizer_init,
                "data_parallel_size": parallel.data_parallel_size,
                "pipeline_parallel_size": parallel.pipeline_parallel_size,
            },
        }


class Host:
    """Answers frames with the engine.

    Calls, bodies and answers are those of `clients.Client`.
    """

    def __init__(self, engine: AsyncLLM, connection: socket.socket):
        self._engine = engine
        self._connection = connection
        self._version: str | None = None
        self._adapter: LoRARequest | None = None
        """What requests are sampled with beside the base weights."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the other end closes, or vLLM's own process is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._start(self._close_when_dead())
        while (frame := await _read_frame(reader)) is not None:
            # Calls overlap: an abort must get through while the request that it ends is being answered.
            self._start(self._answer(*frame))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_when_dead(self) -> None:
        """vLLM's own process may end while nobody asks it for anything."""
        while not self._engine.errored:
            await asyncio.sleep(_POLL_S)
        self._writer.close()

    async def _answer(self, number: int, name: str, body: dict[str, Any]) -> None:
        answer: tuple[int, str, Any]
        try:
            answer = (number, "ok", await getattr(self, name)(**body) or {"success": True})
        except Exception as error:
            if self._engine.errored:
                return  # the other end learns of it when this one closes
            answer = (number, "error", f"{type(error).__name__}: {error.__cause__ or error}")
        self._writer.write(_encode(answer))

    async def generate(
        self, rid: str, input_ids: list[int], sampling_params: dict[str, Any], return_logprob: bool = False
    ) -> dict[str, Any]:
        """Sample one turn."""
        wanted = sampling_params["max_new_tokens"]
        stops = sampling_params.get("stop") or []
        sampling = SamplingParams(
            **{name: sampling_params[name] for name in _SAMPLING if name in sampling_params},
            max_tokens=max(1, wanted),  # 0 = only the cache of the prompt is wanted
            logprobs=0 if return_logprob else None,
            ignore_eos=True,  # a turn ends at the ids that the request names, whatever the model's files say
            stop=stops,
            detokenize=bool(stops),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=input_ids)
        async for output in self._engine.generate(prompt, sampling, rid, lora_request=self._adapter):
            last = output
        (turn,) = last.outputs
        if turn.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended the request: {turn.finish_reason} ({turn.stop_reason})")
        ids = list(turn.token_ids)[:wanted]
        return {
            "meta_info": {
                "finish_reason": {"type": turn.finish_reason, "matched": turn.stop_reason},
                "output_token_logprobs": [
                    (entry[token].logprob, token) for token, entry in zip(ids, turn.logprobs or ())
                ],
                "weight_versions": [
                    {"version": span.version, "start": span.start, "end": span.end}
                    for span in turn.weight_versions or ()
                ],
                "cached_tokens": last.num_cached_tokens or 0,
            }
        }

    async def progress(self) -> dict[str, Any]:
        """How many tokens each request has."""
        states = self._engine.output_processor.request_states
        sampled = {rid: state.detokenizer.num_output_tokens() for rid, state in states.items() if state.detokenizer}
        return {"seen": sampled}

    async def abort_request(self, rid: str) -> None:
        """End a request with what it has."""
        await self._engine.abort(rid)

    async def pause_generation(self, mode: str) -> None:
        """Requests stay; with `retract` they and all others lose their cache."""
        await self._engine.pause_generation(mode="keep", clear_cache=mode == "retract")

    async def continue_generation(self) -> None:
        """Go on after a pause."""
        await self._engine.resume_generation()

    async def flush_cache(self) -> dict[str, Any]:
        """Whether no request runs, and so the prefix cache is empty now."""
        busy = self._engine.output_processor.has_unfinished_requests()
        return {"success": not busy and await self._engine.reset_prefix_cache(), "message": "requests are running"}

    async def begin_weight_update(self) -> None:
        """Open vLLM's weight-update session."""
        await self._engine.start_weight_update()

    async def update_weights_from_tensor(
        self, path: str, entries: list[list[Any]], weight_version: str | None = None
    ) -> None:
        """One bucket; `weight_version` comes with the last one."""
        self._version = weight_version
        request = WeightTransferUpdateRequest(update_info={"path": path, "entries": entries})
        await self._engine.update_weights(request)

    async def init_weights_update_group(self, **group: Any) -> None:
        """Join the sender's group. Waits for the other members."""
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=group))

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the sender's group."""
        await self.init_weights_update_group()

    async def update_weights_from_distributed(
        self, entries: list[list[Any]], weight_version: str | None = None
    ) -> None:
        """One bucket by broadcast, which the sender begins when it has asked for this."""
        await self.update_weights_from_tensor("", entries, weight_version)

    async def end_weight_update(self) -> dict[str, Any]:
        """Close the session: caches go, and tokens from here on carry the version."""
        await self._engine.finish_weight_update(self._version)
        return await self._emptied()

    async def _emptied(self) -> dict[str, Any]:
        emptied = await self._engine.reset_prefix_cache(reset_running_requests=True)
        return {"success": emptied, "message": "the prefix cache could not be emptied"}

    async def load_adapter(self, adapter: bytes, config: dict[str, Any], weight_version: str) -> dict[str, Any]:
        """A whole update of an engine that has the base weights: this adapter takes the last one's place, also for
        requests in a pause. vLLM reads it from files alone."""
        with tempfile.TemporaryDirectory(prefix="verl_mt_adapter_") as folder:
            for name, content in (("model.safetensors", adapter), ("config.json", json.dumps(config).encode())):
                with open(os.path.join(folder, f"adapter_{name}"), "wb") as file:
                    file.write(content)
            await self._engine.add_lora(LoRARequest(_TRANSFER, 1, folder, load_inplace=True))
        self._adapter = LoRARequest(_TRANSFER, 1, "loaded")
        await self._engine.update_weight_version(weight_version)
        return await self._emptied()

    async def update_weights_from_disk(self, model_path: str, weight_version: str) -> dict[str, Any]:
        """A whole update."""
        await self.begin_weight_update()
        await self.update_weights_from_tensor(model_path, [], weight_version)
        return await self.end_weight_update()


def _encode(message: Any) -> bytes:
    """One frame: a length, then a pickle of plain data. Both ends are verl_mt's, and the socket has no name."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


async def _read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the other end is closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _first_frame(connection: socket.socket) -> Any:
    """The next message, for a process that has no event loop yet."""
    with connection.makefile("rb", buffering=0) as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        body = b""
        while len(body) < length:
            body += file.read(length - len(body))
        return pickle.loads(body)


def _fork_children() -> None:
    """vLLM's processes begin as copies of this one, with all that it has imported; on a CPU vLLM would have each of
    them import it all again. Not with a GPU, where vLLM decides."""
    if not torch.cuda.is_available():
        forks = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: forks  # type: ignore[assignment]


def _require_calls() -> None:
    """Whether this vLLM has all calls that a run will need, asked before the engine is loaded."""
    missing = []
    for kind, calls in _CALLS.items():
        for name, parts in calls.items():
            takes = inspect.signature(getattr(kind, name)).parameters if hasattr(kind, name) else ()
            missing += [f"{kind.__name__}.{name}({part}=)" for part in parts if part not in takes]
    if missing:
        raise RuntimeError(f"vLLM {__version__} lacks the calls {', '.join(missing)} (docs/vllm.md has the versions)")


async def _run(arguments: dict[str, Any], connection: socket.socket) -> None:
    try:
        _require_calls()
        transfer = WeightTransferConfig(backend=_TRANSFER)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, weight_transfer_config=transfer))
    except BaseException as error:
        connection.sendall(_encode((0, "failed", "".join(traceback.format_exception_only(error)))))
        raise
    try:
        connection.sendall(_encode((0, "ready", {"version": __version__})))
        connection.setblocking(False)
        await Host(engine, connection).serve()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    ours = socket.socket(fileno=descriptor)
    # The other end is to learn of this process's end. The number is closed once: in a copy of a copy it may be another
    # file's.
    os.register_at_fork(after_in_child=ours.close)
    _fork_children()
    asyncio.run(_run(_first_frame(ours), ours))
    os._exit(0)  # taking the imports down takes seconds
