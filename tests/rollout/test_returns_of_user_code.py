"""What a driver returns is checked where it enters: anything wrong fails its own trajectory by name, and no other."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import generate_functions
import numpy as np
import pytest
import torch
from generate_support import roll_out as roll_out_groups
from generate_support import rows, turn
from generate_support import runner_of as generate_runner
from hostile import Unshowable
from scheduler_lab import prompt_of, roll_out, runner_for, said

from verl_mt.data.batch import build_batch
from verl_mt.data.run_files import row_to_trajectory, trajectory_to_row, write_rows
from verl_mt.data.trajectory import Status, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import rollout_metrics
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.extensions.compat.rollout.scheduler import (
    Env,
    GymScheduler,
    MultiTurnScheduler,
    RequestConfig,
    RolloutOutput,
)
from verl_mt.extensions.compat.schedulers.hooks import current

pytestmark = pytest.mark.slow  # hundreds of conversations


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int = 3000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def case(name: str, says: str, value: Any) -> Any:
    return pytest.param(name, says, value, id=f"{name}={type(value).__name__}:{says:.20}")


WRONG_MESSAGES = [
    ("a list of messages", None),
    ("a list of messages", "text"),
    ("a list of messages", {"role": "user", "content": "x"}),
    ("a list of messages", []),
    ("messages[0]", ["text"]),
    ("messages[0]", [None]),
    ("messages[0]", [{}]),
    ("role", [{"role": 5, "content": "x"}]),
    ("role", [{"content": "x"}]),
    ("content", [{"role": "user", "content": 5}]),
    ("content", [{"role": "user", "content": None}]),
    ("content", [{"role": "user"}]),
    ("content", [{"role": "user", "content": ["text"]}]),
    ("content", [{"role": "user", "content": b"bytes"}]),
    ("content", [{"role": "user", "content": Unshowable()}]),
    ("surrogate", [{"role": "user", "content": "half \ud800 a sign"}]),
    ("surrogate", [{"role": "user", "content": [{"type": "text", "text": "half \ud800 a sign"}]}]),
    ("text", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("tool_calls", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": "x"}]),
    ("tool_calls", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [5]}]),
    ("tool_calls", [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5}}]}]),
    ("tool_call_id", [{"role": "tool", "content": "x", "tool_call_id": 5}]),
    ("reasoning_content", [{"role": "assistant", "content": "x", "reasoning_content": 5}]),
    ("loss", [{"role": "assistant", "content": "x", "loss": "False"}]),
    ("nested", [{"role": "user", "content": "x", "extra": deep()}]),
]  # fmt: skip
WRONG_INFOS = [
    ("must be a dict", "text"),
    ("must be a dict", 5),
    ("must be a dict", [1]),
    ("cannot be written", {"k": object()}),
    ("cannot be written", {"k": Unshowable()}),
    ("cannot be written", {"k": {1, 2}}),
    ("nested", {"k": deep()}),
    ("nested", {"k": endless()}),
    ("must be a list", {"images": 5}),
]


def as_a_step_uses_them(trajectories: list[Trajectory], tmp_path) -> dict[str, float]:
    """Metrics, rows and the batch of a step, which no trajectory may bring down."""
    group = TrajectoryGroup("g", "p", trajectories, "toy", 0, "toy")
    metrics = rollout_metrics([group])
    write_rows(tmp_path / "rows.jsonl", [trajectory_to_row(t, step=1) for t in trajectories])
    for line in (tmp_path / "rows.jsonl").read_text().splitlines():
        row_to_trajectory(json.loads(line))
    trainable = [t for t in trajectories if t.trainable]
    assert len(build_batch(trainable, pad_token_id=0)) == sum(len(t.records) for t in trainable)
    return metrics


def one_fails(trajectories: list[Trajectory], says: str, tmp_path) -> None:
    """The first one fails, says what was wrong, and the second one is as good as ever."""
    bad, good = trajectories
    assert good.status is Status.COMPLETED and good.reward == 1.0, good.error
    assert bad.status is Status.FAILED, (bad.status, bad.info, bad.messages)
    last = bad.error.strip().splitlines()[-1]
    assert says in last and "verl_mt" in bad.error, last
    assert not says or "UserCodeError: " in last or "LedgerError: " in last, last
    assert as_a_step_uses_them(trajectories, tmp_path)["rollout/failed"] == 1


# ---- schedulers


class Steps(MultiTurnScheduler):
    """Two turns; in the conversation that begins with `bad`, `spoil` edits what its hooks return."""

    runs_inline = True

    def __init__(self, spoil, max_turns=2):
        super().__init__(max_turns)
        self.spoil = spoil

    def step(self, infer_request, response_choice, current_turn):
        bad = infer_request.messages[0]["content"] == "bad"
        infer_request.messages.append({"role": "user", "content": "again"})
        result = {"infer_request": infer_request, "response_token_ids": list(response_choice.token_ids)}
        result |= {"response_loss_mask": [1] * len(response_choice.token_ids), "rollout_infos": {"k": 1}}
        return self.spoil(result) if bad else result


def through(scheduler, tmp_path, says: str) -> None:
    turns = {"bad": "x", "good": "yes"}
    engine = ScriptedEngine(lambda request: said(turns["bad" if ".00000." in request.request_id else "good"]))
    trajectories = roll_out(runner_for(engine, scheduler), [prompt_of("bad"), prompt_of("good", index=1)])
    one_fails(trajectories, says, tmp_path)


def test_the_scheduler_of_these_tests_is_a_good_one(tmp_path):
    engine = ScriptedEngine([said("a"), said("yes")])
    (trajectory,) = roll_out(runner_for(engine, Steps(None)), [prompt_of("good")])
    assert trajectory.status is Status.COMPLETED and trajectory.info == {"k": 1, "num_turns": 2}
    as_a_step_uses_them([trajectory], tmp_path)


@pytest.mark.parametrize(
    ("says", "value"),
    [("must return a dict", v) for v in (None, "text", 5, [1], Unshowable())]
    + [("no request", {"infer_request": v}) for v in (None, "text", {"messages": []}, Unshowable())]
    + [("unknown key", {"infer_requests": None})],
)
def test_what_a_step_returns_is_checked(says, value, tmp_path):
    through(Steps(lambda result: value), tmp_path, says)


@pytest.mark.parametrize(("says", "value"), WRONG_MESSAGES)
def test_the_messages_of_a_step_are_checked(says, value, tmp_path):
    def spoil(result):
        result["infer_request"].messages = copy.copy(value)
        del result["response_token_ids"], result["response_loss_mask"]
        return result

    through(Steps(spoil), tmp_path, says)


STEP_FIELDS = {
    "response_token_ids": [
        ("response_token_ids", v)
        for v in (5, "ab", [1.5], ["5"], [None], [True], [[5]], [-1], [10**9], {"a": 1}, Unshowable())
    ]
    + [("same length", None)],
    "response_loss_mask": [
        ("response_loss_mask", v)
        for v in (5, "ab", [1], [1] * 9, [0.5, 1], ["0", "1"], [None, 1], [2, 1], [[1], [1]], Unshowable())
    ],
    "rollout_logprobs": [
        ("rollout_logprobs", v) for v in (5, "ab", [-0.5], ["a", "b"], [None, None], [-0.5] * 9, [math.nan] * 2)
    ],
    "rollout_infos": WRONG_INFOS,
}


@pytest.mark.parametrize(
    ("name", "says", "value"), [case(n, s, v) for n, values in STEP_FIELDS.items() for s, v in values]
)
def test_every_field_of_a_step_is_checked(name, says, value, tmp_path):
    through(Steps(lambda result: result | {name: value}), tmp_path, says)


@pytest.mark.parametrize("value", ["False", "no", 5, 0.5, np.array([True]), [], {}, Unshowable()])
def test_whether_it_is_over_is_said_by_a_bool(value, tmp_path):
    class Says(Steps):
        def check_finished(self, infer_request, response_choice, current_turn):
            return value if infer_request.messages[0]["content"] == "bad" else current_turn == 2

    through(Says(lambda result: result), tmp_path, "check_finished")


@pytest.mark.parametrize("value", [None, False, 0, np.bool_(False), np.array(0), torch.tensor(False)])
def test_a_check_that_says_nothing_or_a_bool_of_another_kind_is_understood(value):
    class Says(Steps):
        def check_finished(self, infer_request, response_choice, current_turn):
            return value

    (trajectory,) = roll_out(runner_for(ScriptedEngine([said("a"), said("yes")]), Says(None)), [prompt_of("good")])
    assert trajectory.status is Status.COMPLETED and trajectory.num_turns == 2


def test_ids_and_masks_of_numpy_are_understood():
    def as_arrays(result):
        ids, mask = np.array(result["response_token_ids"]), np.array(result["response_loss_mask"], dtype=bool)
        return result | {"response_token_ids": ids, "response_loss_mask": mask, "rollout_logprobs": -0.5 * mask}

    (trajectory,) = roll_out(runner_for(ScriptedEngine([said("a"), said("b")]), Steps(as_arrays)), [prompt_of("bad")])
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert sum(trajectory.records[0].loss_mask) == 4


class OneTurn(MultiTurnScheduler):
    """A `run` of one's own; `spoil` edits what it returns of a conversation that begins with `bad`."""

    def __init__(self, spoil):
        super().__init__(None)
        self.spoil = spoil

    async def run(self, infer_request, request_config=None, **kwargs):
        response = await self.infer_engine.infer_async(infer_request, request_config)
        choice = response.choices[0]
        infer_request.messages.append({"role": "assistant", "content": choice.message.content})
        ids = list(choice.token_ids)
        output = RolloutOutput(response, infer_request.messages, [ids], [[1] * len(ids)])
        return self.spoil(output) if infer_request.messages[0]["content"] == "bad" else output


