"""What a killed process leaves half written goes when the next one starts, and nothing else goes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from verl_mt.data import temporary_files
from verl_mt.data.run_files import atomic_file
from verl_mt.data.temporary_files import new_folder, put_in_place, sweep, sweep_beside, temporary


def names(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def folder_with(path, text):
    path.mkdir()
    (path / "weights").write_text(text)
    return path


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "two renames"])
@pytest.mark.parametrize("there", [True, False])
def test_a_complete_folder_takes_the_place_of_the_older_one(tmp_path, monkeypatch, exchange, there):
    final = tmp_path / "hf"
    if there:
        folder_with(final, "old")
    if not exchange:
        monkeypatch.setattr(temporary_files, "_exchange", lambda one, other: False)
    with new_folder(final) as made:
        (made / "weights").write_text("new")
        put_in_place(made, final)
    assert names(tmp_path) == ["hf", "hf/weights"] and (final / "weights").read_text() == "new"


def test_an_exchange_leaves_no_moment_without_the_folder(tmp_path):
    one, other = folder_with(tmp_path / "one", "1"), folder_with(tmp_path / "other", "2")
    if not temporary_files._exchange(one, other):
        pytest.skip("this file system cannot exchange folders")
    assert (one / "weights").read_text() == "2" and (other / "weights").read_text() == "1"
    assert not temporary_files._exchange(one, tmp_path / "none") and one.is_dir()


def test_a_kill_between_two_renames_loses_no_folder(tmp_path, monkeypatch):
    final = folder_with(tmp_path / "hf", "old")
    monkeypatch.setattr(temporary_files, "_exchange", lambda one, other: False)
    rename = os.rename

    def killed(source, target):
        if str(target) == str(final):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), new_folder(final) as made:
        patched.setattr(os, "rename", killed)
        put_in_place(made, final)
    assert names(tmp_path) == [".hf.aside", ".hf.aside/weights"]
    sweep_beside(final)
    assert (final / "weights").read_text() == "old" and names(tmp_path) == ["hf", "hf/weights"]
    folder_with(tmp_path / ".hf.aside", "older")
    sweep(tmp_path)
    assert (final / "weights").read_text() == "old" and names(tmp_path) == ["hf", "hf/weights"]


HOLD = """
import sys, time
from pathlib import Path
from verl_mt.data.temporary_files import new_folder
with new_folder(Path(sys.argv[1])) as made:
    (made / "weights").write_text("half")
    print(made, flush=True)
    time.sleep(600)
"""


def test_folders_of_killed_processes_go_and_those_of_live_ones_stay(tmp_path):
    final = tmp_path / "hf"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(final)], stdout=subprocess.PIPE, text=True)
    try:
        made = process.stdout.readline().strip()
        sweep_beside(final)
        assert os.listdir(made) == ["weights"]
    finally:
        process.kill()
        process.communicate()
    (tmp_path / ".hf2.x.tmp").mkdir()
    sweep_beside(final)
    assert names(tmp_path) == [".hf2.x.tmp"]


def test_a_run_removes_every_name_that_is_given_here(tmp_path):
    """Files of `atomic_file` too; a link goes and what it points to stays."""
    (tmp_path / "rollouts").mkdir()
    mine = folder_with(tmp_path / "mine", "kept")
    writing = atomic_file(tmp_path / "rollouts" / "step_000001.jsonl")
    writing.__enter__()
    temporary(tmp_path / "report.html").write_text("half")
    folder_with(temporary(tmp_path / "step_000001"), "half")
    (tmp_path / ".linked.tmp").symlink_to(mine)
    assert len(names(tmp_path)) == 8
    sweep(tmp_path)
    assert names(tmp_path) == ["mine", "mine/weights", "rollouts"]
