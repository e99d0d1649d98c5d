"""verifiers: its own loops play its environments, and the policy answers."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from two_steps import RO, train_two_steps

from verl_mt.errors import PluginError
from verl_mt.extensions.environments.verifiers import parts

HERE = Path(__file__).parent
try:
    VERSION = tuple(map(int, importlib.metadata.version("verifiers").split(".")[:2]))
except importlib.metadata.PackageNotFoundError:
    VERSION = (0, 0)
old = pytest.mark.skipif(VERSION != (0, 1), reason=f"needs the package verifiers<0.2 (there is {VERSION})")
new = pytest.mark.skipif(VERSION < (0, 3), reason=f"needs the package verifiers 0.3 or newer (there is {VERSION})")


def test_what_is_no_environment_of_verifiers_is_refused():
    with pytest.raises(PluginError, match=r"3 is neither an environment nor a taskset of verifiers"):
        parts(3)


def train(folder: Path, file: Path, name: str = "") -> list[dict]:
    here = f"{file}:{name}"
    return train_two_steps(
        folder, f"{RO}.agent_function_path={here}run", f"reward.path={here}reward", f"data.train_files={here}rows"
    )


@old
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "multi", "tool", "secret"])
def test_an_environment_of_0_1_is_trained_for_two_steps(tmp_path, kind):
    rows = train(tmp_path, HERE / "verifiers_v0_game.py", f"{kind}_")
    for row in rows:
        messages = row["messages"]
        assert messages[0]["content"].startswith("Say ") and len(row["records"]) == 1
        spoken = [message for message in messages if message["role"] == "assistant"]
        assert len(spoken) == {"single": 1, "multi": 3}.get(kind, len(spoken)) or row["stop_reason"] != "finished"
        assert row["reward"] == float(messages[0]["content"][4:-1] in str(spoken[-1]["content"]))
    assert {row["stop_reason"] for row in rows} >= {"finished"}


@new
@pytest.mark.slow
def test_a_taskset_is_trained_for_two_steps(tmp_path):
    rows = train(tmp_path, HERE / "verifiers_v1_game.py")
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert row["reward"] == float(row["messages"][1]["content"][4:-1] in str(row["messages"][2]["content"]))
