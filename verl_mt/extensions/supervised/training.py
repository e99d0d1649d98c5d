"""Supervised training on conversations: what `python -m verl_mt.sft` does.

The loss is the mean negative log-likelihood of what assistants said, over the same template, masks and workers as RL: a
policy-gradient step with advantage 1 at ratio 1 has that gradient. Run directory, log, trackers, checkpoints and
validation are the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.markup import escape
from tensordict import TensorDict

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.schema import Config
from verl_mt.data import batch as columns
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import total_failure, validation_metrics
from verl_mt.errors import CheckpointError, ConfigError, DataError, UserCodeError, VerlMTError
from verl_mt.extensions.supervised.demonstration_rows import Demonstrations, load_demonstrations
from verl_mt.plugins import import_plugins
from verl_mt.rewards.contract import RunState
from verl_mt.tools.registry import CONFIG_KEY
from verl_mt.trainer import build, build_rollout, checkpoint
from verl_mt.trainer.display import Display
from verl_mt.trainer.inference import Inference
from verl_mt.trainer.interrupts import Interrupts
from verl_mt.trainer.ppo_trainer import validation_passes
from verl_mt.trainer.rollout_source import BatchPlan
from verl_mt.trainer.run_directory import RunDirectory, other_directory
from verl_mt.trainer.run_log import RunLog
from verl_mt.trainer.tracking import require_trackers
from verl_mt.workers.worker_group import WorkerGroup

Passes = dict[str, list[TrajectoryGroup]]


@dataclass(frozen=True)
class Plan:
    """What the command says beside the configuration."""

    data: str
    out: Path | None = None
    """The run directory; None = the configuration's (`trainer.default_local_dir`, `trainer.experiment_name`)."""
    val_data: str | None = None
    min_reward: float | None = None
    rollouts: bool = False
    """Validate by rollouts of the configuration's validation prompts, too."""
    stop_at_accuracy: float | None = None
    """End when these are right as often as this, in [0, 1]."""


def train(config: Config, plan: Plan) -> int:
    """Load, train, write a run directory: `config.yaml`, `metrics.jsonl`, `checkpoints/`, `rollouts/`, `hf/`. Where it
    holds an interrupted training of the same configuration and conversations, that one goes on.

    Returns:
        The exit status of the command: 0, or that of the signal that ended it, behind a checkpoint.

    Raises:
        VerlMTError: bad input; nothing is written then.
    """
    with ExitStack() as undo:
        trainer = _build(config, plan, undo)
        return trainer.fit()


def _build(config: Config, plan: Plan, undo: ExitStack) -> SupervisedTrainer:
    """A trainer of which `undo` closes what works beside it."""
    _check_end(config, plan)
    say = Display(total_steps=0, live=False, enabled="console" in config.trainer.logger).note
    place = _place(config, plan, say)
    import_plugins(config.external_plugins)
    require_trackers(config.trainer.logger, spans=config.actor_rollout_ref.rollout.trace.backend)
    build.prepare_process(config)
    chat = build_rollout.build_fitting_chat(config)
    shown, held_out = _load(config, plan, chat, say)
    total = total_steps(config, len(shown.trajectories))
    workers = undo.enter_context(closing(build.build_workers(config, total_steps=total)))
    sampled = Sampled(config, workers, total) if plan.rollouts else None
    if sampled is not None:
        undo.enter_context(sampled)
    # Last, so that a mistake above leaves no folder that looks like an unfinished training.
    snapshot = yaml.safe_load(config_to_yaml(config))
    run = RunDirectory.open(place, snapshot, way_out="name a new folder with --out")
    with ExitStack() as mistake:
        mistake.callback(run.abandon)
        if plan.out is not None and run.path != plan.out:
            raise CheckpointError(f"--out: {plan.out} is in use by another process. Name a new folder")
        store = checkpoint.CheckpointStore(run.path / "checkpoints", config.trainer.max_actor_ckpt_to_keep)
        state = None if run.resume_from is None else checkpoint.load(run.resume_from)
        tools = None if sampled is None else sampled.tools
        log = build.build_log(config, run, snapshot, total, tools, resumes=state, chat=chat)
        trainer = SupervisedTrainer(config, workers, build.pad_token_id(chat), total, shown, held_out.trajectories)
        trainer.log, trainer.store, trainer.enough = log, store, plan.stop_at_accuracy
        trainer.export = partial(build.export_model, workers, chat, run)
        if sampled is not None:
            sampled.open_weights(run.path / "weights")
            trainer.rollouts = sampled
        if state is not None:
            trainer.load_state_dict(state, run.resume_from)
            log.display.resume_at(trainer.step)
            log.display.note(escape(f"resuming {run.path} after step {trainer.step}"))
        mistake.pop_all()
    log.display.note(
        f"[bold]verl_mt sft[/] {config.data.train_batch_size} conversations per step, {total} steps, "
        f"{workers.num_parameters / 1e6:.2f}M parameters on {workers.where}, {torch.get_num_threads()} thread(s); "
        + escape(f"writing to {run.path}")
    )
    return trainer


