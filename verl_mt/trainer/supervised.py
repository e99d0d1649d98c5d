"""Supervised training on conversations: what `python -m verl_mt.sft` does.

The loss is the mean negative log-likelihood of what assistants said, over the same template, masks and workers as RL: a
policy-gradient step with advantage 1 at ratio 1 has that gradient.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from tensordict import TensorDict

from verl_mt.chat.demonstrations import demonstration
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.schema import Config, DataConfig
from verl_mt.data import batch as columns
from verl_mt.data import columnar_rows, row_files
from verl_mt.data.dataset import read_rows
from verl_mt.data.run_files import row_to_trajectory
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.diagnostics.step_metrics import total_failure, validation_metrics
from verl_mt.errors import CheckpointError, DataError, UserCodeError, VerlMTError
from verl_mt.modeling.load import export_hf
from verl_mt.plugins import import_plugins
from verl_mt.tools.registry import CONFIG_KEY, ToolSet
from verl_mt.trainer import build, build_rollout, checkpoint
from verl_mt.trainer.inference import Inference
from verl_mt.trainer.ppo_trainer import Interrupts
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.tracking import JsonLines
from verl_mt.workers.worker_group import WorkerGroup

_NUM_DIFFERENCES = 4
"""Named in the error about tools of another shape."""


@dataclass
class Demonstrations:
    """What is trained on, and what was left out."""

    trajectories: list[Trajectory] = field(default_factory=list)
    num_low: int = 0
    """Rollouts below the wanted reward, or that ended in an error."""
    num_long: int = 0
    """Conversations longer than `rollout.max_model_len`."""
    num_unchecked: int = 0
    """Conversations that show tools of their own while no tools file says what the run will show."""

    def fingerprint(self) -> str:
        """Of all ids, in their order."""
        digest = hashlib.sha256()
        for record in (record for trajectory in self.trajectories for record in trajectory.records):
            digest.update(repr((record.token_ids, record.loss_mask)).encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        tokens = sum(t.num_sampled_tokens for t in self.trajectories)
        text = f"{len(self.trajectories)} conversations, {tokens} assistant tokens"
        left_out = [f"{self.num_low} below the reward"] * bool(self.num_low)
        left_out += [f"{self.num_long} too long"] * bool(self.num_long)
        return text + (f" (left out: {', '.join(left_out)})" if left_out else "")


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


def load_demonstrations(
    source: str | Path,
    chat: ChatTemplate,
    key: str,
    *,
    min_reward: float | None = None,
    max_tokens: int | None = None,
    tools: ToolSet | None = None,
) -> Demonstrations:
    """Rows of a file, or the training rollouts of a run directory, as scored trajectories.

    Args:
        source: a parquet, JSON or JSONL file of conversations or rollouts, or a run directory.
        chat: the template of the model that is trained.
        key: what the user calls the source, for errors.
        min_reward: rollouts below are left out; refused for conversations, which have none.
        max_tokens: longer ones are left out; None = none is.
        tools: those that the run to come shows. Conversations without `tools` are shown these; None = the rows' own.

    Raises:
        DataError: a row of neither kind, one that the template cannot render, tools that are not those of the run,
            rollouts of another tokenizer, or nothing left to train on; names file and row.
    """
    found = Demonstrations()
    for file in _files_of(Path(source).expanduser(), key):
        for index, row in enumerate(_rows_of(file, key)):
            where = f"{file}, row {index}"
            try:
                shown = _tools_shown(row, tools)
                trajectory = _trajectory(row, chat, where, min_reward, shown)
            except VerlMTError as error:
                raise DataError(f"{where}: {error}") from error
            if trajectory is None:
                found.num_low += 1
            elif max_tokens is not None and any(len(r.token_ids) > max_tokens for r in trajectory.records):
                found.num_long += 1
            else:
                found.trajectories.append(trajectory)
                found.num_unchecked += bool(shown) and tools is None and "records" not in row
    if not found.trajectories:
        raise DataError(f"{key}: {source} leaves nothing to train on: {found}")
    return found


def _files_of(source: Path, key: str) -> list[Path]:
    if not (source / row_files.FOLDER).is_dir():
        return [source]
    files = [file.path for file in row_files.row_files(source) if file.split == "train"]
    if not files:
        raise DataError(f"{key}: {source / row_files.FOLDER} holds no step_*; the run has written no rollouts yet")
    return files


def _rows_of(file: Path, key: str) -> Iterable[dict[str, Any]]:
    if file.suffix == f".{row_files.PARQUET}" and columnar_rows.is_rows_file(file):
        return columnar_rows.read_parquet(file)
    return read_rows(file, key)


def _tools_shown(row: dict[str, Any], tools: ToolSet | None) -> list[dict[str, Any]] | None:
    """The schemas that the row's prompt shows: as a rollout of the run to come will show them.

    Raises:
        DataError: the row's own differ from them; says in what.
    """
    given = row.get("tools")
    if tools is None:
        return given
    if "records" in row:  # its ids stand; a rollout may have been shown a selection
        names = [schema["function"]["name"] for schema in given or []]
        wanted = tools.schemas([name for name in names if name in tools.names])
    else:
        extra = row.get("extra_info") or {}
        wanted = tools.for_row(tool_selection=extra.get("tool_selection")).schemas()
    if given is None:
        return wanted
    found = list(islice(_differences(_by_name(given), _by_name(wanted)), _NUM_DIFFERENCES))
    if found:
        raise DataError(
            f"its tools are not those that the run will show ({CONFIG_KEY}), so the model would learn prompts that no "
            f"rollout has: {'; '.join(found)}. Leave `tools` out of the rows: the run's own are shown then"
        )
    return wanted


def _by_name(schemas: Any) -> dict[str, Any]:
    """Tools by their names: their order, and that of keys, is the run's in any case."""
    try:
        return {schema["function"]["name"]: schema for schema in schemas}
    except (TypeError, KeyError) as error:
        raise DataError(f"`tools` must be a list of OpenAI tool schemas, got {schemas!r:.120}") from error


