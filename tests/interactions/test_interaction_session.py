"""One trajectory's interaction: started once, answered to, ended once, its errors attributed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hostile import EXCEPTIONS, deadline_only_for

from verl_mt.errors import DataError, UserCodeError
from verl_mt.interactions.base import BaseInteraction
from verl_mt.interactions.session import InteractionSession, InteractionTurn
from verl_mt.user_code import CallTimeout, LoopBlocked


class Recorder(BaseInteraction):
    """Returns what it is told to and remembers its life."""

    def __init__(self, answer: Any = (False, "again", 0.25, {"k": 1}), fail: str = ""):
        super().__init__({"name": "recorder"})
        self.answer, self.fail = answer, fail
        self.life: list[str] = []
        self.kwargs: dict[str, Any] = {}

    def _enter(self, method: str) -> None:
        self.life.append(method)
        if method == self.fail:
            raise ValueError(f"broken {method}")

    async def start_interaction(self, instance_id=None, **kwargs):
        self._enter("start")
        self.kwargs = kwargs
        return "my-" + instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        assert instance_id == "my-t/recorder"
        self._enter("respond")
        messages.append({"role": "user", "content": "scribble"})
        return self.answer

    async def calculate_score(self, instance_id, **kwargs):
        self._enter("score")
        return 0.5

    async def finalize_interaction(self, instance_id, **kwargs):
        self._enter("finalize")


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_start_respond_and_finish_each_do_their_part_once():
    recorder = Recorder()
    messages = [dict(m) for m in MESSAGES]

    async def main():
        session = InteractionSession(recorder, "t", {"ground_truth": "7", "hint": None, "name": "recorder"})
        await session.start()
        turns = [await session.respond(messages, turn=1), await session.respond(messages, turn=2)]
        scores = await asyncio.gather(session.finish(), session.finish())
        return turns, scores, session

    turns, scores, session = asyncio.run(main())
    assert turns == [InteractionTurn(False, "again", 0.25, {"k": 1})] * 2 and scores == [0.5, 0.5]
    assert recorder.life == ["start", "respond", "respond", "score", "finalize"]
    assert recorder.kwargs == {"ground_truth": "7", "name": "recorder"} and messages == MESSAGES
    assert session.turn_scores == [0.25, 0.25]
    assert [(s.phase, s.name, s.turn) for s in session.time_spans] == [("interaction", "recorder", t) for t in (1, 2)]


@pytest.mark.parametrize("fail", ["start", "respond", "score", "finalize"])
def test_a_raise_names_interaction_method_trajectory_and_turn_and_finalize_still_runs_once(fail):
    recorder = Recorder(fail=fail)

    async def main():
        session = InteractionSession(recorder, "t")
        errors = []
        for step in (lambda: session.respond(MESSAGES, turn=3), session.finish, session.finish):
            try:
                await step()
            except UserCodeError as error:
                errors.append(error)
        return errors

    errors = asyncio.run(main())
    first = str(errors[0])
    assert "'recorder'" in first and "trajectory t" in first and f"broken {fail}" in first
    assert isinstance(errors[0].__cause__, ValueError)
    assert recorder.life.count("finalize") == (0 if fail == "start" else 1)
    if fail == "respond":
        assert "turn 3" in first


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("text", "must return"),
        ((True, "x", 1.0), "must return"),
        ((False, None, 0, {}), "text must be a str"),
        ((False, "x", "good", {}), "finite number"),
        ((False, "x", float("nan"), {}), "finite number"),
        ((False, "x", 0, [1]), "extra must be a dict"),
    ],
)
def test_a_wrong_return_value_is_named(answer, says):
    async def main():
        await InteractionSession(Recorder(answer), "t").respond(MESSAGES, turn=1)

    with pytest.raises(UserCodeError, match=says):
        asyncio.run(main())


def test_none_counts_as_nothing_said_and_nothing_scored():
    async def main():
        return await InteractionSession(Recorder((True, None, None, None)), "t").respond(MESSAGES)

    assert asyncio.run(main()) == InteractionTurn(True, "", 0.0, {})


def test_a_hanging_interaction_is_an_error_in_time_and_is_finalized(monkeypatch):
    deadline_only_for(monkeypatch, lambda *args, **_: MESSAGES in args)
    forever = threading.Event()

    class Hangs(Recorder):
        def generate_response(self, instance_id, messages, **kwargs):
            forever.wait()

    hangs = Hangs()

    async def main():
        session = InteractionSession(hangs, "t", timeout_s=0.05)
        try:
            with pytest.raises(UserCodeError, match=r"timed out after 0.05 s"):
                await session.respond(MESSAGES, turn=1)
        finally:
            await session.finish()

    asyncio.run(main())
    forever.set()
    assert hangs.life == ["start", "score", "finalize"]


def test_ending_methods_without_arguments_as_in_verl_s_base_class_work():
    class Old(Recorder):
        async def calculate_score(self):  # type: ignore[override]
            return 0.75

        async def finalize_interaction(self):  # type: ignore[override]
            self.life.append("finalize")

    old = Old()

    async def main():
        session = InteractionSession(old, "t", {"ground_truth": "1"})
        assert await session.finish() is None  # never started: nothing to end
        session = InteractionSession(old, "t", {"ground_truth": "1"})
        await session.respond(MESSAGES)
        return await session.finish()

    assert asyncio.run(main()) == 0.75 and old.life == ["start", "respond", "finalize"]


def test_a_row_that_names_no_known_interaction_is_a_data_error_of_its_trajectory():
    assert InteractionSession.open({}, {"name": "x"}, trajectory_id="t") is None
    with pytest.raises(DataError, match=r"trajectory t: .*unknown interaction"):
        InteractionSession.open({"recorder": Recorder()}, {"name": "x"}, trajectory_id="t")


@pytest.mark.parametrize("name", EXCEPTIONS)
@pytest.mark.parametrize("method", ["start", "respond", "score", "finalize"])
def test_whatever_an_interaction_raises_is_its_own_error(method, name):
    class Wrong(Recorder):
        def _enter(self, at: str) -> None:
            super()._enter(at)
            if at == method:
                raise EXCEPTIONS[name]

    wrong = Wrong()

    async def main():
        session, errors = InteractionSession(wrong, "t"), []
        for step in (lambda: session.respond(MESSAGES, turn=1), session.finish):
            try:
                await step()
            except UserCodeError as error:
                errors.append(str(error))
        return errors

    errors = asyncio.run(main())
    assert len(errors) == 1 and name in errors[0] and "interaction 'recorder' failed in" in errors[0]
    assert wrong.life.count("finalize") == (method != "start")


@pytest.mark.slow
def test_of_nine_answers_of_which_one_blocks_in_async_code_eight_fail_as_blocked(monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 0.1)
    begun, over = [], threading.Event()

    class ThirdBlocks(BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs):
            begun.append(instance_id)
            while len(begun) < 9:
                await asyncio.sleep(0.001)
            if instance_id == "2/third":
                over.wait(60)
            await asyncio.sleep(1e6 if len(begun) == 9 else 0.0)
            return True, "", 1.0, {}

    shared = ThirdBlocks({"name": "third"})

    async def one(number, timeout_s=2.0):
        return (await InteractionSession(shared, str(number), timeout_s=timeout_s).respond(MESSAGES, turn=1)).score

    async def main():
        found = await asyncio.gather(*map(one, range(9)), return_exceptions=True)
        return found, await one(0, timeout_s=60)

    found, later = asyncio.run(main())
    over.set()
    assert [type(error) for error in found] == [UserCodeError] * 9 and later == 1.0
    assert [type(error.__cause__) for error in found] == [CallTimeout if n == 2 else LoopBlocked for n in range(9)]
    assert "generate_response of interaction third blocked its event loop" in str(found[0])


@pytest.mark.parametrize("value", [1e39, -1e308, 1e16, float("inf")])
def test_a_score_that_spoils_sums_of_float32_is_refused(value):
    async def main():
        with pytest.raises(UserCodeError, match=r"the score must be a finite number of at most 1e\+15, got"):
            await InteractionSession(Recorder((False, "again", value, {})), "t").respond(MESSAGES, turn=1)

    asyncio.run(main())
