"""`Sample`: its fields, its way to a file and back, and what a process without verl_mt sees of it."""

from __future__ import annotations

import collections
import io
import uuid

import numpy
import pytest
import torch
from hostile import Unshowable
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.data.slime_sample import Dumped, Sample, fill_from_record, plain, samples_of
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import LedgerError

DOCUMENTED = (
    "prompt", "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "status", "label",
    "metadata", "reward",
)  # fmt: skip


def record_of_two_turns() -> TrajectoryRecord:
    record = TrajectoryRecord()
    record.append_given([1, 2, 3], kind="prompt", turn=0)
    record.append_sampled([10, 11], [-0.1, -0.2], [4, 4], turn=1)
    record.append_given([50, 51, 52], kind="observation", turn=1)
    record.append_sampled([12], [-0.3], [5], turn=2)
    return record


@pytest.mark.cap("C63", "L2")
def test_a_sample_of_a_record_has_the_documented_columns():
    sample = Sample()
    fill_from_record(sample, record_of_two_turns())
    assert sample.tokens == [1, 2, 3, 10, 11, 50, 51, 52, 12]
    assert (sample.response_length, sample.effective_response_length) == (6, 3)
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, 0.0, 0.0, -0.3]
    assert sample.weight_versions == ["4", "5"]
    assert set(DOCUMENTED) <= vars(sample).keys()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.cap("C63", "C64")
@given(
    tokens=st.lists(st.integers(0, 9), max_size=5),
    status=st.sampled_from(list(Sample.Status)),
    label=json_values,
    metadata=st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    extra=json_values,
)
def test_to_dict_and_from_dict_keep_every_field_and_unknown_ones(tokens, status, label, metadata, extra):
    sample = Sample(tokens=tokens, status=status, label=label, metadata=metadata, reward=0.5, loss_mask=[1])
    sample.of_my_own = extra
    data = sample.to_dict()
    assert data["status"] == status.value and type(data["status"]) is str
    again = Sample.from_dict(data)
    assert again == sample and again.status is status and again.of_my_own == extra
    assert Sample.from_dict(dict(Dumped(data))).to_dict() == data