def _differences(given: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """What a row's tools say otherwise than the run's, place by place."""
    if not (isinstance(given, dict) and isinstance(wanted, dict)):
        if given != wanted:
            yield f"{where} is {given!r:.80} in the row and {wanted!r:.80} in the run"
        return
    for key in dict.fromkeys([*given, *wanted]):
        place = f"{where}.{key}" if where else str(key)
        if key not in wanted:
            yield f"{place} is {given[key]!r:.80} in the row and absent in the run"
        elif key not in given:
            yield f"{place} is absent in the row and {wanted[key]!r:.80} in the run"
        else:
            yield from _differences(given[key], wanted[key], place)


def _trajectory(
    row: dict[str, Any], chat: ChatTemplate, where: str, min_reward: float | None, tools: list[dict[str, Any]] | None
) -> Trajectory | None:
    if "records" in row:
        trajectory = row_to_trajectory(row)
        if not trajectory.trainable or trajectory.reward is None:
            return None
        if min_reward is not None and trajectory.reward < min_reward:
            return None
        _check_same_tokenizer(trajectory, chat)
    else:
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise DataError(f"neither a rollout nor a conversation: no list `messages`; it has {', '.join(row)}")
        if min_reward is not None:
            raise DataError("--min-reward needs rollouts; this is a conversation, which has no reward")
        record = demonstration(chat, messages, tools)
        if not any(record.loss_mask):
            raise DataError("every assistant message has weight 0: nothing is left to learn from")
        trajectory = Trajectory(where, where, where, where, messages=messages, records=[record])
        trajectory.stop_reason = StopReason.FINISHED
    trajectory.trajectory_id = trajectory.prompt_id = trajectory.group_id = where
    trajectory.reward = 1.0
    return trajectory


def _check_same_tokenizer(trajectory: Trajectory, chat: ChatTemplate) -> None:
    """Ids mean nothing to another tokenizer: what they spell must be what was written down as text."""
    span = next((s for s in trajectory.records[0].turns if s.kind == "assistant"), None)
    if span is None or not trajectory.turn_texts:
        return
    ids = trajectory.records[0].token_ids[span.start : span.end]
    size = len(chat.tokenizer)
    text = chat.turn_text(ids) if max(ids) < size else f"id {max(ids)} of a vocabulary of {size}"
    if text != trajectory.turn_texts[0]:
        raise DataError(
            f"this rollout was sampled with another tokenizer: its first turn is {trajectory.turn_texts[0][:60]!r}, "
            f"and its ids spell {text[:60]!r} here; train the model that the run trained, or one of its family"
        )


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
