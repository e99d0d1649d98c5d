"""Names and shapes of a model's weights, as weight updates send them and engines take them. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mt.errors import ConfigError
from verl_mt.modeling.load import meta_causal_lm, tensors_in_checkpoint
from verl_mt.modeling.weights import named_weights

_NAMED = 3
_BODY = "transformer"
"""GPT-2 and BLOOM are published without this prefix, and SGLang and vLLM take their names with and without."""


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model without loading any weight."""

    vocab_size: int
    weights: dict[str, tuple[int, ...]]
    """Name in the checkpoint -> shape of all that an update sends."""
    unsent: frozenset[str] | None = frozenset()
    """Names of the checkpoint that no update sends: those of a vision tower that is not loaded, for example. None = its
    files do not say what they hold."""

    @property
    def has_experts(self) -> bool:
        """It is a mixture of experts."""
        return any(".experts." in name for name in self.weights)


def model_shape(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelShape:
    """Of a model folder or hub name.

    Engines load the files of the checkpoint, and updates under the same names. An update that names or shapes a weight
    otherwise is refused here, before anything starts.

    Raises:
        ConfigError: no such model, one that transformers does not know, or one whose updates would have other names or
            shapes than its files.
    """
    model = meta_causal_lm(path, revision=revision, attn_implementation="eager", trust_remote_code=trust_remote_code)
    model.tie_weights()
    weights = {name: tuple(tensor.shape) for name, tensor in named_weights(model)}
    held = {name: tuple(tensor.shape) for name, tensor in tensors_in_checkpoint(path, revision).items()}
    if model.base_model_prefix == _BODY and not any(name.startswith(f"{_BODY}.") for name in held):
        held = {name if name in weights else f"{_BODY}.{name}": shape for name, shape in held.items()}
    if held:  # other files than safetensors do not say what they hold
        _compare(path, weights, held)
    vocab_size = model.config.get_text_config().vocab_size
    return ModelShape(vocab_size, weights, frozenset(held.keys() - weights.keys()) if held else None)


def _compare(path: str, weights: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]]) -> None:
    """Raises:
    ConfigError: updates have names or shapes that the checkpoint has not.
    """
    wrong = [
        f"{name} {list(shape)} (the files have {list(held[name]) if name in held else 'no such weight'})"
        for name, shape in weights.items()
        if held.get(name) != shape
    ]
    if wrong:
        more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ConfigError(
            f"actor_rollout_ref.model.path {path!r}: weight updates would not fit the engine, which takes the names "
            f"and shapes of the model's *.safetensors. Updates would send {', '.join(wrong[:_NAMED])}{more}. Write the "
            "checkpoint again with save_pretrained of the installed transformers, or set "
            "actor_rollout_ref.rollout.name=local"
        )
