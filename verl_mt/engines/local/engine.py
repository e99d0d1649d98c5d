"""`LocalEngine`: transformers in this process, on one thread, over the actor's own module."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.base import (
    Capabilities,
    EngineSetup,
    InferenceEngine,
    InPlace,
    PauseMode,
    TensorBuckets,
    WeightUpdate,
    check_request,
)
from verl_mt.engines.local.batching import Batcher, LocalOptions
from verl_mt.engines.local.model_runner import PackedForward
from verl_mt.engines.local.slots import Sequence
from verl_mt.engines.stop_strings import Decode, StopStrings
from verl_mt.errors import ConfigError, EngineError, EngineGoneError
from verl_mt.plugins import extension_function, optional_function

logger = logging.getLogger(__name__)


class LocalEngine(InferenceEngine):
    """Continuous batching with transformers, for one process.

    It samples from the very module that is trained: no copy of the weights, nothing to transfer. In return it does
    not sample while the weights change: tell it with `apply(InPlace(version))` when they have. With a module of its
    own (`owns_module`) it samples all the time, and takes `TensorBuckets` between two steps.

    Args:
        module: the actor's Hugging Face causal language model, on any device.
        end_token_ids: ids that end a turn (kept as its last token).
        decode: ids -> text, for stop strings; None = requests with stop strings are refused.
        max_model_len: longest sequence in tokens; None = the model's `max_position_embeddings`.
        options: batch sizes, determinism, seed.
        owns_module: nobody else trains or changes the module.

    Raises:
        ConfigError: the model cannot be served, or an option does not fit it.
    """

    samples_from_policy = True
    overlaps_training = True

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> InferenceEngine:
        """This engine, or for a multimodal model the one of the extension `multimodal`."""
        module, rollout = setup.policy_module, setup.config.rollout
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"actor_rollout_ref.rollout.name={rollout.name} samples from the actor's own module, but got "
                f"{type(module).__name__}: it works only where actor and rollout are in one process"
            )
        forward = (optional_function("local_forward") or (lambda _: PackedForward))(setup)
        if getattr(getattr(module, "config", None), "vision_config", None) is not None:
            if cls is not LocalEngine:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.name={rollout.name}: {type(module).__name__} takes images, which "
                    f"{cls.__name__} cannot sample from, it derives from LocalEngine. Derive from "
                    "verl_mt.engines.local.vision.LocalVisionEngine"
                )
            engine: InferenceEngine = extension_function("media_engine").from_setup(setup)
            return engine
        return cls(
            module,
            end_token_ids=setup.end_token_ids,
            decode=setup.decode,
            max_model_len=setup.max_model_len,
            options=LocalOptions(
                rollout.max_num_seqs, deterministic=setup.deterministic, seed=setup.seed, forward=forward
            ),
            **({"owns_module": True} if setup.overlaps else {}),
        )

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        end_token_ids: Iterable[int],
        decode: Decode | None = None,
        max_model_len: int | None = None,
        options: LocalOptions | None = None,
        owns_module: bool = False,
    ):
        options = options or LocalOptions()
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        max_model_len = max_model_len if max_model_len is not None else longest
        if max_model_len is None:
            raise ConfigError("max_model_len is not set, and the model's config has no max_position_embeddings: set it")
        if longest is not None and max_model_len > longest:
            raise ConfigError(f"max_model_len={max_model_len} is more than the model's {longest} positions. Lower it")
        forward = options.forward(module, max_model_len)
        ends = tuple(end_token_ids)
        if any(not 0 <= token < forward.vocab_size for token in ends):
            raise ConfigError(
                f"end_token_ids {ends} are not all below the model's vocabulary size {forward.vocab_size}"
            )
        self.capabilities = Capabilities(
            transports=frozenset({"tensor_buckets" if owns_module else "in_place"}),
            deterministic=options.deterministic,
            lock_step=options.deterministic,
            overlaps_training=owns_module and not options.deterministic,
        )
        self._weights = module.state_dict() if owns_module else {}
        self.max_model_len = max_model_len
        self._vocab_size = forward.vocab_size
        self._decode = decode
        self._batcher = Batcher(forward, ends, max_model_len, options)
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._acks: list[asyncio.Future[None]] = []
        self._gone: EngineGoneError | None = None
        self._closing = False
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="verl_mt-local-engine", daemon=True)
        self._thread.start()

    # Called on event loops

    @property
    def version(self) -> int:
        return self._batcher.version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Runs on the caller's loop. Waits for the engine's thread to end the turn."""
        sequence = self._sequence(request)
        sequence.future = future = asyncio.get_running_loop().create_future()
        self._post(lambda: self._batcher.submit(sequence))
        try:
            return await future
        except asyncio.CancelledError:
            # Nobody will read the turn, but an engine that is not told computes it to its end.
            with contextlib.suppress(EngineGoneError):
                self._post(lambda: self._batcher.abort(request.request_id))
            raise

    async def abort(self, request_id: str) -> None:
        """Runs on the caller's loop. Waits until the engine's thread has run it."""
        await self._command(lambda: self._batcher.abort(request_id))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """`in_place` keeps the caches, `retract` drops them; running turns go on after `resume`. `abort` ends them.
        Runs on the caller's loop. Waits for the step in progress."""

        def act() -> None:
            self._batcher.paused = True
            if mode == "abort":
                self._batcher.abort_all()
            elif mode == "retract":
                self._batcher.drop_cache()

        if mode not in ("abort", "in_place", "retract"):
            raise EngineError(f"pause: unknown mode {mode!r}. Expected abort, in_place or retract")
        await self._command(act)

    async def resume(self) -> None:
        """Runs on the caller's loop. Waits until the engine's thread has run it."""
        await self._command(partial(setattr, self._batcher, "paused", False))

    async def hold_updates(self) -> None:
        """The policy's own module is the trainer's next: a step that has lost its conversations may still run in it.

        What is cached goes with the weights that it is of, before the update wants the memory, not after it.
        """
        if not self._weights:
            await self.release_memory()

    async def apply(self, update: WeightUpdate) -> None:
        """Runs on the caller's loop. Waits until the engine's thread has the weights, between two steps."""
        if isinstance(update, InPlace) and not self._weights:
            await self._command(lambda: self._batcher.set_version(update.version))
        elif isinstance(update, TensorBuckets) and self._weights:
            await self._command(partial(self._take, update))
        else:
            has = "has a copy of the actor's module: it takes TensorBuckets"
            shares = "shares the actor's module: it takes InPlace"
            what = f"{has if self._weights else shares} updates, got {type(update).__name__}"
            raise EngineError(f"the local engine {what}")

    async def release_memory(self) -> None:
        """Runs on the caller's loop. Waits until the engine's thread has freed its cache."""
        await self._command(lambda: self._batcher.drop_cache(release=True))

    def open_session(self, session_id: str, order: int) -> None:
        """With `deterministic`, open all sessions of a batch before the first `generate`, or a session's successor
        before it is closed: a step starts as soon as all open sessions wait in the engine. Runs in any thread and waits
        for nothing."""
        self._post(lambda: self._batcher.open(session_id, order))

    def close_session(self, session_id: str) -> None:
        """Runs in any thread and waits for nothing."""
        with contextlib.suppress(EngineGoneError):  # nothing is left to free
            self._post(lambda: self._batcher.close(session_id))

    async def close(self) -> None:
        """Runs on the caller's loop. Waits for the end of the engine's thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _take(self, update: TensorBuckets) -> None:
        """Between two steps, in the engine's thread."""
        for name, tensor in update.tensors:
            self._weights[name].copy_(tensor)
        self._batcher.set_version(update.version)

    def _sequence(self, request: GenerationRequest) -> Sequence:
        check_request(
            request,
            "the local engine",
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
            finds_stops=self._decode is not None,
        )
        sampling = request.sampling
        return Sequence(
            request=request,
            limit=min(len(request.input_ids) + sampling.max_new_tokens, self.max_model_len),
            submitted=time.monotonic(),
            stop_strings=StopStrings(self._decode, sampling.stop) if sampling.stop and self._decode else None,
        )

    def _post(self, command: Callable[[], None]) -> None:
        """Let the engine's thread run something between two steps. Runs in any thread and waits for nothing."""
        with self._wake:
            if self._gone is not None:
                raise self._gone_again()
            self._inbox.append(command)
            self._wake.notify()

    async def _command(self, command: Callable[[], None]) -> None:
        """Run something between two steps, and wait until it has run. Runs on the caller's loop."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def act() -> None:
            # Known before it runs: if it fails, so does the engine, and whoever waits is told.
            self._acks.append(done)
            command()

        self._post(act)
        await done

    # Runs in the engine's thread

    def _run(self) -> None:
        """Runs in the engine's thread, until `close` or an error."""
        torch.set_num_threads(self._batcher.forward.num_threads(self._num_threads))
        # A thread that uses torch for the first time gets the number that any thread has set last. From here on this
        # one keeps its own, and later ones get the process's.
        torch.get_num_threads()
        others = threading.Thread(target=torch.set_num_threads, args=(self._num_threads,))
        others.start()
        others.join()
        error: BaseException | None = None
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as caught:
            error = caught
            logger.exception("the local engine failed")
        self._shut_down(error)

    def _turn(self) -> bool:
        """Commands, one step, results. False = the engine is to close. Runs in the engine's thread."""
        batcher = self._batcher
        commands = self._wait()
        if commands is None:
            return False
        while commands:
            try:
                commands.pop(0)()
            except BaseException:
                with self._wake:  # whoever waits for these is told as well
                    self._inbox = commands + self._inbox
                raise
        batcher.expire(time.monotonic())
        if batcher.runnable():
            batcher.forward.enter_eval()
            batcher.step()
        if not batcher.runnable():
            batcher.forward.leave_eval()
        self._flush()
        return True

    def _wait(self) -> list[Callable[[], None]] | None:
        """What was posted since; sleeps while there is nothing to do. Runs in the engine's thread."""
        batcher = self._batcher
        with self._wake:
            while not (self._closing or self._inbox or batcher.runnable()):
                deadline = batcher.next_deadline
                pause = None if deadline is None else max(0.0, deadline - time.monotonic())
                if pause == 0.0:
                    break
                self._wake.wait(pause)
            if self._closing:
                return None
            commands, self._inbox = self._inbox, []
            return commands

    def _flush(self) -> None:
        """Hand results over, with one wake-up per event loop. Runs in the engine's thread and waits for nothing."""
        batcher = self._batcher
        if not batcher.finished and not self._acks:
            return
        results: list[tuple[asyncio.Future[Any] | None, Any]] = [(s.future, result) for s, result in batcher.finished]
        results += [(ack, None) for ack in self._acks]
        batcher.finished, self._acks = [], []
        _deliver(results)

    def _shut_down(self, error: BaseException | None) -> None:
        """Nobody is left waiting: not who was sampled, nor who was about to ask. Runs in the engine's thread, last."""
        # From here on `_post` refuses. What was posted before still runs, so that its future is among those that fail.
        with self._wake:
            if error is None:
                self._gone = EngineGoneError("the local engine is closed")
            else:
                self._gone = EngineGoneError(f"the local engine failed: {error!r}")
                self._gone.__cause__ = error
            pending, self._inbox = self._inbox, []
        batcher = self._batcher
        for command in pending:
            try:
                command()
            except BaseException:
                logger.exception("a command to the local engine failed while it was closing")
        acks, self._acks = self._acks, []
        batcher.fail_all(self._gone_again)
        self._flush()
        _deliver((ack, self._gone_again()) for ack in acks)
        batcher.forward.leave_eval()
        batcher.slots.cache.release()

    def _gone_again(self) -> EngineGoneError:
        assert self._gone is not None
        error = EngineGoneError(str(self._gone))
        error.__cause__ = self._gone.__cause__
        return error


def _deliver(results: Iterable[tuple[asyncio.Future[Any] | None, Any]]) -> None:
    """Resolve futures from another thread, with one wake-up per event loop; exceptions are raised where awaited. Runs
    in the engine's thread and waits for nothing."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for future, result in results:
        if future is not None:
            by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, items in by_loop.items():
        # A loop that was closed meanwhile has nobody who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, items)


def _resolve(items: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in items:
        if not future.done():
            (future.set_exception if isinstance(result, BaseException) else future.set_result)(result)
