"""Rows: parquet, JSON and JSON Lines files, or a Python function, in verl's schema.

A row has `prompt` (messages, or one text), `data_source`, `reward_model: {ground_truth}` (or a column `ground_truth`)
and optionally `extra_info` with `tools_kwargs`, `interaction_kwargs`, `need_tools_kwargs`, `tool_selection`,
`prompt_tools`, and `images` and `videos` for the places `<image>` and `<video>` of the prompt. Every row
is checked when it is loaded: what is wrong is said before the first training step, with file, row and column.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_mt.data.conversation import MESSAGES_AS_TEXT, Message
from verl_mt.data.media import place_media
from verl_mt.errors import DataError, VerlMTError, error_text
from verl_mt.plugins import listing, load_object, suggest

SUFFIXES = (".parquet", ".jsonl", ".json")
_INSTRUCTS = ("system", "developer")
"""Roles of a first message that takes the place of a system message."""
_TOO_LONG = "an integer of more than 4300 digits. Write it as a text, or leave it out"
_TOO_DEEP = "lists or objects are nested too deep to be read; flatten them, or keep them as text"


@dataclass
class DataRow:
    """One problem."""

    prompt: list[Message]
    data_source: str
    """Picks the reward function; validation metrics are named after it."""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    """The whole row as it was read, nulls that parquet filled in removed."""
    index: int = -1
    """Position in its file, from 0: of a .jsonl file the line, blank ones counted. Texts count rows from 1."""
    file: str = ""
    """The file or generator it came from, for error texts."""
    source: str = ""
    """Name of its entry in `data.train_files` or `data.val_files`; with `index` it names the row."""
    label: Any = None
    """What a generate or reward function of slime's kind sees: the label column as it is, else the ground truth."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The same: the column `metadata`, else `extra_info`."""
    problem: str | None = None
    """Why there is no prompt: what was read is no row. `data.on_bad_row` decides how to go on."""

    @property
    def place(self) -> str:
        """File and row, as every text about a row names them: counted from 1, so that an editor's line is the row."""
        return _place(self.file, self.index)

    @property
    def tools_kwargs(self) -> dict[str, Any]:
        """Tool name -> {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}."""
        return self.extra_info.get("tools_kwargs") or {}

    @property
    def interaction_kwargs(self) -> dict[str, Any]:
        """Arguments of `start_interaction`; `name` picks the interaction."""
        return self.extra_info.get("interaction_kwargs") or {}

    @property
    def need_tools_kwargs(self) -> bool:
        return bool(self.extra_info.get("need_tools_kwargs", False))

    @property
    def tool_selection(self) -> list[str] | None:
        """Names of the tools that this row may use; None = all that are configured."""
        return self.extra_info.get("tool_selection")


@dataclass
class DataSource:
    """The rows of one entry of `data.train_files` or `data.val_files`."""

    name: str
    rows: Sequence[DataRow]
    """A list, or `large_files.LargeRows`, which reads a row when it is asked for."""
    weight: float | None = None
    """Share of the mix where `data.mixing` is `weights`; need not sum to 1."""
    read_at_s: float = 0.0
    """When reading them began, in seconds since 1970; 0 = unknown."""


@dataclass(frozen=True)
class Entry:
    """One of those that `data.train_files` or `data.val_files` name."""

    name: str
    path: str
    weight: float | None = None


@dataclass(frozen=True)
class Columns:
    """How the columns of a row become a prompt and its label."""

    prompt: str = "prompt"
    """The messages."""
    label: str | None = None
    """The label; rows may then do without `data_source`, which is the entry's name. None = verl's schema."""
    as_it_is: bool = False
    """A generate function reads the prompt column itself; it may hold a number (of a task, say)."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name in the file -> name that everything else knows the column by."""
    system: str | None = None
    """System message, or a .txt file with it, of the rows whose prompt begins with none."""
    all_optional: bool = False
    """An environment makes the prompt and the score: a row may have neither prompt, data source nor label."""


