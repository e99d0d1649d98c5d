"""`data.over_sample`: batches of what finishes first, in which nothing is older than the bound or left for ever; and
what else goes on when steps are sampled ahead: refills, rollbacks, conversations that begin again, kills."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from dataclasses import replace

import pytest
from command_lab import fit, interrupt_after, metrics_of, rows_of, small_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import before_release
from test_staleness import AHEAD, CHANGES, RUN, SHORT, STEPS, ages, order_of_drawing, slow_tool

from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import read_prompt_log
from verl_mt.data.ledger import TrajectoryRecord, TurnSpan
from verl_mt.data.sampler import ShuffledSampler
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.errors import CollapseError, DataError
from verl_mt.extensions.asynchronous.in_flight import OverSampling, over_sampling
from verl_mt.extensions.inspection import prompt_log
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer.rollout_source import RolloutSource, step_of
from verl_mt.trainer.spool import GroupSpool

assert slow_tool  # a fixture
pytestmark = pytest.mark.usefixtures("warm_workers")


def test_of_one_batch_there_is_nothing_to_choose():
    assert over_sampling(4, 1.0, 2) is None
    assert over_sampling(4, 1.5, 2) == OverSampling(4, 1.5, 2)
    assert step_of("s000007") == step_of("s000007.001.00003") == 6


def group(name: str) -> TrajectoryGroup:
    return TrajectoryGroup(name, name, [])


def test_a_batch_is_what_finishes_first_as_long_as_older_ones_can_wait():
    over = OverSampling(2, 2.0, 1)
    first = {f"s000001.0000{k}": 0 for k in range(4)}
    finished = [group(name) for name in list(first)[::-1]]
    assert over.choose(finished[:1], open_at=first, step=0) is None
    for there in (finished[:2], finished):
        assert [g.prompt_id for g in over.choose(there, open_at=first, step=0)] == ["s000001.00003", "s000001.00002"]
    # Those that are left have their last step next: it waits for both, whatever else is finished.
    later = {"s000001.00000": 0, "s000001.00001": 0, "s000002.00000": 1, "s000002.00001": 1}
    young = [group("s000002.00000"), group("s000002.00001")]
    assert over.choose(young, open_at=later, step=1) is None
    assert over.choose([*young, group("s000001.00001")], open_at=later, step=1) is None
    chosen = over.choose([*young, group("s000001.00001"), group("s000001.00000")], open_at=later, step=1)
    assert sorted(g.prompt_id for g in chosen) == ["s000001.00000", "s000001.00001"]


@pytest.mark.slow
@given(
    size=st.integers(1, 5),
    bound=st.integers(0, 4),
    share=st.floats(0.01, 1),
    steps=st.integers(1, 8),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_whatever_finishes_when_each_prompt_is_trained_in_time_and_none_is_left(size, bound, share, steps, chance):
    over = OverSampling(size, 1 + share * max(1, bound), bound)
    open_at: dict[str, int] = {}
    heavy: dict[str, float] = {}
    trained: dict[str, int] = {}

    def top_up(name: str, version: int, next_step: int) -> None:
        number = over.room(len(open_at), begun=version, next_step=next_step, steps_left=steps - next_step)
        for k in range(number):
            open_at[f"{name}.{k:05d}"] = version
            heavy[f"{name}.{k:05d}"] = chance.paretovariate(0.5)

    for step in range(steps):
        top_up(f"s{step + 1:06d}", step, step)
        assert size <= len(open_at) <= math.ceil(over.factor * size)
        order = [group(name) for name in sorted(open_at, key=lambda name: heavy[name])]
        least = next(n for n in range(len(order) + 1) if over.choose(order[:n], open_at=open_at, step=step))
        chosen = [g.prompt_id for g in over.choose(order[:least], open_at=open_at, step=step)]
        assert len(chosen) == size and set(chosen) <= {g.prompt_id for g in order[:least]}
        # Nobody is waited for whom no last step asks for: the first to finish are enough where all can wait, and
        # otherwise those that cannot, with the first of the others.
        ends = [sum(begun + max(1, bound) <= step + j for begun in open_at.values()) for j in range(max(1, bound))]
        if all(number <= j * size for j, number in enumerate(ends)):
            assert least == size
        trained |= dict.fromkeys(chosen, step)
        assert all(step - open_at.pop(name) <= max(1, bound) for name in chosen), "nobody is left for ever"
        if bound:
            top_up(f"s{step + 1:06d}.001", step, step + 1)
    assert not open_at and len(trained) == size * steps


# Runs

OVER = "data.over_sample=1.5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "factor", "workers"),
    [
        (0, 1.5, 0),
        (2, 1.5, 2),
        before_release(1, 2.0, 0),
        before_release(2, 1.5, 0),
        before_release(2, 3.0, 0),
        before_release(0, 1.5, 2),
    ],
)
def test_with_slow_tools_every_prompt_is_trained_once_and_in_time(tmp_path, slow_tool, bound, factor, workers):
    run = tmp_path / "run"
    words = (slow_tool, f"trainer.max_staleness={bound}", f"data.over_sample={factor}")
    words += (f"actor_rollout_ref.rollout.num_workers={workers}",) if workers else ()
    fit(run, *RUN, *words)
    found = [ages(run, step) for step in range(1, STEPS + 1)]
    assert min(map(min, found)) >= 0 and max(map(max, found)) <= bound
    prompts = read_prompt_log(run).prompts.values()
    assert len(prompts) == 2 * STEPS and prompt_log.main([str(run)]) == 0
    passed = [p.trained_in[0] - 1 - step_of(p.prompt_id) for p in prompts]
    assert max(passed) <= max(1, bound) and min(passed) == 0 and max(passed) > 0, "some were left to others"
    began_again = [p.starts > 1 for p in prompts]
    assert any(began_again) == (bound == 0), "without a bound what is left begins again, counted"


@pytest.mark.slow
def test_what_is_in_flight_when_a_run_is_stopped_goes_on_under_its_own_names(tmp_path, slow_tool, capsys):
    run, words = tmp_path / "run", (*RUN, AHEAD, OVER)
    for step in (1, 2):
        trainer = small_trainer(run, *words, slow_tool)
        interrupt_after(trainer, step)
        trainer.fit()
        assert prompt_log.main([str(run)]) == 0
        assert re.search(rf"{2 * step} trained, 0 left out, \d+ open", capsys.readouterr().out)
    fit(run, *words, slow_tool)
    assert prompt_log.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^{2 * STEPS} drawn, {2 * STEPS} trained, 0 left out, 0 open", said, re.M)
    assert re.search(r"\d+ prompts were in flight .* started again", said)
    assert max(max(ages(run, step)) for step in range(1, STEPS + 1)) <= 2
    rows = order_of_drawing(tmp_path / "straight")
    assert [(p.source, p.row_index) for p in read_prompt_log(run).prompts.values()] == rows


@pytest.fixture(scope="module")
def stopped_after_one(tmp_path_factory, slow_tool):
    """A run with steps ahead, to be read only."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    trainer = small_trainer(run, *RUN, AHEAD, slow_tool)
    interrupt_after(trainer, 1)
    trainer.fit()
    return run


