"""Inputs of a vision-language model's forward pass beside ids: the very tensors that the sampler saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl_mt.data.batch import RowMedia
from verl_mt.errors import ConfigError, DataError

_TYPES = {"image": 1, "video": 2}
"""`mm_token_type_ids` of transformers; 0 is text."""


def has_placeholders(model: Any, ids_BT: Tensor) -> bool:
    """Whether there are tokens among the ids that stand for images or videos; False for a text model."""
    return any(bool((ids_BT == token).any()) for token in _tokens(model))


def _tokens(model: Any) -> list[int]:
    found = [getattr(model.config, f"{kind}_token_id", None) for kind in _TYPES]
    return [token for token in found if token is not None]


def media_arguments(model: Any, ids_BT: Tensor, media: Sequence[RowMedia]) -> dict[str, Tensor]:
    """`pixel_values`, `image_grid_thw` and so on of all rows, and `mm_token_type_ids` [B, T], from which the model
    makes its three-dimensional positions (`get_rope_index`).

    Args:
        model: of transformers, with `image_token_id` and `video_token_id` in its config.
        ids_BT: int64, every row from its beginning and whole.
        media: one entry per row.

    Raises:
        ConfigError: the model has no image tokens.
        DataError: the placeholder tokens of a row are not those of its images and videos; says both numbers.
    """
    tokens = _tokens(model)
    if not tokens:
        raise ConfigError(
            f"{type(model).__name__} takes text only, but the batch holds images. Use a vision-language model"
        )
    types_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
    tensors: dict[str, list[Tensor]] = {}
    for row, of_row in enumerate(media):
        for made in of_row.inputs:
            types_BT[row, made.start : made.end] = _TYPES[made.kind]
            for name, tensor in made.tensors.items():
                tensors.setdefault(name, []).append(tensor)
    placeholders_BT = torch.isin(ids_BT, torch.tensor(tokens, device=ids_BT.device))
    for row in ((types_BT > 0) != placeholders_BT).any(1).nonzero().flatten().tolist():
        num_inputs = len(media[row].inputs)
        raise DataError(
            f"row {row}: {int(placeholders_BT[row].sum())} placeholder tokens, but its {num_inputs} images and videos "
            f"have {int((types_BT[row] > 0).sum())}. Ids and media of a record belong together"
        )
    joined = {name: torch.cat(parts).to(ids_BT.device) for name, parts in tensors.items()}
    return {**joined, "mm_token_type_ids": types_BT}
