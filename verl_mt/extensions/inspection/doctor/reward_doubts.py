"""A reward that pays the truth, and what may be wrong with it still: chance, answers that earn as much without being
right, texts at which it raises, rows whose truths it does not read, a user who is never content."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mt.data.dataset import DataRow
from verl_mt.data.trajectory import Status, StopReason, Trajectory
from verl_mt.errors import VerlMTError
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, warning
from verl_mt.extensions.inspection.doctor.forms import SLOT, asked_forms, shown
from verl_mt.extensions.inspection.doctor.row_contents import commonest, is_empty, truth_text
from verl_mt.extensions.inspection.doctor.scripted import SAME, Talk, called, earned, said
from verl_mt.extensions.inspection.doctor.sources import method, own_tree, returns
from verl_mt.rollout.prompts import Prompt
from verl_mt.trainer import build_data

_TIMES = 6
"""The same conversation is scored."""
_CHANCE = 0.5
"""Of what right and wrong differ by: a judge's noise is below it."""
_LARGE, _SMALL = 100.0, 1e-3
_WRONG_PAYS = 0.9
_SLOW_S = 5.0
_SHAPES, _SHAPE_SHARE = 8, 0.02
_CONSTANT, _LEAST_ROWS = 0.9, 16
_AT_THE_END = re.compile(
    r"(?i)\b(?:end|ends|finish|conclude|finally|last line|step by step|step-by-step|reason|think)\b"
)
_NO_TRUTHS = {"self", "completions", "prompts", "args", "trainer_state", "log_metric", "log_extra"}
_CONTENT_TURNS = 16
"""Turns in which a user may become content."""


@dataclass
class Conversations:
    """Finished conversations over a few rows of one data source, for the reward."""

    subject: Subject
    prompts: Sequence[Prompt]
    calls: bool = False
    """Each conversation begins with a tool call."""
    failed: list[Trajectory] = field(default_factory=list)

    def play(self, talks: Sequence[Talk], **how: int) -> list[Trajectory]:
        """The finished conversations; limits of length do not cut them."""
        return self.subject.open_stage().play(talks, unlimited=True, **how)

    def talk(self, prompt: Prompt, answer: str) -> Talk:
        """A conversation that ends with this answer."""
        chat = self.subject.known_chat
        call = called(chat, prompt.tools[0]) if self.calls and prompt.tools else None
        return Talk(prompt, [*([call] if call else []), said(chat, answer)])


@dataclass(frozen=True)
class Paid:
    """What the reward gave."""

    form: str
    """The form that pays best."""
    forms: Sequence[str]
    """All in which the truth earns more than a wrong answer."""
    right: float
    wrong: float
    nothing: float


def doubts(inquiry: Conversations, paid: Paid) -> Iterator[Finding]:
    """What is wrong although right answers earn more than wrong ones."""
    yield from _wrong_answers(paid)
    yield from size([paid.right, paid.wrong, paid.nothing])
    yield from _odd_answers(inquiry, paid)
    yield from _reasoning_before(inquiry, paid)
    yield from _words_of_the_prompt(inquiry, paid)
    yield from _odd_truths(inquiry, paid)
    yield from _one_truth(inquiry)
    yield from _content_user(inquiry, paid)


def chance(inquiry: Conversations, form: str, difference: float) -> Iterator[Finding]:
    """The same conversation earns the same."""
    prompt = inquiry.prompts[0]
    answer = form.replace(SLOT, str(truth_text(prompt.row.ground_truth)))
    played = inquiry.play([inquiry.talk(prompt, answer)], samples=_TIMES)
    of_role: dict[str, list[float]] = {}  # agents of one episode have different conversations
    for trajectory in played:
        of_role.setdefault(trajectory.group_id, []).append(earned(trajectory))
    values = max(of_role.values(), key=lambda found: max(found) - min(found))
    took = [span.end_s - span.start_s for t in played for span in t.time_spans if span.phase == "reward"]
    if took and min(took) > _SLOW_S:
        yield warning(
            f"the reward takes {min(took):.1f} s for one conversation",
            "let it answer faster, or raise how many conversations it scores at once: a step waits for it",
        )
    if max(values) - min(values) > max(SAME, _CHANCE * abs(difference)):
        yield warning(
            f"the reward of the same conversation differs: {min(values):.4g} to {max(values):.4g} in {len(values)} "
            f"tries ({prompt.row.place}, {answer[-60:]!r}): the reward is random",
            "take chance out of the reward. A judge is asked at temperature 0",
        )


def _wrong_answers(paid: Paid) -> Iterator[Finding]:
    if paid.right > 0 and paid.wrong > _WRONG_PAYS * paid.right:
        yield warning(
            f"a wrong answer as {shown(paid.form)} earns {paid.wrong:.4g}, nearly as much as the right one with "
            f"{paid.right:.4g}",
            "let the form earn less than the answer",
        )


