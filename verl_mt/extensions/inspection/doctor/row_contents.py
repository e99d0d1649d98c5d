"""What rows hold: repeated rows, truths that are missing or disagree, placeholders that nobody filled in. The check
`rows' contents` of a run and `verl-mt doctor FILE` both say it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from verl_mt.data.dataset import DataRow

_LONGEST_TRUTH = 100
_MANY, _SOME, _FEW = 0.1, 0.02, 0.01
"""Shares of the rows: repetition may be meant, contradictions and gaps are not."""
_EMPTY_WORDS = {"", "nan", "none", "null", "n/a", "<na>"}
_NUMBERS_OF_ROWS = re.compile(r"(?i)^(?:.*_)?(?:index|idx|id|uid|uuid|row|number)$")
_PLACEHOLDER = re.compile(
    r"\{\{?\s*(?:question|problem|input|query|prompt|instruction|task|text|content|context)\s*\}?\}"
)
_MANGLED = re.compile(r"Ã[\x80-\xbf©¨¤¶¼±]|â€[™œ\x9d“”˜¦]|Â[ °±»«]|\ufffd")
_FINAL = re.compile(r"(?:####[ \t]*([^\n]+?)|\\boxed\{([^{}\n]+)\})\s*\Z")


def doubts(rows: Sequence[DataRow]) -> Iterator[tuple[str, str]]:
    """(what is probably not meant, what to do), of the rows of one split."""
    if not rows:
        return
    yield from _repeated(rows)
    yield from _contradictions(rows)
    yield from _missing_truths(rows)
    yield from _own_solutions(rows)
    yield from _texts(rows)


def _share(having: Sequence[Any], rows: Sequence[Any]) -> float:
    return len(having) / len(rows)


def truth_text(truth: Any) -> str | None:
    """A ground truth as a model would write it; None where it has none, or is no short text (test cases, rubrics)."""
    if isinstance(truth, dict):
        keys = [k for k in ("target", "targets", "answer", "value", "ground_truth", "label") if k in truth]
        return truth_text(truth[keys[0]]) if keys else None
    if isinstance(truth, list | tuple):
        return truth_text(truth[0]) if truth else None
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)
    if not isinstance(truth, str | int | float):
        return None
    text = str(truth).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip()  # a worked solution, as GSM8K writes it
    return text if text and len(text) <= _LONGEST_TRUTH and "\n" not in text and text[0] not in "{[" else None


def words_of(row: DataRow) -> str:
    """The prompt without its system message, in lower case and single spaces: another layout is the same question. The
    whole row where an environment's `reset` brings the prompt."""
    said: list[Any] = [
        (m.get("role"), m.get("content"), m.get("tool_calls")) for m in row.prompt if m.get("role") != "system"
    ]
    said = said or [row.raw]
    return re.sub(r"(?:\\[nt]|\s)+", " ", json.dumps(said, default=repr).lower())


def _arguments(row: DataRow) -> str:
    """What makes the same question another problem: arguments of tools and users, media."""
    extra = {k: v for k, v in row.extra_info.items() if not _NUMBERS_OF_ROWS.match(k)}
    media = {k: v for k, v in row.raw.items() if k in ("images", "videos", "env_config", "metadata")}
    return repr((extra, media))


def _repeated(rows: Sequence[DataRow]) -> Iterator[tuple[str, str]]:
    first: dict[str, DataRow] = {}
    again = [r for r in rows if first.setdefault(repr((words_of(r), r.ground_truth, _arguments(r))), r) is not r]
    if len(rows) > 1 and _share(again, rows) > _MANY:
        yield (
            f"{len(again)} of {len(rows)} rows repeat the prompt and ground truth of an earlier row (the first is "
            f"{again[0].place}): only {len(first)} are different",
            "leave the repetitions out. More passes over the rows are trainer.total_epochs",
        )


