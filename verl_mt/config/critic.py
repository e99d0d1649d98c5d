"""`critic`: read with `algorithm.adv_estimator=gae`."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mt.config.actor import OptimConfig
from verl_mt.config.knob import Section, knob


@dataclass
class CriticModelConfig(Section):
    """`critic.model`."""

    path: str | None = knob(
        None, "The critic's own model, with the policy's tokenizer; null = starts from the policy's weights."
    )


@dataclass
class CriticOptimConfig(OptimConfig):
    """`critic.optim`: AdamW."""

    lr: float = knob(1e-5, "Peak learning rate.", min=0)


@dataclass
class CriticConfig(Section):
    """`critic`: what estimates the values of states, for algorithm.adv_estimator=gae."""

    model: CriticModelConfig = knob(CriticModelConfig, "Its weights.")
    share_trunk: bool = knob(
        False,
        "Read the policy's last hidden states with a small head instead of a model of its own: no second model in "
        "memory. The head learns, the policy does not feel it (no gradient flows back).",
    )
    optim: CriticOptimConfig = knob(CriticOptimConfig, "The optimizer.")
    ppo_epochs: int | None = knob(None, "Passes over a rollout batch; null = the actor's.", min=1)
    ppo_mini_batch_size: int | None = knob(None, "Prompts per optimizer step; null = the actor's.", min=1)
    ppo_micro_batch_size: int | None = knob(
        None, "Sequences per forward pass; null = the actor's, unless `ppo_max_token_len` is given.", min=1
    )
    ppo_max_token_len: int | None = knob(None, "Tokens (padding included) per pass; null = the actor's.", min=1)
    cliprange_value: float | None = knob(
        0.5, "How far a value may move from the old one in a batch before its loss stops pulling; null = off.", min=0
    )
    loss_agg_mode: str | None = knob(
        None,
        "How token losses become one number; null = the actor's.",
        choices=(None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    grad_clip: float = knob(1.0, "Largest gradient norm; 0 = no clipping.", min=0)
