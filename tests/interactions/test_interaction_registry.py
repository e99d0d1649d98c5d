"""From YAML to interactions, and the choice of one per row."""

from __future__ import annotations

import pytest

from verl_mt.config_paths import configs_root
from verl_mt.errors import ConfigError, DataError, PluginError
from verl_mt.extensions.compat.interactions.checker import CheckerInteraction
from verl_mt.extensions.compat.interactions.gsm8k_interaction import Gsm8kInteraction
from verl_mt.interactions.base import default_name
from verl_mt.interactions.session import load_interactions, pick_interaction

GSM8K = "verl_mt.interactions.gsm8k_interaction.Gsm8kInteraction"
CHECKER = "verl_mt.interactions.checker.CheckerInteraction"


@pytest.fixture
def write(tmp_path):
    def write_yaml(text: str):
        file = tmp_path / "interactions.yaml"
        file.write_text(text)
        return file

    return write_yaml


@pytest.mark.cap("V3")
def test_names_are_given_or_made_from_the_class(write):
    found = load_interactions(
        write(f"interaction:\n  - class_name: {GSM8K}\n  - name: strict\n    class_name: {CHECKER}\n    config: {{}}\n")
    )
    assert list(found) == ["gsm8k", "strict"]
    assert isinstance(found["gsm8k"], Gsm8kInteraction) and isinstance(found["strict"], CheckerInteraction)
    assert found["strict"].name == "strict" and found["gsm8k"].name == "gsm8k"
    assert default_name("MyGameInteraction") == "mygame" and default_name("Interaction") == "interaction"
    assert load_interactions(None) == {}


@pytest.mark.parametrize("file", sorted((configs_root() / "interaction_configs").glob("*.yaml")), ids=lambda f: f.name)
def test_every_shipped_interaction_file_loads(file):
    assert load_interactions(file)


@pytest.mark.parametrize(
    ("yaml", "error", "says"),
    [
        (f"interaction:\n  - class_name: {GSM8K}\n  - name: gsm8k\n    class_name: {CHECKER}\n", PluginError, "exists"),
        ("interaction:\n  - class_name: verl_mt.tools.calculator.Calculator\n", PluginError, "BaseInteraction"),
        ("interaction:\n  - class_name: no.such.Thing\n", PluginError, "interaction[0]"),
        (f"interaction:\n  - class_name: {CHECKER}\n    config: {{retry: x}}\n", PluginError, "retry_text"),
        (f"interaction:\n  - class_name: {CHECKER}\n    name: 3\n", ConfigError, "name must be a text"),
        ("interactions:\n  - class_name: x\n", ConfigError, "'interaction'"),
        ("interaction: {}\n", ConfigError, "list"),
    ],
)
def test_a_broken_interaction_file_is_one_error_that_names_it(write, yaml, error, says):
    with pytest.raises(error) as caught:
        load_interactions(write(yaml))
    assert "interactions.yaml" in str(caught.value) and says in str(caught.value)


def test_the_row_picks_by_name_and_one_alone_is_the_default():
    one, two = CheckerInteraction({"name": "a"}), CheckerInteraction({"name": "b"})
    assert pick_interaction({}, {"name": "gsm8k"}) is None
    assert pick_interaction({"a": one}, None) is one and pick_interaction({"a": one}, {"name": None}) is one
    assert pick_interaction({"a": one, "b": two}, {"name": "b"}) is two
    with pytest.raises(DataError, match="several are configured: a, b"):
        pick_interaction({"a": one, "b": two}, {})
    with pytest.raises(DataError, match="unknown interaction 'c'"):
        pick_interaction({"a": one}, {"name": "c"})
