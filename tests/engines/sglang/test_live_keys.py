"""A server that the run launches answers only requests with its key, and nobody else can read that key."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import ROLLOUT, START_S, metrics_of, processes_of_group

from verl_mt.config.compose import compose
from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.replicas import processes
from verl_mt.extensions.cluster.sglang.server_check import _CALLS
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.sglang
OPEN = ("/health", "/ready", "/metrics")
"""SGLang answers these to everyone."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Iterator[Any]:
    """One launched server that logs its arguments and has a page of metrics, and a rollout worker that asks it.

    The server starts as a user's does: a warm start has the command line and the umask of another process.
    """
    words = [
        ROLLOUT + "name=sglang", ROLLOUT + "launch_servers=1", ROLLOUT + "num_workers=1",
        ROLLOUT + "engine_kwargs={log_level: info, enable_metrics: True}", ROLLOUT + f"engine_timeout_s={START_S}",
        "data.train_batch_size=4", "data.train_max_samples=64", "data.val_files=null",
        "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path_factory.mktemp('keys') / 'run'}",
    ]  # fmt: skip
    mask = os.umask(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.subprocess, "Popen", subprocess.Popen)
        made = build_trainer(compose(words))
    os.umask(mask)
    yield made
    made.close()


def client_of(trainer: Any) -> Any:
    return trainer.engine._replicas[0].serving


def test_without_the_key_no_text_no_weights_and_nothing_else(trainer):
    client, sampling = client_of(trainer), {"max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
    key = {"Authorization": f"Bearer {client._key}"}
    with httpx.Client(base_url=client.url, trust_env=False, timeout=60.0) as http:
        paths = http.get("/openapi.json", headers=key).json()["paths"]
        calls = [(method, path) for path, ways in paths.items() for method in ways if not path.startswith(OPEN)]
        assert {path for _, path in calls} >= {*_CALLS, "/server_info", "/release_memory_occupation", "/flush_cache"}
        calls += [("get", "/openapi.json"), ("get", "/docs")]
        for headers in ({}, {"Authorization": f"Bearer x{client._key}"}):
            answers = {call: http.request(*call, json={}, headers=headers).status_code for call in calls}
            assert answers == dict.fromkeys(calls, 401)
        assert http.post("/generate", json=body).status_code == 401
        answer = http.post("/generate", json=body, headers=key)
        assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 2


def test_no_other_user_may_write_to_the_sockets_between_its_processes(trainer):
    """They carry pickles."""
    (pid,) = trainer.engine.pids
    fds = [fd for member in processes_of_group(pid) for fd in Path(f"/proc/{member}/fd").iterdir()]
    inodes = {os.readlink(fd) for fd in fds}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    sockets = {Path(words[7]) for words in lines if len(words) > 7 and f"socket:[{words[6]}]" in inodes}
    modes = {path: oct(path.stat().st_mode & 0o777) for path in sockets if path.is_socket()}
    assert len(modes) >= 3 and set(modes.values()) == {"0o755"}


def test_the_run_uses_the_key_and_shows_it_nowhere(trainer, capfd, caplog):
    client = client_of(trainer)
    metrics = httpx.get(f"{client.url}/metrics", trust_env=False).text
    assert "sglang:" in metrics
    with pytest.raises(EngineError) as caught:
        trainer.stream.call(client.generate({"input_ids": "no list"}))
    texts = {
        "page of metrics": metrics,
        "error": str(caught.value),
        "objects": repr([client, client.endpoint, client.receiver(), client._process.describe()]),
    }
    (pid,) = trainer.engine.pids
    assert "--port" in Path(f"/proc/{pid}/cmdline").read_text()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                texts[f"{process}/{name}"] = (process / name).read_text(errors="replace")
            except OSError:  # another user's, or it has ended
                continue
    with client._process.log.open() as log:
        trainer.fit()
        texts["log of SGLang"] = log.read()
    assert re.search(r"server_args=.*'api_key': '\*\*\*'", texts["log of SGLang"])
    run = Path(trainer.config.default_local_dir)
    steps = metrics_of(run)
    assert len(steps) == 2 and max(step["rollout/logprob_diff_max"] for step in steps) <= 1e-4
    texts |= {str(path): path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()}
    assert str(run / "config.yaml") in texts
    texts |= {"output": "".join(capfd.readouterr()), "log": caplog.text}
    assert [where for where, text in texts.items() if client._key in text] == []
