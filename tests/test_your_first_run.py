"""`docs/your_first_run.md` word for word: its files and its commands, from a wheel, in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import pytest
import warm_start
from code_blocks import REPO, blocks_of

from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.extensions.compat.migrate.shell import read_script

PAGE = REPO / "docs" / "your_first_run.md"
GAIN = 0.2
"""Of held-out accuracy, sampled, from the start of RL to its end."""


def install(folder: Path) -> dict[str, str]:
    """The environment of a process that sees the wheel, and nothing of this checkout."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    done = subprocess.run([*pip, "--target", str(folder / "site"), str(REPO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {**kept, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


SHORT = {
    "verl_mt.evaluate": ["data.val_max_samples=2", "trainer.num_threads=1"],
    "verl_mt.sft": [
        "trainer.total_training_steps=1",
        "data.val_max_samples=2",
        "data.train_batch_size=4",
        "trainer.num_threads=1",
    ],
    "verl_mt.trainer": [
        "trainer.total_training_steps=1",
        "data.train_max_samples=16",
        "data.val_max_samples=2",
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.num_threads=1",
    ],
}
"""Module -> what its commands are given besides, where they need not lead anywhere."""


class Reader:
    """Does what the page says, in its order.

    Args:
        besides: module -> overrides behind the words of its commands.
    """

    def __init__(self, folder: Path, besides: Mapping[str, list[str]]):
        self.besides = besides
        self.environment = install(folder)
        self.folder = folder / "mine"
        self.folder.mkdir()
        self.said: dict[str, list[str]] = {}
        """Module -> what its commands printed."""

    def follow(self) -> None:
        for block in blocks_of(PAGE):
            if block.title is not None:
                (self.folder / block.title).write_text(block.text)
            elif block.language == "bash":
                for command in read_script(block.text).commands:
                    self.run(command.words)

    def run(self, words: list[str]) -> None:
        assert words[0] == "python", words
        words = [*words, *self.besides.get(words[-1] if len(words) < 3 else words[2], [])]
        done = warm_start.run(
            [sys.executable, *words[1:]], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        self.said.setdefault(words[2] if words[1] == "-m" else words[1], []).append(
            " ".join((done.stdout + done.stderr).split())
        )

    def accuracies(self, run: str) -> list[float]:
        lines = read_jsonl_tolerant(self.folder / "runs" / run / "metrics.jsonl")
        return [line["val/accuracy"] for line in lines if "val/accuracy" in line]


@pytest.fixture
def reader(tmp_path, monkeypatch) -> Iterator[Reader]:
    """Commands are forks of a process that has imported the wheel."""
    reader = Reader(tmp_path, SHORT)
    monkeypatch.setenv(warm_start.ADDRESS, "")  # to be as it was after the test
    server = warm_start.Server(environment=reader.environment)
    yield reader
    assert (server.counts().keys(), server.counts()[""] > 5) == ({""}, True)
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_of_the_page_does_its_work(reader):
    """A few steps of each; whether the model learns is the other test's question."""
    where = reader.folder / "where.py"
    where.write_text("import verl_mt; print(verl_mt.__file__)")
    reader.run(["python", "where.py"])
    where.unlink()
    assert reader.said["where.py"] == [str(reader.folder.parent / "site" / "verl_mt" / "__init__.py")]
    here, installed = REPO / "config", reader.folder.parent / "site" / "verl_mt" / "_configs" / "config"
    assert {f.relative_to(here): f.read_text() for f in here.rglob("*.yaml")} == {
        f.relative_to(installed): f.read_text() for f in installed.rglob("*.yaml")
    }
    reader.run(["python", "-m", "verl_mt.doctor", "experiment=gsm8k_tiny", "algorithm=dapo", "--cfg", "job"])
    assert "clip_ratio_high: 0.28" in reader.said.pop("verl_mt.doctor")[0]
    reader.follow()
    files, run = reader.said["verl_mt.doctor"][:2]
    assert files.count("all can be used") == 2
    assert "0 error(s), 0 warning(s)" in run
    assert "too hard for GRPO" in reader.said["verl_mt.evaluate"][0]
    assert len(reader.accuracies("stock")) == 2
    assert (reader.folder / "runs" / "stock" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(5400)
def test_the_page_leads_to_a_reward_that_rises(tmp_path):
    reader = Reader(tmp_path, {})
    reader.follow()
    files, run = reader.said["verl_mt.doctor"][:2]
    assert files.count("all can be used") == 2
    assert "0 error(s), 0 warning(s)" in run
    without, started = reader.said["verl_mt.evaluate"]
    assert "too hard for GRPO" in without and "a start that GRPO can learn from" in started
    (again,) = [command for block in blocks_of(PAGE) if "verl_mt.trainer" in block.text for command in words_of(block)]
    reader.run([*again, "trainer.seed=1", "data.seed=1", "trainer.default_local_dir=runs/second"])
    for run in ("stock", "second"):
        before, *_, after = reader.accuracies(run)
        assert after - before >= GAIN, reader.accuracies(run)
        lines = read_jsonl_tolerant(reader.folder / "runs" / run / "metrics.jsonl")
        rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
        assert fmean(rewards[-10:]) - fmean(rewards[:10]) >= GAIN
    rows = [json.loads(line) for line in (reader.folder / "start" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 800


def words_of(block) -> list[list[str]]:
    return [command.words for command in read_script(block.text).commands]