LEFT = ([], ["in flight, other steps"])


@pytest.mark.slow
@pytest.mark.xdist_group("stopped_after_one")
@pytest.mark.parametrize(
    ("words", "number", "lives"),
    [
        ((), 6, [LEFT] * 6 + [([s], []) for s in range(2, STEPS + 1) for _ in range(2)]),
        ((AHEAD, "trainer.total_training_steps=2"), 4, [([2], [])] * 2 + [LEFT] * 4),
    ],
    ids=["another bound", "fewer steps"],
)
def test_prompts_in_flight_that_have_no_place_where_a_run_goes_on_are_left_out(
    stopped_after_one, tmp_path, caplog, words, number, lives
):
    other = tmp_path / "other"
    source = f"trainer.resume_from_path={stopped_after_one / 'checkpoints' / 'step_000001'}"
    fit(other, *RUN, SHORT, *words, "trainer.resume_mode=resume_path", source)
    assert f"{number} prompts that were in flight are left out" in caplog.text
    assert [(p.trained_in, p.left_out) for p in read_prompt_log(other).prompts.values()] == lives
    assert prompt_log.main([str(other)]) == 0


@pytest.mark.slow
def test_going_on_in_the_same_rows_keeps_what_is_in_flight_whatever_the_mode(tmp_path, caplog):
    for mode, step in (("auto", 1), ("other_data", 2)):
        trainer = small_trainer(tmp_path / "run", *RUN, AHEAD, SHORT, f"trainer.resume_mode={mode}")
        interrupt_after(trainer, step)
        trainer.fit()
    fit(tmp_path / "run", *RUN, AHEAD, SHORT, "trainer.resume_mode=other_data")
    assert "left out" not in caplog.text and prompt_log.main([str(tmp_path / "run")]) == 0
    assert [p.trained_in for p in read_prompt_log(tmp_path / "run").prompts.values()] == [
        [1 + k // 2] for k in range(2 * STEPS)
    ]


class Locked(ShuffledSampler):
    """Its rows hold what cannot be written."""

    def next_batch(self, n):
        return [replace(row, metadata={"lock": threading.Lock()}) for row in super().next_batch(n)]


@pytest.mark.slow
def test_a_row_that_no_checkpoint_can_hold_is_named_at_the_first_step(tmp_path):
    own = (SHORT, f"data.sampler={__name__}:Locked")
    with pytest.raises(DataError, match=r"row \d+ is in flight .* in a checkpoint: metadata.lock is a _thread.lock"):
        fit(tmp_path / "run", *RUN, AHEAD, *own)
    fit(tmp_path / "synchronous", *RUN, *own, "trainer.total_training_steps=1")


@pytest.mark.slow
def test_groups_without_signal_are_replaced_ahead_of_their_step_too(tmp_path, slow_tool):
    run = tmp_path / "run"
    words = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward")
    words += (
        "data.train_max_samples=64",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.response_length=48",
    )
    lines = fit(run, *RUN, AHEAD, slow_tool, *words, "algorithm.filter_groups.max_num_gen_batches=3")
    assert any(line["rollout/gen_batches"] > 1 for line in lines)
    assert max(max(ages(run, step), default=0) for step in range(1, STEPS + 1)) <= 2
    refills = [row for step in range(1, STEPS + 1) for row in rows_of(run, step) if row["prompt_id"].count(".") == 2]
    versions = {
        (row["step"] - 1 - v) for row in refills for r in row["records"] for v in r["policy_versions"] if v >= 0
    }
    assert versions == {0}, "by the newest weights"
    assert prompt_log.main([str(run)]) == 0
    assert not [p for p in read_prompt_log(run).prompts.values() if p.open]


@pytest.mark.slow
def test_a_rollback_restarts_every_prompt_in_flight(tmp_path, monkeypatch):
    """The smallest run with steps ahead: one prompt a step, four steps."""
    from verl_mt.trainer.ppo_trainer import PPOTrainer

    run, back, conclude = tmp_path / "run", [], PPOTrainer._conclude_step
    small = ("data.train_batch_size=1", "data.train_max_samples=8", "actor_rollout_ref.rollout.n=2")
    steps = ("actor_rollout_ref.rollout.response_length=8", "trainer.total_training_steps=4", "trainer.save_freq=1")
    trainer = small_trainer(run, *RUN, *small, *steps, AHEAD)

    def roll_back_after_two(self, metrics):
        conclude(self, metrics)
        if self.step_number == 2:
            back.extend(p.prompt_id for p in self.source.log.open)
            self._roll_back(self.checkpoints.all()[0])

    monkeypatch.setattr(PPOTrainer, "_conclude_step", roll_back_after_two)
    trainer.fit()
    assert [p.prompt_id for p in read_prompt_log(run).prompts.values() if p.starts == 2] == back != []
    records = [r for step in (3, 4) for row in rows_of(run, step) for r in row["records"]]
    versions = {v for r in records for v in r["policy_versions"] if v >= 0}
    assert min(versions) >= 3, "no token of the abandoned weights is trained"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [(OVER,), before_release(()), before_release(("actor_rollout_ref.rollout.num_workers=2",))]
)
def test_a_rollback_ends_what_the_abandoned_weights_have_begun(tmp_path, slow_tool, monkeypatch, more):
    from verl_mt.trainer.ppo_trainer import PPOTrainer

    run, back = tmp_path / "run", []
    words = (*more, "trainer.save_freq=1", "trainer.collapse_guard=rollback")
    trainer = small_trainer(run, *RUN, AHEAD, slow_tool, *words)
    conclude = PPOTrainer._conclude_step

    def roll_back_after_two(self, metrics):
        conclude(self, metrics)
        if self.step_number == 2 and not back:
            back.extend(p.prompt_id for p in self.source.log.open)
            self._roll_back(self.checkpoints.all()[0])
            self._save()  # as the guard does

    monkeypatch.setattr(PPOTrainer, "_conclude_step", roll_back_after_two)
    trainer.fit()
    assert back and prompt_log.main([str(run)]) == 0
    again = [p.prompt_id for p in read_prompt_log(run).prompts.values() if p.starts == 2]
    assert again == back, "all that was in flight was started again, and nothing else"
    rows = {row["prompt_id"]: row for step in (3, 4) for row in rows_of(run, step)}
    versions = {v for name in back for r in rows[name]["records"] for v in r["policy_versions"] if v >= 0}
    assert min(versions) >= 3, "no token of the abandoned weights is trained, and the restored ones have a new number"
    assert [{row["trained_version"] for row in rows_of(run, step)} for step in (2, 3, 4)] == [{1}, {3}, {4}]
    assert max(max(ages(run, step)) for step in range(1, STEPS + 1)) <= 2


