"""What user code may hand over in place of plain lists, numbers and bools, and what is refused by name."""

from __future__ import annotations

import fractions
import re

import numpy as np
import pytest
import torch

from verl_mt.data.user_values import (
    MAX_DEPTH,
    WrongValue,
    bits_of,
    bool_of,
    count_of,
    ids_of,
    is_nested,
    log_probs_of,
    messages_of,
    number_of,
    numbers_of,
    plain_of,
    stops_of,
    text_of,
    tools_of,
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


def wrong(text: str):
    return pytest.raises(WrongValue, match=re.escape(text))


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (True, 1.0), (-2.5, -2.5), (np.float32(0.5), 0.5), (torch.tensor(2), 2.0), (np.array([4]), 4.0),
     (fractions.Fraction(1, 4), 0.25)],
)  # fmt: skip
def test_a_number_may_be_any_real_one(value, number):
    found = number_of(value, "reward")
    assert found == number and type(found) is float
    assert numbers_of([value, 1], "rewards") == [number, 1.0]


@pytest.mark.parametrize(
    "value",
    [
        "3",
        None,
        float("nan"),
        float("inf"),
        -float("inf"),
        10**400,
        1j,
        np.array([1, 2]),
        torch.ones(2),
        np.str_("x"),
        [1],
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_finite_number_is_named(value):
    with wrong("reward must be a finite number, got"):
        number_of(value, "reward")
    with wrong("rewards[1] must be a finite number, got"):
        numbers_of([1, value], "rewards")


def test_numbers_become_floats_in_a_list():
    found = numbers_of((1, 2.5), "x")
    assert found == [1.0, 2.5] and {*map(type, found)} == {float}
    assert numbers_of(np.array([1, 2]), "x") == [1.0, 2.0] and numbers_of([], "x") == []
    assert numbers_of([True, 0.5], "x") == [1.0, 0.5]
    for value in (5, "12", None, {1: 2}, np.float32(1)):
        with wrong("x must be a list of numbers, got"):
            numbers_of(value, "x")


def test_ids_and_bits_of_other_sequences():
    given = [3, 4]
    assert ids_of(given, "ids") == given and ids_of(given, "ids") is not given
    assert ids_of((3, 4), "ids") == ids_of(np.array([3, 4]), "ids") == ids_of(torch.tensor([3, 4]), "ids") == given
    assert ids_of([], "ids") == bits_of([], "bits") == []
    bits = bits_of([1, True, False, 1.0], "bits")
    assert bits == [1, 1, 0, 1] and {*map(type, bits)} == {int}
    assert {*map(type, bits_of([True, 0], "bits"))} == {int}
    for value in (5, "12", None, {1}):
        with wrong("ids must be a list of token ids, got"):
            ids_of(value, "ids")
        with wrong("bits must be a list of 0 and 1, got"):
            bits_of(value, "bits")
    for value in (2, -1):
        with wrong(f"bits[1] must be 0 or 1, got {value}"):
            bits_of([1, value], "bits")
    with wrong("ids[2] must be a whole number, got 2.5"):
        ids_of([1, 2, 2.5], "ids")


@pytest.mark.parametrize("value", [0, -3, None, True])
def test_a_count_is_at_least_one(value):
    assert (count_of(1, "n"), count_of(np.int64(7), "n")) == (1, 7)
    with wrong("n must be a whole number of at least 1, got"):
        count_of(value, "n")


def test_a_text_can_be_encoded():
    assert text_of("é", "said") == "é"
    with wrong("said must be a text, got 5"):
        text_of(5, "said")
    with wrong(r"said holds half of a surrogate pair ('\ud800' at 2), which no tokenizer takes"):
        text_of("ab\ud800", "said")


@pytest.mark.parametrize(
    ("value", "stops"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())]
)
def test_stop_strings_are_a_text_or_a_list(value, stops):
    assert stops_of(value, "stop") == stops


@pytest.mark.parametrize("value", ["", [""], ["a", 5], 5, {"a"}])
def test_what_is_no_stop_string_is_refused(value):
    with wrong("stop must be a text or a list of texts, none of them empty, got"):
        stops_of(value, "stop")


@pytest.mark.parametrize("num_ids", [2, 3])
def test_log_probs_are_one_per_id_or_one_per_trained_id(num_ids):
    assert log_probs_of(None, "log_probs", 2, 1) is None
    assert log_probs_of([-1.0, -2], "log_probs", num_ids, 2) == [-1.0, -2.0]
    assert log_probs_of([-1.0, -2], "log_probs", 2, 0) == [-1.0, -2.0]
    with wrong("log_probs has 1 entries for 3 response_token_ids (2 in the loss)"):
        log_probs_of([-1.0], "log_probs", 3, 2)
    with wrong("log_probs[1] must be a finite number"):
        log_probs_of([[-1.0], [-2.0, None]], "log_probs", 3, 2)


def test_lists_of_ids_and_lists_are_nested():
    assert is_nested([1, [2]]) and is_nested(([1],)) and not is_nested([]) and not is_nested([{}])


SAID = {"role": "user", "content": "x"}
CALL = {"function": {"name": "f"}}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (5, "m[1] must be a dict with role and content, got 5"),
        ({"content": "x"}, "m[1]['role'] must be a text, got None"),
        ({"role": "user"}, "m[1]['content'] must be a text, got None"),
        ({"role": "tool", "content": None}, "m[1]['content'] must be a text, got None"),
        ({"role": "assistant", "content": 5}, "m[1]['content'] must be a text, got 5"),
        ({"role": "user", "content": ["x"]}, "m[1]['content'][0] must be a part such as"),
        ({"role": "user", "content": ({"type": "text", "text": "x"}, {"type": "text"})}, "m[1]['content'][1]['text']"),
        ({**SAID, "reasoning_content": 5}, "m[1]['reasoning_content'] must be a text, got 5"),
        ({**SAID, "tool_call_id": 5}, "m[1]['tool_call_id'] must be a text"),
        ({**SAID, "name": 5}, "m[1]['name'] must be a text"),
        ({**SAID, "tool_calls": {"k": CALL}}, "m[1]['tool_calls'] must be a list, got"),
        ({**SAID, "loss": 2}, "m[1]['loss'][0] must be 0 or 1, got 2"),
        ({**SAID, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
         "m[1]['tool_calls'][0]['function']['arguments'] must be a dict, or JSON text, got 5"),
    ],
)  # fmt: skip
def test_a_message_that_no_template_renders_is_named_by_its_place(message, said):
    with wrong(said):
        messages_of([SAID, message], "m")


