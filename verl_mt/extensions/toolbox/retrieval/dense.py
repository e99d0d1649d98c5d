"""Dense search: passages and queries as unit vectors of a Hugging Face encoder, compared one by one (exact)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_mt.errors import ConfigError
from verl_mt.extensions.toolbox.retrieval.lexical import Hits, Passage

POOLINGS = ("mean", "cls")


@dataclass(frozen=True)
class EncoderOptions:
    """Which encoder, and how it was trained to be used."""

    model: str
    """Local folder or hub name of an encoder that `AutoModel` loads, e.g. intfloat/e5-base-v2."""
    pooling: str = "mean"
    """`mean` of the last hidden states, or the first one (`cls`)."""
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    max_tokens: int = 256
    batch_size: int = 64
    device: str = "cpu"


class Encoder:
    """Texts -> unit vectors.

    Raises:
        ConfigError: the model cannot be loaded, or an option cannot be.
    """

    def __init__(self, options: EncoderOptions):
        from transformers import AutoModel, AutoTokenizer

        if options.pooling not in POOLINGS:
            raise ConfigError(f"--pooling is {options.pooling!r}. Expected one of {', '.join(POOLINGS)}")
        self.options = options
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(options.model)
            self._model = AutoModel.from_pretrained(options.model).to(options.device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--dense {options.model!r} cannot be loaded as an encoder: {error}") from error

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """[len(texts), D] float32, each row of length 1."""
        # By length, so that hardly anything is padding; put back in order at the end.
        order = sorted(range(len(texts)), key=lambda position: len(texts[position]))
        parts = []
        for start in range(0, len(order), self.options.batch_size):
            chunk = [texts[position] for position in order[start : start + self.options.batch_size]]
            inputs = self._tokenizer(
                chunk, padding=True, truncation=True, max_length=self.options.max_tokens, return_tensors="pt"
            ).to(self.options.device)
            hidden_BTD = self._model(**inputs).last_hidden_state.float()
            if self.options.pooling == "cls":
                pooled_BD = hidden_BTD[:, 0]
            else:
                mask_BT1 = inputs["attention_mask"].unsqueeze(-1).float()
                pooled_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
            parts.append(torch.nn.functional.normalize(pooled_BD, dim=-1).cpu().numpy())
        vectors = np.concatenate(parts)
        ordered = np.empty_like(vectors)
        ordered[order] = vectors
        return ordered


class DenseIndex:
    """Cosine similarity of a query with every passage. Memory: 4 bytes x passages x dimensions.

    Args:
        passages: the corpus; encoded here.
        options: the encoder.
    """

    def __init__(self, passages: Sequence[Passage], options: EncoderOptions):
        self._options, self._encoder = options, Encoder(options)
        self._vectors_ND = self._encoder.encode([options.passage_prefix + p["contents"] for p in passages])

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """The nearest passages; of equal scores, the earlier passage first."""
        if not queries:
            return []
        asked_BD = self._encoder.encode([self._options.query_prefix + query for query in queries])
        scores_BN = asked_BD @ self._vectors_ND.T
        best_BK = np.argsort(-scores_BN, axis=1, kind="stable")[:, :topk]
        return [
            [(int(position), float(scores[position])) for position in best] for scores, best in zip(scores_BN, best_BK)
        ]
