"""The kernels as functions of tensors. Shapes as in `kernels.cpp`; every tensor is contiguous and on the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_mt.extensions.cpu_kernels.build import Built

HEAD_DIMS = (16, 32, 64, 128)
"""Head dimensions that are compiled."""
MOST_QUERIES = 16
"""Query heads of one key-value head: each has a lane."""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "attend": [_P] * 4 + [_I] * 4 + [_P] * 4 + [_I, _F, _T],
    "norm": [_P] * 3 + [_I] * 2 + [_F, _T],
    "silu_multiply": [_P] * 2 + [_I] * 2 + [_T],
    "rotate_and_write": [_P] * 8 + [_I] * 5 + [_P] * 2 + [_F, _T],
    "draw": [_P] * 3 + [_I] * 2 + [_P] * 2 + [_T],
}

_FORWARD: list[Any] = [_P, _P, _I, _P, _I, *[_P] * 4, _I, _P, _I, _P, _F, _F, _T]
_TRAINING = {
    "norm_back": [_P] * 5 + [_I] * 2 + [_F, _T],
    "silu_multiply_back": [_P] * 3 + [_I] * 2 + [_T],
    "rotate": [_P] * 7 + [_I] * 4 + [_F, _T],
    "rotate_back": [_P] * 9 + [_I] * 4 + [_F, _T],
    "tree_attend": [_P] * 5 + [_I] * 4 + [_F] + [_P] * 4 + [_I] + [_P] * 2 + [_I] * 2 + [_T],
}


def sgemm() -> int | None:
    """The address of the product of matrices that torch's operators call in float32. None if torch hides it."""
    if not torch.backends.mkl.is_available():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_, _P).value
    except (OSError, AttributeError):
        return None


def _require_compiled(failed: int, dim: int) -> None:
    if failed:
        raise ValueError(f"head dimension {dim} is not compiled. There is {HEAD_DIMS}")


@dataclass
class Places:
    """Where the tokens of a step go, and which are attended together."""

    rows: np.ndarray
    """[N] int64"""
    positions: np.ndarray
    """[N] int64"""
    order: np.ndarray
    """[N] int64"""
    blocks: np.ndarray
    """[N, 4] int64, of which the first `num_blocks` count: begin, end, shared positions, row."""
    num_blocks: int

    @cached_property
    def pointers(self) -> tuple[int, int, int, int]:
        """Of the arrays, in their order."""
        return tuple(x.ctypes.data for x in (self.rows, self.positions, self.order, self.blocks))  # type: ignore[return-value]


