"""`PromptsInFlight` on a clock of its own: whatever takes how long, and whatever comes between, no trained token is
older than the bound, and each prompt is trained once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import PromptLog, read_prompt_log
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.rollout.prompts import Drawn, Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.in_flight import BatchPlan, PromptsInFlight, over_sampling


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

    def __init__(self, folder: Path, plan: BatchPlan, length: Callable[[], int]):
        self.folder, self.plan, self.length, self.step = folder, plan, length, 0
        self.ages: list[int] = []
        self.begin(None)

    def begin(self, state: dict | None) -> None:
        """A process, from a checkpoint or from the start."""
        self.stream, self.log = TimedStream(self.length), PromptLog.after(state, self.folder, rows=False)
        waiting = (self.log, None, lambda: None, lambda: None)
        self.flight = PromptsInFlight(self.plan, Rows(), self.stream, *waiting)
        if state is not None:
            self.flight.load_state_dict(state, other_rows=False)
            self.step = self.stream.version = state["step"]

    def checkpoint(self) -> dict:
        return {"step": self.step, **self.flight.state_dict()}

    def train_one(self, update_ticks: int, refilled: int) -> None:
        self.flight.admit(self.step)
        groups = self.flight.collect(self.step)
        left_out = {group.prompt_id: "no signal" for group in groups[:refilled]}
        if refilled:
            groups = groups[refilled:] + self.flight.more(self.step, refilled, 2)
        self.flight.admit_during_update(self.step)
        self.ages += [self.step - v for group in groups for v in self.stream.versions[group.prompt_id]]
        for _ in range(update_ticks):
            self.stream.tick()
        self.flight.ended(self.step + 1, left_out | {group.prompt_id: None for group in groups})
        self.step += 1
        self.stream.version = self.step
        if self.plan.max_staleness and self.step < self.plan.total_steps:
            self.flight.admit(self.step)

    def roll_back(self) -> None:
        """Whatever is in flight is by weights that are gone; what begins now is by others of the same number."""
        self.flight.give_up()

    def close(self) -> None:
        self.log.close()


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
    plan = BatchPlan(size, 1, sampling, 1, sampling, False, None, steps, bound, over_sampling(size, factor, bound))

    def length() -> int:
        return chance.choice([1, 1, 2, 5, chance.randint(1, 300)])

    with TemporaryDirectory() as folder:
        run = Run(Path(folder), plan, length)
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
        plan = BatchPlan(3, 1, sampling, 1, sampling, False, None, 6, 2)
        run = Run(Path(folder), plan, lambda: next(numbers))
        while run.step < 6:
            run.train_one(10, 0)
        run.close()
    assert max(run.ages) == 2 and set(run.ages) == {0, 1, 2}


def test_further_prompts_of_a_step_have_the_next_free_number():
    """Prompts that are left out make room for others before the batch."""
    sampling = SamplingParams(1)
    with TemporaryDirectory() as folder:
        plan = BatchPlan(2, 1, sampling, 1, sampling, False, None, 9, 1, over_sampling(2, 2.0, 1))
        run = Run(Path(folder), plan, lambda: 1)
        for left_out in ([], ["s000001.00000", "s000001.00003"], ["s000001.002.00001"]):
            run.flight.ended(1, dict.fromkeys(left_out, "left out"))
            run.flight.admit(0)
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
    PromptsInFlight(plan, Rows(), stream, log, spool if spooled else None, lambda: None, lambda: None)
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
