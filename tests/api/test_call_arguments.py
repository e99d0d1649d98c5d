"""Python names of keys, Python values and Python objects, as the words of a command."""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from verl_mt.api.arguments import TAKES_OBJECTS, CallArguments, full_key
from verl_mt.config.compose import compose
from verl_mt.config.schema import leaves, open_parent
from verl_mt.data.dataset import load_rows
from verl_mt.errors import ConfigError, DataError, PluginError, UnknownKeyError
from verl_mt.interactions.base import BaseInteraction
from verl_mt.interactions.session import load_interactions
from verl_mt.plugins import load_object, objects_given, objects_in
from verl_mt.rewards.base import load_reward
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.registry import load_tools

TOOLS_KEY = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    return word[::-1]


class Counter(BaseTool):
    """A tool with a constructor's own argument."""

    def __init__(self, start: int = 0):
        schema = {"type": "function", "function": {"name": "count", "description": "Count.", "parameters": {}}}
        schema["function"]["parameters"] = {"type": "object", "properties": {}, "required": []}
        from verl_mt.tools.schemas import OpenAIFunctionToolSchema

        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.start = start


class Teacher(BaseInteraction):
    """A simulated user."""


def score(solution_str, ground_truth):
    return float(solution_str == ground_truth)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("total_training_steps", "trainer.total_training_steps"),
        ("trainer__total_training_steps", "trainer.total_training_steps"),
        ("rollout__n", "actor_rollout_ref.rollout.n"),
        ("val_kwargs__n", "actor_rollout_ref.rollout.val_kwargs.n"),
        ("actor__optim__lr", "actor_rollout_ref.actor.optim.lr"),
        ("policy_loss__loss_mode", "actor_rollout_ref.actor.policy_loss.loss_mode"),
        ("reward__kwargs__weight", "reward.kwargs.weight"),
        ("external_plugins", "external_plugins"),
        ("trainer.seed", "trainer.seed"),
        # verl's own name of one of our keys is left to the composition, which knows it.
        ("algorithm__kl_ctrl__kl_coef", "algorithm.kl_ctrl.kl_coef"),
        (
            "actor_rollout_ref__rollout__log_prob_micro_batch_size",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        ),
    ],
)
def test_a_key_is_found_by_its_last_parts(name, key):
    assert full_key(name) == key


@pytest.mark.parametrize("key", leaves())
def test_every_key_has_its_full_name_in_python(key):
    assert full_key(key.replace(".", "__")) == key


def test_an_ambiguous_name_says_what_it_may_mean_and_what_to_write():
    with pytest.raises(UnknownKeyError) as caught:
        full_key("path")
    assert str(caught.value) == (
        "path may mean actor_rollout_ref.model.path or reward.path: "
        "write actor_rollout_ref__model__path or reward__path"
    )


def test_an_unknown_name_is_refused_with_what_is_close():
    with pytest.raises(UnknownKeyError, match=r"totl_training_steps: .* did you mean trainer.total_training_steps"):
        full_key("totl_training_steps")
    with pytest.raises(UnknownKeyError, match=r"zebra: .* lists all keys"):
        full_key("zebra")
    given = CallArguments()
    given.keys({"trainer__total_step": 3})
    with pytest.raises(UnknownKeyError, match=r"trainer\.total_step"):
        compose(given.words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"total_training_steps": 3, "trainer__seed": 5}, ["trainer.total_training_steps=3", "trainer.seed=5"]),
        (
            {"actor__optim__lr": np.float64(3e-4), "stop": ["a b", "c='d'"], "deterministic": True},
            [
                "actor_rollout_ref.actor.optim.lr=3e-4",
                "actor_rollout_ref.rollout.stop=['a b',\"c='d'\"]",
                "trainer.deterministic=True",
            ],
        ),
        (
            {"val_files": None, "default_local_dir": Path("some where/run"), "reward__kwargs": {"a": 1, "b": "x,y"}},
            ["data.val_files=null", "trainer.default_local_dir='some where/run'", "reward.kwargs={a:1,b:'x,y'}"],
        ),
        (
            {"policy_loss__loss_mode": "gspo", "rollout__multi_turn__max_assistant_turns": 2, "rollout__n": 3},
            [
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
                "actor_rollout_ref.rollout.n=3",
            ],
        ),
    ],
)
def test_a_call_and_a_command_build_the_same_configuration(keys, words):
    given = CallArguments()
    given.keys(keys)
    assert dataclasses.asdict(compose(given.words)) == dataclasses.asdict(compose(words))


