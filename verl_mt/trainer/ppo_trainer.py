"""The loop: roll out, score, estimate advantages, update, validate, save."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from verl_mt.chat.sanity import SanityMonitor
from verl_mt.config.schema import TrainerConfig
from verl_mt.data.batch import build_batch
from verl_mt.data.drawn_prompts import OpenPrompt, PromptLog
from verl_mt.data.requests import SamplingParams
from verl_mt.data.run_files import NO_ROOM, disk_refused
from verl_mt.data.sampler import RowSampler
from verl_mt.data.trajectory import StopReason, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import (
    prefix_cache_by_turn,
    rollout_metrics,
    total_failure,
    validation_metrics,
)
from verl_mt.engines.base import InferenceEngine
from verl_mt.errors import CheckpointError, EngineGoneError, UserCodeError, VerlMTError
from verl_mt.rewards.contract import RunState
from verl_mt.rollout.prompts import Prompt, PromptDraws
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer import checkpoint
from verl_mt.trainer.advantage_step import AdvantageStep
from verl_mt.trainer.checkpoint import CheckpointStore
from verl_mt.trainer.collapse_response import CollapseResponse
from verl_mt.trainer.dynamic_sampling import Selection, why_left_out
from verl_mt.trainer.over_sampling import OverSampling, drawn_at
from verl_mt.trainer.run_log import RunLog
from verl_mt.trainer.spool import GroupSpool
from verl_mt.trainer.staleness import require_bound, staleness_metrics
from verl_mt.workers.weight_sync import WeightSync
from verl_mt.workers.worker_group import WorkerGroup

log = logging.getLogger(__name__)

_TRAINING = "s"
"""How the names of plans begin whose groups are trained."""


@dataclass(frozen=True)
class BatchPlan:
    """How large a step is, and how validation samples."""

    num_prompts: int
    n: int
    sampling: SamplingParams
    val_n: int
    val_sampling: SamplingParams
    val_greedy_too: bool
    val_batch_size: int | None
    total_steps: int
    over: OverSampling | None = None
    """More prompts than a step needs are in flight; None = those of whole steps."""
    greedy_too: bool = False
    """Each training prompt has a greedy answer too, which the others are compared with (ReMax)."""
    run: RunState = RunState()
    """What rewards are told of the run as a whole."""

    def admission(self, config: TrainerConfig) -> dict[str, float]:
        """What decides when prompts are started, and in which steps they may be trained."""
        factor = 1.0 if self.over is None else self.over.factor
        return {"prompts": self.num_prompts, "over_sample": factor, "max_staleness": config.max_staleness}

    def rollout(self, prompts: list[Prompt], name: str, step: int) -> RolloutPlan:
        """A training rollout after `step` finished steps."""
        run = replace(self.run, step=step)
        return RolloutPlan(prompts, self.n, name, self.sampling, greedy_too=self.greedy_too, run=run)


@dataclass
class PPOTrainer:
    """Trains a policy; `build.build_trainer(config)` puts it together.

    `step_number` counts finished steps. A checkpoint holds everything at a step's end: weights, optimizer, schedule,
    generators and the position in the data.
    """

    config: TrainerConfig
    plan: BatchPlan
    draws: PromptDraws
    val_prompts: list[Prompt]
    prompt_counts: dict[str, float]
    """`data/...` of every step, `val/...` of every validation: prompts left out or cut, in the rows as loaded."""
    stream: RolloutStream
    engine: InferenceEngine
    workers: WorkerGroup
    weights: WeightSync
    estimate_advantages: AdvantageStep
    checkpoints: CheckpointStore
    sanity: SanityMonitor
    log: RunLog
    prompt_log: PromptLog
    pad_token_id: int
    collapse: CollapseResponse
    spool: GroupSpool | None = None
    """Keeps finished groups for a run that is killed; a deterministic one samples them again."""
    selection: Selection = field(default_factory=Selection)
    model: dict[str, str] = field(default_factory=dict)
    """`path` and `architecture`, for checkpoints: one of another model is refused."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the rows, for the same purpose."""
    step_number: int = 0
    interrupts: Interrupts = field(default_factory=lambda: Interrupts())
    exit_status: int = 0
    """Of a command that ends with this run: 130 after Ctrl-C, 143 after SIGTERM."""
    export: Callable[[], object] = lambda: None
    _score: float | None = None
    """`val/accuracy` of the weights as they are; None if this step was not validated."""
    _unlogged: dict[str, float] | None = None
    _at_boundary: dict[str, Any] = field(default_factory=dict)
    _drawn: dict[int, dict[str, int]] = field(default_factory=dict)
    """Finished steps before a step that is under way or ahead -> `data/...` of what was drawn for it."""

    def __post_init__(self) -> None:
        self.stream.arrived = self.prompt_log.finished
        self.stream.keep = None if self.spool is None else self.spool.keep

    @property
    def sampler(self) -> RowSampler:
        """In which order rows are drawn."""
        return self.draws.sampler

    def fit(self) -> None:
        """Train from `step_number` to the last step. Ctrl-C ends with a checkpoint of the last finished step."""
        with self.log, self.interrupts:
            try:
                # A run that goes on from a checkpoint was validated by its own schedule.
                first = self.config.val_before_train and self.step_number == 0
                if self.val_prompts and (first or self.config.val_only):
                    self.log.metrics(self.step_number, self.validate())
                if not self.config.val_only:
                    self._train()
                    self.weights.make_room()
                    self.export()
                if self.spool is not None:
                    self.spool.close()
                self.log.finish(self.step_number)
            except Interrupted:
                self._save_boundary()
                self.exit_status = self.interrupts.exit_status
                self.log.interrupted(self.step_number)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise CheckpointError(disk_refused(self.log.run.path, error)) from error
            finally:
                self.close()

    def step(self) -> dict[str, float]:
        """One step: rollout -> batch -> advantages -> update -> weights to the engine."""
        # Where the step stands beside what is sampled for later ones: the spans of rollout rows have the same clock.
        timing = {"time/begun_s": time.monotonic()} if self.config.steps_ahead else {}
        # A step that Ctrl-C breaks off has drawn rows already: its checkpoint needs the position before that.
        self._at_boundary = self._position()
        with self._timed(timing, "step"):
            with self._timed(timing, "rollout"):
                groups = self._rollout()
                # Before anything that can fail: what was sampled is what one wants to look at then.
                self.log.dump(self.step_number, groups)
                self._refuse_total_failure(groups)
                self._admit_during_update()
                if self.config.debug_mode == "rollout_only":
                    return self._rollout_only(groups)
                self.weights.release()
            trained = [t for g in groups if not g.filtered for t in g.trajectories]
            batch = build_batch(trained, pad_token_id=self.pad_token_id)
            metrics = self._rollout_metrics(groups) | self.selection.metrics()
            if batch is None:
                metrics["actor/skipped_empty_batches"] = 1
            else:
                if self.config.steps_ahead:
                    require_bound(batch, self.step_number, self.config.steps_ahead)
                with self._timed(timing, "ref"):
                    self.workers.add_ref_log_probs(batch)
                with self._timed(timing, "advantages"):
                    metrics |= self.estimate_advantages(batch)
                    metrics |= self.selection.mask_overlong(batch, groups)
                with self._timed(timing, "update"):
                    metrics |= self.workers.update(batch)
                if self.config.steps_ahead:
                    metrics |= staleness_metrics(batch, self.step_number)
            # Without a batch too: every step has a version of the weights, and the engine gets its memory back.
            with self._timed(timing, "weights"):
                self.weights.push(self.step_number + 1)
            self.sampler.update(groups)
            # After the update, which fills in what the rows say of each token: old log-probs, advantages, clipping.
            self.log.rollouts(self.step_number + 1, groups, batch)
            self._ended(why_left_out(groups, batch))
        metrics["weights/trainer_bytes"] = self.weights.trainer_bytes
        return metrics | self._speed(groups, timing) | timing

    def validate(self) -> dict[str, float]:
        """Sample every validation prompt, then decode it greedily: `val/accuracy`, `val/accuracy_greedy`."""
        if not self.val_prompts:
            return {}
        timing: dict[str, float] = {}
        with self._timed(timing, "validate"):
            passes = validation_passes(self.stream, self.val_prompts, self.plan, self.step_number, self._while_waiting)
            metrics = validation_metrics(passes["val"], "") | _under("val/", self.prompt_counts)
            if "val_greedy" in passes:
                metrics |= validation_metrics(passes["val_greedy"], "_greedy")
        # Its budget and its counts are per pass: nothing of a validation is left for the next step's.
        if "sanity/mismatch_rate" in (checked := self.sanity.metrics(of="val")):
            metrics["val/mismatch_rate"] = checked["sanity/mismatch_rate"]
        self._score = metrics["val/accuracy"]
        self.log.validation(self.step_number, metrics, passes)
        if self.config.val_only and (failure := total_failure(passes["val"])):
            raise UserCodeError(f"validation: {failure}")
        return metrics | timing

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on as if nothing had happened."""
        return {
            "step": self.step_number,
            "score": self._score,
            "unlogged": self._unlogged,
            "model": self.model,
            "rows": self.rows,
            "workers": self.workers.state_dict(),
            "advantages": self.estimate_advantages.state_dict(),
            "collapse": self.collapse.state_dict(),
            "dead_start": self.log.dead_start.state_dict(),
            **self._position(),
        }

    def _position(self) -> dict[str, Any]:
        """What a step that is broken off must leave as it was before."""
        return {
            "sampler": self.sampler.state_dict(),
            "prompts": self.prompt_log.state_dict(),
            "drawn": dict(self._drawn),
            "admission": self.plan.admission(self.config),
            "random": checkpoint.random_state(),
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Continue from a checkpoint; `folder` is its place, where workers find the shards that they wrote."""
        self.step_number, self._score, self._unlogged = state["step"], state["score"], state["unlogged"]
        self.weights.make_room()
        self.workers.load_state_dict(state["workers"], folder)
        self.estimate_advantages.load_state_dict(state.get("advantages", {}))
        self.collapse.load_state_dict(state.get("collapse", {}))
        self.log.dead_start.load_state_dict(state.get("dead_start", {}))
        if self.config.resume_mode == "other_data":
            self.sampler.go_on_in_other_rows(state["sampler"])
        else:
            self.sampler.load_state_dict(state["sampler"])
            self._drawn = dict(state.get("drawn", {}))
        if self.config.resume_mode == "other_data" or state.get("admission") != self.plan.admission(self.config):
            self._leave_in_flight()
        checkpoint.set_random_state(state["random"])
        self.weights.push(self.step_number)

    def _leave_in_flight(self) -> None:
        """Prompts of a checkpoint that is gone on from with other steps have no place in them."""
        if opened := self.prompt_log.open:
            log.warning(
                "%d prompts that were in flight are left out: the checkpoint is of a run with other rows, or with "
                "another data.train_batch_size, data.over_sample or trainer.max_staleness", len(opened),
            )  # fmt: skip
            self.prompt_log.ended(self.step_number, {known.prompt_id: "in flight, other steps" for known in opened})

    def close(self) -> None:
        """End the rollout thread, the engine and the workers. Idempotent."""
        try:
            self.stream.close(self.engine.close)
        finally:
            self.workers.close()
            self.prompt_log.close()

    def _train(self) -> None:
        if self.collapse.needs_start and not self.checkpoints.all():
            self._save()
        while True:
            if self._unlogged is not None:
                self._conclude_step(self._unlogged)
            if self.step_number >= self.plan.total_steps:
                return
            self.interrupts.check()
            # From here on the step counts as done, though nobody has seen its line yet: an interrupt in the validation
            # or the checkpoint that follow saves `_unlogged`, and the resumed run concludes the step first.
            self._unlogged = self.step()
            self._at_boundary = {}
            self.step_number += 1
            self._score = None
            if self.config.steps_ahead and self.step_number < self.plan.total_steps:
                self._at_boundary = self._position()  # a row that ends the run takes no prompts beside it along
                self._admit()
                self._at_boundary = {}

    def _conclude_step(self, metrics: dict[str, float]) -> None:
        """Validate, log, save. If Ctrl-C breaks it off, the resumed run does it (`_unlogged` is saved)."""
        last = self.plan.total_steps
        if _due(self.config.test_freq, self.step_number, last):
            metrics = metrics | self.validate()
        # The line first, so that a run that is stopped or rolled back has said why; then what the guard decided; and a
        # checkpoint only where the guard wrote none, for after a rollback it is the weights of the older one.
        metrics = metrics | self.collapse.observe(self.step_number, metrics)
        self.log.step(self.step_number, metrics)
        self._unlogged = None
        if self.collapse.due:
            self.log.flush()  # the rows of this step are part of what is left to look at
        saved = self.collapse.act(self.step_number, self._save, self._roll_back)
        if not saved and _due(self.config.save_freq, self.step_number, last):
            self._save()

    def _roll_back(self, folder: Path) -> None:
        """The policy of an older checkpoint, its optimizer and controllers; steps, rows and random numbers go on.

        Going back with the generators and the rows as well would draw the same prompts with the same seeds, and most
        likely collapse again in the same step.
        """
        state = checkpoint.load(folder)
        self.weights.make_room()
        self.workers.load_state_dict(state["workers"], folder)
        self.estimate_advantages.load_state_dict(state.get("advantages", {}))
        self.weights.push(self.step_number)
        self._score = None
        self._give_up()

    def _rollout_only(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """A step of which nothing is trained."""
        self.sampler.update(groups)
        self.log.rollouts(self.step_number + 1, groups, None)
        self._ended({g.prompt_id: "trainer.debug_mode=rollout_only" for g in groups})
        return self._rollout_metrics(groups)

    def _speed(self, groups: list[TrajectoryGroup], timing: dict[str, float]) -> dict[str, float]:
        """Tokens per second, and what held the step; ahead of their steps conversations hold nobody but themselves."""
        trajectories = [t for g in groups for t in g.trajectories]
        sampled = sum(t.num_sampled_tokens for t in trajectories)
        if self.config.steps_ahead:
            found = {"rollout/tokens_per_s": sampled / timing["time/step_s"]}
            return found | {"staleness/trainer_wait_s": timing["time/rollout_s"]} | prefix_cache_by_turn(trajectories)
        found = {"rollout/tokens_per_s": sampled / timing["time/rollout_s"]}
        if self.log.debug is None or not self.log.debug.replays:
            found |= self.log.straggler.observe(groups, timing, lock_step=self.engine.capabilities.lock_step)
        return found

    def _rollout_metrics(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """Of the step's groups, with what the engine, the sanity check and the prompts counted."""
        engine = {"rollout/replicas": 1, **self.engine.metrics()}
        found = rollout_metrics(groups, self.log.tool_names, int(engine["rollout/replicas"]))
        checked = self.sanity.metrics(of=_plan_name(self.step_number) if self.plan.over is None else _TRAINING)
        return found | checked | engine | self.stream.metrics() | self._prompt_counts()

    def _rollout(self) -> list[TrajectoryGroup]:
        """Collect this step's rollout. Or read what another run saved."""
        if self.log.debug is not None and self.log.debug.replays:
            return self.log.debug.load(self.step_number)
        self._admit()
        over, number = self.plan.over, self.step_number
        if over is None:
            groups = self.stream.collect(_plan_name(number), self._while_waiting)
        else:
            open_ids = [prompt.prompt_id for prompt in self.prompt_log.open]
            choose = partial(over.choose, open_at={name: drawn_at(name) for name in open_ids}, step=number)
            groups = self.stream.collect_some(choose, self._while_waiting)
            if not self.config.steps_ahead:
                self._give_up()
        self.selection.shape(groups)
        return self.selection.fill(groups, self._rollout_more, self.plan.num_prompts)

    def _admit(self) -> None:
        """Start the rollouts of this step and of those ahead that `trainer.max_staleness` allows.

        A rollout is admitted when at most so many updates lie before its own: what its first token is sampled by is
        then at most so many updates older than what it trains, however long it takes. Steps are trained in the order
        in which their prompts were drawn: a long conversation is in its batch as surely as a short one. With
        `data.over_sample` batches are filled in another order, and `OverSampling` keeps the bound.
        """
        self._reopen()
        if self.plan.over is not None:
            self._top_up(self.plan.over, _plan_name(self.step_number), self.step_number)
            return
        last = max(self.step_number, self.plan.total_steps - 1)
        for number in range(self.step_number, min(self.step_number + self.config.steps_ahead, last) + 1):
            if not self.stream.started(_plan_name(number)):
                self._start(_plan_name(number), self.plan.num_prompts, number)

    def _admit_during_update(self) -> None:
        """The step's groups are there. Of what comes next the bound may let something begin before its update; steps
        ahead have all begun."""
        if self.plan.over is not None and self.config.steps_ahead:
            self._top_up(self.plan.over, f"{_plan_name(self.step_number)}.001", self.step_number + 1)

    def _top_up(self, over: OverSampling, name: str, next_step: int) -> None:
        """Start as many prompts as may be in flight, under the weights after `step_number` updates, where `next_step`
        finished steps come before the next batch."""
        in_flight = len(self.prompt_log.open) - (next_step > self.step_number) * self.plan.num_prompts
        steps_left = self.plan.total_steps - next_step
        wanted = over.room(in_flight, version=self.step_number, next_step=next_step, steps_left=steps_left)
        if wanted:
            self._start(name, wanted, self.step_number)

    def _reopen(self) -> None:
        """What is in flight and does not run begins again, under the names that it had: after a kill, and where its
        weights were given up."""
        plans: dict[str, list[OpenPrompt]] = defaultdict(list)
        for known in self.prompt_log.open:
            if not self.stream.started(known.plan):
                plans[known.plan].append(known)
        for name, opened in plans.items():
            built = self.draws.again([known.row for known in opened])
            gone = {k.prompt_id: "no prompt any more" for k, prompt in zip(opened, built) if prompt is None}
            self.prompt_log.ended(self.step_number, gone)
            there = [(k.position, prompt) for k, prompt in zip(opened, built) if prompt is not None]
            plan = self.plan.rollout([prompt for _, prompt in there], name, drawn_at(name))
            self._begin(replace(plan, positions=[position for position, _ in there]))

    def _rollout_more(self, num_prompts: int, number: int) -> list[TrajectoryGroup]:
        """Rollout `number` of this step, of the prompts that come next."""
        name = f"{_plan_name(self.step_number)}.{number:03d}"
        self._start(name, num_prompts, self.step_number)
        groups = self.stream.collect(name, self._while_waiting)
        self.selection.shape(groups)
        return groups

    def _start(self, name: str, num_prompts: int, step: int) -> None:
        """Draw prompts and begin to roll them out, after `step` finished steps. A row that ends the run takes nothing
        with it that was trained since a checkpoint."""
        try:
            prompts, left_out, counts = self.draws.draw(num_prompts)
        except VerlMTError:
            if self.step_number:
                self._save_boundary()
            raise
        before = self._drawn.get(step, {})
        self._drawn[step] = {kind: before.get(kind, 0) + count for kind, count in counts.items()}
        self.prompt_log.drawn(name, [prompt.row for prompt in prompts], left_out)
        self._begin(self.plan.rollout(prompts, name, step))

    def _begin(self, plan: RolloutPlan) -> None:
        self.stream.start(plan, [] if self.spool is None else self.spool.take(plan))
        self.prompt_log.started(plan.name)

    def _give_up(self) -> None:
        """What is in flight was sampled by weights that no step may train on any more."""
        self.stream.stop()
        if self.spool is not None:
            self.spool.drop(prompt.prompt_id for prompt in self.prompt_log.open)

    def _ended(self, left_out: Mapping[str, str | None]) -> None:
        """The step is over: what became of its prompts."""
        self.prompt_log.ended(self.step_number + 1, left_out)
        if self.spool is not None:
            self.spool.drop(left_out)

    def _refuse_total_failure(self, groups: list[TrajectoryGroup]) -> None:
        """A run in which nothing survives a step would go on to its end and have trained on nothing."""
        failure = total_failure(groups)
        if failure is None:
            return
        step = self.step_number + 1
        self.log.rollouts(step, groups, None)
        self._save_boundary()
        written = self.config.rollout_rows != "off"
        where = f" (all of them: python -m verl_mt.report.rows {self.log.run.path} --step {step})" if written else ""
        lost = all(t.stop_reason is StopReason.ENGINE for g in groups for t in g.trajectories)
        raise (EngineGoneError if lost else UserCodeError)(
            f"step {step}: {failure}{where}. Repair what raised; the same command then goes on after step "
            f"{self.step_number}, from the checkpoint in {self.log.run.path}"
        )

    def _prompt_counts(self) -> dict[str, float]:
        """Of the training rows as loaded, and of what was drawn for this step besides."""
        drawn = self._drawn.pop(self.step_number, {})
        return {k: v + drawn.get(k, 0) for k, v in _under("data/", self.prompt_counts).items()}

    @contextmanager
    def _timed(self, timing: dict[str, float], name: str) -> Iterator[None]:
        """A part of the step: what the live line says now, and its seconds in `timing`."""
        self.log.display.phase(name)
        begun = time.monotonic()
        try:
            yield
        finally:
            timing[f"time/{name}_s"] = time.monotonic() - begun

    def _while_waiting(self) -> None:
        self.interrupts.check()
        # What is sampled could not be trained on, and the next call would come after hours of it.
        self.workers.check("waiting for the rollout")
        self.log.display.rollout(self.stream.progress)

    def _save_boundary(self) -> None:
        if self.config.val_only:
            return
        self._save(self._at_boundary)

    def _save(self, overrides: dict[str, Any] | None = None) -> None:
        begun = time.monotonic()
        self.log.display.phase("checkpoint")
        self.log.flush()
        made_room = self.weights.make_room()
        state = self.state_dict() | (overrides or {})
        self.checkpoints.save(self.step_number, state, score=self._score, write_more=self.workers.save_shards)
        self.workers.put_away()
        if made_room and overrides is None:  # else the run ends here
            self.weights.push(self.step_number)
        self.log.saved(time.monotonic() - begun)


def validation_passes(
    stream: RolloutStream, prompts: list[Prompt], plan: BatchPlan, step: int, while_waiting: Callable[[], None]
) -> dict[str, list[TrajectoryGroup]]:
    """Sample every prompt (`val`), then decode it greedily (`val_greedy`) where the plan asks for it; in batches of
    `plan.val_batch_size` prompts, after `step` finished steps."""
    wanted = {"val": (plan.val_sampling, plan.val_n)}
    if plan.val_greedy_too:
        wanted["val_greedy"] = (plan.val_sampling.greedy(), 1)
    size, run = plan.val_batch_size or len(prompts), replace(plan.run, step=step)
    passes: dict[str, list[TrajectoryGroup]] = {}
    for name, (sampling, n) in wanted.items():
        passes[name] = []
        for start in range(0, len(prompts), size):
            plan_name, part = f"{name}.s{step:06d}.{start:06d}", prompts[start : start + size]
            stream.start(RolloutPlan(part, n, plan_name, sampling, evaluation=True, run=run))
            passes[name] += stream.collect(plan_name, while_waiting)
    return passes


class Interrupted(Exception):
    """The run was asked to stop; it saves a checkpoint and ends. Not an error."""


class Insisted(KeyboardInterrupt):
    """Asked a second time: the run ends here and now."""

    def __init__(self, exit_status: int):
        self.exit_status = exit_status


class Interrupts(AbstractContextManager["Interrupts"]):
    """While open, SIGINT and SIGTERM set `requested`; a second signal raises `Insisted` at once.

    Only the main thread of a process may handle signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._number: int = signal.SIGINT
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    @property
    def exit_status(self) -> int:
        """As a shell counts it: 128 and the number of the signal that came."""
        return 128 + self._number

    def check(self) -> None:
        """Raises:
        Interrupted: a stop was requested.
        """
        if self.requested.is_set():
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if self.requested.is_set():
            raise Insisted(self.exit_status)
        self.requested.set()


def _plan_name(step: int) -> str:
    """Of the rollout that is trained after `step` finished steps, or with `data.over_sample` begun then; further ones
    of that step begin with it."""
    return f"{_TRAINING}{step + 1:06d}"


def _under(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k.startswith(prefix)}


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
