"""The keys of faster updates: `actor_rollout_ref.actor.*` and `actor_rollout_ref.model.recompute`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_mt.config.declare import Section, conflicts, only, option, switched_on
from verl_mt.config.extended import ConfigSections

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@dataclass
class ActorKeys(Section):
    """What this extension adds to `actor_rollout_ref.actor`. The critic has none of it."""

    compile_layers: bool = option(
        False,
        "Compile the decoder layers of policy and reference policy with torch.compile: norms, rotary embeddings and "
        "activations become fused kernels. Needs packed rows. Never measured on a GPU.",
    )
    fused_head: bool = option(
        False,
        "Log-probs from the head's logits in their own precision, in large tiles, with compiled kernels. Never "
        "measured on a GPU.",
    )
    varlen_attention: bool = option(
        False,
        "One call of torch's attention for rows of many lengths per layer. Needs CUDA, bfloat16, "
        "attn_implementation=sdpa and packed rows. Never measured on a GPU.",
    )
    fused_adamw: bool = option(
        False, "One fused kernel for the optimizer's step of all the policy's weights. Never measured on a GPU."
    )
    entropy_metric: bool = option(
        True,
        "Log actor/entropy, which costs another pass over the logits. rollout/entropy is free and stays.",
        when=only(f"{ACTOR}.entropy_coeff", 0.0),
    )

    def problems(self, config: Any, key: str) -> Iterator[str]:
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        if self.fused_adamw:
            why = "the fused step needs all of the optimizer's state on the device"
            yield from conflicts({f"{key}.optimizer_offload": actor.optimizer_offload}, f"{key}.fused_adamw=True", why)
        for name in ("compile_layers", "varlen_attention"):
            if getattr(self, name) and not model.use_remove_padding:
                yield f"{key}.{name}=True needs packed rows: set {MODEL}.use_remove_padding=True"
        if self.compile_layers and model.recompute == "elementwise":
            yield (
                f"{key}.compile_layers=True does not go with {MODEL}.recompute=elementwise: a compiled layer chooses "
                "itself what it recomputes. Remove one of them"
            )
        if self.varlen_attention and (model.dtype, model.attn_implementation) != ("bfloat16", "sdpa"):
            yield (
                f"{key}.varlen_attention=True: found {MODEL}.dtype={model.dtype} and {MODEL}.attn_implementation="
                f"{model.attn_implementation}. Set {MODEL}.dtype=bfloat16 and {MODEL}.attn_implementation=sdpa"
            )


@dataclass
class ModelKeys(Section):
    """What this extension adds to `actor_rollout_ref.model`."""

    recompute: str = option(
        "layers",
        "What gradient checkpointing recomputes: layers = all of a layer. elementwise = norms, rotary embeddings and "
        "activations, so that matrix products and attention run once and their results stay in memory.",
        choices=("layers", "elementwise"),
        when=switched_on(f"{MODEL}.enable_gradient_checkpointing"),
    )


SECTIONS = ConfigSections({ACTOR: ActorKeys, MODEL: ModelKeys})
