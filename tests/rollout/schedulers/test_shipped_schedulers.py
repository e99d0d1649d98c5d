"""The schedulers that are shipped, by name."""

from __future__ import annotations

import asyncio

import pytest
from scheduler_lab import CHAT, EOS, converse, ids_of, prompt_of, response, roll_out, runner_for, said, trained

from verl_mt.data.trajectory import Status, StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineGoneError, PluginError
from verl_mt.extensions.compat.rollout.scheduler import (
    Env,
    GymScheduler,
    ThinkingModelTipsScheduler,
    envs,
    load_scheduler,
    multi_turns,
    orms,
)
from verl_mt.extensions.compat.schedulers.shipped import (
    MathTipsMultiTurnScheduler,
    MathTipsScheduler,
    extract_tool_calls,
)
from verl_mt.plugins import load_object
from verl_mt.rollout.context import Limits

WRONG = "<think>2+2 is 5</think><answer>5</answer>"
RIGHT = "<think>2+2 is 4</think><answer>4</answer>"


def question(solution="4", **more):
    return prompt_of("2+2?", solution=solution, **more)


@pytest.mark.cap("C11")
def test_an_unknown_name_lists_what_exists():
    with pytest.raises(PluginError, match=r"unknown multi-turn scheduler 'math_tip'; did you mean 'math_tip_trick'\?"):
        load_scheduler("math_tip")
    with pytest.raises(PluginError, match="Registered: gym_scheduler, math_tip_trick, math_tip_trick_multi_turn, "):
        load_scheduler("nothing")


@pytest.mark.cap("C11")
def test_all_documented_names_are_registered():
    names = {"math_tip_trick", "math_tip_trick_multi_turn", "thinking_tips_scheduler", "tool_call_scheduler"}
    assert names <= set(multi_turns)


@pytest.mark.cap("C16", "C17")
def test_math_tip_trick_cuts_back_and_goes_on_in_the_message():
    tip = MathTipsScheduler.tips_prompt
    run = converse(load_scheduler("math_tip_trick", max_turns=3), [said(WRONG), said(" 4</think><answer>4</answer>")],
                   prompt=question())  # fmt: skip
    ids, mask, log_probs = response(run.record)
    kept = ids_of("<think>2+2 is 5")
    assert ids[: len(kept)] == kept
    middle = slice(len(kept), len(kept) + len(tip))
    assert CHAT.decode(ids[middle]) == tip
    assert mask[middle] == [0] * len(tip)
    assert log_probs[middle] == [0.0] * len(tip)
    assert run.trajectory.messages[-1]["content"] == f"<think>2+2 is 5{tip} 4</think><answer>4</answer>"
    assert run.trajectory.num_turns == 2


@pytest.mark.cap("C17", "C86")
@pytest.mark.parametrize("name", ["math_tip_trick", "math_tip_trick_multi_turn", "thinking_tips_scheduler"])
def test_tips_are_for_wrong_answers_and_given_once(name):
    right = converse(load_scheduler(name, max_turns=5), [said(RIGHT)], prompt=question())
    assert right.trajectory.num_turns == 1
    wrong = converse(load_scheduler(name, max_turns=5), [said(WRONG), said(WRONG)], prompt=question())
    assert (wrong.trajectory.num_turns, wrong.trajectory.stop_reason) == (2, StopReason.SCHEDULER)
    more = load_scheduler(name, max_turns=5, kwargs={"max_tips": 2})
    assert converse(more, [said(WRONG)] * 3, prompt=question()).trajectory.num_turns == 3


@pytest.mark.cap("C16", "C17", "C86")
def test_math_tip_trick_multi_turn_says_so_in_a_turn_of_its_own():
    run = converse(load_scheduler("math_tip_trick_multi_turn"), [said(WRONG), said(RIGHT)], prompt=question())
    tip = MathTipsMultiTurnScheduler.tips_prompt
    assert [m["content"] for m in run.trajectory.messages] == ["2+2?", WRONG, tip, RIGHT]
    assert trained(run.record) == [*ids_of(WRONG), EOS, *ids_of(RIGHT), EOS]


def test_a_row_without_a_solution_is_named():
    prompt = question()
    prompt.row.raw.pop("solution")
    prompt.row.ground_truth = None
    run = converse(load_scheduler("math_tip_trick"), [said(WRONG)], prompt=prompt)
    assert "MathTipsScheduler needs the column solution" in run.trajectory.error


