"""`python -m verl_mt.migrate`: a launch command of verl, ms-swift or slime as one of ours.

What it cannot carry over it lists with the reason; nothing is left out silently. The keys and reasons are those of the
configuration itself: both read the tables of `verl_mt/spellings/`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pyarrow import parquet

from verl_mt.config.compose import compose
from verl_mt.config.hydra_source import read_yaml
from verl_mt.config.normalize import COMMAND_LINE, normalize_overrides, normalize_tree
from verl_mt.errors import ConfigError, VerlMTError
from verl_mt.migrate.launchers import VERL_DEFAULTS, Launch, Library, find_launch, parses
from verl_mt.migrate.shell import read_script, shell_text

__all__ = ["Migration", "main", "migrate"]

_ENV = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")
_ACTOR = "actor_rollout_ref.actor"
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
    text, taken = _with_commented_rollout(text)
    script = read_script(text, script_file)
    if taken:
        script.note("the `swift rollout` command stands in a comment of the script; what it says was taken over")
    launch = find_launch(script)
    if launch.framework is None:
        if launch.refused:
            raise ConfigError("; ".join(launch.refused))
        started = ", ".join(sorted({c.words[0] for c in script.commands if c.words})) or "nothing"
        raise ConfigError(
            "no launch command of verl (python -m verl.trainer.main_ppo), ms-swift (swift rlhf, swift rollout) or "
            f"slime (python train.py) found; the text starts {started}"
        )
    return _migration(launch, launch.framework, _yaml_of(launch.flags, script_file))


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
    command = []
    for line in lines[start:]:
        command.append(re.sub(r"^\s*#\s?", "", line))
        if not line.rstrip().endswith("\\"):
            break
    return "\n".join([*command, text]), True


def _yaml_of(flags: Sequence[str], script_file: Path | None) -> Path | None:
    """The YAML file that `--config-path` and `--config-name` name; None where there is none, or it is not here.

    A path behind `$(pwd)` or a variable is looked for from the working directory, and from the script upwards.
    """
    given = dict(itertools.pairwise(flags)) | dict(f.split("=", 1) for f in flags if f.startswith("-") and "=" in f)
    name = given.get("--config-name", given.get("-cn"))
    folder = given.get("--config-path", given.get("-cp", ""))
    if name is None:
        return None
    places = [Path.cwd(), *(script_file.resolve().parents if script_file else ())]
    inner = _ENV.sub("", folder).lstrip("/") if _ENV.search(folder) else folder
    files = [place / inner / f"{name.removesuffix('.yaml')}.yaml" for place in places]
    return next((file for file in files if file.is_file()), None)


def _migration(launch: Launch, library: Library, yaml: Path | None) -> Migration:
    content = {} if yaml is None else read_yaml(yaml) or {}
    overrides, instead = _instead(launch.overrides, content) if library == "verl" else (list(launch.overrides), [])
    _, before = normalize_overrides([w for w in overrides if parses(w)])
    named = {item.key for item in before.items} | {item.spelling for item in before.items}
    if yaml is not None:
        _, of_file = normalize_tree({k: v for k, v in content.items() if k not in ("defaults", "hydra")}, str(yaml))
        named |= {item.key for item in of_file.items}
    added = _unsaid(launch, library, named, yaml)
    lines, outcome = normalize_overrides([*overrides, *added])
    found = Migration(library, launch.env, launch.wrapper, launch.flags, [_plain(line) for line in lines])
    found.functions = launch.functions
    found.refused = [*launch.refused, *(_text(p.text) for p in outcome.problems)]
    dropped = [note for note in outcome.notes if "has nothing to set: " in note]
    ranks = [note for note in outcome.notes if note.endswith("also trainer.placement=ray: several ranks need it")]
    if ranks:
        found.added["trainer.placement=ray"] = "several ranks need it"
    found.changed = [*instead, *(_text(n) for n in outcome.notes if n not in dropped and n not in ranks)]
    found.dropped = [*launch.dropped, *(_text(n).replace(" has nothing to set", "") for n in dropped)]
    by_spelling = {word.partition("=")[0].lstrip("+"): why for word, why in added.items()}
    values = {_key(line): line for line in found.overrides}
    for item in outcome.items:
        if item.spelling in by_spelling and item.key in values:
            found.added[values[item.key]] = by_spelling[item.spelling]
    found.notes = [*launch.notes, *_by_hand(library, outcome.items)]
    if not found.refused:
        found.refused = _composing(found, yaml)
    return found


def _instead(words: Sequence[str], content: dict[str, Any]) -> tuple[list[str], list[str]]:
    """verl's words with those that have a counterpart of another name put in their place, and what that changes.

    Args:
        content: what the YAML file sets that the command names.
    """
    kept, said = [], []
    values = {**_flat(content), **{key.lstrip("+"): text for key, _, text in (w.partition("=") for w in words)}}
    if "actor_rollout_ref.rollout.over_sample_rate" in values:
        rate = str(values["actor_rollout_ref.rollout.over_sample_rate"])
        if not (_is_number(rate) and float(rate) == 0):
            said.append(
                f"actor_rollout_ref.rollout.over_sample_rate={rate}: every prompt that was issued is trained here; "
                "there the slowest share of a step is left out"
            )
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "actor_rollout_ref.rollout.name" and value.startswith("vllm"):
            kept.append(f"{key}=sglang")
            said.append(
                f"{key}={value} -> sglang: the engine for real work here; it samples, nothing that is learned changes"
            )
        elif key == "actor_rollout_ref.rollout.trace.backend" and value in ("mlflow", "weave"):
            said.append(f"{key}={value}: not offered, left out; otel sends spans to any collector of OpenTelemetry")
        elif key == "actor_rollout_ref.rollout.trace.token2text":
            said.append(f"{key}={value}: left out; the texts are in rollouts/*.jsonl")
        elif key == "actor_rollout_ref.rollout.over_sample_rate" and _is_number(value):
            continue
        elif key.endswith(".optim.lr_warmup_steps_ratio") and _is_number(value) and (known := _num_steps(values)):
            total, how = known
            updates = _updates(values, key.partition(".optim.")[0])
            steps = int(float(value) * total) * updates
            kept.append(f"{key.removesuffix('_ratio')}={steps}")
            each = f", {updates} updates each" if updates > 1 else ""
            said.append(f"{word} -> {steps} optimizer steps: the ratio of {total} steps ({how}){each}")
        elif key == "trainer.device" and value == "npu":
            said.append(f"{word}: left out; the device is found where the run starts")
        else:
            kept.append(word)
    return kept, said


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def _whole(values: dict[str, Any], key: str, default: int) -> int | None:
    text = str(values.get(key, default))
    return int(text) if text.isdigit() else None


def _num_steps(values: dict[str, Any]) -> tuple[int, str] | None:
    """How many steps verl trains, and from what that is known; None where it is not."""
    total = str(values.get("trainer.total_training_steps"))
    if total.isdigit():
        return int(total), f"trainer.total_training_steps={total}"
    epochs, batch = _whole(values, "trainer.total_epochs", 30), _whole(values, "data.train_batch_size", 1024)
    rows = _num_rows(values)
    if not epochs or not batch or rows is None or rows < batch:
        return None
    return epochs * (rows // batch), f"{epochs} epochs of {rows} rows by {batch}; prompts that are too long are in it"


def _updates(values: dict[str, Any], part: str) -> int:
    """Optimizer steps of one step: verl counts its warm-up in steps."""
    batch = _whole(values, "data.train_batch_size", 1024)
    mini = _whole(values, f"{part}.ppo_mini_batch_size", _whole(values, f"{_ACTOR}.ppo_mini_batch_size", 256) or 256)
    epochs = _whole(values, f"{part}.ppo_epochs", 1)
    return max(1, batch // mini) * epochs if batch and mini and epochs else 1


def _num_rows(values: dict[str, Any]) -> int | None:
    """Training rows, where the files are on this machine or the command says how many it takes."""
    files = values.get("data.train_files")
    if isinstance(files, str):
        text = _ENV.sub(lambda m: os.environ.get(m[1]) or m[2] or m[0], files)
        try:
            files = OverridesParser.create().parse_override(f"files={text}").value()
        except HydraException:
            return None
    paths = [Path(str(name)).expanduser() for name in (files if isinstance(files, list) else [files])]
    if not all(path.is_file() and path.suffix in (".parquet", ".jsonl") for path in paths):
        return None
    rows = sum(
        parquet.read_metadata(path).num_rows
        if path.suffix == ".parquet"
        else sum(bool(line.strip()) for line in path.read_bytes().splitlines())
        for path in paths
    )
    most = _whole(values, "data.train_max_samples", -1)
    return rows if most is None else min(rows, most)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[\d.]+(?:e-?\d+)?", text) is not None


def _unsaid(launch: Launch, library: Library, named: set[str], yaml: Path | None) -> dict[str, str]:
    """Overrides for what the other library does where its command says nothing -> why."""
    words = [word.partition(" # ")[::2] for word in launch.added]
    if library != "verl":  # they use one without being told
        words.append(("actor_rollout_ref.rollout.name=sglang", "the engine for real work"))
    if library == "verl" and (yaml is not None or not launch.flags):
        shown = {key: "null" if value is None else str(value) for key, value in VERL_DEFAULTS.items()}
        # In verl's spelling it also means Ray workers.
        shown["actor_rollout_ref.rollout.name"] = "sglang"  # vLLM there
        shown["trainer.n_gpus_per_node"] = shown.pop("trainer.n_workers_per_node")
        words += [(f"{key}={value}", "verl's default") for key, value in shown.items()]
    named = named | ({"trainer.n_gpus_per_node"} if "trainer.n_workers_per_node" in named else set())
    return {word: why for word, why in words if word.partition("=")[0] not in named}


def _by_hand(library: Library, items: Sequence[object]) -> list[str]:
    keys = {item.key: item.value for item in items}  # type: ignore[attr-defined]
    named = {key: keys[key] if isinstance(keys[key], list) else [keys[key]] for key in _FILES[library] if keys.get(key)}
    notes = [_text(f"{', '.join(files)}: {_FILES[library][key]}") for key, files in named.items()]
    for key, what in (("actor_rollout_ref.model.path", "model"), ("data.train_files", "training data")):
        if not keys.get(key):
            notes.append(f"the command names no {what}: add {key}=...; without it the default task's is used")
    return notes


def _composing(found: Migration, yaml: Path | None) -> list[str]:
    """What only the whole configuration shows; a variable that is not set here is given a number for the while."""
    if yaml is None and any(f.startswith("-") for f in found.flags):
        found.notes.append("the YAML file that the command names is not here: run it with --cfg job where it is")
        return []
    words = [_ENV.sub(lambda m: m.group(2) or "1", word) for word in found.overrides]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # what is to be said of the command stands in the report
            compose(words, yaml.stem if yaml else None, yaml.parent if yaml else None)
    except VerlMTError as error:
        lines = [line.removeprefix("  - ") for line in str(error).splitlines()]
        return [_text(line) for line in lines if not line.endswith("problems in the configuration:")]
    return []


def _plain(line: str) -> str:
    """Without Hydra's quotes where the value is read the same without them."""
    key, _, value = line.partition("=")
    short = value.replace("'", "").replace(", ", ",")
    if short != value and re.fullmatch(r"\[?[\w./:@%+,-]+\]?", _ENV.sub("x", short)):
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
    return _ENV.sub(lambda m: shell_text(m.group(1)) or f"${m.group(1)}", text.replace(f" ({COMMAND_LINE})", ""))


def _for_shell(word: str) -> str:
    """Quoted; `${oc.env:NAME}` is the shell's variable again."""
    if not _ENV.search(word):
        return shlex.quote(word)
    parts, place = [], 0
    for found in _ENV.finditer(word):
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
