"""Corpora, BM25 and dense search: what is found, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

from verl_mt.errors import ConfigError, DataError
from verl_mt.extensions.toolbox.retrieval.dense import DenseIndex, Encoder, EncoderOptions
from verl_mt.extensions.toolbox.retrieval.lexical import BM25Index, read_corpus

PASSAGES = [
    {"id": "0", "contents": "Paris\nParis is the capital of France."},
    {"id": "1", "contents": "Rome\nRome is the capital of Italy, far from Paris."},
    {"id": "2", "contents": "Cheese\nCheese is made of milk."},
]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_passages_are_read_with_all_they_hold(tmp_path, name):
    file = tmp_path / name
    text = "\n".join(json.dumps(passage) for passage in PASSAGES) + "\n\n"
    file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert read_corpus(file) == PASSAGES


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b'{"contents": "a"}\n{"text": "b"}', "line 2: expected an object with the text 'contents'"),
        (b'{"contents": "a"}\n["b"]', "line 2: expected an object"),
        (b'{"contents": 3}', "line 1: expected an object"),
        (b'{"contents": "a"', "line 1: not JSON"),
        (b"\xff\xfe", "after line 0: cannot be read"),
        (b"\n\n", "no passages in it"),
    ],
)
def test_a_corpus_that_is_none_is_refused_with_its_line(tmp_path, content, part):
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_corpus(file)
    assert str(file) in str(error.value) and part in str(error.value)
    with pytest.raises(DataError, match="no corpus"):
        read_corpus(tmp_path / "absent.jsonl")


def test_bm25_finds_the_passages_that_share_a_word_with_the_query():
    hits = BM25Index(PASSAGES).search(["capital France", "milk", "nothing known here", "the of", ""], topk=3)
    assert [[position for position, _ in found] for found in hits] == [[0, 1], [2], [], [], []]
    assert hits[0][0][1] > hits[0][1][1] > 0


def test_bm25_scores_are_those_of_the_formula():
    """Lucene's BM25: sum of ln(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 (1 - b + b l / mean l)), k1 1.5, b 0.75."""
    index = BM25Index(PASSAGES)
    tokens = index._tokens([passage["contents"] for passage in PASSAGES])
    lengths = [len(found) for found in tokens]
    n, f = 2, tokens[1].count("capital")
    idf = math.log(1 + (3 - n + 0.5) / (n + 0.5))
    expected = idf * f / (f + 1.5 * (1 - 0.75 + 0.75 * lengths[1] / (sum(lengths) / 3)))
    ((_, (_, score)),) = index.search(["capital"], topk=2)
    assert score == pytest.approx(expected, rel=1e-5)


def test_of_equal_scores_the_earlier_passage_comes_first():
    index = BM25Index([{"contents": "same words"}] * 5)
    assert [position for position, _ in index.search(["words"], topk=3)[0]] == [0, 1, 2]


def test_a_corpus_without_a_word_is_refused():
    with pytest.raises(DataError, match="no word"):
        BM25Index([{"contents": "the"}, {"contents": "a"}])


@pytest.mark.slow
def test_bm25_finds_the_gold_passage_of_real_questions(shared_data):
    """Among 6,359 real passages; a title of its own in each."""
    tasks = shared_data / "tasks"
    passages = read_corpus(tasks / "search_corpus.jsonl.gz")
    questions = [json.loads(line) for line in (tasks / "search_qa.jsonl").read_text().splitlines()][::20]
    found = BM25Index(passages).search([q["question"] for q in questions], topk=3)
    right = [q["gold_passage"] in {passages[p]["id"] for p, _ in hits} for q, hits in zip(questions, found)]
    assert sum(right) / len(right) > 0.85


# ------------------------------------------------------------------------------------------------ dense
@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    """A tiny BERT with random weights and a vocabulary of the passages' words."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({w for p in PASSAGES for w in p["contents"].lower().replace(".", " ").replace(",", " ").split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, ":", ".", ","]))
    tokenizer = BertTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_nearest_passage_of_a_passage_is_itself(encoder, pooling):
    options = EncoderOptions(encoder, pooling, query_prefix="", passage_prefix="", batch_size=2)
    hits = DenseIndex(PASSAGES, options).search([p["contents"] for p in PASSAGES], topk=2)
    assert [found[0][0] for found in hits] == [0, 1, 2] and all(len(found) == 2 for found in hits)
    assert [found[0][1] for found in hits] == pytest.approx([1.0] * 3, abs=1e-5)
    assert DenseIndex(PASSAGES, options).search([], topk=2) == []


def test_vectors_are_the_mean_of_the_real_tokens_states_whatever_the_batch(encoder):
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = [p["contents"] for p in PASSAGES]
    together = Encoder(EncoderOptions(encoder, batch_size=3)).encode(texts)
    alone = Encoder(EncoderOptions(encoder, batch_size=1)).encode(texts)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
    with torch.no_grad():
        states = model(**tokenizer(texts[0], return_tensors="pt")).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(together[0], (states / states.norm()).numpy(), atol=1e-5)


def test_an_encoder_that_cannot_be_is_refused(encoder, tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded as an encoder"):
        Encoder(EncoderOptions(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"--pooling is 'max'. Expected one of mean, cls"):
        Encoder(EncoderOptions(encoder, pooling="max"))
