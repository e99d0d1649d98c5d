"""Keys of the update."""

from __future__ import annotations

import effect_parts as parts
import effect_probes as probes
from effect_kinds import AC, KL, MO, NOT_VALIDATED, OFF_POLICY, PPO, RO, Effect
from effect_probes import metric

UNPACKED = f"{MO}.use_remove_padding=False"
FOUR_RANKS = ("trainer.placement=ray", "trainer.n_workers_per_node=4", "trainer.device=cpu")

ACTOR = {
    "optim.lr": Effect("0.01", "other weights", probes.weights, NOT_VALIDATED),
    "optim.betas": Effect("[0.5, 0.6]", "other weights", probes.weights, NOT_VALIDATED),
    "optim.weight_decay": Effect("0.9", "other weights", probes.weights, NOT_VALIDATED),
    "optim.lr_warmup_steps": Effect("2", "the rate rises", metric("actor/lr"), NOT_VALIDATED),
    "optim.lr_warmup_steps_ratio": Effect("1", "the rate rises", metric("actor/lr"), NOT_VALIDATED),
    "optim.lr_scheduler_type": Effect(
        "cosine", "the rate falls", metric("actor/lr"), (f"{AC}.optim.lr_scheduler_type=constant", *NOT_VALIDATED)
    ),
    "optim.min_lr_ratio": Effect("0.5", "how far it falls", metric("actor/lr"), NOT_VALIDATED),
    "ppo_mini_batch_size": Effect(
        "1", "updates per step", metric("actor/num_updates"), ("data.train_batch_size=4", *NOT_VALIDATED)
    ),
    "ppo_epochs": Effect("2", "updates per step", metric("actor/num_updates"), NOT_VALIDATED),
    "ppo_micro_batch_size": Effect("1", "more and smaller passes", probes.shapes, NOT_VALIDATED),
    "ppo_max_token_len": Effect("320", "more and smaller passes", probes.shapes, NOT_VALIDATED),
    "share_prefixes": Effect("False", "prompts are computed for every sample", probes.shapes, NOT_VALIDATED),
    "shuffle": Effect(
        "False",
        "which prompts come first",
        probes.weights,
        ("data.train_batch_size=4", f"{AC}.ppo_mini_batch_size=1", *NOT_VALIDATED),
    ),
    "clip_ratio": Effect("0.01", "more is clipped", probes.weights, OFF_POLICY),
    "clip_ratio_low": Effect("0.01", "more is clipped", probes.weights, OFF_POLICY),
    "clip_ratio_high": Effect("0.01", "more is clipped", probes.weights, OFF_POLICY),
    "policy_loss": Effect("{loss_mode: gspo}", "another loss", probes.weights, OFF_POLICY),
    "clip_ratio_c": Effect("1.05", "the dual clip sets in", metric("actor/clipfrac_lower"), OFF_POLICY),
    "loss_agg_mode": Effect("seq-mean-token-sum", "other weights", probes.weights, NOT_VALIDATED),
    "entropy_coeff": Effect("1.0", "other weights", probes.weights, NOT_VALIDATED),
    "top_entropy_quantile": Effect("0.3", "fewer tokens move the policy", probes.weights, NOT_VALIDATED),
    "use_kl_loss": Effect("True", "there is a KL term", metric("actor/kl_loss"), NOT_VALIDATED),
    "kl_loss_coef": Effect("5.0", "its weight", probes.weights, KL),
    "kl_loss_type": Effect("k2", "its estimate", metric("actor/kl_loss"), KL),
    "grad_clip": Effect("0.001", "smaller updates", probes.weights, (f"{AC}.optim.betas=[0, 0]", *NOT_VALIDATED)),
    "skip_zero_advantage": Effect(
        "False",
        "equal rewards go through the update",
        metric("actor/num_updates"),
        ("reward.path=effect_parts:constant", *NOT_VALIDATED),
    ),
    "optimizer_offload": Effect("True", "said where there is nothing to move", probes.warned, NOT_VALIDATED),
    "param_offload": Effect("True", "an engine that has no weights", probes.started, refused="offloads the weights"),
    "fsdp_size": Effect("3", "groups of ranks", probes.placed, FOUR_RANKS, refused="does not divide the number of"),
    "ulysses_sequence_parallel_size": Effect(
        "3", "groups of ranks", probes.placed, FOUR_RANKS, refused="does not divide the number of"
    ),
    "compile_layers": Effect("True", "padding", probes.placed, (UNPACKED,), refused="needs packed rows"),
    "varlen_attention": Effect("True", "padding", probes.placed, (UNPACKED,), refused="needs packed rows"),
    "fused_adamw": Effect("True", "its state", probes.placed, (f"{AC}.optimizer_offload=True",), refused="does not go"),
    "fused_head": Effect("True", "other sums", probes.weights, NOT_VALIDATED),
    "entropy_metric": Effect("False", "no metric", metric("actor/entropy"), NOT_VALIDATED),
    "use_sampler_log_probs": Effect("never", "old log-probs are computed", probes.shapes, NOT_VALIDATED),
}

