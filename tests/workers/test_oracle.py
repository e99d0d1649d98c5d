"""Updates of actor and critic, log-probs and advantages against the oracle, which is plain torch from the papers."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import oracle
import pytest
import torch
from actor_toys import fill_advantages, lora_policy, make_batch, tiny_policy, worker
from critic_toys import critic, value_model
from oracle import Options
from sharded_jobs import one_update

from verl_mt.config.actor import RefConfig
from verl_mt.config.options import read_rollout_correction
from verl_mt.config.schema import AlgorithmConfig
from verl_mt.data import batch as col
from verl_mt.modeling.passes import PLAIN, Passes, use_passes
from verl_mt.trainer.advantage_step import advantage_estimator
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.worker_group import InlineWorkerGroup

KINDS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    "geometric": {"rollout_is": "geometric", "rollout_token_veto_threshold": 0.4},
    "icepop": {"rollout_is": "token", "rollout_rs": "token", "rollout_rs_threshold": 1.4},
    "rejected": {"rollout_rs": "geometric", "rollout_rs_threshold": 1.08},
}
FACTORS: dict[str, list[Any]] = {
    "kl": [None, *KINDS],
    "correction": list(CORRECTIONS),
    "loss": ["vanilla", "gspo", "cispo", "sapo", "gpg"],
    "aggregation": [None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
    "old": ["auto", "never", "always"],
    "updates": [(1, None), (2, None), (1, 3), (1, 1)],
    "split": [{}, {"ppo_micro_batch_size": 2}, {"ppo_max_token_len": 40}, {"ppo_max_token_len": 1}],
    "passes": [PLAIN, Passes(True, False), Passes(True, True)],
    "entropy": [0.0, 0.03],
    "skip": [False, True],
    "temperature": [0.7, 1.3],
    "grad_clip": [0.0, 0.1],
    "executions": [False, True],
}
"""Options of an update and their values; `updates` = (epochs, prompts of a mini-batch)."""


def refused(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """Whether the configuration refuses two values together."""
    pair = dict([one, other])
    correction, old, loss = pair.get("correction", "none"), pair.get("old"), pair.get("loss")
    return (old == "always" and correction != "none") or (loss == "gspo" and correction in ("token", "icepop"))


def all_pairs() -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Every two values of different options that are not refused, by name and place."""
    places = {name: range(len(values)) for name, values in FACTORS.items()}
    return {
        ((a, i), (b, j))
        for a, b in itertools.combinations(FACTORS, 2)
        for i, j in itertools.product(places[a], places[b])
        if not refused((a, FACTORS[a][i]), (b, FACTORS[b][j]))
    }


@functools.cache
def cases() -> list[dict[str, int]]:
    """A covering set: each case begins with a pair that none before it has, and takes for every other option the value
    that adds the most pairs; of values that add as many, another one each time."""
    every, order, found = all_pairs(), list(FACTORS), []
    missing = set(every)
    for pair in sorted(every, key=str):
        if pair not in missing:
            continue
        case = dict(pair)
        for name in order:
            if name in case:
                continue
            gains = []
            for place in range(len(FACTORS[name])):
                more = [tuple(sorted([(name, place), own], key=lambda x: order.index(x[0]))) for own in case.items()]
                gain = len(missing.intersection(more)) if every.issuperset(more) else -1
                gains.append((gain, (place + len(found)) % len(FACTORS[name]), place))
            case[name] = max(gains)[2]
        case = {name: case[name] for name in order}
        missing -= set(itertools.combinations(case.items(), 2))
        found.append(case)
    return found


def test_the_cases_cover_every_pair_of_values_that_is_not_refused():
    assert {pair for case in cases() for pair in itertools.combinations(case.items(), 2)} == all_pairs()


# A batch


def policy() -> Any:
    """One layer is enough in one process."""
    return tiny_policy(1)


@functools.cache
def reference() -> Any:
    """Another policy than the one that is trained."""
    other, generator = copy.deepcopy(policy()), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3).add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return other


