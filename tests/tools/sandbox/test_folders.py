"""Whatever model-written code leaves in its folder is removed, and nothing of it stops a run from starting."""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from verl_mt.extensions.toolbox.sandbox import Sandbox, SandboxLimits, folders

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")

NOBODY = 65534


@pytest.fixture
def temporary(monkeypatch):
    """A temporary folder of its own, in memory where there is one: disks take milliseconds for each folder."""
    folder = Path(tempfile.mkdtemp(prefix="verl_mt_test_", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    folders._home.cache_clear()
    yield folder
    folders._home.cache_clear()
    folders.remove_folder(str(folder))


@pytest.fixture
def left(temporary):
    """The folder of a process that was killed a while ago."""
    folder = temporary / f"{folders._PREFIX}old"
    folder.mkdir()
    return folder


def nest(folder: Path, levels: int) -> None:
    """Folders in folders; no path is long enough to name the innermost."""
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=handle)
        deeper = os.open("a", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = deeper
    os.close(os.open("file", os.O_CREAT, dir_fd=handle))
    os.close(handle)


def old(folder: Path) -> Path:
    os.utime(folder, (0, 0))
    return folder


def without_privileges(function) -> int:
    """Calls it in a process of a user who may do nothing special; 0 = it returned."""
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "levels",
    [
        1_500,
        pytest.param(15_000, marks=pytest.mark.slow),
        pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.release]),
    ],
)
def test_no_depth_of_folders_outlives_the_next_start(left, caplog, monkeypatch, levels):
    nest(left, levels)
    calls, longest = Counter(), 0
    monkeypatch.setattr(folders, "_REMOVE_S", math.inf)

    def counted(name, inner):
        def call(path, *args, **kwargs):
            nonlocal longest
            calls[name] += 1
            longest = max(longest, len(os.fspath(path)) if isinstance(path, str) else 0)
            return inner(path, *args, **kwargs)

        return call

    for name in ("open", "scandir", "rename", "rmdir", "unlink", "chmod"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    folders._sweep(old(left).parent)
    monkeypatch.undo()
    assert not left.exists() and caplog.text == ""
    assert sum(calls.values()) < 10 * levels, calls  # linear in the depth
    assert longest < 200  # no path grows with the depth


@pytest.mark.slow
def test_code_that_nests_folders_leaves_none(temporary):
    interpreter = Sandbox(SandboxLimits(memory_mb=256, disk_mb=64)).open()
    result = interpreter.run("import os\nfor k in range(3000):\n    os.mkdir('a')\n    os.chdir('a')")
    interpreter.close()
    assert result.ending == "ok" and not os.path.exists(interpreter.folder)


@pytest.mark.slow
def test_files_are_counted_at_any_depth_and_beside_it(left):
    nest(left, 5_000)
    for k in range(300):
        (left / f"{k}").mkdir()
        (left / f"{k}" / "file").write_bytes(bytes(4096))
    (left / "link").symlink_to("/")
    assert folders.too_full(str(left), os.getpid(), 64) == ""
    (left / "0" / "big").write_bytes(bytes(2**20))
    assert folders.too_full(str(left), os.getpid(), 1).startswith("its files take more than 1 MiB")
    nest(left / "1", 5_000)
    assert folders.too_full(str(left), os.getpid(), 64) == "its files are more than 10000"


def test_links_are_removed_and_what_they_lead_to_stays(left, temporary):
    outside = temporary / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_text("whole")
    (left / "a" / "b").mkdir(parents=True)
    for folder in (left, left / "a", left / "a" / "b"):
        (folder / "to_folder").symlink_to(outside)
        (folder / "to_file").symlink_to(outside / "file")
        (folder / "dangling").symlink_to("nowhere")
    os.link(outside / "file", left / "a" / "hard")
    folders._sweep(old(left).parent)
    assert not left.exists()
    assert (outside / "file").read_text() == "whole" and (outside / "deep").is_dir()


def test_a_link_in_the_place_of_a_left_folder_is_not_followed(left, temporary):
    outside = temporary / "outside"
    outside.mkdir()
    (outside / "file").write_text("whole")
    left.rmdir()
    left.symlink_to(outside)
    os.utime(outside, (0, 0))
    folders._sweep(temporary)
    folders.remove_folder(str(left))
    assert (outside / "file").read_text() == "whole"


def test_folders_without_permissions_go_too_also_for_an_unprivileged_user():
    home = Path(tempfile.mkdtemp(prefix="verl_mt_test_"))

    def make_and_remove():
        for mode in (0, 0o100, 0o200, 0o400, 0o500):
            (folder := home / "left" / f"{mode}" / "inner").mkdir(parents=True)
            (folder / "file").write_text("x")
            (folder / "deeper").mkdir(mode=0)
            folder.chmod(mode)
            folder.parent.chmod(mode)
        folders.remove_folder(str(home / "left"))
        assert not (home / "left").exists()

    try:
        os.chmod(home, 0o777)
        assert without_privileges(make_and_remove) == 0
    finally:
        shutil.rmtree(home)


def test_what_cannot_be_removed_is_said_once_and_never_refuses_a_start(left, monkeypatch, caplog):
    for k in range(3):
        (left / f"file{k}").touch()
    (left / "folder").mkdir()
    unlink = os.unlink

    def refuse(path, **options):
        if path == "file1":
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **options)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "unlink", refuse)
        folders._sweep(old(left).parent)
        folders._sweep(old(left).parent)
    assert [record.getMessage() for record in caplog.records] == [
        f"{left}, which model-written code left behind, could not be removed (Operation not permitted); "
        "it only takes disk space, so delete it by hand"
    ]


def test_deletion_ends_in_time_and_the_next_start_goes_on(left, caplog):
    nest(left, 1_000)
    folders.remove_folder(str(left), ends=-math.inf)
    assert left.exists() and "deleting it takes too long" in caplog.text
    folders._sweep(old(left).parent)
    assert not left.exists()
