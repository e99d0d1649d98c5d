"""A launch command of another library becomes one of ours that composes, and nothing is left out silently."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_mt.config.compose import compose
from verl_mt.config.write_reference import _show
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate import main, migrate, report
from verl_mt.extensions.compat.migrate.verl import VERL_DEFAULTS

pytestmark = pytest.mark.slow  # many configurations
REPO = Path(__file__).resolve().parents[2]
VERL = "python3 -m verl.trainer.main_ppo data.train_files=$HOME/a.parquet actor_rollout_ref.model.path=org/model "
SGLANG = "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo "
SLIME = "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 32 --apply-chat-template "
SWIFT = "swift rlhf --rlhf_type grpo --train_type full --model org/model --dataset d.jsonl "


def composed(text: str, **environment: str):
    """The configuration that our command gives, its words as a shell makes them."""
    found = migrate(text)
    assert found.refused == []
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    printed = found.command().replace("python -m verl_mt.trainer", "printf '%s\\0'")
    done = subprocess.run(
        ["bash", "-c", printed], capture_output=True, text=True, check=True, env={"HOME": "/home/me", **environment}
    )
    return compose([word for word in done.stdout.split("\0") if word])


# ----------------------------------------------------------------------------------------------------------------------
# verl


def test_a_command_of_verl_means_the_same_here():
    config = composed(
        VERL + SGLANG + "trainer.n_gpus_per_node=4 data.max_response_length=512 "
        "actor_rollout_ref.rollout.multi_turn=True actor_rollout_ref.rollout.multi_turn.max_turns=3 "
        '+data.apply_chat_template_kwargs.enable_thinking=False trainer.logger=\'["console","wandb"]\''
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.response_length, rollout.multi_turn.max_assistant_turns, rollout.multi_turn.enable) == (
        512,
        3,
        True,
    )
    assert (config.trainer.n_workers_per_node, config.trainer.placement) == (4, "ray")
    assert config.data.train_files == "/home/me/a.parquet"
    assert config.actor_rollout_ref.model.template_kwargs == {"enable_thinking": False}
    assert config.trainer.logger == ["console", "wandb"]


def test_what_verl_does_without_being_told_is_written_out():
    found = migrate(VERL + SGLANG)
    assert found.added["data.train_batch_size=1024"] == found.added["trainer.save_freq=-1"] == "verl's default"
    assert "trainer.n_workers_per_node=8" in found.overrides and "trainer.placement=ray" in found.overrides
    assert not any(line.startswith("algorithm.adv_estimator") for line in found.added)  # the command says it


@pytest.mark.parametrize(
    ("mode", "checkout", "limited"),
    [
        ("", None, True),
        ("", "sync", False),
        ("", "async", True),
        ("actor_rollout_ref.rollout.mode=sync ", None, False),
        ("actor_rollout_ref.rollout.mode=async ", "sync", True),
    ],
)
def test_limits_of_agent_loops_are_written_out_where_verl_uses_one(tmp_path, mode, checkout, limited):
    """Where nothing sets the mode, a checkout of verl around the script says it; else it is that of today's verl."""
    script = tmp_path / "examples" / "run.sh"
    script.parent.mkdir()
    if checkout is not None:
        folder = tmp_path / "verl/trainer/config/rollout"
        folder.mkdir(parents=True)
        (folder / "rollout.yaml").write_text(f"mode: {checkout}\n")
    found = migrate(f"{VERL}{SGLANG}{mode}actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", script)
    limits = {
        f"actor_rollout_ref.rollout.multi_turn.{k}" for k in ("max_parallel_calls=1", "max_tool_response_tokens=256")
    }
    assert limits & set(found.overrides) == (limits if limited else set())
    told = [why for word, why in found.added.items() if word in limits]
    assert all(("since 0.7 where nothing sets it" in why) is (mode == "") for why in told)


