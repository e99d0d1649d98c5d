"""What tools written for verl ask of a SandboxFusion service, under verl's name."""

from verl_mt.extensions.compat.tools.sandbox_fusion_tools import process_single_case as _process_single_case

__all__ = ["_process_single_case"]
