"""`python -m verl_mt.migrate`: a launch command of verl, ms-swift or slime as one of verl_mt.

What it cannot carry over it lists with the reason; nothing is left out silently. The keys and reasons are those of the
configuration itself: both read the tables of `verl_mt/extensions/compat/aliases/`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from verl_mt.config.compose import compose
from verl_mt.config.hydra_source import read_yaml
from verl_mt.config.normalize import COMMAND_LINE, normalize_overrides, normalize_tree
from verl_mt.config.redact import is_secret_name
from verl_mt.config.schema import leaves
from verl_mt.errors import ConfigError, VerlMTError
from verl_mt.extensions.compat.aliases.families import families
from verl_mt.extensions.compat.migrate.launch import ENV, Launch, Library, by_flag, parses
from verl_mt.extensions.compat.migrate.ms_swift import read_swift
from verl_mt.extensions.compat.migrate.shell import Command, Script, read_script
from verl_mt.extensions.compat.migrate.shell_values import for_shell, shell_text
from verl_mt.extensions.compat.migrate.slime import read_slime
from verl_mt.extensions.compat.migrate.verl import (
    MAINS,
    VERL_DEFAULTS,
    default_rollout_mode,
    read_verl,
    with_counterparts,
)

__all__ = ["Migration", "main", "migrate"]

_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")
_OTHERS = {
    "verl.trainer.fsdp_sft_trainer": "supervised training is python -m verl_mt.sft",
    "verl.trainer.sft_trainer": "supervised training is python -m verl_mt.sft",
    "verl.trainer.main_generation": "sampling is python -m verl_mt.evaluate",
    "verl.trainer.main_eval": "evaluation is python -m verl_mt.evaluate",
    "verl.model_merger": "a checkpoint becomes a model by python -m verl_mt.export",
    "swift sft": "supervised training is python -m verl_mt.sft",
    "swift infer": "sampling is python -m verl_mt.evaluate",
    "swift eval": "evaluation is python -m verl_mt.evaluate",
    "swift export": "a checkpoint becomes a model by python -m verl_mt.export",
}
_SAYS = {"echo", "printf", "set", "shift", "unset", "true", ":"}
_ENV_DROPPED = {
    "VLLM_": "set it for the run itself, if it samples with vLLM (docs/vllm.md)",
    "CUDA_DEVICE_MAX_CONNECTIONS": "Megatron asks for it",
    "NVTE_": "Transformer Engine is not used",
    "MASTER_ADDR": "Ray finds its machines itself",
    "MASTER_PORT": "Ray finds its machines itself",
    "NODE_RANK": "Ray finds its machines itself",
    "NNODES": "machines are trainer.nnodes",
    "HYDRA_FULL_ERROR": "VERL_MT_TRACEBACK=1 shows tracebacks",
}
_ALSO = re.compile(r"\balso (?P<word>[\w.]+=\S+): (?P<why>.+)$")
"""A note on a verl_mt key that is set beside the command's options, so that they mean the same."""
_TENSOR_RANKS = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_OF_MACHINE = {"--node_rank", "--master_addr", "--master_port", "--machine_rank"}
"""Flags by which the commands of one run on several machines differ."""
_TRUE_ALONE = {"fipo_clip_high_only"}
"""Booleans of ms-swift whose counterpart here is a number."""
_FILES = {
    "verl": {
        "actor_rollout_ref.rollout.tool_kwargs.tools_config_file": "in its class names write verl_mt. for verl.",
        "actor_rollout_ref.rollout.interaction_config_file": "in its class names write verl_mt. for verl.",
    },
    "ms-swift": {"external_plugins": "import from verl_mt.rollout.scheduler (docs/migrating_from_ms_swift.md)"},
    "slime": {
        "actor_rollout_ref.rollout.custom_generate_function_path": "import from verl_mt.rollout.custom_generate",
        "reward.path": "import from verl_mt.rollout.custom_generate",
    },
}


@dataclass
class Migration:
    """A launch command of another library, read."""

    framework: Library
    env: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    """Canonical overrides; `compose(overrides)` takes them."""
    added: dict[str, str] = field(default_factory=dict)
    """Overrides among them that the command does not name -> why."""
    changed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    """Definitions that the shell needs for what it computes in the command."""

    def command(self) -> str:
        """For a shell; a comment stands behind each line that the original does not have."""
        before = "".join(f"{body}\n" for body in self.functions)
        head = [f"{name}={_for_shell(value)}" for name, value in self.env.items()]
        head += [_for_shell(word) for word in self.wrapper]
        head += ["python", "-m", "verl_mt.trainer", *map(_for_shell, self.flags)]
        return before + " \\\n    ".join([" ".join(head), *map(_for_shell, self.overrides)])


