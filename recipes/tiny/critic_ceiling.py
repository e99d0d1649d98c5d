"""What a critic can explain of the default task's returns, at the most.

    python recipes/tiny/critic_ceiling.py                          # two CPU-minutes
    python recipes/tiny/critic_ceiling.py actor_rollout_ref.model.path=runs/tiny/hf    # of a policy that has learned

Many answers of a policy to each of some held-out problems. A critic that knows only the prompt can say no more than the
mean reward of its answers; one that has seen what the calculator gave knows besides whether that is the truth. Both are
explained variances as `critic/explained_variance` is one: over tokens, each with its trajectory's reward (gamma and
lambda are 1). The third line is what the first one shows on single batches of 16 prompts x 8 answers.
"""

from __future__ import annotations

import argparse
from statistics import fmean, stdev

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from verl_mt.algorithms.value_loss import explained_variance
from verl_mt.config.compose import compose
from verl_mt.data.trajectory import Trajectory
from verl_mt.trainer.inference import Inference


def sample(prompts: int, n: int, overrides: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each answer to each problem, [G, n]: its reward, its sampled tokens, whether a call gave the truth."""
    with Inference(compose([f"data.val_max_samples={prompts}", *overrides])) as policy:
        problems = policy.prompts()
        groups = policy.roll_out(problems, n=n)
    found: list[list[tuple[float, int, bool]]] = []
    for problem, group in zip(problems, groups, strict=True):
        truth = str(problem.row.ground_truth)
        found.append([(t.reward or 0.0, t.num_sampled_tokens, _was_told(t, truth)) for t in group.trajectories])
    rewards, tokens, told = torch.tensor(found, dtype=torch.float64).unbind(-1)
    return rewards, tokens, told.bool()


def _was_told(trajectory: Trajectory, truth: str) -> bool:
    return any(m["role"] == "tool" and str(m["content"]).strip() == truth for m in trajectory.messages)


def explained(rewards: Tensor, tokens: Tensor, keys: Tensor) -> float:
    """1 - Var(reward | key) / Var(reward) over tokens; a key's mean is made of the very answers, so the variance within
    is scaled by m / (m - 1). Keys of one answer are left out of it."""
    rewards, tokens, keys = (x.flatten() for x in (rewards, tokens, keys))
    within = weight = 0.0
    for key in keys.unique():
        mine, w = rewards[keys == key], tokens[keys == key]
        if len(mine) > 1:
            mean = (mine * w).sum() / w.sum()
            within += float(((mine - mean) ** 2 * w).sum()) * len(mine) / (len(mine) - 1)
            weight += float(w.sum())
    mean = (rewards * tokens).sum() / tokens.sum()
    return 1 - (within / weight) / float(((rewards - mean) ** 2 * tokens).sum() / tokens.sum())


def scatter(rewards: Tensor, tokens: Tensor, draws: int = 2000) -> tuple[float, float]:
    """Mean and standard deviation of what the mean of each prompt explains on a step's batch: 16 prompts, 8 answers."""
    generator = torch.Generator().manual_seed(0)
    values = rewards.mean(1, keepdim=True).expand_as(rewards)
    seen = []
    for _ in range(draws):
        g = torch.randperm(len(rewards), generator=generator)[:16]
        k = torch.randperm(rewards.shape[1], generator=generator)[:8]
        picked = [x[g][:, k].flatten().repeat_interleave(tokens[g][:, k].flatten().long()) for x in (values, rewards)]
        seen.append(explained_variance(picked[0], picked[1], torch.ones_like(picked[0])).item())
    return fmean(seen), stdev(seen)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=32)
    args, overrides = parser.parse_known_args()
    rewards, tokens, told = sample(args.prompts, args.samples, overrides)
    prompt = torch.arange(len(rewards)).unsqueeze(1).expand_as(rewards)
    mean, spread = scatter(rewards, tokens)
    table = Table("what is known", "explained variance")
    table.add_row("the prompt", f"{explained(rewards, tokens, prompt):.3f}")
    table.add_row(
        "the prompt, and whether a call gave the truth", f"{explained(rewards, tokens, 2 * prompt + told):.3f}"
    )
    table.add_row("the prompt, on batches of 16 x 8", f"{mean:.3f}, standard deviation {spread:.3f}")
    console = Console(width=120)
    console.print(f"{rewards.numel()} answers to {len(rewards)} prompts, mean reward {float(rewards.mean()):.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
