"""As much of a shell as launch scripts use: words, quotes, variables, arrays, comments, continued lines.

`read_script(text)` gives the commands with their variables put in. A variable that the script does not set stays as
`${oc.env:NAME}`: our configuration reads it from the environment, as the shell would.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verl_mt.bounds import MAX_SCRIPT_CHARACTERS, MAX_SCRIPT_WORK
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.migrate.shell_branches import execute
from verl_mt.extensions.compat.migrate.shell_loops import Function, take_functions
from verl_mt.extensions.compat.migrate.shell_values import Piece, Word, expansion, for_shell, kept, without_variables

_NESTED = r"[^()]*"
for _ in range(3):  # brackets in brackets in brackets: $((1 + (2 * 3)))
    _NESTED = rf"(?:[^()]|\({_NESTED}\))*"
_TOKEN = re.compile(
    rf"""
      (?P<continued>\\\n)
    | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
    | (?P<single>'[^']*')
    | (?P<double>"(?:\\.|\$\({_NESTED}\)|[^"\\])*")
    | (?P<escaped>\\.)
    | (?P<computed>\$\({_NESTED}\)|`[^`]*`)
    | (?P<variable>\$\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|\$[A-Za-z_]\w*|\$[@*\#?0-9])
    | (?P<arithmetic>(?<![\w$])\(\({_NESTED}\)\))
    | (?P<array>(?<==)\((?:'[^']*'|"(?:\\.|[^"\\])*"|(?<=\s)\#[^\n]*|\$\({_NESTED}\)|[^()'"])*\))
    | (?P<heredoc><<-?[ \t]*['"]?(?P<end>\w+)['"]?)
    | (?P<to_fill_in><[A-Za-z_][\w-]*>)
    | (?P<redirection>\d*(?:>>|>&|&>|<<<|>|<)[ \t]*(?:"[^"]*"|'[^']*'|[^\s;&|<>]*))
    | (?P<operator>\|\||&&|;;|[;|&\n])
    | (?P<space>[ \t\r]+)
    | (?P<text>[^\s'"\\$;&|<>()`]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMPUTED_NAME = re.compile(r"\$\{oc\.env:[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_COMPUTED = re.compile(rf"\$\({_NESTED}\)|`[^`]*`")
_FUNCTION = re.compile(r"^(?:function\s+)?([A-Za-z_]\w*)\s*\(\)\s*\{.*?^\}", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\d+)\])?(\+?)=")
_DEFAULT = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # ${A:-${B:-${C}}}
_NAME = r"[A-Za-z_]\w*|[1-9]"  # a word of the script's own command line is $1
_VARIABLE = re.compile(rf"\$(?:\{{({_NAME})(?::?[-=]({_DEFAULT}))?\}}|({_NAME}))")
_ANY = re.compile(rf"{_VARIABLE.pattern}|\$\{{(?!oc\.env:)({_DEFAULT})\}}")
"""The last group is an expansion that is more than a variable and its default: `${MODEL##*/}`, `${RATES[1]}`."""
_CUT_OFF = re.compile(r"--[a-z]|[+~]{1,2}\w+[.=]|\w+(?:\.\w+)+=")
"""What a command of no shell begins with: a flag or a key of the launch command above."""
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_SEQUENCE = re.compile(r"\$\(\s*seq((?:\s+-?\d+){1,3})\s*\)")
_OWN_NAME = re.compile(r"\$\{BASH_SOURCE(?:\[0\])?\}|\$BASH_SOURCE\b|\$\{0\}|\$0(?!\w)")
_OWN_FOLDER = re.compile(
    r"""\$\(\s*(?:cd\s+(?:--\s+)?"?\$\(\s*)?dirname\s+(?:--\s+)?"?(?P<file>[\w./+-]+)"?\s*\)"?"""
    r"""(?:\s*&?>\s*/dev/null(?:\s+2>&1)?)?(?:\s*&&\s*pwd(?:\s+-P)?\s*\))?"""
)
_FOLDER = re.compile(
    r"""\$\(\s*cd\s+(?:--\s+)?"?(?P<folder>/[\w./+@-]*)"?(?:\s*&?>\s*/dev/null(?:\s+2>&1)?)?"""
    r"""\s*&&\s*pwd(?:\s+-P)?\s*\)"""
)
_ARGUMENTS = re.compile(r"\$[@*]|\$\{@.*\}")
_KEYWORDS = {"if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac", "!"}
_KEYWORDS |= {"{", "}", "(", ")", "&&", "||", "|", ";;"}
_DECLARE = {"export", "local", "declare", "readonly"}
_OF_WORDS = {"text", "to_fill_in", "escaped", "single", "double", "variable", "computed", "array", "arithmetic"}


@dataclass(frozen=True)
class Command:
    """A simple command: the variables set for it, and its words."""

    env: dict[str, str]
    words: list[str]


@dataclass
class Script:
    """What a launch script does, as far as it was understood."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is missing because only a shell could say it."""
    exported: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    """Name -> its definition as written, for what the shell computes with it."""
    file: str = ""
    """Where it lies; "" = not known."""
    sourced: list[str] = field(default_factory=list)
    """Files that it reads with `source`, as it names them."""
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    launching: dict[str, Function] = field(default_factory=dict)
    """Functions that start a launch command with the words of their call."""

    reading: list[str] = field(default_factory=list)
    """Files that are being read: the script's own, and those that it is in by `source`."""
    depth: int = 0
    """Branches that are being read, in one another."""
    work: int = 0
    """See `spend`."""

    def spend(self, characters: int) -> None:
        """Count what reading the script makes, before it is made.

        Raises:
            ConfigError: it is too much.
        """
        self.work += characters
        if self.work > MAX_SCRIPT_WORK:
            raise ConfigError(
                f"the script's variables, loops and branches make more than {MAX_SCRIPT_WORK} characters. Give the "
                "launch command alone, with its values"
            )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def run(self, words: list[Word]) -> None:
        """One simple command."""
        _run(words, self)

    def fill(self, word: Word) -> str:
        """A word with its variables put in."""
        return _fill_word(word, self)

    def shown(self, word: Word) -> str:
        """A word as a shell reads it, with the script's own variables put in."""
        return "".join(
            f'"{_for_inside(text, self)}"' if kind == "quoted" else _for_inside(text, self) for kind, text in word
        )


def read_script(text: str, file: Path | None = None) -> Script:
    """What a script does.

    Args:
        file: where it lies, which is what `$0` and `BASH_SOURCE` mean in it.

    Raises:
        ConfigError: a quote or a bracket that is not closed; a launch command in a loop; a script that is too large.
    """
    script = Script(file="" if file is None else str(file.resolve()))
    _read(text, script)
    return script


def _read(text: str, script: Script) -> None:
    if len(text) > MAX_SCRIPT_CHARACTERS:
        raise ConfigError(
            f"{script.file or 'the script'} has {len(text)} characters, {MAX_SCRIPT_CHARACTERS} at most are read. Give "
            "the launch command alone"
        )
    if script.file and script.file in script.reading:
        raise ConfigError(f"{script.file} reads itself with `source`. Give the launch command alone")
    script.reading.append(script.file)
    script.functions |= {found[1]: found.group() for found in _FUNCTION.finditer(text)}
    commands, functions = take_functions(list(_split(text)), script.variables, script.arrays)
    script.launching |= functions
    execute(commands, script)
    script.reading.pop()


def _source(words: list[Word], script: Script) -> None:
    """`source FILE`: what the file sets, where it is here."""
    named = _fill_word(words[1], script)
    file = _here(named, script.file)
    script.sourced.append(named)
    if file is None:
        shown = _COMPUTED_NAME.sub("...", named)
        script.note(f"source {shown}: the file is not here, and what it sets is missing")
        return
    if str(file) != os.path.normpath(named):
        script.note(f"source {named}: read from {file}")
    text, before = file.read_text(errors="replace"), script.file
    script.file = str(file)
    _read(text, script)
    script.file = before


def _here(named: str, script_file: str) -> Path | None:
    """The file of a path; a repository that lies elsewhere is looked for from the script upwards."""
    if not script_file:
        return None
    path = Path(os.path.normpath(_COMPUTED_NAME.sub("", named).lstrip("/") if "${" in named else named))
    script = Path(script_file)
    direct = path if path.is_absolute() else script.parent / path
    if direct.is_file() and "${" not in named:
        return direct
    parts = [part for part in path.parts if part not in ("/", "..")]
    tails = [Path(*parts[k:]) for k in range(len(parts) - 1)]  # a folder and a name at least
    return next((up / tail for tail in tails for up in script.parents if (up / tail).is_file()), None)


def _run(words: list[Word], script: Script) -> None:
    """One simple command: set its variables, or note it with them."""
    while words and _raw(words[0]) in _KEYWORDS:
        words = words[1:]
    declares = bool(words) and _raw(words[0]) in _DECLARE
    exports = declares and _raw(words[0]) == "export"
    words = words[1:] if declares else words
    env: dict[str, str] = {}
    while words and (found := _ASSIGNMENT.match(words[0][0][1])) and words[0][0][0] == "plain":
        name, place, plus = found.groups()
        kind, first = words[0][0]
        value: Word = [(kind, first[found.end() :]), *words[0][1:]]
        if value[-1][0] == "array":
            inner = [w for part in _split(value[-1][1]) for w in part]
            old = script.arrays.get(name, []) if plus else []
            script.arrays[name] = old + [text for word in inner for text in _expand(word, script)]
        elif place is not None:
            _set_item(name, int(place), _fill_word(value, script), script)
        else:
            env[name] = (script.variables.get(name, "") if plus else "") + _fill_word(value, script)
        words = words[1:]
    if words and _raw(words[0]) in ("source", ".") and len(words) > 1:
        script.variables |= env
        _source(words, script)
        return
    if words and not declares:
        command = Command(env, [text for word in words for text in _expand(word, script)])
        _note_cut(command, script)
        script.commands.append(command)
        return
    script.variables |= env
    if exports:
        script.exported |= env


def _note_cut(command: Command, script: Script) -> None:
    """A line without its backslash, or a comment between continued lines, ends the command above."""
    first = command.words[0] if command.words else ""
    before = script.commands[-1].words[:1] if script.commands else []
    if before and not _CUT_OFF.match(before[0]) and _CUT_OFF.match(first):
        script.note(
            f"the command ends before {for_shell(first)}: the line above lacks its backslash or is a comment, so that "
            "the script itself starts without what follows"
        )


def _set_item(name: str, place: int, value: str, script: Script) -> None:
    script.spend(place)
    items = [*script.arrays.get(name, [])]
    items += [""] * (place + 1 - len(items))
    items[place] = value
    script.arrays[name] = items


def _split(text: str) -> Iterator[list[Word]]:
    """Lists of words between line ends, `;`, `&&` and pipes. Comments, redirections and heredocs are left out."""
    words: list[Word] = []
    word: Word = []
    place, heredocs = 0, list[str]()
    while found := _TOKEN.match(text, place):
        kind, token, place = found.lastgroup if found["heredoc"] is None else "heredoc", found.group(), found.end()
        if kind in ("space", "operator", "redirection", "heredoc", "comment"):
            words += [word] if word else []
            word = []
        if kind == "heredoc":
            heredocs.append(found["end"])
        elif kind == "operator":
            if words:
                yield words
            if token == ";;":
                yield [[("plain", token)]]
            words = [[("plain", token)]] if token in ("&&", "||", "|") else []
            if token == "\n":
                place = _after_heredocs(text, place, heredocs)
        elif kind in _OF_WORDS:
            word = [*word, _piece(kind, token, text, found.start())]
    words += [word] if word else []
    if words:
        yield words


def _piece(kind: str, token: str, text: str, place: int) -> Piece:
    if kind == "single":
        return "plain", token[1:-1]
    if kind == "double":
        return "quoted", re.sub(r"\\(\n|[\"\\`])", lambda m: m.group(1).strip("\n"), token[1:-1])
    if kind == "escaped":
        return "plain", token[1:]
    if kind == "array":
        return "array", token[1:-1]
    if token in "'\"" or (token == "(" and text[place - 1 : place] == "="):
        raise ConfigError(f"line {text.count(chr(10), 0, place) + 1}: {token} is not closed")
    return ("plain" if kind in ("text", "to_fill_in", "arithmetic") else "expands"), token


def _after_heredocs(text: str, place: int, ends: list[str]) -> int:
    for end in ends:
        over = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(text, place)
        place = len(text) if over is None else over.end()
    ends.clear()
    return place


def _raw(word: Word) -> str:
    return "".join(text for _, text in word)


def _expand(word: Word, script: Script) -> list[str]:
    """A word with its variables put in; an array, and a bare variable that holds several words, become several."""
    raw = _raw(word)
    if len(word) == 1 and word[0][0] in ("expands", "quoted"):
        if array := _ARRAY.fullmatch(raw):
            if array.group(1) not in script.arrays:
                script.note(f"the array {array.group(1)} is not set in this script: what it holds is missing")
            items = script.arrays.get(array.group(1), [])
            script.spend(sum(map(len, items)) + len(items))
            return items
        if _ARGUMENTS.fullmatch(raw):
            script.note(f"{raw}: append the arguments of the script to the command")
            return []
        if word[0][0] == "expands" and (sequence := _SEQUENCE.fullmatch(_for_inside(raw, script))):
            return _numbers([int(number) for number in sequence[1].split()], script)
        if word[0][0] == "expands" and (variable := _VARIABLE.fullmatch(raw)):
            filled = _fill_word(word, script)
            return filled.split() if (variable.group(1) or variable.group(3)) in script.variables else [filled]
    return [_fill_word(word, script)]


def _numbers(given: list[int], script: Script) -> list[str]:
    """What `seq` prints: to last; first to last; first, step, last."""
    first, step, last = (given[0], 1, given[1]) if len(given) == 2 else given if len(given) == 3 else (1, 1, given[0])
    if step == 0:
        return []  # seq refuses it
    numbers = range(first, last + (1 if step > 0 else -1), step)
    script.spend(max(0, (numbers.stop - numbers.start) // step) * len(str(last)))
    return [str(number) for number in numbers]


def _fill_word(word: Word, script: Script) -> str:
    filled = "".join(_fill(text, script) if kind in ("expands", "quoted") else text for kind, text in word)
    script.spend(len(filled))
    return filled


def _for_inside(text: str, script: Script) -> str:
    """A computation with the script's own variables put in, since the result is a command without them."""

    def value(found: re.Match[str]) -> str:
        if found.group(4) is not None:
            return for_shell(_expansion(found, script))
        known = script.variables.get(found.group(1) or found.group(3))
        script.spend(len(known or ""))
        return found.group() if known is None else for_shell(known)

    return _ANY.sub(value, text)


def _expansion(found: re.Match[str], script: Script) -> str:
    """An expansion that is more than a variable and its default; one of another language stays as it is."""
    known = expansion(found.group(4), script.variables, script.arrays, lambda text: _fill(text, script))
    name = re.match(r"#?([A-Za-z_]\w*)(?!\w|:?[-+=])", found.group(4))
    if known is not None and name is not None and not {name[1]} & {*script.variables, *script.arrays}:
        script.note(f"${name[1]}: not set by the script; set it before")
    return found.group() if known is None else known


def _computed(found: re.Match[str], script: Script) -> str:
    text = _for_inside(found.group(), script)
    if _OWN_NAME.search(text):
        if not re.fullmatch(r"[\w./+-]+", script.file):
            script.note(f"{text}: where the script lies is not known here; write the folder in its place")
        text = _OWN_NAME.sub(lambda name: script.file or name.group(), text)
        if (folder := _OWN_FOLDER.fullmatch(text)) is not None:
            return os.path.dirname(folder["file"])
    if (folder := _FOLDER.fullmatch(text)) is not None:
        return os.path.normpath(folder["folder"])
    if not text.startswith("$(("):
        return kept(text)
    # Between $(( and )) a bare name is a variable, too.
    text = re.sub(r"(?<![\w${])[A-Za-z_]\w*", lambda name: for_shell(script.variables.get(name[0], name[0])), text)
    usual = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", text)
    sum_ = re.fullmatch(r"\$\(\(([\d\s+*/()%-]+)\)\)", usual)
    try:
        number = None if sum_ is None else str(int(_value_of(ast.parse(sum_[1].strip(), mode="eval").body)))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):  # not a sum, or a long one
        number = None
    return number if number is not None and usual == text else kept(text, number)


def _value_of(node: ast.expr) -> int:
    """Whole numbers only, as in a shell; a division is cut towards zero."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    if isinstance(node, ast.BinOp):
        a, b = _value_of(node.left), _value_of(node.right)
        rules = {ast.Add: lambda: a + b, ast.Sub: lambda: a - b, ast.Mult: lambda: a * b, ast.Div: lambda: int(a / b)}
        if type(node.op) in rules:
            return rules[type(node.op)]()
    raise ValueError("not a sum that is known here")


def _fill(text: str, script: Script) -> str:
    text = _COMPUTED.sub(lambda found: _computed(found, script), text)

    def value(found: re.Match[str]) -> str:
        if found.group(4) is not None:
            return _expansion(found, script)
        name, default = found.group(1) or found.group(3), found.group(2)
        known = script.variables.get(name)
        if known is None and script.arrays.get(name):
            known = script.arrays[name][0]  # an array's name alone is its first item
        script.spend(len(known or ""))
        # A variable that is empty, or would be, gives way to a default that comes later.
        if known is not None and (default is None or known not in ("", f"${{oc.env:{name},}}")):
            return known
        if default is not None:
            filled = _fill(default.replace('"', ""), script)
            if known == "":
                return filled
            if "${" not in filled:
                return f"${{oc.env:{name},{filled}}}"
            return kept(f"${{{name}:-{for_shell(filled)}}}", without_variables(filled))
        return f"${{oc.env:{name}}}"

    escaped = text.replace("\\$", "\0")
    return _ANY.sub(value, escaped).replace("\0", "$")
