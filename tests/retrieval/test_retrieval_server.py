"""The retrieval server: Search-R1's protocol in process, and the real command over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

import httpx
import pytest
from retrieval_process import RetrievalProcess

from verl_mt.extensions.toolbox.retrieval.__main__ import main
from verl_mt.extensions.toolbox.retrieval.lexical import BM25Index
from verl_mt.extensions.toolbox.retrieval.server import make_app
from verl_mt.extensions.toolbox.tools.search_client import SearchClient, SearchSettings

PASSAGES = [{"id": str(k), "contents": f"Title {k}\nword{k} common"} for k in range(5)]


def post(body, passages=PASSAGES):
    app = make_app(passages, BM25Index(passages), method="bm25", default_topk=3)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            return await client.post("/retrieve", json=body)

    return asyncio.run(run())


@pytest.mark.cap("V12")
def test_the_answer_has_search_r1s_form():
    answer = post({"queries": ["word2", "unknown"], "topk": 2, "return_scores": True}).json()
    ((found,), nothing) = answer["result"]
    assert found["document"] == PASSAGES[2] and found["score"] > 0 and nothing == []
    plain = post({"queries": ["word2"], "topk": 2}).json()
    assert plain == {"result": [[PASSAGES[2]]]}


@pytest.mark.cap("C47")
def test_topk_is_the_requests_or_the_servers():
    assert len(post({"queries": ["common"], "topk": 4}).json()["result"][0]) == 4
    assert len(post({"queries": ["common"]}).json()["result"][0]) == 3
    assert len(post({"queries": ["common"], "topk": 100}).json()["result"][0]) == 5


@pytest.mark.parametrize("body", [{}, {"queries": []}, {"queries": "a"}, {"queries": ["a"], "topk": 0}])
def test_a_request_that_is_none_is_refused(body):
    response = post(body)
    assert response.status_code == 422 and "body" in response.text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--corpus", "absent.jsonl"], "no corpus 'absent.jsonl'"),
        (["--corpus", "{corpus}", "--topk", "0"], "--topk is 0"),
        (["--corpus", "{corpus}", "--port", "{taken}"], "Choose another --port"),
        (["--corpus", "{corpus}", "--dense", "/no/such/model"], "--dense '/no/such/model' cannot be loaded"),
    ],
)
def test_bad_arguments_end_it_with_one_line(words, part, tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps(PASSAGES[0]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        known = {"corpus": corpus, "taken": taken.getsockname()[1]}
        arguments = [word.format(**known) for word in words]
        assert main(arguments if "--port" in words else [*arguments, "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and part in error and error.count("\n") == 1


def test_without_its_packages_it_says_what_to_install(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps(PASSAGES[0]))
    code = (
        "import sys; sys.modules['bm25s'] = None\n"
        "from verl_mt.retrieval.__main__ import main\n"
        f"sys.exit(main(['--corpus', {str(corpus)!r}, '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and 'bm25s is not installed: pip install "verl_mt[search]"' in done.stderr


@pytest.mark.slow
@pytest.mark.cap("V12", "C46")
def test_the_command_serves_a_real_corpus(shared_data):
    question = json.loads((shared_data / "tasks" / "search_qa.jsonl").read_text().splitlines()[0])
    with RetrievalProcess(shared_data / "tasks" / "search_corpus.jsonl.gz") as server:
        health = httpx.get(server.url.replace("retrieve", "health"), trust_env=False).json()
        assert health == {"status": "ok", "passages": 6359, "method": "bm25"}
        client = SearchClient(SearchSettings(retrieval_service_url=server.url))
        result = asyncio.run(client.search(question["question"]))
        assert len(result.documents) == 3 and question["golden_answers"][0] in result.text
