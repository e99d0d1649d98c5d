"""Config groups: every file composes, alone and with others, who wins, and the recipes are what they were."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_start
import yaml
from tables import one_of_each

from verl_mt.config.compose import compose, config_from_mapping, hydra_main
from verl_mt.config.groups import GROUPS, is_choice
from verl_mt.config.schema import Config, leaves, value_of
from verl_mt.errors import ConfigError, UnknownKeyError
from verl_mt.extensions.supervised import sft

REPO = Path(__file__).resolve().parents[2]
ACTOR = "actor_rollout_ref.actor"
PAGE = (REPO / "docs" / "groups.md").read_text()


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (REPO / "config" / group).glob("*.yaml"))


def changed(config: Config) -> dict[str, Any]:
    """Key -> value of what is not the schema's default."""
    default = Config()
    return {key: value for key in leaves() if (value := value_of(config, key)) != value_of(default, key)}


def write(folder: Path, name: str, text: str) -> None:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_groups_are_the_folders_and_have_their_places_in_the_shipped_files():
    assert {folder.name for folder in (REPO / "config").iterdir() if folder.is_dir()} == set(GROUPS)
    for name, task in (("ppo_trainer", None), ("tiny", "tiny")):
        listed = yaml.safe_load((REPO / "config" / f"{name}.yaml").read_text())["defaults"]
        assert listed == ["base_config", "_self_", {"task": task}, *({group: None} for group in GROUPS[1:])]


def test_the_page_lists_every_file_and_no_other():
    table = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", PAGE, re.M) if row[0] in GROUPS}
    assert list(table) == list(GROUPS)
    for group in ("task", "scale", "engine", "logger"):
        assert sorted(re.findall(r"`(\w+)`", table[group])) == names(group)
    for group in ("algorithm", "experiment"):
        rows = PAGE.partition(f"| `{group}=` |")[2].partition("\n\n")[0].splitlines()[2:]
        assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])) == names(group)


def test_an_algorithms_file_names_a_paper_of_the_page_on_algorithms():
    page = (REPO / "docs" / "algorithms.md").read_text()
    for name in names("algorithm"):
        papers = re.findall(r"arXiv:([\d.]+\d)", (REPO / "config" / "algorithm" / f"{name}.yaml").read_text())
        known = [paper for paper in papers if f"arxiv.org/abs/{paper}" in page]
        assert papers and known == papers, name


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_file_composes_alone(group):
    for name in names(group):
        compose([f"{group}={name}"])


