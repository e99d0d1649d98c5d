"""The critic: values of states, and updates that no split of the batch changes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from actor_toys import REWARDS, hand_made, lora_policy, make_batch, tiny_policy, worker
from critic_toys import batch_with_values, critic, value_head, value_model

from verl_mt.algorithms.value_loss import explained_variance
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup
from verl_mt.errors import DataError, VerlMTError
from verl_mt.modeling.values import ValueModel
from verl_mt.trainer.dynamic_sampling import Selection
from verl_mt.workers import critic as module
from verl_mt.workers.critic import _Seen, train_policy_and_critic, update_policy_and_critic, value_metrics
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.sharding import ALONE, Ranks, ShardedCritic
from verl_mt.workers.trainable import UpdatePlan


def gradients(worker, batch) -> list[dict[str, torch.Tensor]]:
    """Before each optimizer step, by name."""
    seen: list[dict[str, torch.Tensor]] = []
    names = {id(p): n for n, p in worker.module.named_parameters()}

    def keep(optimizer, *_):
        seen.append({names[id(p)]: p.grad.clone() for p in optimizer.param_groups[0]["params"]})

    worker.optimizer.register_step_pre_hook(keep)
    worker.update(batch)
    return seen


def test_a_new_critic_says_that_every_state_is_worth_nothing():
    worker = critic(ValueModel(copy.deepcopy(tiny_policy())))
    assert not worker.compute_values(make_batch(REWARDS)).any()


@pytest.mark.parametrize("split", [{"ppo_micro_batch_size": 1}, {"ppo_micro_batch_size": 2}, {"ppo_max_token_len": 40}])
def test_no_split_into_micro_batches_changes_values_or_gradients_of_a_shared_trunk(split):
    policy = tiny_policy()
    whole, parts = critic(policy=policy), critic(policy=policy, **split)
    batch = batch_with_values(whole, records=2)
    torch.testing.assert_close(parts.compute_values(batch), batch[col.VALUES], atol=1e-5, rtol=1e-5)
    (expected,), (got,) = gradients(whole, batch), gradients(parts, batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_padding_changes_nothing():
    worker, wider = critic(), critic()
    batch = batch_with_values(worker)
    padded = batch.clone()
    token_columns = [n for n, column in batch.items() if torch.is_tensor(column) and column.ndim == 2]
    for name in token_columns:
        padded[name] = torch.nn.functional.pad(batch[name], (0, 7), value=5 if name == col.INPUT_IDS else 0)
    (expected,), (got,) = gradients(worker, batch), gradients(wider, padded)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_what_stands_at_observations_never_matters():
    clean, dirty = critic(), critic()
    batch = batch_with_values(clean)
    junk = batch.clone()
    for name in (col.VALUES, col.RETURNS):
        junk[name] = torch.where(batch[col.LOSS_MASK], batch[name], torch.nan)
    expected, got = clean.update(batch), dirty.update(junk)
    assert got == expected
    assert all(map(math.isfinite, got.values()))
    for own, other in zip(clean.module.parameters(), dirty.module.parameters()):
        assert torch.equal(own, other)


def test_the_metrics_of_an_update():
    worker = critic(ppo_mini_batch_size=1, ppo_epochs=2)
    batch = batch_with_values(worker)
    metrics = worker.update(batch)
    mask = batch[col.LOSS_MASK]
    assert metrics["critic/values/mean"] == pytest.approx(batch[col.VALUES][mask].mean().item(), abs=1e-6)
    assert metrics["critic/returns/mean"] == pytest.approx(batch[col.RETURNS][mask].mean().item(), abs=1e-6)
    expected = explained_variance(batch[col.VALUES], batch[col.RETURNS], mask).item()
    assert metrics["critic/explained_variance"] == pytest.approx(expected, abs=1e-6)
    assert worker.num_updates == 6
    assert metrics["critic/vf_loss"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["critic/lr"] == 1e-2
    assert 0 <= metrics["critic/vf_clipfrac"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_the_critic_learns_what_states_are_worth(shared):
    """Returns that are a function of the next-to-last token: no constant explains them."""
    policy = tiny_policy() if shared else None
    worker = critic(policy=policy, lr=1e-2, cliprange_value=None)
    batch = make_batch(REWARDS)
    ids = batch[col.INPUT_IDS]
    target = torch.where(batch[col.LOSS_MASK], (ids.roll(1, 1) % 2).float(), 0.0)
    explained = []
    for _ in range(40):
        batch[col.VALUES], batch[col.RETURNS] = worker.compute_values(batch), target
        explained.append(worker.update(batch)["critic/explained_variance"])
    assert explained[-1] > 0.7 > explained[0]


def test_a_shared_trunk_feels_nothing_of_the_critic():
    policy = copy.deepcopy(tiny_policy())
    before = {n: p.clone() for n, p in policy.named_parameters()}
    worker = critic(value_head(), policy=policy)
    worker.update(batch_with_values(worker))
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in policy.named_parameters())
    assert sum(p.numel() for p in worker.module.parameters()) < 400, "a head, not a second model"


def test_a_head_learns_in_eval_mode_and_keeps_its_dropout():
    """Only a module that recomputes activations goes to training mode, without dropout. A head recomputes none."""
    head = value_head()
    head.layers.append(torch.nn.Dropout(0.5))
    worker, modes = critic(head, policy=tiny_policy()), []
    batch = batch_with_values(worker)
    head.register_forward_hook(lambda module, *_: modes.append(module.training))
    worker.update(batch)
    assert modes and set(modes) == {False}
    assert head.layers[-1].p == 0.5


@pytest.mark.parametrize("adapters", [False, True])
def test_a_shared_trunk_gives_the_values_of_the_policy_as_it_is_now(adapters):
    policy = lora_policy() if adapters else copy.deepcopy(tiny_policy())
    worker, batch = critic(value_head(), policy=policy), make_batch(REWARDS)
    before = worker.compute_values(batch)
    with torch.no_grad():
        next(p for p in policy.parameters() if p.requires_grad).mul_(1.5)
    assert (worker.compute_values(batch) - before).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_resumed_critic_goes_on_bit_for_bit(shared):
    policy = tiny_policy() if shared else None
    kwargs = {"policy": policy, "ppo_mini_batch_size": 1, "ppo_epochs": 2}
    whole = critic(**kwargs)
    batches = [batch_with_values(critic(**kwargs), seed=s) for s in range(3)]
    for batch in batches[:2]:
        whole.update(batch)
    state = copy.deepcopy(whole.state_dict())
    expected = whole.update(batches[2])
    resumed = critic(value_head(seed=5) if shared else value_model(), **kwargs)
    resumed.load_state_dict(state)
    assert resumed.update(batches[2]) == expected
    for own, other in zip(whole.module.parameters(), resumed.module.parameters()):
        assert torch.equal(own, other)


def test_in_the_warm_up_only_the_critic_learns():
    actor, own = worker(tiny_policy()), critic(warmup=2)
    batch = batch_with_values(own)
    seen = [update_policy_and_critic(actor, own, batch.clone()) for _ in range(3)]
    assert ["actor/pg_loss" in metrics for metrics in seen] == [False, False, True]
    assert all("critic/vf_loss" in metrics for metrics in seen)
    assert (actor.num_updates, own.num_updates) == (1, 3)


def test_a_column_that_is_missing_is_named():
    with pytest.raises(DataError, match="no column values, returns"):
        critic().update(make_batch(REWARDS))


def test_a_loss_that_is_not_finite_three_times_in_a_row_stops_the_run():
    worker = critic()
    batch = batch_with_values(worker)
    batch[col.RETURNS] = torch.where(batch[col.LOSS_MASK], torch.inf, 0.0)
    assert worker.update(batch)["critic/nonfinite_updates"] == 1
    worker.update(batch)
    with pytest.raises(VerlMTError, match=r"Lower critic\.optim\.lr"):
        worker.update(batch)
    assert worker.num_updates == 0


def test_trajectories_that_a_limit_cut_teach_the_critic_as_little_as_the_policy():
    cut = Trajectory("g0s1", "g0", "g0", "g0s1", stop_reason=StopReason.RESPONSE_LENGTH)
    found = []
    for earned in (0.0, 1e4):
        batch = batch_with_values(critic())
        batch[col.RETURNS][1] = earned
        Selection(filter_overlong=True).mask_overlong(batch, [TrajectoryGroup("g0", "g0", [cut])])
        learner = critic()
        metrics = learner.update(batch)
        found.append((metrics, [p.detach().clone() for p in learner.module.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


# In numbers


class TimesWeight(torch.nn.Module):
    """The value of a state is its token times 0.5."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))
        self.passes = []

    def forward(self, ids, real, wanted_BT):
        self.passes.append((ids.tolist(), real.tolist(), wanted_BT.tolist()))
        return ids * self.weight


