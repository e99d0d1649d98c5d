"""Token columns: what the page decodes is what the row said, to the digits that it shows."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.extensions.inspection.report.token_columns import RecordNumbers, TokenColumns

log_probs = st.floats(-15, 0)


@st.composite
def records(draw):
    size = draw(st.integers(0, 12))
    sampled = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    trained = [draw(st.integers(0, bit)) for bit in sampled]
    return {
        "token_ids": draw(st.lists(st.integers(0, 2**20), min_size=size, max_size=size)),
        "sampled": sampled,
        "loss_mask": trained,
        "rollout_log_probs": [draw(log_probs) * bit for bit in sampled],
        "policy_versions": [draw(st.integers(0, 10**6)) if bit else -1 for bit in sampled],
        "old_log_probs": draw(st.none() | st.just([draw(log_probs) * bit for bit in trained])),
        "advantages": draw(st.none() | st.just([draw(st.floats(-4, 4)) * bit for bit in trained])),
        "clipped": draw(st.none() | st.just([k for k, bit in enumerate(trained) if bit][::2])),
        "has_log_probs": draw(st.booleans()),
    }


def decode(packed: bytes) -> dict[str, np.ndarray]:
    """The layout of the module's docstring, read the way the page does."""
    n, m = struct.unpack_from("<II", packed)
    at = 8

    def take(count: int, width: int, kind: str) -> np.ndarray:
        nonlocal at
        planes = np.frombuffer(packed, np.uint8, count * width, at).reshape(width, count)
        at += count * width
        whole = np.zeros((count, 4), np.uint8)
        whole[:, :width] = planes.T
        return whole[:, : 4 if width == 3 else width].copy().view(kind).reshape(count)

    found = {"ids": take(n, 3, "<u4"), "flags": take(n, 1, "u1")}
    for name, width, kind in (
        ("sampler", 2, "<f2"),
        ("drift", 2, "<f2"),
        ("advantage", 2, "<f2"),
        ("version", 4, "<i4"),
    ):
        found[name] = take(m, width, kind)
    found["clip"] = take(m, 1, "u1")
    assert at == len(packed)
    return found


@pytest.mark.slow
@given(st.lists(records(), max_size=4))
def test_every_number_comes_back_with_three_digits_and_a_ratio_near_one_exactly_so(given_records):
    columns = TokenColumns()
    for record in given_records:
        columns.add(record)
    found = decode(columns.to_bytes())
    tokens = [(record, t) for record in given_records for t in range(len(record["token_ids"]))]
    assert found["ids"].tolist() == [record["token_ids"][t] for record, t in tokens]
    assert found["flags"].tolist() == [record["sampled"][t] | record["loss_mask"][t] << 1 for record, t in tokens]
    for place, (record, t) in enumerate((r, t) for r, t in tokens if r["sampled"][t]):
        sampler, drift = float(found["sampler"][place]), float(found["drift"][place])
        if record["has_log_probs"]:
            assert sampler == pytest.approx(record["rollout_log_probs"][t], rel=1e-3, abs=1e-6)
        else:
            assert math.isnan(sampler)
        if record["old_log_probs"] is None or not record["loss_mask"][t]:
            assert math.isnan(drift)
        else:
            wanted = record["old_log_probs"][t] - (record["rollout_log_probs"][t] if record["has_log_probs"] else 0.0)
            assert drift == pytest.approx(wanted, rel=1e-3, abs=1e-6)
        assert found["version"][place] == record["policy_versions"][t]
        clipped = record["clipped"]
        assert found["clip"][place] == (0 if clipped is None else 2 if t in clipped else 1)


def test_a_record_whose_columns_do_not_fit_is_refused_with_their_lengths():
    record = {"token_ids": [1, 2], "sampled": [0], "loss_mask": [0, 0], "rollout_log_probs": [], "policy_versions": []}
    with pytest.raises(ValueError, match="'sampled': 1"):
        RecordNumbers(record)