@pytest.mark.slow
def test_the_guard_rolls_a_run_back_whose_next_steps_are_being_sampled(tmp_path, slow_tool):
    run = tmp_path / "run"
    signs = "trainer.collapse_guard_thresholds={window: 2, sampler_kl: 1e-9}"  # as old tokens are, always
    words = (AHEAD, slow_tool, signs, "trainer.collapse_guard=rollback", "trainer.save_freq=1")
    words += ("actor_rollout_ref.rollout.response_length=24", *CHANGES)
    with pytest.raises(CollapseError, match="rolled back twice"):
        fit(run, *RUN, *words, "trainer.total_training_steps=8")
    lines = metrics_of(run)
    back = [line["step"] for line in lines if "collapse/rolled_back_to" in line]
    assert len(back) == 2 and [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert prompt_log.main([str(run)]) == 0
    # What was in flight began again. Two steps later the guard may be back at it.
    for number, step in enumerate(back, 1):
        for later in range(step + 1, min(step + 2, len(lines)) + 1):
            trained = {row["trained_version"] for row in rows_of(run, later)}
            assert len(trained) == 1 and trained.pop() - max(ages(run, later)) >= step + number
    assert max(max(ages(run, line["step"])) for line in lines) <= 2
    stopped = len(lines)
    words += ("trainer.total_training_steps=8", "trainer.collapse_guard=warn")
    lines = fit(run, *RUN, *words)  # the checkpoint knows how often it went back
    assert len(lines) == 8 and {row["trained_version"] for row in rows_of(run, 8)} == {7 + 2}
    assert stopped < 8 and max(max(ages(run, line["step"])) for line in lines) <= 2


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_rollback_keeps_nothing_of_the_abandoned_weights(tmp_path, slow_tool, monkeypatch):
    from verl_mt.trainer.ppo_trainer import PPOTrainer

    run = tmp_path / "run"
    words = ("trainer.save_freq=1", "trainer.collapse_guard=rollback")
    trainer = small_trainer(run, *RUN, AHEAD, slow_tool, *words)
    conclude = PPOTrainer._conclude_step

    def stop_in_the_rollback(self, metrics):
        conclude(self, metrics)
        if self.step_number == 2:
            while not list((run / "spool").glob("*")):
                time.sleep(0.01)
            self.interrupts.requested.set()
            self._roll_back(self.checkpoints.all()[0])

    monkeypatch.setattr(PPOTrainer, "_conclude_step", stop_in_the_rollback)
    trainer.fit()
    assert trainer.step_number == 2 and not list((run / "spool").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [before_release(0), 2])
def test_conversations_that_begin_again_at_an_update_are_by_one_version_and_counted(tmp_path, slow_tool, workers):
    run, words = tmp_path / "run", (AHEAD, "actor_rollout_ref.rollout.on_update=restart", "data.train_batch_size=4")
    words += ("actor_rollout_ref.rollout.response_length=48",)
    lines = fit(run, *RUN, *words, slow_tool, f"actor_rollout_ref.rollout.num_workers={workers}")
    rows = [row for step in range(1, STEPS + 1) for row in rows_of(run, step)]
    of_each = [{v for r in row["records"] for v in r["policy_versions"] if v >= 0} for row in rows]
    assert all(len(versions) == 1 for versions in of_each)
    replaced = [row["counters"].get("replaced", 0) for row in rows]
    assert sum(replaced) == sum(line.get("rollout/replaced", 0) for line in lines) > 0
    assert not any(row["counters"].get("retries") for row in rows)
    assert prompt_log.main([str(run)]) == 0


# What was finished when a run was killed


@pytest.mark.slow
@pytest.mark.parametrize(("more", "steps"), [before_release((), 2), before_release((AHEAD,), 3), ((AHEAD, OVER), 3)])
def test_finished_groups_outlive_the_process(tmp_path, slow_tool, monkeypatch, more, steps):
    """The step is broken off when two groups have arrived, or before they are handed over where more came during the
    step before; the next process trains them as they were sampled."""
    from verl_mt.rollout.stream import RolloutStream

    run, words = tmp_path / "run", (*RUN, *more, slow_tool, "data.train_batch_size=4", "trainer.save_freq=1")
    # With compiled kernels all conversations have ended before the kill, and none is on its way.
    words += (f"trainer.total_training_steps={steps}", "actor_rollout_ref.rollout.kernels=torch")
    seen: dict[str, list[list[int]]] = {}
    take, hand_over = RolloutStream._take_arrivals, RolloutStream._hand_over

    class Killed(BaseException):
        pass

    def die(self):
        if trainer.step_number >= 1 and len(self._finished) >= 2:
            seen.update(
                {g.prompt_id: [r.token_ids for t in g.trajectories for r in t.records] for _, g in self._finished}
            )
            raise Killed

    trainer = small_trainer(run, *words)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutStream, "_take_arrivals", lambda self: (take(self), die(self)))
        patched.setattr(RolloutStream, "_hand_over", lambda self, ids: (die(self), hand_over(self, ids)))
        with pytest.raises(Killed):
            trainer.fit()
    assert len(seen) >= 2 and {path.stem for path in (run / "spool").iterdir()} >= set(seen)
    fit(run, *words)
    rows = [row for step in range(1, steps + 1) for row in rows_of(run, step)]
    trained = {
        name: [r["token_ids"] for row in rows if row["prompt_id"] == name for r in row["records"]] for name in seen
    }
    assert trained == seen
    assert all(row["time_spans"] == [] for row in rows if row["prompt_id"] in seen), "nothing was sampled again"
    assert any(row["time_spans"] for row in rows) and not (run / "spool").exists() and prompt_log.main([str(run)]) == 0
    starts = {p.prompt_id: p.starts for p in read_prompt_log(run).prompts.values()}
    assert {starts[name] for name in seen} == {1}, "kept, not begun again"
    every_later_one = len(seen) >= 4 * (steps - trainer.step_number)
    assert 2 in starts.values() or not more or every_later_one, "with steps ahead others were on their way"


