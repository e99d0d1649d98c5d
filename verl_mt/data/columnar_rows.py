"""Rollout rows as columns: Arrow in memory, Parquet (zstd) on disk; every value is what the JSON of a row has.

What a row has is said in `verl_mt.data.run_files`; this module only knows where some of it goes. Ids and numbers of a
row have a column each. What a record has per token is a list of lists: `token_ids[r][t]` is token t of record r.
Everything else is JSON in `details`, or in `late_details`: a field that is added to a row is there without more.

A row comes in two parts. The *sealed* part is final once a trajectory has its reward. `seal` makes it where the
trajectory was sampled, in a separate process if there is one, and the trainer only passes the bytes on. The *late*
part (`LATE_FIELDS` and `UPDATE_COLUMNS` of `run_files`) is added by the trainer as further columns.

A row that does not fit its columns (an id that is not UTF-8, a row converted by an earlier version) is a whole in the
column `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_mt.data.run_files import (
    LATE_FIELDS,
    RECORD_ORDER,
    ROW_ORDER,
    TOKEN_COLUMNS,
    UPDATE_COLUMNS,
    atomic_file,
    json_text,
    plain_row,
    to_json_value,
    writing,
)
from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import DataError
from verl_mt.reading import parse_json, require_file

_VERSION_KEY, VERSION = b"verl_mt.rollout_rows", b"1"
"""In the file's metadata: how rows are laid out in columns, whatever the rows' own `schema_version`."""
_ROWS_PER_GROUP = 1024

_ROW_TYPES = {
    "schema_version": pa.int64(), "trajectory_id": pa.string(), "prompt_id": pa.string(), "group_id": pa.string(),
    "episode_id": pa.string(), "data_source": pa.string(), "source": pa.string(), "row_index": pa.int64(),
    "num_turns": pa.int64(), "status": pa.string(), "stop_reason": pa.string(),
}  # fmt: skip
_TOKEN_TYPES = {
    "token_ids": pa.int32(), "sampled": pa.int8(), "loss_mask": pa.int8(), "rollout_log_probs": pa.float64(),
    "policy_versions": pa.int32(), "advantages": pa.float64(), "old_log_probs": pa.float64(), "clipped": pa.int32(),
}  # fmt: skip
# Of float32 every value is a float64 whose last bytes are 0; split by bytes they are nothing once they are compressed.


def _of_tokens(names: Sequence[str]) -> list[pa.Field]:
    return [pa.field(name, pa.list_(pa.list_(_TOKEN_TYPES[name]))) for name in names]


SEALED = pa.schema(
    [pa.field(name, kind) for name, kind in _ROW_TYPES.items()]
    + _of_tokens(TOKEN_COLUMNS)
    + [pa.field("details", pa.string()), pa.field("other", pa.string())]
)
LATE = pa.schema(
    [
        pa.field("step", pa.int64()),
        pa.field("reward", pa.float64()),
        *_of_tokens(UPDATE_COLUMNS),
        pa.field("late_details", pa.string()),
    ]
)
_SCHEMA = pa.schema([*SEALED, *LATE], metadata={_VERSION_KEY: VERSION})
_UNFIT = (pa.ArrowException, UnicodeEncodeError, OverflowError, KeyError, TypeError, ValueError)
"""What a value that its column cannot hold ends in."""


def seal(trajectories: Sequence[Trajectory]) -> bytes:
    """The sealed part of the rows of scored trajectories, in their order: for `TrajectoryGroup.sealed`.

    Whatever of a trajectory is not among `run_files.LATE_FIELDS` must not change afterwards: the row has it as it is.
    Costs what the JSON of the messages costs, and about 0.2 microseconds a token (less, where a record's columns are
    arrays of numpy of the types above). The bytes are Arrow's, without a schema: read by the same version of verl_mt.
    """
    rows = [plain_row(t) for t in trajectories]
    try:
        batch = _batch([_sealed_values(row) for row in rows], SEALED)
    except _UNFIT:
        batch = _batch([_sealed_or_other(row) for row in rows], SEALED)
    return batch.serialize().to_pybytes()


def late_part(trajectory: Trajectory, *, step: int, late: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the trainer adds to a sealed row: `LATE_FIELDS` as they are now, and `run_files.update_columns` of each
    record."""
    return {name: getattr(trajectory, name, step) for name in LATE_FIELDS} | {"records": late}


