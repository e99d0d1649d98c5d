"""Many conversations at once: `RolloutRunner.run` yields finished, scored groups.

One bad sample never kills the batch: what a plug-in raised marks its trajectory FAILED, an engine that went away
makes it start again, and both are counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import insort
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from statistics import fmean
from typing import TypeVar

from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import MAX_REWARD, StopReason, TimeSpan, Trajectory, TrajectoryGroup, is_trainable
from verl_mt.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EngineGoneError,
    WeightsReplacedError,
    traceback_text,
)
from verl_mt.interactions.base import BaseInteraction
from verl_mt.interactions.session import InteractionSession
from verl_mt.rewards.base import Reward, RewardFailure, Scores, score_all
from verl_mt.rewards.contract import RunState
from verl_mt.rollout.drivers import Episode, Place, RolloutDriver, ToolLoopDriver
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.reward_input import reward_input
from verl_mt.rollout.session import RolloutSession, SessionContext, deadline_error, session_error
from verl_mt.tools.agent_data import AgentData
from verl_mt.tools.executor import ToolExecutor, ToolSession
from verl_mt.user_code import CallTimeout, end_tasks, fair_turn

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class RolloutProgress:
    """Counts for a display, from when the first of the plans in flight began. Written by the runner, read by anyone."""

    num_plans: int = 0
    num_trajectories: int = 0
    num_finished: int = 0
    num_sampled_tokens: int = 0
    num_tool_calls: int = 0
    started_s: float = 0.0

    def begin(self, num_trajectories: int) -> None:
        """A plan of `num_trajectories` begins; where it is the only one, the counts begin with it."""
        if not self.num_plans:
            self.num_trajectories = self.num_finished = self.num_sampled_tokens = self.num_tool_calls = 0
            self.started_s = time.monotonic()
        self.num_plans += 1
        self.num_trajectories += num_trajectories

    def end(self) -> None:
        """One that began is over."""
        self.num_plans -= 1


@dataclass(frozen=True)
class RolloutPlan:
    """One batch of prompts to roll out."""

    prompts: Sequence[Prompt]
    n: int
    """Samples per prompt."""
    name: str
    """Prefix of all ids: the step, or the validation pass."""
    sampling: SamplingParams | None = None
    """None = the run's own."""
    evaluation: bool = False
    """A validation: nothing of it is trained."""
    greedy_too: bool = False
    """One more, greedy answer to each prompt. Its reward goes to the others (`greedy_reward`); it is not trained."""
    run: RunState = RunState()
    """Where the training run stands; for rewards."""
    positions: Sequence[int] | None = None
    """Places of the prompts in the plan, where it is a part of one; None = 0, 1, 2, ..."""

    @property
    def episodes_per_prompt(self) -> int:
        return self.n + self.greedy_too

    @property
    def placed(self) -> Iterator[tuple[int, Prompt]]:
        """(place in the plan, prompt)"""
        return zip(range(len(self.prompts)) if self.positions is None else self.positions, self.prompts)

    @property
    def prompt_ids(self) -> list[str]:
        """Of its groups."""
        return [self.prompt_id(place) for place, _ in self.placed]

    def prompt_id(self, position: int) -> str:
        return f"{self.name}.{position:05d}"

    @cached_property
    def prompt_of(self) -> dict[str, Prompt]:
        """Its prompts by their ids."""
        return {self.prompt_id(place): prompt for place, prompt in self.placed}

    def only(self, prompt_ids: Container[str]) -> RolloutPlan:
        """The part of it that these prompts are."""
        left = [(place, prompt) for place, prompt in self.placed if self.prompt_id(place) in prompt_ids]
        return replace(self, prompts=[prompt for _, prompt in left], positions=[place for place, _ in left])


