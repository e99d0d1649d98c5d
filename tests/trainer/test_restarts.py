"""`trainer.max_restarts`: a run that loses a process goes on by itself, as the same command would."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from command_lab import VARIED
from tables import before_release

from verl_mt.config.compose import compose
from verl_mt.errors import CollapseError, ConfigError, EngineGoneError, NoRoomError, UserCodeError, WorkerError
from verl_mt.extensions.inspection import prompt_log
from verl_mt.trainer import restarts
from verl_mt.trainer.ppo_trainer import PPOTrainer
from verl_mt.trainer.restarts import run_to_the_end
from verl_mt.trainer.rollout_source import RolloutSource

STEPS = 2
SMALL = [
    "data.train_batch_size=2", "data.train_max_samples=16", "data.val_max_samples=1", "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=16", "actor_rollout_ref.rollout.temperature=3", VARIED,
    f"trainer.total_training_steps={STEPS}", "trainer.logger=[]", f"trainer.test_freq={STEPS}",
    "trainer.deterministic=True", "trainer.num_threads=1", "trainer.save_freq=1",
]  # fmt: skip


def config(folder, *overrides):
    return compose([*SMALL, f"trainer.default_local_dir={folder}", *overrides])


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


BESIDE_IT = pytest.mark.xdist_group("undisturbed")
"""One process makes that run."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run_to_the_end(config(folder))
    return folder


@pytest.fixture
def fails(monkeypatch):
    """`fails(error, ...)`: the updates of these numbers, counted over all lives, raise; `lives` are the trainers."""
    lives: list[PPOTrainer] = []

    def plant(errors, at="step"):
        original, build = getattr(PPOTrainer, at), restarts.build_trainer
        calls = iter(range(100))

        def failing(self, *args):
            if (error := errors.get(next(calls))) is not None:
                raise error
            return original(self, *args)

        def remembered(*args, **kwargs):
            lives.append(build(*args, **kwargs))
            return lives[-1]

        monkeypatch.setattr(PPOTrainer, at, failing)
        monkeypatch.setattr(restarts, "build_trainer", remembered)
        return lives

    return plant


def same_bits(folder, other):
    for name in ("metrics.jsonl", "hf/model.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


class Life:
    """A trainer whose run raises `end`, if there is one. Its directory is `path`."""

    def __init__(self, path, end=None):
        self.log = SimpleNamespace(run=SimpleNamespace(path=path))
        self.interrupts, self.end = SimpleNamespace(requested=threading.Event()), end

    def fit(self):
        if self.end is not None:
            raise self.end


@pytest.fixture
def scripted(monkeypatch):
    """`scripted(lives)`: each call of `build_trainer` returns or raises the next one. Returns the keys of all calls."""
    asked = []

    def plant(lives):
        script = iter(lives)

        def build(config, **keys):
            asked.append(keys)
            made = next(script)
            if isinstance(made, Exception):
                raise made
            return made

        monkeypatch.setattr(restarts, "build_trainer", build)
        clock = SimpleNamespace(now=0.0)
        time = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s))
        monkeypatch.setattr(restarts, "time", time)
        return asked

    return plant


def limits(max_restarts: int, worker_timeout_s: float = 20.0):
    """As much of a configuration as restarts read."""
    return SimpleNamespace(trainer=SimpleNamespace(max_restarts=max_restarts, worker_timeout_s=worker_timeout_s))


@pytest.mark.slow
def test_every_restart_goes_on_in_the_directory_of_the_lost_run(scripted, capsys):
    lives = [Life("a", WorkerError("rank 0 died")), Life("b", EngineGoneError("gone")), Life("c")]
    asked = scripted(lives)
    assert run_to_the_end(limits(2)) is lives[2]
    assert asked == [{}, {"lost": "a"}, {"lost": "b"}]
    said = capsys.readouterr().err.splitlines()
    assert said == ["restart 1 of 2: rank 0 died", "restart 2 of 2: gone"]


@pytest.mark.slow
def test_a_loss_before_there_is_a_directory_restarts_without_one(scripted):
    last = Life("a")
    asked = scripted([WorkerError("lost at once"), last])
    assert run_to_the_end(limits(1)) is last and asked == [{}, {"lost": None}]


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 2])
def test_the_loss_after_the_last_restart_is_raised_and_says_so(scripted, most):
    errors = [WorkerError(f"loss {number}") for number in range(most + 1)]
    asked = scripted([Life("a", error) for error in errors])
    with pytest.raises(WorkerError) as raised:
        run_to_the_end(limits(most))
    assert raised.value is errors[-1] and len(asked) == most + 1
    notes = ["trainer.max_restarts=2: that many restarts were tried"] if most else []
    assert getattr(raised.value, "__notes__", []) == notes


