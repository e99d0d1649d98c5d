"""The calculator behind a slow service: how long a call takes is Pareto-distributed, so that a few take very long."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from verl_mt.tools.calculator import Calculator


class SlowCalculator(Calculator):
    """`config`: `scale_s`, the shortest time of a call; `shape` of the distribution (smaller = a heavier tail), and
    `longest_s`."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """The calculator's answer, later."""
        config = self.config
        seconds = config["scale_s"] * random.paretovariate(config["shape"])
        await asyncio.sleep(min(seconds, config["longest_s"]))
        return await super().execute(instance_id, parameters, **kwargs)
