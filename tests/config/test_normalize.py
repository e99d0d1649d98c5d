"""Command lines and YAML content before Hydra sees them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_mt.config.compose import Command, compose, to_config
from verl_mt.config.normalize import (
    literal,
    normalize_items,
    normalize_overrides,
    normalize_tree,
    raise_problems,
)
from verl_mt.config.schema import leaves, open_parent
from verl_mt.errors import ConfigError, UnknownKeyError
from verl_mt.extensions.compat.aliases.families import aliases

pytestmark = pytest.mark.slow  # many configurations

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def normalized(argv: list[str]) -> list[str]:
    """The command line with canonical keys; everything that is wrong with it is one error."""
    lines, outcome = normalize_overrides(argv)
    raise_problems(outcome.problems)
    return lines


@pytest.mark.cap("V1")
@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 2])))
def test_the_shorthand_works_beside_sub_keys_in_any_order(order):
    words = [f"{MULTI_TURN}=True", f"{MULTI_TURN}.max_user_turns=3", f"{MULTI_TURN}.tool_parser=hermes"]
    turns = compose([words[i] for i in order]).actor_rollout_ref.rollout.multi_turn
    assert (turns.enable, turns.max_user_turns, turns.max_assistant_turns) == (True, 3, 4)


def test_known_overrides_stay_as_written():
    assert normalized(["data.seed=3", "trainer.experiment_name=a-b_c"]) == [
        "data.seed=3",
        "trainer.experiment_name=a-b_c",
    ]


def test_flags_may_stand_between_overrides():
    command = Command(["data.seed=3", "--config-name", "tiny", "++reward.kwargs.a=1", "-c=job", "~x"], None, "test")
    assert (command.flags.cfg, command.file) == ("job", "tiny")
    assert command.overrides == ["data.seed=3", "++reward.kwargs.a=1", "~x"]
    assert Command(["--info", "data.seed=3"], None, "test").flags.info == "all"
    with pytest.raises(ConfigError, match=r"unknown flag --cnfg --colour=red. --help lists the flags"):
        Command(["data.seed=3", "--cnfg", "job", "--colour=red"], None, "test")


def test_normalising_twice_changes_nothing():
    argv = [
        f"{MULTI_TURN}=True",
        "data.max_response_length=64",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=console",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        """actor_rollout_ref.rollout.stop=['</answer>',"it's"]""",
    ]
    once = normalized(argv)
    assert normalized(once) == once


def test_every_refusal_of_a_command_is_in_one_error():
    argv = [
        "actor_rollout_ref.rolout.n=3",
        "data.train_batch_size=abc",
        "critic.megatron.seed=1",
        "algorithm.use_pf_ppo=True",
        "actor_rollout_ref.rollout.name=hf",
        "data.seed=1,2",
        "actor_rollout_ref.actor.ppo_epochs=0",
        "~trainer.seed",
        "nonsense",
    ]
    with pytest.raises(UnknownKeyError) as caught:
        normalized(argv)
    text = str(caught.value)
    assert text.startswith("9 problems")
    for part in (
        "did you mean actor_rollout_ref.rollout.n?", "'abc'", "there is no Megatron", "resampled", "Use sglang or vllm",
        "--multirun", "at least 1", "cannot be deleted", "'nonsense'",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("actor_rollout_ref.actor.strategy=megatron", ("FSDP2", "trainer.placement=ray")),
        ("actor_rollout_ref.ref.strategy=megatron", ("FSDP2", "trainer.placement=ray")),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", ("FSDP2", "tensor_model_parallel_size")),
        ("actor_rollout_ref.ref.megatron.param_offload=True", ("FSDP2", "docs/scaling.md")),
        ("model_engine=megatron", ("FSDP2", "trainer.placement=ray")),
        ("actor_rollout_ref.rollout.name=hf", ("Use sglang or vllm", "local")),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml", ("custom generate functions",)),
    ],
)
def test_what_is_not_offered_is_refused_with_the_reason_and_what_to_use_instead(argument, parts):
    with pytest.raises(UnknownKeyError) as caught:
        normalized([argument])
    assert all(part in str(caught.value) for part in parts)


def test_wrong_values_alone_are_a_config_error():
    with pytest.raises(ConfigError, match=r"ppo_epochs=0.*at least 1") as caught:
        normalized(["actor_rollout_ref.actor.ppo_epochs=0"])
    assert not isinstance(caught.value, UnknownKeyError)


@given(st.sampled_from(sorted(leaves())), st.data())
@settings(max_examples=60, deadline=None)
def test_a_typing_error_in_any_key_never_passes(key, data):
    position = data.draw(st.integers(0, len(key) - 1))
    typo = key[:position] + key[position + 1 :]
    if typo in leaves() or typo in aliases() or open_parent(typo) or not typo.replace(".", ""):
        return
    outcome = normalize_items([(typo, 1)], "test")
    assert outcome.problems
    assert not outcome.items


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        (f"{MULTI_TURN}.tool_config_path=t.yaml", "tool_kwargs.tools_config_file", "t.yaml"),
        (f"{MULTI_TURN}.interaction_config_path=i.yaml", "interaction_config_file", "i.yaml"),
        ("data.max_response_length=77", "response_length", 77),
        (f"{MULTI_TURN}.max_tool_response_length=256", "multi_turn.max_tool_response_tokens", 256),
        (f"{MULTI_TURN}.tool_response_truncate_side=left", "multi_turn.tool_response_keep", "head"),
        (f"{MULTI_TURN}.tool_response_truncate_side=right", "multi_turn.tool_response_keep", "tail"),
        (f"{MULTI_TURN}.format=llama3_json", "multi_turn.tool_parser", "llama3_json"),
        (f"{MULTI_TURN}.tokenization_sanity_check_mode=off", "multi_turn.tokenization_sanity_check_mode", "off"),
        (f"{MULTI_TURN}.tokenization_sanity_check_mode=False", "multi_turn.tokenization_sanity_check_mode", "off"),
        (f"{MULTI_TURN}.tokenization_sanity_check_mode=disable", "multi_turn.tokenization_sanity_check_mode", "off"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=False", "val_kwargs.temperature", 0.0),
    ],
)
@pytest.mark.cap("V2", "V3", "V7")
def test_an_alias_of_verls_sets_our_key_on_the_command_line_and_in_a_file(word, key, value):
    old, _, text = word.partition("=")
    in_a_file = to_config({old: {"False": False, "256": 256, "77": 77}.get(text, text)})
    for config in (compose([word], "ppo_trainer"), in_a_file):
        assert OmegaConf.select(OmegaConf.structured(config.actor_rollout_ref.rollout), key) == value


@pytest.mark.parametrize("written", ["all-linear", "[q_proj,v_proj]", '\'["q_proj", "v_proj"]\''])
def test_the_layers_of_low_rank_adapters_may_be_named_as_verl_does(written):
    model = compose([f"actor_rollout_ref.model.{word}" for word in ("lora_rank=8", f"target_modules={written}")])
    expected = ["all-linear"] if written == "all-linear" else ["q_proj", "v_proj"]
    assert model.actor_rollout_ref.model.lora_target_modules == expected


def test_dropout_of_adapters_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"lora_dropout.*another one than the one that sampled"):
        normalized(["actor_rollout_ref.model.lora_dropout=0.1"])


def test_a_key_that_is_always_so_here_is_named_and_explained_once(capsys):
    from verl_mt.config import compose as module

    module._SAID.clear()
    compose(["data.return_raw_chat=True"])
    compose(["data.return_raw_chat=True"])
    assert capsys.readouterr().err.count("data.return_raw_chat=true (command line)") == 1


def test_two_aliases_of_one_key_with_two_values_are_refused():
    with pytest.raises(ConfigError, match=r"both set actor_rollout_ref\.rollout\.response_length"):
        normalized(["data.max_response_length=5", "actor_rollout_ref.rollout.response_length=6"])
    with pytest.raises(ConfigError, match="both set"):
        normalized([f"{MULTI_TURN}=True", f"{MULTI_TURN}.enable=False"])
    normalized(["data.max_response_length=5", "actor_rollout_ref.rollout.response_length=5"])
    assert normalized(["data.seed=1", "data.seed=2"]) == ["data.seed=1", "data.seed=2"]


def test_the_list_that_a_shells_quotes_left_as_text_is_a_list():
    words = ['trainer.logger=\'["console","wandb"]\'', 'trainer.logger=["console","wandb"]', "trainer.logger=console"]
    values = [normalize_overrides([word])[1].items[0].value for word in words]
    assert values == [["console", "wandb"], ["console", "wandb"], ["console"]]


def test_free_mappings_take_new_keys_with_and_without_plus():
    for prefix in ("", "+", "++"):
        argv = normalized([f"{prefix}data.apply_chat_template_kwargs.enable_thinking=False"])
        assert argv == ["++actor_rollout_ref.model.template_kwargs.enable_thinking=false"]
    assert compose(argv).actor_rollout_ref.model.template_kwargs == {"enable_thinking": False}


def test_free_keys_may_come_as_one_mapping():
    config = compose(["reward.path=exact_match", "reward.kwargs={a:1,b:{c:x}}", "reward.kwargs.d=2"])
    assert config.reward.kwargs == {"a": 1, "b": {"c": "x"}, "d": 2}
    assert compose(["data.train_files={one:{path:a.jsonl}}"]).data.train_files == {"one": {"path": "a.jsonl"}}


text_values = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda t: "${" not in t
)


@given(text_values)
@example("\\")
@example("it's \\\\\"")
@settings(max_examples=40, deadline=None)
def test_any_text_survives_the_way_through_an_alias(text):
    # A value of a renamed key is written anew in Hydra's grammar and must be read back as the same text.
    word = f"{MULTI_TURN}.interaction_config_path={literal(text)}"
    lines, outcome = normalize_overrides([word])
    assert not outcome.problems
    _, again = normalize_overrides(lines)
    assert [i.value for i in again.items] == [text] == [i.value for i in outcome.items]


def test_a_config_groups_file_may_not_set_keys_outside_its_package():
    nested, outcome = normalize_tree({"train_batch_size": 4, "max_response_length": 9}, "data/x.yaml", "data")
    assert nested == {"train_batch_size": 4}
    assert "@package _global_" in outcome.problems[0].text


def test_interpolations_follow_a_renamed_key():
    config = to_config({"data": {"max_response_length": 64, "max_prompt_length": "${data.max_response_length}"}})
    assert config.data.max_prompt_length == 64


@pytest.mark.slow
def test_verls_two_keys_for_the_longest_prompt_are_one():
    words = ["actor_rollout_ref.rollout.prompt_length=99"]
    assert compose(words).data.max_prompt_length == 99
    assert compose([*words, "data.max_prompt_length=99"]).data.max_prompt_length == 99
    with pytest.raises(ConfigError, match=r"both set data\.max_prompt_length"):
        compose([*words, "data.max_prompt_length=100"])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([f"{MULTI_TURN}.tool_config_path=tools_configs/calculator.yaml"], "convert"),
        ([f"{MULTI_TURN}.tool_config_path=tools_configs/calculator.yaml", f"{MULTI_TURN}.tool_argument_types=refuse"],
         "refuse"),
        (["actor_rollout_ref.rollout.tool_kwargs.tools_config_file=tools_configs/calculator.yaml"], "refuse"),
    ],
)  # fmt: skip
def test_under_verls_name_of_the_tools_file_arguments_of_another_type_reach_the_tool(words, wanted):
    assert compose(words).actor_rollout_ref.rollout.multi_turn.tool_argument_types == wanted
