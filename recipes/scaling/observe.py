"""What the steps of a run did and how long they took, from the files that it wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml
from transformers import AutoConfig

from verl_mt.config.compose import to_config
from verl_mt.config.schema import Config
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.row_files import read_rows, rows_of_step
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.doctor.step_time import Model, Observed, StepTime, Work
from verl_mt.extensions.cluster.replicas.model_shape import model_shape
from verl_mt.modeling.packing import find_segments


@cache
def model_of(path: str, dtype: str = "float32") -> Model:
    """Sizes of a model, by its config; no weight is read."""
    config = AutoConfig.from_pretrained(resolve_model_path(path)).get_text_config()
    return Model.of(config, model_shape(path).weights, {"float32": 4}.get(dtype, 2))


def observe_run(run: Path) -> list[Observed]:
    """All steps of a run directory but the first, which warms up.

    Raises:
        SystemExit: the run wrote no rollout rows (`trainer.rollout_rows=off`) or no times.
    """
    config = to_config(yaml.safe_load((run / "config.yaml").read_text()))
    lines = {line["step"]: line for line in read_jsonl_tolerant(run / "metrics.jsonl")}
    if (run / "timings.jsonl").exists():
        for line in read_jsonl_tolerant(run / "timings.jsonl"):
            lines[line["step"]] = lines.get(line["step"], {}) | line
    steps = []
    for number in sorted(lines)[1:]:
        rows = rows_of_step(run, number)
        if "time/step_s" in lines[number] and rows is not None:
            steps.append(observe_step(config, lines[number], list(read_rows(rows.path))))
    if not steps:
        raise SystemExit(f"{run}: no step with times and rollout rows but the first; the formula needs both")
    return steps


def observe_step(config: Config, metrics: Mapping[str, float], rows: list[dict[str, Any]]) -> Observed:
    """One step.

    Args:
        config: the run's.
        metrics: the step's, with `time/...`.
        rows: its trajectories as written.
    """
    policy, trainer = config.actor_rollout_ref, config.trainer
    sampled = [sum(sum(record["sampled"]) for record in row["records"]) for row in rows]
    length = [sum(len(record["token_ids"]) for record in row["records"]) for row in rows]
    prompt = [row["records"][0]["turns"][0]["end"] for row in rows]
    waits = [list(_waits(row)) for row in rows]
    ranks = trainer.nnodes * trainer.n_workers_per_node
    engines = max(1, int(metrics.get("rollout/replicas", 1)))
    work = Work(
        trajectories=len(rows),
        prompt_tokens=fmean(prompt),
        sampled_tokens=fmean(sampled),
        longest_tokens=max(sampled),
        turns=fmean(row["num_turns"] for row in rows),
        observation_tokens=fmean(total - p - s for total, p, s in zip(length, prompt, sampled)),
        calls=fmean(len(wait) for wait in waits),
        last=_last(sampled, [len(wait) for wait in waits]),
        tool_latency_s=median([seconds for wait in waits for seconds in wait] or [0.0]),
        concurrency=policy.rollout.max_concurrent,
        samples_per_prompt=policy.rollout.n,
        trained_share=_trained_share(rows),
        updates=metrics.get("actor/num_updates", 0.0),
        epochs=policy.actor.ppo_epochs,
        max_tokens_per_pass=policy.actor.ppo_max_token_len,
        packed=policy.model.use_remove_padding,
        tree=_tree(rows, share=policy.actor.share_prefixes) if ranks == 1 else None,
        ref=policy.actor.use_kl_loss,
        ranks=ranks,
        engines=engines,
        sync_copies=engines if metrics.get("weights/trainer_bytes") else 1,
    )
    parts = {name: metrics[f"time/{name}_s"] for name in ("step", "rollout", "ref", "update", "weights")}
    times = StepTime(
        rollout_s=parts["rollout"],
        ref_s=parts["ref"],
        update_s=parts["update"],
        weights_s=parts["weights"],
        rest_s=2 * parts["step"] - sum(parts.values()),
        waiting_s=0.0,
    )
    return Observed(model_of(policy.model.path, policy.rollout.dtype or policy.model.dtype), work, times)


def _last(tokens: list[int], waits: list[int]) -> tuple[tuple[float, float], ...]:
    """Trajectories that none has more tokens than at as many waits."""
    most = {number: max(t for t, w in zip(tokens, waits) if w == number) for number in waits}
    return tuple((float(t), float(w)) for w, t in sorted(most.items()))


def _waits(row: Mapping[str, Any]) -> Iterator[float]:
    """Seconds of each wait for tools or a user; calls of one turn run side by side."""
    turns: dict[int, list[Any]] = defaultdict(list)
    for span in row["time_spans"]:
        if span["phase"] in ("tool", "interaction"):
            turns[span["turn"]].append(span)
    for spans in turns.values():
        yield max(span["end_s"] for span in spans) - min(span["start_s"] for span in spans)


def _trained_share(rows: list[dict[str, Any]]) -> float:
    """Trajectories of groups whose rewards differ; where none do, one pass without gradient measures all."""
    return sum(map(len, _trained_groups(rows))) / len(rows)


def _tree(rows: list[dict[str, Any]], *, share: bool) -> tuple[float, float, float]:
    """Tokens, segments and attended pairs of the trained rows, if each group is in one micro-batch."""
    tokens = segments = attended = 0
    for group in _trained_groups(rows):
        ids = [record["token_ids"] for row in group for record in row["records"]]
        length_B = np.array([len(own) for own in ids])
        ids_BT = np.zeros((len(ids), length_B.max()), dtype=np.int64)
        for place, own in enumerate(ids):
            ids_BT[place, : len(own)] = own
        found = find_segments(ids_BT, length_B, share=share)
        tokens += sum(segment.end - segment.start for segment in found)
        segments += len(found)
        attended += sum((segment.end - segment.start) * segment.end for segment in found)
    return float(tokens), float(segments), float(attended)


def _trained_groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["reward"] is not None:
            groups[row["group_id"]].append(row)
    return [group for group in groups.values() if len({row["reward"] for row in group}) > 1]
