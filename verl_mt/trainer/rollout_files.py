"""What a run writes of its rollouts: `rollouts/` and `token_texts.jsonl` of its directory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from verl_mt.data import columnar_rows
from verl_mt.data.batch import ADVANTAGES, CLIPPED, OLD_LOG_PROBS, per_record
from verl_mt.data.row_files import FOLDER, write_columns
from verl_mt.data.run_files import (
    append_token_texts,
    read_token_texts,
    update_columns,
)
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.errors import error_text

log = logging.getLogger(__name__)

_COMPUTED = (ADVANTAGES, OLD_LOG_PROBS, CLIPPED)
_MAX_WAITING = 2
"""Files that may wait to be written: the next one waits for one of them, which bounds memory."""


class RolloutFiles:
    """Writes the rollouts of a run. A thread compresses and writes them. If the disk refuses a file, the next call ends
    the run with one error that names the file.

    Args:
        folder: the run directory.
        text_of: token id -> its own text.
    """

    def __init__(self, folder: Path, text_of: Callable[[int], str]):
        self._folder, self._text_of = folder, text_of
        self._known = set(read_token_texts(folder))
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[Any]] = deque()

    def training(self, step: int, groups: Sequence[TrajectoryGroup], batch: TensorDict | None) -> None:
        """Write `step_<number>`, with what the update computed for each token.

        Raises:
            CheckpointError: the disk refused this file, or an earlier one.
        """
        self._write("step", step, groups, per_record(batch) if batch is not None else {})

    def validation(self, name: str, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Write `<name>_<number>`: the rollouts of one pass of a validation.

        Raises:
            CheckpointError: the disk refused this file, or an earlier one.
        """
        self._write(name, step, groups, {})

    def flush(self) -> None:
        """Wait until everything is on the disk. Runs in the trainer's main thread.

        Raises:
            CheckpointError: the disk refused; names the file.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Write what waits and end the thread. An error is only logged: whoever needs the files has called `flush`.
        Runs in the trainer's main thread. Waits for the thread `rollout rows`."""
        try:
            self.flush()
        except Exception as error:
            log.warning("rollout rows: %s", error_text(error))
        finally:
            if self._thread is not None:
                self._thread.shutdown(cancel_futures=True)

    def _write(
        self, name: str, step: int, groups: Sequence[TrajectoryGroup], computed: dict[tuple[str, int], dict[str, Any]]
    ) -> None:
        """Runs in the trainer's main thread. The thread `rollout rows` writes. Waits for it if too many files wait."""
        trajectories = [t for g in groups for t in g.trajectories]
        late = [_update_of(t, computed) for t in trajectories]
        stem = self._folder / FOLDER / f"{name}_{step:06d}"
        table = columnar_rows.table_of(
            [columnar_rows.seal(g.trajectories) if g.sealed is None else g.sealed for g in groups],
            [columnar_rows.late_part(t, step=step, late=of) for t, of in zip(trajectories, late)],
        )
        # Not in the thread: a tokenizer is used by one at a time.
        self._write_texts(columnar_rows.token_ids(table))
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _MAX_WAITING):
            self._waiting.popleft().result()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="rollout rows")
        self._waiting.append(self._thread.submit(write_columns, stem, table))

    def _write_texts(self, token_ids: Iterable[int]) -> None:
        new = set(token_ids) - self._known
        if new:
            append_token_texts(self._folder, {i: self._text_of(i) for i in sorted(new)})
            self._known |= new


def _update_of(trajectory: Trajectory, computed: dict[tuple[str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """What the update computed for each record, in its row."""
    return [
        update_columns(
            len(record.token_ids), *(computed.get((trajectory.trajectory_id, k), {}).get(name) for name in _COMPUTED)
        )
        for k, record in enumerate(trajectory.records)
    ]