@pytest.mark.slow
def test_groups_by_weights_that_went_with_the_process_are_sampled_again(tmp_path, slow_tool):
    """Killed in step 4, whose weights no checkpoint has: what was sampled by them is not used."""
    from verl_mt.trainer.ppo_trainer import PPOTrainer

    class Killed(BaseException):
        pass

    run, words = tmp_path / "run", (*RUN, AHEAD, slow_tool)
    trainer = small_trainer(run, *words)

    def die(metrics):
        if trainer.step_number == 3:
            raise Killed
        PPOTrainer._conclude_step(trainer, metrics)

    trainer._conclude_step = die
    with pytest.raises(Killed):
        trainer.fit()
    again = small_trainer(run, *words)
    assert again.step_number == 2
    of_kept = [t for kept in again.source.spool._ready.values() for t in kept.group.trajectories]
    assert all(max(r.policy_versions) <= 2 for t in of_kept for r in t.records)
    left = {path.stem for path in (run / "spool").glob("*.group")}
    assert left == set(again.source.spool._ready)
    again.fit()
    assert prompt_log.main([str(run)]) == 0


@pytest.mark.slow
def test_a_deterministic_run_keeps_nothing(tmp_path):
    run = tmp_path / "run"
    trainer = small_trainer(run, *RUN, "trainer.deterministic=True", "trainer.total_training_steps=1")
    assert type(trainer.source) is RolloutSource
    trainer.fit()
    assert not (run / "spool").exists()


