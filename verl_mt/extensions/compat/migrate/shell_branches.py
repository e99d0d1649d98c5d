"""Branches of a launch script: `if`, `&&` and `||`, as far as it can be said without a shell which of them is taken.

Where it cannot be said, a variable that the branches set differently stays for the shell, as `$(if ...; then echo a;
else echo b; fi)`; an array is what it is where no variable is set from outside, which is noted.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from typing import Protocol

from verl_mt.bounds import MAX_SCRIPT_BRANCHES
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate.shell_loops import LOOPS, Function, heads, refuse_loop
from verl_mt.extensions.compat.migrate.shell_values import Word, for_shell, is_known, kept, without_variables

Branch = tuple[list[list[Word]], list[list[Word]]]
"""(commands of its condition, body); no condition = else."""


class Shell(Protocol):
    """What a script has set so far, and what a word of it says; `migrate.shell.Script`."""

    variables: dict[str, str]
    arrays: dict[str, list[str]]
    exported: dict[str, str]
    launching: dict[str, Function]
    depth: int

    def note(self, text: str) -> None: ...
    def spend(self, characters: int) -> None: ...
    def fill(self, word: Word) -> str: ...
    def shown(self, word: Word) -> str: ...
    def run(self, words: list[Word]) -> None: ...


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


def execute(commands: list[list[Word]], script: Shell) -> None:
    """The commands in their order."""
    place = 0
    while place < len(commands):
        words = commands[place]
        head = _raw(words[0])
        script.spend(len(words))
        if head == "if":
            branches, place = _branches(commands, place)
            _choose(branches, script)
            continue
        if head == "case" and len(words) > 2:
            branches, place = _cases(commands, place)
            _choose(branches, script)
            continue
        inner = heads(words)
        if inner and _raw(inner[0]) in LOOPS:
            loop = commands[place : _behind_loop(commands, place)]
            refuse_loop(loop, script.variables, script.arrays, script.launching)
        if inner and _raw(inner[0]) in script.launching:
            _call(script.launching[_raw(inner[0])], script)
            place += 1
            continue
        if head in ("while", "until"):
            place = _behind_loop(commands, place)
            script.note(f"what the script does in `{' '.join(map(_raw, words))}` is not read")
            continue
        place += 1
        after = _raw(commands[place][0]) if place < len(commands) else ""
        if after in ("&&", "||") and _is_test(words):
            body = [commands[place][1:]]
            branch: Branch = ([words if after == "&&" else [[("plain", "!")], *words]], body)
            place += 1
            if body[0]:
                _choose([branch], script)
            continue
        script.run(words)


def _call(function: Function, script: Shell) -> None:
    """A function with the words of its call as $1 to $9; one that the call lacks is empty there."""
    given = [script.fill(word) for word in function.given]
    before = dict(script.variables)
    script.variables |= {str(k + 1): given[k] if k < len(given) else "" for k in range(9)}
    execute(function.body, script)
    for name in map(str, range(1, 10)):
        if name in before:
            script.variables[name] = before[name]
        else:
            script.variables.pop(name, None)


def _branches(commands: list[list[Word]], start: int) -> tuple[list[Branch], int]:
    """The branches of an `if`, and the place behind its `fi`."""
    branches: list[Branch] = [([commands[start][1:]], [])]
    depth, in_body = 1, False
    for place in range(start + 1, len(commands)):
        words = commands[place]
        head = _raw(words[0])
        depth += {"if": 1, "fi": -1}.get(_inner_head(words), 0)
        _check_depth(depth)
        if depth == 0:
            return branches, place + 1
        rest = words[1:]
        if depth > 1 or head not in ("then", "else", "elif"):
            branches[-1][in_body].append(words)
            continue
        in_body = head != "elif"
        if head != "then":
            branches.append(([rest] if head == "elif" else [], []))
        if in_body and rest:
            branches[-1][1].append(rest)
            depth += _raw(rest[0]) == "if"
    return branches, len(commands)


def _cases(commands: list[list[Word]], start: int) -> tuple[list[Branch], int]:
    """The branches of a `case` as tests of its word, and the place behind its `esac`."""
    subject, branches = commands[start][1], list[Branch]()
    patterns, in_pattern, depth = list[str](), True, 1
    rest = [(start, commands[start][3:])] if commands[start][3:] else []
    for place, words in [*rest, *enumerate(commands[start + 1 :], start + 1)]:
        head = _raw(words[0])
        depth += 0 if in_pattern else {"case": 1, "esac": -1}.get(head, 0)
        _check_depth(depth)
        if depth == 0 or (in_pattern and head == "esac"):
            return branches, place + 1
        if head == ";;" and depth == 1:
            in_pattern = True
        elif not in_pattern:
            branches[-1][1].append(words)
        else:
            closed = next((k for k, word in enumerate(words) if _raw(word).endswith(")")), len(words) - 1)
            patterns += [_raw(word).strip("()") for word in words[: closed + 1] if _raw(word) not in ("|", "(")]
            if _raw(words[closed]).endswith(")"):
                body = [words[closed + 1 :]] if words[closed + 1 :] else []
                branches += [([] if p == "*" else [_is_like(subject, p)], body) for p in patterns]
                patterns, in_pattern = [], False
    return branches, len(commands)


def _is_like(subject: Word, pattern: str) -> list[Word]:
    quoted: Word = [("quoted", _raw(subject))]
    return [[("plain", "[[")], quoted, [("plain", "==")], [("plain", pattern)], [("plain", "]]")]]


def _behind_loop(commands: list[list[Word]], start: int) -> int:
    depth = 0
    for place in range(start, len(commands)):
        head = _inner_head(commands[place])
        depth += head in ("for", "while", "until", "select")
        depth -= head == "done"
        if depth == 0:
            return place + 1
    return len(commands)


def _inner_head(words: list[Word]) -> str:
    """What a command begins with, behind what only joins it to others."""
    heads = [_raw(word) for word in words]
    return next((head for head in heads if head not in ("do", "{", "(", "&&", "||", "|", "!")), heads[0])


def _choose(branches: list[Branch], script: Shell) -> None:
    if not branches:
        return
    script.depth += 1
    _check_depth(script.depth)
    (condition, body), *others = branches
    truth = True if not condition else _truth(condition[0], script) if len(condition) == 1 else None
    if truth is True:
        execute(body, script)
    elif truth is False:
        _choose(others, script)
    else:
        _merge(condition, body, others, script)
    script.depth -= 1


def _check_depth(depth: int) -> None:
    if depth > MAX_SCRIPT_BRANCHES:
        raise ConfigError(
            f"the script has more than {MAX_SCRIPT_BRANCHES} branches in one another or in one `if` or `case`. Give "
            "the launch command alone"
        )


def _merge(condition: list[list[Word]], body: list[list[Word]], others: list[Branch], script: Shell) -> None:
    """Both ways are gone, each from what was set before."""
    text = _as_written(condition, script)
    tested = _tested_for_nothing(condition[0])
    usual = _truth(condition[0], script, from_outside=False) if len(condition) == 1 else None
    script.spend(len(script.variables) + sum(map(len, script.arrays.values())))
    variables, arrays = dict(script.variables), copy.deepcopy(script.arrays)
    execute(body, script)
    then_variables, then_arrays = script.variables, script.arrays
    script.variables, script.arrays = variables, arrays
    _choose(others, script)
    for name, value in then_variables.items():
        other = script.variables.get(name)
        if value == other:
            continue
        if other is None and name == tested and is_known(value):
            script.variables[name] = f"${{oc.env:{name},{value}}}"
            continue
        otherwise = f"${{{name}}}" if other is None else for_shell(other)
        script.spend(len(value) + len(other or ""))
        choice = f'$(if {text}; then echo "{for_shell(value)}"; else echo "{otherwise}"; fi)'
        taken = None if usual is None else value if usual else other
        script.variables[name] = kept(choice, None if taken is None else without_variables(taken))
        if name in script.exported:
            script.exported[name] = script.variables[name]
    for name, items in then_arrays.items():
        if items != script.arrays.get(name):
            held = "to hold" if usual else "not to hold"
            script.note(f"{name} depends on `{text}`, which only a shell can say; it was taken {held}")
            script.arrays[name] = items if usual else script.arrays.get(name, [])


def _as_written(condition: list[list[Word]], script: Shell) -> str:
    lines = [" ".join(script.shown(word) for word in words) for words in condition]
    made = lines[0]
    for line in lines[1:]:
        made += f" {line}" if line.startswith(("&&", "||", "|")) else f"; {line}"
    return made


def _tested_for_nothing(words: list[Word]) -> str:
    """NAME in `[ -z "$NAME" ]` and `[ -z "${NAME:-}" ]`; "" of another test."""
    raw = [_raw(word) for word in words]
    if len(raw) != 4 or raw[0] not in ("[", "[[") or raw[1] != "-z":
        return ""
    name = raw[2].removeprefix("$").strip("{}").removesuffix("+x").rstrip(":-")
    return name if name.isidentifier() else ""


def _is_test(words: list[Word]) -> bool:
    return _raw(words[0]) in ("[", "[[", "test") or [_raw(word) for word in words[:1]] == ["!"]


def _truth(words: list[Word], script: Shell, *, from_outside: bool = True) -> bool | None:
    """Whether a test holds; None where only a shell can say it.

    Args:
        from_outside: a variable with a default may be set outside the script.
    """
    if words and _raw(words[0]) == "!":
        inner = _truth(words[1:], script, from_outside=from_outside)
        return None if inner is None else not inner
    raw = [_raw(word) for word in words]
    if raw in (["true"], [":"]):
        return True
    if raw == ["false"]:
        return False
    if raw[:1] == ["test"]:
        words = words[1:]
    elif raw[:1] in (["["], ["[["]) and raw[-1] in ("]", "]]"):
        words = words[1:-1]
    else:
        return None
    texts = [script.fill(word) for word in words]
    if not from_outside:
        texts = [text if (plain := without_variables(text)) is None else plain for text in texts]
    if not all(map(is_known, texts)):
        return None
    if len(texts) == 1:
        return texts[0] != ""
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) == 3:
        return _compared(*texts)
    return None


def _compared(left: str, how: str, right: str) -> bool | None:
    if how in ("=", "==", "!="):
        same = fnmatch.fnmatchcase(left, right) if set("*?[") & set(right) else left == right
        return same == (how != "!=")
    try:
        return _COMPARED[how](int(left), int(right)) if how in _COMPARED else None
    except ValueError:
        return None


def _raw(word: Word) -> str:
    return "".join(text for _, text in word)