def test_overrides_are_words_or_a_mapping():
    first, second = CallArguments(), CallArguments()
    first.overrides(["trainer.total_training_steps=3"])
    second.overrides({"trainer.total_training_steps": 3})
    assert compose(first.words) == compose(second.words)
    with pytest.raises(ConfigError, match="overrides is the text"):
        CallArguments().overrides("trainer.seed=1")


def test_what_takes_objects_are_keys():
    for key in TAKES_OBJECTS:
        assert key in leaves() or open_parent(key) is not None, key


def test_an_object_stands_where_a_path_stands():
    given = CallArguments()
    given.reward(score)
    given.key("trainer.logger", ["console", Counter])
    config = compose(given.words)
    assert (config.reward.path, config.trainer.logger) == ("object:score", ["console", "object:Counter"])
    assert objects_in([]) == {}
    with objects_given(given.objects):
        assert load_object("object:score", what="here") is score
        assert objects_in({"a": ["object:Counter", 3]}) == {"object:Counter": Counter}
    with pytest.raises(PluginError, match="here: 'object:score' stands for an object of a Python call"):
        load_object("object:score", what="here")


def test_two_objects_of_one_name_have_two_names_and_one_object_has_one():
    given, other = CallArguments(), lambda solution_str, ground_truth: 1.0
    other.__name__ = "score"
    names = [given.name(score), given.name(other), given.name(score), given.name(functools.partial(score, 1))]
    assert names == ["object:score", "object:score_2", "object:score", "object:score_3"]


def test_two_calls_at_once_cannot_give_one_name_two_meanings():
    with objects_given({"object:f": 1}), objects_given({"object:f": 1}):
        refused = pytest.raises(PluginError, match="another call in this process still uses object:f")
        with refused, objects_given({"object:f": 2}):
            pass
        assert load_object("object:f", what="f") == 1
    with pytest.raises(PluginError):
        load_object("object:f", what="f")


def test_an_object_where_a_plain_value_belongs_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.client is <unlocked .*plain values.*functools\.partial"):
        CallArguments().keys({"reward__kwargs": {"client": threading.Lock()}})
    with pytest.raises(ConfigError, match=r"trainer\.seed is <function"):
        CallArguments().keys({"trainer__seed": score})


def test_several_rewards_are_summed_and_named_in_the_metrics():
    given, half = CallArguments(), lambda **kwargs: 0.5
    half.__name__ = "half"
    given.reward([score, half])
    config = compose(given.words)
    assert config.reward.path == "weighted_sum"
    with objects_given(given.objects):
        assert load_reward(config.reward.path, kwargs=config.reward.kwargs).names == ["score_reward", "half"]


def test_tools_are_functions_classes_objects_paths_and_entries_together():
    given = CallArguments()
    made = Counter(3)
    shipped = {"class_name": "verl_mt.tools.calculator.Calculator", "config": {}}
    given.tools([look_up, made, shipped])
    path = compose(given.words).actor_rollout_ref.rollout.tool_kwargs.tools_config_file
    assert path == "object:tools(look_up, Counter, Calculator)"
    with objects_given(given.objects):
        tools = load_tools(path)
    assert tools.names == ("look_up", "count", "calculator") or list(tools.names) == ["look_up", "count", "calculator"]
    assert made in list(tools)


def test_a_tools_file_stays_a_file_and_no_tools_are_none():
    given = CallArguments()
    given.tools("tools_configs/calculator.yaml")
    assert given.words == [f"{TOOLS_KEY}='tools_configs/calculator.yaml'"] and not given.objects
    given = CallArguments()
    given.tools([])
    assert given.words == [f"{TOOLS_KEY}=null"]


def test_what_is_no_tool_is_refused_before_anything_is_loaded():
    with pytest.raises(PluginError, match="tools: 3 is no tool"):
        CallArguments().tools([3])
    with pytest.raises(PluginError, match=r"no tool schema can be made: .* Every argument needs a type hint"):
        CallArguments().tools([lambda x: x])


