"""Keys that another package adds to the configuration. In a process of its own: the schema is made once per process."""

import json
import os
import subprocess
import sys

import pytest

CODE = '''
from dataclasses import dataclass
from verl_mt.config.declare import Section, option, switched_on
from verl_mt.config.extended import ConfigSections

@dataclass
class Pace(Section):
    """How fast."""
    slow: bool = option(False, "Slow down.")

@dataclass
class Curriculum(Section):
    """How difficult rows are."""
    start: float = option(0.1, "Difficulty at the start.", min=0, max=1)
    end: float = option(0.9, "Difficulty at the end.", min=0, max=1)
    lr: float = option(0.0, "Not the policy's.")

@dataclass
class TrainerKeys(Section):
    lullaby: str | None = option(None, "Sung at the end.")
    verses: int = option(3, "Of it.", when=switched_on("curriculum.pace.slow"))

    def problems(self, config, key):
        if self.verses > 5:
            yield f"{key}.verses is {self.verses}: nobody sings so long"

def problems(config):
    if config.curriculum.start > config.curriculum.end:
        yield f"curriculum.start is {config.curriculum.start}, above curriculum.end"

SECTIONS = ConfigSections(
    {"curriculum": Curriculum, "trainer": TrainerKeys, "curriculum.pace": Pace}, problems=problems
)
'''


@pytest.fixture
def run(tmp_path):
    def run(program: str, code: str = CODE, points: str = "mine = foreign_config:SECTIONS\n") -> str:
        info = tmp_path / "foreign-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[verl_mt.config_sections]\n{points}")
        (tmp_path / "foreign_config.py").write_text(code)
        path = os.pathsep.join([str(tmp_path), *sys.path])
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_another_package_adds_a_section_keys_and_checks(run):
    program = """
import copy, json, pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from verl_mt.api.arguments import full_key
from foreign_config import Curriculum, TrainerKeys
from verl_mt.config.compose import compose, config_from_mapping, config_to_yaml
from verl_mt.config.extended import section_of
from verl_mt.config.schema import Config, explicit_keys, leaves
import yaml

pool = ThreadPoolExecutor(8)
config = compose(["curriculum.start=0.3", "trainer.lullaby=moon"])
written = config_from_mapping(yaml.safe_load(config_to_yaml(config)))
again = pickle.loads(pickle.dumps(config))
plain = Config()
print(json.dumps({
    "values": [section_of(config, Curriculum).start, section_of(config.trainer, TrainerKeys).lullaby],
    "instance": isinstance(config, Config),
    "as_written": asdict(written) == asdict(config),
    "pickled": again == config and type(again) is type(config) and explicit_keys(again) == explicit_keys(config),
    "copied": copy.deepcopy(config) == config,
    "made_in_python": plain.curriculum.end,
    "explicit": sorted(explicit_keys(config) - explicit_keys(compose([]))),
    "documented": leaves()["curriculum.start"].doc,
    "short_names": [full_key("lr"), full_key("start")],
    "written_at_default": [word for word in ("curriculum", "lullaby") if word in config_to_yaml(compose([]))],
    "one_family": len({*pool.map(lambda _: type(Config()), range(8))}),
}))
"""
    assert json.loads(run(program)) == {
        "values": [0.3, "moon"],
        "instance": True,
        "as_written": True,
        "pickled": True,
        "copied": True,
        "made_in_python": 0.9,
        "explicit": ["curriculum.start", "trainer.lullaby"],
        "documented": "Difficulty at the start.",
        "short_names": ["actor_rollout_ref.actor.optim.lr", "curriculum.start"],
        "written_at_default": [],
        "one_family": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["curriculum.strat=1"], "did you mean curriculum.start"),
        (["curriculum.start=2"], "must be at most 1"),
        (["curriculum.start=0.95"], "curriculum.start is 0.95, above curriculum.end"),
        (["trainer.verses=4"], "curriculum.pace.slow=True"),
        (["trainer.verses=6", "trainer.nnodes=2"], "trainer.verses is 6: nobody sings so long"),
        (["trainer.verses=6", "trainer.nnodes=2"], "trainer.nnodes is 2, which needs trainer.placement=ray"),
    ],
)
def test_its_mistakes_are_found_as_ours_are(run, words, error):
    program = f"""
from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import compose
from verl_mt.errors import VerlMTError
try: reject_unused_keys(compose({words}))
except VerlMTError as error: print(error)
"""
    assert error in run(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("lullaby", "nnodes"), "verl_mt has the key trainer.nnodes already. Rename yours"),
        (('"trainer"', '"trainee.inside"'), "'trainee.inside' is no section of the configuration, nor below one"),
        (('"trainer"', '"trainer.nnodes"'), "'trainer.nnodes' is no section of the configuration, nor below one"),
        (("SECTIONS = ConfigSections(", "SECTIONS = dict("), "is a dict. Expected a ConfigSections"),
        (('"curriculum": Curriculum', '"curriculum": int'), "'curriculum' is <class 'int'>. Expected a subclass of"),
        (("@dataclass\nclass TrainerKeys", "class TrainerKeys"), "Expected a subclass of Section that is a @dataclass"),
        (('"trainer": Tr', '"hydra": Tr'), "'hydra' is no name for a section"),
        (('option(None, "Sung at the end.")', "None"), "lullaby is no option. Write lullaby: TYPE = option(DEFAULT"),
        (("if config.curriculum.start >", "raise ValueError('no')\n    if 1 >"), "its check raised ValueError: no"),
    ],
)
def test_what_cannot_be_added_is_named(run, change, error):
    assert error in run("from verl_mt.config.compose import compose\ncompose([])", CODE.replace(*change))


@pytest.mark.slow
def test_a_run_goes_on_when_a_package_came_or_went(tmp_path, run):
    """What the package adds and nobody has set is not written, so that the run's config is the same without it."""
    words = ["trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}"]
    program = f"""
import yaml
from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.config.schema import Config
from verl_mt.trainer.run_directory import RunDirectory
config = compose({words})
RunDirectory.open(config.trainer, yaml.safe_load(config_to_yaml(config))).abandon
print("opened", hasattr(config, "curriculum"))
"""
    assert run(program, points="") == "opened False\n"
    assert run(program) == "opened True\n"
    assert run(program, points="") == "opened False\n"
