"""Finished runs of the default task, made once in a session; a test gets a copy of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from verl_mt.config.compose import compose
from verl_mt.trainer.build import build_trainer

STEPS = 4
SMALL = [
    "data.train_batch_size=2", "data.train_max_samples=32", "data.val_max_samples=4", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.response_length=64", f"trainer.total_training_steps={STEPS}", "trainer.logger=[]",
    f"trainer.test_freq={STEPS}", "trainer.num_threads=1", "trainer.save_freq=2", "trainer.val_before_train=False",
]  # fmt: skip
KINDS = {
    "plain": [],
    "lora": ["data.val_files=null", "actor_rollout_ref.model.dtype=bfloat16", "actor_rollout_ref.model.lora_rank=2"],
}
"""Kind -> what its configuration has besides `SMALL`. Each run has checkpoints of steps 2 and 4, and an export."""
_LARGE = (".safetensors", ".pt")


def copy_run(source: Path, target: Path) -> Path:
    """A copy whose weights are hard links: the library replaces such a file and never writes into it. All else is
    copied, for lines are added to it."""

    def copy(name: str, to: str) -> None:
        (os.link if name.endswith(_LARGE) else shutil.copy2)(name, to)

    shutil.copytree(source, target, copy_function=copy)
    return target


def state_of(run: Path) -> dict[str, tuple[int, int]]:
    """Changes when somebody writes into a file that copies share."""
    found = ((path, path.stat()) for path in sorted(run.rglob("*")) if path.name.endswith(_LARGE))
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found}


class FinishedRuns:
    """The runs of one session of pytest; its workers share the folder, and the first that wants a run makes it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._states: dict[str, dict[str, tuple[int, int]]] = {}

    def original(self, kind: str) -> Path:
        """The run itself, to be read only."""
        run = self._folder / kind
        with (self._folder / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (run / "FINISHED").exists():
                build_trainer(compose([*SMALL, *KINDS[kind], f"trainer.default_local_dir={run}"])).fit()
        self._states.setdefault(kind, state_of(run))
        return run

    def require_unchanged(self) -> None:
        """No test has written into what other tests read."""
        for kind, before in self._states.items():
            assert state_of(self._folder / kind) == before, f"a test wrote into the finished run {kind!r}"


Finished = Callable[[str], Path]
"""Kind -> this test's copy, in its temporary folder."""
