"""Does the reward mean what its author means? It is asked about the truth of a few rows in the clothes in which models
write answers, about wrong answers and about none, in real conversations of the run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from verl_mt.data.trajectory import Status
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, not_looked_at, ok, warning
from verl_mt.extensions.inspection.doctor.forms import (
    SLOT,
    USUAL_FORMS,
    asked_forms,
    forms_of_source,
    forms_shown,
    own_forms,
    shown,
)
from verl_mt.extensions.inspection.doctor.reward_doubts import (
    Conversations,
    Paid,
    chance,
    doubts,
    size,
    takes_no_truth,
)
from verl_mt.extensions.inspection.doctor.row_contents import truth_text
from verl_mt.extensions.inspection.doctor.scripted import SAME, earned
from verl_mt.extensions.inspection.doctor.sources import only_constant
from verl_mt.plugins import listing
from verl_mt.rollout.prompts import Prompt

_NOTHING = "I do not know."
_ROWS_PER_SOURCE, _SOURCES = 2, 4
_ALONE = "the number in it alone"
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_WRONG_FORMS = 3
"""Forms in which a wrong answer is tried, those that pay best with the truth in them; in the one that pays least, and
in what the prompt asks for."""


def truths(subject: Subject) -> Iterator[Finding]:
    """The reward tells right from wrong."""
    sources: dict[str, list[Prompt]] = {}
    for prompt in subject.prompts:
        known = sources.setdefault(prompt.row.data_source, [])
        text, asked_already = truth_text(prompt.row.ground_truth), [truth_text(p.row.ground_truth) for p in known]
        if text is not None and text not in asked_already and len(known) < _ROWS_PER_SOURCE:
            known.append(prompt)
    asked = [prompts for prompts in list(sources.values())[:_SOURCES] if prompts]
    if not asked:
        yield ok(f"the rows have no short ground truth to ask it about{'' if subject.demos else '; --demos FILE does'}")
    for prompts in asked:
        yield from Inquiry(subject, prompts).findings()


def wrong_text(truth: str) -> str:
    """An answer of the same kind that is not the truth, nor near it."""
    number = re.fullmatch(r"(\D*?)(-?\d+(?:\.\d+)?)(\D*)", truth.replace(",", ""))
    if number:
        value = 2 * (float(number[2]) if "." in number[2] else int(number[2])) + 1
        return f"{number[1]}{value}{number[3]}"
    if len(truth) == 1 and truth.isalpha():
        return "B" if truth.upper() != "B" else "C"
    opposites = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
    return opposites.get(truth.lower(), "something else")


class Inquiry(Conversations):
    """What the reward says of a few rows of one data source."""

    def findings(self) -> Iterator[Finding]:
        forms = [*dict.fromkeys([*asked_forms(self.prompts[0]), *own_forms(self.prompts[0]), *USUAL_FORMS])]
        if takes_no_truth(self._function()):
            random = [*chance(self, forms[0], 0.0)]
            yield from random
            if not random:
                yield not_looked_at("by its source, the reward reads no ground truth. --demos FILE shows what it pays")
            return
        right, wrong, nothing = self._ask(forms)
        if not _pays(right, wrong) and self._can_call():
            self.calls = True
            right, wrong, nothing = self._ask(forms)
        if not _pays(right, wrong) and (more := [f for f in self._forms_of_source() if f not in forms]):
            forms += more
            right, wrong, nothing = self._ask(forms)
        where = self.prompts[0].row.place
        paying = _pays(right, wrong)
        best = max(paying or wrong, key=lambda form: right[form])
        if self.failed:
            yield self._failing(where)
        random = [*chance(self, best, right[best] - wrong[best])]
        yield from random
        if random:
            return  # other numbers mean nothing then
        if paying:
            yield from self._asked_for_another(forms, right, paying)
            yield from self._behind_a_call(best, right, wrong)
            self.calls = self.calls and not self._pays_alone(best, wrong)
            yield from doubts(self, Paid(best, paying, right[best], wrong[best], nothing))
            yield ok(
                f"the truth earns {right[best]:.4g} as {shown(best)}, a wrong answer {wrong[best]:.4g}, none "
                f"{nothing:.4g}" + ("; the truth by itself " + f"{right[SLOT]:.4g}" if SLOT not in paying else "")
            )
            return
        yield from size([*right.values(), *wrong.values(), nothing])
        how = ", also behind a tool call" if self.calls else ""
        yield from self._no_difference(
            where, str(truth_text(self.prompts[0].row.ground_truth)), how, (right, wrong, nothing)
        )

    def _failing(self, where: str) -> Finding:
        reason = (self.failed[0].error or "no error was recorded").strip().splitlines()[-1]
        answer = next((m.get("content") for m in reversed(self.failed[0].messages) if m["role"] == "assistant"), "")
        return warning(
            f"{where}: {len(self.failed)} conversations failed, the first with the answer {str(answer)[:60]!r}: "
            f"{reason}",
            "a run would train without them: let the reward answer with 0 where it finds nothing",
        )

    def _function(self) -> Any:
        return getattr(self.subject.reward, "function", self.subject.reward)

    def _pays_alone(self, form: str, wrong: dict[str, float]) -> bool:
        """Whether the truth needs no tool call before it."""
        self.calls = False
        pays = self._means([form], wrong=False)[form] > wrong[form] + SAME
        self.calls = True
        return pays

    def _no_difference(
        self, where: str, text: str, how: str, found: tuple[dict[str, float], dict[str, float], float]
    ) -> Iterator[Finding]:
        right, wrong, nothing = found
        kind = self._other_truth(right)
        if kind is not None:
            truth = self.prompts[0].row.ground_truth
            yield warning(
                f"{where}: the ground truth {truth!r} is of type {type(truth).__name__}, and the reward is "
                f"{kind[1]:.4g} for a right answer only where it is {kind[0]}: as it is, no answer is ever right",
                "compare both in one form (str(ground_truth).strip()) in the reward, or write the column so",
            )
            return
        values = [*right.values(), *wrong.values(), nothing]
        better = [form for form in wrong if wrong[form] > right[form] + SAME]
        told = f"{where}: truth {text!r}, asked as {forms_shown(right)}{how}"
        if max(values) - min(values) <= SAME:
            if self.subject.rewarded_demos:
                yield ok(f"{values[0]:.4g} for the truth in its usual forms. The demonstrations show what it rewards")
                return
            asked = asked_forms(self.prompts[0])
            constant = only_constant(self._function())
            if values[0] <= 0 and constant is None:
                yield not_looked_at(
                    f"no form of the answer was found that the reward pays, it is {values[0]:.4g} for right, wrong and "
                    f"none ({told}). --demos FILE shows it finished conversations"
                )
                return
            also = f", also for {listing(map(shown, asked))}, which the prompt asks for" if asked else ""
            also += ", and its source returns nothing else" if constant is not None else ""
            yield warning(
                f"the reward is {values[0]:.4g} for every answer: right, wrong and none{also} ({told})",
                "see how the reward finds the answer in the text, and what it compares it with. --demos FILE shows "
                "it your conversations",
            )
        elif better:
            yield warning(
                f"a wrong answer earns more than the right one: {wrong[better[0]]:.4g} against {right[better[0]]:.4g} "
                f"as {shown(better[0])} ({told})",
                "look at the sign and the comparison in the reward",
            )
        elif self.subject.rewarded_demos:
            yield ok("it does not tell the truth from a wrong answer in the usual forms. The demonstrations do better")
        else:
            yield warning(
                f"the reward is the same for right and wrong answers, {min(values):.4g} to {max(values):.4g} by their "
                f"form ({told})",
                "see how the reward finds the answer in the text, and what it compares it with. --demos FILE shows "
                "it your conversations",
            )

    def _asked_for_another(
        self, forms: Sequence[str], right: dict[str, float], paying: Sequence[str]
    ) -> Iterator[Finding]:
        """The prompt asks for a form that earns nothing."""
        asked = asked_forms(self.prompts[0])
        if not asked or any(form in paying for form in asked):
            return
        row = self.prompts[0].row
        yield warning(
            f"the prompt of {row.place} asks for {listing(map(shown, asked))}, for which the reward "
            f"of the truth is {max(right[form] for form in asked):.4g}. It is {max(right[f] for f in paying):.4g} for "
            f"{listing(map(shown, paying[:3]))}",
            "let the reward read the form that the prompt asks for (its regular expression, say), or change the prompt",
        )

    def _behind_a_call(self, form: str, right: dict[str, float], wrong: dict[str, float]) -> Iterator[Finding]:
        """What earns something by itself earns it in a conversation that uses a tool, too."""
        if self.calls or not self._can_call():
            return
        self.calls = True
        talks = [self.talk(p, form.replace(SLOT, str(truth_text(p.row.ground_truth)))) for p in self.prompts]
        played = self.play(talks)
        broken = any(name.endswith("/errors") and count for t in played for name, count in t.counters.items())
        found = fmean(map(earned, played))
        if found > wrong[form] + SAME or broken:
            return
        yield warning(
            f"the truth as {shown(form)} earns {right[form]:.4g} as the only turn, and {found:.4g} as the last of "
            "a conversation that called a tool before",
            "let the reward look at the last assistant message (extra_info.messages), whatever stands before it",
        )

    def _ask(self, forms: Sequence[str]) -> tuple[dict[str, float], dict[str, float], float]:
        """Mean reward of the truth in each form, of a wrong answer in those that pay best, and of no answer."""
        right = self._means(forms, wrong=False)
        by_pay = sorted(forms, key=lambda form: -right[form])
        tried = dict.fromkeys([*by_pay[:_WRONG_FORMS], by_pay[-1], *asked_forms(self.prompts[0])])
        return right, self._means([*tried], wrong=True), self._means([_NOTHING], wrong=True)[_NOTHING]

    def _means(
        self,
        forms: Sequence[str],
        *,
        wrong: bool,
        prompts: Sequence[Prompt] | None = None,
        said_of: Sequence[Prompt] | None = None,
    ) -> dict[str, float]:
        """Mean reward of an answer in each form: the truth of the prompts `said_of`, asked of `prompts`."""
        talks, said_of = [], self.prompts if said_of is None else said_of
        for form in forms:
            for prompt, original in zip(prompts or self.prompts, said_of):
                truth = str(truth_text(original.row.ground_truth))
                talks.append(self.talk(prompt, form.replace(SLOT, wrong_text(truth) if wrong else truth)))
        played = self.play(talks)
        self.failed += [t for t in played if t.status in (Status.FAILED, Status.ABORTED)]
        found = iter(played)
        return {form: fmean(earned(next(found)) for _ in self.prompts) for form in forms}

    def _forms_of_source(self) -> list[str]:
        return forms_of_source(self.subject.reward) if self.subject.reward is not None else []

    def _can_call(self) -> bool:
        rollout = self.subject.rollout
        return bool(self.prompts[0].tools) and rollout.agent_function_path is None

    def _other_truth(self, right: dict[str, float]) -> tuple[str, float] | None:
        """The form of ground truth with which a right answer earns more, also than a wrong one; what it earns then."""
        for kind, change in other_truths(self.prompts[0].row.ground_truth):
            try:
                changed = [_with_truth(prompt, change(prompt.row.ground_truth)) for prompt in self.prompts]
            except (TypeError, ValueError, AttributeError, IndexError):
                continue  # the other row's truth is of another kind
            for said_of in (self.prompts, changed) if kind == _ALONE else (self.prompts,):
                found = self._means(list(right), wrong=False, prompts=changed, said_of=said_of)
                better = max(found, key=lambda form: found[form] - right[form])
                wrong = self._means([better], wrong=True, prompts=changed, said_of=said_of)[better]
                if found[better] > max(right[better], wrong) + SAME:
                    return kind, found[better]
        return None


def other_truths(truth: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(what it would be, how to make it so): other ways to write a ground truth, which a reward may read instead."""
    text = truth_text(truth)
    if isinstance(truth, int | float | list | tuple | dict):
        yield ("text" if isinstance(truth, int | float) else "the text in it alone"), truth_text
    if not isinstance(truth, str) or text is None:
        return
    if re.fullmatch(r"-?\d+", text):
        yield "a whole number", lambda old: int(truth_text(old) or "")
    elif re.fullmatch(r"-?\d*\.\d+", text):
        yield "a number", lambda old: float(truth_text(old) or "")
    if text != truth:
        yield "without the white space or words around it", truth_text
    numbers = re.findall(_NUMBER, text)
    if len(numbers) == 1 and numbers[0] != text:
        yield _ALONE, lambda old: re.findall(_NUMBER, str(truth_text(old)))[0]
    if "," in text:
        yield "without commas", lambda old: str(truth_text(old)).replace(",", "")
    if text.lower() != truth:
        yield "in lower case", lambda old: str(truth_text(old)).lower()
    if text.upper() != truth:
        yield "in upper case", lambda old: str(truth_text(old)).upper()


def _pays(right: dict[str, float], wrong: dict[str, float]) -> list[str]:
    """Forms in which the truth earns more than a wrong answer."""
    return [form for form in wrong if right[form] > wrong[form] + SAME]


def _with_truth(prompt: Prompt, truth: Any) -> Prompt:
    """The same row with a ground truth of another type, wherever the row says it."""
    row, old = prompt.row, prompt.row.ground_truth
    raw = copy.copy(row.raw)
    for key, value in raw.items():
        if type(value) is type(old) and value == old:
            raw[key] = truth
        elif isinstance(value, dict) and value.get("ground_truth") == old:
            raw[key] = {**value, "ground_truth": truth}
    return replace(prompt, row=replace(row, ground_truth=truth, raw=raw))
