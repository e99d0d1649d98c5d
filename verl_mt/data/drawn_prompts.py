"""The life of every drawn prompt: `prompt_log.jsonl` of a run directory, written and read.

Each prompt that a run draws has a number, counted from 0 over the whole run, and ends in one of two ways: it is trained
in a step, or it is left out for a reason. The file only grows; a line is an event:

    {"event": "begun", "step": 40, "drawn": 640, "trained": 633, "left_out": 7, "open": [], "rows": true}
                                                                                            a process goes on
    {"event": "drawn", "prompts": [[640, "gsm8k", 17, "s000041.00000"], ...]}       number, entry of the data, row, id
    {"event": "started", "numbers": [640, ...]}
    {"event": "finished", "number": 640, "attempts": 1, "trajectories": 8, "tokens": 912}
    {"event": "trained", "step": 41, "numbers": [640, ...]}
    {"event": "left_out", "step": 41, "why": "no signal", "numbers": [655]}

A process that goes on from a checkpoint says so first (`begun`). What the file says of the time after that checkpoint
is void then: prompts that were drawn later are drawn again, with the same numbers, and those that were `open` at its
step (in flight, `trainer.max_staleness`) are open again. No line has a time; the order in which prompts of a step are
`finished` is the clock's all the same.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from verl_mt.data.dataset import DataRow
from verl_mt.data.run_files import json_text, writing
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.errors import DataError, error_text
from verl_mt.reading import parse_json, read_bytes, require_file

FILE = "prompt_log.jsonl"


@dataclass(frozen=True)
class OpenPrompt:
    """One that was drawn and has not come to its end."""

    number: int
    prompt_id: str
    row: DataRow

    @property
    def logged(self) -> list[Any]:
        """As the events name it: number, entry of the data, row, id."""
        return [self.number, self.row.source, self.row.index, self.prompt_id]

    @property
    def plan(self) -> str:
        return self.prompt_id.rpartition(".")[0]

    @property
    def position(self) -> int:
        """In its plan."""
        return int(self.prompt_id.rpartition(".")[2])

    @cached_property
    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint.

        Raises:
            DataError: the row cannot be written.
        """
        from verl_mt.data.plain_objects import (
            to_plain,
        )  # torch takes seconds, which `prompt_log --help` need not wait for

        try:
            row = to_plain(self.row)
        except (DataError, RecursionError) as error:
            raise DataError(
                f"{self.row.place} is in flight at the end of a step and cannot be kept in a checkpoint: "
                f"{error_text(error)}. Make the row plain data, or remove trainer.max_staleness and data.over_sample"
            ) from error
        return {"number": self.number, "prompt_id": self.prompt_id, "row": row}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> OpenPrompt:
        """Back from `state`."""
        from verl_mt.data.plain_objects import from_plain

        return cls(state["number"], state["prompt_id"], from_plain(state["row"]))


