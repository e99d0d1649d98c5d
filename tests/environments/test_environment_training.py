"""Environments in whole runs: named in YAML, on the command line and in Python; and what a signal leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import maze
import pytest
import warm_start

import verl_mt
from verl_mt.config.compose import compose
from verl_mt.data.row_files import read_rows, row_files
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, DataError, PluginError, TemplateError
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.build_rollout import build_chat

MAZE = Path(maze.__file__)
RO = "actor_rollout_ref.rollout"
SMALL = [
    "trainer.total_training_steps=3", "trainer.save_freq=-1", "data.train_batch_size=2", f"{RO}.n=2",
    "data.train_max_samples=16", "data.val_files=null", "trainer.logger=[]", "trainer.export_at_end=False",
    "trainer.num_threads=1", "data.train_files=verl_mt.environments.seeds:rows",
    f"{RO}.tool_kwargs.tools_config_file=null", f"{RO}.multi_turn.max_assistant_turns=3",
]  # fmt: skip


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Object -> what was noted of it."""
    monkeypatch.setenv(maze.LOG, str(tmp_path / "maze.log"))

    def read() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in (tmp_path / "maze.log").read_text().splitlines():
            word, name = line.split()
            found.setdefault(name, []).append(word)
        return found

    return read


def assert_each_closed_once(notes: dict[str, list[str]], least: int) -> None:
    assert len(notes) >= least
    assert Counter(map(tuple, notes.values())) == {("made", "closed"): len(notes)}


def rows_of(run: Path) -> list[dict]:
    """The rollout rows of the training steps."""
    return [row for file in row_files(run) if file.split == "train" for row in read_rows(file.path)]


def walks_out(config):
    """An engine that reads how far the exit is, and walks there."""
    chat = build_chat(config)

    def say(request):
        text = chat.decode(request.input_ids).rpartition("The exit is ")[2]
        said = f'<tool_call>\n{{"name": "walk", "arguments": {{"steps": {text.split()[0]}}}}}\n</tool_call>'
        ids = chat.tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
        return ids, None, "stop", [-0.1] * len(ids)

    return ScriptedEngine(say)


@pytest.mark.slow
def test_an_environment_named_in_yaml_is_played_for_three_steps(tmp_path, notes):
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [tiny, _self_]\n"
        f"actor_rollout_ref:\n  rollout:\n    environment: {{path: '{MAZE}:Maze', config: {{size: 3}}}}\n"
    )
    config = compose([*SMALL, f"trainer.default_local_dir={tmp_path / 'run'}"], config_name=str(file))
    trainer = build_trainer(config, engine=walks_out(config))
    try:
        trainer.fit()
    finally:
        trainer.close()
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 12 and {row["stop_reason"] for row in rows} == {"environment"}
    assert {row["reward"] for row in rows} == {1.0}
    for row in rows:
        assert row["loss_mask"] == row["sampled"] if "loss_mask" in row else True
        assert row["messages"][0]["content"].startswith("The exit is")
        assert row["messages"][-1]["content"] == "You are out."
    assert_each_closed_once(notes(), 12)


def command(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """The real command, on the real small model."""
    words = (*SMALL, f"trainer.default_local_dir={tmp_path / 'run'}", f"{RO}.environment.path={MAZE}:Maze", *words)
    # What the children say is only shown when the test fails.
    with (tmp_path / "output").open("w") as output:
        return warm_start.Popen(
            [sys.executable, "-m", "verl_mt.trainer", *words], cwd=tmp_path, stdout=output, stderr=output, text=True
        )


@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.release), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_run_that_is_told_to_stop_closes_every_environment_once_and_goes_on(tmp_path, notes, workers):
    slow = f"{RO}.environment.config={{wait_s: 0.5}}"
    run = command(tmp_path, slow, f"{RO}.num_workers={workers}", "data.train_batch_size=4")
    deadline = time.monotonic() + 120
    while not (tmp_path / "maze.log").exists() or len(notes()) < 8:
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(120) == 128 + signal.SIGTERM, (tmp_path / "output").read_text()
    assert_each_closed_once(notes(), 8)

    stopped = len(notes())
    again = command(tmp_path, slow, f"{RO}.num_workers={workers}", "data.train_batch_size=4")
    assert again.wait(240) == 0, (tmp_path / "output").read_text()
    assert_each_closed_once(notes(), stopped + 24)


