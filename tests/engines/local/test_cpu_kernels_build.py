"""Compiling the kernels: once, under a lock, for this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_mt.extensions.cpu_kernels import build as builds
from verl_mt.extensions.cpu_kernels.build import KernelsError, build


@pytest.fixture
def counted(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a compiler that writes a line for each library that it makes. It compiles little."""
    source, calls, compiler = tmp_path / "kernels.cpp", tmp_path / "calls", tmp_path / "compiler"
    source.write_text('extern "C" int verl_mt_answer() { return 42; }\n')
    counts = f'case "$*" in *--version*) ;; *) sleep 0.5; echo >> {calls} ;; esac'
    compiler.write_text(f'#!/bin/sh\n{counts}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(builds, "SOURCE", source)
    return calls


def num_calls(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.mark.slow
def test_the_second_process_finds_what_the_first_compiled(counted):
    first, second = build(), build()
    assert first.name == second.name and num_calls(counted) == 1
    assert first.code.verl_mt_answer() == 42


@pytest.mark.slow
def test_two_processes_compile_once(counted, tmp_path):
    program = f"""
from pathlib import Path
from verl_mt.extensions.cpu_kernels import build
build.SOURCE = Path({str(tmp_path / "kernels.cpp")!r})
print(build.build().code.verl_mt_answer())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["42", "42"]
    assert num_calls(counted) == 1


@pytest.mark.slow
def test_a_library_that_is_cut_off_is_built_again(counted, tmp_path):
    build()
    (library,) = (tmp_path / "cache").rglob("kernels.so")
    library.unlink()  # it is loaded: another file in its place
    library.write_bytes(b"cut")
    assert build().code.verl_mt_answer() == 42 and num_calls(counted) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [lambda kept: kept | {"features": "avx9"}, lambda kept: kept | {"torch": "1.0"}, lambda kept: []]
)  # fmt: skip
def test_one_of_another_machine_is_built_again(counted, tmp_path, change):
    build()
    (manifest,) = (tmp_path / "cache").rglob("built_for.json")
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    build()
    assert num_calls(counted) == 2


@pytest.mark.slow
def test_other_source_features_torch_or_flags_have_another_name(counted, tmp_path, monkeypatch):
    names = {build().name}
    builds.SOURCE.write_text(builds.SOURCE.read_text() + "// changed\n")
    names.add(build().name)
    monkeypatch.setattr(builds, "_features", lambda: "other")
    names.add(build().name)
    monkeypatch.setattr(builds.torch, "__version__", "1.0")
    names.add(build().name)
    monkeypatch.setattr(builds, "FLAGS", (*builds.FLAGS, "-g"))
    names.add(build().name)
    assert len(names) == 5 == num_calls(counted)


@pytest.mark.slow
def test_what_the_compiler_refuses_is_said(counted):
    builds.SOURCE.write_text("int f( {\n")
    with pytest.raises(KernelsError, match=r"compiler failed: .*error: "):
        build()


def test_a_compiler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler -x c++")
    with pytest.raises(KernelsError, match=r"the compiler /no/such/compiler [(]CXX[)] is not there"):
        build()


def test_a_compiler_that_cannot_run_is_named(monkeypatch, tmp_path):
    (tmp_path / "compiler").write_text("neither a program nor a script")
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    with pytest.raises(KernelsError, match=r"compiler --version failed: .*Exec format error.*Set CXX to another"):
        build()


def test_a_cxx_that_is_no_command_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(KernelsError, match=r"CXX=g\+\+ 'x is no command"):
        build()


@pytest.mark.slow
def test_a_folder_that_others_may_write_to_is_refused(counted, tmp_path):
    build()
    (library,) = (tmp_path / "cache").rglob("kernels.so")
    library.parent.chmod(0o777)
    with pytest.raises(KernelsError, match="others may write to it: remove it, or set XDG_CACHE_HOME"):
        build()


def test_a_cache_that_cannot_be_written_is_named(counted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelsError, match="cannot be used: "):
        build()


def test_no_flag_lets_the_compiler_reorder_sums():
    assert not {"-ffast-math", "-Ofast", "-fassociative-math", "-funsafe-math-optimizations"} & set(builds.FLAGS)


def test_the_source_is_in_the_wheel():
    from hatchling.builders.wheel import WheelBuilder

    repo = Path(__file__).resolve().parents[3]
    shipped = {file.distribution_path for file in WheelBuilder(str(repo)).recurse_included_files()}
    assert "verl_mt/extensions/cpu_kernels/kernels.cpp" in shipped
