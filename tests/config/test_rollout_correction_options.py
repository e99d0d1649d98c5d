"""The mapping of rollout corrections under everybody's names, and what it refuses."""

from __future__ import annotations

import re

import pytest

from verl_mt.config.checks import check
from verl_mt.config.compose import compose, config_of_command
from verl_mt.config.options import RolloutCorrectionOptions, read_rollout_correction
from verl_mt.errors import ConfigError, UnknownKeyError

pytestmark = pytest.mark.slow  # many configurations
KEY = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"


def options(*words: str) -> RolloutCorrectionOptions:
    config = config_of_command(list(words), None, "test")
    check(config)
    return read_rollout_correction(config.algorithm.rollout_correction)


def test_nothing_given_corrects_nothing():
    plain = options()
    assert plain == RolloutCorrectionOptions()
    assert not plain.corrects and not plain.of_batch


def test_verls_keys_on_the_command_line():
    made = options(
        f"{KEY}.rollout_is=token", f"{KEY}.rollout_is_threshold=3.0", f"{KEY}.rollout_is_batch_normalize=True",
        f"{KEY}.rollout_rs=geometric", f"{KEY}.rollout_rs_threshold=1.01", f"{KEY}.rollout_token_veto_threshold=1e-4",
        f"{KEY}.bypass_mode=False", f"{KEY}.use_pure_rollout_correction=False",
    )  # fmt: skip
    assert (made.rollout_is, made.rollout_is_threshold, made.rollout_is_batch_normalize) == ("token", 3.0, True)
    assert (made.rejection, made.estimator, made.rollout_token_veto_threshold) == ("seq_mean", "k1", 1e-4)
    assert made.bounds == pytest.approx((1 / 1.01, 1.01))


def test_a_whole_mapping_is_the_same_as_its_keys():
    whole = options(KEY + "={rollout_is:sequence,rollout_is_threshold:4.0,bypass_mode:false}")
    assert whole == options(f"{KEY}.rollout_is=sequence", f"{KEY}.rollout_is_threshold=4.0")


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"rollout_rs": "token"}, (0.5, 2.0)),
        ({"rollout_rs": "token", "rollout_rs_threshold": 4.0}, (0.25, 4.0)),
        ({"rollout_rs": "token", "rollout_rs_threshold": "0.5_3.0"}, (0.5, 3.0)),
        # k1 is log(sampler / trainer), so that these are bounds of the inverse ratio
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_3.0"}, (1 / 3, 2.0)),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 4.0}, (0.25, 4.0)),
        (
            {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 4, "rollout_rs_threshold_lower": 0},
            (0.25, float("inf")),
        ),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 4, "rollout_rs_threshold_lower": 0}, (0.0, 4.0)),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1}, (0.0, 0.1)),
    ],
)
def test_bounds_of_a_rejection(given, bounds):
    assert read_rollout_correction(given).bounds == pytest.approx(bounds)


@pytest.mark.parametrize(
    ("name", "over", "estimator"),
    [
        ("token", "token", "k1"),
        ("sequence", "seq_sum", "k1"),
        ("geometric", "seq_mean", "k1"),
        ("seq_max_k2", "seq_max", "k2"),
    ],
)
def test_the_product_and_the_geometric_mean_have_different_names(name, over, estimator):
    made = RolloutCorrectionOptions(rollout_rs=name)
    assert (made.rejection, made.estimator, made.of_batch) == (over, estimator, name != "token")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"{ACTOR}.tis_clip=3", {"rollout_is": "token", "rollout_is_threshold": 3}),
        (f"{ACTOR}.tis_imp_ratio_cap=2.5", {"rollout_is": "token", "rollout_is_threshold": 2.5}),
        (f"{ACTOR}.tis_imp_ratio_cap=-1", {}),
        (f"{ACTOR}.tis_clip=null", {}),
        ("--rollout_importance_sampling_mode=token_truncate", {"rollout_is": "token"}),
        ("--rollout_importance_sampling_mode=sequence_truncate", {"rollout_is": "geometric"}),
        (
            "--rollout_importance_sampling_mode=sequence_mask",
            {"rollout_is": "geometric", "rollout_rs": "geometric", "rollout_rs_threshold_lower": 0.0},
        ),
        ("--off_policy_sequence_mask_delta=0.02", {"off_policy_sequence_mask_delta": 0.02}),
    ],
)
def test_other_aliases(word, expected):
    assert config_of_command([word], None, "test").algorithm.rollout_correction == expected


def test_a_mode_and_its_threshold_are_one_mapping():
    words = ["--rollout_importance_sampling_mode", "token_mask", "--rollout_importance_sampling_threshold", "3"]
    made = options(*words)
    assert (made.rollout_is, made.rejection, made.bounds) == ("token", "token", (0.0, 3.0))


