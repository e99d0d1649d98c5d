"""`python -m verl_mt.prompt_log RUN`: check that a run trained each drawn prompt once.

Compares the prompt log (`prompt_log.jsonl`) with files that were written independently of it: the rollout rows of every
step, and the newest checkpoint. The last line is `N drawn, N trained, N left out, N open, 0 missing, 0 double`; open
are prompts of a step that was not finished when the run ended or was ended.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_mt.data.drawn_prompts import FILE, DrawnPrompt, PromptHistory, read_prompt_log
from verl_mt.data.row_files import read_rows, row_files
from verl_mt.errors import VerlMTError

_SHOWN = 10
_WITH_ROWS = "algorithm.filter_overlong"
"""Why a prompt is left out of the loss whose rows have advantages all the same."""


@dataclass
class Examination:
    """How a prompt log and the files beside it agree."""

    history: PromptHistory
    missing: list[str] = field(default_factory=list)
    """Prompts that one of them knows, and another one should know too."""
    double: list[str] = field(default_factory=list)
    """Prompts that came to an end more than once."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    @property
    def holds(self) -> bool:
        return not (self.missing or self.double)

    def summary(self) -> str:
        """The last line."""
        prompts, before = self.history.prompts.values(), self.history.before
        trained = before["trained"] + sum(bool(p.trained_in) for p in prompts)
        left_out = before["left_out"] + sum(bool(p.left_out) and not p.trained_in for p in prompts)
        return (
            f"{before['drawn'] + len(prompts)} drawn, {trained} trained, {left_out} left out, "
            f"{sum(p.open for p in prompts)} open, {len(self.missing)} missing, {len(self.double)} double"
        )


def examine(run: str | Path) -> Examination:
    """Compare a run's prompt log with its rollout rows and its newest checkpoint.

    Raises:
        DataError: there is no log, or a line of it, or of the rows, is damaged; names file and line.
        CheckpointError: the newest checkpoint is none.
    """
    run = Path(run)
    # Before the log, which a run that goes on has brought further by then.
    saved = _newest_checkpoint(run)
    found = Examination(read_prompt_log(run))
    found.missing += found.history.unknown
    prompts = found.history.prompts
    first = found.history.first_number
    found.missing += [f"prompt {n} was never drawn" for n in range(first, max(prompts, default=-1)) if n not in prompts]
    for prompt in prompts.values():
        ends = [f"trained in step {step}" for step in prompt.trained_in]
        ends += [f"left out ({why})" for why in prompt.left_out]
        if len(ends) > 1:
            found.double.append(f"prompt {prompt.number} was {' and '.join(ends)}")
    _compare_rows(run, found, saved_step=0 if saved is None else saved["step"])
    if saved is not None:
        _compare_checkpoint(found, saved)
    return found


def _newest_checkpoint(run: Path) -> dict[str, Any] | None:
    """Step and position of it; of its tensors nothing is read."""
    from verl_mt.trainer.checkpoint import CheckpointStore, read_state  # torch takes seconds

    newest = CheckpointStore(run / "checkpoints").latest()
    return None if newest is None else read_state(newest, mmap=True)


def _compare_checkpoint(found: Examination, saved: dict[str, Any]) -> None:
    """What was over at its step, by the log and by the checkpoint."""
    if "prompts" not in saved:
        found.notes.append("the newest checkpoint is of an older version, which kept no prompt log")
        return
    step, told, history, before = saved["step"], saved["prompts"], found.history, found.history.before
    early = [n for n in history.prompts if n < told["drawn"]]
    trained = sum(any(s <= step for s in p.trained_in) for p in history.prompts.values())
    for word, by_log in (("drawn", before["drawn"] + len(early)), ("trained", before["trained"] + trained)):
        if by_log != told[word]:
            says = f"{by_log} prompts were {word} by the log, {told[word]} by its checkpoint"
            found.missing.append(f"up to step {step} {says}")
    in_flight = {prompt["number"] for prompt in told.get("open", ())}
    found.missing += [
        f"prompt {n} is open, though the checkpoint of step {step} was written behind it"
        for n in early
        if history.prompts[n].open and n not in in_flight
    ]


