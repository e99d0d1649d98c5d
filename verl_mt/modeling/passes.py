"""Which way the rows of a micro-batch go through a decoder: packed or padded, common prefixes once or in every row.

All ways give the same hidden states; they differ in what they cost (docs/memory_and_speed.md). A model that cannot be
packed takes padded passes, and the log says so once, with the reason.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.errors import ConfigError
from verl_mt.modeling import packing
from verl_mt.modeling.head_log_probs import head_log_probs
from verl_mt.modeling.sequence_parallel import Own, SequenceGroup
from verl_mt.modeling.shared_prefix import can_share_prefixes, eval_mode, plan_prefixes, run_with_prefixes

_log = logging.getLogger(__name__)
_ATTRIBUTE = "verl_mt_passes"


@dataclass(frozen=True)
class Passes:
    """How the rows of one model go through it."""

    packed: bool
    """Without padding (`packing.py`)."""
    share_prefixes: bool
    """What rows have in common goes through once."""
    sequence: SequenceGroup | None = None
    """The ranks that have a part of each packed sequence."""
    packed_pass: Callable[[Any, Any, packing.PackedRows], Tensor | None] | None = None
    """(model, its decoder, rows) -> hidden states [N, H] at `rows.wanted_N`; None: the decoder computes them itself."""
    head: Callable[..., tuple[Tensor, Tensor | None]] = head_log_probs
    """Log-probs behind the model's head, as `head_log_probs`; without entropies if they are a metric only."""


PLAIN = Passes(packed=False, share_prefixes=False)


def choose_passes(
    model: Any, *, remove_padding: bool = True, share_prefixes: bool = True, device: str | torch.device | None = None
) -> Passes:
    """What is wanted, as far as the model can do it. Runs two tiny forward passes; warns where padding stays.

    Args:
        model: a Hugging Face causal language model with its weights.
        remove_padding: `actor_rollout_ref.model.use_remove_padding`.
        share_prefixes: `actor_rollout_ref.actor.share_prefixes`.
        device: where the model is going to run; None = where it is. A kernel may work there and nowhere else, so its
            first layers go there for the trial.
    """
    reason = None
    if remove_padding:
        with _beginning_on(decoder_of(model), device):
            reason = _why_not_packed(model)
    if reason is not None:
        _log.warning(
            "%s cannot be trained without padding: %s. Its passes are padded; the results are the same "
            "(actor_rollout_ref.model.use_remove_padding=False ends this warning)",
            type(model).__name__,
            reason,
        )
    return Passes(packed=remove_padding and reason is None, share_prefixes=share_prefixes)


def use_passes(model: Any, passes: Passes) -> None:
    """Make it so for this model, and for copies made of it."""
    setattr(model, _ATTRIBUTE, passes)
    if passes.packed:
        # For good, not for a pass: checkpointed layers run again in the backward pass.
        config = decoder_of(model).config
        config._attn_implementation = packing.TWINS.get(config._attn_implementation, config._attn_implementation)


def passes_of(model: Any) -> Passes:
    """Those that were set; else the best that the model can do, from now on."""
    if not hasattr(model, _ATTRIBUTE):
        use_passes(model, choose_passes(model))
    return getattr(model, _ATTRIBUTE)


def forbid_whole_rows(model: Any) -> None:
    """To be called where rows went through the model whole.

    Raises:
        ConfigError: several ranks were to share them; all of them would count the same gradient.
    """
    if passes_of(model).sequence is not None:
        raise ConfigError(
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size spreads packed rows of text, and these cannot be "
            f"packed ({type(model).__name__}: images, padding on the left, or a custom head). Set it to 1"
        )


