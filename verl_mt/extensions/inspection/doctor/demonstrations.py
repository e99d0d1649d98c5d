"""Demonstrations (`--demos FILE`): finished conversations go through the run's own tools, interaction, limits and
reward, as if a model had sampled them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from verl_mt.chat.demonstrations import WEIGHT
from verl_mt.chat.template import ChatTemplate
from verl_mt.chat.text_delta import turn_ids
from verl_mt.data.conversation import Message
from verl_mt.data.dataset import DataRow, read_rows
from verl_mt.data.trajectory import Status, Trajectory
from verl_mt.errors import DataError
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, error, ok, warning
from verl_mt.extensions.inspection.doctor.row_contents import truth_text
from verl_mt.extensions.inspection.doctor.scripted import SAME, Talk, earned
from verl_mt.extensions.supervised.demonstration_rows import load_demonstrations
from verl_mt.rollout.prompts import Prompt
from verl_mt.trainer import build_data

_MOST = 64
"""Conversations that are played; all are read and measured."""
_KEY = "--demos"
GOLD, WRONG = "gold", "wrong"
"""Columns: what the model should say, and what it should not."""


@dataclass(frozen=True)
class _Demo:
    """A conversation with the data row that it solves."""

    where: str
    prompt: Prompt
    turns: list[list[int]]
    num_tokens: int
    """After the prompt, as written."""
    num_calls: int
    last: str
    """The words of its last turn."""
    wrong: list[list[int]] | None = None
    """The turns of a wrong conversation with the same prompt; None where the row has none."""


def demonstrations(subject: Subject) -> Iterator[Finding]:
    """Those of `--demos` fit the limits, their calls run, and the reward pays them."""
    if subject.demos is None:
        yield ok("none (--demos FILE runs conversations through the real tools and the reward)")
        return
    demos = list(_read(subject, subject.demos))
    few = demos[:_MOST]
    yield ok(f"{len(demos)} read, {len(few)} played")
    yield from _lengths(subject, demos)
    if not few:
        return
    played = subject.open_stage().play([Talk(demo.prompt, demo.turns) for demo in few], unlimited=True)
    yield from _calls(subject, few, played)
    yield from _rewards(subject, few, played)
    yield from _wrong_ones(subject, few, played)


def _read(subject: Subject, file: str) -> Iterator[_Demo]:
    """Raises: DataError: what supervised training would refuse."""
    if Path(file).expanduser().is_dir():
        raise DataError(f"{_KEY}: {file} is a folder. Give a parquet, JSON or JSONL file of conversations (`messages`)")
    chat = subject.known_chat
    rows = conversations(read_rows(file, _KEY), list(islice(subject.train_rows(), _MOST)), file)
    found = load_demonstrations(file, chat, _KEY, data=subject.config.data, tools=subject.tools, rows=rows)
    held_out = [row for source in subject.val for row in source.rows]
    known = {_asked(row.prompt): row for row in [*subject.train_rows(), *held_out]}
    builder = build_data.build_prompts(subject.config, chat, subject.tools)
    builder = replace(builder, max_prompt_length=2**30, _cache={})
    for index, (raw, trajectory) in enumerate(zip(found.rows, found.trajectories, strict=True)):
        if "messages" not in raw or "records" in raw:
            raise DataError(f"{trajectory.trajectory_id}: {_KEY} takes conversations (`messages`), not rollouts")
        messages: list[Message] = [{k: v for k, v in m.items() if k != WEIGHT} for m in trajectory.messages]
        turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        row = _row(raw, messages[: turns[0]], known, f"{file}", index)
        prompt = builder.build(row)
        assert prompt is not None, "the limit is out of reach"
        record = trajectory.records[0]
        wrong = None if raw.get(WRONG) is None else wrong_messages(messages, raw[WRONG], trajectory.trajectory_id)
        yield _Demo(
            trajectory.trajectory_id,
            prompt,
            _turns(chat, messages, prompt),
            len(record.token_ids) - record.sampled.index(1),
            sum(len(messages[i].get("tool_calls") or ()) for i in turns),
            str(messages[turns[-1]].get("content") or ""),
            None if wrong is None else _turns(chat, wrong, prompt),
        )


def _turns(chat: ChatTemplate, messages: Sequence[Message], prompt: Prompt) -> list[list[int]]:
    """Ids of each turn of the model."""
    own = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    return [turn_ids(chat, list(messages[:i]), messages[i], tools=prompt.tools or None, raw=False) for i in own]


def conversations(rows: dict[int, dict[str, Any]], train: Sequence[DataRow], file: str) -> dict[int, dict[str, Any]]:
    """Rows with `messages`, of rows that say only what the model writes (`gold`).

    Args:
        rows: position, from 0 -> row. Each has `messages`, or `gold`: the model's text or messages, an answer to the
            row's own `prompt`, or else to the training row of the same position.
        train: the first training rows.
        file: where the rows are from, for errors.

    Raises:
        DataError: `gold` and `messages`, or neither; or `gold` without a question.
    """
    found = {}
    for index, row in rows.items():
        where = f"{_KEY}: {file}, row {index + 1}"
        if (GOLD in row) == ("messages" in row) and "records" not in row:
            raise DataError(f"{where}: needs `messages` (a whole conversation) or `{GOLD}` (what the model says)")
        if GOLD in row:
            asked: Any = row.get("prompt")
            if asked is None and index >= len(train):
                raise DataError(f"{where}: has no `prompt`, and there is no training row {index + 1} that it answers")
            asked = train[index].prompt if asked is None else asked
            asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
            row = {**row, "messages": [*asked, *_said(row[GOLD], where)]}
        found[index] = row
    return found


def wrong_messages(messages: Sequence[Message], wrong: Any, where: str) -> list[Message]:
    """The conversation that should earn less: a text takes the place of the last answer; messages, of all that came
    after the prompt."""
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    kept = turns[-1] if isinstance(wrong, str) else turns[0]
    return [*messages[:kept], *_said(wrong, f"{where}: {WRONG}")]


def _said(said: Any, where: str) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "assistant", "content": said}]
    messages = list(said) if isinstance(said, list | tuple) else []
    if not messages or not all(isinstance(m, dict) for m in messages) or messages[-1].get("role") != "assistant":
        raise DataError(f"{where}: expected a text, or messages of which the last is the assistant's, got {said!r:.80}")
    return messages


def _row(raw: dict[str, Any], prompt: list[Message], known: dict[str, DataRow], file: str, index: int) -> DataRow:
    """The data row that the conversation solves: its own columns, else the row that asks the same; one without a ground
    truth where there is neither."""
    model = raw.get("reward_model")
    own = raw.get("ground_truth", model.get("ground_truth") if isinstance(model, dict) else None)
    same = known.get(_asked(prompt))
    if same is not None:
        return replace(same, prompt=prompt, ground_truth=same.ground_truth if own is None else own)
    any_row = next(iter(known.values()))
    extra = raw.get("extra_info") if isinstance(raw.get("extra_info"), dict) else {}
    return replace(
        any_row, prompt=prompt, ground_truth=own, extra_info=dict(extra or {}), raw=raw, file=file, index=index,
        data_source=str(raw.get("data_source", any_row.data_source)),
    )  # fmt: skip


def _asked(messages: Sequence[Message]) -> str:
    """The question, whatever system message stands before it."""
    return repr([(m.get("role"), m.get("content")) for m in messages if m.get("role") != "system"])


def _lengths(subject: Subject, demos: Sequence[_Demo]) -> Iterator[Finding]:
    rollout, data = subject.rollout, subject.config.data
    turns = rollout.multi_turn
    run, several = "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.multi_turn."
    limits: tuple[tuple[str, int | None, Callable[[_Demo], int], str], ...] = (
        (f"{run}response_length", rollout.response_length, lambda d: d.num_tokens, "tokens behind its prompt"),
        (
            f"{run}max_tokens_per_turn",
            rollout.max_tokens_per_turn,
            lambda d: max(map(len, d.turns)),
            "tokens in a turn",
        ),
        ("data.max_prompt_length", data.max_prompt_length, lambda d: len(d.prompt.ids), "tokens in its prompt"),
        (f"{run}max_model_len", rollout.max_model_len, lambda d: len(d.prompt.ids) + d.num_tokens, "tokens"),
        (f"{several}max_assistant_turns", turns.max_assistant_turns, lambda d: len(d.turns), "assistant turns"),
        (f"{several}max_tool_calls", turns.max_tool_calls, lambda d: d.num_calls, "tool calls"),
    )
    for key, limit, measure, unit in limits:
        over = [demo for demo in demos if limit is not None and measure(demo) > limit]
        if over:
            longest = max(over, key=measure)
            yield warning(
                f"{len(over)} of {len(demos)} demonstrations do not fit into {key}={limit}: the longest "
                f"({longest.where}) has {measure(longest)} {unit}",
                f"raise {key} to {measure(longest)} and some more: a model that does as it was shown is cut",
            )
    longest_of_all = max(demos, key=lambda demo: demo.num_tokens)
    yield ok(f"the longest has {longest_of_all.num_tokens} tokens behind its prompt ({longest_of_all.where})")


def _calls(subject: Subject, demos: Sequence[_Demo], played: Sequence[Trajectory]) -> Iterator[Finding]:
    """The calls that are written down run, and do not fail."""
    failed = [(d, t) for d, t in zip(demos, played) if t.status in (Status.FAILED, Status.ABORTED)]
    if failed:
        demo, trajectory = failed[0]
        reason = (trajectory.error or "no error was recorded").strip().splitlines()[-1]
        yield error(f"{len(failed)} of {len(demos)} demonstrations {trajectory.status}: {demo.where}: {reason}", "")
    for name in subject.tools.names if subject.tools is not None else ():
        calls = sum(t.counters.get(f"tools/{name}/calls", 0) for t in played)
        broken = [(d, t) for d, t in zip(demos, played) if t.counters.get(f"tools/{name}/errors")]
        if broken and 2 * sum(t.counters[f"tools/{name}/errors"] for _, t in broken) >= calls:
            demo, trajectory = broken[0]
            said = next((str(m.get("content")) for m in trajectory.messages if m["role"] == "tool"), "")
            yield warning(
                f"tool {name}: most calls of the demonstrations fail ({demo.where}: {said[:120]})",
                "repair the tool, or the demonstrations: a cold start would teach calls that do not work",
            )
    missing = [
        (d, t) for d, t in zip(demos, played) if len(t.tool_calls) < d.num_calls and t.status == Status.COMPLETED
    ]
    if missing:
        demo, trajectory = missing[0]
        yield warning(
            f"{len(missing)} of {len(demos)} demonstrations make calls that the run does not see: {demo.where} holds "
            f"{demo.num_calls}, {len(trajectory.tool_calls)} were run (it ended as {trajectory.stop_reason})",
            "the run's tool_parser and turn limits must fit what the demonstrations do",
        )


def _rewards(subject: Subject, demos: Sequence[_Demo], played: Sequence[Trajectory]) -> Iterator[Finding]:
    scored = [(d, t) for d, t in zip(demos, played) if t.reward is not None and d.prompt.row.ground_truth is not None]
    if not scored:
        yield ok("none has the prompt of a data row or a ground truth: nothing to reward")
        return
    values = [earned(trajectory) for _, trajectory in scored]
    best = max(values)
    subject.rewarded_demos = best > 0 or max(values) > min(values)
    if subject.rewarded_demos:
        yield ok(f"{sum(v > 0 for v in values)} of {len(values)} are rewarded, {min(values):.4g} to {best:.4g}")
        return
    demo = scored[0][0]
    truth = truth_text(demo.prompt.row.ground_truth) or demo.prompt.row.ground_truth
    yield warning(
        f"the reward gives {best:.4g} to all {len(values)} demonstrations: {demo.where} ends with {demo.last[-60:]!r}, "
        f"and the truth is {truth!r}",
        "see how the reward finds the answer in the text, and what it compares it with",
    )


def _wrong_ones(subject: Subject, demos: Sequence[_Demo], played: Sequence[Trajectory]) -> Iterator[Finding]:
    """What is right earns more than what is wrong."""
    pairs = [(demo, gold, demo.wrong) for demo, gold in zip(demos, played) if demo.wrong is not None]
    if not pairs:
        return
    talks = [Talk(demo.prompt, wrong) for demo, _, wrong in pairs]
    others = subject.open_stage().play(talks, unlimited=True)
    scores = [(demo, earned(gold), earned(wrong)) for (demo, gold, _), wrong in zip(pairs, others)]
    bad = [(demo, gold, wrong) for demo, gold, wrong in scores if gold <= wrong + SAME]
    if not bad:
        low, high = min(gold for _, gold, _ in scores), max(wrong for _, _, wrong in scores)
        yield ok(f"gold earns more than wrong in all {len(scores)}: at least {low:.4g}, wrong at most {high:.4g}")
        return
    demo, gold, wrong = bad[0]
    yield warning(
        f"gold does not earn more than wrong in {len(bad)} of {len(scores)}: {demo.where}: gold {gold:.4g}, wrong "
        f"{wrong:.4g}",
        "see how the reward finds the answer in the text, and what it compares it with",
    )