class Collector:
    """As `gc`; writes down what is asked of it."""

    def __init__(self, frozen=0):
        self.asked, self.frozen = [], frozen

    def get_freeze_count(self):
        return self.frozen

    def freeze(self):
        self.asked.append("freeze")
        self.frozen = 1

    def unfreeze(self):
        self.asked.append("unfreeze")
        self.frozen = 0

    def collect(self):
        self.asked.append("collect")


def test_the_memory_of_a_lost_run_is_free_before_the_next_one_is_built(scripted, monkeypatch):
    asked, collector = scripted([Life("a", WorkerError("lost")), Life("b")]), Collector()
    monkeypatch.setattr(restarts, "gc", collector)
    run_to_the_end(limits(1))
    assert collector.asked == ["freeze", "unfreeze", "collect", "freeze", "unfreeze"] and len(asked) == 2


def test_objects_that_the_caller_froze_stay_frozen(scripted, monkeypatch):
    scripted([Life("a")])
    collector = Collector(frozen=5)
    monkeypatch.setattr(restarts, "gc", collector)
    run_to_the_end(limits(0))
    assert collector.asked == [] and collector.frozen == 5


@pytest.mark.slow
def test_other_errors_and_a_loss_after_a_request_to_stop_cause_no_restart(scripted):
    stopped, failed = Life("a", WorkerError("SIGTERM")), Life("a", ConfigError("no"))
    stopped.interrupts.requested.set()
    for life in (stopped, failed):
        asked = scripted([life])
        with pytest.raises(type(life.end)):
            run_to_the_end(limits(3))
        assert asked.pop() == {} and not asked


@pytest.mark.slow
def test_only_a_restart_waits_for_room_as_long_as_ranks_wait_for_each_other(scripted, capsys):
    """It looks every 10 seconds and raises at the first look after the limit."""
    no_room = NoRoomError("no room")
    asked = scripted([no_room])
    with pytest.raises(NoRoomError):
        run_to_the_end(limits(3))
    assert asked.pop() == {} and not asked
    last = Life("b")
    asked = scripted([Life("a", WorkerError("lost")), no_room, no_room, last])
    assert run_to_the_end(limits(1)) is last and asked == [{}] + [{"lost": "a"}] * 3
    assert capsys.readouterr().err.splitlines() == ["restart 1 of 1: lost"] + ["waiting for machines: no room"] * 2
    asked.clear()
    scripted([Life("a", WorkerError("lost"))] + [no_room] * 9)
    with pytest.raises(NoRoomError):
        run_to_the_end(limits(1, worker_timeout_s=20.0))
    assert asked == [{}] + [{"lost": "a"}] * 4, "after 0, 10, 20 and 30 seconds"


@pytest.mark.slow
@BESIDE_IT
@pytest.mark.parametrize(
    "error", [WorkerError("rank 1 of 2 died"), before_release(EngineGoneError("the engine is gone"))]
)
def test_a_run_goes_on_by_itself_with_the_same_bits(fails, undisturbed, tmp_path, capsys, error):
    lives = fails({1: error})
    trainer = run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=1"))
    assert len(lives) == 2 and trainer is lives[1] and trainer.step_number == STEPS
    assert f"restart 1 of 1: {error}" in capsys.readouterr().err
    same_bits(tmp_path / "run", undisturbed)


@pytest.mark.slow
@BESIDE_IT
def test_a_loss_before_the_first_checkpoint_begins_at_the_beginning(fails, undisturbed, tmp_path):
    lives = fails({0: WorkerError("lost"), 1: WorkerError("lost again")})
    run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=2"))
    assert len(lives) == 3 and [p.name for p in tmp_path.iterdir()] == ["run"]
    same_bits(tmp_path / "run", undisturbed)


@pytest.mark.slow
@BESIDE_IT
def test_an_engine_that_serves_nobody_any_more_is_a_loss(undisturbed, tmp_path, monkeypatch):
    lose_once(monkeypatch)
    trainer = run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=1"))
    assert trainer.step_number == STEPS
    same_bits(tmp_path / "run", undisturbed)


