"""docs/compatibility.md: results for every file of verl, ms-swift and slime that the tests have.

    python tests/peers/write_compatibility.py            # writes the page
    python tests/peers/write_compatibility.py --print    # prints it

A verdict is what happens when the file is tried: Python files are imported and settings are loaded after the documented
replacement, launch scripts go through `python -m verl_mt.migrate`, whole configurations are composed. Only that a file
trained, or ran, is taken from `PROVED`, which names the test that shows it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import logging
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conformance
from conformance import PEERS, Verdict

from verl_mt.config.compose import compose
from verl_mt.data.dataset import read_rows
from verl_mt.errors import VerlMTError
from verl_mt.extensions.compat.migrate import main as migrate
from verl_mt.extensions.toolbox.mcp_client.servers import McpEntry, read_servers
from verl_mt.interactions.session import load_interactions
from verl_mt.tools.registry import load_tools

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "compatibility.md"
LIBRARIES = ("verl", "ms-swift", "slime")
WHOLE = "verl/trainer/config"
MULTITURN = "examples/sglang_multiturn"
SWIFT, SLIME = "test_swift_files.py", "test_slime_files.py"
PROGRAMS = {
    "evaluation.yaml": "verl.trainer.main_eval",
    "generation.yaml": "verl.trainer.main_generation",
    "sft_trainer.yaml": "verl.trainer.fsdp_sft_trainer",
    "sft_trainer_engine.yaml": "verl.trainer.sft_trainer",
}
"""Whole configurations of programs other than main_ppo."""
COMMITS = {"ms-swift 2026-08": "3602360", "slime 2026-08": "624b824", "slime 2026-06": "3fd7927"}
"""Revision -> its commit; verl's revisions are tags."""

NOT_INSTALLED = "is not installed where this page was made"
"""In the reason of a file that imports a package which is none of ours: elsewhere it may load."""

Proof = tuple[str, str, str]
"""(verdict, file::test below tests/peers, what is said about it)."""
SWAPPED = "model, sizes, engine and placement swapped by overrides"


def _verl_proofs(revision: str) -> dict[tuple[str, str, str], Proof]:
    tool = "test_verl_training.py::test_gsm8k_with_its_tool_trains_two_steps_with_the_tiny_model"
    talk = "test_verl_training.py::test_gsm8k_with_its_interaction_trains_two_steps_with_the_tiny_model"
    rows = {
        f"{MULTITURN}/run_qwen2.5-3b_gsm8k_multiturn.sh": (
            "trained two steps",
            tool,
            f"{SWAPPED}; the model was shown beforehand how the tool is called",
        ),
        f"{MULTITURN}/config/gsm8k_multiturn_grpo.yaml": ("trained two steps", tool, ""),
        f"{MULTITURN}/config/tool_config/gsm8k_tool_config.yaml": ("trained two steps", tool, ""),
        f"{MULTITURN}/run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh": ("trained two steps", talk, SWAPPED),
        f"{MULTITURN}/config/gsm8k_multiturn_grpo_w_interaction.yaml": ("trained two steps", talk, ""),
        f"{MULTITURN}/config/interaction_config/gsm8k_interaction_config.yaml": ("trained two steps", talk, ""),
        f"{MULTITURN}/run_qwen0.5b_gsm8k_multiturn_curriculum.sh": (
            "runs after a named edit",
            "test_verl_training.py::test_the_curriculum_trains_two_steps_with_a_sampler_of_ours_in_its_place",
            f"`data.sampler` names a `verl_mt.data.sampler.RowSampler` instead of verl's class; two steps, {SWAPPED}",
        ),
    }
    own = "test_verl_files.py::test_its_own_tests_of_interactions_pass_or_have_a_reason"
    for name in ("test_gsm8k_interaction", "test_interaction_registry"):
        rows[f"tests/interactions/{name}.py"] = ("runs", own, "")
    return {("verl", revision, file): proof for file, proof in rows.items()}


