"""A decoder over packed rows with the compiled kernels, forward and backward: the update of the policy on a CPU.

A layer is one autograd function. Its products are torch's and write beside each other into one buffer, as in
`forward.py`. Behind the last attention only the tokens are computed whose hidden states are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_mt.extensions.cpu_kernels.bindings import TrainingLibrary, Tree
from verl_mt.extensions.cpu_kernels.build import Built
from verl_mt.extensions.cpu_kernels.forward import why_not
from verl_mt.modeling.packing import PackedRows, Segment

LONGEST = 2048
"""Tokens of a row. Of longer ones torch's attention, which works in tiles, takes less time."""


def compiled_pass(built: Built) -> Callable[[Any, Any, PackedRows], Tensor | None]:
    """What computes packed rows with these kernels: `Passes.packed_pass`."""
    library = TrainingLibrary(built)

    def run(model: Any, base: Any, rows: PackedRows) -> Tensor | None:
        """Hidden states [N, C] at `rows.wanted_N`; None where the kernels cannot compute them."""
        if rows.sequence is not None or base.is_gradient_checkpointing or why_not(model) is not None:
            return None
        if base.embed_tokens.weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return None
        if max(segment.end for segment in rows.segments) > LONGEST:
            return None
        return _hidden_states(library, base, rows)

    return run


def tree_of(segments: list[Segment]) -> Tree:
    """Where segments begin, and which they follow."""
    last: dict[int, int] = {}
    parents = []
    for number, segment in enumerate(segments):
        parents.append(last.get(segment.rows[0], -1))
        last.update(dict.fromkeys(segment.rows, number))
    sizes = [segment.end - segment.start for segment in segments]
    return Tree(np.cumsum([0, *sizes[:-1]]), np.array(parents, dtype=np.int64))


def _hidden_states(library: TrainingLibrary, base: Any, rows: PackedRows) -> Tensor:
    x = base.embed_tokens(rows.input_ids_1T)[0]
    angles = tuple(part[0].contiguous() for part in base.rotary_emb(x[None], rows.position_ids_1T))
    tree, layers = tree_of(rows.segments), list(base.layers)
    # Samples of one prompt want the same token's hidden state.
    wanted, place_N = torch.unique(rows.wanted_N, return_inverse=True)
    for layer in layers:
        keep = wanted if layer is layers[-1] and len(wanted) < len(x) else None
        x = _Layer.apply((library, tree, angles, layer, keep), x, *_weights(layer))
    return _Norm.apply(library, x, base.norm.weight, base.norm.variance_epsilon).index_select(
        0, place_N if len(x) == len(wanted) else rows.wanted_N
    )


def _weights(layer: Any) -> list[Tensor | None]:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return [
        layer.input_layernorm.weight, layer.post_attention_layernorm.weight, *(n and n.weight for n in norms),
        *(p.weight for p in projections), *(p.bias for p in projections), attention.o_proj.weight,
        mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
    ]  # fmt: skip


def _beside(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """The products of `x` [T, C] with weights [width, C], beside each other."""
    out, start = x.new_empty(len(x), sum(map(len, weights))), 0
    for weight, bias in zip(weights, biases):
        part = out.narrow(1, start, len(weight))
        start += len(weight)
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias, x, weight.t(), out=part)
    return out