def test_messages_that_a_template_renders_come_back_as_they_are():
    good = [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None, "loss": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "x"}]},
        {"role": "tool", "content": [], "tool_calls": None},
    ]
    assert messages_of(good, "m") is good
    assert messages_of(tuple(good), "m") == good and type(messages_of(tuple(good), "m")) is list
    for value in ([], (), None, SAID, "x"):
        with wrong("m must be a list of messages with at least one, got"):
            messages_of(value, "m")


def nested(levels: int, make=lambda inner: [inner]):
    value = make("x")
    for _ in range(levels - 1):
        value = make(value)
    return value


def test_data_is_nested_no_deeper_than_that():
    for make in (
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {"k": inner},
        lambda inner: frozenset({inner}),
    ):
        fine = nested(MAX_DEPTH - 1, make)
        assert plain_of(fine, "x") is fine
        with wrong("x is nested more than 100 levels deep, or holds itself"):
            plain_of(nested(MAX_DEPTH, make), "x")
    wide = ["x"]
    for _ in range(90):
        wide = [wide, wide]  # 2 ** 90 places, one list
    assert plain_of(wide, "x") is wide and plain_of("x", "x") == "x"


def test_messages_and_tools_that_are_too_deep_are_named():
    deep = nested(200)
    with wrong("m[0] is nested more than"):
        messages_of([{**SAID, "info": deep}], "m")
    with wrong("m[0]['content'][0] is nested more than"):
        messages_of([{"role": "user", "content": [{"type": "image", "image": deep}]}], "m")
    with wrong("t[1] is nested more than"):
        tools_of([{}, {"k": deep}], "t")


def test_a_part_of_a_message_may_be_as_deep_as_data():
    message = {"role": "user", "content": [{"type": "image", "image": nested(MAX_DEPTH - 2)}]}
    assert messages_of([message], "m") == [message]
    with wrong("m[0] is nested more than"):
        messages_of([{**message, "name": "n"}], "m")


def test_tools_are_a_list_of_dicts():
    tools = [{"name": "f"}]
    assert tools_of(tools, "t") == tools_of(tuple(tools), "t") == tools and tools_of(tools, "t") is not tools
    assert tools_of([], "t") == []
    with wrong("t must be a list of tool schemas, got {'name': 'f'}"):
        tools_of(tools[0], "t")
    with wrong("t[1] must be a dict such as"):
        tools_of([{}, "f"], "t")


def test_a_shown_value_is_cut_at_100_characters():
    with pytest.raises(WrongValue) as caught:
        text_of([0] * 500, "x")
    assert str(caught.value) == "x must be a text, got " + repr([0] * 500)[:97] + "..."


def test_plain_lists_are_not_looked_at_item_by_item(monkeypatch):
    for name in ("_scalar", "_index", "number_of"):
        monkeypatch.setattr(f"verl_mt.data.user_values.{name}", None)
    assert ids_of([3, 4], "x") == [3, 4] and numbers_of([0.5, -1.0], "x") == [0.5, -1.0]
    for bits in ([0, 1], [True, 0, False], [1], [0]):
        assert bits_of(bits, "x") == bits


def test_one_wrong_item_among_good_ones_of_its_type_is_found():
    with wrong("x[2] must be 0 or 1, got 2"):
        bits_of([0, 1, 2], "x")
    with wrong("x[1] must be a finite number, got nan"):
        numbers_of([0.5, float("nan")], "x")
    assert [*map(type, numbers_of([True, 0.5, 2], "x"))] == [float] * 3
