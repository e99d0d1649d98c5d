"""How old the tokens of a batch are: updates between the weights that sampled a token and those that it trains."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.data import batch as columns
from verl_mt.errors import EngineError


def require_bound(batch: TensorDict, version: int, max_staleness: int) -> None:
    """What `trainer.max_staleness` promises, looked at before each update.

    Args:
        batch: as built; [B, T].
        version: of the weights that it trains.

    Raises:
        EngineError: a trained token is older, or by weights that the trainer does not have yet: the engine's versions
            are not those of its updates.
    """
    ages = _ages(batch, version)[_trained(batch)]
    if len(ages) and not 0 <= int(ages.min()) <= int(ages.max()) <= max_staleness:
        raise EngineError(
            f"tokens are {int(ages.min())} to {int(ages.max())} updates older than the weights that they would train "
            f"(version {version}), trainer.max_staleness={max_staleness}: the engine took an update late, or gives "
            "tokens versions of its own (GenerationOutput.version_spans)"
        )


def staleness_metrics(batch: TensorDict, version: int) -> dict[str, float]:
    """`staleness/mean` and `/max` over trained tokens; by age the share of them, the mean |difference| of the
    trainer's and the sampler's log-probs before the update, and the share that the policy loss gave no gradient.

    Args:
        batch: behind its update.
        version: of the weights that it has trained.
    """
    trained_BT, ages_BT = _trained(batch), _ages(batch, version)
    ages = ages_BT[trained_BT]
    if not len(ages):
        return {}
    found = {"staleness/mean": ages.float().mean().item(), "staleness/max": float(ages.max())}
    # An update of the critic alone (`trainer.critic_warmup`) looks at no log-probs of the policy.
    unknown_BT = torch.full(ages_BT.shape, torch.nan)
    difference_BT = (batch.get(columns.OLD_LOG_PROBS, unknown_BT) - batch[columns.ROLLOUT_LOG_PROBS]).abs()
    difference_BT = difference_BT.masked_fill(~batch[columns.HAS_LOG_PROBS][:, None], torch.nan)
    clipped_BT = batch.get(columns.CLIPPED, unknown_BT)
    for age in ages.unique().tolist():
        of_age_BT = trained_BT & (ages_BT == age)
        parts = {
            "token_share": of_age_BT.sum() / len(ages),
            "logprob_diff": difference_BT[of_age_BT].nanmean(),
            "clip_fraction": torch.where(clipped_BT.isnan(), torch.nan, (clipped_BT > 0).float())[of_age_BT].nanmean(),
        }
        found |= {f"staleness/age_{age}/{name}": value.item() for name, value in parts.items() if not value.isnan()}
    return found


def _trained(batch: TensorDict) -> Tensor:
    """bool [B, T]"""
    return batch[columns.LOSS_MASK] & batch[columns.SAMPLED]


def _ages(batch: TensorDict, version: int) -> Tensor:
    """int64 [B, T]"""
    return version - batch[columns.POLICY_VERSIONS]
