"""Runs that begin again by themselves when a process is lost: `trainer.max_restarts`."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from verl_mt.config.schema import Config
from verl_mt.errors import LOSSES, NoRoomError
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer

_LOOK_EVERY_S = 10.0


def run_to_the_end(config: Config) -> PPOTrainer:
    """Build a trainer and let it train; after a loss build another one, which goes on from the last checkpoint, as the
    same command would. Nothing of the lost one is kept but its directory: ranks, engines and rollout workers are ended
    and started again, so that a deterministic run has the same bits as one without the loss.

    Returns:
        The trainer that came to the end, or was interrupted.

    Raises:
        VerlMTError: what `build_trainer` and `fit` raise; of a loss when `trainer.max_restarts` are used up.
    """
    most = config.trainer.max_restarts
    folder: Path | None = None
    trainer: PPOTrainer | None = None
    for number in range(most + 1):
        try:
            trainer = _built(config, folder, again=number > 0)
            folder = trainer.log.run.path
            with _objects_that_stay():
                trainer.fit()
            return trainer
        except LOSSES as error:
            if trainer is not None and trainer.interrupts.requested.is_set():
                raise  # who was asked to stop, and lost its ranks to the same signal, has to stop
            if number == most:
                if most:
                    error.add_note(f"trainer.max_restarts={most}: that many restarts were tried")
                raise
            _say(f"restart {number + 1} of {most}: {error}")
        trainer = None
        gc.collect()  # the lost one's memory, before the next one's
    raise AssertionError("unreachable: the last loss is raised")


@contextlib.contextmanager
def _objects_that_stay() -> Iterator[None]:
    """What was made before the first step lives as long as the run. No collection looks at it: that takes a quarter of
    a second for nothing, in which no conversation goes on."""
    if gc.get_freeze_count():  # the caller has done so, and knows what it froze
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _built(config: Config, folder: Path | None, *, again: bool) -> PPOTrainer:
    """A trainer; in `folder`, where a run was lost that had one. A machine that is gone may come back, or another one
    in its place: this waits for a place for the workers as long as ranks would wait for each other.

    Raises:
        VerlMTError: see `build_trainer`; of `NoRoomError` after that time.
    """
    if not again:
        return build_trainer(config)
    deadline = time.monotonic() + config.trainer.worker_timeout_s
    while True:
        try:
            return build_trainer(config, lost=folder)
        except NoRoomError as error:
            if time.monotonic() > deadline:
                raise
            _say(f"waiting for machines: {error}")
            time.sleep(_LOOK_EVERY_S)


def _say(text: str) -> None:
    first, _, _ = text.partition("\n")
    Console(stderr=True).print(f"[bold yellow]{escape(first)}[/]", highlight=False)
