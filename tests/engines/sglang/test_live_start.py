"""Engines of these tests are forks of a process that has imported SGLang; this one starts as a user's does."""

from __future__ import annotations

import subprocess

import pytest
import warm_start
from live import ROUNDING, Lab, worst_difference

from verl_mt.data.requests import GenerationRequest, SamplingParams
from verl_mt.engines.sglang import processes

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("start", [subprocess.Popen, warm_start.Popen], ids=["as a user's", "as all others here"])
def test_an_engine_starts_and_answers(lab: Lab, run, monkeypatch, start):
    monkeypatch.setattr(processes.subprocess, "Popen", start)
    engine = lab.engine()
    started = []
    monkeypatch.setattr(start, "__init__", noting(start.__init__, started))
    try:
        run(engine.start())
        asked = GenerationRequest(lab.prompts[0].ids, SamplingParams(max_new_tokens=8), "request", "session")
        said = run(engine.generate(asked))
        assert worst_difference(lab.module, lab.prompts[0].ids, said) < ROUNDING
    finally:
        run(engine.close())
    assert [getattr(process, "why_real", "no fork") for process in started] == [
        "no fork" if start is subprocess.Popen else None
    ]


def noting(original, seen):
    def init(self, *args, **kwargs):
        seen.append(self)
        original(self, *args, **kwargs)

    return init
