"""The same scheduler and script give the same records, however turns are batched and wherever they are sampled."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest
from scheduler_lab import EOS, LP, ids_of, prompt_of, roll_out, runner_for, said

from verl_mt.data.run_files import trajectory_to_row
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.lock_step import LockStepEngine
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineGoneError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream

sys.path.insert(0, str(Path(__file__).parents[2] / "engines" / "sglang"))
from fake_client import FakeEngine, answer


class Mixed(MultiTurnScheduler):
    """A new turn, then a message that goes on, then another history."""

    def step(self, infer_request, response_choice, current_turn):
        if current_turn == 1:
            infer_request.messages.append({"role": "user", "content": "u"})
        elif current_turn == 2:
            infer_request.messages[-1]["content"] += "TIP"
        else:
            infer_request.messages = [{"role": "user", "content": "other"}]
        return {"infer_request": infer_request, "rollout_infos": {"turn": current_turn}}


def records(trajectories: list[Trajectory]) -> list[dict]:
    """What belongs to the conversation, and not to the clock."""
    rows = [trajectory_to_row(t, step=0) for t in trajectories]
    return [{k: v for k, v in row.items() if k not in ("time_spans", "counters", "replicas")} for row in rows]


def text_of(input_ids: list[int]) -> str:
    return str(sum(input_ids) % 991)


def by_prompt(request):
    return said(text_of(request.input_ids))


def colocated() -> ScriptedEngine:
    return ScriptedEngine(by_prompt)


def server_process() -> FakeEngine:
    """The engine of the server mode: HTTP servers of their own, of which the answers are written here."""

    def script(body):
        ids = [*ids_of(text_of(body["input_ids"])), EOS]
        found = answer(ids)
        found["meta_info"]["output_token_logprobs"] = [(LP, token, None) for token in ids]
        return found

    return FakeEngine(script, num_replicas=2, ours=False)


def run(engine, n=2) -> list[Trajectory]:
    return roll_out(runner_for(engine, Mixed(max_turns=4)), [prompt_of("a"), prompt_of("b")], n=n)


@pytest.mark.cap("C14", "C15", "C90")
def test_colocated_server_and_lock_step_give_the_same_records():
    expected = records(run(colocated()))
    assert len(expected[0]["records"]) == 2
    assert records(run(server_process())) == expected
    assert records(run(LockStepEngine(colocated()))) == expected
    assert records(run(LockStepEngine(server_process()))) == expected


@pytest.mark.cap("C15")
def test_the_trainers_background_thread_gives_the_same_records():
    stream = RolloutStream(runner_for(colocated(), Mixed(max_turns=4)))
    try:
        stream.start(RolloutPlan([prompt_of("a"), prompt_of("b")], 2, "s1"))
        groups = stream.collect("s1")
    finally:
        stream.close()
    assert records([t for g in groups for t in g.trajectories]) == records(run(colocated()))


class ThreeTurns(MultiTurnScheduler):
    def __init__(self):
        super().__init__(max_turns=3)
        self.ended = []
        self.order = []

    def step(self, infer_request, response_choice, current_turn):
        self.order.append((current_turn, infer_request.messages[0]["content"]))
        infer_request.messages.append({"role": "user", "content": "u"})
        return {"infer_request": infer_request}

    def on_trajectory_end(self, infer_request, reason):
        self.ended.append(infer_request.messages[0]["content"])


def name_of(request) -> str:
    place, number = int(request.session_id.split(".")[1]), int(request.request_id.rpartition("/")[2])
    return f"{['slow', 'quick'][place]}{number}"


def with_a_slow_turn(*, lock_step: bool):
    """Records, which conversations had ended when the slow turn was sampled, and the order of the steps."""
    scheduler, sampled, ended = ThreeTurns(), [], []

    class OneSlowTurn(ScriptedEngine):
        async def generate(self, request):
            if name_of(request) == "slow3":
                while not ("quick3" in sampled if lock_step else scheduler.ended):
                    await asyncio.sleep(0.001)
                if lock_step:
                    await asyncio.sleep(0.05)  # the other conversation would end here if it did not wait
                ended.extend(scheduler.ended)
            sampled.append(name_of(request))
            return await super().generate(request)

    engine = OneSlowTurn(lambda request: said(name_of(request)))
    runner = runner_for(LockStepEngine(engine) if lock_step else engine, scheduler)
    found = roll_out(runner, [prompt_of("slow"), prompt_of("quick")])
    return records(found), ended, scheduler.order


@pytest.mark.slow
@pytest.mark.cap("C14")
def test_nobody_waits_for_a_slow_conversation_unless_turns_are_in_lock_step():
    free, ended, _ = with_a_slow_turn(lock_step=False)
    assert ended == ["quick"]
    stepped, ended, order = with_a_slow_turn(lock_step=True)
    assert free == stepped and ended == []
    assert [turn for turn, _ in order] == [1, 1, 2, 2]


@pytest.mark.cap("C14")
def test_in_lock_step_all_turns_of_a_batch_are_asked_for_together():
    batches, together = [], asyncio.Barrier(4)

    class Watching(ScriptedEngine):
        live = 0

        async def generate(self, request):
            self.live += 1
            batches.append(self.live)
            try:
                await together.wait()  # until all four are here
                return await super().generate(request)
            finally:
                self.live -= 1

    run(LockStepEngine(Watching(by_prompt)), n=2)
    assert batches == [1, 2, 3, 4] * 4


def test_lock_step_survives_trajectories_that_fail_end_early_or_start_again():
    class Uneven(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            if infer_request.uuid.endswith("1"):
                raise RuntimeError("boom")
            infer_request.messages.append({"role": "user", "content": "u"})
            return {"infer_request": infer_request}

        def check_finished(self, infer_request, response_choice, current_turn):
            return current_turn >= (1 if infer_request.uuid.endswith("2") else 3)

    gone = iter([True])

    def turn(request):
        if request.session_id.endswith("3") and next(gone, False):
            raise EngineGoneError("gone")
        return said("a")

    found = roll_out(runner_for(LockStepEngine(ScriptedEngine(turn)), Uneven(), max_concurrent=2), [prompt_of()], n=5)
    assert [t.num_turns for t in found] == [3, 1, 1, 3, 3]
    assert [str(t.status) for t in found] == ["completed", "failed", "completed", "completed", "completed"]
    assert found[3].counters["retries"] == 1


def test_lock_step_is_the_engine_that_it_holds_in_everything_else():
    engine = ScriptedEngine([], version=7)
    stepped = LockStepEngine(engine)
    assert (stepped.version, stepped.requests) == (7, engine.requests)
    assert stepped.capabilities == dataclasses.replace(engine.capabilities, lock_step=True)
    with pytest.raises(AttributeError):
        stepped.nothing  # noqa: B018
