"""Command line, YAML and Python give the same checked configuration, from any directory."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import hydra
import pytest
import warm_start
import yaml
from hydra.errors import HydraException

from verl_mt.config.actor import OptimConfig
from verl_mt.config.compose import (
    Plan,
    compose,
    config_from_mapping,
    config_of_command,
    config_to_yaml,
    hydra_main,
    register,
    to_config,
)
from verl_mt.config.hydra_source import Composition, composing
from verl_mt.config.schema import Config
from verl_mt.config_paths import config_dir
from verl_mt.errors import ConfigError, UnknownKeyError

REPO = Path(__file__).resolve().parents[2]
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return file


def test_without_arguments_the_default_task_is_composed():
    config = compose()
    assert config.trainer.experiment_name == "tiny"
    assert config.actor_rollout_ref.rollout.tool_kwargs.tools_config_file is not None
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "ppo_trainer"])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.train_batch_size=8", "trainer.logger=[console]", "trainer.logger=[]"],
        ["++actor_rollout_ref.rollout.engine_kwargs.sglang={a:1}", "actor_rollout_ref.model.path=${oc.env:HOME}"],
        ["~data.val_files", "+trainer.nothing=1"],
        ["trainer.nothing=1"],
        ["data.train_batch_size=many"],
        ["~trainer.nothing"],
    ],
    ids=str,
)
def test_a_shipped_file_takes_overrides_as_hydra_gives_them_to_it(name, overrides):
    """Hydra composes it once in a process; the first result is not changed by the next one's overrides."""
    with composing(Composition(primary=name)):
        Plan(config_dir(), name, ["data.train_batch_size=4096"], Composition(primary=name)).tree()
        tree, failure = Plan(config_dir(), name, overrides, Composition(primary=name)).tree()
        with hydra.initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            try:
                assert (tree, failure) == (hydra.compose(config_name=name, overrides=overrides), None)
            except HydraException as error:
                assert failure is not None and " ".join(str(error).split()) in failure


def test_the_optimizers_defaults_are_verls_and_the_default_task_sets_its_own():
    own = OptimConfig()
    assert (own.lr_scheduler_type, own.weight_decay, own.betas) == ("constant", 0.01, [0.9, 0.999])
    tiny = compose().actor_rollout_ref.actor.optim
    assert tiny == OptimConfig(3e-4, [0.9, 0.99], 0.0, 5, "linear", 0.0)


def test_own_model_and_own_data_inherit_nothing_of_the_default_task():
    own = compose(["data.train_files=x.parquet", "actor_rollout_ref.model.path=y"])
    assert own.actor_rollout_ref.rollout.tool_kwargs.tools_config_file is None
    assert own.data.val_files is None
    assert own.trainer.total_training_steps is None
    still_tiny = compose(["data.train_files=x.parquet"])
    assert still_tiny.actor_rollout_ref.rollout.tool_kwargs.tools_config_file is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        "multi_turn: True\n    multi_turn:\n      max_user_turns: 3",
        "multi_turn:\n      max_user_turns: 3\n    multi_turn: True",
        "multi_turn: True\n    multi_turn.max_user_turns: 3",
        "multi_turn.max_user_turns: 3\n    multi_turn: True",
        "multi_turn: {enable: True, max_user_turns: 3}",
    ],
)
@pytest.mark.cap("V1")
def test_the_shorthand_works_in_yaml_in_either_order(tmp_path, block):
    write(tmp_path, "mine", f"defaults: [tiny, _self_]\nactor_rollout_ref:\n  rollout:\n    {block}\n    n: 4\n")
    rollout = compose(config_name="mine", config_dir=tmp_path).actor_rollout_ref.rollout
    assert (rollout.multi_turn.enable, rollout.multi_turn.max_user_turns, rollout.n) == (True, 3, 4)


