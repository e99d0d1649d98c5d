"""The kinds of bugs that are drawn: small edits of expressions and statements in function bodies.

Not mutated: docstrings, annotations, decorators and defaults, `assert`, `raise` and its arguments, f-strings, calls of
loggers and `warnings`, `__repr__` and `__str__`, and `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from mutants import FunctionNode, Mutant, Text, functions

Edit = tuple[int, int, str]
"""Start, end, the text that comes there."""

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")), ast.LtE: ("<=", ("<", ">=")), ast.Gt: (">", (">=", "<")), ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum",
    "argmin": "argmax", "argmax": "argmin", "sum": "mean", "mean": "sum", "any": "all", "all": "any", "zeros": "ones",
    "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like", "clamp_min": "clamp_max",
    "clamp_max": "clamp_min", "floor": "ceil", "ceil": "floor", "startswith": "endswith", "endswith": "startswith",
    "lstrip": "rstrip", "rstrip": "lstrip", "appendleft": "append",
}  # fmt: skip
_BUILTINS = {"min", "max", "any", "all"}
_DROPPED_CALLS = {"detach", "abs"}
_LOGGERS = re.compile(r"^(_?log|_?logger|logging|warnings|self\._?log|self\._?logger)\.\w+$|^(print|warn)$")
_UNORDERED = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "min", "max", "zip", "super", "range"}
_SKIPPED_FUNCTIONS = {"__repr__", "__str__"}


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in its order."""
    text, found = Text(source), {}
    for name, node in functions(source).items():
        if node.name in _SKIPPED_FUNCTIONS:
            continue
        start, end = text.span(node)
        for edit in _body_edits(node, text):
            first, last = text.lines_around(edit[0], edit[1])
            first, last = max(first, start), min(last, end)
            old = source[first:last]
            new = source[first : edit[0]] + edit[2] + source[edit[1] : last]
            occurrence = _count(source[start:end], old, first - start)
            mutant = Mutant(file, name, old, new, occurrence)
            if new != old:
                found[mutant.key] = mutant
    return list(found.values())


def _count(text: str, old: str, at: int) -> int:
    """Which occurrence begins at `at`, from 1; overlapping ones count."""
    number, place = 1, text.find(old)
    while place < at:
        place, number = text.find(old, place + 1), number + 1
    return number


def _body_edits(function: FunctionNode, text: Text) -> Iterator[Edit]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    boolean = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    for statement in body:
        yield from _statement(statement, text, boolean)


def _statement(node: ast.stmt, text: Text, boolean: bool) -> Iterator[Edit]:
    if isinstance(node, FunctionNode | ast.ClassDef | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and text.of(node.test).endswith("TYPE_CHECKING"):
        return
    start, end = text.span(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        if _is_log_call(node.value, text):
            return
        yield start, end, "pass"
    elif (
        isinstance(node, ast.AugAssign | ast.Delete)
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
        or isinstance(node, ast.Break | ast.Continue)
    ):
        yield start, end, "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        sign, other = _ARITHMETIC[type(node.op)]
        yield from _between(node.target, node.value, f"{sign}=", f"{other}=", text)
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield from _negated(node.test, text)
    if isinstance(node, ast.Return) and boolean and isinstance(node.value, ast.Name | ast.Attribute | ast.Call):
        yield from _negated(node.value, text)
    for child in _children(node):
        if isinstance(child, ast.stmt):
            yield from _statement(child, text, boolean)
        elif isinstance(child, ast.expr):
            yield from _expression(child, text)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Statements and expressions, through handlers, `with` items and cases; no annotations, patterns and keywords."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "pattern", "type"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.stmt | ast.expr):
                yield child
            elif isinstance(child, ast.excepthandler | ast.withitem | ast.match_case | ast.comprehension):
                yield from _children(child)


def _is_log_call(node: ast.expr, text: Text) -> bool:
    call = node.value if isinstance(node, ast.Await) else node
    return isinstance(call, ast.Call) and bool(_LOGGERS.match(text.of(call.func)))


def _negated(node: ast.expr, text: Text) -> Iterator[Edit]:
    start, end = text.span(node)
    yield start, end, f"not {text.source[start:end]}"


def _between(left: ast.expr, right: ast.expr, sign: str, other: str, text: Text) -> Iterator[Edit]:
    """The operator between two operands; comments and parentheses may stand there too."""
    start, end = text.span(left)[1], text.span(right)[0]
    word = rf"\b{sign}\b".replace(" ", r"\s+") if sign[0].isalpha() else re.escape(sign)
    found = re.search(word, text.source[start:end])
    if found:
        yield start + found.start(), start + found.end(), other


def _expression(node: ast.expr, text: Text) -> Iterator[Edit]:
    if isinstance(node, ast.JoinedStr) or _is_log_call(node, text):
        return
    start, end = text.span(node)
    match node:
        case ast.Compare():
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):
                sign, others = _COMPARISONS[type(operator)]
                for other in others:
                    yield from _between(left, right, sign, other, text)
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text_or_type(node):
            yield from _between(node.left, node.right, *_ARITHMETIC[type(node.op)], text)
        case ast.BoolOp():
            signs = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:]):
                yield from _between(left, right, *signs, text)
        case ast.UnaryOp() if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            sign = {ast.Not: "not", ast.USub: "-", ast.Invert: "~"}[type(node.op)]
            yield start, start + len(sign), ""
        case ast.IfExp() if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield from _negated(node.test, text)
        case ast.Constant():
            yield from _constant(node, start, end)
        case ast.Attribute() if node.attr in _NAMES:
            yield end - len(node.attr), end, _NAMES[node.attr]
        case ast.Slice():
            yield from _slice(node, text)
        case ast.Call():
            yield from _call(node, text)
    for child in _children(node):
        if isinstance(child, ast.expr):
            yield from _expression(child, text)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            yield from _keyword(keyword, text)