def _compare_rows(run: Path, found: Examination, *, saved_step: int) -> None:
    """Who was trained in which step, by the log and by the rows."""
    by_step: dict[int, dict[str, DrawnPrompt]] = defaultdict(dict)
    known: dict[str, DrawnPrompt] = {}
    for prompt in found.history.prompts.values():
        if prompt.prompt_id is not None:
            known[prompt.prompt_id] = prompt
            for step in prompt.trained_in:
                by_step[step][prompt.prompt_id] = prompt
    first, last = found.history.first_step, max(by_step, default=0)
    files = {f.step: f for f in row_files(run) if f.split == "train"}
    seen: Counter[str] = Counter()
    unseen: list[int] = []
    for step in sorted({*by_step, *(s for s in files if first < s <= last)}):
        if step in found.history.without_rows:
            unseen.append(step)
            continue
        if step not in files:
            if step <= saved_step:
                found.missing.append(f"step {step} has trained {len(by_step[step])} prompts, and has no rollout rows")
            else:
                found.notes.append(f"step {step} has no rollout rows: it ended after the newest checkpoint")
            continue
        trained = dict(_trained_in(files[step].path))
        seen.update(trained.keys())
        found.missing += list(_differences(step, trained, by_step[step], known))
    if unseen:
        found.notes.append(f"{len(unseen)} steps have no rollout rows to compare with (trainer.rollout_rows=off)")
    twice = [name for name, count in seen.items() if count > 1]
    found.double += [f"{name} was trained in {seen[name]} steps, by the rollout rows" for name in twice]


def _trained_in(path: Path) -> Iterator[tuple[str, tuple[str, int]]]:
    """Prompt id and row of the data of every trajectory that an update has seen."""
    for row in read_rows(path):
        if any(record["advantages"] is not None for record in row["records"]):
            yield row["prompt_id"], (row["source"], row["row_index"])


def _differences(
    step: int, rows: dict[str, tuple[str, int]], log: dict[str, DrawnPrompt], known: dict[str, DrawnPrompt]
) -> Iterator[str]:
    for name, prompt in log.items():
        if name not in rows:
            yield f"prompt {prompt.number} ({name}) was trained in step {step} by the log, not by the rollout rows"
    for name, row in rows.items():
        if name not in known:
            yield f"{name} was trained in step {step} by the rollout rows, and the log does not know it"
        elif not known[name].trained_in and set(known[name].left_out) != {_WITH_ROWS}:
            told = known[name].left_out or "open"
            yield f"{name} was trained in step {step} by the rollout rows, and not by the log, which says: {told}"
        elif (known[name].source, known[name].row_index) != row:
            yield f"{name} is row {row} by the rollout rows, {(known[name].source, known[name].row_index)} by the log"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 where log, rows and checkpoint agree, 1 where not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.prompt_log", description=__doc__.split("\n")[0])
    parser.add_argument("run", metavar="RUN", help=f"a run directory, with its {FILE}")
    args = parser.parse_args(argv)
    try:
        found = examine(Path(args.run).expanduser())
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    prompts = found.history.prompts.values()
    for why, count in Counter(p.left_out[0] for p in prompts if p.left_out).most_common():
        print(f"left out {count}: {why}")
    if again := sum((p.attempts or 1) > 1 for p in prompts):
        print(f"{again} prompts had conversations that were begun again, because their engine was lost")
    if again := sum(p.starts > 1 for p in prompts):
        print(
            f"{again} prompts were in flight when the run ended or their weights were abandoned, and were started again"
        )
    for title, lines in (("note", found.notes), ("missing", found.missing), ("double", found.double)):
        for line in lines[:_SHOWN]:
            print(f"{title}: {line}")
        if len(lines) > _SHOWN:
            print(f"{title}: and {len(lines) - _SHOWN} more")
    print(found.summary())
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
