"""benchmarks/mfu.py: what it refuses, and that it times and counts a whole update."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import warm_start

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_mfu_is_refused():
    done = warm_start.run([sys.executable, str(FOLDER / "mfu.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "CUDA" in done.stderr and "Traceback" not in done.stderr


def test_the_work_that_mfu_times_is_an_update_and_its_flops_are_counted_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import mfu

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, batch = mfu.make_policy(shape, 64, "cpu", "sdpa", vocabulary=61), mfu.make_update_batch(32, 128, 61)
    before = [p.detach().clone() for p in model.parameters()]
    assert mfu.seconds_of_update(model, batch, 1, share=False) > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert len(batch) == 4
    # Per layer: q 16x16 + 16, k and v 16x16 + 16 (2 heads of 8), o 16x16, MLP 3 x 16x24, two norms of 16.
    in_layers = 2 * (3 * (16 * 16 + 16) + 16 * 16 + 3 * 16 * 24 + 2 * 16)
    forward = 2 * in_layers * 128 + 2 * 16 * 61 * 4 * 28 + 4 * 2 * (2 * 16 * 32) * 32
    assert mfu.flops_of(model, batch) == 3 * forward
    assert mfu.matmul_peak("cpu", size=32, repetitions=2) > 0
