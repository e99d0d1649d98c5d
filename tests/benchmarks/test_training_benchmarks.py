"""The benchmarks of the trainer run, and their last lines say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *words]
    return subprocess.run(command, capture_output=True, text=True)


def last_lines(script: str, *words: str) -> list[str]:
    done = run(script, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_an_export_of_shards_holds_the_model_once():
    said = last_lines("export_memory.py", "--size", "medium")[-1]
    held = re.fullmatch(r"export of 98 MB in shards: holds the model (\d+\.\d\d) times", said)
    assert held is not None and 0.9 < float(held[1]) < 1.5


@pytest.mark.slow
def test_packing_gives_padding_speed_up_and_their_ratio():
    lines = last_lines("packing.py", "--rows", "8", "--repetitions", "1")
    pattern = r".*: padding (\d+\.\d\d), packed / padded = (\d+\.\d\d), of it (\d+\.\d\d)"
    found = [re.fullmatch(pattern, line) for line in lines[-4:]]
    assert all(found), lines[-4:]
    for padding, gain, share in (map(float, match.groups()) for match in found):
        assert padding >= 1 and share == pytest.approx(gain / padding, abs=0.02)
    differences = [float(x) for x in re.findall(r"gradients differ by (\S+) at most", "\n".join(lines))]
    assert len(differences) == 2 and max(differences) < 1e-4


@pytest.mark.slow
def test_prefix_sharing_gives_tokens_and_speed_up():
    lines = last_lines("prefix_sharing.py", "--rows", "16", "--group-sizes", "8", "--repetitions", "1")
    found = [re.fullmatch(r".*: tokens (\d\.\d\d), not shared / shared = (\d+\.\d\d)", line) for line in lines[-3:]]
    assert all(found), lines[-3:]
    assert all(0 < float(match[1]) < 0.7 for match in found)
    differences = [float(x) for x in re.findall(r"gradients differ by (\S+) at most", "\n".join(lines))]
    assert len(differences) == 3 and max(differences) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_log_probs_of_tiles_need_a_fraction_of_the_memory_of_all_logits():
    (line,) = last_lines("log_prob_memory.py", "--shapes", "1024x50000", "--hidden", "32", "--repetitions", "1")[-1:]
    shares = [float(x) for x in re.findall(r"(\d+\.\d)% of naive's memory", line)]
    assert len(shares) == 2, line
    assert shares[0] < 20, "the recomputed way"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_mfu_is_refused():
    done = run("mfu.py")
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


@pytest.mark.slow
def test_checkpoint_digests_gives_the_ratios_of_saving_and_loading():
    line = last_lines("checkpoint_digests.py", "--megabytes", "16", "--repetitions", "1")[-1]
    assert re.fullmatch(
        r"checkpoint digests: save with / without = \d+\.\d\d, load with / without = \d+\.\d\d", line
    ), line


@pytest.mark.slow
def test_gradients_added_up_in_float32_are_as_good_as_exact():
    last = last_lines("gradient_accumulation.py", "--micro-batches", "16", "--tokens", "8")[-1]
    before, after = re.search(r"bfloat16 ([\d.]+)% off, in float32 (\S+)$", last).groups()
    assert float(after) < 1e-6 < 1e-1 < float(before)


@pytest.mark.slow
def test_training_on_rows_of_all_lengths_keeps_few_kernels():
    plain, ours, last = last_lines("kernel_caches.py", "--passes", "12")[-3:]
    first, then = map(float, re.search(r": (\d+) MiB after 3 passes, (\d+) after 12", plain).groups())
    assert ours.startswith("as load_causal_lm sets it: ")
    if then - first < 50:
        pytest.skip("this CPU's products in bfloat16 are not compiled for each shape")
    assert float(last.removeprefix("growth, ratio: ")) > 2


@pytest.mark.slow
def test_ranks_that_share_a_row_keep_their_part_of_it():
    last = last_lines("sequence_parallel.py", "--tokens", "512", "--sizes", "1", "2", "--size", "tiny")[-1]
    kept = re.search(r"2 ranks ([\d.]+),", last)
    assert kept and 0.4 < float(kept[1]) < 0.7