class PromptLog:
    """Writes the log of a run. Nothing is written before the first prompt is drawn.

    Args:
        folder: the run directory.
        step: after which the run goes on.
        state: what `state_dict` said then; None = a new run, or one that an older version began.
        rows: whether this process writes rollout rows, which the log can be compared with.
    """

    def __init__(self, folder: Path, *, step: int = 0, state: Mapping[str, Any] | None = None, rows: bool = True):
        self._path = folder / FILE
        self._counts = Counter(_counts(state or {}))
        known = map(OpenPrompt.of, (state or {}).get("open", ()))
        self._open: dict[str, OpenPrompt] = {found.prompt_id: found for found in known}
        opened = [found.logged for found in self._open.values()]
        self._begun = {"event": "begun", "step": step, **self._counts, "open": opened, "rows": rows}
        self._file: BinaryIO | None = None

    @classmethod
    def after(cls, checkpoint: Mapping[str, Any] | None, folder: Path, *, rows: bool) -> PromptLog:
        """Of a run that goes on from a checkpoint's state; None = it begins."""
        found = checkpoint or {}
        return cls(folder, step=found.get("step", 0), state=found.get("prompts"), rows=rows)

    def drawn(self, plan: str, rows: Sequence[DataRow], left_out: Sequence[tuple[DataRow, str]] = ()) -> None:
        """The prompts of a plan, in its order; and the rows that were drawn with them and gave none, each with why."""
        first, named = self._counts["drawn"], [f"{plan}.{place:05d}" for place in range(len(rows))]
        everything = [*zip(rows, named), *((row, None) for row, _ in left_out)]
        prompts = [[first + k, row.source, row.index, name] for k, (row, name) in enumerate(everything)]
        self._open |= {name: OpenPrompt(first + k, name, row) for k, (name, row) in enumerate(zip(named, rows))}
        self._counts["drawn"] += len(prompts)
        self._append({"event": "drawn", "prompts": prompts})
        self._leave_out({first + len(rows) + k: why for k, (_, why) in enumerate(left_out)})
        self._sync()

    def started(self, plan: str, but: Collection[str] = ()) -> None:
        """The conversations of a plan's prompts, for the first time or again; `but` are prompts that were finished
        before and kept."""
        numbers = [found.number for found in self._open.values() if found.plan == plan and found.prompt_id not in but]
        if numbers:
            self._append({"event": "started", "numbers": numbers})

    def finished(self, group: TrajectoryGroup) -> None:
        """All conversations of a prompt are over and scored."""
        if (known := self._open.get(group.prompt_id)) is None:
            return
        of = group.trajectories
        found = {
            "attempts": 1 + int(max((t.counters.get("retries", 0) for t in of), default=0)),
            "trajectories": len(of),
            "tokens": sum(t.num_sampled_tokens for t in of),
        }
        self._append({"event": "finished", "number": known.number, **found})

    def ended(self, step: int, left_out: Mapping[str, str | None]) -> None:
        """A step is over: record the outcome of its prompts.

        Args:
            step: its number.
            left_out: prompt id -> why it was not trained; None where it was.
        """
        known = {self._open.pop(name).number: why for name, why in left_out.items() if name in self._open}
        trained = sorted(number for number, why in known.items() if why is None)
        if trained:
            self._counts["trained"] += len(trained)
            self._append({"event": "trained", "step": step, "numbers": trained})
        self._leave_out({number: why for number, why in known.items() if why is not None}, step=step)
        self._sync()

    @property
    def open(self) -> list[OpenPrompt]:
        """In flight, in the order in which they were drawn."""
        return list(self._open.values())

    def state_dict(self) -> dict[str, Any]:
        """How many were drawn, trained and left out, and those that are in flight: none at the end of a synchronous
        step.

        Raises:
            DataError: the row of one cannot be written.
        """
        return {**self._counts, "open": [known.state for known in self._open.values()]}

    def close(self) -> None:
        """Idempotent. What a full disk did not take was refused when it was written."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _leave_out(self, why_of: Mapping[int, str], **step: int) -> None:
        for why in sorted(set(why_of.values())):
            numbers = sorted(number for number in why_of if why_of[number] == why)
            self._counts["left_out"] += len(numbers)
            self._append({"event": "left_out", **step, "why": why, "numbers": numbers})

    def _append(self, event: dict[str, Any]) -> None:
        """Handed to the system when this returns: whatever kills the process, the line stays."""
        with writing(self._path):
            if self._file is None:
                require_file(self._path, or_device=True)
                self._file = self._path.open("ab")
                # Whatever stands there, a line that a killed process has torn perhaps: this is a line of its own.
                self._file.write(b"\n" * (self._file.tell() > 0) + json_text(self._begun) + b"\n")
            self._file.write(json_text(event) + b"\n")
            self._file.flush()

    def _sync(self) -> None:
        """On the disk, so that the lines outlive the machine's power too."""
        if self._file is not None:
            with writing(self._path):
                os.fsync(self._file.fileno())


def _counts(state: Mapping[str, Any]) -> dict[str, int]:
    return {name: state.get(name, 0) for name in ("drawn", "trained", "left_out")}


@dataclass
class DrawnPrompt:
    """One prompt's life, as far as the log tells."""

    number: int
    source: str
    row_index: int
    prompt_id: str | None
    """None of a row that gave no prompt."""
    starts: int = 0
    """How often its conversations were begun by a step: again by a run that goes on, or where their weights were
    abandoned."""
    attempts: int | None = None
    """How often one of them was begun since, the most of any: its engine was lost. None = they are not over."""
    trained_in: list[int] = field(default_factory=list)
    """Steps. More than one, or one and `left_out`, is an error of the program that wrote the log."""
    left_out: list[str] = field(default_factory=list)
    """Why; likewise."""

    @property
    def open(self) -> bool:
        return not self.trained_in and not self.left_out