def migrate(text: str, script_file: Path | None = None) -> Migration:
    """Read a launch script or command.

    Args:
        script_file: where it lies; the YAML file that it names is looked for from there upwards, too.

    Raises:
        ConfigError: it starts nothing that is known, or a quote is not closed.
    """
    if script_file is not None and script_file.suffix == ".py":
        raise ConfigError(
            f"{script_file.name} is a Python program, not a launch script or command. Give the command that it starts "
            "(python -m verl_mt.migrate -- python3 train.py ...)"
        )
    text, taken = _with_commented_rollout(text)
    script = read_script(text, script_file)
    if taken:
        script.note("the `swift rollout` command stands in a comment of the script; what it says was taken over")
    launch = find_launch(script)
    if launch.framework is None:
        if launch.refused:
            raise ConfigError("; ".join(launch.refused))
        if (script.arrays or script.sourced) and not any(_starts(command) for command in script.commands):
            held = f" ({', '.join(sorted(script.arrays))})" if script.arrays else ""
            raise ConfigError(
                f"the file only holds arguments{held} and starts nothing. Give the script that reads it with `source`"
            )
        started = ", ".join(sorted({c.words[0] for c in script.commands if c.words})) or "nothing"
        raise ConfigError(
            "no launch command of verl (python -m verl.trainer.main_ppo), ms-swift (swift rlhf, swift rollout) or "
            f"slime (python train.py) found. The text starts {started}"
        )
    folders = _folders_of(script_file)
    return _migration(launch, launch.framework, _yaml_of(launch.flags, folders), default_rollout_mode(folders))


def main(argv: Sequence[str] | None = None) -> int:
    """The body of the command. Returns 0 if everything could be carried over, 3 if some of it means something else here
    (listed), 1 if something is refused, 2 if there is nothing to carry over."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = words[words.index("--") + 1 :] if "--" in words else None
    parser = argparse.ArgumentParser(prog="python -m verl_mt.migrate", description=(__doc__ or "").partition(":")[2])
    parser.add_argument("script", nargs="?", help="file with the launch command; - or nothing = standard input")
    parser.epilog = "A command itself goes behind --: python -m verl_mt.migrate -- python -m verl.trainer.main_ppo ..."
    args = parser.parse_args(words if given is None else words[: words.index("--")])
    try:
        script_file = None
        if given is not None:
            text = shlex.join(given)
        elif args.script in (None, "-"):
            text = sys.stdin.read()
        else:
            script_file = Path(args.script)
            text = script_file.read_text(errors="replace")
        found = migrate(text, script_file)
    except (VerlMTError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(found))
    return 1 if found.refused else 3 if found.changed else 0


def report(found: Migration) -> str:
    """The command and, as comments, everything that is to be said about it: a script that runs as it is."""
    parts = [f"# {found.framework} -> verl_mt", found.command()]
    for title, lines in (
        ("set because the other library means it without saying so", [f"{k}: {v}" for k, v in found.added.items()]),
        ("carried over with another meaning", found.changed),
        ("dropped, because there is nothing to set", found.dropped),
        ("to do by hand", found.notes),
        ("REFUSED, and why", found.refused),
    ):
        if lines:
            parts.append("\n".join([f"# {title}:", *(f"#   {' '.join(line.split())}" for line in lines)]))
    return "\n\n".join(parts)


def _with_commented_rollout(text: str) -> tuple[str, bool]:
    """ms-swift's scripts show the command of their rollout server in a comment, and start the trainer alone."""
    lines = text.splitlines()
    if any(re.match(r"[^#]*\bswift\s+rollout\b", line) for line in lines):
        return text, False
    start = next(
        (k for k, line in enumerate(lines) if re.match(r"\s*#\s*(?:\w+=\S+\s+)*swift\s+rollout\s", line)), None
    )
    if start is None:
        return text, False
    while start and re.match(r"\s*#\s*\w+=\S+.*\\\s*$", lines[start - 1]):
        start -= 1  # variables that are set for it, on lines of their own
    command = []
    for line in lines[start:]:
        command.append(re.sub(r"^\s*#\s?", "", line))
        if not line.rstrip().endswith("\\"):
            break
    return "\n".join([*command, text]), True


