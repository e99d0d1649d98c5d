"""slime's reward signature: one Sample, or a batch of them; behind the tool loop too."""

from __future__ import annotations

import asyncio

import pytest

from verl_mt.errors import PluginError
from verl_mt.extensions.compat.generate.args import ARGS
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.rewards.base import RewardFailure, RewardInput, load_reward
from verl_mt.rollout.drivers import DriverParts

SEEN: list = []


async def per_sample(args, sample, bonus=0.0):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    SEEN.append((args, sample.response))
    if "bad" in sample.response:
        raise RuntimeError("cannot score this")
    return float(sample.response == sample.label["ground_truth"]) + bonus


def synchronous(args, sample):
    return {"score": 0.5, "length": len(sample.response)}


async def batched(args, samples, **kwargs):
    SEEN.append([s.response for s in samples])
    if any("bad" in s.response for s in samples):
        raise RuntimeError("one of them")
    return [float(len(s.response)) for s in samples]


def too_short(args, samples):
    return [1.0]


def needs_judge(args, sample, judge):
    return 1.0


def items(*responses):
    return [
        RewardInput("toy", r, "yes", {"index": k}, source=Sample(response=r, label={"ground_truth": "yes"}))
        for k, r in enumerate(responses)
    ]


def score(name, *responses, **kwargs):
    SEEN.clear()
    reward = load_reward(f"{__name__}.{name}", kwargs=kwargs)
    reward.bind(None, DriverParts(shared={ARGS: "the args"}))
    return asyncio.run(reward.score(items(*responses)))


@pytest.mark.cap("C44")
def test_a_dotted_path_names_it_and_it_is_given_args_and_the_sample():
    assert score("per_sample", "yes", "no") == [{"score": 1.0}, {"score": 0.0}]
    assert SEEN == [("the args", "yes"), ("the args", "no")]
    assert score("per_sample", "yes", bonus=0.25) == [{"score": 1.25}]
    assert score("synchronous", "abc") == [{"score": 0.5, "length": 3.0}]


@pytest.mark.cap("C44", "C57")
def test_what_raises_or_is_no_sample_fails_its_own_item_only():
    good, bad = score("per_sample", "yes", "bad")
    assert good == {"score": 1.0} and isinstance(bad, RewardFailure)
    assert "row 1: raised RuntimeError: cannot score this" in bad.error
    reward = load_reward(f"{__name__}.per_sample")
    [failure] = asyncio.run(reward.score([RewardInput("toy", "yes", "yes")]))
    assert "TypeError: Sample must be an instance" in failure.error


@pytest.mark.cap("C75")
def test_a_batched_function_is_called_once_and_keeps_the_order():
    assert score("batched", "aaa", "b", "cc") == [{"score": 3.0}, {"score": 1.0}, {"score": 2.0}]
    assert SEEN == [["aaa", "b", "cc"]]


@pytest.mark.cap("C75", "C57")
def test_a_batch_that_raises_is_scored_again_sample_by_sample():
    first, second, third = score("batched", "aaa", "bad", "cc")
    assert (first, third) == ({"score": 3.0}, {"score": 2.0}) and isinstance(second, RewardFailure)
    assert SEEN[0] == ["aaa", "bad", "cc"] and sorted(SEEN[1:]) == [["aaa"], ["bad"], ["cc"]]
    assert [type(r) for r in score("too_short", "a", "b")] == [dict, dict], "alone, one score is right"
    [failure] = score("batched", "bad")
    assert "one of them" in failure.error


def test_a_parameter_that_nothing_fills_is_refused_at_start():
    with pytest.raises(PluginError, match=r"nothing fills its parameter judge; a reward of slime's gets args"):
        load_reward(f"{__name__}.needs_judge")
    assert load_reward(f"{__name__}.needs_judge", kwargs={"judge": 1})