@pytest.mark.slow
def test_a_recipe_resolves_from_any_directory(tmp_path, monkeypatch):
    folder = tmp_path / "recipe"
    folder.mkdir()
    write(folder, "mine", "defaults: [ppo_trainer, _self_]\ndata: {max_response_length: 99}\n")
    monkeypatch.chdir(tmp_path)
    for name, where in (("mine", "recipe"), (str(folder / "mine.yaml"), None)):
        assert compose(config_name=name, config_dir=where).actor_rollout_ref.rollout.response_length == 99


def test_the_command_line_wins_over_yaml_and_yaml_over_the_schema(tmp_path):
    write(tmp_path, "mine", "defaults: [ppo_trainer, _self_]\ndata: {max_response_length: 99, train_batch_size: 8}\n")
    config = compose(["actor_rollout_ref.rollout.response_length=98"], "mine", tmp_path)
    assert config.actor_rollout_ref.rollout.response_length == 98
    assert config.data.train_batch_size == 8
    assert config.data.max_prompt_length == Config().data.max_prompt_length


def test_a_yaml_without_defaults_starts_from_the_schema(tmp_path):
    write(tmp_path, "bare", "actor_rollout_ref:\n    rollout:\n        multi_turn: True\n        name: sglang\n")
    config = compose(["trainer.seed=5"], "bare", tmp_path)
    assert config.actor_rollout_ref.rollout.multi_turn.enable is True
    assert (config.actor_rollout_ref.rollout.name, config.trainer.seed) == ("sglang", 5)


def test_a_yaml_of_verls_composes(tmp_path):
    write(
        tmp_path,
        "gsm8k",
        """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    response_length: ${data.max_response_length}
    multi_turn:
      enable: True
      max_assistant_turns: 5
      tool_config_path: tools.yaml
""",
    )
    rollout = compose(config_name="gsm8k", config_dir=tmp_path).actor_rollout_ref.rollout
    assert rollout.tool_kwargs.tools_config_file == "tools.yaml"
    assert rollout.response_length == 1024


