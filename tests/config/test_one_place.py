"""A key has one place: change its default there and every run and every page follows; add one there and it works."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from key_effects import EFFECTS
from tables import one_of_each

from verl_mt.config import compose as compose_module
from verl_mt.config import hydra_source, normalize, write_reference
from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.config.schema import Config, explicit_keys, leaves, sections, value_of

pytestmark = pytest.mark.slow  # a composition for each key, and a run

REPO = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
OTHER: dict[str, Any] = {
    f"{ROLLOUT}.max_model_len": 4096,
    "actor_rollout_ref.actor.ppo_max_token_len": 20000,
    "critic.ppo_max_token_len": 20000,
    "trainer.resume_mode": "disable",
    "trainer.debug_rollout_data": "rollouts/{rollout_id}.pt",
}
"""Where what `key_effects.py` sets does not go with config/task/tiny.yaml, or is quoted for a shell."""
NOT_WITH_THE_DEFAULT_TASK = {
    **dict.fromkeys((f"{ROLLOUT}.{name}" for name in ("top_p", "top_k", "min_p")), "training needs all tokens"),
    **dict.fromkeys((f"{ROLLOUT}.agent_function_path", f"{ROLLOUT}.multi_turn.enable"), "it has tools"),
    **dict.fromkeys(("trainer.nnodes", "trainer.n_workers_per_node"), "it is one process"),
    **dict.fromkeys(
        (f"actor_rollout_ref.actor.{name}" for name in ("param_offload", "ulysses_sequence_parallel_size")),
        "it is one process that samples from the actor's own weights",
    ),
    "reward.placement": "it has one reward per trajectory",
}
"""No other default of these would go with config/task/tiny.yaml, as the value on the command line does not: why."""


def forget() -> None:
    """What was made of the declarations, so that it is made again."""
    leaves.cache_clear()
    sections.cache_clear()
    compose_module._shipped.cache_clear()
    normalize._scratch.cache_clear()
    ConfigStore.instance().repo.pop(f"{hydra_source.BASE}.yaml", None)


def declared(key: str) -> dataclasses.Field[Any]:
    """The field that declares a key."""
    section, _, name = key.rpartition(".")
    cls = sections()[section].cls if section else Config
    return next(item for item in dataclasses.fields(cls) if item.name == name)


def with_default(init: Any, name: str, value: Any) -> Any:
    """The defaults of a dataclass are part of its `__init__`."""

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: copy.copy(value), **kwargs})

    return made


@pytest.fixture
def other_default(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    key: str = request.param
    text = EFFECTS[key].value if isinstance(EFFECTS[key].value, str) else EFFECTS[key].value()
    value = OTHER[key] if key in OTHER else OverridesParser.create().parse_override(f"{key}={text}").value()
    field = declared(key)
    if field.default_factory is not dataclasses.MISSING:
        monkeypatch.setattr(field, "default_factory", lambda: type(value)(value))
    else:
        monkeypatch.setattr(field, "default", value)
    for cls in {section.cls for section in sections().values()} | {Config}:
        if field in cls.__dataclass_fields__.values():  # a section that adds to another one has its fields too
            monkeypatch.setattr(cls, "__init__", with_default(cls.__init__, field.name, value))
    forget()
    yield key, value
    monkeypatch.undo()
    forget()


def kind_of(key: str) -> tuple[str, bool, bool]:
    """Keys whose defaults have one type, and which the default task leaves alone or sets."""
    field = declared(key)
    return str(field.type), "also" in field.metadata, key in OTHER


@pytest.mark.parametrize(
    "other_default",
    one_of_each([key for key in EFFECTS if key not in NOT_WITH_THE_DEFAULT_TASK], kind_of),
    indirect=True,
)
def test_another_default_in_the_declaration_is_the_default_of_every_run_and_every_page(other_default):
    key, value = other_default
    config = compose()
    reject_unused_keys(config)
    assert explicit_keys(config) == frozenset()
    tiny = yaml.safe_load((REPO / "config" / "task" / "tiny.yaml").read_text())
    for part in key.split("."):
        tiny = tiny.get(part) if isinstance(tiny, dict) else None
    became = value_of(config, key)
    if tiny is None:
        also = leaves()[key].metadata.get("also", {})
        assert became == (also[value] if value in list(also) else value)
    row = next(
        line for line in write_reference.reference().splitlines() if line.startswith(f"| `{key.rpartition('.')[2]}` |")
        and f"| `{write_reference._show(leaves()[key].default)}` |" in line
    )  # fmt: skip
    assert row and leaves()[key].default == value
    again = yaml.safe_load(config_to_yaml(config))
    assert again == yaml.safe_load(config_to_yaml(compose_module.to_config(again)))


PATCH = {
    "verl_mt/config/schema.py": (
        '    project_name: str = option("verl_mt"',
        '    shout_every: int = option(1, "Steps between shouts.", min=1)\n    project_name: str = option("verl_mt"',
    ),
    "verl_mt/trainer/ppo_trainer.py": (
        "    def step(self",
        "    def shout(self):\n        print('shouts every', self.config.shout_every)\n\n    def step(self",
    ),
}


@pytest.mark.release
def test_a_new_key_is_a_declaration_and_a_reader(tmp_path):
    """In a copy of the package; the third thing is a test such as this one."""
    for name in ("verl_mt", "config", "tools_configs", "interaction_configs"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in PATCH.items():
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1
        (tmp_path / name).write_text(text.replace(old, new))
    trainer = tmp_path / "verl_mt/trainer/ppo_trainer.py"
    text = trainer.read_text()
    body = text.index('"""', text.index('"""', text.index("    def step(self")) + 3) + 3
    trainer.write_text(f"{text[:body]}\n        self.shout(){text[body:]}")
    words = [
        "trainer.shout_every=7", "trainer.total_training_steps=1", "trainer.export_at_end=False",
        "trainer.save_freq=-1", "trainer.logger=[console]", f"trainer.default_local_dir={tmp_path / 'run'}",
        "data.train_batch_size=2", "data.train_max_samples=16", "data.val_files=null",
        f"{ROLLOUT}.n=2", f"{ROLLOUT}.response_length=16",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "shouts every 7" in run("verl_mt.trainer", *words)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]["shout_every"] == 7
    assert "| `shout_every` | integer | `1` |  | Steps between shouts. (at least 1) |" in run(
        "verl_mt.config.write_reference"
    )
