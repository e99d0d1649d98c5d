"""The words that this project does not use, and where they stand.

    python tests/language.py [FILE ...]      # prints every hit; without files: in all pages and in all texts of verl_mt

Pages are read without code blocks, inline code, comments and link targets. Of the library's source these texts are
read: docstrings, the documentation of options, and the texts that are raised or yielded as errors.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SOURCE = REPO / "verl_mt"

INSTEAD = {
    r"doors?": "rollout driver",
    r"givers?|hand(?:s|ed|ing)? over|(?:give|gives|gave|giving) (?:the )?(?:new )?weights": "publish, publisher",
    r"given": "user-provided, set explicitly",
    r"knobs?": "option",
    r"spellings?": "alias",
    r"puts? away|putting away|(?:make|makes|made|making) room": "offload, free engine memory",
    r"census": "batch statistics",
    r"share of (?:a|the|its|each|every|this) rank|rank's share": "rank batch",
    r"(?<!in.)flights?": "in-flight prompts",
    r"model (?:that|which|who) sees|models? with eyes": "is multimodal",
    r"idle keys?|rests|at rest|(?:may|must|to|can) rest": "unused key",
    r"anew|once more": "restarts, again",
    r"(?:hold|holds|held|holding) (?:[\w']+ ){1,3}up|(?:hold|holds|held|holding) up": "delay",
    r"sampl(?:e|es|ed|ing) ahead|while others sample": "asynchronous training",
    r"logs? of prompts": "prompt log",
    r"what (?:came|comes|becomes|became|has become) of": "compatibility, or the result's name",
    r"of (?:one's|your|our|their|its|my|his|her) own|of (?:yours|ours|theirs|hers|mine)": "your ..., a custom ...",
    r"(?:by|for|to|with|from) whom|by what|to what end": "rewrite the sentence",
    r"shall": "the present tense, or must",
    r"so many|for long": "the number, or the noun for it",
    r"that which|those which|what of (?:it|them|this|that|the)|who asks|what is sampled": "the noun",
    r"houses?|rooms?|floors?|walls?(?!.time|.clock)|rings?": "package, module, layer, extension",
    r"ways? in|way of a|the way of the": "call path, or the noun",
    r"anybody": "you",
    r"can be had": "loads, exists",
}
"""Banned words as regular expressions (a space is any white space) -> what to write."""

_BANNED = [
    (re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])".replace(" ", r"\s+"), re.IGNORECASE | re.DOTALL), instead)
    for words, instead in INSTEAD.items()
]
_FRONT_MATTER = re.compile(r"\A---\n.*?^---$", re.DOTALL | re.MULTILINE)
_NOT_PROSE = re.compile(
    r"^ *```.*?^ *```[^\n]*$"  # code blocks
    r"|(?:(?<=\n\n)|\A)(?: {4,}\S[^\n]*\n)+"  # indented ones
    r"|<!--.*?-->"
    r"|(`+)(?!`).+?(?<!`)\1(?!`)"  # inline code
    r"|(?<=\])\([^)\s]*\)"  # where a link leads
    r"|<[a-z/][^>]*>"  # tags
    r"|https?://[^\s)>\]]+",
    re.DOTALL | re.MULTILINE,
)
CODE = "\N{MIDDLE DOT}"
"""Stands for each character of inline code, so that code is one word and matches nothing."""


@dataclass(frozen=True)
class Text:
    """A piece of prose, and where it begins."""

    file: Path
    line: int
    text: str
    kind: str = "page"

    def hits(self) -> Iterator[str]:
        """`file:line: 'words': write ...` for each banned word."""
        place = self.file.relative_to(REPO) if self.file.is_relative_to(REPO) else self.file
        prose = prose_of(self.text)
        found = [(hit.start(), hit, instead) for pattern, instead in _BANNED for hit in pattern.finditer(prose)]
        for start, hit, instead in sorted(found, key=lambda entry: entry[0]):
            line = self.line + prose.count("\n", 0, start)
            yield f"{place}:{line}: {' '.join(hit[0].split())!r}: write {instead}"


def prose_of(markdown: str) -> str:
    """Everything but the prose blanked, with the lines where they were."""

    def blank(found: re.Match[str]) -> str:
        inline = found[0].startswith("`") and "\n" not in found[0]
        return re.sub(r"[^\n]", CODE if inline else " ", found[0])

    return _NOT_PROSE.sub(blank, _FRONT_MATTER.sub(blank, markdown))


def pages() -> list[Path]:
    """The pages that a reader opens."""
    return [
        REPO / "README.md",
        REPO / "CONTRIBUTING.md",
        *sorted((REPO / "docs").glob("*.md")),
        *sorted((REPO / "recipes").rglob("README.md")),
        REPO / "benchmarks" / "README.md",
    ]


def page(path: Path) -> Text:
    return Text(path, 1, path.read_text(encoding="utf-8"))


def texts_of_source(path: Path) -> Iterator[Text]:
    """Docstrings, docs of options and error texts of a file of Python.

    A docstring is any text that is a statement, so those of attributes count. Values in an f-string become inline code.
    Other texts are found where they are written: a constant or f-string in `raise ...`, `yield ...` or
    `yield from ...`, and the second argument of `option(...)`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _text(node.value):
            yield Text(path, node.lineno, _text(node.value), "docstring")
        elif isinstance(node, ast.Call) and _name(node.func) == "option":
            doc = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "doc"), None)
            if doc is not None:
                yield Text(path, doc.lineno, _text(doc), "option")
        elif isinstance(node, ast.Raise | ast.Yield | ast.YieldFrom):
            for text in _said(node.exc if isinstance(node, ast.Raise) else node.value):
                yield Text(path, text.lineno, _text(text), "error")


def _said(node: ast.expr | None) -> Iterator[ast.expr]:
    """Texts of several words in an expression, the outermost of each."""
    if node is None:
        return
    if " " in _text(node):
        yield node
    elif not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _said(child)
            elif isinstance(child, ast.keyword):
                yield from _said(child.value)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def texts_of_library() -> list[Text]:
    return [text for path in sorted(SOURCE.rglob("*.py")) for text in texts_of_source(path)]


def main() -> None:
    files = [Path(name).resolve() for name in sys.argv[1:]]
    if files:
        texts = [text for path in files for text in (texts_of_source(path) if path.suffix == ".py" else [page(path)])]
    else:
        texts = [page(path) for path in pages()] + texts_of_library()
    hits = [hit for text in texts for hit in text.hits()]
    print(*hits, f"{len(hits)} hits in {len(texts)} texts", sep="\n")
    raise SystemExit(bool(hits))


if __name__ == "__main__":
    main()
