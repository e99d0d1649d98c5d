"""`python -m verl_mt.data_check`: deprecated, use `verl-mt doctor FILE`.

    verl-mt doctor train.jsonl val.jsonl
    verl-mt doctor train.parquet --model Qwen/Qwen2.5-3B-Instruct data.prompt_key=question
    verl-mt doctor train.jsonl actor_rollout_ref.rollout.environment.path=maze.py:Maze

Every row is read as a run reads it. Printed are what each column means, the first row as messages (with `--model` as
the text that the model reads), and every row that cannot be used. `docs/your_own_data.md` shows a row with all columns.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mt.config.compose import compose
from verl_mt.config.rollout import EnvironmentConfig
from verl_mt.config.schema import DataConfig
from verl_mt.data.conversation import Message, user_texts
from verl_mt.data.dataset import Columns, DataRow, examine_rows
from verl_mt.environments.kinds import KEY, build_environments
from verl_mt.errors import DataError, VerlMTError
from verl_mt.extensions.inspection.doctor.row_contents import doubts, words_of
from verl_mt.plugins import listing

if TYPE_CHECKING:
    from verl_mt.chat.template import ChatTemplate

_MEANINGS = {
    "data_source": "chooses the reward function; validation is reported under it",
    "reward_model": "the reward gets its ground_truth",
    "ground_truth": "the reward gets it",
    "extra_info": "the reward gets it; tools_kwargs, tool_selection, prompt_tools, interaction_kwargs in it are read",
    "images": "pictures for the places <image> of the prompt",
    "videos": "videos for the places <video> of the prompt",
    "metadata": "metadata of the sample that a generate function sees",
    "agent_name": "tool_agent or single_turn_agent: whether the row may call tools",
}
_OTHER = "kept with the row: agents, schedulers and ms-swift's rewards get it"
_ROLES = ("system", "user", "assistant", "tool")
_CONTROL = re.compile(r"<\|\w{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>|\[/?INST\]")
"""Control tokens of published chat templates, where no model says which it has."""
_NUM_SHOWN = 20
"""Problems and remarks that are printed; `DataCheck` holds all."""


@dataclass(frozen=True)
class ColumnFound:
    """A column, as it is in the rows."""

    kinds: dict[str, int]
    """text, whole number, number, ... -> rows; `absent` and `null` are kinds."""
    example: Any
    """Of the first row that has one."""
    meaning: str


@dataclass(frozen=True)
class DataCheck:
    """What was understood of one file. True where every row can be used."""

    path: str
    num_rows: int
    columns: dict[str, ColumnFound]
    rows: list[DataRow] = field(repr=False)
    """Those that can be used, their prompts as messages."""
    rendered: str | None = None
    """Its prompt as the model of `model=` reads it, generation prompt included, tools not. None = no model."""
    longest: tuple[int, str] | None = None
    """Most tokens in a prompt, and the row; None = no model."""
    problems: list[str] = field(default_factory=list)
    """Rows that no run can use, with file and row: a run refuses the first of them."""
    remarks: list[str] = field(default_factory=list)
    """What is probably not meant."""

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        good = "all can be used" if self else f"{len(self.problems)} cannot be used"
        lines = [f"{self.path}: {self.num_rows} rows, {good}"]
        width = max(map(len, self.columns), default=0)
        for name, column in self.columns.items():
            kinds = ", ".join(k if n == self.num_rows else f"{k} in {n} rows" for k, n in column.kinds.items())
            lines += [f"  {name:{width}}  {kinds}: {_short(column.example)}", f"  {'':{width}}  -> {column.meaning}"]
        if self.rows:
            first, shown = self.rows[0], [self.rendered or ""]
            if self.rendered is None:
                shown = [f"{m['role']}> {_text(m)}" for m in first.prompt]
            lines += ["first row:", *(f"  {line}" for text in shown for line in text.splitlines())]
            truth = f"{_short(first.ground_truth)} ({_kind(first.ground_truth)})"
            lines.append(f"  the reward for {first.data_source!r} gets the ground truth {truth}")
        if self.longest is not None:
            lines.append(f"longest prompt: {self.longest[0]} tokens without tools ({self.longest[1]})")
        for word, found in (("note", self.remarks), ("problem", self.problems)):
            lines += [f"{word}: {text}" for text in found[:_NUM_SHOWN]]
            lines += [f"... and {len(found) - _NUM_SHOWN} more"] if len(found) > _NUM_SHOWN else []
        return "\n".join(lines)


def check_data(path: str | Path, *, model: str | None = None, overrides: Sequence[str] = ()) -> DataCheck:
    """Read a data file as a run would, to its end.

    Args:
        path: a .parquet, .jsonl or .json file, or `module:function` as `data.train_files` takes it.
        model: a folder or hub name: its chat template renders the prompts, and its tokenizer counts them.
        overrides: keys that say how rows are read: those of `data` (`["data.prompt_key=question"]`), and of
            `actor_rollout_ref.rollout.environment`, whose rows need no prompt.

    Raises:
        VerlMTError: the file cannot be read or has no rows, a key is wrong, or the model's template cannot be had.
    """
    config = compose(overrides, config_name="ppo_trainer") if overrides else None
    data = config.data if config else DataConfig()
    environment = config.actor_rollout_ref.rollout.environment if config else EnvironmentConfig()
    makes_prompt = environment.is_configured
    columns = Columns(
        data.prompt_key, data.label_key, not data.apply_chat_template, data.columns, data.system, makes_prompt
    )
    raw, rows, problems = examine_rows(str(path), num_rows=data.train_max_samples, columns=columns)
    remarks = _remarks(rows, columns.prompt)
    if makes_prompt:
        problems += _unfit(rows, environment)
    elif raw and not any(columns.prompt in row for row in raw.values()):
        remarks.append(f"no row has a prompt. An environment may make it: add {KEY}.path=PATH")
    rendered = longest = None
    control = _likely_control
    if model is not None and rows:
        from verl_mt.chat.loading import load_chat  # transformers: seconds that nobody else waits for

        chat = load_chat(model)
        control = chat.control_text
        rendered, longest, unshown = _rendered(rows, chat)
        problems += unshown
    having = [row for row in rows if control(row.prompt)]
    if having:
        remarks.append(
            f"{_places(having)}: a user's text holds control tokens ({listing(map(repr, control(having[0].prompt)))}); "
            "the model sees the end of a turn there. Take them out, or set actor_rollout_ref.model.trust_prompts=False"
        )
    found = {name: _column_found(name, list(raw.values()), columns) for row in raw.values() for name in row}
    return DataCheck(str(path), len(raw), found, rows, rendered, longest, problems, remarks)


def _unfit(rows: Sequence[DataRow], config: EnvironmentConfig) -> list[str]:
    """What the environment's class wants and a row has not."""
    tools, found = build_environments(config, None, 60.0), []
    for row in rows:
        try:
            assert tools is not None
            tools.of_row(row.extra_info, row.raw)
        except DataError as error:
            found.append(f"{row.place}: {error}")
    return found