def _beside_back(x: Tensor, weights: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Derivatives of `_beside`: by `x`, by the weights, and the parts of `grad` that belong to each weight."""
    parts = list(grad.split([len(weight) for weight in weights], 1))
    of_x = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:]):
        of_x.addmm_(part, weight)
    return of_x, [part.t() @ x for part in parts], parts


class _Norm(torch.autograd.Function):
    """RMSNorm of [T, C]."""

    @staticmethod
    def forward(ctx: Any, library: TrainingLibrary, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.kernels, ctx.eps = library, eps
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x)
        library.norm(x, weight, out, eps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = torch.zeros_like(x)
        of_weight = ctx.kernels.norm_back(x, weight, grad.contiguous(), of_x, ctx.eps)
        return None, of_x, of_weight, None


class _Layer(torch.autograd.Function):
    """A decoder layer: [T, C] to [T, C], or to the rows `keep` of it."""

    @staticmethod
    def forward(ctx: Any, options: Any, x: Tensor, *weights: Tensor | None) -> Tensor:
        library, tree, angles, layer, keep = options
        norm1, norm2, q_norm, k_norm, wq, wk, wv, bq, bk, bv, wo, gate, up, down = weights
        attention, eps = layer.self_attn, layer.input_layernorm.variance_epsilon
        dim, scale = attention.head_dim, float(attention.scaling)
        heads, kv_heads = len(wq) // dim, len(wk) // dim  # type: ignore[arg-type]
        normed = torch.empty_like(x)
        library.norm(x, norm1, normed, eps)
        qkv = _beside(normed, [wq, wk, wv], [bq, bk, bv])  # type: ignore[list-item]
        q, k = x.new_empty(len(x), heads, dim), x.new_empty(len(x), kv_heads, dim)
        library.rotate(qkv, (q_norm, k_norm), angles, q, k, eps)
        out, log_sums = library.tree_attend((q, k, qkv[:, (heads + kv_heads) * dim :]), tree, scale)
        attended, middle = (out, x) if keep is None else (out[keep], x[keep])
        middle = torch.addmm(middle, attended, wo.t())  # type: ignore[union-attr]
        normed2 = torch.empty_like(middle)
        library.norm(middle, norm2, normed2, eps)
        both = _beside(normed2, [gate, up], [None, None])  # type: ignore[list-item]
        inside = both.new_empty(len(both), both.shape[1] // 2)
        library.silu_multiply(both, inside)
        ctx.options, ctx.scale, ctx.eps = (library, tree, angles, keep), scale, eps
        ctx.save_for_backward(x, *weights, normed, qkv, q, k, out, log_sums, attended, middle, normed2, both, inside)
        return torch.addmm(middle, inside, down.t())  # type: ignore[union-attr]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        library, tree, angles, keep = ctx.options
        x, norm1, norm2, q_norm, k_norm, wq, wk, wv, bq, bk, bv, wo, gate, up, down, *made = ctx.saved_tensors
        normed, qkv, q, k, out, log_sums, attended, middle, normed2, both, inside = made
        of_both = library.silu_multiply_back(both, grad @ down)
        of_down = grad.t() @ inside
        of_normed2, of_gate_up, _ = _beside_back(normed2, [gate, up], of_both)
        of_middle = grad.clone()
        of_norm2 = library.norm_back(middle, norm2, of_normed2, of_middle, ctx.eps)
        of_attended, of_wo = of_middle @ wo, of_middle.t() @ attended
        if keep is not None:
            of_attended = torch.zeros_like(out).index_copy_(0, keep, of_attended)
            of_middle = torch.zeros_like(x).index_copy_(0, keep, of_middle)
        of_qkv, start = torch.empty_like(qkv), (q.shape[1] + k.shape[1]) * q.shape[2]
        grads = library.tree_attend_back(
            (q, k, qkv[:, start:]), (out, log_sums), tree, ctx.scale, of_attended, of_qkv[:, start:]
        )
        of_norms = library.rotate_back(qkv, (q_norm, k_norm), angles, grads, of_qkv, ctx.eps)
        of_normed, of_weights, parts = _beside_back(normed, [wq, wk, wv], of_qkv)
        of_norm1 = library.norm_back(x, norm1, of_normed, of_middle, ctx.eps)
        of_biases = [None if bias is None else part.sum(0) for bias, part in zip((bq, bk, bv), parts)]
        of_heads = [None if norm is None else each for norm, each in zip((q_norm, k_norm), of_norms)]
        return (
            None, of_middle, of_norm1, of_norm2, *of_heads, *of_weights, *of_biases, of_wo, *of_gate_up, of_down
        )  # fmt: skip
