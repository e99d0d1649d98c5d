"""Declaration files: what both tools and interactions read the same way."""

from __future__ import annotations

import pytest

from verl_mt.config.declarations import load_declarations
from verl_mt.errors import UnknownKeyError


def test_entries_come_with_their_place_and_resolved_interpolations(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_URL", "http://retriever")
    file = tmp_path / "d.yaml"
    file.write_text("tools:\n  - class_name: a.B\n    config: {url: '${oc.env:MY_URL}'}\n  - class_name: c.D\n")
    first, second = load_declarations(file, key="tools", config_key="k", fields=())
    assert first.config == {"url": "http://retriever"} and second.config == {}
    assert first.where == f"{file}: tools[0] (a.B)" and second.where.endswith("tools[1] (c.D)")


def test_a_second_top_level_key_is_not_ignored(tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text("tools:\n  - class_name: a.B\nother: 1\n")
    with pytest.raises(UnknownKeyError, match="'other'"):
        load_declarations(file, key="tools", config_key="k", fields=())
