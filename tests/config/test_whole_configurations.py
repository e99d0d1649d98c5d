"""A whole configuration of verl composes: its defaults ask for nothing, what was changed is offered or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_data import SHARED_DATA

from verl_mt.config.compose import compose
from verl_mt.config.normalize import normalize_items
from verl_mt.config.schema import leaves
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases.families import at_default, families
from verl_mt.extensions.compat.translate import WHOLE

PEERS = SHARED_DATA.parent / "peers" / "verl"
REVISIONS = ("v0.5.0", "v0.6.1")


@pytest.fixture
def folder(request) -> Path:
    found = PEERS / request.param / "verl" / "trainer" / "config"
    if not found.is_dir():
        pytest.skip(f"no files of verl at {found}")
    return found


both = pytest.mark.parametrize("folder", REVISIONS, indirect=True)


@pytest.mark.slow
@both
@pytest.mark.parametrize("name", ["ppo_trainer", "_generated_ppo_trainer"])
def test_a_whole_configuration_composes_with_verls_own_values(folder, name):
    config = compose([], name, folder)
    assert config.actor_rollout_ref.model.dtype == config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.data.train_batch_size == 1024 and config.algorithm.adv_estimator == "gae"
    assert config.actor_rollout_ref.rollout.n == 1 and config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0
    assert config.trainer.save_freq == config.trainer.test_freq == -1
    assert config.trainer.n_workers_per_node == 8 and config.trainer.placement == "ray"


@pytest.mark.slow
@both
def test_overrides_count_above_a_whole_configuration(folder):
    words = ["data.max_response_length=64", "actor_rollout_ref.rollout.name=sglang", "algorithm.adv_estimator=grpo"]
    words += ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]
    config = compose(words, "ppo_trainer", folder)
    assert config.actor_rollout_ref.rollout.response_length == 64
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"  # the loss's own, not verl's default


@pytest.mark.slow
@both
def test_both_forms_of_a_whole_configuration_are_one(folder):
    assert compose([], "ppo_trainer", folder) == compose([], "_generated_ppo_trainer", folder)


@pytest.mark.slow
@both
def test_a_changed_key_without_a_counterpart_is_refused_in_a_whole_configuration(folder, tmp_path):
    text = (folder / "_generated_ppo_trainer.yaml").read_text()
    assert "num_cycles: 0.5" in text
    text = text.replace("num_cycles: 0.5", "num_cycles: 0.7", 1)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="num_cycles") as error:
        compose([], "mine", tmp_path)
    assert "problems in" not in str(error.value)


@pytest.mark.slow
def test_a_group_and_its_package_are_chosen_as_in_hydra(tmp_path):
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "slow.yaml").write_text("lr: 1e-7\n")
    (tmp_path / "speed" / "fast.yaml").write_text("lr: 1e-4\n")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - speed@actor_rollout_ref.actor.optim: slow\n  - _self_\n")
    assert compose([], "mine", tmp_path).actor_rollout_ref.actor.optim.lr == 1e-7
    chosen = compose(["speed@actor_rollout_ref.actor.optim=fast"], "mine", tmp_path)
    assert chosen.actor_rollout_ref.actor.optim.lr == 1e-4
    added = compose(["+speed@critic.optim=fast", "algorithm.adv_estimator=gae"], "mine", tmp_path)
    assert added.critic.optim.lr == 1e-4 and added.actor_rollout_ref.actor.optim.lr == 1e-7
    with pytest.raises(ConfigError, match="none"):
        compose(["speed@actor_rollout_ref.actor.optim=none"], "mine", tmp_path)


def test_a_default_of_verl_is_no_wish_and_another_value_is():
    table = families()["verl"].defaults
    assert len(table) > WHOLE
    assert at_default("actor_rollout_ref.rollout.agent.agent_loop_config_path", None)
    for value, problems in ((None, 0), ("loops.yaml", 1)):
        outcome = normalize_items([("actor_rollout_ref.rollout.agent.agent_loop_config_path", value)], "a file")
        assert len(outcome.problems) == problems and not outcome.items


SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
OURS = {
    **{
        f"{section}.{SEQUENCE_PARALLEL}": f"actor_rollout_ref.actor.{SEQUENCE_PARALLEL}"
        for section in (
            *(f"actor_rollout_ref.{part}.fsdp_config" for part in ("actor", "ref")),
            *("critic.fsdp", "critic.model.fsdp_config"),
        )
    },
    "actor_rollout_ref.model.lora.rank": "actor_rollout_ref.model.lora_rank",
}
"""verl's key -> ours, whose value in force has to be verl's default."""
WITHOUT_A_COUNTERPART = (
    "actor_rollout_ref.actor.checkpoint.strict", "critic.checkpoint.async_save",  # a checkpoint is whole, or an error
    "actor_rollout_ref.actor.fsdp_config.forward_only", "actor_rollout_ref.ref.fsdp_config.forward_only",
    "critic.fsdp.forward_only", "critic.model.fsdp_config.forward_only",  # the role says it
    "actor_rollout_ref.actor.fsdp_config.strategy", "actor_rollout_ref.ref.fsdp_config.strategy",
    "critic.fsdp.strategy", "critic.model.fsdp_config.strategy",  # FSDP
    "critic.fsdp.use_orig_params", "critic.model.fsdp_config.use_orig_params",
    "critic.model.fsdp_config.entropy_", "critic.model.fsdp_config.use_torch_compile",
    "critic.model.fsdp_config.wrap_policy", "actor_rollout_ref.ref.fsdp_config.o",  # memory and speed
    "critic.model.use_remove_padding", "critic.model.use_liger", "critic.model.fused_kernel_options",
    "critic.model.use_fused_kernels",
    "critic.model.tiled_mlp", "critic.model.custom_chat_template", "critic.model.lora_adapter_path",
    "actor_rollout_ref.model.hf_config_path", "critic.model.hf_config_path", "actor_rollout_ref.ref.model",
    "actor_rollout_ref.model.override_config", "critic.model.override_config",  # as in the checkpoint
    "data.return_raw_chat", "data.audio_key", "data.image_patch_size", "data.mm_processor_kwargs", "data.custom_cls",
    "data.datagen", "trainer.checkpoint_callback_class", "ray_init", "ray_kwargs",
    "reward.reward_manager.module", "reward_manager.module", "reward_model.reward_manager",
    *(f"actor_rollout_ref.rollout.{name}" for name in ("agent", "engine_kwargs.vllm", "router_config_path")),
    *(f"actor_rollout_ref.rollout.multi_turn.{name}" for name in ("completion_callback", "num_repeat_rollouts")),
    "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker",
)  # fmt: skip
"""Keys, and beginnings of keys, of which verl's default is what happens here too, or changes no result."""
OFF = (
    "actor_rollout_ref.actor.fsdp_config.qat", "actor_rollout_ref.actor.fsdp_config.turbo_config",
    "actor_rollout_ref.ref.fsdp_config.qat", "actor_rollout_ref.ref.fsdp_config.turbo_config",
    "critic.fsdp.qat", "critic.fsdp.turbo_config", "actor_rollout_ref.actor.qat", "actor_rollout_ref.model.mtp",
    "actor_rollout_ref.rollout.mtp", "actor_rollout_ref.rollout.qat", "critic.model.mtp",
    "actor_rollout_ref.model.lora", "critic.model.lora", "algorithm.pf_ppo", "distillation",
    "skip", "reward_model", "reward.reward_model",
)  # fmt: skip
"""Blocks of features that are off in verl where nobody sets them, and that are not offered here."""


