"""Whole runs with plug-ins at their worst: what they raise, return or block is counted, and the run goes on."""

from __future__ import annotations

import math

import pytest
import yaml
from command_lab import NO_VALIDATION, calculator_yaml, fit, rows_of
from tables import before_release, one_of_each

pytestmark = pytest.mark.slow

TOOLS = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"
INTERACTION = "actor_rollout_ref.rollout.interaction_config_file"
OPTIONS = (
    *NO_VALIDATION,
    "data.train_batch_size=2",
    "trainer.progress=off",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
)
SHORT = "actor_rollout_ref.rollout.response_length=16"

PLUGIN = """
import asyncio, itertools, threading, time
from verl_mt.interactions.base import BaseInteraction
from verl_mt.tools.calculator import Calculator

COUNT, LOCK = itertools.count(1), threading.Lock()

class Unspeakable(Exception):
    def __str__(self):
        return f"{self.response.status}"

class Bare(BaseException):
    pass

class Raising(Calculator):
    runs_inline = False

    async def release(self, instance_id, **kwargs):
        raise Unspeakable

    async def calc_reward(self, instance_id, **kwargs):
        raise (Bare, Unspeakable, SystemExit)[next(COUNT) % 3]

class RaisingInExecute(Calculator):
    runs_inline = False

    async def execute(self, instance_id, parameters, **kwargs):
        raise (Bare, Unspeakable, SystemExit)[next(COUNT) % 3]

class BlocksInRelease(Calculator):
    runs_inline = False

    async def release(self, instance_id, **kwargs):
        time.sleep(1.5)

class Raises(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 0.0, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        if next(COUNT) % 2:
            raise Unspeakable

def every_third(make):
    with LOCK:
        number = next(COUNT)
    return make() if number % 3 == 0 else float(number % 2)

def throws():
    raise Unspeakable

def raising(solution_str, ground_truth):
    return every_third(throws)

async def raising_later(solution_str, ground_truth):
    return every_third(throws)

async def bare_later(solution_str, ground_truth):
    def throw():
        raise Bare("bare")
    return every_third(throw)

def huge(solution_str, ground_truth):
    return every_third(lambda: 1e39)

def huger(solution_str, ground_truth):
    return {"score": every_third(lambda: 1e308), "part": 1e300}

def large(solution_str, ground_truth):
    return every_third(lambda: -1e15)
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "hostile_plugin.py"
    file.write_text(PLUGIN)
    return file


REWARDS = {"raising": "sync", "bare_later": "async", "huger": "number", "raising_later": "async", "huge": "number"}


@pytest.mark.parametrize("name", one_of_each(REWARDS, REWARDS.get))
def test_a_reward_that_raises_or_is_too_large_fails_its_own_samples(tmp_path, plugin, name):
    words = (f"reward.path={plugin}", f"reward.name={name}", "reward.timeout_s=60")
    lines = fit(tmp_path / "run", *OPTIONS, SHORT, *words)
    lost = [line["rollout/reward_errors"] for line in lines]
    assert len(lines) == 2 and sum(lost) == 16 // 3  # every third of 2 x 8
    assert [line["rollout/failed"] for line in lines] == lost
    for line in lines:
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        assert line["reward/max"] == 1.0
    failed = [row for row in rows_of(tmp_path / "run", 1) if row["status"] == "failed"]
    assert all(name in ("huge", "huger") or "Unspeakable" in row["error"] or "Bare" in row["error"] for row in failed)


@pytest.mark.parametrize("norm", [True, before_release(False)])
def test_the_largest_rewards_that_are_taken_end_no_run(tmp_path, plugin, norm):
    lines = fit(
        tmp_path / "run", *OPTIONS, SHORT, f"reward.path={plugin}", "reward.name=large",
        f"algorithm.norm_adv_by_std_in_grpo={norm}",
    )  # fmt: skip
    assert len(lines) == 2 and all(line["rollout/failed"] == 0 for line in lines)


def test_a_tool_that_raises_at_the_end_is_counted(tmp_path, plugin):
    lines = fit(tmp_path / "run", *OPTIONS, f"{TOOLS}={calculator_yaml(tmp_path, f'{plugin}:Raising')}")
    for line in lines:
        assert line["rollout/failed"] == 0 and line["tools/calculator/errors"] > 0
        assert line["tools/calculator/errors"] % 2 == 0  # `calc_reward` and `release` of each instance


def test_a_tool_that_raises_in_execute_is_told_to_the_model_and_counted(tmp_path, plugin):
    lines = fit(tmp_path / "run", *OPTIONS, f"{TOOLS}={calculator_yaml(tmp_path, f'{plugin}:RaisingInExecute')}")
    for line in lines:
        calls, wrong = line["tools/calculator/calls"], line.get("tools/calculator/model_errors", 0)
        assert line["rollout/failed"] == 0 and line["tools/calculator/errors"] == calls - wrong > 0


def test_a_release_that_blocks_is_one_error_of_its_own_instance(tmp_path, plugin):
    lines = fit(
        tmp_path / "run", *OPTIONS, f"{TOOLS}={calculator_yaml(tmp_path, f'{plugin}:BlocksInRelease')}",
        "actor_rollout_ref.rollout.multi_turn.tool_timeout_s=0.5",
        "actor_rollout_ref.rollout.multi_turn.max_tool_calls=1",
    )  # fmt: skip
    for step, line in enumerate(lines, start=1):
        rows = rows_of(tmp_path / "run", step)
        instances = sum(bool(row["tool_rewards"]) for row in rows)
        assert all(call["failure"] != "tool" for row in rows for call in row.get("tool_calls", []))
        assert line["tools/calculator/errors"] == instances > 0 and line["rollout/failed"] == 0


def test_an_interaction_that_raises_at_its_end_fails_its_own_trajectory(tmp_path, plugin):
    file = tmp_path / "interactions.yaml"
    file.write_text(yaml.safe_dump({"interaction": [{"class_name": f"{plugin}:Raises", "config": {}, "name": "r"}]}))
    lines = fit(tmp_path / "run", *OPTIONS, f"{INTERACTION}={file}")
    assert len(lines) == 2 and sum(line["rollout/failed"] for line in lines) == 8
