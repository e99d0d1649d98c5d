"""The ledger: who may write tokens, and what its verbs leave in the records."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import verl_mt
from verl_mt.data.ledger import _COLUMNS, Ledger

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
    ledger.given([1, 2], turn=0)
    ledger.sampled([3], [-0.5], [7], turn=1)
    ledger.given([4], turn=1)
    record = ledger.record
    record.check()
    assert (record.token_ids, record.sampled, record.loss_mask) == ([1, 2, 3, 4], [0, 0, 1, 0], [0, 0, 1, 0])
    assert [span.kind for span in record.turns] == ["prompt", "assistant", "observation"]
    assert ledger.num_response_tokens == 2


def test_a_fork_keeps_what_was_sampled_and_replaces_what_nobody_read():
    ledger = Ledger()
    ledger.given([1, 2], turn=0)
    assert not ledger.fork([5], turn=0)
    ledger.sampled([3], [-0.5], [7], turn=1)
    assert ledger.fork([5, 6], turn=1)
    assert [record.token_ids for record in ledger.records] == [[5, 3], [5, 6]]
    assert ledger.record.turns[0].kind == "prompt" and ledger.num_response_tokens == 1


def test_what_is_taken_back_counts_against_the_response():
    ledger = Ledger()
    ledger.given([1], turn=0)
    ledger.sampled([2, 3, 4], [-0.1] * 3, [0] * 3, turn=1)
    assert ledger.cut(2) == 2
    assert (ledger.record.token_ids, ledger.num_cut_tokens, ledger.num_response_tokens) == ([1, 2], 2, 3)
