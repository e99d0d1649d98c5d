"""`image_zoom_in_tool`: the model looks closer at a part of its image."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

from verl_mt.data.media import load_image
from verl_mt.errors import ToolCallError
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

log = logging.getLogger(__name__)

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "image_zoom_in_tool",
        "description": "Zoom in on a part of the image: it is cut out and shown larger.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox_2d": {
                    "type": "array",
                    "items": {"type": "number"},
                    "minItems": 4,
                    "maxItems": 4,
                    "description": "The part as [x1, y1, x2, y2] in pixels from the image's upper left corner",
                },
                "label": {"type": "string", "description": "What is looked for there"},
            },
            "required": ["bbox_2d"],
        },
    },
}


_OF_VERL = {"type", "num_workers", "rate_limit", "timeout", "enable_global_rate_limit"}
"""Settings of verl's tool of this name."""


class ImageZoomInTool(BaseTool):
    """Cuts a part out of the row's image and enlarges it. Named as verl's tool of this kind.

    A row gives `extra_info.tools_kwargs.image_zoom_in_tool.create_kwargs.image`, in any form of `verl_mt.data.media`.

    Args:
        config: `zoom` (float, default 2): how much larger; `min_side` (int, default 28): pixels that a side of what is
            shown has at least; `max_side` (int, default 1024): at most. Of verl's settings, the smaller of
            `num_workers` and `rate_limit` (the latter unless `enable_global_rate_limit` is False) is how many crops
            run at once in this process; `timeout` is said to change nothing, `multi_turn.tool_timeout_s` holds for
            every tool.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        known = {"zoom": 2.0, "min_side": 28, "max_side": 1024}
        unknown = sorted(set(config) - set(known) - _OF_VERL)
        values = known | {key: value for key, value in config.items() if key in known}
        if unknown or not all(isinstance(values[key], int | float) and values[key] > 0 for key in known):
            raise ValueError(f"{self.name}: config takes the positive numbers {', '.join(known)}, got {config}")
        self._zoom, self._min, self._max = (values[key] for key in known)
        at_once = [config.get("num_workers")]
        at_once += [config.get("rate_limit")] if config.get("enable_global_rate_limit", True) else []
        self.max_concurrency = min((n for n in at_once if n is not None), default=None)
        if "timeout" in config:
            log.warning(
                "%s: timeout=%s changes nothing; multi_turn.tool_timeout_s holds for every tool",
                self.name,
                config["timeout"],
            )
        self._instance_dict: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """A box `bbox_2d`, and optionally a `label`."""
        return self.__dict__.get("tool_schema") or OpenAIFunctionToolSchema.model_validate(_SCHEMA)

    async def create(
        self, instance_id: str | None = None, image: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Open the row's image. Runs on the tool's loop. Waits for a thread that reads the image.

        Raises:
            ValueError: the row gives none.
            DataError: it cannot be read.
        """
        if image is None:
            raise ValueError(
                f"{self.name} needs the row's image: set extra_info.tools_kwargs.{self.name}.create_kwargs.image"
            )
        instance_id = instance_id or str(uuid4())
        picture = await asyncio.to_thread(load_image, image)
        self._instance_dict[instance_id] = {"image": picture}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Cut a box out, as far as it is inside the image.

        Raises:
            ToolCallError: nothing of the box is inside.
        """
        image = self._instance_dict[instance_id]["image"]
        left, top, right, bottom = (round(number) for number in parameters["bbox_2d"])
        box = (max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height))
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ToolCallError(
                f"bbox_2d {[left, top, right, bottom]} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2, inside the "
                f"image of {image.width} x {image.height} pixels"
            )
        part = image.crop(box)
        scale = max(self._zoom, self._min / min(part.size))
        scale = min(scale, self._max / max(part.size))
        part = part.resize((max(1, round(part.width * scale)), max(1, round(part.height * scale))))
        label = f" ({parameters['label']})" if parameters.get("label") else ""
        return ToolResponse(image=[part], text=f"Zoomed in on {list(box)}{label}."), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the image."""
        del self._instance_dict[instance_id]
