"""Whether an engine computes with the compiled kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from verl_mt.engines.base import EngineSetup
from verl_mt.engines.local.model_runner import PackedForward
from verl_mt.errors import ConfigError
from verl_mt.extensions.cpu_kernels.build import KernelsError, build
from verl_mt.extensions.cpu_kernels.config import RolloutKeys
from verl_mt.extensions.cpu_kernels.forward import CompiledForward, why_not
from verl_mt.extensions.cpu_kernels.update import compiled_pass
from verl_mt.modeling.passes import passes_of, use_passes

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.kernels"
_said: set[str] = set()


def local_forward(setup: EngineSetup) -> Callable[[torch.nn.Module, int], PackedForward]:
    """What the local engine computes its steps with, by `rollout.kernels`.

    Raises:
        ConfigError: `compiled` is asked for and cannot be had.
    """
    rollout, module = setup.config.rollout, setup.policy_module
    assert isinstance(rollout, RolloutKeys)
    is_trained = "verl_mt_passes" in vars(module)
    if is_trained:
        use_passes(module, replace(passes_of(module), packed_pass=None))  # of an earlier engine
    if rollout.kernels == "torch" or (rollout.kernels == "auto" and setup.deterministic):
        return PackedForward
    reason = why_not(module)
    try:
        if reason is None:
            built = build()
            if is_trained:
                use_passes(module, replace(passes_of(module), packed_pass=compiled_pass(built)))
            return partial(CompiledForward, built=built)
    except KernelsError as error:
        reason = str(error)
    if rollout.kernels == "compiled":
        raise ConfigError(f"{KEY}=compiled: {reason}. Set {KEY}=torch or remove {KEY}")
    if next(module.parameters()).device.type == "cpu" and reason not in _said:
        _said.add(reason)
        log.warning("the local engine computes with torch's operators, not with compiled kernels: %s", reason)
    return PackedForward
