"""A policy loss of the user's: what it gets, what it may return, and what is said when it is wrong."""

from __future__ import annotations

import pytest
import torch

from verl_mt.algorithms.losses import ppo_clip_loss
from verl_mt.config.compose import compose
from verl_mt.config.policy_loss import read_policy_loss
from verl_mt.errors import ConfigError, PluginError, UserCodeError
from verl_mt.workers.own_loss import load_own_loss, own_loss

MODULE = "own_losses_of_the_test"
SOURCE = """
import torch
from verl_mt.algorithms.losses import ppo_clip_loss

def same(log_probs, old_log_probs, advantages, mask, clip_low, clip_high, clip_c):
    ranges = dict(clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)
    return ppo_clip_loss(log_probs, old_log_probs, advantages, mask, **ranges)

def scaled(log_probs, old, advantages, mask, factor):
    return -factor * advantages * log_probs
def few(log_probs, mask): return log_probs
def scalar(log_probs, old, advantages, mask): return log_probs.sum()
def constant(log_probs, old, advantages, mask): return torch.ones_like(log_probs)
def nothing(log_probs, old, advantages, mask): return None
def raises(log_probs, old, advantages, mask): raise ZeroDivisionError("by zero")
number = 3
"""
OFFERED = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_own_loss.cache_clear()
    return MODULE


def tensors() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2, 5, generator=draw).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    return log_probs, torch.randn(2, 5, generator=draw), torch.randn(2, 5, generator=draw), mask


def test_one_that_does_what_ppos_does_has_its_loss_gradient_and_numbers(module):
    given = tensors()
    options = read_policy_loss({"loss_mode": f"{module}.same"})
    loss, numbers = own_loss(options, given, OFFERED)
    expected, its_numbers = ppo_clip_loss(*given, **OFFERED)
    assert torch.equal(loss, expected) and numbers.keys() == its_numbers.keys()
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), given[:1], retain_graph=True) for x in (loss, expected))
    assert torch.equal(ours, theirs)


def test_its_own_arguments_come_from_the_config_and_nothing_outside_the_mask_counts(module):
    given = tensors()
    loss, _ = own_loss(read_policy_loss({"loss_mode": f"{module}.scaled", "factor": 2.0}), given, OFFERED)
    assert torch.equal(loss, torch.where(given[3], -2.0 * given[2] * given[0], 0.0))


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("scaled", {}, UserCodeError, "raised TypeError: .*factor"),
        (
            "same",
            {"factor": 1},
            ConfigError,
            r"policy_loss.factor: .*takes no argument of that name; it takes log_p",
        ),
        ("few", {}, ConfigError, r"takes log_probs, mask; expected \(log_probs, old_log_probs, advantages, mask"),
        ("number", {}, ConfigError, "is a int, expected a function"),
        ("absent", {}, PluginError, "has no 'absent'"),
        ("scalar", {}, UserCodeError, r"returned shape \(\); expected a loss for each token, \(2, 5\)"),
        ("nothing", {}, UserCodeError, "returned a NoneType"),
        ("constant", {}, UserCodeError, "without gradient"),
        ("raises", {}, UserCodeError, "raised ZeroDivisionError: by zero"),
    ],
)
def test_one_that_cannot_be_a_loss_is_named_with_what_is_wrong(module, name, options, error, text):
    with pytest.raises(error, match=text):
        own_loss(read_policy_loss({"loss_mode": f"{module}.{name}", **options}), tensors(), OFFERED)


def test_a_name_that_is_no_path_is_still_refused():
    with pytest.raises(ConfigError, match=r"'vanila', expected one of 'vanilla', .*, or a dotted path or file.py:name"):
        compose(["actor_rollout_ref.actor.policy_loss.loss_mode=vanila"])
    with pytest.raises(ConfigError, match=r"'grppo', expected one of 'grpo', .*, or a dotted path or file.py:name"):
        compose(["algorithm.adv_estimator=grppo"])