@pytest.mark.cap("C18", "C9", "C21", "C22")
def test_thinking_tips_forgets_reasoning_and_returns_a_record_per_turn():
    run = converse(
        load_scheduler("thinking_tips_scheduler", max_turns=3), [said(WRONG), said(RIGHT)],
        prompt=question(), reward=orms["thinking_tips"](),
    )  # fmt: skip
    first, second = run.trajectory.records
    assert "<think>" not in CHAT.decode(second.token_ids[: second.num_prompt_tokens])
    assert (trained(first), trained(second)) == ([*ids_of(WRONG), EOS], [*ids_of(RIGHT), EOS])
    assert run.trajectory.reward == 1.0
    assert run.trajectory.messages[1]["content"] == "<answer>5</answer>"


@pytest.mark.cap("C34")
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Action: calculator\nAction Input: 1+2", [("calculator", "1+2")]),
        (
            "Thought: x\nAction: a\nAction Input: 1\nAction:  b \nAction Input:  2 \nrest",
            [("a", "1"), ("b", "2")],
        ),
        ("<think>Action: a\nAction Input: 1</think>no", []),
        ("Action: a\nno input", []),
        ("Final Answer: 3", []),
    ],
)
def test_react_pairs(text, calls):
    assert extract_tool_calls(text) == calls


@pytest.mark.cap("C34", "C33", "C25", "C32", "C23")
def test_tool_call_scheduler_puts_the_result_into_the_message():
    call = "Action: calculator\nAction Input: 1+2"
    seen = []

    def reward(completions, rollout_infos, **kwargs):
        seen.extend(rollout_infos)
        return [1.0]

    run = converse(load_scheduler("tool_call_scheduler", max_turns=4), [said(call), said("It is 3.")], reward=reward)
    assert run.trajectory.messages[-1]["content"] == f"{call}\nObservation: 3\nIt is 3."
    ids, mask, _ = response(run.record)
    assert CHAT.decode(ids) == f"{call}\nObservation: 3\nIt is 3.<|im_end|>"
    observation = slice(len(call), len(call) + len("\nObservation: 3\n"))
    assert mask == [int(not observation.start <= k < observation.stop) for k in range(len(ids))]
    assert seen == [{"tool_results": ["3"], "num_turns": 2}]
    assert run.trajectory.stop_reason is StopReason.SCHEDULER
    assert "differing_response_ids" not in run.trajectory.counters


def test_two_calls_and_a_mistake_are_answered_in_order():
    call = "Action: calculator\nAction Input: 1/0\nAction: search\nAction Input: x"
    run = converse(load_scheduler("tool_call_scheduler"), [said(call), said("ok")])
    told = run.trajectory.messages[-1]["content"]
    assert "Observation: <error>division by zero</error>\nObservation: <error>there is no tool 'search'" in told


class Corridor(Env):
    """Walk right until the end; counts its own openings and closings."""

    log: list[str] = []

    async def reset(self, config):
        self.place = 0
        self.log.append("open")
        if self.env_config.get("broken"):
            raise RuntimeError("no corridor")
        return "you are at 0", {"length": self.env_config["length"]}, "walk"

    async def step(self, action):
        if action[-1]["content"] == "fall":
            raise RuntimeError("fell")
        self.place += action[-1]["content"] == "right"
        done = self.place >= self.env_config["length"]
        return f"you are at {self.place}", float(done), done, {"place": self.place}

    async def close(self):
        self.log.append("close")


class PlainCorridor:
    """The same in Gymnasium's manner."""

    def __init__(self, length):
        self.length = length

    def reset(self, seed=None, options=None):
        self.place = 0
        Corridor.log.append("open")
        return "you are at 0", {}

    def step(self, action):
        self.place += action == "right"
        return f"you are at {self.place}", float(self.place >= self.length), self.place >= self.length, False, {}

    def close(self):
        Corridor.log.append("close")


@pytest.fixture(autouse=True)
def corridor():
    Corridor.log.clear()
    envs["corridor"] = Corridor


