"""SGLang without a GPU and without its CPU kernels: a platform plug-in that routes everything through torch.

Registered under SGLang's own entry-point group `sglang.srt.platforms`: SGLang finds it wherever verl_mt is installed.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """Dotted path of the platform class, or None where SGLang's own platform serves better.

    It steps aside where there is a GPU, and for whoever asks for SGLang's CPU kernels (`SGLANG_USE_CPU_ENGINE=1`).
    """
    import torch

    accelerated = torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()
    if accelerated or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "verl_mt.extensions.cluster.sglang.cpu_platform_class.TorchCpuPlatform"