def _starts(command: Command) -> bool:
    """Whether a command does more than say or set something."""
    return bool(command.words) and command.words[0] not in _SAYS and not command.words[0].startswith("((")


def _folders_of(script_file: Path | None) -> list[Path]:
    """The working directory, and those of the script upwards."""
    return [Path.cwd(), *(script_file.resolve().parents if script_file else ())]


def _yaml_of(flags: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """The YAML file that `--config-path` and `--config-name` name; None where there is none, or it is not here.

    A path behind `$(pwd)` or a variable is looked for from these folders.
    """
    given = dict(itertools.pairwise(flags)) | dict(f.split("=", 1) for f in flags if f.startswith("-") and "=" in f)
    name = given.get("--config-name", given.get("-cn"))
    folder = given.get("--config-path", given.get("-cp", ""))
    if name is None:
        return None
    name = ENV.sub(lambda found: found[2] or found[0], name)
    inner = ENV.sub("", folder).lstrip("/") if ENV.search(folder) else folder
    files = [place / inner / f"{name.removesuffix('.yaml')}.yaml" for place in folders]
    return next((file for file in files if file.is_file()), None)


def _migration(launch: Launch, library: Library, yaml: Path | None, rollout_mode: str) -> Migration:
    content = {} if yaml is None else read_yaml(yaml) or {}
    elsewhere = yaml is None and bool(launch.flags)
    overrides, instead, same = (
        with_counterparts(launch.overrides, content, launch.dropped, rollout_mode, None if elsewhere else "vllm")
        if library == "verl"
        else (list(launch.overrides), [], {})
    )
    _, before = normalize_overrides([w for w in overrides if parses(w)])
    named = {item.key for item in before.items} | {item.alias for item in before.items}
    if yaml is not None:
        _, of_file = normalize_tree({k: v for k, v in content.items() if k not in ("defaults", "hydra")}, str(yaml))
        named |= {item.key for item in of_file.items}
    added = _unsaid(launch, library, named, yaml)
    lines, outcome = normalize_overrides([*overrides, *added])
    found = Migration(library, launch.env, launch.wrapper, launch.flags, [_plain(line) for line in lines])
    found.functions = launch.functions
    found.refused = _once([*map(_text, launch.refused), *(_text(p.text) for p in outcome.problems)])
    dropped = [n for n in outcome.notes if "has nothing to set: " in n or n.endswith("have nothing to set here")]
    dropped += [note for note in outcome.notes if note.endswith("has nothing to set here")]
    same_with = [note for note in outcome.notes if _ALSO.search(note)]
    found.added |= {m["word"]: m["why"] for note in same_with if (m := _ALSO.search(note))}
    found.changed = [
        *map(_text, launch.changed),
        *instead,
        *(_text(n) for n in outcome.notes if n not in dropped and n not in same_with),
    ]
    found.dropped = [*map(_text, launch.dropped), *(_text(n).replace(" has nothing to set: ", ": ") for n in dropped)]
    by_alias = {word.partition("=")[0].lstrip("+"): why for word, why in {**same, **added}.items()}
    values = {_key(line): line for line in found.overrides}
    for item in outcome.items:
        if item.alias in by_alias and item.key in values:
            found.added[values[item.key]] = by_alias[item.alias]
    found.notes = [*map(_text, launch.notes), *_by_hand(library, outcome.items), *_from_outside(found)]
    if not found.refused:
        found.refused = _composing(found, yaml)
    return found


def _unsaid(launch: Launch, library: Library, named: set[str], yaml: Path | None) -> dict[str, str]:
    """Overrides for what the other library does where its command says nothing -> why."""
    words = [word.partition(" # ")[::2] for word in launch.added]
    if library != "verl":  # slime has SGLang; ms-swift's trainer samples by itself where it has no vLLM
        words.append(("actor_rollout_ref.rollout.name=sglang", "the engine for real work"))
    if library == "verl" and (yaml is not None or not launch.flags):
        shown = {key: "null" if value is None else str(value) for key, value in VERL_DEFAULTS.items()}
        ranks = next((w.partition("=")[2] for w in launch.overrides if w.startswith("trainer.n_gpus_per_node=")), "8")
        if ranks.isdigit() and int(ranks) % VERL_DEFAULTS[_TENSOR_RANKS]:  # there it would not start
            del shown[_TENSOR_RANKS]
        # Under verl's name it also means Ray workers.
        shown["trainer.n_gpus_per_node"] = shown.pop("trainer.n_workers_per_node")
        words += [(f"{key}={value}", "verl's default") for key, value in shown.items()]
    named = named | ({"trainer.n_gpus_per_node"} if "trainer.n_workers_per_node" in named else set())
    return {word: why for word, why in words if word.partition("=")[0] not in named}


def _by_hand(library: Library, items: Sequence[object]) -> list[str]:
    keys = {item.key: item.value for item in items}  # type: ignore[attr-defined]
    given = {key: keys[key] if isinstance(keys[key], list) else [keys[key]] for key in _FILES[library] if keys.get(key)}
    named = {key: files for key, files in given.items() if any("." in str(file) for file in files)}
    notes = [_text(f"{', '.join(files)}: {_FILES[library][key]}") for key, files in named.items()]
    for key, what in (("actor_rollout_ref.model.path", "model"), ("data.train_files", "training data")):
        if not keys.get(key):
            notes.append(f"the command names no {what}: add {key}=...; without it the default task's is used")
    return notes


def _once(refused: Sequence[str]) -> list[str]:
    """One line for all keys that are refused for the same reason."""
    keys: dict[str, list[str]] = {}
    for line in refused:
        what, _, why = line.partition(" is refused: ")
        keys.setdefault(why or line, []).append(what)
    return [
        why if what == [why] else f"{what[0]}{f' (and {len(what) - 1} more)' if what[1:] else ''} is refused: {why}"
        for why, what in keys.items()
    ]


def _from_outside(found: Migration) -> list[str]:
    """Variables that the script reads and does not set."""
    names = {m[1] for word in found.overrides for m in ENV.finditer(word) if m[2] is None and shell_text(m[1]) is None}
    wanted = sorted(names - found.env.keys() - {"HOME", "USER", "PWD", "HOSTNAME"})
    return [f"{', '.join(f'${name}' for name in wanted)}: not set by the script; set it before"] if wanted else []


def _composing(found: Migration, yaml: Path | None) -> list[str]:
    """What only the whole configuration shows; a variable that is not set here has a number meanwhile."""
    if yaml is None and any(f.startswith("-") for f in found.flags):
        found.notes.append("the YAML file that the command names is not here: run it with --cfg job where it is")
        return []
    words = [ENV.sub(lambda m: m.group(2) or "1", word) for word in found.overrides]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # what is to be said of the command stands in the report
            compose(words, yaml.stem if yaml else None, yaml.parent if yaml else None)
    except VerlMTError as error:
        lines = [line.removeprefix("  - ") for line in str(error).splitlines()]
        problems = [_text(line) for line in lines if not line.endswith("problems in the configuration:")]
        unknown = {line: _unknown_in(line, found.overrides) for line in problems}
        found.notes += dict.fromkeys(note for notes in unknown.values() for note in notes)
        return [line for line, notes in unknown.items() if not notes]
    return []


def _unknown_in(problem: str, overrides: Sequence[str]) -> list[str]:
    """A line for each key that a problem names and whose value only the shell knows: the number that stood in for it is
    nothing to blame."""
    lines = []
    for word in overrides:
        names = [m[1] for m in ENV.finditer(word.partition("=")[2]) if m[2] is None]
        if names and re.search(rf"(?<![\w.]){re.escape(_key(word))}(?!\.?\w)", problem):
            shown = ", ".join(dict.fromkeys(shell_text(name) or f"${name}" for name in names))
            lines.append(f"{_key(word)} depends on {shown}: it is checked when the run starts")
    return lines


def _plain(line: str) -> str:
    """Without Hydra's quotes where the value is read the same without them."""
    key, _, value = line.partition("=")
    short = value.replace("'", "").replace(", ", ",")
    if short != value and re.fullmatch(r"\[?[\w./:@%+,-]+\]?", ENV.sub("x", short)):
        bare = f"{key}={short}"
        try:
            parse = OverridesParser.create().parse_override
            if parse(bare).value() == parse(line).value():
                return bare
        except HydraException:
            pass
    return line


def _key(line: str) -> str:
    return line.partition("=")[0].lstrip("+")


def _text(text: str) -> str:
    return for_shell(text.replace(f" ({COMMAND_LINE})", ""))


def _for_shell(word: str) -> str:
    """Quoted; `${oc.env:NAME}` is the shell's variable again."""
    if not ENV.search(word):
        return shlex.quote(word)
    parts, place = [], 0
    for found in ENV.finditer(word):
        parts.append(re.sub(r'([\\"$`])', r"\\\1", word[place : found.start()]))
        name, default = found.groups()
        if (computed := shell_text(name)) is not None:
            parts.append(computed)
            place = found.end()
            continue
        parts.append(f"${name}" if default is None else f"${{{name}:-{default}}}")
        place = found.end()
    parts.append(re.sub(r'([\\"$`])', r"\\\1", word[place:]))
    # A letter behind `$NAME` would belong to the name.
    for k, part in enumerate(parts[:-1]):
        if re.fullmatch(r"\$\w+", part) and re.match(r"\w", parts[k + 1]):
            parts[k] = f"${{{part[1:]}}}"
    return '"' + "".join(parts) + '"'


def find_launch(script: Script) -> Launch:
    """The launch commands of a script; several (a rollout server and its trainer) become one.

    A script without one has `framework` None.
    """
    launch = Launch(notes=list(script.notes))
    _take_env(script.exported, launch)  # before the commands, which count ranks
    trained: list[list[str]] = []
    for command in script.commands:
        _take(command, launch, trained)
    if launch.cut_at:
        launch.refused = [launch.cut_at]
    names = re.findall(r"oc\.env:(\w+)", " ".join([*launch.overrides, *launch.flags, *launch.env.values()]))
    computed = " ".join(text for name in names if (text := shell_text(name)))
    launch.functions = [body for name, body in script.functions.items() if re.search(rf"\b{name}\b", computed)]
    if launch.wants_server and "swift rollout" not in launch.started:
        launch.refused.append(
            "--vllm_mode server: a `swift rollout` command elsewhere starts the server, and says which scheduler runs "
            "there; give both commands in one text"
        )
    return launch


def _take(command: Command, launch: Launch, trained: list[list[str]]) -> None:
    """Take over one command.

    Args:
        trained: words of the training command that was read before; this one's are added.
    """
    words = [w for w in command.words if w not in ("nohup", "exec", "time", "&")]
    if launch.framework == "slime" and words and re.match(r"--[a-z]", words[0]):
        launch.cut_at = launch.cut_at or (
            f"the command ends before {words[0]}: the line above lacks its backslash, so that the script itself starts "
            "without what follows"
        )
        return
    wrapper: list[str] = []
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        cut = words.index("--") + 1
        wrapper, words = words[:cut], words[cut:]
    if words[:2] == ["uv", "run"]:
        words = words[next((k for k, word in enumerate(words) if _PYTHON.fullmatch(word)), 0) :]
    found = _which(words)
    if found is None:
        return
    library, name, rest = found
    if name in _OTHERS or (library == "verl" and name not in MAINS):
        launch.refused.append(f"{name}: {_OTHERS.get(name) or f'only {MAINS[0]} and {MAINS[1]} have a counterpart'}")
        return
    if library == "slime" and not any(word.startswith("--") for word in rest):
        launch.refused.append(
            f"python {' '.join([name, *rest[:3]])}: no word is a flag of slime; it is another program of that name"
        )
        return
    if launch.framework not in (None, library):
        launch.refused.append(f"{name}: the script starts {launch.framework} too; give one command at a time")
        return
    launch.framework = library
    if name != "swift rollout":
        if trained:
            _again(name, [name, *rest], trained[0], launch)
            return
        trained.append([name, *rest])
    launch.started.append(name)
    launch.wrapper = wrapper or launch.wrapper
    _take_env(command.env | _of_torchrun(words), launch)
    if library == "slime":
        first = next(place for place, word in enumerate(rest) if word.startswith("--"))
        launch.refused += [f"{word}: it stands before the flags, and slime reads no such word" for word in rest[:first]]
        rest = rest[first:]
    rest = _with_values(rest, library, launch)
    {"verl": read_verl, "ms-swift": read_swift, "slime": read_slime}[library](rest, name, launch)


def _again(name: str, words: list[str], before: list[str], launch: Launch) -> None:
    """A second training command: that of a further machine, or a separate run."""
    first, second = _of_any_machine(before), _of_any_machine(words)
    if first == second:
        launch.notes.append(f"{name}: a further machine's command was left out; Ray starts its ranks")
        return
    own = [" ".join([w for w in some if w not in other][:3]) for some, other in ((first, second), (second, first))]
    differ = ", then ".join(text or "the same with fewer words" for text in own)
    launch.refused.append(f"the script starts training twice ({differ}); give one command at a time")


def _of_any_machine(words: Sequence[str]) -> list[str]:
    """The words without those that say which machine of a run this is."""
    kept, after = [], ""
    for word in words:
        flag = word.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if flag not in _OF_MACHINE and after not in _OF_MACHINE:
            kept.append(word)
        after = flag if "=" not in word else ""
    return kept


def _with_values(words: list[str], library: Library, launch: Launch) -> list[str]:
    """The words without flags that lack their value, which are refused: as `True` they would be blamed for a type."""
    if library == "verl":
        return words
    rows, known, bare = families()[library].rows, leaves(), set[str]()
    for flag, values in by_flag(words):
        key = flag.removeprefix("--").replace("-", "_")
        row = rows.get(key)
        if values or row is None or row.meaning != "renamed" or row.switch or key in _TRUE_ALONE:
            continue
        # ms-swift's table does not mark booleans: they are those of our keys, and a converter may take one.
        leaf = known.get(row.to)
        if library == "ms-swift" and (row.convert or leaf is None or isinstance(leaf.default, bool)):
            continue
        bare.add(flag)
        launch.refused.append(f"{flag} has no value")
    kept, leave = list[str](), False
    for word in words:  # another value of the same flag goes with it, lest it be taken for the flag's before it
        leave = word.partition("=")[0] in bare if word.startswith("--") else leave
        kept += [] if leave else [word]
    return kept


def _which(words: Sequence[str]) -> tuple[Library, str, list[str]] | None:
    """(library, what is started, its words)."""
    if not words:
        return None
    if re.fullmatch(r"(?:.*/)?(?:swift|megatron)", words[0]) and len(words) > 1:
        name = " ".join([words[0].rpartition("/")[2], words[1]])
        return "ms-swift", name, list(words[2:])
    script = next((k for k, word in enumerate(words) if re.fullmatch(r"(?:.*/)?swift/cli/\w+\.py", word)), None)
    if script is not None:
        return "ms-swift", f"swift {Path(words[script]).stem}", list(words[script + 1 :])
    if not _PYTHON.fullmatch(words[0]):
        return None
    rest = [w for w in words[1:] if w not in ("-u", "-O")]
    if rest[:1] == ["-m"] and len(rest) > 1:
        started = re.match(r"verl\.|recipe\.|slime\.", rest[1])
        return ("verl", rest[1], rest[2:]) if started else None
    if rest and re.fullmatch(r"(?:.*/)?train(?:_async)?\.py", rest[0]):
        return "slime", rest[0].rpartition("/")[2], rest[1:]
    return None


def _of_torchrun(words: Sequence[str]) -> dict[str, str]:
    """What `torchrun` says of ranks, as the variables that say the same."""
    if not words or Path(words[0]).name != "torchrun":
        return {}
    names = {"--nproc_per_node": "NPROC_PER_NODE", "--nproc-per-node": "NPROC_PER_NODE", "--nnodes": "NNODES"}
    flags = [word.split("=", 1) if "=" in word else [word, after] for word, after in zip(words, [*words[1:], ""])]
    return {names[flag]: value for flag, value in flags if flag in names}


def _take_env(env: dict[str, str], launch: Launch) -> None:
    for name, value in env.items():
        reason = next((why for prefix, why in _ENV_DROPPED.items() if name.startswith(prefix)), None)
        if name == "NPROC_PER_NODE":
            launch.added.append(f"trainer.n_workers_per_node={value} # NPROC_PER_NODE")
            if value != "1":
                launch.added.append("trainer.placement=ray # several ranks need it")
        elif name == "NNODES" and (value.isdigit() or launch.framework == "ms-swift"):
            launch.added.append(f"trainer.nnodes={value} # NNODES")
        elif reason is not None:
            launch.dropped.append(f"{name}: {reason}")
        elif is_secret_name(name):
            launch.dropped.append(f"{name}: a secret; set it in the environment that the run starts in")
        else:
            launch.env[name] = value
