"""The critical path of a step, from its rollout rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_mt.diagnostics.critical_path import critical_path_of_rows
from verl_mt.report.run_reader import section

_IDS = ("trajectory_id", "prompt_id")
_SPAN = ("phase", "start_s", "end_s", "turn")


def _is_span(span: Any) -> bool:
    """Whether it has what a span needs; rows of other versions may hold anything."""
    if not isinstance(span, Mapping) or not all(name in span for name in _SPAN):
        return False
    return isinstance(span["start_s"], int | float) and isinstance(span["end_s"], int | float)


def critical_path(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`CriticalPath.to_dict()` of the rows that have ids and spans; None where none has.

    Args:
        rows: of one training step.
        config: the run's; says whether the conversations waited for each other.
    """
    usable = []
    for row in rows:
        given = row.get("time_spans")
        if isinstance(given, list) and all(isinstance(row.get(name), str | int) for name in _IDS):
            spans = [{k: s[k] for k in (*_SPAN, "name") if k in s} for s in given if _is_span(s)]
            usable.append(
                {**row, "episode_id": str(row.get("episode_id") or row["trajectory_id"]), "time_spans": spans}
            )
    if not any(row["time_spans"] for row in usable):
        return None
    is_sync = section(config, "actor_rollout_ref", "rollout").get("mode") == "sync"
    lock_step = bool(section(config, "trainer").get("deterministic")) or is_sync
    return critical_path_of_rows(usable, lock_step=lock_step).to_dict()
