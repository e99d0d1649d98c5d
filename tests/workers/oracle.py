"""An update of the policy and of the critic, computed from the papers' formulas in plain torch.

The library is compared with this file, so this file imports none of its formulas: it reads the columns of a batch and
calls the Hugging Face module. It favours plain formulas over speed: full logits, whole padded rows, float64.

Shape suffixes: `B` rows, `T` tokens, `N` trajectories. Position t of a column belongs to token t, so log p(token t)
comes from the logits at t - 1. A *sequence* is a trajectory with all its records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.data import batch as col


@dataclass(frozen=True)
class Options:
    """What an update depends on."""

    temperature: float
    loss: str = "vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    aggregation: str = "token-mean"
    norm_constant: float = 1.0
    kl: str | None = None
    kl_coef: float = 0.0
    entropy_coeff: float = 0.0
    correction: dict[str, Any] = field(default_factory=dict)
    old: str = "auto"
    epochs: int = 1
    mini_batch: int | None = None
    skip_zero: bool = False
    grad_clip: float = 0.0
    lr: float = 3e-3
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 0.1
    cliprange_value: float | None = None


@dataclass
class Result:
    """One entry per optimizer step, and the metrics."""

    gradients: list[list[Tensor]] = field(default_factory=list)
    """After clipping."""
    metrics: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    """Log-probs of the weights before the update [B, T]."""


def shifted(values_BT: Tensor) -> Tensor:
    """What position t - 1 says about token t."""
    return torch.cat([torch.zeros_like(values_BT[:, :1]), values_BT[:, :-1]], 1)


def log_probs(module: nn.Module, batch: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """(log softmax(logits / T)[token], entropy of that distribution), [B, T] each."""
    ids = batch[col.INPUT_IDS]
    logits = module(input_ids=ids, attention_mask=batch[col.ATTENTION_MASK].long()).logits.double()
    all_BTV = (logits / temperature).log_softmax(-1)
    chosen_BT = all_BTV[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    entropy_BT = -(all_BTV.exp() * all_BTV).sum(-1)
    return torch.cat([torch.zeros_like(chosen_BT[:, :1]), chosen_BT], 1), shifted(entropy_BT)


def over_sequence(values_BT: Tensor, mask_BT: Tensor, owner_B: Tensor) -> Tensor:
    """[B, 1]: the sum over all masked tokens of the rows with the same owner."""
    same_BB = (owner_B[:, None] == owner_B[None, :]).double()
    return same_BB @ torch.where(mask_BT, values_BT.double(), 0.0).sum(1, keepdim=True)


def token_weights(mode: str, mask_BT: Tensor, owner_B: Tensor, norm_constant: float) -> Tensor:
    """DAPO (2503.14476, 3.3): every token the same. GRPO (2402.03300, eq. 3): every sequence the same. Dr. GRPO
    (2503.20783, 3.2): sums of sequences, divided by a constant."""
    tokens_B1 = over_sequence(torch.ones_like(mask_BT), mask_BT, owner_B)
    sequences = len(owner_B[tokens_B1[:, 0] > 0].unique())
    weight_B1 = {
        "token-mean": torch.full_like(tokens_B1, 1 / max(1, int(mask_BT.sum()))),
        "seq-mean-token-mean": 1 / (sequences * tokens_B1),
        "seq-mean-token-sum": torch.full_like(tokens_B1, 1 / max(1, sequences)),
        "seq-mean-token-sum-norm": torch.full_like(tokens_B1, 1 / max(1, sequences) / norm_constant),
    }[mode]
    return torch.where(mask_BT, weight_B1, 0.0)


def policy_loss(
    options: Options, kind: str, log_ratio: Tensor, logp: Tensor, advantage: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss of each token, whether the clip decides it). All [B, T]; for GSPO `log_ratio` is its sequence's mean.

    vanilla: PPO (1707.06347, eq. 7) with the dual clip (1912.09729). GSPO (2507.18071, eq. 5). CISPO (2506.13585,
    eq. 4). SAPO (2511.20347). GPG (2504.02546): the plain policy gradient.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if kind in ("vanilla", "gspo"):
        pessimistic = -torch.minimum(ratio * advantage, clipped * advantage)
        decides = clipped * advantage < ratio * advantage
        if kind == "vanilla":
            bound = torch.where(advantage < 0, -advantage * options.clip_c, math.inf)
            pessimistic = torch.minimum(pessimistic, bound)
        return pessimistic, decides
    if kind == "cispo":
        return -clipped.detach() * advantage * logp, clipped != ratio
    if kind == "sapo":
        tau = torch.where(advantage > 0, 1.0, 1.05)
        return -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, torch.zeros_like(ratio, dtype=torch.bool)
    assert kind == "gpg"
    return -advantage * logp, torch.zeros_like(ratio, dtype=torch.bool)


def kl_estimate(kind: str, logp: Tensor, ref: Tensor) -> Tensor:
    """Schulman 2020, "Approximating KL divergence": k1, k2, k3; GRPO (2402.03300, eq. 4) clamps k3. With a plus the
    value of the estimator and the gradient of k2."""
    log_r = ref - logp
    k2, k3 = log_r**2 / 2, log_r.exp() - 1 - log_r
    values = {
        "k1": -log_r, "kl": -log_r, "abs": log_r.abs(), "k2": k2, "mse": k2, "k3": k3, "low_var_kl": k3.clamp(-10, 10),
    }  # fmt: skip
    value = values[kind.removesuffix("+")]
    return value.detach() + k2 - k2.detach() if kind.endswith("+") else value


def correction_factors(given: dict[str, Any], old: Tensor, batch: Any) -> Tensor:
    """[B, T] factors of the policy loss against the sampler mu: w = pi_old / mu of a token, the product over its
    sequence, or the geometric mean; truncated (IMPALA, 1802.01561, 4.1); 0 where a ratio is outside of the bounds of
    a rejection (IcePop, 2510.18855, by token) or a sequence has a token below the veto's. Tokens without a sampler's
    log-prob have 1."""
    owner, known = batch[col.TRAJECTORY_INDEX], with_sampler(batch)
    log_w = torch.where(known, old - batch[col.ROLLOUT_LOG_PROBS], 0.0)
    total, count = over_sequence(log_w, known, owner), over_sequence(torch.ones_like(log_w), known, owner)
    ratio = {
        "token": log_w.exp(),
        "sequence": total.exp().expand_as(log_w),
        "geometric": (total / count.clamp(min=1)).exp().expand_as(log_w),
    }
    factor = torch.ones_like(log_w)
    if "rollout_is" in given:
        factor = ratio[given["rollout_is"]].clamp(max=given.get("rollout_is_threshold", 2.0))
    if given.get("rollout_is_batch_normalize"):
        factor = factor / factor[known].mean()
    if "rollout_rs" in given:
        bound, seen = given["rollout_rs_threshold"], ratio[given["rollout_rs"]]
        factor = torch.where((seen >= 1 / bound) & (seen <= bound), factor, 0.0)
    if "rollout_token_veto_threshold" in given:
        hopeless = ratio["token"] < given["rollout_token_veto_threshold"]
        factor = torch.where(over_sequence(hopeless, known, owner) > 0, 0.0, factor)
    return torch.where(known, factor, 1.0)


def with_sampler(batch: Any) -> Tensor:
    """Sampled tokens of the loss that have a sampler's log-prob."""
    return batch[col.LOSS_MASK] & batch[col.SAMPLED] & batch[col.HAS_LOG_PROBS][:, None]


