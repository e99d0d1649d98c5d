"""Videos without torchvision: frames to patches as transformers' Qwen2-VL video processor makes them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from hypothesis import given, settings
from hypothesis import strategies as st
from vision_toys import PATCH, SIZES, picture, shown, video_processor, vision_chat, vision_model

from verl_mt.chat.vision import FrameProcessor, MediaProcessor, load_frame_processor, load_media_processor
from verl_mt.data.batch import RowMedia
from verl_mt.errors import ConfigError, DataError
from verl_mt.modeling.log_probs import forward_log_probs

MEAN, STD = (np.array(x) for x in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]))


def frames(count: int, width: int = 16, height: int = 16) -> list:
    return [picture(width, height, (40 * k + 10, 99, 7 * k)) for k in range(count)]


def by_hand(video: list, merge: int = 2, depth: int = 2) -> list[np.ndarray]:
    """The definition as loops: steps in time, then blocks of merge x merge patches, row by row within a block."""
    pixels = [(np.asarray(frame, dtype=np.float64) / 255 - MEAN) / STD for frame in video]  # [H, W, C]
    pixels += [pixels[-1]] * (-len(pixels) % depth)
    height, width, _ = pixels[0].shape
    patches, block = [], merge * PATCH
    for step in range(0, len(pixels), depth):
        for top in range(0, height, block):
            for left in range(0, width, block):
                for y in range(top, top + block, PATCH):
                    for x in range(left, left + block, PATCH):
                        cube = [image[y : y + PATCH, x : x + PATCH] for image in pixels[step : step + depth]]
                        patches.append(np.stack(cube).transpose(3, 0, 1, 2).ravel())  # [C, depth, h, w]
    return patches


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_frames_become_the_patches_of_the_definition(count, columns, rows):
    video = frames(count, 8 * columns, 8 * rows)
    made = video_processor()(videos=[video])
    expected = by_hand(video)
    assert made["video_grid_thw"].tolist() == [[(count + 1) // 2, 2 * rows, 2 * columns]]
    torch.testing.assert_close(
        made["pixel_values_videos"].double(), torch.tensor(np.array(expected)), atol=1e-5, rtol=0
    )


def test_the_numbers_are_those_of_transformers():
    try:
        from transformers import Qwen2VLVideoProcessor

        theirs = Qwen2VLVideoProcessor(**SIZES, size={"shortest_edge": 64, "longest_edge": 64 * 12})
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs a torchvision that fits torch: {error}"[:100])
    for count, size in ((1, (16, 16)), (3, (24, 16)), (4, (37, 21)), (5, (100, 80))):
        video = frames(count, *size)
        expected = theirs(videos=[video], do_sample_frames=False, return_tensors="pt")
        made = video_processor()(videos=[video])
        assert made["video_grid_thw"].tolist() == expected["video_grid_thw"].tolist()
        gap = (made["pixel_values_videos"] - expected["pixel_values_videos"]).abs()
        assert gap.max() < 1.01 / 255 / 0.26 and (gap > 1e-5).float().mean() < 0.02


def test_the_frames_of_a_video_have_one_size():
    with pytest.raises(DataError, match=r"must have one size, got \[\(8, 8\), \(16, 16\)\] among 2 frames"):
        video_processor()(videos=[[*frames(1), *frames(1, 8, 8)]])


def test_a_saved_processor_comes_back_and_makes_the_same(tmp_path):
    chat = vision_chat()
    chat.media.save_pretrained(tmp_path)
    again = load_media_processor(str(tmp_path))
    assert again.kinds == {"images", "videos"}
    assert again.video_processor.settings == video_processor().settings
    video = frames(3, 30, 21)
    for name, tensor in again("video", video).tensors.items():
        assert torch.equal(tensor, chat.media("video", video).tensors[name])


def test_a_folder_that_says_nothing_of_videos_has_the_sizes_of_its_images(tmp_path):
    """As transformers reads the folders of Qwen2-VL."""
    MediaProcessor(vision_chat().media.image_processor).save_pretrained(tmp_path)
    assert load_frame_processor(str(tmp_path), {}).settings["size"] == {"shortest_edge": 64, "longest_edge": 64 * 12}


def test_another_family_of_videos_is_refused_by_name_and_images_go_on(tmp_path, caplog):
    vision_chat().media.save_pretrained(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"video_processor_type": "Qwen3VLVideoProcessor"})
    )
    with pytest.raises(ConfigError, match="offered for Qwen2VLVideoProcessor, this model has Qwen3VLVideoProcessor"):
        load_frame_processor(str(tmp_path), {})
    assert load_media_processor(str(tmp_path)).kinds == {"images"}
    assert "videos are refused" in caplog.text


def test_pixels_per_frame_default_to_qwens():
    assert FrameProcessor({}).settings["size"] == {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}


@pytest.mark.cap("V5")
def test_a_model_sees_a_video_and_the_order_of_its_frames():
    chat, model = vision_chat(), vision_model()

    def log_probs(video):
        message = shown(video, "what?")
        ids = chat.prompt_ids([message])
        media = [RowMedia(tuple(chat.media_inputs([message], ids)))]
        ids_BT = torch.tensor([ids])
        wanted_BT = torch.arange(len(ids))[None] > 0
        keys = {"wanted_BT": wanted_BT, "temperature": 1.0, "media": media}
        return forward_log_probs(model, ids_BT, torch.ones_like(ids_BT), **keys).log_probs_BT[0]

    video = frames(4)
    seen = log_probs(video)
    assert torch.isfinite(seen).all()
    assert torch.equal(seen, log_probs(list(video)))
    assert not torch.allclose(seen[-3:], log_probs(video[::-1])[-3:], atol=1e-4)
