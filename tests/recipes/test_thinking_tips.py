"""recipes/thinking_tips: the reference scripts of the colocated and the server mode, without a GPU."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from verl_mt.config.checks import check
from verl_mt.config.compose import compose, hydra_main
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.schedulers.thinking_tips import ThinkingModelTipsScheduler
from verl_mt.trainer.build_rollout import build_door

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "thinking_tips"


def commands(tmp_path: Path, mode: str) -> list[str]:
    """What the script would run: `python` is replaced by a recorder."""
    log, python = tmp_path / "commands", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(log))}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "MODE": mode}
    words = ["bash", str(RECIPE / "run_qwen3-1.7b.sh"), "trainer.total_epochs=2"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.cap("C41", "C15")
@pytest.mark.parametrize(("mode", "servers"), [("colocate", 0), ("server", 1)])
def test_the_reference_scripts_load_and_validate_on_a_cpu(mode, servers, tmp_path):
    *prepared, trained = commands(tmp_path, mode)
    assert [line.split("--split ")[1].split()[0] for line in prepared] == ["train", "test"]
    module, _, arguments = trained.removeprefix("-m ").partition(" ")
    assert module == "verl_mt.trainer"
    configs: list = []
    hydra_main(configs.append, argv=shlex.split(arguments))
    config = configs[0]
    check(config)
    assert (config.actor_rollout_ref.rollout.launch_servers, config.trainer.total_epochs) == (servers, 2)
    door = build_door(config, None)
    assert type(door.scheduler) is ThinkingModelTipsScheduler and door.scheduler.max_turns == 3
    assert load_reward(config.reward.path) is not None


@pytest.mark.slow
@pytest.mark.cap("C41", "C10", "C11")
@pytest.mark.parametrize("name", ["math_tip_trick", "math_tip_trick_multi_turn", "tool_call_scheduler"])
def test_every_shipped_scheduler_can_be_chosen_in_either_mode(name):
    for words in ([], ["actor_rollout_ref.rollout.launch_servers=1"]):
        config = compose(
            [f"actor_rollout_ref.rollout.multi_turn.scheduler={name}", *words],
            config_name="thinking_tips_colocate", config_dir=RECIPE / "config",
        )  # fmt: skip
        check(config)
        assert build_door(config, None).scheduler is not None
