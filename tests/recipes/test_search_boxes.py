"""The boxes: what is held out, what the corpora hold, what the shipped model is."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from pathlib import Path

import pytest

from verl_mt.data.dataset import load_rows
from verl_mt.extensions.toolbox.retrieval.lexical import BM25Index, read_corpus
from verl_mt.rewards.exact_match import compute_score
from verl_mt.tools.registry import load_tools

pytestmark = pytest.mark.slow  # commands, servers, many configurations

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "recipes" / "search" / "tiny"
sys.path.append(str(TINY))
world = importlib.import_module("world")
demonstrations = importlib.import_module("box_demonstrations")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What the command writes."""
    folder = tmp_path_factory.mktemp("boxes")
    before, sys.argv = sys.argv, ["world.py", "--out", str(folder)]
    try:
        world.main()
    finally:
        sys.argv = before
    return folder


def rows_of(file: Path):
    return load_rows(str(file), split="train")[0].rows


@pytest.mark.slow
def test_no_box_of_validation_occurs_in_any_training(data):
    splits = {split: {box.number for box in world.boxes(0, split)} for split in world.SPLITS}
    assert sum(map(len, splits.values())) == len(set().union(*splits.values())) == 9 * 9 * 8 * 7
    assert {box.number for box in world.boxes(5, "val")} == splits["val"]
    asked = {name: {row.extra_info["box"] for row in rows_of(data / f"{name}.parquet")} for name in ("train", "val")}
    assert len(asked["val"]) == 500 and asked["val"] <= splits["val"]
    assert len(asked["train"]) == 1800 and asked["train"] <= splits["train"]
    for row in rows_of(data / "val.parquet"):
        assert re.findall(r"\d+", row.prompt[-1]["content"]) == [str(row.extra_info["box"])]
    warm = world.questions(3, "warm_start")
    assert {next(warm).box.number for _ in range(200)} <= splits["warm_start"]


def test_every_answer_stands_in_the_passage_that_a_search_finds(data):
    passages = read_corpus(data / "corpus.jsonl")
    index = BM25Index(passages)
    rows = [*rows_of(data / "val.parquet")[:60], *rows_of(data / "train.parquet")[:60]]
    hits = index.search([f"in box {row.extra_info['box']}" for row in rows], topk=1)
    for row, ((position, _),) in zip(rows, hits, strict=True):
        title, text = passages[position]["contents"].split("\n")
        assert title == f"box {row.extra_info['box']}"
        (answer,) = row.ground_truth["target"]
        thing, count = re.fullmatch(r"There are (\w+) (\d\d)\.", text).groups()
        assert count == answer and thing in row.prompt[-1]["content"]


def test_in_the_shuffled_corpus_every_box_has_the_contents_of_another(data):
    right, wrong = (
        {p["id"]: p["contents"] for p in read_corpus(data / f"{name}.jsonl")} for name in ("corpus", "corpus_shuffled")
    )
    assert right.keys() == wrong.keys()
    assert sorted(text.split("\n")[1] for text in right.values()) == sorted(
        text.split("\n")[1] for text in wrong.values()
    )
    assert sum(right[number] == wrong[number] for number in right) / len(right) < 0.01  # others may have the same
    kept = [
        row.ground_truth["target"][0] in wrong[str(row.extra_info["box"])].split("\n")[1]
        for row in rows_of(data / "val.parquet")
    ]
    assert sum(kept) / len(kept) < 0.04  # a number may stand there by chance


def test_the_same_arguments_give_the_same_questions_and_another_seed_others():
    first, same, other = (
        [world.ask(box, random.Random(0)).text for box in world.boxes(seed, "val")[:50]] for seed in (0, 0, 1)
    )
    assert first == same != other


def test_a_demonstration_searches_restates_and_answers_right():
    for question, _ in zip(world.questions(0, "warm_start"), range(50)):
        messages = demonstrations.demonstration(question)
        assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert f"{question.box.thing} {question.answer}." in messages[3]["content"]
        assert compute_score(messages[4]["content"], {"target": [question.answer]}) == 1.0
        assert str(question.box.number) in messages[2]["tool_calls"][0]["function"]["arguments"]["query"]


def test_the_tool_is_what_the_demonstrations_show():
    tools = load_tools(TINY / "tools.yaml")
    assert tools.schemas() == demonstrations.tool_schemas() and tools["search"].settings.topk == 1


def test_the_shipped_model_is_small_and_of_the_calculators_shape():
    shipped, calculator = TINY / "checkpoint", REPO / "verl_mt" / "tiny" / "checkpoint"
    assert sum(file.stat().st_size for file in shipped.iterdir()) <= 4_000_000
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (shipped / name).read_text() == (calculator / name).read_text()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (shipped, calculator)]
    assert len({json.dumps(c | {"transformers_version": ""}, sort_keys=True) for c in configs}) == 1