@pytest.mark.parametrize(
    ("says", "value"),
    [("return a RolloutOutput", v) for v in (None, "text", 5, [], ["text"], [None], {"response": None}, Unshowable())],
)
def test_what_a_run_returns_is_checked(says, value, tmp_path):
    through(OneTurn(lambda output: value), tmp_path, says)


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_an_output_may_hold_one_array_per_turn(array):
    def as_arrays(output):
        (ids,) = output.response_token_ids
        output.response_token_ids, output.response_loss_mask = [array(ids)], [array([0] + [1] * (len(ids) - 1))]
        output.rollout_logprobs = [array([-0.5] * len(ids))]
        return output

    (trajectory,) = roll_out(runner_for(ScriptedEngine([said("abc")]), OneTurn(as_arrays)), [prompt_of("bad")])
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert sum(trajectory.records[0].loss_mask) == 3


class OwnId:
    def __init__(self, name):
        self.id = name


RUN_FIELDS = {
    "response": [("response", v) for v in (None, "text", OwnId("x"), OwnId([]), OwnId(None), Unshowable())],
    "messages": [pair for pair in WRONG_MESSAGES if pair[1] is not None],
    "response_token_ids": [
        ("response_token_ids", v)
        for v in (5, "ab", [1.5, 2.5], ["5", "6"], [[1.5]], [[5], 5], [None], [[5]], [[5], [6]], [[[5]]], Unshowable())
    ]
    + [("same length", None)],
    "response_loss_mask": [
        ("response_loss_mask", v)
        for v in (5, "ab", [[1]], [1], [[1, 1, 1]], [["0", "1"]], [[0.5, 1]], [[2, 1]], [[None, 1]], Unshowable())
    ],
    "rollout_infos": WRONG_INFOS,
    "rollout_logprobs": [("rollout_logprobs", v) for v in (5, "ab", [["a", "b"]], [[None] * 2], [[-0.5] * 9])],
    "whole": [("whole", v) for v in ("no", None, 5)],
}


