"""The runs of a sweep -> what its page shows: settings with their seeds, which keys differ, and every job.

A *setting* is all of `config.yaml` but seeds, directories and names. Jobs of one setting and different seeds repeat one
experiment. The page computes means, intervals and costs from the metrics of the jobs.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_mt.data.run_files import holder_of, to_json_value
from verl_mt.errors import DataError
from verl_mt.extensions.inspection.report.collect import Collector, Contents, pack
from verl_mt.extensions.inspection.report.run_reader import Run, is_run, leaves, read_curves, section
from verl_mt.reading import require_file

_MAX_DEPTH = 3
"""Levels below the sweep's folder where jobs are looked for."""
_SEEDS = ("trainer.seed", "data.seed")
_FOLDERS = ("trainer.default_local_dir", "actor_rollout_ref.rollout.weight_sync_dir")
_NAMES = ("trainer.experiment_name", "trainer.project_name")
_TASK = ("data.train_files", "data.val_files", "reward.")
"""Keys, or beginnings of keys, that decide what a reward measures."""
_LOGS = ("*.log", "*.err", "*.out", "stderr*")
_ENDED = "jobs.jsonl"
"""Beside the folders of the jobs: a line for each that ended, or was skipped."""
_OF_A_JOB = (".hydra", "stderr.log")
"""What a job leaves that never became a run."""
_LOG_TAIL_BYTES = 65536
_ERROR = re.compile(
    r"^(?:error|fatal): |^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?::|$)|\b(?:ERROR|CRITICAL)\b"
)
_MAX_ERROR, _MAX_VALUE = 500, 40
"""Characters of an error, and of a value in the label of a setting."""

Setting = tuple[tuple[str, str], ...]
"""Key and value as JSON, in the order of `config.yaml`."""


@dataclass(frozen=True)
class Job:
    """One run directory of a sweep, or what a job left that never became a run."""

    name: str
    """Its path below the sweep's folder."""
    run: Run
    setting: Setting | None
    """None: `config.yaml` cannot be read."""
    seeds: tuple[str, ...]
    """Values of `_SEEDS`."""
    state: str
    """`finished`, `running`, `failed` or `broken off`."""
    error: str | None
    """Why it failed."""

    @property
    def progress(self) -> tuple[bool, int]:
        """Orders the jobs of one setting and seed: finished ones first, then by steps."""
        return self.run.finished, self.run.metrics[-1]["step"] if self.run.metrics else -1


@dataclass
class SweepContents(Contents):
    """What the page of a sweep shows."""

    name: str = ""
    jobs: list[Job] = field(default_factory=list)
    sweep: dict[str, Any] = field(default_factory=dict)

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        """Group the jobs by setting and add them all."""
        self.jobs = list(jobs)
        groups = _by_setting(jobs)
        keys, labels = _differing([jobs[0].setting or () for jobs in groups]), _labels(groups)
        doubles = {name: other for group in groups for name, other in _doubles(group)}
        place = {job.name: number for number, group in enumerate(groups) for job in group}
        data_seeds = len({job.seeds[1] for job in jobs if job.setting}) > 1
        self.sweep = {
            "name": self.name,
            "notes": _notes(groups, keys),
            "keys": keys,
            "settings": [
                {"label": label, "values": [_shown(dict(group[0].setting or ()).get(key)) for key in keys]}
                for label, group in zip(labels, groups)
            ],
            "jobs": [
                {
                    "name": job.name,
                    "setting": place.get(job.name),
                    "seed": _seed_text(job, data_seeds),
                    "state": job.state,
                    "error": job.error,
                    "same_as": doubles.get(job.name),
                    "total_steps": section(job.run.config, "trainer").get("total_training_steps"),
                    "problems": job.run.problems,
                    "metrics": self._block(pack(job.run.metrics)),
                }
                for job in jobs
            ],
        }

    @property
    def manifest(self) -> dict[str, Any]:
        return {"runs": [], "sweep": self.sweep}

    @property
    def title(self) -> str:
        return self.name

    @property
    def summary(self) -> str:
        numbers = {"run": len(self.jobs), "setting": len(self.sweep["settings"])}
        return ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in numbers.items())

    @property
    def complaints(self) -> list[str]:
        said = [f"{job.name}: {job.error or job.state}" for job in self.jobs if not job.run.finished]
        return [*said, *(f"{job.name}: {problem}" for job in self.jobs for problem in job.run.problems)]


