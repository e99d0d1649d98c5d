"""One forward pass of the actor's own module over a step's tokens, with keys and values in a cache of slots.

All tokens of one engine step travel through the model as ONE packed sequence `[1, N]`: no padding in any linear
layer. Only in the attention, which is plugged into transformers' attention interface, are they taken apart again:
tokens whose row needs just one token (decoding) read the cache's rows in place; longer pieces (prompts, tool answers)
are padded within groups of similar length.

Grouped-query attention folds the query heads that share a key-value head into the query length: keys and values
are never repeated, which is most of the time that decoding a small model would otherwise take.

Shapes: `S` rows (slots) of the cache, `M` positions; `N` tokens of the step, `H` query heads, `K` key-value heads,
`G = H / K`, `D` head dimension, `L` cache positions that are looked at, `Q` longest piece of a group.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from verl_mt.engines.local.sampling import SamplingRows, sample
from verl_mt.engines.local.shared_prefix import SharedKeys, SharedPrefix, attend, find_shared_prefix
from verl_mt.errors import ConfigError, EngineError

NAME = "verl_mt_slots"
_LEN_MULTIPLE = 16
_CALL_BYTES = {"cpu": 512 << 10, "other": 32 << 20}
"""Keys and values that are read in the time that a call of the attention takes by itself: rows of other lengths are
read in a separate call where reading them as long as the others would cost more."""
_RETURNING_BYTES = 128 << 20
"""A released cache that was not larger gets the same size when it is used again."""
_KEPT_BYTES = 128 << 20
"""A released cache on a CPU that was not larger is kept: new memory takes longer than what is computed with it."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_ROW_CHUNK = 16
_LEN_CHUNK = 64


