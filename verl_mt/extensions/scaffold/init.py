"""`verl-mt init NAME`: start a project that trains as it is.

`--kind tool` (the default), `environment`, `chat` or `agent` chooses the template (docs/your_own_project.md).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from verl_mt.errors import ConfigError, VerlMTError

TEMPLATES = Path(__file__).resolve().parent / "templates"
KINDS = {
    "tool": "the model calls a Python function",
    "environment": "one object per conversation, whose methods are tools",
    "chat": "a scripted user answers the model",
    "agent": "your program talks to the model through the openai client",
}
"""Folder in `TEMPLATES` -> what the project is."""
_SHARED = "shared"
_NAME_IN_TEMPLATES = "my_project"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 0, or 2 if it cannot make the project (one line on stderr).

    Args:
        argv: None = `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(prog="verl-mt init", description=(__doc__ or "").partition("`: ")[2])
    parser.add_argument("folder", metavar="NAME", help="the folder to make. Its name is the project's name")
    kinds = ". ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument("--kind", choices=KINDS, default="tool", help=f"{kinds}. Default: tool")
    args = parser.parse_args(argv)
    try:
        made = make_project(args.folder, args.kind)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.folder} has {len(made)} files: {', '.join(path.name for path in made)}\n"
        f"Next: cd {args.folder} && python -m verl_mt.trainer --config-path . --config-name config\n"
        "README.md has the other commands."
    )
    return 0


def make_project(folder: str | Path, kind: str = "tool") -> list[Path]:
    """Write the files of a new project.

    Args:
        folder: where. Its last part is the name of the project and of its run.
        kind: a key of `KINDS`.

    Returns:
        The files, sorted by name.

    Raises:
        ConfigError: an unknown kind, a name with other characters than letters, digits, `_` and `-`, or a folder that
            has files already, or a name that YAML reads as something else.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r}: there is no such template. Choose one of {', '.join(KINDS)}.")
    target = Path(folder).expanduser()
    name = target.absolute().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"project name {name!r}: use letters, digits, _ and -, and begin with a letter, such as my_project"
        )
    if yaml.safe_load(name) != name:
        raise ConfigError(f"project name {name!r}: YAML reads {yaml.safe_load(name)}. Choose another name")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder. Choose another name, or remove it.")
    files = {file.name: file for part in (_SHARED, kind) for file in (TEMPLATES / part).iterdir() if file.is_file()}
    target.mkdir(parents=True, exist_ok=True)
    for file in files.values():
        text = file.read_text(encoding="utf-8").replace(_NAME_IN_TEMPLATES, name)
        (target / file.name).write_text(text, encoding="utf-8")
    return [target / file for file in sorted(files)]


if __name__ == "__main__":
    sys.exit(main())
