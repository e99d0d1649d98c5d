"""Rewards for the form of an answer."""

from __future__ import annotations

import asyncio

import pytest

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.rewards.answer_style import Cosine, Format, ReActFormat, Repetition
from verl_mt.rewards.base import RewardInput, load_reward


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", 1),
        ("<think></think><answer></answer>", 1),
        (" <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>\n", 0),
        ("<think>a</think>so<answer>b</answer>", 0),
        ("<answer>b</answer>", 0),
        ("<think>a</think><think>b</think><answer>c</answer>", 1),
        ("", 0),
    ],
)
def test_format_is_thoughts_and_an_answer_and_nothing_around_them(text, score):
    assert Format()([text]) == [score]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>\nAction: x\nAction Input: {}", 1),
        ("<think>a</think>Action:Action Input:", 1),
        ("<think>a</think>\nAction: x", 0),
        ("Action: x\nAction Input: {}", 0),
    ],
)
def test_react_format_is_thoughts_an_action_and_its_input(text, score):
    assert ReActFormat()([text]) == [score]


@pytest.mark.parametrize(
    ("text", "score"), [("a b", 0.0), ("a b c d", 0.0), ("a A a a", -0.5), ("a b a b a b", -0.5), ("", 0.0)]
)
def test_repetition_is_the_share_of_n_grams_that_are_repeated(text, score):
    assert Repetition()([text]) == [pytest.approx(score)]


def test_repetition_has_its_own_length_and_price():
    assert Repetition(n_grams=1, max_penalty=-2.0)(["a a a a"]) == [-1.5]
    with pytest.raises(ConfigError, match="n_grams must be at least 1"):
        Repetition(n_grams=0)


def test_cosine_pays_short_right_answers_most_and_short_wrong_ones_least():
    pytest.importorskip("math_verify")
    right, wrong = r"\boxed{2}", r"\boxed{3}"
    texts, tokens = [right] * 3 + [wrong] * 3, [0, 50, 100] * 2
    # The ids of two turns count together.
    ids = [[[7] * (n // 2), [7] * (n - n // 2)] for n in tokens]
    scores = Cosine(max_len=100)(texts, solution=["$2$"] * 6, response_token_ids=ids)
    assert scores == pytest.approx([1.0, 0.75, 0.5, -0.5, -0.25, 0.0])


def test_cosine_counts_the_tokens_of_the_rollout():
    pytest.importorskip("math_verify")
    reward = load_reward("cosine", kwargs={"max_len": 4})
    one = RewardInput("d", "x", "$2$", completion=r"\boxed{2}", message_ids=((1, 2), (3, 4)))
    assert asyncio.run(reward.score([one])) == [{"score": pytest.approx(0.5)}]
