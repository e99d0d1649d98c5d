"""The frozen reference policy of a KL term."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt.config.actor import RefConfig
from verl_mt.workers.micro_batch import compute_log_probs


class RefWorker:
    """A policy that never changes.

    Args:
        module: a Hugging Face causal language model of its own (not the actor's).
        config: its part of the configuration.
        temperature: that of sampling; log-probs are of logits / temperature.
    """

    def __init__(self, module: nn.Module, config: RefConfig, *, temperature: float):
        self.module = module.eval().requires_grad_(False)
        self._config = config
        self._temperature = temperature

    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        """[B, T] where the loss mask is set, 0 elsewhere, on the batch's device."""
        here = batch.to(next(self.module.parameters()).device)
        rows = torch.arange(len(here), device=here.device)
        max_tokens = self._config.log_prob_max_token_len
        log_probs = compute_log_probs(self.module, here, rows, temperature=self._temperature, max_tokens=max_tokens)
        return log_probs.to(batch.device or "cpu")
