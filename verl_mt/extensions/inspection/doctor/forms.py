"""Forms in which an answer may stand: usual ones, those that the prompt asks for or shows, texts of the row, and those
that the source of the reward looks for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from verl_mt.extensions.inspection.doctor.row_contents import truth_text
from verl_mt.extensions.inspection.doctor.sources import file_tree
from verl_mt.rewards.base import Reward
from verl_mt.rollout.prompts import Prompt

SLOT = "\0"
"""Where the answer stands in a form."""
USUAL_FORMS = tuple(
    form.replace("@", SLOT)
    for form in (
        "@", "#### @", r"\boxed{@}", "Answer: @", "The answer is @.", "<answer>@</answer>",
        "<think>\nLet me see.\n</think>\n\n<answer>@</answer>",
    )
)  # fmt: skip
_LONGEST_TEXT = 4000
_MOST = 4
"""Forms of a kind that are taken from a prompt or a row."""
_MOST_OF_SOURCE, _LONGEST_CONSTANT = 16, 60

_ASKS_FOR_ANSWER = re.compile(
    r"(?i)(?:\b(?:with|as|form|format|write|line|like|say|give|end|finish|reply|respond)\b[^\n]{0,40}?|[`'\"“«*])"
    r"((?:the )?(?:final )?answer(?: is)?:)(?!\s*\Z)"
)
_SPAN = re.compile(r"[`'\"“«]([^`'\"”»\n]{2,80})[`'\"”»]")
_BRACKETED = r"<\w[\w ]{0,20}>|\[\w[\w ]{0,20}\]|\{\w{1,20}\}"
_PLACEHOLDER = re.compile(rf"{_BRACKETED}|\.\.\.|\b[NXn]\b")
_STATED = re.compile(
    rf"\{{[^{{}}\n]{{1,60}}?(?:{_BRACKETED})[^{{}}\n]{{0,20}}\}}|\S{{0,40}}[^\s\w,;.] ?(?:{_BRACKETED})"
)
"""A JSON object with a gap, and a mark with a gap behind it: `RESULT=<number>`."""
_GROUP = re.compile(r"(?<!\\)\((?:\?P<\w+>|(?!\?))")
_ATOM = re.compile(r"(\\.|\[[^\]]*\]|\(\?[a-zA-Z]+\)|.)([*?]\??|\+)?")


def asked_forms(prompt: Prompt) -> list[str]:
    """Forms that the prompt's own words ask for."""
    text = _text_of(prompt)
    found = [f"{match[1]} {SLOT}" for match in _ASKS_FOR_ANSWER.finditer(text)]
    found += [f"#### {SLOT}"] if "####" in text else []
    found += [rf"\boxed{{{SLOT}}}"] if r"\boxed" in text else []
    found += [f"<answer>{SLOT}</answer>"] if "<answer>" in text else []
    return list(dict.fromkeys(found))


def own_forms(prompt: Prompt) -> list[str]:
    """Forms that the prompt quotes or states with a gap in them, and texts of the row that hold the truth (a
    solution)."""
    text = _text_of(prompt)
    quoted = [_PLACEHOLDER.sub(SLOT, m[1], count=1) for m in _SPAN.finditer(text)]
    stated = [re.sub(_BRACKETED, SLOT, m[0], count=1) for m in _STATED.finditer(text)]
    stated += [form.replace(SLOT, f'"{SLOT}"') for form in stated if form.startswith("{") and f'"{SLOT}"' not in form]
    truth, row = truth_text(prompt.row.ground_truth) or "", prompt.row
    texts = [value for value in {**row.extra_info, **row.raw}.values() if isinstance(value, str)]
    shown = row.raw.get("prompt")
    if isinstance(shown, list) and shown and shown[-1].get("role") == "assistant":
        texts.append(str(shown[-1].get("content")))
    holds = re.compile(rf"(?<![\w.]){re.escape(truth)}(?![\w]|\.\d)")
    solutions = [holds.sub(SLOT, t) for t in texts if len(t) <= _LONGEST_TEXT and t not in _text_of(prompt)]
    return [form for form in [*quoted[:_MOST], *stated[:_MOST], *solutions[:_MOST]] if SLOT in form]


def forms_of_source(reward: Reward) -> list[str]:
    """Forms that the file of a reward looks for, by its regular expressions and other texts; empty where it has no
    source."""
    texts = _constants(reward)
    reads_json = any("json" in text for text in texts) or _imports_json(reward)
    found = [f for text in texts for f in _forms_of_text(text, reads_json)]
    # Words alone are names of columns and keys, mostly.
    return sorted(dict.fromkeys(found), key=lambda form: form.replace(SLOT, "").strip().isalnum())[:_MOST_OF_SOURCE]


def _constants(reward: Reward) -> list[str]:
    """Texts in the file of a reward, docstrings left out."""
    tree = file_tree(getattr(reward, "function", reward))
    if tree is None:
        return []
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in documented]
    return [text for text in found if isinstance(text, str)]


def _imports_json(reward: Reward) -> bool:
    tree = file_tree(getattr(reward, "function", reward))
    return tree is not None and any(isinstance(n, ast.Name) and n.id == "json" for n in ast.walk(tree))


def _forms_of_text(text: str, reads_json: bool) -> Iterator[str]:
    """Of one text in a source."""
    if not 2 <= len(text) <= _LONGEST_CONSTANT or "\n" in text:
        return
    group = _GROUP.search(text)
    if group is not None:
        before, behind = _literal(text[: group.start()]), _literal(text[_closing(text, group.start()) + 1 :])
        if before is not None:
            yield f"{before}{SLOT}{behind or ''}"
    elif tag := re.fullmatch(r"<(\w+)>", text):
        yield f"<{tag[1]}>{SLOT}</{tag[1]}>"
    else:
        if reads_json and text.isidentifier():
            yield f'{{"{text}": {SLOT}}}'
            yield f'{{"{text}": "{SLOT}"}}'
        yield f"{text}{'' if text[-1] in ' =' else ' '}{SLOT}"


def _closing(pattern: str, start: int) -> int:
    """Where the group that opens at `start` ends."""
    depth = 0
    for match in re.finditer(r"\\.|[()]", pattern[start:]):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.start()
    return len(pattern)


def _literal(pattern: str) -> str | None:
    """A text that a regular expression without groups matches; None where that is not simple."""
    text = ""
    for atom, times in _ATOM.findall(pattern):
        if times.startswith(("*", "?")) or atom in ("^", "$", r"\b", r"\A", r"\Z") or atom.startswith("(?"):
            continue
        escaped = len(atom) == 2 and not atom[1].isalnum()
        if atom != r"\s" and not escaped and (len(atom) > 1 or atom in "[]()|.*+?"):
            return None
        text += " " if atom == r"\s" else atom[-1]
    return text


def _text_of(prompt: Prompt) -> str:
    said_to_model = [m.get("content") for m in prompt.messages if m.get("role") in ("system", "developer", "user")]
    return "\n".join(text for text in said_to_model if isinstance(text, str))


def shown(form: str) -> str:
    """A form as a finding writes it."""
    words = " ".join(form.replace(SLOT, "x").split())
    return f"`{words if len(words) <= 60 else '...' + words[-50:]}`"


def forms_shown(forms: dict[str, float]) -> str:
    """The first of several."""
    return ", ".join(map(shown, list(forms)[:5])) + (f" and {len(forms) - 5} more" if len(forms) > 5 else "")