def _column_found(name: str, rows: list[dict[str, Any]], columns: Columns) -> ColumnFound:
    kinds = Counter(_kind(row[name]) if name in row else "absent" for row in rows)
    example = next((row[name] for row in rows if row.get(name) is not None), None)
    meaning = _MEANINGS.get(name, _OTHER)
    if name == columns.prompt:
        meaning = "the prompt; a text is one message of the user"
    elif name == columns.label:
        meaning = "the reward gets it"
    elif name == "ground_truth" and any("reward_model" in row for row in rows):
        meaning = "read where a row has no reward_model"
    return ColumnFound(dict(kinds), example, meaning)


def _remarks(rows: Sequence[DataRow], prompt: str) -> list[str]:
    """What no run refuses, and few people want."""
    found = []
    taken_off = [row for row in rows if isinstance(given := row.raw.get(prompt), list) and _ends_in_answer(given)]
    if taken_off:
        found.append(f"{_places(taken_off)}: the last message is the assistant's; it is taken off, the model answers")
    for role in dict.fromkeys(m["role"] for row in rows for m in row.prompt if m["role"] not in _ROLES):
        having = [row for row in rows if any(m["role"] == role for m in row.prompt)]
        found.append(f"{_places(having)}: role {role!r}; most templates know {', '.join(_ROLES)} only (try --model)")
    kinds: dict[str, DataRow] = {}
    for row in rows:
        kinds.setdefault(_kind(row.ground_truth), row)
    if len(kinds) > 1:
        each = "; ".join(f"{kind} in {row.place}" for kind, row in kinds.items())
        found.append(
            f"the ground truth is of several kinds: {each}. A reward that compares texts must make texts of them"
        )
    found += [text for text, _ in doubts(rows)]
    return found