def lose_once(monkeypatch) -> None:
    """The engine ends when the second step is to begin."""
    admit, closed = RolloutSource.begin, []

    def lose_and_admit(self, step):
        if step == 1 and not closed:
            closed.append(self)
            self.stream.call(self.stream.runner.context.engine.close())
        admit(self, step)

    monkeypatch.setattr(RolloutSource, "begin", lose_and_admit)


@pytest.mark.slow
def test_what_ended_with_a_lost_engine_is_not_kept_for_the_run_that_goes_on(tmp_path, monkeypatch):
    lose_once(monkeypatch)
    trainer = run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=1", "trainer.deterministic=False"))
    assert trainer.step_number == STEPS and prompt_log.main([str(tmp_path / "run")]) == 0


@pytest.mark.slow
@BESIDE_IT
@pytest.mark.parametrize("most", [before_release(0), 1])
def test_a_loss_too_many_ends_the_run_and_the_command_goes_on(fails, undisturbed, tmp_path, most):
    lives = fails({number: WorkerError("rank 0 died") for number in range(1, most + 2)})
    with pytest.raises(WorkerError, match="rank 0 died") as raised:
        run_to_the_end(config(tmp_path / "run", f"trainer.max_restarts={most}"))
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert ("trainer.max_restarts=1: that many restarts were tried" in notes) == bool(most)
    assert len(lives) == most + 1 and steps(tmp_path / "run") == [0, 1]
    run_to_the_end(config(tmp_path / "run"))  # another number of restarts is no other run
    same_bits(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        before_release(UserCodeError("a tool raised")),
        before_release(CollapseError("collapsed")),
        KeyboardInterrupt(),
    ],
)
def test_what_would_come_again_is_not_tried_again(fails, tmp_path, error):
    lives = fails({0: error})
    with pytest.raises(type(error)):
        run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=3"))
    assert len(lives) == 1


@pytest.mark.slow
def test_who_is_asked_to_stop_and_loses_a_rank_to_the_same_signal_stops(tmp_path, monkeypatch):
    def stopped(self):
        self.interrupts.requested.set()
        raise WorkerError("rank 0 died of SIGTERM")

    monkeypatch.setattr(PPOTrainer, "step", stopped)
    with pytest.raises(WorkerError, match="SIGTERM"):
        run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=3"))


@pytest.mark.slow
@BESIDE_IT
def test_a_run_from_a_named_checkpoint_restarts_from_there(fails, undisturbed, tmp_path):
    """Whatever `resume_mode` says of other runs; and in its own directory, not in the next one."""
    source = sorted((undisturbed / "checkpoints").glob("step_*"))[0]
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}", "trainer.max_restarts=1"]
    begun = int(source.name.split("_")[1])
    lives = fails({0: WorkerError("lost")})
    run_to_the_end(config(tmp_path / "run", *named))
    assert len(lives) == 2 and steps(tmp_path / "run")[0] == begun + 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run/hf/model.safetensors").read_bytes() == (undisturbed / "hf/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_machine_in_the_place_of_a_lost_one_is_waited_for(fails, tmp_path, monkeypatch, capsys):
    fails({0: WorkerError("a machine is gone")})
    build, refusals = restarts.build_trainer, iter([False, True, True, False])

    def without_room(*args, **kwargs):
        if next(refusals):
            raise NoRoomError("the Ray cluster has: none")
        return build(*args, **kwargs)

    monkeypatch.setattr(restarts, "build_trainer", without_room)
    monkeypatch.setattr(restarts, "_LOOK_EVERY_S", 0.01)
    assert run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=1")).step_number == STEPS
    assert capsys.readouterr().err.count("waiting for machines: the Ray cluster has: none") == 2


@pytest.mark.slow
def test_room_is_not_waited_for_for_ever_nor_at_the_beginning(tmp_path, monkeypatch):
    asked = []

    def no_room(*args, lost=None):
        asked.append(lost)
        raise NoRoomError("the Ray cluster has: none")

    monkeypatch.setattr(restarts, "build_trainer", no_room)
    monkeypatch.setattr(restarts, "_LOOK_EVERY_S", 0.4)
    with pytest.raises(NoRoomError):
        run_to_the_end(config(tmp_path / "run", "trainer.max_restarts=1"))
    assert asked == [None]
    waiting = config(tmp_path / "run", "trainer.worker_timeout_s=1")
    for folder in (tmp_path, None):  # also where the first life ended before it had a directory
        asked.clear()
        with pytest.raises(NoRoomError):
            restarts._built(waiting, folder, again=True)
        assert asked == [folder] * 4
