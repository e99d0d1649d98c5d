"""Weights are verified and packed without loss."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.replicas.buckets import Buckets, payload, verify

EXPECTED = {"a.weight": (4, 3), "a.bias": (4,), "norm.weight": (3,)}


def tensors(**changes):
    named = {name: torch.zeros(shape) for name, shape in EXPECTED.items()} | changes
    return [(name, tensor) for name, tensor in named.items() if tensor is not None]


def test_the_models_own_names_and_shapes_pass():
    verify(tensors(), EXPECTED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tensors(extra=torch.zeros(1)), "the model has no weight 'extra'. It has a.weight, a.bias, norm.weight"),
        (tensors(**{"a.bias": torch.zeros(5)}), r"'a.bias' has shape \(5,\), the model's has \(4,\)"),
        (tensors(**{"a.weight": torch.zeros(3, 4)}), r"'a.weight' has shape \(3, 4\)"),
        (tensors(**{"norm.weight": None}), "1 of 3 weights are missing: norm.weight"),
        ([*tensors(), ("a.bias", torch.zeros(4))], "'a.bias' comes twice"),
    ],
)
def test_what_would_kill_sglang_or_be_ignored_by_it_is_refused(given, message):
    with pytest.raises(EngineError, match=message):
        verify(given, EXPECTED)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    limit=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_is_packed_comes_out_again_whatever_the_bucket_size(shapes, limit, dtype):
    weights = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    weights["steps"] = torch.arange(7)
    found, last = {}, []
    buckets = Buckets({name: tuple(tensor.shape) for name, tensor in weights.items()}, dtype)
    # Like a gather over processes: a tensor is gone when the next one is asked for.
    stream = ((name, tensor.clone()) for name, tensor in weights.items())
    for buffer, entries, is_last in buckets.pack(stream, limit):
        assert buffer.is_shared()
        last.append(is_last)
        for e in entries:
            found[e.name] = buffer[e.start : e.start + e.num_bytes].view(e.dtype).view(e.shape).clone()
    assert last == [False] * (len(last) - 1) + [True]
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor if name == "steps" else tensor.to(dtype), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_a_bucket_holds_until_as_many_later_ones_as_there_are_buffers(number):
    shapes = {f"w{k}": (4,) for k in range(7)}
    buckets = Buckets(shapes, torch.float32)
    found = []
    stream = ((name, torch.full((4,), float(k))) for k, name in enumerate(shapes))
    for bucket in buckets.pack(stream, 16, num_buffers=number):
        found.append(bucket.buffer)
        held = [float(buffer.view(torch.float32)[0]) for buffer in found[-number:]]
        assert held == [float(k) for k in range(len(found))][-number:]
    assert len(found) == 7 and len({buffer.data_ptr() for buffer in found}) == number


def test_a_payload_holds_a_handle_and_no_class_of_sglang_and_leaves_the_sharing_strategy_alone():
    before = mp.get_sharing_strategy()
    buckets = Buckets({"w": (2, 3)}, torch.float32)
    buffer, entries, _ = next(buckets.pack([("w", torch.arange(6.0).view(2, 3))], 1000))
    data = payload(buffer, entries)
    assert mp.get_sharing_strategy() == before
    assert len(data) < 1000
    content = pickle.load(io.BytesIO(data))
    meta = content["metadata"][0]
    part = content["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
    assert (meta.name, part.tolist()) == ("w", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


SENDER = """
import pathlib, sys, time, torch
from verl_mt.extensions.cluster.replicas.buckets import Buckets, payload
bucket = next(Buckets({"w": (2, 3)}, torch.float32).pack([("w", torch.arange(6.0).view(2, 3))], 1000))
folder = pathlib.Path(sys.argv[1])
(folder / "part").write_bytes(payload(bucket.buffer, bucket.entries))
(folder / "part").rename(folder / "payload")
while not (folder / "opened").exists():
    time.sleep(0.01)
print("sent", file=sys.stderr)
"""
SERVER = """
import pathlib, pickle, sys, time
import torch
folder = pathlib.Path(sys.argv[1])
while not (folder / "payload").exists():
    time.sleep(0.01)
content = pickle.loads((folder / "payload").read_bytes())
(folder / "opened").touch()
sys.stdin.read()
"""


@pytest.mark.slow
def test_who_reads_the_output_of_a_run_does_not_wait_for_a_server_that_lives_on(tmp_path):
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdin=subprocess.PIPE)
    try:
        words = [sys.executable, "-c", SENDER, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0 and "sent" in done.stderr and server.poll() is None
    finally:
        server.stdin.close()
        server.wait()