def _other_proofs() -> dict[tuple[str, str, str], Proof]:
    calls = f"{SWIFT}::test_its_tool_call_scheduler_trains_two_steps_with_the_tiny_model"
    lake = f"{SWIFT}::test_its_frozen_lake_trains_two_steps_with_the_tiny_model"
    search = f"{SLIME}::test_search_r1_trains_two_steps_with_the_tiny_model"
    team = f"{SLIME}::test_multi_agent_trains_two_steps_with_the_tiny_model"
    lakes = "examples/megatron/grpo/multi_turn"
    rows = {
        ("ms-swift", "2026-08", "examples/train/grpo/plugin/plugin.py"): (calls, "`ToolCallScheduler`, `CountdownORM`"),
        ("ms-swift", "2026-08", f"{lakes}/frozen_lake_plugin.py"): (lake, "its environment and its reward"),
    }
    for revision in ("2026-06", "2026-08"):
        for name in ("generate_with_search.py", "qa_em_format.py"):
            said = "searches answered by a server of the test" if name.startswith("generate") else ""
            rows["slime", revision, f"examples/search-r1/{name}"] = (search, said)
    for name in ("rollout_with_multi_agents.py", "agent_system.py", "prompts.py"):
        rows["slime", "2026-08", f"examples/multi_agent/{name}"] = (team, "")
    return {place: ("trained two steps", test, said) for place, (test, said) in rows.items()}


PROVED: dict[tuple[str, str, str], Proof] = {
    **_verl_proofs("v0.5.0"),
    **_verl_proofs("v0.6.1"),
    **_other_proofs(),
}
"""(library, revision, file) -> what a test shows about it, beyond that it loads or composes."""


def marked_slow(file: Path) -> dict[str, bool]:
    """Test functions of a file -> whether they are marked slow."""
    body = ast.parse(file.read_text()).body
    whole = any(isinstance(node, ast.Assign) and ast.unparse(node) == "pytestmark = pytest.mark.slow" for node in body)
    found = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {n.name: whole or any("mark.slow" in ast.unparse(d) for d in n.decorator_list) for n in found}


def shortened(text: str, *folders: Path) -> str:
    """A reason for one cell of a table: no folders of this machine, the first problem only, at most 200 characters."""
    for folder in folders:
        text = text.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
    problems = re.findall(r"(?m)^  - (.*(?:\n    .*)*)", text)
    words = " ".join((problems[0] if problems else text).partition(" Config search path")[0].split())
    words = re.sub(r" \([^()]*\.yaml\)", "", words)
    if len(words) > 200:
        words = f"{words[:200].rpartition(' ')[0]} ..."
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return words.replace("|", "\\|").replace("<", "&lt;").replace("`", "'") + more


def _quietly(action: Callable[[], object]) -> str:
    """What it raises, as text; "" where it ends well. What it prints is not shown."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            action()
        except ModuleNotFoundError as error:
            return f"it imports {(error.name or '').partition('.')[0]}, which {NOT_INSTALLED}"
        except SystemExit as error:
            if error.code != 2:  # 2: a program asks for its arguments, after all its imports
                return f"it ends with status {error.code}"
        except Exception as error:  # whatever a file raises is its verdict
            return str(error) if isinstance(error, VerlMTError) else f"{type(error).__name__}: {error}"
    return ""


def _missing_names(nodes: Iterable[ast.AST]) -> str:
    """The first import of ours among statements of a replaced file that has no counterpart; "" where all have one."""
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("verl_mt"):
            continue
        module = node.module or ""
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("verl_mt"):
                continue
            return f"no counterpart of {module.replace('verl_mt', 'verl', 1)}"
        for name in (alias.name for alias in node.names):
            if not hasattr(found, name) and importlib.util.find_spec(f"{module}.{name}") is None:
                return f"no counterpart of {name} from {module.replace('verl_mt', 'verl', 1)}"
    return ""


def try_python(library: str, revision: Path, file: Path) -> tuple[str, str]:
    """Import a file after the documented replacement; an example with its folder, a file of a library alone."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        inside = file.relative_to(revision).parts
        if library == "slime":
            conformance.copy_replaced(library, file.parent, root / inside[0])
            (root / inside[0] / "__init__.py").write_text("")
            copy = root / inside[0] / file.parent.name / file.name
        else:
            copy = conformance.copy_replaced(library, file, root)
        package = (copy.parent / "__init__.py").is_file() and library == "slime"
        name = ".".join(copy.relative_to(root).with_suffix("").parts) if package else f"theirs_{copy.stem.strip('_')}"

        def load() -> None:
            with _on_path(root), conformance.imported(copy, name):
                pass

        tree = ast.parse(copy.read_text())
        # asked first, so that a package which is not installed does not hide it
        if reason := _missing_names(tree.body) or _quietly(load):
            return "refused", shortened(reason, root)
        later = _missing_names(ast.walk(tree))
        return "loads", f"inside a function: {later}" if later else ""


