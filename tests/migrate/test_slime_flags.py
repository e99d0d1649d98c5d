"""What flags of slime mean together, and where its command says nothing."""

from __future__ import annotations

import re

import pytest

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate import migrate
from verl_mt.extensions.compat.migrate.launch import ENV

pytestmark = pytest.mark.slow  # many configurations
PLAIN = (
    "python3 train.py --hf-checkpoint /m/Qwen --prompt-data /d.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 1000 --num-rollout 10 --global-batch-size 128 --attention-dropout 0 --hidden-dropout 0 "
    "--actor-num-gpus-per-node 1 "
)
RENDERED = PLAIN + "--apply-chat-template --rm-type math "
AGENT = PLAIN + "--custom-generate-function-path my.generate "


def carried(text: str):
    found = migrate(text)
    assert found.refused == []
    return found, compose([ENV.sub(lambda m: m.group(2) or "1", word) for word in found.overrides])


def value(config, key: str):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {f"{ACTOR}.optim.lr_scheduler_type": "linear", f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.clip_ratio_c": None,
              f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.ppo_micro_batch_size": 1, "data.shuffle": False,
              "data.prompt_key": "input", "data.val_files": None, "trainer.save_freq": -1,
              f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", "data.max_prompt_length": 8192}),
        ("--use-kl-loss --eps-clip-c 4 --disable-grpo-std-normalization --use-rollout-logprobs",
         {f"{ACTOR}.kl_loss_coef": 0.0, f"{ACTOR}.kl_loss_type": "k1", f"{ACTOR}.clip_ratio_c": 4.0,
          "algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}.use_sampler_log_probs": "always"}),
        ("--kl-loss-coef 0.1 --kl-loss-type k2 --advantage-estimator gspo",
         {f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.policy_loss": {"loss_mode": "gspo"},
          "algorithm.adv_estimator": "grpo"}),
        ("--lr-decay-style cosine --lr 1e-5 --min-lr 1e-6 --lr-warmup-fraction 0.1 --custom-rm-path my.reward",
         {f"{ACTOR}.optim.min_lr_ratio": 0.1, f"{ACTOR}.optim.lr_warmup_steps": 2,  # 10 rollouts of 2 steps
          "reward.path": "my.reward", "reward.kwargs": {}}),
        ("--max-tokens-per-gpu 4000 --context-parallel-size 2",
         {f"{ACTOR}.ppo_max_token_len": 8000, "data.max_prompt_length": 7000}),
        ("--max-tokens-per-gpu 2000", {f"{ACTOR}.ppo_max_token_len": 3048, "data.max_prompt_length": 2048}),
        ("--rollout-max-context-len 5000 --prompt-data /x.parquet@[0:300] --eval-prompt-data a /a",
         {f"{ROLLOUT}.max_model_len": 5000, "data.max_prompt_length": 4999, "data.train_files": "/x.parquet",
          "data.train_max_samples": 300, "data.val_files": None}),
        ("--eval-interval 5 --eval-prompt-data a /a b /b --rollout-temperature 0.8 --skip-eval-before-train",
         {"data.val_files": ["/a", "/b"], f"{ROLLOUT}.val_kwargs.temperature": 0.8, "trainer.val_before_train": False}),
        ("--dynamic-sampling-filter-path a.check_reward_nonzero_std",
         {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 0}),
        ("--advantage-estimator ppo --normalize-advantages",
         {"critic.optim.lr": 1e-6, "critic.optim.lr_scheduler_type": "linear"}),
        ("--advantage-estimator ppo --normalize-advantages --critic-lr 3e-6 --min-lr 1e-7",
         {"critic.optim.lr": 3e-6, "critic.optim.lr_scheduler_type": "linear", "critic.optim.min_lr_ratio": 0.1}),
        ("--advantage-estimator ppo --normalize-advantages --kl-coef 0.1 --lr 2e-6",
         {"algorithm.adv_estimator": "gae", "critic.optim.lr": 2e-6, "critic.cliprange_value": 0.2,
          "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl": {"kl_coef": 0.1}, "algorithm.kl_penalty": "k1"}),
        ("--apply-chat-template-kwargs '{\"enable_thinking\": false}' --rm-type dapo --reward-key score "
         "--train-backend fsdp --gradient-checkpointing --attn-implementation flash_attention_3",
         {"actor_rollout_ref.model.template_kwargs": {"enable_thinking": False},
          "actor_rollout_ref.model.enable_gradient_checkpointing": True,
          "actor_rollout_ref.model.attn_implementation": "flash_attention_2",
          "reward.kwargs": {"rm_type": "dapo", "reward_key": "score"}}),
        ("--rm-type remote_rm --rm-url http://h/x", {"reward.kwargs": {"rm_type": "remote_rm", "url": "http://h/x"}}),
        ("--sglang-dtype float16 --sglang-context-length 2048 --sglang-attention-backend fa3",
         {f"{ROLLOUT}.dtype": "float16", f"{ROLLOUT}.max_model_len": 2048,
          f"{ROLLOUT}.engine_kwargs": {"attention_backend": "fa3"}, "data.max_prompt_length": 2047}),
    ],
)  # fmt: skip
def test_what_a_flag_of_slime_means(flags, expected):
    _, config = carried(RENDERED + flags)
    assert {key: value(config, key) for key in expected} == expected


