"""`Sample`: one trajectory as slime's generate and reward functions know it.

A generate function fills a Sample; what it says about tokens is then checked against the ledger and replaced by it, so
that a reward function, a dump and the trainer see the same numbers (docs/migrating_from_slime.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from verl_mt.data.ledger import TrajectoryRecord, listed
from verl_mt.data.trajectory import Status as _Status
from verl_mt.data.trajectory import Trajectory
from verl_mt.data.user_values import MAX_DEPTH, WrongValue, bits_of, bool_of, ids_of, numbers_of, plain_of, text_of
from verl_mt.errors import LedgerError, key_text, value_text


class _Counts:
    """Numbers that a Sample carries, as plain data and back; a key that is absent counts 0."""

    def to_dict(self) -> dict[str, int]:
        return vars(self).copy()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in data.items() if name in known})


@dataclass
class Speculation(_Counts):
    """Speculative decoding of a sample's turns, summed; all 0 where the engine does none."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add one reply's `meta_info`."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    @property
    def spec_accept_rate(self) -> float:
        """Share of the drafted tokens that were accepted; 0.0 without any."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens per verification; 0.0 without any."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCache(_Counts):
    """How many prompt tokens of a sample's turns needed no prefill, and of how many."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add one reply's `meta_info`."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """0.0 before the first turn."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass
class Sample:
    """One prompt and its result. Further attributes may be set. `to_dict` and `from_dict` keep them."""

    Status = _Status
    SpecInfo = Speculation
    PrefixCacheInfo = PrefixCache

    group_index: int | None = None
    """Number of the prompt in its batch. The samples of one prompt share it."""
    index: int | None = None
    """Number of the sample in its batch."""
    prompt: str | list[dict[str, Any]] = ""
    """The rendered prompt. With `data.apply_chat_template=False` the data set's column as it is."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response. After the generate function exactly what the engine saw and sampled."""
    response: str = ""
    response_length: int = 0
    """Tokens after the prompt, observations included."""
    label: Any = None
    """The data set's label column (`data.label_key`), else the ground truth."""
    reward: float | dict[str, Any] | None = None
    """Set by a generate function that scores its own samples. The reward function is not asked then."""
    loss_mask: list[int] | None = None
    """Of the response: 1 = trained. None = every token that the engine sampled."""
    rollout_log_probs: list[float] | None = None
    """Of the response: the engine's where it sampled, 0.0 elsewhere."""
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    """The data set's metadata column. `metadata["role"]` names an agent: its samples are compared with their like."""
    weight_versions: list[str] = field(default_factory=list)
    """Versions of the weights that sampled it, in order, each once."""
    remove_sample: bool = False
    """True takes it out of training."""
    session_id: str | None = None
    """The trajectory's id."""
    rollout_id: int | None = None
    """The execution that it came from: Samples of a batch that share it weigh in the loss as one. None = its own. After
    the generate function it is the sample's `index` then."""
    train_metadata: dict[str, Any] | None = None
    """Kept with the sample, not read by training."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    generate_function_path: str | None = None
    """Kept with the sample. The run has one generate function."""
    non_generation_time: float = 0.0
    """Seconds that the function spent outside of the engine, as it says itself."""
    spec_info: Speculation = field(default_factory=Speculation)
    prefix_cache_info: PrefixCache = field(default_factory=PrefixCache)
    teacher_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    turn_texts: list[str] = field(default_factory=list)
    """What the model itself wrote, turn by turn: no observation is in it. Filled from the ledger."""

    @property
    def effective_response_length(self) -> int:
        """Tokens in the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def model_text(self) -> str:
        """What the model wrote, its turns joined by a newline: the part of the response that may be scored."""
        return "\n".join(self.turn_texts) if self.turn_texts else self.response

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry `args.reward_key` where that is set."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Put tokens behind the response, and keep `tokens`, `loss_mask`, `rollout_log_probs` and lengths in step.

        The three lists grow in place: a function may hold one of them under a name of its own.

        Args:
            args: of the generate function. Not needed.
            tokens: ids. `sample.tokens` must hold the prompt's before the first call.
            log_probs: the engine's, one per token, for tokens that it sampled. None (or zeros) for others.
            trainable: True = sampled, in the loss. False = text of a tool or an environment.
            meta_info: of the engine's reply. Sets status and counts.
            text: appended to `response`.
            update_terminal_info: False leaves status and counts as they are.

        Raises:
            ValueError: sampled tokens without log-probs, others with them, or as many as there are not tokens.
        """
        ids = ids_of(tokens if tokens is not None else [], "tokens")
        known = None if log_probs is None else numbers_of(log_probs, "log_probs")
        if known is not None and len(known) != len(ids):
            raise ValueError(f"append_response_tokens: {len(known)} log_probs for {len(ids)} tokens")
        if ids and trainable and known is None:
            raise ValueError(
                "append_response_tokens: sampled tokens need log_probs. Take both from meta_info.output_token_logprobs "
                "(return_logprob: True), or say trainable=False"
            )
        if ids and not trainable and any(known or ()):
            raise ValueError("append_response_tokens: tokens that are not trainable have no log_probs. Leave them out")
        if ids:
            if self.loss_mask is None:
                self.loss_mask = [1] * self.response_length
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * self.response_length
            self.response_length += len(ids)
            self._grow("tokens", ids)
            self._grow("loss_mask", [int(trainable)] * len(ids))
            self._grow("rollout_log_probs", known if known is not None else [0.0] * len(ids))
        if text is not None:
            self.response += text
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def _grow(self, name: str, items: list[Any]) -> None:
        column = getattr(self, name)
        if not isinstance(column, list):  # an array or a tuple that a function has set
            column = list(column)
            setattr(self, name, column)
        column += items

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Status, weight version and cache counts of one reply of the engine."""
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        kinds = {"length": _Status.TRUNCATED, "abort": _Status.ABORTED, "stop": _Status.COMPLETED}
        reason = (meta_info.get("finish_reason") or {}).get("type")
        self.status = kinds.get(str(reason), self.status)

    def check_types(self) -> None:
        """Verify what a generate function set. Arrays become lists, and a status may be its value.

        Raises:
            LedgerError: names the field, what was expected and what was got.
        """
        try:
            self.tokens = ids_of(self.tokens, "sample.tokens")
            (self.response_length,) = ids_of([self.response_length], "sample.response_length")
            text_of(self.response, "sample.response")
            if self.loss_mask is not None:
                self.loss_mask = bits_of(self.loss_mask, "sample.loss_mask")
            if self.rollout_log_probs is not None:
                self.rollout_log_probs = numbers_of(self.rollout_log_probs, "sample.rollout_log_probs")
            self.remove_sample = bool_of(self.remove_sample, "sample.remove_sample")
            self._check_metadata()
        except WrongValue as error:
            raise LedgerError(str(error)) from None
        self.status = _status(self.status)

    def _check_metadata(self) -> None:
        if not isinstance(self.metadata, dict):
            raise WrongValue(f"sample.metadata must be a dict, got {value_text(self.metadata, 100)}")
        plain_of(self.metadata, "sample.metadata")
        if self.metadata.get("role") is not None:
            text_of(self.metadata["role"], "sample.metadata['role']")

    def check_lengths(self) -> None:
        """Verify that the columns fit each other.

        Raises:
            LedgerError: names both numbers.
        """
        n = self.response_length
        if not 0 <= n <= len(self.tokens):
            raise LedgerError(f"response_length is {n}, but sample.tokens has {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise LedgerError(
                    f"sample.{name} has {len(column)} entries, but response_length is {n}. One entry per response token"
                )

    def to_dict(self) -> dict[str, Any]:
        """Every field and every further attribute. The status by its value."""
        counts = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {**vars(self), "status": plain(self.status), **counts}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Back from `to_dict`. Keys that are no fields become attributes.

        Raises:
            LedgerError: a status that does not exist.
        """
        names = {f.name for f in fields(cls)}
        data = {**data}
        for name, kind in (("spec_info", Speculation), ("prefix_cache_info", PrefixCache)):
            if isinstance(data.get(name), Mapping):
                data[name] = kind.from_dict(data[name])
        sample = cls(**{k: v for k, v in data.items() if k in names})
        sample.status = _status(sample.status)
        for name, value in data.items():
            if name not in names:
                setattr(sample, name, value)
        return sample


def _status(value: Any) -> _Status:
    known = [status.value for status in _Status]
    if not isinstance(value, str) or value not in known:
        raise LedgerError(f"sample.status is {value_text(value, 100)}, expected one of {', '.join(known)}")
    return _Status(value)


def fill_from_record(sample: Sample, record: TrajectoryRecord) -> None:
    """Set what the ledger knows better: tokens, lengths, mask, log-probs and weight versions."""
    start = record.num_prompt_tokens
    versions = [str(v) for v in record.policy_versions if v >= 0]
    sample.tokens = listed(record.token_ids)
    sample.response_length = len(record.token_ids) - start
    sample.loss_mask = listed(record.loss_mask[start:])
    sample.rollout_log_probs = listed(record.rollout_log_probs[start:]) if record.has_log_probs else None
    sample.weight_versions = list(dict.fromkeys(versions))


def samples_of(
    trajectory: Trajectory,
    decode: Callable[[Sequence[int]], str],
    *,
    label: Any = None,
    metadata: dict[str, Any] | None = None,
) -> list[Sample]:
    """A trajectory as Samples, one per record; the one that a generate function returned where there is one.

    Args:
        decode: ids -> text, control tokens kept.
        label, metadata: for Samples that are made here.
    """
    if trajectory.sample is not None:
        return [trajectory.sample]
    return [replace(s, label=label, metadata=dict(metadata or {})) for s in _from_records(trajectory, decode)]


def _from_records(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> Iterator[Sample]:
    for record in trajectory.records:
        start = record.num_prompt_tokens
        sample = Sample(
            prompt=decode(listed(record.token_ids[:start])),
            response=decode(listed(record.token_ids[start:])),
            reward=trajectory.reward,
            status=trajectory.status,
            session_id=trajectory.trajectory_id,
            turn_texts=list(trajectory.turn_texts),
        )
        fill_from_record(sample, record)
        yield sample


class Dumped(OrderedDict[str, Any]):
    """A mapping that `torch.load` gives back with attributes too, in a process that never heard of verl_mt.

    It is pickled as a plain `OrderedDict` whose `__dict__` holds the same values: the one shape with attributes that
    `torch.load` builds without being told to trust the file (`weights_only=True`, its default).
    """

    def __init__(self, data: dict[str, Any]):
        super().__init__({str(k): plain(v) for k, v in data.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> Any:
        return OrderedDict, (), dict(self), None, iter(self.items())


def plain(value: Any, levels: int = 2 * MAX_DEPTH) -> Any:
    """What `torch.load` reads without trusting the file: plain data and tensors; other objects by their text, and so
    lists and dicts more than `levels` deep."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, _Status):
        return value.value
    if isinstance(value, dict | list | tuple | set | frozenset) and not levels:
        return "(nested too deeply to be written)"
    if isinstance(value, dict):
        keys = [plain(k) if isinstance(k, int | float | str) else key_text(k) for k in value]
        return {key: plain(inner, levels - 1) for key, inner in zip(keys, value.values())}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, levels - 1) for v in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__.startswith("torch") and hasattr(value, "detach"):
        return value.detach().cpu()
    return plain(value.tolist(), levels) if hasattr(value, "tolist") else value_text(value, 10_000)


def check_unsupported(sample: Sample) -> None:
    """Refuse what training would not use.

    Raises:
        LedgerError: names the field.
    """
    unused = (
        "multimodal_inputs", "multimodal_train_inputs", "teacher_log_probs", "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets", "rollout_routed_experts",
    )  # fmt: skip
    for name in unused:
        value = getattr(sample, name)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise LedgerError(f"sample.{name} is set, but training does not use it. Leave it None")