def size(values: Sequence[float]) -> Iterator[Finding]:
    """Rewards have the size of numbers that people reward with."""
    largest, difference = max(map(abs, values)), max(values) - min(values)
    if largest > _LARGE:
        yield warning(
            f"the reward has values of {min(values):.4g} to {max(values):.4g}: wrong scale, a single conversation "
            "outweighs all others of its batch",
            "scale the reward to about -1 to 1",
        )
    elif SAME < difference < _SMALL:
        yield warning(
            f"the reward tells right from wrong by {difference:.1g} only: wrong scale",
            "scale the reward to about -1 to 1",
        )


def _odd_answers(inquiry: Conversations, paid: Paid) -> Iterator[Finding]:
    """Answers that models give now and then do not raise, and earn less than the truth."""
    prompt = inquiry.prompts[0]
    truth = str(truth_text(prompt.row.ground_truth))
    odd = {"": "an empty answer"}
    for answer, name in _odd_texts(truth).items():
        odd.setdefault(paid.form.replace(SLOT, answer), name)
    played = inquiry.play([inquiry.talk(prompt, text) for text in odd])
    failed = [(text, t) for text, t in zip(odd, played) if t.status in (Status.FAILED, Status.ABORTED)]
    if failed:
        text, trajectory = failed[0]
        reason = (trajectory.error or "no error was recorded").strip().splitlines()[-1]
        yield warning(
            f"{len(failed)} of {len(odd)} odd answers fail, the first with {odd[text]} ({_cut(text)}): {reason}",
            "a run would train without such conversations: let the reward answer with 0 where it finds nothing",
        )
    for text, trajectory in zip(odd, played):
        value = earned(trajectory)
        if trajectory.status == Status.COMPLETED and value > paid.nothing + SAME and value >= paid.right - SAME:
            yield warning(
                f"{odd[text]} ({_cut(text)}) earns {value:.4g}, as much as the truth {truth!r}: a model learns to "
                "write that",
                "compare the whole answer with the truth, not a part of it (`==` after strip(), no `in`)",
            )
            return


