"""From images and videos to a model's tensors, and to the number of placeholder tokens that stand for them.

For models of the Qwen2-VL family (Qwen2-VL, Qwen2.5-VL and those that took over their image processor): an image
becomes a grid of patches, and `merge_size` x `merge_size` patches of it one token.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from verl_mt.chat.video_frames import load_frame_processor
from verl_mt.data.media import Kind, MediaInput, load_image, load_video
from verl_mt.errors import ConfigError, TemplateError

logger = logging.getLogger(__name__)

_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_FPS = 2.0
"""Frames per second of a video that does not say; what Qwen's own tools sample."""
_NUM_KEPT = 64
"""Processed images that are kept: the samples of a prompt and the sanity check meet the same ones again."""


class MediaProcessor:
    """The image processor (and video processor) of a model.

    Args:
        image_processor: of transformers; returns `pixel_values` and `image_grid_thw`.
        video_processor: returns `pixel_values_videos` and `video_grid_thw`; None = videos are refused.
        tokens: the placeholder token of each kind.
    """

    def __init__(
        self,
        image_processor: Any,
        *,
        video_processor: Any = None,
        tokens: Mapping[Kind, str] | None = None,
    ):
        self.image_processor, self.video_processor = image_processor, video_processor
        self.tokens: dict[Kind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>", **(tokens or {})}
        for processor in (image_processor, video_processor):
            if processor is not None and not hasattr(processor, "merge_size"):
                raise ConfigError(
                    f"{type(processor).__name__} has no merge_size: images are offered for models of the Qwen2-VL "
                    "family, whose processors have one"
                )
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[Any, MediaInput]] = OrderedDict()
        self.num_processed = 0
        """Images and videos that went through the processor."""

    @property
    def kinds(self) -> frozenset[str]:
        """Names of the media that are taken, as data columns name them."""
        return frozenset({"images"} if self.video_processor is None else {"images", "videos"})

    def __call__(self, kind: Kind, value: Any) -> MediaInput:
        """The tensors of one image or video, and how many tokens it takes; `start` is 0.

        Raises:
            DataError: it cannot be read.
            TemplateError: a video, and there is no video processor.
        """
        key = (kind, id(value))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][1]
        made = self._image(value) if kind == "image" else self._video(value)
        with self._lock:
            self.num_processed += 1
            # The value is kept beside it: its id is taken as long as it lives.
            self._kept[key] = (value, made)
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return made

    def save_pretrained(self, folder: Any) -> None:
        """Write what `load_media_processor` reads."""
        for processor in (self.image_processor, self.video_processor):
            if hasattr(processor, "save_pretrained"):
                processor.save_pretrained(folder)

    def _image(self, value: Any) -> MediaInput:
        made = self.image_processor(images=[load_image(value)], return_tensors="pt")
        return _input("image", dict(made), self.image_processor.merge_size)

    def _video(self, value: Any) -> MediaInput:
        import torch

        if self.video_processor is None:
            raise TemplateError(
                "this model's processor takes images only, got a video: its folder describes no video processor of the "
                "Qwen2-VL family"
            )
        frames, fps = load_video(value), float(value.get("fps") or _FPS) if isinstance(value, Mapping) else _FPS
        made = self.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        tensors = {name: tensor for name, tensor in dict(made).items() if isinstance(tensor, torch.Tensor)}
        tensors["second_per_grid_ts"] = torch.tensor([self.video_processor.temporal_patch_size / fps])
        return _input("video", tensors, self.video_processor.merge_size)


def _load_image_processor(path: str, keys: dict[str, Any]) -> Any:
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", **keys)
    except ImportError:
        # Up to some version transformers' own finder needs torchvision, even for a class that does not.
        found, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(path, **keys)
        if not str(found.get("image_processor_type")).startswith("Qwen2VLImageProcessor"):
            raise
        return Qwen2VLImageProcessorPil.from_pretrained(path, **keys)


def _input(kind: Kind, tensors: dict[str, Any], merge_size: int) -> MediaInput:
    grid = tensors.get(_GRIDS[kind])
    if grid is None:
        raise TemplateError(
            f"the {kind} processor returned {sorted(tensors)} and no {_GRIDS[kind]}: images are offered for models of "
            "the Qwen2-VL family"
        )
    return MediaInput(kind, 0, int(grid[0].prod()) // merge_size**2, tensors)


def load_media_processor(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> MediaProcessor | None:
    """The processor of a model that sees images; None, with a warning, for a family that is not offered.

    Both processors work on Pillow's images: the same pixels with and without torchvision.

    Raises:
        ConfigError: Pillow is not installed, or the folder holds no image processor.
    """
    from transformers.utils import is_vision_available

    keys: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if not is_vision_available():
        raise ConfigError(f"{path!r} is a vision model, which needs Pillow: pip install verl_mt[multimodal]")
    try:
        images = _load_image_processor(path, keys)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{path!r} is a vision model, but no image processor could be loaded from it: {error}. Its folder needs "
            "preprocessor_config.json (or processor_config.json)"
        ) from error
    if not hasattr(images, "merge_size"):
        logger.warning(
            "%s: images are offered for models of the Qwen2-VL family; %s is used with text only",
            type(images).__name__,
            path,
        )
        return None
    videos = None
    try:
        videos = load_frame_processor(path, keys)
    except ConfigError as error:
        logger.warning("videos are refused: %s", error)
    return MediaProcessor(images, video_processor=videos)
