"""The shipped image tool: boxes, sizes, and what is not a box."""

from __future__ import annotations

import asyncio

import pytest

from verl_mt.data.conversation import ToolCall
from verl_mt.extensions.multimodal.image_zoom_in_tool import ImageZoomInTool
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.toolset import ToolSet

Image = pytest.importorskip("PIL.Image")
NAME = "image_zoom_in_tool"


def look(path, *boxes, media=frozenset({"images"}), config=None):
    """Results of calls with these arguments."""

    async def go():
        executor = ToolExecutor(ToolSet([ImageZoomInTool(config or {})]), ToolLimits(), str.split, media=media)
        session = executor.open("t", {NAME: {"create_kwargs": {"image": str(path)}}})
        calls = [ToolCall(NAME, box if isinstance(box, dict) else {"bbox_2d": box}, id="c") for box in boxes]
        try:
            return await session.run(calls, turn=1)
        finally:
            await session.close()

    return asyncio.run(go())


@pytest.fixture
def quarters(tmp_path):
    """Red, and blue in the lower right quarter."""
    image = Image.new("RGB", (80, 40), (255, 0, 0))
    image.paste((0, 0, 255), (40, 20, 80, 40))
    image.save(tmp_path / "quarters.png")
    return tmp_path / "quarters.png"


def test_a_box_is_cut_out_and_enlarged(quarters):
    blue, edge, small = look(quarters, {"bbox_2d": [42, 22, 78, 40], "label": "sky"}, [60, 30, 500, 900], [0, 0, 2, 4])
    (part,) = blue.media
    assert part["image"].size == (72, 36)
    assert part["image"].getcolors() == [(72 * 36, (0, 0, 255))]
    assert blue.text == "Zoomed in on [42, 22, 78, 40] (sky)."
    assert edge.media[0]["image"].size == (56, 28)
    assert small.media[0]["image"].size == (28, 56)
    assert blue.to_message()["content"] == [part, {"type": "text", "text": blue.text}]


def test_no_box_is_the_model_s_mistake(quarters):
    outside, turned, three = look(quarters, [100, 0, 120, 9], [9, 9, 3, 12], [1, 2, 3])
    for result in (outside, turned):
        assert "inside the image of 80 x 40 pixels" in result.text
    assert {outside.failure, turned.failure, three.failure} == {"model"}


def test_a_row_without_an_image_and_a_wrong_config_are_named(quarters):
    (result,) = look(quarters.with_name("none.png"), [0, 0, 1, 1])
    assert "none.png' cannot be read" in result.text
    with pytest.raises(ValueError, match=r"positive numbers zoom, min_side, max_side, got \{'zom': 2\}"):
        ImageZoomInTool({"zom": 2})
    with pytest.raises(ValueError, match=r"set extra_info.tools_kwargs.image_zoom_in_tool.create_kwargs.image"):
        asyncio.run(ImageZoomInTool({}).create("i"))


def test_verls_settings_limit_the_crops_at_once_and_a_timeout_is_said_to_change_nothing(caplog):
    of_verl = {"num_workers": 20, "rate_limit": 5, "timeout": 30, "type": "native"}
    assert ImageZoomInTool(of_verl).max_concurrency == 5
    assert "timeout=30 changes nothing" in caplog.text
    assert ImageZoomInTool(of_verl | {"enable_global_rate_limit": False}).max_concurrency == 20
    assert ImageZoomInTool({}).max_concurrency is None
