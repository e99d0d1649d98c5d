"""A step of the local engine with the compiled kernels, over the actor's own weights.

The products stay torch's: in float32 one call computes all layers with the product that torch calls, else torch's
operators are called layer by layer. Queries, keys and values of a layer, and gate and up, are written beside each other
into one buffer, so no weight is copied and none can be out of date. Shapes as in `kernels.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_mt.engines.local.model_runner import KVCache, PackedForward, StepTokens
from verl_mt.engines.local.sampling import SamplingRows
from verl_mt.extensions.cpu_kernels.bindings import DTYPES, HEAD_DIMS, MOST_QUERIES, Library, Places, sgemm
from verl_mt.extensions.cpu_kernels.build import Built, KernelsError

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of transformers whose layers are as `_Layer` computes them."""
SMALL_WEIGHTS = 1 << 18
"""Numbers in the largest weight of a model whose steps run on one thread: their products take less time than a second
thread takes to start. The other cores are free for tools, tokenization and the sanity check."""
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the length of the sequence."""


def why_not(module: Any) -> str | None:
    """Why a model cannot be computed with the kernels; None if it can."""
    name, config = type(module).__name__, getattr(module, "config", None)
    if name not in FAMILIES or not type(module).__module__.startswith("transformers."):
        return f"{name} is none of {', '.join(FAMILIES)}"
    parameters = list(module.parameters())
    kinds = sorted({f"{p.dtype} on {p.device.type}".removeprefix("torch.") for p in parameters})
    if kinds not in ([f"{known} on cpu"] for known in DTYPES.values()):
        return f"the weights are {', '.join(kinds)}, not all float32 or all bfloat16 on the cpu"
    if any(not p.is_contiguous() for p in parameters):
        return "some weights are not contiguous"
    assert config is not None
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    rotation = rope.get("rope_type", "default")
    if rotation not in _FIXED_ROTATIONS:
        return f"its rotary embedding is {rotation}, which depends on the length"
    if (turned := rope.get("partial_rotary_factor") or 1) != 1:
        return f"its rotary embedding turns {turned:g} of each head, not all of it"
    attention = module.model.layers[0].self_attn
    dim, group = attention.head_dim, config.num_attention_heads // config.num_key_value_heads
    if dim not in HEAD_DIMS or group > MOST_QUERIES:
        return f"head_dim {dim} is none of {HEAD_DIMS}, or {group} query heads share a key-value head"
    return _changed(module)


def _changed(module: torch.nn.Module) -> str | None:
    """What is not as transformers made it."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return f"{name or 'the model'} has a hook, or another forward"
        is_linear = name.rpartition(".")[2].endswith("_proj") or name == "lm_head"
        if is_linear and type(part) is not torch.nn.Linear:
            return f"{name} is a {type(part).__name__}, not a Linear"
        if is_linear and part.bias is not None and name.rpartition(".")[2] not in ("q_proj", "k_proj", "v_proj"):
            return f"{name} has a bias"
    return None


_Product = tuple[torch.Tensor, torch.Tensor | None]
"""A transposed weight [in, out] and its bias [out]."""