def _check_end(config: Config, plan: Plan) -> None:
    """An accuracy to stop at is measured, and before the last step.

    Raises:
        ConfigError: otherwise.
    """
    accuracy, trainer = plan.stop_at_accuracy, config.trainer
    if accuracy is None:
        return
    if not 0 < accuracy <= 1:
        raise ConfigError(f"--stop-at-accuracy is {accuracy:g}, must be a share above 0 and at most 1")
    if not plan.rollouts:
        raise ConfigError(
            "--stop-at-accuracy needs prompts to sample: name their file with data.val_files=..., or the run's "
            "configuration with --config-name, and leave --no-rollouts out"
        )
    if trainer.test_freq <= 0 and trainer.total_epochs == 1:
        raise ConfigError(
            "--stop-at-accuracy: there is one epoch, and the accuracy is measured at its end. trainer.test_freq=N "
            "measures it every N steps"
        )


def _place(config: Config, plan: Plan, say: Callable[[str], None]) -> Any:
    """The trainer's section with the run directory of this training.

    Raises:
        CheckpointError: a folder that was named and holds something else than an unfinished training.
    """
    place = replace(config.trainer, resume_mode="auto", resume_from_path=None)
    if plan.out is None:
        if (words := other_directory(place)) is not None:
            say(escape(words))
        return place
    out = plan.out
    unfinished = (out / "config.yaml").is_file() and not (out / "FINISHED").exists()
    if out.exists() and not unfinished and not (out.is_dir() and {p.name for p in out.iterdir()} <= {".lock"}):
        raise CheckpointError(f"--out: {out} is not empty. Name a new folder")
    return replace(place, default_local_dir=str(out))


def _load(
    config: Config, plan: Plan, chat: ChatTemplate, say: Callable[[str], None]
) -> tuple[Demonstrations, Demonstrations]:
    """What is trained on, and what is held out; said on the terminal."""
    load = partial(
        load_demonstrations,
        chat=chat,
        data=config.data,
        min_reward=plan.min_reward,
        max_tokens=config.actor_rollout_ref.rollout.max_model_len,
        tools=build_rollout.build_tools(config),
    )
    train = load(plan.data, key="--data")
    say(f"training on {train}")
    if train.num_unchecked:
        say(
            f"[yellow]{train.num_unchecked} of them show tools that are compared with nothing: name the run's own with "
            f"{CONFIG_KEY}, or its configuration with --config-name[/]"
        )
    held_out = Demonstrations()
    if plan.val_data:
        held_out = load(plan.val_data, key="--val-data")
        say(f"loss also on {held_out}, which are not trained")
    return train, held_out