def _keyword(keyword: ast.keyword, text: Text) -> Iterator[Edit]:
    """`dim=-1` becomes -2: of a tensor with two dimensions, as most are, 1 is the same as -1."""
    if keyword.arg != "dim":
        yield from _expression(keyword.value, text)
    elif isinstance(keyword.value, ast.UnaryOp):
        yield *text.span(keyword.value), "-2"
    elif isinstance(keyword.value, ast.Constant):
        yield from _constant(keyword.value, *text.span(keyword.value))


def _is_text_or_type(node: ast.BinOp) -> bool:
    """A string or list that grows, `"%s" % x`, or `A | B` of types."""
    literal = ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp | ast.Dict
    parts = (node.left, node.right)
    if any(isinstance(p, literal) or (isinstance(p, ast.Constant) and isinstance(p.value, str | bytes)) for p in parts):
        return True
    return isinstance(node.op, ast.BitOr) and any(
        (isinstance(p, ast.Constant) and p.value is None)
        or (isinstance(p, ast.Name) and (p.id[:1].isupper() or p.id in ("str", "int", "float", "list", "dict", "bool")))
        for p in parts
    )


def _constant(node: ast.Constant, start: int, end: int) -> Iterator[Edit]:
    if isinstance(node.value, bool):
        yield start, end, str(not node.value)
    elif isinstance(node.value, int):
        yield start, end, "1" if node.value == 0 else "0" if node.value == 1 else str(node.value + 1)
    elif isinstance(node.value, float):
        new = 1.0 if node.value == 0 else 0.0 if node.value == 1 else node.value + 1
        yield start, end, repr(new)


def _slice(node: ast.Slice, text: Text) -> Iterator[Edit]:
    """Bounds that are no constants, off by one."""
    for bound, sign in ((node.lower, "+"), (node.upper, "-")):
        if isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            start, end = text.span(bound)
            yield start, end, f"{text.source[start:end]} {sign} 1"


def _call(node: ast.Call, text: Text) -> Iterator[Edit]:
    function = node.func
    start, end = text.span(function)
    if isinstance(function, ast.Name) and function.id in _BUILTINS:
        yield start, end, _NAMES[function.id]
    if isinstance(function, ast.Attribute) and function.attr in _DROPPED_CALLS and not node.args:
        yield text.span(function.value)[1], text.span(node)[1], ""
    for keyword in node.keywords:
        if keyword.arg in ("min", "max"):
            at = text.offset(keyword.lineno, keyword.col_offset)
            yield at, at + 3, _NAMES[keyword.arg]
    if isinstance(function, ast.Name) and function.id in _UNORDERED:
        return
    for one, other in zip(node.args, node.args[1:]):
        if type(one) is type(other) and isinstance(one, ast.Name | ast.Attribute):
            first, last = text.span(one), text.span(other)
            middle = text.source[first[1] : last[0]]
            yield first[0], last[1], text.of(other) + middle + text.of(one)