def _ends_in_answer(messages: list[Any]) -> bool:
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _likely_control(messages: Sequence[Message]) -> list[str]:
    """What most chat models take for control tokens."""
    return list(dict.fromkeys(literal for text in user_texts(messages) for literal in _CONTROL.findall(text)))


def _rendered(rows: Sequence[DataRow], chat: ChatTemplate) -> tuple[str, tuple[int, str] | None, list[str]]:
    """The first row's prompt as text; most tokens and the row that has them; what the template cannot show."""
    from verl_mt.chat.prompt_messages import require_traces

    problems, lengths = [], []
    for row in rows:
        try:
            lengths.append((len(chat.prompt_ids(row.prompt, None)), row.place))
            require_traces(chat, row.prompt, None)
        except VerlMTError as error:
            problems.append(f"{row.place}: {error}")
    text = chat.full_text(rows[0].prompt, None, add_generation_prompt=True)
    return text, max(lengths, default=None), problems


def _places(rows: Sequence[DataRow]) -> str:
    return rows[0].place if len(rows) == 1 else f"{rows[0].place} and {len(rows) - 1} more"


def _kind(value: Any) -> str:
    names = {bool: "truth value", str: "text", int: "whole number", float: "number", list: "list", type(None): "null"}
    return "mapping" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else _short(content)


def _shared(one: DataCheck, other: DataCheck) -> list[str]:
    """What is in both files: what was trained on measures nothing."""
    known = {words_of(row) for row in one.rows}
    both = [row for row in other.rows if words_of(row) in known]
    return [f"note: {_places(both)}: the prompt is in {one.path}, too"] if both else []


def main(argv: list[str] | None = None) -> int:
    """`run` under its old name. Returns its exit status."""
    print("python -m verl_mt.data_check is deprecated: write verl-mt doctor FILE", file=sys.stderr)
    return run(sys.argv[1:] if argv is None else argv)


def run(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 2 where a row or the input cannot be used (bad input: one line on stderr)."""
    parser = argparse.ArgumentParser(
        prog="verl-mt doctor",
        usage="%(prog)s FILE [FILE ...] [--model PATH] [KEY=value ...]",
        description="What a run would understand of files of rows, and what it could not use.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=".parquet, .jsonl or .json, or module:function")
    parser.add_argument("--model", help="local folder or hub name: render the prompts with its chat template")
    args = parser.parse_args(argv)
    overrides = [word for word in args.files if word.startswith(("data.", f"{KEY}.")) and "=" in word]
    try:
        checks = [check_data(f, model=args.model, overrides=overrides) for f in args.files if f not in overrides]
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(map(str, checks)))
    for one, other in combinations(checks, 2):
        for note in _shared(one, other):
            print(note)
    return 0 if all(checks) else 2


if __name__ == "__main__":
    sys.exit(main())
