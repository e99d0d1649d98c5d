"""What one rollout batch did, as numbers. Counts are exact: what failed, was dropped or was cut is in here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum, sqrt
from statistics import fmean, pstdev

import numpy as np

from verl_mt.data.ledger import listed, total
from verl_mt.data.trajectory import Status, StopReason, Trajectory, TrajectoryGroup
from verl_mt.tools.results import EVENTS

_COUNTED = (
    "retries", "replaced", "reward_errors", "deadlines", "inserted_end_tokens", "unread_messages", "forks",
    "cut_tokens", "masked_tokens", "discarded_tokens", "trained_given_tokens",
    "differing_response_ids", "masked_observation_tokens", "unread_tokens", "dropped_samples",
    "unreturned_conversations", "cut_interaction_texts",
)  # fmt: skip
"""Counters of trajectories that are summed under `rollout/`."""

_OF_THE_REWARD = ("mean", "std", "max", "min", "without_format")
"""Names under `reward/` that a reward function's own keys must not take."""
_MAX_CACHE_TURNS = 8
"""Turns whose prefix cache has a separate number."""


def rollout_metrics(
    groups: Sequence[TrajectoryGroup], tool_names: Iterable[str] = (), num_replicas: int = 1
) -> dict[str, float]:
    """Metrics of the training rollouts of one step, by an engine of which `num_replicas` serve now.

    `stop/<reason>`, `rollout/failed`, `rollout/aborted`, `tools/<name>/calls|errors|...` are counts of the step,
    `tools/<name>/latency_s` and a tool's own metrics are means per call; everything named `mean` is a mean over
    trajectories. What each number looks like when a run goes wrong: docs/diagnostics.md.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    scored = [t for t in trajectories if t.reward is not None]
    metrics: dict[str, float] = {"rollout/trajectories": len(trajectories)}
    rewards = [t.reward for t in scored if t.reward is not None]
    if rewards:
        metrics |= {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/max": max(rewards),
            "reward/min": min(rewards),
        }
        metrics |= _reward_parts(scored)
    metrics |= _shape(scored) | _sampler_entropy(trajectories)
    metrics |= _outcomes(trajectories)
    metrics |= tool_metrics(trajectories, tool_names) | _tool_use(trajectories, tool_names)
    metrics |= _groups(groups) | _replica_tokens_min_share(trajectories, num_replicas)
    return metrics


def validation_metrics(groups: Sequence[TrajectoryGroup], suffix: str) -> dict[str, float]:
    """`val/accuracy<suffix>` (mean score), by data source too, with pass@k where there are several samples.

    A reward that returns `first_answer` beside `score` is validated by it: retries do not flatter the model.
    A trajectory that failed or was aborted counts as score 0: leaving it out would flatter the model.
    """
    by_source: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        by_source[group.data_source].append(group)
    metrics = {f"val/accuracy{suffix}": _accuracy(groups)}
    for source, members in sorted(by_source.items()):
        metrics[f"val/{source}/accuracy{suffix}"] = _accuracy(members)
    if any(len(g.trajectories) > 1 for g in groups):
        k = min(len(g.trajectories) for g in groups)
        metrics[f"val/pass_at_{k}{suffix}"] = fmean(pass_at_k(len(g.trajectories), num_right(g), k) for g in groups)
    trajectories = [t for g in groups for t in g.trajectories]
    calls = sum(_count(t, "calls") for t in trajectories)
    metrics[f"val/tool_calls_mean{suffix}"] = calls / max(1, len(trajectories))
    metrics[f"val/truncated{suffix}"] = sum(t.status is Status.TRUNCATED for t in trajectories) / max(
        1, len(trajectories)
    )
    metrics[f"val/failed{suffix}"] = sum(t.status in (Status.FAILED, Status.ABORTED) for t in trajectories)
    return metrics


def prefix_cache_by_turn(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """`rollout/prefix_cache_hit_rate_turn_<k>`: cached tokens over input tokens of the k-th assistant turn.

    Turns beyond the eighth are one number, `..._turn_9_on`: a rate that falls from one turn to the next says that the
    engine evicts conversations while their tools work.
    """
    cached: dict[int, float] = defaultdict(float)
    asked: dict[int, float] = defaultdict(float)
    for trajectory in trajectories:
        for name, amount in trajectory.counters.items():
            kind, _, turn = name.partition("/")
            if kind in ("cached_tokens", "input_tokens") and turn:
                (cached if kind == "cached_tokens" else asked)[min(int(turn), _MAX_CACHE_TURNS + 1)] += amount
    return {
        f"rollout/prefix_cache_hit_rate_turn_{turn if turn <= _MAX_CACHE_TURNS else f'{turn}_on'}": cached[turn]
        / asked[turn]
        for turn in sorted(asked)
        if asked[turn]
    }


def first_turn_hit_rate(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`rollout/first_turn_hit_rate`: cached tokens of all first turns, over what replicas that begin with empty caches
    and compute nothing twice would have found there.

    That is counted in a prefix tree of the prompts at each replica, where a prompt's last token counts for neither:
    SGLang always computes it. Of n samples of a prompt of P tokens n - 1 find P - 1 of them, and one finds what it
    begins with as another prompt there. So 1 = each shared beginning was computed once; above 1: caches from before the
    step, of a validation, had some, too.
    Absent where no two prompts share anything.
    """
    prompts: dict[str | None, list[bytes]] = defaultdict(list)
    cached = 0.0
    for trajectory in trajectories:
        size = int(trajectory.counters.get("input_tokens/1", 0))
        if size and trajectory.records:
            place = trajectory.replicas[0] if trajectory.replicas else None
            # Big-endian bytes of ids sort as the ids do: what two prompts share is largest between neighbours.
            prompts[place].append(np.array(trajectory.records[0].token_ids[:size], dtype=">i4").tobytes())
            cached += min(trajectory.counters.get("cached_tokens/1", 0), size - 1)
    possible = sum(_shared(before, after) for at_one in prompts.values() for before, after in pairwise(sorted(at_one)))
    return {"rollout/first_turn_hit_rate": cached / possible} if possible else {}


