"""Launch scripts are read as a shell reads them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate import migrate
from verl_mt.extensions.compat.migrate.shell import Command, read_script
from verl_mt.extensions.compat.migrate.shell_values import shell_text


def words(text: str) -> list[list[str]]:
    return [command.words for command in read_script(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a \\\n  b # c 'd\n", [["run", "a", "b"]]),
        ("run a#b 'x y' \"z 'w'\" p\\ q", [["run", "a#b", "x y", "z 'w'", "p q"]]),
        ("A=1\nB=$A/x\nrun ${B} \"$A$A\" '$A'", [["run", "1/x", "11", "$A"]]),
        ("L='--a 1 --b 2'\nrun $L \"$L\"", [["run", "--a", "1", "--b", "2", "--a 1 --b 2"]]),
        ("A=(\n --x 1  # don't (stop)\n 'y z'\n)\nA+=(--w)\nrun ${A[@]}", [["run", "--x", "1", "y z", "--w"]]),
        ("run x 2>&1 | tee log.txt &", [["run", "x"], ["tee", "log.txt"]]),
        ("run x > out.txt && echo ok; echo no", [["run", "x"], ["echo", "ok"], ["echo", "no"]]),
        ("cat <<EOF > f\nit's not a command\nEOF\nrun x", [["cat"], ["run", "x"]]),
        ("if true; then\n  run x\nfi", [["run", "x"]]),
        ("run \"['$HOME/a']\" ${N:-8} \"\\$5\"", [["run", "['${oc.env:HOME}/a']", "${oc.env:N,8}", "$5"]]),
        ('D="$(cd -- "$(dirname "$0")" && pwd)"\nrun x', [["run", "x"]]),
        ("A=(--n 1 $(seq 2 2 6) $((1 + (2 * 3))) 'x)')\nrun ${A[@]}", [["run", "--n", "1", "2", "4", "6", "7", "x)"]]),
        ("N=3\nrun $(seq $N) $(seq 5 -2 1) $(seq 2 1)", [["run", "1", "2", "3", "5", "3", "1"]]),
        ("run", [["run"]]),
        ("", []),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(text, expected):
    assert words(text) == expected


def test_variables_before_a_command_are_its_own_and_exported_ones_the_scripts():
    script = read_script("export A=1\nB=2 run x\nrun $B")
    assert script.commands == [Command({"B": "2"}, ["run", "x"]), Command({}, ["run", "${oc.env:B}"])]
    assert script.exported == {"A": "1"}


def test_what_only_the_caller_knows_is_said():
    script = read_script('run ${MISSING[@]} "$@"')
    assert script.commands == [Command({}, ["run"])]
    assert ["MISSING" in script.notes[0], "$@" in script.notes[1], len(script.notes)] == [True, True, 2]


@pytest.mark.parametrize("text", ["run 'x\nrun y", 'run\nrun "x', "A=(1 2\nrun x"])
def test_what_is_not_closed_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match=r"line \d: .* is not closed"):
        read_script(text)


plain = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=12)


@given(st.lists(plain, min_size=1, max_size=5))
def test_what_shlex_quotes_is_read_back(given_words):
    assert words("run " + shlex.join(given_words)) == [["run", *given_words]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_itself_agrees():
    text = """
