"""The page of verl's keys says what the tables say, and holds every key of verl's own file."""

from __future__ import annotations

import json

import pytest
import verl_keys
from omegaconf import DictConfig, OmegaConf
from reference_data import SHARED_DATA
from tables import newest_first

from verl_mt.config.normalize import normalize_items
from verl_mt.extensions.compat.aliases.families import families


def test_the_page_is_what_the_tables_give():
    assert verl_keys.PAGE.read_text(encoding="utf-8") == verl_keys.page(), (
        "run python tests/aliases/verl_keys.py, which writes the page"
    )


def keys_of(tree: DictConfig, before: str = "") -> list[str]:
    keys: list[str] = []
    for name in tree:
        node = tree._get_node(name)
        inner = isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation() and len(node)
        keys += keys_of(node, f"{before}{name}.") if inner else [f"{before}{name}"]
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("revision", newest_first(["v0.5.0", "v0.6.1"]))
def test_every_key_of_a_whole_configuration_of_verl_is_on_the_page(revision):
    file = SHARED_DATA.parent / "peers" / "verl" / revision / "verl/trainer/config/_generated_ppo_trainer.yaml"
    if not file.is_file():
        pytest.skip(f"no file of verl at {file}")
    keys = keys_of(OmegaConf.load(file))
    page = verl_keys.PAGE.read_text(encoding="utf-8")
    assert len(keys) > 300 and [key for key in keys if f"| `{key}` |" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changed"),
    [("no effect here", ()), ("one value", ("problem",)), ("not offered", ("problem",))],
)
def test_a_changed_value_is_taken_as_the_page_says(kind, changed):
    """Values of the kind that verl's own are, and that are none of those that the page names."""
    verl, tried = families()["verl"], 0
    for key, defaults in verl.defaults.items():
        known = [d for d in defaults if isinstance(d, bool | int | float) and d is not None]
        became, why = verl_keys.became(key, dict(verl.rows))
        if became != kind or not known or key.endswith("_target_"):
            continue
        value = (
            next(v for v in (False, True) if v not in known) if isinstance(known[0], bool) and len(known) == 1 else 77
        )
        if (isinstance(known[0], bool) and value == 77) or json.dumps(value) in why:
            continue
        outcome = normalize_items([(key, value)], "test")
        assert bool(outcome.problems) == bool(changed), (key, value, outcome.problems, outcome.notes)
        tried += 1
    assert tried > 20
