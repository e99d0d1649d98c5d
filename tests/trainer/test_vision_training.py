"""A vision-language model trained on rows with images: the same tensors from the file to the update."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("PIL")

from command_lab import NO_VALIDATION, SMALL, metrics_of, rows_of
from vision_toys import image_processor, picture, vision_model, vision_tokenizer

from verl_mt.chat.loading import load_chat
from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError, DataError
from verl_mt.extensions.multimodal.chat_template import ProcessorChat
from verl_mt.modeling.load import load_causal_lm
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.slow

IMAGE_RUN = (
    "data.train_batch_size=2",
    "data.train_max_samples=4",
    "data.max_prompt_length=200",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.response_length=12",
    "actor_rollout_ref.rollout.max_model_len=600",
    "actor_rollout_ref.rollout.name=local",
    "reward.name=null",
    "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


def length_reward(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 12


@pytest.fixture
def folders(tmp_path):
    model = tmp_path / "model"
    vision_model().save_pretrained(model)
    vision_tokenizer().save_pretrained(model)
    image_processor().save_pretrained(model)
    for number in range(4):
        picture(16 + 8 * number, 24, (60 * number, 9, 80)).save(tmp_path / f"{number}.png")
    with open(tmp_path / "rows.jsonl", "w") as file:
        for number in range(4):
            images = [f"{number}.png"] * (1 + number % 2)
            row = {
                "prompt": "<image>" * len(images) + "what?",
                "images": images,
                "data_source": "d",
                "ground_truth": "x",
            }
            file.write(json.dumps(row) + "\n")
    return tmp_path


def config_of(folders, *overrides):
    return compose(
        [
            *SMALL, *NO_VALIDATION, *IMAGE_RUN,
            f"trainer.default_local_dir={folders / 'run'}",
            f"actor_rollout_ref.model.path={folders / 'model'}",
            f"data.train_files={folders / 'rows.jsonl'}",
            f"reward.path={__file__}:length_reward",
            *overrides,
        ]
    )  # fmt: skip


@pytest.mark.cap("V5")
def test_a_run_on_images_trains_the_tensors_it_sampled_from(folders):
    trainer = build_trainer(config_of(folders, "trainer.export_at_end=True"))
    before = {name: tensor.clone() for name, tensor in trainer.workers.policy_module.state_dict().items()}
    trainer.fit()
    lines = metrics_of(folders / "run")
    assert len(lines) == 2
    assert all(0 < line["rollout/logprob_diff_max"] < 1e-4 for line in lines)
    after = load_causal_lm(str(folders / "run" / "hf")).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)
    assert isinstance(load_chat(str(folders / "run" / "hf")), ProcessorChat)
    (row, *_) = rows_of(folders / "run", 1)
    assert row["messages"][0]["content"][0]["type"] == "image"


@pytest.mark.cap("V5")
def test_a_run_on_videos_and_images_trains_the_tensors_it_sampled_from(folders):
    rows = [
        {"prompt": "<video>what?", "videos": [["0.png", "0.png", "0.png"]]},
        {"prompt": "<image>now <video>?", "images": ["1.png"], "videos": [{"video": ["2.png", "2.png"], "fps": 1}]},
    ]
    text = "".join(json.dumps({"data_source": "d", "ground_truth": "x", **row}) + "\n" for row in rows * 2)
    (folders / "rows.jsonl").write_text(text)
    build_trainer(config_of(folders)).fit()
    lines = metrics_of(folders / "run")
    assert len(lines) == 2
    assert all(0 < line["rollout/logprob_diff_max"] < 1e-4 and line["actor/grad_norm"] > 0 for line in lines)
    # A model of random weights samples a placeholder now and then, which fails that trajectory and no other.
    assert all(line["rollout/failed"] <= line["rollout/trajectories"] / 4 for line in lines)
    kinds = [part["type"] for row in rows_of(folders / "run", 1) for part in row["messages"][0]["content"]]
    assert {"video", "image"} < set(kinds)


def test_saved_rollouts_with_images_are_refused_where_they_would_be_trained_again(folders):
    saved = f"trainer.debug_rollout_data={folders / 'saved'}/{{rollout_id}}.pt"
    build_trainer(config_of(folders, saved, "trainer.debug_mode=save", "trainer.total_training_steps=1")).fit()
    again = (saved, "trainer.debug_mode=train_only", f"trainer.default_local_dir={folders / 'again'}")
    with pytest.raises(DataError, match="it holds images, whose tensors are not saved"):
        build_trainer(config_of(folders, *again)).fit()


def test_an_engine_that_would_not_see_the_images_is_refused_before_it_starts(folders):
    from verl_mt.engines.base import Capabilities
    from verl_mt.engines.scripted import ScriptedEngine

    engine = ScriptedEngine([])
    engine.capabilities = Capabilities(frozenset({"disk"}), deterministic=True)
    with pytest.raises(
        ConfigError, match=r"rows.jsonl, row \d: the prompt holds \d images?, but .*name=local takes text"
    ):
        build_trainer(config_of(folders), engine=engine)


def test_low_rank_adapters_train_on_images_too(folders):
    pytest.importorskip("peft")
    trainer = build_trainer(config_of(folders, "actor_rollout_ref.model.lora_rank=4"))
    trainer.fit()
    lines = metrics_of(folders / "run")
    assert all(0 < line["rollout/logprob_diff_max"] < 1e-4 for line in lines)
    assert lines[-1]["actor/grad_norm"] > 0


def test_a_policy_that_sees_is_not_sampled_while_it_is_trained_which_is_said_before_it_is_loaded(folders, monkeypatch):
    from verl_mt.trainer import build

    monkeypatch.setattr(build, "build_workers", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"max_staleness=1: .*model sees images, .*name=sglang"):
        build.build_trainer(config_of(folders, "trainer.max_staleness=1", "trainer.deterministic=False"))