class AdamW:
    """Loshchilov and Hutter 2019 (1711.05101, algorithm 2), with eps 1e-8."""

    def __init__(self, parameters: Sequence[Tensor], options: Options):
        self.parameters, self.options, self.t = list(parameters), options, 0
        self.m, self.v = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))

    @torch.no_grad()
    def step(self, loss: Tensor) -> tuple[list[Tensor], float]:
        """Clip the gradient to the global norm (Pascanu et al. 2013) and step. Returns it, and its norm before."""
        gradients = torch.autograd.grad(loss, self.parameters)
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        largest, self.t = self.options.grad_clip or math.inf, self.t + 1
        gradients = [g * min(1.0, largest / max(norm, 1e-30)) for g in gradients]
        b1, b2 = self.options.betas
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v):
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g * g)
            m_hat, v_hat = m / (1 - b1**self.t), v / (1 - b2**self.t)
            p.sub_(self.options.lr * (m_hat / (v_hat.sqrt() + 1e-8) + self.options.weight_decay * p))
        return gradients, norm


def mini_batches(batch: Any, options: Options) -> list[tuple[Any, float]]:
    """(rows, factor of the loss) of each update: whole prompts, in order. A last mini-batch of fewer prompts weighs as
    much less."""
    prompts = batch[col.PROMPT_INDEX].unique().tolist()
    size = options.mini_batch or len(prompts)
    parts = [prompts[k : k + size] for k in range(0, len(prompts), size)] * options.epochs
    rows = [torch.isin(batch[col.PROMPT_INDEX], torch.tensor(part)) for part in parts]
    return [(own, min(1.0, len(part) / size)) for own, part in zip(rows, parts)]


