"""Numbers and rollouts reach the real trackers, a resumed run goes on in the same curves, and one that is down is said
once and stops nothing."""

from __future__ import annotations

import json
import logging
import posixpath
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_lab import NO_VALIDATION, fit, run_command
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.config.schema import TrainerConfig
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.rollout_table import COLUMNS
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.inspection.trackers.mlflow import mlflow_name
from verl_mt.extensions.inspection.trackers.tensorboard import as_written
from verl_mt.plugins import Registry
from verl_mt.trainer import tracking
from verl_mt.trainer.tracking import Background, TrackedRun, Tracker, build_trackers, require_trackers

FEW = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2")
CONFIG = {"trainer": {"seed": 0}, "reward": {"kwargs": {"api_key": "***"}}, "empty": {}}


def begin(folder: Path, *names: str, resume_step: int | None = None, **config):
    made = TrainerConfig(logger=list(names), **{"test_freq": 2, "log_val_generations": 2} | config)
    return build_trackers(made, TrackedRun(folder, "project", "name", CONFIG, resume_step))


def groups(*rewards: float) -> list[TrajectoryGroup]:
    made = [
        Trajectory(
            f"t{k}", "p", "g", f"t{k}", reward=r, stop_reason=StopReason.FINISHED,
            messages=[{"role": "user", "content": "<b>2+2</b> | *?*"}, {"role": "assistant", "content": "4\n# no"}],
        )
        for k, r in enumerate(rewards)
    ]  # fmt: skip
    return [TrajectoryGroup("g", "p", made)]


class Kept(Tracker):
    """Keeps what it is told."""

    def __init__(self, run: TrackedRun | None = None):
        self.run, self.seen = run, []

    def log(self, step, metrics):
        self.seen.append((step, metrics))

    def table(self, step, name, table):
        self.seen.append((step, name, len(table.rows)))

    def trajectories(self, step, groups):
        self.seen.append((step, "all", sum(len(g.trajectories) for g in groups)))

    def close(self, outcome):
        self.seen.append(outcome)


# ----------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("val/openai/gsm8k/accuracy", "val/openai/gsm8k/accuracy"),
        ("val/pass@8", "val/pass_at_8"),
        ("val//data/a+b.jsonl/accuracy", "val/data/a_b.jsonl/accuracy"),
        ("val/../accuracy", "val/__/accuracy"),
        ("tools/my tool: 1/calls", "tools/my tool: 1/calls"),
        ("/", "_"),
    ],
)
def test_a_metric_gets_a_name_that_mlflow_takes(name, taken):
    assert mlflow_name(name) == taken


@given(st.text(max_size=30))
def test_every_text_becomes_a_name_that_mlflow_takes(name):
    taken = mlflow_name(name)
    # MLflow's own two rules: these characters, and a path that normalises to itself.
    assert re.fullmatch(r"[/\w.\- :]+", taken)
    assert posixpath.normpath(taken) == taken and not taken.startswith(("..", "/")) and taken != "."


# ----------------------------------------------------------------------------------------------------------------------
# One interface


def test_a_tracker_of_ones_own_gets_numbers_tables_and_all_rollouts(tmp_path, monkeypatch):
    made = []

    def make(run):
        made.append(Kept(run))
        return made[0]

    monkeypatch.setattr(tracking, "trackers", Registry("tracker", {"mine": make}))
    found = begin(tmp_path, "console", "file", "mine")
    found.log(1, {"a": 1.0})
    found.rollouts(1, "train", groups(0, 1, 0.5))
    found.rollouts(2, "train", groups(0, 1, 0.5))
    found.rollouts(2, "val", groups(1))
    found.close("finished")
    assert made[0].run.config == CONFIG
    assert made[0].seen == [
        (1, {"a": 1.0}), (1, "all", 3),
        (2, "all", 3), (2, "train", 2), (2, "all", 1), (2, "val", 1), "finished",
    ]  # fmt: skip
    assert found.failures() == {}


def test_a_tracker_by_its_dotted_path(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl_mt.trainer.tracking import Tracker\n"
        "class Last(Tracker):\n"
        "    def __init__(self, run): self.file = run.folder / 'last.txt'\n"
        "    def log(self, step, metrics): self.file.write_text(f'{step} {metrics}')\n"
    )
    name = f"{tmp_path}/mine.py:Last"
    require_trackers([name])
    found = begin(tmp_path, name)
    found.log(3, {"a": 1.0})
    found.close("finished")
    assert (tmp_path / "last.txt").read_text() == "3 {'a': 1.0}"


def test_an_unknown_tracker_is_refused_with_what_there_is():
    with pytest.raises(PluginError, match=r"'wandbb'; did you mean 'wandb'.*Registered: mlflow, tensorboard, wandb"):
        require_trackers(["console", "wandbb"])


