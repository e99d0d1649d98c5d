"""SGLang servers and ranks that a run cannot use: one error before any training step, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from verl_mt.config.compose import compose, config_from_mapping
from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.sglang.server_check import _CALLS
from verl_mt.trainer.build import build_trainer

QUICK = (
    "data.train_max_samples=8", "data.val_max_samples=2", "data.train_batch_size=2", "trainer.logger=[]",
    "trainer.num_threads=1", "actor_rollout_ref.rollout.name=sglang",
)  # fmt: skip


@pytest.fixture(scope="module")
def base() -> dict:
    return dataclasses.asdict(compose(QUICK))


@pytest.fixture
def refusal(tmp_path, base):
    """The text of the one error that a command ends with."""

    def of(*overrides: str) -> str:
        run = tmp_path / "run"
        with pytest.raises(ConfigError) as caught:
            build_trainer(config_from_mapping(base, [f"trainer.default_local_dir={run}", *overrides]))
        assert not run.exists() and not any(thread.name == "rollout" for thread in threading.enumerate())
        return str(caught.value)

    return of


class Server(ThreadingHTTPServer):
    """Answers what an SGLang server says about itself, and that it is in no weight update; counts everything else."""

    def __init__(self, model_path: str, calls: tuple[str, ...] = _CALLS):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = {
            "/model_info": {"model_path": model_path, "weight_version": "default"},
            "/server_info": {"context_length": 4096},
            "/openapi.json": {"paths": {call: {} for call in calls}},
        }
        self.others: list[str] = []

    @property
    def servers(self) -> str:
        return f"actor_rollout_ref.rollout.servers=[http://127.0.0.1:{self.server_port}]"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        reply = self.server.replies.get(self.path)
        self.send_response(200 if reply else 404)
        self.end_headers()
        self.wfile.write(json.dumps(reply or {}).encode())

    def do_POST(self) -> None:
        no_update = self.path == "/end_weight_update"
        if not no_update:
            self.server.others.append(self.path)
        self.send_response(400 if no_update else 500)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def serve() -> Iterator:
    """Start servers; none may have been asked for anything but what it is."""
    started: list[Server] = []

    def start(*arguments) -> Server:
        started.append(Server(*arguments))
        threading.Thread(target=started[-1].serve_forever, args=(0.01,), daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
        assert not server.others


@pytest.mark.slow
def test_a_url_that_does_not_answer(refusal):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        text = refusal(f"actor_rollout_ref.rollout.servers=[{url}]")
    assert text.startswith(f"actor_rollout_ref.rollout.servers: {url} does not answer (ConnectError")
    assert "Does SGLang run there" in text


@pytest.mark.slow
def test_a_server_that_lacks_a_call(refusal, serve):
    server = serve(resolve_model_path("verl_mt://tiny"), tuple(c for c in _CALLS if c != "/begin_weight_update"))
    text = refusal(server.servers)
    assert f"{server.server_port} lacks the calls /begin_weight_update" in text and "Start 0.5.23 there" in text


@pytest.mark.slow
def test_a_server_that_was_started_with_another_model(refusal, serve, tmp_path):
    config = json.loads(Path(resolve_model_path("verl_mt://tiny"), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    text = refusal(serve(str(tmp_path)).servers)
    assert "was started with another model" in text and "hidden_size 64 instead of" in text
    assert "Start the server with that model" in text


@pytest.mark.slow
def test_a_good_server_beside_a_bad_one_does_not_hide_it(refusal, serve, tmp_path):
    good = serve(resolve_model_path("verl_mt://tiny"))
    text = refusal(f"actor_rollout_ref.rollout.servers=[http://127.0.0.1:{good.server_port},http://127.0.0.1:9]")
    assert "http://127.0.0.1:9 does not answer" in text and str(good.server_port) not in text


def test_more_ranks_than_rows_are_refused_before_ray_is_started(refusal, monkeypatch):
    monkeypatch.setattr("verl_mt.trainer.build.build_workers", None)
    text = refusal("trainer.placement=ray", "trainer.n_workers_per_node=17")
    assert "16 sequences per optimizer step (2 prompts x actor_rollout_ref.rollout.n)" in text
    assert "fewer than 17 ranks (trainer.nnodes x trainer.n_workers_per_node)" in text
