"""The calculator is exact, bounded, and its errors are written for the model."""

from __future__ import annotations

import asyncio
import warnings
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.errors import ToolCallError
from verl_mt.tools.calculator import Calculator, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-3 - -4", "1"),
        ("1/3*3", "1"),
        ("0.1+0.2", "0.3"),
        ("10/4", "2.5"),
        ("1/3", "0.333333333333"),
        ("2/3", "0.666666666667"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%3", "1"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("1e3", "1000"),
        (" 6 / 2 ", "3"),
        ("1**999999999", "1"),
        ("(-1)**999999999", "-1"),
        ("0**0", "1"),
        ("1/10**20", "1E-20"),
    ],
)
def test_values_are_exact_and_integers_print_as_integers(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1/0", "division by zero"),
        ("5%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "number too large"),
        ("2**-99999999", "number too large"),
        ("1e400", "number too large"),
        ("4**0.5", "whole number"),
        ("2^3", "write ** for powers"),
        ("1,000+1", "write 1000, not 1,000"),
        ("2+2=4", "only the left side"),
        ("x+1", "cannot use 'x'"),
        ("__import__('os')", "cannot use '_'"),
        ("e", "only numbers"),
        ("(1).real", "cannot use 'r'"),
        ("5(3)", "only numbers"),
        ("()", "only numbers"),
        ("", "not a valid expression"),
        ("1 2", "not a valid expression"),
        ("(" * 200, "not a valid expression"),
        ("1+" * 400, "too long"),
        ("-" * 255 + "1", ""),
    ],
)
def test_what_cannot_be_evaluated_says_why(expression, reason):
    if reason:
        with pytest.raises(ToolCallError) as error:
            calculate(expression)
        assert reason in str(error.value)
    else:
        assert calculate(expression) == "-1"


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789+-*/%(). eE", max_size=40))
def test_any_text_gives_a_value_or_a_tool_call_error_and_no_warning(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            value = calculate(text)
        except ToolCallError as error:
            assert str(error)
        else:
            Fraction(value)


@settings(max_examples=100, deadline=None)
@given(st.integers(-999, 999), st.integers(-999, 999), st.integers(1, 99), st.sampled_from("+-*"))
def test_integer_arithmetic_agrees_with_python(a, b, c, op):
    value = {"+": a + b, "-": a - b, "*": a * b}[op] * c
    assert calculate(f"({a} {op} ({b})) * {c}") == str(value)
    assert calculate(f"({value}) / {c} * {c}") == str(value)


def test_the_tool_answers_with_text_and_no_step_reward():
    tool = Calculator({})
    assert tool.name == "calculator"
    response, reward, metrics = asyncio.run(tool.execute("i", {"expression": "6*7"}))
    assert (response.text, reward, metrics) == ("42", 0.0, {})
