"""One packed sequence over several processes (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Each of S ranks holds T / S consecutive tokens of a sequence of T and all that a decoder makes of them. Where tokens
look at each other, in attention, the ranks exchange: from all heads of some tokens to all tokens of some heads, and
back (`to_heads`, `to_tokens`). Attention itself is what it is on one rank, over fewer heads.

Heads that do not divide are dealt out unevenly: of 14 heads four ranks get 4, 4, 3 and 3. So no other scheme is
needed for them; a rank with fewer waits for the others. A rank gets the key and value heads that its own heads read.

Losses want log-probs of whole rows. So each rank scores the tokens that it has, and all of them get all scores
(`Own.everyone`); each works out the same loss, and its backward pass goes through its own tokens only. The gradient is
the sum over the ranks.

Shape suffixes: `T` tokens of the sequence, `t` those of a rank, `H` heads, `h` those of a rank, `D` head dimension, `N`
wanted tokens, `n` those of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mt.errors import ConfigError


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each sequence, as one of them sees them."""

    group: Any
    """A process group of torch.distributed."""
    rank: int
    size: int

    def width(self, num_tokens: int) -> int:
        """Tokens of every rank; the last ranks' are filled up."""
        return -(-num_tokens // self.size)

    def chunk(self, tokens_T: Tensor) -> Tensor:
        """[t], this rank's of the tokens; filled up with 0."""
        width = self.width(len(tokens_T))
        filled = torch.nn.functional.pad(tokens_T, (0, width * self.size - len(tokens_T)))
        return filled[self.rank * width : (self.rank + 1) * width]

    def own(self, place_N: Tensor, num_tokens: int) -> Own:
        """Which of some places in the sequence are on this rank."""
        start = self.rank * self.width(num_tokens)
        inside_N = (place_N >= start) & (place_N < start + self.width(num_tokens))
        index_n = inside_N.nonzero().squeeze(1)
        return Own(self, index_n, place_N[index_n] - start, len(place_N))

    def heads(self, num_heads: int) -> list[range]:
        """The heads of each rank.

        Raises:
            ConfigError: more ranks than heads.
        """
        if num_heads < self.size:
            raise ConfigError(
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={self.size}: the model's attention has "
                f"{num_heads} heads, and every rank needs one. Set at most that many"
            )
        each, more = divmod(num_heads, self.size)
        ends = [each * (k + 1) + min(k + 1, more) for k in range(self.size)]
        return [range(start, end) for start, end in zip([0, *ends], ends)]

    def to_heads(self, x_1HtD: Tensor, heads: list[list[int]], num_tokens: int) -> Tensor:
        """All tokens of some heads [1, h, T, D], from all heads of some tokens.

        Args:
            x_1HtD: of this rank's tokens.
            heads: those that each rank gets; more than one may get a head.
            num_tokens: T, without what fills up.
        """
        _, _, width, dim = x_1HtD.shape
        sent = x_1HtD[0].index_select(0, torch.tensor([*chain(*heads)], device=x_1HtD.device))
        sizes = [len(own) * width * dim for own in heads]
        got = _exchange(sent.flatten(), self, sizes, [sizes[self.rank]] * self.size)
        by_rank = got.view(self.size, len(heads[self.rank]), width, dim)
        return by_rank.transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]

    def to_tokens(self, x_1ThD: Tensor, heads: list[range]) -> Tensor:
        """All heads of this rank's tokens [1, t, H, D], from all tokens of its heads. The way back of `to_heads`, for
        heads that each are on one rank."""
        _, num_tokens, _, dim = x_1ThD.shape
        width = self.width(num_tokens)
        filled = torch.nn.functional.pad(x_1ThD[0], (0, 0, 0, 0, 0, width * self.size - num_tokens))
        sizes = [width * len(own) * dim for own in heads]
        got = _exchange(filled.flatten(), self, [sizes[self.rank]] * self.size, sizes)
        return torch.cat([part.view(width, -1, dim) for part in got.split(sizes)], dim=1)[None]


@dataclass(frozen=True)
class Own:
    """Those of N wanted tokens that are on this rank; one that has none takes part with a token that nobody wants."""

    sequence: SequenceGroup
    index_n: Tensor
    """Among the N."""
    place_n: Tensor
    """In this rank's chunk."""
    total: int

    @property
    def places(self) -> Tensor:
        """In this rank's chunk, of what goes through the head: at least one."""
        return self.place_n if len(self.place_n) else self.place_n.new_zeros(1)

    def of(self, values_N: Tensor) -> Tensor:
        """This rank's of what is known of all; as many as `places`."""
        return values_N[self.index_n] if len(self.index_n) else values_N.new_zeros(1, *values_N.shape[1:])

    def everyone(self, values_n: Tensor) -> Tensor:
        """[N, ...] of what each rank has for its own. Its gradient is that of the own ones: every rank is going to work
        out the same loss of all."""
        return _Everyone.apply(values_n[: len(self.index_n)], self)


class _Everyone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_n: Tensor, own: Own) -> Tensor:
        """Runs in every rank of the sequence group. Waits for all of them."""
        ctx.own = own
        values_N = values_n.new_zeros(own.total, *values_n.shape[1:])
        values_N[own.index_n] = values_n
        dist.all_reduce(values_N, group=own.sequence.group)
        return values_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return grad_N[ctx.own.index_n], None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, sequence: SequenceGroup, sizes: tuple[list[int], list[int]]) -> Tensor:
        """Runs in every rank of the sequence group. Waits for all of them."""
        ctx.sequence, ctx.sizes = sequence, sizes
        got = sent.new_empty(sum(sizes[1]))
        dist.all_to_all_single(got, sent.contiguous(), sizes[1], sizes[0], group=sequence.group)
        return got

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad, ctx.sequence, ctx.sizes[::-1]), None, None


def _exchange(sent: Tensor, sequence: SequenceGroup, to: list[int], by: list[int]) -> Tensor:
    """Numbers in a row: `to` = how many go to each rank, `by` = how many come from each."""
    return _Exchange.apply(sent, sequence, (to, by))