def three_tokens(**given):
    """Values 1, 1.5 and 2; of the last row nothing is in the loss."""
    return hand_made(
        [[0, 1, 0], [1, 1, 0], [0, 0, 0]], input_ids=torch.tensor([[1, 2, 9], [3, 4, 9], [9, 9, 9]]), **given
    )


LEARNED = {
    "values": torch.tensor([[7.0, 1.0, 7], [1.5, 0.5, 7], [7, 7, 7]]),
    "returns": torch.tensor([[9.0, 2.0, 9], [1.0, 3.0, 9], [9, 9, 9]]),
}
"""The last token's value is 1.5 above what it was."""


@pytest.fixture
def by_token(monkeypatch):
    monkeypatch.setattr(module, "packs", lambda module: False)

    def made(**options):
        return critic(TimesWeight(), grad_clip=0.0, shuffle=False, **options)

    return made


@pytest.mark.parametrize("split", [{}, {"ppo_micro_batch_size": 1}])
def test_values_of_the_tokens_in_the_loss(by_token, split):
    worker = by_token(**split)
    found = worker.compute_values(three_tokens())
    assert found.tolist() == [[0, 1, 0], [1.5, 2, 0], [0, 0, 0]] and not found.requires_grad
    assert [len(ids) for ids, _, _ in worker.module.passes] == ([1, 1] if split else [2])


