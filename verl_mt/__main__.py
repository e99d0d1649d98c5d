"""`verl-mt COMMAND [arguments]`, or `python -m verl_mt COMMAND`: every command under one name.

`verl-mt train ...` is `python -m verl_mt.trainer ...`: the same module runs, with its arguments, its exit status and
what it does at Ctrl-C.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("trainer", "train a policy on multi-turn rollouts"),
    "check-data": ("data_check", "what a run understands of a data file"),
    "sft": ("sft", "a cold start by supervised training on conversations"),
    "evaluate": ("evaluate", "accuracy and pass@k of a model, or a conversation with it"),
    "doctor": ("doctor", "what is wrong with a run, before it begins"),
    "report": ("report", "what runs did, as one HTML file"),
    "convert-checkpoint": ("convert_checkpoint", "checkpoints of earlier versions in today's format"),
    "prompt-log": ("prompt_log", "whether every drawn prompt of a run was trained once, or left out"),
    "export": ("export", "a checkpoint as a plain model folder"),
    "migrate": ("migrate", "a launch script of verl, ms-swift or slime as one of ours"),
    "check-template": ("check_template", "what a chat template does to conversations"),
    "serve-tools": ("serve_tools", "a run's tools for any MCP client"),
    "retrieval": ("retrieval", "a search server for the search tool"),
    "keys": ("config.write_reference", "all keys of the configuration, as a page"),
}
"""Command -> (module, what it does)."""


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
    if words[0] not in COMMANDS:
        names = {**{name: name for name in COMMANDS}, **{module: name for name, (module, _) in COMMANDS.items()}}
        close = difflib.get_close_matches(words[0], names, n=1)
        hint = f"; did you mean {names[close[0]]}?" if close else ""
        print(f"error: verl-mt has no command {words[0]!r}{hint} There is: {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    module = f"verl_mt.{COMMANDS[words[0]][0]}"
    sys.argv = [f"verl-mt {words[0]}", *words[1:]]
    if "" not in sys.path:  # as `python -m` does: modules of the working directory can be named
        sys.path.insert(0, "")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _usage() -> str:
    lines = [f"  {name:15} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: verl-mt COMMAND [arguments]", "", *lines, "", "verl-mt COMMAND --help says more; verl-mt --version."]
    )


if __name__ == "__main__":
    main()
