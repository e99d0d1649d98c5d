"""GSM8K, exact match and the default task: the reference rows and a few laws."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.rewards import RewardInput, arithmetic, default_scorers, exact_match, gsm8k, load_reward


# ---------------------------------------------------------------- GSM8K
@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("#### 42", "42", 1),
        ("The answer is 42", "42", 0),
        ("#### 1,000", "1000", 1),
        ("#### 1000", "1,000", 1),
        ("#### -5", "-5", 1),
        ("#### 5", "-5", 0),
        ("#### 41\nno: #### 42", "42", 1),
        ("#### 42\nno: #### 41", "42", 0),
        ("#### 42" + "x" * 301, "42", 0),
        ("y" * 1000 + "#### 42", "42", 1),
        ("#### $42", "42", 1),
        ("#### 42.", "42", 1),
        ("####42", "42", 1),
        ("####   42  ", "42", 1),
        ("#### 42.00", "42", 1),
        ("#### .5", "0.5", 1),
        ("#### $ 1,234.50.", "1234.5", 1),
        ("#### -$5", "-5", 1),
        ("#### \u22125", "-5", 1),
        ("#### **42**", "42", 1),
        ("#### $\\boxed{42}$", "42", 1),
        ("so \\boxed{42}.", "42", 1),
        ("\\boxed{\\$1,000}", "1000", 1),
        ("#### 42 apples", "42", 1),
        ("#### 42", 42, 1),
        ("#### 42", "#### 42", 1),
        ("#### 1.2.3", "1.2", 0),
        ("#### 3,4", "34", 0),
        ("#### 3/4", "3", 0),
        ("#### " + "*" * 290 + "x", "42", 0),
        ("####", "42", 0),
        ("", "42", 0),
    ],
)
def test_gsm8k_strict_wants_a_marked_final_number(text, truth, expected):
    assert gsm8k.compute_score(text, truth) == expected


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("The answer is 42.", "42", 1),
        ("ans 42 .", "42", 1),
        ("1,000", "1000", 1),
        ("6 * 7 = 42", "42", 1),
        ("it costs $42", "42", 1),
        ("#### 42 of the 50", "42", 1),
        ("about 3/4", "4", 0),
        ("no number", "42", 0),
    ],
)
def test_gsm8k_flexible_takes_the_last_number(text, truth, expected):
    assert gsm8k.compute_score(text, truth, method="flexible") == expected


def test_gsm8k_format_score_is_for_a_wrong_answer_and_not_for_none():
    assert gsm8k.compute_score("#### 41", "42", format_score=0.1) == 0.1
    assert gsm8k.compute_score("41", "42", "strict", 0.1) == 0.0
    assert gsm8k.compute_score("#### 42", "42", "strict", 0.1, 2.0) == 2.0


def test_gsm8k_refuses_what_it_cannot_score():
    with pytest.raises(ValueError, match="method must be 'strict' or 'flexible', got 'loose'"):
        gsm8k.compute_score("#### 1", "1", method="loose")
    with pytest.raises(ValueError, match="must be a number, got 'many'"):
        gsm8k.compute_score("#### 1", "many")


@given(value=st.integers(-(10**9), 10**9), suffix=st.sampled_from(["", ".", " ", "\n", ".00", " dollars"]))
@settings(max_examples=50, deadline=None)
def test_gsm8k_accepts_a_number_however_it_is_dressed(value, suffix):
    for dressed in (f"{value}", f"{value:,}", f"$ {value:,}", f"\\boxed{{{value}}}"):
        text = f"thus\n#### {dressed}{suffix if 'boxed' not in dressed else ''}"
        assert gsm8k.compute_score(text, str(value)) == 1.0
        assert gsm8k.compute_score(text, str(value + 1)) == 0.0


def test_gsm8k_reference_solutions_score_one(shared_data):
    with open(shared_data / "tasks" / "gsm8k_test.jsonl") as file:
        answers = [json.loads(line)["answer"] for line in file]
    assert len(answers) == 1319
    assert sum(gsm8k.compute_score(answer, answer.split("####")[1]) for answer in answers) == 1319


def test_gsm8k_is_found_under_verls_name():
    from verl_mt.extensions.compat.utils.reward_score import gsm8k as under_verls_name
    from verl_mt.extensions.compat.utils.rollout_trace import rollout_trace_op

    @rollout_trace_op
    def function():
        return 7

    assert under_verls_name.compute_score("#### 42", "42", method="flexible", format_score=0.0, score=1.0) == 1.0
    assert function() == 7


# ---------------------------------------------------------------- exact match

G = (
    '<think>x</think>\n<search>q</search>\n\n<information>Doc 1(Title: "Paris") Paris is</information>\n\n'
    "<think>y</think>\n<answer> The Paris </answer>"
)
LONDON = G.replace(" The Paris ", "London")
EXAMPLE = "<|im_start|>user\nAnswer like <answer> Beijing </answer>.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The U.S.A.", "usa"),
        ("  New   York ", "new york"),
        ("a Cat, the Dog", "cat dog"),
        ("AN apple", "apple"),
        ("Café", "café"),
        ("the", ""),
        ("New-York", "newyork"),
        ("3.14", "3.14"),
        ("3.14.", "3.14"),
        (".5", ".5"),
        ("No.5", "no5"),
        ("1,000", "1000"),
        ("the-cat", "thecat"),
    ],
)
def test_normalisation_lowers_strips_and_collapses_in_that_order(text, expected):
    assert exact_match.normalize(text) == expected


@pytest.mark.cap("C70", "C71", "C82")
@pytest.mark.parametrize(
    ("text", "truth", "scores", "expected"),
    [
        (EXAMPLE + G, ["Paris"], {}, 1.0),
        (G, ["Paris"], {}, 1.0),
        (LONDON, ["Paris"], {"format_score": 0.2}, 0.2),
        (LONDON, ["Paris"], {"structure_format_score": 0.2, "retrieval_score": 0.1}, 0.3),
        (EXAMPLE + LONDON, ["Paris"], {"structure_format_score": 0.2, "retrieval_score": 0.1}, 0.3),
        ("Paris <answer>Paris</answer>", ["Paris"], {"structure_format_score": 0.2}, 0.8),
        ("x <answer>London</answer>", ["Paris"], {"final_format_score": 0.1}, 0.1),
        ("<information><answer>Paris</answer></information>", ["Paris"], {"format_score": 0.2}, 0.0),
        ("<information><answer>Paris</answer>", ["Paris"], {"format_score": 0.2}, 0.0),
        ("<think><answer>Paris</answer></think>", ["Paris"], {"format_score": 0.2}, 0.0),
        (EXAMPLE + "no idea", ["Beijing"], {"format_score": 0.2}, 0.0),
        (G.replace("The Paris", "London").replace("Paris", "zzz p zzz"), "Paris", {"retrieval_score": 0.1}, 0.0),
        (G, "Paris", {}, 1.0),
        (G, ["London", "Paris"], {}, 1.0),
        (G, {"target": ["Paris"]}, {}, 1.0),
        (G, {"ground_truth": "Paris"}, {}, 1.0),
        ("<answer>London</answer><answer>Paris</answer>", "Paris", {}, 1.0),
        ("<answer>the</answer>", ["the", ""], {}, 0.0),
        ("<answer></answer>", [""], {}, 0.0),
    ],
)
def test_exact_match_reference_rows(text, truth, scores, expected):
    assert exact_match.compute_score(text, truth, **scores) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"])
def test_verls_search_rows_are_scored_by_exact_match_without_a_reward_in_the_config(name):
    assert default_scorers[f"searchR1_{name}"] is exact_match.compute_score


def test_retrieved_text_comes_from_tool_messages_where_there_are_any():
    text = "<think>x</think><search>q</search>\n<think>y</think><answer>London</answer>"
    messages = [{"role": "tool", "content": "Paris is a city"}]
    scores = {"structure_format_score": 0.2, "retrieval_score": 0.1}
    assert exact_match.compute_score(text, "Paris", {"messages": messages}, **scores) == pytest.approx(0.3)
    assert exact_match.compute_score(text, "Rome", {"messages": messages}, **scores) == pytest.approx(0.2)
    made_up = text.replace("</search>", "</search><information>Rome</information>")
    assert exact_match.compute_score(made_up, "Rome", {"messages": messages}, **scores) == 0.0


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (G, True),
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a</think>\n<answer>b</answer>\n", True),
        ("<answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> bye", False),
        ("<think>a</think>so<answer>b</answer>", False),
        ("<think>a</think><search>q</search><answer>b</answer>", False),
        ("<think>a</think><search>q</search><information>i</information><answer>b</answer>", False),
    ],
)
def test_structure_is_think_search_result_think_answer(text, valid):
    assert exact_match.has_valid_structure(text) is valid


def test_a_row_without_targets_is_refused():
    for truth in (None, [], {"target": []}):
        with pytest.raises(ValueError, match="no target"):
            exact_match.compute_score(G, truth)
    with pytest.raises(ValueError, match="needs 'target'"):
        exact_match.compute_score(G, {"answers": ["Paris"]})


# ---------------------------------------------------------------- the default task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So it is 12.\n#### 12", 1),
        ("#### 12\n", 1),
        ("####12", 1),
        ("#### 12.", 0),
        ("#### 12 apples", 0),
        ("#### 13", 0),
        ("12", 0),
        ("#### 12\n#### 13", 0),
        ("#### 13\n#### 12", 1),
        ("#### -12", 0),
        ("#### " + "1" * 10_000, 0),
        ("", 0),
    ],
)
def test_arithmetic_wants_the_final_line_and_the_right_integer(text, expected):
    assert arithmetic.compute_score(text, "12")["score"] == expected


def conversation(*turns: str | dict) -> dict:
    messages = [t if isinstance(t, dict) else {"role": "assistant", "content": t} for t in turns]
    return {"messages": [{"role": "user", "content": "?"}, *messages]}


def test_arithmetic_scores_the_last_turn_and_tells_the_first_answer_apart():
    call = {"role": "assistant", "content": "#### 12", "tool_calls": [{"function": {"name": "calculator"}}]}
    retry = {"role": "user", "content": "Try again. #### 12"}
    cases = [
        (("#### 12",), 1, 1),
        ((call, "#### 12"), 1, 1),
        (("#### 13", retry, "#### 12"), 1, 0),
        (("#### 12", retry, "#### 13"), 0, 1),
        (("#### 12", retry, ""), 0, 1),
        ((call,), 0, 0),
    ]
    for turns, score, first in cases:
        assert arithmetic.compute_score("#### 12", 12, conversation(*turns)) == {"score": score, "first_answer": first}


def test_arithmetic_ignores_examples_of_the_prompt():
    info = conversation("#### 12", "#### 13") | {"assistant_turns": 1}
    assert arithmetic.compute_score("#### 13", 12, info) == {"score": 0.0, "first_answer": 0.0}


def test_what_is_paid_for_the_form_is_a_part_of_its_own():
    def scores(name: str, **kwargs: float):
        items = [
            RewardInput("x", text, "42") for text in ("#### 42 <answer>42</answer>", "#### 41 <answer>41</answer>")
        ]
        return asyncio.run(load_reward(name, kwargs=kwargs).score(items))

    assert scores("gsm8k") == scores("exact_match") == [{"score": 1.0}, {"score": 0.0}]
    assert scores("gsm8k", format_score=0.1) == [{"score": 1.0, "format": 0.0}, {"score": 0.1, "format": 0.1}]
    broken = [{"score": 0.75, "format": -0.25}, {"score": 0.125, "format": 0.125}]
    assert scores("exact_match", structure_format_score=0.25, final_format_score=0.125) == broken
