"""`<image>` and `<video>` in prompts, and the columns behind them."""

from __future__ import annotations

import base64
import io
import json
import os
import types

import pytest
from PIL import Image

from verl_mt.data.dataset import load_rows
from verl_mt.data.media import (
    MediaInput,
    describe,
    from_wire,
    has_media,
    has_places,
    is_image,
    load_image,
    load_video,
    parts_of,
    place_media,
    to_wire,
)
from verl_mt.errors import DataError


def user(content):
    return {"role": "user", "content": content}


def test_places_take_the_items_in_order():
    messages = [user("<image>left, <video> then <image>"), user([{"type": "image"}, {"type": "text", "text": "x"}])]
    first, second = place_media(messages, {"images": ["a", "b", "c"], "videos": [["f"]]}, "w")
    assert [part.get("image") or part.get("video") or part["text"] for part in first["content"]] == [
        "a", "left, ", ["f"], " then ", "b",
    ]  # fmt: skip
    assert second["content"] == [{"type": "image", "image": "c"}, {"type": "text", "text": "x"}]
    assert messages[0]["content"] == "<image>left, <video> then <image>"


def test_without_columns_nothing_is_a_place():
    messages = [user("write <image> in HTML")]
    assert place_media(messages, {"images": None}, "w") == messages
    assert place_media(messages, {"images": []}, "w") == messages


@pytest.mark.parametrize(
    ("text", "columns", "complaint"),
    [
        ("<image> and <image>", {"images": ["a"]}, "2 places <image> in the text, but images holds 1 items"),
        ("none", {"images": "a"}, "0 places <image> in the text, but images holds 1 items"),
        ("<image><video>", {"images": ["a"]}, "1 places <video> in the text, but videos holds 0 items"),
    ],
)
def test_another_number_of_places_than_items_is_refused_with_both_numbers(text, columns, complaint):
    with pytest.raises(DataError, match=f"here: {complaint}"):
        place_media([user(text)], columns, "here")


def test_rows_of_a_file_get_their_images_beside_it_and_bytes_as_text(tmp_path):
    (tmp_path / "a.png").write_bytes(b"png")
    rows = [{"prompt": "<image>?", "data_source": "d", "ground_truth": "1", "images": ["a.png"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (source,) = load_rows(str(tmp_path / "rows.jsonl"), split="train")
    (message,) = source.rows[0].prompt
    assert message["content"][0] == {"type": "image", "image": str(tmp_path / "a.png")}
    (placed,) = place_media([user("<image>")], {"images": [{"bytes": b"png", "path": None}]}, "w")
    assert placed["content"][0]["image"]["bytes"] == "data:application/octet-stream;base64,cG5n"
    rows[0]["videos"] = [["x"], ["y"]]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match=r"rows.jsonl, row 1: 0 places <video> in the text, but videos holds 2"):
        load_rows(str(tmp_path / "rows.jsonl"), split="train")


def test_numbers_beside_a_picture_stay_numbers():
    item = {"image": "a.png", "max_pixels": 4}
    messages = [{"role": "user", "content": "<image>"}]
    (placed,) = place_media(messages, {"images": [item]}, "w", folder="there")
    assert next(part for part in placed["content"] if part.get("type") == "image")["image"] == item


PIXEL = (10, 20, 30)


def picture(mode="RGB"):
    return Image.new("RGB", (2, 1), PIXEL).convert(mode)


def png() -> bytes:
    buffer = io.BytesIO()
    picture().save(buffer, format="PNG")
    return buffer.getvalue()


IMAGE, VIDEO = {"type": "image", "image": "a.png"}, {"type": "video", "video": ["f"]}
TEXT = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("contents", "parts", "said"),
    [
        (["<image>", None, [TEXT]], [], ""),
        ([[IMAGE]], [("image", "a.png")], "1 image"),
        ([[IMAGE, TEXT, VIDEO], [VIDEO, IMAGE, "text"]],
         [("image", "a.png"), ("video", ["f"]), ("video", ["f"]), ("image", "a.png")], "2 images and 2 videos"),
        ([[VIDEO]], [("video", ["f"])], "1 video"),
        ([[{"type": "image"}]], [("image", None)], "1 image"),
    ],
)  # fmt: skip
def test_images_and_videos_of_messages_are_found_in_order(contents, parts, said):
    messages = [user(content) for content in contents]
    assert list(parts_of(messages)) == parts and has_media(messages) is bool(parts) and describe(messages) == said


@pytest.mark.parametrize(
    ("content", "there"),
    [("x <image>", True), ("<video>", True), ("<audio>", False), (None, False), ([IMAGE], False),
     ([{"type": "video"}], True), ([TEXT, {"type": "text", "text": "<image>"}], True), (["<image>"], False),
     ([{"type": "text", "text": 5}], False)],
)  # fmt: skip
def test_a_place_is_a_mark_in_a_text_or_a_part_without_a_value(content, there):
    assert has_places([user("x"), user(content)]) is there


def test_only_messages_with_places_change_and_only_there():
    plain, own = user("plain"), user([IMAGE, TEXT])
    marked = user([{"type": "text", "text": "<image>!"}, IMAGE, "as it is", {"type": "video", "fps": 2}, TEXT])
    found = place_media([plain, own, marked], {"images": ("b",), "videos": [["f"]]}, "w")
    assert found[0] is plain and found[1] is own
    assert found[2]["content"] == [
        {"type": "image", "image": "b"}, {"type": "text", "text": "!"}, IMAGE, "as it is",
        {"type": "video", "fps": 2, "video": ["f"]}, TEXT,
    ]  # fmt: skip
    assert marked["content"][3] == {"type": "video", "fps": 2}


def test_paths_lead_to_files_beside_the_data_unless_they_lead_somewhere_already(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("d/a.png", "both.png", "d/both.png"):
        (tmp_path / name).write_bytes(b"")
    items = ["a.png", "both.png", "absent.png", "http://x/a.png", "data:a.png", {"path": "a.png", "n": [("a.png", 5)]}]
    (found,) = place_media([user("<image>" * len(items))], {"images": items}, "w", folder="d")
    beside = os.path.join("d", "a.png")
    expected = [beside, "both.png", "absent.png", "http://x/a.png", "data:a.png", {"path": beside, "n": [[beside, 5]]}]
    assert [part["image"] for part in found["content"]] == expected
    (found,) = place_media([user("<image>")], {"images": bytearray(b"png")}, "w")
    assert found["content"][0]["image"] == "data:application/octet-stream;base64,cG5n"
    (found,) = place_media([user("<image>")], {"images": "a.png"}, "w")
    assert found["content"][0]["image"] == "a.png"


def test_an_image_is_read_in_each_of_its_forms(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    uri = "data:image/png;base64," + base64.b64encode(png()).decode()
    path = str(tmp_path / "a.png")
    forms = [
        picture(), picture("RGBA"), png(), bytearray(png()), path, tmp_path / "a.png", f"file://{path}", uri,
        {"image": picture()}, {"image": None, "bytes": png(), "path": "absent"}, {"path": path}, {"url": uri},
    ]  # fmt: skip
    for form in forms:
        found = load_image(form)
        assert (found.mode, found.size, found.getpixel((1, 0))) == ("RGB", (2, 1), PIXEL)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"k": 1, "a": 2}, r"an image as a mapping needs image, bytes, path or url, got the keys \['a', 'k'\]"),
        (b"12345", "image of 5 bytes is not in a format that Pillow can read"),
        ("absent.png", r"image 'absent\.png' cannot be read: FileNotFoundError"),
        ("https://x/a.png", r"image 'https://x/a\.png' cannot be read: ValueError: images are not downloaded"),
        ("http://x/a.png", "images are not downloaded"),
        ("data:image/png;base64,?", "cannot be read: Error"),
        (5, "image 5 cannot be read: ValueError: expected an image, a path, a data URI or bytes, got int"),
    ],
)
def test_what_is_no_image_is_named(value, said):
    with pytest.raises(DataError, match=said):
        load_image(value)