def _contradictions(rows: Sequence[DataRow]) -> Iterator[tuple[str, str]]:
    known: dict[str, DataRow] = {}
    other = []
    for row in rows:
        text = truth_text(row.ground_truth)
        if text is None:
            continue
        earlier = known.setdefault(repr((words_of(row), row.data_source, _arguments(row))), row)
        if truth_text(earlier.ground_truth) != text:
            other.append((row, earlier))
    if _share(other, rows) > _SOME:
        row, earlier = other[0]
        yield (
            f"{len(other)} of {len(rows)} rows ask the same as an earlier row and have another ground truth "
            f"({row.place}: {row.ground_truth!r}; {earlier.place}: {earlier.ground_truth!r})",
            "keep one truth of each question, or put what tells the rows apart into the prompt",
        )


def is_empty(truth: Any) -> bool:
    """Whether nothing stands where a truth should be."""
    if isinstance(truth, str):
        return truth.strip().lower() in _EMPTY_WORDS
    return truth is None or truth != truth or (isinstance(truth, list | tuple | dict) and not truth)


def _missing_truths(rows: Sequence[DataRow]) -> Iterator[tuple[str, str]]:
    by_source: dict[str, list[DataRow]] = defaultdict(list)
    for row in rows:
        by_source[row.data_source].append(row)
    for source, of_source in by_source.items():
        empty = [row for row in of_source if is_empty(row.ground_truth)]
        if empty and len(empty) < len(of_source) and _share(empty, of_source) >= _FEW:
            yield (
                f"{len(empty)} of {len(of_source)} rows of data source {source!r} have an empty ground truth (the "
                f"first is {empty[0].place}: {empty[0].ground_truth!r}): no answer to them is right",
                "fill in the truths, or leave these rows out",
            )


def _own_solutions(rows: Sequence[DataRow]) -> Iterator[tuple[str, str]]:
    """Rows whose own worked solution ends with another answer than the truth."""
    having, other = 0, []
    for row in rows:
        truth = truth_text(row.ground_truth)
        texts = [v for v in {**row.extra_info, **row.raw}.values() if isinstance(v, str)]
        ends = [found[1] or found[2] for text in texts if (found := _FINAL.search(text))]
        if truth is None or not ends or any(text == row.ground_truth for text in texts if _FINAL.search(text)):
            continue
        having += 1
        if all(_plain(end) != _plain(truth) for end in ends):
            other.append((row, ends[0]))
    if having and len(other) / having > _MANY:
        row, end = other[0]
        yield (
            f"{len(other)} of {having} rows have a ground truth that their own solution does not end with "
            f"({row.place}: {row.ground_truth!r}, the solution ends with {end!r})",
            "see whether truths and prompts are of the same rows: a sort or a merge may have moved one column",
        )


def _plain(text: str) -> str:
    return re.sub(r"[\s,$%]|\.0+$|\.$", "", text).lower()


def _texts(rows: Sequence[DataRow]) -> Iterator[tuple[str, str]]:
    found: dict[str, list[tuple[DataRow, str]]] = defaultdict(list)
    for row in rows:
        asked = [m["content"] for m in row.prompt if m.get("role") == "user" and isinstance(m.get("content"), str)]
        if asked and asked[-1].strip().lower() in _EMPTY_WORDS:
            found["empty"].append((row, asked[-1]))
        if gap := next((g[0] for text in asked if (g := _PLACEHOLDER.search(text))), None):
            found["gap"].append((row, gap))
        if odd := next((g[0] for text in asked if (g := _MANGLED.search(text))), None):
            found["odd"].append((row, odd))
    says = {
        "empty": ("ask nothing", "fill the prompt column, or leave these rows out"),
        "gap": ("hold a placeholder that nobody filled in", "fill it in where the rows are made (str.format, say)"),
        "odd": (
            "hold text that was decoded with the wrong encoding",
            "read the source as UTF-8 where the rows are made",
        ),
    }
    for kind, having in found.items():
        what, fix = says[kind]
        if _share(having, rows) >= _FEW:
            row, text = having[0]
            yield f"{len(having)} of {len(rows)} prompts {what} ({row.place}: {text!r})", fix


def commonest(rows: Sequence[DataRow]) -> tuple[str, float, int]:
    """The truth that most rows have, their share of those with a short one, and the number of these; distinct
    questions count once."""
    texts = {words_of(row): text for row in rows if (text := truth_text(row.ground_truth)) is not None}
    if not texts:
        return "", 0.0, 0
    text, count = Counter(texts.values()).most_common(1)[0]
    return text, count / len(texts), len(texts)
