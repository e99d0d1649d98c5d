"""Images on their way through JSON: an object of Pillow's becomes a data URI, and an image again."""

from __future__ import annotations

import base64
import io
from typing import Any

_PREFIX = "data:image/png;base64,"


def is_image(value: Any) -> bool:
    """Whether it is an image of Pillow's; without importing Pillow, which text needs not."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "PIL.Image.Image" for kind in type(value).__mro__)


def to_wire(value: Any) -> Any:
    """`{"image": "data:image/png;base64,..."}` of an image; anything else as it is."""
    if not is_image(value):
        return value
    buffer = io.BytesIO()
    value.save(buffer, format="PNG")
    return {"image": _PREFIX + base64.b64encode(buffer.getvalue()).decode()}


def from_wire(value: Any) -> Any:
    """The image that `to_wire` wrote; anything else as it is."""
    if not (isinstance(value, dict) and set(value) == {"image"} and str(value["image"]).startswith(_PREFIX)):
        return value
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(value["image"].removeprefix(_PREFIX))))
    image.load()
    return image
