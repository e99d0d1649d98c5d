"""A run's rollouts as a data frame, and its curves as a figure: `Run.rollouts` and `Run.plot` (docs/python_api.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas
from plotly.graph_objects import Figure

from verl_mt.data.row_files import read_rows, row_files

_SHOWN = ("reward/mean", "val/accuracy", "val/accuracy_greedy")
"""Curves that `plot` draws if it gets no names."""


class Curves(Protocol):
    """What `plot` needs of a run."""

    @property
    def metrics(self) -> list[dict[str, Any]]: ...

    def curve(self, name: str) -> dict[int, float]: ...


def rollouts(folder: Path) -> pandas.DataFrame:
    """A row per conversation, in order of steps, training before validation.

    Args:
        folder: the run directory.

    Returns:
        The data frame. Its columns are the keys of `_row`, and `reward/<part>` for each part of the reward.

    Raises:
        DataError: a damaged file of rollout rows.
    """
    files = row_files(folder)
    rows = [{"step": file.step, "split": file.split, **_row(row)} for file in files for row in read_rows(file.path)]
    return pandas.DataFrame(rows)


def plot(run: Curves, names: Sequence[str]) -> Figure:
    """Curves over the steps, in one figure.

    Args:
        run: whose curves.
        names: of metrics. Empty = the mean reward and the accuracies.

    Returns:
        The figure. A notebook shows it. `figure.write_html(path)` writes it.

    Raises:
        KeyError: a metric that was never measured.
    """
    measured = {name for line in run.metrics for name in line}
    shown = names or [name for name in _SHOWN if name in measured] or _SHOWN[:1]
    figure = Figure(layout={"xaxis_title": "step", "margin": {"t": 30}, "showlegend": True})
    for name in shown:
        curve = run.curve(name)
        figure.add_scatter(x=list(curve), y=list(curve.values()), name=name, mode="lines+markers")
    return figure


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    calls, messages, records = (row.get(name) or [] for name in ("tool_calls", "messages", "records"))
    return {
        "trajectory_id": row["trajectory_id"],
        "prompt_id": row["prompt_id"],
        "data_source": row.get("data_source"),
        "question": next((m["content"] for m in messages if m["role"] == "user"), None),
        "answer": messages[-1]["content"] if messages else None,
        "ground_truth": row.get("ground_truth"),
        "reward": row.get("reward"),
        "stop_reason": row.get("stop_reason"),
        "turns": row.get("num_turns"),
        "calls": len(calls),
        "failed_calls": sum(call.get("failure") is not None for call in calls),
        "sampled_tokens": sum(sum(record["sampled"]) for record in records),
        "error": row.get("error"),
        "messages": messages,
        **{f"reward/{name}": value for name, value in (row.get("reward_parts") or {}).items()},
    }
