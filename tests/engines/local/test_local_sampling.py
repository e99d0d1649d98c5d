"""The sampler: supports, distributions, streams of random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.engines.local.sampling import BLOCK, SamplingRows, keep_support, sample, stream_key, uniforms


def rows(n, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, uniform=None):
    full = lambda value, kind: np.full(n, value, dtype=kind)  # noqa: E731
    return SamplingRows(
        full(temperature, np.float64),
        full(top_k, np.int64),
        full(top_p, np.float64),
        full(min_p, np.float64),
        np.random.default_rng(0).random(n) if uniform is None else np.asarray(uniform, dtype=np.float64),
    )


logit_rows = st.lists(st.floats(-8, 8).map(lambda x: round(x, 1)), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 2, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_filters_apply_in_order_and_no_removed_token_is_ever_sampled(logits, temperature, top_k, top_p, min_p, uniform):
    probs = np.exp(torch.log_softmax(torch.tensor(logits) / temperature, -1).numpy().astype(np.float64))
    ranked = sorted(range(len(logits)), key=lambda i: (-probs[i], i))[: None if top_k < 0 else top_k]
    mass, nucleus, total = 0.0, [], sum(probs[i] for i in ranked)
    for i in ranked:
        if nucleus and top_p < 1 and mass >= top_p - 1e-12:
            break
        nucleus.append(i)
        mass += probs[i] / total
    allowed = [i for i in nucleus if probs[i] >= min_p * probs[ranked[0]] - 1e-12]
    options = rows(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=[uniform])
    token, log_prob = sample(torch.tensor([logits]), options)
    assert token[0] in allowed
    assert log_prob[0] == pytest.approx(np.log(probs[token[0]]), abs=1e-5)


def test_top_k_keeps_exactly_k_even_among_equals():
    kept = keep_support(torch.full((1, 6), 1 / 6).double(), np.array([3]), np.array([1.0]), np.array([0.0]))
    assert kept.gt(0)[0].tolist() == [True, True, True, False, False, False]


def test_greedy_takes_the_lowest_id_among_equals_and_reports_the_log_prob_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    token, log_prob = sample(logits, rows(1, temperature=0.0))
    assert token.tolist() == [1]
    assert log_prob[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_a_token_of_probability_zero_is_never_sampled(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    token, _ = sample(logits, rows(1, uniform=[uniform]))
    assert token[0] in (1, 3)


def test_samples_follow_the_distribution():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = torch.softmax(logits[0].double() / 0.8, -1).numpy()
    draws = np.concatenate([uniforms(stream_key(7, i), 0) for i in range(300)])
    tokens, _ = sample(logits.expand(len(draws), -1), rows(len(draws), temperature=0.8, uniform=draws))
    counts = np.bincount(tokens, minlength=20)
    chi_square = ((counts - len(draws) * expected) ** 2 / (len(draws) * expected)).sum()
    # 19 degrees of freedom: the 0.999 quantile is 43.8.
    assert chi_square < 43.8


def test_rows_are_independent_of_their_company():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1)) * 2
    together = rows(7)
    together.temperature[3], together.top_k[2], together.top_p[5] = 0.0, 4, 0.6
    tokens, log_probs = sample(logits, together)
    for i in range(7):
        alone = SamplingRows(*(getattr(together, name)[i : i + 1] for name in SamplingRows.__dataclass_fields__))
        token, log_prob = sample(logits[i : i + 1], alone)
        assert (token[0], log_prob[0]) == (tokens[i], log_probs[i])


@pytest.mark.parametrize("vocabulary", [255, 256, 257, 1000])
@pytest.mark.parametrize("shape", ["smooth", "holes", "one block", "equal"])
def test_the_token_is_where_running_sums_over_the_whole_vocabulary_exceed_the_uniform_number(vocabulary, shape):
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    if shape == "equal":
        logits = torch.zeros(1, vocabulary)
    elif shape == "holes":
        logits[:, torch.arange(vocabulary) % 3 > 0] = -torch.inf
    elif shape == "one block":
        logits[:, : vocabulary - vocabulary // 4], logits[:, -1] = -torch.inf, -torch.inf
    sums = torch.log_softmax(logits, -1)[0].exp().double().cumsum(0).numpy()
    ends = sums[[0, vocabulary // 2, vocabulary - 1]] / sums[-1]
    draws = np.concatenate([np.linspace(0, 1, 1999, endpoint=False), ends * (1 - 1e-9), [0.0, np.nextafter(1.0, 0.0)]])
    tokens, _ = sample(logits.expand(len(draws), -1), rows(len(draws), uniform=draws))
    last = np.flatnonzero(np.diff(sums)).max() + 1
    expected = np.minimum(np.searchsorted(sums, draws * sums[-1], side="right"), last)
    # At the edge between two tokens the last bits of a sum decide: of a block's sum in float32.
    unclear = np.abs(sums[:, None] / sums[-1] - draws).min(0) < 3e-7
    assert unclear.sum() < 20
    assert np.array_equal(tokens[~unclear], expected[~unclear])
    assert np.isfinite(logits[0, tokens].numpy()).all()


def test_large_vocabularies_are_drawn_in_pieces(monkeypatch):
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(2))
    whole = sample(logits, rows(9))
    monkeypatch.setattr("verl_mt.engines.local.sampling._CHUNK_ELEMENTS", (100, 100))
    pieces = sample(logits, rows(9))
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces))


def test_streams_of_random_numbers_are_seekable_and_differ():
    generator = np.random.Generator(np.random.Philox(key=5))
    assert np.array_equal(np.concatenate([uniforms(5, 0), uniforms(5, 1)]), generator.random(2 * BLOCK))
    starts = {uniforms(key, 0)[0] for key in [*range(50), *(stream_key(0, i) for i in range(50)), -1, 2**100]}
    assert len(starts) == 102


def test_non_finite_logits_are_told_by_their_log_prob():
    _, log_probs = sample(torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), rows(2))
    assert np.isnan(log_probs).tolist() == [True, False]
