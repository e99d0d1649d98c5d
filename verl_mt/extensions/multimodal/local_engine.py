"""`LocalVisionEngine`: the local engine of models that see: one turn after the other, each with a new cache.

A plain path on purpose: nothing is packed, no cache outlives its turn. Positions and tensors come from where the
trainer takes them, so that both compute the same log-probs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from verl_mt.data.batch import RowMedia
from verl_mt.data.requests import FinishReason, GenerationOutput, GenerationRequest, Timings, VersionSpan
from verl_mt.engines.base import (
    Capabilities,
    EngineSetup,
    InferenceEngine,
    InPlace,
    PauseMode,
    WeightUpdate,
    check_request,
)
from verl_mt.engines.local.sampling import BLOCK, SamplingRows, sample, stream_key, uniforms
from verl_mt.engines.stop_strings import Decode, StopStrings
from verl_mt.errors import ConfigError, EngineError, EngineGoneError
from verl_mt.modeling.media import media_arguments
from verl_mt.modeling.shared_prefix import eval_mode

_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")


class LocalVisionEngine(InferenceEngine):
    """Samples from the actor's own vision-language model, in a thread of this process.

    Args:
        module: of transformers' Qwen2-VL family (it has `get_rope_index`), shared with the trainer.
        end_token_ids: ids that end a turn (kept as its last token).
        decode: ids -> text, for stop strings; None = requests with stop strings are refused.
        max_model_len: longest sequence in tokens; None = the model's `max_position_embeddings`.
        seed: of requests that bring none.

    Raises:
        ConfigError: a model that does not compute its positions in this way.
    """

    samples_from_policy = True

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> InferenceEngine:
        return cls(
            setup.policy_module,
            end_token_ids=setup.end_token_ids,
            decode=setup.decode,
            max_model_len=setup.max_model_len,
            seed=setup.seed,
        )

    def __init__(
        self,
        module: Any,
        *,
        end_token_ids: Iterable[int],
        decode: Decode | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
    ):
        if not hasattr(module.base_model, "get_rope_index"):
            raise ConfigError(
                f"{type(module).__name__}: the local engine serves vision models of the Qwen2-VL family. Use another "
                "model, or a text model"
            )
        config = module.config.get_text_config()
        self.capabilities = Capabilities(
            transports=frozenset({"in_place"}),
            deterministic=True,
            media=frozenset({"images", "videos"}),
        )
        self.max_model_len = max_model_len or config.max_position_embeddings
        self._module, self._decode, self._seed = module, decode, seed
        self._vocab_size = config.vocab_size
        self._ends = frozenset(end_token_ids)
        self._version = self._num_requests = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="verl_mt-local-vision")
        self._running: dict[str, threading.Event] = {}
        self._gate, self._step = threading.Event(), threading.Lock()
        self._gate.set()
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Runs on the rollout's loop. Waits for the engine's thread `verl_mt-local-vision`."""
        if self._is_closed:
            raise EngineGoneError("the local engine is closed")
        check_request(
            request,
            "the local engine",
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
            takes_media=True,
            finds_stops=self._decode is not None,
        )
        ended = self._running.setdefault(request.request_id, threading.Event())
        self._num_requests += 1
        seed = request.sampling.seed
        key = stream_key(self._seed, self._num_requests) if seed is None else seed
        submitted = time.monotonic()
        try:
            work = self._pool.submit(self._turn, request, key, submitted, ended)
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            ended.set()
            if self._is_closed:
                raise EngineGoneError("the local engine is closed") from None
            raise
        finally:
            self._running.pop(request.request_id, None)

    async def abort(self, request_id: str) -> None:
        """Runs on the rollout's loop and waits for nothing."""
        if request_id in self._running:
            self._running[request_id].set()

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """In whatever mode, a token that is being computed is waited for; `abort` ends the running turns. Runs on the
        rollout's loop. Waits for the token in progress, in a thread."""
        if mode == "abort":
            for ended in self._running.values():
                ended.set()
        self._gate.clear()
        await asyncio.to_thread(self._wait_for_step)

    async def resume(self) -> None:
        self._gate.set()

    async def apply(self, update: WeightUpdate) -> None:
        if not isinstance(update, InPlace):
            raise EngineError(
                f"the local engine shares the actor's module: it takes InPlace updates, got {type(update).__name__}"
            )
        self._version = update.version

    async def close(self) -> None:
        """Runs on the rollout's loop. Waits for the engine's thread."""
        self._is_closed = True
        for ended in self._running.values():
            ended.set()
        self._gate.set()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    def _wait_for_step(self) -> None:
        """Runs in a thread. Waits for the token in progress."""
        with self._step:
            pass

    def _turn(self, request: GenerationRequest, key: int, submitted: float, ended: threading.Event) -> GenerationOutput:
        """Runs in the engine's thread."""
        begun = time.monotonic()
        deadline = float("inf") if request.deadline_s is None else submitted + request.deadline_s
        turn = _VisionTurn(self._module, request, key)
        watch = StopStrings(self._decode, request.sampling.stop) if request.sampling.stop and self._decode else None
        limit = min(request.sampling.max_new_tokens, self.max_model_len - len(request.input_ids))
        stops = self._ends.union(request.sampling.stop_token_ids)
        reason: FinishReason = "abort"
        first = None
        while not ended.is_set() and time.monotonic() < deadline:
            if not self._gate.wait(0.05):
                continue
            with self._step:
                if not self._gate.is_set():
                    continue
                token = turn.step(self._version)
            first = first or time.monotonic()
            if token in stops or (watch is not None and watch.push(token)):
                reason = "stop"
                break
            if len(turn.ids) == limit:
                reason = "length"
                break
        if self._is_closed:
            raise EngineGoneError("the local engine is closed")
        now = time.monotonic()
        first = first or now
        return GenerationOutput(
            token_ids=turn.ids,
            log_probs=turn.log_probs,
            finish_reason=reason,
            version_spans=[VersionSpan(version, 1) for version in turn.versions],
            timings=Timings(queue_s=begun - submitted, prefill_s=first - begun, decode_s=now - first),
        )


