"""Supervised training on conversations: what `python -m verl_mt.sft` does.

The loss is the mean negative log-likelihood of what assistants said, over the same template, masks and workers as RL: a
policy-gradient step with advantage 1 at ratio 1 has that gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from tensordict import TensorDict

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.schema import Config, DataConfig
from verl_mt.data import batch as columns
from verl_mt.data.trajectory import Trajectory
from verl_mt.diagnostics.step_metrics import total_failure, validation_metrics
from verl_mt.errors import CheckpointError, DataError, UserCodeError, VerlMTError
from verl_mt.modeling.load import export_hf
from verl_mt.plugins import import_plugins
from verl_mt.tools.registry import CONFIG_KEY
from verl_mt.trainer import build, build_rollout, checkpoint
from verl_mt.trainer.demonstration_rows import Demonstrations, load_demonstrations
from verl_mt.trainer.inference import Inference
from verl_mt.trainer.ppo_trainer import Interrupts
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.tracking import JsonLines
from verl_mt.workers.worker_group import WorkerGroup


@dataclass(frozen=True)
class Plan:
    """What the command says beside the configuration."""

    data: str
    out: Path
    val_data: str | None = None
    min_reward: float | None = None
    rollouts: bool = False
    """Measure by rollouts of the configuration's validation prompts, too."""
    stop_at_accuracy: float | None = None
    """End when these are right as often as this, in [0, 1]."""


def train(config: Config, plan: Plan) -> int:
    """Load, train, write `config.yaml`, `metrics.jsonl`, `checkpoints/` and `hf/` into `plan.out`. Returns the exit
    status of the command.

    Raises:
        VerlMTError: bad input; nothing is written then.
    """
    _refuse_taken(plan.out)
    console = Console()
    import_plugins(config.external_plugins)
    build.prepare_process(config)
    chat = build_rollout.build_fitting_chat(config)
    train, held_out = _load(config, plan, chat, console)
    total = total_steps(config, len(train.trajectories))
    with ExitStack() as undo:
        workers = undo.enter_context(closing(build.build_workers(config, total_steps=total)))
        trainer = SupervisedTrainer(workers, build.pad_token_id(chat), total, config.data, config.trainer.test_freq)
        if plan.rollouts:
            sampled = Sampled(config, workers, plan.out / "weights")
            undo.enter_context(sampled)
            trainer.measure = sampled.measure
            trainer.enough = plan.stop_at_accuracy
        # Last, so that a mistake above leaves no folder that looks like an unfinished training.
        place = replace(config.trainer, default_local_dir=str(plan.out), resume_mode="auto", resume_from_path=None)
        run = RunDirectory.open(place, yaml.safe_load(config_to_yaml(config)), way_out="name a new folder with --out")
        if run.path != plan.out:
            run.abandon()
            raise CheckpointError(f"--out: {plan.out} is in use by another process; name a new folder")
        undo.callback(run.close)
        store = checkpoint.CheckpointStore(plan.out / "checkpoints", config.trainer.max_actor_ckpt_to_keep)
        store.sweep()
        status = 0
        if run.resume_from is not None:
            trainer.load_state_dict(checkpoint.load(run.resume_from), train, run.resume_from)
            console.print(f"resuming {plan.out} after step {trainer.step}", highlight=False)
        log = JsonLines(plan.out, resume_step=trainer.step or None, split_timings=False)
        interrupts = undo.enter_context(Interrupts())
        for metrics in trainer.fit(train.trajectories, held_out.trajectories):
            log.log(int(metrics["step"]), metrics)
            console.print(_line(metrics, total), highlight=False)
            stops = interrupts.requested.is_set() and trainer.step < total
            due = trainer.step > 0 and (stops or trainer.step % max(config.trainer.save_freq, 1) == 0)
            if config.trainer.save_freq > 0 and due:
                _save(store, trainer, train)
            if stops:
                console.print("interrupted: writing the model as it is")
                status = interrupts.exit_status
                break
        folder = export_hf(workers.policy_module, build.tokenizer_as_trained(chat), plan.out / "hf")
        if not status:
            run.finish()
    console.print(f"written to {folder}", highlight=False)
    return status


