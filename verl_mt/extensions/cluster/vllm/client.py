"""vLLM's process as seen from the rollout's event loop."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.replicas.clients import ChildClient
from verl_mt.extensions.cluster.replicas.options import KEY
from verl_mt.extensions.cluster.replicas.processes import ChildProcess
from verl_mt.extensions.cluster.replicas.turn import Turn

_PROCESS = str(Path(__file__).with_name("process.py"))
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
_ON_CPU = {
    # A second thread per operator, or threads that are bound to cores, slow down what shares the machine.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Unless the user has set them."""


class VLLMClient(ChildClient):
    """The engine beside the actor.

    Args:
        arguments: `python` = the interpreter of the process, `engine` = vLLM's arguments.
        environment: variables of that process, beside ours.
    """

    kind = "vLLM"

    def __init__(self, arguments: dict[str, Any], environment: Mapping[str, str] | None = None):
        super().__init__(arguments["engine"], environment)
        self._python = arguments["python"]
        self.num_ranks = int(self._arguments["tensor_parallel_size"])

    def _spawn(self, descriptor: int) -> ChildProcess:
        command = [self._python, "-W", "ignore", _PROCESS, str(descriptor)]
        eager = bool(self._arguments.get("enforce_eager"))
        variables = environment_of(self._python, eager=eager) | dict(self._environment or {})
        try:
            return ChildProcess(command, descriptor, variables, self.kind)
        except OSError as error:
            raise ConfigError(
                f"{KEY}.python={self._python}: it does not run on {socket.gethostname()} ({error}). Install vLLM under "
                "the same path on every machine (docs/vllm.md)"
            ) from error


@dataclass
class VLLMTurn(Turn):
    """A request to vLLM, which takes a seed."""

    engine: ClassVar[str] = "vLLM"

    def body(self, rid: str) -> dict[str, Any]:
        body = super().body(rid)
        body["sampling_params"]["seed"] = self.request.sampling.seed
        return body


def environment_of(python: str, *, eager: bool) -> dict[str, str]:
    """All variables of vLLM's process.

    Args:
        python: its interpreter. Another one than this gets none of the variables that are about this one.
        eager: nothing is compiled.
    """
    other = os.path.realpath(python) != os.path.realpath(sys.executable) or sys.prefix not in python
    environment = {name: value for name, value in os.environ.items() if not (other and name in _OF_THIS_PYTHON)}
    environment["PATH"] = os.pathsep.join([os.path.dirname(python), *filter(None, [os.environ.get("PATH")])])
    # The folder of `process.py` is not searched for modules.
    environment["PYTHONSAFEPATH"] = "1"
    if not torch.cuda.is_available():
        # Without it the first request would compile parts of the sampler for half a minute.
        compiles = {"TORCHDYNAMO_DISABLE": "1"} if eager else {}
        environment = _ON_CPU | compiles | environment
    return _DEFAULTS | environment
