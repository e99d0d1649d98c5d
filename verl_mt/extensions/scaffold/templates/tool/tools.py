"""The tool of `my_project`. The shipped model knows only this name and argument. Yours may have any."""

import re

from verl_mt import ToolCallError, function_tool


def add(expression: str) -> str:
    """A sum or a difference of two whole numbers.

    Raises:
        ToolCallError: anything else. The model reads this text.
    """
    found = re.fullmatch(r"(\d{1,9})([+-])(\d{1,9})", expression.replace(" ", ""))
    if found is None:
        raise ToolCallError("write two numbers, such as 3+4")
    return str(int(found[1]) + int(found[2] + found[3]))


@function_tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to compute
    """
    return add(expression)
