"""Launch commands that a script starts several times: in a loop, or in a function that it calls.

One command of verl_mt stands for one launch, so a loop over learning rates is refused. A function that is called once
is read where it is called, with the words of the call as `$1`, `$2`, ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl_mt.bounds import MAX_SCRIPT_BRANCHES
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate.shell_values import Word

_LAUNCH = re.compile(
    r"(?<!\S)(?:-m (?:verl\.trainer\.main_\w+|recipe\.\w+\.main_\w+)|(?:\S*/)?(?:swift|megatron) (?:rlhf|rollout)"
    r"|\S*swift/cli/(?:rlhf|rollout)\.py|\S*python\S*(?: -[uO])* (?:\S*/)?train(?:_async)?\.py)(?!\S)"
)
_SAYS = ("echo", "printf")
_SET = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?\}?")
_NOT_PUT_IN = re.compile(r"\$[@*#]|\$\{[@*#]|\$\{\d\d|\[[@*]\]|(?<!\S)shift(?!\S)")
_JOINING = ("do", "then", "else", "{", "(", "&&", "||", "|", "!", "time", "exec", "nohup")
LOOPS = ("for", "while", "until", "select")


@dataclass
class Function:
    """A function of the script that starts a launch command."""

    body: list[list[Word]]
    given: list[Word]
    """The words of its only call; empty where it has none."""


def heads(words: list[Word]) -> list[Word]:
    """A command without what only joins it to others."""
    while words and raw(words[0]) in _JOINING:
        words = words[1:]
    return words


def raw(word: Word) -> str:
    """A word as the script writes it, without its quotes."""
    return "".join(text for _, text in word)


def starts_launch(words: list[Word], variables: dict[str, str], arrays: dict[str, list[str]]) -> bool:
    """Whether a command is a launch of verl, ms-swift or slime; its words may stand in variables and arrays."""
    words = heads(words)
    if not words or raw(words[0]) in _SAYS:
        return False

    def value(found: re.Match[str]) -> str:
        return " ".join(arrays[found[1]]) if found[1] in arrays else variables.get(found[1], found[0])

    return _LAUNCH.search(" ".join(_SET.sub(value, raw(word)) for word in words)) is not None


def refuse_loop(
    loop: list[list[Word]], variables: dict[str, str], arrays: dict[str, list[str]], functions: dict[str, Function]
) -> None:
    """Raises:
    ConfigError: the loop starts a launch command, itself or by a function.
    """
    if not any(starts_launch(words, variables, arrays) or _called(words) in functions for words in loop):
        return
    first = heads(loop[0])
    over = raw(first[1]) if raw(first[0]) in ("for", "select") and len(first) > 1 else f"`{_shown(first)}`"
    raise ConfigError(f"the launch command is started in a loop over {over}: give one command")


def take_functions(
    commands: list[list[Word]], variables: dict[str, str], arrays: dict[str, list[str]]
) -> tuple[list[list[Word]], dict[str, Function]]:
    """The commands without the functions that launch and are called with words; those functions.

    Raises:
        ConfigError: such a function is called several times, or reads its words in a way that is not put in here.
    """
    replaced, functions = list[tuple[int, int, list[list[Word]]]](), dict[str, Function]()
    launching = set[str]()
    for name, start, end in _definitions(commands):
        body = _body(commands[start:end])
        if not any(starts_launch(w, variables, arrays) or _called(w) in launching for w in body):
            continue
        launching.add(name)
        calls = [words for words in commands if _called(words) == name]
        if not any(map(_has_words, calls)):
            replaced += [(start, end, body)] if calls else []
            continue
        if len(calls) > 1:
            raise ConfigError(f"the launch command is started by {len(calls)} calls of {name}: give one command")
        given = heads(calls[0])[1:]
        written = " ".join(raw(word) for words in [*body, given] for word in words)
        if raw(heads(calls[0])[0]) != name or _NOT_PUT_IN.search(written):
            raise ConfigError(f"the launch command is started by {name} with words of this call: give one command")
        functions[name] = Function(body, given)
        replaced.append((start, end, []))
    rest = list(commands)
    for start, end, body in reversed(replaced):
        rest[start:end] = body
    return rest, functions


def _has_words(call: list[Word]) -> bool:
    """Whether a call gives a function more than the script's own words."""
    return [raw(word) for word in heads(call)[1:]] not in ([], ["$@"], ["$*"], ["${@}"])


def _definitions(commands: list[list[Word]]) -> list[tuple[str, int, int]]:
    """(name, first command, place behind the last) of each function.

    Raises:
        ConfigError: many are not closed.
    """
    found, unclosed = list[tuple[str, int, int]](), 0
    for start, words in enumerate(commands):
        if found and start < found[-1][2]:
            continue  # a function in a function is a part of it
        named = re.match(r"(?:function )?([A-Za-z_][\w-]*) ?\(\) ?\{?|function ([A-Za-z_][\w-]*) ?\{?", _shown(words))
        if named is None:
            continue
        depth, begun = 0, False
        for place in range(start, len(commands)):
            line = [raw(word) for word in commands[place]]
            depth += sum(text == "{" or text.endswith("(){") for text in line) - (line[0] == "}")
            begun = begun or depth > 0
            if begun and depth <= 0:
                found.append((named[1] or named[2], start, place + 1))
                break
        else:
            unclosed += 1
            if unclosed > MAX_SCRIPT_BRANCHES:
                raise ConfigError(f"more than {MAX_SCRIPT_BRANCHES} functions of the script are not closed")
    return found


def _body(definition: list[list[Word]]) -> list[list[Word]]:
    opened = definition[:-1]
    for k, words in enumerate(opened):
        brace = next((i for i, word in enumerate(words) if raw(word) == "{" or raw(word).endswith("(){")), None)
        if brace is not None:
            return [words[brace + 1 :], *opened[k + 1 :]] if words[brace + 1 :] else opened[k + 1 :]
    return []


def _called(words: list[Word]) -> str:
    """The name of what a command starts, behind the variables that are set for it."""
    return next((raw(w) for w in heads(words) if not re.match(r"[A-Za-z_]\w*\+?=", raw(w))), "")


def _shown(words: list[Word]) -> str:
    return " ".join(map(raw, words))
