"""Real files of other libraries, tried as they are: where they lie, the documented replacement, and what came of it.

Nothing of theirs is kept here: a file is copied into a temporary folder, the replacement that its migration page
documents is applied there, and it is imported from there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from reference_data import SHARED_DATA

PEERS = Path(os.environ.get("VERL_MT_TEST_PEERS", SHARED_DATA.parent / "peers"))

REPLACEMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "verl": ((r"\bverl\.", "verl_mt."),),
    "ms-swift": (
        (r"(?m)^(\s*)from swift[\w.]* import\b", r"\1from verl_mt.rollout.scheduler import"),
    ),
    "slime": (
        (r"(?m)^(\s*)from slime[\w.]* import\b", r"\1from verl_mt.rollout.custom_generate import"),
    ),
}  # fmt: skip
"""Library -> (pattern, replacement) pairs: the commands of the migration pages, nothing else is changed in a file."""

VERDICTS = (
    "loads",
    "composes",
    "trained two steps",
    "runs",
    "runs after a named edit",
    "refused",
)


@dataclass(frozen=True)
class Verdict:
    """What came of one file."""

    project: str
    revision: str
    file: str
    """Path below the revision's folder."""
    verdict: str
    """One of `VERDICTS`."""
    reason: str = ""
    """Of a refusal, or the edit's name."""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.file}: {self.verdict!r} is none of {', '.join(VERDICTS)}")


def revisions(library: str) -> list[Path]:
    """The folders of a library's revisions, oldest first; empty where the reference files are absent."""
    root = PEERS / library
    return sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []


def peer(library: str, revision: str, file: str = "") -> Path:
    """A file of a revision; the test is skipped where the reference files are absent."""
    if not PEERS.is_dir():
        pytest.skip(f"files of other libraries not found at {PEERS} (set VERL_MT_TEST_PEERS)")
    return PEERS / library / revision / file


def replaced(library: str, text: str, package: str = "") -> str:
    """A file's text after the documented replacement.

    Args:
        package: the package that the file is taken out of; its relative imports are written with this name first.
    """
    if package:
        text = re.sub(r"(?m)^(\s*from) \.(?=\w)", rf"\1 {package}.", text)
    for pattern, replacement in REPLACEMENTS[library]:
        text = re.sub(pattern, replacement, text)
    return text


def copy_replaced(library: str, source: Path, folder: Path) -> Path:
    """A file, or a folder with all text files below it, copied into `folder` with the replacement applied."""
    if source.is_dir():
        for file in sorted(source.rglob("*")):
            if file.is_file():
                copy_replaced(library, file, folder / source.name / file.relative_to(source).parent)
        return folder / source.name
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    text = replaced(library, source.read_text(encoding="utf-8"), _package(library, source))
    target.write_text(text, encoding="utf-8")
    return target


def _package(library: str, source: Path) -> str:
    """The dotted package of a file of the library's own package; "" for examples, and files beside it."""
    for revision in revisions(library):
        if source.is_relative_to(revision):
            folders = source.relative_to(revision).parent.parts
            return ".".join(folders) if folders[:1] == (library,) else ""
    return ""


@contextmanager
def imported(file: Path, name: str | None = None) -> Iterator[ModuleType]:
    """A file as a module of its own name, its folder importable for what lies beside it; forgotten afterwards."""
    name = name or file.stem
    before = dict(sys.modules)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(file.parent))
        for other, loaded in list(sys.modules.items()):
            origin = getattr(loaded, "__file__", None) or ""
            if loaded is not before.get(other) and Path(origin).is_relative_to(file.parent):
                del sys.modules[other]
                if other in before:  # a module of ours had that name
                    sys.modules[other] = before[other]


def table(verdicts: list[Verdict]) -> list[str]:
    """Lines of a Markdown table, in the order of the files."""
    rows = sorted(verdicts, key=lambda v: (v.project, v.revision, v.file))
    lines = ["| file | revision | verdict | |", "|---|---|---|---|"]
    return lines + [f"| `{v.file}` | {v.project} {v.revision} | {v.verdict} | {v.reason} |" for v in rows]