def finished(name: str, ids: list[int], version: int = 2, stop: StopReason = StopReason.FINISHED) -> TrajectoryGroup:
    record = TrajectoryRecord([*ids, 9], [0] * len(ids) + [1], policy_versions=[-1] * len(ids) + [version])
    record.turns = [TurnSpan("prompt", 0, len(ids), 0)]
    span = TimeSpan("decode", 1.0, 2.0, 1)
    trajectory = Trajectory(f"{name}.00", name, name, f"{name}.00", "made", 3, records=[record], source="rows")
    trajectory.stop_reason, trajectory.time_spans = stop, [span]
    return TrajectoryGroup(name, name, [trajectory], "made", 3, "rows")


def plan_of(ids: list[int], n: int = 1) -> RolloutPlan:
    return RolloutPlan([Prompt(DataRow([], "made", index=3, source="rows"), [], [], ids)], n, "s000003")


@pytest.mark.parametrize(
    ("kept", "plan", "version", "used"),
    [
        (finished("s000003.00000", [5, 6]), plan_of([5, 6]), 2, True),
        (finished("s000003.00000", [7, 8, 9]), plan_of([5, 6]), 2, True),
        (finished("s000003.00000", [5, 6]), plan_of([5, 7]), 2, False),
        (finished("s000003.00000", [5, 6]), plan_of([5, 6], n=2), 2, False),
        (finished("s000003.00000", [5, 6]), plan_of([5, 6]), 1, False),
        (finished("s000003.00000", [5, 6]), plan_of([5, 6]), None, False),
        (finished("s000003.00001", [5, 6]), plan_of([5, 6]), 2, False),
        (finished("s000003.00000", [5, 6], stop=StopReason.ERROR), plan_of([5, 6]), 2, False),
        (finished("s000003.00000", [5, 6], stop=StopReason.ENGINE), plan_of([5, 6]), 2, False),
    ],
    ids=[
        "the same",
        "began with a text of its own",
        "another prompt",
        "more samples",
        "later weights",
        "other rows",
        "another place",
        "failed",
        "lost",
    ],
)
def test_what_was_finished_is_used_where_it_is_what_would_be_sampled(tmp_path, kept, plan, version, used):
    begun = replace(plan_of([5, 6]), positions=[int(kept.prompt_id[-1])])
    GroupSpool(tmp_path / "spool", 0).keep(begun, kept)
    found = GroupSpool(tmp_path / "spool", version).take(plan)
    assert [g.prompt_id for g in found] == [kept.prompt_id] * used
    assert all(t.time_spans == [] for g in found for t in g.trajectories), "of a clock that is gone"


