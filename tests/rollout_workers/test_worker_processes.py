"""Conversations in other processes: the same bits, and nothing lost or counted twice when one of them is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import deadly
import pytest
from command_lab import SMALL, calculator_yaml, metrics_of
from worker_lab import say

from verl_mt.config.compose import compose
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, PluginError, WorkerError
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.inference import Inference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_workers")]  # processes that load a tokenizer

RO = "actor_rollout_ref.rollout"
COUNTS = ("rollout/worker_restarts", "rollout/groups_restarted")


def trained(folder: Path, num_workers: int, engine: ScriptedEngine) -> tuple[list[dict], list]:
    run = folder / f"{num_workers}"
    more = ["trainer.deterministic=True", "trainer.logger=[]", "trainer.export_at_end=False"]
    more += ["data.train_batch_size=3", f"{RO}.n=2", "trainer.total_training_steps=2"]
    config = compose([*SMALL, *more, f"{RO}.num_workers={num_workers}", f"trainer.default_local_dir={run}"])
    trainer = build_trainer(config, engine=engine)
    seen: list[Trajectory] = []
    update = trainer.sampler.update
    trainer.sampler.update = lambda groups: (update(groups), seen.extend(t for g in groups for t in g.trajectories))
    trainer.fit()
    lines = [{k: v for k, v in line.items() if k not in COUNTS} for line in metrics_of(run)]
    return lines, [told(t) for t in seen]


def told(t: Trajectory) -> dict:
    """All of a trajectory but the times."""
    counters = {name: value for name, value in t.counters.items() if "latency" not in name}
    calls = [{k: v for k, v in call.items() if k != "latency_s"} for call in t.tool_calls]
    records = [{k: list(v) if hasattr(v, "__len__") else v for k, v in vars(r).items()} for r in t.records]
    return vars(t) | {"time_spans": [], "counters": counters, "tool_calls": calls, "records": records}


@pytest.mark.timeout(600)
def test_numbers_and_rows_are_the_same_with_0_1_and_2_workers(tmp_path):
    lines, trajectories = trained(tmp_path, 0, ScriptedEngine(say))
    assert any(line.get("tools/calculator/calls") for line in lines) and any(t["reward"] for t in trajectories)
    for num_workers in (1, 2):
        assert trained(tmp_path, num_workers, ScriptedEngine(say)) == (lines, trajectories)


@pytest.fixture(scope="module")
def pooled(warm_workers, tmp_path_factory):
    """Two workers under a tool and a reward that kill their process on demand."""
    folder = tmp_path_factory.mktemp("deadly")
    os.environ[deadly.FOLDER] = str(folder)
    file = Path(deadly.__file__)
    tools = calculator_yaml(folder, f"{file}:DeadlyCalculator")
    config = compose([
        f"{RO}.num_workers=2", f"{RO}.tool_kwargs.tools_config_file={tools}",
        f"external_plugins=[{file}]", f"reward.path={file}", "data.val_max_samples=12", f"{RO}.response_length=64",
    ])  # fmt: skip
    with Inference(config, engine=ScriptedEngine(say)) as inference:
        yield inference, folder
    del os.environ[deadly.FOLDER]


def rolled_out(inference: Inference, name: str, *, evaluation: bool = False) -> list[dict]:
    inference.stream.start(RolloutPlan(inference.prompts(), 3, "same", evaluation=evaluation))
    groups = inference.stream.collect("same", lambda: None)
    trajectories = [told(t) for g in groups for t in g.trajectories]
    assert len(groups) == 12 and len({t["trajectory_id"] for t in trajectories}) == 36
    return trajectories


@pytest.fixture(scope="module")
def expected(pooled):
    return rolled_out(pooled[0], "first")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phase", "evaluation"),
    [
        ("tool", False),
        ("reward", True),
        ("sending", False),
        pytest.param("tool", True, marks=pytest.mark.release),
        pytest.param("reward", False, marks=pytest.mark.release),
        pytest.param("sending", True, marks=pytest.mark.release),
    ],
)
def test_a_worker_that_dies_costs_its_unfinished_groups_and_each_comes_once(pooled, expected, phase, evaluation):
    inference, folder = pooled
    wait_until(lambda: all(inference.stream.pool.pids))
    before = inference.stream.metrics()
    inference.runner.context.sanity.metrics()
    (folder / phase).touch()
    assert rolled_out(inference, phase, evaluation=evaluation) == expected
    assert not (folder / phase).exists()
    after = inference.stream.metrics()
    restarts, groups = (after[name] - before[name] for name in COUNTS)
    assert restarts == 1 and 1 <= groups <= 6
    sanity = inference.runner.context.sanity
    observed = sum(counts.observed for counts in sanity._counts.values())
    assert observed == 36, "each is counted once, those of the lost groups too"
    sanity.metrics()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.release)])
def test_an_idle_worker_that_is_killed_costs_nothing(pooled, expected, number):
    """By SIGKILL, from outside."""
    inference, _ = pooled
    pool = inference.stream.pool
    before = pool.metrics()
    wait_until(lambda: all(pool.pids))
    os.kill(pool.pids[number], signal.SIGKILL)
    assert rolled_out(inference, "idle") == expected
    after = pool.metrics()
    assert after[COUNTS[0]] - before[COUNTS[0]] == 1 and after[COUNTS[1]] - before[COUNTS[1]] in range(7)


def wait_until(so) -> None:
    while not so():
        time.sleep(0.05)


KILLER = """
import os, signal
def compute_score(solution_str, ground_truth, extra_info=None):
    if CONDITION:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def with_killer(tmp_path, condition: str, num_rows: int):
    (tmp_path / "killer.py").write_text(KILLER.replace("CONDITION", condition))
    return compose([f"{RO}.num_workers=1", f"reward.path={tmp_path / 'killer.py'}", f"data.val_max_samples={num_rows}"])


