"""Bytes of one weight update of a policy with low-rank adapters: the adapters alone, and merged weights.

    python benchmarks/adapter_bytes.py [--out FILE]

No weight is loaded, and nothing is downloaded: shapes decide. The table of docs/scaling.md is this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from provenance import add_out, write_rows
from transformers import AutoModelForCausalLM, Qwen2Config

from verl_mt.config.actor import ModelConfig
from verl_mt.extensions.cluster.replicas.adapters import AdapterShape, adapter_shape
from verl_mt.modeling.load import meta_causal_lm
from verl_mt.modeling.weights import named_weights

RANKS = (8, 32)
# Those of Qwen2.5-3B.
LARGE = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def models() -> Iterator[tuple[str, Any, torch.dtype]]:
    """Name, module on the meta device, and the engine's dtype."""
    yield "the shipped model", meta_causal_lm("verl_mt://tiny"), torch.float32
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(Qwen2Config(**LARGE), dtype=torch.bfloat16)
    large.tie_weights()
    yield "3.1 billion parameters (the shapes of Qwen2.5-3B)", large, torch.bfloat16


def updates() -> Iterator[dict[str, Any]]:
    """Bytes of an update, by model and rank."""
    for name, module, dtype in models():
        merged = sum(tensor.numel() for _, tensor in named_weights(module)) * dtype.itemsize
        for rank in RANKS:
            shape = adapter_shape(ModelConfig(lora_rank=rank), module)
            assert isinstance(shape, AdapterShape)
            dtype_name = str(dtype).removeprefix("torch.")
            yield {
                "model": name, "dtype": dtype_name, "rank": rank, "adapters": shape.num_bytes(dtype), "merged": merged,
            }  # fmt: skip


def row(update: dict[str, Any]) -> str:
    """Of the table in docs/scaling.md."""
    times = update["merged"] / update["adapters"]
    return (
        f"| {update['model']} | `{update['dtype']}` | {update['rank']} | {update['adapters']:,} | "
        f"{update['merged']:,} | {times:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    args = parser.parse_args()
    found = list(updates())
    write_rows(args.out, found)
    print("| model | engine's dtype | `lora_rank` | adapters | merged weights | times |\n|---|---|---|---|---|---|")
    print("\n".join(map(row, found)))
    times = [update["merged"] / update["adapters"] for update in found]
    print(f"merged weights / adapters: {min(times):.1f} to {max(times):.1f} times the bytes of an update")


if __name__ == "__main__":
    main()
