"""The frozen reference policy of a KL term."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_mt.config.actor import ActorConfig, RefConfig
from verl_mt.modeling.lora import adapters_off, lora_of
from verl_mt.workers.micro_batch import compute_log_probs
from verl_mt.workers.rank_batch import RankBatch, for_whole
from verl_mt.workers.sharding import ALONE, model_of, ranks_of


class RefWorker:
    """A policy that never changes. With a sharded module there is one such worker per rank, like the actor's.

    Args:
        module: a Hugging Face causal language model of its own, or a `ShardedPolicy`; or the actor's own one if that
            has low-rank adapters: the reference is then what it is without them, and costs no memory.
        config: its part of the configuration. With `offload` its weights wait in CPU memory; a whole module is moved
            to the device for each batch, a sharded one (made with `offload`) layer by layer.
        actor: the actor's part of the configuration. Its passes are split in the same way (unless `config` says
            otherwise): two passes of one policy agree to the bit only where their shapes do, and Adam makes a full
            step even of a gradient that is nothing but rounding.
        temperature: that of sampling; log-probs are of logits / temperature.
        device: where passes run; None = where the module is.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RefConfig,
        *,
        actor: ActorConfig,
        temperature: float,
        device: str | torch.device | None = None,
    ):
        self.module = module.eval()
        self._is_actors = lora_of(model_of(module)) is not None
        if not self._is_actors:
            module.requires_grad_(False)
        self._max_tokens = config.log_prob_max_token_len or actor.ppo_max_token_len
        self._max_rows = None if config.log_prob_max_token_len else actor.ppo_micro_batch_size
        self._temperature = temperature
        self.device = torch.device(device or next(module.parameters()).device)
        offload = config.offload and not self._is_actors
        self._moves = offload and self.device.type != "cpu" and ranks_of(module) is ALONE
        if self._moves:
            self.module.to("cpu")

    def compute_log_probs(self, batch: TensorDict) -> Tensor:
        """[B, T] where the loss mask is set, 0 elsewhere, on the batch's device."""
        return for_whole(batch, ranks_of(self.module), self.log_probs)

    def log_probs(self, rank_batch: RankBatch) -> Tensor:
        """[b, T] of this rank's rows."""
        if self._moves:
            self.module.to(self.device)
        try:
            with adapters_off(model_of(self.module)):
                log_probs = compute_log_probs(
                    self.module,
                    rank_batch.to(self.device),
                    torch.arange(len(rank_batch.stats)),
                    temperature=self._temperature,
                    max_tokens=self._max_tokens,
                    max_rows=self._max_rows,
                )
        finally:
            if self._moves:
                self.module.to("cpu")
        return log_probs
