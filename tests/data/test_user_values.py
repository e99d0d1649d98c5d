"""What user code may hand over in place of plain lists, numbers and bools, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_mt.data.user_values import (
    WrongValue,
    bits_of,
    bool_of,
    count_of,
    ids_of,
    is_nested,
    log_probs_of,
    messages_of,
)


@pytest.mark.parametrize(
    "value",
    [
        list(np.array([True, False])),
        [torch.tensor(1), torch.tensor(False)],
        [np.float32(1.0), np.array(0)],
        np.array([True, False]),
        torch.tensor([1.0, 0.0]),
    ],
)
def test_bits_may_be_scalars_of_numpy_and_torch(value):
    bits = bits_of(value, "mask")
    assert bits == [1, 0] and {*map(type, bits)} == {int}


@pytest.mark.parametrize("bad", [np.int64(2), torch.tensor(0.5), torch.tensor([1]), "1", None])
def test_what_is_no_bit_is_named_by_its_place(bad):
    with pytest.raises(WrongValue, match=r"mask\[1\] must be 0 or 1, got"):
        bits_of([1, bad], "mask")


@pytest.mark.parametrize("loss", [np.bool_(False), torch.tensor(False), 0, True, np.True_])
def test_the_loss_flag_of_a_message_may_be_a_scalar(loss):
    messages_of([{"role": "assistant", "content": "x", "loss": loss}], "messages")


@pytest.mark.parametrize(
    "call", [5, {}, {"function": {"name": 5}}, {"function": {"name": "f", "arguments": [1]}}], ids=str
)
def test_a_tool_call_of_another_form_is_named_by_its_place(call):
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}, call]}
    with pytest.raises(WrongValue, match=r"messages\[0\]\['tool_calls'\]\[1\]"):
        messages_of([said], "messages")


@pytest.mark.parametrize("bad", [torch.tensor(1.5), np.array([1, 2]), np.float32(1.0), torch.tensor([1, 2]), True, "5"])
def test_what_is_no_id_is_named_by_its_place(bad):
    with pytest.raises(WrongValue, match=r"ids\[1\] must be a whole number, got"):
        ids_of([5, bad], "ids")
    with pytest.raises(WrongValue, match="max_tokens must be a whole number of at least 1, got"):
        count_of(bad, "max_tokens")


def test_ids_and_counts_may_be_scalars_of_numpy_and_torch():
    ids = ids_of([5, np.int32(6), torch.tensor(7)], "ids")
    assert ids == [5, 6, 7] and {*map(type, ids)} == {int}
    assert count_of(torch.tensor(3), "max_tokens") == 3


@pytest.mark.parametrize("kind", [bool, int, np.bool_, np.int64, np.array, torch.tensor])
@pytest.mark.parametrize("truth", [True, False])
def test_a_bool_may_be_a_scalar_or_0_or_1(kind, truth):
    assert bool_of(kind(truth), "done") is truth


@pytest.mark.parametrize(
    "value", ["False", None, 2, -1, 1.0, [], np.array([True, False]), torch.tensor(2), torch.tensor([]), np.str_("x")]
)
def test_what_is_neither_true_nor_false_is_refused(value):
    with pytest.raises(WrongValue, match="done must be True or False, got"):
        bool_of(value, "done")


@pytest.mark.parametrize("array", [list, tuple, np.array, torch.tensor])
def test_a_list_of_arrays_is_one_list_per_turn(array):
    assert is_nested([array([1, 2]), array([3])])
    assert log_probs_of([array([-1.0, -2.0]), array([-3.0])], "log_probs", 3, 2) == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("value", "nested"),
    [
        ([np.int64(1), torch.tensor(2)], False),
        (np.array([1, 2]), False),
        (torch.tensor([[1], [2]]), True),
        (5, False),
        ("ab", False),
        (None, False),
    ],
)
def test_scalars_are_no_lists_of_a_turn(value, nested):
    assert is_nested(value) is nested