@dataclass(frozen=True)
class Reading:
    """How the entries of a split are read."""

    split: str
    """`train` or `val`; generators get it."""
    num_rows: int = -1
    """Rows taken from the beginning of each entry; -1 = all."""
    seed: int = 0
    """For generators."""
    columns: Columns = Columns()
    """Which of them are what."""
    keeps_bad: bool = False
    """What is no row becomes one with a `problem`; False = it is an error."""

    @property
    def key(self) -> str:
        return f"data.{self.split}_files"

    def row_of(self, raw: Any, index: int, entry: Entry) -> DataRow:
        """Row `index` of an entry from what was read.

        Raises:
            DataError: it is none, and bad rows are not kept; names file, row and column.
        """
        try:
            if not isinstance(raw, dict):
                raise _no_row(raw, _place(entry.path, index))
            names = self.columns.renamed
            return _to_row(_renamed_row(raw, names) if names else raw, index, entry, self.columns)
        except DataError as error:
            if not self.keeps_bad:
                raise
            known = raw if isinstance(raw, dict) else {}
            return DataRow([], "", raw=known, index=index, file=entry.path, source=entry.name, problem=str(error))


def load_rows(
    entry_spec: Any,
    *,
    split: str,
    num_rows: int = -1,
    seed: int = 0,
    columns: Columns | None = None,
) -> list[DataSource]:
    """Load and check all rows of `data.train_files` or `data.val_files`.

    Args:
        entry_spec: one entry, a list of entries, or a mapping name -> entry. An entry is a path (.parquet, .jsonl,
            .json), `package.module:function` (called with num_rows, seed and split; returns dicts), or a mapping with
            `path` and `weight`.
        split: `train` or `val`; generators get it.
        num_rows: rows taken from the beginning of each entry; -1 = all.
        seed: for generators.
        columns: which of them are what; None = verl's schema.

    Raises:
        DataError: names the key, or the file, row and column; says what was got and what to do.
    """
    reading = Reading(split, num_rows, seed, with_system_text(columns or Columns()))
    return [load_entry(entry, reading) for entry in entries_of(entry_spec, split)]


def load_entry(entry: Entry, reading: Reading) -> DataSource:
    """All rows of one entry, in memory.

    Raises:
        DataError: as `load_rows`.
    """
    read_at_s = time.time()
    found = _read(entry.path, reading.key, reading)
    check_renamed(_mappings(found), reading.columns.renamed, entry.path)
    rows = [reading.row_of(raw, index, entry) for index, raw in found.items()]
    if not rows:
        raise DataError(f"{reading.key}: {entry.path} has no rows")
    return DataSource(entry.name, rows, entry.weight, read_at_s)


def read_rows(path: str | Path, key: str) -> dict[int, dict[str, Any]]:
    """Rows of a parquet, JSON or JSON Lines file as they are, of any schema; position in the file, from 0 -> row.

    Args:
        path: the file.
        key: where the path came from, for the errors.

    Raises:
        DataError: no such file, or one that cannot be read; names file and row.
    """
    return _read(str(path), key, Reading("train"))


def examine_rows(
    path: str, *, num_rows: int = -1, columns: Columns | None = None
) -> tuple[dict[int, dict[str, Any]], list[DataRow], list[str]]:
    """What `load_rows` would make of a file, where it would stop at the first mistake.

    Args:
        path: one entry of `data.train_files`.
        num_rows, columns: as for `load_rows`.

    Returns:
        The rows as they are, their columns renamed (position -> row); those that can be used; what is wrong with the
        others, a line each.

    Raises:
        DataError: the file cannot be read, or has no rows.
    """
    reading = Reading("train", num_rows, 0, with_system_text(columns or Columns()), keeps_bad=True)
    entry, names = _entry(None, path, "rows"), reading.columns.renamed
    found = _read(entry.path, "rows", reading)
    if not found:
        raise DataError(f"{entry.path} has no rows")
    check_renamed(_mappings(found), names, entry.path)
    raw_rows = {index: _renamed_row(raw, names) for index, raw in found.items() if isinstance(raw, dict)}
    made = [reading.row_of(raw, index, entry) for index, raw in found.items()]
    return raw_rows, [row for row in made if row.problem is None], [row.problem for row in made if row.problem]


def drop_nulls(value: Any) -> Any:
    """Remove what parquet fills in: keys that are null, and mappings in which nothing else was.

    A column of structs has the union of all rows' keys; a row that never had a key reads null there. Lists keep their
    length; a mapping that was empty stays. A value of nothing but nulls is None.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in ((k, drop_nulls(v)) for k, v in value.items()) if v is not None}
        return kept if kept or not value else None
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a Parquet file, as it was before it was written."""
    return {column: drop_nulls(value) for column, value in row.items()}


