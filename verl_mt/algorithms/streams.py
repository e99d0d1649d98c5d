"""The trained tokens of each trajectory as one stream in time, whatever number of rows holds them.

Shape suffixes: `B` rows (records), `T` tokens of a row, `N` trajectories, `M` tokens of the longest stream, `K` tokens
of all streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Streams:
    """The tokens of a mask, ordered by trajectory, record and position.

    A trajectory whose history was rewritten has several rows; what its second row says comes behind what its first
    row said, and the value of a state at the end of the first row is the expectation of what the second one earns.
    """

    order_B: Tensor
    """Rows by trajectory and record."""
    mask_BT: Tensor
    """In that order of rows."""
    stream_B: Tensor
    """The trajectory of each row, 0..N-1, in that order."""
    stream_K: Tensor
    place_K: Tensor
    """Place of each token in its stream."""
    length_N: Tensor

    @classmethod
    def of(cls, mask_BT: Tensor, trajectory_index_B: Tensor, record_index_B: Tensor) -> Streams:
        """Args:
        mask_BT: tokens that are a step in time.
        trajectory_index_B: int64, any numbers; streams come in their order.
        record_index_B: int64, the order of a trajectory's rows in time.
        """
        values, index_B = torch.unique(trajectory_index_B, return_inverse=True)
        width = int(record_index_B.max()) + 1 if len(record_index_B) else 1
        order_B = (index_B * width + record_index_B).argsort()
        mask = mask_BT.bool()[order_B]
        stream_B = index_B[order_B]
        stream_K = stream_B[mask.nonzero()[:, 0]]
        length_N = torch.bincount(stream_K, minlength=len(values))
        first_N = length_N.cumsum(0) - length_N
        place_K = torch.arange(len(stream_K), device=stream_K.device) - first_N[stream_K]
        return cls(order_B, mask, stream_B, stream_K, place_K, length_N)

    @property
    def mask_NM(self) -> Tensor:
        """Which places of `gather`'s result are tokens."""
        longest = int(self.length_N.max()) if len(self.length_N) else 0
        return torch.arange(longest, device=self.length_N.device) < self.length_N.unsqueeze(1)

    def gather(self, values_BT: Tensor) -> Tensor:
        """[N, M]: the values of the tokens, 0 behind a stream's end."""
        return self._spread(values_BT[self.order_B][self.mask_BT])

    def gather_rewards(self, rewards_BT: Tensor) -> Tensor:
        """[N, M]: the rewards of the tokens. One between two tokens of a stream belongs to the earlier one, whatever
        row it stands in; one before the first token has no token that earned it, and is left out."""
        rewards = rewards_BT[self.order_B].reshape(-1)
        latest = self.mask_BT.reshape(-1).long().cumsum(0) - 1
        stream = self.stream_B.repeat_interleave(self.mask_BT.shape[1])
        earned = ((rewards != 0) & (latest >= 0)).nonzero().squeeze(1)
        earned = earned[self.stream_K[latest[earned]] == stream[earned]]
        sums_K = rewards.new_zeros(len(self.stream_K)).index_add(0, latest[earned], rewards[earned])
        return self._spread(sums_K)

    def scatter(self, values_NM: Tensor) -> Tensor:
        """[B, T]: the way back; 0 outside of the mask."""
        result = values_NM.new_zeros(self.mask_BT.shape)
        result[self.mask_BT] = values_NM[self.stream_K, self.place_K]
        back = torch.empty_like(result)
        back[self.order_B] = result
        return back

    def _spread(self, values_K: Tensor) -> Tensor:
        result = values_K.new_zeros(self.mask_NM.shape)
        result[self.stream_K, self.place_K] = values_K
        return result
