"""The Dockerfile cannot be built here; what it copies and installs is compared with the checkout."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[1]
KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (REPO / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def sources() -> list[str]:
    return [word for name, rest in instructions() if name == "COPY" for word in shlex.split(rest)[:-1]]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps it out of the build."""
    patterns = (REPO / ".dockerignore").read_text().split()
    return any(fnmatch.fnmatch(path.split("/")[0], pattern) for pattern in patterns)


def test_instructions_are_dockers_and_every_line_that_goes_on_has_a_next_one():
    found = instructions()
    assert {name for name, _ in found} <= KNOWN
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    assert not (REPO / "Dockerfile").read_text().rstrip().endswith("\\")


@pytest.mark.parametrize("source", sources())
def test_what_is_copied_exists_and_reaches_the_build(source):
    assert (REPO / source).exists() and not ignored(source)


def test_what_the_wheel_is_made_of_is_copied():
    """hatchling refuses to build where one of these is absent."""
    build = tomllib.loads((REPO / "pyproject.toml").read_text())
    wheel = build["tool"]["hatch"]["build"]["targets"]["wheel"]
    hooks = build["tool"]["hatch"]["metadata"]["hooks"]
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        *(fragment["path"] for fragment in hooks["fancy-pypi-readme"]["fragments"]),
        *build["project"]["license-files"],
        hooks["custom"]["path"],
    }
    assert needed <= set(sources())


def test_pip_installs_extras_that_exist():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = [w for name, rest in instructions() if name == "RUN" and "pip install" in rest for w in shlex.split(rest)]
    asked = [re.fullmatch(r"\.\[(.+)\]", word) for word in words]
    names = [name for match in asked if match for name in match[1].split(",")]
    assert "sglang" in names and set(names) <= set(extras)
    others = [word for word in words if "[" in word and not word.startswith(".")]
    assert [str(Requirement(word)) for word in others] == others == ["ray[default]"]


def test_the_base_image_s_cuda_is_the_one_that_sglang_s_packages_are_for():
    """SGLang 0.5.23 requires flashinfer_python[cu13] and its like."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["sglang"] == ["sglang==0.5.23"], "look up which CUDA the new release is for, then change this test"
    image = next(rest for name, rest in instructions() if name == "ARG" and rest.startswith("CUDA_IMAGE="))
    assert re.fullmatch(r"CUDA_IMAGE=nvidia/cuda:13\.\d+\.\d+-cudnn-devel-ubuntu24\.04", image)
