"""How the pages read: counts per 1,000 words. It holds nobody back.

    python tests/language_figures.py [--each] [FILE ...]      # --each: a line for each page, not only the sum

Counted in prose, without code and tables:

- clauses: `what`, `who`, `whom` and `whoever` inside a sentence that is no question. "Who" behind a noun counts too.
- semicolons, `you` (with `your`, `yourself`), imperatives (a sentence that begins with a verb of the list below), and
  sentences of more than 30 words. A list item is a sentence, and inline code is one word.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from language import CODE, REPO, page, pages, prose_of, texts_of_library

_LONG = 30
_WORD = re.compile(rf"[\w{CODE}]+(?:[-'’.,/][\w{CODE}]+)*")
_CLAUSE = re.compile(r"(?<!\A)\b(?:what|who|whom|whoever|whatever)\b", re.IGNORECASE)
_YOU = re.compile(r"\byou(?:r|rs|rself)?\b", re.IGNORECASE)
_IMPERATIVES = re.compile(
    r"(?:add|ask|begin|build|call|change|check|choose|compare|copy|count|create|declare|delete|do|draw|export|find|follow"
    r"|give|help|install|keep|leave|let|look|lower|make|mark|name|open|pass|pick|prefer|print|put|raise|read|remove"
    r"|repair|replace|restart|return|run|save|see|select|send|set|show|start|stop|store|subclass|switch|take|tell|train"
    r"|try|turn|use|wait|watch|write)\b",
    re.IGNORECASE,
)
HEADS = ("words", "clauses", "semicolons", "you", "imperatives", f"over {_LONG} words")


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of the prose: paragraphs and list items, without headings, tables and code."""
    lines = [line for line in prose_of(markdown).splitlines() if not re.match(r"\s*(?:\||#)", line)]
    text = re.sub(r"(?m)^\s*>\s?", "", "\n".join(lines))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        plain = re.sub(r"[*_\[\]]", "", " ".join(block.split()))
        plain = re.sub(r"^(?:-|\d+\.) ", "", plain)
        yield from (part for part in re.split(r"(?<=[.!?:])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[^a-z\s])", plain) if part)


def figures(markdown: str) -> Counter[str]:
    """Numbers, not per 1,000 words, by the names of `HEADS`."""
    counts: Counter[str] = Counter(dict.fromkeys(HEADS, 0))
    for sentence in sentences(markdown):
        words = _WORD.findall(sentence)
        question = sentence.endswith("?")
        found = (
            len(words),
            0 if question else len(_CLAUSE.findall(sentence)),
            sentence.count(";"),
            len(_YOU.findall(sentence)),
            bool(_IMPERATIVES.match(sentence)),
            len(words) > _LONG,
        )
        counts.update(dict(zip(HEADS, map(int, found))))
    return counts


def line(name: str, counts: Counter[str]) -> str:
    words = counts["words"]
    rates = "".join(f"{1000 * counts[head] / max(words, 1):>15.1f}" for head in HEADS[1:])
    return f"{name:44}{words:>8}{rates}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="a line for each page")
    parser.add_argument("files", nargs="*", type=Path, help="pages; without them all pages and the library's texts")
    arguments = parser.parse_args()
    print(f"{'per 1,000 words':44}{HEADS[0]:>8}" + "".join(f"{head:>15}" for head in HEADS[1:]))
    total: Counter[str] = Counter()
    for path in [file.resolve() for file in arguments.files] or pages():
        counts = figures(page(path).text)
        total.update(counts)
        if arguments.each:
            print(line(str(path.relative_to(REPO) if path.is_relative_to(REPO) else path), counts))
    print(line("all pages", total))
    if not arguments.files:
        texts = texts_of_library()
        for kind in ("docstring", "option", "error"):
            of_kind = [text for text in texts if text.kind == kind]
            counted = sum((figures(text.text) for text in of_kind), Counter())
            hits = sum(1 for text in of_kind for _ in text.hits())
            print(line(f"{len(of_kind)} {kind}s, {hits} banned words", counted))


if __name__ == "__main__":
    main()