@pytest.mark.slow
def test_a_class_of_a_python_call_is_trained_and_its_rows_are_seeds(tmp_path, notes):
    run = verl_mt.train(
        environment={"path": maze.Maze, "config": {"size": 2}}, total_training_steps=3, save_freq=-1,
        train_batch_size=2, rollout__n=2, val_max_samples=2, logger=[], num_threads=1, resume_mode="disable",
        default_local_dir=str(tmp_path / "run"),
    )  # fmt: skip
    rows = rows_of(run.folder)
    assert len(rows) == 12 and all(row["messages"][0]["content"].startswith("The exit is") for row in rows)
    assert not any(row["error"] for row in rows)
    assert_each_closed_once(notes(), 12 + 2 * 2 * 2)
    found = verl_mt.evaluate_model(run.model, environment=maze.Maze, val_max_samples=3)
    assert len(found.rollouts) == 3 and {t.error for t in found.rollouts} == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ([f"{RO}.environment.path={MAZE}:Maize"], PluginError, "has no 'Maize'; did you mean 'Maze'?"),
        ([f"{RO}.environment.path={MAZE}:LOG"], PluginError, "is 'MAZE_LOG', no environment. Write a subclass"),
        (
            [f"{RO}.environment.path={MAZE}:Maze", f"{RO}.environment.config={{sise: 3}}"],
            ConfigError,
            "(Maze) takes no 'sise'; did you mean 'size'. Its constructor takes: size, wait_s",
        ),
        (
            [f"{RO}.environment.path={MAZE}:Maze", f"{RO}.multi_turn.scheduler=gym_scheduler"],
            ConfigError,
            "an environment is played by the tool loop, over several turns. Remove one of them",
        ),
        (
            [f"{RO}.environment.path={MAZE}:Maze", f"{RO}.multi_turn.enable=False"],
            ConfigError,
            "an environment is played by the tool loop",
        ),
        (
            [f"{RO}.environment.config={{a: 3}}"],
            ConfigError,
            "has no effect unless actor_rollout",
        ),
        (
            [f"{RO}.environment.named={{maze: '{MAZE}:Maze'}}", f"{RO}.multi_turn.tool_parser=glm45"],
            TemplateError,
            "tool_parser=glm45 cannot read the tool calls that this chat template writes",
        ),
        (
            [f"{RO}.environment.path={MAZE}:Maze", f"{RO}.interaction_config_file=interaction_configs/checker.yaml"],
            ConfigError,
            "Maze has a method `reply`",
        ),
        (
            [f"{RO}.environment.path={MAZE}:Maze", "data.apply_chat_template=False"],
            ConfigError,
            "data.apply_chat_template=False has no effect unless",
        ),
        (
            [f"{RO}.environment.path={MAZE}:Maze", "data.train_files=verl_mt.tiny.problems:rows"],
            DataError,
            "(Maze.reset) wants 'seed', which the row has not. Add the column seed",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sampled(tmp_path, words, error, text):
    with pytest.raises(error) as caught:
        build_trainer(compose([*SMALL, f"trainer.default_local_dir={tmp_path / 'run'}", *words])).close()
    assert text in str(caught.value)


@pytest.mark.slow
def test_a_class_of_a_python_call_is_not_found_by_rollout_workers_and_that_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        verl_mt.train(
            environment=maze.Maze, rollout__num_workers=2, total_training_steps=1, save_freq=-1, logger=[],
            default_local_dir=str(tmp_path / "run"),
        )  # fmt: skip
    assert "num_workers=2: Maze is an object of this Python call (maze.Maze)" in str(caught.value)
    assert "pass 'my_file.py:Maze', or set actor_rollout_ref.rollout.num_workers=0" in str(caught.value)