@pytest.mark.cap("C64")
def test_statuses_are_slimes_and_an_unknown_one_is_refused():
    assert [s.value for s in Sample.Status] == ["pending", "completed", "truncated", "aborted", "failed"]
    assert Sample.Status("truncated") is Sample.Status.TRUNCATED
    with pytest.raises(LedgerError, match="'done', expected one of pending, completed"):
        Sample.from_dict({"status": "done"})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": [1, 2], "response_length": 3}, "response_length is 3, but sample.tokens has 2"),
        (
            {"tokens": [1, 2], "response_length": 2, "loss_mask": [1]},
            "loss_mask has 1 entries, but response_length is 2",
        ),
        ({"tokens": [1], "response_length": 1, "rollout_log_probs": []}, "rollout_log_probs has 0 entries"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_with_both_numbers(fields, text):
    with pytest.raises(LedgerError, match=text):
        Sample(**fields).check_lengths()


def test_a_sample_without_or_of_nothing_but_a_response_fits():
    Sample(tokens=[1, 2], response_length=0, loss_mask=[], rollout_log_probs=[]).check_lengths()
    Sample(tokens=[1, 2], response_length=2, loss_mask=[0, 1], rollout_log_probs=[-1.0, -2.0]).check_lengths()


@pytest.mark.cap("C80")
def test_a_dumped_sample_has_items_and_attributes_for_torch_load_that_trusts_nobody(tmp_path):
    sample = Sample(prompt="p", response="r", reward=1.0, loss_mask=[1, 0], status=Sample.Status.TRUNCATED)
    sample.metadata = {"set": {3}, "object": object(), "tensor": torch.ones(2), "numpy": torch.ones(1).numpy()}
    torch.save({"samples": [Dumped(sample.to_dict())]}, tmp_path / "dump.pt")
    [loaded] = torch.load(tmp_path / "dump.pt")["samples"]  # weights_only=True is the default
    assert type(loaded) is collections.OrderedDict, "nothing of ours is needed to read it"
    assert (loaded.prompt, loaded.response, loaded.reward, loaded.loss_mask) == ("p", "r", 1.0, [1, 0])
    assert loaded["prompt"] == "p" and loaded.status == Sample.Status.TRUNCATED
    assert loaded.metadata["set"] == [3] and loaded.metadata["numpy"] == [1.0]
    assert loaded.metadata["tensor"].tolist() == [1.0, 1.0] and loaded.metadata["object"].startswith("<object")
    with pytest.raises(AttributeError):
        Dumped({}).prompt  # noqa: B018
    assert plain({1: (2, "x")}) == {1: [2, "x"]}


def test_a_trajectory_without_a_sample_becomes_one_per_record():
    trajectory = Trajectory("t", "p", "p", "t", reward=2.0, stop_reason=StopReason.FINISHED, turn_texts=["a", "b"])
    trajectory.records = [record_of_two_turns(), record_of_two_turns()]
    first, second = samples_of(trajectory, lambda ids: " ".join(map(str, ids)), label="yes", metadata={"k": 1})
    assert first.tokens == second.tokens and first.prompt == "1 2 3" and first.response == "10 11 50 51 52 12"
    assert (first.label, first.metadata, first.reward, first.session_id) == ("yes", {"k": 1}, 2.0, "t")
    assert first.model_text == "a\nb"
    trajectory.sample = first
    assert samples_of(trajectory, str) == [first]


@pytest.mark.parametrize("value", [Unshowable(), {Unshowable(): 1}])
def test_a_sample_is_dumped_whatever_a_function_left_in_it(value):
    sample = Sample(metadata={"k": value})
    sample.own, sample.status = sample.metadata, value  # type: ignore[assignment]
    sample.metadata["itself"] = sample.metadata
    dumped = Dumped(sample.to_dict())
    buffer = io.BytesIO()
    torch.save(dumped, buffer)
    buffer.seek(0)
    inside = torch.load(buffer, weights_only=True)["metadata"]
    for _ in range(150):
        inside = inside["itself"]
    assert "whose __repr__ raised AttributeError" in str(inside["k"])


def test_keys_that_are_no_texts_are_dumped_as_str_writes_them():
    name = uuid.UUID(int=5)
    assert plain({numpy.int64(3): "a", name: "b", 4: "c"}) == {"3": "a", str(name): "b", 4: "c"}
    (odd,) = plain({Unshowable(): 1})
    assert "__repr__ raised" in odd


def test_one_reply_of_the_engine_updates_status_version_and_counts():
    sample = Sample()
    reply = {
        "finish_reason": {"type": "length"}, "weight_version": 3, "spec_accept_token_num": 6,
        "spec_draft_token_num": 8, "spec_verify_ct": 2, "completion_tokens": 9, "cached_tokens": 5, "prompt_tokens": 20,
    }  # fmt: skip
    sample.update_from_meta_info(None, reply)
    assert sample.status is Sample.Status.TRUNCATED and sample.weight_versions == ["3"]
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.spec_accept_length) == (0.75, 4.5)
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.25
    sample.update_from_meta_info(None, {"finish_reason": {"type": "stop"}})
    assert sample.status is Sample.Status.COMPLETED and sample.weight_versions == ["3"]
    sample.update_from_meta_info(None, {})
    assert sample.status is Sample.Status.COMPLETED and Sample().spec_info.spec_accept_rate == 0.0


def test_masks_and_log_probs_given_as_arrays_become_lists_and_wrong_ones_are_named():
    sample = Sample(tokens=[1, 2], loss_mask=torch.tensor([1, 0]), rollout_log_probs=numpy.array([-0.5, -1.0]))
    sample.check_types()
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0], [-0.5, -1.0])
    for wrong in ({"loss_mask": [0, 2]}, {"rollout_log_probs": ["x"]}, {"remove_sample": 3}):
        (field,) = wrong
        with pytest.raises(LedgerError, match=f"sample.{field}"):
            Sample(**wrong).check_types()
