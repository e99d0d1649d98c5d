"""A generate function that asks for scores while the service behind the reward is down."""

from __future__ import annotations

from generate_support import only, roll_out, rows, runner_of, turn

from verl_mt.config.schema import Config
from verl_mt.data.trajectory import Status
from verl_mt.diagnostics.step_metrics import rollout_metrics
from verl_mt.rewards import Reward, RewardFailure


class Moody(Reward):
    """Down as often as `failures` says, then 1."""

    failures = 0

    async def score(self, items):
        if type(self).failures > 0:
            type(self).failures -= 1
            return [RewardFailure("the judge is down", "the judge is down", "unavailable") for _ in items]
        return [{"score": 1.0} for _ in items]


def rollout(failures: int):
    Moody.failures, config = failures, Config()
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"roles": ["solver"]}
    script = [turn("a"), turn("b"), turn("c")]
    runner = runner_of("generate_functions.team", script, reward=f"{__name__}.Moody", config=config, max_retries=2)
    return roll_out(runner, rows("q"))


def test_the_episode_starts_again():
    groups = rollout(1)
    assert only(groups).status is Status.COMPLETED and only(groups).reward == 1.0
    assert rollout_metrics(groups)["rollout/retries"] == 1


def test_a_service_that_stays_down_aborts_it():
    trajectory = only(rollout(9))
    assert trajectory.status is Status.ABORTED and trajectory.reward is None
    assert "the judge is down" in trajectory.error
