"""`rollout.name` takes an engine from a file of the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_lab import FEW, NO_VALIDATION, VARIED, fit, metrics_of, rows_of, run_command

from verl_mt.errors import ConfigError, PluginError
from verl_mt.trainer.build import build_trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your_own_engine.md"
NAME = "actor_rollout_ref.rollout.name"
KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
COUNTING = """
from verl_mt.engines.base import Capabilities, InferenceEngine
from verl_mt.engines.local import LocalEngine

class Counting(LocalEngine):
    num_requests = 0

    async def generate(self, request):
        Counting.num_requests += 1
        return await super().generate(request)

def make(setup):
    assert setup.policy_module is None and setup.config.rollout.engine_kwargs == {"speed": 3}
    raise RuntimeError("made with speed 3")

class NoEngine:
    pass

class WrongDevice(InferenceEngine):
    @classmethod
    def check_config(cls, config, trainer):
        from verl_mt.errors import ConfigError
        raise ConfigError("this engine is for Tuesdays")
    generate = abort = pause = resume = apply = close = version = None

def nothing(setup):
    return None

class HalfAnEngine(InferenceEngine):
    def __init__(self, setup):
        pass

class SaysNothing(WrongDevice):
    check_config = InferenceEngine.check_config
    __abstractmethods__ = frozenset()
    def __init__(self, setup):
        pass

class Pigeons(SaysNothing):
    def __init__(self, setup):
        self.capabilities = Capabilities(transports=frozenset({"pigeon", "disk"}), deterministic=False)

class Sounds(SaysNothing):
    def __init__(self, setup):
        self.capabilities = Capabilities(frozenset({"disk"}), False, media=frozenset({"audios"}))

class Loose(LocalEngine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.capabilities = Capabilities(transports=frozenset({"in_place"}), deterministic=False)
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my_engine.py"
    path.write_text(COUNTING)
    return path


@pytest.mark.slow
def test_a_class_derived_from_the_local_engine_trains_to_the_same_numbers(file, tmp_path):
    from verl_mt.plugins import import_file

    same = ("trainer.deterministic=True", "trainer.total_training_steps=2", *NO_VALIDATION, *FEW, VARIED)
    ours = fit(tmp_path / "ours", f"{NAME}={file}:Counting", *same)
    theirs = fit(tmp_path / "theirs", *same)
    assert import_file(file).Counting.num_requests >= 2 * 4
    assert [line["step"] for line in ours] == [1, 2]
    assert [line["actor/loss"] for line in ours] == [line["actor/loss"] for line in theirs]
    streams = [
        [r["token_ids"] for row in rows_of(tmp_path / run, 2) for r in row["records"]] for run in ("ours", "theirs")
    ]
    assert streams[0] == streams[1]


@pytest.mark.slow
def test_the_engine_of_the_page_trains_by_the_command_and_gets_every_new_version_of_the_weights(tmp_path):
    code = re.search(r'```python title="my_engine.py"\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_engine.py").write_text(code[1])
    words = ("trainer.total_training_steps=2", *FEW, *NO_VALIDATION[:2])
    done = run_command(tmp_path, f"{NAME}={tmp_path}/my_engine.py:MyEngine", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "tiny"
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert all(line["rollout/logprob_diff_max"] < 1e-4 for line in metrics_of(run))
    for step in (1, 2):
        records = [record for row in rows_of(run, step) for record in row["records"]]
        versions = {v for r in records for v, sampled in zip(r["policy_versions"], r["sampled"]) if sampled}
        assert versions == {step - 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "error", "message"),
    [
        (
            "make",
            ["actor_rollout_ref.rollout.engine_kwargs={speed: 3}"],
            PluginError,
            "making .* RuntimeError: made with speed 3",
        ),
        ("NoEngine", [], PluginError, "NoEngine is no InferenceEngine"),
        ("WrongDevice", [], ConfigError, "for Tuesdays"),
        ("HalfAnEngine", [], PluginError, "HalfAnEngine: making it .* TypeError: Can't instantiate abstract class"),
        ("SaysNothing", [], PluginError, r"name=.*:SaysNothing: its `capabilities` must be a Capabilities .*got None"),
        ("Pigeons", [], PluginError, "transports names pigeon. There is: broadcast, disk, from_ranks, in_place, "),
        ("Sounds", [], PluginError, "capabilities.media names audios. There is: images, videos"),
        ("nothing", [], PluginError, "made NoneType, expected an InferenceEngine"),
        ("Counted", [], PluginError, r"has no 'Counted'; did you mean 'Counting'\?"),
        ("Loose", ["trainer.deterministic=True"], ConfigError, "trainer.deterministic needs an engine that gives"),
    ],
)
def test_what_is_no_engine_or_does_not_fit_is_one_clear_error(file, tmp_path, name, words, error, message):
    from verl_mt.config.compose import compose

    few = ("data.train_max_samples=8", "data.val_max_samples=2")
    config = compose([*few, f"{NAME}={file}:{name}", f"trainer.default_local_dir={tmp_path / 'run'}", *words])
    with pytest.raises(error, match=message):
        build_trainer(config)
    assert not (tmp_path / "run").exists()