def active_rows(batch: Any, options: Options) -> Tensor:
    """bool [B]: rows that pass. Those without an advantage may be left out, but for a term beside the advantage."""
    mask = batch[col.LOSS_MASK]
    if not options.skip_zero or options.kl or options.entropy_coeff:
        return mask.any(1)
    moves_B = (mask & (batch[col.ADVANTAGES] != 0)).any(1)
    if options.loss == "gspo":
        return mask.any(1) & torch.isin(batch[col.TRAJECTORY_INDEX], batch[col.TRAJECTORY_INDEX][moves_B])
    return mask.any(1) & moves_B


def update_policy(module: nn.Module, batch: Any, options: Options) -> Result:
    """Train the module on a batch with advantages (and reference log-probs)."""
    result, optimizer = Result(), AdamW([p for p in module.parameters() if p.requires_grad], options)
    with torch.no_grad():
        result.before, _ = log_probs(module, batch, options.temperature)
    active, old = active_rows(batch, options), old_log_probs(options, batch, result.before)
    sums = dict.fromkeys(("pg_loss", "kl_loss", "entropy", "ppo_kl", "clipfrac", "grad_norm", "tokens", "steps"), 0.0)
    for rows, share in mini_batches(batch, options):
        if not (rows & active).any():
            continue
        found = loss_of(module, batch, options, (rows, active), old)
        weights = torch.where(rows[:, None], found.pop("weights") * share, 0.0)
        terms = {name: (found.pop(name) * weights).sum() for name in ("pg", "kl", "bonus")}
        loss = terms["pg"] + options.kl_coef * terms["kl"] - options.entropy_coeff * terms["bonus"]
        gradients, norm = optimizer.step(loss)
        result.gradients.append(gradients)
        found |= {"pg_loss": terms["pg"].detach(), "kl_loss": terms["kl"].detach(), "grad_norm": norm, "steps": 1}
        sums = {name: value + float(found[name]) for name, value in sums.items()}
    over = {"entropy": "tokens", "ppo_kl": "tokens", "clipfrac": "tokens"}
    result.metrics = {name: value / max(1.0, sums[over.get(name, "steps")]) for name, value in sums.items()}
    return result


def old_log_probs(options: Options, batch: Any, before: Tensor) -> Tensor:
    """Ratios are taken to them: by the weights before the update; by the sampler (`always`)."""
    if options.old == "always":
        return torch.where(with_sampler(batch), batch[col.ROLLOUT_LOG_PROBS].double(), before)
    return before


def loss_of(
    module: nn.Module, batch: Any, options: Options, which: tuple[Tensor, Tensor], old: Tensor
) -> dict[str, Tensor]:
    """Terms of the loss and numbers for the metrics of one mini-batch.

    Args:
        which: rows of the mini-batch, and rows of the batch that pass.
        old: see `old_log_probs`.
    """
    rows, active = which
    logp, entropy = log_probs(module, batch, options.temperature)
    mask = batch[col.LOSS_MASK] & rows[:, None]
    sampled = mask & batch[col.SAMPLED]
    owner, advantage = batch[col.TRAJECTORY_INDEX], torch.where(mask, batch[col.ADVANTAGES], 0.0)
    log_ratio = own_ratio = torch.where(mask, logp - old, 0.0)
    if options.loss == "gspo":
        count = over_sequence(torch.ones_like(log_ratio), sampled, owner)
        log_ratio = (over_sequence(log_ratio, sampled, owner) / count.clamp(min=1)).expand_as(log_ratio)
    pg, clipped = policy_loss(options, options.loss, log_ratio, logp, advantage)
    factors = correction_factors(options.correction, old, batch)
    # A token that nobody sampled is trained by itself: PPO's loss where the chosen one is a sequence's.
    alone, _ = policy_loss(options, "vanilla" if options.loss == "gspo" else options.loss, own_ratio, logp, advantage)
    kl = torch.zeros_like(logp)
    if options.kl:
        kl = kl_estimate(options.kl, logp, batch[col.REF_LOG_PROBS].double())
    seen = sampled & active[:, None]
    return {
        "weights": token_weights(options.aggregation, mask, col.weighed_together(batch), options.norm_constant),
        "pg": torch.where(batch[col.SAMPLED], pg * factors, alone), "kl": kl, "bonus": entropy,
        "entropy": entropy.detach()[seen].sum(), "ppo_kl": -own_ratio.detach()[seen].sum(),
        "clipfrac": clipped[seen].sum(), "tokens": seen.sum(),
    }  # fmt: skip


def values(model: Any, batch: Any) -> Tensor:
    """[B, T]: V of the state before each token of the loss mask; 0 elsewhere."""
    ids, real = batch[col.INPUT_IDS], batch[col.ATTENTION_MASK].long()
    found = model.head(model.trunk(input_ids=ids, attention_mask=real).last_hidden_state)[..., 0]
    return torch.where(batch[col.LOSS_MASK], shifted(found), 0.0)


