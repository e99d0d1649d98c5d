"""`AsynchronousSource` on a clock of its own: whatever takes how long, and whatever comes between, no trained token is
older than the bound, and each prompt is trained once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_mt.data import batch as columns
from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import PromptLog, read_prompt_log
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.errors import DataError, EngineError
from verl_mt.extensions.asynchronous.in_flight import (
    AsynchronousSource,
    OverSampling,
    add_ages,
    over_sampling,
    require_bound,
    staleness_metrics,
)
from verl_mt.rewards.contract import RunState
from verl_mt.rollout.prompts import Drawn, Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.rollout_source import BatchPlan, RolloutSource, plan_name, step_of


class Rows:
    """The rows of a run, in order: sampler and draws in one."""

    def __init__(self, first: int = 0):
        self.next = first
        self.sampler = self

    def draw(self, wanted: int) -> Drawn:
        rows = [DataRow([], "made", index=self.next + k, source="rows") for k in range(wanted)]
        self.next += wanted
        return Drawn(self.again(rows), [], {})

    def again(self, rows: Sequence[DataRow]) -> list[Prompt]:
        return [Prompt(row, [], [], [row.index]) for row in rows]

    def state_dict(self) -> int:
        return self.next

    def load_state_dict(self, state: int) -> None:
        self.next = state


class TimedStream:
    """A stream whose conversations sample a token per tick, by the weights that are there then, as many as `length`
    says."""

    def __init__(self, length: Callable[[], int]):
        self.version, self.arrived = 0, lambda group: None
        self.length = length
        self.runner = SimpleNamespace(context=SimpleNamespace(sanity=SimpleNamespace(observe=lambda *_: None)))
        self.left: dict[str, int] = {}
        self.versions: dict[str, list[int]] = {}
        self.finished: list[TrajectoryGroup] = []
        self.plans: dict[str, set[str]] = {}

    def start(self, plan: RolloutPlan, finished: Sequence[TrajectoryGroup] = ()) -> None:
        assert not finished and not self.started(plan.name)
        self.plans[plan.name] = set(plan.prompt_ids)
        self.left |= {name: self.length() for name in plan.prompt_ids}
        self.versions |= {name: [] for name in plan.prompt_ids}

    def started(self, name: str) -> bool:
        return name in self.plans

    def tick(self) -> None:
        for name in [*self.left]:
            self.versions[name].append(self.version)
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
                self.finished.append(TrajectoryGroup(name, name, []))
                self.arrived(self.finished[-1])

    def collect(self, name: str, while_waiting: Callable[[], None]) -> list[TrajectoryGroup]:
        wanted = self.plans[name]
        return self.collect_some(
            lambda done: own if len(own := [g for g in done if g.prompt_id in wanted]) == len(wanted) else None
        )

    def collect_some(self, choose, while_waiting=None) -> list[TrajectoryGroup]:
        for _ in range(100_000):
            if (chosen := choose(self.finished)) is not None:
                break
            self.tick()
        ids = {group.prompt_id for group in chosen}
        self.finished = [group for group in self.finished if group.prompt_id not in ids]
        self.plans = {name: rest for name, own in self.plans.items() if (rest := own - ids)}
        return sorted(chosen, key=lambda group: group.prompt_id)

    def stop(self) -> None:
        self.left, self.finished, self.plans = {}, [], {}


class Run:
    """A run without a model: what `PPOTrainer` does with its prompts, step by step."""

    def __init__(self, folder: Path, plan: BatchPlan, length: Callable[[], int], **ahead):
        self.folder, self.plan, self.length, self.step, self.ahead = folder, plan, length, 0, ahead
        self.ages: list[int] = []
        self.begin(None)

    def begin(self, state: dict | None) -> None:
        """A process, from a checkpoint or from the start."""
        self.stream, self.log = TimedStream(self.length), PromptLog.after(state, self.folder, rows=False)
        self.source = AsynchronousSource(self.plan, Rows(), self.stream, self.log, **self.ahead)
        if state is not None:
            self.source.load_state_dict(state, other_rows=False)
            self.step = self.stream.version = state["step"]

    def checkpoint(self) -> dict:
        return {"step": self.step, **self.source.state_dict()}

    def train_one(self, update_ticks: int, refilled: int) -> None:
        self.source.begin(self.step)
        groups = self.source.collect(self.step)
        left_out = {group.prompt_id: "no signal" for group in groups[:refilled]}
        if refilled:
            groups = groups[refilled:] + self.source.more(self.step, refilled, 2)
        self.ages += [self.step - v for group in groups for v in self.stream.versions[group.prompt_id]]
        for _ in range(update_ticks):
            self.stream.tick()
        self.source.ended(self.step + 1, left_out | {group.prompt_id: None for group in groups})
        self.step += 1
        self.stream.version = self.step
        self.source.begin_ahead(self.step)

    def roll_back(self) -> None:
        """Whatever is in flight is by weights that are gone; what begins now is by others of the same number."""
        self.source.give_up()

    def close(self) -> None:
        self.log.close()


@pytest.mark.slow
@pytest.mark.parametrize("over_sampled", [False, True], ids=["steps ahead", "over-sampled"])
@given(
    size=st.integers(1, 4),
    bound=st.integers(0, 4),
    share=st.floats(0.1, 1),
    steps=st.integers(2, 8),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_whatever_takes_how_long_nothing_is_too_old_or_trained_twice(over_sampled, size, bound, share, steps, chance):
    sampling = SamplingParams(1)
    factor = 1 + share * max(1, bound) if over_sampled else 1.0
    plan = BatchPlan(size, 1, sampling, 1, sampling, False, None, steps)
    ahead = {"max_staleness": bound, "over": over_sampling(size, factor, bound)}

    def length() -> int:
        return chance.choice([1, 1, 2, 5, chance.randint(1, 300)])

    with TemporaryDirectory() as folder:
        run = Run(Path(folder), plan, length, **ahead)
        saved = run.checkpoint()
        kills = 0
        while run.step < steps:
            refilled = 0 if over_sampled else chance.choice([0, 0, chance.randint(0, size)])
            run.train_one(chance.choice([0, 1, 5, 40]), refilled)
            happens = chance.choice(["nothing", "nothing", "checkpoint", "rollback", "kill"])
            if happens == "checkpoint":
                saved = run.checkpoint()
            elif happens == "rollback":
                run.roll_back()
                saved = run.checkpoint()
            elif happens == "kill" and kills < 3:
                kills += 1
                run.close()
                run.begin(saved)
        run.close()
        history = read_prompt_log(folder)
    assert min(run.ages) >= 0 and max(run.ages) <= bound
    assert not history.unknown and not any(prompt.open for prompt in history.prompts.values())
    assert all(len(prompt.trained_in) + len(prompt.left_out) == 1 for prompt in history.prompts.values())
    trained = [prompt.trained_in[0] for prompt in history.prompts.values() if prompt.trained_in]
    assert [trained.count(step) for step in range(1, steps + 1)] == [size] * steps
    assert [prompt.row_index for prompt in history.prompts.values()] == list(range(len(history.prompts)))


def test_the_bound_is_reached_so_that_the_property_above_can_fail():
    """One conversation of each step is as long as four updates, which take ten tokens each."""
    sampling, numbers = SamplingParams(1), iter([40, 1, 1] * 10)
    with TemporaryDirectory() as folder:
        plan = BatchPlan(3, 1, sampling, 1, sampling, False, None, 6)
        run = Run(Path(folder), plan, lambda: next(numbers), max_staleness=2)
        while run.step < 6:
            run.train_one(10, 0)
        run.close()
    assert max(run.ages) == 2 and set(run.ages) == {0, 1, 2}


def test_further_prompts_of_a_step_have_the_next_free_number():
    """Prompts that are left out make room for others before the batch."""
    sampling = SamplingParams(1)
    with TemporaryDirectory() as folder:
        plan = BatchPlan(2, 1, sampling, 1, sampling, False, None, 9)
        run = Run(Path(folder), plan, lambda: 1, max_staleness=1, over=over_sampling(2, 2.0, 1))
        for left_out in ([], ["s000001.00000", "s000001.00003"], ["s000001.002.00001"]):
            run.source.ended(1, dict.fromkeys(left_out, "left out"))
            run.source.begin(0)
        opened = [known.prompt_id for known in run.log.open]
        run.close()
    first = [f"s000001.0000{k}" for k in (1, 2)]
    assert opened == [*first, "s000001.002.00000", "s000001.003.00000"]


@pytest.mark.parametrize("spooled", [False, True])
def test_groups_that_are_trained_go_to_the_spool_where_there_is_one(tmp_path, spooled):
    kept: list[tuple[str, str]] = []
    spool = SimpleNamespace(keep=lambda plan, group: kept.append((plan.name, group.prompt_id)))
    sampling = SamplingParams(1)
    plan, log = BatchPlan(2, 1, sampling, 1, sampling, False, None, 9), PromptLog.after(None, tmp_path, rows=False)
    stream = TimedStream(lambda: 1)
    AsynchronousSource(plan, Rows(), stream, log, spool=spool if spooled else None)
    assert stream.arrived == log.finished
    if spooled:
        for name, evaluation in (("s000001", False), ("v000001", True)):
            stream.keep(
                RolloutPlan([], 1, name, evaluation=evaluation), TrajectoryGroup(f"{name}.00000", f"{name}.00000", [])
            )
    else:
        assert stream.keep is None
    assert kept == [("s000001", "s000001.00000")] * spooled
    log.close()


def plan_of(size=2, *, steps=9, **changed) -> BatchPlan:
    sampling, val_sampling = SamplingParams(1), SamplingParams(2)
    return replace(BatchPlan(size, 3, sampling, 1, val_sampling, False, None, steps), **changed)


class Told:
    """A stream, a spool and draws in one, which keep what they are told."""

    def __init__(self):
        self.began: list[tuple[RolloutPlan, list[TrajectoryGroup]]] = []
        self.running: set[str] = set()
        self.dropped: list[list[str]] = []
        self.kept: dict[str, TrajectoryGroup] = {}
        self.calls: list[str] = []
        self.observed: list[tuple] = []
        observe = SimpleNamespace(observe=lambda *words: self.observed.append(words))
        self.runner = SimpleNamespace(context=SimpleNamespace(sanity=observe))
        self.next, self.left_out, self.counts, self.gone = 0, 0, {"data/filtered_prompts": 1}, set()
        self.sampler = SimpleNamespace(
            state_dict=lambda: self.next,
            load_state_dict=lambda state: self.calls.append(f"load {state}"),
            go_on_in_other_rows=lambda state: self.calls.append(f"other rows {state}"),
        )

    def start(self, plan, finished=()):
        self.began.append((plan, list(finished)))
        self.running.add(plan.name)

    def started(self, name):
        return name in self.running

    def stop(self):
        self.calls.append("stop")
        self.running.clear()

    def collect(self, name, while_waiting):
        self.calls.append(f"collect {name} {while_waiting()}")
        return [name]

    def collect_some(self, choose, while_waiting):
        self.choose = choose
        self.calls.append(f"collect some {while_waiting()}")
        return self.chosen

    def draw(self, wanted):
        rows = [DataRow([], "made", index=self.next + k, source="rows") for k in range(wanted)]
        self.next += wanted
        return Drawn(self.again(rows), [(DataRow([], "bad"), "too long")] * self.left_out, dict(self.counts))

    def again(self, rows):
        return [None if row.index in self.gone else Prompt(row, [], [], [row.index]) for row in rows]

    def take(self, plan):
        return [self.kept[name] for name in plan.prompt_ids if name in self.kept]

    def drop(self, names):
        self.dropped.append(list(names))

    def clear(self):
        self.calls.append("clear")

    @property
    def names(self) -> list[tuple[str, int]]:
        return [(plan.name, len(plan.prompts)) for plan, _ in self.began]


def flight_of(folder, plan, state=None, *, spooled=True, bound=0, factor=1.0) -> tuple[AsynchronousSource, Told]:
    told = Told()
    log = PromptLog.after(state, folder, rows=False)
    waiting = {"while_waiting": lambda: "waiting", "on_bad_row": lambda: told.calls.append("bad row")}
    ahead = {"max_staleness": bound, "over": over_sampling(plan.num_prompts, factor, bound)}
    return AsynchronousSource(plan, told, told, log, spool=told if spooled else None, **waiting, **ahead), told


def opened(flight) -> list[str]:
    return [known.prompt_id for known in flight.log.open]


def test_names_count_steps_from_one_and_back():
    assert [plan_name(step) for step in (0, 6, 999_999)] == ["s000001", "s000007", "s1000000"]
    assert [step_of(name) for name in ("s000001", "s000007.001.00012", "s1000000.00000")] == [0, 6, 999_999]


@pytest.mark.parametrize(("factor", "there"), [(0.5, False), (1.0, False), (1.001, True)])
def test_more_than_a_batch_is_over_sampling(factor, there):
    assert over_sampling(4, factor, 2) == (OverSampling(4, factor, 2) if there else None)


@pytest.mark.parametrize(
    ("over", "in_flight", "begun", "next_step", "steps_left", "room"),
    [
        (OverSampling(4, 1.4, 0), 0, 0, 0, 9, 6),  # 5.6, as a whole number
        (OverSampling(4, 3.0, 0), 0, 0, 0, 9, 8),  # two batches are in time
        (OverSampling(4, 3.0, 1), 0, 0, 0, 9, 8),
        (OverSampling(4, 3.0, 2), 0, 0, 0, 9, 12),
        (OverSampling(4, 9.0, 2), 0, 0, 1, 9, 8),
        (OverSampling(4, 9.0, 2), 5, 3, 3, 9, 7),
        (OverSampling(4, 9.0, 2), 0, 3, 3, 2, 8),
        (OverSampling(4, 9.0, 2), 9, 3, 3, 2, 0),
        (OverSampling(4, 1.5, 2), 6, 3, 3, 9, 0),
        (OverSampling(4, 1.5, 2), 0, 3, 3, 0, 0),
    ],
)
def test_no_more_are_started_than_can_be_trained_in_time(over, in_flight, begun, next_step, steps_left, room):
    assert over.room(in_flight, begun=begun, next_step=next_step, steps_left=steps_left) == room


def test_each_prompt_waits_one_step_or_as_many_as_may_be_stale():
    assert [OverSampling(1, 2.0, bound).patience for bound in (0, 1, 2, 5)] == [1, 1, 2, 5]


@pytest.mark.parametrize(
    ("bound", "finished", "open_at", "step", "chosen"),
    [
        # Of two steps, one prompt of the older: it must be in this batch, whatever came first.
        (1, "bca", {"a": 0, "b": 1, "c": 1, "d": 1}, 1, "ba"),
        (1, "bcd", {"a": 0, "b": 1, "c": 1, "d": 1}, 1, None),
        (2, "bca", {"a": 0, "b": 1, "c": 1, "d": 1}, 1, "bc"),
        # Three that may wait one step: the next batch takes two, one must be in this.
        (2, "xyabc", {"a": 0, "b": 0, "c": 0, "x": 1, "y": 1}, 1, "xa"),
        (2, "xy", {"a": 0, "b": 0, "x": 1, "y": 1}, 1, "xy"),
        # Overdue ones have no slack, as those of their last step.
        (1, "ba", {"a": 0, "b": 3}, 3, "ba"),
        (1, "bca", {"a": 0, "b": 3, "c": 3}, 3, "ba"),
        (1, "", {"a": 0}, 0, None),
        (1, "a", {"a": 0}, 0, None),
    ],
)
def test_a_batch_takes_the_earliest_that_leave_room_for_those_that_cannot_wait(bound, finished, open_at, step, chosen):
    groups = [TrajectoryGroup(name, name, []) for name in finished]
    found = OverSampling(2, 9.0, bound).choose(groups, open_at=open_at, step=step)
    assert found == (
        None if chosen is None else [group for name in chosen for group in groups if group.prompt_id == name]
    )


@pytest.mark.parametrize(
    ("bound", "factor", "several"), [(0, 1.0, False), (1, 1.0, True), (0, 2.0, True), (2, 2.0, True)]
)
def test_what_decides_when_prompts_start(tmp_path, bound, factor, several):
    flight, told = flight_of(tmp_path, plan_of(4), bound=bound, factor=factor)
    assert flight.metrics([]) == ({"rollout/prompts_in_flight": 0} if several else {})
    assert flight.admission == {"prompts": 4, "over_sample": factor, "max_staleness": bound}
    synchronous = RolloutSource(plan_of(4), told, told, flight.log)
    assert (synchronous.admission == flight.admission) is not several


def test_without_steps_ahead_both_sources_do_the_same(tmp_path):
    said = []
    for name, source in (("core", RolloutSource), ("ahead", AsynchronousSource)):
        told = Told()
        made = source(plan_of(2), told, told, PromptLog.after(None, tmp_path / name, rows=False))
        (tmp_path / name).mkdir()
        for step in range(2):
            made.begin(step)
            made.collect(step)
            made.more(step, 1, 2)
            made.ended(step + 1, {"s000001.00000": None})
            made.begin_ahead(step + 1)
        made.give_up()
        made.begin(2)
        made.log.close()
        plans = [(plan.name, plan.prompts, plan.positions, plan.run) for plan, _ in told.began]
        said.append((plans, told.calls, made.state_dict(), (tmp_path / name / "prompt_log.jsonl").read_text()))
    assert said[0] == said[1] and len(said[0][0]) > 5


def test_a_rollout_is_told_how_to_sample_and_where_the_run_stands():
    plan = plan_of(greedy_too=True, run=RunState(7, 9, 2, 1))
    made = plan.rollout(["p"], "s000004", 3)
    assert (made.prompts, made.n, made.name, made.sampling) == (["p"], 3, "s000004", SamplingParams(1))
    assert made.greedy_too and not made.evaluation and made.run == RunState(3, 9, 2, 1) and made.positions is None


def test_steps_ahead_begin_once_up_to_the_last_step(tmp_path):
    flight, told = flight_of(tmp_path, plan_of(2, steps=4), bound=2)
    flight.begin(0)
    assert told.names == [("s000001", 2), ("s000002", 2), ("s000003", 2)]
    assert [plan.run.step for plan, _ in told.began] == [0, 1, 2]
    flight.begin_ahead(1)
    assert told.names[3:] == [("s000004", 2)]
    flight.begin(2)
    flight.begin(3)
    assert len(told.names) == 4
    flight.begin(4)
    assert told.names[4:] == [("s000005", 2)], "a step that is asked for begins"
    flight.log.close()


@pytest.mark.parametrize(("bound", "names"), [(0, [("s000003", 3)]), (1, [("s000003", 3), ("s000003.001", 1)])])
def test_places_in_flight_are_filled_up_before_a_batch_and_before_its_update(tmp_path, bound, names):
    """Of a batch of 2, at most 3 in flight. While it is trained its own prompts are open in the log, and one more waits
    for the next batch, which takes 2."""
    flight, told = flight_of(tmp_path, plan_of(2, steps=9), bound=bound, factor=1.5)
    told.chosen = []
    flight.begin(2)
    flight.begin(2)
    flight.collect(2)
    assert told.names == names
    flight.log.close()


def test_places_in_flight_end_with_the_run(tmp_path):
    flight, told = flight_of(tmp_path, plan_of(2, steps=3), bound=1, factor=2.0)
    told.chosen = []
    flight.begin(2)
    flight.collect(2)
    assert told.names == [("s000003", 2)]
    flight.log.close()


def test_a_batch_of_whole_steps_is_collected_by_its_name(tmp_path):
    flight, told = flight_of(tmp_path, plan_of())
    assert flight.collect(4) == ["s000005"] and told.calls == ["collect s000005 waiting"]
    assert flight.more(4, 3, 2) == ["s000005.002"] and told.names == [("s000005.002", 3)]
    assert told.calls[1:] == ["collect s000005.002 waiting"]
    assert told.began[0][0].run.step == 4
    flight.log.close()


@pytest.mark.parametrize("bound", [0, 1])
def test_a_batch_is_chosen_of_what_is_open_and_the_rest_goes_on_only_where_it_may_be_stale(tmp_path, bound):
    flight, told = flight_of(tmp_path, plan_of(2), bound=bound, factor=2.0)
    flight.begin(3)
    names = opened(flight)
    told.chosen = [TrajectoryGroup(name, name, []) for name in names[1:3]]
    assert flight.collect(3) == told.chosen
    assert told.calls == ["collect some waiting", *["stop"] * (not bound)]
    assert told.dropped == ([] if bound else [[names[0], names[3]]])
    assert told.choose.keywords == {"open_at": dict.fromkeys(names, 3), "step": 3}
    flight.log.close()


@pytest.mark.parametrize("spooled", [True, False])
def test_what_is_over_or_given_up_leaves_the_spool(tmp_path, spooled):
    flight, told = flight_of(tmp_path, plan_of(), spooled=spooled)
    flight.begin(0)
    flight.ended(1, {"s000001.00000": None})
    flight.give_up()
    flight.end()
    assert opened(flight) == ["s000001.00001"]
    assert told.dropped == [["s000001.00000"], ["s000001.00001"]] * spooled
    assert told.calls == ["stop", *["clear"] * spooled]
    flight.log.close()


def test_what_was_given_up_begins_again_in_its_places(tmp_path):
    flight, told = flight_of(tmp_path, plan_of(3), bound=1)
    flight.begin(0)
    flight.log.ended(1, {"s000001.00001": None})
    flight.give_up()
    told.gone = {2}
    flight.begin(1)
    again, whole, following = (plan for plan, _ in told.began[2:])
    assert (again.name, again.positions, again.run.step) == ("s000001", [0], 0)
    assert [prompt.row.index for prompt in again.prompts] == [0]
    assert (whole.name, whole.positions, whole.run.step) == ("s000002", [0, 1, 2], 1)
    assert [prompt.row.index for prompt in whole.prompts] == [3, 4, 5] and following.name == "s000003"
    flight.log.close()
    lives = read_prompt_log(tmp_path).prompts
    assert lives[2].left_out == ["no prompt any more"] and [lives[n].starts for n in (0, 1, 2, 3, 6)] == [2, 1, 1, 2, 1]


def test_groups_that_were_kept_are_not_sampled_again(tmp_path):
    flight, told = flight_of(tmp_path, plan_of(2))
    kept = TrajectoryGroup("s000001.00001", "s000001.00001", [Trajectory(f"t{k}", "p", "g", "e") for k in range(3)])
    kept.trajectories[1].sanity = {"cause": "x"}
    told.kept[kept.prompt_id] = kept
    flight.begin(0)
    assert [(plan.name, finished) for plan, finished in told.began] == [("s000001", [kept])]
    assert told.observed == [(None, "s000001")] * 2
    flight.log.close()
    lives = read_prompt_log(tmp_path).prompts
    assert [(p.starts, p.attempts) for p in lives.values()] == [(1, None), (0, 1)]


def test_what_was_drawn_is_counted_for_its_step_and_logged(tmp_path):
    flight, told = flight_of(tmp_path, plan_of(2))
    told.left_out = 1
    flight.begin(0)
    told.counts = {"data/filtered_prompts": 2, "data/bad_rows": 5}
    flight.more(0, 1, 2)
    told.counts = {"data/filtered_prompts": 7}
    flight.begin(1)
    saved = flight.state_dict()
    assert saved["drawn"] == {0: {"data/filtered_prompts": 3, "data/bad_rows": 5}, 1: {"data/filtered_prompts": 7}}
    assert (saved["sampler"], saved["admission"]) == (5, flight.admission)
    assert saved["prompts"] == flight.log.state_dict() and saved["prompts"]["left_out"] == 3
    assert flight.counts(0) == saved["drawn"][0] and flight.counts(0) == {} and flight.counts(1) == saved["drawn"][1]
    flight.log.close()


def test_a_draw_that_fails_is_said_before_it_ends_the_run(tmp_path):
    flight, told = flight_of(tmp_path, plan_of())

    def draw(wanted):
        raise DataError("bad")

    told.draw = draw
    with pytest.raises(DataError, match="bad"):
        flight.begin(0)
    assert told.calls == ["bad row"] and not told.began


def saved_in_flight(folder, plan):
    flight, _ = flight_of(folder, plan, bound=2)
    flight.begin(0)
    flight.log.ended(1, dict.fromkeys(opened(flight)[: plan.num_prompts]))
    flight.log.close()
    return {"step": 1, **flight.state_dict()}


@pytest.mark.parametrize(
    ("changed", "other_rows", "left"),
    [({}, False, 4), ({"total_steps": 2}, False, 2), ({"total_steps": 1}, False, 0), ({"total_steps": 0}, False, 0),
     ({"max_staleness": 1}, False, 0), ({}, True, 0)],
)  # fmt: skip
def test_prompts_in_flight_go_on_where_the_run_is_the_same(tmp_path, caplog, changed, other_rows, left):
    plan = plan_of(2, steps=5)
    state = saved_in_flight(tmp_path, plan)
    bound = changed.get("max_staleness", 2)
    changed = {key: value for key, value in changed.items() if key != "max_staleness"}
    flight, told = flight_of(tmp_path, replace(plan, **changed), state, bound=bound)
    with caplog.at_level(logging.WARNING):
        flight.load_state_dict(state, other_rows=other_rows)
    assert opened(flight) == ["s000002.00000", "s000002.00001", "s000003.00000", "s000003.00001"][:left]
    assert told.calls == ["other rows 6" if other_rows else "load 6"]
    assert flight.counts(1) == ({} if other_rows else {"data/filtered_prompts": 1})
    assert ("4 prompts that were in flight are left out" in caplog.text) is (left == 0)
    assert bool(caplog.text) is (left < 4)
    flight.log.close()
    lives = read_prompt_log(tmp_path).prompts
    assert [n for n, p in lives.items() if p.left_out == ["in flight, other steps"]] == [2, 3, 4, 5][left:]


def test_a_checkpoint_of_an_older_version_counts_nothing(tmp_path):
    flight, told = flight_of(tmp_path, plan_of())
    flight.load_state_dict({"step": 1, "sampler": 3}, other_rows=False)
    assert told.calls == ["load 3"] and flight.state_dict()["drawn"] == {}


NAN = math.nan


def aged(versions, *, sampled=None, loss=None) -> TensorDict:
    """Two rows of four tokens; version -1 is nobody's."""
    versions = torch.tensor(versions)
    sampled = versions >= 0 if sampled is None else torch.tensor(sampled)
    found = {columns.POLICY_VERSIONS: versions, columns.SAMPLED: sampled, columns.LOSS_MASK: sampled}
    if loss is not None:
        found[columns.LOSS_MASK] = torch.tensor(loss)
    return TensorDict(found, batch_size=[len(versions)])


