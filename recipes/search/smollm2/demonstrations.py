"""Questions, a corpus, and conversations that search it once and answer: what a cold start and training of search need.

    python recipes/search/smollm2/demonstrations.py --questions qa.jsonl --corpus wiki.jsonl --out data/search_smollm2

Questions and passages are read as by `recipes/search/prepare.py`. The first `--demonstrations` questions become
conversations: the question is the query, the passage is what the retrieval server's own index finds first, and the
answer follows; a question whose answer does not stand in that passage is left out. The last `--test` questions measure,
those between train, without their solutions. Questions stay in their order: neighbours are often about one text, so
that few texts are on two sides. Written are `demos.jsonl`, `train.parquet`, `test.parquet` and `corpus.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import Question, make_row, read_passages, read_questions

from verl_mt.errors import DataError, VerlMTError
from verl_mt.retrieval.lexical import BM25Index
from verl_mt.tools.search_client import format_documents

SYSTEM = (
    "Look the question up with the search tool. Then answer with words of the passage, as few as possible, between "
    "<answer> and </answer>."
)


def demonstration(question: Question, passage: str) -> list[dict[str, Any]] | None:
    """The conversation of someone who asks once and reads; None where the passage has none of the answers.

    The answer follows a space, as words of a passage do: without it a word has other tokens than those in the passage,
    and cannot be copied token for token (README.md has what that costs).
    """
    _, _, text = passage.partition("\n")
    answer = next((a for a in question.answers if a in text), None)
    if answer is None:
        return None
    call = {"name": "search", "arguments": {"query": question.text}}
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "search", "content": format_documents([passage])},
        {"role": "assistant", "content": f"<answer> {answer}</answer>"},
    ]


def write(
    questions: Sequence[Question], passages: Sequence[dict[str, str]], num_demonstrations: int, num_test: int, out: Path
) -> str:
    """Write the four files; returns one line about them.

    Raises:
        DataError: nothing would be left to train on.
    """
    first, last = num_demonstrations, len(questions) - num_test
    if min(first, num_test) < 1 or first >= last:
        raise DataError(
            f"--demonstrations {num_demonstrations} and --test {num_test}: of {len(questions)} questions each must "
            "get at least one, and leave one to train on"
        )
    hits = BM25Index(passages).search([q.text for q in questions[:first]], 1)
    found = [passages[hit[0][0]]["contents"] if hit else "" for hit in hits]
    made = [demonstration(question, passage) for question, passage in zip(questions, found)]
    kept = [messages for messages in made if messages is not None]
    out.mkdir(parents=True, exist_ok=True)
    _write_lines(out / "demos.jsonl", [{"messages": messages} for messages in kept])
    _write_lines(out / "corpus.jsonl", passages)
    for split, begin, end in (("train", first, last), ("test", last, len(questions))):
        rows = [
            make_row(questions[k], data_source="search", split=split, index=k, style="tool", system=SYSTEM)
            for k in range(begin, end)
        ]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
    return (
        f"{len(kept)} demonstrations ({first - len(kept)} questions left out: the answer is not in the passage that is "
        f"found), {last - first} training questions, {num_test} test questions, {len(passages)} passages -> {out}"
    )


def _write_lines(file: Path, objects: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(o, ensure_ascii=False) + "\n" for o in objects), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--questions", required=True, help="as for prepare.py questions --source")
    parser.add_argument("--corpus", required=True, help="as for prepare.py corpus --source")
    parser.add_argument("--demonstrations", type=int, default=300, help="questions that become conversations")
    parser.add_argument("--test", type=int, default=300, help="questions that measure")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    try:
        questions, passages = list(read_questions(args.questions, "train")), list(read_passages(args.corpus))
        print(write(questions, passages, args.demonstrations, args.test, args.out))
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
