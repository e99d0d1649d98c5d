"""Images and videos: as parts of messages, as a model takes them, and on their way through JSON.

A message with media has a list of parts as its content: `{"type": "text", "text": ...}`, `{"type": "image",
"image": ...}` and `{"type": "video", "video": ...}`. An image is Pillow's, a path, a data URI, bytes, or a mapping with
one of these under `image`, `bytes`, `path` or `url`; a video is a list of images (its frames), or a mapping with them
under `video` and with `fps`, frames per second.

A row with a column `images` or `videos` (verl's and ms-swift's names) marks their places in its prompt with `<image>`
and `<video>`, or with a part that has no value (`{"type": "image"}`). Each place takes the next item of its column.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from verl_mt.data.conversation import Message
from verl_mt.errors import DataError

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")

_PREFIX = "data:image/png;base64,"
_PLACE = re.compile("<(image|video)>")


@dataclass(frozen=True, eq=False)
class MediaInput:
    """One image or video of a record, as the model takes it."""

    kind: Kind
    start: int
    """Its first placeholder token in the record."""
    num_tokens: int
    """Placeholder tokens; they are adjacent."""
    tensors: dict[str, Any]
    """Arguments of the model's forward pass: `pixel_values` float32 [patches, values], `image_grid_thw` int64 [1, 3]
    (frames, rows and columns of patches), or `pixel_values_videos`, `video_grid_thw`, `second_per_grid_ts` [1]."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def moved(self, by: int) -> MediaInput:
        """The same, `by` tokens later."""
        return replace(self, start=self.start + by)


def parts_of(messages: Iterable[Message]) -> Iterator[tuple[Kind, Any]]:
    """Kind and value of every image and video in the messages, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in KINDS:
                yield kind, part.get(kind)


def has_media(messages: Iterable[Message]) -> bool:
    """Whether there is an image or a video in the messages."""
    return next(parts_of(messages), None) is not None


def describe(messages: Iterable[Message]) -> str:
    """`2 images and 1 video`; empty where there are none."""
    found = [kind for kind, _ in parts_of(messages)]
    counted = ((found.count(kind), kind) for kind in KINDS)
    return " and ".join(f"{number} {kind}{'s' * (number > 1)}" for number, kind in counted if number)


def place_media(
    messages: Sequence[Message], columns: Mapping[str, Any], where: str, *, folder: str = ""
) -> list[Message]:
    """The messages with images and videos in their places; as they are where the row has none.

    Args:
        messages: the prompt.
        columns: `images` and `videos`, each one item or a list.
        where: file and row, for errors.
        folder: of the data file; a path that leads nowhere is looked for there too.

    Raises:
        DataError: as many places as items are needed; says both numbers.
    """
    items: dict[Kind, list[Any]] = {kind: _listed(columns.get(f"{kind}s")) for kind in KINDS}
    if not any(items.values()):
        return list(messages)
    wanted = {kind: sum(found == kind for m in messages for found in _places(m)) for kind in KINDS}
    for kind in KINDS:
        if wanted[kind] != len(items[kind]):
            raise DataError(
                f"{where}: {wanted[kind]} places <{kind}> in the text, but {kind}s holds {len(items[kind])} items. "
                "Every item needs one place, in order"
            )
    supply = {kind: iter([_portable(item, folder) for item in items[kind]]) for kind in KINDS}
    return [_filled(message, supply) for message in messages]


def has_places(messages: Sequence[Message]) -> bool:
    """Whether there is a place `<image>` or `<video>` in the messages."""
    return any(next(_places(message), None) is not None for message in messages)


def load_image(value: Any) -> Any:
    """An image in any of the forms of this module's first lines, as Pillow's, in RGB.

    Raises:
        DataError: there is no such file, or it is no image that can be read; names it.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("image", "bytes", "path", "url") if value.get(key) is not None), None)
        if inner is None:
            raise DataError(f"an image as a mapping needs image, bytes, path or url, got the keys {sorted(value)}")
        return load_image(inner)
    if is_image(value):
        return value.convert("RGB")
    name = _named(value)
    try:
        source = _opened(value)
        with Image.open(source) as image:
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise DataError(f"image {name} is not in a format that Pillow can read") from error
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError) as error:
        raise DataError(f"image {name} cannot be read: {type(error).__name__}: {error}") from error


def load_video(value: Any) -> list[Any]:
    """The frames of a video, as Pillow's images.

    Raises:
        DataError: not a list of images, or a frame cannot be read.
    """
    frames = value.get("video") if isinstance(value, Mapping) else value
    if not isinstance(frames, Sequence) or isinstance(frames, str | bytes) or not frames:
        raise DataError(
            f"a video must be a list of images (its frames), got {_named(value)}: video files are not decoded here"
        )
    return [load_image(frame) for frame in frames]


def _opened(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return io.BytesIO(value)
    if isinstance(value, str | Path):
        text = str(value)
        if text.startswith("data:"):
            return io.BytesIO(base64.b64decode(text.partition("base64,")[2], validate=True))
        if text.startswith(("http://", "https://")):
            raise ValueError("images are not downloaded. Save it as a file first")
        return Path(text.removeprefix("file://")).expanduser()
    raise ValueError(f"expected an image, a path, a data URI or bytes, got {type(value).__name__}")


def _named(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return f"of {len(value)} bytes"
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 200 else text[:100] + "..."


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


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _places(message: Message) -> Iterator[str]:
    for part in _parts(message):
        if not isinstance(part, Mapping):
            continue
        if part.get("type") in KINDS and part.get(part["type"]) is None:
            yield part["type"]
        elif isinstance(part.get("text"), str):
            yield from _PLACE.findall(part["text"])


def _filled(message: Message, supply: Mapping[Kind, Iterator[Any]]) -> Message:
    if next(_places(message), None) is None:
        return message
    parts: list[Any] = []
    for part in _parts(message):
        if not isinstance(part, Mapping):
            parts.append(part)
        elif part.get("type") in KINDS and part.get(part["type"]) is None:
            parts.append({**part, part["type"]: next(supply[part["type"]])})
        elif isinstance(part.get("text"), str):
            parts += _split(part["text"], supply)
        else:
            parts.append(part)
    return {**message, "content": parts}


def _split(text: str, supply: Mapping[Kind, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Texts and media, alternating: `re.split` puts what a group matched at the odd places."""
    for place, piece in enumerate(_PLACE.split(text)):
        if place % 2:
            kind: Any = piece
            yield {"type": kind, kind: next(supply[kind])}
        elif piece:
            yield {"type": "text", "text": piece}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _portable(value: Any, folder: str) -> Any:
    """Bytes as a data URI, so that messages can be written as JSON; a path beside the data file as its whole path."""
    if isinstance(value, bytes | bytearray):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, Mapping):
        return {key: _portable(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(inner, folder) for inner in value]
    if isinstance(value, str) and "://" not in value and not value.startswith("data:") and folder:
        beside = Path(folder) / value
        return str(beside) if not os.path.exists(value) and beside.exists() else value
    return value
