"""The contract of every inference engine: exact ids in, exact ids and log-probs out.

Log-probs everywhere (engines and trainer) are `log_softmax(logits / T)` over the full vocabulary; T = 0 counts as 1.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig, TrainerConfig
from verl_mt.data.requests import GenerationOutput, GenerationRequest
from verl_mt.engines.stop_strings import Decode
from verl_mt.errors import EngineError, VerlMTError

TRANSPORTS = ("in_place", "tensor_buckets", "from_ranks", "broadcast", "disk")
MEDIA = ("images", "videos")


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. Checked at start, so that nothing degrades silently."""

    transports: frozenset[str]
    """Names of the `WeightUpdate` classes it takes: in_place, tensor_buckets, from_ranks, broadcast, disk."""
    deterministic: bool
    """The same requests give the same bits, whatever the timing."""
    returns_token_ids: bool = True
    """False: it yields text only, and the delta method of `verl_mt.chat` finds the ids."""
    media: frozenset[str] = frozenset()
    """What it takes beside ids: `images`, `videos`."""
    lock_step: bool = False
    """While one open session does not wait for the engine, nobody's next token is sampled."""
    frees_memory: bool = False
    """`release_memory` frees device memory worth having while training runs. After `resume_memory` such an engine has
    no weights until the next `apply`."""
    overlaps_training: bool = False
    """It samples while the policy is trained, and takes weights while conversations run: those go on, and each token
    has the version that sampled it (`trainer.max_staleness`)."""
    takes_adapters: bool = False
    """It has the base weights of a policy with low-rank adapters: an update holds the adapters alone, by peft's names.
    Without this it holds merged weights."""


@dataclass(frozen=True)
class InPlace:
    """The engine shares the actor's module: nothing moves, caches are dropped."""

    version: int


@dataclass(frozen=True)
class TensorBuckets:
    """All of the model's tensors, by the names that they have in its checkpoint, in flattened buckets.

    An engine that had to be started anew reads `tensors` once more: they are to stay as they are until the next update,
    or until `hold_updates`.
    """

    version: int
    tensors: Iterable[tuple[str, torch.Tensor]]
    bucket_bytes: int = 512 * 1024 * 1024
    streamed: bool = False
    """Every pass over `tensors` gathers them from other processes: they are looked at once, on their way."""


class EngineHost(abc.ABC):
    """A place for an engine's process: beside ranks of the worker group, on their machine, or on other devices.

    What is made there is an object whose coroutines are called from here: its class must import on both sides, its
    arguments and results are pickled.
    """

    name: str
    """For messages: the ranks, or its number."""
    num_ranks: int
    """Devices of the engine (tensor parallelism)."""
    rank: int | None
    """The first rank that it stands beside. None = beside none."""
    on_gpu: bool
    devices: tuple[str, ...] | None
    """The GPUs of the ranks beside it, as their machine names them. None where they are on the CPU. None = its process
    sees its own devices and no others."""

    @abc.abstractmethod
    async def make(self, path: str, *args: Any) -> None:
        """Make the object: the class's dotted path, and its arguments. What was there before is ended.

        Raises:
            EngineGoneError: the machine is gone.
        """

    @abc.abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """What the object's coroutine returns. An error of verl_mt that it raises is raised here.

        Raises:
            EngineGoneError: there is no object any more, because its process or machine went away.
        """

    @abc.abstractmethod
    def caller(self) -> Callable[..., Any]:
        """`call(method, *args, timeout_s=...)` for a rank, which waits for it. It is pickled, and equal where it is to
        the same object.

        Raises:
            EngineGoneError: there is no object.
        """

    @abc.abstractmethod
    async def end(self) -> None:
        """End the object's process. Idempotent. Never raises."""


@dataclass(frozen=True)
class Receiver:
    """An engine as its publisher sees it. It is pickled, and equal where it is the same life of the engine."""

    call: Callable[..., None]
    """`call(name, body, timeout_s)`, which waits for the answer. A call of the engine's own kind."""
    num_ranks: int = 1
    """Devices of the engine. Each takes the weights."""
    on_gpu: bool = False
    rank: int | None = None
    """The first rank that it stands beside, on its machine. None = beside none, and it gets the weights from rank 0."""


