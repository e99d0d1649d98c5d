"""The critical path of a step, from its rollout rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_mt.diagnostics.critical_path import critical_path_of_rows


def _timed(span: Mapping[str, Any]) -> bool:
    return isinstance(span["start_s"], int | float) and isinstance(span["end_s"], int | float)


def critical_path(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`CriticalPath.to_dict()` of the rows that have ids and spans; None where none has.

    Args:
        rows: of one training step.
        config: the run's; says whether the conversations waited for each other.
    """
    needed = ("trajectory_id", "prompt_id", "episode_id", "time_spans")
    known = ("phase", "start_s", "end_s", "turn")
    usable = []
    for row in rows:
        if all(name in row for name in needed):
            spans = [s for s in row["time_spans"] or [] if all(name in s for name in known) and _timed(s)]
            usable.append({**row, "time_spans": [{k: s[k] for k in (*known, "name") if k in s} for s in spans]})
    if not any(row["time_spans"] for row in usable):
        return None
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    lock_step = bool((config.get("trainer") or {}).get("deterministic")) or rollout.get("mode") == "sync"
    return critical_path_of_rows(usable, lock_step=lock_step).to_dict()
