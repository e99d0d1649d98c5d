"""Ends training in forked children at chosen points and resumes it. Started by test_resume.py.

    python kill_lab.py FOLDER [PHASE...]         # ends a child once in each phase, or in these
    python kill_lab.py FOLDER NUM_KILLS SEED     # SIGKILL at events that SEED draws, in a longer run

In each phase the child ends itself with `os._exit`, so nothing of what it holds in memory is written and no handler
runs. With random kills the child reports an event and waits, and the parent lets it go on or kills it. This process
computes nothing itself. Prints one JSON line.

As a plug-in of a command (`external_plugins`) the module stops the process (SIGSTOP) in the phase `$STOP_IN_PHASE`.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.data import columnar_rows, row_files, run_files
from verl_mt.data.drawn_prompts import PromptLog
from verl_mt.extensions.inspection import prompt_log
from verl_mt.modeling import load
from verl_mt.tools.calculator import Calculator
from verl_mt.trainer import build, checkpoint, rollout_files, tracking
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.run_log import RunLog
from verl_mt.trainer.spool import GroupSpool
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.weight_sync import WeightSync
from verl_mt.workers.worker_group import InlineWorkerGroup

STEPS = 2
SAVED = 1
"""Steps between two checkpoints. Phases lie behind the first of them."""
OVERRIDES = [
    "data.train_batch_size=2",
    "data.train_max_samples=16",
    "data.val_max_samples=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.entropy_coeff=0.01",  # every update changes the weights, whatever the rewards are
    "actor_rollout_ref.actor.skip_zero_advantage=False",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.test_freq={STEPS}",
    f"trainer.save_freq={SAVED}",
    "trainer.val_before_train=False",
    "trainer.max_actor_ckpt_to_keep=1",
    "trainer.num_threads=1",
    "trainer.logger=[]",
]
LAZY = (
    "antlr4.LL1Analyzer",
    "transformers.models.qwen3.modeling_qwen3",
    "verl_mt.engines.local",
    "verl_mt.rollout.generate",
    "verl_mt.tiny.problems",
)
"""Modules that the first run of a process imports."""
DETERMINISTIC = "trainer.deterministic=True"
LONGER_STEPS = 4
LONGER = f"{DETERMINISTIC} trainer.total_training_steps={LONGER_STEPS} trainer.test_freq=2 trainer.save_freq=2"
AHEAD = "trainer.max_staleness=1"
"""Finished groups wait for their step in the spool; what is sampled depends on the clock."""
EXIT = 137


def die() -> None:
    """As SIGKILL ends a process: no handler runs and no buffer is written."""
    os._exit(EXIT)


# ----------------------------------------------------------------------------------------------------------------------
# Phases

Fault = Callable[[Callable[[], None]], None]
"""Changes the library in this process so that the function that it gets is called in the phase."""


def before(owner: Any, name: str, call: int = 1, which: Callable[..., bool] = lambda *args: True) -> Fault:
    """At the beginning of the call with that number, counted over those whose arguments `which` accepts."""

    def arm(end: Callable[[], None]) -> None:
        original, seen = getattr(owner, name), [0]

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if which(*args):
                seen[0] += 1
                if seen[0] == call:
                    end()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    return arm


def after(owner: Any, name: str, which: Callable[..., bool] = lambda *args: True) -> Fault:
    """When the first call that `which` accepts has returned."""

    def arm(end: Callable[[], None]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if which(*args):
                end()
            return found

        setattr(owner, name, wrapped)

    return arm


def tool_call(end: Callable[[], None]) -> None:
    before(Calculator, "execute")(end)


def in_validation(end: Callable[[], None]) -> None:
    before(PPOTrainer, "validate")(lambda: tool_call(end))


def half_a_file_of_rows(end: Callable[[], None]) -> None:
    original = columnar_rows.pq.write_table

    def write_table(table: Any, file: Any, **options: Any) -> None:
        whole = io.BytesIO()
        original(table, whole, **options)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        end()

    columnar_rows.pq.write_table = write_table


def half_a_line(path: Path, line: bytes, end: Callable[[], None]) -> None:
    with path.open("ab") as file:
        file.write(line[: len(line) // 2])
    end()


def half_a_line_of_metrics(end: Callable[[], None]) -> None:
    tracking.append_metrics = lambda path, metrics: half_a_line(Path(path), run_files.json_text(metrics), end)


def half_a_line_of_token_texts(end: Callable[[], None]) -> None:
    rollout_files.append_token_texts = lambda folder, texts: half_a_line(
        Path(folder) / "token_texts.jsonl", run_files.json_text({str(k): text for k, text in texts.items()}), end
    )


def half_a_line_of_the_prompt_log(end: Callable[[], None]) -> None:
    original = PromptLog._append

    def append(self: PromptLog, event: dict[str, Any]) -> None:
        if is_event("trained")(self, event):
            half_a_line(self._path, run_files.json_text(event), end)
        original(self, event)

    PromptLog._append = append


def half_a_checkpoint(end: Callable[[], None]) -> None:
    original = checkpoint.save_tensors

    def save_tensors(content: Any, file: Any) -> str:
        original(content, file)
        file.flush()
        os.truncate(file.name, os.path.getsize(file.name) // 2)
        end()
        raise AssertionError("unreachable")

    checkpoint.save_tensors = save_tensors


def half_of_an_older_checkpoint(end: Callable[[], None]) -> None:
    def remove(path: Path) -> None:
        if path.name.startswith(".gone-"):
            (path / "state.pt").unlink()
            end()

    checkpoint._remove = remove


def half_an_export(end: Callable[[], None]) -> None:
    """The weights are there, the tokenizer is not."""
    original = load.export_hf

    class Torn:
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            end()

    build.export_hf = lambda module, tokenizer, folder, **kwargs: original(module, Torn(), folder, **kwargs)


def half_a_kept_group(end: Callable[[], None]) -> None:
    before(Path, "replace", which=lambda path, *target: path.name.endswith(".group.tmp"))(end)


def is_event(name: str) -> Callable[..., bool]:
    return lambda log, event: event["event"] == name


def renames(prefix: str) -> Callable[..., bool]:
    return lambda path, *target: path.name.startswith(prefix)


FIRST_STEP: dict[str, Fault] = {
    "in a tool call of the first step": tool_call,
    "in the middle of a line of token texts": half_a_line_of_token_texts,
}
"""Phases of a run without a checkpoint, which starts again. It ends in them before it gets its first checkpoint."""
LATER: dict[str, Fault] = {
    # The second step
    "prompts are drawn and none is started": before(PromptLog, "started"),
    "in a tool call": tool_call,
    "one prompt is finished": before(PromptLog, "_append", call=2, which=is_event("finished")),
    "between rollout and update": before(InlineWorkerGroup, "update"),
    "between two optimizer steps of an update": before(ActorWorker, "_step", call=2),
    "between update and new weights for the engine": before(WeightSync, "push"),
    "in the middle of a file of rollout rows": half_a_file_of_rows,
    "before rollout rows have their name": before(run_files.os, "replace"),
    "between rollout rows and prompt log": before(PromptLog, "ended"),
    "in the middle of a line of the prompt log": half_a_line_of_the_prompt_log,
    "between prompt log and metrics": before(RunLog, "step"),
    "in the middle of a line of metrics": half_a_line_of_metrics,
    "behind a line of metrics": after(RunLog, "step"),
    # Its end, with validation and checkpoint
    "in a tool call of a validation": in_validation,
    "between two passes of a validation": after(rollout_files.RolloutFiles, "validation"),
    "between metrics and checkpoint": before(PPOTrainer, "_save"),
    "in the middle of a checkpoint": half_a_checkpoint,
    "a checkpoint has its tensors alone": after(checkpoint, "_sync"),
    "before a checkpoint has its name": before(Path, "rename", which=renames(".partial-")),
    "behind a checkpoint": after(Path, "rename", which=renames(".partial-")),
    "in the middle of deleting an older checkpoint": half_of_an_older_checkpoint,
    # The end of the run
    "in the middle of the export": half_an_export,
    "between export and the mark of a finished run": before(RunDirectory, "finish"),
}
"""Phases between two checkpoints, which go on from the first of them."""
KEPT: dict[str, Fault] = {
    "in the middle of keeping a finished group": half_a_kept_group,
    "a finished group is kept": after(GroupSpool, "keep"),
    "between prompt log and forgetting kept groups": before(GroupSpool, "drop"),
}
"""Phases of an asynchronous run, whose finished groups outlive the process: of its first step."""
PHASES = FIRST_STEP | LATER | KEPT
ELSEWHERE = (
    "in a tool call of the first step",
    "between rollout and update",
    "between update and new weights for the engine",
    "before rollout rows have their name",
    "between prompt log and metrics",
    "behind a line of metrics",
    "in a tool call of a validation",
    "a checkpoint has its tensors alone",
    "before a checkpoint has its name",
    "behind a checkpoint",
    "between export and the mark of a finished run",
    "a finished group is kept",
)
"""Phases that leave the same kinds of files as a neighbour does: they are tried before a release."""
IN_A_ROW = 6
"""How often one run is ended. After each end it resumes from its checkpoint, and is ended in the next phase."""
LAST_BEFORE_CHECKPOINT = "before a checkpoint has its name"
"""Later phases come after a new checkpoint, so no earlier phase can follow them: a run ends in one of them, last."""


def runs(wanted: Collection[str]) -> list[list[str]]:
    """Phases by the run that ends in them, one after the other, before it goes on to its end. The first run is
    deterministic; those of the first step are left out."""
    last = list(LATER).index(LAST_BEFORE_CHECKPOINT) + 1
    names = [name for name in list(LATER)[:last] if name in wanted]
    rows = [names[k : k + IN_A_ROW] for k in range(0, len(names), IN_A_ROW)]
    late = [[name] for name in list(LATER)[last:] if name in wanted]
    kept = [name for name in KEPT if name in wanted]
    together = [row + end for row, end in zip_longest(rows, late, fillvalue=[])] or [[]]
    return [*together, kept] if kept else together


def arm(phase: str, end: Callable[[], None]) -> None:
    """Call `end` in the phase: of the first step, or behind the first checkpoint."""
    first, step = SAVED if phase in LATER else 0, PPOTrainer.step

    def stepping(self: PPOTrainer) -> Any:
        if self.step_number == first:
            PPOTrainer.step = step
            PHASES[phase](end)
        return step(self)

    PPOTrainer.step = stepping


# ----------------------------------------------------------------------------------------------------------------------
# Children


def forked(job: Callable[[], None]) -> int:
    """Its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            job()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@cache