@pytest.mark.slow
def test_a_service_is_imported_when_a_run_names_it_and_not_before(tmp_path):
    program = (
        "import sys; from verl_mt.trainer.tracking import require_trackers\n"
        "def loaded(): return sorted(name for name in sys.modules if '.inspection.trackers.' in name)\n"
        "before = loaded()\n"
        "require_trackers(['console', 'tensorboard'])\n"
        "print(before, loaded())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['verl_mt.extensions.inspection.trackers.tensorboard']"


def test_without_tables_and_without_trackers_nothing_is_made(tmp_path, monkeypatch):
    kept = Kept()
    monkeypatch.setattr(tracking, "trackers", Registry("tracker", {"kept": lambda run: kept}))
    found = begin(tmp_path, "kept", log_val_generations=0)
    found.rollouts(2, "val", groups(1))
    found.close("stopped")
    assert kept.seen == [(2, "all", 1), "stopped"]
    assert begin(tmp_path, "console").failures() == {}


# ----------------------------------------------------------------------------------------------------------------------
# A tracker that goes down


class Down(Tracker):
    def log(self, step, metrics):
        raise ConnectionError(f"no route to http://me:hunter2@host, step {step}")


def test_one_that_goes_down_is_counted_and_said_once_without_its_password(caplog):
    tracker = Background(Down(), "down")
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log(step, {"a": 0.0})
        tracker.close("finished")
    assert tracker.failures == 5
    (said,) = [r.getMessage() for r in caplog.records]
    assert "down" in said and "no route" in said and "step 0" in said and "hunter2" not in said


def test_one_that_hangs_holds_nobody_up(caplog):
    release = threading.Event()

    class Hangs(Tracker):
        def log(self, step, metrics):
            release.wait()

    tracker = Background(Hangs(), "hangs", capacity=3, patience_s=0.05)
    for step in range(10):
        tracker.log(step, {})
    assert tracker.failures >= 6  # one in the thread's hands, three that wait
    tracker.close("finished")
    release.set()
    assert "were not written" in caplog.text


def test_one_that_cannot_begin_is_refused_in_a_new_run_and_left_out_of_a_resumed_one(tmp_path, monkeypatch, caplog):
    def broken(run):
        raise ConnectionError("no route")

    monkeypatch.setattr(tracking, "trackers", Registry("tracker", {"broken": broken}))
    with pytest.raises(ConfigError, match=r"tracker broken could not begin: .*no route\. .*leave it out"):
        begin(tmp_path, "broken")
    found = begin(tmp_path, "broken", resume_step=4)
    found.log(5, {"a": 0.0})
    found.close("finished")
    assert "tracker broken could not go on" in caplog.text


@pytest.mark.slow
def test_a_run_survives_a_tracker_that_goes_down_and_counts_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl_mt.trainer.tracking import Tracker\n"
        "class Down(Tracker):\n"
        "    def __init__(self, run): pass\n"
        "    def log(self, step, metrics): raise OSError('gone')\n"
        "    def close(self, outcome): raise OSError('gone')\n"
    )
    lines = fit(tmp_path / "run", *NO_VALIDATION, f"trainer.logger=[{tmp_path}/mine.py:Down]", *FEW)
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2, 3]
    assert lines[-1]["trackers/Down/failures"] >= 1
    assert "trackers/Down/failures" not in lines[0]


# ----------------------------------------------------------------------------------------------------------------------
# TensorBoard


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(e.step, e.value) for e in found.Scalars(tag)]


def texts(folder: Path, tag: str) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return [e.tensor_proto.string_val[0].decode() for e in found.Tensors(f"{tag}/text_summary")]


