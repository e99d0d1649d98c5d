"""Entry points find extensions: the library's own in a file beside them, another package's in its metadata."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from verl_mt import engines, extension_points
from verl_mt.chat.parsers import get_parser, tool_parsers
from verl_mt.config.compose import compose
from verl_mt.config.policy_losses import POLICY_LOSSES
from verl_mt.config.rollout import ENGINES
from verl_mt.config_paths import group_folders
from verl_mt.errors import ConfigError, PluginError
from verl_mt.import_paths import read_table, real_path
from verl_mt.plugins import Registry, load_object
from verl_mt.rewards import RewardInput
from verl_mt.rewards.adapters import adapt
from verl_mt.rollout.drivers import DRIVERS, DriverParts, build_driver, has_own_loop

REPO = Path(__file__).resolve().parents[1]
PATHS = read_table()["verl_mt.import_paths"]
_PATHS_OF_OTHERS = ("verl_mt.import_paths", "sglang.srt.platforms")
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_distribution_declares_what_the_file_beside_the_extensions_says():
    declared = ProjectMetadata(str(REPO), PluginManager()).core.entry_points
    assert declared == read_table()
    assert "verl_mt_cpu" in declared["sglang.srt.platforms"] and "sft" in declared["verl_mt.commands"]


@pytest.mark.parametrize("group", [group for group in read_table() if group not in _PATHS_OF_OTHERS])
def test_every_entry_point_leads_to_something(group):
    for name, path in extension_points.own(group).items():
        assert load_object(path, what=name) if ":" in path else import_module(path)
        assert extension_points.extra_of(group, name) in {None, *EXTRAS}


@pytest.mark.parametrize("documented", PATHS)
def test_a_documented_path_is_the_same_module(documented):
    assert import_module(documented) is import_module(PATHS[documented])


@pytest.mark.slow
def test_a_module_in_a_moved_package_is_loaded_once():
    program = (
        "import verl_mt.doctor.checks as a; from verl_mt.doctor import checks as b\n"
        "import verl_mt.extensions.inspection.doctor.checks as c, verl_mt.doctor, inspect\n"
        "assert a is b is c and verl_mt.doctor.checks is c\n"
        "assert c.__name__ == c.__spec__.name == 'verl_mt.extensions.inspection.doctor.checks'\n"
        "assert 'def report' in inspect.getsource(c)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_path_below_a_documented_one_and_one_that_is_none():
    assert real_path("verl_mt.report.page.x") == "verl_mt.extensions.inspection.report.page.x"
    assert real_path("verl_mt.trainer.ppo_trainer") is None and real_path("verl_mt.reporter") is None
    with pytest.raises(ModuleNotFoundError, match=r"verl_mt\.report\.nothing"):
        import_module("verl_mt.report.nothing")


def test_the_help_reads_no_metadata():
    program = (
        "import sys\nfrom verl_mt.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit: print('loaded:', 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("loaded: False\n") and "doctor" in done.stdout


def forget() -> None:
    """What was read of installed packages."""
    for read in (extension_points._installed, extension_points._all_installed, group_folders):
        read.cache_clear()


@pytest.fixture
def other_packages(tmp_path, monkeypatch):
    """Adds an installed distribution with entry points; everything is as before afterwards."""

    def add(distribution: str, points: str, **modules: str) -> None:
        folder = tmp_path / distribution
        info = folder / f"{distribution}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(points)
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    forget()
    yield add
    forget()


def test_another_package_adds_a_name(other_packages):
    other_packages("foreign", "[verl_mt.trackers]\nmine = foreign_tracker:Mine\n", foreign_tracker="class Mine: pass")
    registry: Registry[type] = Registry("tracker", group="verl_mt.trackers")
    assert "mine" in registry and registry.find("mine").__name__ == "Mine"
    assert load_object("mine", what="trainer.logger", registry=registry) is registry["mine"]
    with pytest.raises(PluginError, match=r"unknown tracker 'mien'; did you mean 'mine'"):
        Registry("tracker", group="verl_mt.trackers").find("mien")


def test_another_package_adds_an_engine_a_loss_and_a_parser(other_packages):
    code = """
from verl_mt.chat.parsers import HermesParser
from verl_mt.config.policy_losses import PolicyLoss
from verl_mt.engines.scripted import ScriptedEngine

class Engine(ScriptedEngine): pass
class Parser(HermesParser): pass

def loss(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT):
    return -(log_probs_BT * advantages_BT), {}

class Loss(PolicyLoss):
    formula = "foreign_things.loss"
    aggregation = "seq-mean-token-mean"
"""
    points = "[verl_mt.engines]\nmine = foreign_things:Engine\n[verl_mt.policy_losses]\nmine = foreign_things:Loss\n"
    points += "[verl_mt.tool_parsers]\nmine = foreign_things:Parser\n"
    other_packages("foreign", points, foreign_things=code)
    loss = "actor_rollout_ref.actor.policy_loss={loss_mode: mine}"
    parser = "actor_rollout_ref.rollout.multi_turn.tool_parser=mine"
    try:
        config = compose(["actor_rollout_ref.rollout.name=mine", loss, parser])
        assert engines._find("mine").__name__ == "Engine" and get_parser("mine").__class__.__name__ == "Parser"
        assert config.actor_rollout_ref.actor.aggregation == "seq-mean-token-mean"
        with pytest.raises(ConfigError, match="'nobodys', expected one of"):
            compose(["actor_rollout_ref.rollout.name=nobodys"])
    finally:
        for registry in (ENGINES, POLICY_LOSSES, tool_parsers):
            registry.pop("mine", None)


SIGNATURE = """
from verl_mt.rewards.adapters import FunctionReward, parameter_names