def total_steps(config: Config, num_trajectories: int) -> int:
    """Optimizer steps: every epoch ends with a smaller batch if the rows do not divide."""
    steps = config.trainer.total_epochs * -(-num_trajectories // config.data.train_batch_size)
    limit = config.trainer.total_training_steps
    return steps if limit is None else min(steps, limit)


@dataclass
class SupervisedTrainer:
    """Epochs over conversations; one optimizer step per batch."""

    config: Config
    workers: WorkerGroup
    pad_token_id: int
    total_steps: int
    shown: Demonstrations
    held_out: Sequence[Trajectory] = ()
    """Their loss is measured with each validation."""
    log: RunLog | None = None
    """None = nothing is written or shown; `steps` alone can be used then."""
    store: checkpoint.CheckpointStore | None = None
    rollouts: Sampled | None = None
    """Measures the accuracy; None = only losses are."""
    export: Callable[[], object] = lambda: None
    enough: float | None = None
    """The accuracy at which training ends."""
    step: int = 0
    """Updates that were made."""
    accuracy: float | None = None
    """By rollouts of these weights; None = not measured."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    _unlogged: dict[str, float] | None = None
    """A step whose validation was broken off."""
    _random: dict[str, Any] | None = None
    """The generators before a validation that is going on."""

    def fit(self) -> int:
        """Train from `step` to the last step. Ctrl-C ends with a checkpoint of the last finished step. Returns the exit
        status: 0, or 128 and the signal's number."""
        assert self.log is not None
        with self.log, self.interrupts, self.interrupts.ending(self.log, self._save):
            for metrics in self.steps():
                self.log.step(self.step, metrics)
                freq = self.config.trainer.save_freq
                if freq > 0 and (self.step % freq == 0 or self.step == self.total_steps):
                    self._save()
            self.export()
            self.log.finish(self.step, self._closing_rows())
        return self.interrupts.exit_status

    def steps(self) -> Iterator[dict[str, float]]:
        """Make the steps that are not yet made, and yield the metrics of each: `loss` (nats per trained token, before
        the step's update), `lr`, `grad_norm`, `tokens`, `time_s`, `left_s` (seconds, as the steps so far went), and
        where a validation is due its `val/loss` and `val/accuracy`.

        Raises:
            Interrupted: a stop was requested; a step that was made and not yielded is concluded by whoever goes on.
        """
        if self.step == 0 and self.config.trainer.val_before_train and (found := self._validate()) and self.log:
            self.log.metrics(0, found)
        first, started = self.step, time.monotonic()
        batches = islice(self._batches(), self.step, None)
        while True:
            if self._unlogged is not None:
                metrics = self._unlogged | (self._validate() if self._due() else {})
                each = (time.monotonic() - started) / max(1, self.step - first)
                self._unlogged = None
                yield metrics | {"left_s": each * (self.total_steps - self.step)}
            if self.step >= self.total_steps or self._good_enough():
                return
            self.interrupts.check()
            if self.log is not None:
                self.log.display.phase("training")
            self._unlogged = self._step(next(batches))
            self.step += 1
            self.accuracy = None

    def _due(self) -> bool:
        """Every `trainer.test_freq` steps, or where that is not set after every epoch; and after the last step."""
        freq = self.config.trainer.test_freq
        every = freq if freq > 0 else -(-len(self.shown.trajectories) // self.config.data.train_batch_size)
        return self.step == self.total_steps or self.step % every == 0

    def _good_enough(self) -> bool:
        return self.enough is not None and self.accuracy is not None and self.accuracy >= self.enough

    def _validate(self) -> dict[str, float]:
        """Losses and accuracy of the weights as they are; shown and written."""
        begun = time.monotonic()
        found = {"val/loss": self.loss(self.held_out)} if self.held_out else {}
        passes: Passes = {}
        if self.rollouts is not None:
            self._random = checkpoint.random_state()
            measured, passes = self.rollouts.measure(self.step, self._while_waiting)
            found |= measured
            self.accuracy = found["val/accuracy"]
            self._random = None
        if found and self.log is not None:
            if passes:
                self.log.validation(self.step, found, passes)
            else:
                self.log.display.validation(self.step, found)
            found["time/validate_s"] = time.monotonic() - begun
        return found

    def _while_waiting(self) -> None:
        self.interrupts.check()
        self.workers.check("waiting for the rollout")
        if self.log is not None and self.rollouts is not None:
            self.log.display.rollout(self.rollouts.runner.progress)

    def _closing_rows(self) -> list[tuple[str, str]]:
        assert self.log is not None
        rows = []
        if self._good_enough():
            rows.append(("ended", f"at accuracy {self.accuracy:.3f}, as --stop-at-accuracy {self.enough:g} asks"))
        rows.append(("go on with", escape(f"actor_rollout_ref.model.path={self.log.run.path / 'hf'}")))
        return rows

    def _save(self) -> int:
        assert self.store is not None and self.log is not None
        begun = time.monotonic()
        self.store.save(self.step, self.state_dict(), score=self.accuracy, write_more=self.workers.save_shards)
        self.log.saved(time.monotonic() - begun)
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Everything that a training that goes on needs."""
        return {
            "step": self.step,
            "accuracy": self.accuracy,
            "unlogged": self._unlogged,
            "rows": self.shown.fingerprint(),
            "workers": self.workers.state_dict(),
            "random": self._random or checkpoint.random_state(),
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path | None) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it was trained on other conversations.
        """
        if state["rows"] != self.shown.fingerprint():
            raise CheckpointError(
                f"{folder} was trained on other conversations than --data (or another --min-reward) gives now: put "
                "them back, or name a new folder with --out"
            )
        self.step, self.accuracy, self._unlogged = state["step"], state["accuracy"], state.get("unlogged")
        self.workers.load_state_dict(state["workers"], folder)
        checkpoint.set_random_state(state["random"])

    def loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Mean negative log-likelihood in nats over all tokens in the loss."""
        total, count = 0.0, 0
        size = self.config.data.train_batch_size
        for start in range(0, len(trajectories), size):
            batch = self._batch(trajectories[start : start + size])
            total -= self.workers.compute_log_probs(batch)[batch[columns.LOSS_MASK]].double().sum().item()
            count += int(batch[columns.LOSS_MASK].sum())
        return total / count

    def _step(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        begun = time.monotonic()
        batch = self._batch(trajectories)
        mask = batch[columns.LOSS_MASK]
        batch[columns.ADVANTAGES] = mask.float()
        updated = self.workers.update(batch)
        if updated["actor/nonfinite_updates"]:
            raise VerlMTError("loss or gradient was not finite. Lower actor_rollout_ref.actor.optim.lr")
        loss = -batch[columns.OLD_LOG_PROBS][mask].double().mean().item()
        names = {"lr": "actor/lr", "grad_norm": "actor/grad_norm"}
        found = {"loss": loss, **{k: updated[v] for k, v in names.items()}, "tokens": float(mask.sum())}
        return found | {"time_s": time.monotonic() - begun}

    def _batch(self, trajectories: Sequence[Trajectory]) -> TensorDict:
        batch = columns.build_batch(trajectories, pad_token_id=self.pad_token_id)
        assert batch is not None  # every demonstration has a token in the loss
        return batch

    def _batches(self) -> Iterator[list[Trajectory]]:
        train, data = self.shown.trajectories, self.config.data
        generator = torch.Generator().manual_seed(data.seed)
        step = 0
        while step < self.total_steps:
            order = torch.randperm(len(train), generator=generator) if data.shuffle else torch.arange(len(train))
            for rows in order.split(data.train_batch_size)[: self.total_steps - step]:
                step += 1
                yield [train[i] for i in rows.tolist()]


class Sampled(Inference):
    """Measures the policy that is trained by rollouts of the configuration's validation prompts, as the trainer does.

    Args:
        config: of the training.
        workers: that train; the engine lives where a trainer's would.
        total_steps: of the training, for rewards that ask.

    Raises:
        VerlMTError: what `build_trainer` would refuse; nothing is left running then.
    """

    def __init__(self, config: Config, workers: WorkerGroup, total_steps: int):
        if config.data.val_files is None:
            raise DataError("--rollouts: the configuration has no data.val_files. Name a file of prompts with it")
        super().__init__(config, workers=workers)
        self.workers = workers
        validation, sampling = config.actor_rollout_ref.rollout.val_kwargs, build_rollout.validation_sampling(config)
        self.plan = BatchPlan(
            num_prompts=config.data.train_batch_size,
            n=1,
            sampling=sampling,
            val_n=validation.n,
            val_sampling=sampling,
            val_greedy_too=validation.greedy_too,
            val_batch_size=config.data.val_batch_size,
            total_steps=total_steps,
            run=RunState(total_steps=total_steps, total_epochs=config.trainer.total_epochs),
        )
        try:
            self.rows = self.prompts()
            if not self.rows:
                limit = config.data.max_prompt_length
                raise DataError(f"data.val_files: each prompt is longer than data.max_prompt_length={limit} tokens")
            self.check(self.rows)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def open_weights(self, folder: Path) -> None:
        """Let the engine get weights; files go to `folder` where the configuration names none."""
        self.weights = build.weight_sync(self.config, self.stream, self.workers, folder)
        self.weights.release()  # training begins at once where a run goes on from its checkpoint

    def measure(self, step: int, while_waiting: Callable[[], None]) -> tuple[dict[str, float], Passes]:
        """`val/accuracy` and what else validation reports, and the groups of each pass.

        Raises:
            UserCodeError: not one trajectory survived.
        """
        self.weights.push(step)
        try:
            passes = validation_passes(self.stream, self.rows, self.plan, step, while_waiting)
        finally:
            self.weights.release()
        if failure := total_failure(passes["val"]):
            raise UserCodeError(f"validation: nothing could be measured, all failed: {failure}")
        metrics = validation_metrics(passes["val"], "")
        if "val_greedy" in passes:
            metrics |= validation_metrics(passes["val_greedy"], "_greedy")
        return metrics, passes