@contextlib.contextmanager
def _on_path(root: Path) -> Iterator[None]:
    """A folder that packages are imported from; what was imported from it is forgotten."""
    hidden = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "examples"}
    argv, sys.argv = sys.argv, [str(root)]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        sys.argv = argv
        for name in [n for n in sys.modules if n.partition(".")[0] == "examples"]:
            del sys.modules[name]
        sys.modules.update(hidden)


def try_script(file: Path) -> tuple[str, str]:
    """A launch script through `python -m verl_mt.migrate`, by its exit status and the first thing that it lists."""
    said, failed = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
            status = migrate([str(file)])
    except Exception as error:  # a fault of ours belongs on the page as well
        return "refused", shortened(f"python -m verl_mt.migrate fails: {type(error).__name__}: {error}", PEERS)
    if status == 2:
        return "refused", shortened(failed.getvalue().strip().removeprefix("error: "), PEERS)
    title = {0: "", 1: "# REFUSED, and why:", 3: "# carried over with another meaning:"}[status]
    block = said.getvalue().partition(title)[2].split("\n\n")[0] if title else ""
    lines = [f"  - {line.removeprefix('#').strip()}" for line in block.splitlines() if line.startswith("#   ")]
    first = shortened("\n".join(lines), PEERS)
    if status == 1:
        return "refused", first
    engine = re.findall(r"actor_rollout_ref\.rollout\.name=\W*(\w+)", said.getvalue().partition("\n\n#")[0])[-1]
    return "composes", "; ".join(
        [f"{SAMPLES}{ENGINES[engine]}", *([f"with another meaning: {first}"] if first else [])]
    )


def try_whole(file: Path) -> tuple[str, str]:
    """A YAML file that holds a whole configuration, composed."""
    reason = _quietly(lambda: compose([], file.stem, file.parent))
    if reason and (program := PROGRAMS.get(file.name)):
        return "refused", f"of {program}, not of main_ppo: {shortened(reason, PEERS)}"
    return ("refused", shortened(reason, PEERS)) if reason else ("composes", "")


def parts_of(config: Path, whole: str) -> set[Path]:
    """The files below a folder of settings without which a whole configuration comes out otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(config, Path(folder) / "config"))
        before = _quietly(lambda: compose([], whole, copy))
        read = set()
        for part in sorted(copy.glob("*/*.yaml")):
            text = part.read_text()
            part.unlink()
            if _quietly(lambda: compose([], whole, copy)) != before:
                read.add(config / part.relative_to(copy))
            part.write_text(text)
        return read


def try_parts(config: Path) -> dict[Path, tuple[str, str]]:
    """The files of its configuration groups: each counts as what the whole configuration is that reads it."""
    verdicts: dict[Path, tuple[str, str]] = {}
    for whole in ("ppo_trainer", "ppo_megatron_trainer"):
        verdict = try_whole(config / f"{whole}.yaml")[0]
        said = ", which is refused" if verdict == "refused" else ""
        for part in parts_of(config, whole):
            verdicts.setdefault(part, (verdict, f"a part of {whole}.yaml{said}"))
    for part in config.glob("*/*.yaml"):
        verdicts.setdefault(part, ("refused", "neither ppo_trainer.yaml nor ppo_megatron_trainer.yaml reads it"))
    return verdicts


def try_settings(library: str, file: Path) -> tuple[str, str]:
    """A file that names tools, interactions or servers, loaded after the documented replacement."""
    with tempfile.TemporaryDirectory() as folder:
        copy = conformance.copy_replaced(library, file.parent, Path(folder)) / file.name
        if file.suffix == ".json":
            entry = McpEntry(mcp_servers_config_path=str(copy))
            reason = _quietly(lambda: read_servers(entry, beside=copy.parent))
        elif file.parent.name == "interaction_config":
            reason = _quietly(lambda: load_interactions(copy))
        else:
            reason = _quietly(lambda: load_tools(copy))
        return ("refused", shortened(reason, Path(folder) / file.parent.name)) if reason else ("loads", "")


def try_file(library: str, revision: Path, file: Path, parts: dict[Path, tuple[str, str]]) -> tuple[str, str] | None:
    """(verdict, reason) of a file; None for a text that nothing runs."""
    if file in parts:
        return parts[file]
    if file.suffix == ".py":
        return try_python(library, revision, file)
    if file.suffix == ".sh":
        return try_script(file)
    if file.parent.name in ("tool_config", "interaction_config"):
        return try_settings(library, file)
    if file.suffix == ".yaml":
        return try_whole(file)
    if file.suffix == ".jsonl":
        reason = _quietly(lambda: read_rows(file, "data.train_files"))
        return ("refused", shortened(reason, PEERS)) if reason else ("loads", "")
    return None


def own_tests(revision: str, file: Path) -> str:
    """How many of verl's own tests in a file pass here, and why the others do not."""
    from test_verl_files import EXPECTED_FAILURES

    names = re.findall(r"(?m)^    (?:async )?def (test_\w+)", file.read_text())
    reasons = Counter(why for (r, name), why in EXPECTED_FAILURES.items() if r == revision and name in names)
    passed = f"{len(names) - sum(reasons.values())} of its {len(names)} tests pass"
    return "; the others: ".join([passed, *reasons])


