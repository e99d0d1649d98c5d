"""What `from verl_mt import ...` offers, and what it costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_start

import verl_mt

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", verl_mt.__all__)
def test_every_public_name_is_the_one_of_its_module(name):
    value = getattr(verl_mt, name)
    assert name in dir(verl_mt)
    if name in verl_mt._HOMES:
        assert value is getattr(import_module(f"verl_mt.{verl_mt._HOMES[name]}"), name)


@pytest.mark.parametrize("name", sorted({*verl_mt.__all__} - {"__version__"}))
def test_every_public_name_is_in_the_api_reference(name):
    """mkdocstrings needs the module where the object is defined, and the page shows the name that you import."""
    pages = "".join(page.read_text() for page in (REPO / "docs").glob("api_*.md"))
    entries = re.findall(rf"^::: ([\w.]+)\n    options: {{heading: verl_mt\.{name}}}$", pages, re.MULTILINE)
    assert len(entries) == 1, f"give verl_mt.{name} one entry in docs/api_*.md"
    module, _, attribute = entries[0].rpartition(".")
    assert getattr(import_module(module), attribute) is getattr(verl_mt, name)


def test_no_public_name_is_the_name_of_a_module():
    """`import verl_mt.tools` sets `verl_mt.tools`, whatever else had that name."""
    for name in verl_mt.__all__[1:]:
        with pytest.raises(ModuleNotFoundError):
            import_module(f"verl_mt.{name}")


def test_an_unknown_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'verl_mt' has no attribute 'BaseTol'"):
        _ = verl_mt.BaseTol


def loaded(of: tuple[str, ...]) -> str:
    return f"print([name for name in {of!r} if name in sys.modules])"


@pytest.mark.slow
def test_importing_costs_no_more_than_what_is_asked_for():
    steps = (
        ("import verl_mt", ("torch", "transformers", "pydantic", "hydra", "numpy")),
        ("from verl_mt import BaseTool, BaseInteraction, ToolResponse", ("torch", "transformers", "ray", "sglang")),
        ("from verl_mt import Run, evaluate_model, fine_tune, train", ("torch", "transformers", "ray", "sglang")),
    )
    program = "; ".join(["import sys", *(f"{words}; {loaded(absent)}" for words, absent in steps)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]"] * len(steps)


@pytest.mark.slow
def test_importing_the_scheduler_costs_no_engine_and_no_cluster():
    """A warm start has torch and transformers, and nothing of ours once that is forgotten."""
    forget = "[sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] == 'verl_mt']"
    program = f"import sys; {forget}; from verl_mt import MultiTurnScheduler, Sample; {loaded(('ray', 'sglang'))}"
    done = warm_start.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="which OpenMP torch has, and what it says, differs elsewhere")
@pytest.mark.parametrize(("given", "read"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_threads_of_torch_sleep_while_they_wait_unless_the_user_says_otherwise(given, read):
    """What torch's own OpenMP says that it read, when the library is loaded that torch loads first."""
    ours = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = {**ours, "OMP_DISPLAY_ENV": "true", **given}
    library = Path(find_spec("torch").origin).with_name("lib") / "libtorch_global_deps.so"
    command = [sys.executable, "-c", f"import verl_mt; import ctypes; ctypes.CDLL({str(library)!r})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert f"OMP_WAIT_POLICY = '{read}'" in done.stderr