class OnText(FunctionReward):
    signature = "grade(text)"
    filled = ("text",)

    @classmethod
    def recognize(cls, function):
        return function if parameter_names(function)[:1] == ["text"] else None

    async def _value(self, item):
        return await self._call(item.solution_str)
"""


def test_another_package_adds_a_reward_signature(other_packages):
    def grade(text, bonus=0):
        return len(text) + bonus

    def nobodys(answer):
        return 0.0

    other_packages("foreign", "[verl_mt.reward_signatures]\nmine = foreign_sig:OnText\n", foreign_sig=SIGNATURE)
    reward = adapt(grade, label="grade", kwargs={"bonus": 2}, timeout_s=5.0)
    assert asyncio.run(reward.score([RewardInput("", "abc", None)])) == [{"score": 5.0}]
    with pytest.raises(ConfigError, match="text of grade comes from the rollout"):
        adapt(grade, label="grade", kwargs={"text": ""}, timeout_s=5.0)
    with pytest.raises(PluginError, match=r"parameters \(answer\)\. Expected compute_score\(.*\) or grade\(text\) or "):
        adapt(nobodys, label="nobodys", kwargs={}, timeout_s=5.0)


@pytest.mark.slow
def test_another_package_adds_config_groups(other_packages, tmp_path):
    for name, text in {"task/shop": "trainer: {seed: 7}", "season/winter": "data: {max_response_length: 99}"}.items():
        file = tmp_path / "foreign" / "foreign_groups" / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"# @package _global_\n{text}\n")
    other_packages("foreign", "[verl_mt.config_folders]\nmine = foreign_groups.configs\n")
    config = compose(["task=shop", "+season=winter", "algorithm=dapo"])
    assert (config.trainer.seed, config.actor_rollout_ref.rollout.response_length) == (7, 99)
    with pytest.raises(ConfigError, match=r"task=shp \(command line\).* It has .*, shop, .*Did you mean task=shop"):
        compose(["task=shp"])
    forget()
    other_packages("second", "[verl_mt.config_folders]\ntheirs = nowhere.configs\n")
    with pytest.raises(
        PluginError, match=r"'theirs' of verl_mt\.config_folders: there is no package 'nowhere\.configs'"
    ):
        compose(["task=shop"])


def test_a_driver_of_another_package_is_used_and_checked(other_packages):
    code = """
from verl_mt.rollout.drivers import RolloutDriver

class Mine(RolloutDriver):
    async def run(self, episode): ...

def build(config, parts): return Mine()
def other(config, parts): return object()
"""
    points = "[verl_mt.rollout_drivers]\nmode = foreign_driver:build\n"  # a key that every run has
    other_packages("foreign", points, foreign_driver=code)
    config = compose([])
    try:
        driver = build_driver(config, DriverParts())
        assert type(driver).__name__ == "Mine" and has_own_loop(config.actor_rollout_ref.rollout)
        del DRIVERS["mode"]
        DRIVERS["mode"] = lambda config, parts: object()
        with pytest.raises(PluginError, match=r"mode: its driver, a object, has no is_tool_loop, run, session_class: "):
            build_driver(config, DriverParts())
    finally:
        DRIVERS.pop("mode", None)


def test_a_driver_without_its_key_is_named(other_packages):
    other_packages("foreign", "[verl_mt.rollout_drivers]\nno_key = foreign_driver:build\n")
    with pytest.raises(PluginError, match=r"'no_key' of verl_mt\.rollout_drivers: there is no key .*rollout\.no_key"):
        has_own_loop(compose([]).actor_rollout_ref.rollout)


def test_another_package_adds_a_command(other_packages, capsys):
    from verl_mt.__main__ import main

    other_packages("foreign", "[verl_mt.commands]\ngreet = foreign_greets\n", foreign_greets="print('hello')")
    main(["greet"])
    assert capsys.readouterr().out == "hello\n"


def test_a_name_of_the_library_is_not_taken_over_and_two_packages_cannot_share_one(other_packages, caplog):
    other_packages("first", "[verl_mt.trackers]\nwandb = first:A\nboth = first:A\nmore = first:A [extra]\n")
    assert extension_points.known("verl_mt.trackers")["more"] == "first:A"
    assert "first: its entry point 'wandb' of the group verl_mt.trackers is not used" in caplog.text
    assert extension_points.find("verl_mt.trackers", "wandb") == "verl_mt.extensions.inspection.trackers.wandb:Wandb"
    forget()
    other_packages("second", "[verl_mt.trackers]\nboth = second:B\n")
    with pytest.raises(PluginError, match=r"'both' of the group verl_mt\.trackers: (first|second) .*Uninstall one"):
        extension_points.find("verl_mt.trackers", "both")


def test_an_extension_that_is_not_there_is_named(monkeypatch):
    from verl_mt.plugins import extension_function

    monkeypatch.setattr("verl_mt.plugins.find_entry_point", lambda group, name: None)
    with pytest.raises(PluginError, match="examine is done by an extension"):
        extension_function("examine")


def test_a_missing_dependency_is_refused_with_the_extra_that_brings_it(monkeypatch):
    from verl_mt.workers.worker_group import placements

    for name in [name for name in sys.modules if name.startswith("verl_mt.extensions.cluster.workers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PluginError, match=r"placement ray needs the package ray.*pip install 'verl_mt\[ray\]'"):
        placements.find("ray")