@pytest.mark.slow
def test_tensorboard_draws_curves_and_shows_rollouts_as_written(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    # The writers' number in the names: a run and its resume in one second would stand in the wrong order.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    found = begin(tmp_path, "tensorboard")
    for step in (1, 2, 3):
        found.log(step, {"reward/mean": step / 10})
    found.rollouts(2, "val", groups(0.0, 1.0))
    found.close("stopped")
    resumed = begin(tmp_path, "tensorboard", resume_step=1)
    resumed.log(2, {"reward/mean": 7.0})
    resumed.close("finished")
    assert scalars(tmp_path, "reward/mean") == [(1, pytest.approx(0.1)), (2, 7.0)]
    assert "api_key: '***'" in texts(tmp_path, "config")[0]
    (shown,) = texts(tmp_path, "rollouts/val")
    # A block of code: the page renders nothing of what a model or a tool wrote.
    assert "    <b>2+2</b> | *?*" in shown and "    # no" in shown and shown.count("**step 2") == 2


@given(st.text(max_size=60))
def test_every_line_of_a_text_stays_inside_its_block_of_code(text):
    assert all(line.startswith("    ") for line in as_written(text).splitlines())


# ----------------------------------------------------------------------------------------------------------------------
# W&B


def wandb_records(folder: Path, patience_s: float = 60.0) -> list:
    """What the offline runs of a folder hold, oldest first. W&B's own process writes them, and may not be done with the
    last one when the run is finished here."""
    deadline = time.monotonic() + patience_s
    while True:
        found = [_records_of(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
        if all(records and records[-1].WhichOneof("record_type") == "exit" for records in found):
            return [record for records in found for record in records]
        assert time.monotonic() < deadline, f"a run under {folder} has no end"
        time.sleep(0.05)


def _records_of(file: Path) -> list:
    """LevelDB's log format, with a header of 7 bytes; what is written in part is left out."""
    from wandb.proto import wandb_internal_pb2

    found = []
    data, place, part = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if place + 7 + length > len(data):
            break
        part, place = part + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def history(records: list) -> list[dict[str, object]]:
    lines = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in line.item} for line in lines]


@pytest.fixture
def wandb_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'verl_mt[wandb]')")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.mark.slow
def test_wandb_offline_holds_curves_tables_and_the_config_under_one_id(tmp_path, wandb_offline):
    found = begin(tmp_path, "wandb")
    for step in (1, 2, 3):
        found.log(step, {"reward/mean": step / 10})
    found.rollouts(2, "val", groups(0.0, 1.0))
    found.close("stopped")
    resumed = begin(tmp_path, "wandb", resume_step=1)
    resumed.log(2, {"reward/mean": 7.0})
    resumed.close("finished")
    assert found.failures() == resumed.failures() == {}

    records = wandb_records(tmp_path)
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {r.run_id for r in runs} == {(tmp_path / ".wandb_id").read_text()}
    assert {r.project for r in runs} == {"project"} and {r.display_name for r in runs} == {"name"}
    config = {u.key: json.loads(u.value_json) for u in runs[0].config.update}
    assert config["reward"] == {"kwargs": {"api_key": "***"}}
    points = [(line["trainer/step"], line["reward/mean"]) for line in history(records) if "reward/mean" in line]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (2, 7.0)]
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [255, 0]
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts/*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(COLUMNS) and [row[3] for row in table["data"]] == [0.0, 1.0]
    assert "<b>2+2</b>" in table["data"][0][-1]


@pytest.mark.slow
def test_a_whole_run_with_wandb_offline_and_no_secret_in_its_files(tmp_path, wandb_offline):
    reward = tmp_path / "score.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info, **kw): return 1.0\n")
    done = run_command(
        tmp_path, f"reward.path={reward}", "reward.kwargs={api_key:sk-very-secret}", "trainer.logger=[wandb,console]",
        "trainer.total_training_steps=1", "trainer.default_local_dir=run", *FEW,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = wandb_records(tmp_path / "run")
    steps = [line["trainer/step"] for line in history(records) if "reward/mean" in line]
    assert steps == [1]
    leaks = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"sk-very-secret" in p.read_bytes()]
    assert leaks == []


# ----------------------------------------------------------------------------------------------------------------------
# MLflow


@pytest.fixture
def mlflow_store(monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'verl_mt[mlflow]')")
    pytest.importorskip("sqlalchemy", reason="MLflow's local store needs sqlalchemy (pip install 'verl_mt[mlflow]')")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.chdir(tmp_path)  # artifacts go to ./mlruns


@pytest.mark.slow
def test_mlflow_holds_curves_tables_and_the_config_in_one_run(tmp_path, mlflow_store):
    from mlflow import MlflowClient

    found = begin(tmp_path, "mlflow")
    for step in (1, 2):
        found.log(step, {"val/pass@8": step / 10, "bad": float("nan")})
    found.rollouts(2, "val", groups(0.0, 1.0))
    found.close("stopped")
    assert found.failures() == {}
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.info.status == "KILLED" and run.info.run_name == "name"

    resumed = begin(tmp_path, "mlflow", resume_step=1)
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    resumed.log(2, {"val/pass@8": 7.0})
    resumed.close("finished")
    assert resumed.failures() == {}
    (run,) = client.search_runs([run.info.experiment_id])
    assert run.info.status == "FINISHED"
    points = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "val/pass_at_8")]
    assert points == [(1, 0.1), (2, 0.2), (2, 7.0)]
    assert run.data.params == {"trainer.seed": "0", "reward.kwargs.api_key": "***", "empty": "{}"}
    shown = Path(client.download_artifacts(run.info.run_id, "rollouts/val_000002.json")).read_text()
    assert json.loads(shown)["columns"] == list(COLUMNS) and "2+2" in shown
    assert "***" in Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text()


@pytest.mark.slow
def test_mlflow_whose_server_is_away_is_refused_at_the_start(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'verl_mt[mlflow]')")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match="tracker mlflow could not begin"):
        begin(tmp_path, "mlflow")
    assert not (tmp_path / ".mlflow_id").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_said_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'verl_mt\[{name}\]'"):
        require_trackers([name])
