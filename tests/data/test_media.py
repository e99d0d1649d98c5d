"""`<image>` and `<video>` in prompts, and the columns behind them."""

from __future__ import annotations

import json

import pytest

from verl_mt.data.dataset import load_rows
from verl_mt.data.media import place_media
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
