"""A policy loss of the user's: what it gets, what it may return, and what is said when it is wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from verl_mt.algorithms.losses import ppo_clip_loss
from verl_mt.config.actor import ActorConfig
from verl_mt.config.checks import means_nothing
from verl_mt.config.compose import compose
from verl_mt.config.declare import option
from verl_mt.config.policy_losses import POLICY_LOSSES, PolicyLoss, read_policy_loss
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError, PluginError, UserCodeError
from verl_mt.plugins import load_object
from verl_mt.workers.loss import token_loss

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
RANGES = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


def loss_of(path: str, **options):
    """As the configuration names it, with clip ranges of its own."""
    return token_loss(ActorConfig(policy_loss={"loss_mode": path, **options}, clip_ratio_high=0.3))


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return MODULE


def tensors() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    log_probs = torch.randn(2, 5, generator=draw).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    return log_probs, torch.randn(2, 5, generator=draw), torch.randn(2, 5, generator=draw), mask


def test_one_that_does_what_ppos_does_has_its_loss_gradient_and_numbers(module):
    given = tensors()
    loss, numbers = loss_of(f"{module}.same")(*given)
    expected, its_numbers = ppo_clip_loss(*given, **RANGES)
    assert torch.equal(loss, expected) and numbers.keys() == its_numbers.keys()
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), given[:1], retain_graph=True) for x in (loss, expected))
    assert torch.equal(ours, theirs)


def test_its_own_arguments_come_from_the_config_and_nothing_outside_the_mask_counts(module):
    given = tensors()
    loss, _ = loss_of(f"{module}.scaled", factor=2.0)(*given)
    assert torch.equal(loss, torch.where(given[3], -2.0 * given[2] * given[0], 0.0))


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("scaled", {}, UserCodeError, "raised TypeError: .*factor"),
        (
            "same",
            {"factor": 1},
            ConfigError,
            r"policy_loss.factor: .*takes no argument of that name. It takes log_p",
        ),
        ("few", {}, ConfigError, r"takes log_probs, mask. Expected \(log_probs, old_log_probs, advantages, mask"),
        ("number", {}, ConfigError, "is a int, expected a function"),
        ("absent", {}, PluginError, "has no 'absent'"),
        ("scalar", {}, UserCodeError, r"returned shape \(\). Expected a loss for each token, \(2, 5\)"),
        ("nothing", {}, UserCodeError, "returned a NoneType"),
        ("constant", {}, UserCodeError, "without gradient"),
        ("raises", {}, UserCodeError, "raised ZeroDivisionError: by zero"),
    ],
)
def test_one_that_cannot_be_a_loss_is_named_with_what_is_wrong(module, name, options, error, text):
    with pytest.raises(error, match=text):
        loss_of(f"{module}.{name}", **options)(*tensors())


def test_a_name_that_is_no_path_is_still_refused():
    with pytest.raises(ConfigError, match=r"'vanila', expected one of 'vanilla', .*, or a dotted path or file.py:name"):
        compose(["actor_rollout_ref.actor.policy_loss.loss_mode=vanila"])
    with pytest.raises(ConfigError, match=r"'grppo', expected one of 'grpo', .*, or a dotted path or file.py:name"):
        compose(["algorithm.adv_estimator=grppo"])


DECIDED = {"gspo": {"log_ratio_B"}, "real": {"slope_B"}, "clip_cov": {"chosen"}, "kl_cov": {"chosen"}}
"""Arguments of a formula that `over_mini_batch` returns."""


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_says_what_its_formula_takes(name):
    """What the configuration refuses or calls unused is read off the class, so the class must be true."""
    loss = read_policy_loss({"loss_mode": name})
    first, takes = [], dict(inspect.signature(load_object(loss.formula, what=name)).parameters)
    for key in list(takes)[:4]:
        first.append(key)
        del takes[key]
    assert first == ["log_probs", "old_log_probs", "advantages", "mask"]
    clips = {"clip_low", "clip_high", "clip_c"}
    assert clips & takes.keys() == {*loss.clips}
    assert takes.keys() - clips - loss.options.keys() == DECIDED.get(name, set())
    assert loss.options.keys() <= takes.keys() or name in DECIDED


def test_a_loss_that_is_added_to_the_table_can_be_chosen_with_its_options_and_no_others(monkeypatch, module):
    @dataclass
    class Mine(PolicyLoss):
        formula = f"{module}.scaled"
        factor: float = option(2.0, "A number.", max=3.0)

    monkeypatch.setitem(POLICY_LOSSES, "mine", Mine)
    with pytest.raises(ConfigError, match=r"tau_pos is 2.0, which only loss_mode=sapo reads. It is mine"):
        read_policy_loss({"loss_mode": "mine", "tau_pos": 2.0})
    with pytest.raises(ConfigError, match=r"factor: got 4.0, must be at most 3.0"):
        read_policy_loss({"loss_mode": "mine", "factor": 4.0})
    config = Config()
    config.actor_rollout_ref.actor.policy_loss = {"loss_mode": "mine"}
    assert len([key for key in means_nothing(config) if ".clip_ratio" in key]) == 4
    given = tensors()
    loss = token_loss(ActorConfig(), read_policy_loss({"loss_mode": "mine"}))(*given)
    assert torch.equal(loss, -2.0 * given[2] * given[0])


@pytest.mark.slow
def test_a_configuration_is_checked_with_every_loss_without_torch():
    program = (
        "import sys; from verl_mt.config.policy_losses import POLICY_LOSSES, read_policy_loss\n"
        "for name in POLICY_LOSSES: read_policy_loss({'loss_mode': name})\n"
        "print(len(POLICY_LOSSES), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["9", "False"]
