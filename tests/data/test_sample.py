"""`Sample`: its fields, its way to a file and back, and what a process without verl_mt sees of it."""

from __future__ import annotations

import collections
import enum
import io
import types
import uuid

import numpy
import pytest
import torch
from hostile import Unshowable
from hypothesis import given
from hypothesis import strategies as st

from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import LedgerError
from verl_mt.extensions.compat.slime_sample import (
    Dumped,
    PrefixCache,
    Sample,
    Speculation,
    check_unsupported,
    fill_from_record,
    plain,
    samples_of,
)

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


REPLY = {"finish_reason": {"type": "length"}, "weight_version": 3, "cached_tokens": 5, "prompt_tokens": 20}


def test_appended_tokens_stand_behind_the_response_in_every_column():
    sample = Sample(tokens=[1, 2])
    tokens = sample.tokens
    sample.append_response_tokens(tokens=[10, 11], log_probs=[-0.1, -0.2], text="ab", meta_info=REPLY)
    mask, log_probs = sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[50], trainable=False, text="<o>", meta_info=REPLY, update_terminal_info=False)
    sample.append_response_tokens(tokens=[51], trainable=False, log_probs=[0.0])
    sample.append_response_tokens(tokens=numpy.array([12]), log_probs=torch.tensor([-0.5]))
    assert sample.tokens == [1, 2, 10, 11, 50, 51, 12] and sample.tokens is tokens
    assert sample.loss_mask == [1, 1, 0, 0, 1] and sample.loss_mask is mask and {*map(type, mask)} == {int}
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, 0.0, -0.5] and sample.rollout_log_probs is log_probs
    assert (sample.response_length, sample.response, sample.status) == (5, "ab<o>", Sample.Status.TRUNCATED)
    assert (sample.weight_versions, sample.prefix_cache_info) == (["3"], PrefixCache(5, 20))
    sample.check_lengths()


def test_what_a_function_set_itself_before_it_appends_stays():
    sample = Sample(tokens=(1, 10), response_length=1, response="a")
    sample.append_response_tokens(tokens=[11], log_probs=[-0.2])
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 10, 11], [1, 1], [0.0, -0.2])
    assert (sample.response_length, sample.response, sample.status) == (2, "a", Sample.Status.PENDING)
    sample = Sample(tokens=[1, 10], response_length=1, loss_mask=[0], rollout_log_probs=[-0.1])
    sample.append_response_tokens(tokens=[11], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0, 0], [-0.1, 0.0])


def test_no_tokens_change_no_column():
    sample = Sample(tokens=[1])
    for tokens in (None, []):
        sample.append_response_tokens(tokens=tokens, text="x", meta_info={"finish_reason": {"type": "abort"}})
    sample.append_response_tokens(trainable=False, log_probs=[])
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.response) == ([1], None, None, "xx")
    assert (sample.response_length, sample.status) == (0, Sample.Status.ABORTED)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": [1, 2], "log_probs": [-0.1]}, "1 log_probs for 2 tokens"),
        ({"log_probs": [-0.1], "trainable": False}, "1 log_probs for 0 tokens"),
        ({"tokens": [1]}, "sampled tokens need log_probs"),
        ({"tokens": [1, 2], "log_probs": [0.0, -0.1], "trainable": False}, "that are not trainable have no log_probs"),
    ],
)
def test_appended_tokens_that_do_not_fit_are_refused(given, said):
    sample = Sample(tokens=[1])
    with pytest.raises(ValueError, match=said):
        sample.append_response_tokens(**given)
    assert sample == Sample(tokens=[1])


def test_counts_of_several_replies_add_up_and_come_back_without_unknown_keys():
    spec, cache = Speculation(), PrefixCache()
    assert (spec.spec_accept_rate, spec.spec_accept_length, cache.prefix_cache_hit_rate) == (0.0, 0.0, 0.0)
    for meta_info in (
        {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2, "completion_tokens": 5},
        {"spec_accept_token_num": 3, "spec_draft_token_num": 8, "spec_verify_ct": 3, "completion_tokens": 6},
        {"cached_tokens": 6, "prompt_tokens": 8},
        {"cached_tokens": 2, "prompt_tokens": 8},
        {},
    ):
        spec.add(meta_info)
        cache.add(meta_info)
    assert spec == Speculation(6, 12, 5, 11) and cache == PrefixCache(8, 16)
    assert (spec.spec_accept_rate, spec.spec_accept_length, cache.prefix_cache_hit_rate) == (0.5, 2.2, 0.5)
    data = spec.to_dict()
    assert Speculation.from_dict(data | {"later": 1}) == spec and Speculation.from_dict({}) == Speculation()
    data["spec_verify_ct"] = 99
    assert spec.spec_verify_ct == 5, "the dict is a copy"
    sample = Sample.from_dict({"spec_info": spec.to_dict(), "prefix_cache_info": cache})
    assert (sample.spec_info, sample.prefix_cache_info) == (spec, cache)


@pytest.mark.parametrize(
    ("reward", "key", "value"),
    [({"a": 1.0}, "a", 1.0), ({"a": 1.0}, None, {"a": 1.0}), (2.0, "a", 2.0), (2.0, None, 2.0), (None, "a", None)],
)
def test_a_reward_value_is_the_entry_that_is_asked_for(reward, key, value):
    assert Sample(reward=reward).get_reward_value(types.SimpleNamespace(reward_key=key)) == value
    assert Sample(reward=reward).get_reward_value(None) == reward


