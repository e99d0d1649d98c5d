"""The rules that a reader relies on: layers, lint, YAML that composes, keys that are read."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
import yaml
from mypy import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.traverser import NameAndMemberCollector
from mypy.types import Instance, Type, UnionType, get_proper_type

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config, leaves, sections
from verl_mt.config_paths import configs_root

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "verl_mt"
PYTHON_FILES = sorted(
    file for room in ("verl_mt", "recipes", "examples", "benchmarks", "tests") for file in (REPO / room).rglob("*.py")
)

NOT_READ_YET: set[str] = set()
"""Keys that nothing reads yet; the list may only shrink."""


def test_packages_import_only_from_lower_layers():
    words = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@functools.cache
def imports() -> grimp.ImportGraph:
    """Who imports whom, imports inside functions and under TYPE_CHECKING included."""
    return grimp.build_graph("verl_mt")


def circles() -> list[list[str]]:
    """Modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    graph, found, index, low, stack = imports(), [], {}, {}, []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            ring = [stack.pop()]
            while ring[-1] != module:
                ring.append(stack.pop())
            found.append(sorted(ring))

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return [ring for ring in found if len(ring) > 1]


def test_no_modules_import_each_other():
    assert circles() == []


def composable() -> list[Path]:
    """YAML files for `--config-name`: those under config/, and every one in a recipe that has a defaults list."""
    recipes = [f for room in ("recipes", "examples") for f in (REPO / room).rglob("*.yaml")]
    primary = [f for f in recipes if "defaults" in (yaml.safe_load(f.read_text()) or {})]
    return sorted([*(REPO / "config").glob("*.yaml"), *primary])


@pytest.mark.parametrize("file", composable(), ids=lambda f: f.relative_to(REPO).as_posix())
def test_every_yaml_composes_and_names_files_that_exist(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rollout = compose(config_name=file.stem, config_dir=file.parent).actor_rollout_ref.rollout
    for named in (rollout.tool_kwargs.tools_config_file, rollout.interaction_config_file):
        if named is not None and not Path(named).is_absolute() and "$" not in named:
            assert any((root / named).is_file() for root in (configs_root(), REPO, file.parent)), named


MADE_UP = """
from verl_mt.config.schema import Config
from verl_mt.data.sampler import SamplerOptions
def reads(config: Config, options: SamplerOptions, other: str):
    trainer = config.trainer
    trainer.device = config.data.truncation
    for section in (config.reward, config.algorithm):
        print(section, trainer.seed, options.shuffle, other.title, [r.n for r in [config.actor_rollout_ref.rollout]])
"""


@functools.cache
def attributes_read() -> dict[str, set[tuple[str, str]]]:
    """Module -> (section's class, attribute) of every attribute that it reads from an object that mypy knows to be a
    section of the config, or a protocol that a section satisfies; the module `made_up` is the text above."""
    options = Options()
    options.export_types = options.preserve_asts = options.ignore_missing_imports = options.check_untyped_defs = True
    options.incremental, options.follow_imports, options.cache_dir = False, "skip", os.devnull
    files = {file.relative_to(REPO).with_suffix(""): file for file in sorted(PACKAGE.rglob("*.py"))}
    texts = {".".join(name.parts).removesuffix(".__init__"): file.read_text() for name, file in files.items()}
    texts["made_up"] = MADE_UP
    names = dict(zip(texts, [str(f) for f in files.values()]))
    built = build.build([BuildSource(names.get(module), module, text) for module, text in texts.items()], options)
    section_fields = {s.cls.__name__: {f.name for f in dataclasses.fields(s.cls)} for s in sections().values()}
    section_fields["Config"] = {f.name for f in dataclasses.fields(Config)}
    keys_of_extensions = {base for s in sections().values() for base in s.cls.__mro__ if is_extensions(base)}
    section_fields |= {base.__name__: {f.name for f in dataclasses.fields(base)} for base in keys_of_extensions}
    read: dict[str, set[tuple[str, str]]] = {}
    for module, text in texts.items():
        loaded = {
            (node.lineno, node.col_offset, node.attr)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
        members = NameAndMemberCollector()
        built.graph[module].tree.accept(members)
        read[module] = {
            (owner, node.name)
            for node in members.member_exprs
            if (node.line, node.column, node.name) in loaded
            for owner in _sections_of(built.types.get(node.expr), section_fields)
        }
    return read


def is_extensions(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and cls.__module__.startswith("verl_mt.extensions.")


def _name(cls: type) -> str:
    return cls.__name__


def _sections_of(of: Type | None, section_fields: dict[str, set[str]]) -> Iterator[str]:
    """Class names of the sections that an object of this type may be."""
    known = get_proper_type(of)
    if isinstance(known, UnionType):
        for item in known.items:
            yield from _sections_of(item, section_fields)
    elif isinstance(known, Instance) and known.type.fullname.startswith("verl_mt."):
        if known.type.name in section_fields:  # and sections that add to it: who reads the base reads them
            yield from (s.cls.__name__ for s in sections().values() if known.type.name in map(_name, s.cls.__mro__))
            yield from ({"Config"} & {known.type.name})
        elif known.type.is_protocol:
            members = set(known.type.protocol_members)
            yield from (name for name, fields in section_fields.items() if members <= fields)


def read_by_property(section: str, word: str) -> set[str]:
    """Fields of a section that its property `word` reads: who reads the property reads them."""
    for cls in (s.cls for s in sections().values() if s.cls.__name__ == section):
        if isinstance(found := getattr(cls, word, None), property):
            tree = ast.parse(textwrap.dedent(inspect.getsource(found.fget)))
            of_self = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
            return {f.name for f in dataclasses.fields(cls)} & {n.attr for n in of_self if n.value.id == "self"}
    return set()


@pytest.mark.slow
@pytest.mark.xdist_group("mypy")  # which reads the package once for both
def test_what_counts_as_reading_a_key():
    assert attributes_read()["made_up"] == {
        ("Config", "trainer"), ("Config", "data"), ("Config", "reward"), ("Config", "algorithm"),
        ("Config", "actor_rollout_ref"), ("ActorRolloutRefConfig", "rollout"), ("RolloutConfig", "n"),
        ("DataConfig", "truncation"), ("DataConfig", "shuffle"), ("TrainerConfig", "seed"),
    }  # fmt: skip
    assert read_by_property("ActorConfig", "aggregation") == {"loss_agg_mode", "policy_loss"}
    assert read_by_property("ActorConfig", "loss_agg_mode") == read_by_property("DataConfig", "no_such") == set()


@pytest.mark.slow
@pytest.mark.xdist_group("mypy")
def test_every_key_of_the_schema_is_read_by_something():
    rooms = {
        m: found
        for m, found in attributes_read().items()
        if not re.match(r"verl_mt\.(extensions\.\w+\.)?config\b|made_up", m)
    }
    read = set().union(*rooms.values())
    read |= {(owner, name) for owner, word in read for name in read_by_property(owner, word)}
    classes = {"": "Config"} | {s.key: s.cls.__name__ for s in sections().values()}
    assert len(set(classes.values())) == len(classes), "a class stands for one section"
    unread = {k for k in leaves() if (classes[k.rpartition(".")[0]], k.rpartition(".")[2]) not in read}
    assert unread <= NOT_READ_YET, f"parsed and ignored: {sorted(unread - NOT_READ_YET)}"
    assert unread >= NOT_READ_YET, f"read by now, take it off the list: {sorted(NOT_READ_YET - unread)}"
