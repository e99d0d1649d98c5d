"""What is trained and what it is compared with: `actor_rollout_ref.model`, `.actor`, `.ref`, and `critic`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_mt.config.declare import Section, conflicts, is_set, option, switched_on
from verl_mt.config.policy_losses import POLICY_LOSSES, LossChoice, read_policy_loss, reads

KL_LOSS = "actor_rollout_ref.actor.use_kl_loss"
_HAS_KL_LOSS = switched_on(KL_LOSS)
_LORA = is_set("actor_rollout_ref.model.lora_rank")


@dataclass
class ModelConfig(Section):
    """`actor_rollout_ref.model`."""

    path: str = option("verl_mt://tiny", "Local folder, hub name, or verl_mt://tiny (the shipped 4 MB model).")
    revision: str | None = option(None, "Branch, tag or commit of a hub model. null = its default.")
    tokenizer_path: str | None = option(None, "Tokenizer, if it lives elsewhere. null = `path`.")
    custom_chat_template: str | None = option(None, "A Jinja template (text or file) instead of the model's own.")
    template_kwargs: dict[str, Any] = option({}, "Variables of the chat template, e.g. {enable_thinking: False}.")
    trust_prompts: bool = option(
        True, "Control-token text in data-set prompts keeps its meaning. False = it is plain text."
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with a hub model.")
    dtype: str = option("float32", "Weights of actor and ref.", choices=("float32", "bfloat16"))
    attn_implementation: str = option(
        "sdpa", "Attention kernel of transformers.", choices=("sdpa", "eager", "flash_attention_2")
    )
    lora_rank: int = option(
        0,
        "Rank of low-rank adapters (LoRA), which are then all that is trained. 0 = train all weights. Needs peft: "
        'pip install "verl_mt[lora]".',
        min=0,
    )
    lora_alpha: int = option(16, "Adapters are scaled by lora_alpha / lora_rank.", min=1, when=_LORA)
    lora_target_modules: list[str] = option(
        ["all-linear"],
        "Names of the linear layers that get adapters (their last part, or in full). all-linear = all but the head.",
        when=_LORA,
    )
    freeze_vision: bool = option(
        False, "A vision tower and its projector keep their weights and get no adapters. Models without one have none."
    )
    enable_gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    use_remove_padding: bool = option(
        True, "Rows of different lengths are packed into one without padding. Padded for models that cannot be packed."
    )


@dataclass
class OptimConfig(Section):
    """`actor_rollout_ref.actor.optim`: AdamW."""

    lr: float = option(1e-6, "Peak learning rate.", min=0)
    betas: list[float] = option([0.9, 0.999], "AdamW's betas.")
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay.", min=0)
    lr_warmup_steps: int = option(0, "Optimizer steps of linear warm-up.", min=0)
    lr_scheduler_type: str = option(
        "constant",
        "After the warm-up: constant, linear or cosine decay to `min_lr_ratio`.",
        choices=("constant", "linear", "cosine"),
    )
    min_lr_ratio: float = option(0.0, "Last learning rate as a share of the peak.", min=0, max=1)
    lr_warmup_steps_ratio: float = option(
        0.0,
        "`lr_warmup_steps` as a share of all optimizer steps of the run, rounded down. Above 0 it counts instead.",
        min=0,
        max=1,
    )

    def problems(self, config: Any, key: str) -> Iterator[str]:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            yield f"{key}.betas is {self.betas}: expected two numbers in [0, 1)"


@dataclass
class ActorConfig(Section):
    """`actor_rollout_ref.actor`."""

    optim: OptimConfig = option(OptimConfig, "The optimizer.")
    ppo_mini_batch_size: int | None = option(
        None,
        "Prompts per optimizer step. null = `data.train_batch_size` (one step per rollout batch, on-policy). A last "
        "step with fewer prompts has a loss as much smaller, so that every prompt of the batch weighs the same.",
        min=1,
    )
    ppo_epochs: int = option(1, "Passes over a rollout batch.", min=1)
    ppo_micro_batch_size: int | None = option(None, "Sequences per forward pass. null = by `ppo_max_token_len`.", min=1)
    ppo_max_token_len: int = option(
        16384,
        "Tokens per forward pass and rank. Those of padding count unless `model.use_remove_padding`.",
        min=1,
    )
    share_prefixes: bool = option(
        True, "What rows of a forward pass have in common at their beginning is computed once for all of them."
    )
    shuffle: bool = option(True, "Shuffle trajectories between mini-batches.")
    clip_ratio: float = option(
        0.2,
        "PPO's clip range (Schulman et al. 2017, eq. 7).",
        min=0,
        when=reads("clip_low", "clip_high"),
        allow_unused=True,  # verl's launch scripts give it, and clip_ratio_c, with every loss; the start says so
    )
    clip_ratio_low: float | None = option(None, "Lower clip range. null = `clip_ratio`.", min=0, when=reads("clip_low"))
    clip_ratio_high: float | None = option(
        None,
        "Upper clip range (clip-higher, DAPO). null = `clip_ratio`.",
        min=0,
        when=reads("clip_high"),
    )
    policy_loss: dict[str, Any] = option(
        {},
        f"`loss_mode`: {', '.join(POLICY_LOSSES)} (default: vanilla, PPO's), and the numbers that only it has "
        "(docs/algorithms.md), or a custom function by its dotted path or file.py:name, and its arguments "
        "(docs/your_own_algorithm.md). gspo wants clip ranges of about 3e-4.",
        options=LossChoice,
    )
    clip_ratio_c: float | None = option(
        3.0,
        "Dual clip's bound for negative advantages. null = off.",
        min=1,
        when=reads("clip_c"),
        allow_unused=True,
    )
    loss_agg_mode: str | None = option(
        None,
        "How token losses become one number. null = as in the paper of the loss (docs/algorithms.md): token-mean for "
        "vanilla, seq-mean-token-mean (every trajectory weighs the same) for gspo. A run's config.yaml has which.",
        choices=(None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    entropy_coeff: float = option(0.0, "Weight of the entropy bonus.")
    top_entropy_quantile: float = option(
        1.0,
        "Share of a mini-batch's sampled tokens, those of the highest entropy, that have a policy loss. Below 1 it "
        "costs a forward pass per update (Wang et al. 2025, arXiv:2506.01939).",
        min=0.001,
        max=1,
    )
    use_kl_loss: bool = option(False, "Add a KL term to the reference policy to the loss.")
    kl_loss_coef: float = option(0.001, "Its weight.", min=0, when=_HAS_KL_LOSS, allow_unused=(0.0,))
    kl_loss_type: str = option(
        "low_var_kl",
        "Its estimator (k1 = kl, k2 = mse, k3 = low_var_kl without the clamp). With a plus its value has k2's gradient "
        "(straight through).",
        choices=("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"),
        when=_HAS_KL_LOSS,
    )
    optimizer_offload: bool = option(
        False,
        "Keep the optimizer's state in CPU memory. Saves 8 to 12 bytes of device memory per trained parameter and "
        "costs two copies per step (nothing to save on the CPU).",
    )
    param_offload: bool = option(
        False,
        "Keep the weights of actor and critic in CPU memory during rollouts. Their device memory is the engine's then "
        "(nothing to save on the CPU, nor for an engine that samples from the actor's own weights).",
    )
    fsdp_size: int | None = option(
        None,
        "Ranks that weights, gradients and optimizer state are spread over. Every such group has the whole policy, and "
        "layers are gathered within it (HSDP). null, or a number above that of the ranks = over all of them.",
        min=1,
    )
    ulysses_sequence_parallel_size: int = option(
        1,
        "Neighbouring ranks that share each sequence, of actor, reference policy and critic: a row takes that much "
        "less of a rank's memory (docs/scaling.md). At most the model's attention heads. Needs "
        "`model.use_remove_padding`.",
        min=1,
    )
    grad_clip: float = option(1.0, "Largest gradient norm. 0 = no clipping.", min=0)
    skip_zero_advantage: bool = option(
        True,
        "Leave sequences whose advantages are all 0 out of the forward pass. Runs with a KL or entropy term keep them.",
    )
    use_sampler_log_probs: str = option(
        "auto",
        "Old log-probs: auto = recomputed, unless a step is one update (ratios are 1 then). always = the sampler's. "
        "never = recomputed, then too.",
        choices=("auto", "always", "never"),
        removed={
            "interpolated": "Set auto, which computes the log-probs that it approximated (one more forward pass in a "
            "step of several updates), or always, which needs no pass."
        },
    )

    @property
    def aggregation(self) -> str:
        """`loss_agg_mode`, or that of the loss where it is null."""
        return self.loss_agg_mode or read_policy_loss(self.policy_loss).aggregation

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high): the ratio is trusted in [1 - low, 1 + high]."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        return low, self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    def problems(self, config: Any, key: str) -> Iterator[str]:
        trainer, batch, model = config.trainer, config.data.train_batch_size, config.actor_rollout_ref.model
        ranks = trainer.nnodes * trainer.n_workers_per_node
        mini, samples = self.ppo_mini_batch_size or batch, config.actor_rollout_ref.rollout.n
        if batch % mini:
            yield (
                f"{key}.ppo_mini_batch_size ({mini}) does not divide data.train_batch_size ({batch}). Both count "
                f"prompts: choose {_divisors(batch)}"
            )
        elif mini * samples < ranks and config.actor_rollout_ref.rollout.custom_generate_function_path is None:
            yield (
                f"{mini * samples} sequences per optimizer step ({mini} prompts x actor_rollout_ref.rollout.n) are "
                f"fewer than {ranks} ranks (trainer.nnodes x trainer.n_workers_per_node): some would never train"
            )
        shard, sequence = self.fsdp_size or ranks, self.ulysses_sequence_parallel_size
        sizes = {"fsdp_size": shard if shard < ranks else 1, "ulysses_sequence_parallel_size": sequence}
        for name, size in sizes.items():
            if ranks % size:
                yield (
                    f"{key}.{name}={size} does not divide the number of ranks, which is {ranks} (trainer.nnodes x "
                    "trainer.n_workers_per_node)"
                )
        packed = f"{key}.ulysses_sequence_parallel_size spreads packed rows"
        if sequence > 1 and not model.use_remove_padding:
            yield f"{packed}: it needs actor_rollout_ref.model.use_remove_padding=True"
        if sequence > 1 and model.attn_implementation == "eager":
            yield (
                f"{packed}, which actor_rollout_ref.model.attn_implementation=eager cannot attend to: use sdpa or "
                "flash_attention_2"
            )


def _divisors(number: int) -> str:
    every = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(every if len(every) < 10 else [*every[:3], "...", *every[-4:]])


@dataclass
class RefConfig(Section):
    """`actor_rollout_ref.ref`: the frozen reference policy; loaded only if a KL term needs it."""

    log_prob_max_token_len: int | None = option(
        None,
        "Tokens per forward pass, as for the actor. null = passes just like the actor's, so that the KL term of an "
        "unchanged policy is exactly 0, not rounding.",
        min=1,
    )
    offload: bool = option(
        False, "Keep its weights in CPU memory between its passes. Saves device memory (nothing to save on the CPU)."
    )


@dataclass
class CriticModelConfig(Section):
    """`critic.model`."""

    path: str | None = option(
        None, "The critic's own model, with the policy's tokenizer. null = starts from the policy's weights."
    )


@dataclass
class CriticOptimConfig(OptimConfig):
    """`critic.optim`: AdamW."""

    lr: float = option(1e-5, "Peak learning rate.", min=0)


@dataclass
class CriticConfig(Section):
    """`critic`: what estimates the values of states, for algorithm.adv_estimator=gae."""

    model: CriticModelConfig = option(CriticModelConfig, "Its weights.")
    share_trunk: bool = option(
        False,
        "Read the policy's last hidden states with a small head instead of a separate model: no second model in "
        "memory. The head learns, and no gradient flows back into the policy.",
    )
    optim: CriticOptimConfig = option(CriticOptimConfig, "The optimizer.")
    ppo_epochs: int | None = option(None, "Passes over a rollout batch. null = the actor's.", min=1)
    ppo_mini_batch_size: int | None = option(None, "Prompts per optimizer step. null = the actor's.", min=1)
    ppo_micro_batch_size: int | None = option(
        None, "Sequences per forward pass. null = the actor's, unless `ppo_max_token_len` is set.", min=1
    )
    ppo_max_token_len: int | None = option(None, "Tokens (padding included) per pass. null = the actor's.", min=1)
    cliprange_value: float | None = option(
        0.5, "How far a value may move from the old one in a batch before its loss stops pulling. null = off.", min=0
    )
    loss_agg_mode: str | None = option(
        None,
        "How token losses become one number. null = the actor's.",
        choices=(None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    grad_clip: float = option(1.0, "Largest gradient norm. 0 = no clipping.", min=0)

    def problems(self, config: Any, key: str) -> Iterator[str]:
        trainer, batch, mini = config.trainer, config.data.train_batch_size, self.ppo_mini_batch_size
        if config.algorithm.adv_estimator != "gae":
            return
        if self.share_trunk:
            why = "share_trunk reads the policy's hidden states"
            yield from conflicts({f"{key}.model.path": self.model.path}, f"{key}.share_trunk=True", why)
        if self.optim.lr == 0 and not trainer.val_only:
            yield f"{key}.optim.lr is 0: the critic would say 0 of every state for ever. Give a rate (1e-5 is usual)"
        if mini is not None and batch % mini:
            yield (
                f"{key}.ppo_mini_batch_size ({mini}) does not divide data.train_batch_size ({batch}). Both count "
                f"prompts: choose {_divisors(batch)}"
            )
        total, warmup = trainer.total_training_steps, trainer.critic_warmup
        if total is not None and total <= warmup and warmup and not trainer.val_only:
            yield (
                f"trainer.critic_warmup ({warmup}) leaves no step of trainer.total_training_steps ({total}) in which "
                "the policy learns: lower it"
            )
