"""Seams of the trainer: hooks that watch steps and act on them, and sources that one step cannot tell apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lab import FEW, NO_VALIDATION, VARIED, metrics_of, rows_of, small_trainer
from kill_lab import same

from verl_mt.errors import CollapseError
from verl_mt.plugins import Registry
from verl_mt.trainer import build, checkpoint
from verl_mt.trainer.checkpoint import step_of
from verl_mt.trainer.rollout_source import RolloutSource
from verl_mt.trainer.step_hook import Continue, RollBack, Save, StepHook, StepHooks, StepLine, Stop

QUICK = (*FEW, *NO_VALIDATION, VARIED, "trainer.deterministic=True", "trainer.total_training_steps=3")


class Judge(StepHook):
    """Says what it is asked to say, and writes down what it is told."""

    name = "judge"

    def __init__(self, verdicts=None):
        self.verdicts, self.told, self.seen = verdicts or {}, [], 0

    def after_rollout(self, step, groups):
        self.told.append(("rollout", step, len(groups)))

    def before_update(self, step):
        self.told.append(("before", step.number, step.version, "advantages" in step.batch.keys()))  # noqa: SIM118

    def after_update(self, step):
        step.metrics["judge/tokens"] = float(step.batch["loss_mask"].sum())
        self.told.append(("update", step.number, step.version, "old_log_probs" in step.batch.keys()))  # noqa: SIM118

    def after_step(self, line):
        self.seen += 1
        line.metrics["judge/seen"], line.words["judge/words"] = float(self.seen), f"step {line.number}"
        return self.verdicts.get(line.number, Continue())

    def summary(self):
        return [("judge", f"saw {self.seen} steps")]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state.get("seen", 0)


def trainer_with(run: Path, judge: Judge, *overrides: str):
    trainer = small_trainer(run, *QUICK, *overrides)
    trainer.hooks = StepHooks([*trainer.hooks, judge])
    return trainer


def test_the_strongest_verdict_counts_and_every_hook_is_asked():
    save, stop, back = Save(), Stop(after=lambda: ValueError("no")), RollBack(folder=Path("x"))
    hooks = [Judge({1: verdict}) for verdict in (Continue(), save, stop, back, Stop())]
    line = StepLine(1, {})
    assert StepHooks(hooks).after_step(line) is stop
    assert [hook.seen for hook in hooks] == [1] * 5 and line.words == {"judge/words": "step 1"}
    assert StepHooks(hooks[:2]).after_step(line) is save
    assert StepHooks().after_step(line) == Continue() == StepHook().after_step(line)


@pytest.mark.slow
def test_a_hook_sees_each_step_adds_to_its_line_and_has_its_state_in_checkpoints(tmp_path):
    run, order = tmp_path / "run", []

    def before():
        order.append((metrics_of(run)[-1]["step"], len(rows_of(run, 2)), trainer.checkpoints.all()))

    judge = Judge({2: Save(before=before, after=lambda: order.append(trainer.checkpoints.latest().name))})
    trainer = trainer_with(run, judge, "trainer.save_freq=-1")
    trainer.fit()
    assert judge.told[:3] == [("rollout", 0, 2), ("before", 0, 0, False), ("update", 0, 0, True)]
    assert len(judge.told) == 9 and judge.told[-1] == ("update", 2, 2, True)
    assert order == [(2, 4, []), "step_000002"], "the line and the rows are there before a verdict is carried out"
    lines = metrics_of(run)
    assert [line["judge/seen"] for line in lines] == [1, 2, 3] and lines[1]["judge/words"] == "step 2"
    assert all(line["judge/tokens"] > 0 for line in lines)
    again = trainer_with(tmp_path / "again", later := Judge(), "trainer.save_freq=-1")
    again.load_state_dict(checkpoint.load(run / "checkpoints" / "step_000002"))
    assert later.seen == 2
    again.close()


@pytest.mark.slow
def test_a_hook_rolls_a_run_back_and_ends_it_with_its_own_error(tmp_path):
    run = tmp_path / "run"
    back = RollBack(folder=run / "checkpoints" / "step_000001")
    judge = Judge({2: back, 3: Stop(after=lambda: CollapseError("enough"))})
    trainer = trainer_with(run, judge, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3")
    with pytest.raises(CollapseError, match="enough"):
        trainer.fit()
    assert [step_of(path) for path in trainer.checkpoints.all()] == [1, 2, 3]
    one, two, three = (checkpoint.load(path) for path in trainer.checkpoints.all())
    assert [state["version"] for state in (one, two, three)] == [1, 3, 4]
    assert same(one["workers"], two["workers"]) and not same(two["workers"], three["workers"])
    assert not same(one["sampler"], two["sampler"]), "rows go on"
    assert not (run / "FINISHED").exists()


@pytest.mark.slow
def test_a_source_that_may_sample_ahead_has_the_same_bits_where_it_does_not(tmp_path, monkeypatch):
    ended = []
    for name in ("synchronous", "asynchronous"):
        sources = Registry("rollout source", {**build.SOURCES, "synchronous": build.SOURCES[name]})
        monkeypatch.setattr(build, "SOURCES", sources)
        trainer = small_trainer(tmp_path / name, *QUICK, "trainer.save_freq=3")
        assert (type(trainer.source) is RolloutSource) is (name == "synchronous")
        trainer.fit()
        run, state = tmp_path / name, checkpoint.load(trainer.checkpoints.latest())
        ids = [[r["token_ids"] for row in rows_of(run, step) for r in row["records"]] for step in (1, 2, 3)]
        ended.append([state, ids, (run / "metrics.jsonl").read_bytes()])
    assert same(*ended)