@pytest.mark.parametrize(("length", "shown"), [(198, "'" + "x" * 198 + "'"), (199, "'" + "x" * 99 + "...")])
def test_a_long_name_is_cut(length, shown):
    with pytest.raises(DataError) as caught:
        load_image("x" * length)
    assert str(caught.value).partition(" cannot")[0] == f"image {shown}"


def test_a_video_is_a_list_of_its_frames():
    frames = [picture(), {"bytes": png()}]
    for form in (frames, tuple(frames), {"video": frames, "fps": 2.0}):
        assert [frame.getpixel((0, 0)) for frame in load_video(form)] == [PIXEL, PIXEL]
    for wrong in ([], "a.mp4", b"mp4", 5, {"fps": 2}, {"video": "a.mp4"}):
        with pytest.raises(DataError, match="a video must be a list of images"):
            load_video(wrong)


def test_an_image_goes_through_json_and_back():
    wired = json.loads(json.dumps(to_wire(picture())))
    assert list(wired) == ["image"] and wired["image"].startswith("data:image/png;base64,")
    assert from_wire(wired).getpixel((1, 0)) == PIXEL
    others = ("a", None, 5, {"image": "a.png"}, {"image": wired["image"], "k": 1}, {"k": wired["image"]}, [wired])
    for other in others:
        assert to_wire(other) is other and from_wire(other) is other


def test_an_image_is_known_by_its_class():
    class Own(Image.Image):
        """A subclass."""

    namesake = type("Image", (), {"__module__": "PIL.Image", "__qualname__": "Images"})
    assert [is_image(x) for x in (picture(), Own(), namesake(), "a.png", Image)] == [True, True, False, False, False]
    assert not is_image(types.SimpleNamespace())


def test_a_moved_input_is_the_same_elsewhere():
    made = MediaInput("image", 3, 4, {"k": 1})
    moved = made.moved(10)
    assert (made.start, made.end, moved.start, moved.end) == (3, 7, 13, 17)
    assert (moved.kind, moved.num_tokens, moved.tensors) == ("image", 4, made.tensors)
