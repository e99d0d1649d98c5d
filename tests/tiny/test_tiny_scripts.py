"""The scripts that make the pages' curves and tables run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tables import before_release

from verl_mt.data import batch as columns
from verl_mt.workers.critic import CriticWorker

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny"
FEW = [
    "data.train_batch_size=4",
    "data.train_max_samples=64",
    "trainer.num_threads=1",
    "trainer.total_training_steps=1",
    "actor_rollout_ref.rollout.n=2",
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["ppo", before_release("gspo")])
def test_an_algorithms_run_is_made_once_and_its_table_is_read_from_its_files(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPE))
    import algorithms

    few = [word for word in FEW if "batch_size" not in word]
    argv = [*few, "data.train_batch_size=8", "--out", str(tmp_path), "--only", name, "--seeds", "0", "--problems", "4"]
    monkeypatch.setattr("sys.argv", ["algorithms.py", *argv])
    algorithms.main()
    folder = tmp_path / name / "seed_0"
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    algorithms.main()
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    (found,) = algorithms.results(tmp_path)[name]
    assert found["curve"][-1] == (1, json.loads((folder / "result.json").read_text())["end"])
    assert (found["explained_variance"] is not None) == (name == "ppo")
    assert name in capsys.readouterr().out


def test_the_guards_runs_are_judged_by_their_first_sign(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPE))
    import collapses

    assert collapses.main(["--out", str(tmp_path), "--only", "seed 11", *FEW]) == 0
    assert collapses.main(["--out", str(tmp_path), "--only", "rate", *FEW]) == 1, "one step is too few to see anything"
    assert "none" in capsys.readouterr().out


def test_what_a_critic_can_explain_at_the_most_is_measured(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPE))
    import critic_ceiling

    monkeypatch.setattr("sys.argv", ["critic_ceiling.py", "trainer.num_threads=1", "--prompts", "17", "--samples", "4"])
    critic_ceiling.main()
    assert "68 answers to 17 prompts" in capsys.readouterr().out


def test_a_critic_learns_from_batches_of_earlier_steps_and_is_measured_on_the_new_one(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPE))
    import critic_replay

    learned = []
    update = CriticWorker.update
    monkeypatch.setattr(CriticWorker, "update", lambda self, batch: learned.append(batch) or update(self, batch))
    words = [
        "data.train_batch_size=8", *FEW[1:3], FEW[4], "trainer.total_training_steps=3", "data.val_max_samples=2",
        "actor_rollout_ref.rollout.response_length=64", "critic.ppo_epochs=1",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["x", *words, "--out", str(tmp_path), "--seeds", "0", "--earlier", "1"])
    critic_replay.main()
    prompts = [len(batch[columns.PROMPT_INDEX].unique()) for batch in learned]
    assert prompts[1] == prompts[2] == 2 * prompts[0], "the new batch and one earlier"
    found = json.loads((tmp_path / "earlier_1/seed_0/result.json").read_text())
    assert len(found["explained"]) == 3 and "last 10 steps" in capsys.readouterr().out


def test_what_is_known_explains_the_variance_between_its_values_whatever_their_length(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    import critic_ceiling as critic

    rewards = torch.tensor([[1.0] * 500 + [0.0] * 500, [1.0] * 1000], dtype=torch.float64)
    prompt = torch.tensor([[0], [1]]).expand_as(rewards)
    # Variance 3/16, of which 1/8 is within the first prompt: a third is explained.
    assert critic.explained(rewards, torch.full_like(rewards, 7.0), prompt) == pytest.approx(1 / 3, abs=2e-3)
    assert critic.explained(rewards, torch.ones_like(rewards), 2 * prompt + rewards) == pytest.approx(1.0)
    # Three times as many tokens in the second: variance 7/64, of which 1/16 is within.
    tokens = torch.tensor([[1.0], [3.0]]).double().expand_as(rewards)
    assert critic.explained(rewards, tokens, prompt) == pytest.approx(3 / 7, abs=2e-3)
    mean, spread = critic.scatter(rewards.repeat(10, 1), tokens.repeat(10, 1), draws=20)
    assert 0.2 < mean < 0.7 and spread > 0.01
