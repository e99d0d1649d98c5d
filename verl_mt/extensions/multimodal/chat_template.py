"""Models that see images and videos: their chat, and what makes tensors of what they see.

For models of the Qwen2-VL family (Qwen2-VL, Qwen2.5-VL and those that took over their image processor): an image
becomes a grid of patches, and `merge_size` x `merge_size` patches of it one token.

- `ProcessorChat` is the twin of `ChatTemplate`. The template writes one placeholder token per image; here it becomes as
  many as the image has tokens, and the image's tensors are told apart for the record. Everything else (deltas,
  neutralised text, stop tokens) is `ChatTemplate`'s. Only what arrives is processed: a delta never touches an image
  that an earlier turn has shown.
- `FrameProcessor` takes videos frame by frame with the image processor that works on Pillow's images: transformers' own
  video processors need torchvision. What they do to a list of frames can be said with images: each frame is resized and
  normalised as an image, and `temporal_patch_size` frames that follow each other are one step in time; the last frame
  fills up the last step. The numbers are those of `Qwen2VLVideoProcessor` up to rounding (1e-6; one step of 1/255 here
  and there where frames are resized), and the same on every machine.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_mt.chat.encode import Hidden, compile_literals
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.conversation import Message
from verl_mt.data.media import KINDS, Kind, MediaInput, load_image, load_video, parts_of
from verl_mt.errors import ConfigError, DataError, LedgerError, TemplateError

logger = logging.getLogger(__name__)

_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_FPS = 2.0
"""Frames per second of a video that does not say; what Qwen's own tools sample."""
_NUM_KEPT = 64
"""Processed images that are kept: the samples of a prompt and the sanity check meet the same ones again."""
_SETTINGS = (
    "do_resize", "size", "min_pixels", "max_pixels", "resample", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "do_convert_rgb", "patch_size", "temporal_patch_size", "merge_size",
)  # fmt: skip
_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Pixels of a frame, at least and at most, where the model's folder does not say."""
_FILE = "video_preprocessor_config.json"


class ProcessorChat(ChatTemplate):
    """A tokenizer with a chat template, and the processor of what its model sees.

    Args:
        tokenizer: a Hugging Face tokenizer with the placeholder tokens in its vocabulary.
        media: makes tensors of images and videos.
        keys: as `ChatTemplate`'s.

    Raises:
        TemplateError: a placeholder token is not in the vocabulary.
    """

    def __init__(self, tokenizer: Any, *, media: MediaProcessor, **keys: Any):
        super().__init__(tokenizer, **keys)
        self.media = self._made_with["media"] = media
        kinds = [kind for kind in KINDS if f"{kind}s" in media.kinds]
        missing = [media.tokens[kind] for kind in kinds if media.tokens[kind] not in self._encoder.added]
        if missing:
            raise TemplateError(
                f"the placeholder token {missing[0]!r} is not in the tokenizer's vocabulary: this is not the tokenizer "
                "of the model that the image processor belongs to"
            )
        self._kind_of = {self._encoder.added[t]: k for k, t in media.tokens.items() if t in self._encoder.added}

    @property
    def media_kinds(self) -> frozenset[str]:
        return self.media.kinds

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset(self._kind_of)

    def saved_with_model(self, tokenizer: Any) -> Any:
        return SavedTogether(tokenizer, self.media)

    def full_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """With as many placeholders as the recorded stream has: one text per token, as it is decoded."""
        hidden = Hidden(compile_literals(self.media.tokens.values()))
        bare = hidden.hide(self._shown(messages), beside=list(tools or ()))
        text = hidden.unescape(self._rendered(bare, tools, add_generation_prompt))
        for kind in KINDS:
            token = self.media.tokens[kind]
            first, *rest = text.split(token)
            inputs = self._inputs(messages, kind, len(rest))
            text = first + "".join(token * made.num_tokens + piece for made, piece in zip(inputs, rest))
        return hidden.show(text)

    def media_inputs(self, messages: Sequence[Message], ids: Sequence[int]) -> list[MediaInput]:
        """Model inputs for the placeholder tokens among `ids`, in their order.

        Args:
            messages: those whose rendering `ids` are; only these are processed.
            ids: made by this chat of these messages; places are counted in them.

        Raises:
            LedgerError: the placeholders among the ids are not those of the messages.
        """
        found: list[MediaInput] = []
        place = 0
        for kind, value in parts_of(messages):
            made, token = self.media(kind, value), self._encoder.added[self.media.tokens[kind]]
            while place < len(ids) and ids[place] not in self._kind_of:
                place += 1
            run = list(ids[place : place + made.num_tokens])
            if run != [token] * made.num_tokens:
                raise LedgerError(
                    f"{kind} {len(found)} takes {made.num_tokens} tokens {self.media.tokens[kind]!r}, but at "
                    f"token {place} there are {run[:4]}..."
                )
            found.append(made.moved(place))
            place += made.num_tokens
        if any(token in self._kind_of for token in ids[place:]):
            raise LedgerError(f"there are placeholder tokens behind the last of {len(found)} images and videos")
        return found

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Images and videos are only marked: templates look at types, never at pixels."""

        def bare(part: Any) -> Any:
            return {"type": part["type"]} if isinstance(part, Mapping) and part.get("type") in KINDS else part

        return [
            {**m, "content": [bare(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
            for m in super()._shown(messages)
        ]

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Each placeholder as often as its image or video has tokens."""
        if not any(token in self._kind_of for token in ids) and next(parts_of(messages), None) is None:
            return ids
        counts = {
            kind: iter(
                [m.num_tokens for m in self._inputs(messages, kind, sum(self._kind_of.get(i) == kind for i in ids))]
            )
            for kind in KINDS
        }
        out: list[int] = []
        for token in ids:
            kind = self._kind_of.get(token)
            out += [token] if kind is None else [token] * next(counts[kind])
        return out

    def _inputs(self, messages: Sequence[Message], kind: Kind, num_placeholders: int) -> list[MediaInput]:
        values = [value for k, value in parts_of(messages) if k == kind]
        if len(values) != num_placeholders:
            raise TemplateError(
                f"the messages hold {len(values)} {kind}s, but their rendering has {num_placeholders} placeholders "
                f"{self.media.tokens[kind]!r}: the template must write one for each, and no trusted text may hold one"
            )
        return [self.media(kind, value) for value in values]


@dataclass(frozen=True)
class SavedTogether:
    """A tokenizer and the processor of what its model sees, written into one folder."""

    tokenizer: Any
    media: MediaProcessor

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.media.save_pretrained(folder)


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

    @property
    def kinds(self) -> frozenset[str]:
        """Names of the media that are taken, as data columns name them."""
        return frozenset({"images"} if self.video_processor is None else {"images", "videos"})

    def __call__(self, kind: Kind, value: Any) -> MediaInput:
        """The tensors of one image or video, and how many tokens it takes; `start` is 0.

        Runs in any thread and waits for nothing.

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
    """The processor of a multimodal model; None, with a warning, for a family that is not offered.

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
