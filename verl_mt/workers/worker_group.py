"""The worker group that the YAML declares: actor and, where a KL term needs it, reference policy."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as columns
from verl_mt.errors import ConfigError
from verl_mt.modeling.load import load_causal_lm
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.ref import RefWorker


@dataclass
class WorkerGroup:
    """Workers that live in this process."""

    actor: ActorWorker
    ref: RefWorker | None = None
    """None where no KL term needs it."""

    @property
    def policy_module(self) -> nn.Module:
        """The policy itself, which the local engine decodes with: after an update it has the new weights."""
        return self.actor.module

    def update(self, batch: TensorDict) -> dict[str, float]:
        """Train on a rollout batch with advantages; see `ActorWorker.update`."""
        return self.actor.update(batch)

    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        """[B, T] by the current policy; see `ActorWorker.compute_log_probs`."""
        return self.actor.compute_log_probs(batch)

    def add_ref_log_probs(self, batch: TensorDict) -> None:
        """Fill in the batch's `ref_log_probs`; does nothing where there is no reference policy."""
        if self.ref is not None:
            batch[columns.REF_LOG_PROBS] = self.ref.compute_log_probs(batch)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes. The reference policy never does."""
        return {"actor": self.actor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a `state_dict`."""
        self.actor.load_state_dict(state["actor"])


def build_worker_group(
    config: ActorRolloutRefConfig,
    *,
    total_steps: int,
    train_batch_size: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    placement: str = "inline",
) -> WorkerGroup:
    """Load the policy and put the workers around it.

    Args:
        config: model, actor, rollout (for its temperature and response length) and ref.
        total_steps: training steps of the whole run, for the learning-rate schedule.
        train_batch_size: prompts per training step, for the same; null where a step is one mini-batch anyway.
        device: where the workers live.
        seed: of the shuffling between mini-batches.
        placement: `inline` = in this process.

    Raises:
        ConfigError: a placement or device that cannot be had.
    """
    if placement != "inline":
        raise ConfigError(
            f"trainer.placement={placement}: this version runs its workers in one process only; "
            "set trainer.placement=inline"
        )
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"trainer.device={device}: torch finds no CUDA device; set trainer.device=cpu or auto")
    model = config.model
    module = load_causal_lm(
        model.path,
        revision=model.revision,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        device=device,
    )
    # Copied before any checkpoint is loaded into the actor: the reference stays what the run started from.
    ref = copy.deepcopy(module) if config.actor.use_kl_loss else None
    if model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable()
    temperature = config.rollout.temperature
    actor = ActorWorker(
        module,
        config.actor,
        temperature=temperature,
        total_steps=total_steps,
        train_batch_size=train_batch_size,
        norm_constant=config.rollout.response_length,
        seed=seed,
    )
    return WorkerGroup(actor, None if ref is None else RefWorker(ref, config.ref, temperature=temperature))
