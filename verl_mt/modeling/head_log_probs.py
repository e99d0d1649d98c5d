"""Log-probs and entropies behind a language-model head, without all of its logits at once.

The logits of N tokens over a vocabulary of V are often the largest tensor of a training step, several times over:
8,192 x 151,936 in float32 is 5 GB, and a plain forward and backward pass holds three of them. Three ways, one result:

- up to `LOGITS_AT_ONCE` of them: plainly, under autograd;
- more: tile by tile with a running maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867); only hidden states
  and one number per token are kept, and the backward pass makes the logits again (as Wijmans et al. 2024, "Cut Your
  Losses", arXiv:2411.09009, do in a fused kernel);
- more, and the loss's derivative is known beforehand (`expected`): hidden states' and weights' gradients are made
  on the way forward, where the logits are at hand (as Hsu et al. 2024, Liger Kernel, arXiv:2410.10989), and the
  backward pass only hands them out, if the derivative is what was expected, bit for bit; else it does as above.

Shape suffixes: `N` tokens, `H` hidden size, `V` vocabulary, `v` a tile of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**24
"""Logits that may be alive at once. More are worked on in tiles."""
TILE = {"cpu": 2**20, "cuda": 2**27}
"""Logits in a tile (benchmarks/log_prob_memory.py): what a processor's cache holds, or what keeps a GPU busy."""
_TILE_TOKENS = 1024
"""Most tokens in a tile: a gradient of the weights is written once for as many."""


