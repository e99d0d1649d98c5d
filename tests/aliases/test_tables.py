"""The tables of other libraries' names: every row does what it says, on the command line and in a file."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tables import one_of_each

from verl_mt.config.normalize import Outcome, normalize_items
from verl_mt.config.schema import leaves, open_parent, sections
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.aliases import converters
from verl_mt.extensions.compat.aliases.engine_arguments import ARGUMENTS, ENGINE
from verl_mt.extensions.compat.aliases.families import Alias, aliases, families
from verl_mt.extensions.compat.aliases.table import read_table

ROWS = [pytest.param(row, id=row.name) for row in aliases().values()]
RENAMED = [pytest.param(row, id=row.name) for row in aliases().values() if row.meaning == "renamed"]
FOLDER = Path(converters.__file__).parent


def path_of(row: Alias) -> tuple[Any, ...]:
    """Rows with the same path take the same code with every value."""
    converter = row.convert.__qualname__ if row.convert else ""
    return row.meaning, converter, row.covers_below, row.switch, row.values is None, row.name == row.to, bool(row.why)


VALUES: list[Any] = [
    True, False, None, 0, 1, 3, 0.5, "x", ["x"], {"a": 1}, "left", "full", "token", "cosine", "group", "grpo", "none",
    "otel", "sglang", "token_mask", "a.check_reward_nonzero_std", "float32", "bf16", "steps", "kl", "k1", "[", "maybe",
    "sequence", '{"a": "b"}', "always", "vllm", "weave", "gspo", 0.05, 64, "sdpa",
]  # fmt: skip
"""Among them is, for every row, one that it takes, and for every converter that refuses, one that it refuses."""
REFUSING = {
    "as_list", "rewards_by_name", "weights", "columns", "trackers", "trace_backend", "convert",
    "slime_estimator", "group_filter", "swift_correction", "async_or_sync", "plus_one",
}  # fmt: skip
"""Converters with values that have no counterpart; `convert` is that of a closed list of values."""


def outcome_of(key: str, value: Any) -> Outcome:
    return normalize_items([(key, value)], "test")


@pytest.mark.slow
@pytest.mark.parametrize("row", one_of_each(RENAMED, path_of))
def test_another_name_of_a_key_sets_it(row: Alias):
    assert row.to in leaves() or open_parent(row.to) or (row.covers_below and row.to in sections())
    below = ".some" if row.covers_below and open_parent(row.to + ".some") else ".len" if row.covers_below else ""
    engine = [] if row.name.startswith(ENGINE) or row.to == ENGINE else [(ENGINE, "vllm")]
    outcomes = [normalize_items([*engine, (row.name + below, value)], "test") for value in VALUES]
    taken = [o for o in outcomes if not o.problems and len(o.items) > len(engine)]
    assert taken, "no value is taken"
    for outcome in taken:
        assert all(item.alias.startswith(row.name) for item in outcome.items if item.key != ENGINE)
        assert any(item.key.startswith(row.to) for item in outcome.items)
        silent = not row.why or row.name == row.to or row.to.startswith(ARGUMENTS)
        assert silent or any(note.endswith(row.why) for note in outcome.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    one_of_each([p for p in RENAMED if p.values[0].convert and p.values[0].convert.__name__ in REFUSING], path_of),
)
def test_a_value_without_a_counterpart_is_refused_with_the_reason(row: Alias):
    refused = []
    for value in (value for value in VALUES if not isinstance(value, dict)):  # a mapping is read key by key
        try:
            row.value_of(value)
        except ValueError as error:
            refused.append((value, str(error)))
    assert refused and all(reason for _, reason in refused)
    for value, reason in refused:
        texts = [problem.text for problem in outcome_of(row.name, value).problems]
        assert texts and (row.name == row.to or texts[0].endswith(reason))


@pytest.mark.slow
@pytest.mark.parametrize("row", one_of_each([p for p in ROWS if p.values[0].meaning == "fixed"], path_of))
def test_a_fixed_key_takes_what_agrees_and_refuses_the_rest_with_the_reason(row: Alias):
    assert row.why
    for value in VALUES if row.values is None else row.values:
        if isinstance(value, dict):
            continue
        outcome = outcome_of(row.name, value)
        if outcome.problems and row.values is None:
            assert "expected" in outcome.problems[0].text and outcome.problems[0].text.endswith(row.why)
        else:
            assert not outcome.problems and not outcome.items and outcome.notes[0].endswith(row.why)
    if row.values is None:
        assert any(not outcome_of(row.name, value).problems for value in VALUES)
    else:
        (problem,) = outcome_of(row.name, "something else").problems
        assert "is possible" in problem.text and problem.text.endswith(row.why)


@pytest.mark.slow
@pytest.mark.parametrize("row", one_of_each([p for p in ROWS if p.values[0].meaning == "refused"], path_of))
def test_a_refused_key_is_refused_with_everything_below_it(row: Alias):
    for key in (row.name, row.name + ".some.key"):
        (problem,) = outcome_of(key, 1).problems
        assert problem.text == f"{key} (test) is refused: {row.why}" and problem.unknown_key


def test_a_name_of_ours_stays_ours():
    """A row of a key of ours is for its values; all other names are no keys of ours, nor the first word of one."""
    for row in aliases().values():
        assert row.name == row.to or row.name not in leaves(), row.name
        assert row.name != row.to or row.convert or row.name == "external_plugins", row.name
    ours = {key.partition(".")[0] for key in leaves()} - {"external_plugins"}
    flags = {name for family in ("slime", "ms-swift", "trl") for name in families()[family].rows}
    assert not ours & flags


def test_a_name_in_two_tables_means_one_thing():
    seen: dict[str, Alias] = {}
    for family in families().values():
        for name, row in family.rows.items():
            assert seen.setdefault(name, row) == row, name


def test_every_converter_is_named_by_a_row():
    text = "".join(file.read_text() for file in FOLDER.glob("*.txt") if not file.stem.endswith("_defaults"))
    cells = {cell.strip() for line in text.splitlines() for cell in line.split("|")[2:3]}
    apart = {"verl_page", "slime_flags", "swift_flags", "settle_verl", "settle_slime", "settle_swift"}
    made = {
        name
        for name, value in vars(converters).items()
        if callable(value) and getattr(value, "__module__", "") == converters.__name__ and not name.startswith("_")
    }
    assert made - apart == cells - {""}


@pytest.mark.slow
def test_a_command_in_our_own_names_reads_no_table():
    text = "import sys; from verl_mt.config.compose import compose, to_config; "
    text += "compose(['data.seed=1', 'trainer.logger=[file]']); "
    text += "to_config({'trainer': {'seed': '3'}, 'reward.path': 'exact_match', 'reward': {'kwargs': {'lr': 1}}})"
    done = subprocess.run(
        [sys.executable, "-c", text + "; print([m for m in sys.modules if 'extensions' in m])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # Of keys, or checks of some.
    owners = ("asynchronous", "cluster", "compat", "cpu_kernels", "fast_update", "inspection", "toolbox")
    declared = ["", *(f".{name}{part}" for name in owners for part in ("", ".config"))]
    declared[3:3] = [".cluster.vllm", ".cluster.vllm.arguments"]  # what `cluster.config` refuses
    assert done.stdout.strip() == str([f"verl_mt.extensions{name}" for name in declared])


def test_the_tables_are_packed_with_the_code():
    """hatchling takes every file of a package that git does not ignore."""
    root = Path(__file__).resolve().parents[2]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert FOLDER.relative_to(root).parts[0] in build["packages"]
    ignored = (root / ".gitignore").read_text().split()
    tables = {file.name for file in FOLDER.glob("*.txt")}
    assert tables == {"verl.txt", "verl_defaults.txt", "slime.txt", "ms_swift.txt", "trl.txt"}
    assert not [(name, pattern) for name in tables for pattern in ignored if fnmatch(name, pattern)]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("a | -> b | no_such", "no_such"),
        ("a | = yes", "Expecting value"),
        ("a | refused", "with its reason"),
        ("a | b", "expected '-> key'"),
        ("a | refused | | @nowhere", "@nowhere"),
        ("{a,a} | = 1 | | why", "a has a row already"),
    ],
)
def test_a_row_that_cannot_be_read_names_file_and_line(tmp_path, line, part):
    file = tmp_path / "theirs.txt"
    file.write_text(f"# a table\n{line}\n")
    with pytest.raises(ConfigError, match=r"theirs\.txt, line 2: .*" + part):
        read_table(file, {})


def test_groups_of_names_are_rows_of_their_own(tmp_path):
    file = tmp_path / "theirs.txt"
    file.write_text("@why = it is so\n{a,b}.{x,y} (switch) | -> {a,b}.z | neg\n{c,d} | = null, [1] | | @why\n")
    rows = read_table(file, {"neg": lambda value: -value})
    assert {name: row.to for name, row in rows.items()} == {
        "a.x": "a.z", "a.y": "a.z", "b.x": "b.z", "b.y": "b.z", "c": "", "d": "",
    }  # fmt: skip
    assert rows["a.y"].value_of(3) == -3 and rows["a.y"].switch
    assert rows["d"].values == (None, [1]) and rows["d"].why == "it is so" and not rows["d"].switch


@pytest.mark.parametrize("value", [True, False])
def test_verls_frozen_vision_tower_is_ours(value):
    """Its `visual` holds the projector too, as ours does."""
    (found,) = outcome_of("actor_rollout_ref.actor.freeze_vision_tower", value).items
    assert (found.key, found.value) == ("actor_rollout_ref.model.freeze_vision", value)