def config_of(mode: str) -> Config:
    return compose([*OVERRIDES, *mode.split()])


def prepare() -> None:
    """What all children need and may be there before a fork: imports, and configurations. Nothing is computed."""
    for mode in (DETERMINISTIC, LONGER, AHEAD):
        config_of(mode)
    for name in LAZY:
        import_module(name)
    get_checkpoint_conversion_mapping("qwen3")  # hundreds of patterns, which transformers compiles once
    gc.collect()
    gc.freeze()


def train(folder: Path, mode: str) -> None:
    config = config_of(mode)
    build_trainer(replace(config, trainer=replace(config.trainer, default_local_dir=str(folder)))).fit()


def begin(folder: Path) -> None:
    """A deterministic run up to the first checkpoint."""

    def stop(self: PPOTrainer) -> Any:
        if self.step_number == SAVED:
            os._exit(0)
        return step(self)

    step, PPOTrainer.step = PPOTrainer.step, stop
    train(folder, DETERMINISTIC)


def run_to_its_end(job: Callable[[], None], what: str) -> None:
    if status := forked(job):
        raise SystemExit(f"{what}: a child ended with {status}")


def end_in(phase: str, folder: Path) -> None:
    def job() -> None:
        arm(phase, die)
        train(folder, AHEAD if phase in KEPT else DETERMINISTIC)

    if (status := forked(job)) != EXIT:
        raise SystemExit(f"a child that should end {phase!r} ended with {status}")


