"""Branches of launch scripts, and files that they read with `source`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from verl_mt.extensions.compat.migrate import migrate
from verl_mt.extensions.compat.migrate.shell import read_script

SLIME = (
    "python3 train.py --prompt-data /d.jsonl --rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 3 --lr 1e-6 "
    "--lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --apply-chat-template --rm-type math "
    "--actor-num-gpus-per-node 1 --hf-checkpoint "
)


def last(text: str, **environment: str) -> list[str]:
    return read_script(text).commands[-1].words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=x\nif [ $A = x ]; then B=1; else B=2; fi\nrun $B", "1"),
        ('A=y\nif [ "$A" == x ]; then B=1\nelif [ $A = y ]\nthen\n B=2\nelse B=3; fi\nrun $B', "2"),
        ('if [[ -n "" ]]; then B=1; else B=2; fi\nrun $B', "2"),
        ("N=8\nif [ $N -gt 4 ]; then if [ $N -eq 8 ]; then B=1; fi; else B=2; fi\nrun $B", "1"),
        ("N=8\nif ! [ $N -le 4 ]; then B=1; else B=2; fi\nrun $B", "1"),
        ("B=0\nA=x\n[ $A = y ] && B=1\nrun $B", "0"),
        ("B=0\nA=x\n[ $A = y ] || B=1\nrun $B", "1"),
        ("A=(a b)\nA[1]=c\nA[3]=d\nrun ${A[@]}", "d"),
        ('if [ -z "$X" ]; then X=5; fi\nrun $X', "${oc.env:X,5}"),
        ('N=${M:-"a b"}\nrun "$N"', "${oc.env:M,a b}"),
    ],
)
def test_the_branch_that_a_shell_takes_is_taken(text, expected):
    assert last(text)[-1] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("K=big\ncase $K in\n  small|tiny) W=1;;\n  big)\n    W=2\n    ;;\n  *) W=3;;\nesac\nrun $W", "2"),
        ('K=tiny\ncase "$K" in small | tiny) W=1;; *) W=3; esac\nrun $W', "1"),
        ("K=qwen3\ncase $K in\n  llama*) W=1;;\n  qwen*) case x in x) W=2;; esac;;\nesac\nrun $W", "2"),
        ("K=other\ncase $K in a) W=1;; *) W=3;; esac\nrun $W", "3"),
        ("W=1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --w) W=$2; shift 2;;\n  esac\ndone\nrun $W", "1"),
        ("W=1\nwhile sleep 1; do\n  ls | while read -r x; do if [ $x ]; then W=2; fi; done\ndone\nrun $W", "1"),
        ('A=\nif [ -n "$A" ]; then\n  for i in 1; do if [ $i ]; then W=2; fi; done\nelse\n  W=3\nfi\nrun $W', "3"),
        ("M=${1:-/m}\nrun $M", "${oc.env:1,/m}"),
        ('run "$1"', "${oc.env:1}"),
    ],
)
def test_cases_loops_and_the_scripts_own_arguments(text, expected):
    assert last(text)[-1] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rate"), [("small", "1e-05"), ("", "1e-06")])
def test_a_case_that_only_a_shell_can_decide_stays_one(size, rate):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    text = 'R=1e-6\ncase "$SIZE" in\n  small) R=1e-5 ;;\n  big) R=1e-4 ;;\nesac\n' + SLIME + "/m --lr $R"
    found = migrate(text)
    assert found.refused == []
    printed = found.command().replace("python -m verl_mt.trainer", "printf '%s\\n'")
    done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True, env={"SIZE": size})
    chosen = [line for line in done.stdout.splitlines() if line.startswith("actor_rollout_ref.actor.optim.lr=")]
    assert [float(line.partition("=")[2]) for line in chosen] == [float(rate)]


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_a_choice_that_only_a_shell_can_make_stays_one(wanted):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    text = (
        'COUNT=$(echo $SEEN | wc -w)\nif [ "$COUNT" -gt 0 ]; then\n  M=/with\nelse\n  M=/without\nfi\n' + SLIME + "$M"
    )
    found = migrate(text)
    assert found.refused == []
    printed = found.command().replace("python -m verl_mt.trainer", "printf '%s\\n'")
    seen = {"SEEN": "a b"} if wanted == "1" else {}
    done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True, env=seen)
    assert f"actor_rollout_ref.model.path={'/with' if wanted == '1' else '/without'}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("condition", "words"),
    [('[ "${MODE:-a}" = a ]', ["1"]), ('[ "$MODE" = a ]', ["2"]), ('[ -n "$MODE" ] && [ -d /x ]', ["2"])],
)
def test_an_array_is_what_it_is_where_nothing_is_set_from_outside(condition, words):
    script = read_script(f"if {condition}; then\n A=(1)\nelse\n A=(2)\nfi\nrun ${{A[@]}}")
    assert script.commands[-1].words == ["run", *words]
    assert any(note.startswith("A depends on `") for note in script.notes)


def test_a_file_that_is_read_with_source_knows_where_it_lies_itself(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    (models / "base.sh").write_text('ARGS=(--base "${BASE:-10}" x)\n')
    (models / "own.sh").write_text('BASE=5 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\nARGS[2]=y\n')
    script = tmp_path / "run.sh"
    script.write_text(
        'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nR="$(cd -- "${D}/.." && pwd)"\n'
        'source "${D}/models/own.sh"\nrun ${ARGS[@]} $D $R'
    )
    read = read_script(script.read_text(), script)
    assert read.commands[-1].words == ["run", "--base", "5", "y", str(tmp_path), str(tmp_path.parent)]
    assert read.notes == []


def test_a_repository_that_lies_elsewhere_is_found_from_the_script_upwards(tmp_path):
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "m.sh").write_text("ARGS=(1)")
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "run.sh"
    script.write_text('source "/root/lib/scripts/models/m.sh"\nsource /root/other.sh\nrun ${ARGS[@]}')
    read = read_script(script.read_text(), script)
    assert read.commands[-1].words == ["run", "1"]
    here, missing = read.notes
    assert here == f"source /root/lib/scripts/models/m.sh: read from {tmp_path}/scripts/models/m.sh"
    assert missing.startswith("source /root/other.sh: the file is not here")