def tokens_by_replica(trajectories: Iterable[Trajectory]) -> Counter[str]:
    """Sampled tokens of each replica; empty where the engine is one."""
    tokens: Counter[str] = Counter()
    for trajectory in trajectories:
        for record in trajectory.records if trajectory.replicas else ():
            for span in record.turns:
                name = trajectory.replicas[span.turn - 1] if 0 < span.turn <= len(trajectory.replicas) else None
                if name is not None:
                    tokens[name] += total(record.sampled[span.start : span.end])
    return tokens


def _replica_tokens_min_share(trajectories: Iterable[Trajectory], num_replicas: int) -> dict[str, float]:
    """`rollout/replica_tokens_min_share`: of the step's sampled tokens, the share of the replica with the fewest."""
    tokens = tokens_by_replica(trajectories)
    if not tokens.total():
        return {}
    # Who serves and was asked for nothing is in no trajectory.
    return {"rollout/replica_tokens_min_share": min(tokens.values()) / tokens.total() * (len(tokens) >= num_replicas)}


def _shared(before: bytes, after: bytes) -> int:
    """Tokens at the beginning of `after` that need not be computed once `before` was."""
    one, other = np.frombuffer(before, ">i4"), np.frombuffer(after, ">i4")
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return min(int(differs.argmax()) if differs.any() else length, len(other) - 1)


