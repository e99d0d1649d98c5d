"""Launch commands in loops and functions, expansions in their words, and lines that cut them off."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate import main, migrate
from verl_mt.extensions.compat.migrate.shell import read_script

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=/d.parquet actor_rollout_ref.model.path=Qwen/Q "
    "trainer.n_gpus_per_node=1 "
)
RATE = "actor_rollout_ref.actor.optim.lr="
SWIFT = "swift rlhf --rlhf_type grpo --model Qwen/Q --learning_rate $LR"


@pytest.mark.parametrize(
    ("text", "over"),
    [
        (f"for LR in 1e-6 2e-6; do\n  {VERL}{RATE}$LR\ndone", "LR"),
        (f"for SEED in 1 2\ndo\n  for LR in 1e-6; do {SWIFT}; done\ndone", "SEED"),
        (f"while read LR; do {VERL}{RATE}$LR; done < rates", "`while read LR`"),
        (f"cat rates | while read LR; do {SWIFT}; done", "`while read LR`"),
        (f"until false; do\n{SWIFT}\ndone", "`until false`"),
        (f'CMD="{VERL}"\nfor LR in 1 2; do $CMD {RATE}$LR; done', "LR"),
        (f"RUN=({VERL})\nfor LR in 1 2; do \"${{RUN[@]}}\" {RATE}$LR; done", "LR"),
        (f"train() {{\n  {VERL}{RATE}$1\n}}\nfor LR in 1 2; do train $LR; done", "LR"),
    ],
)  # fmt: skip
def test_a_launch_in_a_loop_is_refused(text, over, capsys, tmp_path):
    with pytest.raises(ConfigError) as refused:
        migrate(text)
    assert str(refused.value) == f"the launch command is started in a loop over {over}: give one command"
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert [main([str(script)]), refused.value.args[0] in capsys.readouterr().err] == [2, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        "for F in a b; do\n  cp $F /d\ndone",
        "while ! nc -z host 1; do sleep 1; done",
        "for F in a; do echo swift rlhf; done",
    ],
)
def test_a_loop_beside_the_launch_is_none_of_it(loop):
    assert f"{RATE}1e-6" in migrate(f"{loop}\n{VERL}{RATE}1e-6").overrides


@pytest.mark.parametrize(
    "calls",
    ["train 1e-6\ntrain 2e-6", "train 1e-6 && train 2e-6", "LR=1e-6 train"],
)
@pytest.mark.parametrize(
    "function",
    [f"train() {{\n  {VERL}{RATE}$1\n}}\n", f"function train {{ {VERL}{RATE}$1; }}\n"],
)
def test_a_function_that_launches_once_per_call_is_refused(function, calls):
    with pytest.raises(ConfigError, match=r"the launch command is started by .*train.*: give one command"):
        migrate(function + calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rate"),
    [
        (f"train() {{\n  {VERL}{RATE}$1\n}}\ntrain 1e-6", "1e-6"),
        (f"train() {{ {VERL}{RATE}$2; }}\ntrain a 1e-6", "1e-6"),
        (f"train() {{\n  local LR=${{1}}\n  {VERL}{RATE}$LR\n}}\nR=2e-6\ntrain $R", "2e-6"),
        (f"function train {{\n  {VERL}{RATE}${{1:-3e-6}}\n}}\ntrain ''", "3e-6"),
        (f"inner() {{\n{VERL}{RATE}$1\n}}\nouter() {{\ninner $1\n}}\nouter 4e-6", "4e-6"),
        (f"train() {{ {VERL}{RATE}5e-6; }}\ntrain", "5e-6"),
    ],
)
def test_a_function_that_is_called_once_is_read_with_its_words(text, rate):
    found = migrate(text)
    assert [f"{RATE}{rate}" in found.overrides, found.notes] == [True, []]


def test_words_of_the_script_itself_stay_those_of_the_script():
    found = migrate(f'main() {{\n  {VERL}{RATE}1e-6 "$@"\n}}\nmain "$@"')
    assert [f"{RATE}1e-6" in found.overrides, any("$@" in note for note in found.notes)] == [True, True]


EXPANSIONS = [
    "${MODEL##*/}", "${MODEL#*/}", "${MODEL%/*}", "${FILE%.*}", "${FILE%%.*}", "${FILE##*.}", "${MODEL%x}",
    "${N:?need}",
    "${RATES[1]}", "${RATES[-1]}", "${RATES[$I]}", "${RATES[I]}", "a${RATES[9]}b", "${#RATES[@]}", "${#MODEL}",
    "${MODEL/Q/r}", "${MODEL//\\//-}", "${MODEL^^}", "${MODEL,,}", "${MODEL:2:3}", "${N:+set}", "${EMPTY:+set}x",
    "${MODEL%$TAIL}", "${OUTSIDE##*/}", "${OUTSIDE%.*}", "${OURS##*/}", "${NAMES[*]}", "$(basename ${FILE%.*})",
    "${UNSET:-${MODEL##*/}}", "${OUTSIDE:?need}", "$((${#RATES[@]} + ${RATES[0]}))", "${RATES}",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("word", EXPANSIONS)
def test_the_printed_command_says_what_the_script_said(word):
    assignments = (
        "MODEL=Qwen/Qwen2-7B\nFILE=/d/a.b.json\nN=8\nEMPTY=\nI=1\nRATES=(1 2 3)\nTAIL=-7B\nOURS=${OUTSIDE}/z\n"
        "NAMES=('p q' r)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "OUTSIDE": "/o/p.q"}

    def said(command: str) -> str:
        return subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, check=True
        ).stdout

    expected = said(f'{assignments}printf "%s\\n" "trainer.experiment_name=x{word}"')
    found = migrate(f'{assignments}{VERL}"trainer.experiment_name=x{word}"')
    printed = found.command().replace("python -m verl_mt.trainer", 'printf "%s\\n"')
    assert expected in said(printed)


def test_an_expansion_of_what_the_script_does_not_set_is_said():
    found = migrate(VERL + "trainer.experiment_name=${OUTSIDE##*/} trainer.project_name=${ELSE:-a}")
    unset = [note for note in found.notes if "set it before" in note]
    assert unset == ["$OUTSIDE: not set by the script; set it before"]
    assert "trainer.experiment_name=${OUTSIDE##*/}" in shlex.split(found.command())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "first"),
    [
        (f"{VERL} \\\n  # the rate\n  {RATE}1e-6 \\\n  trainer.nnodes=1", f"{RATE}1e-6"),
        (f"{VERL} \\\n  # +x.y=1 \\\n  +trainer.z=1", "+trainer.z=1"),
        (f"{VERL}\n  {RATE}$LR", f"{RATE}${{LR}}"),
        ("swift rlhf --rlhf_type grpo --model Qwen/Q \\\n  # more\n  --beta 0.1 \\\n  --seed 1", "--beta"),
    ],
)
def test_what_a_comment_between_continued_lines_cuts_off_is_said(text, first):
    cut = [note for note in read_script(text).notes if note.startswith("the command ends before")]
    assert [len(cut), f"the command ends before {first}:" in cut[0]] == [1, True]
    assert any(note.startswith("the command ends before") for note in migrate(text).notes)


def test_a_comment_behind_the_last_line_cuts_nothing_off():
    assert read_script(f"{VERL} \\\n  # last\nA=1\necho done --x a.b=c\n").notes == []
