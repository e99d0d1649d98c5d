"""Several rewards as one."""

from __future__ import annotations

import asyncio
import math

import pytest

from verl_mt.errors import ConfigError
from verl_mt.rewards.base import RewardFailure, RewardInput, load_reward, rewards


def item(text: str = "one two", truth: str = "2", **more) -> RewardInput:
    return RewardInput("d", text, truth, completion=text, **more)


def score(kwargs, *items):
    return asyncio.run(load_reward("weighted_sum", kwargs=kwargs).score(items))


@pytest.fixture
def parts(monkeypatch):
    """Rewards of two forms: the length of the text, and something to say of texts with a digit only."""
    made = {
        "length": lambda completions, **kwargs: [float(len(text)) for text in completions],
        "digit": lambda completions, **kwargs: [
            float(text[-1]) if text[-1:].isdigit() else None for text in completions
        ],
        "nan": lambda completions, **kwargs: [math.nan for _ in completions],
        "broken": lambda completions, **kwargs: ["no number" for _ in completions],
    }
    for name, function in made.items():
        monkeypatch.setitem(rewards, name, function)


def test_the_score_is_the_weighted_sum_and_each_reward_a_number_of_its_own(parts):
    assert score({"rewards": ["length", "digit"], "weights": [1, 0.5]}, item("ab4")) == [
        {"score": 5.0, "length": 3.0, "digit": 4.0}
    ]
    assert score({"rewards": ["length", "digit"]}, item("ab4"))[0]["score"] == 7


@pytest.mark.parametrize("silent", ["digit", "nan"])
def test_a_reward_that_gives_none_or_nan_is_left_out_of_the_sum(parts, silent):
    found = score({"rewards": ["length", silent], "weights": [2, 1]}, item("abc"), item("ab"))
    assert found == [{"score": 6.0, "length": 3.0}, {"score": 4.0, "length": 2.0}]


def test_a_trajectory_of_which_no_reward_says_anything_fails(parts):
    (found,) = score({"rewards": ["digit", "nan"]}, item("abc"))
    assert isinstance(found, RewardFailure) and "none of digit, nan gave a number" in found.error


def test_a_reward_that_returns_no_number_fails_the_trajectory_as_it_does_alone(parts):
    (found,) = score({"rewards": ["length", "broken"]}, item("abc"))
    assert isinstance(found, RewardFailure) and "reward broken" in found.error and found.kind == "invalid"


def test_each_part_has_arguments_of_its_own_and_the_deadline_of_the_whole():
    reward = load_reward(
        "weighted_sum",
        kwargs={"rewards": ["repetition", "format"], "kwargs": {"repetition": {"n_grams": 1}}},
        timeout_s=7,
    )
    assert reward.timeout_s == 7
    assert asyncio.run(reward.score([item("a a a a")])) == [{"score": -0.75, "repetition": -0.75, "format": 0.0}]


def test_a_weighted_form_is_not_what_the_score_without_the_form_is_taken_from():
    (found,) = score(
        {"rewards": ["format", "repetition"], "weights": [0.1, 1]}, item("<think>a</think><answer>b</answer>")
    )
    assert found == {"score": pytest.approx(0.1), "format_reward": 1.0, "repetition": 0.0}


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"rewards": []}, "expected a list of rewards"),
        ({"rewards": "format"}, "expected a list of rewards"),
        ({"rewards": ["format"], "weights": [1, 2]}, "2 weights for 1 rewards"),
        ({"rewards": ["format"], "weights": ["a"]}, "expected a list of numbers"),
        ({"rewards": ["format"], "weights": [math.nan]}, "weights: nan is not finite"),
        ({"rewards": ["format"], "weights": [-math.inf]}, "weights: -inf is not finite"),
        ({"rewards": ["format", "format"]}, "a distinct name"),
        ({"rewards": ["format"], "kwargs": {"formt": {}}}, "no part formt"),
        ({"rewards": ["format"], "weights": [0.5], "kwargs": {"format_reward": {}}}, "There are format$"),
    ],
)
def test_what_cannot_be_added_up_is_refused(kwargs, text):
    with pytest.raises(ConfigError, match=text):
        load_reward("weighted_sum", kwargs=kwargs)