def test_a_default_is_said_to_have_nothing_to_set_only_where_our_value_in_force_is_the_same():
    ours = leaves()
    for key, values in families()["verl"].defaults.items():
        for value in values:
            outcome = normalize_items([(key, value)], "a file")
            interpolated = isinstance(value, str) and "${" in value  # it follows another key, as ours does
            if key.endswith("._target_") or interpolated or not any("at its default" in note for note in outcome.notes):
                continue
            if key in OURS:
                assert ours[OURS[key]].default == value, key
            else:
                assert key.startswith((*WITHOUT_A_COUNTERPART, *OFF)), f"{key}={value}: is that what happens here?"


def test_passes_are_of_the_type_that_verls_key_names():
    key, critic = "actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"
    for name in ("dtype", "mixed_precision.param_dtype", "model_dtype"):
        (item,) = normalize_items([(f"{key}.{name}", "bf16")], "command line").items
        assert (item.key, item.value) == ("actor_rollout_ref.model.dtype", "bfloat16")
        for other in (f"{critic}.{name}", f"critic.fsdp.{name}", f"actor_rollout_ref.ref.fsdp_config.{name}"):
            outcome = normalize_items([(other, "bfloat16")], "command line")
            assert outcome.items == outcome.problems == [] and "actor_rollout_ref.model.dtype" in outcome.notes[0]
    outcome = normalize_items([(f"{key}.model_dtype", "fp32")], "command line")
    assert outcome.items == outcome.problems == [] and "always keeps float32 weights" in outcome.notes[0]
    for value, problems in (("fp32", 0), ("bf16", 1)):
        outcome = normalize_items([(f"{key}.mixed_precision.reduce_dtype", value)], "command line")
        assert len(outcome.problems) == problems and outcome.items == []


