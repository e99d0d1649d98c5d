"""The mapping that names the policy loss, with verl's and slime's aliases, and estimators that are not offered."""

from __future__ import annotations

import re

import pytest

from verl_mt.config.checks import means_nothing
from verl_mt.config.compose import compose
from verl_mt.config.policy_losses import POLICY_LOSSES, loss_mode, read_policy_loss
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError, UnknownKeyError

pytestmark = pytest.mark.slow  # many configurations
ACTOR = "actor_rollout_ref.actor"


def test_nothing_given_is_ppos_loss():
    assert read_policy_loss({}) == read_policy_loss(Config().actor_rollout_ref.actor.policy_loss)
    assert isinstance(read_policy_loss({}), POLICY_LOSSES["vanilla"])


def test_verls_command_line_sets_it_and_the_numbers_of_its_loss():
    config = compose([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.5"])
    chosen = config.actor_rollout_ref.actor.policy_loss
    assert loss_mode(chosen) == "sapo" and read_policy_loss(chosen).options == {"tau_pos": 1.0, "tau_neg": 1.5}


@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for mode in POLICY_LOSSES for name in read_policy_loss({"loss_mode": mode}).options]
)
def test_a_number_that_the_loss_does_not_read_is_refused_and_one_that_it_reads_is_taken(mode, name):
    with pytest.raises(ConfigError, match=f"{name} is 1.0, which only loss_mode={mode} reads. It is gspo"):
        read_policy_loss({name: 1.0, "loss_mode": "gspo"})
    assert read_policy_loss({name: 1.0, "loss_mode": mode}).options[name] == 1.0


@pytest.mark.parametrize(("theirs", "ours"), [("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo"), ("opo", "opo")])
def test_verls_other_names_of_an_estimator(theirs, ours):
    assert compose([f"algorithm.adv_estimator={theirs}"]).algorithm.adv_estimator == ours


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("algorithm.adv_estimator=gdpo", "needs algorithm.gdpo_reward_weights"),
        ("algorithm.adv_estimator=grpoo", "expected one of 'grpo'"),
        ("algorithm.gamma=0.9", "unless algorithm.adv_estimator=gae or reinforce_plus_plus (it is grpo)"),
        ("advantage_estimator=gspo", "policy_loss.loss_mode=gspo"),
    ],
)
def test_what_is_not_offered_says_why(word, text):
    with pytest.raises((ConfigError, UnknownKeyError), match=re.escape(text)):
        compose([word])


@pytest.mark.parametrize(
    ("mode", "idle"),
    [
        ("vanilla", []),
        ("my_losses.py:mine", []),
        ("fipo", []),
        ("gspo", ["clip_ratio_c"]),
        ("cispo", ["clip_ratio_c"]),
        ("clip_cov", ["clip_ratio_c"]),
        ("sapo", ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]),
        ("real", ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]),
        ("gpg", ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]),
        ("kl_cov", ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]),
    ],
)
def test_clip_ranges_that_a_loss_does_not_read_are_known(mode, idle):
    config = Config()
    config.actor_rollout_ref.actor.policy_loss = {"loss_mode": mode}
    assert {key for key in means_nothing(config) if ".clip_ratio" in key} == {f"{ACTOR}.{name}" for name in idle}


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ([], "token-mean"),
        (["loss_mode=gspo"], "seq-mean-token-mean"),
        (["loss_mode=sapo"], "seq-mean-token-mean"),
        (["loss_mode=cispo"], "token-mean"),
    ],
)
def test_how_tokens_become_one_number_goes_with_the_loss_and_is_shown(words, mode):
    config = compose([f"{ACTOR}.policy_loss.{word}" for word in words])
    assert config.actor_rollout_ref.actor.loss_agg_mode == mode
    told = compose([*(f"{ACTOR}.policy_loss.{word}" for word in words), f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"])
    assert told.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum"


@pytest.mark.parametrize(
    ("ratio", "dual", "refused"), [(4, 3.0, True), (3, 3.0, True), (2, 3.0, False), (4, "null", False), (0, 3.0, False)]
)
def test_a_safety_ratio_of_fipo_that_the_dual_clip_makes_idle_is_refused(ratio, dual, refused):
    from verl_mt.config.compose import compose

    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.policy_loss={{loss_mode: fipo, fipo_safety_ratio: {ratio}}}", f"{actor}.clip_ratio_c={dual}"]
    if not refused:
        compose(words)
        return
    with pytest.raises(ConfigError, match=rf"fipo_safety_ratio \({ratio}\) is not below clip_ratio_c \(3\.0\)"):
        compose(words)
