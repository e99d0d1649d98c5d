"""`Sample`: one trajectory as slime's generate and reward functions know it.

A generate function fills a Sample; what it says about tokens is then checked against the ledger and replaced by it, so
that a reward function, a dump and the trainer see the same numbers (docs/migrating_from_slime.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.trajectory import Status as _Status
from verl_mt.data.trajectory import Trajectory
from verl_mt.data.user_values import MAX_DEPTH, WrongValue, bits_of, bool_of, ids_of, numbers_of, plain_of, text_of
from verl_mt.errors import LedgerError, key_text, value_text


@dataclass
class Sample:
    """One prompt and what came of it. Further attributes may be set; `to_dict` and `from_dict` keep them."""

    Status = _Status

    group_index: int | None = None
    """Number of the prompt in its batch; the samples of one prompt share it."""
    index: int | None = None
    """Number of the sample in its batch."""
    prompt: str | list[dict[str, Any]] = ""
    """The rendered prompt; with `data.apply_chat_template=False` the data set's column as it is."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response; after the generate function exactly what the engine saw and sampled."""
    response: str = ""
    response_length: int = 0
    """Tokens after the prompt, observations included."""
    label: Any = None
    """The data set's label column (`data.label_key`), else the ground truth."""
    reward: float | dict[str, Any] | None = None
    """Set by a generate function that scores its own samples; the reward function is not asked then."""
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
    """The rollout step, from 0."""
    train_metadata: dict[str, Any] | None = None
    """Kept with the sample, not read by training."""
    multimodal_inputs: dict[str, Any] | None = None
    teacher_log_probs: list[float] | None = None
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

    def check_types(self) -> None:
        """Verify what a generate function set; arrays become lists, and a status may be given by its value.

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
                    f"sample.{name} has {len(column)} entries, but response_length is {n}; one entry per response token"
                )

    def to_dict(self) -> dict[str, Any]:
        """Every field and every further attribute; the status by its value."""
        return {**vars(self), "status": plain(self.status)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Back from `to_dict`; keys that are no fields become attributes.

        Raises:
            LedgerError: a status that does not exist.
        """
        names = {f.name for f in fields(cls)}
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
    sample.tokens = list(record.token_ids)
    sample.response_length = len(record.token_ids) - start
    sample.loss_mask = list(record.loss_mask[start:])
    sample.rollout_log_probs = list(record.rollout_log_probs[start:]) if record.has_log_probs else None
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
            prompt=decode(record.token_ids[:start]),
            response=decode(record.token_ids[start:]),
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
    for name in ("multimodal_inputs", "teacher_log_probs"):
        if getattr(sample, name) is not None:
            raise LedgerError(f"sample.{name} is set, but training does not use it; leave it None")