def entries_of(spec: Any, split: str) -> list[Entry]:
    """What `data.train_files` or `data.val_files` names, in its order; their names differ.

    Raises:
        DataError: names the key, and says what was got.
    """
    key = f"data.{split}_files"
    if isinstance(spec, str):
        entries = [_entry(None, spec, key)]
    elif isinstance(spec, Sequence):
        entries = [_entry(None, item, key) for item in spec]
    elif isinstance(spec, dict) and "path" in spec:
        entries = [_entry(None, spec, key)]
    elif isinstance(spec, dict):
        entries = [_entry(str(name), item, key) for name, item in spec.items()]
    else:
        raise DataError(f"{key}: expected a path, a list or a mapping name -> path, got {spec!r}")
    if not entries:
        raise DataError(f"{key}: no entry. Name at least one file or generator")
    names = [e.name for e in entries]
    numbered = [
        e if names.count(e.name) == 1 else Entry(f"{e.name}_{position}", e.path, e.weight)
        for position, e in enumerate(entries)
    ]
    names = [e.name for e in numbered]
    if len(set(names)) < len(names):
        raise DataError(f"{key}: two entries are named {max(names, key=names.count)!r}. Give each its own name")
    for entry in numbered:
        if entry.weight is not None and split != "train":
            raise DataError(
                f"{key}.{entry.name}: weight {entry.weight:g} would be ignored, all rows count. Leave it out"
            )
    return numbered


def _entry(name: str | None, item: Any, key: str) -> Entry:
    weight = None
    where = f"{key}.{name}" if name else key
    if isinstance(item, dict):
        unknown = [k for k in item if k not in ("path", "weight", "name")]
        if unknown or not isinstance(item.get("path"), str):
            hint = suggest(str(unknown[0]), ("path", "weight", "name")) if unknown else ""
            raise DataError(f"{where}: expected {{path: ..., weight: ...}}, got {item!r}{hint}")
        name, weight, item = item.get("name", name), item.get("weight"), item["path"]
        if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0):
            raise DataError(f"{where}: weight must be a number above 0, got {weight!r}")
    if not isinstance(item, str) or not item.strip():
        raise DataError(f"{where}: expected a path or package.module:function, got {item!r}")
    default = Path(item).stem if item.endswith(SUFFIXES) else item
    return Entry(name or default, item, None if weight is None else float(weight))


def _place(file: str, index: int) -> str:
    return f"{file}, row {index + 1}"


def _mappings(found: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [raw for raw in found.values() if isinstance(raw, dict)]


def _read(path: str, key: str, reading: Reading) -> dict[int, Any]:
    """Position in the file, from 0 -> mapping; where bad rows are kept, an error in the place of what is none."""
    num_rows = reading.num_rows
    if path.endswith(SUFFIXES):
        file = Path(path).expanduser()
        if not file.is_file():
            raise DataError(f"{key}: no file {path!r} (looked at {file.absolute()})")
        reader = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}[file.suffix]
        rows = dict(islice(reader(file), None if num_rows < 0 else num_rows))
    elif ":" in path and "://" not in path:
        rows = dict(enumerate(_generate(path, key, reading)))
    else:
        raise DataError(
            f"{key}: {path!r} is neither a {', '.join(SUFFIXES)} file nor package.module:function. Hub names and URLs "
            "are not read directly: prepare the data set as a file first (docs/your_own_data.md shows how)"
        )
    for index, row in rows.items():
        if not isinstance(row, dict):
            rows[index] = _no_row(row, _place(path, index))
            if not reading.keeps_bad:
                raise rows[index]
    return rows


def _no_row(raw: Any, where: str) -> DataError:
    if isinstance(raw, DataError):
        return raw
    return DataError(f"{where}: expected a mapping column -> value, got {type(raw).__name__} {_short(raw)}")


