"""From data rows to prompts: messages, tools of the row, token ids; over-long ones filtered and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_mt.chat.encode import strings_in
from verl_mt.chat.prompt_messages import require_traces
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message
from verl_mt.data.dataset import DataRow
from verl_mt.data.media import describe, has_media
from verl_mt.data.sampler import RowSampler
from verl_mt.environments.kinds import EnvironmentTools
from verl_mt.errors import DataError, TemplateError, VerlMTError, value_text
from verl_mt.plugins import listing, suggest
from verl_mt.tools.registry import ToolSet

log = logging.getLogger(__name__)

_MAX_DRAWS = 20
"""Rows drawn for each prompt of a step before an order whose rows have no prompts is an error."""
_BAD_ROWS_SAID = 20
_LONG_CHARS = 200_000
"""Shorter prompts are tokenized in less than a second."""
_MAX_CUT_CHARS = 2_000_000
"""What `data.truncation` still cuts: some seconds of tokenization."""


_ONE_TURN = "single_turn_agent"
_LOOPS = ("tool_agent", _ONE_TURN)
"""What the column `agent_name` of verl's rows may say."""


@dataclass(frozen=True)
class Prompt:
    """A row, ready to roll out."""

    row: DataRow
    messages: list[Message]
    tools: list[dict[str, Any]]
    ids: list[int]
    """First prompt, generation prompt included; empty where an environment makes it."""
    toolset: ToolSet | None = None
    """The tools that this row may call."""
    problem: str | None = None
    """What is wrong with the row's own arguments, where a sampler made the row during the run: its trajectories fail
    with this text, the others go on. `PromptBuilder.keep` refuses such a row."""
    truncated: bool = False
    """`data.truncation` cut it to `data.max_prompt_length`."""
    one_turn: bool = False
    """The row's `agent_name` asks for one answer, without tools and interaction."""


def ends_with_user(messages: Sequence[Message]) -> bool:
    """Whether the model may answer these messages."""
    return bool(messages) and messages[-1].get("role") != "system"


