"""Log-probs and entropies of known tokens: the trainer's forward pass.

Convention (engines and trainer): position t holds log p(token t | tokens < t) = log_softmax(logits_{t-1} / T)[token t]
over the full vocabulary, in float32; T = 0 counts as 1. Shape suffixes: `B` rows, `T` tokens, `N` wanted tokens,
`H` hidden size, `V` vocabulary.

The language-model head runs only where a log-prob is wanted, never on more than a few logits at once
(`head_log_probs.py`); rows go through the model without padding, and what they share only once (`passes.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.data.batch import RowMedia
from verl_mt.modeling.media import has_placeholders, media_arguments
from verl_mt.modeling.passes import decoder_of, forbid_whole_rows, hidden_of_padded, logits_of_padded, passes_of
from verl_mt.modeling.sequence_parallel import Own
from verl_mt.modeling.shared_prefix import eval_mode


@dataclass(frozen=True)
class LogProbs:
    """Both are float32 [B, T] (float64 for a float64 model), 0 where nothing was wanted."""

    log_probs_BT: Tensor
    entropy_BT: Tensor | None
    """-sum_v p log p of the distribution that the token was drawn from, in nats; None unless asked for."""


def forward_log_probs(
    model: nn.Module,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    *,
    wanted_BT: Tensor,
    temperature: float,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    media: Sequence[RowMedia] | None = None,
    expected_slope: Callable[[], Tensor | None] | None = None,
) -> LogProbs:
    """Log-probs of the tokens at the wanted positions; works under autograd and without.

    Args:
        model: a Hugging Face causal language model. Its training mode is left as it is.
        input_ids_BT: int64.
        attention_mask_BT: bool or 0/1. Right-padded rows (1s, then 0s) take the fast path, others work too.
        wanted_BT: bool; column 0 must be False.
        temperature: T above; 0 counts as 1.
        with_entropy: also return the entropies.
        entropy_grad: False keeps the entropies out of the graph (a metric costs no memory then).
        media: images and videos, one entry per row; None = text only. Such rows are padded and share no prefixes.
        expected_slope: [B, T], what the derivative of the loss by these log-probs is going to be, or None; see
            `head_log_probs`.

    Raises:
        ValueError: a log-prob of position 0 is wanted.
        DataError: `media` and the placeholder tokens do not fit.
    """
    if wanted_BT[:, :1].any():
        raise ValueError("position 0 has no log-prob: no token comes before it")
    row_N, position_N = wanted_BT.nonzero(as_tuple=True)
    if len(row_N) == 0:
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        zeros = torch.zeros(wanted_BT.shape, dtype=dtype, device=wanted_BT.device)
        return LogProbs(zeros, zeros.clone() if with_entropy else None)
    used_B = wanted_BT.any(1)
    compact_N = (used_B.cumsum(0) - 1)[row_N]
    # The last wanted token itself is never an input.
    width = int(position_N.max())
    ids, mask, wanted = (x[used_B] for x in (input_ids_BT, attention_mask_BT, wanted_BT))
    index = (compact_N, position_N - 1)
    seen = [row for row, used in zip(media or [RowMedia()] * len(used_B), used_B.tolist()) if used]
    own: Own | None = None
    if any(row.inputs for row in seen) or has_placeholders(model, ids):
        hidden, head = _with_media(model, ids, mask, seen, index)
    else:
        hidden, own, head = _hidden_states(model, ids[:, :width], mask[:, :width], wanted, index)
    targets_N = input_ids_BT[row_N, position_N]
    log_probs_N, entropy_N = passes_of(model).head(
        head,
        hidden,
        targets_N if own is None else own.of(targets_N),
        temperature=temperature or 1.0,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        expected=None if expected_slope is None else partial(_at, expected_slope, (row_N, position_N), own),
    )
    if own is None:
        forbid_whole_rows(model)
    else:
        log_probs_N, entropy_N = own.everyone(log_probs_N), None if entropy_N is None else own.everyone(entropy_N)

    def scatter(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT.bool(), values_N)

    return LogProbs(scatter(log_probs_N), None if entropy_N is None else scatter(entropy_N))


def _at(slope: Callable[[], Tensor | None], index: tuple[Tensor, Tensor], own: Own | None) -> Tensor | None:
    slope_BT = slope()
    if slope_BT is None:
        return None
    return slope_BT[index] if own is None else own.of(slope_BT[index])


def position_ids(attention_mask_BT: Tensor) -> Tensor:
    """Positions that count real tokens only: mask [0, 0, 1, 1, 1, 0] -> [0, 0, 0, 1, 2, 2]."""
    return (attention_mask_BT.long().cumsum(1) - 1).clamp(min=0)


def _hidden_states(
    model: Any, ids_BT: Tensor, mask_BT: Tensor, wanted_BT: Tensor, index: tuple[Tensor, Tensor]
) -> tuple[Tensor, Own | None, nn.Module]:
    """What the head must see to predict the wanted tokens, or this rank's of them; and the head.

    `index` = (rows, positions of the tokens before the wanted ones). Where the model does more than a plain head
    (soft-capped or scaled logits), the "hidden states" are its logits and the head does nothing.
    """
    base, head = decoder_of(model), model.get_output_embeddings()
    right_padded = not bool((mask_BT[:, 1:].long() > mask_BT[:, :-1].long()).any()) and bool(mask_BT[:, 0].all())
    if right_padded:
        if not _has_plain_head(model):
            return *logits_of_padded(model, ids_BT, index), nn.Identity()
        return *hidden_of_padded(base, ids_BT, wanted_BT, index, model=model), head
    positions = position_ids(mask_BT)
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT.long(), "position_ids": positions, "use_cache": False}
    if not _has_plain_head(model):
        return model(**inputs).logits[index], None, nn.Identity()
    return base(**inputs).last_hidden_state[index], None, head


def _with_media(
    model: Any, ids_BT: Tensor, mask_BT: Tensor, media: Sequence[RowMedia], index: tuple[Tensor, Tensor]
) -> tuple[Tensor, nn.Module]:
    """`_hidden_states` of rows with images or videos: a plain pass over whole rows."""
    inputs: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False, **media_arguments(model, ids_BT, media)}
    if not bool(mask_BT.all()):
        inputs["attention_mask"] = mask_BT.long()
    if not _has_plain_head(model):
        return model(**inputs).logits[index], nn.Identity()
    return model.base_model(**inputs).last_hidden_state[index], model.get_output_embeddings()


_plain_heads: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _has_plain_head(model: Any) -> bool:
    """Whether `model(x).logits == head(decoder(x))`: nothing is scaled, capped or added behind the head.

    Found by one tiny forward pass per model, in which the head's input is scaled up so that its logits reach about
    1000: a soft cap, invisible on small logits, shows there.
    """
    if model not in _plain_heads:
        _plain_heads[model] = _probe_head(model)
    return _plain_heads[model]


@torch.no_grad()
def _probe_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    if head is None:
        return False
    ids = torch.arange(1, 5, device=next(model.parameters()).device).unsqueeze(0)
    with eval_mode(model):
        hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        scale = 1000.0 / head(hidden).abs().max().clamp(min=1e-6)
        expected = head(hidden * scale)
        hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * scale, *inputs[1:]))
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
    return logits.shape == expected.shape and bool(((logits - expected).abs().max() <= 1.0).item())