@functools.cache
def given(temperature: float, executions: bool = False, layers: int = 1) -> Any:
    """Groups of three, two, four and two trajectories, each group's first in two records. One group has equal rewards,
    one trajectory no log-probs of its sampler, one row no token in the loss. The loss has holes among the sampled
    tokens and a few tokens that nobody sampled. The sampler is another policy, and its tokens are of several ages."""
    batch = make_batch([[1.0, 0.0, 0.4], [0.5, 0.5], [0.4, 0.0, 1.0, 0.6], [0.0, 1.0]], seed=2, records=2)
    draw = torch.Generator().manual_seed(9)
    chance = torch.rand(batch[col.SAMPLED].shape, generator=draw)
    noise, further = (size * torch.randn(chance.shape, generator=draw) for size in (0.4, 1.8))
    real = batch[col.ATTENTION_MASK].clone()
    real[:, :3] = False
    batch[col.LOSS_MASK] = real & torch.where(batch[col.SAMPLED], chance > 0.15, chance > 0.9)
    batch[col.LOSS_MASK][4] = False
    batch[col.HAS_LOG_PROBS] = batch[col.TRAJECTORY_INDEX] != 6
    if executions:
        batch[col.EXECUTION_INDEX] = batch[col.TRAJECTORY_INDEX] // 2
    fill_advantages(batch)
    with torch.no_grad():
        own, _ = oracle.log_probs(tiny_policy(layers), batch, temperature)
    batch[col.ROLLOUT_LOG_PROBS] = torch.where(batch[col.SAMPLED], own + noise, 0.0).float()
    batch[col.REF_LOG_PROBS] = torch.where(batch[col.LOSS_MASK], (own + further).clamp(max=-1e-3), 0.0).float()
    ages = torch.tensor([0, 1, 3])[torch.randint(3, chance.shape, generator=draw)]
    batch[col.AGES] = ages.masked_fill(~batch[col.SAMPLED], 0).to(torch.int32)
    return batch


# The policy


def options_of(case: dict[str, int]) -> tuple[dict[str, Any], Options]:
    """The values of a case, and what the oracle is told of them."""
    chosen = {name: FACTORS[name][place] for name, place in case.items()}
    epochs, mini_batch = chosen["updates"]
    default = "seq-mean-token-mean" if chosen["loss"] in ("gspo", "sapo") else "token-mean"  # each paper's own
    return chosen, Options(
        temperature=chosen["temperature"], loss=chosen["loss"], clip_low=0.1, clip_high=0.25, clip_c=1.4,
        aggregation=chosen["aggregation"] or default, norm_constant=8.0, kl=chosen["kl"], kl_coef=0.2,
        entropy_coeff=chosen["entropy"], correction=CORRECTIONS[chosen["correction"]], old=chosen["old"],
        epochs=epochs, mini_batch=mini_batch, skip_zero=chosen["skip"], grad_clip=chosen["grad_clip"],
    )  # fmt: skip


def keywords(told: Options) -> dict[str, Any]:
    """The oracle's options as those of `actor_toys.worker`."""
    kl = {"use_kl_loss": True, "kl_loss_type": told.kl, "kl_loss_coef": told.kl_coef} if told.kl else {}
    return {
        "lr": told.lr, "optim": {"betas": list(told.betas), "weight_decay": told.weight_decay}, "shuffle": False,
        "temperature": told.temperature, "policy_loss": {"loss_mode": told.loss}, "clip_ratio_low": told.clip_low,
        "clip_ratio_high": told.clip_high, "clip_ratio_c": told.clip_c, "loss_agg_mode": told.aggregation,
        "entropy_coeff": told.entropy_coeff, "grad_clip": told.grad_clip, "use_sampler_log_probs": told.old,
        "ppo_epochs": told.epochs, "ppo_mini_batch_size": told.mini_batch, "skip_zero_advantage": told.skip_zero, **kl,
    }  # fmt: skip


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


def trained(module: Any) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference by the size of the second."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-3))


def check_steps(
    found: list[torch.Tensor], weights: torch.Tensor, expected: oracle.Result, modules: tuple[Any, Any], what: Any
) -> None:
    """Gradients of all steps, and how far the weights moved: rounding adds up from step to step.

    Adam makes a full step of a gradient that is nothing but rounding, so weights with such a gradient are left out.

    Args:
        found: gradients.
        weights: behind the last step.
        modules: the oracle's behind the last step, and the one that both began with.
        what: for the message.
    """
    steps = [flat(g) for g in expected.gradients]
    assert len(found) == len(steps), what
    for number, (own, gradient) in enumerate(zip(found, steps)):
        assert off(own, gradient) < (2e-4 if number else 5e-6), (number, what)
    sure = torch.stack([(g.abs() > 1e-4 * g.abs().max()) | (g == 0) for g in steps]).all(0)
    moved, start = (flat(trained(module)) for module in modules)
    assert sure.float().mean() > 0.9, what
    assert off((weights - start)[sure], (moved - start)[sure]) < (1e-5 if len(steps) == 1 else 1e-4), what


