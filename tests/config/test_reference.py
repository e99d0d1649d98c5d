"""The configuration reference is the schema."""

from __future__ import annotations

from pathlib import Path

from verl_mt.config.reference import reference
from verl_mt.config.tree import leaves, sections

REPO = Path(__file__).resolve().parents[2]


def test_the_page_is_current():
    page = (REPO / "docs" / "configuration.md").read_text()
    assert page == reference(), "run: python -m verl_mt.config.reference > docs/configuration.md"


def test_there_are_at_most_150_keys():
    assert len(leaves()) <= 150


def test_every_key_has_a_doc():
    for node in (*leaves().values(), *sections().values()):
        assert node.doc.endswith((".", "?")), node.key
