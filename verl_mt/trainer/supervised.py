"""Supervised training on conversations: what `python -m verl_mt.sft` does.

The loss is the mean negative log-likelihood of what assistants said, over the same template, masks and workers as RL: a
policy-gradient step with advantage 1 at ratio 1 has that gradient.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tensordict import TensorDict

from verl_mt.chat.demonstrations import demonstration
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.schema import Config, DataConfig
from verl_mt.data import batch as columns
from verl_mt.data.dataset import read_rows
from verl_mt.data.run_files import append_metrics, row_to_trajectory
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.errors import CheckpointError, DataError, VerlMTError
from verl_mt.modeling.load import export_hf
from verl_mt.plugins import import_plugins
from verl_mt.tools.registry import CONFIG_KEY, ToolSet
from verl_mt.trainer import build, build_rollout
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

    def __str__(self) -> str:
        tokens = sum(t.num_sampled_tokens for t in self.trajectories)
        text = f"{len(self.trajectories)} conversations, {tokens} assistant tokens"
        left_out = [f"{self.num_low} below the reward"] * bool(self.num_low)
        left_out += [f"{self.num_long} too long"] * bool(self.num_long)
        return text + (f" (left out: {', '.join(left_out)})" if left_out else "")


def train(config: Config, data: str, *, val_data: str | None, out: Path, min_reward: float | None) -> int:
    """Load, train, write `config.yaml`, `metrics.jsonl` and `hf/` into `out`. Returns the exit status of the command.

    Raises:
        VerlMTError: bad input; nothing is written then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"--out: {out} is not empty; name a new folder")
    console = Console()
    import_plugins(config.external_plugins)
    build.prepare_process(config)
    chat = build_rollout.build_fitting_chat(config)
    load = partial(
        load_demonstrations,
        chat=chat,
        min_reward=min_reward,
        max_tokens=config.actor_rollout_ref.rollout.max_model_len,
        tools=build_rollout.build_tools(config),
    )
    train = load(data, key="--data")
    console.print(f"training on {train}", highlight=False)
    if train.num_unchecked:
        console.print(
            f"[yellow]{train.num_unchecked} of them show tools that are compared with nothing: name the run's own with "
            f"{CONFIG_KEY}, or its configuration with --config-name[/]",
            highlight=False,
        )
    held_out = Demonstrations()
    if val_data:
        held_out = load(val_data, key="--val-data")
        console.print(f"validating on {held_out}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(config_to_yaml(config))
    total = total_steps(config, len(train.trajectories))
    with closing(build.build_workers(config, total_steps=total)) as workers:
        trainer = SupervisedTrainer(workers, build.pad_token_id(chat), total, config.data, config.trainer.test_freq)
        try:
            for metrics in trainer.fit(train.trajectories, held_out.trajectories):
                append_metrics(out / "metrics.jsonl", metrics)
                console.print(_line(metrics, total), highlight=False)
            status = 0
        except KeyboardInterrupt:
            console.print("interrupted: writing the model as it is")
            status = 130
        folder = export_hf(workers.policy_module, build.tokenizer_as_trained(chat), out / "hf")
    console.print(f"written to {folder}", highlight=False)
    return status


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
    folder = Path(source).expanduser() / "rollouts"
    files = sorted(folder.glob("step_*.jsonl")) if folder.is_dir() else [Path(source)]
    if not files:
        raise DataError(f"{key}: {folder} holds no step_*.jsonl; the run has written no rollouts yet")
    found = Demonstrations()
    for file in files:
        for index, row in enumerate(read_rows(file, key)):
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
    """Steps between two losses of the held-out conversations; 0 or less = before the first and after the last only."""

    def fit(self, train: Sequence[Trajectory], held_out: Sequence[Trajectory] = ()) -> Any:
        """Yield the metrics of each step: `loss` (nats per trained token, before the step's update), `lr`, `grad_norm`,
        `tokens`, `time_s`, and `val/loss` every `test_freq` steps, before the first and after the last."""
        if held_out:
            yield {"step": 0, "val/loss": self.loss(held_out)}
        for step, chosen in enumerate(self._batches(train), 1):
            begun = time.monotonic()
            metrics: dict[str, float] = {"step": step, **self._step(chosen), "time_s": time.monotonic() - begun}
            if held_out and (step == self.total_steps or (self.test_freq > 0 and step % self.test_freq == 0)):
                metrics["val/loss"] = self.loss(held_out)
            yield metrics

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


def _line(metrics: dict[str, float], total: int) -> str:
    parts = [f"step {int(metrics['step'])}/{total}"]
    parts += [f"{name} {metrics[name]:.4g}" for name in ("loss", "val/loss", "lr", "grad_norm") if name in metrics]
    return "  ".join(parts)