@dataclass
class PromptBuilder:
    """Renders rows. One instance per run."""

    chat: ChatTemplate
    tools: ToolSet | None
    max_prompt_length: int
    filter_overlong: bool
    truncation: str
    single_turn: bool = False
    """`multi_turn.enable` is False: rows that ask for tools do without them."""
    reads_agent_name: bool = True
    """The column `agent_name` says how a row is rolled out; False where a loop of the user's drives the conversations,
    to which it is a column as any other."""
    skips_bad: bool = False
    """Rows without a prompt are left out and counted (`data.on_bad_row`); False = they are an error."""
    num_unseen: int = 0
    """Rows of files that are not loaded: what was not looked at before the first step is when it is drawn."""
    num_filtered: int = 0
    """Rows that `keep` left out because they are too long."""
    num_truncated: int = 0
    num_bad: int = 0
    """Rows that were left out because they have no prompt."""
    num_control: int = 0
    """Prompts in which users' text becomes control tokens."""
    first_control: str = ""
    """The first of them, and its control tokens."""
    _cache: dict[int, Prompt] = field(default_factory=dict)
    _looked_at: list[DataRow] = field(default_factory=list)

    def build(self, row: DataRow) -> Prompt | None:
        """The prompt of a row, or None if it is too long and over-long rows are filtered.

        Raises:
            DataError: too long, and `data.truncation` is `error`; or it needs tools and none are configured; or the
                template cannot render it, or drops a message; or what was read is no row. Names file and row.
        """
        if row.problem is not None:
            raise DataError(row.problem)
        known = self._cache.get(id(row))
        if known is not None:
            return known
        one_turn, problem = self._loop_of(row)
        toolset = None
        if not one_turn and problem is None:
            toolset, problem = self._tools_of(row)
        shown = None if problem else row.extra_info.get("prompt_tools")
        tools = toolset.schemas(shown) if toolset is not None else []
        if self._far_too_long(row, tools):
            return None
        # Of a row that has no prompt yet, its environment makes one.
        begins_later = isinstance(self.tools, EnvironmentTools) and not ends_with_user(row.prompt)
        ids = [] if begins_later else self._ids(row, tools)
        if control := self.chat.control_text(row.prompt):
            self.num_control += 1
            self.first_control = self.first_control or f"{row.place}: {listing(map(repr, control))}"
        too_long = len(ids) > self.max_prompt_length
        if too_long:
            if self.filter_overlong:
                return None
            ids = self._truncate(row, ids)
        return Prompt(row, row.prompt, tools, ids, toolset, problem, truncated=too_long, one_turn=one_turn)

    def keep(self, rows: Sequence[DataRow]) -> list[DataRow]:
        """The rows whose prompt fits; the others are counted in `num_filtered`.

        Raises:
            DataError: no row is left, or what a row says about tools cannot be; names file and row.
        """
        kept, bad = [], self.num_bad
        for row in rows:
            try:
                prompt = self.build_sound(row)
            except DataError as error:
                self.leave_out(row, error)
                continue
            if prompt is None:
                self.num_filtered += 1
                continue
            self._cache[id(row)] = prompt
            kept.append(row)
        if rows and not kept and self.num_bad > bad:
            raise DataError(f"{rows[0].file}: none of {len(rows)} rows is left, {self.num_bad - bad} are bad")
        if rows and not kept:
            raise DataError(
                f"{rows[0].file}: all {len(rows)} prompts are longer than data.max_prompt_length="
                f"{self.max_prompt_length} tokens. Raise it, or check the chat template and the tools' schemas "
                "(they are part of the prompt)"
            )
        return kept

    def build_sound(self, row: DataRow) -> Prompt | None:
        """As `build`, for a row of a file, whose own arguments have to be right.

        Raises:
            DataError: they are not, as well.
        """
        prompt = self.build(row)
        if prompt is not None and prompt.problem is not None:
            raise DataError(prompt.problem)
        return prompt

    def look_at(self, rows: Sequence[DataRow]) -> None:
        """Render the first rows of a file that is not loaded, so that what is wrong with all of them is said at once.
        Those that have a prompt are among `rows()`; nothing is counted, for they will be drawn.

        Raises:
            DataError: one is bad; where those are left out, all of them.
        """
        truncated, errors = self.num_truncated, []
        for row in rows:
            try:
                if self.build_sound(row) is not None:
                    self._looked_at.append(row)
            except DataError as error:
                if not self.skips_bad:
                    raise
                errors.append(error)
        self.num_truncated = truncated
        if rows and len(errors) == len(rows):
            raise DataError(f"{errors[0]}. None of the first {len(rows)} rows of {rows[0].file} has a prompt")

    def leave_out(self, row: DataRow, error: VerlMTError) -> None:
        """Count a row that cannot be used, and forget it.

        Raises:
            VerlMTError: `error`, if bad rows are not left out.
        """
        if not self.skips_bad:
            raise error
        self._cache.pop(id(row), None)
        self.num_bad += 1
        if self.num_bad <= _BAD_ROWS_SAID:
            last = "; further ones are only counted" if self.num_bad == _BAD_ROWS_SAID else ""
            log.warning("left out (data.on_bad_row=skip): %s%s", error, last)

    def knows(self, row: DataRow) -> bool:
        """Whether `keep` took the row; a custom sampler may make others."""
        return id(row) in self._cache

    def rows(self) -> list[DataRow]:
        """All rows that `keep` took, and of files that are not loaded the first."""
        return [prompt.row for prompt in self._cache.values()] + self._looked_at

    def _ids(self, row: DataRow, tools: list[dict[str, Any]]) -> list[int]:
        try:
            ids = self.chat.prompt_ids(row.prompt, tools or None)
            require_traces(self.chat, row.prompt, tools or None)
            return ids
        except (TemplateError, DataError) as error:
            raise DataError(f"{row.place}: {error}") from error

    def _loop_of(self, row: DataRow) -> tuple[bool, str | None]:
        """Whether the row wants one answer only; what is wrong with its `agent_name`."""
        name = row.raw.get("agent_name") if self.reads_agent_name else None
        if name is None or name in _LOOPS:
            return name == _ONE_TURN, None
        return False, (
            f"{row.place}: column agent_name is {value_text(name, 80)}, but the loops that a row can "
            f"name are {listing(_LOOPS)}{suggest(str(name), _LOOPS).removesuffix('?')}. For a custom loop leave "
            "out the column, and set actor_rollout_ref.rollout.custom_generate_function_path or .multi_turn.scheduler"
        )

    def _tools_of(self, row: DataRow) -> tuple[ToolSet | None, str | None]:
        if self.tools is None:
            self._refuse_without_tools(row)
            return None, None
        try:
            chosen = self.tools.of_row(row.extra_info, row.raw)
        except DataError as error:
            return self.tools, f"{row.place}: {error}"
        return chosen, None

    def _refuse_without_tools(self, row: DataRow) -> None:
        wants = "tool_selection" if row.tool_selection else "need_tools_kwargs" if row.need_tools_kwargs else None
        if wants is not None and not self.single_turn:
            raise DataError(
                f"{row.place}: extra_info.{wants} is {row.extra_info[wants]!r}, but no tools are "
                "configured. Name them in actor_rollout_ref.rollout.tool_kwargs.tools_config_file, or set "
                "actor_rollout_ref.rollout.multi_turn.enable=False to do without"
            )

    def _far_too_long(self, row: DataRow, tools: list[dict[str, Any]]) -> bool:
        """Whether to leave a row out that would take minutes to tokenize; it is not tokenized to find that out.

        Raises:
            DataError: it is that long, and over-long rows are not left out.
        """
        limit, num_chars = self.max_prompt_length, sum(map(len, strings_in(row.prompt)))
        cut = not self.filter_overlong and self.truncation != "error"
        if has_media(row.prompt) or num_chars <= (_MAX_CUT_CHARS if cut else _LONG_CHARS):
            return False
        try:
            if not self.chat.surely_longer(row.prompt, tools or None, limit):
                return False
        except TemplateError as error:
            raise DataError(f"{row.place}: {error}") from error
        if not self.filter_overlong:
            also = f"; data.truncation={self.truncation} cuts prompts of up to {_MAX_CUT_CHARS:,}" if cut else ""
            raise DataError(
                f"{row.place}: the prompt has {num_chars:,} characters, far more than "
                f"data.max_prompt_length={limit} tokens{also}. Shorten it, or set data.filter_overlong_prompts=True"
            )
        return True

    def _truncate(self, row: DataRow, ids: list[int]) -> list[int]:
        limit = self.max_prompt_length
        if self.truncation == "error":
            raise DataError(
                f"{row.place}: the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}. "
                "Raise it, set data.filter_overlong_prompts=True, or data.truncation=left|right|middle"
            )
        if has_media(row.prompt):
            raise DataError(
                f"{row.place}: the prompt has {len(ids)} tokens with {describe(row.prompt)}, which "
                f"cannot be cut to data.max_prompt_length={limit}. Raise it, or set data.filter_overlong_prompts=True"
            )
        self.num_truncated += 1
        if self.truncation == "left":
            return ids[-limit:]
        if self.truncation == "right":
            return ids[:limit]
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]


