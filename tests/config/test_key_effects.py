"""No silent key: every key of the configuration is flipped once, and something other than the configuration differs."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any, TypeGuard

import effect_probes as probes
import pytest
from effect_engines import sglang
from effect_kinds import NOT_VALIDATED, RO, VALIDATES
from key_effects import EFFECTS, Effect
from tables import before_release, one_of_each

import verl_mt
from verl_mt.config.schema import leaves

REFUSAL = re.compile(r"\w+(Error|Exit): ")


def test_every_key_has_an_entry_and_every_entry_a_key():
    missing = [key for key in leaves() if key not in EFFECTS]
    assert not missing, f"tests/config/key_effects.py: add what changes with {', '.join(missing)}"
    unknown = [key for key in EFFECTS if key not in leaves()]
    assert not unknown, f"tests/config/key_effects.py: no such key: {', '.join(unknown)}"


@pytest.mark.slow
def test_every_key_is_read_by_code_that_does_not_declare_it():
    """By name, for every commit: the flips below run one key of each kind for a commit, and all before a release."""
    read: set[str] = set()
    for file in sorted(Path(verl_mt.__file__).parent.rglob("*.py")):
        read |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if reads(node)}
    assert "seed" in read and "no_such_key" not in read
    unread = [key for key in leaves() if key.rpartition(".")[2] not in read]
    assert not unread, f"declared, and read by nothing: {', '.join(unread)}"


def reads(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def sides(key: str, effect: Effect) -> tuple[Any, Any]:
    """What the probe sees without and with the other value."""
    context = tuple(item if isinstance(item, str) else item() for item in effect.context)
    value = effect.value if isinstance(effect.value, str) else effect.value()
    base = () if effect.base is None else (f"{key}={effect.base}",)
    return effect.probe((*context, *base)), effect.probe((*context, f"{key}={value}"))


def refusal(seen: Any) -> str:
    text = seen[0] if isinstance(seen, tuple) and seen else seen
    return text if isinstance(text, str) and REFUSAL.match(text) else ""


def kind_of(key: str) -> tuple[str, ...]:
    """Keys that one kind of probe sees; a quick case is a class of its own."""
    effect = EFFECTS[key]
    if effect.quick:
        return (key,)
    return effect.probe.__module__, getattr(effect.probe, "__qualname__", ""), str(bool(effect.refused))


@pytest.mark.parametrize(
    "key",
    one_of_each(
        [pytest.param(key, marks=[] if EFFECTS[key].quick else [pytest.mark.slow]) for key in EFFECTS], kind_of
    ),
)
def test_another_value_of_the_key_makes_a_difference(key):
    effect = EFFECTS[key]
    before, after = sides(key, effect)
    assert before != after, f"{key}: {effect.what}? Nothing is different"
    said = [text for text in (refusal(before), refusal(after)) if text]
    assert bool(said) == bool(effect.refused), said
    assert not said or any(effect.refused in text for text in said), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "probe",
    [
        *(probes.talk(script) for script in probes.SCRIPTS),
        probes.talk("answers", latency_s=0.05, n=3),
        probes.drawn,
        probes.chat,
        probes.model,
        sglang,
    ],
)
def test_without_another_value_a_probe_sees_no_difference(probe):
    """Else every flip would make a difference, read or not."""
    overrides = () if probe is not sglang else (f"{RO}.weight_transport=disk",)
    assert probe(overrides) == probe(overrides)


def test_where_a_line_of_the_clock_breaks_is_no_difference():
    short = "│ most in one step   step 2: decode, 0.27 s │\n│ time               1 s wall │\ntok/s   941\n"
    broken = (
        "│ most in one step   step 2: prefill of s000002, │\n│                    0.27 s │\n"
        "│ time               2 s wall │\n"
    )
    assert probes._plain(short) == probes._plain(broken + "tok/s 1,041") == "time # s wall\ntok/s #"


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [before_release(NOT_VALIDATED), VALIDATES, before_release(("trainer.logger=[console]", *NOT_VALIDATED))],
)
def test_two_runs_of_the_same_values_leave_the_same_behind(context):
    first, second = (probes.run.__wrapped__(context) for _ in range(2))
    different = [f.name for f in dataclasses.fields(first) if getattr(first, f.name) != getattr(second, f.name)]
    assert different == [] and first.error == "" and first.steps == 2
    assert first.shapes and first.rows and first.weights