def test_the_defaults_are_those_of_the_page():
    page = (REPO / "docs" / "migrating_from_verl.md").read_text().partition("| key | verl's default | here |")[2]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| `[^`]+` \|$", page.partition("\n\n")[0], re.MULTILINE)
    assert {key: _show(value) for key, value in VERL_DEFAULTS.items()} == dict(rows)


def test_what_is_refused_keeps_its_reason_and_the_rest_is_still_written():
    found = migrate(VERL + SGLANG + "algorithm.use_pf_ppo=True trainer.totl_epochs=3 data.sed=$(date +%s)")
    assert [text.partition(" ")[0].partition("=")[0].rstrip(":") for text in found.refused] == [
        "algorithm.use_pf_ppo", "trainer.totl_epochs", "data.sed",
    ]  # fmt: skip
    assert "did you mean trainer.total_epochs" in found.refused[1]
    assert "actor_rollout_ref.rollout.name=sglang" in found.overrides


def test_what_only_the_whole_configuration_shows_is_refused_too():
    found = migrate(VERL + SGLANG + "actor_rollout_ref.rollout.top_p=0.9")
    assert len(found.refused) == 1 and "top_p" in found.refused[0]


@pytest.mark.slow
def test_a_variable_stays_one_for_the_shell():
    assert composed(VERL + SGLANG + "trainer.nnodes=$NODES", NODES="2").trainer.nnodes == 2
    assert composed(VERL + SGLANG + "trainer.nnodes=${NODES:-3}").trainer.nnodes == 3


def test_a_configuration_file_of_verls_is_started_from_as_it_is():
    found = migrate("python -m verl.trainer.main_ppo --config-path=conf --config-name='gsm8k' data.train_batch_size=8")
    assert found.flags == ["--config-path=conf", "--config-name=gsm8k"]
    assert found.overrides == ["data.train_batch_size=8"] and found.refused == []


# ----------------------------------------------------------------------------------------------------------------------
# slime


def test_a_train_py_without_a_flag_of_slime_is_another_program():
    with pytest.raises(ConfigError, match=r"optim\.lr=3e-5 n=4: no word is a flag of slime"):
        migrate("python train.py optim.lr=3e-5 n=4")


def test_words_before_the_flags_are_refused():
    found = migrate("python train.py optim.lr=3e-5 n=4 --rollout-batch-size 32")
    assert [text.partition(":")[0] for text in found.refused if "before the flags" in text] == ["optim.lr=3e-5", "n=4"]


def test_a_script_of_slime_with_arrays_and_a_submission():
    script = f"""
CKPT_ARGS=(
   --save /out/   # where
   --load /out/
   --ref-load /m_torch_dist
)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --eps-clip-high 0.28)
SGLANG_ARGS=(--sglang-mem-fraction-static 0.7 --sglang-attention-backend fa3 --sglang-enable-metrics)
ray job submit --address="http://127.0.0.1:8265" -- {SLIME} \\
   --n-samples-per-prompt 8 --global-batch-size 128 --adam-beta1 0.9 --adam-beta2 0.95 \\
   --colocate --rollout-num-gpus 4 --actor-num-gpus-per-node 4 --eval-interval 20 --eval-prompt-data aime /aime.jsonl \\
   --num-layers 36 --swiglu --attention-dropout 0.0 --apply-chat-template \\
   ${{CKPT_ARGS[@]}} ${{GRPO_ARGS[@]}} ${{SGLANG_ARGS[@]}}
"""
    found = migrate(script)
    assert found.refused == []
    assert found.command().startswith("ray job submit --address=http://127.0.0.1:8265 -- python -m verl_mt.trainer")
    config = compose(found.overrides)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (32, 8, 16)
    assert (actor.optim.betas, actor.use_kl_loss, actor.kl_loss_coef) == ([0.9, 0.95], True, 0.01)
    assert rollout.engine_kwargs == {"attention_backend": "fa3", "enable_metrics": True}
    assert (rollout.name, rollout.gpu_memory_utilization) == ("sglang", 0.7)
    assert (config.trainer.placement, config.trainer.n_workers_per_node) == ("ray", 4)
    assert (config.data.val_files, config.trainer.default_local_dir) == (["/aime.jsonl"], "/out/")
    assert any(line.startswith("num_layers=36: the model's config.json") for line in found.dropped)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--made-up 3", "--made-up: no counterpart"),
        ("--rollout-batch-siz 3", "did you mean 'rollout_batch_size'"),
        ("--load /other --save /out", "load is refused: use trainer.resume_mode"),
        ("--global-batch-size 100 --n-samples-per-prompt 8", "global_batch_size is refused"),
        (
            "--pipeline-model-parallel-size 2 --expert-model-parallel-size 8",
            "a mixture of experts is split by its layers",
        ),
        ("--enable-mtp-training --fp8-format e4m3", "trained (--enable-mtp-training); weights are multiplied in FP8"),
        ("--moe-aux-loss-coeff 0.001", "a loss balances the experts"),
        ("--loss-type sft_loss --made-up 1", "python -m verl_mt.sft"),
        ("--use-opd --opd-type sglang", "distillation"),
        ("--rollout-function-path my.rollout", "rollout_function_path=my.rollout"),
        ("--rm-type deepscalar", "did you mean 'deepscaler'"),
        ("--rm-type ifbench", "a separate package"),
        ("--ref-load /elsewhere/other", "ref_load is refused"),
        ("--custom-config-path /nowhere.yaml", "the file is not here"),
        ("--attention-dropout 0.1", "with dropout"),
    ],
)
def test_a_flag_of_slime_without_a_counterpart_is_refused_by_name(flags, reason):
    (refused,) = migrate(SLIME + flags).refused
    assert reason in refused


# ----------------------------------------------------------------------------------------------------------------------
# ms-swift


def test_the_two_commands_of_ms_swift_become_one():
    found = migrate(
        "CUDA_VISIBLE_DEVICES=0 swift rollout --model org/model --use_async_engine true --max_turns 3 \\\n"
        " --multi_turn_scheduler math_tip_trick --vllm_max_model_len 4096\n\n"
        "CUDA_VISIBLE_DEVICES=1,2 NPROC_PER_NODE=2 WANDB_API_KEY=hunter2 VLLM_USE_V1=1 " + SWIFT + "--max_turns 4 "
        "--external_plugins p.py --beta 0.04 --num_generations 8 --per_device_train_batch_size 8 "
        "--gradient_accumulation_steps 2 --report_to wandb --deepspeed zero3 --reward_funcs acc"
    )
    assert found.refused == []
    assert found.env == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert "hunter2" not in report(found) and any("WANDB_API_KEY" in line for line in found.dropped)
    assert any("if it samples with vLLM" in line for line in found.dropped)
    assert "--max_turns: 3 gave way to 4" in found.notes
    config = compose(found.overrides)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (rollout.multi_turn.scheduler, rollout.multi_turn.max_assistant_turns) == ("math_tip_trick", 4)
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.04)
    assert config.data.train_batch_size == 4  # 8 x 2 x 2 ranks / 8
    assert (config.trainer.placement, config.trainer.logger) == ("ray", ["console", "wandb"])


def test_what_ms_swift_does_without_being_told_is_written_out():
    found = migrate(SWIFT)
    added = {line.split("=")[0].rpartition(".")[2]: line.split("=")[1] for line in found.added}
    assert (added["kl_loss_coef"], added["use_kl_loss"], added["temperature"]) == ("0.04", "true", "0.9")
    assert (added["lr_scheduler_type"], added["loss_agg_mode"]) == ("cosine", "seq-mean-token-mean")
    assert (float(added["lr"]), added["total_epochs"], added["n"], added["response_length"]) == (1e-5, "3", "8", "512")
    assert (added["weight_decay"], added["betas"], added["clip_ratio_c"]) == ("0.1", "[0.9,0.95]", "null")
    assert (added["prompt_key"], added["label_key"], added["truncation"]) == ("messages", "solution", "left")
    adapters = migrate(SWIFT.replace("full", "lora") + "--beta 0 --temperature 1")
    assert any(line.endswith("optim.lr=0.0001") for line in adapters.added)
    assert not any("0.04" in line or "temperature=0.9" in line for line in adapters.added)


def test_steps_per_generation_and_a_warm_up_ratio_are_computed_with_the_ranks():
    found = migrate(
        "NPROC_PER_NODE=2 " + SWIFT.replace("d.jsonl", "org/set#10000") + "--per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 4 --steps_per_generation 8 --num_train_epochs 1 --warmup_ratio 0.05 "
        "--report_to swanlab wandb"
    )
    assert found.refused == []
    assert {
        "data.train_batch_size=4",  # 2 x 2 ranks x 8 / 8
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",  # 2 x 2 ranks x 4 / 8
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05",
    } <= set(found.overrides)
    assert any("swanlab: not offered" in line for line in found.dropped)
    both = migrate(SWIFT + "--warmup_ratio 0.05 --warmup_steps 3")
    assert "actor_rollout_ref.actor.optim.lr_warmup_steps=3" in both.overrides and not both.refused
    assert not any("steps_ratio" in word for word in both.overrides)
    assert any("--warmup_ratio 0.05: --warmup_steps" in line for line in both.dropped)


def test_what_counts_updates_there_counts_steps_here():
    found = migrate(
        "NPROC_PER_NODE=2 " + SWIFT + "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
        "--steps_per_generation 8 --num_iterations 2 --max_steps 100 --save_steps 30 --num_train_epochs 1"
    )
    config = compose(found.overrides)
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (4, 2)
    # Two updates of each of two passes: four of a step.
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (25, 8)
    assert config.trainer.total_epochs == 1_000_000  # its steps alone end a run there


@pytest.mark.parametrize(
    ("flags", "freq"),
    [
        ("", (500, 10, True)),  # without validation data its frequency does not matter
        ("--val_dataset a.jsonl", (500, 500, False)),
        ("--val_dataset a.jsonl --save_steps 30", (30, 30, False)),
        ("--val_dataset a.jsonl --eval_steps 7 --eval_on_start true", (500, 7, True)),
        ("--val_dataset a.jsonl --save_strategy no", (-1, -1, False)),
        (  # 4 updates of a step
            "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --steps_per_generation 8 "
            "--num_iterations 2",
            (125, 10, True),
        ),
    ],
)
def test_frequencies_that_a_command_does_not_name_are_ms_swifts(flags, freq):
    trainer = compose(migrate(f"{SWIFT}{flags}").overrides).trainer
    assert (trainer.save_freq, trainer.test_freq, trainer.val_before_train) == freq


def test_a_command_that_names_no_type_computes_in_bfloat16():
    assert compose(migrate(SWIFT).overrides).actor_rollout_ref.model.dtype == "bfloat16"
    assert compose(migrate(f"{SWIFT}--torch_dtype float32").overrides).actor_rollout_ref.model.dtype == "float32"


def test_a_batch_of_variables_is_that_of_their_defaults_and_said():
    found = migrate(SWIFT + '--per_device_train_batch_size "${SIZE:-16}" --num_generations 8')
    assert "data.train_batch_size=2" in found.overrides
    assert any("where nobody sets them" in note for note in found.notes)


def test_an_update_over_several_samplings_is_one_batch():
    config = compose(
        migrate(
            "NPROC_PER_NODE=4 " + SWIFT + "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 "
            "--generation_batch_size 4 --num_generations 4"
        ).overrides
    )
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (4, None)


def test_ranks_of_torchrun_and_of_several_machines_count():
    flags = SWIFT.removeprefix("swift rlhf ") + "--per_device_train_batch_size 4 --gradient_accumulation_steps 1"
    found = migrate("export NNODES=3\ntorchrun --nproc_per_node=8 swift/cli/rlhf.py " + flags)
    assert compose(found.overrides).data.train_batch_size == 12 and "trainer.nnodes=3" in found.overrides
    unknown = migrate("NNODES=$WORLD_SIZE torchrun --nproc_per_node=8 swift/cli/rlhf.py " + flags)
    assert len(unknown.refused) == 1 and "is a shell's variable" in unknown.refused[0]


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--top_p 0.9 --top_k 50", "--top_p 0.9, --top_k 50: training draws from the whole distribution"),
        ("--repetition_penalty 1.1", "--repetition_penalty 1.1: training draws from the whole distribution"),
        ("--async_generate true", "by the weights of the step before"),
        ("--top_entropy_quantile 0.2", "of an update's tokens, there of those of each device's batch"),
        ("--loss_type bnpo --per_device_train_batch_size 8", "there over each device's batch"),
        ("--split_dataset_ratio 0.01", "all rows are trained on"),
        ("--freeze_aligner false", "the projector is trained with its tower, or not with it"),
        ("--template qwen3", "the model's own chat template writes prompts"),
    ],
)
def test_what_ms_swift_does_otherwise_is_listed(flags, changed):
    found = migrate(SWIFT + flags)
    assert found.refused == [] and len(found.changed) == 1 and changed in found.changed[0]


def test_what_means_the_same_is_not_listed():
    found = migrate(
        "NPROC_PER_NODE=2 " + SWIFT + "--top_p 1.0 --top_k -1 --use_gym_env true --gym_env e --multi_turn_scheduler "
        "gym_scheduler --max_turns 3 --vllm_max_model_len 4096 --per_device_train_batch_size 4 --async_generate false"
    )
    assert found.refused == found.changed == []
    assert compose(found.overrides).reward.path == "gym"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--reward_funcs a b --reward_weights 1 0.5", {"rewards": ["a", "b"], "weights": [1.0, 0.5]}),
        ("--reward_funcs a b", {"rewards": ["a", "b"]}),
        ("--reward_funcs a", {}),
        ("--reward_funcs a --reward_weights 0.5", {"rewards": ["a"], "weights": [0.5]}),
        ("--reward_funcs cosine --max_completion_length 99", {"max_len": 99}),
        (
            "--reward_funcs a repetition --repetition_n_grams 4",
            {"rewards": ["a", "repetition"], "kwargs": {"repetition": {"n_grams": 4}}},
        ),
    ],
)
def test_several_rewards_become_their_weighted_sum(flags, expected):
    reward = compose(migrate(SWIFT + flags).overrides).reward
    several = "rewards" in expected
    assert (reward.path, reward.kwargs) == ("weighted_sum" if several else flags.split()[1], expected)


def test_each_loss_keeps_its_bounds_and_its_aggregation():
    def actor(flags):
        return compose(migrate(SWIFT + flags).overrides).actor_rollout_ref.actor

    cispo = actor("--loss_type cispo --epsilon_high 5")
    assert (cispo.policy_loss, cispo.clip_range) == ({"loss_mode": "cispo"}, (1.0, 4.0))
    assert actor("--loss_type dapo --epsilon_high 0.28").loss_agg_mode == "token-mean"
    assert actor("--loss_type dr_grpo").loss_agg_mode == "seq-mean-token-sum-norm"
    assert actor("--loss_type grpo --delta 2").clip_ratio_c == 2 and actor("").clip_ratio_c is None
    sapo = actor("--loss_type sapo --tau_pos 2 --epsilon 0.1")
    assert (sapo.policy_loss, sapo.loss_agg_mode) == ({"loss_mode": "sapo", "tau_pos": 2.0}, "seq-mean-token-mean")
    fipo = actor("--loss_type fipo --fipo_clip_range 0.3 --fipo_clip_high_only true").policy_loss
    assert (fipo["fipo_weight_low"], fipo["fipo_weight_high"]) == (1.0, 1.3)


@pytest.mark.parametrize(
    ("flags", "estimator", "in_reward"),
    [
        ("--advantage_estimator rloo", "rloo", True),
        ("--advantage_estimator rloo --kl_in_reward false", "rloo", False),
        ("--advantage_estimator reinforce_plus_plus", "reinforce_plus_plus_baseline", True),
        ("--advantage_estimator grpo --kl_in_reward true", "grpo", True),
        ("--scale_rewards gdpo --reward_funcs a b", "gdpo", False),
    ],
)
def test_the_kl_is_where_ms_swift_has_it_for_each_estimator(flags, estimator, in_reward):
    config = compose(migrate(SWIFT + flags + " --beta 0.01").overrides)
    assert (config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward) == (estimator, in_reward)
    assert config.actor_rollout_ref.actor.use_kl_loss is not in_reward
    assert estimator != "gdpo" or config.algorithm.gdpo_reward_weights == {"a": 1.0, "b": 1.0}


def test_the_penalty_on_length_is_dapos():
    reward = compose(
        migrate(SWIFT + "--reward_funcs a soft_overlong --soft_cache_length 64 --reward_weights 1 0.5").overrides
    ).reward
    buffer = reward.overlong_buffer
    assert (reward.path, buffer.enable, buffer.len, buffer.penalty_factor) == ("a", True, 64, 0.5)
    flags = "--reward_funcs a b soft_overlong --soft_cache_length 64 --reward_weights 1 2 0.5 --scale_rewards gdpo"
    by_parts = compose(migrate(SWIFT + flags).overrides)
    assert by_parts.algorithm.gdpo_reward_weights == {"a": 1.0, "b": 2.0, "overlong": 0.5}
    assert by_parts.reward.overlong_buffer.penalty_factor == 1.0 and "weights" not in by_parts.reward.kwargs


SERVER = "# swift rollout --model org/model \\\n#     --multi_turn_scheduler math_tip_trick \\\n#     --max_turns 3\n"


def test_a_rollout_server_in_a_comment_is_taken_over_and_a_missing_one_is_asked_for():
    trainer = SWIFT + "--vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8000"
    found = migrate("# first run `swift rollout`\n" + SERVER + trainer)
    assert found.refused == [] and any("stands in a comment" in note for note in found.notes)
    assert "actor_rollout_ref.rollout.multi_turn.scheduler=math_tip_trick" in found.overrides
    assert "actor_rollout_ref.rollout.launch_servers=1" in found.overrides
    (refused,) = migrate(trainer).refused
    assert "give both commands in one text" in refused


def test_rollout_servers_elsewhere_are_named_and_listed_as_ones_to_start():
    servers = "swift rollout --model org/model --vllm_tensor_parallel_size 2 --port 8000\n"
    found = migrate(servers + SWIFT + "--vllm_mode server --vllm_server_host one two --vllm_server_port 8000 8001")
    assert found.refused == [] and compose(found.overrides).actor_rollout_ref.rollout.servers == [
        "http://one:8000", "http://two:8001",
    ]  # fmt: skip
    (changed,) = found.changed
    assert "are vLLM's, started there before the run" in changed and "vllm_tensor_parallel_size=2" in changed
    unnamed = migrate(2 * servers + SWIFT + "--vllm_mode server --vllm_server_host <one> <two> --vllm_server_port 80")
    assert compose(unnamed.overrides).actor_rollout_ref.rollout.servers == ["http://<one>:80", "http://<two>:80"]
    assert any("put their addresses in" in text for text in unnamed.changed)


def test_megatrons_tensor_parallelism_and_what_changes_no_result_do_not_make_a_script_of_slime_fail():
    found = migrate(
        SLIME + "--n-samples-per-prompt 4 --tensor-model-parallel-size 2 --context-parallel-size 2 --kl-coef 0.00 "
        "--eval-max-response-len 99 "
        "--wandb-key hunter2 --wandb-team us --hf-checkpoint /m/ --ref-load /m_torch_dist/"
    )
    assert found.refused == [] and "hunter2" not in report(found)
    assert any("--tensor-model-parallel-size 2: FSDP2" in line for line in found.dropped)
    assert any("--ref-load" in line for line in found.dropped)
    assert any("--eval-max-response-len" in line for line in found.dropped)  # nothing is validated


def test_what_slime_does_without_being_told_is_written_out():
    found = migrate(SLIME)
    loss = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    assert {"actor_rollout_ref.rollout.n=1", loss} <= set(found.added)
    assert "n is 1: grpo compares the samples of one prompt" in found.refused[0]
    by_token = migrate(SLIME + "--n-samples-per-prompt 4 --calculate-per-token-loss")
    assert by_token.refused == [] and "actor_rollout_ref.actor.loss_agg_mode=token-mean" in by_token.overrides


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "rank", "alpha"),
    [
        ("--train_type full", 0, 16), ("--train_type lora", 8, 32), ("--train_type lora --lora_rank 64", 64, 32),
        ("--train_type lora --lora_rank 4 --lora_alpha 8", 4, 8), ("--train_type full --lora_rank 64", 0, 16),
        ("", 8, 32),
    ],
)  # fmt: skip
def test_adapters_are_trained_where_ms_swift_trains_them(flags, rank, alpha):
    model = composed("swift rlhf --model org/m --dataset d.jsonl " + flags).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (rank, alpha)


@pytest.mark.slow
def test_rows_counted_behind_the_name_of_a_data_set():
    config = composed(SWIFT.replace("d.jsonl", "'org/set#500'"))
    assert (config.data.train_files, config.data.train_max_samples) == ("org/set", 500)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--made_up true", "--made_up: no counterpart"),
        ("--vllm_mode server --vllm_server_host h", "give both commands in one text"),
        ("--reward_funcs a b --reward_weights 1", "expected a number for each of a, b"),
        ("--reward_funcs toolbench", "toolbench is not offered: it compares calls"),
        ("--loss_type mine", "expected grpo, bnpo"),
        ("--loss_type cispo", "below 1 every token's weight is that constant"),
        ("--loss_type grpo --delta 1.1", "delta=1.1 is below 1 + epsilon_high"),
        ("--scale_rewards batch", "scale_rewards=batch with advantage_estimator=grpo: not offered"),
        ("--teacher_model m", "distillation is not offered"),
        (
            "--num_generations 16 --per_device_train_batch_size 8",
            "8 samples an update and 8 a sampling, 16 of a prompt: updates",
        ),
        ("--per_device_train_batch_size 8 --multi_turn_scheduler s", "give vllm_max_model_len or"),
    ],
)
def test_a_flag_of_ms_swift_without_a_counterpart_is_refused_by_name(flags, reason):
    assert any(reason in text for text in migrate(SWIFT + flags).refused)


# ----------------------------------------------------------------------------------------------------------------------
# The documents' own commands


@pytest.mark.slow
@pytest.mark.parametrize("k", range(3))
def test_the_commands_of_the_page_on_verl_are_carried_over_whole(k):
    page = (REPO / "docs" / "migrating_from_verl.md").read_text()
    block = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[k]
    config = composed(block)
    assert config.actor_rollout_ref.rollout.name == "sglang" and config.actor_rollout_ref.rollout.multi_turn.enable


def documents(shared_data: Path) -> list[str]:
    folder = shared_data.parent / "seeds"
    if not folder.is_dir():
        pytest.skip(f"the libraries' documents were not found at {folder}")
    return [file.read_text() for file in sorted(folder.glob("*.txt"))]


@pytest.mark.slow
@pytest.mark.cap("C11", "C43", "C44")
def test_the_launch_commands_of_the_libraries_own_documents_are_carried_over(shared_data):
    texts = documents(shared_data)
    swift = [b for text in texts for b in re.findall(r"^swift rollout \\\n(?:[ \t]*--.*\n?)+", text, re.MULTILINE)]
    slime = [b for text in texts for b in re.findall(r"^CUSTOM_ARGS=\((?:.*\n)+?.*OPTIMIZER_ARGS\[@\]\}", text, re.M)]
    assert len(swift) >= 2 and len(slime) >= 1
    for block in swift:
        block = re.sub(r"(\d)[A-Z].*", r"\1", block)  # one page runs its prose into the command
        found = migrate(block.replace("--multi_turns xxx", "--multi_turns 4"))
        assert found.refused == []
        compose(found.overrides)
    for block in slime:
        found = migrate(block)
        assert found.refused == [] and any("MODEL_ARGS" in note for note in found.notes)
        config = compose([*found.overrides, "actor_rollout_ref.model.path=org/model"])
        assert config.actor_rollout_ref.rollout.custom_generate_function_path.endswith(".generate")
        assert config.algorithm.rollout_correction


# ----------------------------------------------------------------------------------------------------------------------
# The command


def test_the_status_says_whether_everything_could_be_carried_over(tmp_path, capsys, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text(VERL + SGLANG)
    assert main([str(script)]) == 0
    assert main(["--", *(VERL + SGLANG).split(), "trainer.sed=1"]) == 1
    assert "REFUSED" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(VERL + SGLANG))
    assert main(["-"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "absent.sh")]) == 2
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main([str(tmp_path / "binary")]) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("echo hello"))
    assert main([]) == 2
    assert "no launch command" in capsys.readouterr().err


def test_the_output_is_a_script_that_runs_as_it_is(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    text = report(migrate("A=1 " + VERL + SGLANG + "trainer.sed=$B \"data.prompt_key='it is'\""))
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$A" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-eu", "-c", text], capture_output=True, text=True, env={"PATH": path, "HOME": "/h"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["1", "-m", "verl_mt.trainer"] and "data.train_files=/h/a.parquet" in lines
    assert "data.prompt_key='it is'" in lines and not any("sed" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("swift sft --model m", "python -m verl_mt.sft"),
        ("python -m verl.trainer.main_eval x=1", "python -m verl_mt.evaluate"),
        ("python -m recipe.prime.main_prime x=1", "only verl.trainer.main_ppo and recipe.dapo.main_dapo have"),
    ],
)
def test_what_is_no_training_by_reinforcement_is_sent_elsewhere(text, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        migrate(text)


def test_a_runtime_environment_written_over_several_lines_reaches_the_submission(tmp_path):
    """The printed command is run by a shell with a stand-in for ray that shows its words."""
    text = """PORT=8265
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/lib/\\",
    \\"LINK\\": \\"${HAS_LINK}\\"
  }
}"
ray job submit --address="http://127.0.0.1:${PORT}" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 4 --rollout-max-response-len 64
"""
    found = migrate(text)
    (tmp_path / "ray").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    (tmp_path / "ray").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HAS_LINK": "1"}
    done = subprocess.run(["bash", "-c", found.command()], text=True, capture_output=True, env=environment, check=True)
    words = done.stdout.split("\0")
    assert words[:3] == ["job", "submit", "--address=http://127.0.0.1:8265"]
    asked = json.loads(words[3].removeprefix("--runtime-env-json="))
    assert asked == {"env_vars": {"PYTHONPATH": "/root/lib/", "LINK": "1"}}
    assert words[4:8] == ["--", "python", "-m", "verl_mt.trainer"]


def test_a_list_for_the_engine_keeps_its_numbers_and_may_be_counted_by_the_shell():
    text = SLIME + "--n-samples-per-prompt 8 --sglang-cuda-graph-bs 1 2 $(seq 4 4 12)"
    key = "actor_rollout_ref.rollout.engine_kwargs.cuda_graph_bs"
    found = migrate(text)
    assert not found.refused and any(word.lstrip("+") == f"{key}=[1,2,4,8,12]" for word in found.overrides)
    assert composed(text).actor_rollout_ref.rollout.engine_kwargs["cuda_graph_bs"] == [1, 2, 4, 8, 12]


OVER = f"python3 -m verl.trainer.main_ppo {SGLANG.replace('n=8', 'n=4')}"


@pytest.mark.parametrize(("rate", "status"), [("0", 0), ("0.0", 0), ("0.1", 3)])
def test_a_rate_that_leaves_samples_out_is_a_listed_difference_and_none_is_not(rate, status, capsys):
    said = f"actor_rollout_ref.rollout.over_sample_rate={rate}"
    words = (OVER + f"actor_rollout_ref.model.path=/m data.train_files=/d.parquet {said}").split()
    assert main(["--", *words, "trainer.n_gpus_per_node=1"]) == status
    listed = capsys.readouterr().out.partition("# carried over with another meaning:")[2]
    assert (said in listed) == (status == 3)


def test_a_rate_in_the_yaml_file_of_the_command_is_listed_too(tmp_path):
    (tmp_path / "theirs.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 4, over_sample_rate: 0.2}}\n"
    )
    text = f"{OVER} --config-path={tmp_path} --config-name=theirs"
    assert any("over_sample_rate=0.2" in line for line in migrate(text).changed)


WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps"


def test_verls_steps_of_warm_up_become_optimizer_steps_and_its_ratio_stays():
    split = (
        "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_epochs=3 "
    )
    critic = "algorithm.adv_estimator=gae critic.optim.lr_warmup_steps=5 critic.ppo_epochs=1 "
    cases = {
        f"{WARM_UP}=10": (f"{WARM_UP}=40", "10 steps of verl's trainer with 4"),  # 1024 by 256
        f"{split}{WARM_UP}=10": (f"{WARM_UP}=120", "with 12"),
        f"{split}{critic}": ("critic.optim.lr_warmup_steps=20", "with 4"),
        f"{WARM_UP}=0 {WARM_UP}_ratio=0.1": (f"{WARM_UP}_ratio=0.0", "its ratio of 0.1 does not"),
    }
    for words, (override, how) in cases.items():
        found = migrate(OVER + words)
        assert how in found.added[override] and found.refused == [], (words, found)
        assert override in found.overrides and not any("warmup" in line for line in found.changed)
    ratio = migrate(f"{OVER}{WARM_UP}_ratio=0.285 {WARM_UP}=-1 data.train_files=/nowhere/a.parquet")
    assert f"{WARM_UP}_ratio=0.285" in ratio.overrides and ratio.refused == [] and ratio.changed == []


def test_steps_of_warm_up_of_a_batch_that_only_the_shell_knows_are_listed():
    found = migrate(f"{OVER}{WARM_UP}=10 data.train_batch_size=$SIZE")
    assert any(f"{WARM_UP}=10: steps of the trainer there" in line for line in found.changed)


def test_a_key_that_is_set_so_that_a_command_means_the_same_is_no_difference():
    found = migrate(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.rollout.multi_turn.enable=True "
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools_configs/gsm8k_tool.yaml "
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 trainer.n_gpus_per_node=8"
    )
    assert not any("convert" in line or "placement" in line for line in found.changed)
    assert found.added["actor_rollout_ref.rollout.multi_turn.tool_argument_types=convert"].startswith("an argument of")
    assert found.added["trainer.placement=ray"] == "several ranks need it"


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        (VERL + SGLANG, "trainer.seed=1", "trainer.seed=2"),
        (SLIME + "--n-samples-per-prompt 8 ", "--lr=1e-6", "--lr=2e-6"),
        (SWIFT, "--learning_rate=1e-6", "--learning_rate=2e-6"),
    ],
)
def test_a_second_run_of_a_script_is_refused_and_a_further_machine_of_the_first_is_a_note(command, first, second):
    twice = migrate(f"{command}{first}\n{command}{second}")
    assert twice.refused == [f"the script starts training twice ({first}, then {second}); give one command at a time"]
    more = migrate(f"NODE_RANK=0 {command}{first}\nNODE_RANK=1 MASTER_ADDR=10.0.0.1 {command}{first}")
    assert more.refused == [] and any("a further machine's command was left out" in note for note in more.notes)
    keys = [word.partition("=")[0] for word in more.overrides]
    assert len(set(keys)) == len(keys)


def test_a_rollout_server_and_its_trainer_are_one_run_and_a_machines_rank_makes_no_other():
    trainer = SWIFT + "--use_vllm true --vllm_mode server "
    found = migrate(f"swift rollout --model org/model\n{trainer}--node_rank 0\n{trainer}--node-rank=1")
    assert not any("twice" in line for line in found.refused)
    assert any("a further machine's" in note for note in found.notes)


def test_a_number_that_only_the_shell_knows_is_not_blamed_and_others_are():
    n = "actor_rollout_ref.rollout.n"
    few = f"{OVER.replace(n + '=4', '')}{n}="
    unknown = migrate(f"{few}$N")
    assert unknown.refused == [] and f"{n} depends on $N: it is checked when the run starts" in unknown.notes
    for own in ("1", "${N:-1}"):
        found = migrate(f"{few}{own} data.seed=$SEED")
        assert any(line.startswith(f"{n} is 1") for line in found.refused)
        assert not any("it is checked when" in note for note in found.notes)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (SWIFT, "--learning_rate"),
        (SWIFT, "--dataset"),
        (SLIME, "--lr"),
        (SLIME, "--n-samples-per-prompt"),
        (SLIME, "--advantage-estimator"),
    ],
)
def test_a_flag_without_its_value_is_named(command, flag):
    assert migrate(f"{command} {flag}").refused == [f"{flag} has no value"]


def test_a_boolean_of_ms_swift_needs_no_value():
    assert migrate(SWIFT + "--num_generations 8 --gradient_checkpointing --bf16 --overlong_filter").refused == []


# ----------------------------------------------------------------------------------------------------------------------
# vLLM

ROLLOUT = "actor_rollout_ref.rollout"


def test_verls_engine_stays_vllm_with_its_arguments_and_keeps_its_memory():
    own = f"+{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True {ROLLOUT}.enforce_eager=True "
    own += f"{ROLLOUT}.enable_chunked_prefill=True +{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3"
    for name in ("", f"{ROLLOUT}.name=vllm ", f"{ROLLOUT}.name=vllm_async "):
        text = OVER.replace(f"{ROLLOUT}.name=sglang ", name) + own
        found, config = migrate(text), composed(text)
        rollout = config.actor_rollout_ref.rollout
        assert (rollout.name, rollout.tensor_model_parallel_size) == ("vllm", 2) and found.refused == []
        assert rollout.engine_kwargs == {"disable_cascade_attn": True, "enforce_eager": True}
        assert any("vLLM does so without the argument" in line for line in found.dropped)
        assert any("attention_backend=fa3" in line for line in found.dropped)
        assert not rollout.free_cache_engine and any("keep their GPU memory" in line for line in found.changed)
    kept = migrate(f"{OVER.replace('sglang', 'vllm')}{ROLLOUT}.free_cache_engine=False")
    assert not any("free_cache_engine" in line for line in kept.changed)


def test_an_engine_that_the_shell_may_change_has_the_arguments_of_the_scripts_own():
    text = f"ENGINE=${{1:-vllm}}\n{OVER.replace('sglang', '$ENGINE')}{ROLLOUT}.enforce_eager=True "
    found = migrate(text + f"+{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True")
    assert f"++{ROLLOUT}.engine_kwargs.enforce_eager=true" in found.overrides and "${1:-vllm}" in found.command()
    assert any(word.endswith("engine_kwargs.disable_cascade_attn=true") for word in found.overrides)
    assert any(line.endswith("the command has the arguments of vllm") for line in found.changed)


def test_arguments_of_vllm_beside_sglang_are_listed():
    text = f"{OVER}{ROLLOUT}.enforce_eager=True +{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True"
    found = migrate(text)
    assert composed(text).actor_rollout_ref.rollout.engine_kwargs == {} and found.changed == found.refused == []
    listed = "\n".join(found.dropped)
    assert "SGLang's is engine_kwargs.disable_cuda_graph" in listed and "only vllm has these arguments" in listed


def test_arguments_in_one_mapping_mean_what_each_of_them_does():
    text = OVER.replace("sglang", "vllm") + f"'+{ROLLOUT}.engine_kwargs.vllm="
    defaults = composed(text + "{swap_space: null, disable_mm_preprocessor_cache: false}'")
    assert defaults.actor_rollout_ref.rollout.engine_kwargs == {}
    rollout = composed(text + "{disable_mm_preprocessor_cache: true, disable_cascade_attn: true}'").actor_rollout_ref
    assert rollout.rollout.engine_kwargs == {"mm_processor_cache_gb": 0, "disable_cascade_attn": True}


def test_an_argument_that_vllm_engines_do_not_take_is_refused_before_a_run():
    (line,) = migrate(f"{OVER.replace('sglang', 'vllm')}+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8").refused
    assert line.startswith(f"{ROLLOUT}.engine_kwargs.quantization=fp8: ") and "Remove quantization" in line


@pytest.mark.parametrize(("in_file", "word"), [("vllm", ""), ("sglang", f"{ROLLOUT}.name=vllm ")])
def test_the_yaml_files_options_of_the_engine_count_for_the_commands_engine(tmp_path, in_file, word):
    (tmp_path / "theirs.yaml").write_text(
        f"defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {{rollout: {{name: {in_file}, enforce_eager: true}}}}\n"
    )
    text = OVER.replace(f"{ROLLOUT}.name=sglang ", word) + f"--config-path={tmp_path} --config-name=theirs "
    found = migrate(text + f"{ROLLOUT}.max_num_batched_tokens=4096")
    config = compose(found.overrides, "theirs", tmp_path)
    assert config.actor_rollout_ref.rollout.name == "vllm" and found.refused == []
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"enforce_eager": True, "max_num_batched_tokens": 4096}


def test_an_argument_whose_engine_only_the_file_names_says_what_to_add(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {model: {path: x}, rollout: {name: vllm}}\n"
        "data: {train_files: x.parquet}\n"
    )
    word = f"{ROLLOUT}.enforce_eager=True"
    assert compose([word], "mine", tmp_path).actor_rollout_ref.rollout.engine_kwargs == {}
    said = " ".join(capsys.readouterr().err.split())
    assert f"the command line does not say that vllm samples. Add {ROLLOUT}.name=vllm there, or write" in said
    assert "SGLang's is" not in said
    for words in ([f"{ROLLOUT}.name=vllm", word], [f"{ROLLOUT}.engine_kwargs.enforce_eager=true"]):
        assert compose(words, "mine", tmp_path).actor_rollout_ref.rollout.engine_kwargs == {"enforce_eager": True}


@pytest.mark.parametrize(("ranks", "size"), [("8", 2), ("1", 1), ("4 actor_rollout_ref.rollout.n=4", 2)])
def test_engines_have_verls_two_ranks_where_nothing_is_said(ranks, size):
    config = composed(f"{OVER}trainer.n_gpus_per_node={ranks}")
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == size


def test_ms_swifts_vllm_is_ours():
    text = f"{SWIFT}--num_generations 8 --per_device_train_batch_size 8 --use_vllm true --vllm_mode colocate "
    text += "--vllm_enforce_eager true --vllm_limit_mm_per_prompt '{\"image\": 2}' --sleep_level "
    found, rollout = migrate(text + "1"), composed(text + "0").actor_rollout_ref.rollout
    assert (rollout.name, rollout.free_cache_engine) == ("vllm", False)
    assert rollout.engine_kwargs == {"enforce_eager": True, "limit_mm_per_prompt": {"image": 2}}
    assert any(line.startswith("--sleep_level 1: vLLM engines keep") for line in found.changed)
    own = migrate(text.replace("true --vllm_mode", "false --vllm_mode") + "0")
    assert f"{ROLLOUT}.name=sglang" in own.overrides
    assert any(line.startswith("--use_vllm false: ") for line in own.dropped)
    assert any("enforce_eager=true: it is vLLM's argument" in line for line in own.dropped)


def test_arguments_of_servers_that_run_already_are_left_to_them():
    text = f"swift rollout --model m --vllm_enforce_eager true\n{SWIFT}--vllm_mode server --vllm_server_host one "
    text += "--vllm_server_port 8000 --vllm_gpu_memory_utilization 0.4 "
    text += "--num_generations 8 --per_device_train_batch_size 8"
    found = migrate(text)
    assert found.refused == [] and not any("engine_kwargs" in word for word in found.overrides)
    assert composed(text).actor_rollout_ref.rollout.servers == ["http://one:8000"]
    assert "--vllm_gpu_memory_utilization 0.4: the servers have their own" in found.dropped


def test_names_of_trl_choose_vllm_and_its_servers():
    words = ["use_vllm=True", "vllm_mode=colocate", "vllm_model_impl=transformers", "vllm_enable_sleep_mode=False"]
    rollout = compose(words).actor_rollout_ref.rollout
    assert (rollout.name, rollout.free_cache_engine) == ("vllm", False)
    assert rollout.engine_kwargs == {"model_impl": "transformers"}
    servers = ["use_vllm=True", "vllm_mode=server", "vllm_server_base_url=http://one:8000"]
    rollout = compose(servers).actor_rollout_ref.rollout
    assert (rollout.name, rollout.servers) == ("vllm", ["http://one:8000"])
    assert compose(["use_vllm=False"]).actor_rollout_ref.rollout.name == "local"
