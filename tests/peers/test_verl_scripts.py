"""verl's own launch scripts through `python -m verl_mt.migrate`: how they end, what they resolve to, and that a shell
reads what comes out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import conformance
import pytest
from tables import newest_first, one_of_each
from verl_resolved import ours, theirs, verl_resolves, we_resolve

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate import main, migrate
from verl_mt.extensions.toolbox.mcp_client.servers import McpEntry, read_servers

pytestmark = pytest.mark.slow  # real files, whole conversations

REFUSED = {
    "run_qwen3_4b_dapo_multiturn.sh": "data.custom_cls",  # a data set class of a recipe that is not there
}
"""Scripts that need no Megatron and are refused -> what they name that has no counterpart."""
EXAMPLES = "examples/sglang_multiturn"
SCRIPTS = sorted(
    (revision.name, str(file.relative_to(revision / EXAMPLES)))
    for revision in conformance.revisions("verl")
    for file in (revision / EXAMPLES).rglob("*.sh")
    if "main_ppo" in file.read_text()
)


def file_of(place: tuple[str, str]) -> str:
    """A script's revisions are nearly equal, and so is it for four GPUs: the newest one runs for every commit."""
    return place[1].replace("_4xgpu", "")


def migrated(revision: str, script: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main([str(conformance.peer("verl", revision, f"{EXAMPLES}/{script}"))])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(("revision", "script"), one_of_each(reversed(SCRIPTS), file_of))
def test_a_script_composes_or_is_refused_for_a_known_reason(revision, script, capsys):
    status, text = migrated(revision, script, capsys)
    refused = text.partition("# REFUSED")[2]
    if "megatron" in script:
        assert status == 1 and "Megatron is not offered" in refused
    elif script in REFUSED:
        assert status == 1 and REFUSED[script] in refused
    else:
        assert status in (0, 3) and not refused
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.release  # the newest revision's are tried one by one
def test_four_of_five_scripts_without_megatron_compose(capsys):
    tried = [place for place in SCRIPTS if "megatron" not in place[1]]
    if not tried:
        pytest.skip("no files of verl")
    ended = [migrated(*place, capsys)[0] for place in tried]
    assert sum(status in (0, 3) for status in ended) >= 0.8 * len(tried) and len(tried) >= 20


def test_what_a_script_prints_is_what_a_shell_hands_to_the_trainer(capsys, tmp_path):
    """The printed command is run by a shell with a stand-in for python that shows its words."""
    revision, script = "v0.6.1", "run_qwen2.5-3b_gsm8k_multiturn.sh"
    status, text = migrated(revision, script, capsys)
    (tmp_path / "python").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    (tmp_path / "python").chmod(0o755)
    root = conformance.peer("verl", revision).resolve()
    done = subprocess.run(
        ["bash", "-c", text], cwd=root, text=True, capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/someone", "OFFLOAD": "False"},
    )  # fmt: skip
    words = done.stdout.split("\n")[2:-1]
    folder = next(w for w in words if w.startswith("--config-path=")).partition("=")[2]
    assert status in (0, 3) and folder == f"{root}/{EXAMPLES}/config"
    overrides = [w for w in words if not w.startswith("-")]
    tools = next(w for w in overrides if "tools_config_file" in w).partition("=")[2].strip("'")
    assert tools == f"{root}/{EXAMPLES}/config/tool_config/gsm8k_tool_config.yaml"
    config = compose(overrides, "gsm8k_multiturn_grpo", folder)
    assert config.data.train_batch_size == 256 and config.actor_rollout_ref.rollout.n == 16
    assert config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0  # verl's default, not ours
    assert config.trainer.max_actor_ckpt_to_keep is None and config.trainer.n_workers_per_node == 8


OUTSIDE = {"use_kl_loss": "False"}
"""A variable that one of the scripts reads and does not set."""


def compared(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """What was found, without the limit of calls where there is none: verl's other rollout has no such limit."""
    return {**found, "calls of a turn": None} if wanted["calls of a turn"] is None else found


@pytest.mark.parametrize(
    ("revision", "script"),
    one_of_each([p for p in reversed(SCRIPTS) if "megatron" not in p[1] and p[1] not in REFUSED], file_of),
)
def test_a_script_resolves_to_what_verl_itself_resolves(revision, script, tmp_path):
    file = conformance.peer("verl", revision, f"{EXAMPLES}/{script}")
    root = conformance.peer("verl", revision)
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    wanted = theirs(verl_resolves(file, root, tmp_path / "theirs", OUTSIDE))
    found = ours(we_resolve(migrate(file.read_text(), file).command(), root, tmp_path / "ours", OUTSIDE))
    assert compared(found, wanted) == wanted and wanted["batch"] > 1


def test_a_variable_that_a_script_does_not_set_is_named():
    found = migrate("N=4\npython -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$N trainer.total_epochs=$EPOCHS")
    assert any(note.startswith("$EPOCHS: not set by the script") for note in found.notes)
    assert not any("$N:" in note for note in found.notes)


WITHOUT_YAML = "python -m verl.trainer.main_ppo "


def test_defaults_that_count_beside_what_is_given_are_carried_over():
    actor = "actor_rollout_ref.actor"
    clipped = migrate(f"{WITHOUT_YAML}{actor}.clip_ratio=0.1 {actor}.clip_ratio_high=0.28")
    assert f"{actor}.clip_ratio_low=0.2" in clipped.added and f"{actor}.clip_ratio_high=0.28" in clipped.overrides
    assert f"{actor}.shuffle=False" in clipped.added
    turns = "actor_rollout_ref.rollout.multi_turn"
    tools = f"{turns}.tool_config_path=tools_configs/calculator.yaml"
    loop = migrate(f"{WITHOUT_YAML}{tools} actor_rollout_ref.rollout.mode=async").overrides
    assert {f"{turns}.max_parallel_calls=1", f"{turns}.max_tool_response_tokens=256"} <= set(loop)
    assert not any(
        "max_parallel_calls" in word
        for word in migrate(f"{WITHOUT_YAML}{tools} actor_rollout_ref.rollout.mode=sync").overrides
    )


MAIN_BRANCH = """
set -xeuo pipefail
gpus=${GPUS:-8}
MODE=${MODE:-async}
N=${N:-}
N=${N:-5}
long=$((1024 * 2))
ROOT=${ROOT:-"${HOME}/verl"}
if [ "${MODE}" = "server" ]; then
    CONFIG_NAME=gsm8k_multiturn_grpo_server
else
    CONFIG_NAME=gsm8k_multiturn_grpo
fi
CONFIG=(
    --config-path="$(pwd)/examples/sglang_multiturn/config"
    --config-name="$CONFIG_NAME"
)
DATA=(
    data.val_files=${VAL:-"${ROOT}/b.parquet"}
    data.max_response_length=${long}
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((long + 1024) * 2))
    data.train_files=$HOME/a.parquet
    data.train_batch_size=${TRAIN_BATCH_SIZE:-64}
)
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=${MINI:-$((64 / 4))}
    actor_rollout_ref.rollout.n=$N
    actor_rollout_ref.rollout.mode=$MODE
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
)
EXTRA=(
)
uv run --frozen --no-sync python3 -m verl.trainer.main_ppo "${CONFIG[@]}" "${DATA[@]}" "${ACTOR[@]}" "${EXTRA[@]}" \\
    trainer.n_gpus_per_node=${gpus} actor_rollout_ref.rollout.max_num_batched_tokens=9000 "$@"
"""


@pytest.fixture
def main_branch(tmp_path) -> Path:
    """A script beside verl's own YAML files."""
    folder = tmp_path / "examples" / "own"
    folder.mkdir(parents=True)
    configs = conformance.peer("verl", "v0.6.1", f"{EXAMPLES}/config")
    (folder.parent / "sglang_multiturn").mkdir()
    (folder.parent / "sglang_multiturn" / "config").symlink_to(configs.resolve())
    (folder / "run.sh").write_text(MAIN_BRANCH)
    return folder / "run.sh"


def test_a_script_in_the_manner_of_its_main_branch_is_carried_over(main_branch):
    found = migrate(main_branch.read_text(), main_branch)
    assert found.refused == []
    assert "trainer.placement=ray" in found.overrides and "several ranks" in found.added["trainer.placement=ray"]
    steps = "actor_rollout_ref.actor.optim.lr_warmup_steps=40"
    assert "4 optimizer steps each (with the script's own sizes)" in found.added[steps]
    assert found.changed == []
    assert "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4" in found.overrides
    command = found.command()
    assert '"actor_rollout_ref.rollout.n=${N:-5}"' in command and "ppo_max_token_len=6144" in command
    assert "data.val_files=${VAL:-${ROOT:-${HOME}/verl}/b.parquet}" in command


@pytest.mark.parametrize("variables", [{}, {"N": "3", "TRAIN_BATCH_SIZE": "32", "GPUS": "4", "MODE": "sync"}])
def test_variables_from_outside_reach_both_alike(main_branch, tmp_path, variables):
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    root = conformance.peer("verl", "v0.6.1")
    wanted = theirs(verl_resolves(main_branch, root, tmp_path / "theirs", variables))
    found = ours(we_resolve(migrate(MAIN_BRANCH, main_branch).command(), root, tmp_path / "ours", variables))
    warm_up = (found.pop("warm-up"), wanted.pop("warm-up"))
    assert compared(found, wanted) == wanted and wanted["n"] == int(variables.get("N", 5))
    assert warm_up == (40, 10 * wanted["batch"] // 16)  # the number of steps is of the script's own sizes


def test_dapos_own_trainer_is_started_with_the_same_keys():
    words = "data.train_files=a.parquet algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    found = migrate(
        f"ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo {words} reward_model.reward_manager=dapo"
    )
    assert found.refused == [] and found.wrapper[:3] == ["ray", "job", "submit"]
    assert "actor_rollout_ref.rollout.n=4" in found.overrides


def test_megatron_is_refused_once_whatever_names_it():
    parts = " ".join(f"actor_rollout_ref.{p}.megatron.tensor_model_parallel_size=2" for p in ("actor", "ref"))
    refused = migrate(WITHOUT_YAML + parts).refused
    assert (
        len(refused) == 1
        and "tensor_model_parallel_size (and 1 more) is refused: Megatron is not offered" in refused[0]
    )
    by_file = migrate(
        WITHOUT_YAML + "--config-path=./config --config-name='ppo_megatron_trainer.yaml' data.train_files=a"
    )
    assert len(by_file.refused) == 1 and "ppo_megatron_trainer.yaml: Megatron is not offered" in by_file.refused[0]


@pytest.mark.parametrize("revision", newest_first(["v0.5.0", "v0.6.1"]))
def test_a_yaml_file_over_megatrons_trainer_has_one_clear_error(revision):
    folder = conformance.peer("verl", revision, f"{EXAMPLES}/config")
    with pytest.raises(
        ConfigError, match=r"starts from verl's ppo_megatron_trainer: Megatron is not offered"
    ) as raised:
        compose([], "gsm8k_multiturn_megatron_grpo", folder)
    assert "Could not load" not in str(raised.value)


@pytest.mark.parametrize("revision", newest_first(["v0.5.0", "v0.6.1"]))
def test_a_placeholder_for_a_servers_address_is_named(revision):
    entry = McpEntry(mcp_servers_config_path="mcp_server.json")
    folder = conformance.peer("verl", revision, f"{EXAMPLES}/config/tool_config")
    with pytest.raises(ConfigError, match=r"server 'Tavily Expert'.*url 'your_tavily_expert_url' is not the address"):
        read_servers(entry, beside=folder)


@pytest.mark.parametrize(
    ("word", "left_out"),
    [
        ("algorithm.lam=0.95", "grpo does not read it"),
        ("trainer.rollout_data_dir=/tmp/x", "rollouts/ of the run directory"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=['model']", "everything that a resumed run needs"),
        ("ray_init.num_cpus=16", "start Ray as you need it"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True", "only vllm has these"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "transformers' own kernels"),
        ("actor_rollout_ref.ref.fsdp_config.fsdp_size=2", "spread as the actor is"),
        ("actor_rollout_ref.rollout.max_num_batched_tokens=9000", "only speed depends on it"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent", "nothing to set"),
    ],
)
def test_what_nothing_that_is_learned_depends_on_does_not_make_a_script_fail(word, left_out):
    engine = "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=4"
    found = migrate(f'{WITHOUT_YAML}algorithm.adv_estimator=grpo {engine} "{word}"')
    assert found.refused == found.changed == []
    assert any(left_out in line for line in found.dropped), found.dropped


def test_trackers_that_are_not_offered_are_left_out_and_the_others_stay():
    words = {"['console','swanlab']": "[console]", "swanlab": "[console]", "['wandb','vemlp_wandb']": "[wandb]"}
    for value, kept in words.items():
        found = migrate(f'{WITHOUT_YAML}"trainer.logger={value}"')
        assert f"trainer.logger={kept}" in found.overrides and found.refused == []
        assert any("is not offered" in line for line in found.dropped)
    own = migrate(f"{WITHOUT_YAML}trainer.logger=[my.py:Tracker]")
    assert any("my.py:Tracker" in word for word in own.overrides) and own.dropped == []


def test_a_value_that_an_estimator_reads_stays():
    found = migrate(f"{WITHOUT_YAML}algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.gamma=0.99")
    assert {"algorithm.lam=0.95", "algorithm.gamma=0.99"} <= set(found.overrides)