@pytest.mark.parametrize("split", [{}, {"ppo_micro_batch_size": 1}])
@pytest.mark.parametrize(
    ("clip", "losses", "slope", "clipped"),
    [
        (None, 1 + 0.25 + 1, -1 * 2 + 0.5 * 3 - 1 * 4, 0),
        (1.0, 1 + 0.25 + 1.5**2, -1 * 2 + 0.5 * 3, 1),  # held at 1.5
    ],
)
def test_an_update_in_numbers(by_token, split, clip, losses, slope, clipped):
    worker, seen = by_token(cliprange_value=clip, **split), []
    worker.optimizer.register_step_pre_hook(lambda *_: seen.append(worker.module.weight.grad.item()))
    metrics = worker.update(three_tokens(**LEARNED))
    assert seen == [pytest.approx(slope / 3)]
    expected = {"vf_loss": losses / 6, "vf_clipfrac": clipped / 3, "grad_norm": abs(slope) / 3, "lr": 1e-2}
    expected |= {"nonfinite_updates": 0, "values/mean": 1.0, "returns/mean": 2.0}
    expected |= {"explained_variance": 1 - 2.25}
    assert metrics == pytest.approx({f"critic/{name}": value for name, value in expected.items()})
    assert [len(ids) for ids, _, _ in worker.module.passes] == ([1, 1] if split else [2])


def test_mini_batches_without_a_token_in_the_loss_make_no_step(by_token):
    worker = by_token(ppo_mini_batch_size=1, optim={"lr_warmup_steps": 0})
    metrics = worker.update(three_tokens(**LEARNED))
    assert worker.num_updates == 2 and worker.progress()["num_batches"] == 1
    assert metrics["critic/vf_clipfrac"] == pytest.approx(1 / 3)


def test_the_numbers_of_an_update_are_those_of_the_steps_that_were_made():
    seen = _Seen(lr=0.5)
    assert seen.metrics() == {"critic/lr": 0.5, "critic/nonfinite_updates": 0}
    for loss, clipped, tokens, norm in ((1.0, 2, 4, 1.0), (9.0, 9, 9, None), (3.0, 1, 6, 2.0)):
        norm = None if norm is None else torch.tensor(norm)
        seen.add(torch.tensor(loss), torch.tensor(clipped), torch.tensor(tokens), norm)
    expected = {"lr": 0.5, "nonfinite_updates": 1, "vf_loss": 2.0, "vf_clipfrac": 0.3, "grad_norm": 1.5}
    assert seen.metrics() == pytest.approx({f"critic/{name}": value for name, value in expected.items()})


def test_how_much_the_values_explain():
    found = value_metrics(three_tokens(**LEARNED))
    expected = {"explained_variance": -1.25, "values/mean": 1.0, "returns/mean": 2.0}
    assert found == pytest.approx({f"critic/{name}": value for name, value in expected.items()})


@pytest.mark.parametrize(("done", "waits"), [(1, True), (2, True), (3, False)])
def test_the_policy_waits_for_the_batches_of_the_warm_up(done, waits):
    worker = critic(TimesWeight(), warmup=2)
    worker._num_batches = done
    assert worker.policy_waits == waits


