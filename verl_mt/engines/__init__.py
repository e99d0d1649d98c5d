"""Inference engines: exact ids in, exact ids and log-probs out.

`base.py` is the contract. `local` samples in this process from the actor's own module, `scripted` replays fixed turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from verl_mt.config.rollout import RolloutConfig
from verl_mt.engines.base import InferenceEngine
from verl_mt.engines.stop_strings import Decode
from verl_mt.errors import ConfigError

__all__ = ["build"]

_KEY = "actor_rollout_ref.rollout"


def build(
    config: RolloutConfig,
    policy_module: Any = None,
    *,
    end_token_ids: Iterable[int],
    decode: Decode | None,
    max_model_len: int | None,
    deterministic: bool,
    seed: int,
) -> InferenceEngine:
    """The engine that the config names.

    Args:
        config: `actor_rollout_ref.rollout`.
        policy_module: the actor's model; the local engine samples from it without a copy.
        end_token_ids: ids that end an assistant turn; the config's `stop_token_ids` are added per request.
        decode: ids -> text, for stop strings.
        max_model_len: longest sequence in tokens; None = what the model allows.
        deterministic: same calls, same bits, whatever the timing.
        seed: of requests that bring none.

    Raises:
        ConfigError: an engine that does not exist here, or an option that it does not take.
    """
    if config.name == "sglang":
        raise ConfigError(
            f"{_KEY}.name: this version has no SGLang engine yet; use {_KEY}.name=local, which samples with "
            "transformers from the actor's own weights in the training process"
        )
    if config.name != "local":
        raise ConfigError(
            f"{_KEY}.name: a {config.name!r} engine cannot be made from a config, it needs its turns: pass "
            "verl_mt.engines.scripted.ScriptedEngine(turns) from Python, or use local"
        )
    _check_local(config, policy_module)
    # Imported here: who only needs the contract or a script does not load transformers.
    from verl_mt.engines.local import LocalEngine, LocalOptions

    options = LocalOptions(max_num_seqs=config.max_num_seqs, deterministic=deterministic, seed=seed)
    return LocalEngine(
        policy_module, end_token_ids=end_token_ids, decode=decode, max_model_len=max_model_len, options=options
    )


def _check_local(config: RolloutConfig, module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"{_KEY}.name=local samples from the actor's own module, but got {type(module).__name__}: it works only "
            "where actor and rollout are in one process"
        )
    if config.engine_kwargs:
        raise ConfigError(f"{_KEY}.engine_kwargs: the local engine takes none, got {sorted(config.engine_kwargs)}")
    if config.tensor_model_parallel_size != 1:
        raise ConfigError(
            f"{_KEY}.tensor_model_parallel_size: the local engine runs on one rank, "
            f"got {config.tensor_model_parallel_size}"
        )
    actual = str(next(module.parameters()).dtype).removeprefix("torch.")
    if config.dtype is not None and config.dtype != actual:
        raise ConfigError(
            f"{_KEY}.dtype: the local engine shares the actor's weights, which are {actual}; got {config.dtype}. "
            "Set it to null, or change the actor's dtype"
        )