@pytest.mark.parametrize(
    ("name", "says", "value"), [case(n, s, v) for n, values in RUN_FIELDS.items() for s, v in values]
)
def test_every_field_of_an_output_is_checked(name, says, value, tmp_path):
    def spoil(output):
        setattr(output, name, copy.copy(value) if name == "messages" else value)
        return output

    through(OneTurn(spoil), tmp_path, says)


class Asks(OneTurn):
    """Hands the engine a request config with a field that is wrong in the conversation about `bad`."""

    def __init__(self, **fields):
        super().__init__(None)
        self.fields = fields

    async def run(self, infer_request, request_config=None, **kwargs):
        bad = infer_request.messages[0]["content"] == "bad"
        response = await self.infer_engine.infer_async(infer_request, RequestConfig(**(self.fields if bad else {})))
        infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
        return RolloutOutput(response, infer_request.messages)


WRONG_SAMPLING = {
    "max_tokens": ["5", 1.5, 0, -3, True, [5], Unshowable()],
    "stop": [5, [5], [""], {"a": 1}, Unshowable()],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_SAMPLING.items() for v in values])
def test_what_a_scheduler_asks_the_engine_for_is_checked(name, value, tmp_path):
    through(Asks(**{name: value}), tmp_path, f"request_config.{name} must be")


