"""The command lines of Hydra 1.3's Basic Tutorial and Patterns give what a bare `@hydra.main` gives over one schema.

The pages' keys are replaced by keys of ours: `db.user` by `trainer.project_name`, `db.timeout` by `data.seed`.
Where the variable HYDRA_CHECKOUT names a checkout of Hydra, a test collects the pages' command lines and looks for
their rows.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from hydra_program import SET_BY_US, both, outcome, run_bare, start_ours

FILES = {
    "config": "defaults: [base_config, _self_, db: mysql, table: warehouse]\ntrainer: {seed: 3}\n",
    "groups_only": "defaults: [base_config, _self_]\n",
    "self_last": "defaults: [base_config, db: mysql, _self_]\ntrainer: {project_name: root}\n",
    "pair": "defaults: [base_config, _self_, db: mysql, server: apache]\n",
    "special": "defaults: [base_config, _self_, db: mysql, server: apache, optional both: '${db}_${server}']\n",
    "swept": (
        "defaults: [config, _self_]\n"
        "hydra: {sweeper: {params: {db: 'mysql,postgresql', table: 'warehouse,support,school'}}}\n"
    ),
    "always_swept": (
        "defaults: [config, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {db: 'mysql,postgresql'}}}\n"
    ),
    "db/mysql": "# @package _global_\ntrainer: {project_name: mysql}\ndata: {seed: 10}\n",
    "db/base": "# @package _global_\ntrainer: {project_name: base}\ndata: {seed: 30, val_seed: 4}\n",
    "db/postgresql": "# @package _global_\ndefaults: [base]\ntrainer: {project_name: postgresql}\n",
    "db/elsewhere": "# @package _global_\ndefaults: [/db/base@_here_]\ntrainer: {project_name: elsewhere}\n",
    "server/apache": "# @package _global_\ndata: {val_batch_size: 80}\n",
    "server/nginx": "# @package _global_\ndata: {val_batch_size: 81}\n",
    "both/postgresql_apache": "# @package _global_\ndata: {train_batch_size: 5}\n",
    "table/warehouse": "# @package _global_\ntrainer: {experiment_name: warehouse}\n",
    "table/support": "# @package _global_\ntrainer: {experiment_name: support}\n",
    "table/school": "# @package _global_\ntrainer: {experiment_name: school}\n",
    "experiment/aplite": "# @package _global_\ndefaults: [{override /db: postgresql}]\ndata: {val_batch_size: 8080}\n",
    "experiment/nglite": (
        "# @package _global_\ndefaults: [{override /db: postgresql}, {override /server: nginx}]\n"
        "data: {train_batch_size: 8080}\n"
    ),
    "data/rows/few": "val_max_samples: 7\n",
    "trainer/quiet": "logger: []\nseed: 11\n",
    "trainer/loud": "logger: [console, tensorboard]\n",
    "parts/seeds": "seed: 77\n",
    "parts/more": "seed: 78\n",
    "relocated": "defaults: [base_config, parts@trainer: seeds, _self_]\n",
}
CONFIG, PAIR = ["-cn", "config"], ["-cn", "pair"]
ONE_RUN = {
    "your_first_app/1_simple_cli": [
        ["-cn", "groups_only", "+reward.kwargs.driver=mysql", "+reward.kwargs.user=omry", "+reward.kwargs.port=1"],
    ],
    "your_first_app/2_config_file": [
        CONFIG, [*CONFIG, "trainer.project_name=root", "data.seed=1234"], [*CONFIG, "++data.seed=1234"],
        [*CONFIG, "++reward.kwargs.timeout=5"], ["-cn", "self_last"],
    ],
    "your_first_app/3_using_config": [CONFIG],
    "your_first_app/6_composition": [PAIR],
    "your_first_app/4_config_groups": [
        ["-cn", "groups_only"], ["-cn", "groups_only", "+db=postgresql"],
        ["-cn", "groups_only", "+db=postgresql", "data.seed=20"],
    ],
    "your_first_app/5_defaults": [
        CONFIG,
        [*CONFIG, "db=postgresql", "data.seed=20"], [*CONFIG, "~db"], [*CONFIG, "~db=mysql"], [*CONFIG, "db=elsewhere"],
    ],
    "running_your_app/3_working_directory": [
        CONFIG, [*CONFIG, "hydra.job.chdir=True"], [*CONFIG, "hydra.output_subdir=null"],
    ],
    "running_your_app/4_logging": [
        CONFIG,
        [*CONFIG, "hydra.verbose=[__main__,hydra]"], [*CONFIG, "hydra/job_logging=disabled"],
        [*CONFIG, "hydra/job_logging=none", "hydra/hydra_logging=none"],
    ],
    "running_your_app/5_debugging": [CONFIG],
    "patterns/configuring_experiments": [PAIR, [*PAIR, "+experiment=aplite"], [*PAIR, "+experiment=nglite"]],
    "patterns/extending_configs": [CONFIG],
    "patterns/select_multiple_configs_from_config_group": [
        CONFIG,
        [*CONFIG, "table=[warehouse,school]"], [*CONFIG, "+trainer=[quiet,loud]"], [*CONFIG, "+data/rows@data=few"],
        [*CONFIG, "+parts@trainer=seeds"], ["-cn", "relocated", "parts@trainer=more"], ["-cn", "relocated"],
    ],
    "patterns/specializing_config": [["-cn", "special"], ["-cn", "special", "db=postgresql"]],
}  # fmt: skip
MISTAKES = [
    [*CONFIG, "db=nothing"], [*CONFIG, "data.seed=fail"], [*CONFIG, "data.sed=1"], [*CONFIG, "+trainer=nothing"],
    [*CONFIG, "db=mysql,postgresql"], [*CONFIG, "trainer"], ["-cn", "nothing"], [*CONFIG, "+experiment=nglite"],
    [*CONFIG, "~server"], [*CONFIG, "server=nginx"], [*CONFIG, "~data.sed"], [*CONFIG, "hydra.nothing=1"],
    [*CONFIG, "-m", "db=mysql,nothing"], [*CONFIG, "-m", "data.sed=1,2"], [*CONFIG, "hydra/launcher=nothing"],
]  # fmt: skip
SWEEPS = {
    "running_your_app/2_multirun": [
        [*CONFIG, "hydra.mode=MULTIRUN", "db=mysql,postgresql", "table=warehouse,support"],
        [*CONFIG, "--multirun", "db=mysql,postgresql", "table=warehouse,support"],
        ["-cn", "swept", "-m", "db=mysql"],
        ["-cn", "always_swept"],
        [*CONFIG, "-m", "data.seed=range(1,3)"],
        [*CONFIG, "-m", "table=glob(*,exclude=w*)"],
    ],
    "patterns/configuring_experiments": [
        [*PAIR, "--multirun", "+experiment=aplite,nglite"],
        [*PAIR, "--multirun", "+experiment=glob(*lite)"],
    ],
}
PRINTED = {
    "running_your_app/5_debugging": [
        [*CONFIG, "--cfg", "job"], [*CONFIG, "data.seed=20", "--cfg", "job"],
        [*CONFIG, "--cfg", "job", "-p", "data"], [*CONFIG, "data.seed=20", "--cfg", "job", "--package", "data"],
        [*CONFIG, "--cfg", "hydra", "--package", "hydra.launcher"],
    ],
    "structured_config/5_schema": [[*CONFIG, "--info", "defaults-tree"]],
}  # fmt: skip


@pytest.fixture
def conf(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setenv("HYDRA_PROGRAM_SEEN", "")
    return tmp_path


def lines(table: dict[str, list[list[str]]]) -> list:
    """Each line once, with the first page that has it."""
    pages = {tuple(words): page for page, rows in reversed(table.items()) for words in rows}
    return [pytest.param(list(words), id=f"{page}: {' '.join(words[1:])}") for words, page in pages.items()]


def some_for_releases(sweeps: list, of_every_commit: set[str]) -> list:
    """A sweep starts processes. Those that end in one of these words run for every commit, the others for releases."""
    marks = {True: pytest.mark.slow, False: pytest.mark.release}
    return [pytest.param(*s.values, id=s.id, marks=marks[s.values[0][-1] in of_every_commit]) for s in sweeps]


@pytest.mark.slow
@pytest.mark.parametrize("words", lines(ONE_RUN))
def test_one_run(conf, words):
    seen, text, _ = both(conf, words)
    assert len(seen) == 1, text


@pytest.mark.slow
@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words[2:]))
def test_a_mistake(conf, words):
    seen, text, _ = both(conf, words)
    assert seen == [] and text.startswith("error: ")


@pytest.mark.parametrize("words", some_for_releases(lines(SWEEPS), {"always_swept", "+experiment=aplite,nglite"}))
def test_a_sweep(conf, words):
    seen, text, _ = both(conf, words, start_ours)
    assert len(seen) >= 2, text
    assert len(set(seen)) == len(seen) == text.count("  finished  ")


@pytest.mark.slow
@pytest.mark.parametrize("words", lines(PRINTED))
def test_what_is_printed(conf, words):
    seen, mine, theirs = both(conf, words)
    assert seen == []
    ours = tuple(key.rpartition(".")[2] for key in SET_BY_US)
    missing = [line for line in theirs.splitlines() if line not in mine and not line.strip().startswith(ours)]
    assert missing == (
        ["    hydra/hydra_logging: default", "    hydra/job_logging: default"] if "--info" in words else []
    )


COMMAND = re.compile(r"""(?:^|[$"] ?)python3? \w+\.py(?P<words>(?: (?:'[^']*'|[^\s'"`]+))*)""", re.M)
NOT_OURS = {"write_protect_config_node"}
"""Pages on classes of the program's own."""


def form(words: list[str]) -> list[str]:
    """What a line does: `+group=sweep` of `+db=mysql,postgresql`. Words for Hydra itself stay as they are."""
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("-") or key.startswith("hydra"):
            found.append({"-p": "--package", "--multirun": "-m"}.get(word, word))
            continue
        kind = (
            "list" if value.startswith("[") else "glob" if value.startswith("glob") else "sweep" if "," in value else ""
        )
        name = "key" if "." in key.partition("@")[0] else "group@package" if "@" in key else "group"
        found.append("".join(c for c in key if c in "+~") + name + equals + kind)
    return sorted("PACKAGE" if before == "--package" else word for before, word in zip(["", *found], found))


@pytest.mark.skipif("HYDRA_CHECKOUT" not in os.environ, reason="set HYDRA_CHECKOUT to a checkout of Hydra")
def test_every_command_line_of_the_pages_has_a_row():
    rows: dict[str, list[list[str]]] = {}
    for table in (ONE_RUN, SWEEPS, PRINTED):
        for page, lines in table.items():
            rows.setdefault(page.rpartition("/")[2], []).extend(form(words[2:]) for words in lines)
    pages = Path(os.environ["HYDRA_CHECKOUT"], "website", "versioned_docs", "version-1.3")
    files = [*pages.glob("tutorials/basic/*/*.md"), *pages.glob("patterns/*.md")]
    found = [(file.stem, shlex.split(line["words"])) for file in files for line in COMMAND.finditer(file.read_text())]
    assert len(found) >= 30
    missing = [(page, words) for page, words in found if page not in NOT_OURS and form(words) not in rows.get(page, [])]
    assert missing == []


@pytest.mark.slow
def test_the_program_sees_the_groups(conf):
    _, (text,), _ = outcome(run_bare, [*CONFIG, "db=postgresql"], conf / "seen.jsonl")
    config = json.loads(text)
    assert (config["trainer"]["project_name"], config["data"]["seed"], config["data"]["val_seed"]) == (
        "postgresql", 30, 4,
    )  # fmt: skip
