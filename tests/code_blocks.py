"""The blocks of code on the pages, and what it means to run one.

A block is run as what its language says. `title="my_tools.py"` behind the language makes it a file that the other
blocks of its page find. A block that cannot run here stands below a comment that says why:
`<!-- not run: it needs two machines -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from verl_mt.config.compose import Command as TrainCommand
from verl_mt.config.compose import config_of_command
from verl_mt.config.normalize import normalize_tree, raise_problems
from verl_mt.config.schema import sections
from verl_mt.extension_points import find as find_entry_point
from verl_mt.extensions.compat.migrate import migrate
from verl_mt.extensions.compat.migrate.shell import Command, read_script
from verl_mt.extensions.hydra_commands.sweeps import normalize_sweep
from verl_mt.extensions.inspection.doctor.checks import checks_of
from verl_mt.extensions.scaffold.init import main as init
from verl_mt.interactions.session import load_interactions
from verl_mt.tools.registry import load_tools

REPO = Path(__file__).resolve().parents[1]
PAGES = [
    REPO / "README.md",
    *sorted(REPO.glob("docs/*.md")),
    *sorted(REPO.glob("recipes/**/README.md")),
    *sorted(REPO.glob("benchmarks/*.md")),
]
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: ([^\n]+?) -->\n\s*$")
_PLACEHOLDER = re.compile(r"\.\.\.|\[?[A-Z]+=[A-Z]+.*|\]|[A-Z_]{2,}\]?")
"""`...`, `[KEY=VALUE ...]`, `CONF`: words that stand for the reader's own."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None
    """Why it cannot be run here."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        language, words, code = block.groups()
        title, reason = re.search(r'title="([^"]+)"', words), _NOT_RUN.search(text[: block.start()])
        found.append(
            Block(
                page, text.count("\n", 0, block.start()) + 1, language, title and title[1], code, reason and reason[1]
            )
        )
    return found


def run_json(text: str) -> None:
    """One value, or a part of an object; `[...]` stands for what is left out. Several lines may be an object each."""
    text = text.replace("[...]", "[]").strip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.startswith("{"):  # an object in each line
            for line in text.splitlines():
                json.loads(line)
        else:
            json.loads("{" + text + "}")


def run_yaml(text: str) -> None:
    """Tools and interactions are made, keys of ours are checked, anything else is read."""
    content = yaml.safe_load(text)
    if "tools" in content:
        file = Path("block.yaml")
        file.write_text(text)
        load_tools(str(file))
    elif "interaction" in content:
        file = Path("block.yaml")
        file.write_text(text)
        load_interactions(str(file))
    elif set(content) & {key.partition(".")[0] for key in sections()}:
        content.pop("defaults", None)
        _, outcome = normalize_tree(content, "block")
        assert not outcome.problems, outcome.problems


def run_bash(text: str) -> None:
    """Every command: ours compose or know their flags, scripts exist and know theirs, extras exist."""
    if re.search(r"\bverl\.trainer\.main_ppo\b", text) and "verl_mt.migrate" not in text:
        refused = migrate(text).refused
        assert not refused, refused
        return
    for command in read_script(text).commands:
        words = command.words
        if "--" in words and words[:3] == ["ray", "job", "submit"]:
            words = words[words.index("--") + 1 :]
        run_command(Command(command.env, words))


def run_command(command: Command) -> None:
    words = command.words
    if words[:2] == ["pip", "install"]:
        check_pip(words)
    elif words[:2] == ["verl-mt", "init"]:
        assert init(words[2:]) == 0
    elif words[:2] == ["verl-mt", "doctor"] or words[1:3] == ["-m", "verl_mt.doctor"]:
        check_doctor(words[2 if words[0] == "verl-mt" else 3 :])
    elif words[0] == "verl-mt" and (module := find_entry_point("verl_mt.commands", words[1])):
        check_module(module, words[2:])
    elif words[0] == "cd":
        os.chdir(words[1])  # the test goes back
    elif words[:2] == ["python", "-m"] and words[2].startswith("verl_mt."):
        check_module(words[2], words[3:])
    elif words[0] == "python" and Path(words[1]).is_file():
        compile(Path(words[1]).read_text(), words[1], "exec")  # a file of the page's, which ran as its own block
    elif words[0] in ("python", "bash", "sbatch") or words[0].startswith(("recipes/", "requirements/")):
        script = next(w for w in words if re.fullmatch(r"(?:recipes|examples|requirements|benchmarks)/\S+", w))
        source = (REPO / script).read_text()
        flags = [w for w in words[words.index(script) :] if re.fullmatch(r"--[a-z][\w-]*", w)]
        unknown = [f for f in flags if f not in source]
        if unknown and script.endswith(".py"):  # made from a table
            text = subprocess.run([sys.executable, REPO / script, "--help"], capture_output=True, text=True).stdout
            unknown = [f for f in unknown if f not in text]
        assert not unknown, f"{script} has no such flag: {unknown}"
    elif words[0] not in ("export", "set", "pytest"):
        raise AssertionError(f"nobody checks {words[0]!r}: teach tests/code_blocks.py, or say why it is not run")


def check_pip(words: list[str]) -> None:
    import tomllib

    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if found := re.search(r"\[([\w,-]+)\]", word):
            assert set(found[1].split(",")) <= set(extras), word
        if word.endswith(".txt"):
            assert (REPO / word).is_file(), word


def check_doctor(words: list[str]) -> None:
    """Groups exist, the configuration composes, and flags of the report on a template are its own."""
    if "--ahead" in words:  # which reads a finished run, and no configuration
        return
    own = {word: value for word, value in pairwise([*words, ""]) if word in ("--only", "--demos", "--model")}
    only = own.get("--only", "").split(",") if "--only" in own else []
    checks_of(only)
    rest = [word for word in words if word not in (*own, *own.values())]
    if only == ["template"] and "--model" in own:
        check_module("verl_mt.check_template", rest)
    else:
        check_module("verl_mt.trainer", [word for word in rest if word.startswith("-") or "=" in word])


def check_module(module: str, words: list[str]) -> None:
    words = [w for w in words if not _PLACEHOLDER.fullmatch(w) or w == "PATH"]
    if module == "verl_mt.migrate":
        assert "--" not in words or migrate(" ".join(words[words.index("--") + 1 :])).framework
        return
    if module in ("verl_mt.trainer", "verl_mt.doctor"):
        if "--ahead" not in words:  # which reads a finished run, and no configuration
            compose_words([word for word in words if word != "--demos"])  # the doctor's own
        return
    text = help_of(module)
    flags = [w.partition("=")[0] for w in words if w.startswith("--")]
    unknown = [f for f in flags if not re.search(rf"{f}\b", text)]
    assert not unknown, f"{module} has no such flag: {unknown}"
    if overrides := [w for w in words if re.match(r"[a-z_]+(\.\w+)+=", w)]:
        compose_words(overrides)


def compose_words(words: list[str]) -> None:
    """As the command does; a file of the reader's own (`--config-path CONF --config-name NAME`) is left aside."""
    kept: list[str] = []
    for word, following in zip(words, [*words[1:], ""]):
        if word in ("--config-path", "--config-name") and (
            following.startswith("--") or "=" in following or not following
        ):
            continue  # its placeholder is gone
        kept.append(str(REPO / word) if word.startswith("recipes/") else word)
    if "-m" in kept:
        raise_problems(TrainCommand(kept, None, "verl_mt.trainer").plan(normalize_sweep).composition.problems)
    else:
        config_of_command(kept, None, "verl_mt.trainer")


def help_of(module: str) -> str:
    """What `--help` prints."""
    import contextlib
    import importlib
    import io

    found = importlib.import_module(module)
    main = getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["--help"])
    assert out.getvalue(), f"{module} --help prints nothing"
    return out.getvalue()
