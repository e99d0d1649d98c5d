"""Questions as parquet rows in verl's schema, and passages as a corpus for `python -m verl_mt.retrieval`.

    python recipes/search/prepare.py questions --source nq.jsonl --split train --out data/search/train.parquet
    python recipes/search/prepare.py corpus --source wiki.jsonl.gz squad.json --out data/search/corpus.jsonl

Questions: JSON Lines with `question` and the answers under `golden_answers` (FlashRAG), `answer` (NQ-open) or
`answers`; a SQuAD-style JSON file; or the name of a hub data set (needs `pip install datasets`).
Passages: JSON Lines or a JSON list with `contents` or `text`, and `title`; or a SQuAD-style JSON file, whose paragraphs
they are.

`--style tool` is for models that call tools by their chat template, `--style tags` for Search-R1's tags.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_mt.errors import DataError, VerlMTError

ANSWER_COLUMNS = ("golden_answers", "answers", "answer")

SYSTEM = (
    "Answer the question. Where you are not certain, look it up with the `search` tool, as often as you need. "
    "Think inside <think> and </think> before every search and before the answer. "
    "Close with the answer alone, as short as possible, between <answer> and </answer>, e.g. <answer>Lima</answer>."
)
TAGS = (
    "Answer the question below. First reason between <think> and </think>; do so again whenever you learn something. "
    "If you lack knowledge, write a query between <search> and </search>: what is found comes back between "
    "<information> and </information>. Search as often as you need. When nothing is missing, write the answer alone, "
    "as short as possible, between <answer> and </answer>, e.g. <answer>Lima</answer>.\nQuestion: {question}"
)


@dataclass(frozen=True)
class Question:
    """One question and the answers that count as right."""

    text: str
    answers: list[str]


def make_row(
    question: Question, *, data_source: str, split: str, index: int, style: str, system: str = SYSTEM
) -> dict[str, Any]:
    """One row in verl's schema; `system` is the tool style's message."""
    truth = {"target": question.answers}
    if style == "tags":
        prompt = [{"role": "user", "content": TAGS.format(question=question.text)}]
    else:
        prompt = [{"role": "system", "content": system}, {"role": "user", "content": question.text}]
    create_kwargs = {"question": question.text, "ground_truth": truth, "data_source": data_source}
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question.text,
            "need_tools_kwargs": style == "tool",
            "tools_kwargs": {"search": {"create_kwargs": create_kwargs}} if style == "tool" else None,
        },
    }


def read_questions(source: str, split: str) -> Iterator[Question]:
    """The questions of a file or hub data set.

    Raises:
        DataError: no such file, a hub name without `datasets`, or a record that is no question; names its place.
    """
    for where, record in _records(source, split):
        if "paragraphs" in record:
            yield from _squad_questions(record, where)
            continue
        question, column = record.get("question"), next((c for c in ANSWER_COLUMNS if c in record), None)
        if not isinstance(question, str) or column is None:
            raise DataError(f"{where}: needs question and one of {', '.join(ANSWER_COLUMNS)}; it has {sorted(record)}")
        yield Question(question.strip(), _answers(record[column], f"{where}, {column}"))


def read_passages(source: str) -> Iterator[dict[str, str]]:
    """`{id, contents}` of each passage, its title in the first line, in quotes as Search-R1 has it.

    Raises:
        DataError: no such file, or a record that is no passage; names its place.
    """
    for number, (where, record) in enumerate(_records(source, "")):
        for part, text in enumerate(_texts(record, where)):
            yield {"id": str(record.get("id", f"{Path(source).name}-{number}-{part}")), "contents": text}


def _texts(record: dict[str, Any], where: str) -> Iterator[str]:
    title = record.get("title")
    if "paragraphs" in record:
        texts = [paragraph.get("context") for paragraph in record["paragraphs"]]
    else:
        texts = [record.get("contents", record.get("text"))]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: needs contents or text; it has {sorted(record)}")
        yield text if title is None else f'"{str(title).replace("_", " ")}"\n{text}'


def _squad_questions(article: dict[str, Any], where: str) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        for asked in paragraph.get("qas", []):
            yield Question(asked["question"].strip(), _answers([a["text"] for a in asked["answers"]], where))


def _answers(given: Any, where: str) -> list[str]:
    listed = given if isinstance(given, list) else [given]
    answers = [text for text in dict.fromkeys(str(a).strip() for a in listed if isinstance(a, str | int)) if text]
    if not answers:
        raise DataError(f"{where}: no answer in {given!r}")
    return answers


def _records(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of each record: a line, an item of a list, an article of a SQuAD file, a row of the hub."""
    path = Path(source).expanduser()
    if not path.suffix and not path.exists() and split:
        yield from _hub_records(source, split)
        return
    if not path.is_file():
        raise DataError(f"{source} does not exist (looked at {path.absolute()})")
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    lines = path.name.removesuffix(".gz").endswith(".jsonl")
    for where, record in _json_lines(text, path) if lines else _json_items(text, path):
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object, got {type(record).__name__}")
        yield where, record


