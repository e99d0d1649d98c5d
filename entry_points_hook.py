"""For the build: the entry points of the distribution are those of `verl_mt/extensions/entry_points.txt`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class EntryPointsHook(MetadataHookInterface):
    """Fills `[project.entry-points]`, so that an extension is declared in one file."""

    def update(self, metadata: dict[str, Any]) -> None:
        read_table = runpy.run_path(str(Path(self.root) / "verl_mt" / "import_paths.py"))["read_table"]
        metadata["entry-points"] = read_table()
