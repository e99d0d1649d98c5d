"""What calls return: a finished run, an evaluation, an examination."""

from __future__ import annotations

import argparse
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from verl_mt.api.arguments import CallArguments
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.diagnostics.step_metrics import first_and_last
from verl_mt.errors import CheckpointError, UserCodeError
from verl_mt.evaluate import config_of
from verl_mt.plugins import extension_function, objects_given

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from verl_mt.data.trajectory import Trajectory
    from verl_mt.trainer.inference import Measured


class Run:
    """A run's directory, as Python objects. Also of a run that goes on, was interrupted, or was a command's.

    Args:
        folder: the run directory.
        objects: what its configuration names as `object:name`, where the run was a call.
        trust: run the code that its `config.yaml` names, though another user has written it.

    Raises:
        CheckpointError: no run directory.
    """

    def __init__(self, folder: str | Path, *, objects: Mapping[str, Any] | None = None, trust: bool = False):
        self.folder = Path(folder).expanduser()
        self.trust = trust
        self.objects = dict(objects or {})
        if not (self.folder / "config.yaml").is_file():
            raise CheckpointError(f"{self.folder} is no run directory: it has no config.yaml")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: `step` and the numbers of a step or a validation, in order."""
        file = self.folder / "metrics.jsonl"
        return read_jsonl_tolerant(file) if file.is_file() else []

    def curve(self, name: str) -> dict[int, float]:
        """Step -> value of one number, where it was measured: `run.curve("reward/mean")`.

        Raises:
            KeyError: it was never measured.
        """
        found = {int(line["step"]): line[name] for line in self.metrics if name in line}
        if not found:
            raise KeyError(f"{name} is in no line of {self.folder / 'metrics.jsonl'}")
        return found

    def plot(self, *names: str) -> Figure:
        """Draw curves over the steps: `run.plot("reward/mean")`. Needs `pip install 'verl_mt[report]'`.

        Args:
            names: of metrics. Without any: the mean reward and the accuracies.

        Returns:
            A plotly figure, which a notebook shows. `figure.write_html("curves.html")` writes it.

        Raises:
            KeyError: it was never measured.
        """
        return extension_function("plot")(self, names)

    @property
    def rollouts(self) -> DataFrame:
        """All conversations that were written, as a pandas data frame with a row for each. Needs `pip install
        'verl_mt[report]'`. Columns: `step`, `split` (`train`, `val`, `val_greedy`), `question`, `answer`,
        `ground_truth`, `reward`, `stop_reason`, `turns`, `calls`, `failed_calls`, `sampled_tokens`, `error`,
        `messages`, ids, and `reward/NAME` for each part of the reward. It reads every token of the run: of a large run
        read `rollouts/` instead (docs/rollout_rows.md).

        Raises:
            DataError: a damaged file of rollout rows.
        """
        return extension_function("rollouts")(self.folder)

    @property
    def steps(self) -> int:
        """The last step that was finished."""
        return max((int(line["step"]) for line in self.metrics), default=0)

    @property
    def finished(self) -> bool:
        """It came to its end. Otherwise the call that began it goes on with it."""
        return (self.folder / "FINISHED").exists()

    @property
    def model(self) -> Path:
        """The Hugging Face folder of the trained model. Where the run has written none (it was interrupted, or
        `trainer.export_at_end` is off), the newest checkpoint is exported now.

        Raises:
            CheckpointError: there is no checkpoint either.
        """
        folder = self.folder / "hf"
        if not folder.is_dir():
            from verl_mt.export import export

            out = folder if self.finished else self.folder / f"hf_step_{self.steps:06d}"
            return export(self.folder, out, trust=self.trust)
        return folder

    def evaluate(self, data: Any = None, *, n: int | None = None, **keys: Any) -> Evaluation:
        """Its model on other data, or on its own validation rows, with its own tools, limits and reward.

        Args:
            data: as `verl_mt.train` takes it. None = the run's validation rows.
            n: samples per prompt. None = as the run was validated.
            keys: of the configuration, where they are to differ.

        Raises:
            VerlMTError: bad input, or not one conversation survived.
        """
        return evaluated(CallArguments(objects=dict(self.objects)), data, keys, n=n, run=self)

    def report(self, out: str | Path | None = None, *, beside: Sequence[Run | str | Path] = ()) -> Path:
        """Write the page of `python -m verl_mt.report`. Returns the HTML file.

        Args:
            out: the file. None = `report.html` in the run's directory.
            beside: other runs, for curves side by side.
        """
        runs = [str(run.folder if isinstance(run, Run) else run) for run in (self, *beside)]
        written: list[Path] = extension_function("report")(runs, None if out is None else str(out))
        return written[0]

    def __repr__(self) -> str:
        facts = [f"{self.steps} steps", *(f"{name} {then:.3f} -> {now:.3f}" for name, then, now in self._changes())]
        return f"Run({str(self.folder)!r}: {', '.join(facts)}{'' if self.finished else '; not finished'})"

    def _repr_html_(self) -> str:
        rows = [(name, f"{then:.3f} &rarr; <b>{now:.3f}</b>") for name, then, now in self._changes()]
        rows += [("steps", f"{self.steps}{'' if self.finished else ' (not finished)'}")]
        rows += [("folder", f"<code>{html.escape(str(self.folder))}</code>")]
        cells = "".join(f"<tr><td>{name}</td><td style='text-align:left'>{text}</td></tr>" for name, text in rows)
        return f"<table>{cells}</table>"

    def _changes(self) -> list[tuple[str, float, float]]:
        """(name, at the beginning, at the end): the reward's means as the command says them at its end, and the first
        and the last validation."""
        found = []
        for name in ("reward/mean", "val/accuracy", "val/accuracy_greedy"):
            values = [line[name] for line in self.metrics if name in line]
            if values:
                then, now, _ = first_and_last(values, *([] if name == "reward/mean" else [1]))
                found.append((name, then, now))
        return found


class Evaluation:
    """What a model can do on some data."""

    def __init__(self, found: Measured):
        self.metrics: dict[str, float] = found.metrics
        """`val/accuracy`, `val/pass_at_k`, ...; docs/diagnostics.md names them."""
        self.groups = found.groups
        """One for each prompt, with its samples in `.trajectories`."""
        self._found = found

    @property
    def accuracy(self) -> float:
        """`val/accuracy`: the share of right answers, or the mean score."""
        return self.metrics["val/accuracy"]

    @property
    def rollouts(self) -> list[Trajectory]:
        """All conversations: `.messages`, `.reward`, `.stop_reason` and every token."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def save(self, folder: str | Path) -> Path:
        """Write `metrics.json` and `rollouts.jsonl`. Returns the folder."""
        from verl_mt.trainer.inference import write_measured

        write_measured(self._found, Path(folder).expanduser())
        return Path(folder).expanduser()

    def __repr__(self) -> str:
        rates = {f"pass_at_{k}": self.metrics.get(f"val/pass_at_{k}") for k in (2, 4, 8, 16, 32, 64, 128)}
        facts = [f"accuracy {self.accuracy:.3f}", *(f"{k} {v:.3f}" for k, v in rates.items() if v is not None)]
        return f"Evaluation({len(self.groups)} prompts, {len(self.rollouts)} conversations: {', '.join(facts)})"


def evaluated(
    given: CallArguments,
    data: Any,
    keys: Mapping[str, Any],
    *,
    n: int | None = None,
    run: Run | None = None,
    model: str | None = None,
) -> Evaluation:
    """Sample rows as `python -m verl_mt.evaluate` does.

    Args:
        given: what else the call was given.
        data: the rows; None = the configuration's validation rows.
        keys: further keys, with `config_name` and `overrides` among them.
        n: samples per prompt; None = the configuration's.
        run: whose configuration and model it is; None = no run's.
        model: instead of the run's.

    Raises:
        VerlMTError: bad input, or not one conversation survived.
    """
    from verl_mt.trainer.inference import measure  # torch takes seconds

    keys = dict(keys)
    base, overrides = keys.pop("config_name", None), keys.pop("overrides", ())
    spec = None if data is None else given.rows("data.val_files", data)
    if spec is not None and not isinstance(spec, str):
        given.key("data.val_files", spec)
        spec, base = None, base or ("ppo_trainer" if model and run is None else None)
    given.keys(keys)
    given.overrides(overrides)
    if run is not None:
        model = model or str(run.model)
    named = argparse.Namespace(run=run and str(run.folder), trust=run is not None and run.trust)
    named.__dict__.update(config=base, config_path=None, model=model, data=spec, n=n, system=None, chat=False)
    with objects_given(given.objects):
        found = measure(config_of(named, given.words))
    if found.failure is not None:
        raise UserCodeError(f"nothing could be measured, all failed: {found.failure}")
    return Evaluation(found)


class Finding(Protocol):
    """One line of an examination: what was looked at, `ok`, `warning` or `error`, and what was found."""

    check: str
    status: str
    text: str


class Examination:
    """What the doctor found (docs/doctor.md). `print` shows the list."""

    def __init__(self, findings: Sequence[Finding]):
        self.findings = list(findings)

    @property
    def errors(self) -> list[str]:
        """What would end the run."""
        return [f"{f.check}: {f.text}" for f in self.findings if f.status == "error"]

    @property
    def warnings(self) -> list[str]:
        """What may be meant otherwise."""
        return [f"{f.check}: {f.text}" for f in self.findings if f.status == "warning"]

    @property
    def ok(self) -> bool:
        """No errors."""
        return not self.errors

    def __str__(self) -> str:
        text = io.StringIO()
        extension_function("show_findings")(self.findings, Console(file=text, width=120))
        return text.getvalue()

    __repr__ = __str__
