"""A prefix that several rows share goes through the model once.

Rows of one group start with the same prompt, and all rows of a task often with the same system message and tools.
Their hidden states there are equal, so they are computed once and the rows attend to one set of keys and values, with
gradients. Two levels::

    common   [1, P0]   what all rows share, run once
    prompts  [C, Q]    what the rows of one prompt share beyond it, run once per different prompt
    rests    [B, S]    every row from its prompt's end on, rows of like length together

With 128 rows of 16 prompts, 180 tokens each and 40 of them sampled, that is a third of the work or less.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.modeling import packing

_log = logging.getLogger(__name__)

_MIN_SHARED = 16
"""Shorter prefixes are not worth a separate forward pass."""
_MAX_MASK = 2**25
"""Elements of the dense attention mask; beyond that a causal kernel without mask is the better deal."""


@dataclass(frozen=True)
class PrefixPlan:
    """Where the work of each row begins."""

    common: int
    """P0: tokens that all rows share."""
    prompt_rows_C: Tensor
    """A row of each different prompt."""
    prompt_of_B: Tensor
    """The prompt of each row."""
    prompt_end_C: Tensor
    """Tokens of each prompt that are run once for its rows, the common ones included; never below `common`."""
    start_B: Tensor
    """The first position that is a row's own work: the end of its prompt."""
    rest_B: Tensor
    """Tokens of each row's own work: from there up to the token before its last wanted one."""


def plan_prefixes(ids_BT: Tensor, wanted_BT: Tensor) -> PrefixPlan | None:
    """What is worth sharing among these rows; None if nothing is.

    Args:
        ids_BT: right-padded.
        wanted_BT: bool; the log-probs wanted. The position before a row's first one must stay the row's own.
    """
    num_rows = len(ids_BT)
    if num_rows < 2:
        return None
    own_B = wanted_BT.long().argmax(1) - 1
    prompts: dict[bytes, int] = {}
    rows: list[int] = []
    prompt_of = []
    ids, ends = ids_BT.cpu().numpy(), own_B.tolist()
    for row, end in enumerate(ends):
        key = ids[row, :end].tobytes()
        if key not in prompts:
            prompts[key] = len(rows)
            rows.append(row)
        prompt_of.append(prompts[key])
    first = ids_BT[rows, : min(ends)]
    common = int((first == first[:1]).all(0).long().cumprod(0).sum())
    end_C = torch.tensor([ends[row] for row in rows])
    shared_by_prompt = len(rows) * 2 <= num_rows and int((end_C - common).max()) >= _MIN_SHARED // 2
    if not shared_by_prompt:
        end_C = torch.full((len(rows),), common)
    if max(common if len(rows) > 1 or not shared_by_prompt else int(end_C[0]), int(end_C.min())) < _MIN_SHARED:
        return None
    prompt_of_B = torch.tensor(prompt_of)
    start_B = end_C[prompt_of_B]
    last_B = wanted_BT.shape[1] - 1 - wanted_BT.flip(1).long().argmax(1).cpu()
    rest_B = last_B - start_B
    width = int(rest_B.max())
    if num_rows * width * (int(end_C.max()) + width) > _MAX_MASK:
        return None
    device = ids_BT.device
    rows_C = torch.tensor(rows, device=device)
    return PrefixPlan(common, rows_C, prompt_of_B.to(device), end_C.to(device), start_B.to(device), rest_B.to(device))


def run_with_prefixes(base: Any, ids_BT: Tensor, plan: PrefixPlan, row_N: Tensor, position_N: Tensor) -> Tensor:
    """Hidden states [N, H] at these rows and positions; each position is its row's own work."""
    from transformers import DynamicCache

    cache = DynamicCache(config=base.config)
    prompt_of_B = plan.prompt_of_B
    # These passes only fill the cache: nobody wants a hidden state there, since the position before a row's first
    # wanted token is the row's own. Gradients reach the prefix through the cached keys and values.
    if plan.common:
        base(input_ids=ids_BT[:1, : plan.common], past_key_values=cache, use_cache=True)
    cached = int(plan.prompt_end_C.max())
    if cached > plan.common:
        if plan.common:
            cache = _select(cache, torch.zeros_like(plan.prompt_rows_C))
        prompts_CQ = ids_BT[plan.prompt_rows_C, plan.common : cached]
        base(input_ids=prompts_CQ, past_key_values=cache, use_cache=True)
    else:
        prompt_of_B = torch.zeros_like(prompt_of_B)
    pieces, places = [], []
    for rows in _rows_of_like_length(plan.rest_B):
        start, width = plan.start_B[rows], int(plan.rest_B[rows].max())
        positions = start.unsqueeze(1) + torch.arange(width, device=ids_BT.device)
        hidden = base(
            input_ids=ids_BT[rows].gather(1, positions.clamp(max=ids_BT.shape[1] - 1)),
            position_ids=positions,
            attention_mask=_mask(start, cached, width, next(base.parameters()).dtype),
            past_key_values=_select(cache, prompt_of_B[rows]),
            use_cache=True,
        ).last_hidden_state
        # Which of the wanted (row, position) pairs belong to this piece, and where its rows are in it.
        local_B = torch.full_like(plan.start_B, -1)
        local_B[rows] = torch.arange(len(rows), device=rows.device)
        place = (local_B[row_N] >= 0).nonzero().squeeze(1)
        row = local_B[row_N[place]]
        pieces.append(hidden[row, position_N[place] - start[row]])
        places.append(place)
    return torch.cat(pieces)[torch.cat(places).argsort()]