class OfTwo(Ranks):
    def sum(self, value):
        return 2 * value


@pytest.mark.parametrize(
    ("ranks", "has", "expected"),
    [(ALONE, True, 3.0), (OfTwo(0, 2), True, 6.0), (OfTwo(1, 2, 2), True, 0.0), (OfTwo(0, 2), False, 0.0)],
)
def test_gradients_of_a_head_are_added_up_over_ranks(ranks, has, expected):
    worker = critic(TimesWeight(), policy=tiny_policy())
    worker.ranks = ranks
    worker.module.weight.grad = torch.tensor([3.0]) if has else None
    worker._add_up_gradients()
    assert worker.module.weight.grad.item() == expected
    alone = critic(TimesWeight())
    alone.ranks, alone.module.weight.grad = OfTwo(0, 2), torch.tensor([3.0])
    alone._add_up_gradients()
    assert alone.module.weight.grad.item() == 3.0, "FSDP2 adds up shards"


def test_a_rank_without_rows_takes_part_with_a_row_of_its_own_making(by_token, monkeypatch):
    worker = by_token()
    assert worker._forward(three_tokens(), None).tolist() == [[0.5, 0.5]]
    assert worker.module.passes == [([[1, 1]], [[1, 1]], [[False, True]])]
    monkeypatch.setattr(module, "micro_batches", lambda *args, **options: [None])
    share = RankBatch.alone(three_tokens(**LEARNED))
    assert not worker.values(share).any()
    assert worker.learn(share)["critic/grad_norm"] == 0.0
    assert worker.optimizer.state[worker.module.weight]["step"] == 1, "by a gradient of 0"


def test_a_head_reads_the_hidden_states_of_the_policy(monkeypatch):
    asked, policy = [], tiny_policy()

    def hidden(*args, wanted_BT):
        asked.append((*args, wanted_BT))
        return torch.tensor([[2.0], [4.0]], requires_grad=True)

    monkeypatch.setattr(module, "hidden_states", hidden)
    head = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Flatten(0))
    with torch.no_grad():
        head[0].weight.fill_(0.5)
    worker = critic(head, policy=policy)
    batch = three_tokens()
    found = worker._forward(batch, torch.tensor([1]))
    assert found.tolist() == [[1.0, 2.0, 0.0]] and found.requires_grad
    ((model, ids, real, wanted),) = asked
    assert model is policy and (ids.tolist(), real.tolist()) == ([[3, 4, 9]], [[1, 1, 1]])
    assert wanted.tolist() == [[True, True, False]]


@pytest.mark.parametrize("trains", [True, False])
def test_a_sharded_critic_gives_its_layers_back_where_no_backward_pass_will(monkeypatch, trains):
    calls = []

    class Sharded(ShardedCritic):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.weight, self.ranks, self.model = torch.nn.Parameter(torch.ones(1)), ALONE, torch.nn.Linear(1, 1)

        def forward(self, ids, real, wanted_BT):
            return ids * self.weight

        def reshard(self):
            calls.append("reshard")

    worker = critic(Sharded())
    with torch.set_grad_enabled(trains):
        worker._forward(three_tokens(), torch.tensor([0]))
    assert calls == ([] if trains else ["reshard"])


@pytest.mark.parametrize("waits", [True, False])
def test_the_critic_learns_first_and_the_policy_unless_it_waits(waits):
    calls = []

    def noted(name, result):
        return lambda given: calls.append((name, given)) or result

    actor = SimpleNamespace(update=noted("update", {"a": 1.0}), train=noted("train", ({"a": 1.0}, {"x": 2})))
    own = SimpleNamespace(update=noted("critic", {"c": 3.0}), learn=noted("learn", {"c": 3.0}), policy_waits=waits)
    assert update_policy_and_critic(actor, None, "batch") == {"a": 1.0}
    assert update_policy_and_critic(actor, own, "batch") == ({"c": 3.0} if waits else {"c": 3.0, "a": 1.0})
    assert train_policy_and_critic(actor, None, "share") == ({"a": 1.0}, {"x": 2})
    learned = train_policy_and_critic(actor, own, "share")
    assert learned == (({"c": 3.0}, {}) if waits else ({"c": 3.0, "a": 1.0}, {"x": 2}))
    assert [name for name, _ in calls] == (
        ["update", "critic", "train", "learn"] if waits else ["update", "critic", "update", "train", "learn", "train"]
    )