class Library:
    """The kernels for tensors of one dtype.

    Args:
        built: the compiled kernels.
        dtype: of weights, activations and cache: float32 or bfloat16.
    """

    def __init__(self, built: Built, dtype: torch.dtype):
        self.dtype = dtype
        self._plan = built.code.verl_mt_plan
        self._plan.argtypes, self._plan.restype = [_P, _I, _P, _P, *[_I] * 4, _P, _P], _I
        self._forward = built.code.verl_mt_forward
        self._forward.argtypes = _FORWARD
        self._call: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            self._call[name] = getattr(built.code, f"verl_mt_{name}_{DTYPES[dtype]}")
            self._call[name].argtypes = arguments

    def plan(
        self, ids: np.ndarray, rows: np.ndarray, positions: np.ndarray, num_single: int, group: int, dim: int
    ) -> Places:
        """Which tokens are attended together.

        Args:
            ids: [S, M] of the cache's rows.
            rows, positions: [N] of the tokens; the first `num_single` decode, then come pieces.
            num_single: how many decode.
            group: G.
            dim: D.
        """
        ids, rows, positions = (np.ascontiguousarray(x, dtype=np.int64) for x in (ids, rows, positions))
        order, blocks = np.empty(len(rows), dtype=np.int64), np.empty((len(rows), 4), dtype=np.int64)
        count = self._plan(
            ids.ctypes.data, ids.shape[1], rows.ctypes.data, positions.ctypes.data, num_single, len(rows), group, dim,
            order.ctypes.data, blocks.ctypes.data,
        )  # fmt: skip
        return Places(rows, positions, order, blocks, count)

    def forward(
        self,
        decoder: np.ndarray,
        x: torch.Tensor,
        kv: list[tuple[torch.Tensor, torch.Tensor]],
        places: Places,
        wanted: np.ndarray,
        logits: torch.Tensor,
        eps: float,
        scale: float,
    ) -> None:
        """A step of all layers in one call, in float32.

        Args:
            decoder: `Decoder` of `kernels.cpp` as int64.
            x: [N, C] embedded tokens, overwritten.
            kv: of each layer, keys and values of the cache, [S, K, M, D] each, written.
            places: where the tokens go.
            wanted: [W] indices of the tokens whose logits are wanted.
            logits: [W, V], written.
            eps: of the norms.
            scale: of the scores.

        Raises:
            ValueError: a head dimension that is not compiled.
        """
        wanted = np.ascontiguousarray(wanted, dtype=np.int64)
        caches = np.array([part.data_ptr() for pair in kv for part in pair], dtype=np.int64)
        failed = self._forward(
            decoder.ctypes.data, caches.ctypes.data, kv[0][0].shape[2], x.data_ptr(), len(x), *places.pointers,
            places.num_blocks, wanted.ctypes.data, len(wanted), logits.data_ptr(), eps, scale, torch.get_num_threads(),
        )  # fmt: skip
        _require_compiled(failed, kv[0][0].shape[3])

    def attend(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        places: Places,
        scale: float,
    ) -> None:
        """Attention of queries [N, H, D] in float32 to keys and values `[S, K, M, D]`, into `out` [N, H * D].

        Raises:
            ValueError: a head dimension that is not compiled.
        """
        keys, values = kv
        _, heads, length, dim = keys.shape
        failed = self._call["attend"](
            q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), heads, q.shape[1] // heads, dim, length,
            *places.pointers, places.num_blocks, scale, torch.get_num_threads(),
        )  # fmt: skip
        _require_compiled(failed, dim)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
        """RMSNorm of `x` [N, C] with `weight` [C], into `out` [N, C]."""
        self._call["norm"](x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps, torch.get_num_threads())

    def silu_multiply(self, both: torch.Tensor, out: torch.Tensor) -> None:
        """silu(gate) * up of `both` [N, 2 * I], gate first, into `out` [N, I]."""
        self._call["silu_multiply"](both.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        angles: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        places: Places,
        eps: float,
    ) -> None:
        """Norm and rotary embedding of queries and keys; keys and values go into the cache.

        Args:
            qkv: [N, (H + 2 K) * D] queries, keys, values of each token.
            norms: weights [D] of the norms of queries and keys; None = there are none.
            angles: cosine and sine, [positions, D] float32 each.
            q: [N, H, D] float32, written.
            kv: keys and values of the cache, [S, K, M, D] each, written.
            places: where the tokens go.
            eps: of the norms.
        """
        q_weight, k_weight = (None if w is None else w.data_ptr() for w in norms)
        _, heads, length, dim = kv[0].shape
        self._call["rotate_and_write"](
            qkv.data_ptr(), q_weight, k_weight, angles[0].data_ptr(), angles[1].data_ptr(), q.data_ptr(),
            kv[0].data_ptr(), kv[1].data_ptr(), qkv.shape[0], q.shape[1], heads, dim, length, *places.pointers[:2], eps,
            torch.get_num_threads(),
        )  # fmt: skip

    def draw(self, logits: torch.Tensor, temperature: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One token per row by inverting the cumulative distribution, without filters; see `engines.local.sampling`.

        Args:
            logits: [n, V]
            temperature: [n] float64; 0 = the most probable token.
            uniform: [n] float64 in [0, 1).

        Returns:
            ids [n] int64 and their log-probs [n] float32.
        """
        ids, log_probs = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.float32)
        temperature, uniform = (np.ascontiguousarray(x, dtype=np.float64) for x in (temperature, uniform))
        logits = logits.contiguous()
        self._call["draw"](
            logits.data_ptr(), temperature.ctypes.data, uniform.ctypes.data, *logits.shape, ids.ctypes.data,
            log_probs.ctypes.data, torch.get_num_threads(),
        )  # fmt: skip
        return ids, log_probs


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass
class Tree:
    """The segments of packed rows, each behind those on its way to the root; see `modeling.packing`."""

    begins: np.ndarray
    """[segments] int64, in the packed sequence."""
    parents: np.ndarray
    """[segments] int64: the segment that each follows, an earlier one; -1 = none."""


class TrainingLibrary(Library):
    """The kernels of a decoder layer over T packed tokens, and their derivatives, in float32.

    Args:
        built: the compiled kernels.
    """

    def __init__(self, built: Built):
        super().__init__(built, torch.float32)
        for name, arguments in _TRAINING.items():
            self._call[name] = getattr(built.code, f"verl_mt_{name}")
            self._call[name].argtypes = arguments

    def norm_back(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, to: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Derivatives of `norm`: by `x` [N, C], added to `to`; by the weight [C], returned."""
        of_weight = torch.empty_like(weight)
        self._call["norm_back"](
            x.data_ptr(), weight.data_ptr(), grad.data_ptr(), to.data_ptr(), of_weight.data_ptr(), *x.shape, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return of_weight

    def silu_multiply_back(self, both: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The derivative of `silu_multiply` by `both` [N, 2 * I], of `grad` [N, I]."""
        out = torch.empty_like(both)
        self._call["silu_multiply_back"](
            both.data_ptr(), grad.data_ptr(), out.data_ptr(), *grad.shape, torch.get_num_threads()
        )
        return out

    def rotate(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        angles: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        eps: float,
    ) -> None:
        """Norm and rotary embedding of the queries and keys in `qkv` [T, (H + 2 K) * D], into `q` [T, H, D] and `k`
        [T, K, D]; `angles` are cosine and sine of each token, [T, D] each."""
        self._call["rotate"](
            qkv.data_ptr(), *map(_address, (*norms, *angles)), q.data_ptr(), k.data_ptr(), *q.shape[:2], *k.shape[1:],
            eps, torch.get_num_threads(),
        )  # fmt: skip

    def rotate_back(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        angles: tuple[torch.Tensor, torch.Tensor],
        grads: tuple[torch.Tensor, torch.Tensor],
        to: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Derivatives of `rotate`, of those by `q` and `k` in `grads`: by queries and keys, written to `to` (as `qkv`);
        by the norms' weights [2, D], returned."""
        of_norms = qkv.new_empty(2, grads[0].shape[2])
        self._call["rotate_back"](
            qkv.data_ptr(), *map(_address, (*norms, *angles, *grads)), to.data_ptr(), of_norms.data_ptr(),
            *grads[0].shape[:2], *grads[1].shape[1:], eps, torch.get_num_threads(),
        )  # fmt: skip
        return of_norms

    def tree_attend(
        self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tree: Tree, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q` [T, H, D] to `k` [T, K, D] and `v` [T, K * D], which may be a part of wider rows.

        Returns:
            [T, H * D], and the log of the sum of each query's exponentials [T, H].
        """
        q = qkv[0]
        out, log_sums = q.new_empty(len(q), q.shape[1] * q.shape[2]), q.new_empty(q.shape[:2])
        self._tree(qkv, (out, log_sums), tree, scale, (None, None, None, None), 0)
        return out, log_sums

    def tree_attend_back(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        made: tuple[torch.Tensor, torch.Tensor],
        tree: Tree,
        scale: float,
        grad: torch.Tensor,
        of_v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Derivatives of `tree_attend`, which made `made`, of `grad` [T, H * D]: by `q` and `k`, returned; by `v`,
        written to `of_v`, which may be a part of wider rows."""
        of_q, of_k = torch.empty_like(qkv[0]), torch.zeros_like(qkv[1])
        of_v.zero_()
        self._tree(qkv, made, tree, scale, (grad, of_q, of_k, of_v), of_v.stride(0))
        return of_q, of_k

    def _tree(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        made: tuple[torch.Tensor, torch.Tensor],
        tree: Tree,
        scale: float,
        grads: tuple[torch.Tensor | None, ...],
        of_v_stride: int,
    ) -> None:
        q, k, v = qkv
        self._call["tree_attend"](
            *map(_address, (*qkv, *made)), q.shape[1], k.shape[1], q.shape[2], v.stride(0), scale,
            *map(_address, grads), of_v_stride, tree.begins.ctypes.data, tree.parents.ctypes.data, len(tree.begins),
            len(q), torch.get_num_threads(),
        )  # fmt: skip
