"""A run directory as it is: complete, broken off, being written, or of another version. What is missing is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_mt.data.row_files import PARQUET, RowFile, row_files
from verl_mt.data.row_files import read_rows as read_rollout_rows
from verl_mt.data.run_files import READABLE_VERSIONS, SCHEMA_VERSION, read_token_texts
from verl_mt.errors import DataError
from verl_mt.reading import parse_json, read_bytes, read_yaml

_SECTIONS = ("actor_rollout_ref", "actor_rollout_ref.model", "trainer")
"""Of `config.yaml`, which the page reads."""
_TRACES = ("config.yaml", "metrics.jsonl", "rollouts")


@dataclass
class Run:
    """What a run directory holds, rollout rows aside."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One dict per step, in order; lines of one step (of `timings.jsonl` too) are one dict."""
    token_texts: dict[int, str] = field(default_factory=dict)
    finished: bool = False
    problems: list[str] = field(default_factory=list)
    """What is missing or could not be read, a sentence each."""


def is_run(folder: Path) -> bool:
    """Whether a run was written there, or begun."""
    return any((folder / name).exists() for name in _TRACES)


def open_run(path: str | Path) -> Run:
    """Read everything but the rollout rows.

    Raises:
        DataError: `path` is no run directory.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() or not is_run(folder):
        what = (
            "is not a directory"
            if not folder.is_dir()
            else f"holds none of {', '.join(_TRACES)}, and no run lies in it"
        )
        raise DataError(
            f"{folder}: not a run directory (it {what}). Name one that `python -m verl_mt.trainer` wrote, "
            "such as runs/tiny"
        )
    run = read_curves(folder)
    run.token_texts = _token_texts(run)
    if not run.finished:
        run.problems.append("The run is not over: it is being written, or was broken off.")
    if not row_files(folder):
        off = section(run.config, "trainer").get("rollout_rows") in (False, "off")
        why = "trainer.rollout_rows=off" if off else "no step is finished, or they were removed"
        run.problems.append(f"There are no rollout rows ({why}): no table, no conversations, no timeline.")
    return run


def read_curves(folder: Path) -> Run:
    """Read only the settings and the metrics."""
    run = Run(folder, folder.resolve().name, finished=(folder / "FINISHED").exists())
    run.config = _config(folder, run.problems)
    run.metrics = _metrics(folder, run.problems)
    return run


def leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty mapping is a value."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{below}", leaf) for below, leaf in leaves(value))
        else:
            yield str(key), value


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A section of a config that may be of any shape; empty where it is missing or holds no keys."""
    found: Any = config
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a JSON Lines file, and a sentence about every line that is none."""
    rows, problems = [], []
    try:
        lines = read_bytes(path).split(b"\n")
    except DataError as error:
        return [], [f"{error}. It is left out."]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
        except ValueError:
            if number == len(lines):
                problems.append(f"{path.name}: its last line is cut off and left out ({len(rows)} before it are read).")
            else:
                problems.append(f"{path.name}, line {number}: not a JSON object, left out.")
    return rows, problems


def read_rollouts(file: RowFile) -> tuple[list[dict[str, Any]], list[str]]:
    """Rollout rows of any format and version, and what is unusual about them."""
    if file.format == PARQUET:
        rows, problems = _read_columns(file)
    else:
        rows, problems = read_rows(file.path)
    versions = {str(row.get("schema_version")) for row in rows}
    other = sorted(versions.difference(map(str, READABLE_VERSIONS)))
    if other:
        problems.append(
            f"{file.path.name}: rows of schema version {', '.join(other)} (this verl_mt writes {SCHEMA_VERSION}); "
            "what they have is shown."
        )
    if "1" in versions:
        problems.append("An older verl_mt wrote its rollout rows, without the ground truth: no truth is shown.")
    return rows, problems


def _read_columns(file: RowFile) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(read_rollout_rows(file.path))
    except DataError as error:
        return rows, [f"{error}; {len(rows)} rows of it are read."]
    return rows, []


def _config(folder: Path, problems: list[str]) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.exists():
        problems.append("config.yaml is missing: clip ranges and settings are not known.")
        return {}
    try:
        found = read_yaml(path)
    except DataError as error:
        problems.append(f"{error}. Settings are not known.")
        return {}
    if not isinstance(found, dict):
        problems.append(f"config.yaml holds no keys but {type(found).__name__}: settings are not known.")
        return {}
    cut = [name for name in _SECTIONS if not section(found, *name.split("."))]
    if cut:
        problems.append(f"config.yaml is not whole: {', '.join(cut)} missing or cut off.")
    return found


def _metrics(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    if not (folder / "metrics.jsonl").exists():
        problems.append("metrics.jsonl is missing: there are no curves.")
    for name in ("metrics.jsonl", "timings.jsonl"):
        if not (folder / name).exists():
            continue
        rows, found = read_rows(folder / name)
        problems += found
        for row in rows:
            step = row.get("step")
            if isinstance(step, int):  # a line without one says nothing about any step
                by_step.setdefault(step, {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def _token_texts(run: Run) -> dict[int, str]:
    try:
        texts = read_token_texts(run.path)
    except DataError as error:
        run.problems.append(f"{error}. Tokens are shown as their ids.")
        return {}
    if texts or not row_files(run.path):
        return texts
    tokenizer = run.path / "hf" / "tokenizer.json"
    if tokenizer.exists():
        return _texts_of_export(tokenizer.parent)
    run.problems.append(
        "token_texts.jsonl is missing (an older run) and there is no hf/ export to take a tokenizer from: tokens are "
        "shown as their ids."
    )
    return {}


def _texts_of_export(folder: Path) -> dict[int, str]:
    """The texts of a whole vocabulary; imports transformers, which takes seconds."""
    from verl_mt.chat.display import token_text
    from verl_mt.chat.loading import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    return {token_id: token_text(tokenizer, token_id) for token_id in range(len(tokenizer))}