def _rows_of_like_length(rest_B: Tensor) -> list[Tensor]:
    """Rows in pieces whose longest is at most a quarter (or 8 tokens) longer than their shortest: little padding."""
    order = rest_B.argsort(stable=True)
    pieces: list[list[int]] = []
    limit = -1.0
    for row, length in zip(order.tolist(), rest_B[order].tolist()):
        if length > limit:
            pieces.append([])
            limit = max(length * 1.25, length + 8)
        pieces[-1].append(row)
    return [torch.tensor(piece, device=rest_B.device) for piece in pieces]


def _mask(start_B: Tensor, cached: int, width: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, S, cached + S] added to attention scores: a row sees its own prompt in the cache, and itself causally.

    The cache is right-padded where prompts differ in length: its column k is position k of the row's prompt.
    """
    device = start_B.device
    seen_BK = torch.arange(cached, device=device) < start_B.unsqueeze(1)
    causal_SS = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    num_rows = len(start_B)
    allowed = torch.cat(
        [seen_BK[:, None].expand(num_rows, width, cached), causal_SS.expand(num_rows, width, width)], dim=2
    )
    blocked = torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, blocked).unsqueeze(1)


def _select(cache: Any, rows: Tensor) -> Any:
    """A cache whose row i is row rows[i] of `cache`, with gradients; `cache` stays as it is."""
    # The next pass appends to its cache by making new tensors, never in place: shallow copies may share what they hold,
    # and the given cache serves every piece of rows.
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in selected.layers:
        layer.keys = layer.keys.index_select(0, rows)
        layer.values = layer.values.index_select(0, rows)
    return selected


def can_share_prefixes(model: nn.Module, base: Any) -> bool:
    """Whether the model gives the same hidden states this way: full attention in every layer, through a kernel that
    takes a dense mask, no checkpointed activations (transformers keeps no cache then), and, found by one tiny forward
    pass per model, a cache and positions that work as they should.

    Args:
        model: a Hugging Face causal language model.
        base: the part of it that makes hidden states.
    """
    config: Any = model.config
    layer_types = getattr(config, "layer_types", None)
    full = set(layer_types) == {"full_attention"} if layer_types else getattr(config, "sliding_window", None) is None
    checkpointing = model.training and getattr(model, "is_gradient_checkpointing", False)
    if (
        not full
        or checkpointing
        or getattr(config, "_attn_implementation", None) not in ("sdpa", "eager", packing.NAME)
    ):
        return False
    if model not in _probed:
        with eval_mode(model):
            _probed[model] = _probe(base)
    return _probed[model]


_probed: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def forbid_sharing(model: nn.Module) -> None:
    """Let the model take the plain pass always: its layers are sharded, and every rank must call them equally often."""
    _probed[model] = False


@torch.no_grad()
def _probe(base: Any) -> bool:
    """Compare with a plain pass: two prompts of different length behind two common tokens, three rows."""
    device = next(base.parameters()).device
    ids_BT = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5], [1, 2, 4, 6, 3, 0]], device=device)
    ids_BT = ids_BT * 997 % base.get_input_embeddings().num_embeddings
    ends, start = torch.tensor([4, 3], device=device), torch.tensor([4, 4, 3], device=device)
    prompts, prompt_of = torch.tensor([0, 2], device=device), torch.tensor([0, 0, 1], device=device)
    plan = PrefixPlan(2, prompts, prompt_of, ends, start, rest_B=torch.full_like(start, 2))
    plain_BTH = base(input_ids=ids_BT, use_cache=False).last_hidden_state
    row_N = torch.arange(3, device=device).repeat_interleave(2)
    position_N = start[row_N] + torch.arange(2, device=device).repeat(3)
    expected = plain_BTH[row_N, position_N]
    try:
        got = run_with_prefixes(base, ids_BT, plan, row_N, position_N)
    except Exception as error:
        # An architecture with a cache or mask of its own may raise anything here; the plain pass serves it.
        _log.info("%s cannot share prefixes: %r", type(base).__name__, error)
        return False
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every submodule in eval mode inside, as it was before afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