def test_what_the_configuration_says_of_a_critics_updates():
    made = critic(
        TimesWeight(), ppo_epochs=2, ppo_mini_batch_size=3, shuffle=False, grad_clip=0.25, optim={"weight_decay": 0.5}
    )
    assert made._plan == UpdatePlan(made.config.optim, 2, 3, False, 0.25, "critic") and not made.offloads
    assert made._total_updates == 200
    schedule = module.CriticSchedule(total_steps=4, seed=5)
    config = replace(made.config, ppo_epochs=None, ppo_max_token_len=None, loss_agg_mode=None)
    bare = module.CriticWorker(TimesWeight(), config, schedule=schedule, param_offload=True)
    assert bare.offloads and bare._plan.ppo_epochs == 1 and bare._plan.shuffle and bare._total_updates == 4


@pytest.mark.parametrize("policy", [True, False])
def test_a_critics_rows_are_packed_as_those_of_the_module_that_reads_them(monkeypatch, policy):
    asked, trunk = [], tiny_policy()
    monkeypatch.setattr(module, "packs", lambda of: asked.append(of) or "packed")
    monkeypatch.setattr(module, "micro_batches", lambda share, rows, **limits: (share, rows, limits))
    made = critic(TimesWeight(), policy=trunk if policy else None, ppo_max_token_len=30, ppo_micro_batch_size=2)
    limits = {"max_tokens": 30, "max_rows": 2, "packed": "packed"}
    assert made._micro_batches("share", "rows") == ("share", "rows", limits)
    assert asked == [trunk if policy else made.module]
    made.config = replace(made.config, ppo_max_token_len=None)
    assert made._micro_batches("share", "rows")[2] == limits | {"max_tokens": 1}


@pytest.mark.parametrize("split", [{}, {"ppo_micro_batch_size": 1}])
def test_the_last_pass_of_a_critics_update_is_said_to_be_it(by_token, monkeypatch, split):
    lasts = []
    monkeypatch.setattr(module, "expect_backward", lambda of, *, last: lasts.append(last))
    by_token(**split).update(three_tokens(**LEARNED))
    assert lasts == ([False, True] if split else [True])


def test_a_rank_that_shares_its_rows_counts_nothing(by_token):
    worker = by_token()
    worker.ranks = type("Silent", (Ranks,), {"sum": lambda self, value: value})(1, 2, 2)
    assert worker.learn(RankBatch.alone(three_tokens(**LEARNED)))["critic/vf_loss"] == 0.0


def test_a_head_has_the_ranks_of_the_policy_that_it_reads(monkeypatch):
    trunk, own = tiny_policy(), TimesWeight()
    monkeypatch.setattr(
        module, "ranks_of", lambda of: Ranks(1, 2) if of is trunk else pytest.fail("asked for no policy")
    )
    assert critic(own, policy=trunk).ranks == Ranks(1, 2)
    assert critic(own).ranks is ALONE


def test_gradients_that_were_left_behind_do_not_count(by_token):
    worker = by_token()
    worker.module.idle = torch.nn.Parameter(torch.ones(1))
    fresh = critic(worker.module, grad_clip=0.0, cliprange_value=None)
    for parameter in fresh.module.parameters():
        parameter.grad = torch.full((1,), 9.0)
    assert fresh.update(three_tokens(**LEARNED))["critic/grad_norm"] == pytest.approx(1.5)
    assert fresh.module.idle not in fresh.optimizer.state


@pytest.mark.parametrize(("mode", "loss"), [(None, 2.25 / 6), ("seq-mean-token-sum", 2.25 / 4)])
def test_how_token_losses_of_a_critic_become_one_number(by_token, mode, loss):
    worker = by_token(cliprange_value=None, loss_agg_mode=mode)
    worker.config = replace(worker.config, loss_agg_mode=mode)
    given, added, step = [], [], worker._step
    worker._step = lambda loss: given.append(loss) or step(loss)
    worker._add_up_gradients = lambda: added.append(1)
    assert worker.update(three_tokens(**LEARNED))["critic/vf_loss"] == pytest.approx(loss)
    assert not given[0].requires_grad and added == [1]


def test_a_head_alone_keeps_what_gradients_it_has():
    worker = critic(TimesWeight(), policy=tiny_policy())
    worker._add_up_gradients()
    assert worker.module.weight.grad is None
