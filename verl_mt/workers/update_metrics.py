"""The numbers of one update, collected over micro-batches without waiting for the device."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.corrections import effective_sample_size, importance_weights
from verl_mt.data import batch as columns
from verl_mt.workers.loss import MicroBatchLoss
from verl_mt.workers.ranks import ALONE, Ranks


@dataclass
class UpdateMetrics:
    """Collects; `summary` gives plain numbers under their logged names."""

    num_updates: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0
    lr: float = 0.0
    token_share: float = math.nan
    """Of the batch's trained tokens that were sampled: those that go through the model, which the means are over."""
    grad_norms: list[Tensor] = field(default_factory=list)
    _sums: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _token_sums: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _token_counts: list[Tensor] = field(default_factory=list)
    _difference: dict[str, float] = field(default_factory=dict)

    def add(self, micro: MicroBatchLoss) -> None:
        """A micro-batch's share of its mini-batch's numbers; a mean whose name has no slash is `actor/`'s."""
        for name, value in micro.sums.items():
            self._sums[name].append(value.detach())
        self._token_counts.append(micro.num_tokens)
        for name, mean in micro.means.items():
            self._token_sums[name if "/" in name else f"actor/{name}"].append(mean.detach() * micro.num_tokens)

    def updated(self, grad_norm: Tensor | None) -> None:
        """An optimizer step with its gradient's norm; None = it was dropped, because that was not finite."""
        if grad_norm is None:
            self.num_nonfinite += 1
        else:
            self.num_updates += 1
            self.grad_norms.append(grad_norm)

    def covers(self, batch: TensorDict, rows_B: Tensor) -> None:
        """The rows that go through the model."""
        counted_B = (batch[columns.SAMPLED] & batch[columns.LOSS_MASK]).sum(1)
        self.token_share = (counted_B[rows_B].sum() / counted_B.sum()).item()

    def log_prob_difference(self, batch: TensorDict) -> None:
        """How far the sampler is from the policy before its first update, over trained tokens that both gave log-probs.

        |difference| of the log-probs, the k1 and k3 estimates of KL(sampler || policy), quantiles of the ratio policy
        to sampler, and the effective sample size of these ratios, as a share.
        """
        own = batch[columns.OLD_LOG_PROBS]
        both = batch[columns.SAMPLED] & batch[columns.LOSS_MASK] & batch[columns.HAS_LOG_PROBS].unsqueeze(1)
        both = both & ~torch.isnan(own)
        log_ratio = (own - batch[columns.ROLLOUT_LOG_PROBS])[both].float()
        if len(log_ratio):
            ratio = importance_weights(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio))
            ordered = ratio.sort().values
            self._difference = {
                "rollout/logprob_diff_max": log_ratio.abs().max().item(),
                "rollout/logprob_diff_mean": log_ratio.abs().mean().item(),
                "rollout/sampler_kl": (torch.expm1(log_ratio) - log_ratio).mean().item(),
                "rollout/sampler_kl_k1": -log_ratio.mean().item(),
                "rollout/ratio_p01": ordered[round(0.01 * (len(ordered) - 1))].item(),
                "rollout/ratio_p50": ordered[round(0.5 * (len(ordered) - 1))].item(),
                "rollout/ratio_p99": ordered[round(0.99 * (len(ordered) - 1))].item(),
                "rollout/ratio_max": ordered[-1].item(),
                "rollout/ratio_ess": effective_sample_size(ratio, torch.ones_like(ratio)).item(),
            }

    def add_final(self, numbers: dict[str, float]) -> None:
        """Numbers of the whole batch, the same on every rank."""
        self._difference |= numbers

    def summary(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Sums are means over the mini-batches that were run; token means are over their tokens; both over all ranks.
        What is not finite (the loss of an update that was dropped) is absent."""
        tried = self.num_updates + self.num_nonfinite
        result = {
            "actor/lr": self.lr,
            "actor/num_updates": float(self.num_updates),
            "actor/skipped_zero_advantage_sequences": float(self.num_skipped),
            "actor/nonfinite_updates": float(self.num_nonfinite),
            "actor/token_share": self.token_share,
        }
        sums, token_sums, tokens = self._over(ranks)
        for name, value in sums.items():
            result[name] = value / max(1, tried)
        for name, value in token_sums.items():
            result[name] = value / max(1, tokens)
        if self.grad_norms:
            result["actor/grad_norm"] = torch.stack(self.grad_norms).mean().item()
        result |= self._difference
        return {name: value for name, value in result.items() if math.isfinite(value)}

    def _over(self, ranks: Ranks) -> tuple[dict[str, float], dict[str, float], float]:
        """Sums, token sums and numbers of tokens of all ranks; a rank without rows has none."""
        own = (
            {name: torch.stack(values).sum().item() for name, values in self._sums.items()},
            {name: torch.stack(values).sum().item() for name, values in self._token_sums.items()},
            sum(n.item() for n in self._token_counts),
        )
        sums: dict[str, float] = defaultdict(float)
        token_sums: dict[str, float] = defaultdict(float)
        tokens = 0.0
        for other_sums, other_token_sums, other_tokens in ranks.gather(own):
            tokens += other_tokens
            for name, value in other_sums.items():
                sums[name] += value
            for name, value in other_token_sums.items():
                token_sums[name] += value
        return sums, token_sums, tokens