class SweepCollector:
    """Reads the jobs of a sweep, again and again.

    Args:
        folder: holds their directories, at most three levels down.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def contents(self) -> SweepContents:
        """What the page shows now.

        Raises:
            DataError: a folder of the sweep cannot be listed; names it.
        """
        contents = SweepContents(name=self._folder.resolve().name)
        contents.add_jobs([_read_job(path, self._folder) for path in find_jobs(self._folder)])
        return contents


def collector(paths: Sequence[str], max_rollouts: int) -> Collector | SweepCollector:
    """What reads these paths: run directories, or one folder of them. A folder that holds one run stands for it.

    Raises:
        DataError: a folder of several runs beside other paths, or one that cannot be listed.
    """
    runs: list[str] = []
    for path in paths:
        folder = Path(path).expanduser()
        jobs = [] if not folder.is_dir() or is_run(folder) else find_jobs(folder)
        if len(jobs) > 1 and len(paths) > 1:
            raise DataError(f"{folder} holds {len(jobs)} runs. Name it alone for the page of a sweep, or name its runs")
        if len(jobs) > 1 or (jobs and not is_run(jobs[0])):
            return SweepCollector(folder)
        runs.append(str(jobs[0]) if jobs else path)
    return Collector(runs, max_rollouts)


def find_jobs(folder: Path) -> list[Path]:
    """Directories of jobs below `folder`, in natural order. Links are not followed, and runs hold no other runs.

    Raises:
        DataError: a folder cannot be listed; names it.
    """
    return list(_jobs_below(folder, _MAX_DEPTH))


def _jobs_below(folder: Path, levels: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror or error}") from error
    for path in (folder / name for name in sorted(found, key=_natural)):
        if is_run(path):
            yield path
            continue
        below = list(_jobs_below(path, levels - 1)) if levels > 1 else []
        yield from below or ([path] if any((path / name).exists() for name in _OF_A_JOB) else [])


def _natural(name: str) -> list[tuple[int, str]]:
    """`job10` comes after `job9`."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _read_job(path: Path, sweep: Path) -> Job:
    run = read_curves(path) if is_run(path) else Run(path, path.name)
    values = {
        key: json.dumps(value, ensure_ascii=False, sort_keys=True) for key, value in leaves(to_json_value(run.config))
    }
    setting = tuple((key, value) for key, value in values.items() if not _is_apart(key))
    seeds = tuple(values.get(key, "unknown") for key in _SEEDS)
    state, error = _state(path, run.finished)
    return Job(path.relative_to(sweep).as_posix(), run, setting or None, seeds, state, error)


def _state(path: Path, finished: bool) -> tuple[str, str | None]:
    """The state of a job, and why it failed."""
    if finished:
        return "finished", None
    if holder_of(path) is not None:
        return "running", None
    error = _last_error(path) or _why_failed(path)
    return "failed" if error else "broken off", error


def _why_failed(path: Path) -> str | None:
    """What the sweep says of a job that failed, unless the job has been started again since."""
    try:
        require_file(path.parent / _ENDED)
        lines = (path.parent / _ENDED).read_text(encoding="utf-8").splitlines()
        own = [line for line in map(json.loads, lines) if line["folder"] == path.name]
        begun = max((file.stat().st_mtime for file in [path / ".lock"] if file.exists()), default=0.0)
        last = own[-1] if own else {}
        return str(last["why"]) if last.get("status") == "failed" and last["ended"] >= begun else None
    except (DataError, OSError, ValueError, KeyError, TypeError):
        return None  # no sweep of ours


def _is_apart(key: str) -> bool:
    """Whether runs may differ in it and still repeat one experiment."""
    return key in _SEEDS or key in _NAMES or key in _FOLDERS