def check_metrics(metrics: dict[str, float], expected: dict[str, float], prefix: str, what: Any) -> None:
    shared = {name: value for name, value in expected.items() if f"{prefix}/{name}" in metrics}
    assert {name: metrics[f"{prefix}/{name}"] for name in shared} == pytest.approx(shared, rel=2e-5, abs=2e-6), what


@pytest.mark.slow
@pytest.mark.cap("C27", "C31", "C65")
@pytest.mark.parametrize("loss", FACTORS["loss"])
def test_an_update_is_the_oracles(loss):
    for case in cases():
        chosen, told = options_of(case)
        if chosen["loss"] != loss:
            continue
        batch, module = given(told.temperature, chosen["executions"]), copy.deepcopy(policy()).double()
        expected = oracle.update_policy(module, batch, told)
        changed = {**keywords(told), **chosen["split"], "loss_agg_mode": chosen["aggregation"]}
        actor, filled = worker(policy(), **changed), batch.clone()
        use_passes(actor.module, chosen["passes"])
        actor.loss.correction = RolloutCorrection(read_rollout_correction(told.correction))
        seen = gradients_of(actor)
        metrics = actor.update(filled)
        check_steps(seen, flat(trained(actor.module)), expected, (module, policy()), chosen)
        named = {"pg_loss", "entropy", "grad_norm", "ppo_kl"} | ({"kl_loss"} if told.kl else set())
        assert {f"actor/{name}" for name in named} <= metrics.keys()
        check_metrics(metrics, expected.metrics, "actor", chosen)
        check_old(filled, expected, told, metrics, chosen)


def gradients_of(learner: Any) -> list[torch.Tensor]:
    """Filled with the gradient just before each step of a worker's optimizer."""
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append(flat(p.grad for p in trained(learner.module))))
    return seen


def check_old(filled: Any, expected: oracle.Result, told: Options, metrics: dict[str, float], what: Any) -> None:
    """The log-probs from before the update that are in the batch, and how far the sampler is from them."""
    old, mask = filled[col.OLD_LOG_PROBS].double(), filled[col.LOSS_MASK]
    computed = ~torch.isnan(old).any(1)
    if told.old in ("auto", "never"):
        assert computed[oracle.active_rows(filled, told)].all(), what
    both = mask & computed[:, None]
    assert both.any() and off(old[both], expected.before[both]) < 1e-6, what
    known = oracle.with_sampler(filled) & both & (filled[col.AGES] == 0)  # by the weights that are trained
    difference = (expected.before - filled[col.ROLLOUT_LOG_PROBS])[known].abs()
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(float(difference.mean()), rel=1e-5), what
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(float(difference.max()), rel=1e-5), what
    skipped = int((mask.any(1) & ~oracle.active_rows(filled, told)).sum())
    assert metrics["actor/skipped_zero_advantage_sequences"] == skipped, what


def test_the_cases_reach_every_branch_of_the_formulas():
    """Ratios beyond both bounds and beyond the dual clip, estimates beyond GRPO's clamp, factors of all kinds."""
    for temperature in FACTORS["temperature"]:
        _, told = options_of(dict.fromkeys(FACTORS, 0) | {"temperature": FACTORS["temperature"].index(temperature)})
        batch = given(temperature)
        own, _ = oracle.log_probs(policy(), batch, temperature)
        known, gain = oracle.with_sampler(batch), batch[col.ADVANTAGES]
        ratio = (own - batch[col.ROLLOUT_LOG_PROBS]).exp()
        for beyond in (
            (ratio < 1 - told.clip_low) & (gain < 0), (ratio > 1 + told.clip_high) & (gain > 0),
            (ratio > told.clip_c) & (gain < 0), gain == 0,
        ):  # fmt: skip
            assert 0 < int((beyond & known).sum()) < int(known.sum()) // 2
        log_r = (batch[col.REF_LOG_PROBS] - own)[batch[col.LOSS_MASK]]
        assert (log_r > 2.7).any() and (log_r < 0).any()
        for name, given_ in CORRECTIONS.items():
            factors = oracle.correction_factors(given_, own, batch)[known]
            assert name == "none" or (len(factors.unique()) > 1 and factors.max() > 0), name
        assert (~batch[col.SAMPLED] & batch[col.LOSS_MASK]).any() and (batch[col.SAMPLED] & ~batch[col.LOSS_MASK]).any()


