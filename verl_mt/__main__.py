"""`verl-mt COMMAND [arguments]`, or `python -m verl_mt COMMAND`: every command under one name.

`verl-mt train ...` is `python -m verl_mt.trainer ...`: the same module runs, with its arguments, its exit status and
what it does at Ctrl-C.
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from verl_mt.extension_points import find, known, own

COMMANDS = {
    "train": ("trainer", "train a policy on multi-turn rollouts"),
    "evaluate": ("evaluate", "measure accuracy and pass@k of a model, or talk to it"),
    "convert-checkpoint": ("convert_checkpoint", "convert checkpoints of earlier versions"),
    "export": ("export", "write a checkpoint as a plain model folder"),
}
"""Command of the core -> (module, its line in the help). Extensions bring more: the entry points `verl_mt.commands`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the words name.

    Args:
        argv: None = `sys.argv[1:]`.

    Raises:
        SystemExit: the command's status; 2 for one that there is not.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words in ([], ["--help"], ["-h"], ["help"]):
        print(_usage())
        raise SystemExit(0 if words else 2)
    if words == ["--version"]:
        from verl_mt import __version__

        print(f"verl_mt {__version__}")
        return
    module = _core().get(words[0]) or find("verl_mt.commands", words[0])
    if module is None:
        commands = {**_core(), **known("verl_mt.commands")}
        names = {path.rpartition(".")[2]: name for name, path in commands.items()} | {name: name for name in commands}
        close = difflib.get_close_matches(words[0], names, n=1)
        hint = f"; did you mean {names[close[0]]}?" if close else "."
        print(f"error: verl-mt has no command {words[0]!r}{hint} There is: {', '.join(commands)}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"verl-mt {words[0]}", *words[1:]]
    if "" not in sys.path:  # as `python -m` does: modules of the working directory can be named
        sys.path.insert(0, "")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _core() -> dict[str, str]:
    return {name: f"verl_mt.{module}" for name, (module, _) in COMMANDS.items()}


def _what(module: str) -> str:
    """An extension's command in a line: the first one of its docstring, after "`python -m ...`: ". No import."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin)
    file = file.with_name("__main__.py") if file.name == "__init__.py" else file
    text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return text.partition("`: ")[2].partition(" (docs/")[0].rstrip(".")


def _usage() -> str:
    """Reads no metadata: commands of other packages are listed in the error for an unknown one."""
    does = {name: what for name, (_, what) in COMMANDS.items()}
    does |= {name: _what(module) for name, module in own("verl_mt.commands").items()}
    lines = [f"  {name:18} {what}" for name, what in does.items()]
    return "\n".join(
        ["usage: verl-mt COMMAND [arguments]", "", *lines, "", "verl-mt COMMAND --help says more; verl-mt --version."]
    )


if __name__ == "__main__":
    main()
