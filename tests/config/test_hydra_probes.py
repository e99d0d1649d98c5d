"""31 things that a user of Hydra types: each works as under a bare `@hydra.main` over the same schema, or is refused.

Most also work in a program with its own `@hydra.main` that calls `verl_mt.register()`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra_program import both, outcome, run_ours, run_registered, start_ours
from omegaconf import OmegaConf

from verl_mt.plugins import import_plugins

FILES = {
    "conf/mine": "defaults: [base_config, {algo: grpo}, _self_]\ndata: {seed: 7}\n",
    "conf/shipped": "defaults: [ppo_trainer, _self_]\ndata: {seed: 7}\n",
    "conf/algo/grpo": "# @package _global_\nalgorithm: {adv_estimator: grpo}\n",
    "conf/algo/rloo": "# @package _global_\nalgorithm: {adv_estimator: rloo}\n",
    "conf/size/small": "# @package _global_\ndata: {train_batch_size: 2}\n",
    "conf/experiment/big": "# @package _global_\ndefaults: [{override /algo: rloo}]\ndata: {val_seed: 5}\n",
    "more/extra/on": "# @package _global_\ndata: {seed: 11}\n",
    "other/mine": "defaults: [base_config, _self_]\ndata: {seed: 12}\n",
}
NODES = """
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from verl_mt.config.schema import AlgorithmConfig

@dataclass
class Mine(AlgorithmConfig):
    adv_estimator: str = "rloo"

@dataclass
class Further(AlgorithmConfig):
    adv_estimater: str = "rloo"

