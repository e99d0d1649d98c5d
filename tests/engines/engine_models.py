"""Tiny random models and short-hands for engine tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from verl_mt.data.requests import GenerationRequest, SamplingParams
from verl_mt.engines.local import LocalEngine, LocalOptions

VOCAB = 300
_numbers = itertools.count()


def make_model(architecture: str = "Qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random decoder of that family; weights large enough that its distributions are far from flat."""
    import transformers

    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture == "Qwen3":
        options["head_dim"] = 16
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**{**options, **changes})
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


def request(ids: list[int], session: str | None = None, *, deadline_s: float | None = None, **sampling: Any) -> Any:
    """A request with an id of its own; greedy, 8 tokens unless told."""
    number = next(_numbers)
    sampling = {"max_new_tokens": 8, "temperature": 0.0, **sampling}
    return GenerationRequest(
        input_ids=list(ids),
        sampling=SamplingParams(**sampling),
        request_id=f"request-{number}",
        session_id=session or f"session-{number}",
        deadline_s=deadline_s,
    )


PROMPT = [5, 17, 200, 31, 8, 99, 140, 77]


def plain_log_probs(model: Any, prompt: list[int], turn: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / T) of the turn's ids by one ordinary forward pass."""
    ids = torch.tensor([prompt + turn])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0].float() / (temperature or 1.0), dim=-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, torch.tensor(turn)[:, None])[:, 0]


def assert_exact(model: Any, prompt: list[int], output: Any, temperature: float = 1.0) -> None:
    """The engine's log-probs are those of a plain forward pass."""
    expected = plain_log_probs(model, prompt, output.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=1e-5)


@asynccontextmanager
async def engine_of(
    model: Any, end_token_ids: Any = (), decode: Any = None, **options: Any
) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(
        model, end_token_ids=end_token_ids, decode=decode, max_model_len=256, options=LocalOptions(**options)
    )
    try:
        yield engine
    finally:
        await engine.close()


def random_ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)
