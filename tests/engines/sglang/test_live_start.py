"""Engines of these tests are forks of a process that has imported SGLang; this one starts as a user's does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from live import ROUNDING, Lab, worst_difference

from verl_mt.data.requests import GenerationRequest, SamplingParams
from verl_mt.extensions.cluster.replicas import processes
from verl_mt.extensions.cluster.sglang.options import nccl_environment
from verl_mt.workers.weight_sync import weight_update_for

pytestmark = pytest.mark.sglang
SHARED = Path("/dev/shm")


@pytest.mark.parametrize("start", [subprocess.Popen, warm_start.Popen], ids=["as a user's", "as all others here"])
def test_an_engine_starts_and_answers(lab: Lab, run, monkeypatch, start):
    monkeypatch.setattr(processes.subprocess, "Popen", start)
    engine = lab.engine()
    before = set(SHARED.iterdir())  # engines of other tests in this process serve on
    started = []
    monkeypatch.setattr(start, "__init__", noting(start.__init__, started))
    try:
        run(engine.start())
        asked = GenerationRequest(lab.prompts[0].ids, SamplingParams(max_new_tokens=8), "request", "session")
        said = run(engine.generate(asked))
        assert worst_difference(lab.module, lab.prompts[0].ids, said) < ROUNDING
        update = weight_update_for(engine.capabilities, lab.module, 1)
        run(engine.apply(update))
        new = set(SHARED.glob("verl_mt.*")) - before
        made = {path for path in new if path.name.split(".")[2] in owners(engine)}
        made |= {SHARED / path.name.split(".", 4)[4] for path in made}
        assert {path.name.split("_")[0] for path in made} == {"verl", "torch", "sglang"}
    finally:
        run(engine.close())
    assert not [path for path in made if path.exists()]
    assert [getattr(process, "why_real", "no fork") for process in started] == [
        "no fork" if start is subprocess.Popen else None
    ]


SETS = """
import json, os, sys
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.server_args import ServerArgs
_set_envs_and_config(ServerArgs(model_path="none", device="cpu", **json.loads(sys.argv[1])))
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("NCCL_")}))
"""


@pytest.mark.release
@pytest.mark.parametrize("arguments", [{}, {"enable_nccl_nvls": True}])
def test_ranks_get_the_nccl_variables_that_sglang_sets_for_itself(arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    command = [sys.executable, "-W", "ignore", "-c", SETS, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == nccl_environment(arguments)


def owners(engine):
    return {str(pid) for pid in [os.getpid(), *engine.pids]}


def noting(original, seen):
    def init(self, *args, **kwargs):
        seen.append(self)
        original(self, *args, **kwargs)

    return init
