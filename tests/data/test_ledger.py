"""The ledger: who may write tokens, and what its verbs leave in the records."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import verl_mt
from verl_mt.data.ledger import _COLUMNS, Ledger, TrajectoryRecord, TurnSpan, listed, total
from verl_mt.data.media import MediaInput
from verl_mt.errors import LedgerError

PACKAGE = Path(verl_mt.__file__).parent
OTHERS_COLUMNS = {"self", "sample"}
"""Objects that have columns of these names and are no records: a Sample, a request in flight, a report's table."""
MUTATORS = ("append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort")


def column_of(node: ast.AST) -> str | None:
    """`record.token_ids` for an expression that names a record's column, or an item or slice of one."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute) and node.attr in _COLUMNS:
        return ast.unparse(node)
    return None


def written(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Assign | ast.Delete):
        return [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return [node.func.value]
    return []


@pytest.mark.slow
def test_only_the_ledger_writes_tokens_provenance_and_mask():
    found = []
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "data" / "ledger.py":
            continue
        name = file.relative_to(PACKAGE).as_posix()
        text = file.read_text()
        if not any(word in text for word in (*_COLUMNS, "append_given", "append_sampled")):
            continue
        for node in ast.walk(ast.parse(text)):
            columns = [c for c in map(column_of, written(node)) if c and c.split(".")[0] not in OTHERS_COLUMNS]
            found += [f"{name}:{node.lineno} writes {column}" for column in columns]
            if isinstance(node, ast.Attribute) and node.attr in ("append_given", "append_sampled"):
                found.append(f"{name}:{node.lineno} calls {node.attr}; go through a Ledger")
    assert not found, "\n".join(found)


def test_a_turn_is_in_the_loss_and_what_is_given_is_not():
    ledger = Ledger()
    ledger.append_observation([1, 2], turn=0)
    ledger.sampled([3], [-0.5], [7], turn=1)
    ledger.append_observation([4], turn=1)
    record = ledger.record
    record.check()
    assert (record.token_ids, record.sampled, record.loss_mask) == ([1, 2, 3, 4], [0, 0, 1, 0], [0, 0, 1, 0])
    assert [span.kind for span in record.turns] == ["prompt", "assistant", "observation"]
    assert ledger.num_response_tokens == 2


def test_a_fork_keeps_what_was_sampled_and_replaces_what_nobody_read():
    ledger = Ledger()
    ledger.append_observation([1, 2], turn=0)
    assert not ledger.fork([5], turn=0)
    ledger.sampled([3], [-0.5], [7], turn=1)
    assert ledger.fork([5, 6], turn=1)
    assert [record.token_ids for record in ledger.records] == [[5, 3], [5, 6]]
    assert ledger.record.turns[0].kind == "prompt" and ledger.num_response_tokens == 1


def test_what_is_taken_back_counts_against_the_response():
    ledger = Ledger()
    ledger.append_observation([1], turn=0)
    ledger.sampled([2, 3, 4], [-0.1] * 3, [0] * 3, turn=1)
    assert ledger.cut(2) == 2
    assert (ledger.record.token_ids, ledger.num_cut_tokens, ledger.num_response_tokens) == ([1, 2], 2, 3)


def two_turns() -> TrajectoryRecord:
    """Positions 0-1 prompt, 2-4 turn 1, 5-6 observation, 7-8 turn 2."""
    record = TrajectoryRecord()
    record.append_given([1, 2], kind="prompt", turn=0)
    record.append_sampled([10, 11, 12], [-0.1, -0.2, -0.3], [4, 4, 5], turn=1)
    record.append_given([50, 51], kind="observation", turn=1)
    record.append_sampled([13, 14], [-0.4, -0.5], [6, 6], turn=2)
    return record


def columns(record: TrajectoryRecord) -> list[list]:
    return [listed(getattr(record, name)) for name in _COLUMNS]


def spans(record: TrajectoryRecord) -> list[tuple]:
    return [(span.kind, span.start, span.end, span.turn) for span in record.turns]


def test_every_column_of_a_record_of_two_turns():
    record = two_turns()
    bits = [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert columns(record) == [
        [1, 2, 10, 11, 12, 50, 51, 13, 14], bits, bits,
        [0.0, 0.0, -0.1, -0.2, -0.3, 0.0, 0.0, -0.4, -0.5], [-1, -1, 4, 4, 5, -1, -1, 6, 6],
    ]  # fmt: skip
    assert record.sampled is not record.loss_mask
    assert spans(record) == [
        ("prompt", 0, 2, 0),
        ("assistant", 2, 5, 1),
        ("observation", 5, 7, 1),
        ("assistant", 7, 9, 2),
    ]
    assert record.assistant_turns == [record.turns[1], record.turns[3]]
    assert (record.num_prompt_tokens, TrajectoryRecord().num_prompt_tokens) == (2, 0)
    started = TrajectoryRecord()
    started.append_sampled([1], [-0.5], [0], turn=1)
    assert started.num_prompt_tokens == 0


def test_a_sum_and_a_list_of_a_column_are_the_same_sealed_or_not():
    record = two_turns()
    plain = columns(record)
    record.seal()
    assert columns(record) == plain and listed(record.token_ids[2:4]) == [10, 11]
    assert [getattr(record, name).dtype for name in _COLUMNS] == [np.int32, np.int8, np.int8, np.float64, np.int32]
    assert total(record.sampled) == total(plain[1]) == 5 and type(total(record.sampled)) is int
    for column in (record.token_ids, record.policy_versions):
        with pytest.raises(AttributeError):
            column.append(1)
    with pytest.raises(AttributeError):
        record.append_given([1], kind="observation", turn=2)
    assert {*map(type, listed(record.sampled))} == {int} and listed((1, 2)) == [1, 2]
    column = [1]
    assert listed(column) is not column
    record.check()


def test_sampled_tokens_without_log_probs_come_only_where_none_had_some():
    record = TrajectoryRecord()
    record.append_given([1], kind="prompt", turn=0)
    record.append_sampled([2, 3], None, [0, 0], turn=1)
    assert record.rollout_log_probs == [0.0, 0.0, 0.0] and not record.has_log_probs
    record.append_sampled([4], None, [0], turn=2)
    with pytest.raises(LedgerError, match="sampled tokens without log-probs after"):
        two_turns().append_sampled([5], None, [0], turn=3)


@pytest.mark.parametrize(
    ("log_probs", "versions"), [([-0.1], [0, 0]), ([-0.1] * 3, [0, 0]), ([-0.1] * 2, [0]), (None, [0])]
)
def test_columns_of_another_length_are_refused_before_anything_is_appended(log_probs, versions):
    record = TrajectoryRecord()
    with pytest.raises(LedgerError, match=f"2 sampled ids came with .* and {len(versions)} versions"):
        record.append_sampled([10, 11], log_probs, versions, turn=1)
    assert columns(record) == [[]] * 5 and not record.turns


def test_bits_that_change_are_counted():
    record = two_turns()
    assert record.clear_mask([0, 2, 7]) == 2 and record.clear_mask([2]) == 0
    assert record.loss_mask == [0, 0, 0, 1, 1, 0, 0, 0, 1] and record.sampled[2] == 1
    record.media = [MediaInput("image", 5, 2, {})]
    assert record.set_mask([0, 2, 3, 5, 6, 7]) == 1, (
        "positions 2 and 7 were sampled, 3 was in the loss, 5 and 6 are an image"
    )
    assert record.loss_mask == [1, 0, 1, 1, 1, 0, 0, 1, 1]
    assert record.set_mask([0]) == 0 and record.set_mask(range(1, 2)) == 1


@pytest.mark.parametrize(
    ("end", "dropped", "left"),
    [
        (9, 0, [("prompt", 0, 2, 0), ("assistant", 2, 5, 1), ("observation", 5, 7, 1), ("assistant", 7, 9, 2)]),
        (8, 1, [("prompt", 0, 2, 0), ("assistant", 2, 5, 1), ("observation", 5, 7, 1), ("assistant", 7, 8, 2)]),
        (7, 2, [("prompt", 0, 2, 0), ("assistant", 2, 5, 1), ("observation", 5, 7, 1)]),
        (3, 4, [("prompt", 0, 2, 0), ("assistant", 2, 3, 1)]),
        (2, 5, [("prompt", 0, 2, 0)]),
    ],
)
def test_a_cut_record_ends_there_in_every_column(end, dropped, left):
    record, whole = two_turns(), columns(two_turns())
    images = [MediaInput("image", 0, 2, {}), MediaInput("image", 5, 2, {})]
    record.media = list(images)
    assert record.cut(end) == dropped
    assert columns(record) == [column[:end] for column in whole] and spans(record) == left
    assert record.media == images[: 1 + (end >= 7)]
    record.check()


@pytest.mark.parametrize(("start", "first_end"), [(7, 5), (8, 8), (5, 5), (2, 2)])
def test_a_split_record_trains_each_token_once(start, first_end):
    record, whole = two_turns(), columns(two_turns())
    record.messages, record.media = [{"role": "user"}], [MediaInput("image", 0, 1, {})]
    first, second = record.split(start)
    assert columns(first) == [column[:first_end] for column in whole]
    assert columns(record) == whole and first.messages == record.messages and first.messages is not record.messages
    given = [whole[0][:start], [0] * start, [0] * start, [0.0] * start, [-1] * start]
    assert columns(second) == [before + column[start:] for before, column in zip(given, whole)]
    assert second.media == record.media and second.media is not record.media and second.has_log_probs
    turn = {7: 1, 8: 2, 5: 1, 2: 0}[start]
    behind = {7: [("assistant", 7, 9, 2)], 5: [("observation", 5, 7, 1), ("assistant", 7, 9, 2)]}
    behind[2] = [("assistant", 2, 5, 1), *behind[5]]
    assert spans(second) == [("prompt", 0, start, turn), *behind.get(start, [])]


def test_a_record_that_began_without_a_prompt_can_be_split():
    record = TrajectoryRecord(has_log_probs=False)
    first, second = record.split(0)
    assert spans(second) == [("prompt", 0, 0, 0)] and not second.has_log_probs and not first.turns


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.policy_versions.pop(), "columns of one record differ in length"),
        (
            lambda r: r.rollout_log_probs.__setitem__(1, -0.5),
            "position 1 was not sampled but has log-prob -0.5 and version -1",
        ),
        (
            lambda r: r.policy_versions.__setitem__(5, 3),
            "position 5 was not sampled but has log-prob 0.0 and version 3",
        ),
        (lambda r: r.turns.__setitem__(1, TurnSpan("assistant", 3, 5, 1)), "not contiguous at token 2"),
        (lambda r: r.turns.__setitem__(1, TurnSpan("assistant", 2, 1, 1)), "not contiguous at token 2"),
        (lambda r: r.turns.__setitem__(0, TurnSpan("prompt", 1, 2, 0)), "not contiguous at token 0"),
        (lambda r: r.turns.pop(), "turn spans cover 7 of 9 tokens"),
    ],
)
def test_a_record_that_does_not_hold_together_is_refused(change, said):
    record = two_turns()
    record.append_given([], kind="observation", turn=2)
    record.check()
    record.turns.pop()
    change(record)
    with pytest.raises(LedgerError, match=said):
        record.check()


def test_tokens_of_all_records_count_once_against_the_response():
    ledger = Ledger([two_turns()])
    assert ledger.num_response_tokens == 7 and ledger.cut(8) == 1 and ledger.num_response_tokens == 7
    assert ledger.fork([1, 2, 3], turn=2) and ledger.num_response_tokens == 7
    ledger.sampled([20], None, [7], turn=3)
    assert ledger.num_response_tokens == 8 and spans(ledger.record) == [("prompt", 0, 3, 2), ("assistant", 3, 4, 3)]
    ledger.append_observation([30], turn=3)
    assert spans(ledger.record)[-1] == ("observation", 4, 5, 3)
    assert Ledger().records is not Ledger().records
