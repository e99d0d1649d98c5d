"""The generator of the default task: right answers, stable rows, splits that share nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.errors import DataError
from verl_mt.tiny.problems import DATA_SOURCE, FORMS, rows, split_of

SPLITS = ("train", "val", "warm_start")


def expression_of(row: dict) -> str:
    return row["extra_info"]["answer"].split(" = ")[0]


def exact_value(node: ast.expr) -> Fraction:
    """Evaluates with fractions and insists that every intermediate result is a non-negative integer."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    left, right = exact_value(node.left), exact_value(node.right)
    names = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__"}
    result = getattr(left, names[type(node.op)])(right)
    assert result.denominator == 1 and result >= 0
    return result


@given(seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
@settings(max_examples=10, deadline=None)
def test_every_answer_is_the_exact_value_of_its_expression(seed, split):
    for row in rows(40, seed, split):
        truth = row["reward_model"]["ground_truth"]
        assert exact_value(ast.parse(expression_of(row), mode="eval").body) == int(truth)
        assert row["extra_info"]["answer"].endswith(f"\n#### {truth}")
        assert row["extra_info"]["interaction_kwargs"] == {"ground_truth": truth}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_a_question_says_every_number_of_its_expression_and_no_other(seed):
    for row in rows(40, seed, "train"):
        said = [w for w in row["prompt"][1]["content"].replace(".", " ").replace(",", " ").split() if w.isdigit()]
        needed = "".join(c if c.isdigit() else " " for c in expression_of(row)).split()
        assert sorted(said) == sorted(needed)


@pytest.mark.slow
def test_splits_share_neither_questions_nor_expressions():
    made = {split: rows(3000, 0, split) + rows(1000, 1, split) for split in SPLITS}
    for key in (expression_of, lambda row: row["prompt"][1]["content"]):
        sets = [{key(row) for row in made[split]} for split in SPLITS]
        assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
    assert all(split_of(expression_of(row)) == split for split in SPLITS for row in made[split])


def test_rows_are_the_same_in_another_process():
    code = "import json; from verl_mt.tiny.problems import rows; print(json.dumps(rows(50, 7, 'val')))"
    made = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        made.append(
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        )
    assert made[0] == made[1] == json.dumps(rows(50, 7, "val")) + "\n"


def test_rows_of_one_call_are_different_and_a_shorter_call_is_a_prefix():
    made = rows(4096, 3, "train")
    assert len({row["prompt"][1]["content"] for row in made}) == 4096
    assert rows(100, 3, "train") == made[:100]
    assert rows(100, 4, "train") != made[:100]


def test_rows_have_verls_schema_and_the_declared_mix():
    made = rows(2000, 0, "train")
    assert set(made[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert {row["data_source"] for row in made} == {DATA_SOURCE}
    assert [row["extra_info"]["index"] for row in made] == list(range(2000))
    counts = [sum(row["extra_info"]["num_operations"] == n for row in made) for n in (1, 2, 3)]
    assert all(abs(count - share * 2000) < 120 for count, share in zip(counts, (0.4, 0.4, 0.2)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.expression)
def test_every_story_uses_every_number_once(form):
    for story in form.stories:
        for letter in "abcd":
            assert story.count("{" + letter + "}") == form.expression.count("{" + letter + "}")


def test_an_unknown_split_or_an_endless_number_of_rows_is_refused():
    with pytest.raises(DataError, match=r"no split 'test'. Known: val, warm_start, train"):
        rows(1, 0, "test")
    with pytest.raises(DataError, match=r"at least 1 .* got -1"):
        rows(-1, 0, "train")
