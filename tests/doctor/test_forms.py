"""Forms of an answer that the doctor tries, and the arguments that it makes up."""

from __future__ import annotations

import pytest

from verl_mt.data.dataset import DataRow
from verl_mt.extensions.inspection.doctor.forms import SLOT, _literal, asked_forms, forms_of_source, own_forms
from verl_mt.extensions.inspection.doctor.scripted import example_arguments
from verl_mt.plugins import import_file
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.prompts import Prompt


def prompt_of(text: str) -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(DataRow(messages, "sums", ground_truth="12"), messages, [], [])


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Finish with RESULT=<number> please.", "RESULT=@"),
        ("Finish with 'RESULT=<grams>;' please.", "RESULT=<grams>;".replace("<grams>", "@")),
        ('Reply with {"answer": <number>} only.', '{"answer": @}'),
        ('Reply with {"answer": <text>} only.', '{"answer": "@"}'),
        ("Last line: Total: [amount]", "Total: @"),
    ],
)
def test_a_form_with_a_gap_is_read_from_the_prompt(text, form):
    assert form.replace("@", SLOT) in own_forms(prompt_of(text))


@pytest.mark.parametrize("text", ["What is 6 * 2?", "Use [brackets], <b>bold</b>, and f{x}.", "N bolts of 3 g"])
def test_other_words_of_a_prompt_are_no_form_that_it_asks_for(text):
    assert asked_forms(prompt_of(text)) == []


SOURCE = r'''
"""Doc (string) of a file."""
import json
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """RESULT: (never)"""
    if re.search(r"(?i)made in\s+(\d{4})\b", solution_str) or solution_str.startswith("Year=" + ground_truth):
        return 1.0
    inside = solution_str.split("<year>")[-1].split("</year>")[0]
    return float(inside == ground_truth or json.loads(solution_str)["year"] == ground_truth)
'''


def test_forms_of_a_rewards_own_source(tmp_path):
    (tmp_path / "year.py").write_text(SOURCE)
    found = forms_of_source(load_reward(str(tmp_path / "year.py")))
    for form in ("made in @", "Year=@", "<year>@</year>", '{"year": @}', '{"year": "@"}'):
        assert form.replace("@", SLOT) in found
    assert not any("never" in form or "string" in form for form in found)
    assert len(found) <= 16
    kind = import_file(tmp_path / "year.py")
    assert forms_of_source(kind.compute_score) == found, "a function by itself"
    assert forms_of_source(min) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"RESULT= *", "RESULT="),
        (r"^weighs?\s+", "weigh "),
        (r"\\boxed\{", r"\boxed{"),
        (r"[Aa]nswer:?\s*", None),
        (r"\d+ of ", None),
        (r"a|b", None),
        ("", ""),
    ],
)
def test_a_text_that_a_simple_expression_matches(pattern, text):
    assert _literal(pattern) == text


def test_made_up_arguments_fit_and_others_differ():
    kinds = {
        "a": {"type": "string"}, "b": {"type": "integer", "minimum": 3}, "c": {"type": "number"},
        "d": {"type": "boolean"}, "e": {"enum": ["x", "y"]}, "f": {"type": "array", "items": {"type": "integer"}},
        "g": {"type": "object", "properties": {"h": {"type": "string"}}, "required": ["h"]},
    }  # fmt: skip
    schema = {"function": {"name": "f", "parameters": {"type": "object", "properties": kinds, "required": list(kinds)}}}
    first, other = example_arguments(schema), example_arguments(schema, other=True)
    assert first == {"a": "1", "b": 3, "c": 1.0, "d": True, "e": "x", "f": [1], "g": {"h": "1"}}
    assert all(first[name] != other[name] and type(first[name]) is type(other[name]) for name in kinds)
    fixed = {"function": {"name": "f", "parameters": {"properties": {"a": {"default": 5}}, "required": ["a"]}}}
    assert example_arguments(fixed) == example_arguments(fixed, other=True) == {"a": 5}
