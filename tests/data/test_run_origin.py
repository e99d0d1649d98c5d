"""Whose run directory it is, before code runs that its `config.yaml` names."""

from __future__ import annotations

import os
import stat

import pytest

from verl_mt.data import run_origin
from verl_mt.data.run_origin import FILE, is_own, require_trust, sign
from verl_mt.errors import ConfigError, DataError

CONFIG = b"""
data: {train_files: rows.parquet, val_files: verl_mt.tiny.problems:rows, sampler: mine.sampler:Mine}
reward: {path: /somewhere/reward.py, name: f, kwargs: {judges: [a.b.C, plain words, 0.5]}}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B, trust_remote_code: true, custom_chat_template: t.jinja}
  rollout: {multi_turn: {tool_config_path: tools.yaml, interaction_config_path: ''}}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_bytes(CONFIG)
    return folder


def test_a_run_of_this_user_is_known_by_its_signature(run, tmp_path, monkeypatch):
    assert not is_own(run)
    sign(run, CONFIG)
    key = tmp_path / "state" / "verl_mt" / "key"
    assert is_own(run) and stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    assert os.listdir(key.parent) == ["key"]
    require_trust(run, trust=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_bytes(CONFIG.replace(b"plain", b"other"))
    (other / FILE).write_bytes((run / FILE).read_bytes())
    assert not is_own(other), "the signature is of this config.yaml"
    sign(other, (other / "config.yaml").read_bytes())
    assert is_own(other) and is_own(run), "one key"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's"))
    assert not is_own(run)


def test_another_users_run_is_refused_with_the_code_that_it_names(run):
    with pytest.raises(ConfigError) as caught:
        require_trust(run, trust=False)
    said = str(caught.value)
    assert said.startswith(f"{run / 'config.yaml'} was not written by one of your runs") and "--trust" in said
    assert (
        "It names data.sampler=mine.sampler:Mine, reward.path=/somewhere/reward.py, reward.kwargs.judges[0]=a.b.C, "
        "actor_rollout_ref.model.trust_remote_code=true, "
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml. Read"
    ) in said
    require_trust(run, trust=True)


def test_only_the_first_names_are_listed(run):
    (run / "config.yaml").write_text("\n".join(f"k{n}: my.code{n}" for n in range(11)))
    with pytest.raises(ConfigError, match=r"k7=my\.code7 and 3 more\. Read"):
        require_trust(run, trust=False)
    (run / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"names\. Read it"):
        require_trust(run, trust=False)
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml cannot be read"):
        require_trust(run, trust=False)


def test_without_a_place_for_the_key_a_run_is_nobodys_and_goes_on(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    sign(run, CONFIG)
    assert not is_own(run) and not (run / FILE).exists()


def test_two_runs_that_begin_side_by_side_keep_one_key(run, tmp_path, monkeypatch):
    link = os.link

    def later(draft, file):
        file.write_bytes(b"of the other run")
        link(draft, file)

    monkeypatch.setattr(os, "link", later)
    assert run_origin._key(create=True) == b"of the other run"
    assert os.listdir(tmp_path / "state" / "verl_mt") == ["key"]
