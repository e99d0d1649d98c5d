"""The configuration reference is the schema."""

from __future__ import annotations

import re
from pathlib import Path

from verl_mt.config.schema import leaves, sections
from verl_mt.config.write_reference import _show, reference

REPO = Path(__file__).resolve().parents[2]


def test_the_page_is_current():
    page = (REPO / "docs" / "configuration.md").read_text()
    assert page == reference(), "run: python -m verl_mt.config.write_reference > docs/configuration.md"


def test_the_defaults_that_differ_from_verls_are_listed_as_they_are():
    page = (REPO / "docs" / "migrating_from_verl.md").read_text().partition("| key | verl's default | here |")[2]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", page.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) >= 10
    for key, theirs, ours in rows:
        assert _show(leaves()[key].default) == ours != theirs, key


def test_there_are_at_most_225_keys():
    """About 200, those that only training over many ranks needs, two of training while others sample, which text a
    reward of verl's gets, three that name environments, the Python of an engine, what LoRA sends to engines, the local
    engine's kernels, and six of faster updates, each off until a GPU has shown what it gives."""
    assert len(leaves()) <= 225


def test_every_key_has_a_doc():
    for node in (*leaves().values(), *sections().values()):
        assert node.doc.endswith((".", "?")), node.key