def judged(library: str, revision: Path) -> Iterator[Verdict]:
    """Verdicts of all files of a revision that something can run.

    Raises:
        ValueError: `PROVED` says more of a file that does not even load.
    """
    config = revision / WHOLE
    parts = try_parts(config) if config.is_dir() else {}
    for file in sorted(f for f in revision.rglob("*") if f.is_file()):
        inside = file.relative_to(revision).as_posix()
        tried = try_file(library, revision, file, parts)
        if tried is None:
            continue
        verdict, reason = tried
        if proof := PROVED.get((library, revision.name, inside)):
            if verdict == "refused":
                raise ValueError(f"{inside} of {revision.name} is refused ({reason}), and {proof[1]} is named for it")
            verdict = proof[0]
            reason = (
                own_tests(revision.name, file) if verdict == "runs" else "; ".join(filter(None, (proof[2], reason)))
            )
        yield Verdict(library, revision.name, inside, verdict, reason)


def verdicts() -> list[Verdict]:
    """All verdicts; each file is tried now."""
    logging.disable(logging.CRITICAL)
    return [
        v for library in LIBRARIES for revision in conformance.revisions(library) for v in judged(library, revision)
    ]


SAMPLES, ENGINES = "samples with ", {"sglang": "SGLang", "vllm": "vLLM"}

INTRO = """# Compatibility

Results for every file of verl, ms-swift and slime that the tests have. The files are tried as they are, but for the
replacement of import lines and class names that the migration pages document; nothing else is claimed anywhere. A
file that is not here has not been tried; licences and manuals, which nothing runs, are left out.
`python tests/peers/write_compatibility.py` tries them and makes this page, and a test keeps the two together.

| verdict | |
|---|---|
| loads | a Python file is imported, a file of tools, interactions, servers or rows is read |
| composes | the command that `migrate` makes of a script, or a YAML file: a whole configuration, or a part of one |
| runs | verl's own tests, run against verl_mt |
| trained two steps | on a CPU with the shipped 4 MB model and few rows, in a test of `tests/peers` |
| runs after a named edit | the same, after the edit that the last column names |
| refused | with one error; the last column has the first thing that it says |

"""


def page(found: list[Verdict]) -> str:
    """The page's text."""
    lines = ["| | files | " + " | ".join(conformance.VERDICTS) + " |", "|---|---|" + "---|" * len(conformance.VERDICTS)]
    revisions = list(dict.fromkeys((v.project, v.revision) for v in found))
    for library, revision in revisions:
        count = Counter(v.verdict for v in found if (v.project, v.revision) == (library, revision))
        cells = " | ".join(str(count[verdict] or "") for verdict in conformance.VERDICTS)
        lines.append(f"| {library} {revision} | {count.total()} | {cells} |")
    lines += [
        "",
        "Engines of the launch scripts that compose or ran:",
        "",
        "| | " + " | ".join(ENGINES.values()) + " |",
    ]
    lines.append("|---|" + "---|" * len(ENGINES))
    for library, revision in revisions:
        reasons = [v.reason for v in found if (v.project, v.revision) == (library, revision)]
        counts = [sum(f"{SAMPLES}{engine}" in reason for reason in reasons) for engine in ENGINES.values()]
        if any(counts):
            lines.append(f"| {library} {revision} | {' | '.join(map(str, counts))} |")
    for library, revision in revisions:
        name = f"{library} {revision}"
        commit = f" (commit {COMMITS[name]})" if name in COMMITS else ""
        rows = conformance.table([v for v in found if (v.project, v.revision) == (library, revision)])
        lines += ["", f"## {name}{commit}", "", *rows]
    return INTRO + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if not PEERS.is_dir():
        sys.exit(f"error: no files of other libraries at {PEERS}; set VERL_MT_TEST_PEERS to the folder that has them")
    text = page(verdicts())
    if "--print" in sys.argv[1:]:
        print(text, end="")
    else:
        PAGE.write_text(text)
