"""Declaration files: what both tools and interactions read the same way."""

from __future__ import annotations

import pytest

from verl_mt.config.declarations import load_declarations
from verl_mt.errors import ConfigError, PluginError, UnknownKeyError
from verl_mt.tools.settings import ToolSettings, parse_settings


def test_entries_come_with_their_place_and_resolved_interpolations(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_URL", "http://retriever")
    file = tmp_path / "d.yaml"
    file.write_text("tools:\n  - class_name: a.B\n    config: {url: '${oc.env:MY_URL}'}\n  - class_name: c.D\n")
    first, second = load_declarations(file, key="tools", config_key="k", fields=())
    assert first.config == {"url": "http://retriever"} and second.config == {}
    assert first.where == f"{file}: tools[0] (a.B)" and second.where.endswith("tools[1] (c.D)")


def test_an_error_that_shows_a_config_hides_what_looks_like_a_secret(tmp_path):
    (tmp_path / "tools.yaml").write_text("tools:\n  - {class_name: a.B, config: {salt: Zx81Qk77vW23pL90, n: 3}}\n")
    (entry,) = load_declarations(tmp_path / "tools.yaml", key="tools", config_key="k", fields=())
    with pytest.raises(PluginError, match=r"config \{'salt': '\*\*\*hidden\*\*\*', 'n': 3\} raised ValueError"):
        entry.build(lambda: int("x"))


def test_a_wrong_setting_of_a_tool_is_shown_unless_it_looks_like_a_secret():
    class Mine(ToolSettings):
        timeout: float = 1.0
        limit: float = 1.0

    with pytest.raises(ConfigError) as caught:
        parse_settings(Mine, {"timeout": "Zx81Qk77vW23pL90", "limit": "soon"})
    assert "Zx81" not in str(caught.value) and "got 'soon'" in str(caught.value)


def test_a_second_top_level_key_is_not_ignored(tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text("tools:\n  - class_name: a.B\nother: 1\n")
    with pytest.raises(UnknownKeyError, match="'other'"):
        load_declarations(file, key="tools", config_key="k", fields=())


def test_a_file_that_is_a_bomb_is_refused_at_once(tmp_path):
    file = tmp_path / "d.yaml"
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12))
    for text, says in (
        (bomb + "tools: []\n", "more than 100000 values"),
        ("tools: " + "[" * 500 + "]" * 500, "more than 64 levels"),
        ("tools: " + "[" * 100 + "]" * 100, "more than 64 levels"),
        ("# " + "x" * 2_000_001, "2000003 bytes, 2000000 at most"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"d.yaml .*{says}"):
            load_declarations(file, key="tools", config_key="k", fields=())