@dataclass
class _Layer:
    """The weights of a decoder layer: views of the actor's own."""

    source: torch.nn.Module
    input_norm: torch.Tensor = field(init=False)
    qkv: list[_Product] = field(init=False)
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None] = field(init=False)
    output: torch.Tensor = field(init=False)
    mlp_norm: torch.Tensor = field(init=False)
    gate_up: list[_Product] = field(init=False)
    down: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        layer: Any = self.source
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.qkv = [_product(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.head_norms = (q_norm and q_norm.weight, k_norm and k_norm.weight)
        self.output, self.down = attention.o_proj.weight.t(), mlp.down_proj.weight.t()
        self.gate_up = [_product(part) for part in (mlp.gate_proj, mlp.up_proj)]

    def pointers(self) -> list[int]:
        """`DecoderLayer` of `kernels.cpp`."""
        (q, q_bias), (k, k_bias), (v, v_bias) = self.qkv
        parts = (
            self.input_norm, q, k, v, q_bias, k_bias, v_bias, *self.head_norms, self.output, self.mlp_norm,
            *(weight for weight, _ in self.gate_up), self.down,
        )  # fmt: skip
        return [0 if part is None else part.data_ptr() for part in parts]


def _product(part: Any) -> _Product:
    return part.weight.t(), part.bias


def _beside(x: torch.Tensor, products: list[_Product]) -> torch.Tensor:
    """The products of `x` [N, C], beside each other [N, sum of the widths]."""
    out, start = x.new_empty(x.shape[0], sum(weight.shape[1] for weight, _ in products)), 0
    for weight, bias in products:
        part = out.narrow(1, start, weight.shape[1])
        start += weight.shape[1]
        if bias is None:
            torch.mm(x, weight, out=part)
        else:
            torch.addmm(bias, x, weight, out=part)
    return out


class CompiledForward(PackedForward):
    """`PackedForward` with the compiled kernels.

    Args:
        module: a model of one of the `FAMILIES`, float32 or bfloat16, on the CPU.
        max_model_len: the longest sequence it will see, in tokens.
        built: the kernels.

    Raises:
        KernelsError: the kernels cannot compute the model.
    """

    def __init__(self, module: torch.nn.Module, max_model_len: int, built: Built):
        super().__init__(module, max_model_len)
        if (reason := why_not(module)) is not None:
            raise KernelsError(reason)
        self._built, self._max_model_len = built, max_model_len
        # Where each parameter hangs, not the parameter: another one may take its place.
        self._places = [(part._parameters, name) for part in module.modules() for name in part._parameters]
        self._pointers: list[int] = []
        self._use(module)

    def _where(self) -> list[int]:
        """Addresses of all parameters. A bias may be None."""
        found = [parameters[name] for parameters, name in self._places]
        return [0 if p is None else p.data_ptr() for p in found]

    def _use(self, module: Any) -> None:
        """Look the weights up, where they are now."""
        config = module.config
        self._pointers = self._where()
        attention = module.model.layers[0].self_attn
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._scale, self._eps = attention.head_dim, float(attention.scaling), float(config.rms_norm_eps)
        self._embedding, self._final_norm = module.model.embed_tokens.weight, module.model.norm.weight
        self._library = Library(self._built, self._embedding.dtype)
        self._head = module.lm_head.weight.t()
        self._is_small = max(weight.numel() for weight in module.parameters()) <= SMALL_WEIGHTS
        self._layers = [_Layer(layer) for layer in module.model.layers]
        with torch.inference_mode():
            positions = torch.arange(self._max_model_len)[None]
            angles = module.model.rotary_emb(self._embedding[:1, None], positions)
            self._angles = tuple(x[0].float().contiguous() for x in angles)
        self._decoder = self._table()

    def _table(self) -> np.ndarray | None:
        """`Decoder` of `kernels.cpp`, for a step in one call. None if torch's products are called from here."""
        product = sgemm() if self._embedding.dtype == torch.float32 else None
        if product is None:
            return None
        (vocabulary, hidden), inside = self._head.t().shape, self._layers[0].down.shape[0]
        sizes = [hidden, self._heads, self._kv_heads, self._dim, inside, vocabulary, len(self._layers)]
        weights = [part.data_ptr() for part in (*self._angles, self._final_norm, self._head)]
        layers = [pointer for layer in self._layers for pointer in layer.pointers()]
        return np.array([product, *sizes, *weights, *layers], dtype=np.int64)

    def num_threads(self, available: int) -> int:
        return 1 if self._is_small else available

    def compute(self, work: StepTokens, cache: KVCache, ids: np.ndarray) -> torch.Tensor:
        """As the base class computes it.

        Raises:
            KernelsError: the module was changed since the engine was made, and the kernels cannot compute it any more.
        """
        if self._where() != self._pointers:
            if (reason := why_not(self.module)) is not None:
                raise KernelsError(f"the model was changed while it was sampled from: {reason}")
            self._use(self.module)
        group = self._heads // self._kv_heads
        places = self._library.plan(ids, work.rows, work.positions, work.num_single, group, self._dim)
        x = torch.nn.functional.embedding(torch.from_numpy(work.tokens), self._embedding)
        kv = [self._stored(number, x, cache) for number in range(len(self._layers))]
        if self._decoder is None or torch.get_float32_matmul_precision() != "highest":
            return self._by_layers(x, kv, places, torch.from_numpy(work.wanted))
        logits = x.new_empty(len(work.wanted), self._head.shape[1])
        self._library.forward(self._decoder, x, kv, places, work.wanted, logits, self._eps, self._scale)
        return logits

    def _stored(self, number: int, x: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer in the cache, made if they are not there."""
        try:
            kv = cache.of_layer(number)
        except KeyError:
            nowhere, nothing = torch.empty(0, dtype=torch.int64), x.new_empty(0, self._kv_heads, self._dim)
            cache.write(number, nowhere, nowhere, (nothing, nothing))
            kv = cache.of_layer(number)
        if kv[0].dtype != x.dtype:
            raise KernelsError(f"the cache holds {kv[0].dtype} and the model computes in {x.dtype}: it was changed")
        return kv

    def _by_layers(
        self, x: torch.Tensor, kv: list[tuple[torch.Tensor, torch.Tensor]], places: Places, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Logits [W, V] of embedded tokens `x` [N, C], with torch's products and one call for each part of a layer."""
        library = self._library
        # The default dtype is the process's: user code may change it meanwhile, and the kernels write float32.
        q = torch.empty(x.shape[0], self._heads, self._dim, dtype=torch.float32)
        for number, layer in enumerate(self._layers):
            normed = torch.empty_like(x)
            library.norm(x, layer.input_norm, normed, self._eps)
            qkv = _beside(normed, layer.qkv)
            library.rotate_and_write(qkv, layer.head_norms, self._angles, q, kv[number], places, self._eps)
            attended = qkv.new_empty(x.shape[0], self._heads * self._dim)
            library.attend(q, kv[number], attended, places, self._scale)
            if number == len(self._layers) - 1 and len(wanted) < len(x):
                # Behind the last attention only the tokens count whose logits are wanted.
                x, attended = x[wanted], attended[wanted]
            x.addmm_(attended, layer.output)
            normed = torch.empty_like(x)
            library.norm(x, layer.mlp_norm, normed, self._eps)
            both = _beside(normed, layer.gate_up)
            inside = both.new_empty(both.shape[0], both.shape[1] // 2)
            library.silu_multiply(both, inside)
            x.addmm_(inside, layer.down)
        normed = torch.empty_like(x)
        library.norm(x, self._final_norm, normed, self._eps)
        return normed @ self._head

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
        """As the base class samples; rows with top-k, top-p or min-p go there."""
        if ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any():
            return super().sample(logits, rows)
        return self._library.draw(logits, rows.temperature, rows.uniform)
