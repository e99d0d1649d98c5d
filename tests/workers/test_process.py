"""What torch is told once per process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from verl_mt.workers.process import prepare_torch


@pytest.fixture
def as_before():
    """Other tests find what they had."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.set_num_threads(threads)


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_generator_is_seeded(as_before):
    drawn = []
    for seed in (7, 7, 8):
        prepare_torch(threads=1, seed=seed, deterministic=False)
        drawn.append(draws())
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])


def test_a_seed_may_be_larger_than_numpys_largest(as_before):
    prepare_torch(threads=1, seed=2**32 + 7, deterministic=False)
    first = np.random.rand()
    prepare_torch(threads=1, seed=7, deterministic=False)
    assert np.random.rand() == first


@pytest.mark.parametrize("deterministic", [False, True])
def test_threads_determinism_and_no_attention_of_cudnn(as_before, deterministic):
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    prepare_torch(threads=2, seed=0, deterministic=deterministic)
    assert torch.get_num_threads() == 2 and torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() == deterministic, "warned, where there is no other way"
