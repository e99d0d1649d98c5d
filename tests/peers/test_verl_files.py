"""verl's own Python files, after the documented replacement."""

from __future__ import annotations

import conformance
import pytest


@pytest.mark.parametrize("revision", ["v0.5.0", "v0.6.1"])
def test_a_file_loads_from_a_copy_with_its_names_replaced(tmp_path, revision):
    source = conformance.peer("verl", revision, "verl/interactions/gsm8k_interaction.py")
    file = conformance.copy_replaced("verl", source, tmp_path)
    with conformance.imported(file, "gsm8k_interaction_of_verl") as module:
        names = {c.__module__ for c in module.Gsm8kInteraction.__mro__}
    assert "verl_mt.interactions.base" in names and "gsm8k_interaction_of_verl" in names
