"""docs/capabilities.md says what the tests prove, and no row of it is empty."""

from __future__ import annotations

import pytest
from capability_table import CAPABILITIES, PAGE, REPO, page, proofs


@pytest.mark.slow
def test_every_capability_is_proved_by_a_test():
    found = proofs()
    assert not [number for number in CAPABILITIES if not found.get(number)]
    assert len(CAPABILITIES) == 91 + 13


def test_what_a_row_names_is_there():
    missing = [where for _, where in CAPABILITIES.values() if not (REPO / "verl_mt" / where).exists()]
    assert not missing


@pytest.mark.slow
def test_the_page_is_made_from_the_tests():
    assert PAGE.read_text() == page(), "run: python tests/capability_table.py"
