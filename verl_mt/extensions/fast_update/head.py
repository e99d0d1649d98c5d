"""Log-probs behind a language-model head whose logits stay in their own precision.

`modeling/head_log_probs.py` copies each tile of logits to float32 and passes over it several times. Here two small
functions, compiled with torch.compile, pass over a tile once each: one sums exponentials in float32 without keeping
them, one writes the derivative over the logits. Tiles hold whole rows of the vocabulary, so that products are large.
The weights' gradient is added up in float32 inside the product, where the device can.

- If the derivative of the loss is known beforehand, logits are computed once: three products in all.
- Else the backward pass computes them again: four products.

Why not a library: the kernels of Liger and Cut Cross-Entropy are Triton's, which runs on a GPU only. The chunked
`torch.nn.functional.linear_cross_entropy` (torch 2.13) computes gradients in its forward pass, for a mean or a sum of
token losses. It has no temperature, no entropy and no weight for a token, which a policy loss needs.

Shape suffixes: `N` tokens, `n` tokens of a tile, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_mt.modeling.head_log_probs import head_log_probs, is_plain_linear, wide_dtype

TILE = {"cpu": 2**24, "cuda": 2**30}
"""Logits in a tile: on CUDA 2 GB in bfloat16, about 7,000 tokens of a vocabulary of 151,936."""
_Head = tuple[Tensor, Tensor, Tensor | None]
_Compute = Callable[..., Any]


def fused_head_log_probs(
    head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    expected: Callable[[], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `modeling.head_log_probs.head_log_probs`, which does the work if the head is no plain `nn.Linear`.

    Args:
        head: gives logits [N, V].
        hidden_NH: what the head sees.
        targets_N: int64.
        temperature: above 0.
        with_entropy: return entropies, too.
        entropy_grad: False: they are numbers without a graph.
        expected: gives the loss's derivative by each log-prob [N], or None if it is not known. A wrong guess costs
            time, never the gradient.

    Returns:
        Both [N] in float32 (float64 for float64 hidden states); None for entropies that nobody asked for.
    """
    if not is_plain_linear(head):
        return head_log_probs(
            head, hidden_NH, targets_N, temperature=temperature, with_entropy=with_entropy, entropy_grad=entropy_grad,
            expected=expected,
        )  # fmt: skip
    slopes_entropy = with_entropy and entropy_grad
    expected_N = expected() if expected is not None and torch.is_grad_enabled() and not slopes_entropy else None
    if expected_N is not None:
        expected_N = expected_N.to(wide_dtype(hidden_NH.dtype))
    log_probs_N, entropy_N = _FusedHead.apply(
        hidden_NH, head.weight, head.bias, targets_N, expected_N, (temperature, with_entropy, slopes_entropy)
    )
    return log_probs_N, entropy_N if with_entropy else None