REF = {
    "log_prob_max_token_len": Effect("400", "passes of the reference policy", probes.shapes, KL),
    "offload": Effect(
        "True",
        "said where there is nothing to move",
        probes.printed,
        (*KL, f"{MO}.lora_rank=4", "trainer.logger=[console]"),
    ),
}

CRITIC = {
    "model.path": Effect(parts.other_model, "where values begin", probes.weights, PPO),
    "share_trunk": Effect("True", "no second model", probes.weights, PPO),
    "optim.lr": Effect("1e-2", "other values", probes.weights, (*PPO, "trainer.total_training_steps=3")),
    "optim.betas": Effect("[0.1, 0.2]", "other values", probes.weights, (*PPO, "trainer.total_training_steps=3")),
    "optim.weight_decay": Effect("0.9", "other values", probes.weights, (*PPO, "trainer.total_training_steps=3")),
    "optim.lr_warmup_steps": Effect("2", "the rate rises", metric("critic/lr"), PPO),
    "optim.lr_warmup_steps_ratio": Effect(
        "1", "the rate rises", metric("critic/lr"), (*PPO, "trainer.total_training_steps=3")
    ),
    "optim.lr_scheduler_type": Effect("cosine", "the rate falls", metric("critic/lr"), PPO),
    "optim.min_lr_ratio": Effect(
        "0.5", "how far it falls", metric("critic/lr"), (*PPO, "critic.optim.lr_scheduler_type=linear")
    ),
    "ppo_epochs": Effect("3", "values move further", probes.weights, PPO),
    "ppo_mini_batch_size": Effect("1", "values move further", probes.weights, ("data.train_batch_size=4", *PPO)),
    "ppo_micro_batch_size": Effect("1", "passes", probes.shapes, PPO),
    "ppo_max_token_len": Effect("320", "passes", probes.shapes, PPO),
    "cliprange_value": Effect(
        "0.0001", "how far values move", metric("critic/vf_clipfrac"), (*PPO, "critic.ppo_epochs=3")
    ),
    "loss_agg_mode": Effect("seq-mean-token-sum", "its loss", metric("critic/vf_loss"), PPO),
    "grad_clip": Effect(
        "0.001",
        "smaller updates",
        probes.weights,
        (*PPO, "critic.optim.betas=[0, 0]", "trainer.total_training_steps=3"),
    ),
}

ALGORITHM = {
    "adv_estimator": Effect("rloo", "advantages", probes.rows, NOT_VALIDATED),
    "gamma": Effect("0.5", "advantages", probes.rows, ("algorithm.adv_estimator=reinforce_plus_plus", *NOT_VALIDATED)),
    "lam": Effect("0.5", "advantages", probes.rows, PPO),
    "use_kl_in_reward": Effect("True", "a penalty in the metrics", metric("actor/reward_kl_penalty"), NOT_VALIDATED),
    "kl_penalty": Effect(
        "k2", "its estimate", probes.rows, ("algorithm.use_kl_in_reward=True", f"{AC}.optim.lr=3e-2", *NOT_VALIDATED)
    ),
    "kl_ctrl": Effect(
        "{kl_coef: 5.0}",
        "its weight",
        probes.rows,
        ("algorithm.use_kl_in_reward=True", f"{AC}.optim.lr=3e-2", *NOT_VALIDATED),
    ),
    "gdpo_reward_weights": Effect(
        "{score: 1.0, acc: 5.0}",
        "advantages",
        probes.rows,
        ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_weights={score: 1.0}", *NOT_VALIDATED),
    ),
    "norm_adv_by_std_in_grpo": Effect("False", "advantages", probes.rows, NOT_VALIDATED),
    "rollout_correction": Effect(
        "{rollout_is: token}", "weights of tokens", metric("rollout_corr/rollout_is_mean"), NOT_VALIDATED
    ),
    "filter_groups.enable": Effect(
        "True",
        "groups without a signal are sampled anew",
        metric("rollout/trajectories"),
        ("reward.path=null", f"{RO}.n=2", *NOT_VALIDATED),
    ),
    "filter_groups.metric": Effect(
        "acc", "which number counts", probes.rows, ("algorithm.filter_groups.enable=True", f"{RO}.n=2", *NOT_VALIDATED)
    ),
    "filter_groups.max_num_gen_batches": Effect(
        "1",
        "how often",
        metric("rollout/trajectories"),
        ("algorithm.filter_groups.enable=True", "reward.path=effect_parts:constant", *NOT_VALIDATED),
        base="2",
    ),
    "filter_overlong": Effect(
        "True", "cut responses are not trained", probes.weights, (f"{RO}.response_length=44", *NOT_VALIDATED)
    ),
}
