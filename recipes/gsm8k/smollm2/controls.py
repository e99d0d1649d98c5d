"""A control: GRPO on rewards that were shuffled within their groups, which say nothing of who was right.

    python -m verl_mt.trainer ... algorithm.adv_estimator=recipes/gsm8k/smollm2/controls.py:shuffled_rewards

What a run still gains with it is not learned from the answers: format, lengths, or luck. The other control needs no
code: `actor_rollout_ref.actor.optim.lr=0`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mt.algorithms.advantages import grpo


def shuffled_rewards(rewards: Tensor, groups: Tensor, norm_by_std: bool) -> Tensor:
    """Advantages [N] of each reward [N] given to another trajectory of its group [N], by torch's random numbers."""
    drawn = torch.randperm(len(rewards))
    shuffled = torch.empty_like(rewards)
    shuffled[groups.argsort(stable=True)] = rewards[drawn[groups[drawn].argsort(stable=True)]]
    return grpo(shuffled, groups, norm_by_std=norm_by_std)
