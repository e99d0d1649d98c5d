"""Put the keys of this extension into effect on the workers of a process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl_mt.config.extended import section_of
from verl_mt.errors import ConfigError
from verl_mt.extensions.fast_update.config import ACTOR, ActorKeys, ModelKeys
from verl_mt.modeling.passes import passes_of, use_passes
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.setup import WorkerSetup
from verl_mt.workers.sharding import model_of


def tune_workers(setup: WorkerSetup, actor: ActorWorker, reference: RefWorker | None) -> None:
    """For `load_workers`, before any checkpoint is loaded. The reference policy computes with the policy's kernels.

    Raises:
        ConfigError: the model, the device or this machine cannot do what a key asks for.
    """
    keys, device = section_of(setup.config, ActorKeys), torch.device(setup.device)
    if section_of(setup.config, ModelKeys).recompute == "elementwise":
        from verl_mt.extensions.fast_update.recompute import recompute_elementwise

        recompute_elementwise(model_of(actor.module))
    if keys.fused_adamw:
        use_fused_kernel(actor.optimizer)
    modules = [actor.module] if reference is None else [actor.module, reference.module]
    for module in {id(module): module for module in modules}.values():
        tune_model(model_of(module), keys, device)


def use_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """For an AdamW that has not stepped yet and keeps its state on the device."""
    for group in optimizer.param_groups:
        group["fused"] = True


def tune_model(model: Any, keys: ActorKeys, device: torch.device) -> None:
    """What concerns the passes of one model.

    Args:
        model: a Hugging Face causal language model whose passes are chosen.
        keys: of `actor_rollout_ref.actor`.
        device: where the passes run.

    Raises:
        ConfigError: see `tune_workers`.
    """
    if (keys.compile_layers or keys.varlen_attention) and not passes_of(model).packed:
        needs = f"{ACTOR}.{'compile_layers' if keys.compile_layers else 'varlen_attention'}"
        raise ConfigError(
            f"{needs}=True needs packed rows, and {type(model).__name__} cannot be packed (the log says why). "
            f"Remove {needs}"
        )
    if keys.varlen_attention:
        from verl_mt.extensions.fast_update.attention import attend_in_one_call

        attend_in_one_call(model, device)
    if keys.compile_layers:
        from verl_mt.extensions.fast_update.layers import compile_layers, require_compiler

        require_compiler(device, f"{ACTOR}.compile_layers")
        compile_layers(model)
    if keys.fused_head or not keys.entropy_metric:
        use_passes(model, replace(passes_of(model), head=_head(keys, device)))


def _head(keys: ActorKeys, device: torch.device) -> Any:
    """Log-probs behind the head, as the keys say. Another process can load it."""
    from verl_mt.extensions.fast_update.head import fused_head_log_probs, without_metric
    from verl_mt.modeling.head_log_probs import head_log_probs

    if keys.fused_head:
        from verl_mt.extensions.fast_update.layers import require_compiler

        require_compiler(device, f"{ACTOR}.fused_head")
    log_probs = fused_head_log_probs if keys.fused_head else head_log_probs
    return log_probs if keys.entropy_metric else partial(without_metric, log_probs)