def test_a_tool_that_is_made_takes_no_config():
    given = CallArguments()
    given.tools({"class_name": Counter(), "config": {"a": 1}})
    with objects_given(given.objects), pytest.raises(ConfigError, match="made already takes neither config"):
        load_tools(next(name for name in given.objects if name.startswith("object:tools")))


@pytest.mark.parametrize("interaction", [Teacher, Teacher({"name": "ms_lee"})])
def test_an_interaction_is_a_class_or_an_object(interaction):
    given = CallArguments()
    given.interaction(interaction)
    path = compose(given.words).actor_rollout_ref.rollout.interaction_config_file
    assert path == "object:interaction(Teacher)"
    with objects_given(given.objects):
        (found,) = load_interactions(path).values()
    assert found is interaction if isinstance(interaction, Teacher) else isinstance(found, Teacher)


def test_what_is_no_interaction_is_refused():
    with pytest.raises(PluginError, match=r"interaction: <function score .* is no BaseInteraction"):
        CallArguments().interaction(score)


ROWS = [{"prompt": f"{n}?", "ground_truth": n, "extra_info": {"hint": None}} for n in range(5)]


def read(data, num_rows=-1):
    given = CallArguments()
    spec = given.rows("data.train_files", data)
    with objects_given(given.objects):
        return load_rows(spec, split="train", num_rows=num_rows)[0].rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", [list, tuple, pyarrow.Table.from_pylist], ids=["list", "tuple", "arrow"])
def test_rows_of_many_kinds_become_the_same_rows(kind):
    rows = read(kind(ROWS))
    assert [row.ground_truth for row in rows] == list(range(5))
    assert rows[1].prompt == [{"role": "user", "content": "1?"}]
    assert rows[1].data_source == "data"


def test_rows_of_a_data_frame_are_read_as_a_table():
    pandas = pytest.importorskip("pandas")
    found = read(pandas.DataFrame(ROWS), 3)
    assert [(row.ground_truth, row.extra_info) for row in found] == [(0, {}), (1, {}), (2, {})]


@pytest.mark.slow
def test_rows_of_datasets_are_read_as_a_table():
    datasets = pytest.importorskip("datasets")
    assert [row.ground_truth for row in read(datasets.Dataset.from_list(ROWS), 3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"mapping of train. Give one part"):
        read(datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}))
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert [row.ground_truth for row in read(stream, 2)] == [0, 1]


def test_all_rows_that_are_given_count_whatever_the_shipped_task_takes():
    given = CallArguments()
    given.key("data.train_files", given.rows("data.train_files", ROWS))
    assert compose(given.words).data.train_max_samples == -1


def test_a_later_change_of_the_list_changes_no_run():
    mine = [dict(row) for row in ROWS]
    given = CallArguments()
    spec = given.rows("data.train_files", mine)
    mine[0]["extra_info"]["hint"] = mine[0]["ground_truth"] = "changed"
    with objects_given(given.objects):
        assert load_rows(spec, split="train")[0].rows[0].ground_truth == 0


def test_a_row_that_is_none_is_named():
    with pytest.raises(DataError, match=r"data\.train_files, row 2: expected a mapping column -> value, got 'two'"):
        read([ROWS[0], "two", 3])
    with pytest.raises(DataError, match="got a generator, which can be read only once"):
        read(row for row in ROWS)


def test_files_and_functions_stay_what_they_are(tmp_path):
    given = CallArguments()
    assert given.rows("data.train_files", tmp_path / "a.jsonl") == str(tmp_path / "a.jsonl")
    assert given.rows("data.train_files", ["a.jsonl", "b.parquet"]) == ["a.jsonl", "b.parquet"]
    assert given.rows("data.train_files", {"a": {"path": "a.jsonl", "weight": 2}}) == {
        "a": {"path": "a.jsonl", "weight": 2}
    }
    assert not given.objects and not given.words
    made = read(lambda num_rows, seed, split: [{**row, "data_source": split} for row in ROWS[:num_rows]], num_rows=2)
    assert [row.data_source for row in made] == ["train", "train"]
