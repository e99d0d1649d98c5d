"""Ranks that share each sequence (`ulysses_sequence_parallel_size`): the update is that of one process."""

from __future__ import annotations

import functools

import pytest
import torch
from actor_toys import REWARDS, VOCAB, fill_advantages, make_batch, tiny_policy
from critic_toys import batch_with_values, critic
from sharded_jobs import PACKED, SHARED, critic_gradients, one_update, reference
from tables import before_release

from verl_mt.algorithms.aggregate import MODES
from verl_mt.data import batch as col
from verl_mt.errors import ConfigError
from verl_mt.modeling.sequence_parallel import SequenceGroup
from verl_mt.workers.sharding import ALONE, Ranks

pytestmark = pytest.mark.slow
PRECISION = {"atol": 5e-6, "rtol": 0.0}


@functools.cache
def policy(heads: int, key_heads: int):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=8 * heads, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def a_batch(seed: int = 0):
    batch = make_batch([*REWARDS[1:], [1.0, 1.0]], seed=seed, records=2)
    fill_advantages(batch)
    batch[col.REF_LOG_PROBS] = torch.where(batch[col.LOSS_MASK], -3.1, 0.0)
    return batch


def check(got, expected):
    assert len(got["gradients"]) == len(expected["gradients"]) == 1
    torch.testing.assert_close(got["gradients"], expected["gradients"], **PRECISION)
    assert got["metrics"] == pytest.approx(expected["metrics"], abs=5e-6, rel=5e-6)
    torch.testing.assert_close(got["old"], expected["old"], atol=1e-5, rtol=1e-5, equal_nan=True)


PASSES = {"packed": PACKED, "prefixes shared": SHARED}
LOSSES = {
    "vanilla": {},
    "gspo": {"policy_loss": {"loss_mode": "gspo"}, "clip_ratio": 3e-4},
    "gspo, a record a pass": {"policy_loss": {"loss_mode": "gspo"}, "ppo_max_token_len": 1},
    "entropy and kl": {"entropy_coeff": 0.1, "use_kl_loss": True, "loss_agg_mode": "seq-mean-token-sum"},
}
LAYOUTS = [(2, 2), (4, 2), (4, 4), (3, 3)]
"""How many ranks there are, and how many of them share each sequence."""


def layouts_of_losses():
    """For every commit each loss with two ranks and with two groups of two, and a loss with each larger group."""
    for place, layout in enumerate(LAYOUTS):
        for number, loss in enumerate(LOSSES):
            for packing in PASSES:
                chosen = (packing == "packed") == ((place + number) % 2 == 0) and (place < 2 or number == place - 1)
                yield (*layout, loss, packing) if chosen else before_release(*layout, loss, packing)


@pytest.mark.parametrize(("size", "sequence", "loss", "packing"), [*layouts_of_losses()])
def test_gradients_metrics_and_old_log_probs_are_those_of_one_process(ranks, size, sequence, loss, packing):
    made, passes, options = functools.partial(policy, 4, 2), PASSES[packing], LOSSES[loss]
    batch = a_batch()
    expected = one_update(ALONE, batch.clone(), policy=made, **options)
    for got in ranks(size)(one_update, batch, policy=made, sequence=sequence, passes=passes, **options):
        check(got, expected)


CLIPPED = {"use_sampler_log_probs": "always", "lr": 0.0}


