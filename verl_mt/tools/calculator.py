"""A calculator: exact arithmetic without `eval`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from verl_mt.errors import ToolCallError
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

MAX_LENGTH = 256
"""Characters of an expression."""
MAX_BITS = 1024
"""Size of a numerator or denominator at any step, about 308 digits."""
SIGNIFICANT_DIGITS = 12
"""Of a result that is not an integer."""

# Without letters other than the exponent's e there are no names and no keywords, and nothing for the parser to warn of.
_ALLOWED = re.compile(r"[0-9eE.+\-*/%()\s]*\Z")
_HINTS = {"^": "; write ** for powers", ",": "; write 1000, not 1,000", "=": "; write only the left side"}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator(BaseTool):
    """`calculator(expression)`: + - * / // % ** and parentheses, exact (1/3*3 is 1)."""

    runs_inline = True

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One string, `expression`."""
        schema = self.__dict__.get("tool_schema")
        if schema is not None:
            return schema
        expression = {"type": "string", "description": "An arithmetic expression, for example (3 + 4) * 2"}
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "calculator",
                    "description": "Evaluate an arithmetic expression.",
                    "parameters": parameters,
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """The value of `parameters["expression"]`.

        Raises:
            ToolCallError: it cannot be evaluated; says why.
        """
        return ToolResponse(text=calculate(str(parameters["expression"]))), 0.0, {}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Returns:
        An integer as digits, anything else as a decimal with at most 12 significant digits.

    Raises:
        ToolCallError: not arithmetic, too long, too large, or division by zero; the text is written for the model.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolCallError(f"expression is too long: {len(expression)} characters, at most {MAX_LENGTH}")
    if not _ALLOWED.match(expression):
        wrong = next(c for c in expression if not _ALLOWED.match(c))
        raise ToolCallError(
            f"cannot use {wrong!r} in an expression{_HINTS.get(wrong, '')}. Allowed: numbers + - * / // % ** ( )"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolCallError(f"not a valid expression: {expression.strip()!r}") from None
    return _show(_value(tree.body))


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if node.value in (float("inf"), float("-inf")):
            raise ToolCallError("number too large")
        return _bounded(Fraction(Decimal(repr(node.value))))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and (type(node.op) in _BINARY or isinstance(node.op, ast.Pow)):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        try:
            return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
        except ZeroDivisionError:
            raise ToolCallError("division by zero") from None
    raise ToolCallError("only numbers, + - * / // % ** and parentheses can be used")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolCallError(f"an exponent must be a whole number, got {_show(exponent)}")
    if base == 0 and exponent < 0:
        raise ToolCallError("division by zero")
    power = exponent.numerator
    # Refused before it is computed: 9**9**9 would take forever.
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and (bits - 1) * abs(power) > MAX_BITS:
        raise ToolCallError("number too large")
    if abs(base) in (0, 1):
        power = power % 2 + 2 if power else 0
    return _bounded(Fraction(base**power))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolCallError("number too large")
    return value


def _show(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rounded = Context(prec=SIGNIFICANT_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator)).normalize()
    return format(rounded, "f") if -SIGNIFICANT_DIGITS <= rounded.adjusted() < SIGNIFICANT_DIGITS else str(rounded)
