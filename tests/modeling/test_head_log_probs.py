"""Log-probs from tiles of logits: the plain computation's values and gradients, a few logits at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl_mt.modeling import head_log_probs as module_under_test
from verl_mt.modeling.head_log_probs import head_log_probs

TOKENS, HIDDEN, VOCAB = 5, 3, 7


@pytest.fixture
def in_tiles(monkeypatch):
    """No more than 5 logits at once, of 2 tokens: tiles that divide neither tokens nor vocabulary."""
    monkeypatch.setattr(module_under_test, "LOGITS_AT_ONCE", 5)
    monkeypatch.setattr(module_under_test, "TILE", {"cpu": 5, "cuda": 5})
    monkeypatch.setattr(module_under_test, "_TILE_TOKENS", 2)


def case(bias: bool = False, frozen: bool = False, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias).to(dtype).requires_grad_(not frozen)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(VOCAB, (TOKENS,))


def naive(head, hidden, targets, temperature):
    log_probs = (head(hidden) / temperature).log_softmax(-1)
    return log_probs[torch.arange(len(targets)), targets], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradients_of_log_probs_and_entropies_are_the_derivatives(in_tiles, bias, frozen, temperature):
    head, hidden, targets = case(bias, frozen)
    trained = [p for p in head.parameters() if p.requires_grad]

    def function(hidden, *_):
        return head_log_probs(head, hidden, targets, temperature=temperature, with_entropy=True)

    got, expected = function(hidden), naive(head, hidden, targets, temperature)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, atol=1e-14, rtol=1e-13)
    assert torch.autograd.gradcheck(function, (hidden, *trained))


@pytest.mark.parametrize("guess", ["right", "wrong"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_guess_of_the_derivative_changes_no_gradient_be_it_right_or_wrong(in_tiles, monkeypatch, guess, bias):
    head, hidden, targets = case(bias)
    coefficients = torch.randn(TOKENS, dtype=torch.float64)
    log_probs, entropy = naive(head, hidden, targets, 0.8)
    wanted = torch.autograd.grad((log_probs * coefficients).sum(), [hidden, *head.parameters()])
    recomputed = []
    real = module_under_test._gradients
    monkeypatch.setattr(module_under_test, "_gradients", lambda *args: recomputed.append(1) or real(*args))
    guessed = coefficients if guess == "right" else coefficients + 1e-12
    flags = {"temperature": 0.8, "with_entropy": True, "entropy_grad": False, "expected": lambda: guessed}
    output = head_log_probs(head, hidden, targets, **flags)
    torch.testing.assert_close(output[0], log_probs)
    torch.testing.assert_close(output[1], entropy.detach())
    got = torch.autograd.grad((output[0] * coefficients).sum(), [hidden, *head.parameters()])
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)
    assert recomputed == ([] if guess == "right" else [1])


def test_logits_of_a_thousand_overflow_nothing_and_entropies_are_never_negative(in_tiles):
    head, hidden, targets = case(dtype=torch.float32)
    with torch.no_grad():
        head.weight.mul_(3000)
    log_probs, entropy = head_log_probs(head, hidden, targets, with_entropy=True)
    exact = naive(head.double(), hidden.double(), targets, 1.0)
    assert torch.isfinite(log_probs).all() and (entropy >= 0).all()
    torch.testing.assert_close(log_probs.double(), exact[0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-3, atol=1e-4)


def test_a_bfloat16_head_rounds_its_logits_and_adds_up_in_float32(in_tiles):
    head, hidden, targets = case(dtype=torch.bfloat16)
    logits = head(hidden).float().double()
    log_probs, _ = head_log_probs(head, hidden, targets)
    assert log_probs.dtype == torch.float32
    expected = logits.log_softmax(-1)[torch.arange(TOKENS), targets]
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(log_probs.sum(), [hidden, head.weight])
    plain = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    for a, b in zip(got, plain):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


class _Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["other class", "hook", "logits already"])
def test_a_head_that_does_more_than_multiply_is_called(in_tiles, kind):
    head, hidden, targets = case()
    if kind == "other class":
        head.__class__ = _Scaled
    elif kind == "hook":
        head.register_forward_hook(lambda _, inputs, output: output + 1)
    else:
        head, hidden = nn.Identity(), torch.randn(TOKENS, VOCAB, dtype=torch.float64, requires_grad=True)
    expected = naive(head, hidden, targets, 0.5)
    got = head_log_probs(head, hidden, targets, temperature=0.5, with_entropy=True)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)
        slopes = [torch.autograd.grad(x.sum(), hidden, retain_graph=True)[0] for x in (a, b)]
        torch.testing.assert_close(*slopes)


def test_no_tile_has_more_logits_than_it_may(in_tiles, monkeypatch):
    head, hidden, targets = case()
    sizes = []
    real = module_under_test._logits
    monkeypatch.setattr(module_under_test, "_logits", lambda *args: sizes.append((r := real(*args)).numel()) or r)
    log_probs, _ = head_log_probs(head, hidden, targets)
    log_probs.sum().backward()
    assert max(sizes) <= 5 and sum(sizes) == 2 * TOKENS * VOCAB
