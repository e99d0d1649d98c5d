"""Launchers and sweepers of Hydra, which only the processes of their own tests have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def environment(plugin: str) -> dict[str, str]:
    """The environment of a process that finds a plug-in, such as `hydra_joblib_launcher`; skips where it is not."""
    folder = os.environ.get("HYDRA_PLUGINS", "")
    if not folder or not Path(folder, "hydra_plugins", plugin).is_dir():
        pytest.skip(f"HYDRA_PLUGINS names no folder with {plugin} (requirements/hydra-plugins.txt)")
    paths = [str(REPO), str(Path(folder).absolute()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
