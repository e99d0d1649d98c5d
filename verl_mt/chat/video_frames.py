"""Videos of the Qwen2-VL family, frame by frame with the image processor that works on Pillow's images.

transformers' own video processors need torchvision. What they do to given frames can be said with images: each frame
is resized and normalised as an image, and `temporal_patch_size` frames that follow each other are one step in time; the
last frame fills up the last step. The numbers are those of `Qwen2VLVideoProcessor` up to rounding (1e-6; one step of
1/255 here and there where frames are resized), and the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_mt.errors import ConfigError, DataError

_SETTINGS = (
    "do_resize", "size", "min_pixels", "max_pixels", "resample", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "do_convert_rgb", "patch_size", "temporal_patch_size", "merge_size",
)  # fmt: skip
_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Pixels of a frame, at least and at most, where the model's folder does not say."""
_FILE = "video_preprocessor_config.json"


class FrameProcessor:
    """Frames to patches, as `Qwen2VLVideoProcessor` makes them.

    Args:
        settings: a `video_preprocessor_config.json`; keys that images do not have are left aside.
    """

    def __init__(self, settings: Mapping[str, Any]):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.settings = {"size": _SIZE} | {k: settings[k] for k in _SETTINGS if settings.get(k) is not None}
        self._images = Qwen2VLImageProcessorPil(**self.settings)
        self.merge_size: int = self._images.merge_size
        self.temporal_patch_size: int = self._images.temporal_patch_size

    def __call__(self, videos: Sequence[Sequence[Any]], **_: Any) -> dict[str, torch.Tensor]:
        """The tensors of one video.

        Args:
            videos: one list of frames, images of Pillow's, all of one size.

        Returns:
            `pixel_values_videos` [steps * rows * columns, C * temporal_patch_size * patch_size**2] and
            `video_grid_thw` [1, 3]: steps in time, rows and columns of patches.

        Raises:
            DataError: frames of different sizes.
        """
        (frames,) = videos
        sizes = {frame.size for frame in frames}
        if len(sizes) > 1:
            raise DataError(f"the frames of a video must have one size, got {sorted(sizes)} among {len(frames)} frames")
        made = self._images(images=list(frames), return_tensors="pt")
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        depth = self.temporal_patch_size
        # The image processor repeats an image in time: one of the repetitions is the frame.
        shape = (len(frames), rows * columns, -1, depth, self._images.patch_size**2)
        frames_TNCP = made["pixel_values"].view(shape)[:, :, :, 0]
        missing = -len(frames) % depth
        filled = torch.cat([frames_TNCP, frames_TNCP[-1:].expand(missing, -1, -1, -1)])
        steps = filled.unflatten(0, (-1, depth)).permute(0, 2, 3, 1, 4)
        return {
            "pixel_values_videos": steps.flatten(0, 1).flatten(1),
            "video_grid_thw": torch.tensor([[steps.shape[0], rows, columns]]),
        }

    def save_pretrained(self, folder: Any) -> None:
        """Write what `load_frame_processor` reads, and transformers too."""
        described = {"video_processor_type": "Qwen2VLVideoProcessor", **self.settings}
        (Path(folder) / _FILE).write_text(json.dumps(described, indent=2, default=dict) + "\n")


def load_frame_processor(path: str, keys: Mapping[str, Any]) -> FrameProcessor:
    """The processor that a model's folder describes, where transformers would look for it.

    Raises:
        ConfigError: a video processor of another family, or none.
    """
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        found, _ = BaseVideoProcessor.get_video_processor_dict(path, **keys)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no video processor: {error}") from error
    family = str(found.get("video_processor_type") or "Qwen2VLVideoProcessor")
    if not family.startswith("Qwen2VLVideoProcessor"):
        raise ConfigError(f"{path}: videos are offered for Qwen2VLVideoProcessor, this model has {family}")
    return FrameProcessor(found)