def total_failure(groups: Sequence[TrajectoryGroup]) -> str | None:
    """Where every trajectory failed or was aborted: how many, and what most of them died of. Else None."""
    trajectories = [t for g in groups for t in g.trajectories]
    lost = Counter(t.status for t in trajectories if t.status in (Status.FAILED, Status.ABORTED))
    if not trajectories or lost.total() < len(trajectories):
        return None
    kinds = ", ".join(f"{count} {status}" for status, count in lost.items())
    reason, count = Counter(map(_reason, trajectories)).most_common(1)[0]
    first = next(t for t in trajectories if _reason(t) == reason)
    share = f"{count} of them, first {first.trajectory_id}"
    return f"not one of {len(trajectories)} trajectories survived ({kinds}); {share}: {reason}"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate that one of k samples is right, from c right ones of n (Chen et al. 2021, eq. 1)."""
    if n - c < k:
        return 1.0
    miss = 1.0
    for i in range(n - c + 1, n + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss


def interval_95(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean of numbers between 0 and 1, one for each prompt.

    Wilson's (1927), for as many independent coins as would scatter like these numbers: samples of one prompt are alike,
    so that eight of them tell less than eight prompts do. None where a number is outside, or there is none.
    """
    if not values or not all(0.0 <= v <= 1.0 for v in values):
        return None
    mean, variance = fmean(values), pstdev(values) ** 2
    number = len(values) * (mean * (1 - mean) / variance if variance else 1.0)
    z = 1.959964
    middle = (mean + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * sqrt(mean * (1 - mean) / number + z * z / (4 * number * number))
    return max(0.0, middle - half), min(1.0, middle + half)


def prompt_scores(groups: Sequence[TrajectoryGroup], k: int | None = None) -> list[float]:
    """For each prompt the mean score of its samples; or with k the chance that one of k samples is right."""
    if k is None:
        return [fmean(map(_score, g.trajectories)) for g in groups if g.trajectories]
    return [pass_at_k(len(g.trajectories), num_right(g), k) for g in groups]


def tool_metrics(trajectories: Sequence[Trajectory], tool_names: Iterable[str]) -> dict[str, float]:
    """`tools/<name>/<event>` summed. Every configured tool has its calls and errors, even 0.

    What is no event is the sum divided by the number of calls: `latency_s`, and the metrics that tools return
    themselves (of all calls, also of those that returned none).
    """
    totals: dict[str, float] = defaultdict(float)
    for name in tool_names:
        for event in ("calls", "errors", "latency_s"):
            totals[f"tools/{name}/{event}"] += 0
    for trajectory in trajectories:
        for key, amount in trajectory.counters.items():
            if key.startswith("tools/"):
                totals[key] += amount
    for key in list(totals):
        tool, _, event = key.rpartition("/")
        if event not in EVENTS:
            totals[key] /= max(1, totals[f"{tool}/calls"])
    return dict(totals)


def _reward_parts(scored: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/<key>`: the mean over the scored trajectories that have the key, each counted once, however many records.

    Where some lack it, `reward/<key>_share` is the share that has it. A key that is one of the reward's own statistics
    is logged as `reward/part_<key>`. `reward/without_format` is the mean of the reward less its part `format`, where
    there is one.
    """
    metrics: dict[str, float] = {}
    for part in sorted({k for t in scored for k in t.reward_parts}):
        values = [t.reward_parts[part] for t in scored if part in t.reward_parts]
        name = f"part_{part}" if part in _OF_THE_REWARD else part
        metrics[f"reward/{name}"] = fmean(values)
        if len(values) < len(scored):
            metrics[f"reward/{name}_share"] = len(values) / len(scored)
        if part == "format":
            metrics["reward/without_format"] = fmean((t.reward or 0.0) - t.reward_parts.get(part, 0.0) for t in scored)
    return metrics


def _tool_use(trajectories: Sequence[Trajectory], tool_names: Iterable[str]) -> dict[str, float]:
    """`tools/use_rate` (share of trajectories in which a tool ran: a call that the model got wrong runs none), calls a
    trajectory, and the share of calls that failed, whoever was at fault. Absent where there are no tools."""
    calls, failed = tool_calls_and_failures(trajectories)
    if not trajectories or not (calls or tuple(tool_names)):
        return {}
    return {
        "tools/use_rate": sum(tool_runs(t) > 0 for t in trajectories) / len(trajectories),
        "tools/call_frequency": calls / len(trajectories),
        "tools/failure_frequency": failed / max(1.0, calls),
    }


def tool_calls_and_failures(trajectories: Sequence[Trajectory]) -> tuple[float, float]:
    """Calls of all tools, and how many of them failed, whoever was at fault."""
    calls = sum(_count(t, "calls") for t in trajectories)
    return calls, sum(_count(t, "model_errors") + _count(t, "errors") for t in trajectories)


def tool_runs(trajectory: Trajectory) -> float:
    """Calls for which a tool was run."""
    return _count(trajectory, "calls") - _count(trajectory, "model_errors")


def _count(trajectory: Trajectory, event: str) -> float:
    """An event of all tools."""
    return sum(v for k, v in trajectory.counters.items() if k.startswith("tools/") and k.endswith(f"/{event}"))


def _shape(scored: Sequence[Trajectory]) -> dict[str, float]:
    if not scored:
        return {}
    response = [sum(len(r.token_ids) - r.num_prompt_tokens for r in t.records) for t in scored]
    sampled = [t.num_sampled_tokens for t in scored]
    prompts = [t.records[0].num_prompt_tokens for t in scored]
    return {
        "prompt/tokens_mean": fmean(prompts),
        "response/tokens_mean": fmean(response),
        "response/tokens_max": max(response),
        "response/sampled_tokens_mean": fmean(sampled),
        "turns/mean": fmean(t.num_turns for t in scored),
        "turns/max": max(t.num_turns for t in scored),
    }


def _sampler_entropy(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`rollout/entropy`: the mean of -log p, by the sampler, over ALL tokens that it sampled, whatever is trained of
    them. Absent where the engine gave no log-probs; trajectories without them do not count."""
    known = [r for t in trajectories for r in t.records if r.has_log_probs]
    num_tokens = sum(total(r.sampled) for r in known)
    if not num_tokens:
        return {}
    # What was not sampled has log-prob 0.
    return {"rollout/entropy": -fsum(fsum(listed(r.rollout_log_probs)) for r in known) / num_tokens}


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    stops = Counter(t.stop_reason for t in trajectories if t.stop_reason is not None)
    metrics: dict[str, float] = {f"stop/{reason}": stops[reason] for reason in StopReason if stops[reason]}
    metrics["rollout/failed"] = sum(t.status is Status.FAILED for t in trajectories)
    metrics["rollout/aborted"] = sum(t.status is Status.ABORTED for t in trajectories)
    if trajectories:
        cut = sum(t.status is Status.TRUNCATED for t in trajectories)
        metrics["response/clip_ratio"] = cut / len(trajectories)
    totals: Counter[str] = Counter()
    for trajectory in trajectories:
        totals.update({k: v for k, v in trajectory.counters.items() if "/" not in k})
    for name in _COUNTED:
        if totals[name]:
            metrics[f"rollout/{name}"] = totals[name]
    if totals["input_tokens"]:
        metrics["rollout/prefix_cache_hit_rate"] = totals["cached_tokens"] / totals["input_tokens"]
        metrics |= first_turn_hit_rate(trajectories)
    return metrics


def _groups(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Shares of groups whose rewards are all equal, that solve all, that solve none (a score of 1 is solved).

    Agents of several roles on one prompt are several groups.
    """
    members: dict[tuple[int, str], list[Trajectory]] = defaultdict(list)
    for k, t in ((k, t) for k, g in enumerate(groups) for t in g.trajectories):
        if t.reward is not None:
            members[k, t.group_id].append(t)
    if not members:
        return {}
    flat = sum(len({t.reward for t in m}) == 1 for m in members.values())
    solved = [{_score(t) >= 1.0 for t in m} for m in members.values()]
    return {
        "group/zero_variance": flat / len(members),
        "group/solve_all": solved.count({True}) / len(members),
        "group/solve_none": solved.count({False}) / len(members),
    }


def _accuracy(groups: Sequence[TrajectoryGroup]) -> float:
    scores = [_score(t) for g in groups for t in g.trajectories]
    return fmean(scores) if scores else 0.0


def num_right(group: TrajectoryGroup) -> int:
    """Trajectories of a group that count as solved in `val/accuracy` and pass@k."""
    return sum(_score(t) >= 1.0 for t in group.trajectories)


def _score(trajectory: Trajectory) -> float:
    parts = trajectory.reward_parts
    return parts.get("first_answer", parts.get("score", 0.0))


def _reason(trajectory: Trajectory) -> str:
    """The exception of a stored traceback: the lines below its last frame."""
    lines = (trajectory.error or "no error was recorded").strip().splitlines()
    last_frame = max((k for k, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :] or lines[-1:])


def first_and_last(values: Sequence[float], most: int = 10) -> tuple[float, float, int]:
    """(mean of the first `k` values, mean of the last `k`, `k`): what a run began and ended with.

    One step is noise. `k` is a quarter of the values, at least 1 and at most `most`, so that the two never overlap
    where there are two values or more.
    """
    k = max(1, min(most, len(values) // 4))
    return fmean(values[:k]), fmean(values[-k:]), k
