"""`--out FILE` of the benchmarks: the numbers behind a table, with the command, commit, date, machine and versions.

The files behind published tables are in `benchmarks/measured/`. They name no host, no user and no folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "transformers", "sglang", "ray", "trl")


def add_out(parser: argparse.ArgumentParser) -> None:
    """The option `--out`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON, with commit and machine")


def write_rows(out: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` with their provenance; nothing without `--out`."""
    if out is not None:
        head = json.dumps(provenance(), indent=1, ensure_ascii=False).removesuffix("\n}")
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False, allow_nan=False)}" for row in rows)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def provenance() -> dict[str, Any]:
    """Command, commit, date, machine and versions of this process."""
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def command() -> str:
    """The command without `--out`; of a path outside of the repository only its last part."""
    words = [sys.argv[0], *sys.argv[1:]]
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    return " ".join(["python", *map(_without_folder, words)])


def _without_folder(word: str) -> str:
    path = Path(word).resolve()
    if path.is_relative_to(REPO) and path.exists():
        return str(path.relative_to(REPO))
    return path.name if os.path.isabs(word) else word


def commit() -> str | None:
    """The last commit that changed the library, `verl_mt/`; with a `+` where there are changes that are not committed.

    None outside of a git checkout.
    """
    found = [
        subprocess.run(["git", *words, "--", "verl_mt"], cwd=REPO, capture_output=True, text=True)
        for words in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
    ]
    if any(each.returncode for each in found):
        return None
    return found[0].stdout.strip() + ("+" if found[1].stdout else "")


def machine() -> dict[str, Any]:
    """Cores that this process may use, the processor, and the load of the last minute."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores, "cpu": cpu, "load": round(os.getloadavg()[0], 1)}


def _versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed
