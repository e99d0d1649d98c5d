"""Rows, prompts, rewards, and how many steps they make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_mt.data.dataset import load_rows
from verl_mt.errors import DataError
from verl_mt.rewards.base import load_reward
from verl_mt.trainer import build_data
from verl_mt.trainer.doctor.findings import Note, error, ok, warning
from verl_mt.trainer.doctor.subject import Subject


def reward(subject: Subject) -> Iterator[Note]:
    """The reward loads."""
    wanted = subject.config.reward
    subject.reward = load_reward(wanted.path, name=wanted.name, kwargs=wanted.kwargs, timeout_s=wanted.timeout_s)
    yield ok(wanted.path or "by the rows' data_source")


def rows(subject: Subject) -> Iterator[Note]:
    """The files are there and every row has the columns that it needs."""
    data = subject.config.data
    columns: dict[str, Any] = {"prompt_key": data.prompt_key, "label_key": data.label_key}
    subject.train = load_rows(
        data.train_files, split="train", num_rows=data.train_max_samples, seed=data.seed, **columns
    )
    yield ok(f"{subject.num_rows} training rows of {', '.join(s.name for s in subject.train)}")
    if data.val_files is not None:
        found = load_rows(data.val_files, split="val", num_rows=data.val_max_samples, seed=data.val_seed, **columns)
        yield ok(f"{sum(len(s.rows) for s in found)} validation rows")


def prompts(subject: Subject) -> Iterator[Note]:
    """A few rows become prompts; their rows' own arguments fit the tools, and something scores them."""
    builder = build_data.build_prompts(subject.config, subject.known_chat, subject.tools)
    few = subject.few()
    try:
        kept = builder.keep(few)
    except DataError as raised:
        yield error(str(raised), "")
        return
    subject.prompts = [prompt for row in kept if (prompt := builder.build(row)) is not None]
    longest = max(len(p.ids) for p in subject.prompts)
    yield ok(f"{len(few)} rendered, the longest has {longest} tokens (limit {builder.max_prompt_length})")
    if builder.num_filtered * 5 > len(few):
        yield warning(
            f"{builder.num_filtered} of the first {len(few)} prompts are over-long and would be left out",
            "raise data.max_prompt_length, or shorten prompts and tool schemas",
        )
    assert subject.reward is not None
    for prompt in subject.prompts:
        subject.reward.check(prompt.row)


def schedule(subject: Subject) -> Iterator[Note]:
    """The rows make the steps that are asked for, and the schedule fits into them."""
    config, trainer = subject.config, subject.config.trainer
    batch, steps = config.data.train_batch_size, subject.total_steps
    if trainer.val_only:
        yield ok("validation only")
        return
    if steps == 0 and trainer.total_training_steps != 0:
        yield error(
            f"data.train_batch_size={batch} with {subject.num_rows} rows and trainer.total_epochs="
            f"{trainer.total_epochs} is not one step",
            "lower the batch size, raise total_epochs, or give more rows",
        )
        return
    wanted = trainer.total_training_steps
    if wanted is not None and steps < wanted:
        yield warning(
            f"trainer.total_training_steps={wanted}, but the rows end after {steps} steps",
            "raise trainer.total_epochs, or lower total_training_steps",
        )
    optim = config.actor_rollout_ref.actor.optim
    updates = steps * (batch // (config.actor_rollout_ref.actor.ppo_mini_batch_size or batch))
    if optim.lr_warmup_steps >= updates > 0:
        yield warning(
            f"optim.lr_warmup_steps={optim.lr_warmup_steps} of {updates} updates: the peak rate is never reached",
            "lower actor_rollout_ref.actor.optim.lr_warmup_steps",
        )
    if optim.lr == 0:
        yield warning("the learning rate is 0: nothing will change", "set actor_rollout_ref.actor.optim.lr")
    sequences = batch * subject.rollout.n
    if sequences % subject.num_ranks:
        yield warning(
            f"{sequences} sequences over {subject.num_ranks} ranks do not come out even: some ranks wait for others",
            "choose data.train_batch_size x rollout.n as a multiple of the ranks",
        )
    if config.data.val_files is None:
        yield ok(f"{steps} steps of {batch} prompts x {subject.rollout.n} samples; nothing is validated")
    else:
        yield ok(f"{steps} steps of {batch} prompts x {subject.rollout.n} samples")
