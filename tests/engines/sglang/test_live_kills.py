"""Replicas, ranks and machines that are killed in each phase of a step: two nodes of a Ray cluster on this machine, on
each a rank of the worker group with a real engine beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from live import ROLLOUT, metrics_of, processes_of_group, rows_of, words_of
from ray_machines import disconnect
from warm_start import parent_of

from verl_mt.config.compose import compose
from verl_mt.errors import WorkerError
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
from verl_mt.extensions.inspection import prompt_log
from verl_mt.trainer import checkpoint, restarts
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.ppo_trainer import PPOTrainer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]
SGLANG, VLLM = pytest.mark.sglang, (pytest.mark.vllm, pytest.mark.release)
PROMPTS, SAMPLES = 4, 4
SMALL = [
    f"data.train_batch_size={PROMPTS}", "data.val_files=null", "trainer.logger=[console]", "trainer.num_threads=1",
    "trainer.export_at_end=False", "actor_rollout_ref.actor.skip_zero_advantage=False",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}", ROLLOUT + f"n={SAMPLES}",
    ROLLOUT + "response_length=32", "data.train_max_samples=64",
]  # fmt: skip
"""Two optimizer steps in each training step, whatever was sampled."""
ON_TWO_NODES = [
    "trainer.placement=ray", "trainer.nnodes=2", "trainer.n_workers_per_node=1", "trainer.device=cpu",
    ROLLOUT + "max_num_seqs=32",
    ROLLOUT + "num_workers=0",  # the phases are calls in this process
]  # fmt: skip
PHASES = {
    "rollout": ("engine", "generate"),
    "release": ("engine", "release_memory"),
    "update": ("workers", "update"),
    "sync": ("workers", "publish"),
    "resume": ("engine", "resume_memory"),
}
"""Phase of a step -> part of the trainer and its call, at whose beginning somebody is killed. `publish` is called
when every engine has been told that an update begins."""
WITHOUT_MEMORY = ("rollout", "update", "sync")
"""Phases with an engine that keeps its memory, as vLLM does."""


@dataclass
class Nodes:
    """The cluster's second node can be lost, and comes back."""

    cluster: object
    second: object
    arguments: dict

    @classmethod
    def make(cls) -> Nodes:
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 2, "object_store_memory": 200 * 1024 * 1024}
        cluster = Cluster(initialize_head=True, head_node_args=arguments)
        nodes = cls(cluster, cluster.add_node(**arguments), arguments)
        cluster.wait_for_nodes()
        return nodes

    def processes(self) -> set[int]:
        """Workers of the second node."""
        raylet = self.second.all_processes["raylet"][0].process.pid
        started = set(children_of({raylet}))
        return started | set(children_of(started))  # what the raylet starts asks for the fork that is the worker

    def lose(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def bring_back(self) -> None:
        self.second = self.cluster.add_node(**self.arguments)
        self.cluster.wait_for_nodes()


def children_of(parents: set[int]) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if parent_of(pid) in parents:
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def two_nodes():
    disconnect()
    nodes = Nodes.make()
    yield nodes
    disconnect()
    nodes.cluster.shutdown()


@pytest.fixture
def trainer_of(two_nodes, tmp_path, monkeypatch):
    """Makes a trainer of the same run as before, with the engine `make.engine`; the last one is ended with the test."""
    monkeypatch.setenv("RAY_ADDRESS", two_nodes.cluster.address)
    # Device memory changes hands as on a GPU; SGLang accepts the calls on a CPU.
    make_engine, made = SGLangEngine.__init__, []

    def as_on_a_gpu(engine, options):
        make_engine(engine, options)
        engine.capabilities = replace(engine.capabilities, frees_memory=True)

    monkeypatch.setattr(SGLangEngine, "__init__", as_on_a_gpu)

    def make(*overrides: str) -> PPOTrainer:
        words = [*SMALL, *ON_TWO_NODES, *words_of(make.engine), f"trainer.default_local_dir={tmp_path / 'run'}"]
        made.append(build_trainer(compose([*words, *overrides])))
        return made[-1]

    make.engine = "sglang"
    yield make
    for trainer in made:
        trainer.close()


def before(owner: object, name: str, do: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
    """Call `do` at the beginning of each call of `owner.name`, and `after` at its end."""
    original = getattr(owner, name)

    async def awaited(*args):
        do()
        result = await original(*args)
        after()
        return result

    def called(*args):
        do()
        result = original(*args)
        after()
        return result

    setattr(owner, name, awaited if asyncio.iscoroutinefunction(original) else called)


@dataclass
class Killer:
    """Kills once in each of the steps that are planned."""

    trainer: PPOTrainer
    plan: dict[int, str]
    """Finished steps -> phase."""
    kill: Callable[[], None]
    late: str = ""
    """A phase in which it kills at the end of the call."""
    phases: Mapping[str, tuple[object, str]] | None = None
    """Others than `PHASES`, with the parts themselves."""
    calls: Counter = field(default_factory=Counter)
    killed: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = {phase: (getattr(self.trainer, owner), name) for phase, (owner, name) in PHASES.items()}
        for phase, (owner, name) in (self.phases or named).items():
            at = partial(self.at, phase)
            before(owner, name, *([lambda: None, at] if phase == self.late else [at]))

    def at(self, phase: str) -> None:
        step = self.trainer.step_number
        self.calls[step, phase] += 1
        # In the rollout when others are being sampled.
        if self.plan.get(step) == phase and self.calls[step, phase] == (6 if phase == "rollout" else 1):
            self.killed.append((step, phase))
            self.kill()


def hold_rollout(engine: SGLangEngine, killer: Killer) -> None:
    """Once somebody was killed, the turns that are left take an hour."""
    generate = engine.generate

    async def for_an_hour(request):
        output = await generate(request)
        await asyncio.sleep(3600.0 if killer.killed else 0.0)
        return output

    engine.generate = for_an_hour


def wait_until_gone(pids: list[int], groups: list[int], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while left := [p for p in pids if Path(f"/proc/{p}").exists()] + [p for g in groups for p in processes_of_group(g)]:
        assert time.monotonic() < deadline, f"processes outlive the run: {left}"
        time.sleep(0.1)


def assert_each_step_once(run: Path, num_steps: int) -> None:
    """In the metrics, and each trajectory of each step in its rollouts, sampled with the weights of then."""
    steps, rows = metrics_of(run), rows_of(run)
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    assert max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4
    assert [step["rollout/aborted"] for step in steps] == [0] * num_steps
    assert len(rows) == num_steps
    for number, of_step in enumerate(rows):
        assert {row["step"] for row in of_step} == {number + 1}
        prompts = {row["prompt_id"] for row in of_step}
        expected = [f"{prompt}.{n:02d}" for prompt in prompts for n in range(SAMPLES)]
        assert len(prompts) == PROMPTS and sorted(row["trajectory_id"] for row in of_step) == sorted(expected)
        records = [record for row in of_step for record in row["records"]]
        versions = {v for r in records for v, sampled in zip(r["policy_versions"], r["sampled"]) if sampled}
        assert versions == {number}


def losses(*every_commit: object, release: tuple[object, ...], vllm: tuple[object, ...]) -> list:
    """(engine, loss). Each loss costs a minute: every commit gets one of each kind, a release all of them."""
    return [
        *(pytest.param("sglang", value, marks=SGLANG, id=f"sglang {name_of(value)}") for value in every_commit),
        *(
            pytest.param("sglang", value, marks=(SGLANG, pytest.mark.release), id=f"sglang {name_of(value)}")
            for value in release
        ),
        *(pytest.param("vllm", value, marks=VLLM, id=f"vllm {name_of(value)}") for value in vllm),
    ]


def name_of(loss: object) -> str:
    return " ".join(loss) if isinstance(loss, tuple) else str(loss)


@pytest.mark.parametrize(("name", "phases"), losses(("sync",), release=(tuple(PHASES),), vllm=(WITHOUT_MEMORY,)))
def test_a_replica_that_is_killed_in_any_phase_comes_back_and_each_step_is_trained_once(
    trainer_of, tmp_path, name, phases
):
    """And in the end the process that holds an engine alone, while the engine hangs: it would keep its device."""
    trainer_of.engine, last = name, len(phases) + 1
    plan = {**dict(enumerate(phases, start=1)), last: "rollout"}
    trainer = trainer_of(f"trainer.total_training_steps={last + 2}", "trainer.save_freq=-1")
    lives: list[list[int]] = []

    def kill():
        lives.append(trainer.engine.pids)
        engine = lives[-1][len(lives) % 2]
        if trainer.step_number == last:
            os.killpg(engine, signal.SIGSTOP)
        os.kill(parent_of(engine) if trainer.step_number == last else engine, signal.SIGKILL)

    killer = Killer(trainer, plan, kill)
    try:
        trainer.fit()
        wait_until_gone([], [pid for pids in lives for pid in pids])
    finally:
        for group in {pid for pids in lives for pid in pids if processes_of_group(pid)}:
            os.killpg(group, signal.SIGKILL)
    assert killer.killed == list(plan.items())
    assert_each_step_once(tmp_path / "run", last + 2)
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["engine/restarts"] == len(plan) and lines[-1]["rollout/replicas"] == 2
    assert sum(line["actor/num_updates"] for line in lines) == 2 * (last + 2)


UPDATING, PUBLISHING = "updating the policy", "publishing weights to the engines"
# A release that takes its time is itself the place where the loss is noticed.
DOING = {"rollout": "waiting for the rollout", "release": f"({UPDATING}|{PUBLISHING})", "update": UPDATING}


LOST = {
    "both": {"update": "rank", "resume": "node"},
    "ranks": dict.fromkeys(PHASES, "rank"),
    "nodes": dict.fromkeys(PHASES, "node"),
    "ranks without memory": dict.fromkeys(WITHOUT_MEMORY, "rank"),
    "nodes without memory": dict.fromkeys(WITHOUT_MEMORY, "node"),
}
"""Who is lost in which phase, one after the other. The run that goes on by itself loses a machine in the rollout."""


@pytest.mark.parametrize(
    ("name", "plan"), losses(release=("both", "ranks", "nodes"), vllm=("ranks without memory", "nodes without memory"))
)
def test_a_run_that_loses_one_in_each_phase_goes_on_from_its_checkpoints(trainer_of, two_nodes, tmp_path, name, plan):
    """Memory is resumed in a step, where a rank is killed, and before a run goes on from its checkpoint, where the
    machine is lost."""
    trainer_of.engine, steps, run = name, len(LOST[plan]) + 1, tmp_path / "run"
    words = [f"trainer.total_training_steps={steps}", "trainer.save_freq=1"]
    for number, (phase, who) in enumerate(LOST[plan].items()):
        if (who, phase) == ("node", "resume"):
            lose_while_it_resumes(two_nodes, partial(trainer_of, *words))
            continue
        lose_one(trainer_of(*words), two_nodes, run, (number, phase, who))
    trainer_of(*words).fit()
    assert_each_step_once(run, steps)
    assert checkpoint.load(run / "checkpoints" / f"step_{steps:06d}")["workers"]["actor"]["num_updates"] == 2 * steps
    assert_same_rows_and_rates(run, tmp_path / "straight", words)


def lose_one(trainer: PPOTrainer, two_nodes: Nodes, run: Path, planned: tuple[int, str, str]) -> None:
    """`planned`: the steps that are finished, the phase of the step after the next one, who is lost in it."""
    number, phase, who = planned
    assert trainer.step_number == number
    engines, ranks = trainer.engine.pids, trainer.workers.worker_pids
    there = two_nodes.processes()
    (lost,) = [rank for rank, pid in enumerate(ranks) if pid in there]
    kill = two_nodes.lose if who == "node" else partial(os.kill, ranks[lost], signal.SIGKILL)
    # A machine, when the weights have come to its engine, and no rank is asked for anything any more.
    killer = Killer(trainer, {number + 1: phase}, kill, late="sync" if who == "node" else "")
    hold_rollout(trainer.engine, killer)
    with pytest.raises(WorkerError) as error:
        trainer.fit()
    # What is lost when all have their weights is noticed by what comes next; the step may be finished by then.
    late = killer.late == phase
    doing = ".*" if late else DOING.get(phase, PUBLISHING)
    assert re.match(rf"rank {lost} \(process {ranks[lost]} on .*\) of 2 died while {doing};", str(error.value))
    assert str(error.value).endswith("The same command goes on from the run's last checkpoint")
    assert killer.killed == [(number + 1, phase)] and len(metrics_of(run)) in (number + 1, number + 1 + late)
    wait_until_gone(ranks, engines)
    if who == "node":
        two_nodes.bring_back()


def lose_while_it_resumes(two_nodes: Nodes, make: Callable[[], PPOTrainer]) -> None:
    """The second node, when a checkpoint's weights are on their way to the engines."""
    workers: list[int] = []
    engines: list[int] = []

    def lose():
        workers.extend(two_nodes.processes())
        engines.extend(set(children_of(set(workers))) - set(workers))
        two_nodes.lose()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGLangEngine, "resume_memory", SGLangEngine.resume_memory)  # so that it is undone
        before(SGLangEngine, "resume_memory", lose)
        with pytest.raises(WorkerError, match=rf"rank \d .*died while {PUBLISHING};"):
            make()
    assert len(engines) == 1
    wait_until_gone(workers, engines)
    two_nodes.bring_back()


@pytest.mark.parametrize(("name", "who"), losses(release=("machine", "engine"), vllm=("machine",)))
def test_a_run_that_loses_a_machine_or_every_life_of_an_engine_goes_on_by_itself(
    trainer_of, two_nodes, tmp_path, monkeypatch, capfd, name, who
):
    """`trainer.max_restarts`; the machine comes back when the run has begun to wait for it. And the policy's weights
    leave the device during rollouts, so that each checkpoint makes the engines give their memory back."""
    run, steps, build, lives = tmp_path / "run", 3, restarts.build_trainer, []
    words = [
        f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.max_restarts=1",
        "trainer.worker_timeout_s=300", "actor_rollout_ref.actor.param_offload=True",
        f"trainer.default_local_dir={run}",
    ]  # fmt: skip
    ended = threading.Event()

    say, times = restarts._say, []

    def say_and_bring_back(text):
        say(text)
        times.append(text.startswith("waiting for machines"))
        if sum(times) == 2 and times[-1]:
            two_nodes.bring_back()

    def kill_every_life():
        while not ended.wait(0.5):
            for pid in lives[0].engine.pids[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def build_and_plan(*args, **kwargs):
        ended.set()
        lives.append(build(*args, **kwargs))
        if len(lives) == 1:
            ended.clear()
            kill = two_nodes.lose if who == "machine" else threading.Thread(target=kill_every_life).start
            killer = Killer(lives[0], {1: "rollout"}, kill)
            if who == "machine":
                hold_rollout(lives[0].engine, killer)
        return lives[-1]

    monkeypatch.setattr(restarts, "build_trainer", build_and_plan)
    monkeypatch.setattr(restarts, "_LOOK_EVERY_S", 2.0)
    monkeypatch.setattr(restarts, "_say", say_and_bring_back)
    trainer = restarts.run_to_the_end(compose([*SMALL, *ON_TWO_NODES, *words_of(name), *words]))
    assert len(lives) == 2 and trainer is lives[1] and trainer.step_number == steps
    said = capfd.readouterr().err
    assert "restart 1 of 1: " in said and ("waiting for machines: " in said) == (who == "machine")
    assert_each_step_once(run, steps)
    found = prompt_log.examine(run)
    assert (
        found.summary()
        == f"{steps * PROMPTS} drawn, {steps * PROMPTS} trained, 0 left out, 0 open, 0 missing, 0 double"
    )


def assert_same_rows_and_rates(run: Path, straight: Path, words: list[str]) -> None:
    """As of a run that nothing happened to: prompts, number of optimizer steps and learning rate of each step."""
    build_trainer(compose([*SMALL, *words, f"trainer.default_local_dir={straight}"])).fit()
    for one, other in zip(metrics_of(run), metrics_of(straight), strict=True):
        assert [one[k] for k in ("actor/num_updates", "actor/lr")] == [
            other[k] for k in ("actor/num_updates", "actor/lr")
        ]
    for one, other in zip(rows_of(run), rows_of(straight), strict=True):
        assert {r["prompt_id"]: r["row_index"] for r in one} == {r["prompt_id"]: r["row_index"] for r in other}