def test_all_problems_of_command_and_files_are_in_one_error(tmp_path):
    write(tmp_path, "base", "defaults: [ppo_trainer, _self_]\ntrainer: {lr: 1}\n")
    write(tmp_path, "mine", "defaults: [base, _self_]\ndata: {nope: 1, seed: x}\n")
    with pytest.raises(UnknownKeyError) as caught:
        compose(["foo.bar=1"], "mine", tmp_path)
    text = str(caught.value)
    assert text.startswith("4 problems")
    for part in ("foo.bar (command line)", "trainer.lr (", "base.yaml", "data.nope (", "data.seed=x ("):
        assert part in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: {seed: 1\n", "line 2"),
        ("data:\n  seed: 1\n  seed: 2\n", "line 3: found duplicate key seed"),
        ("- a\n", "expected a mapping"),
        ("defaults: [nowhere, _self_]\n", "nowhere"),
    ],
)
def test_a_broken_yaml_names_file_and_place(tmp_path, text, part):
    write(tmp_path, "broken", text)
    with pytest.raises(ConfigError, match=re.escape(part)) as caught:
        compose(config_name="broken", config_dir=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_config_lists_what_is_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no nix.yaml.*ppo_trainer, tiny"):
        compose(config_name="nix")
    with pytest.raises(ConfigError, match=r"no ppo_megatron_trainer.yaml.*FSDP2"):
        compose(config_name="ppo_megatron_trainer")
    with pytest.raises(ConfigError, match="no folder"):
        compose(config_name="x", config_dir=tmp_path / "absent")


def test_to_config_takes_plain_mappings_and_refuses_like_the_command():
    assert to_config({"trainer": {"seed": 3}}).trainer.seed == 3
    with pytest.raises(UnknownKeyError, match=r"did you mean trainer\.seed"):
        to_config({"trainer": {"sed": 3}})


@pytest.mark.slow
def test_a_written_configuration_is_read_back(tmp_path):
    config = compose(["actor_rollout_ref.model.template_kwargs.enable_thinking=False", "data.seed=9"])
    file = write(tmp_path, "config", config_to_yaml(config))
    assert compose(config_name=str(file)) == config
    again = config_from_mapping(yaml.safe_load(file.read_text()), ["trainer.seed=4", "data.max_response_length=50"])
    assert (again.trainer.seed, again.actor_rollout_ref.rollout.response_length, again.data.seed) == (4, 50, 9)


def test_secrets_are_not_printed():
    config = compose(["++actor_rollout_ref.rollout.engine_kwargs.api_key=abc", "actor_rollout_ref.rollout.name=sglang"])
    assert "abc" not in config_to_yaml(config)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{{ a }}${x}", "{{ a }}${x:1}", "{{ a }}${ {{ x }} }"])
def test_a_chat_template_with_a_dollar_says_to_use_a_file(tmp_path, text):
    key = "actor_rollout_ref.model.custom_chat_template"
    write(tmp_path, "mine", f"defaults: [tiny, _self_]\n{key}: '{text}'\n")
    tree = {"actor_rollout_ref": {"model": {"custom_chat_template": text}}}
    ways = (lambda: compose([f"{key}='{text}'"]), lambda: compose([], "mine", tmp_path), lambda: to_config(tree))
    for way in ways:
        with pytest.raises(ConfigError, match=r"custom_chat_template.*save the text as a file"):
            way()


@pytest.mark.slow
def test_a_redacted_value_is_not_read_back_as_a_real_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "from-env")
    given = ["reward.kwargs={api_key: abc, url: 'http://u:pw@h/', keys: [{token: t}]}"]
    file = write(tmp_path, "config", config_to_yaml(compose(given)))
    with pytest.raises(ConfigError) as caught:
        compose(config_name=str(file))
    assert "reward.kwargs.api_key, reward.kwargs.url, reward.kwargs.keys[0].token: ***" in str(caught.value)
    assert "Give each again, as key=value or from the environment: ${oc.env:NAME}" in str(caught.value)
    again = ["reward.kwargs.api_key=${oc.env:MY_KEY}", "reward.kwargs.url='http://u:p2@h/'", "reward.kwargs.keys=[]"]
    kwargs = compose(again, str(file)).reward.kwargs
    assert kwargs == {"api_key": "from-env", "url": "http://u:p2@h/", "keys": []}


@pytest.mark.slow
def test_harmless_settings_of_a_reward_survive_and_variables_stay_names(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "short")
    judge = "{judge: Qwen/Qwen3-8B, weight: 0.5, separator: '***', prompt: 'Be brief.', salt: '${oc.env:MY_KEY}'"
    config = compose([f"reward.kwargs={judge}, nested: [{{x: 'a ${{oc.env:MY_KEY}}'}}], pin: Zx81Qk77vW23pL90}}"])
    text = config_to_yaml(config)
    assert "short" not in text and "Zx81" not in text
    file = str(write(tmp_path, "config", text))
    with pytest.raises(ConfigError, match=r"^reward\.kwargs\.pin: \*\*\* .*Give it again"):
        compose([], file)
    monkeypatch.setenv("MY_KEY", "another")
    again = compose(["reward.kwargs.pin=p"], file).reward.kwargs
    assert again == config.reward.kwargs | {"salt": "another", "nested": [{"x": "a another"}], "pin": "p"}
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"reward\.kwargs.*MY_KEY"):
        compose(["reward.kwargs.pin=p"], file)
    engine = "engine_kwargs={dist_init_addr: 'head:5000', env: {EXA: pw88}, x: {y: [Qm20Ld93cV58yJ61], n: 3}}"
    written = config_to_yaml(compose(["actor_rollout_ref.rollout.name=sglang", f"actor_rollout_ref.rollout.{engine}"]))
    assert yaml.safe_load(written)["actor_rollout_ref"]["rollout"]["engine_kwargs"] == {
        "dist_init_addr": "head:5000", "env": {"EXA": "***"}, "x": {"y": ["***hidden***"], "n": 3},
    }  # fmt: skip
    config.reward.kwargs["salt"] = "changed"
    assert "salt: changed" in config_to_yaml(config)