def test_ages_are_of_sampled_tokens():
    batch = aged([[-1, 5, 3, -1], [-1, 4, 5, 5]])
    add_ages(batch, 5)
    assert batch[columns.AGES].tolist() == [[0, 0, 2, 0], [0, 1, 0, 0]] and batch[columns.AGES].dtype == torch.int32


@pytest.mark.parametrize(
    ("versions", "loss", "fits"),
    [
        ([[-1, 5, 3]], None, True), ([[-1, 5, 2]], None, False), ([[-1, 6, 5]], None, False),
        ([[-1, 3, 3]], None, True), ([[-1, 5, 2]], [[False, True, False]], True),
        ([[-1, 5, 2]], [[True, True, False]], True), ([[-1, -1, -1]], None, True),
    ],
)  # fmt: skip
def test_trained_tokens_are_not_older_than_the_bound_or_younger_than_the_weights(versions, loss, fits):
    batch = aged(versions, loss=loss)
    if fits:
        require_bound(batch, 5, 2)
    else:
        with pytest.raises(EngineError, match=r"\(version 5\), trainer\.max_staleness=2"):
            require_bound(batch, 5, 2)


def test_staleness_is_measured_over_trained_tokens_by_age():
    """Ages 0, 2, 2 and, in a row without log-probs, 0; the last sampled token is in no loss."""
    batch = aged([[-1, 5, 3, 3], [-1, 5, 1, -1]], loss=[[False, True, True, True], [False, True, False, True]])
    batch[columns.HAS_LOG_PROBS] = torch.tensor([True, False])
    batch[columns.ROLLOUT_LOG_PROBS] = torch.zeros(2, 4)
    bare = staleness_metrics(batch, 5)
    shares = {"staleness/age_0/token_share": 0.5, "staleness/age_2/token_share": 0.5}
    assert bare == {"staleness/mean": 1.0, "staleness/max": 2.0, **shares}
    batch[columns.ROLLOUT_LOG_PROBS] = torch.tensor([[0.0, -1.0, -2.0, -1.0], [0.0, -4.0, -9.0, 0.0]])
    batch[columns.OLD_LOG_PROBS] = torch.tensor([[9.0, -1.5, -1.0, NAN], [9.0, -9.0, -9.0, 9.0]])
    batch[columns.CLIPPED] = torch.tensor([[9.0, 0.0, 0.5, 0.0], [NAN, NAN, 9.0, 9.0]])
    assert staleness_metrics(batch, 5) == bare | {
        "staleness/age_0/logprob_diff": 0.5, "staleness/age_2/logprob_diff": 1.0,
        "staleness/age_0/clip_fraction": 0.0, "staleness/age_2/clip_fraction": 0.5,
    }  # fmt: skip
    assert staleness_metrics(aged([[-1, -1]]), 5) == {}


def test_differences_by_age_are_of_tokens_that_were_not_certain():
    """The oldest tokens of a turn are its beginning, which is nearly certain whatever the weights are."""
    batch = aged([[-1, 3, 3, 5], [-1, 3, 5, -1]])
    batch[columns.HAS_LOG_PROBS] = torch.tensor([True, True])
    just, hardly = math.log(0.9) - 1e-4, math.log(0.9) + 1e-4
    batch[columns.ROLLOUT_LOG_PROBS] = torch.tensor([[0.0, hardly, just, just], [0.0, hardly, hardly, 0.0]])
    batch[columns.OLD_LOG_PROBS] = batch[columns.ROLLOUT_LOG_PROBS] + torch.tensor([[0, 7, 0.5, 0.25], [0, 7, 7, 7]])
    batch[columns.CLIPPED] = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    found = staleness_metrics(batch, 5)
    assert found["staleness/age_2/token_share"] == pytest.approx(0.6)
    names = [f"staleness/age_{age}/{name}" for age in (2, 0) for name in ("logprob_diff", "clip_fraction")]
    assert [found[name] for name in names] == pytest.approx([0.5, 0.0, 0.25, 1.0])
