"""Images that a scheduler puts in place of the row's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from scheduler_lab import converse, prompt_of, said

from verl_mt.data.dataset import load_rows
from verl_mt.data.run_files import row_to_trajectory, trajectory_to_row
from verl_mt.errors import DataError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.driver import make_request

image_module = pytest.importorskip("PIL.Image")


class Crop(MultiTurnScheduler):
    """After the first turn the model gets a part of its image; `infos` is what is returned beside it."""

    def __init__(self, infos=lambda images: {"images": images}, **kwargs):
        super().__init__(**kwargs)
        self.infos = infos

    def step(self, infer_request, response_choice, current_turn):
        infer_request.images.append(infer_request.images[0].crop((0, 0, 2, 2)))
        infer_request.messages.append({"role": "user", "content": "look closer"})
        return {"infer_request": infer_request, "rollout_infos": self.infos(infer_request.images)}


def picture():
    return image_module.new("RGB", (4, 4), (200, 10, 10))


def crop(scheduler, **keys):
    return converse(scheduler, [said("a"), said("b")], prompt=prompt_of(images=[picture()]), **keys).trajectory


@pytest.mark.cap("C24")
def test_images_of_a_scheduler_replace_the_rows_in_the_order_of_the_messages():
    trajectory = crop(Crop(max_turns=2), media=frozenset({"images"}))
    assert [image.size for image in trajectory.media["images"]] == [(4, 4), (2, 2)]
    assert "images" not in trajectory.info


def test_a_scheduler_can_open_an_image_that_lies_beside_the_data_file(tmp_path):
    picture().save(tmp_path / "a.png")
    row = {"prompt": "<image>q", "data_source": "x", "ground_truth": "y", "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (loaded,) = load_rows(str(tmp_path / "rows.jsonl"), split="train")[0].rows
    episode = SimpleNamespace(
        session=SimpleNamespace(messages=loaded.prompt, trajectory=SimpleNamespace(tools=[], trajectory_id="t")),
        prompt=SimpleNamespace(row=loaded),
    )
    assert make_request(episode).images == [str(tmp_path / "a.png")]


@pytest.mark.cap("C24")
def test_other_keys_replace_nothing():
    infos = lambda images: {"num_crops": 1}  # noqa: E731
    trajectory = crop(Crop(infos, max_turns=2), media=frozenset({"images"}))
    assert trajectory.media == {}
    assert trajectory.info["num_crops"] == 1


@pytest.mark.cap("C24")
def test_images_cross_the_border_of_a_process():
    trajectory = crop(Crop(max_turns=2), media=frozenset({"images"}))
    row = json.loads(json.dumps(trajectory_to_row(trajectory, step=1)))
    back = row_to_trajectory(row).media["images"]
    assert [(i.size, i.getpixel((0, 0))) for i in back] == [((4, 4), (200, 10, 10)), ((2, 2), (200, 10, 10))]


@pytest.mark.cap("C24")
@pytest.mark.parametrize(
    ("infos", "complaint"),
    [
        (lambda images: {"images": images}, "rollout_infos['images'] holds 2 items, but this model takes text only"),
        (lambda images: {"audios": ["x"]}, "rollout_infos['audios'] holds 1 items"),
        (lambda images: {"images": "x"}, "rollout_infos['images'] must be a list, got 'x'"),
    ],
)
def test_media_that_the_model_does_not_take_are_refused_by_name(infos, complaint):
    assert complaint in crop(Crop(infos, max_turns=2)).error


def test_a_row_with_audio_is_refused_by_name(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "q", "data_source": "x", "ground_truth": "y", "audios": ["a.wav"]}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl, row 1: column audios holds 1 items. Audio is not offered"):
        load_rows(str(file), split="train")