def layouts_of_aggregations():
    """For every commit each aggregation, with both losses and with one and two groups of ranks by turns."""
    for place, mode in enumerate(MODES):
        for number, loss in enumerate(("vanilla", "gspo")):
            for layout in ((2, 2), (4, 2), (4, 4)):
                chosen = number == place % 2 and layout == ((2, 2), (4, 2))[place // 2 % 2]
                yield (*layout, mode, loss) if chosen else before_release(*layout, mode, loss)


@pytest.mark.parametrize(("size", "sequence", "mode", "loss"), [*layouts_of_aggregations()])
def test_every_aggregation_with_ratios_that_are_clipped(ranks, size, sequence, mode, loss):
    """Old log-probs that are the sampler's, far from the policy's: ratios on both sides of the clip."""
    made, batch, options = functools.partial(policy, 4, 2), a_batch(), CLIPPED | LOSSES[loss] | {"loss_agg_mode": mode}
    expected = one_update(ALONE, batch.clone(), policy=made, **options)
    assert 0.05 < expected["metrics"]["actor/clipfrac"] < 1
    for got in ranks(size)(one_update, batch, policy=made, sequence=sequence, **options):
        check(got, expected)


@pytest.mark.parametrize(("size", "sequence"), [(2, 2), (4, 4)])
def test_the_reference_policy_says_what_it_says_in_one_process(ranks, size, sequence):
    made, batch = functools.partial(policy, 4, 2), a_batch()
    expected = reference(ALONE, batch, policy=made)
    assert expected.abs().max() > 1
    for got in ranks(size)(reference, batch, policy=made, sequence=sequence):
        torch.testing.assert_close(got, expected, **PRECISION)


@pytest.mark.parametrize(
    ("size", "sequence", "heads", "tokens", "checkpointing"),
    [
        (2, 2, (7, 7), 16, True),  # as many heads of keys
        (3, 3, (4, 1), 4096, False),  # fewer heads of keys than ranks
        before_release(4, 4, (6, 3), 4096, True),
        before_release(4, 2, (5, 1), 16, False),
        before_release(3, 3, (6, 2), 1, True),
        before_release(4, 2, (4, 4), 1, True),
    ],
)
def test_heads_that_do_not_divide_are_dealt_out_unevenly(ranks, size, sequence, heads, tokens, checkpointing):
    made = functools.partial(policy, *heads)
    batch = a_batch()
    expected = one_update(ALONE, batch.clone(), policy=made)
    options = {"sequence": sequence, "checkpointing": checkpointing, "ppo_max_token_len": tokens}
    for got in ranks(size)(one_update, batch, policy=made, **options):
        check(got, expected)


@pytest.mark.parametrize(
    ("size", "sequence", "shared"),
    [
        (2, 2, False),
        (4, 2, True),
        *(before_release(*c) for c in ((2, 2, True), (4, 2, False), (4, 4, False), (4, 4, True))),
    ],
)
def test_a_critic_learns_what_it_learns_in_one_process(ranks, size, sequence, shared):
    options = {"ppo_micro_batch_size": 2, "shared": shared, "policy": functools.partial(policy, 4, 2)}
    batch = batch_with_values(critic(), [*REWARDS[:2], [1.0]], seed=0, records=2)
    values, metrics, gradients = critic_gradients(ALONE, batch.clone(), **options)
    # Of a loss whose gradient is hundreds: the same digits as of one about 1.
    largest = max(1.0, *(float(g.abs().max()) for g in gradients.values()))
    for own in ranks(size)(critic_gradients, batch, sequence=sequence, passes=SHARED, **options):
        torch.testing.assert_close(own[0], values, **PRECISION)
        assert own[1] == pytest.approx(metrics, abs=5e-6, rel=5e-6)
        torch.testing.assert_close(own[2], gradients, atol=5e-6 * largest, rtol=0.0)


def test_adapters_too(ranks):
    batch = a_batch()
    expected = one_update(ALONE, batch.clone(), lora_rank=4)
    for got in ranks(2)(one_update, batch, lora_rank=4, sequence=2):
        check(got, expected)


def test_more_ranks_than_heads_and_rows_that_cannot_be_packed_are_refused(ranks):
    with pytest.raises(RuntimeError, match=r"ulysses_sequence_parallel_size=4.*has 2 heads"):
        ranks(4)(one_update, a_batch(), policy=tiny_policy, sequence=4)
    from verl_mt.modeling.passes import PLAIN

    with pytest.raises(RuntimeError, match="packed rows of text"):
        ranks(2)(one_update, a_batch(), sequence=2, passes=PLAIN)


def test_heads_and_tokens_of_each_rank():
    group = SequenceGroup(None, 2, 4)
    assert [list(own) for own in group.heads(14)] == [[*range(4)], [*range(4, 8)], [8, 9, 10], [11, 12, 13]]
    with pytest.raises(ConfigError, match="has 3 heads"):
        group.heads(3)
    assert group.chunk(torch.arange(1, 11)).tolist() == [7, 8, 9]
    assert SequenceGroup(None, 3, 4).chunk(torch.arange(1, 11)).tolist() == [10, 0, 0]
    assert group.chunk(torch.tensor([5])).tolist() == [0]


def test_ranks_that_share_sequences_take_the_same_rows_and_one_of_them_counts():
    own = [Ranks(rank, 4, sequence=2) for rank in range(4)]
    assert [r.part for r in own] == [0, 0, 1, 1] and [r.counts for r in own] == [True, False, True, False]
    assert own[0].shares([5, 4, 3, 2]) == [[0, 3], [1, 2]]