# ---- generate functions


WRONG_PAYLOADS: list[tuple[str, Any]] = [
    ("expected a dict", "text"),
    ("must be a dict", {"text": "q", "sampling_params": 5}),
    *[("input_ids", {"input_ids": ids}) for ids in (5, "abc", [1.5], ["5"], [None], [True], [[5]], [-1], [10**9])],
    *[("text must be one text", {"text": text}) for text in (5, ["a", "b"], b"q")],
    *[("max_new_tokens", {"text": "q", "sampling_params": {"max_new_tokens": n}}) for n in ("5", 1.5, 0, True, [5])],
    *[("sampling_params.stop", {"text": "q", "sampling_params": {"stop": stop}}) for stop in (5, [5], [""])],
    *[("stop_token_ids", {"text": "q", "sampling_params": {"stop_token_ids": ids}}) for ids in (5, ["5"], [1.5])],
]


@pytest.mark.parametrize(("says", "payload"), WRONG_PAYLOADS)
def test_what_a_generate_function_asks_the_engine_for_is_checked(says, payload, tmp_path):
    generate_functions.PAYLOAD[:] = [payload]
    through_a_function(lambda sample: sample, tmp_path, says, path="generate_functions.asks_wrongly")


def through_a_function(spoil, tmp_path, says: str, path="generate_functions.wrong_for_bad") -> None:
    generate_functions.SPOIL[:] = [spoil]
    engine = ScriptedEngine(lambda request: turn("x" if ".00000." in request.request_id else "yes"))
    runner = generate_runner(path, [], engine=engine)
    groups = roll_out_groups(runner, rows("bad", "good"))
    one_fails([t for group in groups for t in group.trajectories], says, tmp_path)


@pytest.mark.parametrize(
    "value", [None, "text", 5, {"tokens": []}, [], [None], ["text"], [5, None], (1, 2), Unshowable()]
)
def test_what_a_generate_function_returns_is_checked(value, tmp_path):
    through_a_function(lambda sample: value, tmp_path, "Sample")


SAMPLE_FIELDS: dict[str, list[Any]] = {
    "tokens": [None, 5, "abc", [1.5], ["5"], [None], [[5]], [], [True] * 40, Unshowable()],
    "response": [None, 5, b"bytes", ["x"], Unshowable()],
    "response_length": [None, "2", 2.0, True, -1, 1, 10**6, [2], Unshowable()],
    "reward": ["1.0", "text", math.nan, math.inf, [1.0], {}, {"score": None}, {"score": "1"}, Unshowable()],
    "loss_mask": [5, "11", [1], [1] * 9, ["0", "1"], [0.5, 1], [2, 1], [None, 1], [[1], [1]], Unshowable()],
    "rollout_log_probs": [5, "ab", [-0.5], ["a", "b"], [None, None], [math.nan] * 2, [-9.0] * 2, Unshowable()],
    "status": [None, "done", 5, [], Unshowable()],
    "metadata": [None, "text", 5, [1], {"role": 5}, {"role": ["a"]}, Unshowable()],
    "remove_sample": [None, "False", 5, [], Unshowable()],
    "multimodal_inputs": ["text", {"pixel_values": 1}],
    "teacher_log_probs": [5, [0.5]],
}


