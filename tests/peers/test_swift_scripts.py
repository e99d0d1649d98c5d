"""ms-swift's own launch scripts through `python -m verl_mt.migrate`: how they end, and that they resolve to what
ms-swift itself resolves.

The numbers are those that ms-swift 4 gives a run of each script: its command line over the defaults of its argument
classes (beta 0.04, temperature 0.9, cosine, weight decay 0.1, beta2 0.95, a loss averaged over sequences, adapters of
rank 8 at 1e-4, no nucleus), worked out by hand. A batch there is per_device_train_batch_size x steps_per_generation x
ranks samples of num_generations to a prompt; an update has gradient_accumulation_steps of its parts.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conformance
import pytest

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.extensions.compat.migrate import Migration, migrate

pytestmark = pytest.mark.slow  # real files, whole conversations

REVISION, EXAMPLES = "2026-08", "examples/train/grpo"
SEQUENCES, TOKENS = "seq-mean-token-mean", "token-mean"


@dataclass(frozen=True)
class Resolved:
    """What a run of a script has. Sizes are in prompts; what most scripts share is the default."""

    status: int
    batch: int
    n: int
    response: int
    lr: float = 1e-6
    mini: int | None = None
    epochs: int = 1
    warmup: float = 0.05
    temperature: float = 0.9
    kl: float = 0.04
    clip: tuple[float, float] = (0.2, 0.2)
    dual: float | None = None
    loss: str = "vanilla"
    aggregation: str = SEQUENCES
    estimator: str = "grpo"
    reward: Any = "accuracy"
    rank: int = 0
    rows: int = -1
    prompt: int = 8192
    iterations: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    """Key -> value, of what only this script sets."""


ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
PARTS = ["accuracy", "format"]
R1V = ["external_r1v_acc", "format"]
SCRIPTS = {
    "external/grpo_7b.sh": Resolved(
        3, batch=3, n=8, response=2048, epochs=3, temperature=1.0, rows=1000, more={f"{ROLLOUT}.launch_servers": 2}
    ),
    "external/moe_lora.sh": Resolved(
        3, batch=2, n=14, response=8192, warmup=0.01, temperature=1.0, kl=0.001, rank=8, rows=1000, prompt=12000,
        more={"algorithm.filter_overlong": True, f"{ROLLOUT}.max_model_len": 16384},
    ),
    "external/vllm_multi_turn.sh": Resolved(
        3, batch=4, mini=2, n=8, response=32768, temperature=1.0, loss="gspo", reward="thinking_tips", rows=10000,
        more={
            f"{TURNS}.scheduler": "thinking_tips_scheduler", f"{TURNS}.max_assistant_turns": 3,
            f"{TURNS}.loss_scale": "last_round", f"{ROLLOUT}.max_tokens_per_turn": 8192,
            "actor_rollout_ref.actor.top_entropy_quantile": 0.2, f"{ROLLOUT}.max_model_len": 32768,
        },
    ),
    "internal/fipo.sh": Resolved(
        3, batch=4, mini=2, n=8, response=4096, temperature=1.0, kl=0.0, clip=(0.2, 0.28), dual=10.0, loss="fipo",
        aggregation=TOKENS, iterations=3,
        more={"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 4},
    ),
    "internal/gspo.sh": Resolved(
        3, batch=32, mini=8, n=16, response=8192, kl=0.0, clip=(3e-4, 4e-4), loss="gspo", rows=10000,
    ),
    "internal/moe_lora.sh": Resolved(
        3, batch=2, n=16, response=8192, warmup=0.01, temperature=1.0, kl=0.001, rank=8, rows=1000, prompt=12000,
        more={"algorithm.filter_overlong": True, f"{ROLLOUT}.tensor_model_parallel_size": 2},
    ),
    "internal/rloo.sh": Resolved(
        3, batch=4, n=16, response=1024, warmup=0.0, temperature=1.0, clip=(3e-4, 4e-4), kl=0.0, estimator="rloo",
        reward=R1V, rank=8,
        more={"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl": {"type": "fixed", "kl_coef": 0.001}},
    ),
    "internal/real.sh": Resolved(
        3, batch=2, n=8, response=4096, lr=2e-6, temperature=0.6, kl=0.001, dual=3.0, loss="real", rows=5000,
        more={"algorithm.norm_adv_by_std_in_grpo": False},
    ),
    "internal/transformers.sh": Resolved(
        3, batch=1, n=4, response=1024, lr=1e-5, rank=8, rows=1000, prompt=2048, reward=PARTS,
    ),
    "internal/vllm_lora_qwenvl72b.sh": Resolved(
        3, batch=1, n=8, response=2048, temperature=1.1, rank=8, rows=1000, prompt=8191, reward=R1V,
        more={"reward.kwargs": {"rewards": R1V, "weights": [1.0, 0.1]}, "data.filter_overlong_prompts": True},
    ),
    "internal/vllm_vl7b.sh": Resolved(3, batch=1, n=8, response=1024, temperature=1.0, rank=8, reward=PARTS),
    "multi_node/colocate_multi_node1.sh": Resolved(
        0, batch=2, n=8, response=2048, rows=5000, prompt=4095, reward=PARTS, more={"trainer.nnodes": 2},
    ),
    "multi_node/server_multi_node.sh": Resolved(
        3, batch=2, n=4, response=2048, epochs=3, rank=8, rows=1000, more={"trainer.nnodes": 2},
    ),
    "plugin/gsm8k/gsm8k.sh": Resolved(
        3, batch=8, n=8, response=8192, warmup=0.0, temperature=1.0, clip=(0.2, 0.28), prompt=2048,
        reward=["gsm8k_accuracy", "gsm8k_format"],
        more={
            "algorithm.norm_adv_by_std_in_grpo": False, "data.columns": {"answer": "solution"},
            "actor_rollout_ref.model.template_kwargs": {"enable_thinking": False},
        },
    ),
    "plugin/run_external_reward_func.sh": Resolved(
        3, batch=8, n=8, response=8192, warmup=0.0, temperature=1.0, kl=0.001, clip=(0.2, 0.28), reward=R1V,
    ),
    "plugin/run_external_scheduler.sh": Resolved(
        0, batch=3, n=4, response=8192, lr=1e-5, rows=1000, prompt=8191,
        more={
            f"{TURNS}.scheduler": "tool_call_scheduler", f"{TURNS}.max_assistant_turns": 5,
            f"{ROLLOUT}.stop": ["Observation:"], f"{ROLLOUT}.max_tokens_per_turn": 2048,
        },
    ),
}  # fmt: skip
"""Those that carry over."""
REFUSED = {
    "opd_rl.sh": "distillation is not offered",
    "external/agent.sh": "agent_template=react_grpo is refused",
    "qwen2_5_omni/infer.sh": "",  # starts no training: a usage error
}


def script(name: str) -> Path:
    return conformance.peer("ms-swift", REVISION, f"{EXAMPLES}/{name}")


def migrated(name: str) -> Migration:
    file = script(name)
    return migrate(file.read_text(), file)


def at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_every_script_has_its_numbers_or_its_reason():
    folder = script("")
    if not folder.is_dir():
        pytest.skip(f"no files of ms-swift at {folder}")
    assert {str(file.relative_to(folder)) for file in folder.rglob("*.sh")} == SCRIPTS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_resolves_to_what_ms_swift_resolves_and_what_is_printed_is_a_script(name):
    wanted, found = SCRIPTS[name], migrated(name)
    done = subprocess.run(["bash", "-n"], input=found.command(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert found.refused == [] and (3 if found.changed else 0) == wanted.status, (found.refused, found.changed)
    assert len(found.changed) <= 4
    config = compose(found.overrides)
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    assert (data.train_batch_size, actor.ppo_mini_batch_size or data.train_batch_size, rollout.n) == (
        wanted.batch, wanted.mini or wanted.batch, wanted.n,
    )  # fmt: skip
    optim = actor.optim
    assert (optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps_ratio) == (wanted.lr, "cosine", wanted.warmup)
    assert (optim.weight_decay, optim.betas, optim.min_lr_ratio, actor.grad_clip) == (0.1, [0.9, 0.95], 0.0, 1.0)
    assert (actor.use_kl_loss, actor.kl_loss_coef if actor.use_kl_loss else 0.0) == (wanted.kl > 0, wanted.kl)
    assert (actor.clip_range, actor.clip_ratio_c) == (wanted.clip, wanted.dual if wanted.loss != "gspo" else 3.0)
    assert actor.policy_loss.get("loss_mode", "vanilla") == wanted.loss
    assert (actor.loss_agg_mode, actor.ppo_epochs) == (wanted.aggregation, wanted.iterations)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (wanted.temperature, 1.0, -1)
    assert (rollout.response_length, data.max_prompt_length) == (wanted.response, wanted.prompt)
    assert (config.algorithm.adv_estimator, config.trainer.total_epochs) == (wanted.estimator, wanted.epochs)
    assert (config.actor_rollout_ref.model.lora_rank, data.train_max_samples) == (wanted.rank, wanted.rows)
    several = isinstance(wanted.reward, list)
    assert config.reward.path == ("weighted_sum" if several else wanted.reward)
    assert not several or config.reward.kwargs["rewards"] == wanted.reward
    assert (data.prompt_key, data.label_key) == ("messages", "solution")
    assert {key: at(config, key) for key in wanted.more} == wanted.more
    asks = "--system" in script(name).read_text()
    assert (data.system is not None) is asks and config.actor_rollout_ref.model.freeze_vision


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, reason in REFUSED.items() if reason])
def test_a_script_that_is_refused_says_why(name, reason):
    assert any(reason in text for text in migrated(name).refused)


def test_a_system_prompt_of_several_lines_reaches_the_trainer_as_the_script_has_it(tmp_path):
    """The printed command is run by a shell with a stand-in for python that shows its words."""
    (tmp_path / "python").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    (tmp_path / "python").chmod(0o755)
    found = migrated("plugin/run_external_scheduler.sh")
    done = subprocess.run(
        ["bash", "-c", found.command()], text=True, capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    words = done.stdout.split("\0")[2:-1]
    system = compose(words).data.system
    assert system.startswith("\nAnswer the following questions") and system.endswith("Begin!\n")
    assert r"\(\boxed{10}\)" in system and '"2*(3+4)"' in system


def test_the_devices_of_a_commented_rollout_server_stand_behind_the_trainers():
    assert migrated("external/vllm_multi_turn.sh").env["CUDA_VISIBLE_DEVICES"] == "1,2,0"