def test_bypassing_the_trainers_log_probs_is_the_actors_switch():
    assert compose([f"{KEY}.bypass_mode=True"]).actor_rollout_ref.actor.use_sampler_log_probs == "always"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rollout_iss": "token"}, "did you mean 'rollout_is'"),
        ({"rollout_is": "turn"}, "'token', 'sequence', 'geometric'"),
        ({"rollout_is_threshold": 2.0}, "or rollout_rs is set (rollout_is is null, rollout_rs is null)"),
        ({"rollout_rs_threshold": 2.0}, "unless rollout_rs is set (it is null)"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.5}, "leaves out 1"),
        ({"rollout_is": "token", "rollout_is_threshold_lower": 2.0}, "leaves out 1"),
        ({"rollout_is": "token", "rollout_is_threshold": "big"}, "expected a number"),
        ({"rollout_is": "token", "rollout_is_batch_normalize": 1}, "expected true or false"),
        ({"rollout_rs": "token", "rollout_rs_threshold": 0.5}, "leaves out 1"),
        ({"rollout_rs": "token", "rollout_rs_threshold": 0.0}, "must be above 0"),
        ({"rollout_rs": "token", "rollout_rs_threshold_lower": 1.5}, "leaves out 1"),
        ({"rollout_rs": "token", "rollout_rs_threshold": "2_0.5"}, "below the upper one"),
        ({"rollout_rs": "token", "rollout_rs_threshold": "2"}, "lower_upper"),
        ({"rollout_rs": "token", "rollout_rs_threshold": "0.5_2", "rollout_rs_threshold_lower": 0.1}, "has a lower"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "an upper bound only"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0.0}, "reject everything"),
        ({"rollout_token_veto_threshold": 1.0}, "must be below 1"),
        ({"off_policy_sequence_mask_delta": -0.1}, "must be at least 0"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(given, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        read_rollout_correction(given)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([f"{KEY}.rollout_is=token", f"{ACTOR}.use_sampler_log_probs=always"], "taken to the sampler already"),
        (
            [f"{KEY}.rollout_token_veto_threshold=1e-4", f"{KEY}.bypass_mode=True"],
            "rollout_token_veto_threshold=0.0001",
        ),
        ([f"{KEY}.rollout_is=token", f"{ACTOR}.policy_loss.loss_mode=gspo"], "Use sequence or geometric"),
        ([f"{KEY}.rollout_rs=token_k3", f"{ACTOR}.policy_loss.loss_mode=gspo"], "rollout_rs=token_k3 with"),
        (
            [f"{KEY}.rollout_is=sequence", "actor_rollout_ref.rollout.agent_function_path=my.agent"],
            "a product over all of them is the ratio of none. Use token, or geometric",
        ),
        ([f"{KEY}.rollout_is=token", f"{KEY}.rollout_is_threshold=0.1"], "leaves out 1"),
    ],
)
def test_what_a_correction_does_not_go_with_is_refused_with_the_reason(words, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        check(compose(words))


@pytest.mark.parametrize("word", [f"{KEY}.use_pure_rollout_correction=True", f"{KEY}.loss_type=reinforce"])
def test_a_pure_policy_gradient_names_the_loss_to_use(word):
    with pytest.raises(UnknownKeyError, match="loss_mode=cispo"):
        compose([word])


def test_interpolated_log_probs_were_removed_and_the_refusal_names_what_to_set():
    with pytest.raises(ConfigError) as raised:
        compose([f"{ACTOR}.use_sampler_log_probs=interpolated"])
    said = str(raised.value)
    assert f"{ACTOR}.use_sampler_log_probs=interpolated" in said and "'interpolated' was removed. Set auto" in said


def test_sequence_masking_goes_with_the_samplers_log_probs_and_sequence_weights_with_gspo():
    options(f"{KEY}.off_policy_sequence_mask_delta=0.01", f"{ACTOR}.use_sampler_log_probs=always")
    options(f"{KEY}.rollout_is=geometric", f"{ACTOR}.policy_loss.loss_mode=gspo")


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)])
def test_filtered_sampling_is_refused_for_training_because_the_trainers_log_probs_are_of_all_tokens(key, value):
    with pytest.raises(ConfigError) as error:
        compose([f"actor_rollout_ref.rollout.{key}={value}"])
    assert "training needs the full distribution" in str(error.value)
    assert "over the whole vocabulary" in str(error.value) and f"val_kwargs.{key}" in str(error.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=reinforce_plus_plus"],
            "adv_estimator=reinforce_plus_plus, which does not compare the samples of a prompt",
        ),
        (
            ["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=900"],
            "even an empty response would be penalised",
        ),
        (["dynamic_sampling_filter_path=my.filters.keep"], "only check_reward_nonzero_std has a counterpart"),
    ],
)
def test_dapos_parts_refuse_what_they_do_not_go_with(words, text):
    with pytest.raises((ConfigError, UnknownKeyError), match=re.escape(text)):
        check(config_of_command(["actor_rollout_ref.rollout.response_length=512", *words], None, "test"))


def test_dapos_parts_by_everybodys_keys():
    verl = compose([
        "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=5", "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=64", "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
    ])  # fmt: skip
    groups, buffer = verl.algorithm.filter_groups, verl.reward.overlong_buffer
    assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "acc", 5)
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 64, 0.5)
    words = ["--dynamic_sample", "true", "--max_resample_times", "3", "--overlong_filter"]
    swift = config_of_command(words, None, "test")
    assert swift.algorithm.filter_groups.enable and swift.algorithm.filter_overlong
    assert swift.algorithm.filter_groups.max_num_gen_batches == 4, "three more than the first"
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert config_of_command(["--dynamic-sampling-filter-path", path], None, "test").algorithm.filter_groups.enable
