"""Older kernels know fewer of Landlock's rights: what they cannot take away must still be refused."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from verl_mt.extensions.toolbox.sandbox import SandboxLimits, jail
from verl_mt.extensions.toolbox.sandbox.policy import readable_paths
from verl_mt.extensions.toolbox.sandbox.seccomp import build_filter


def test_the_struct_grows_as_the_kernels_does():
    got = {
        version: (hex(files), len(attributes))
        for version in range(1, 8)
        for files, attributes in [jail.ruleset_attributes(version)]
    }
    assert got == {
        1: ("0x1fff", 8),
        2: ("0x3fff", 8),
        3: ("0x7fff", 8),
        4: ("0x7fff", 16),
        5: ("0xffff", 16),
        6: ("0xffff", 24),
        7: ("0xffff", 24),
    }


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_an_older_landlock_holds_too(version, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.write_text("whole")
    setup = {
        "folder": str(inside),
        "readable": [*readable_paths(sys.executable), str(outside)],
        "rlimits": SandboxLimits().rlimits(),
        "filter": build_filter().hex(),
    }
    script = """
        import importlib.util, json, os, sys
        setup, version, file, outside = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
        spec = importlib.util.spec_from_file_location("jail", file)
        jail = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(jail)
        jail.landlock_version = lambda: version
        jail.lock_in({**setup, "parent": os.getppid()})
        attempts = [
            lambda: os.truncate(outside, 0),
            lambda: os.open(outside, os.O_RDONLY | os.O_TRUNC),
            lambda: os.open(outside, 3 | os.O_TRUNC),  # neither for reading nor for writing, as Landlock sees it
            lambda: os.open(outside, 3 | os.O_TRUNC | os.O_CREAT | os.O_NONBLOCK),
            lambda: os.open(outside, os.O_WRONLY | os.O_TRUNC),
            lambda: os.ftruncate(os.open(outside, 3), 0),
            lambda: os.ftruncate(os.open(outside, os.O_PATH), 0),
            lambda: os.ftruncate(os.open(outside, os.O_RDONLY), 0),
            lambda: os.posix_fallocate(os.open(outside, os.O_RDONLY), 0, 4096),
            lambda: os.open(os.path.dirname(outside), os.O_TMPFILE | os.O_RDWR),
            lambda: os.open(os.path.dirname(outside), os.O_TMPFILE | 3),
            lambda: open(outside, "w"),
            lambda: os.rename(outside, "mine"),
            lambda: os.link(outside, "mine"),
            lambda: os.unlink(outside),
            lambda: os.mkdir(outside + ".d"),
            lambda: os.listdir("/"),
            lambda: open("/etc/passwd"),
        ]
        refused = 0
        for attempt in attempts:
            try:
                attempt()
            except OSError:
                refused += 1
        open("kept", "w").write("x")
        print(refused, len(attempts), open(outside).read(), os.listdir("."))
    """
    words = [
        sys.executable,
        "-c",
        textwrap.dedent(script),
        json.dumps(setup),
        str(version),
        jail.__file__,
        str(outside),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.strip() == "18 18 whole ['kept']", done.stderr