def _read_parquet(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # In parts: of a large file few rows may be wanted.
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield from enumerate(without_nulls(row) for part in table.iter_batches() for row in part.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable parquet file: {error}") from error


def _read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    with open(file, "rb") as lines:
        for index, line in enumerate(lines):
            if line.strip():
                yield index, read_line(line, file, index)


def read_line(line: bytes, file: Path, position: int) -> Any:
    """What a line of a JSON Lines file holds; where it is not one, a `DataError` that names its row.

    Args:
        position: of the line in the file, from 0.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return DataError(f"{_place(str(file), position)}: not JSON: {error.msg} at column {error.colno}")
    except UnicodeDecodeError as error:
        return DataError(f"{_place(str(file), position)}: not UTF-8: {error}")
    except ValueError:
        return DataError(f"{_place(str(file), position)}: {_TOO_LONG}")
    except RecursionError:
        return DataError(f"{_place(str(file), position)}: {_TOO_DEEP}")


def _read_json(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        hint = "; one object per line is .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{file}, line {error.lineno}: not JSON: {error.msg}{hint}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error}") from error
    except ValueError as error:
        raise DataError(f"{file}: {_TOO_LONG}") from error
    except RecursionError as error:
        raise DataError(f"{file}: {_TOO_DEEP}") from error
    if not isinstance(content, list):
        raise DataError(f"{file}: expected a list of rows, got {type(content).__name__}")
    yield from enumerate(content)


def _generate(path: str, key: str, reading: Reading) -> list[Any]:
    num_rows, seed, split = reading.num_rows, reading.seed, reading.split
    make = load_object(path, what=key)
    if not callable(make):
        raise DataError(
            f"{key}: {path} is a {type(make).__name__}, expected a function (num_rows, seed, split) -> rows"
        )
    try:
        made = make(num_rows=num_rows, seed=seed, split=split)
        if num_rows < 0 and not isinstance(made, Sequence):
            raise DataError(
                f"{key}: {path} yields rows without end. Say how many: data.{split}_max_samples (it is {num_rows})"
            )
        if not isinstance(made, Iterable):
            raise DataError(f"{key}: {path} returned {type(made).__name__}, expected rows (dicts)")
        return list(islice(made, None if num_rows < 0 else num_rows))
    except (VerlMTError, KeyboardInterrupt):
        raise
    except BaseException as error:
        called = f"{path}(num_rows={num_rows}, seed={seed}, split={split!r})"
        raise DataError(f"{key}: {called} raised {error_text(error, named=True)}") from error


def _to_row(raw: dict[str, Any], index: int, entry: Entry, columns: Columns) -> DataRow:
    where = _place(entry.path, index)
    extra_info = raw.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(
            f"{where}: column extra_info must be a mapping, got {type(extra_info).__name__} {_short(extra_info)}"
        )
    if raw.get("audios"):
        raise DataError(f"{where}: column audios holds {len(raw['audios'])} items. Audio is not offered, leave it out")
    has_prompt = not columns.all_optional or raw.get(columns.prompt) is not None
    shown = _column(raw, columns.prompt, where) if has_prompt else None
    if columns.as_it_is and isinstance(shown, int | float):
        shown = str(shown)
    if isinstance(shown, str) and not columns.as_it_is and MESSAGES_AS_TEXT.fullmatch(shown):
        raise DataError(
            f"{where}: column {columns.prompt} holds messages written as text, {_short(shown)}: the model would read "
            "brackets and quotes. Write a list of messages (json.loads, or ast.literal_eval where quotes are single); "
            'where a user says exactly this, give [{"role": "user", "content": text}]'
        )
    prompt = _messages(shown, f"{where}, column {columns.prompt}") if has_prompt else []
    prompt = begun_by_system(prompt, columns.system)
    prompt = place_media(prompt, raw, where, folder=str(Path(entry.path).parent))
    may_be_missing = columns.label is not None or columns.all_optional
    named = raw.get("data_source") if may_be_missing else _column(raw, "data_source", where)
    data_source = _text(entry.name if named is None else named, f"{where}, column data_source")
    if columns.label is not None:
        label = _column(raw, columns.label, where)
    else:
        has_label = not columns.all_optional or "ground_truth" in raw or "reward_model" in raw
        label = _ground_truth(raw, where) if has_label else None
    return DataRow(
        prompt=prompt,
        data_source=data_source,
        ground_truth=label["ground_truth"] if isinstance(label, dict) and "ground_truth" in label else label,
        extra_info=dict(extra_info or {}),
        label=label,
        metadata=_metadata(raw, extra_info, where),
        raw=raw,
        index=index,
        file=entry.path,
        source=entry.name,
    )


def check_renamed(rows: Sequence[dict[str, Any]], names: Mapping[str, str], file: str) -> None:
    """A column whose name is taken by a renamed one is gone. A row that has nothing to rename keeps what it has under
    the new name.

    Raises:
        DataError: two columns get one name, or no row has a column of a name that is to be changed.
    """
    if not names or not rows:
        return
    for new in names.values():
        if len(several := [old for old, other in names.items() if other == new]) > 1:
            raise DataError(f"data.columns renames {listing(several)} to one name, {new}: give one of them")
    if missing := [name for name in names if not any(name in row for row in rows)]:
        raise DataError(
            f"{file}: data.columns renames {listing(missing)}, which no row has. The first has "
            f"{listing(map(str, rows[0]))}"
        )


def _renamed_row(row: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    stays = {name: value for name, value in row.items() if name not in names}
    # A null is what parquet gives the rows that never had the column.
    moves = {new: row[old] for old, new in names.items() if old in row and (row[old] is not None or new not in stays)}
    return {name: value for name, value in stays.items() if name not in moves} | moves


def begun_by_system(messages: list[Message], system: str | None) -> list[Message]:
    """The messages, behind a system message with this text where they begin with none; None = as they are."""
    if system is None or (messages and messages[0].get("role") in _INSTRUCTS):
        return messages
    return [{"role": "system", "content": system}, *messages]


def with_system_text(columns: Columns) -> Columns:
    """With the text of `system`, where that names a .txt file.

    Raises:
        DataError: as `system_text`.
    """
    return replace(columns, system=system_text(columns.system))


def system_text(system: str | None) -> str | None:
    """The text, or what the .txt file holds.

    Raises:
        DataError: no such file, or it is not UTF-8; or there is no text.
    """
    if system is None:
        return None
    try:
        text = Path(system).expanduser().read_text(encoding="utf-8") if system.endswith(".txt") else system
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.system: {system} cannot be read: {error}. Give the text itself, or a .txt file"
        ) from error
    if not text.strip():
        where = f"{system} is empty" if system.endswith(".txt") else f"got {system!r}, which is no text"
        raise DataError(f"data.system: {where}. Give a text, or leave it out (null): no message is added then")
    return text


def _column(raw: dict[str, Any], name: str, where: str) -> Any:
    if name not in raw:
        raise DataError(f"{where}: column {name!r} is missing{_instead_of(raw, name)}")
    if raw[name] is None:
        raise DataError(f"{where}: column {name!r} is null")
    return raw[name]


def _instead_of(raw: dict[str, Any], name: str) -> str:
    """What is there where a column is missing."""
    return f"{suggest(name, map(str, raw)).removesuffix('?')}; columns present: {listing(map(str, raw))}"


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, got {type(value).__name__} {_short(value)}")
    return value


def _ground_truth(raw: dict[str, Any], where: str) -> Any:
    """`reward_model.ground_truth`, else the column `ground_truth` (which may be null: a task without one says so)."""
    if "ground_truth" in raw and "reward_model" not in raw:
        return raw["ground_truth"]
    if "reward_model" not in raw:
        raise DataError(
            f"{where}: column 'reward_model' is missing{_instead_of(raw, 'reward_model')}. Rows of a task without "
            "labels, which an environment scores, say, have a column ground_truth that is null. data.label_key names "
            "another one"
        )
    model = _column(raw, "reward_model", where)
    if not isinstance(model, dict) or "ground_truth" not in model:
        raise DataError(f"{where}: column reward_model must be a mapping with ground_truth, got {_short(model)}")
    return model["ground_truth"]


def _metadata(raw: dict[str, Any], extra_info: Any, where: str) -> dict[str, Any]:
    """The column `metadata`, else `extra_info`."""
    value = raw.get("metadata")
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{where}: column metadata must be a mapping, got {type(value).__name__} {_short(value)}")
    return dict(value if value is not None else extra_info or {})


def _messages(value: Any, where: str) -> list[Message]:
    """The prompt's messages; a last assistant message is the data set's own answer and does not belong to it."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{where}: expected messages (a list) or a text, got {type(value).__name__} {_short(value)}")
    messages = [_message(m, f"{where}, message {number}") for number, m in enumerate(value, 1)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{where}: no message before the answer, got {_short(value)}")
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{where}: expected {{role: ..., content: ...}}, got {_short(value)}")
    message = {k: v for k, v in value.items() if v is not None or k == "content"}
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{where}: tool_calls must be a list of calls, got {type(calls).__name__} {_short(calls)}")
    content = message.setdefault("content", None)
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise DataError(
            f"{where}: content must be text (or a list of parts), got {type(content).__name__} {_short(content)}"
        )
    return message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