def _last_error(folder: Path) -> str | None:
    """The last line that tells of an error in the newest log that has one."""
    logs = {path for pattern in _LOGS for path in folder.glob(pattern)}
    for path in sorted(logs, key=lambda path: (path.lstat().st_mtime_ns, path.name), reverse=True):
        try:
            require_file(path)
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        except (DataError, OSError) as error:
            return f"its log cannot be read: {error}"
        if found := [line for line in lines if _ERROR.search(line)]:
            return found[-1] if len(found[-1]) <= _MAX_ERROR else f"{found[-1][:_MAX_ERROR]}…"
    return None


def _by_setting(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs of one setting each. A job with metrics and no readable configuration stands alone; one without metrics is
    in none."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        if job.setting or job.run.metrics:
            groups.setdefault(frozenset(job.setting) if job.setting else job.name, []).append(job)
    return list(groups.values())


def _doubles(group: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """Jobs that repeat a seed, and the job that counts instead: the same seed twice is no second sample."""
    best: dict[tuple[str, ...], Job] = {}
    for job in group:
        if job.seeds not in best or job.progress >= best[job.seeds].progress:
            best[job.seeds] = job
    yield from ((job.name, best[job.seeds].name) for job in group if job is not best[job.seeds])


def _differing(settings: Sequence[Setting]) -> list[str]:
    known = [dict(setting) for setting in settings if setting]
    keys = dict.fromkeys(key for setting in known for key in setting)
    return [key for key in keys if len({setting.get(key) for setting in known}) > 1]


def _labels(groups: Sequence[Sequence[Job]]) -> list[str]:
    """A short name of each setting: as few of the keys that differ as tell all of them apart."""
    known = [dict(group[0].setting) for group in groups if group[0].setting]
    keys = _differing([group[0].setting or () for group in groups])
    last = Counter(key.rpartition(".")[2] for key in keys)
    chosen: list[str] = []

    def value(key: str) -> int:
        """How many settings are told apart with it. Words say more than numbers."""
        told = len({tuple(setting.get(k) for k in (*chosen, key)) for setting in known})
        return 2 * told + all(setting.get(key, '"')[0] == '"' for setting in known)

    while len({tuple(setting.get(key) for key in chosen) for setting in known}) < len(known):
        chosen.append(max((key for key in keys if key not in chosen), key=value))

    def label(group: Sequence[Job]) -> str:
        if not group[0].setting:
            return group[0].name
        setting = dict(group[0].setting)
        names = {key: short if last[short := key.rpartition(".")[2]] == 1 else key for key in chosen}
        return ", ".join(f"{names[key]}={_shortened(_shown(setting.get(key)))}" for key in chosen) or "all runs"

    found = [label(group) for group in groups]
    again = Counter(found)
    return [text if again[text] == 1 else f"{text} ({number})" for number, text in enumerate(found, start=1)]


def _shown(value: str | None) -> str:
    """A value of a setting, for a reader: text without its quotation marks."""
    return "not set" if value is None else json.loads(value) if value.startswith('"') else value


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _seed_text(job: Job, data_seeds: bool) -> str:
    if not job.setting:
        return "–"
    trainer, data = job.seeds
    return f"{trainer}, data {data}" if data_seeds else trainer


def _notes(groups: Sequence[Sequence[Job]], keys: Sequence[str]) -> list[str]:
    """What a reader must know before comparing."""
    notes = []
    if task := [key for key in keys if key.startswith(_TASK)]:
        notes.append(
            f"The settings differ in {', '.join(task)}: their rewards and validations measure different things. "
            "Compare them only where these keys are equal."
        )
    named = [_metric_names(group) for group in groups]
    if len(named) > 1 and all(named) and not set.intersection(*named):
        notes.append("The settings have no metric in common: there is nothing to compare.")
    return notes


def _metric_names(group: Sequence[Job]) -> set[str]:
    lines = (line for job in group for line in job.run.metrics)
    return {name for line in lines for name, value in line.items() if type(value) in (int, float)} - {"step"}
