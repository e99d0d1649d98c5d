"""bfloat16 policies train: small updates are not rounded away; the learning rate is a pure function of the step."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.config.actor import OptimConfig
from verl_mt.modeling.exact import remember_exact
from verl_mt.workers.optimizer import (
    MASTER,
    MOMENTS,
    MasterAdamW,
    build_adamw,
    lr_factor,
    names_of_state,
    state_of,
    warmup_steps_of,
)


def train(dtype, optimizer_class, steps=50, lr=1e-5):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64, generator=generator).to(torch.bfloat16).to(dtype))
    optimizer = optimizer_class([parameter], lr=lr, weight_decay=0.01)
    for _ in range(steps):
        parameter.grad = torch.randn(64, generator=generator).abs().to(torch.bfloat16).to(dtype)
        optimizer.step()
    return parameter, optimizer


def test_master_weights_of_a_bfloat16_policy_follow_float32_training():
    exact, _ = train(torch.float32, torch.optim.AdamW)
    low, optimizer = train(torch.bfloat16, build_adamw)
    master = state_of(optimizer, low)[MASTER]
    assert torch.allclose(master, exact.detach(), atol=1e-7)
    assert torch.equal(low.detach(), master.to(torch.bfloat16))


def test_without_master_weights_most_of_it_would_be_lost():
    start, _ = train(torch.float32, build_adamw, steps=0)
    exact, _ = train(torch.float32, build_adamw)
    naive, _ = train(torch.bfloat16, torch.optim.AdamW)
    moved = (exact - start).abs().mean()
    assert (naive.detach().float() - exact).abs().mean() > 0.5 * moved


def test_float32_parameters_step_exactly_as_torchs():
    ours, _ = train(torch.float32, build_adamw)
    theirs, _ = train(torch.float32, torch.optim.AdamW)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_lives_elsewhere_visits_for_the_step_and_comes_back(dtype):
    """A copy stands for the other device: what were not copied back would be lost."""
    plain, expected = train(dtype, build_adamw)
    offloaded, optimizer = train(dtype, functools.partial(build_adamw, offload=True))
    assert torch.equal(offloaded, plain)
    ours, theirs = state_of(optimizer, offloaded), state_of(expected, plain)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_only_one_parameters_state_visits_at_a_time(monkeypatch):
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(3)]
    optimizer, visits = build_adamw(parameters, offload=True, lr=1e-3), []
    real = MasterAdamW._update
    monkeypatch.setattr(MasterAdamW, "_update", lambda self, group, p, s: visits.append(s) or real(self, group, p, s))
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    optimizer.step()
    assert [len(states) for states in visits] == [1, 1, 1]
    for parameter, (visiting,) in zip(parameters, visits):
        kept = state_of(optimizer, parameter)
        assert all(kept[name] is not visiting[name] for name in ("exp_avg", "exp_avg_sq"))


def test_an_offloaded_state_is_in_cpu_memory_wherever_the_parameters_are():
    parameter = torch.nn.Parameter(torch.zeros(8, device="meta"))
    places = [state_of(build_adamw([parameter], offload=o, lr=1e-3), parameter)["exp_avg"].device.type for o in (0, 1)]
    assert places == ["meta", "cpu"]


def test_mixed_precisions_are_refused():
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    with pytest.raises(ValueError, match="1 of 2 parameters are not float32"):
        build_adamw(parameters, lr=1e-3)


def factors(kind: str, warmup: int, total: int, min_ratio: float = 0.0) -> list[float]:
    return [
        lr_factor(step, warmup_steps=warmup, total_steps=total, kind=kind, min_ratio=min_ratio)
        for step in range(total + 1)
    ]


def test_linear_warms_up_without_a_wasted_step_and_decays_to_its_end():
    assert factors("linear", 2, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_and_its_minimum():
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)]
    assert factors("cosine", 0, 4, 0.1) == pytest.approx(expected)


def test_constant_stays():
    assert factors("constant", 3, 5, 0.5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 9),
    total=st.integers(0, 30),
    min_ratio=st.floats(0, 1),
    step=st.integers(0, 99),
)
def test_always_between_nothing_and_the_peak_also_after_the_end(kind, warmup, total, min_ratio, step):
    assert 0.0 <= lr_factor(step, warmup_steps=warmup, total_steps=total, kind=kind, min_ratio=min_ratio) <= 1.0


def test_a_ratio_is_a_share_of_all_updates_and_stands_for_the_steps():
    assert warmup_steps_of(OptimConfig(lr_warmup_steps_ratio=0.285), 400) == 114
    assert warmup_steps_of(OptimConfig(lr_warmup_steps=5), 400) == 5
    assert warmup_steps_of(OptimConfig(lr_warmup_steps=5, lr_warmup_steps_ratio=0.1), 39) == 3


def test_a_warm_up_as_long_as_the_run_ends_at_the_peak():
    assert factors("linear", 2, 2) == pytest.approx([0.5, 1.0, 1.0])
    assert factors("cosine", 3, 2, 0.1) == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_later_steps_have_the_last_rate(kind):
    assert lr_factor(9, warmup_steps=1, total_steps=5, kind=kind, min_ratio=0.25) == 0.25


def test_the_state_of_a_parameter_begins_with_nothing_and_its_exact_weights():
    low = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    remember_exact(low, torch.tensor([1.0001, 2.0001]))
    optimizer = build_adamw([low], lr=1e-3)
    state = state_of(optimizer, low)
    assert set(state) == set(names_of_state(low)) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert {name: value.tolist() for name, value in state.items()} == {
        "step": 0.0,
        "exp_avg": [0.0, 0.0],
        "exp_avg_sq": [0.0, 0.0],
        "master": torch.tensor([1.0001, 2.0001]).tolist(),
    }
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert not any(value.requires_grad for value in state.values())
    assert state_of(optimizer, low) is state, "made once"
    plain = torch.nn.Parameter(torch.ones(2))
    assert set(state_of(torch.optim.AdamW([plain]), plain)) == set(names_of_state(plain)) == set(MOMENTS)


def test_master_weights_are_no_view_of_the_parameter():
    low = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    master = state_of(build_adamw([low], lr=1e-3), low)[MASTER]
    with torch.no_grad():
        low.zero_()
    assert master.tolist() == [1.0, 2.0] and master.dtype == torch.float32 and not master.requires_grad


def test_only_parameters_with_a_gradient_step():
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    parameters[1].grad = torch.ones(2, dtype=torch.bfloat16)
    for offload in (False, True):
        optimizer = build_adamw(parameters, offload=offload, lr=0.5, betas=(0.5, 0.75), weight_decay=0.25, eps=1.0)
        assert optimizer.offload == offload
        with torch.no_grad():
            parameters[1].fill_(1.0)
        optimizer.step()
        assert parameters[0].tolist() == [1.0, 1.0] and parameters[0] not in optimizer.state
        # 1 - 0.5 * 0.25 by the decay, then 0.5 * 1 / (1 + 1) by the gradient, whose bias is corrected.
        state = optimizer.state[parameters[1]]
        assert state[MASTER].tolist() == pytest.approx([0.625] * 2) and state["step"].item() == 1
        assert state["exp_avg"].tolist() == [0.5] * 2 and state["exp_avg_sq"].tolist() == [0.25] * 2
        assert parameters[1].tolist() == [0.625] * 2
