"""Inference engines: exact ids in, exact ids and log-probs out.

`base.py` is the contract. `local` samples in this process from the actor's own module, `sglang` is for real work,
`scripted` replays fixed turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.engines.base import InferenceEngine
from verl_mt.engines.stop_strings import Decode
from verl_mt.errors import ConfigError

__all__ = ["build"]

_KEY = "actor_rollout_ref.rollout"


def build(
    config: ActorRolloutRefConfig,
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
        config: `actor_rollout_ref`.
        policy_module: the actor's model; the local engine samples from it without a copy.
        end_token_ids: ids that end an assistant turn; the config's `stop_token_ids` are added per request.
        decode: ids -> text, for stop strings.
        max_model_len: longest sequence in tokens; None = what the model allows.
        deterministic: same calls, same bits, whatever the timing.
        seed: of requests that bring none.

    Raises:
        ConfigError: an engine that does not exist here, or an option that it does not take.
    """
    rollout = config.rollout
    # Imported where they are needed: who only needs the contract or a script loads neither transformers nor a client.
    if rollout.name == "sglang":
        from verl_mt.engines.sglang.engine import SGLangEngine
        from verl_mt.engines.sglang.options import SGLangOptions

        return SGLangEngine(
            SGLangOptions.from_config(config, end_token_ids=end_token_ids, max_model_len=max_model_len, seed=seed)
        )
    if rollout.name != "local":
        raise ConfigError(
            f"{_KEY}.name: a {rollout.name!r} engine cannot be made from a config, it needs its turns: pass "
            "engine=ScriptedEngine(turns) (verl_mt.engines.scripted) to build_trainer from Python, or use local"
        )
    _check_local(rollout, policy_module)
    from verl_mt.engines.local import LocalEngine, LocalOptions
    from verl_mt.engines.local.vision import LocalVisionEngine, sees

    if sees(policy_module):
        return LocalVisionEngine(
            policy_module, end_token_ids=end_token_ids, decode=decode, max_model_len=max_model_len, seed=seed
        )
    options = LocalOptions(max_num_seqs=rollout.max_num_seqs, deterministic=deterministic, seed=seed)
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
