"""A calculator that makes conversations meet new weights, whatever the machine.

On some machines every conversation is over before the next update, so that none would be by two versions.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from verl_mt.tools.calculator import Calculator
from verl_mt.workers.weight_sync import WeightSync


class LateCalculator(Calculator):
    """Answers the first call under each version of the weights only once the next version has come, until one did.

    The version is read from the file `config.version_file`: the tool may run in another process than the trainer.
    """

    runs_inline = False
    max_wait_s = 20.0
    """The first call may be of the batch that the next update waits for; after such a wait the next one is not."""
    asked = 0
    went_on = False

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """As the calculator; late."""
        if not self.went_on and (version := self.version()) > self.asked:
            self.asked = version
            until = time.monotonic() + self.max_wait_s
            while self.version() == version and time.monotonic() < until:
                await asyncio.sleep(0.05)
            self.went_on = self.version() > version
        return await super().execute(instance_id, parameters, **kwargs)

    def version(self) -> int:
        """The last one that the engine was given."""
        return int(Path(self.config["version_file"]).read_text())


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tools file with the late calculator, whose version file every push of weights from now on keeps.

    Processes that are started later find this module.
    """
    said = folder / "version"
    said.write_text("0")
    push = WeightSync.push

    def noted(self: WeightSync, version: int) -> None:
        push(self, version)
        said.with_suffix(".new").write_text(str(version))
        said.with_suffix(".new").replace(said)

    monkeypatch.setattr(WeightSync, "push", noted)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    shipped = (Path(__file__).parents[3] / "tools_configs" / "calculator.yaml").read_text()
    name = f"{Calculator.__module__}.{Calculator.__name__}"
    assert f"{name}\n    config: {{}}\n" in shipped
    written = folder / "late_calculator.yaml"
    mine = f"{__name__}.{LateCalculator.__name__}\n    config: {{version_file: {said}}}\n"
    written.write_text(shipped.replace(f"{name}\n    config: {{}}\n", mine))
    return written
