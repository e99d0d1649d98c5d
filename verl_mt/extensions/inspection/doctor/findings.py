"""What the doctor looks at, what a check says, how checks depend on each other, and the list that is printed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_mt import engines
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.schema import Config
from verl_mt.data.dataset import DataRow, DataSource
from verl_mt.errors import PluginError, VerlMTError, error_text
from verl_mt.extensions.inspection.doctor.scripted import Stage
from verl_mt.interactions.base import BaseInteraction
from verl_mt.rewards.base import Reward
from verl_mt.rollout.prompts import Prompt
from verl_mt.tools.registry import ToolSet

Status = Literal["ok", "warning", "error", "skipped"]
_NEEDS = "needs "
_LOOKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
    "skipped": ("-", "dim"),
}


@dataclass
class Subject:
    """A run that has not begun."""

    config: Config
    chat: ChatTemplate | None = None
    tools: ToolSet | None = None
    reward: Reward | None = None
    interactions: dict[str, BaseInteraction] = field(default_factory=dict)
    module: Any = None
    """The model without weights (`meta` device)."""
    train: list[DataSource] = field(default_factory=list)
    val: list[DataSource] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    """Rendered from the first rows of each training entry."""
    demos: str | None = None
    """A file of finished conversations to look at."""
    rewarded_demos: bool = False
    """The reward gives some of them more than the others, or than a wrong answer."""
    _stage: Stage | None = None

    def train_rows(self) -> Iterator[DataRow]:
        """All of those that are loaded; of files that are not, the first."""
        for source in self.train:
            yield from islice(source.rows, self.config.data.eager_rows or None)

    def open_stage(self) -> Stage:
        """Where scripted conversations are played; `close` closes it."""
        if self._stage is None:
            self._stage = Stage(self.config, self.known_chat, self.tools)
        return self._stage

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @property
    def known_chat(self) -> ChatTemplate:
        assert self.chat is not None, "a check that needs the template says so"
        return self.chat

    @property
    def samples_from_policy(self) -> bool:
        """Whether the engine shares the actor's module and devices. Not where there is no such engine: its own check
        says that, and once is enough."""
        try:
            return engines.samples_from_policy(self.rollout.name)
        except PluginError:
            return False

    @property
    def num_rows(self) -> int:
        return sum(len(source.rows) for source in self.train)

    @property
    def num_ranks(self) -> int:
        return self.config.trainer.nnodes * self.config.trainer.n_workers_per_node

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens."""
        both = self.config.data.max_prompt_length + self.rollout.response_length
        return min(both, self.rollout.max_model_len or both)

    @property
    def total_steps(self) -> int:
        """As the run would count them."""
        trainer = self.config.trainer
        by_epochs = trainer.total_epochs * self.num_rows // self.config.data.train_batch_size
        wanted = trainer.total_training_steps
        return by_epochs if wanted is None else min(by_epochs, wanted)


@dataclass(frozen=True)
class Finding:
    """One line of the list."""

    status: Status
    text: str
    """What was found; where it was raised, what to do as well."""
    fix: str = ""
    check: str = ""
    """The name of the check that found it; `run_checks` fills it in."""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def not_looked_at(text: str) -> Finding:
    return Finding("skipped", text)


def warning(text: str, fix: str) -> Finding:
    return Finding("warning", text, fix)


def error(text: str, fix: str) -> Finding:
    return Finding("error", text, fix)


@dataclass(frozen=True)
class Check:
    """Looks at one thing."""

    name: str
    look: Callable[[Subject], Iterator[Finding]]
    needs: tuple[str, ...] = ()
    """Checks without whose success this one has nothing to look at."""


def run_checks(checks: Sequence[Check], subject: Subject) -> Iterator[Finding]:
    """All findings, in order. What a check raises is its error, and whoever needs that check is skipped: never a
    traceback (the environment variable VERL_MT_TRACEBACK=1 shows it)."""
    failed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name in failed]
        if missing:
            failed.add(check.name)
            yield Finding("skipped", f"{_NEEDS}{' and '.join(missing)}", check=check.name)
            continue
        for found in _look(check, subject):
            if found.status == "error":
                failed.add(check.name)
            yield replace(found, check=check.name)


def _look(check: Check, subject: Subject) -> Iterator[Finding]:
    try:
        yield from check.look(subject)
    except VerlMTError as raised:
        yield error(str(raised), "")
    except Exception as raised:
        if os.environ.get("VERL_MT_TRACEBACK") == "1":
            raise
        yield error(error_text(raised, named=True), "VERL_MT_TRACEBACK=1 shows where. A run would end there as well")


def show(findings: Sequence[Finding], console: Console | None = None) -> int:
    """Print them; the checks that need a failed one are one line. Returns the exit status: 2 with errors, else 0."""
    console = console or Console()
    counts = Counter(found.status for found in findings)
    skipped = [found for found in findings if found.status == "skipped" and found.text.startswith(_NEEDS)]
    findings = [found for found in findings if found not in skipped]
    if skipped:
        names, needed = (list(dict.fromkeys(words)) for words in zip(*((f.check, f.text) for f in skipped)))
        findings.append(Finding("skipped", f"{', '.join(names)} ({'; '.join(needed)})", check="not looked at"))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for found in findings:
        word, style = _LOOKS[found.status]
        text = Text(found.text, style="dim" if found.status == "skipped" else "")
        if found.fix:
            text.append(f"\n-> {found.fix}", style="cyan")
        table.add_row(Text(word, style=style), found.check, text)
    console.print(table)
    console.print(
        f"{counts['error']} error(s), {counts['warning']} warning(s), {counts['skipped']} skipped, {counts['ok']} ok"
    )
    return 2 if counts["error"] else 0