def test_what_cannot_be_written_is_said_once_and_what_cannot_be_read_is_sampled_again(tmp_path, caplog):
    spool = GroupSpool(tmp_path / "spool", 0)
    for name in ("s000003.00000", "s000003.00001"):
        group = finished(name, [5])
        group.trajectories[0].info["lock"] = threading.Lock()
        spool.keep(replace(plan_of([5]), positions=[int(name[-1])]), group)
    assert caplog.text.count("finished groups are not kept") == 1 and not (tmp_path / "spool").exists()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "s000003.00000.group").write_bytes(b"torn")
    assert GroupSpool(tmp_path / "spool", 5).take(plan_of([5])) == []
    assert "is sampled again" in caplog.text and not list((tmp_path / "spool").iterdir())


@pytest.mark.slow
def test_a_group_that_is_being_written_is_written_before_its_plan_has_stopped(tmp_path):
    """What is given up is dropped next: a file that came later would outlive it."""
    written = []

    class Runner:
        tools = None

        async def run(self, plan):
            try:
                yield finished("s000003.00000", [5])
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.1)
                written.append("closed")

    def keep(plan, group):
        begun.set()
        time.sleep(0.3)
        written.append(group.prompt_id)

    stream, begun = RolloutStream(Runner()), threading.Event()
    stream.keep = keep
    try:
        stream.start(plan_of([5]))
        assert begun.wait(60)
        stream.stop()
        assert written == ["s000003.00000", "closed"] and not stream.started("s000003")
    finally:
        stream.close()
