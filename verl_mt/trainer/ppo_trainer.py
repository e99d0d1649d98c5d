"""The loop: roll out, score, estimate advantages, update, validate, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from verl_mt.chat.sanity import SanityMonitor
from verl_mt.config.schema import TrainerConfig
from verl_mt.data.batch import build_batch
from verl_mt.data.sampler import RowSampler
from verl_mt.data.trajectory import StopReason, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import rollout_metrics, total_failure, validation_metrics
from verl_mt.engines.base import InferenceEngine
from verl_mt.errors import EngineGoneError, UserCodeError
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer import checkpoint
from verl_mt.trainer.advantage_step import AdvantageStep
from verl_mt.trainer.checkpoint import CheckpointStore
from verl_mt.trainer.dynamic_sampling import Selection, why_left_out
from verl_mt.trainer.interrupts import Interrupts
from verl_mt.trainer.rollout_source import BatchPlan, RolloutSource
from verl_mt.trainer.run_log import RunLog
from verl_mt.trainer.step_hook import RollBack, Save, StepHooks, StepLine, Stop, TrainStep
from verl_mt.workers.weight_sync import WeightSync
from verl_mt.workers.worker_group import WorkerGroup


@dataclass
class PPOTrainer:
    """Trains a policy. `build.build_trainer(config)` puts it together.

    `step_number` counts finished steps. A checkpoint holds everything at a step's end: weights, optimizer, schedule,
    generators and the position in the data.
    """

    config: TrainerConfig
    source: RolloutSource
    val_prompts: list[Prompt]
    prompt_counts: dict[str, float]
    """`data/...` of every step, `val/...` of every validation: prompts left out or cut, in the rows as loaded."""
    engine: InferenceEngine
    workers: WorkerGroup
    weights: WeightSync
    estimate_advantages: AdvantageStep
    checkpoints: CheckpointStore
    sanity: SanityMonitor
    log: RunLog
    pad_token_id: int
    hooks: StepHooks = StepHooks()
    selection: Selection = field(default_factory=Selection)
    model: dict[str, str] = field(default_factory=dict)
    """`path` and `architecture`, for checkpoints: one of another model is refused."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the rows, for the same purpose."""
    step_number: int = 0
    version: int = 0
    """Of the policy's weights: one more with each step, and with each rollback."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    export: Callable[[], object] = lambda: None
    _score: float | None = None
    """`val/accuracy` of the weights as they are. None if this step was not validated."""
    _unlogged: dict[str, float] | None = None
    _at_boundary: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source.while_waiting, self.source.on_bad_row = self._while_waiting, self._before_it_ends

    @property
    def plan(self) -> BatchPlan:
        """How large a step is."""
        return self.source.plan

    @property
    def sampler(self) -> RowSampler:
        """In which order rows are drawn."""
        return self.source.draws.sampler

    @property
    def stream(self) -> RolloutStream:
        """Runs conversations beside the trainer."""
        return self.source.stream

    @property
    def exit_status(self) -> int:
        """Of a command that ends with this run: not 0 where it was asked to stop."""
        return self.interrupts.exit_status

    def fit(self) -> None:
        """Train from `step_number` to the last step. Ctrl-C ends with a checkpoint of the last finished step."""
        with self.log, self.interrupts, closing(self), self.interrupts.ending(self.log, self._save_boundary):
            try:
                # A run that goes on from a checkpoint was validated by its own schedule.
                first = self.config.val_before_train and self.step_number == 0
                if self.val_prompts and (first or self.config.val_only):
                    self.log.metrics(self.step_number, self.validate())
                if not self.config.val_only:
                    self._train()
                    self.export()
                self.source.end()
                self.log.finish(self.step_number, spent=self.hooks.summary())
            except Exception as error:
                self.source.end(error)
                raise

    def step(self) -> dict[str, float]:
        """One step: rollout -> batch -> advantages -> update -> weights to the engine."""
        timing: dict[str, float] = {}
        with self._timed(timing, "step"):
            with self._timed(timing, "rollout"):
                groups = self.rollout()
                self.weights.release()
            trained = [t for g in groups if not g.filtered for t in g.trajectories]
            batch = build_batch(trained, pad_token_id=self.pad_token_id)
            metrics = self.measure(self.step_number, groups) | self.selection.metrics()
            step = TrainStep(self.step_number, self.version, groups, batch, metrics, timing)
            if batch is None:
                metrics["actor/skipped_empty_batches"] = 1
            else:
                self.hooks.before_update(step)
                with self._timed(timing, "ref"):
                    self.workers.add_ref_log_probs(batch)
                with self._timed(timing, "advantages"):
                    metrics |= self.estimate_advantages(batch)
                    metrics |= self.selection.mask_overlong(batch, groups)
                with self._timed(timing, "update"):
                    metrics |= self.workers.update(batch)
                self.source.mark_trained(trained, batch, self.version)
            # Without a batch too: every step has a version of the weights, and the engine gets its memory back.
            with self._timed(timing, "weights"):
                self.weights.push(self.version + 1)
            self.end_rollout(groups, batch, why_left_out(groups, batch))
        metrics["weights/trainer_bytes"] = self.weights.trainer_bytes
        sampled = sum(t.num_sampled_tokens for g in groups for t in g.trajectories)
        metrics["rollout/tokens_per_s"] = sampled / timing["time/rollout_s"]
        self.hooks.after_update(step)
        return metrics | timing

    def rollout(self) -> list[TrajectoryGroup]:
        """The groups that this step trains, and those that dynamic sampling left out.

        Raises:
            EngineGoneError, UserCodeError: no trajectory survived. A checkpoint of the last finished step is written.
        """
        # A step that is broken off has drawn rows already: its checkpoint needs the position before that.
        self._at_boundary = self._position()
        self.source.begin(self.step_number)
        groups = self.source.collect(self.step_number)
        self.selection.shape(groups)
        groups = self.selection.fill(groups, self._rollout_more, self.plan.num_prompts)
        # Before anything that can fail: what was sampled is what one wants to look at then.
        self.log.rolled_out(self.step_number + 1, groups)
        self.hooks.after_rollout(self.step_number, groups)
        self._refuse_total_failure(groups)
        return groups

    def measure(self, step: int, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """Numbers of a step's groups, with what the engine, the sanity check and the prompts counted since the last
        call. `step` is the number of finished steps."""
        engine = {"rollout/replicas": 1, **self.engine.metrics()}
        found = rollout_metrics(groups, self.log.tool_names, int(engine["rollout/replicas"]))
        checked = self.sanity.metrics(of=self.source.plans(step))
        lost, drawn = self.stream.metrics(), self.source.counts(step)
        prompts = {k: v + drawn.get(k, 0) for k, v in _under("data/", self.prompt_counts).items()}
        return found | self.source.metrics(groups) | checked | engine | lost | prompts

    def end_rollout(
        self, groups: list[TrajectoryGroup], batch: TensorDict | None, left_out: Mapping[str, str | None]
    ) -> None:
        """The step's groups are done with: tell the sampler, write their rows, close their prompts.

        Args:
            groups: of `rollout`.
            batch: after the update, which fills in what rows say of each token: old log-probs, advantages, clipping.
            left_out: prompt id -> why it was not trained. None where it was.
        """
        self.sampler.update(groups)
        self.log.rollouts(self.step_number + 1, groups, batch)
        self.source.ended(self.step_number + 1, left_out)

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
        self.hooks.after_validation(self.step_number, passes)
        self.log.validation(self.step_number, metrics, passes)
        if self.config.val_only and (failure := total_failure(passes["val"])):
            raise UserCodeError(f"validation: {failure}")
        return metrics | timing

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on as if nothing had happened."""
        return {
            "step": self.step_number,
            "version": self.version,
            "score": self._score,
            "unlogged": self._unlogged,
            "model": self.model,
            "rows": self.rows,
            "workers": self.workers.state_dict(),
            "advantages": self.estimate_advantages.state_dict(),
            **self.hooks.state_dict(),
            **self._position(),
        }

    def _position(self) -> dict[str, Any]:
        """What a step that is broken off must leave as it was before."""
        return {**self.source.state_dict(), "random": checkpoint.random_state()}

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Continue from a checkpoint. `folder` is its place, where workers find the shards that they wrote."""
        self.step_number, self._score, self._unlogged = state["step"], state["score"], state["unlogged"]
        self.version = checkpoint.version_of(state)
        self._load_policy(state, folder)
        self.hooks.load_state_dict(state)
        if not self.config.val_only:
            self.source.load_state_dict(state, other_rows=self._has_other_rows(state))
        checkpoint.set_random_state(state["random"])
        self.weights.push(self.version)

    def notes(self) -> list[str]:
        """What a person should know before the first step, as Rich markup."""
        return self.source.notes()

    def _load_policy(self, state: dict[str, Any], folder: Path | None) -> None:
        """Weights, optimizer and controllers of a checkpoint; the engine gets them with the next `push`."""
        self.weights.free_engine_memory()
        self.workers.load_state_dict(state["workers"], folder)
        self.estimate_advantages.load_state_dict(state.get("advantages", {}))

    def _has_other_rows(self, state: dict[str, Any]) -> bool:
        """Whether the position of a checkpoint counts in rows that are gone."""
        saved, key = state.get("rows") or {}, "data.train_files"
        return self.config.resume_mode == "other_data" and saved.get(key) != self.rows.get(key)

    def close(self) -> None:
        """End the rollout thread, the engine and the workers. Idempotent."""
        try:
            self.stream.close(self.engine.close)
        finally:
            self.workers.close()
            self.source.log.close()

    def _train(self) -> None:
        if self.checkpoints.from_start and not self.checkpoints.all():
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
            self.step_number, self.version = self.step_number + 1, self.version + 1
            self._score = None
            self._at_boundary = self._position()  # a row that ends the run takes no prompts beside it along
            self.source.begin_ahead(self.step_number)
            self._at_boundary = {}

    def _conclude_step(self, metrics: dict[str, float]) -> None:
        """Validate, log, save. If Ctrl-C breaks it off, the resumed run does it (`_unlogged` is saved)."""
        last = self.plan.total_steps
        if _due(self.config.test_freq, self.step_number, last):
            metrics = metrics | self.validate()
        # The line first, so that a run that is stopped or rolled back has said why.
        line = StepLine(self.step_number, dict(metrics))
        verdict = self.hooks.after_step(line)
        self.log.step(self.step_number, line.metrics, line.words)
        self._unlogged = None
        if isinstance(verdict, Save):
            self.log.flush()
            verdict.before()
            if isinstance(verdict, RollBack):
                self._roll_back(verdict.folder)
            self._save()
            if isinstance(verdict, Stop):
                raise verdict.after()
            verdict.after()
        elif _due(self.config.save_freq, self.step_number, last):
            self._save()

    def _roll_back(self, folder: Path) -> None:
        """The policy of an older checkpoint, its optimizer and controllers; steps, rows, random numbers and versions of
        weights go on.

        Going back with the generators and the rows as well would draw the same prompts with the same seeds, and most
        likely collapse again in the same step.
        """
        state = checkpoint.load(folder)
        self.source.give_up()
        self._load_policy(state, folder)
        self.version += 1
        self.weights.push(self.version)
        self._score = None

    def _rollout_more(self, num_prompts: int, number: int) -> list[TrajectoryGroup]:
        """Rollout `number` of this step, of the prompts that come next."""
        groups = self.source.more(self.step_number, num_prompts, number)
        self.selection.shape(groups)
        return groups

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
            f"step {step}: {failure}{where}. Repair what raised. The same command then goes on after step "
            f"{self.step_number}, from the checkpoint in {self.log.run.path}"
        )

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

    def _before_it_ends(self) -> None:
        """A row that ends the run takes nothing with it that was trained since a checkpoint."""
        if self.step_number:
            self._save_boundary()

    def _save_boundary(self) -> int:
        """The last finished step."""
        if not self.config.val_only:
            self._save(self._at_boundary)
        return self.step_number

    def _save(self, overrides: dict[str, Any] | None = None) -> None:
        begun = time.monotonic()
        self.log.display.phase("checkpoint")
        self.log.flush()
        # With overrides the run ends here.
        with self.weights.set_aside(self.version if overrides is None else None):
            state = self.state_dict() | (overrides or {})
            self.checkpoints.save(self.step_number, state, score=self._score, write_more=self.workers.save_shards)
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


def _under(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k.startswith(prefix)}


def _due(every: int, step: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
