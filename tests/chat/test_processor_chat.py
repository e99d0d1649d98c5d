"""Messages with images and videos to ids and tensors: deltas, the whole, and what a text may not do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("PIL")

from hypothesis import given, settings
from hypothesis import strategies as st
from vision_toys import hf_processor, image_processor, picture, shown, vision_chat, vision_model

from verl_mt.chat import ChatTemplate, load_chat
from verl_mt.chat.sanity import Cause, SanityMode, check
from verl_mt.chat.vision import ProcessorChat
from verl_mt.data.conversation import Message
from verl_mt.errors import ConfigError, DataError, LedgerError, TemplateError

CHAT = vision_chat()
END = CHAT.tokenizer.eos_token_id
PAD = CHAT.tokenizer.convert_tokens_to_ids("<|image_pad|>")
VIDEO_PAD = CHAT.tokenizer.convert_tokens_to_ids("<|video_pad|>")


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
def test_a_delta_processes_only_the_images_that_arrive():
    chat = vision_chat()
    prompt, env = [shown(picture(24, 24), "what?")], [shown("closer", picture(12, 12), role="tool")]
    ids = chat.prompt_ids(prompt)
    chat.media_inputs(prompt, ids)
    assert chat.media.num_processed == 1
    chat.media._kept.clear()
    delta = chat.delta_ids(env, history=[*prompt, assistant("zoom")], last_ids=[END])
    assert chat.media.num_processed == 2
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