def same(one: object, other: object) -> bool:
    """Equal, bit for bit, whatever is nested in what."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(
        (one == other) if not hasattr(one, "tobytes") else one.tobytes() == other.tobytes()
    )


def prompts_of(run: Path, steps: int = STEPS) -> list[str]:
    """What is wrong with the run's account of its prompts."""
    found, all_trained = prompt_log.examine(run), f"{2 * steps} drawn, {2 * steps} trained, 0 left out, 0 open"
    return [*found.missing, *found.double, *([] if found.summary().startswith(all_trained) else [found.summary()])]


def rows_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Rollout rows by file, without what the clock says."""
    timed = ("time_spans", "counters", "tool_calls")
    return {
        file.path.name: [{k: v for k, v in row.items() if k not in timed} for row in row_files.read_rows(file.path)]
        for file in row_files.row_files(run)
    }


def names_in(run: Path, steps: int = STEPS) -> set[str]:
    """All files and folders but older checkpoints, one of which may be left for the next checkpoint to delete, and the
    files of Hydra that only a command writes."""
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    return {name for name in names if not name.startswith((f"checkpoints/step_{steps // 2:06d}", ".hydra"))}


def differences(reference: Path, other: Path, steps: int = STEPS) -> list[str]:
    """What two finished deterministic runs do not have in common, and prompts that were not trained exactly once."""
    found = prompts_of(other, steps)
    last = f"checkpoints/step_{steps:06d}"
    one, two = checkpoint.load(reference / last), checkpoint.load(other / last)
    found += [key for key in one if not same(one[key], two[key])]
    for name in ("metrics.jsonl", "hf/model.safetensors"):
        if (reference / name).read_bytes() != (other / name).read_bytes():
            found.append(name)
    if rows_of(reference) != rows_of(other):
        found.append("rollout rows")
    return found + sorted(names_in(reference, steps) ^ names_in(other, steps))


def each_phase(folder: Path, wanted: Collection[str]) -> dict[str, list[str]]:
    """Phase -> what is wrong with the run that was ended in it. Phases that share a run share the answer."""
    reference = folder / "reference"
    run_to_its_end(lambda: train(reference, DETERMINISTIC), "the reference")
    begun, first = folder / "begun", [name for name in FIRST_STEP if name in wanted]
    for phase in first:
        end_in(phase, begun)
    run_to_its_end(lambda: begin(begun), "the first steps")
    wrong: dict[str, list[str]] = {}
    for number, phases in enumerate(runs(wanted)):
        run, mode = folder / f"run-{number}", AHEAD if KEPT.keys() & phases else DETERMINISTIC
        if mode == DETERMINISTIC:
            shutil.copytree(begun, run)
        for phase in phases:
            end_in(phase, run)
        run_to_its_end(lambda run=run, mode=mode: train(run, mode), " and ".join(phases))
        found = differences(reference, run) if mode == DETERMINISTIC else prompts_of(run)
        if mode == AHEAD:
            found += sorted(name for name in names_in(run) if name.startswith("spool"))
        for phase in phases if mode == AHEAD else [*first, *phases]:
            wrong.setdefault(phase, []).extend(found)
    return wrong


# ----------------------------------------------------------------------------------------------------------------------
# Random kills


class Reporter:
    """The child's end: report an event, wait for leave to go on."""

    def __init__(self, to_parent: int, from_parent: int):
        self._out, self._in, self._lock = to_parent, from_parent, threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            os.write(self._out, name[:1].encode())
            os.read(self._in, 1)

    def at(self, owner: object, name: str, event: str) -> None:
        """Report `event` at the beginning of every call of `owner.name`."""
        original = getattr(owner, name)

        def reporting(*args, **kwargs):
            self(event)
            return original(*args, **kwargs)

        setattr(owner, name, reporting)