@pytest.mark.parametrize("temperature", FACTORS["temperature"])
def test_log_probs_and_entropies_of_policy_and_reference_are_the_oracles(temperature):
    batch, mask = given(temperature), given(temperature)[col.LOSS_MASK]
    actor = worker(policy(), temperature=temperature)
    ref = RefWorker(copy.deepcopy(reference()), RefConfig(), actor=actor.config, temperature=temperature)
    for found, module in ((actor.compute_log_probs(batch), policy()), (ref.compute_log_probs(batch), reference())):
        with torch.no_grad():
            expected, _ = oracle.log_probs(copy.deepcopy(module).double(), batch, temperature)
        torch.testing.assert_close(found.double(), torch.where(mask, expected, 0.0), atol=1e-5, rtol=1e-5)


# Rewards, values and advantages


def workers_of(temperature: float) -> InlineWorkerGroup:
    """Policy, reference and critic."""
    actor = worker(policy(), temperature=temperature)
    ref = RefWorker(copy.deepcopy(reference()), RefConfig(), actor=actor.config, temperature=temperature)
    return InlineWorkerGroup(actor, ref, critic(value_model(policy())))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("+")])
def test_advantages_with_a_kl_penalty_in_the_reward_are_the_oracles(kind):
    """Of single tokens, and of trajectories; the weight of the penalty adapts."""
    coef, temperature, target, horizon = 0.05, 1.3, 0.5, 50.0
    workers, batch = workers_of(temperature), given(temperature).clone()
    workers.add_ref_log_probs(batch)
    with torch.no_grad():
        logp, _ = oracle.log_probs(copy.deepcopy(policy()).double(), batch, temperature)
        ref, _ = oracle.log_probs(copy.deepcopy(reference()).double(), batch, temperature)
        model = copy.deepcopy(workers.critic.module).double()
        expected_values = oracle.values(model, batch)
    kl = torch.where(batch[col.LOSS_MASK] & batch[col.SAMPLED], oracle.kl_estimate(kind, logp, ref), 0.0)
    control = {"type": "adaptive", "kl_coef": coef, "target_kl": target, "horizon": horizon}
    common = {"use_kl_in_reward": True, "kl_penalty": kind, "kl_ctrl": control}

    step = advantage_estimator(AlgorithmConfig(adv_estimator="gae", gamma=0.95, lam=0.9, **common), workers)
    metrics = step(batch)
    batch[col.VALUES], found = batch[col.VALUES].double(), batch[col.VALUES]
    torch.testing.assert_close(found.double(), expected_values, atol=1e-5, rtol=1e-5)
    advantages, returns = oracle.gae(batch, coef * kl, gamma=0.95, lam=0.9)
    assert off(batch[col.ADVANTAGES].double(), advantages) < 1e-5
    assert off(batch[col.RETURNS].double(), returns) < 1e-5
    mean = oracle.mean_over_trajectories(batch, kl)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert metrics["actor/reward_kl_penalty_coeff"] == coef
    error = min(0.2, max(-0.2, mean / target - 1))  # Ziegler et al. 2019 (1909.08593, 2.2)
    coef *= 1 + error * len(batch[col.TRAJECTORY_INDEX].unique()) / horizon
    assert step(batch)["actor/reward_kl_penalty_coeff"] == pytest.approx(coef, rel=1e-6)

    control = {"kl_coef": 0.05}
    step = advantage_estimator(AlgorithmConfig(adv_estimator="grpo", **common | {"kl_ctrl": control}), workers)
    step(batch)
    assert off(batch[col.ADVANTAGES].double(), oracle.grpo(batch, 0.05 * kl)) < 1e-5
    assert step(batch)["actor/reward_kl_penalty_coeff"] == 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cliprange", "aggregation", "mini", "epochs", "split"),
    [
        (0.1, "token-mean", None, 1, {"ppo_micro_batch_size": 2}),
        (0.3, "seq-mean-token-mean", 3, 1, {}),
        (0.1, "seq-mean-token-sum", 1, 1, {"ppo_max_token_len": 40}),
        (None, "seq-mean-token-sum-norm", 3, 2, {"ppo_micro_batch_size": 3}),
    ],
)
def test_a_critics_update_is_the_oracles(cliprange, aggregation, mini, epochs, split):
    told = Options(
        temperature=1.0, aggregation=aggregation, norm_constant=8.0, epochs=epochs, mini_batch=mini, grad_clip=0.5,
        cliprange_value=cliprange,
    )  # fmt: skip
    optim = {"betas": list(told.betas), "weight_decay": told.weight_decay}
    learner = critic(
        value_model(policy()), lr=told.lr, optim=optim, shuffle=False, cliprange_value=cliprange,
        loss_agg_mode=aggregation, grad_clip=told.grad_clip, ppo_mini_batch_size=mini, ppo_epochs=epochs, **split,
    )  # fmt: skip
    batch, start = given(0.7, executions=mini == 3).clone(), copy.deepcopy(learner.module)
    draw = torch.Generator().manual_seed(1)
    batch[col.VALUES] = learner.compute_values(batch) + 0.3 * torch.randn(batch[col.LOSS_MASK].shape, generator=draw)
    batch[col.RETURNS] = torch.randn(batch[col.LOSS_MASK].shape, generator=draw)
    module = copy.deepcopy(start).double()
    expected = oracle.update_critic(module, batch, told)
    seen = gradients_of(learner)
    metrics = learner.update(batch)
    check_steps(seen, flat(trained(learner.module)), expected, (module, start), aggregation)
    check_metrics(metrics, expected.metrics, "critic", aggregation)
    assert (metrics["critic/vf_clipfrac"] > 0.1) == (cliprange is not None)


