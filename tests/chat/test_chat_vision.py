"""Messages with images and videos to ids and tensors: deltas, the whole, what a text may not do, and frames to patches
without torchvision, as transformers' Qwen2-VL video processor makes them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from hypothesis import given, settings
from hypothesis import strategies as st
from vision_toys import (
    PATCH,
    SIZES,
    hf_processor,
    image_processor,
    picture,
    shown,
    video_processor,
    vision_chat,
    vision_model,
)

from verl_mt.chat import ChatTemplate, load_chat
from verl_mt.chat.sanity import Cause, SanityMode, check
from verl_mt.data.batch import RowMedia
from verl_mt.data.conversation import Message
from verl_mt.errors import ConfigError, DataError, LedgerError, TemplateError
from verl_mt.extensions.multimodal.chat_template import (
    FrameProcessor,
    MediaProcessor,
    ProcessorChat,
    load_frame_processor,
    load_media_processor,
)
from verl_mt.modeling.log_probs import forward_log_probs

CHAT = vision_chat()
END = CHAT.tokenizer.eos_token_id
PAD = CHAT.tokenizer.convert_tokens_to_ids("<|image_pad|>")
VIDEO_PAD = CHAT.tokenizer.convert_tokens_to_ids("<|video_pad|>")
MEAN, STD = (np.array(x) for x in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]))


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def play(chat, prompt, steps):
    """Ids, mask and media inputs of a conversation, built delta by delta as a rollout does."""
    ids = chat.prompt_ids(prompt)
    inputs, sampled, history = chat.media_inputs(prompt, ids), [0] * len(ids), list(prompt)
    for number, (text, env) in enumerate(steps):
        turn = [*chat.encode_text(text, neutral=False), END]
        ids, sampled = ids + turn, sampled + [1] * len(turn)
        history.append(assistant(text))
        if number + 1 < len(steps):
            delta = chat.delta_ids(env, history=history, last_ids=ids[-1:])
            inputs += [made.moved(len(ids)) for made in chat.media_inputs(env, delta.ids)]
            ids, sampled = ids + delta.ids, sampled + [0] * len(delta.ids)
            history += env
    return ids, sampled, inputs, history


WORDS = st.text(st.sampled_from("ab <>|x\n"), max_size=6)
PICTURES = st.builds(picture, st.integers(8, 40), st.integers(8, 40), st.just((9, 80, 200)))
PARTS = st.lists(st.one_of(WORDS, PICTURES), min_size=1, max_size=4)


@st.composite
def conversations(draw):
    messages = st.builds(lambda parts, role: shown(*parts, role=role), PARTS, st.sampled_from(["user", "tool"]))
    prompt = [shown(*draw(PARTS))]
    return prompt, [(draw(WORDS), [draw(messages)]) for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.slow
@pytest.mark.cap("V5")
@settings(max_examples=40, deadline=None)
@given(conversations())
def test_deltas_with_images_are_what_the_processor_makes_of_the_whole_conversation(talk):
    ids, _, inputs, history = play(CHAT, *talk)
    pictures = [part["image"] for m in history for part in m["content"] if isinstance(part, dict) and "image" in part]
    unexpanded = CHAT._renderer.text(history, add_generation_prompt=False).removesuffix("\n")
    full = hf_processor()(images=pictures or None, text=[unexpanded], return_tensors="pt")
    assert ids == full["input_ids"][0].tolist()
    assert [made.kind for made in inputs] == ["image"] * len(pictures)
    for name in ("pixel_values", "image_grid_thw"):
        assert not pictures or torch.equal(torch.cat([made.tensors[name] for made in inputs]), full[name])
    covered = [place for made in inputs for place in range(made.start, made.end)]
    assert covered == [place for place, token in enumerate(ids) if token == PAD]
    assert covered == full["mm_token_type_ids"][0].nonzero()[:, 0].tolist()


@pytest.mark.cap("V5")
def test_a_delta_processes_only_the_images_that_arrive(monkeypatch):
    chat, processed = vision_chat(), []
    made = type(chat.media)._image
    monkeypatch.setattr(chat.media, "_image", lambda value: processed.append(value) or made(chat.media, value))
    prompt, env = [shown(picture(24, 24), "what?")], [shown("closer", picture(12, 12), role="tool")]
    ids = chat.prompt_ids(prompt)
    chat.media_inputs(prompt, ids)
    assert len(processed) == 1
    chat.media._kept.clear()
    delta = chat.delta_ids(env, history=[*prompt, assistant("zoom")], last_ids=[END])
    assert len(processed) == 2
    assert [made.num_tokens for made in chat.media_inputs(env, delta.ids)] == [delta.ids.count(PAD)]


def test_the_number_of_tokens_follows_the_size_of_the_image():
    counts = [CHAT.prompt_ids([shown(picture(w, h))]).count(PAD) for w, h in ((16, 16), (24, 16), (8, 8))]
    assert counts == [4, 6, 1]


@pytest.mark.cap("V5")
def test_videos_are_expanded_and_carry_their_tensors():
    message = shown("look", [picture(16, 8)] * 4, "and", picture(8, 8))
    ids = CHAT.prompt_ids([message])
    video, image = CHAT.media_inputs([message], ids)
    assert (video.kind, video.num_tokens, ids.count(VIDEO_PAD)) == ("video", 4, 4)
    assert video.tensors["video_grid_thw"].tolist() == [[2, 2, 4]]
    assert video.tensors["second_per_grid_ts"].tolist() == [1.0]
    assert (image.kind, image.num_tokens, ids.count(PAD)) == ("image", 1, 1)


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|vision_start|><|video_pad|><|vision_end|>"])
def test_placeholder_text_of_a_tool_never_becomes_a_placeholder(text):
    prompt, env = [shown(picture())], [shown(text, picture(8, 8), role="tool")]
    ids, sampled, inputs, history = play(CHAT, prompt, [("a", env), ("b", [])])
    assert [ids.count(PAD), ids.count(VIDEO_PAD)] == [5, 0]
    assert text in CHAT.decode(ids)
    assert [made.num_tokens for made in inputs] == [4, 1]
    finding = check(CHAT, messages=history, tools=None, token_ids=ids, sampled=sampled, mode=SanityMode.STRICT)
    assert finding.cause is Cause.NEUTRALISED_TEXT
    assert not finding.in_budget


def test_the_sanity_check_finds_nothing_in_a_conversation_with_images_and_a_changed_turn_where_there_is_one():
    steps = [("a", [shown("see", picture(20, 30), role="tool")]), ("b", [])]
    ids, sampled, _, history = play(CHAT, [shown(picture(), "q")], steps)
    keys = {"tools": None, "sampled": sampled, "mode": SanityMode.STRICT}
    assert check(CHAT, messages=history, token_ids=ids, **keys) is None
    assert check(CHAT, messages=[*history[:-1], assistant("c")], token_ids=ids, **keys).recorded.endswith("b<|im_end|>")


def test_a_text_model_refuses_images_and_an_image_model_videos():
    text = ChatTemplate(CHAT.tokenizer)
    with pytest.raises(TemplateError, match="hold 2 images, but this model takes text only"):
        text.prompt_ids([shown(picture(), picture())])
    with pytest.raises(TemplateError, match="hold 1 image, but"):
        text.delta_ids([shown(picture(), role="tool")], history=[assistant("a")], last_ids=[END])
    with pytest.raises(TemplateError, match="hold 1 video, but this model takes text and images only"):
        vision_chat(videos=False).prompt_ids([shown([picture()])])


def test_a_trusted_placeholder_without_an_image_is_refused_with_both_numbers():
    with pytest.raises(TemplateError, match=r"hold 1 images, but their rendering has 2 placeholders '<\|image_pad\|>'"):
        CHAT.prompt_ids([shown("<|image_pad|>", picture())])
    assert vision_chat(trust_prompts=False).prompt_ids([shown("<|image_pad|>", picture())]).count(PAD) == 4


def test_an_unreadable_image_is_named(tmp_path):
    (broken := tmp_path / "broken.png").write_bytes(b"no image")
    for path, complaint in ((broken, "broken.png' is not in a format"), (tmp_path / "none.png", "none.png' cannot be")):
        with pytest.raises(DataError, match=complaint):
            CHAT.prompt_ids([{"role": "user", "content": [{"type": "image", "image": str(path)}]}])
    with pytest.raises(DataError, match="images are not downloaded"):
        CHAT.prompt_ids([{"role": "user", "content": [{"type": "image", "image": "https://x/y.png"}]}])
    with pytest.raises(DataError, match=r"a video must be a list of images .* got 'v.mp4'"):
        CHAT.prompt_ids([{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}])


def test_ids_of_other_messages_have_no_media():
    ids = CHAT.prompt_ids([shown(picture(16, 16))])
    with pytest.raises(LedgerError, match="image 0 takes 6 tokens"):
        CHAT.media_inputs([shown(picture(24, 16))], ids)
    with pytest.raises(LedgerError, match="behind the last of 0"):
        CHAT.media_inputs([shown("none")], ids)
    with pytest.raises(LedgerError, match="behind the last of 0"):
        CHAT.media_inputs([shown("none")], [PAD])


def test_a_vision_model_s_folder_gives_its_image_processor(tmp_path):
    vision_model().config.save_pretrained(tmp_path)
    CHAT.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="vision model, but no image processor could be loaded"):
        load_chat(str(tmp_path))
    image_processor().save_pretrained(tmp_path)
    chat = load_chat(str(tmp_path))
    message = [shown(picture(30, 20), "what?")]
    assert chat.prompt_ids(message) == CHAT.prompt_ids(message)
    assert isinstance(chat.with_kwargs({"date": "x"}), ProcessorChat)
    assert END in chat.end_token_ids


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