M=m0
ARGS=( --a "x y" --b '$M' $M/z  # no
 --c "q\\"r" )
LIST="1 2"
printf '%s\\n' "${ARGS[@]}" $LIST "['$M/a']" a#b ${N:-8} "$M$M" \\
   last
"""
    seen = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env=dict(os.environ, N="8"))
    (ours,) = words(text)
    assert ours[:2] == ["printf", "%s\\n"]
    assert [w.replace("${oc.env:N,8}", "8") for w in ours[2:]] == seen.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("$(pwd)/tools.yaml", '"$(pwd)/tools.yaml"'),
        ("$((1024 * 3))", "3072"),
        ("$((1024 * SIZE / 2))", None),
        ('"$(basename "$NAME")"', None),
        ("`hostname`", '"`hostname`"'),
    ],
)
def test_what_a_shell_computes_stays_the_shells(value, printed):
    from verl_mt.extensions.compat.migrate import migrate

    script = f"NAME=Qwen/Qwen3\npython -m verl.trainer.main_ppo trainer.experiment_name={value}\n"
    command = migrate(script).command()
    (line,) = [line for line in command.splitlines() if "experiment_name" in line]
    if printed is None:
        shown = subprocess.run(["bash", "-c", f"SIZE=4; printf %s {line.strip().rstrip(chr(92))}"], text=True,
                               capture_output=True, check=True).stdout  # fmt: skip
        assert shown.partition("=")[2] in ("2048", "Qwen3")
    else:
        assert printed.strip('"') in line


def test_a_function_of_the_script_goes_with_what_calls_it():
    from verl_mt.extensions.compat.migrate import migrate

    script = "function now() {\n    echo today\n}\npython -m verl.trainer.main_ppo trainer.experiment_name=run_$(now)\n"
    command = migrate(script).command()
    assert command.startswith("function now() {\n    echo today\n}\n") and "run_$(now)" in command


FOLDER = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'


@pytest.mark.parametrize(
    "text",
    [
        FOLDER + "run $D/a.yaml",
        'D=$(cd "$(dirname "$0")" && pwd)\nrun $D/a.yaml',
        "run $(dirname $BASH_SOURCE)/a.yaml",
        'D="$(cd "$( dirname "${BASH_SOURCE}" )" >/dev/null 2>&1 && pwd -P )"\nrun "${D}/a.yaml"',
    ],
)
def test_the_folder_of_the_script_is_known_where_the_script_lies_and_missed_where_not(tmp_path, text):
    file = tmp_path / "launch.sh"
    file.write_text(text.replace("run", "echo"))
    script = read_script(text, file)
    assert script.commands == [Command({}, ["run", f"{tmp_path.resolve()}/a.yaml"])] and not script.notes
    if shutil.which("bash"):
        said = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=True).stdout
        assert said == f"{tmp_path.resolve()}/a.yaml\n"
    (note,) = read_script(text).notes
    assert "where the script lies is not known" in note


def test_a_path_made_of_the_scripts_own_name_is_left_to_the_shell_with_the_name_in_it(tmp_path):
    file = tmp_path / "launch.sh"
    (command,) = read_script('run $(basename "$0" .sh)', file).commands
    (name,) = re.findall(r"oc\.env:(\w+)", command.words[1])
    assert shell_text(name) == f'$(basename "{file.resolve()}" .sh)'


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('A=${A:-"${HOME}/a"}\nrun $A', "${A:-${HOME}/a}"),
        ("B=${B:-4}\nA=${A:-${B}}\nrun $A", "${A:-${B:-4}}"),
        ("A=${A:-}\nA=${A:-8}\nrun $A", "${A:-8}"),
        ("A=\nrun ${A:-8}", "8"),
        ("a=3\nb=$((2 * a))\nrun $((a + b))", "9"),
        ("a=${A:-3}\nrun $((a * 2))", "$((${A:-3} * 2))"),
    ],
)
def test_defaults_within_defaults_and_bare_names_in_a_sum(text, word):
    from verl_mt.extensions.compat.migrate.shell_values import for_shell

    (command,) = read_script(text).commands
    assert for_shell(command.words[1]) == word


def test_a_branch_that_only_a_shell_can_choose_says_which_one_is_usual():
    text = 'M=${M:-a}\nif [ "$M" = "b" ]; then C=one; else C=two; fi\nrun $C'
    (command,) = read_script(text).commands
    assert command.words[1].endswith(",two}") and read_script(text.replace(":-a", ":-b")).commands[0].words[1].endswith(
        ",one}"
    )


LAUNCH = "\npython3 -m verl.trainer.main_ppo data.train_batch_size=8\n"
TEST = 'if [ "$A" = 1 ]; then\n'
TOO_MUCH, TOO_MANY = "more than 20000000 characters", "more than 200 branches"


UNBOUNDED = {
    "nested if": (TEST * 3000 + "B=1\n" + "fi\n" * 3000, TOO_MANY),
    "chain of elif": (TEST + "B=0\n" + 'elif [ "$A" = 2 ]; then\nB=1\n' * 1500 + "fi\n", TOO_MANY),
    "nested case": ('case "$A" in\na)\n' * 3000 + "B=1;;\n" + "esac\n" * 3000, TOO_MANY),
    "patterns of nested cases": ('case "$A" in\na|b|c|d)\n' * 30 + "B=1\n;;\n" + ";;\nesac\n" * 30, TOO_MUCH),
    "growth by branches": ("B=x\n" + f'{TEST}B="${{B}}x"; fi\n' * 60, TOO_MUCH),
    "loop over a sequence": ("for i in $(seq 1 100000000); do\necho $i\ndone", TOO_MUCH),
    "falling sequence": ("A=($(seq 100000000 -1 1))", TOO_MUCH),
    "far place of an array": ("A[100000000]=1", TOO_MUCH),
    "doubled text": ("A=xxxxxxxx\n" + 'A="$A$A"\n' * 40, TOO_MUCH),
    "doubled array": ("A=(1 2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40, TOO_MUCH),
    "squares": ("A=$((9999999999*9999999999))\n" + "A=$(($A*$A))\n" * 25, TOO_MUCH),
    "open functions": ("f() {\n" * 3000, "more than 200 functions"),
    "long comment": ("# " + "x" * 100_000, "has 100060 characters, 100000 at most"),
}


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("text", "says"), UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_a_script_without_a_bound_is_refused_soon(text, says):
    with pytest.raises(ConfigError, match=says):
        migrate(text + LAUNCH)


def test_a_sum_of_thousands_of_numbers_is_left_to_the_shell():
    assert "data.train_batch_size=8" in migrate("A=$((" + "1+" * 5000 + "1))" + LAUNCH).overrides


def test_a_script_that_reads_itself_is_refused(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("source ./run.sh" + LAUNCH)
    with pytest.raises(ConfigError, match=r"run\.sh reads itself with `source`"):
        migrate(file.read_text(), file)
    (tmp_path / "env.sh").write_text("A=8\n")
    file.write_text("source ./env.sh\nsource ./env.sh" + LAUNCH.replace("=8", "=$A"))
    assert "data.train_batch_size=8" in migrate(file.read_text(), file).overrides