def launch_commands() -> list[list[str]]:
    page = (REPO / "docs" / "migrating_from_verl.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    return [shlex.split(b.replace("\\\n", " ").replace("$HOME", "home")) for b in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("words", launch_commands(), ids=range(len(launch_commands())))
def test_a_launch_command_of_verl_runs_after_replacing_the_module(words):
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    config = config_of_command(words[3:], None, "test")
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.rollout.multi_turn.enable is True


@pytest.mark.slow
def test_hydra_main_runs_the_task_once_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    hydra_main(seen.append, argv=["data.seed=4"])
    assert [c.data.seed for c in seen] == [4]
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_hydra_main_prints_one_line_and_exits_with_2(capsys, monkeypatch):
    monkeypatch.delenv("VERL_MT_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as exit_:
        hydra_main(print, argv=["data.sed=4"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: data.sed (command line): unknown key; did you mean data.seed?\n"
    monkeypatch.setenv("VERL_MT_TRACEBACK", "1")
    with pytest.raises(UnknownKeyError):
        hydra_main(print, argv=["data.sed=4"])


@pytest.mark.slow
def test_hydra_main_takes_hydras_flags(tmp_path, capsys):
    write(tmp_path, "mine", "defaults: [ppo_trainer, _self_]\ndata: {seed: 7}\n")
    seen = []
    hydra_main(seen.append, argv=["--config-path", str(tmp_path), "-cn", "mine", "data.val_seed=1"])
    hydra_main(seen.append, argv=["data.val_seed=2", f"--config-dir={tmp_path}", "--config-name=mine"])
    assert [(c.data.seed, c.data.val_seed) for c in seen] == [(7, 1), (7, 2)]
    hydra_main(seen.append, argv=["-cn", "mine", "-cp", str(tmp_path), "--cfg", "job", "data.seed=8"])
    assert len(seen) == 2
    assert yaml.safe_load(capsys.readouterr().out)["data"]["seed"] == 8
    with pytest.raises(SystemExit) as exit_:
        hydra_main(seen.append, argv=["--help"])
    assert exit_.value.code == 0
    assert "actor_rollout_ref.rollout" in capsys.readouterr().out
    for wrong in (["--nonsense"], ["--config-name"], ["--cfg", "nothing"]):
        with pytest.raises(SystemExit) as exit_:
            hydra_main(seen.append, argv=wrong)
        assert exit_.value.code == 2


@pytest.mark.slow
def test_one_more_folder_has_groups_for_a_shipped_file(tmp_path):
    (tmp_path / "exp").mkdir()
    write(tmp_path / "exp", "fast", "# @package _global_\ndata:\n  val_seed: 7\n")
    seen: list[Config] = []
    hydra_main(seen.append, argv=["--config-dir", str(tmp_path), "-cn", "tiny", "+exp=fast"])
    assert seen[0].data.val_seed == 7


PROGRAM = """
import hydra
from verl_mt.config.compose import register, to_config

register()

@hydra.main(version_base="1.3", config_path={folder!r}, config_name="mine")
def main(cfg):
    print(to_config(cfg).actor_rollout_ref.rollout.response_length)

main()
"""


@pytest.mark.slow
def test_a_program_with_its_own_hydra_main_finds_the_shipped_files(tmp_path):
    write(tmp_path, "mine", "defaults: [ppo_trainer, _self_]\ndata: {max_response_length: 99}\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))
    words = [sys.executable, str(program), "hydra.run.dir=out", "hydra.output_subdir=null", "data.seed=1"]
    env = dict(os.environ, PYTHONPATH=str(REPO))
    done = warm_start.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "99", done.stderr


def test_composing_leaves_other_hydra_programs_alone(tmp_path):
    import hydra

    assert register is not None
    compose()
    write(tmp_path, "other", "multi_turn: 3\nfree: {key: 1}\n")
    with hydra.initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"):
        assert hydra.compose("other") == {"multi_turn": 3, "free": {"key": 1}}