def _odd_texts(truth: str) -> dict[str, str]:
    found = {"": "the form without an answer", "abc": "a word", "9" * 400: "a number of 400 digits"}
    if re.fullmatch(r"-?\d+", truth):
        found["1" + truth.lstrip("-") + "1"] = "another number that holds the truth"
        if len(truth) > 1:
            found[truth[:-1]] = "a part of the truth"
    elif re.fullmatch(r"[A-Z]", truth):
        others = [letter for letter in "ABC" if letter != truth]
        found[f"{others[0]}, {truth}, {others[1]}"] = "a list of several choices"
    elif len(truth) > 3:
        found[truth[: len(truth) // 2]] = "a part of the truth"
    found.pop(truth, None)
    return found


def _cut(text: str) -> str:
    return repr(text if len(text) <= 50 else text[:47] + "...")


def _reasoning_before(inquiry: Conversations, paid: Paid) -> Iterator[Finding]:
    """Where the prompt asks for the answer at the end, words may stand before it."""
    prompt = inquiry.prompts[0]
    said = "\n".join(str(m.get("content")) for m in prompt.messages if m.get("role") != "assistant")
    if paid.form not in asked_forms(prompt) or not _AT_THE_END.search(said):
        return
    answer = paid.form.replace(SLOT, str(truth_text(prompt.row.ground_truth)))
    found = earned(inquiry.play([inquiry.talk(prompt, f"Let me see. First I look at the question.\n{answer}")])[0])
    if found <= paid.wrong + SAME:
        yield warning(
            f"the truth as {shown(paid.form)} earns {paid.right:.4g} alone and {found:.4g} behind a line of reasoning, "
            f"and the prompt of {prompt.row.place} asks for it at the end",
            "search the whole text for the answer (re.search or the last match, not re.match or split()[0])",
        )


def _words_of_the_prompt(inquiry: Conversations, paid: Paid) -> Iterator[Finding]:
    """What the question says is not the model's answer."""
    subject, prompt = inquiry.subject, inquiry.prompts[0]
    if subject.rollout.environment.is_configured or not isinstance(prompt.messages[-1].get("content"), str):
        return
    said = paid.form.replace(SLOT, str(truth_text(prompt.row.ground_truth)))
    last = {**prompt.messages[-1], "content": f"{prompt.messages[-1]['content']}\n{said}"}
    row = replace(prompt.row, prompt=[*prompt.messages[:-1], last])
    asked = built(subject, row)
    if asked is None:
        return
    found = earned(inquiry.play([inquiry.talk(asked, "I do not know.")])[0])
    if found >= paid.right - SAME and found > paid.nothing + SAME:
        yield warning(
            f"a conversation without an answer earns {found:.4g} if its question says {_cut(said)}: the reward reads "
            "the text of the prompt",
            "let the reward read solution_str or the last assistant message only",
        )


def built(subject: Subject, row: DataRow) -> Prompt | None:
    """The prompt of a row that was not rendered yet, however long; None where it has none."""
    builder = build_data.build_prompts(subject.config, subject.known_chat, subject.tools)
    try:
        return replace(builder, max_prompt_length=2**30, _cache={}).build(row)
    except VerlMTError:
        return None  # `prompts` says why


def truth_shape(truth: Any) -> str:
    """Truths of one shape are read alike."""
    if not isinstance(truth, str):
        return type(truth).__name__
    text = truth.strip()
    outer = "text with white space around it, " if text != truth else ""
    kinds = {
        r"[+-]?\d+": "whole number", r"[+-]?\d*\.\d+": "number with a point", r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?": "1,000",
        r"[+-]?\d+\s*/\s*\d+": "fraction", r"[$€£]\s*[\d,.]+|[\d,.]+\s*(%|[^\W\d]\w*\.?)": "number with a unit",
        r"[A-Za-z]": "letter", r"\([A-Za-z]\)|[A-Za-z][).]": "letter in brackets",
    }  # fmt: skip
    return outer + next((name for pattern, name in kinds.items() if re.fullmatch(pattern, text)), "words")


def _odd_truths(inquiry: Conversations, paid: Paid) -> Iterator[Finding]:
    """Truths of another shape than those that were asked are paid as well."""
    subject, asked = inquiry.subject, inquiry.prompts[0].row
    rows = [
        row
        for row in subject.train_rows()
        if row.data_source == asked.data_source and truth_text(row.ground_truth) and not is_empty(row.ground_truth)
    ]
    shapes: dict[str, list[DataRow]] = {}
    for row in rows:
        shapes.setdefault(truth_shape(row.ground_truth), []).append(row)
    for prompt in inquiry.prompts:
        shapes.pop(truth_shape(prompt.row.ground_truth), None)
    common = [(name, having) for name, having in shapes.items() if len(having) >= _SHAPE_SHARE * len(rows)]
    forms = list(dict.fromkeys([paid.form, *paid.forms, *asked_forms(inquiry.prompts[0])]))[:4]
    for name, having in common[:_SHAPES]:
        rendered = built(subject, having[0])
        if rendered is None:
            continue
        text = str(truth_text(having[0].ground_truth))
        answers = [f.replace(SLOT, said) for f in forms for said in dict.fromkeys((text, text.replace(",", "")))]
        found = max(earned(t) for t in inquiry.play([inquiry.talk(rendered, answer) for answer in answers]))
        if found <= paid.wrong + SAME:
            yield warning(
                f"{len(having)} of {len(rows)} ground truths are like {having[0].ground_truth!r} "
                f"({having[0].place}, {name}): the reward of a right answer is {found:.4g} there, and "
                f"{paid.right:.4g} for {asked.ground_truth!r} ({asked.place})",
                "write all truths in one form, or let the reward read both",
            )


def _one_truth(inquiry: Conversations) -> Iterator[Finding]:
    rows = [r for r in inquiry.subject.train_rows() if r.data_source == inquiry.prompts[0].row.data_source]
    text, share, number = commonest(rows)
    if number >= _LEAST_ROWS and share > _CONSTANT:
        yield warning(
            f"{share:.0%} of {number} questions have the same ground truth {text!r}: a model that always says so is "
            "nearly always right",
            "balance the rows, or leave most of these out",
        )


def _content_user(inquiry: Conversations, paid: Paid) -> Iterator[Finding]:
    """A simulated user who can be content is so after the right answer."""
    users = [i for i in inquiry.subject.interactions.values() if _can_end(i)]
    if not users or len(users) < len(inquiry.subject.interactions):
        return
    prompt = inquiry.prompts[0]
    text = str(truth_text(prompt.row.ground_truth))
    forms = list(dict.fromkeys([paid.form, *paid.forms, *asked_forms(prompt), "#### \0", "\0"]))
    talks = [inquiry.talk(prompt, form.replace(SLOT, text)) for form in forms]
    played = inquiry.play(talks, more_turns=_CONTENT_TURNS)
    if any(t.stop_reason in (StopReason.INTERACTION, None) or not _said_on(t) for t in played):
        return
    yield warning(
        f"the simulated user {users[0].name!r} goes on after the right answer {text!r}, for which the reward is "
        f"{paid.right:.4g}: it asked {_said_on(played[0])} times more and never ended ({prompt.row.place})",
        "see what generate_response compares: a number with a text is never equal",
    )


def _said_on(trajectory: Trajectory) -> int:
    first = next((i for i, m in enumerate(trajectory.messages) if m["role"] == "assistant"), 0)
    return sum(m["role"] == "user" for m in trajectory.messages[first:])


def _can_end(interaction: object) -> bool:
    """Its source says something else than False at the place of `should_terminate`."""
    tree = method(interaction, "generate_response")
    if tree is None:
        return False
    ends = [node.elts[0] for node in returns(tree) if isinstance(node, ast.Tuple) and node.elts]
    return any(not (isinstance(end, ast.Constant) and end.value is False) for end in ends)


def takes_no_truth(function: Any) -> bool:
    """By its source, a reward of completions alone: of their length or form, say."""
    tree = own_tree(function)
    if tree is None:
        return False
    given = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} - _NO_TRUTHS
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return "completions" in {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} and not given & read