def _refuse_taken(out: Path) -> None:
    """A folder that is empty, or holds a checkpoint of a training that was interrupted, is free."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    goes_on = (out / "config.yaml").is_file() and not (out / "FINISHED").exists()
    if not goes_on or checkpoint.CheckpointStore(out / "checkpoints").latest() is None:
        raise CheckpointError(f"--out: {out} is not empty; name a new folder")


def _load(config: Config, plan: Plan, chat: ChatTemplate, console: Console) -> tuple[Demonstrations, Demonstrations]:
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
    console.print(f"training on {train}", highlight=False)
    if train.num_unchecked:
        console.print(
            f"[yellow]{train.num_unchecked} of them show tools that are compared with nothing: name the run's own with "
            f"{CONFIG_KEY}, or its configuration with --config-name[/]",
            highlight=False,
        )
    held_out = Demonstrations()
    if plan.val_data:
        held_out = load(plan.val_data, key="--val-data")
        console.print(f"validating on {held_out}", highlight=False)
    return train, held_out


def _save(store: checkpoint.CheckpointStore, trainer: SupervisedTrainer, train: Demonstrations) -> None:
    if not (store.folder / f"step_{trainer.step:06d}" / "meta.json").exists():
        state = trainer.state_dict(train)
        store.save(trainer.step, state, score=trainer.accuracy, write_more=trainer.workers.save_shards)


def total_steps(config: Config, num_trajectories: int) -> int:
    """Optimizer steps: every epoch ends with a smaller batch if the rows do not divide."""
    steps = config.trainer.total_epochs * -(-num_trajectories // config.data.train_batch_size)
    limit = config.trainer.total_training_steps
    return steps if limit is None else min(steps, limit)


@dataclass
class SupervisedTrainer:
    """Epochs over conversations; one optimizer step per batch."""

    workers: WorkerGroup
    pad_token_id: int
    total_steps: int
    data: DataConfig
    test_freq: int = -1
    """Steps between two validations; 0 or less = before the first and after the last only."""
    measure: Callable[[int], dict[str, float]] | None = None
    """Step -> metrics of rollouts, `val/accuracy` among them."""
    enough: float | None = None
    """The accuracy at which training ends."""
    step: int = 0
    """Updates that were made."""
    accuracy: float | None = None
    """By rollouts of these weights; None = not measured."""

    def fit(self, train: Sequence[Trajectory], held_out: Sequence[Trajectory] = ()) -> Iterator[dict[str, float]]:
        """Yield the metrics of each step that is not yet made: `loss` (nats per trained token, before the step's
        update), `lr`, `grad_norm`, `tokens`, `time_s`, `left_s` (seconds, as the steps so far went), and every
        `test_freq` steps, before the first and after the last `val/loss` and what `measure` finds."""
        if self.step == 0 and (found := self._validate(held_out)):
            yield {"step": 0, **found}
        first = self.step
        started = time.monotonic()
        for chosen in islice(self._batches(train), first, None):
            if self.enough is not None and self.accuracy is not None and self.accuracy >= self.enough:
                return
            begun = time.monotonic()
            metrics: dict[str, float] = {"step": self.step + 1, **self._step(chosen)}
            self.step += 1
            self.accuracy = None
            metrics["time_s"] = time.monotonic() - begun
            if self.step == self.total_steps or (self.test_freq > 0 and self.step % self.test_freq == 0):
                metrics |= self._validate(held_out)
            passed = time.monotonic() - started
            metrics["left_s"] = passed / (self.step - first) * (self.total_steps - self.step)
            yield metrics

    def _validate(self, held_out: Sequence[Trajectory]) -> dict[str, float]:
        found = {"val/loss": self.loss(held_out)} if held_out else {}
        if self.measure is not None:
            found |= self.measure(self.step)
            self.accuracy = found["val/accuracy"]
        return found

    def state_dict(self, train: Demonstrations) -> dict[str, Any]:
        """Everything that a training that goes on needs."""
        return {
            "step": self.step,
            "accuracy": self.accuracy,
            "rows": train.fingerprint(),
            "workers": self.workers.state_dict(),
            "random": checkpoint.random_state(),
        }

    def load_state_dict(self, state: dict[str, Any], train: Demonstrations, folder: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it was trained on other conversations.
        """
        if state["rows"] != train.fingerprint():
            raise CheckpointError(
                f"{folder} was trained on other conversations than --data (or another --min-reward) gives now: put "
                "them back, or name a new folder with --out"
            )
        self.step, self.accuracy = state["step"], state["accuracy"]
        self.workers.load_state_dict(state["workers"], folder)
        checkpoint.set_random_state(state["random"])

    def loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Mean negative log-likelihood in nats over all tokens in the loss."""
        total, count = 0.0, 0
        size = self.data.train_batch_size
        for start in range(0, len(trajectories), size):
            batch = self._batch(trajectories[start : start + size])
            total -= self.workers.compute_log_probs(batch)[batch[columns.LOSS_MASK]].double().sum().item()
            count += int(batch[columns.LOSS_MASK].sum())
        return total / count

    def _step(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        batch = self._batch(trajectories)
        mask = batch[columns.LOSS_MASK]
        batch[columns.ADVANTAGES] = mask.float()
        updated = self.workers.update(batch)
        if updated["actor/nonfinite_updates"]:
            raise VerlMTError("loss or gradient was not finite; lower actor_rollout_ref.actor.optim.lr")
        loss = -batch[columns.OLD_LOG_PROBS][mask].double().mean().item()
        names = {"lr": "actor/lr", "grad_norm": "actor/grad_norm"}
        return {"loss": loss, **{k: updated[v] for k, v in names.items()}, "tokens": float(mask.sum())}

    def _batch(self, trajectories: Sequence[Trajectory]) -> TensorDict:
        batch = columns.build_batch(trajectories, pad_token_id=self.pad_token_id)
        assert batch is not None  # every demonstration has a token in the loss
        return batch

    def _batches(self, train: Sequence[Trajectory]) -> Any:
        generator = torch.Generator().manual_seed(self.data.seed)
        size, step = self.data.train_batch_size, 0
        while step < self.total_steps:
            shuffle = self.data.shuffle
            order = torch.randperm(len(train), generator=generator) if shuffle else torch.arange(len(train))
            for rows in order.split(size)[: self.total_steps - step]:
                step += 1
                yield [train[i] for i in rows.tolist()]


class Sampled(Inference):
    """Measures the policy that is trained by rollouts of the configuration's validation prompts.

    Args:
        config: of the training.
        workers: that train; the engine lives where a trainer's would.
        folder: for weights, where the engine reads files and the configuration names no folder.

    Raises:
        VerlMTError: what `build_trainer` would refuse; nothing is left running then.
    """

    def __init__(self, config: Config, workers: WorkerGroup, folder: Path):
        if config.data.val_files is None:
            raise DataError("--rollouts: the configuration has no data.val_files; name a file of prompts with it")
        super().__init__(config, workers=workers)
        try:
            self.rows = self.prompts()
            self.weights = build.weight_sync(config, self.stream, workers, folder)
            self.weights.release()  # training begins at once where a run goes on from its checkpoint
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def measure(self, step: int) -> dict[str, float]:
        """`val/accuracy` and what else validation reports.

        Raises:
            UserCodeError: not one trajectory survived.
        """
        validation = self.config.actor_rollout_ref.rollout.val_kwargs
        self.weights.push(step)
        sampling = build_rollout.validation_sampling(self.config)
        groups = self.roll_out(self.rows, n=validation.n, sampling=sampling, name=f"sft-{step}")
        self.weights.release()
        if failure := total_failure(groups):
            raise UserCodeError(f"--rollouts: nothing could be measured, all failed: {failure}")
        return validation_metrics(groups, "")


def _line(metrics: dict[str, float], total: int) -> str:
    parts = [f"step {int(metrics['step'])}/{total}"]
    names = ("loss", "val/loss", "val/accuracy", "lr", "grad_norm")
    parts += [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
    if "left_s" in metrics:
        parts.append(f"{metrics['left_s'] / 60:.1f} min left")
    return "  ".join(parts)