class Drawn(NamedTuple):
    """What was drawn for a step, or for a part of it."""

    prompts: list[Prompt]
    left_out: list[tuple[DataRow, str]]
    """Rows that were drawn with them and gave none, each with why."""
    counts: dict[str, int]
    """Of these rows, how many were left out or cut, as `data/...`."""


@dataclass
class PromptDraws:
    """The next prompts in the order of a run."""

    sampler: RowSampler
    prompts: PromptBuilder
    check: Callable[[DataRow], None]
    """Raises a VerlMTError for a row that was not looked at before the first step, and cannot be rolled out."""

    def draw(self, wanted: int) -> Drawn:
        """The next `wanted` prompts.

        Raises:
            DataError: a row is bad, and bad rows are not left out; or too few of many rows have a prompt.
        """
        found: list[Prompt] = []
        left_out: list[tuple[DataRow, str]] = []
        prompts, drawn, last = self.prompts, 0, ""
        truncated, bad = prompts.num_truncated, prompts.num_bad
        while len(found) < wanted:
            rows = self.sampler.next_batch(wanted - len(found))
            drawn += len(rows)
            if not rows or drawn > _MAX_DRAWS * wanted:
                source, shorter = "data.sampler", "let the sampler make shorter rows"
                if prompts.num_unseen:
                    source, shorter = "data.train_files", "give files with shorter rows"
                raise DataError(
                    f"{source} gave {drawn} rows, of which only {len(found)} have prompts within "
                    f"data.max_prompt_length={prompts.max_prompt_length} tokens, and a step needs "
                    f"{wanted}: raise it, or {shorter}{last}"
                )
            for row in rows:
                try:
                    prompt = self._prompt_of(row)
                except VerlMTError as error:
                    if prompts.num_unseen and not prompts.skips_bad:
                        raise DataError(
                            f"{error}. Such rows are left out with data.on_bad_row=skip: the same command then goes on "
                            "after the last finished step"
                        ) from error
                    prompts.leave_out(row, error)
                    left_out.append((row, "bad row"))
                    last = f". The last one that was left out: {error}"
                    continue
                if prompt is None:
                    left_out.append((row, "longer than data.max_prompt_length"))
                else:
                    found.append(prompt)
        bad = prompts.num_bad - bad
        counts = {
            "data/filtered_prompts": drawn - len(found) - bad,
            "data/truncated_prompts": prompts.num_truncated - truncated,
        }
        return Drawn(found, left_out, counts | ({"data/bad_rows": bad} if prompts.skips_bad else {}))

    def again(self, rows: Sequence[DataRow]) -> list[Prompt | None]:
        """The prompts of rows that were drawn before; None where one has none any more.

        Raises:
            DataError: one is bad.
        """
        return [self._prompt_of(row) for row in rows]

    def _prompt_of(self, row: DataRow) -> Prompt | None:
        prompts = self.prompts
        if prompts.knows(row):
            return prompts.build(row)
        # Rows of files that are not loaded are held to what those of others are held to at the start.
        prompt = prompts.build_sound(row) if prompts.num_unseen or prompts.skips_bad else prompts.build(row)
        if prompt is not None:
            self.check(row)
        return prompt
