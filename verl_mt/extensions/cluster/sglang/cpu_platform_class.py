"""The class that `cpu_platform.activate` names; apart from it, because importing it needs SGLang."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as an out-of-tree platform: for such a one SGLang takes neither vLLM's nor `sgl_kernel`'s operators."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Attention by torch's scaled_dot_product_attention."""
        return "torch_native"