@pytest.mark.timeout(600)
def test_a_row_that_ends_its_workers_fails_alone(tmp_path, caplog):
    config = with_killer(tmp_path, "extra_info['index'] == 2", 5)
    with Inference(config, engine=ScriptedEngine(say)) as inference:
        inference.stream.start(RolloutPlan(inference.prompts(), 2, "some", greedy_too=True))
        groups = {g.prompt_id: g for g in inference.stream.collect("some", lambda: None)}
        counts = inference.stream.metrics()
    assert len(groups) == 5 and counts[COUNTS[0]] == 3
    (failed,) = [g for g in groups.values() if any(t.status == "failed" for t in g.trajectories)]
    assert [t.status for t in failed.trajectories] == ["failed"] * 2 and failed.row_index == 2
    assert all(f"ended while they had {failed.prompt_id} (" in t.error for t in failed.trajectories)
    assert caplog.text.count("The group counts as failed") == 1
    others = [t for g in groups.values() if g is not failed for t in g.trajectories]
    assert [t.reward for t in others] == [1.0] * 8


@pytest.mark.timeout(600)
def test_where_one_group_after_the_other_ends_its_workers_the_run_ends(tmp_path):
    config = with_killer(tmp_path, "True", 4)
    with Inference(config, engine=ScriptedEngine(say)) as inference, pytest.raises(WorkerError) as raised:
        inference.roll_out(inference.prompts())
    assert "3 rollout workers ended while they had inference.0000" in str(raised.value)
    assert "3 groups in a row failed like this" in str(raised.value)


@pytest.mark.timeout(600)
def test_what_a_worker_cannot_make_stops_the_start(tmp_path):
    """A reward that is registered in the script that starts the run, and in no plug-in."""
    config = compose([f"{RO}.num_workers=1", "data.val_max_samples=1", f"reward.path={tmp_path / 'lost.py'}"])
    (tmp_path / "lost.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}\n"
        "def compute_score(solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    with pytest.raises(PluginError, match=r"lost\.py failed to import"):
        Inference(config, engine=ScriptedEngine(say))


def test_a_deterministic_run_whose_engine_must_sample_in_the_trainers_process_is_refused(tmp_path):
    config = compose(
        [*SMALL, "trainer.deterministic=True", f"{RO}.num_workers=2", f"trainer.default_local_dir={tmp_path}"]
    )
    with pytest.raises(ConfigError, match="would depend on when they come from several processes"):
        build_trainer(config)


@pytest.mark.timeout(600)
def test_requests_for_an_engine_of_the_trainers_process_come_to_it(tmp_path):
    """The local engine samples from the trainer's own weights: of each update, in this process."""
    run = tmp_path / "run"
    config = compose([
        *SMALL, f"{RO}.num_workers=1", "trainer.logger=[]", "trainer.export_at_end=False", "data.val_files=null",
        f"trainer.default_local_dir={run}", "trainer.total_training_steps=2",
    ])  # fmt: skip
    trainer = build_trainer(config)
    versions: list[set[int]] = []
    update = trainer.sampler.update
    trainer.sampler.update = lambda groups: (
        update(groups),
        versions.append({int(v) for g in groups for t in g.trajectories for r in t.records for v in r.policy_versions}),
    )
    trainer.fit()
    assert versions == [{-1, 0}, {-1, 1}]
    assert all(line["rollout/logprob_diff_max"] < 1e-3 for line in metrics_of(run))
    # A tiny model samples for more than the 50 ms after which the worker has looked at its loop.
    assert all(0 <= line["rollout/event_loop_lag_p99_ms"] < 60_000 for line in metrics_of(run))


def test_a_script_that_counts_arrivals_stays_where_they_are_counted():
    assert ScriptedEngine(say).branch() is not None
    assert ScriptedEngine([([1], "a")]).branch() is None
    assert ScriptedEngine(say, fail_at=(2,)).branch() is None
    assert ScriptedEngine(lambda request: ([1], "a")).branch() is None, "a lambda cannot be pickled"