@dataclass
class RolloutRunner:
    """Runs conversations on one event loop."""

    context: SessionContext
    reward: Reward
    driver: RolloutDriver = field(default_factory=ToolLoopDriver)
    tools: ToolExecutor | None = None
    interactions: dict[str, BaseInteraction] = field(default_factory=dict)
    interaction_timeout_s: float = 60.0
    max_concurrent: int | None = None
    seats: int | None = None
    """Of a plan without that limit no more live at once, where more than the engine holds would only wait in it:
    for their requests' deadlines, with their keys and values lost to others."""
    max_retries: int = 2
    tool_reward_weight: float = 0.0
    turn_score_weight: float = 0.0
    reward_by_turn: bool = False
    """What a turn earned is told apart (`turn_rewards`)."""
    turn_cost: float = 0.0
    """Per assistant turn after the first; like the other weights, not for what a driver has scored itself."""
    token_cost: float = 0.0
    """Per sampled token."""
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    _shared: Gate | None = None
    """Of all plans in flight, where `max_concurrent` limits them."""

    async def run(self, plan: RolloutPlan) -> AsyncGenerator[TrajectoryGroup]:
        """Yield each group when its last trajectory is scored, in the order they finish.

        Runs on the rollout's loop, or on that of a rollout worker. Waits for the groups.

        Raises:
            DeadlineError: a deadline fired in a deterministic run.
        """
        gate = self._gate_for(len(plan.prompts) * plan.episodes_per_prompt)
        self.progress.begin(len(plan.prompts) * plan.episodes_per_prompt)
        tasks = [
            asyncio.create_task(self.run_group(plan, position, prompt, gate), name=f"group {position}")
            for position, prompt in plan.placed
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            cut = not all(task.done() for task in tasks)
            await end_tasks(lambda: tasks)
            self.progress.end()
            if cut:
                gate.expect_no_more()

    def _gate_for(self, expected: int) -> Gate:
        """The gate of a plan of `expected` conversations that begins: the other plans' gate, or a new one."""
        if self.max_concurrent is None:
            return Gate(max(1, min(expected, self.seats or expected)), expected)
        if self._shared is None or not self.progress.num_plans:
            self._shared = Gate(self.max_concurrent, 0)
        self._shared.expect(expected)
        return self._shared

    async def run_group(self, plan: RolloutPlan, position: int, prompt: Prompt, gate: Gate) -> TrajectoryGroup:
        """Roll out and score the prompt at `position` of a plan.

        Raises:
            DeadlineError: a deadline fired in a deterministic run.
        """
        prompt_id = plan.prompt_id(position)
        context = self.context if plan.sampling is None else replace(self.context, sampling=plan.sampling)
        contexts = [context] * plan.n + [replace(context, sampling=context.sampling.greedy())] * plan.greedy_too
        row, first = prompt.row, position * plan.episodes_per_prompt
        runs = []
        for sample, own in enumerate(contexts):
            name, place = f"{prompt_id}.{sample:02d}", Place(position, first + sample, plan.evaluation, plan.run)
            begin = partial(Trajectory, name, prompt_id, prompt_id, name, row.data_source, row.index, source=row.source)
            runs.append(asyncio.ensure_future(self._run_one(own, name, begin, prompt, gate, place)))
        try:
            outcomes = await asyncio.gather(*runs)
        finally:  # of a group that is cancelled, too, every trajectory gives back what it holds
            await end_tasks(lambda: runs)
        finished = [t for outcome in outcomes for t in outcome]
        for trajectory in finished:
            trajectory.ground_truth = row.ground_truth
        group = TrajectoryGroup(prompt_id, prompt_id, finished, row.data_source, row.index, row.source)
        await self._score(group, prompt, plan.run)
        for trajectory in finished:
            trajectory.extra_fields = {}
        if plan.greedy_too:
            set_aside(group, outcomes[-1])
        return group

    async def _run_one(
        self,
        context: SessionContext,
        session_id: str,
        begin: Callable[..., Trajectory],
        prompt: Prompt,
        gate: Gate,
        place: Place,
    ) -> list[Trajectory]:
        """One episode, tried again after the engine went away; its trajectories (a driver may make several)."""
        engine, order = context.engine, place.sample
        arrived = time.monotonic()
        opens, closes = partial(engine.open_session, session_id, order), partial(engine.close_session, session_id)
        await gate.enter((place.run.step, order), opens, closes)
        waited = [] if self.max_concurrent is None else [TimeSpan("queue", arrived, time.monotonic(), 0)]
        try:
            await fair_turn()
            lost = replaced = 0
            while True:
                # From the beginning, in a trajectory of its own: the engine that comes back may have other weights and
                # has no cache, tools hold what the lost attempt did to them, and tokens of two attempts in one record
                # would have log-probs of histories that never were. The gate's place and the engine's session stay, so
                # that a deterministic engine does not go on without this conversation.
                trajectory = begin(time_spans=list(waited))
                session = self.driver.session_class(context, trajectory, order, lost + replaced, prompt.truncated)
                error, outcome = await self._attempt(session, prompt, place)
                if all(t is not trajectory for t in outcome):
                    # What tools and engine did is counted, though the first conversation came to nothing.
                    for name, amount in trajectory.counters.items():
                        outcome[0].counters[name] = outcome[0].counters.get(name, 0) + amount
                    outcome[0].time_spans += trajectory.time_spans
                if isinstance(error, WeightsReplacedError):
                    replaced += 1
                elif isinstance(error, EngineGoneError) and lost < self.max_retries:
                    lost += 1
                else:
                    break
            again = {"retries": lost, "replaced": replaced}
            outcome[0].counters |= {name: count for name, count in again.items() if count}
        finally:
            gate.leave()
            engine.close_session(session_id)
        self.progress.num_finished += 1
        self.progress.num_sampled_tokens += sum(t.num_sampled_tokens for t in outcome)
        return outcome

    async def _attempt(
        self, session: RolloutSession, prompt: Prompt, place: Place
    ) -> tuple[BaseException | None, list[Trajectory]]:
        """One try at a conversation; whatever is raised is attributed and stored, except cancellation and deadlines
        of deterministic runs."""
        trajectory, extra = session.trajectory, prompt.row.extra_info
        tools = interaction = None
        try:
            session.start(prompt.ids, prompt.messages, prompt.tools)
            if prompt.problem is not None:
                raise DataError(prompt.problem)
            if self.tools is not None and not prompt.one_turn:
                tools = self.tools.open(
                    trajectory.trajectory_id,
                    extra.get("tools_kwargs"),
                    tools=prompt.toolset,
                    agent_data=AgentData(trajectory, extra),
                )
                await tools.start()
            if self.interactions and not prompt.one_turn:
                interaction = InteractionSession.open(
                    self.interactions,
                    extra.get("interaction_kwargs"),
                    trajectory_id=trajectory.trajectory_id,
                    timeout_s=self.interaction_timeout_s,
                )
                if interaction is not None:
                    await interaction.start()
            episode = Episode(session, prompt, tools, interaction, place)
            await self.driver.run(episode)
            if tools is not None and session.context.deterministic:
                for name, count in tools.counters.items():
                    if name.endswith("/timeouts") and count:
                        raise deadline_error(trajectory, f"multi_turn.tool_timeout_s of {name.split('/')[1]}")
            await session.finish()
            return None, episode.outcome or [trajectory]
        except (asyncio.CancelledError, KeyboardInterrupt, DeadlineError):
            raise
        except EngineGoneError as error:
            trajectory.stop_reason = StopReason.ENGINE
            trajectory.error = session_error(trajectory, error)
            return error, [trajectory]
        except Exception as error:
            if session.context.deterministic and isinstance(error.__cause__, CallTimeout):
                raise deadline_error(trajectory, f"the deadline of {error}") from error
            self._fail(trajectory, error)
            return error, [trajectory]
        finally:
            await self._close(session, tools, interaction)

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        trajectory.stop_reason = StopReason.ERROR
        trajectory.error = traceback_text(error)
        log.warning("trajectory failed: %s", session_error(trajectory, error))

    async def _close(
        self, session: RolloutSession, tools: ToolSession | None, interaction: InteractionSession | None
    ) -> None:
        trajectory = session.trajectory
        if tools is not None:
            trajectory.tool_rewards, trajectory.tool_reward_turns = await tools.close(), tools.reward_turns
            trajectory.counters.update(tools.counters)
            trajectory.tool_calls += tools.calls
            trajectory.extra_fields = tools.agent_data.extra_fields
            trajectory.time_spans += tools.time_spans
            self.progress.num_tool_calls += sum(int(v) for k, v in tools.counters.items() if k.endswith("/calls"))
        if interaction is not None:
            try:
                trajectory.info["interaction_score"] = await interaction.finish()
            except Exception as error:  # also an EngineError: the conversation itself is over
                if trajectory.stop_reason is not StopReason.ENGINE:
                    self._fail(trajectory, error)
            trajectory.time_spans += interaction.time_spans

    async def _score(self, group: TrajectoryGroup, prompt: Prompt, run: RunState) -> None:
        """Reward every trajectory that was not aborted or failed, unless its driver has scored it; a reward that raises
        fails its own trajectory."""
        scored, inputs = [], []
        several_turns = self.tools is not None or bool(self.interactions) or not self.driver.is_tool_loop
        for trajectory in group.trajectories:
            if trajectory.status not in ("completed", "truncated") or trajectory.reward is not None:
                continue
            try:
                inputs.append(reward_input(trajectory, prompt, run, self.context.chat, several_turns=several_turns))
                scored.append(trajectory)
            except Exception as error:
                self._fail(trajectory, error)
        if not scored:
            return
        begun = time.monotonic()
        outcomes = await score_all(self.reward, inputs)
        ended = time.monotonic()
        for trajectory, outcome in zip(scored, outcomes):
            trajectory.time_spans.append(TimeSpan("reward", begun, ended, trajectory.num_turns))
            failure = outcome if isinstance(outcome, RewardFailure) else self._reward(trajectory, outcome)
            if failure is not None:
                if failure.kind in ("timeout", "unavailable") and self.context.deterministic:
                    raise deadline_error(trajectory, "reward.timeout_s")
                lost = failure.kind == "unavailable"
                trajectory.stop_reason = StopReason.REWARD_UNAVAILABLE if lost else StopReason.ERROR
                trajectory.error = failure.traceback
                trajectory.counters["reward_errors"] = 1
                log.warning("reward failed: %s: %s", trajectory.trajectory_id, failure.error)

    def _reward(self, trajectory: Trajectory, scores: Scores) -> RewardFailure | None:
        """Give it its reward; a failure where the terms, each of them small enough, make too large a number."""
        costs, by_turn = self._costs(trajectory), {}
        reward = (
            scores["score"]
            + self.tool_reward_weight * sum(sum(r) for r in trajectory.tool_rewards.values())
            + self.turn_score_weight * sum(trajectory.turn_scores)
            + sum(costs.values())
        )
        if self.reward_by_turn:
            weights = {"tool_weight": self.tool_reward_weight, "score_weight": self.turn_score_weight}
            by_turn = turn_rewards(trajectory, **weights)
        if not all(map(is_trainable, [reward, *by_turn.values()])):
            text = f"score {scores['score']:g} with the weighted rewards of tools, turns and costs is {reward:g}"
            text += f", or that of a turn: beyond {MAX_REWARD:.2g}; lower the weights or the rewards"
            return RewardFailure(text, text, "invalid")
        trajectory.reward_parts, trajectory.reward, trajectory.turn_rewards = scores | costs, reward, by_turn
        if trajectory.sample is not None:
            trajectory.sample.reward = trajectory.reward
        return None

    def _costs(self, trajectory: Trajectory) -> dict[str, float]:
        """What the conversation's length costs, as terms of the reward; nothing where it costs nothing."""
        costs = {
            "turn_cost": self.turn_cost * max(0, trajectory.num_turns - 1),
            "token_cost": self.token_cost * trajectory.num_sampled_tokens,
        }
        charged = {"turn_cost": self.turn_cost, "token_cost": self.token_cost}
        return {name: 0.0 - cost for name, cost in costs.items() if charged[name]}


def failed_group(plan: RolloutPlan, position: int, prompt: Prompt, error: str) -> TrajectoryGroup:
    """The group of the prompt at `position` of a plan, none of whose conversations came to an end.

    Args:
        error: why, for all of them.
    """
    prompt_id, row = plan.prompt_id(position), prompt.row
    names = [f"{prompt_id}.{sample:02d}" for sample in range(plan.episodes_per_prompt)]
    failed = [
        Trajectory(
            name, prompt_id, prompt_id, name, row.data_source, row.index, list(row.prompt), source=row.source,
            ground_truth=row.ground_truth, stop_reason=StopReason.ERROR, error=error,
        )
        for name in names
    ]  # fmt: skip
    group = TrajectoryGroup(prompt_id, prompt_id, failed, row.data_source, row.index, row.source)
    if plan.greedy_too:
        set_aside(group, failed[-1:])
    return group


class Gate:
    """Lets `limit` conversations live at once, by rank (older plans first, then by place in the plan); a conversation's
    engine session is opened as it is let in.

    A deterministic engine steps only when every open session waits for it. Two things keep timing out of that: no one
    begins before all `expected` have arrived, and the next session is opened before the one it replaces is closed.
    With 0 expected they begin as they arrive.
    """

    def __init__(self, limit: int, expected: int):
        if limit < 1:
            raise ConfigError(f"rollout.max_concurrent must be at least 1, got {limit}")
        self._free = limit
        self._missing = expected
        self._waiting: list[tuple[tuple[int, int], Callable[[], None], asyncio.Future[None]]] = []

    def expect(self, number: int) -> None:
        """`number` more will arrive."""
        self._missing = max(0, self._missing) + number

    def expect_no_more(self) -> None:
        """A plan was cut off, and some of its conversations will not arrive: those that wait may begin."""
        self._missing = 0
        self._fill()

    async def enter(
        self, order: tuple[int, int], open_session: Callable[[], None], close_session: Callable[[], None]
    ) -> None:
        """Returns once it is let in; who is cancelled in that moment leaves again. Runs on the rollout's loop. Waits
        for the other conversations."""
        future = asyncio.get_running_loop().create_future()
        insort(self._waiting, (order, open_session, future), key=itemgetter(0))
        self._missing -= 1
        if self._missing <= 0:
            self._fill()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()
                close_session()
            raise

    def _fill(self) -> None:
        while self._free and self._admit():
            self._free -= 1

    def leave(self) -> None:
        if not self._admit():
            self._free += 1

    def _admit(self) -> bool:
        while self._waiting:
            _, open_session, future = self._waiting.pop(0)
            if not future.done():
                open_session()
                future.set_result(None)
                return True
        return False


def turn_rewards(trajectory: Trajectory, *, tool_weight: float, score_weight: float) -> dict[int, float]:
    """Assistant turn -> the weighted rewards that it earned: a tool's step rewards for the turn that made the calls, an
    interaction's score for the turn that it judged.

    What belongs to no turn is not in it: the reward function's score, and a tool's `calc_reward` of the whole.
    """
    earned: dict[int, float] = defaultdict(float)
    for name, turns in trajectory.tool_reward_turns.items():
        for turn, reward in zip(turns, trajectory.tool_rewards.get(name, [])):
            earned[turn] += tool_weight * reward
    judged = [span.turn for span in trajectory.time_spans if span.phase == "interaction"]
    if len(judged) == len(trajectory.turn_scores):
        for turn, score in zip(judged, trajectory.turn_scores):
            earned[turn] += score_weight * score
    return {turn: reward for turn, reward in sorted(earned.items()) if reward}


def set_aside(group: TrajectoryGroup, greedy: list[Trajectory]) -> None:
    """Take the greedy answer (several trajectories, where an episode has several agents) out of a scored group; each
    agent's others get its reward to be compared with, NaN where it was not scored."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in greedy:
        if trajectory.reward is not None:
            rewards[trajectory.group_id].append(trajectory.reward)
    taken = {id(t) for t in greedy}
    group.trajectories = [t for t in group.trajectories if id(t) not in taken]
    for trajectory in group.trajectories:
        found = rewards.get(trajectory.group_id)
        trajectory.greedy_reward = fmean(found) if found else math.nan