@pytest.mark.parametrize(
    ("section", "instead"),
    [
        ("reward", "reward.path"),
        ("data", "data.sampler"),
        ("algorithm", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor", "policy_loss.loss_mode"),
        ("actor_rollout_ref.rollout", "actor_rollout_ref.rollout.name"),
        ("trainer", "external_plugins"),
    ],
)
def test_a_class_of_ones_own_in_the_place_of_a_section_is_refused(section, instead):
    outcome = normalize_items([(f"{section}._target_", "my.Own")], "command line")
    (problem,) = outcome.problems
    assert (
        f"{section}._target_=my.Own (command line): no section is a class" in problem.text and instead in problem.text
    )
    assert outcome.items == []
    outcome = normalize_items([(f"{section}._target_", "verl.workers.config.Any")], "verl.yaml")
    assert outcome.problems == outcome.items == []
    kept = normalize_items([("reward.kwargs._target_", "my.Own")], "command line").items
    assert [(item.key, item.value) for item in kept] == [("reward.kwargs._target_", "my.Own")]


@pytest.mark.parametrize(
    ("key", "value", "taken"),
    [
        ("critic.shuffle", 7, False),
        ("critic.shuffle", True, True),
        ("data.dataloader_num_workers", "many", False),
        ("data.dataloader_num_workers", 4, True),
        ("trainer.balance_batch", "yes please", False),
        ("global_profiler.tool", "nsys", True),
        ("global_profiler.steps", [1, 2], False),
        ("global_profiler.steps", None, True),
        ("actor_rollout_ref.rollout.over_sample_rate", 0.1, True),
        ("actor_rollout_ref.rollout.over_sample_rate", "half", False),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["extra", "hf_model", "model", "optimizer"], True),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["optimizer", "model", "extra"], True),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["model"], False),
        ("actor_rollout_ref.model.enable_activation_offload", False, True),
        ("actor_rollout_ref.rollout.name", "sglang_async", True),
    ],
)
def test_what_sets_nothing_here_is_checked_all_the_same(key, value, taken):
    assert bool(normalize_items([(key, value)], "command line").problems) != taken


def test_a_critics_settings_beside_an_estimator_without_one_set_nothing():
    words = [("algorithm.adv_estimator", "grpo"), ("critic.optim.lr", 1e-5), ("trainer.n_gpus_per_node", 1)]
    outcome = normalize_items(words, "command line")
    assert [item.key for item in outcome.items] == ["algorithm.adv_estimator", "trainer.n_workers_per_node"]
    assert "critic.optim.lr (command line) has nothing to set: grpo has no critic" in outcome.notes


def test_a_reward_of_gdpo_is_named_in_a_list_there():
    words = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[accuracy_reward, format_reward]"]
    assert compose(words).algorithm.gdpo_reward_weights == {"accuracy_reward": 1.0, "format_reward": 1.0}
