"""Short names of keys: one rule for Python's keywords and for "did you mean", and its page."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from verl_mt.api.arguments import CallArguments, full_key
from verl_mt.config.compose import compose
from verl_mt.config.normalize import normalize_items, normalize_overrides
from verl_mt.config.schema import leaves, sections
from verl_mt.config.short_names import keys_meant, suggest_key
from verl_mt.errors import UnknownKeyError
from verl_mt.extensions.compat.aliases.families import aliases

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PAGE = Path(__file__).parents[2].joinpath("docs/python_api.md").read_text()
AMBIGUOUS = {"path", "name", "enable"}
VALUES: list[Any] = [True, 2, 0.5, "group", "sequence", "dr_grpo", "x", "none", {"a": 1}]
"""One of them is right for each of TRL's names."""


def keys_by_last_part() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for key in (*leaves(), *sections()):
        found[key.rpartition(".")[2]].append(key)
    return found


def table(head: str) -> list[list[list[str]]]:
    """The rows of a table of the page: of each cell what stands in backticks."""
    rows = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows
    return [[re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lr", f"{ACTOR}.optim.lr"),
        ("actor.lr", f"{ACTOR}.optim.lr"),
        ("optim.lr", f"{ACTOR}.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("n", f"{ROLLOUT}.n"),
        ("rollout.n", f"{ROLLOUT}.n"),
        ("val_kwargs.n", f"{ROLLOUT}.val_kwargs.n"),
        ("rollout.val_kwargs", f"{ROLLOUT}.val_kwargs"),
        ("temperature", f"{ROLLOUT}.temperature"),
        ("seed", "trainer.seed"),
        ("actor.loss_mode", ""),
        ("policy_loss.loss_mode", f"{ACTOR}.policy_loss.loss_mode"),
        ("actor.policy_loss.loss_mode", f"{ACTOR}.policy_loss.loss_mode"),
        ("scheduler_kwargs.env.name", f"{ROLLOUT}.multi_turn.scheduler_kwargs.env.name"),
        ("optim.actor.lr", ""),
        ("earning_rate", ""),
    ],
)
def test_a_short_name_is_a_last_part_with_any_parts_above_it(name: str, key: str):
    assert keys_meant(name) == ([key] if key else [])


def test_at_most_three_names_stay_ambiguous():
    """Of all endings of all keys, however many parts they have."""
    several = set()
    for key in (*leaves(), *sections()):
        parts = key.split(".")
        assert keys_meant(key) == [key]
        for start in range(1, len(parts)):
            name = ".".join(parts[start:])
            if len(keys_meant(name)) > 1:
                several.add(name)
    assert several == AMBIGUOUS
    assert sum(len(keys) > 1 for keys in keys_by_last_part().values()) > 25


def test_did_you_mean_and_keywords_agree_on_every_last_part():
    for name in keys_by_last_part().keys() - leaves().keys() - sections().keys():
        meant = keys_meant(name)
        assert suggest_key(name) == f"; did you mean {' or '.join(meant)}?"
        if name not in AMBIGUOUS:
            assert [full_key(name)] == meant
        else:
            with pytest.raises(UnknownKeyError) as caught:
                full_key(name)
            assert all(key in str(caught.value) for key in meant) and len(meant) > 1


def test_other_libraries_names_of_a_key_mean_the_same_as_its_short_name():
    """`lr=1e-5` on a command line is slime's name; in Python it is the short name."""
    renamed = {name: row.to for name, row in aliases().items() if row.meaning == "renamed"}
    differing = {name for name, key in renamed.items() if keys_meant(name) not in ([], [name], [key])}
    assert differing == {"model"}  # an argument of its own in Python


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("sed", "trainer.seed"),
        ("temprature", f"{ROLLOUT}.temperature"),
        ("learning_rat", "learning_rate"),
        ("rollout.seed", "trainer.seed"),
        (f"{ACTOR}.optm.lr", f"{ACTOR}.optim.lr"),
        (f"{ROLLOUT}.val_kwarg.n", f"{ROLLOUT}.val_kwargs.n"),
        ("path", "actor_rollout_ref.model.path or reward.path"),
        ("betas", f"{ACTOR}.optim.betas"),
        ("trainer.totl_training_steps", "trainer.total_training_steps"),
        (f"{ACTOR}.lr", f"{ACTOR}.optim.lr"),
        (f"{ROLLOUT}.temprature", f"{ROLLOUT}.temperature"),
        ("rollout.n", f"{ROLLOUT}.n"),
        ("actor.lr", f"{ACTOR}.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
    ],
)
def test_a_typing_error_is_answered_by_the_same_rule(wrong: str, right: str):
    _, outcome = normalize_overrides([f"{wrong}=3"])
    assert [p.text for p in outcome.problems] == [f"{wrong} (command line): unknown key; did you mean {right}?"]


def test_a_name_that_resembles_nothing_names_the_list_of_keys():
    assert suggest_key("zebra") == "; python -m verl_mt.config.write_reference lists all keys"


def test_the_page_lists_every_name_that_several_keys_have():
    listed = set()
    for names, means, others in table("short name | sets | does not set"):
        for name in names:
            meant, left = ([key.replace("*", name) for key in cell] for cell in (means, others))
            assert keys_meant(name) == meant if meant else name in AMBIGUOUS, name
            assert sorted(meant + left) == sorted(keys_by_last_part()[name]), name
        listed |= set(names)
    # `model` is an argument of the call.
    assert listed == {name for name, keys in keys_by_last_part().items() if len(keys) > 1} - {"model"}


@pytest.mark.parametrize(("theirs", "ours"), table("TRL | short name of the key"))
def test_the_page_is_true_of_trls_names(theirs: list[str], ours: list[str]):
    for name, short in zip(theirs, ours):
        outcomes = [normalize_items([(full_key(name), value)], "test") for value in VALUES]
        keys = {item.key for outcome in outcomes if not outcome.problems for item in outcome.items}
        assert any(f"{key}.".startswith(f"{full_key(short)}.") for key in keys), (name, keys)


def test_names_that_only_trl_has_set_the_value_that_they_mean():
    given = {
        "chat_template_kwargs": {"enable_thinking": False}, "mask_truncated_completions": True,
        "max_tool_calling_iterations": 5, "off_policy_mask_threshold": 0.5, "sapo_temperature_neg": 1.1,
        "loss_type": "sapo", "shuffle_dataset": False, "vllm_max_model_length": 300,
    }  # fmt: skip
    call = CallArguments()
    call.keys(given)
    config = compose(call.words)
    ours = config.actor_rollout_ref
    assert ours.model.template_kwargs == {"enable_thinking": False}
    assert config.algorithm.filter_overlong and not config.data.shuffle
    assert ours.rollout.multi_turn.max_assistant_turns == 6 and ours.rollout.max_model_len == 300
    assert config.algorithm.rollout_correction["off_policy_sequence_mask_delta"] == 0.5
    assert ours.actor.policy_loss == {"loss_mode": "sapo", "tau_neg": 1.1}


def test_the_page_is_true_of_names_that_trl_and_we_share_and_of_those_that_are_refused():
    same, refused = PAGE.partition("These have the same name: ")[2].partition("\n\n")[0].split("`. `")
    shared = re.findall(r"`(\w+)", same)
    assert len(shared) == 9
    for name in shared:
        assert len(keys_meant(name)) == 1, name
    names = re.findall(r"(\w+)`", refused.partition(" are refused")[0])
    assert len(names) == 4
    for name in names:
        (problem,) = normalize_items([(full_key(name), 4)], "test").problems
        assert " is refused: " in problem.text