def decoder_of(model: Any) -> Any:
    """The part of a causal language model that makes hidden states."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model.base_model if decoder is None or decoder is model else decoder


def hidden_of_padded(
    base: Any, ids_BT: Tensor, wanted_BT: Tensor, index: tuple[Tensor, Tensor], *, model: Any
) -> tuple[Tensor, Own | None]:
    """Hidden states [N, H] of right-padded rows at `index` = (rows, positions), in the model's way. Where a sequence is
    spread over ranks, those [n, H] of this rank, and which they are."""
    passes = passes_of(model)
    if passes.packed:
        rows = packing.PackedRows(ids_BT, *index, share=passes.share_prefixes, sequence=passes.sequence)
        if passes.packed_pass and (found := passes.packed_pass(model, base, rows)) is not None:
            return found, None
        places, own = rows.wanted()
        return base(**rows.arguments()).last_hidden_state[0, places], own
    if passes.share_prefixes and can_share_prefixes(model, base):
        plan = plan_prefixes(ids_BT, wanted_BT)
        if plan is not None:
            return run_with_prefixes(base, ids_BT, plan, *index), None
    # Causal attention never looks at padding on the right, so no mask is needed and the kernel may be causal.
    return base(input_ids=ids_BT, use_cache=False).last_hidden_state[index], None


def logits_of_padded(model: Any, ids_BT: Tensor, index: tuple[Tensor, Tensor]) -> tuple[Tensor, Own | None]:
    """Logits [N, V] likewise, of a model that does more than a plain head does."""
    passes = passes_of(model)
    if passes.packed and "logits_to_keep" in inspect.signature(model.forward).parameters:
        rows = packing.PackedRows(ids_BT, *index, share=passes.share_prefixes, sequence=passes.sequence)
        places, own = rows.wanted()
        return model(**rows.arguments(), logits_to_keep=places).logits[0], own
    return model(input_ids=ids_BT, use_cache=False).logits[index], None


def _why_not_packed(model: Any) -> str | None:
    """None = it can be."""
    base = decoder_of(model)
    config = base.config
    kinds = set(getattr(config, "layer_types", None) or ())
    other = kinds - {"full_attention"}
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if not kinds and getattr(config, "sliding_window", None) is not None:
        return f"its attention has a window of {config.sliding_window} tokens"
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in (*packing.TWINS, *packing.TWINS.values()):
        return f"its attention is {kernel!r}, and only {' and '.join(packing.TWINS)} take packed rows"
    config._attn_implementation = packing.TWINS.get(kernel, kernel)
    try:
        with eval_mode(model):
            return _probe(base)
    except Exception as error:
        # An architecture with attention or positions of its own may raise anything here; padded passes serve it.
        return f"a trial pass raised {type(error).__name__}: {error}"
    finally:
        config._attn_implementation = kernel


@contextmanager
def _beginning_on(base: Any, device: str | torch.device | None) -> Iterator[None]:
    """A decoder with its first two layers only, on another device than its own; as it was afterwards."""
    before, after = next(base.parameters()).device, None if device is None else torch.device(device)
    stays = after is None or (after.type == before.type and after.index in (None, before.index))
    if stays or not isinstance(getattr(base, "layers", None), nn.ModuleList):
        yield
        return
    layers, base.layers = base.layers, base.layers[:2]
    try:
        base.to(after)
        yield
    finally:
        base.to(before)
        base.layers = layers


@torch.no_grad()
def _probe(base: Any) -> str | None:
    """Three rows behind a common prefix, packed with and without it, against one plain pass."""
    device = next(base.parameters()).device
    # All over the vocabulary: of a few repeated tokens, some models see hidden states of which rounding decides.
    common = torch.arange(packing.MIN_SHARED) * 997
    ends = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 0, 0]]) * 7919
    ids_BT = (torch.cat([common.expand(3, -1), ends], 1) % base.get_input_embeddings().num_embeddings).to(device)
    length_B = torch.tensor([4, 4, 2]) + len(common)
    row_N, position_N = (torch.arange(ids_BT.shape[1]) < length_B[:, None]).nonzero(as_tuple=True)
    row_N, position_N = row_N.to(device), position_N.to(device)
    expected = base(input_ids=ids_BT, use_cache=False).last_hidden_state[row_N, position_N]
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    for share in (False, True):
        rows = packing.PackedRows(ids_BT, row_N, position_N, share=share)
        got = base(**rows.arguments()).last_hidden_state[0, rows.wanted_N]
        if not bool((got - expected).abs().max() <= tolerance * expected.abs().max()):
            return "a trial pass gave other hidden states than a padded one"
    return None


def forbid_packing(model: nn.Module) -> None:
    """Plain passes, unless others were set before."""
    if not hasattr(model, _ATTRIBUTE):
        setattr(model, _ATTRIBUTE, PLAIN)