class KVCache:
    """Keys and values of every layer, `[S, K, M, D]` each.

    A layer's tensors are made at its first write, from the shape of what is written, so no model config is read.
    Memory is zeroed when it is made: a masked position has weight 0, and 0 times an uninitialised NaN is NaN.
    """

    def __init__(self, max_rows: int, max_len: int):
        self.max_rows = max_rows
        self.max_len = _round_up(max_len, _LEN_CHUNK)
        self.num_rows = 0
        self.length = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._before = (0, 0)
        self._kept: list[torch.Tensor] = []

    def reserve(self, num_rows: int, length: int) -> bool:
        """Grow to `num_rows` rows of `length` positions; keeps what is stored. True if it grew."""
        rows, positions = self.num_rows, self.length
        if not rows and num_rows <= self._before[0] and length <= self._before[1]:
            num_rows, length = self._before  # growing step by step copies what is stored
        if num_rows > rows:
            rows = min(self.max_rows, _round_up(max(num_rows, rows * 3 // 2), _ROW_CHUNK))
        if length > positions:
            positions = min(self.max_len, _round_up(max(length, positions * 3 // 2), _LEN_CHUNK))
        if (rows, positions) == (self.num_rows, self.length):
            return False
        self.num_rows, self.length = rows, positions
        for store in (self._keys, self._values):
            for layer, old in store.items():
                new = old.new_zeros(rows, old.shape[1], positions, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                store[layer] = new
        return True

    def write(
        self, layer: int, rows: torch.Tensor, positions: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Store keys and values `[N, K, D]` of N tokens at (`rows[N]`, `positions[N]`)."""
        key, value = kv
        if layer not in self._keys:
            self._keys[layer], self._values[layer] = self._zeros(key), self._zeros(value)
        self._keys[layer][rows, :, positions] = key
        self._values[layer][rows, :, positions] = value

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.num_rows, like.shape[1], self.length, like.shape[2])
        if self._kept and (self._kept[-1].shape, self._kept[-1].dtype) == (shape, like.dtype) and like.is_cpu:
            return self._kept.pop().zero_()
        self._kept = []
        return like.new_zeros(shape)

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all rows, `[S, K, M, D]` each."""
        return self._keys[layer], self._values[layer]

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of one row into others."""
        if length == 0 or not targets:
            return
        for tensor in (*self._keys.values(), *self._values.values()):
            prefix = tensor[source, :, :length]
            for first, last in _runs(targets):
                tensor[first:last, :, :length] = prefix

    def release(self) -> None:
        """Give the memory back, but for little of it on a CPU. Everything stored is lost."""
        if self.num_rows:
            self._before = (self.num_rows, self.length) if self.num_bytes <= _RETURNING_BYTES else (0, 0)
            stored = [*self._keys.values(), *self._values.values()]
            self._kept = stored if self.num_bytes <= _KEPT_BYTES and all(t.is_cpu for t in stored) else []
        self.num_rows = self.length = 0
        self._keys.clear()
        self._values.clear()

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))

    @property
    def position_bytes(self) -> int:
        """What one position of one row takes in a layer; 0 before the first write."""
        return self.num_bytes // max(1, len(self._keys) * self.num_rows * self.length)

    @property
    def can_share(self) -> bool:
        """Whether `shared_prefix.attend` takes what is stored here: on a CPU, keys as long as values."""
        pairs = zip(self._keys.values(), self._values.values())
        return bool(self._keys) and all(k.is_cpu and k.shape == v.shape for k, v in pairs)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Consecutive runs [first, last) of a set of rows: slices copy faster than index lists."""
    runs: list[tuple[int, int]] = []
    for row in sorted(rows):
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


@dataclass
class _DecodeGroup:
    """Tokens `begin:end` of the step, one per row, in consecutive rows of the cache, perhaps with holes."""

    begin: int
    end: int
    cached: tuple[slice, slice, slice]
    """Rows, heads and positions of the cache that are looked at; rows may be among them that no token is in."""
    inside: torch.Tensor | None
    """Index of each token's row in those rows; None = no row but theirs."""
    mask: torch.Tensor
    """[rows, 1, 1, L], 0 or -inf."""


@dataclass
class _PieceGroup:
    """Pieces of several tokens, padded to the longest of them."""

    tokens: torch.Tensor
    """[P, Q] index into the step's tokens; filler repeats token 0 of the piece."""
    flat: torch.Tensor
    """Index into the padded [P * Q] of every real token, in the order of `targets`."""
    targets: torch.Tensor
    rows: torch.Tensor
    length: int
    mask: torch.Tensor
    """[P, 1, Q, L], True = visible."""


@dataclass
class StepTokens:
    """The tokens of one step, in the layout that `StepAttention` describes."""

    tokens: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    num_single: int
    wanted: np.ndarray
    """Index of every token after which one is sampled."""


class StepAttention:
    """The layout of one engine step; handed to every attention layer of the model."""

    def __init__(
        self,
        cache: KVCache,
        rows: np.ndarray,
        positions: np.ndarray,
        num_decode: int,
        device: torch.device,
        shared: SharedPrefix | None = None,
    ):
        """
        Args:
            cache: where keys and values live; must hold every (row, position).
            rows, positions: [N] where each token goes. The first `num_decode` are single tokens in ascending rows;
                then come pieces: consecutive tokens of one row at consecutive positions.
            num_decode: how many single tokens there are.
            device: of the model.
            shared: a prefix that the single tokens' rows have in common, as `find_shared_prefix` gives it.
        """
        self.cache = cache
        self.device = device
        self.rows = torch.from_numpy(rows).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.layers_seen = 0
        self._shared = SharedKeys(shared, device) if shared else None
        self._start = shared.length if shared else 0
        self._num_decode = num_decode
        self._decode = self._plan_decode(rows[:num_decode], positions[:num_decode]) if num_decode else []
        self._pieces = self._plan_pieces(rows, positions, num_decode)

    def attend(
        self, layer: int, query: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float | None
    ) -> torch.Tensor:
        """Store the new keys and values `[1, K, N, D]`, then attend with `query` [1, H, N, D] -> [1, N, H, D]."""
        self.layers_seen += 1
        key, value = (x[0].transpose(0, 1) for x in kv)
        self.cache.write(layer, self.rows, self.positions, (key, value))
        num_kv_heads = key.shape[1]
        q = query[0].transpose(0, 1)
        q = q.reshape(q.shape[0], num_kv_heads, -1, q.shape[-1])
        parts = [self._attend_decode(layer, q[: self._num_decode], scale)] if self._decode else []
        if self._pieces:
            out = value.new_empty(len(q) - self._num_decode, *q.shape[1:-1], value.shape[-1])
            for group in self._pieces:
                out[group.targets - self._num_decode] = self._attend_pieces(group, layer, q, scale)
            parts.append(out)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(1, out.shape[0], -1, out.shape[-1])

    def _plan_decode(self, rows: np.ndarray, positions: np.ndarray) -> list[_DecodeGroup]:
        """Groups of rows that are read together, as long as the longest, with what lies between them."""
        call = _CALL_BYTES["cpu" if self.device.type == "cpu" else "other"] // max(1, self.cache.position_bytes)
        first = rows[0]
        longest = np.zeros(1 << int(rows[-1] - first).bit_length(), dtype=np.int64)
        longest[rows - first] = self._rounded(positions) - self._start
        # Of every two neighbours of 1, 2, 4, ... rows: is one call for both cheaper than the best calls for each?
        group, cost, size = np.arange(len(longest)), np.where(longest > 0, longest + call, 0), 1
        while size < len(group):
            size *= 2
            longest, apart = longest.reshape(-1, 2).max(1), cost.reshape(-1, 2).sum(1)
            together = longest * size + call
            joined, cost = together <= apart, np.minimum(together, apart)
            group.reshape(-1, size)[joined] = np.flatnonzero(joined)[:, None] * size
        cuts = np.flatnonzero(np.diff(group[rows - first], prepend=-1)).tolist()
        return [self._decode_group(rows[a:b], positions[a:b], a) for a, b in pairwise([*cuts, len(rows)])]

    def _decode_group(self, rows: np.ndarray, positions: np.ndarray, begin: int) -> _DecodeGroup:
        first, last, start = int(rows[0]), int(rows[-1]) + 1, self._start
        length = self._length(positions)
        # A row between them that is not decoded sees its first position, and its result is dropped: where nothing is
        # visible, softmax is NaN.
        visible = np.full(last - first, start)
        visible[rows - first] = positions
        mask = torch.zeros(last - first, length - start)
        mask.masked_fill_(torch.arange(start, length) > torch.from_numpy(visible)[:, None], float("-inf"))
        holes = last - first != len(rows)
        return _DecodeGroup(
            begin=begin,
            end=begin + len(rows),
            cached=(slice(first, last), slice(None), slice(start, length)),
            inside=torch.from_numpy(rows - first).to(self.device) if holes else None,
            mask=mask.to(self.device)[:, None, None],
        )

    def _plan_pieces(self, rows: np.ndarray, positions: np.ndarray, start: int) -> list[_PieceGroup]:
        if start == len(rows):
            return []
        # Pieces begin where the row changes; groups hold lengths within a factor of two of each other.
        begins = np.flatnonzero(np.diff(rows[start:], prepend=-1)) + start
        sizes = np.diff(begins, append=len(rows))
        buckets = np.ceil(np.log2(sizes)).astype(np.int64)
        return [
            self._piece_group(rows, positions, begins[buckets == bucket], sizes[buckets == bucket])
            for bucket in np.unique(buckets)
        ]

    def _piece_group(
        self, rows: np.ndarray, positions: np.ndarray, begins: np.ndarray, sizes: np.ndarray
    ) -> _PieceGroup:
        offsets = np.arange(sizes.max())
        real = offsets < sizes[:, None]
        tokens = begins[:, None] + np.where(real, offsets, 0)
        length = self._length(positions[tokens])
        visible = np.arange(length) <= positions[tokens][..., None]
        as_tensor = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        return _PieceGroup(
            tokens=as_tensor(tokens),
            flat=as_tensor(np.flatnonzero(real)),
            targets=as_tensor(tokens[real]),
            rows=as_tensor(rows[begins]),
            length=length,
            mask=as_tensor(visible)[:, None],
        )

    def _length(self, positions: np.ndarray) -> int:
        return int(self._rounded(positions.max()))

    def _rounded(self, positions: np.ndarray) -> np.ndarray:
        return np.minimum(-(-(positions + 1) // _LEN_MULTIPLE) * _LEN_MULTIPLE, self.cache.length)

    def _attend_decode(self, layer: int, q: torch.Tensor, scale: float | None) -> torch.Tensor:
        """q [n, K, G, D] -> [n, K, G, D] of all single tokens."""
        if self._shared is None:
            parts = [self._attend_rows(group, layer, q, scale)[0] for group in self._decode]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        rest, log_sums = map(torch.cat, zip(*(self._attend_rows(group, layer, q, scale) for group in self._decode)))
        return self._shared.join(q, self.cache.of_layer(layer), (rest, log_sums), scale)

    def _attend_rows(
        self, group: _DecodeGroup, layer: int, q: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[n, K, G, D] of one group, and where a prefix is shared the log of the sums [n, K, G].

        Each token is its row's only query, so G takes the place of the length.
        """
        key, value = (x[group.cached] for x in self.cache.of_layer(layer))
        q = q[group.begin : group.end]
        if group.inside is not None:
            spread = q.new_zeros(len(key), *q.shape[1:])
            spread[group.inside] = q
            q = spread
        mask = group.mask.to(q.dtype).expand(-1, 1, q.shape[2], -1)
        log_sums = None
        if self._shared is None:
            out = scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
        else:
            out, log_sums = attend(q, key, value, mask, scale)
        if group.inside is None:
            return out, log_sums
        return out[group.inside], None if log_sums is None else log_sums[group.inside]

    def _attend_pieces(self, group: _PieceGroup, layer: int, q: torch.Tensor, scale: float | None) -> torch.Tensor:
        """q [N, K, G, D] -> [number of the group's tokens, K, G, D]."""
        key, value = (x[:, :, : group.length][group.rows] for x in self.cache.of_layer(layer))
        pieces, longest = group.tokens.shape
        _, kv_heads, share, dim = q.shape
        padded = q[group.tokens].permute(0, 2, 3, 1, 4).reshape(pieces, kv_heads, share * longest, dim)
        mask = group.mask[:, :, None].expand(-1, -1, share, -1, -1).reshape(pieces, 1, share * longest, -1)
        out = scaled_dot_product_attention(padded, key, value, attn_mask=mask, scale=scale)
        out = out.view(pieces, kv_heads, share, longest, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(pieces * longest, kv_heads, share, -1)[group.flat]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' decoder layers call while the local engine runs a step.

    Another thread that runs the same module meanwhile has no step of its own and gets plain SDPA attention.

    Raises:
        EngineError: the model's attention needs something that this engine does not compute.
    """
    step: StepAttention | None = kwargs.pop("slot_step", None)
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise EngineError(
                f"{type(module).__name__} uses {name!r} in its attention. The local engine has no such term"
            )
    return step.attend(module.layer_idx, query, (key, value), kwargs.get("scaling")), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS[NAME] = sdpa_mask


class PackedForward:
    """Runs the actor's own module; leaves no trace in it.

    Args:
        module: a Hugging Face causal language model (or a wrapper that passes keyword arguments through).
        max_model_len: the longest sequence it will see, in tokens.

    Raises:
        ConfigError: an architecture that the slot cache cannot hold (sliding windows, encoder-decoder, ...).
    """

    def __init__(self, module: torch.nn.Module, max_model_len: int):
        self.module = module
        self.config = module.config
        check_architecture(module, max_model_len)
        self.num_layers: int = self.config.num_hidden_layers  # type: ignore[union-attr, assignment]
        self.vocab_size: int = self.config.vocab_size  # type: ignore[union-attr, assignment]
        self._trained: list[torch.nn.Module] = []
        # An explicit 4D mask stops transformers from building one: `slot_attention` ignores it.
        self._no_mask = torch.zeros(1, 1, 1, 1)

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return next(self.module.parameters()).device

    def num_threads(self, available: int) -> int:
        """How many threads of torch the engine's thread uses for this model."""
        return available

    def enter_eval(self) -> None:
        """Put every submodule in eval mode, and remember which ones were not. Does nothing when already in it."""
        if not self._trained and self.module.training:
            self._trained = [m for m in self.module.modules() if m.training]
            for submodule in self._trained:
                submodule.training = False

    def leave_eval(self) -> None:
        """Give every submodule the mode it had before `enter_eval`."""
        for submodule in self._trained:
            submodule.training = True
        self._trained = []

    def compute(self, work: StepTokens, cache: KVCache, ids: np.ndarray) -> torch.Tensor:
        """
        Args:
            work: the step's tokens.
            cache: where keys and values live; takes those of the step.
            ids: [S, M] of every row of the cache.

        Returns:
            [W, V] logits after the wanted tokens.
        """
        shared, single = None, slice(work.num_single)
        if cache.can_share:
            shared = find_shared_prefix(ids, work.rows[single], work.positions[single], cache.position_bytes)
        step = StepAttention(cache, work.rows, work.positions, work.num_single, self.device, shared)
        return self(work.tokens, step, work.wanted)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
        """One token per row and its log-prob; see `sampling.sample`."""
        return sample(logits, rows)

    def __call__(self, tokens: np.ndarray, step: StepAttention, wanted: np.ndarray) -> torch.Tensor:
        """
        Args:
            tokens: [N] ids, in the layout that `step` describes.
            step: where each token goes.
            wanted: [W] indices of the tokens whose next-token logits are wanted.

        Returns:
            [W, V] logits, in the dtype that the model has them in.

        Raises:
            EngineError: the model did not call the attention function once per layer.
        """
        # The trainer runs the same module with its own attention, so ours is there for one pass only.
        config: Any = self.config
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            output = self.module(
                input_ids=torch.from_numpy(tokens).to(self.device)[None],
                position_ids=step.positions[None],
                attention_mask=self._no_mask.to(self.device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(wanted).to(self.device),
                slot_step=step,
            )
        finally:
            config._attn_implementation = before
        if step.layers_seen != self.num_layers:
            raise EngineError(
                f"{type(self.module).__name__} called transformers' attention interface {step.layers_seen} times in a "
                f"forward pass, expected {self.num_layers} (its number of layers): the local engine cannot cache it"
            )
        return output.logits[0]


def check_architecture(module: torch.nn.Module, max_model_len: int) -> None:
    """
    Raises:
        ConfigError: says what about the model cannot be served, and what to do.
    """
    config: Any = getattr(module, "config", None)
    name = type(module).__name__
    remedy = "; use another engine (actor_rollout_ref.rollout.name) for this model"
    if config is None or not hasattr(config, "num_hidden_layers"):
        raise ConfigError(f"the local engine needs a Hugging Face causal language model, got {name}")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "vision_config", None) is not None:
        raise ConfigError(f"{name}: the local engine serves decoder-only text models{remedy}")
    if not getattr(_unwrapped(module), "_supports_attention_backend", False):
        raise ConfigError(
            f"{name} does not use transformers' attention interface, which the local engine needs{remedy}"
        )
    if "logits_to_keep" not in inspect.signature(_unwrapped(module).forward).parameters:
        raise ConfigError(f"{name}.forward has no `logits_to_keep`, which the local engine needs{remedy}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds == {"full_attention"} and getattr(config, "layer_types", None):
        window = None
    other = kinds - {"full_attention", "sliding_attention"}
    if other or (window is not None and window < max_model_len):
        what = f"layers of type {', '.join(sorted(other))}" if other else f"a sliding window of {window} tokens"
        raise ConfigError(
            f"{name} has {what}. The local engine has full attention only, for max_model_len={max_model_len}{remedy}"
        )


def _unwrapped(module: torch.nn.Module) -> Any:
    """The Hugging Face model inside a wrapper such as a PEFT model."""
    inner: Any = module
    while not hasattr(type(inner), "_supports_attention_backend"):
        inside = inner.get_base_model() if hasattr(inner, "get_base_model") else getattr(inner, "module", None)
        if inside is None:
            break
        inner = inside
    return inner
