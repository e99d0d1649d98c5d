"""Which policies the local engine can copy, to sample from one while the other is trained."""

from __future__ import annotations

from verl_mt import engines
from verl_mt.chat.loading import is_multimodal
from verl_mt.config.schema import Config
from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import ConfigError
from verl_mt.modeling.load import meta_causal_lm, source_of
from verl_mt.modeling.weights import named_weights


def require_copyable(config: Config) -> None:
    """A policy that is sampled from while it is trained is copied; not every model can be. Nothing is loaded yet.

    Raises:
        ConfigError: this one cannot.
    """
    name, model = config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.model
    if not engines.samples_from_policy(name):
        return
    why = "sees images"
    if not is_multimodal(resolve_model_path(model.path), model.revision):
        empty = meta_causal_lm(**source_of(model))
        others = {weight for weight, _ in named_weights(empty)} - empty.state_dict().keys()
        if not others:
            return
        why = f"keeps weights in other shapes or under other names than its checkpoint ({min(others)})"
    raise ConfigError(
        f"trainer.max_staleness={config.trainer.max_staleness}: {model.path} {why}, and {name} samples such a model "
        "from weights that are trained meanwhile. Set actor_rollout_ref.rollout.name=sglang, or max_staleness=0"
    )
