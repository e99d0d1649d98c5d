"""ms-swift's flags: the page's table is the code's, and the documents' command composes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_mt.config.checks import check
from verl_mt.config.compose import Command, compose, config_of_command
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases.families import families

ROWS = families()["ms-swift"].rows
PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating_from_ms_swift.md"
DOCUMENTED = (
    "model", "use_async_engine", "multi_turn_scheduler", "vllm_max_model_len", "vllm_gpu_memory_utilization",
    "max_turns", "multi_turns", "loss_scale", "vllm_server_pass_dataset", "external_plugins", "max_completion_length",
)  # fmt: skip
"""Every flag that ms-swift's documents on multi-turn training name."""


@pytest.mark.cap("C11", "C12", "C14", "C27", "C35", "C87")
def test_the_page_lists_every_flag_with_the_key_or_the_reason_that_the_table_has():
    expected = {name: f"`{row.to}`" if row.to else row.why for name, row in ROWS.items()}
    flags = PAGE.read_text().partition("## Flags")[2]
    assert dict(re.findall(r"^\| `--([a-z0-9_]+)` \| (.*) \|$", flags, re.MULTILINE)) == expected
    assert set(DOCUMENTED) <= expected.keys()


def command_of_page() -> list[str]:
    text = PAGE.read_text().partition("```bash\npython")[2].partition("```")[0].replace("\\\n", " ")
    words = ["python", *text.split()]
    assert words[:3] == ["python", "-m", "verl_mt.trainer"]
    return words[3:]


@pytest.mark.slow
@pytest.mark.cap("C11", "C12", "C14", "C30", "C35", "C41")
def test_the_pages_command_composes():
    config = config_of_command(command_of_page(), None, "test")
    check(config)
    rollout = config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-1.7B"
    assert (rollout.mode, rollout.multi_turn.scheduler) == ("async", "thinking_tips_scheduler")
    assert (rollout.multi_turn.max_assistant_turns, rollout.max_model_len, rollout.response_length) == (3, 32768, 32768)
    assert rollout.max_tokens_per_turn == 8192  # of each turn, as there
    assert (rollout.gpu_memory_utilization, rollout.multi_turn.loss_scale) == (0.8, "default")
    assert (config.external_plugins, config.reward.path) == (["my_plugins.py"], "thinking_tips")
    assert (config.data.prompt_key, config.data.label_key) == ("messages", "solution")


@pytest.mark.slow
@pytest.mark.cap("C14")
def test_the_engine_type_is_a_switch():
    assert config_of_command(["--use_async_engine", "false"], None, "test").actor_rollout_ref.rollout.mode == "sync"
    assert compose([]).actor_rollout_ref.rollout.mode == "async"


def test_flags_with_several_values_and_without_one():
    argv = ["--external_plugins", "a.py", "b.py", "--vllm_server_pass_dataset", "--max_turns=3", "data.seed=3", "-r"]
    assert Command(argv, None, "test").overrides == [
        'external_plugins=["a.py", "b.py"]', "vllm_server_pass_dataset=True", "max_turns=3", "data.seed=3",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--use_vllm", "--vllm_mode", "server"], "rollout.servers names none"),
        (["--vllm_server_host", "127.0.0.1"], "vllm_server_base_url=http://host:port"),
        (["--reward_funcs", "a", "b", "--reward_weights", "1"], "expected a number for each of a, b"),
        (["--rlhf_type", "dpo"], "only 'grpo' is possible"),
        (["--use_async_engine", "maybe"], "expected true or false"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(words, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        config_of_command(words, None, "test")


@pytest.mark.slow
def test_an_environment_is_named_and_scores_as_the_manual_says():
    words = ["--multi_turn_scheduler", "gym_scheduler", "--use_gym_env", "true", "--gym_env", "frozen_lake"]
    config = config_of_command(words, None, "test")
    assert config.reward.path == "gym"
    assert config.actor_rollout_ref.rollout.multi_turn.scheduler_kwargs == {"env": "frozen_lake"}
    both = config_of_command([*words, "--reward_funcs", "format"], None, "test").reward
    assert (both.path, both.kwargs) == ("weighted_sum", {"rewards": ["format", "gym"]})