def train_and_report(folder: Path, report: Reporter) -> None:
    report.at(checkpoint, "_sync", "checkpoint")
    report.at(tracking, "append_metrics", "metrics")
    report.at(run_files.os, "replace", "file")
    report.at(ActorWorker, "_step", "update")
    report.at(Calculator, "execute", "tool")
    train(folder, LONGER)


def run_child(folder: Path, kill_at: int | None) -> tuple[bool, int, str]:
    """(finished, events seen, last event). `kill_at` counts events from 1."""
    up, down = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(up[0])
        os.close(down[1])
        try:
            train_and_report(folder, Reporter(up[1], down[0]))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(up[1])
    os.close(down[0])
    seen, last = 0, ""
    while event := os.read(up[0], 1):
        seen, last = seen + 1, event.decode()
        if seen == kill_at:
            os.kill(pid, signal.SIGKILL)
            break
        os.write(down[1], b".")
    _, status = os.waitpid(pid, 0)
    os.close(up[0])
    os.close(down[1])
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a child failed after {seen} events ({last})")
    return os.WIFEXITED(status), seen, last


def random_kills(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    reference = folder / "reference"
    _, num_events, _ = run_child(reference, None)
    kills: Counter[str] = Counter()
    different: dict[str, list[str]] = {}
    while sum(kills.values()) < num_kills:
        run, finished = folder / f"killed-{len(different) + 1}", False
        while not finished:
            go_on = sum(kills.values()) >= num_kills
            finished, _, last = run_child(run, None if go_on else rng.randint(1, max(2, 2 * num_events // 3)))
            if not finished:
                kills[last] += 1
        different[run.name] = differences(reference, run, LONGER_STEPS)
    return {"events": num_events, "kills": kills, "different": different}


def main() -> None:
    folder, *words = sys.argv[1:]
    prepare()
    random_ones = words[:1] and words[0].isdigit()
    found = random_kills(Path(folder), *map(int, words)) if random_ones else each_phase(Path(folder), words or PHASES)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
elif phase := os.environ.get("STOP_IN_PHASE"):
    arm(phase, lambda: os.kill(os.getpid(), signal.SIGSTOP))