class WeightPublisher(abc.ABC):
    """Publishes a policy's weights to engines, in the process that holds the weights. It is made with the engine's
    arguments and `address=`, where other machines reach this one."""

    @abc.abstractmethod
    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        bucket_bytes: int,
        receivers: Sequence[Receiver],
    ) -> list[VerlMTError | None]:
        """Send all tensors to all engines. Returns for each engine the error, or None.

        Args:
            tensors: (name in the checkpoint, whole tensor), each good until the next one.
            version: of the weights.
            bucket_bytes: sent at once.
            receivers: the engines.

        Raises:
            EngineError: a tensor that does not fit the model.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing that outlives them
        """Leave what was joined. Idempotent."""


class Giver(WeightPublisher):
    """The earlier name of `WeightPublisher`, whose method was called `give`."""

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        bucket_bytes: int,
        receivers: Sequence[Receiver],
    ) -> list[VerlMTError | None]:
        return self.give(tensors, version, bucket_bytes, receivers)

    @abc.abstractmethod
    def give(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        bucket_bytes: int,
        receivers: Sequence[Receiver],
    ) -> list[VerlMTError | None]:
        """As `publish`."""


class Publishers:
    """The publishers of one process, kept for later updates."""

    def __init__(self) -> None:
        self._made: dict[type[WeightPublisher], tuple[Any, WeightPublisher]] = {}

    def get(self, kind: type[WeightPublisher], arguments: tuple[Any, ...], address: str) -> WeightPublisher:
        """The one that is there, if it was made with the same. Otherwise a new one takes its place.

        Raises:
            EngineError: the class is no `WeightPublisher`.
        """
        if not (isinstance(kind, type) and issubclass(kind, WeightPublisher)):
            base = f"{WeightPublisher.__module__}.WeightPublisher"
            raise EngineError(f"{kind!r} is to publish weights to engines, but is no subclass of {base}")
        made_with, publisher = self._made.get(kind, (None, None))
        if publisher is None or made_with != (arguments, address):
            if publisher is not None:
                publisher.close()
            publisher = kind(*arguments, address=address)  # type: ignore[call-arg]
            self._made[kind] = (arguments, address), publisher
        return publisher

    def close(self) -> None:
        """All of them. Idempotent."""
        for _, publisher in self._made.values():
            publisher.close()


@dataclass(frozen=True)
class FromRanks:
    """Each engine gets the weights from the rank that it stands beside, on their machine. Those that stand beside none
    get them from rank 0, all at once.

    `publish(receivers, publisher, arguments)` is collective over the worker group. In the process of each receiver's
    rank a `WeightPublisher` (its class's dotted path) sends to that rank's own receivers. It returns the error of each
    receiver, or None, and so does `publish` for all of them.
    """

    version: int
    publish: Callable[[Sequence[Receiver], str, tuple[Any, ...]], Awaitable[list[VerlMTError | None]]]

    @property
    def hand_over(self) -> Callable[[Sequence[Receiver], str, tuple[Any, ...]], Awaitable[list[VerlMTError | None]]]:
        """The earlier name of `publish`."""
        return self.publish


@dataclass(frozen=True)
class Broadcast:
    """A collective over a process group (gloo, NCCL) that trainer and engine joined.

    For programs that drive an engine themselves: the trainer sends `InPlace`, `TensorBuckets` or `Disk`, and no shipped
    engine but the scripted one takes it (SGLang's broadcasts are how that engine passes `TensorBuckets` on).
    """

    version: int
    names: tuple[str, ...]
    group: str


@dataclass(frozen=True)
class Disk:
    """A Hugging Face folder that the engine reads."""

    version: int
    path: str


WeightUpdate = InPlace | TensorBuckets | FromRanks | Broadcast | Disk
PauseMode = Literal["abort", "in_place", "retract"]


def check_request(
    request: GenerationRequest,
    engine: str,
    *,
    max_model_len: int,
    vocab_size: int,
    takes_media: bool = False,
    finds_stops: bool = True,
) -> None:
    """Find what cannot be served, before it can do harm to others.

    Raises:
        EngineError: media, no input, too much input, ids that are not in the vocabulary, a stop string that is empty or
            that nobody could find.
    """
    name, size, stops = f"request {request.request_id!r}", len(request.input_ids), request.sampling.stop
    if request.media and not takes_media:
        raise EngineError(f"{name}: {engine} serves text only, got media {sorted(request.media)}")
    if not size:
        raise EngineError(f"{name}: input_ids is empty. There is nothing to continue")
    if size >= max_model_len:
        raise EngineError(f"{name}: {size} input tokens leave none to sample within max_model_len={max_model_len}")
    if min(request.input_ids) < 0 or max(request.input_ids) >= vocab_size:
        raise EngineError(f"{name}: input_ids are not all within the vocabulary of {vocab_size}")
    if not all(stops):
        raise EngineError(f"{name}: stop strings {stops}: one is empty")
    if stops and not finds_stops:
        raise EngineError(f"{name}: stop strings {stops}: an engine without `decode` cannot honour them")


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is made from when `actor_rollout_ref.rollout.name` names it."""

    config: ActorRolloutRefConfig
    """The model's path and dtype, and the keys under `rollout`. `engine_kwargs` are the engine's own."""
    policy_module: Any
    """The actor's module, for an engine with `samples_from_policy`. None for others, which load the model. With
    `overlaps` a copy of it, which is the engine's own and gets its weights by `TensorBuckets`."""
    end_token_ids: frozenset[int]
    """Ids that end an assistant turn. A request may bring further `stop_token_ids`."""
    decode: Decode | None
    """Ids -> text, for stop strings."""
    max_model_len: int | None
    """Longest sequence in tokens. None = what the model allows."""
    deterministic: bool
    """Same calls, same bits, whatever the timing."""
    seed: int
    """Of requests that bring none."""
    hosts: tuple[EngineHost, ...] = ()
    """For an engine that `lives_beside_ranks`: one place for each of its replicas. none = in or beside this process."""
    overlaps: bool = False
    """It is to sample while the policy is trained (`Capabilities.overlaps_training`)."""


@dataclass(frozen=True)
class Branch:
    """What a rollout worker makes, in its own process, to ask an engine of the trainer's for tokens. It is pickled."""

    path: str
    """Dotted path of the class, or of a function that makes it."""
    args: tuple[Any, ...] = ()
    """Its arguments. The worker's number follows them."""


class InferenceEngine(abc.ABC):
    """One inference engine. Methods are awaited on the rollout's event loop. It may work in threads or processes."""

    capabilities: Capabilities
    samples_from_policy: ClassVar[bool] = False
    """It samples from the actor's own module, in the trainer's process. Others load the model and are sent weights."""
    lives_beside_ranks: ClassVar[bool] = False
    """Where the worker group is spread over devices, so is this engine: it takes `EngineSetup.hosts`."""
    overlaps_training: ClassVar[bool] = False
    """It can sample while the policy is trained: without this `trainer.max_staleness` is refused before anything loads.
    Whether an engine as configured does, its capabilities say."""
    say: Callable[[Any], None] | None = None
    """In a branch, set by who made it: sends a word to the engine's `hear`, from the rollout's event loop."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions that it imports where it `lives_beside_ranks`: all machines must have one version of each."""

    @classmethod  # noqa: B027 - most engines have nothing to refuse
    def check_config(cls, config: ActorRolloutRefConfig, trainer: TrainerConfig) -> None:
        """Refuse what this engine cannot do, before anything is loaded.

        Raises:
            ConfigError: names the key, what was got and what to do.
        """

    @classmethod
    def rank_environment(cls, rollout: RolloutConfig) -> Mapping[str, str]:
        """Variables that ranks and engines on Ray start with, unless the user has set them: those that must be alike in
        an engine and in the ranks that send it weights."""
        return {}

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> InferenceEngine:
        """The engine that a configuration describes."""
        return cls(setup)  # type: ignore[call-arg]

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Version of the weights that the next token would come from."""

    async def start(self) -> None:  # noqa: B027 - engines that are ready when made have nothing to do
        """Wait until the engine can serve. Called before anything else. `generate` does it where nobody did.

        Runs on the caller's loop.

        Raises:
            ConfigError: it cannot start, or is not the engine that the configuration describes.
        """

    async def start_without_weights(self) -> bool:
        """`start`, for a caller who sends weights by `apply` before anything is sampled: the engine need not read the
        model's files. Returns whether it waits for them. Runs on the caller's loop."""
        await self.start()
        return False

    @abc.abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample one assistant turn. Runs on the caller's loop. Waits for the turn.

        Raises:
            EngineGoneError: the engine died or is closed.
            EngineError: the request cannot be served (too long for the model, an unknown option, ...).
        """

    @abc.abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request now. Its `generate` returns what was sampled, finish_reason `abort`. Unknown ids are fine."""

    @abc.abstractmethod
    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop sampling (running requests wait, or are aborted) until `resume`. Runs on the caller's loop. Waits until
        no token is being sampled."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Go on after `pause`."""

    @abc.abstractmethod
    async def apply(self, update: WeightUpdate) -> None:
        """Take new weights. Every token sampled afterwards carries `update.version`.

        Runs on the caller's loop. Waits until the engine has the weights.

        Raises:
            EngineError: this engine does not take that kind of update.
        """

    async def hold_updates(self) -> None:  # noqa: B027 - most engines read weights in `apply` alone
        """The policy is about to change: from when this returns until the next `apply` nothing reads the last
        update."""

    async def expect(self, update: WeightUpdate) -> None:  # noqa: B027
        """`apply(update)` comes as soon as the turns that run are over: what waits for weights may have these now."""

    async def release_memory(self) -> None:  # noqa: B027 - engines that hold nothing have nothing to do
        """Free what the engine holds on the device while training runs."""

    async def resume_memory(self) -> None:  # noqa: B027
        """Take it back before the next rollout."""

    def open_session(self, session_id: str, order: int) -> None:  # noqa: B027
        """A conversation begins. `order` ranks live sessions where an engine must be deterministic."""

    def close_session(self, session_id: str) -> None:  # noqa: B027
        """A conversation is over: its KV cache may go. Every `open_session` is followed by exactly one of these."""

    def metrics(self) -> dict[str, float]:
        """`engine/*`, for the metrics of a step."""
        return {}

    def branch(self) -> Branch | None:
        """For rollout workers (`rollout.num_workers`), each of which gets its own. None = the requests of their
        conversations come to this process."""
        return None

    def news(self) -> Any:
        """What branches have to know of what changes: pickled, compared, and sent to `hear` of each branch before it
        samples, and whenever it is another one."""
        return self.version

    def hear(self, news: Any) -> None:  # noqa: B027 - most have nothing to hear
        """In a branch: the engine's `news`. In the trainer's process: what a branch said by its `say`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the engine. Waiting requests raise `EngineGoneError`. Idempotent."""