@pytest.mark.cap("C23")
@pytest.mark.parametrize("name", ["corridor", f"{__name__}.PlainCorridor"])
def test_an_episode_is_played_and_rewarded(name):
    scheduler = load_scheduler("gym_scheduler", max_turns=9, kwargs={"env": name, "env_config": {"length": 2}})
    run = converse(scheduler, [said("right"), said("left"), said("right")], reward=orms["gym"]())
    contents = [m["content"] for m in run.trajectory.messages]
    opening = ["walk"] if name == "corridor" else []
    assert contents == [*opening, "you are at 0", "right", "you are at 1", "left", "you are at 1", "right"]
    assert (run.trajectory.reward, run.trajectory.info["step_rewards"]) == (1.0, [0.0, 0.0, 1.0])
    assert run.trajectory.info["gym_done"] is True
    assert len(run.trajectory.records) == 1
    assert trained(run.record) == [t for text in ("right", "left", "right") for t in [*ids_of(text), EOS]]
    assert Corridor.log == ["open", "close"]


def test_a_row_names_its_own_environment():
    scheduler = load_scheduler("gym_scheduler", max_turns=9)
    prompt = prompt_of(env_config={"name": "corridor", "length": 1})
    assert converse(scheduler, [said("right")], prompt=prompt).trajectory.info["total_reward"] == 1.0
    assert "no environment" in converse(scheduler, [said("right")]).trajectory.error
    with pytest.raises(PluginError, match="unknown environment 'maze'"):
        load_scheduler("gym_scheduler", kwargs={"env": "maze"})


@pytest.mark.cap("C90")
@pytest.mark.parametrize(
    ("turns", "config", "status"),
    [
        ([said("right"), said("right")], {}, Status.COMPLETED),
        ([said("left")] * 3, {}, Status.COMPLETED),
        ([said("leftleftleft", "length")], {}, Status.TRUNCATED),
        ([said("fall")], {}, Status.FAILED),
        ([], {"broken": True}, Status.FAILED),
        ([EngineGoneError("gone")] * 2, {}, Status.ABORTED),
    ],
    ids=["done", "max_turns", "length", "step raises", "reset raises", "abort"],
)
def test_an_environment_is_closed_exactly_once_whatever_ends_the_trajectory(turns, config, status):
    left = iter(turns)

    def turn(request):
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    scheduler = load_scheduler(
        "gym_scheduler", max_turns=3, kwargs={"env": "corridor", "env_config": {"length": 2, **config}}
    )
    runner = runner_for(
        ScriptedEngine(turn), scheduler, limits=Limits(4000, 8000, max_tokens_per_turn=12), max_retries=1
    )
    (trajectory,) = roll_out(runner, [prompt_of()])
    assert trajectory.status is status
    attempts = 2 if status is Status.ABORTED else 1
    assert Corridor.log == ["open", "close"] * attempts


@pytest.mark.cap("C90")
def test_a_cancelled_episode_is_closed_too():
    from verl_mt.rollout.runner import RolloutPlan

    scheduler = load_scheduler("gym_scheduler", kwargs={"env": "corridor", "env_config": {"length": 2}})
    engine = ScriptedEngine(lambda request: said("left"), latency_s=1e6)
    runner = runner_for(engine, scheduler)

    async def go():
        task = asyncio.create_task(anext(runner.run(RolloutPlan([prompt_of()], 1, "s1"))))
        while not engine.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())
    assert Corridor.log == ["open", "close"]


def test_every_shipped_scheduler_resolves_by_name():
    for name in multi_turns:
        assert load_object(name, what="test", registry=multi_turns.registry) is multi_turns[name]


def with_check(kind, answer, *, is_async):
    """A subclass whose `check_finished` is its own."""

    class Own(kind):
        if is_async:

            async def check_finished(self, infer_request, response_choice, current_turn):
                return answer
        else:

            def check_finished(self, infer_request, response_choice, current_turn):
                return answer

    return Own


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [GymScheduler, ThinkingModelTipsScheduler])
def test_a_check_of_ones_own_in_a_shipped_loop_keeps_max_turns_and_is_read_as_everywhere(kind, is_async):
    more = {"env": f"{__name__}.Corridor", "env_config": {"length": 9}} if kind is GymScheduler else {}
    turns = [said("<answer>5</answer>")] * 4
    run = converse(with_check(kind, False, is_async=is_async)(max_turns=2, **more), turns, prompt=question())
    assert run.trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS, run.trajectory.error
    assert len(run.engine.requests) == 2
    run = converse(with_check(kind, True, is_async=is_async)(max_turns=2, **more), turns, prompt=question())
    assert run.trajectory.stop_reason is StopReason.SCHEDULER and len(run.engine.requests) == 1
    run = converse(with_check(kind, "False", is_async=is_async)(max_turns=2, **more), turns, prompt=question())
    assert "failed in check_finished" in run.trajectory.error and "must be True or False" in run.trajectory.error
