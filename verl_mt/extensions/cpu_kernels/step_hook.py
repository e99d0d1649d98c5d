"""A deterministic run with compiled kernels keeps its bits: it does not resume with other kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mt.config.extended import section_of
from verl_mt.errors import CheckpointError
from verl_mt.extensions.cpu_kernels.build import build
from verl_mt.extensions.cpu_kernels.config import RolloutKeys
from verl_mt.trainer.step_hook import HookParts, StepHook


class SameKernels(StepHook):
    """Keeps the name of the kernels in the checkpoint.

    Args:
        kernels: `Built.name` of those that this process uses.
    """

    name = "cpu_kernels"

    def __init__(self, kernels: str):
        self._kernels = kernels

    @classmethod
    def of(cls, parts: HookParts) -> StepHook | None:
        """For deterministic runs that ask for compiled kernels; others may compute with whatever is there."""
        asked = section_of(parts.config, RolloutKeys).kernels == "compiled"
        return cls(build().name) if asked and parts.config.trainer.deterministic else None

    def state_dict(self) -> dict[str, Any]:
        return {"kernels": self._kernels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the checkpoint was written with other kernels.
        """
        then = state.get("kernels", self._kernels)
        if then != self._kernels:
            raise CheckpointError(
                f"the checkpoint was computed with the compiled kernels {then[:12]}, and this process has "
                f"{self._kernels[:12]}: source, compiler, processor or torch differ, and so would the bits of this "
                "deterministic run. Resume where it ran, or start a new run with trainer.resume_mode=disable"
            )