def head_log_probs(
    head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    expected: Callable[[], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(head(hidden) / temperature)[target], and the entropy of that distribution in nats.

    Args:
        head: an `nn.Linear`; any other module works in pieces of tokens, made again in the backward pass.
        hidden_NH: what the head sees.
        targets_N: int64.
        temperature: above 0.
        with_entropy: return entropies, too.
        entropy_grad: False: they are numbers without a graph.
        expected: gives what the loss's derivative by each log-prob [N] is going to be, or None if it is not known;
            called only where it saves time. A wrong guess costs time, never the gradient.

    Returns:
        Both [N] in float32 (float64 for float64 hidden states); None for entropies nobody asked for.
    """
    entropy = (with_entropy, with_entropy and entropy_grad)
    if len(targets_N) * _vocabulary(head, hidden_NH) <= LOGITS_AT_ONCE:
        return _plain(head, hidden_NH, targets_N, temperature, entropy)
    if not is_plain_linear(head):
        return _checkpointed(head, hidden_NH, targets_N, temperature, entropy)
    expected_N = expected() if expected is not None and torch.is_grad_enabled() and not entropy[1] else None
    if expected_N is not None:
        expected_N = expected_N.to(wide_dtype(hidden_NH.dtype))
    log_probs_N, entropy_N = _HeadLogProbs.apply(
        hidden_NH, head.weight, head.bias, targets_N, expected_N, (temperature, entropy)
    )
    return log_probs_N, entropy_N if with_entropy else None


def _vocabulary(head: nn.Module, hidden_NH: Tensor) -> int:
    return hidden_NH.shape[1] if isinstance(head, nn.Identity) else len(head.weight)  # type: ignore[arg-type]


def is_plain_linear(head: nn.Module) -> bool:
    """Whether its output is hidden @ weight.T + bias and nothing else: no adapter, no hook."""
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _plain(
    head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature: float, entropy: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None]:
    logits_NV = head(hidden_NH)
    logits_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    all_NV = logits_NV.log_softmax(-1)
    log_probs_N = all_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    wanted, with_grad = entropy
    if not wanted:
        return log_probs_N, None
    source_NV = all_NV if with_grad else all_NV.detach()
    return log_probs_N, -(source_NV.exp() * source_NV).sum(-1)


def _checkpointed(
    head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature: float, entropy: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None]:
    size = max(1, LOGITS_AT_ONCE // _vocabulary(head, hidden_NH))
    call: Any = partial(checkpoint, _plain, use_reentrant=False) if torch.is_grad_enabled() else _plain
    splits = zip(hidden_NH.split(size), targets_N.split(size))
    pieces = [call(head, *split, temperature, entropy) for split in splits]
    log_probs_N = torch.cat([piece[0] for piece in pieces])
    return log_probs_N, torch.cat([piece[1] for piece in pieces]) if entropy[0] else None


class _HeadLogProbs(torch.autograd.Function):
    """Ways two and three of the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        expected_N: Tensor | None,
        options: tuple[float, tuple[bool, bool]],
    ) -> tuple[Tensor, Tensor]:
        temperature, entropy = options
        ctx.temperature, ctx.entropy_grad = temperature, entropy[1]
        head = (hidden_NH, weight_VH, bias_V)
        made: list[Tensor | None] = [None, None, None]
        if expected_N is None:
            lse_N, log_probs_N, entropy_N = _statistics(head, targets_N, temperature, entropy[0])
        else:
            lse_N, log_probs_N, entropy_N, made = _fused(
                head, targets_N, expected_N, (temperature, entropy[0], ctx.needs_input_grad[:3])
            )
        ctx.save_for_backward(*head, targets_N, lse_N, entropy_N, expected_N, *made)
        if not entropy[1]:
            ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, lse_N, entropy_N, expected_N, *made = ctx.saved_tensors
        # Bit for bit: of a derivative that is merely close, the gradients made beforehand would be silently wrong.
        if expected_N is None or not torch.equal(grad_N, expected_N):
            made = _gradients(
                (hidden_NH, weight_VH, bias_V),
                targets_N,
                (lse_N, entropy_N),
                (grad_N, grad_entropy_N if ctx.entropy_grad else None),
                (ctx.temperature, ctx.needs_input_grad[:3]),
            )
        return (*made, None, None, None)


_Head = tuple[Tensor, Tensor, Tensor | None]


def _tile_size(device: torch.device) -> int:
    return TILE["cpu" if device.type == "cpu" else "cuda"]


def _tiles(num_tokens: int, vocabulary: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(tokens, part of the vocabulary) of every tile; the parts of the vocabulary one after the other."""
    tokens = min(num_tokens, _TILE_TOKENS if device.type == "cpu" else 8 * _TILE_TOKENS)
    width = max(1, _tile_size(device) // tokens)
    starts = product(range(0, vocabulary, width), range(0, num_tokens, tokens))
    return ((slice(n, n + tokens), slice(v, v + width)) for v, n in starts)


def _logits(head: _Head, tokens: slice, part: slice, temperature: float) -> Tensor:
    """One tile, wide; rounded first where the head computes in a lower precision, as the sampler's are."""
    hidden_NH, weight_VH, bias_V = head
    tile_Nv = nn.functional.linear(hidden_NH[tokens], weight_VH[part], None if bias_V is None else bias_V[part])
    tile_Nv = tile_Nv.to(wide_dtype(tile_Nv.dtype))
    return tile_Nv if temperature == 1.0 else tile_Nv.div_(temperature)


def _pick(tile_Nv: Tensor, targets_N: Tensor, part: slice, into_N: Tensor) -> None:
    """Write the targets' logits that lie in this part of the vocabulary."""
    place_N = targets_N - part.start
    inside_N = (place_N >= 0) & (place_N < tile_Nv.shape[1])
    found_N = tile_Nv.gather(1, place_N.clamp(0, tile_Nv.shape[1] - 1).unsqueeze(1)).squeeze(1)
    into_N.copy_(torch.where(inside_N, found_N, into_N))


def _statistics(head: _Head, targets_N: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(log of the sum of exponentials, log-prob, entropy), each [N]; the entropy is empty unless asked for.

    With m the largest logit so far, s = sum exp(x - m) and e = sum exp(x - m) (x - m): the entropy is log s - e / s, a
    sum of terms that are not negative, so nothing cancels.
    """
    hidden_NH, weight_VH, _ = head
    num_tokens, device, dtype = len(targets_N), hidden_NH.device, wide_dtype(hidden_NH.dtype)
    largest_N = torch.full((num_tokens,), -torch.inf, dtype=dtype, device=device)
    sum_N, spread_N, target_N = (torch.zeros(num_tokens, dtype=dtype, device=device) for _ in range(3))
    for tokens, part in _tiles(num_tokens, len(weight_VH), device):
        tile_Nv = _logits(head, tokens, part, temperature)
        _pick(tile_Nv, targets_N[tokens], part, target_N[tokens])
        before = largest_N[tokens]
        now = torch.maximum(before, tile_Nv.amax(1))
        tile_Nv.sub_(now.unsqueeze(1))
        shrink, first = (before - now).exp(), before.isinf()
        exp_Nv = tile_Nv.exp() if entropy else tile_Nv.exp_()
        if entropy:
            # Sums so far were to another maximum: exp(x - m) shrinks, and x - m moves by the difference, which is -inf
            # in the first tile, where there is nothing to move.
            earlier = shrink * (spread_N[tokens] + sum_N[tokens] * (before - now).masked_fill(first, 0.0))
            spread_N[tokens] = earlier + tile_Nv.mul_(exp_Nv).sum(1)
        sum_N[tokens] = sum_N[tokens] * shrink + exp_Nv.sum(1)
        largest_N[tokens] = now
    lse_N = largest_N + sum_N.log()
    entropy_N = sum_N.log() - spread_N / sum_N if entropy else lse_N.new_empty(0)
    return lse_N, target_N - lse_N, entropy_N


def _gradients(
    head: _Head,
    targets_N: Tensor,
    statistics: tuple[Tensor, Tensor],
    upstream: tuple[Tensor, Tensor | None],
    options: tuple[float, tuple[bool, bool, bool]],
) -> list[Tensor | None]:
    """Of hidden states, weights and bias. With p = exp(x - lse), x = logits / T, the derivative by the logits is

    d/dz = (grad (onehot - p) - grad_entropy p (log p + entropy)) / T
    """
    hidden_NH, weight_VH, bias_V = head
    lse_N, entropy_N = statistics
    temperature, needed = options
    grad_N, grad_entropy_N = (None if g is None else (g / temperature).unsqueeze(1) for g in upstream)
    dtype = hidden_NH.dtype
    into_hidden = torch.zeros_like(hidden_NH, dtype=wide_dtype(dtype)) if needed[0] else None
    into_weight = torch.empty_like(weight_VH) if needed[1] else None
    into_bias = torch.zeros_like(bias_V, dtype=lse_N.dtype) if needed[2] and bias_V is not None else None
    assert grad_N is not None
    partial: Tensor | None = None
    for tokens, part in _tiles(len(targets_N), len(weight_VH), hidden_NH.device):
        log_p = _logits(head, tokens, part, temperature).sub_(lse_N[tokens].unsqueeze(1))
        if grad_entropy_N is None:
            slope = log_p.exp_().mul_(-grad_N[tokens])
        else:
            factor = (log_p + entropy_N[tokens].unsqueeze(1)).mul_(grad_entropy_N[tokens]).add_(grad_N[tokens])
            slope = log_p.exp_().mul_(factor).neg_()
        _add_onehot(slope, targets_N[tokens], part, grad_N[tokens])
        low = slope.to(dtype)
        if into_hidden is not None:
            _add_product(into_hidden[tokens], low, weight_VH[part])
        if into_bias is not None:
            into_bias[part] += slope.sum(0)
        if into_weight is not None:
            # Over tiles of tokens the sum is kept wide; it is as small as a tile.
            first, last = tokens.start == 0, tokens.stop >= len(targets_N)
            product_vH = low.T @ hidden_NH[tokens]
            if not (first and last):
                partial = product_vH.to(lse_N.dtype) if first or partial is None else partial.add_(product_vH)
                product_vH = partial
            if last:
                into_weight[part] = product_vH
    return [None if g is None else g.to(dtype) for g in (into_hidden, into_weight, into_bias)]


def _add_onehot(slope_Nv: Tensor, targets_N: Tensor, part: slice, grad_N1: Tensor) -> None:
    place_N = targets_N - part.start
    inside_N = (place_N >= 0) & (place_N < slope_Nv.shape[1])
    place_N1 = place_N.clamp(0, slope_Nv.shape[1] - 1).unsqueeze(1)
    slope_Nv.scatter_add_(1, place_N1, torch.where(inside_N.unsqueeze(1), grad_N1, torch.zeros_like(grad_N1)))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right, `into` perhaps of a higher precision than the two."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)


def _fused(
    head: _Head, targets_N: Tensor, expected_N: Tensor, options: tuple[float, bool, tuple[bool, bool, bool]]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """`_statistics`, and `_gradients` for the expected derivative, from logits that are made once.

    Each step has whole rows, so that their sums are known before their gradient is.
    """
    hidden_NH, weight_VH, bias_V = head
    temperature, entropy, needed = options
    dtype, wide = hidden_NH.dtype, wide_dtype(hidden_NH.dtype)
    into_hidden = torch.empty_like(hidden_NH) if needed[0] else None
    into_weight = torch.zeros_like(weight_VH, dtype=wide) if needed[1] else None
    into_bias = torch.zeros_like(bias_V, dtype=wide) if needed[2] and bias_V is not None else None
    lse, log_probs, entropies = [], [], []
    size = max(1, max(LOGITS_AT_ONCE, _tile_size(hidden_NH.device)) // len(weight_VH))
    for start in range(0, len(targets_N), size):
        tokens = slice(start, start + size)
        grad_N1 = (expected_N[tokens] / temperature).unsqueeze(1)
        targets_N1 = targets_N[tokens].unsqueeze(1)
        x_NV = _logits(head, tokens, slice(0, len(weight_VH)), temperature)
        target_N, largest_N = x_NV.gather(1, targets_N1).squeeze(1), x_NV.amax(1)
        x_NV.sub_(largest_N.unsqueeze(1))
        exp_NV = x_NV.exp() if entropy else x_NV.exp_()
        sum_N = exp_NV.sum(1)
        lse.append(largest_N + sum_N.log())
        log_probs.append(target_N - lse[-1])
        if entropy:
            entropies.append(sum_N.log() - x_NV.mul_(exp_NV).sum(1) / sum_N)
        slope = exp_NV.mul_(-grad_N1 / sum_N.unsqueeze(1))
        slope.scatter_add_(1, targets_N1, grad_N1)
        low = slope.to(dtype)
        if into_hidden is not None:
            torch.mm(low, weight_VH, out=into_hidden[tokens])
        if into_weight is not None:
            _add_product(into_weight, low.T, hidden_NH[tokens])
        if into_bias is not None:
            into_bias += slope.sum(0)
    made = [None if g is None else g.to(dtype) for g in (into_hidden, into_weight, into_bias)]
    entropy_N = torch.cat(entropies) if entropy else lse[0].new_empty(0)
    return torch.cat(lse), torch.cat(log_probs), entropy_N, made