def table_of(sealed: Iterable[bytes], late: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows from their parts, without touching what was sealed.

    Args:
        sealed: by `seal`, in order.
        late: the `late_part` of each row.

    Raises:
        ValueError: not as many rows were sealed as come now.
    """
    batches = [pa.ipc.read_record_batch(pa.py_buffer(part), SEALED) for part in sealed]
    table = pa.Table.from_batches(batches, SEALED)
    if len(table) != len(late):
        raise ValueError(f"{len(table)} rows were sealed, and the late part is of {len(late)}")
    added = _batch([_late_values(row) for row in late], LATE)
    return pa.table([*table.columns, *(pa.chunked_array([column]) for column in added.columns)], schema=_SCHEMA)


def token_ids(table: pa.Table) -> list[int]:
    """Every token id that occurs, once."""
    flat = [chunk.flatten().flatten().to_numpy() for chunk in table.column("token_ids").chunks]
    return np.unique(np.concatenate(flat)).tolist() if flat else []


def to_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows as plain JSON data, as `run_files.trajectory_to_row` made them."""
    for batch in table.to_batches(max_chunksize=_ROWS_PER_GROUP):
        yield from _rows_of(batch)


def write_parquet(path: str | Path, table: pa.Table) -> int:
    """Write a table whole or not at all (temporary file, fsync, rename). Returns the number of rows.

    Raises:
        CheckpointError: the disk refused.
    """
    leaves = [f"{f.name}.list.element.list.element" if f.name in _TOKEN_TYPES else f.name for f in _SCHEMA]
    split = [f"{name}.list.element.list.element" for name, kind in _TOKEN_TYPES.items() if kind == pa.float64()]
    plain = {*split, "reward", "details", "late_details", "other", "token_ids.list.element.list.element"}
    with writing(path), atomic_file(Path(path)) as file:
        pq.write_table(
            table,
            file,
            row_group_size=_ROWS_PER_GROUP,
            compression="zstd",
            use_byte_stream_split=split,
            use_dictionary=[name for name in leaves if name not in plain],
            write_statistics=list(_ROW_TYPES),
        )
    return len(table)


def is_rows_file(path: str | Path) -> bool:
    """Whether it is a Parquet file of rollout rows, of any layout."""
    try:
        return _VERSION_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def read_parquet(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, of which a thousand are held at a time.

    Raises:
        DataError: not a file of rollout rows, of another layout, or damaged; names it.
    """
    try:
        require_file(path)
        file = pq.ParquetFile(path)
        version = (file.schema_arrow.metadata or {}).get(_VERSION_KEY)
        if version != VERSION:
            what = "no rollout rows" if version is None else f"rollout rows of layout {version.decode()!r}"
            raise DataError(f"{path}: {what}. This verl_mt reads layout {VERSION.decode()!r}")
        for batch in file.iter_batches(_ROWS_PER_GROUP):
            yield from _rows_of(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def count_rows(path: str | Path) -> int:
    """How many rows a file has, from its last bytes.

    Raises:
        DataError: not a Parquet file, or a damaged one.
    """
    try:
        require_file(path)
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def _sealed_or_other(row: dict[str, Any]) -> dict[str, Any]:
    """A row as `plain_row` gives it. One that does not fit is a whole in `other`."""
    try:
        values = _sealed_values(row)
        _batch([values], SEALED)
        return values
    except _UNFIT:
        return {"other": json_text({name: row[name] for name in row if name not in LATE_FIELDS})}


def _sealed_values(row: Mapping[str, Any]) -> dict[str, Any]:
    details = {name: value for name, value in row.items() if name not in _ROW_TYPES and name not in LATE_FIELDS}
    details["records"] = [{k: v for k, v in record.items() if k not in _TOKEN_TYPES} for record in row["records"]]
    values = to_json_value({name: row[name] for name in _ROW_TYPES})
    values |= {name: [record[name] for record in row["records"]] for name in TOKEN_COLUMNS}
    return values | {"details": json_text(details)}


def _late_values(row: Mapping[str, Any]) -> dict[str, Any]:
    values = {"step": row["step"], "reward": row["reward"]}
    values["late_details"] = json_text({name: row[name] for name in LATE_FIELDS if name in row and name not in values})
    return values | {name: [record.get(name) for record in row["records"]] for name in UPDATE_COLUMNS}


def _batch(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([_column([row.get(f.name) for row in rows], f) for f in schema], schema=schema)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    kind = _TOKEN_TYPES.get(field.name, field.type)
    if kind != pa.float64():
        return pa.array(values, field.type)
    if field.name in _TOKEN_TYPES:  # arrays of float64 are copied as they are, others number by number
        values = [
            None if row is None else [c.astype(np.float64, copy=False) if isinstance(c, np.ndarray) else c for c in row]
            for row in values
        ]
    made = pa.array(values, field.type, from_pandas=True)  # NaN becomes null
    numbers = made.flatten().flatten() if field.name in _TOKEN_TYPES else made
    if np.isinf(numbers.drop_null().to_numpy()).any():
        return pa.array(to_json_value(values), field.type)
    return made


def _rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    plain = {f.name: batch.column(f.name).to_pylist() for f in batch.schema if f.name not in _TOKEN_TYPES}
    tokens = {name: list(_lists(batch.column(name))) for name in _TOKEN_TYPES}
    for place in range(len(batch)):
        of_row = {name: values[place] for name, values in plain.items()}
        yield _row(of_row, {name: values[place] for name, values in tokens.items()})


def _row(of_row: dict[str, Any], tokens: dict[str, Any]) -> dict[str, Any]:
    if of_row["other"] is not None:
        row = parse_json(of_row["other"])
    else:
        row = {name: of_row[name] for name in _ROW_TYPES} | parse_json(of_row["details"])
        for k, record in enumerate(row["records"]):
            record |= {name: tokens[name][k] for name in TOKEN_COLUMNS}
    if of_row["late_details"] is None:  # a whole row of another form
        return row
    row |= {"step": of_row["step"], "reward": of_row["reward"]} | parse_json(of_row["late_details"])
    for k, record in enumerate(row["records"]):
        record |= {name: tokens[name][k] for name in UPDATE_COLUMNS}
        if record["clipped"] is None:
            del record["clipped"]
    row["records"] = [_in_order(record, RECORD_ORDER) for record in row["records"]]
    return _in_order(row, ROW_ORDER)


def _in_order(found: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    return {name: found[name] for name in order if name in found} | found


def _lists(column: pa.ListArray) -> Iterator[list[list[Any] | None] | None]:
    """A column of tokens as Python's lists: `to_pylist` takes ten times as long."""
    inner = column.values
    numbers = inner.values
    missing = numbers.is_null().to_numpy(zero_copy_only=False) if numbers.null_count else None
    flat = numbers.fill_null(0).to_numpy()
    ends, valid = inner.offsets.to_pylist(), inner.is_valid().to_pylist()
    outer, there = column.offsets.to_pylist(), column.is_valid().to_pylist()
    for place in range(len(column)):
        if not there[place]:
            yield None
            continue
        found: list[list[Any] | None] = []
        for k in range(outer[place], outer[place + 1]):
            piece = slice(ends[k], ends[k + 1])
            if not valid[k]:
                found.append(None)
            elif missing is not None and missing[piece].any():
                found.append([None if gone else x for x, gone in zip(flat[piece].tolist(), missing[piece])])
            else:
                found.append(flat[piece].tolist())
        yield found