store = ConfigStore.instance()
store.store(group="algorithm", name="mine", node=Mine)
store.store(group="algorithm", name="further", node=Further)
store.store(group="algorithm", name="unknown", node={"adv_estimatr": "rloo"})
store.store(group="season", name="winter", node={"data": {"seed": 5}}, package="_global_")
OmegaConf.register_new_resolver("product", lambda a, b: a * b, replace=True)
"""
MINE, PLUGIN = ["-cn", "mine"], "external_plugins=[nodes.py]"
RUNS = {
    "your YAML file": [*MINE],
    "a config group": [*MINE, "+size=small"],
    "@package _global_": [*MINE, "+size=small", "algo=rloo"],
    "+experiment= with override /algo:": [*MINE, "+experiment=big"],
    "algo=": [*MINE, "algo=rloo"],
    "++key": [*MINE, "++data.seed=3"],
    "${oc.env:}": [*MINE, "trainer.project_name=${oc.env:MINE}"],
    "-cp": ["-cp", "OTHER", *MINE],
    "-cd": [*MINE, "-cd", "MORE", "+extra=on"],
    "hydra/launcher=": [*MINE, "hydra/launcher=basic"],
    "hydra.run.dir=": [*MINE, "hydra.run.dir=out/${now:%Y}"],
    "hydra.job.chdir=": [*MINE, "hydra.job.chdir=True"],
    "your resolver": [*MINE, "data.seed=${product:3,4}", PLUGIN],
    "your dataclass in the ConfigStore": [*MINE, "+algorithm=mine", PLUGIN],
}
REFUSED = {
    "+new.key=": [*MINE, "+new.key=1"],
    "_target_": [*MINE, "+reward._target_=my.Score"],
    "two mistakes": [*MINE, "data.sed=1", "trainer.sed=2"],
}
SWEEPS = {
    "-m": ["-m", "algo=grpo,rloo"],
    "--multirun": ["--multirun", "+size=small", "data.seed=1,2"],
    "a,b": ["-m", "data.seed=1,2", "algo=rloo"],
    "choice()": ["-m", "data.seed=choice(1,2)"],
    "range()": ["-m", "data.seed=range(1,3)"],
    "hydra.sweeper.": ["-m", "data.seed=1,2", "hydra.sweeper.max_batch_size=1"],
}
PRINTED = {
    "--cfg job": (["--cfg", "job"], ["seed: 7"]),
    "--cfg hydra": (["--cfg", "hydra"], ["hydra:", "launcher:", "sweep:"]),
    "--cfg all": (["--cfg", "all"], ["hydra:", "launcher:", "seed: 7"]),
    "--package": (["--cfg", "job", "--package", "data"], ["# @package data", "seed: 7"]),
    "--info": (["--info"], ["Config search path", "Defaults List", "Installed Hydra Plugins"]),
    "--info defaults": (["--info", "defaults"], ["Defaults List", "algo/grpo"]),
    "--hydra-help": (["--hydra-help"], ["hydra/launcher: basic"]),
    "--shell-completion": (["--shell-completion", "install=bash"], ["hydra_bash_completion"]),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "nodes.py").write_text(NODES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "from env")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setenv("HYDRA_PROGRAM_SEEN", "")
    import_plugins(["nodes.py"])  # a bare program registers its own
    yield tmp_path
    OmegaConf.clear_resolver("product")
    for group in ("algorithm", "season"):
        ConfigStore.instance().repo.pop(group, None)


def placed(words: list[str], folder: Path) -> list[str]:
    """A bare program takes relative folders from where its file lies."""
    return [str(folder / word.lower()) if word in ("OTHER", "MORE") else word for word in words]


def test_all_31_are_here():
    assert len(RUNS) + len(REFUSED) + len(SWEEPS) + len(PRINTED) == 31


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("run", [run_ours, run_registered], ids=["command", "own hydra.main"])
def test_a_run(folder, words, run):
    seen, text, _ = both(folder, placed(words, folder), run)
    assert len(seen) == 1, text


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("run", [run_ours, run_registered], ids=["command", "own hydra.main"])
def test_what_a_bare_program_takes_and_we_refuse(folder, words, run):
    status, seen, text = outcome(run, words, folder / "seen.jsonl")
    assert (status, seen) == (2 if run is run_ours else 1, [])
    assert words[2].partition("=")[0].lstrip("+") in text
    assert run is run_registered or text.startswith("error: ")


def test_all_mistakes_are_in_one_error_with_the_names_that_are_meant(folder):
    status, _, text = outcome(run_ours, REFUSED["two mistakes"], folder / "seen.jsonl")
    assert status == 2
    assert "did you mean data.seed?" in text and "did you mean trainer.seed?" in text


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(w, id=name, marks=pytest.mark.slow if name == "-m" else pytest.mark.release)
        for name, w in SWEEPS.items()
    ],
)
def test_a_sweep(folder, words):
    seen, text, _ = both(folder, [*MINE, *words], start_ours)
    assert len(set(seen)) == len(seen) == text.count("  finished  ") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("words", "parts"), PRINTED.values(), ids=PRINTED)
def test_what_is_printed(folder, words, parts):
    seen, mine, theirs = both(folder, [*MINE, *words])
    assert seen == []
    for part in parts:
        assert part in mine and part in theirs


def values(run, words: list[str], folder: Path) -> tuple[str, int]:
    status, (text,), printed = outcome(run, words, folder / "seen.jsonl")
    assert status == 0, printed
    config = json.loads(text)
    return config["algorithm"]["adv_estimator"], config["data"]["seed"]


@pytest.mark.slow
@pytest.mark.parametrize("run", [start_ours, run_registered], ids=["command", "own hydra.main"])
def test_files_of_the_config_store_are_files_of_our_groups_and_of_others(folder, run):
    """In a new process, `external_plugins` brings them."""
    words = ["-cn", "shipped", "algorithm=mine", "+season=winter", PLUGIN]
    assert values(run, words, folder) == ("rloo", 5)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_ours, run_registered], ids=["command", "own hydra.main"])
@pytest.mark.parametrize(("name", "key"), [("further", "adv_estimater"), ("unknown", "adv_estimatr")])
def test_a_dataclass_cannot_add_a_key(folder, run, name, key):
    status, seen, text = outcome(run, ["-cn", "shipped", f"algorithm={name}", PLUGIN], folder / "seen.jsonl")
    assert (status, seen) == (2 if run is run_ours else 1, [])
    assert key in text
    assert "did you mean algorithm.adv_estimator?" in text or (run is run_registered and name == "unknown")


@pytest.mark.release
def test_a_sweep_over_a_dataclass_and_a_file(folder):
    words = ["-cn", "shipped", "-m", "algorithm=mine,grpo", PLUGIN]
    status, seen, text = outcome(start_ours, words, folder / "seen.jsonl")
    assert status == 0 and "2 finished" in text
    assert [json.loads(line)["algorithm"]["adv_estimator"] for line in seen] == ["rloo", "grpo"]
