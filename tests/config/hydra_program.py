"""Two programs over one schema, in the words of Hydra's tutorial: `ours` is a command of verl_mt, `bare` is Hydra's.

`python -m hydra_program WORDS` is the first. Both write each configuration that they run with to a file: Hydra's
tutorial prints it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl_mt.config import hydra_source
from verl_mt.config.compose import hydra_main, register, to_config
from verl_mt.config.schema import Config, schema

SEEN = "HYDRA_PROGRAM_SEEN"
"""Variable of the environment: the file."""
SET_BY_US = ("trainer.default_local_dir", "algorithm.rollout_correction", "actor_rollout_ref.actor.loss_agg_mode")
"""Keys that follow others where nobody sets them, and the run directory."""


def record(content: dict[str, Any]) -> None:
    for key in SET_BY_US:
        *parents, last = key.split(".")
        node = content
        for part in parents:
            node = node[part]
        del node[last]
    with Path(os.environ[SEEN]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, sort_keys=True) + "\n")


def ours(config: Config) -> None:
    record(dataclasses.asdict(config))
    folder = Path(str(config.trainer.default_local_dir))
    if folder.is_dir():  # of a job of a sweep
        (folder / "FINISHED").touch()


def bare(tree: DictConfig) -> None:
    content = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(content, dict)
    record({str(key): value for key, value in content.items()})


def run_ours(words: Sequence[str]) -> None:
    hydra_main(ours, argv=["--config-path=conf", *words])


def start_ours(words: Sequence[str]) -> None:
    """In a process of its own, which the jobs of a sweep are started like."""
    done = subprocess.run([sys.executable, "-m", "hydra_program", *words], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    raise SystemExit(done.returncode)


def run_bare(words: Sequence[str]) -> None:
    if "base_config.yaml" not in ConfigStore.instance().repo:
        ConfigStore.instance().store("base_config", schema())
    before, sys.argv = sys.argv, ["hydra_program", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(Path("conf").absolute()))(bare)()
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()


def run_registered(words: Sequence[str]) -> None:
    """A program with its own `@hydra.main`, which calls `verl_mt.register()`."""
    before, sys.argv = sys.argv, ["hydra_program", *words]
    register()
    try:
        hydra.main(version_base="1.3", config_path=str(Path("conf").absolute()))(lambda tree: ours(to_config(tree)))()
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
        hydra_source._REGISTERED.clear()  # the next program of this process is another one


def outcome(run: Callable[[Sequence[str]], None], words: Sequence[str], seen: Path) -> tuple[int, list[str], str]:
    """(exit status, the configurations, what was printed) of a program in this process.

    Args:
        run: `run_ours`, `start_ours` or `run_bare`.
        words: its command line.
        seen: a new file.
    """
    os.environ[SEEN] = str(seen)
    status: Any = 0
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            run(words)
        except SystemExit as end:
            status = end.code
        finally:
            HydraConfig.instance().cfg = None  # each expects to be the only program of its process
            root.handlers[:] = handlers
            root.setLevel(level)
            for name in ("hydra", "__main__"):
                logging.getLogger(name).setLevel(logging.NOTSET)
    return int(status or 0), seen.read_text().splitlines() if seen.exists() else [], out.getvalue() + err.getvalue()


def both(folder: Path, words: list[str], run: Callable[[Sequence[str]], None] = run_ours) -> tuple[list[str], str, str]:
    """The configurations and what each printed, where both agree on the first and on whether it works."""
    theirs = outcome(run_bare, words, folder / "bare.jsonl")
    mine = outcome(run, words, folder / "ours.jsonl")
    refused = 1 if run is run_registered else 2
    assert mine[0] == (refused if theirs[0] else 0), (theirs, mine)
    assert sorted(mine[1]) == sorted(theirs[1]), (theirs[2], mine[2])
    return mine[1], mine[2], theirs[2]


if __name__ == "__main__":
    run_ours(sys.argv[1:])
