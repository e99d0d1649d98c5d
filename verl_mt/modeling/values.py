"""Values of states: the critic's forward pass.

Convention, that of log-probs: position t holds V(tokens < t), the value of the state in which token t was chosen. Shape
suffixes: `B` rows, `T` tokens, `N` wanted tokens, `H` hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.errors import ConfigError
from verl_mt.modeling.log_probs import position_ids
from verl_mt.modeling.media import has_placeholders
from verl_mt.modeling.passes import decoder_of, forbid_whole_rows, hidden_of_padded
from verl_mt.modeling.sequence_parallel import Own


class ValueModel(nn.Module):
    """A decoder with a linear head. The head starts at 0: every state is worth 0 until the critic knows better.

    Args:
        model: a Hugging Face causal language model, whose own head goes.

    Raises:
        ConfigError: a model that sees images.
    """

    def __init__(self, model: Any):
        super().__init__()
        if getattr(model.config, "vision_config", None) is not None:
            raise ConfigError(
                f"critic: {type(model).__name__} sees images, and the critic reads text only: give critic.model.path a "
                "text model with the same tokenizer, or use an estimator without critic (algorithm.adv_estimator=grpo)"
            )
        self.trunk = decoder_of(model)
        self.head = nn.Linear(model.config.hidden_size, 1, dtype=model.dtype, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def get_decoder(self) -> Any:
        """The part that makes hidden states; named as in transformers."""
        return self.trunk

    @property
    def config(self) -> Any:
        """The decoder's."""
        return self.trunk.config

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Of the decoder, as in transformers."""
        return bool(self.trunk.is_gradient_checkpointing)

    @property
    def _no_split_modules(self) -> Any:
        return self.trunk._no_split_modules

    def forward(self, input_ids_BT: Tensor, attention_mask_BT: Tensor, *, wanted_BT: Tensor) -> Tensor:
        """float32 [B, T]; 0 where nothing is wanted. See `hidden_before`."""
        hidden, own = hidden_before(self, input_ids_BT, attention_mask_BT, wanted_BT=wanted_BT)
        values = self.head(hidden).squeeze(1)
        if own is None:
            forbid_whole_rows(self)
        return scatter(values if own is None else own.everyone(values), wanted_BT)


class ValueHead(nn.Module):
    """Values from the policy's own hidden states: one layer of units and a linear one that starts at 0.

    Args:
        hidden_size: of the policy.
        seed: of the first layer's weights.
    """

    def __init__(self, hidden_size: int, *, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.LayerNorm(hidden_size), nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, 1)
            )
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N] from [N, H]; in float32, whatever the policy computes in."""
        return self.layers(hidden_NH.float()).squeeze(1)


def hidden_before(
    model: Any, input_ids_BT: Tensor, attention_mask_BT: Tensor, *, wanted_BT: Tensor
) -> tuple[Tensor, Own | None]:
    """[N, H]: the last hidden states at the tokens before the wanted ones, rows first; works under autograd. Rows go
    through in the model's way (`passes.py`), as in the pass for log-probs; where a sequence is spread over ranks,
    [n, H] are those of this rank, and the second result says which.

    Args:
        model: a Hugging Face causal language model, or a `ValueModel`.
        input_ids_BT: int64.
        attention_mask_BT: bool or 0/1. Right-padded rows take the fast path, others work too.
        wanted_BT: bool; at least one, and none in column 0.

    Raises:
        ValueError: position 0 is wanted: no state comes before it.
        ConfigError: a row with images or videos.
    """
    if wanted_BT[:, :1].any():
        raise ValueError("position 0 has no value: no token comes before it")
    used_B = wanted_BT.any(1)
    ids, mask, wanted = (x[used_B] for x in (input_ids_BT, attention_mask_BT, wanted_BT))
    row_N, position_N = wanted.nonzero(as_tuple=True)
    if has_placeholders(model, ids):
        raise ConfigError(
            "critic.share_trunk: a row holds images or videos, and the critic reads text only: its values would be of "
            "another conversation. Use an estimator without critic (algorithm.adv_estimator=grpo)"
        )
    index, width, base = (row_N, position_N - 1), int(position_N.max()), decoder_of(model)
    ids, mask = ids[:, :width], mask[:, :width]
    if not bool((mask[:, 1:].long() > mask[:, :-1].long()).any()) and bool(mask[:, 0].all()):
        return hidden_of_padded(base, ids, wanted, index, model=model)
    output = base(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False)
    return output.last_hidden_state[index], None


def scatter(values_N: Tensor, wanted_BT: Tensor) -> Tensor:
    """float32 [B, T] (float64 for a float64 model), 0 where nothing is wanted."""
    values_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    return values_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT.bool(), values_N)
