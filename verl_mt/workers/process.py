"""What torch is told once in a process that trains or samples."""

from __future__ import annotations

import random

import numpy as np
import torch


def prepare_torch(*, threads: int, seed: int, deterministic: bool) -> None:
    """Threads, seeds of every generator, determinism, and the attention kernels to choose from."""
    torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Where torch prefers cuDNN's attention (Hopper), it builds a plan for each shape that it has not seen, and packed
    # rows have new ones in every step: `benchmarks/new_shapes.py`.
    torch.backends.cuda.enable_cudnn_sdp(False)