def without_metric(
    log_probs: Callable[..., tuple[Tensor, Tensor | None]],
    *args: Any,
    with_entropy: bool = False,
    entropy_grad: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`log_probs(...)`; None for entropies without a gradient's use, those of a metric."""
    return log_probs(*args, with_entropy=with_entropy and entropy_grad, entropy_grad=entropy_grad, **kwargs)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        expected_N: Tensor | None,
        options: tuple[float, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, with_entropy, ctx.entropy_grad = options
        head, dtype = (hidden_NH, weight_VH, bias_V), wide_dtype(hidden_NH.dtype)
        lse_N, target_N = (torch.empty(targets_N.shape, dtype=dtype, device=hidden_NH.device) for _ in range(2))
        entropy_N = torch.empty_like(lse_N) if with_entropy else lse_N.new_empty(0)
        into = None if expected_N is None else _Gradients(head, ctx.needs_input_grad)
        for tokens in _tiles(hidden_NH, weight_VH):
            logits_nV, targets_n = _logits(head, tokens), targets_N[tokens]
            found = _compiled(_sums)(logits_nV, targets_n, ctx.temperature, with_entropy)
            lse_N[tokens], target_N[tokens] = found[:2]
            if with_entropy:
                entropy_N[tokens] = found[2]
            if into is not None and expected_N is not None:
                slope = _compiled(_write_slope)
                slope(logits_nV, targets_n, lse_N[tokens], expected_N[tokens], None, None, ctx.temperature)
                into.add(tokens, logits_nV)
        made = (None, None, None) if into is None else into.made()
        ctx.save_for_backward(*head, targets_N, lse_N, entropy_N, expected_N, *made)
        if not ctx.entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return target_N - lse_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        *head, targets_N, lse_N, entropy_N, expected_N, into_hidden, into_weight, into_bias = ctx.saved_tensors
        made: tuple[Tensor | None, ...] = (into_hidden, into_weight, into_bias)
        # Bit for bit: gradients made for a derivative that is merely close would be silently wrong.
        if expected_N is None or not torch.equal(grad_N, expected_N):
            into = _Gradients((head[0], head[1], head[2]), ctx.needs_input_grad)
            for tokens in _tiles(head[0], head[1]):
                logits_nV = _logits((head[0], head[1], head[2]), tokens)
                entropies = (entropy_N[tokens], grad_entropy_N[tokens]) if ctx.entropy_grad else (None, None)
                slope = _compiled(_write_slope)
                slope(logits_nV, targets_N[tokens], lse_N[tokens], grad_N[tokens], *entropies, ctx.temperature)
                into.add(tokens, logits_nV)
            made = into.made()
        return (*made, None, None, None)


class _Gradients:
    """Of hidden states, weights and bias, from the derivatives by the logits of tile after tile.

    Args:
        head: hidden states, weights, bias.
        needed: which of the three are wanted; None stands for the others.
    """

    def __init__(self, head: _Head, needed: tuple[bool, ...]):
        self._hidden_NH, self._weight_VH, bias_V = head
        self._dtype, wide = self._hidden_NH.dtype, wide_dtype(self._hidden_NH.dtype)
        self._into_hidden = torch.empty_like(self._hidden_NH) if needed[0] else None
        self._into_weight = torch.zeros_like(self._weight_VH, dtype=wide) if needed[1] else None
        self._into_bias = torch.zeros_like(bias_V, dtype=wide) if needed[2] and bias_V is not None else None

    def add(self, tokens: slice, slope_nV: Tensor) -> None:
        if self._into_hidden is not None:
            torch.mm(slope_nV, self._weight_VH, out=self._into_hidden[tokens])
        if self._into_weight is not None:
            _add_product(self._into_weight, slope_nV.T, self._hidden_NH[tokens])
        if self._into_bias is not None:
            self._into_bias += slope_nV.sum(0, dtype=self._into_bias.dtype)

    def made(self) -> tuple[Tensor | None, ...]:
        into = (self._into_hidden, self._into_weight, self._into_bias)
        return tuple(None if g is None else g.to(self._dtype) for g in into)


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right, in one product where the device adds up in the precision of `into`."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    elif into.device.type == "cuda":
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        into += left @ right


def _tiles(hidden_NH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    size = max(1, TILE["cpu" if hidden_NH.device.type == "cpu" else "cuda"] // len(weight_VH))
    return (slice(start, start + size) for start in range(0, len(hidden_NH), size))


def _logits(head: _Head, tokens: slice) -> Tensor:
    return nn.functional.linear(head[0][tokens], head[1], head[2])


@functools.cache
def _compiled(function: _Compute) -> _Compute:
    return torch.compile(function, dynamic=True)


def _sums(logits_nV: Tensor, targets_n: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
    """(log of the sum of exponentials, target's logit and, if asked for, entropy), each [n] and wide."""
    x_nV = logits_nV.to(wide_dtype(logits_nV.dtype)) / temperature
    lse_n = x_nV.logsumexp(1)
    target_n = x_nV.gather(1, targets_n.unsqueeze(1)).squeeze(1)
    if not entropy:
        return lse_n, target_n
    below_nV = lse_n.unsqueeze(1) - x_nV  # no term of the sum is negative, so nothing cancels
    return lse_n, target_n, ((-below_nV).exp() * below_nV).sum(1)


def _write_slope(
    logits_nV: Tensor,
    targets_n: Tensor,
    lse_n: Tensor,
    grad_n: Tensor,
    entropy_n: Tensor | None,
    grad_entropy_n: Tensor | None,
    temperature: float,
) -> None:
    """Write the derivative of the loss by the logits over them. With p = exp(x - lse), x = logits / T, it is

    (grad (onehot - p) - grad_entropy p (log p + entropy)) / T
    """
    log_p_nV = logits_nV.to(lse_n.dtype) / temperature - lse_n.unsqueeze(1)
    grad_n1 = grad_n.unsqueeze(1)
    factor = grad_n1
    if entropy_n is not None and grad_entropy_n is not None:
        factor = grad_n1 + (log_p_nV + entropy_n.unsqueeze(1)) * grad_entropy_n.unsqueeze(1)
    is_target_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == targets_n.unsqueeze(1)
    slope_nV = (torch.where(is_target_nV, grad_n1, 0.0) - log_p_nV.exp() * factor) / temperature
    logits_nV.copy_(slope_nV)