def test_the_effective_length_counts_the_mask_and_the_model_text_the_turns():
    sample = Sample(response="all of it", response_length=3)
    assert (sample.effective_response_length, sample.model_text) == (3, "all of it")
    sample.loss_mask, sample.turn_texts = [1, 0, 0], ["a"]
    assert (sample.effective_response_length, sample.model_text) == (1, "a")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": 5}, "sample.tokens must be a list of token ids"),
        ({"response_length": "3"}, "sample.response_length"),
        ({"response": None}, "sample.response must be a text"),
        ({"metadata": [1]}, "sample.metadata must be a dict"),
        ({"metadata": {"role": 5}}, r"sample.metadata\['role'\] must be a text"),
        ({"status": "done"}, "sample.status is 'done'"),
        ({"status": None}, "sample.status is None"),
    ],
)
def test_a_field_of_another_type_is_named(fields, named):
    with pytest.raises(LedgerError, match=named):
        Sample(**fields).check_types()


def test_checked_fields_become_plain_ones():
    sample = Sample(
        tokens=numpy.array([1, 2]), response_length=numpy.int64(1), remove_sample=numpy.True_, status="failed",
        metadata={"role": None},
    )  # fmt: skip
    sample.check_types()
    assert (sample.tokens, sample.response_length, sample.remove_sample) == ([1, 2], 1, True)
    assert type(sample.tokens) is list and type(sample.response_length) is int and type(sample.remove_sample) is bool
    assert sample.status is Sample.Status.FAILED and sample.loss_mask is sample.rollout_log_probs is None
    cyclic = {}
    cyclic["itself"] = cyclic
    with pytest.raises(LedgerError, match=r"sample\.metadata is nested"):
        Sample(metadata=cyclic).check_types()


@pytest.mark.parametrize("length", [-1, 3])
def test_a_response_cannot_be_longer_than_all_tokens_or_negative(length):
    with pytest.raises(LedgerError, match=f"response_length is {length}, but sample.tokens has 2 tokens"):
        Sample(tokens=[1, 2], response_length=length).check_lengths()


def test_a_record_without_log_probs_gives_none_and_each_version_once():
    record = record_of_two_turns()
    record.has_log_probs, record.policy_versions[3:5] = False, [0, 5]
    sample = Sample(loss_mask=[9], rollout_log_probs=[9.0])
    fill_from_record(sample, record)
    assert sample.rollout_log_probs is None and sample.weight_versions == ["0", "5"]


def test_samples_of_a_trajectory_hold_its_status_and_own_metadata():
    trajectory = Trajectory("t", "p", "p", "t", records=[record_of_two_turns()], stop_reason=StopReason.RESPONSE_LENGTH)
    metadata = {"k": 1}
    (sample,) = samples_of(trajectory, str, metadata=metadata)
    assert sample.status is Sample.Status.TRUNCATED and sample.label is None and sample.reward is None
    assert sample.metadata == metadata and sample.metadata is not metadata and sample.turn_texts == []
    assert samples_of(trajectory, str)[0].metadata == {}


class IntEnumerated(enum.IntEnum):
    """A number with a name."""

    TWO = 2


class Text(str):
    """A subclass."""


class Number(float):
    """Likewise."""


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (None, None), (True, True), (3, 3), (b"x", b"x"), (Text("x"), "x"), (Number(0.5), 0.5), ({1}, [1]),
        ({True: 1, 2.5: 2, "k": 3}, {True: 1, 2.5: 2, "k": 3}), (numpy.float32(0.5), 0.5),
        (Sample.Status.FAILED, "failed"), (numpy.arange(2), [0, 1]), (object, "<class 'object'>"),
        ((), []), (IntEnumerated.TWO, 2),
    ],
)  # fmt: skip
def test_a_value_is_dumped_as_plain_data(value, made):
    found = plain(value)
    assert found == made and type(found) is type(made)


def test_the_text_of_an_object_is_cut_where_it_is_dumped():
    class Long:
        def __repr__(self):
            return "x" * 20_000

    assert plain(Long()) == "x" * 9_997 + "..."


def test_a_dumped_tensor_is_detached_and_what_is_too_deep_is_a_text():
    tensor = torch.ones(1, requires_grad=True) * 2
    assert plain(tensor).tolist() == [2.0] and not plain(tensor).requires_grad
    text = "(nested too deeply to be written)"
    assert plain([[[1]]], 2) == [[text]] and plain({"k": {"k": 1}}, 1) == {"k": text} and plain({3}, 0) == text
    assert plain([[1]], 2) == [[1]] and plain(5, 0) == 5
    value = [1]
    for _ in range(199):
        value = [value]
    assert plain(value) == value and text in str(plain([value]))


@pytest.mark.parametrize(
    "name",
    [
        "multimodal_inputs", "multimodal_train_inputs", "teacher_log_probs", "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets", "rollout_routed_experts",
    ],
)  # fmt: skip
def test_what_training_does_not_use_is_refused(name):
    for fine in (None, [], {}):
        check_unsupported(Sample(**{name: fine}))
    for wrong in ([1], 0, {"k": 1}):
        with pytest.raises(LedgerError, match=f"sample.{name} is set"):
            check_unsupported(Sample(**{name: wrong}))
