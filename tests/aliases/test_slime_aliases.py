"""slime's flags: the page's table is the code's, and the document's launch command composes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import Command, compose, config_of_command
from verl_mt.config.normalize import normalize_overrides
from verl_mt.config.options import read_rollout_correction
from verl_mt.errors import ConfigError, UnknownKeyError
from verl_mt.extensions.compat.aliases.families import families

pytestmark = pytest.mark.slow  # published templates, commands, many configurations

ROWS = families()["slime"].rows
PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating_from_slime.md"
DOCUMENTED = (
    "custom-generate-function-path", "custom-rm-path", "prompt-data", "input-key", "label-key", "metadata-key",
    "rollout-batch-size", "n-samples-per-prompt", "rollout-max-response-len", "rollout-temperature", "use-tis",
    "tis-clip", "save-debug-rollout-data",
)  # fmt: skip
"""Every flag that slime's guide to agents names."""


def table_of_page() -> dict[str, str]:
    flags = PAGE.read_text().partition("## Flags")[2]
    return dict(re.findall(r"^\| `--([a-z0-9-]+)` \| (.*) \|$", flags, re.MULTILINE))


@pytest.mark.cap("C43", "C44", "C66", "C67", "C68", "C80")
def test_the_page_lists_every_flag_with_the_key_or_the_reason_that_the_table_has():
    flags = {name.replace("_", "-"): row for name, row in ROWS.items() if "." not in name}
    expected = {name: f"`{row.to}`" if row.to else row.why for name, row in flags.items()}
    assert table_of_page() == expected
    assert set(DOCUMENTED) <= expected.keys()


@pytest.mark.cap("C43", "C44", "C66", "C67", "C68")
def test_the_documents_launch_command_composes():
    argv = [
        "--custom-generate-function-path", "examples.search_r1.generate_with_search.generate",
        "--custom-rm-path", "examples.search_r1.generate_with_search.reward_func",
        "--prompt-data", "/root/nq_search/train.jsonl",
        "--input-key", "question", "--label-key", "answer", "--metadata-key", "metadata",
        "--rollout-batch-size", "32", "--n-samples-per-prompt", "4",
        "--rollout-max-response-len", "8192", "--rollout-temperature", "1.0", "--apply-chat-template",
        "--use-tis", "--tis-clip", "2.0",
        "--save-debug-rollout-data", "/root/debug/rollout_{rollout_id}.pt",
        "--hf-checkpoint", "verl_mt://tiny", "actor_rollout_ref.actor.ppo_max_token_len=9000",
    ]  # fmt: skip
    config = config_of_command(argv, None, "test")
    rollout, data = config.actor_rollout_ref.rollout, config.data
    assert rollout.custom_generate_function_path == "examples.search_r1.generate_with_search.generate"
    assert config.reward.path == "examples.search_r1.generate_with_search.reward_func"
    assert (data.train_files, data.prompt_key, data.label_key) == ("/root/nq_search/train.jsonl", "question", "answer")
    assert (data.train_batch_size, rollout.n, rollout.response_length, rollout.temperature) == (32, 4, 8192, 1.0)
    assert config.trainer.debug_rollout_data == "/root/debug/rollout_{rollout_id}.pt" and data.apply_chat_template


def test_flags_of_hydra_and_overrides_are_left_alone():
    argv = ["--config-name", "tiny", "--cfg", "job", "data.seed=3", "--colocate", "data.shuffle=False", "--lr=1e-5"]
    argv += ["--prompt-data", "/data/split=train/x.jsonl", "--use-tis", "--weight-decay", "-1", "--use-kl-loss"]
    command = Command(argv, None, "test")
    assert (command.file, command.flags.cfg) == ("tiny", "job")
    assert command.overrides == [
        "data.seed=3", "colocate=True", "data.shuffle=False", "lr=1e-5", "prompt_data=/data/split=train/x.jsonl",
        "use_tis=True", "weight_decay=-1", "use_kl_loss=True",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("load_debug_rollout_data=/x/{rollout_id}.pt", "trainer.debug_mode=train_only"),
        ("adam_eps=1e-5", "only 1e-08 is possible"),
        ("metadata_key=meta", "only 'metadata' is possible"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(word, text):
    with pytest.raises((ConfigError, UnknownKeyError), match=re.escape(text)):
        compose([word])


def test_debug_modes_by_slimes_names():
    for word, mode in (
        ("debug_rollout_only=True", ["'rollout_only'"]),
        ("debug_train_only=True", ["'train_only'"]),
        ("debug_rollout_only=False", []),
    ):
        lines, _ = normalize_overrides(["save_debug_rollout_data=/x/{rollout_id}.pt", word])
        assert lines == ["trainer.debug_rollout_data='/x/{rollout_id}.pt'", *(f"trainer.debug_mode={m}" for m in mode)]


@pytest.mark.cap("C43")
def test_one_sample_per_prompt_is_refused_unless_a_function_makes_the_group():
    with pytest.raises(ConfigError, match="needs at least 2"):
        compose(["actor_rollout_ref.rollout.n=1"])
    made = compose(["actor_rollout_ref.rollout.n=1", "custom_generate_function_path=my.agents", "use_kl_loss=False"])
    assert made.actor_rollout_ref.rollout.n == 1


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("interaction_config_file=x.yaml", "interaction_config_file=x.yaml does not go with"),
        ("multi_turn.loss_scale=last_round", "multi_turn.loss_scale=last_round does not go with"),
        ("multi_turn.train_prompt_assistants=True", "train_prompt_assistants=True does not go with"),
        ("multi_turn.enable=False", "multi_turn.enable=False does not go with"),
    ],
)
def test_what_a_generate_function_decides_itself_is_refused_beside_it(word, text):
    with pytest.raises(ConfigError, match=text):
        compose(["custom_generate_function_path=my.generate", f"actor_rollout_ref.rollout.{word}"])


def test_settings_of_a_function_that_is_not_named_are_refused():
    with pytest.raises(ConfigError, match=r"custom_generate_kwargs=.* unless .*custom_generate_function_path"):
        reject_unused_keys(compose(["actor_rollout_ref.rollout.custom_generate_kwargs={a:1}"]))


@pytest.mark.cap("C65")
@pytest.mark.parametrize(
    ("words", "clip"),
    [
        ([], None),
        (["--use-tis"], 2.0),
        (["--use-tis", "--tis-clip", "3.5"], 3.5),
        (["--tis-clip", "3.5", "--use-tis"], 3.5),
        (["use_tis=False", "tis_clip=3.5"], None),
        (["tis_clip=1.5"], 1.5),
    ],
)
def test_the_flags_of_truncated_importance_sampling_switch_it_on_and_bound_it(words, clip):
    options = read_rollout_correction(config_of_command(words, None, "test").algorithm.rollout_correction)
    assert (options.rollout_is, options.rollout_is_threshold) == (("token", clip) if clip else (None, 2.0))


@pytest.mark.parametrize(
    ("words", "delta"),
    [(["--use-opsm"], 1e-4), (["--use-opsm", "--opsm-delta", "0.01"], 0.01), (["use_opsm=False"], None)],
)
def test_the_flags_of_off_policy_sequence_masking_are_one_number(words, delta):
    given = config_of_command(words, None, "test").algorithm.rollout_correction
    assert read_rollout_correction(given).off_policy_sequence_mask_delta == delta