def _json_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON: {error}; download the file again") from error


def _json_items(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}; lines of JSON are .jsonl") from error
    items = content.get("data") if isinstance(content, dict) else content
    if not isinstance(items, list):
        raise DataError(f"{path}: expected a list, or SQuAD's {{data: [...]}}, got {type(content).__name__}")
    for number, item in enumerate(items):
        yield f"{path}, item {number}", item


def _hub_records(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{source!r} is not a file; to read it from the hub, pip install datasets") from error
    name, _, config = source.partition(":")
    for number, record in enumerate(load_dataset(name, config or None, split=split)):
        yield f"{source}[{split}] row {number}", record


def write_questions(args: argparse.Namespace) -> str:
    """The parquet file; returns what was done."""
    questions = islice(read_questions(args.source, args.split), args.skip, args.limit and args.skip + args.limit)
    common = {"data_source": args.data_source, "split": args.split, "style": args.style, "system": args.system}
    rows = [make_row(question, index=args.skip + index, **common) for index, question in enumerate(questions)]
    if not rows:
        raise DataError(f"{args.source}: no questions in it" + (f" after the first {args.skip}" if args.skip else ""))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), args.out)
    return f"{len(rows)} questions -> {args.out}"


def write_corpus(args: argparse.Namespace) -> str:
    """The JSON Lines file, each text once; returns what was done."""
    passages: Iterable[dict[str, str]] = (p for source in args.source for p in read_passages(source))
    by_text = {passage["contents"]: passage for passage in passages}
    if not by_text:
        raise DataError(f"{', '.join(args.source)}: no passages in it")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(passage, ensure_ascii=False) + "\n" for passage in by_text.values())
    return f"{len(by_text)} passages -> {args.out}"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="questions|corpus")
    questions = commands.add_parser("questions", help="a parquet file")
    questions.add_argument(
        "--source", required=True, help="a file, or a hub name such as RUC-NLPIR/x or RUC-NLPIR/x:nq"
    )
    questions.add_argument("--split", default="train", choices=("train", "test"))
    questions.add_argument("--style", default="tool", choices=("tool", "tags"))
    questions.add_argument("--system", default=SYSTEM, help="the system message of --style tool")
    questions.add_argument("--data-source", default="searchR1_nq", help="names validation metrics")
    questions.add_argument("--skip", type=int, default=0, help="leave out the first so many questions")
    questions.add_argument("--limit", type=int, help="at most so many questions")
    questions.add_argument("--out", required=True, type=Path)
    questions.set_defaults(write=write_questions)
    corpus = commands.add_parser("corpus", help="a JSON Lines file")
    corpus.add_argument("--source", required=True, nargs="+")
    corpus.add_argument("--out", required=True, type=Path)
    corpus.set_defaults(write=write_corpus)
    args = parser.parse_args(argv)
    try:
        print(args.write(args))
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