def update_critic(model: nn.Module, batch: Any, options: Options) -> Result:
    """Clipped value loss max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 (PPO's code, see Huang et al. 2022)."""
    result, optimizer = Result(), AdamW(list(model.parameters()), options)
    sums = dict.fromkeys(("vf_loss", "vf_clipfrac", "grad_norm", "tokens"), 0.0)
    old, target = batch[col.VALUES].double(), batch[col.RETURNS].double()
    for rows, share in mini_batches(batch, options):
        mask = batch[col.LOSS_MASK] & rows[:, None]
        value, limit = values(model, batch), options.cliprange_value or math.inf
        held = torch.minimum(torch.maximum(value, old - limit), old + limit)
        losses = torch.maximum((value - target) ** 2, (held - target) ** 2) / 2
        weights = share * token_weights(options.aggregation, mask, col.weighed_together(batch), options.norm_constant)
        loss = (losses * weights)[mask].sum()
        gradients, norm = optimizer.step(loss)
        result.gradients.append(gradients)
        decides = ((held - target) ** 2 > (value - target) ** 2) & ((value - old).abs() > limit)
        found = (float(loss.detach()), float(decides[mask].sum()), norm, float(mask.sum()))
        sums = {name: value + more for (name, value), more in zip(sums.items(), found)}
    steps = {"vf_clipfrac": sums["tokens"]}
    result.metrics = {name: value / steps.get(name, len(result.gradients)) for name, value in sums.items()}
    return result


def stream(batch: Any, trajectory: int) -> list[tuple[int, int]]:
    """(row, position) of the trained tokens of a trajectory, its records in order of time."""
    rows = [r for r, t in enumerate(batch[col.TRAJECTORY_INDEX].tolist()) if t == trajectory]
    rows.sort(key=lambda r: int(batch[col.RECORD_INDEX][r]))
    return [(r, t) for r in rows for t in batch[col.LOSS_MASK][r].nonzero()[:, 0].tolist()]


def mean_over_trajectories(batch: Any, values_BT: Tensor) -> float:
    """The mean over trajectories of the mean over each one's sampled tokens of the loss."""
    means = []
    for trajectory in batch[col.TRAJECTORY_INDEX].unique().tolist():
        sampled = [float(values_BT[place]) for place in stream(batch, trajectory) if batch[col.SAMPLED][place]]
        means.append(sum(sampled) / max(1, len(sampled)))
    return sum(means) / len(means)


def gae(batch: Any, penalty_BT: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B, T], whitened over the batch (Schulman et al. 2016, 1506.02438, eq. 16). A trajectory's
    reward is on its last token; the penalty is taken from each token's."""
    advantages, returns = (torch.zeros(penalty_BT.shape, dtype=torch.float64) for _ in range(2))
    for trajectory in batch[col.TRAJECTORY_INDEX].unique().tolist():
        advantage, after, places = 0.0, 0.0, stream(batch, trajectory)
        for number, place in enumerate(reversed(places)):
            reward = float(batch[col.REWARDS][place[0]]) if number == 0 else 0.0
            value = float(batch[col.VALUES][place])
            advantage = reward - float(penalty_BT[place]) + gamma * after - value + gamma * lam * advantage
            advantages[place], returns[place], after = advantage, advantage + value, value
    mask = batch[col.LOSS_MASK]
    mean, std = advantages[mask].mean(), (advantages[mask].var() + 1e-8).sqrt()
    return torch.where(mask, (advantages - mean) / std, 0.0), returns


def grpo(batch: Any, penalty_BT: Tensor) -> Tensor:
    """[B, T]: (R - mean) / (std + 1e-6) over the trajectories of a group (2402.03300, 4.1.2); R less the penalty of the
    trajectory's tokens. A group of one, or of equal rewards, has 0."""
    places = {n: stream(batch, n) for n in batch[col.TRAJECTORY_INDEX].unique().tolist()}
    earned = {n: float(batch[col.REWARDS][p[0][0]]) - sum(float(penalty_BT[q]) for q in p) for n, p in places.items()}
    group = {n: int(batch[col.GROUP_INDEX][p[0][0]]) for n, p in places.items()}
    advantages = torch.zeros(penalty_BT.shape, dtype=torch.float64)
    for n, own in places.items():
        others = torch.tensor([earned[m] for m in places if group[m] == group[n]], dtype=torch.float64)
        if len(others) > 1 and others.max() - others.min() > 1e-9:
            for place in own:
                advantages[place] = (earned[n] - others.mean()) / (others.std() + 1e-6)
    return advantages