def test_a_generate_function_has_the_bound_in_each_turn_and_sees_slimes_numbers():
    _, config = carried(AGENT + "--max-tokens-per-gpu 8000 --context-parallel-size 2 --reward-key accuracy")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.max_tokens_per_turn, config.data.apply_chat_template) == (1000, False)
    assert (config.data.max_prompt_length, rollout.response_length) == (4000, 12000)
    assert config.reward.path == "rm_hub" and config.reward.kwargs == {"reward_key": "accuracy"}
    assert rollout.custom_generate_kwargs == {"context_parallel_size": 2}


def test_weights_start_from_the_folder_that_ref_load_was_made_of():
    found, config = carried(RENDERED + "--ref-load /m/Other-SFT_torch_dist")
    model = config.actor_rollout_ref.model
    assert (model.path, model.tokenizer_path) == ("/m/Other-SFT", "/m/Qwen")
    assert any("weights are started from it" in line for line in found.changed)
    bf16 = RENDERED.replace("/m/Qwen", "/m/Qwen-bf16") + "--ref-load /m/Qwen_torch_dist"
    assert carried(bf16)[1].actor_rollout_ref.model.path == "/m/Qwen-bf16"
    for same in ("/m/Qwen_torch_dist/", "/elsewhere/Qwen_mcore", "/m/Qwen"):
        found, config = carried(RENDERED + f"--ref-load {same}")
        assert config.actor_rollout_ref.model.path == "/m/Qwen" and found.changed == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--loss-type decoupled_policy_loss", "expected policy_loss"),
        ("--advantage-estimator ppo", "only with --normalize-advantages"),
        ("--normalize-advantages", "normalize_advantages is refused"),
        ("--ref-load /elsewhere/model", "ref_load is refused"),
        ("--prompt-data /x.parquet@[5:300]", "rows from the middle of a file"),
        ("--custom-pg-loss-reducer-function-path a.b", "seq-mean-token-sum-norm"),
        ("--freeze-params-name-list embedding", "every weight is trained"),
    ],
)
def test_what_would_mean_something_else_is_refused(flags, reason):
    (refused,) = migrate(RENDERED + flags).refused
    assert reason in refused


def test_a_prompt_that_is_sent_as_it_is_needs_a_generate_function():
    (refused,) = migrate(PLAIN + "--rm-type math").refused
    assert "messages are always rendered" in refused


def test_a_quantized_checkpoint_is_not_trained():
    (refused,) = migrate(RENDERED.replace("/m/Qwen", "/m/Qwen-FP8")).refused
    assert "its weights are quantized" in refused


def test_files_of_settings_are_read_where_they_are(tmp_path):
    own, tests = tmp_path / "own.yaml", tmp_path / "eval.yaml"
    own.write_text("max_turns: 3\nrollout_temperature: 0.5\nname: a b\n")
    tests.write_text(
        "eval:\n  defaults: {n_samples_per_eval_prompt: 4, top_p: 0.7}\n  datasets:\n"
        "    - {name: a, path: /a.jsonl, rm_type: math}\n    - {name: b, path: /b.jsonl}\n"
    )
    found, config = carried(AGENT + f"--custom-config-path {own} --eval-interval 5 --eval-config {tests}")
    rollout = config.actor_rollout_ref.rollout
    assert rollout.custom_generate_kwargs == {"max_turns": 3, "name": "a b"} and rollout.temperature == 0.5
    assert config.data.val_files == ["/a.jsonl", "/b.jsonl"]
    assert (rollout.val_kwargs.n, rollout.val_kwargs.top_p, rollout.val_kwargs.temperature) == (4, 0.7, 0.5)
    assert [line for line in found.changed if "rm_type" in line]
    found, config = carried(RENDERED + "--eval-interval 5 --eval-config /nowhere.yaml")
    assert config.data.val_files is None and any("the file is not here" in line for line in found.changed)


def test_numbers_with_a_default_are_computed_with_it_and_that_is_said():
    found, config = carried(RENDERED.replace("--global-batch-size 128", "--global-batch-size ${GBS:-64}"))
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert "--global-batch-size ${GBS:-64}: numbers that are computed from it here take 64" in found.notes


def test_a_program_in_python_is_no_launch_script(tmp_path):
    file = tmp_path / "run_model.py"
    file.write_text("import slime.utils.external_utils.command_utils as U\n")
    with pytest.raises(ConfigError, match=r"run_model.py is a Python program, .* Give the command that it starts"):
        migrate(file.read_text(), file)


def test_a_line_without_its_backslash_ends_the_command():
    (refused,) = migrate(RENDERED + "\\\n  --lr 1e-6\n  --made-up 3 \\\n --use-tis").refused
    assert re.search("ends before --made-up: the line above lacks its backslash", refused)


def test_what_is_bounded_here_and_not_there_is_a_difference_and_so_is_an_unsaid_size_of_updates():
    found, _ = carried(AGENT + "--max-tokens-per-gpu 9000")
    assert [line.partition("=")[0] for line in found.changed] == [
        "data.max_prompt_length", f"{ROLLOUT}.response_length"
    ]  # fmt: skip
    assert carried(RENDERED)[0].changed == []
    (said,) = carried(RENDERED.replace("--global-batch-size 128 ", ""))[0].changed
    assert said.startswith(
        "neither --global-batch-size nor --num-steps-per-rollout: here a rollout is one optimizer step"
    )
