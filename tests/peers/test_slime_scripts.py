"""slime's launch scripts, unmodified: what they set here is what slime resolves from their arguments.

The numbers are worked out by hand from each script, and from what slime and Megatron take where it says nothing: the
loss is a mean over samples, beta2 0.999, no dual clip, k1 as KL loss of weight 0, validation sampled as training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import conformance
import pytest

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate import main, migrate
from verl_mt.extensions.compat.migrate.launch import ENV

pytestmark = pytest.mark.slow
REVISION = "2026-08"
MATH = {"prompt_key": "prompt", "label_key": "label", "train_files": "/root/dapo-math-17k/dapo-math-17k.jsonl"}


@dataclass
class Resolved:
    """What slime resolves, under our names."""

    status: int
    batch: int
    mini: int
    n: int
    per_turn: int | None
    response: int
    steps: int | None
    data: dict[str, object]
    reward: tuple[str, dict[str, object]]
    model: str
    ranks: int
    engine_ranks: int
    weight_decay: float = 0.1
    kl: tuple[bool, float, str] = (True, 0.0, "low_var_kl")
    clip: tuple[float, float] = (0.2, 0.28)
    temperature: float = 1.0
    context: int | None = None
    aggregation: str = "seq-mean-token-mean"
    generate: str | None = None
    loss: str | None = None
    tis: str | None = None
    sampler_log_probs: str = "auto"
    validation: tuple[object, int, int, float, float, int] | None = None
    """(files, every, n, temperature, top_p, top_k)"""
    save: tuple[str | None, int] = (None, -1)
    filters: bool = False
    listed: list[str] = field(default_factory=list)
    """Beginnings of the listed differences."""


AIME = "/root/aime-2024/aime-2024.jsonl"
SCRIPTS = {
    "examples/search-r1/run_qwen2.5_3B.sh": Resolved(
        status=3, batch=32, mini=32, n=8, per_turn=512, response=0, steps=3000,
        listed=["data.max_prompt_length=", "actor_rollout_ref.rollout.response_length="],
        data={
            "prompt_key": "prompt", "label_key": "reward_model",
            "train_files": "/root/Search-R1/data/nq_hotpotqa_train/train.parquet",
        },
        reward=("generate_with_search.reward_func", {}), model="/root/Qwen2.5-3B/", ranks=4, engine_ranks=2,
        weight_decay=0.01, kl=(True, 0.001, "low_var_kl"), generate="generate_with_search.generate",
    ),
    "examples/multi_agent/run-qwen3-30B-A3B-multi-agent.sh": Resolved(
        status=0, batch=32, mini=32, n=8, per_turn=8192, response=16384, steps=3000, data=MATH, context=16384,
        reward=("rm_hub", {"rm_type": "deepscaler"}), model="/root/Qwen3-30B-A3B", ranks=8, engine_ranks=8,
        generate="examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
        sampler_log_probs="always", save=("/root/Qwen3-4B_slime/", 20),
    ),
    "examples/fully_async/run-qwen3.5-9B-fully_async.sh": Resolved(
        status=3, batch=8, mini=8, n=4, per_turn=None, response=2048, steps=3,
        data=MATH | {"train_files": "/root/datasets/dapo-math-17k/dapo-math-17k.jsonl"},
        reward=("rm_hub", {"rm_type": "deepscaler"}), model="/root/models/Qwen3.5-9B", ranks=4, engine_ranks=2,
        save=("/tmp/slime_fully_async_demo/", 9999),
        listed=["--rollout-function-path", "train_async.py", "--rollout-num-gpus"],
    ),
    "examples/eval_multi_task/multi_task.sh": Resolved(
        status=3, batch=32, mini=32, n=8, per_turn=None, response=8192, steps=3000, data=MATH,
        reward=("rm_hub", {"rm_type": "deepscaler"}), model="/root/Qwen3-4B", ranks=8, engine_ranks=2,
        save=("/root/Qwen3-4B_slime/", 20), listed=["--eval-config"],
    ),
    "scripts/run-qwen3-32B.sh": Resolved(
        status=3, batch=32, mini=32, n=8, per_turn=None, response=8192, steps=5, data=MATH,
        reward=("rm_hub", {"rm_type": "deepscaler"}), model="/root/Qwen3-32B", ranks=8, engine_ranks=8,
        validation=([AIME], 20, 16, 1.0, 1.0, -1), save=("/root/Qwen3-32B_slime", 20),
        listed=["--eval-max-response-len 16384"],
    ),
    "scripts/run-qwen2.5-0.5B-reproducibility.sh": Resolved(
        status=3, batch=32, mini=32, n=8, per_turn=None, response=1024, steps=100,
        data={"prompt_key": "messages", "label_key": "label", "train_files": "/root/gsm8k/train.parquet"},
        reward=("rm_hub", {"rm_type": "math"}), model="/root/Qwen2.5-0.5B-Instruct/", ranks=8, engine_ranks=1,
        aggregation="token-mean", validation=(["/root/gsm8k/test.parquet"], 20, 1, 1.0, 1.0, 1),
        listed=["--deterministic-mode", "--sglang-enable-deterministic-inference"],
    ),
    "scripts/run-moonlight-16B-A3B.sh": Resolved(
        status=3, batch=128, mini=32, n=8, per_turn=None, response=4096, steps=3000, data=MATH,
        reward=("rm_hub", {"rm_type": "math"}), model="/root/Moonlight-16B-A3B", ranks=8, engine_ranks=8,
        validation=([AIME], 20, 8, 1.0, 1.0, -1), save=("/root/Moonlight-16B-A3B_slime/", 20), filters=True,
        listed=["--over-sampling-batch-size 256"],
    ),
    "scripts/low_precision/run-qwen3-4b-fp8.sh": Resolved(
        status=3, batch=32, mini=32, n=8, per_turn=None, response=8192, steps=3000, data=MATH,
        reward=("rm_hub", {"rm_type": "deepscaler"}), model="/root/Qwen3-4B", ranks=8, engine_ranks=2,
        validation=(["/root/data/aime-2024.jsonl"], 20, 16, 1.0, 1.0, -1),
        save=("/root/rl-model/qwen3-4b_cp8_fp8", 20), listed=["--hf-checkpoint", "--eval-max-response-len"],
    ),
}  # fmt: skip
REFUSED = {
    "examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh": "custom_tis_function_path is refused",
    "examples/on_policy_distillation/run-qwen3-8B-opd-megatron.sh": "--use-opd: distillation",
    "scripts/low_precision/run-moonlight-16B-A3B-int4.sh": "it needs Megatron: weights are rounded to int4",
    "scripts/low_precision/run-qwen3-30B-A3B-int4.sh": "it needs Megatron: weights are rounded to int4",
    "scripts/run-deepseek-r1.sh": "it needs Megatron: a mixture of experts",
    "scripts/run-glm4.7-30B-A3B.sh": "it needs Megatron: the layers that predict further tokens",
    "scripts/run-glm5-744B-A40B.sh": "it needs Megatron: a mixture of experts",
    "scripts/run-kimi-k2-Instruct.sh": "the line above lacks its backslash",
    "scripts/run-mimo-7B-rl-eagle.sh": "it needs Megatron: the layers that predict further tokens",
    "scripts/run-qwen3-235B-A22B.sh": "it needs Megatron: a mixture of experts",
    "scripts/run-qwen3-4B-base-sft.sh": "python -m verl_mt.sft",
    "scripts/run-qwen3-next-80B-A3B.sh": "it needs Megatron: a mixture of experts",
    "scripts/run-qwen3.5-35B-A3B-sft.sh": "python -m verl_mt.sft",
}


def carried(name: str):
    file = conformance.peer("slime", REVISION, name)
    found = migrate(file.read_text(), file)
    assert found.refused == []
    words = [ENV.sub(lambda m: m.group(2) or "4", word) for word in found.overrides]
    return found, compose(words)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_sets_is_what_slime_resolves(name):
    expected = SCRIPTS[name]
    found, config = carried(name)
    assert (3 if found.changed else 0) == expected.status, found.changed
    listed = [line for line in found.changed if not line.startswith(tuple(expected.listed))]
    assert listed == [] and len(found.changed) == len(expected.listed)
    _check_rollout(config, expected)
    _check_learning(config, expected)
    _check_trainer(config, expected)


def _check_rollout(config, expected):
    rollout, data = config.actor_rollout_ref.rollout, config.data
    assert (data.train_batch_size, rollout.n, rollout.temperature) == (expected.batch, expected.n, expected.temperature)
    assert (rollout.max_tokens_per_turn, rollout.max_model_len) == (expected.per_turn, expected.context)
    if expected.per_turn is None or expected.context:
        assert rollout.response_length == expected.response
    else:  # several turns, which slime does not bound together
        assert rollout.response_length >= 8 * expected.per_turn
    assert (rollout.top_p, rollout.top_k, rollout.name) == (1.0, -1, "sglang")
    assert rollout.custom_generate_function_path == expected.generate
    assert {key: getattr(data, key) for key in expected.data} == expected.data
    assert (data.shuffle, data.apply_chat_template) == (True, True)
    assert data.max_prompt_length >= 2048 and data.filter_overlong_prompts
    assert (config.reward.path, config.reward.kwargs) == expected.reward
    assert rollout.tensor_model_parallel_size == expected.engine_ranks


def _check_learning(config, expected):
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs) == (expected.mini, 1)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.lr_warmup_steps) == (1e-6, "constant", 0)
    assert (actor.optim.betas, actor.optim.weight_decay, actor.grad_clip) == ([0.9, 0.98], expected.weight_decay, 1.0)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == expected.kl
    assert (actor.clip_range, actor.clip_ratio_c, actor.entropy_coeff) == (expected.clip, None, 0.0)
    assert (actor.loss_agg_mode, actor.policy_loss) == (expected.aggregation, {})
    assert actor.use_sampler_log_probs == expected.sampler_log_probs
    assert (algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo, algorithm.use_kl_in_reward) == (
        "grpo", True, False,
    )  # fmt: skip
    assert algorithm.filter_groups.enable is expected.filters
    assert algorithm.rollout_correction == {}
    longest = config.actor_rollout_ref.rollout.max_model_len
    rows = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    assert actor.ppo_max_token_len >= min(rows, longest or rows)


def _check_trainer(config, expected):
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    assert (trainer.total_training_steps, trainer.total_epochs) == (expected.steps, 1_000_000)
    assert trainer.nnodes * trainer.n_workers_per_node == expected.ranks and trainer.placement == "ray"
    assert (config.actor_rollout_ref.model.path, config.actor_rollout_ref.model.dtype) == (expected.model, "bfloat16")
    assert rollout.dtype is None  # the actor's
    assert (trainer.default_local_dir, trainer.save_freq) == expected.save
    assert trainer.max_actor_ckpt_to_keep is None
    if expected.validation is None:
        assert config.data.val_files is None
        return
    sampled = rollout.val_kwargs
    shown = (config.data.val_files, trainer.test_freq, sampled.n, sampled.temperature, sampled.top_p, sampled.top_k)
    assert shown == expected.validation and not sampled.greedy_too and trainer.val_before_train


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_does_something_else_is_refused_with_one_reason(name):
    file = conformance.peer("slime", REVISION, name)
    refused = migrate(file.read_text(), file).refused
    assert REFUSED[name] in refused[-1]
    assert len(refused) == 1 or name.endswith("mis.sh")  # which names a file that is not here, too


def test_all_scripts_are_looked_at_and_four_of_five_that_can_be_carried_over_are():
    root = conformance.peer("slime", REVISION)
    scripts = {str(file.relative_to(root)) for file in root.rglob("*.sh")}
    models = {name for name in scripts if name.startswith("scripts/models/")}
    assert scripts - models == SCRIPTS.keys() | REFUSED.keys()
    # All others are supervised, distil, do not run themselves, or need Megatron.
    could = [name for name, reason in REFUSED.items() if re.match("custom_tis", reason)]
    assert len(SCRIPTS) >= 0.8 * (len(SCRIPTS) + len(could))


def test_a_file_that_only_holds_arguments_says_so(capsys):
    for file in sorted(conformance.peer("slime", REVISION, "scripts/models").glob("*.sh")):
        with pytest.raises(ConfigError, match=r"only holds arguments.* Give the script that reads it with `source`"):
            migrate(file.read_text(), file)
        assert main([str(file)]) == 2


def test_the_models_arguments_are_read_where_the_file_is():
    file = conformance.peer("slime", REVISION, "examples/search-r1/run_qwen2.5_3B.sh")
    found = migrate(file.read_text(), file)
    assert any(line.startswith("num_layers=36: the model's config.json") for line in found.dropped)
    assert not any("MODEL_ARGS" in note or "source" in note for note in found.notes)
    team = conformance.peer("slime", REVISION, "examples/multi_agent/run-qwen3-30B-A3B-multi-agent.sh")
    notes = migrate(team.read_text(), team).notes
    assert any(re.match(r"source /root/slime/scripts/models/.*: read from ", note) for note in notes)