@dataclass
class PromptHistory:
    """What a log says once what is void is gone."""

    prompts: dict[int, DrawnPrompt] = field(default_factory=dict)
    """Number -> prompt, of those that were drawn in this directory."""
    before: dict[str, int] = field(default_factory=lambda: _counts({}))
    """What was drawn, trained and left out in another directory, in which the run was begun."""
    first_step: int = 0
    """The step after which this directory's log begins."""
    first_number: int = 0
    """Of the first prompt that was drawn behind it; those that were in flight then have smaller ones."""
    begun_at: int = 0
    """The step after which the last process began."""
    without_rows: set[int] = field(default_factory=set)
    """Steps whose process wrote no rollout rows."""
    _rows: bool = True
    _void: dict[int, int] = field(default_factory=dict)
    """Number -> how often a prompt was started that will be drawn again."""
    unknown: list[str] = field(default_factory=list)
    """Events of prompts that nobody has drawn."""

    def take(self, event: dict[str, Any]) -> None:
        """One more line of the log.

        Raises:
            KeyError, TypeError, ValueError: not an event.
        """
        kind = event["event"]
        if kind == "begun":
            self._begin(event)
        elif kind == "drawn":
            self._draw(event["prompts"])
        elif kind in ("started", "finished", "trained", "left_out"):
            numbers = [event["number"]] if kind == "finished" else event["numbers"]
            for number in numbers:
                if number not in self.prompts:
                    self.unknown.append(f"prompt {number} is {kind}, and nobody has drawn it")
                else:
                    _tell(self.prompts[number], kind, event)
            if kind == "trained":
                (self.without_rows.discard if self._rows else self.without_rows.add)(event["step"])
        else:
            raise ValueError(f"unknown event {kind!r}")

    def _begin(self, event: dict[str, Any]) -> None:
        self.begun_at, self._rows, counts = event["step"], event["rows"], _counts(event)
        opened = event.get("open", [])
        again = {number for number in self.prompts if number >= counts["drawn"]} | {number for number, *_ in opened}
        self._void |= {number: self.prompts.pop(number).starts for number in again & self.prompts.keys()}
        if not self.prompts:
            self.before, self.first_step = counts | {"drawn": counts["drawn"] - len(opened)}, self.begun_at
            self.first_number = counts["drawn"]
        self._draw(opened)

    def _draw(self, prompts: Iterable[Sequence[Any]]) -> None:
        for number, source, row_index, prompt_id in prompts:
            if number in self.prompts:
                self.unknown.append(f"prompt {number} is drawn twice")
            self.prompts[number] = DrawnPrompt(number, source, row_index, prompt_id, self._void.pop(number, 0))


def _tell(prompt: DrawnPrompt, kind: str, event: dict[str, Any]) -> None:
    if kind == "started":
        prompt.starts += 1
    elif kind == "finished":
        prompt.attempts = event["attempts"]
    elif kind == "trained":
        prompt.trained_in.append(event["step"])
    else:
        prompt.left_out.append(event["why"])


def read_prompt_log(run: str | Path) -> PromptHistory:
    """What the log of a run directory says. Lines that a killed process has torn are left out: whatever they said is
    void, or open.

    Raises:
        DataError: there is no log, or a line is none of it; names file and line.
    """
    path = Path(run) / FILE
    if not path.exists():
        raise DataError(f"{path} cannot be read: no directory of a run that has drawn prompts")
    lines = read_bytes(path).split(b"\n")
    history = PromptHistory()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            history.take(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if _is_torn(lines[number:]):
                continue
            raise DataError(f"{path}, line {number}: {line[:80]!r} is no event of a prompt log: {error!r}") from error
    history.prompts = dict(sorted(history.prompts.items()))  # those that were open again stand behind the others
    return history


def _is_torn(after: Iterable[bytes]) -> bool:
    """Whether a line may have been cut off by a kill: it is the last, or the next process begins behind it."""
    following = next((line for line in after if line.strip()), None)
    return following is None or following.startswith(b'{"event": "begun"')