# Adapters and lower precision


def test_adapters_are_trained_against_the_base_as_the_oracle_does():
    """The reference is the policy without its adapters, whatever they have become."""
    told = Options(temperature=0.7, kl="k3", kl_coef=0.5, mini_batch=3, grad_clip=0.1)
    adapted, batch = lora_policy(), given(0.7, layers=2).clone()
    actor, module = worker(adapted, **keywords(told)), copy.deepcopy(adapted).double()
    ref = RefWorker(actor.module, RefConfig(), actor=actor.config, temperature=told.temperature)
    with torch.no_grad():
        base, _ = oracle.log_probs(copy.deepcopy(tiny_policy()).double(), batch, told.temperature)
    batch[col.REF_LOG_PROBS] = ref.compute_log_probs(batch)
    mask = batch[col.LOSS_MASK]
    assert off(batch[col.REF_LOG_PROBS].double()[mask], base[mask]) < 1e-6
    expected, seen = oracle.update_policy(module, batch, told), gradients_of(actor)
    metrics = actor.update(batch)
    check_metrics(metrics, expected.metrics, "actor", "adapters")
    assert metrics["actor/kl_loss"] > 0.1
    check_steps(seen, flat(trained(actor.module)), expected, (module, adapted), "adapters")
    assert torch.equal(ref.compute_log_probs(batch), batch[col.REF_LOG_PROBS]), "an update has moved the reference"


# Layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"shard": 1}, {"sequence": 2}], ids=["fsdp", "hsdp of two replicas", "sequence parallel"]
)
def test_two_ranks_make_the_oracles_update(ranks, layout):
    """Several micro-batches per rank and update; rows of uneven lengths, so that ranks have different shares."""
    told = Options(
        temperature=0.7, clip_low=0.1, aggregation="seq-mean-token-mean", kl="k3", kl_coef=0.2, entropy_coeff=0.03,
        correction=CORRECTIONS["sequence"], mini_batch=3,
    )  # fmt: skip
    module, batch = copy.deepcopy(tiny_policy()).double(), given(0.7, layers=2)
    expected = oracle.update_policy(module, batch, told)
    options = {**keywords(told), **layout, "correction": told.correction, "ppo_micro_batch_size": 2}
    for found in ranks(2)(one_update, batch, keep_weights=True, **options):
        names = [name for name, _ in module.named_parameters()]
        seen = [flat(own[name] for name in names) for own in found["gradients"]]
        weights = flat(found["weights"][name] for name in names)
        check_steps(seen, weights, expected, (module, tiny_policy()), layout)
        check_metrics(found["metrics"], expected.metrics, "actor", layout)
        both = batch[col.LOSS_MASK]
        assert off(found["old"].double()[both], expected.before[both]) < 1e-6