def tried_together() -> list[tuple[str, str, str]]:
    """Each task with each algorithm, and all scales with both. The first ones have every algorithm once."""
    tasks, scales = names("task"), names("scale")
    return [
        (tasks[(i + turn) % len(tasks)], algorithm, scales[(i // len(tasks) + turn) % len(scales)])
        for turn in range(len(tasks))
        for i, algorithm in enumerate(names("algorithm"))
    ]


def test_all_pairs_are_tried():
    cases = tried_together()
    for i, j, kinds in ((0, 1, ("task", "algorithm")), (0, 2, ("task", "scale")), (1, 2, ("algorithm", "scale"))):
        assert len({(case[i], case[j]) for case in cases}) == len(names(kinds[0])) * len(names(kinds[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "algorithm", "scale"), one_of_each(tried_together(), lambda case: case[1]))
def test_task_algorithm_and_scale_combine(task, algorithm, scale):
    config = compose([f"task={task}", f"algorithm={algorithm}", f"scale={scale}"])
    alone = changed(compose([f"algorithm={algorithm}"]))
    for key in alone.keys() - changed(compose()).keys():  # what the algorithm sets is set, whatever the task and scale
        assert value_of(config, key) == alone[key], key
    assert config.data.train_files == compose([f"task={task}"]).data.train_files
    assert (config.actor_rollout_ref.rollout.name == "local") is (scale == "laptop")


@pytest.mark.slow
def test_experiments_are_what_the_recipes_files_were():
    """`recipe_configurations.yaml` was written from those files before they became experiments."""
    recorded = yaml.safe_load((Path(__file__).parent / "recipe_configurations.yaml").read_text())
    in_recipes = {file.stem: file for file in (REPO / "recipes").rglob("config/*.yaml")}
    later = {"bfcl", "public_tasks", "tau2_retail"}
    assert {*names("experiment"), *in_recipes, "tiny"} - later == set(recorded)
    for name, values in recorded.items():
        if name == "tiny":
            config = compose()
        elif name in in_recipes:
            config = compose(config_name=name, config_dir=in_recipes[name].parent)
        else:
            config = compose([f"experiment={name}"])
        assert changed(config) == values, name


def test_a_choice_replaces_that_of_an_experiment():
    config = compose(["experiment=gsm8k_tool_8gpus", "algorithm=dapo", "+logger=wandb"])
    actor = config.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.clip_ratio_high, config.algorithm.filter_groups.enable) == (False, 0.28, True)
    assert (config.trainer.n_workers_per_node, config.trainer.logger) == (8, ["console", "wandb"])


@pytest.mark.slow
def test_null_chooses_no_file():
    without = compose(["experiment=gsm8k_tool_grpo", "algorithm=null", "logger=null"])
    assert without.actor_rollout_ref.actor.use_kl_loss is False and without.trainer.logger == ["console"]
    assert without.data.train_files == "data/gsm8k/train.parquet"
    assert compose(["task=null"]).trainer.experiment_name != "tiny"


@pytest.mark.slow
def test_the_engine_wins_over_the_scale_and_a_key_over_both():
    memory = "actor_rollout_ref.rollout.gpu_memory_utilization"
    assert value_of(compose(["scale=1gpu", "engine=sglang_servers"]), memory) == 0.8
    assert value_of(compose([f"{memory}=0.6", "scale=1gpu"]), memory) == 0.6


FILES = {
    "own": "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {clip_ratio_high: 0.25}}\n",
    "named": "defaults: [ppo_trainer, algorithm: rloo, _self_]\n",
    "keyed": "defaults: [ppo_trainer, algorithm: grpo, _self_]\nalgorithm: {adv_estimator: rloo}\n",
    "nested": "defaults: [named, _self_]\ntrainer: {seed: 4}\n",
    "overriding": "defaults: [ppo_trainer, _self_, override algorithm: rloo, override task: gsm8k_tool]\n",
    "tiny_based": "defaults: [tiny, _self_]\nalgorithm: {adv_estimator: rloo}\n",
    "experimental": "defaults: [ppo_trainer, experiment: gsm8k_tool_8gpus, _self_]\ntrainer: {seed: 4}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_choice_of_the_command_line_wins_over_a_file_of_any_form(name, tmp_path):
    for file, text in FILES.items():
        write(tmp_path, file, text)
    alone = compose([], name, tmp_path)
    assert alone.actor_rollout_ref.actor.clip_ratio_high == (0.25 if name == "own" else None)
    assert alone.algorithm.adv_estimator == ("grpo" if name in ("own", "experimental") else "rloo")
    assert alone.trainer.n_workers_per_node == (8 if name == "experimental" else 1)
    chosen = compose(["algorithm=dapo", "task=search"], name, tmp_path)
    assert chosen.actor_rollout_ref.actor.clip_ratio_high == 0.28
    assert chosen.algorithm.adv_estimator == "grpo" and chosen.algorithm.filter_groups.enable
    assert chosen.data.train_files == "data/search/train.parquet"
    big = compose(["experiment=gsm8k_tool_2nodes"], name, tmp_path)
    assert (big.trainer.nnodes, big.trainer.experiment_name) == (2, "qwen2.5-3b-tool-2nodes")


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (
            ["logger=wandbb", "foo=1"],
            UnknownKeyError,
            "logger=wandbb (command line): the group logger has no file wandbb.yaml. It has console, mlflow, "
            "tensorboard, wandb. Did you mean logger=wandb?",
        ),
        (["scale=16gpus"], ConfigError, "It has 1gpu, 2nodes, 8gpus, laptop. Did you mean scale="),
        (
            ["logger=[wandb,mlflow]"],
            UnknownKeyError,
            "logger (command line): unknown key; did you mean trainer.logger?",
        ),
        (["algorithm={adv_estimatr:rloo}"], UnknownKeyError, "did you mean algorithm.adv_estimator?"),
        (["season=winter"], UnknownKeyError, "season (command line): unknown key"),
    ],
)
def test_a_name_that_is_no_file_of_the_group(words, kind, text):
    with pytest.raises(kind) as caught:
        compose(words)
    assert text in str(caught.value)
    assert type(caught.value) is kind


def test_a_mapping_sets_keys_of_the_section_that_has_the_groups_name():
    assert compose(["algorithm={adv_estimator:rloo}"]).algorithm.adv_estimator == "rloo"
    assert (
        not is_choice("algorithm={adv_estimator:rloo}") and not is_choice("algorithm.gamma=1") and is_choice("task=x")
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--config-dir", "hydra.searchpath"])
def test_your_folder_has_files_for_the_shipped_groups_and_groups_of_its_own(way, tmp_path, capsys):
    """Verl's names of keys are read in both, and a key that does not exist is refused in both."""
    write(tmp_path, "task/shop", "# @package _global_\ndata: {max_response_length: 99}\n")
    write(tmp_path, "season/winter", "# @package _global_\ntrainer: {seed: 7}\n")
    write(tmp_path, "season/summer", "# @package _global_\ntrainer: {sed: 7}\n")
    named = [way, str(tmp_path)] if way == "--config-dir" else [f"{way}=[file://{tmp_path}]"]
    seen: list[Config] = []
    hydra_main(seen.append, argv=[*named, "task=shop", "+season=winter", "algorithm=rloo"])
    assert (seen[0].trainer.seed, seen[0].actor_rollout_ref.rollout.response_length) == (7, 99)
    assert seen[0].algorithm.adv_estimator == "rloo" and seen[0].trainer.experiment_name != "tiny"
    for words, text in (
        (["+season=summer"], f"trainer.sed ({tmp_path}/season/summer.yaml): unknown key; did you mean trainer.seed?"),
        (
            ["+season=wintr"],
            "season=wintr (command line): the group season has no file wintr.yaml. It has summer, winter",
        ),
    ):
        with pytest.raises(SystemExit):
            hydra_main(seen.append, argv=[*named, *words])
        assert text in capsys.readouterr().err


def test_a_file_that_names_a_missing_file_of_a_group_is_named(tmp_path):
    write(tmp_path, "mine", "defaults: [ppo_trainer, _self_, override algorithm: dappo]\n")
    with pytest.raises(ConfigError, match=rf"algorithm=dappo \({tmp_path}/mine\.yaml\).*Did you mean algorithm=dapo\?"):
        compose(["trainer.seed=2"], "mine", tmp_path)


def test_the_cold_start_takes_an_experiment():
    config = sft.config_of("x.jsonl", ["experiment=smollm2"])
    assert config is not None and config.data.max_prompt_length == 352


PROGRAM = """
import hydra
from verl_mt.config.compose import register, to_config

register()

@hydra.main(version_base="1.3", config_path={folder!r}, config_name="mine")
def main(cfg):
    config = to_config(cfg)
    print(config.actor_rollout_ref.actor.clip_ratio_high, config.data.train_files, config.trainer.n_workers_per_node)

main()
"""


@pytest.mark.slow
def test_a_program_with_its_own_hydra_main_has_the_groups(tmp_path):
    write(tmp_path, "mine", "defaults: [ppo_trainer, _self_]\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))
    words = [sys.executable, str(program), "experiment=gsm8k_tool_8gpus", "algorithm=dapo"]
    done = warm_start.run(
        [*words, "hydra.run.dir=out", "hydra.output_subdir=null"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "0.28 data/gsm8k/train.parquet 8", done.stderr


def test_a_runs_own_configuration_takes_keys_and_no_group():
    """It has every key already: a group would win over none of them, or over all."""
    with pytest.raises(ConfigError, match="algorithm=dapo"):
        config_from_mapping({"trainer": {"seed": 1}}, ["algorithm=dapo"])