class _VisionTurn:
    """One turn that is being sampled: its cache, its positions, its stream of random numbers."""

    def __init__(self, module: Any, request: GenerationRequest, key: int):
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self._module, self._key, self._sampling = module, key, request.sampling
        device = next(module.parameters()).device
        ids_1T = torch.tensor([request.input_ids], device=device)
        inputs = request.media.get("inputs") or ()
        self._next: dict[str, Any] = {"input_ids": ids_1T}
        if inputs:
            media = media_arguments(module, ids_1T, [RowMedia(tuple(inputs))])
            grids = {name: media[name] for name in _GRIDS if name in media}
            positions, _ = module.base_model.get_rope_index(ids_1T, **grids)
            self._next |= media
        else:
            positions = torch.arange(ids_1T.shape[1], device=device).expand(3, 1, -1)
        self._next["position_ids"] = positions
        self._position = int(positions.max()) + 1

    @torch.no_grad()
    def step(self, version: int) -> int:
        """Sample one more token."""
        with eval_mode(self._module):
            output = self._module(**self._next, use_cache=True, logits_to_keep=1)
        logits_1V = output.logits[:, -1].float()
        asked, number = self._sampling, len(self.ids)
        rows = SamplingRows(
            temperature=np.array([asked.temperature]),
            top_k=np.array([asked.top_k]),
            top_p=np.array([asked.top_p]),
            min_p=np.array([asked.min_p]),
            uniform=np.array([uniforms(self._key, number // BLOCK)[number % BLOCK]]),
        )
        tokens, log_probs = sample(logits_1V, rows)
        token = int(tokens[0])
        self.ids.append(token)
        self.log_probs.append(float(log_probs[0]))
        self.versions.append(version)
        device = logits_1V.device
        self._next = {
            "input_ids": torch.tensor([[token]], device=device),
            "position_ids": torch.full((3, 1, 1), self._position, device=device),
            "past_key_values": output.past_key_values,
        }
        self._position += 1
        return token