@pytest.mark.parametrize(
    ("name", "says", "value"), [case(n, n, v) for n, values in SAMPLE_FIELDS.items() for v in values]
)
def test_every_field_of_a_sample_is_checked(name, says, value, tmp_path):
    def spoil(sample):
        setattr(sample, name, value)
        return sample

    says = {"response_length=1": "response", "rollout_log_probs": "rollout_log_probs"}.get(name, says)
    through_a_function(spoil, tmp_path, says)


def test_a_sample_of_numpy_and_a_status_by_its_value_are_understood():
    def spoil(sample):
        sample.tokens, sample.loss_mask = np.array(sample.tokens), np.array(sample.loss_mask)
        sample.rollout_log_probs, sample.status = np.array(sample.rollout_log_probs), "completed"
        return sample

    generate_functions.SPOIL[:] = [spoil]
    runner = generate_runner("generate_functions.wrong_for_bad", [turn("x")])
    ((trajectory,),) = [g.trajectories for g in roll_out_groups(runner, rows("bad"))]
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert trajectory.sample.status is Status.COMPLETED and type(trajectory.sample.tokens) is list


@pytest.mark.parametrize(
    "value", ["1.0", None, [1.0], {}, {"score": None}, {"score": "1"}, math.nan, math.inf, object(), Unshowable(), 1j]
)
@pytest.mark.parametrize("function", ["reward_for_bad", "rewards_for_bad"])
def test_what_a_reward_function_in_slimes_manner_returns_is_checked(function, value, tmp_path):
    generate_functions.SPOIL[:] = [lambda sample: sample]
    generate_functions.REWARD[:] = [value]
    engine = ScriptedEngine(lambda request: turn("x" if ".00000." in request.request_id else "yes"))
    runner = generate_runner(
        "generate_functions.wrong_for_bad", [], engine=engine, reward=f"generate_functions.{function}"
    )
    bad, good = (g.trajectories[0] for g in roll_out_groups(runner, rows("bad", "good")))
    assert good.reward == 1.0 and bad.status is Status.FAILED and bad.counters["reward_errors"] == 1
    assert as_a_step_uses_them([bad, good], tmp_path)["rollout/reward_errors"] == 1


# ---- environments


class Shop(Env):
    """Two steps; `WRONG` is what the second one returns in the conversation about `bad`."""

    WRONG: list[Any] = []

    async def reset(self, config):
        self.bad, self.steps = config.messages[0]["content"] == "bad", 0
        return config.messages[0]["content"], {}, ""

    async def step(self, action):
        self.steps += 1
        return self.WRONG[0] if self.bad else ("more", 0.5, self.steps == 2, {})


@pytest.mark.parametrize(
    ("says", "value"),
    [("reward", ("o", v, False, {})) for v in ("1.0", None, math.nan, [1.0], Unshowable())]
    + [("done", ("o", 1.0, v, {})) for v in ("False", None, 5, [], Unshowable())]
    + [("cannot be written", ("o", 1.0, False, {"k": object()})), ("nested", ("o", 1.0, True, {"k": deep()}))]
    + [("on_turn_end", v) for v in (None, "text", (1, 2, 3), ("o", 1.0, False, 5))],
)
def test_what_an_environment_returns_is_checked(says, value, tmp_path):
    Shop.WRONG[:] = [value]
    through(GymScheduler(max_turns=2, env=f"{__name__}.Shop"), tmp_path, says)


# ---- and what is behind all drivers


@pytest.mark.parametrize("value", [deep(), endless(), Unshowable(), {Unshowable(): Unshowable()}])
def test_whatever_is_left_in_a_trajectory_its_row_can_be_written(value, tmp_path):
    """As the arguments of a call, which a model may nest as deeply as it likes."""
    (trajectory,) = roll_out(runner_for(ScriptedEngine([said("yes")]), OneTurn(None)), [prompt_of("good")])
    trajectory.info["k"] = value
    trajectory.messages[-1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"k": value}}}]
    as_a_step_uses_them([trajectory], tmp_path)


def test_a_trajectory_that_cannot_be_shown_to_the_reward_fails_alone(tmp_path):
    class Spoils(OneTurn):
        async def on_trajectory_end(self, infer_request, reason):
            if infer_request.messages[0]["content"] == "bad":
                current().session.trajectory.messages.append("no message")

    through(Spoils(lambda output: output), tmp_path, "")
