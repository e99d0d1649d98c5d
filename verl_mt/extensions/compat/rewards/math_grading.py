r"""Are two answers of mathematics the same, by the two rules that rule-based rewards of competition problems use?

Both compare texts that are normalised first, and neither rounds:

- `same_by_text`, MATH's (Hendrycks et al. 2021): `\frac12` is `\frac{1}{2}`, 1/2 and 0.5 is, `x=3` is `3`; units behind
  `\text{ `, degrees, percent signs and white space are no part of an answer.
- `same_by_algebra`, PRM800K's (Lightman et al. 2023): both become an expression, whose difference has to be 0. An
  integer is only itself, a fraction only itself as written, a tuple is compared part by part.

An answer is the model's text: what reaches sympy is made of numbers, letters and operators only.
"""

from __future__ import annotations

import re
import unicodedata

_WHOLE_TEXT = re.compile(r"^\\text\{(?P<inner>.+?)\}$")
_DRESSING = (
    ("\n", ""), (r"\!", ""), (r"\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", ""),
    (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", ""),
)  # fmt: skip
_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_UNIT = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNITS]
_MAGNITUDES = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
_SIGNS = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "pm": "±", "div": "÷", "le": "≤", "leq": "≤",
    "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "in": "∈", "circ": "∘", "ldots": "…", "dots": "…", "{": "{",
    "}": "}", "%": "%", "$": "$", "&": "&", "#": "#", "_": "_", " ": " ", ",": " ", ";": " ", ":": " ", "!": "",
    "quad": "  ", "qquad": "    ",
}  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu", "xi", "rho",
    "sigma", "tau", "phi", "chi", "psi", "omega",
)  # fmt: skip
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "min", "max", "gcd", "lcm", "arcsin"}
_FUNCTIONS |= {"arccos", "arctan", "sinh", "cosh", "tanh", "lim", "det", "arg", "deg"}
_MACRO = re.compile(r"\\([A-Za-z]+|.)\s*", re.DOTALL)
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_READABLE = re.compile(r"[0-9a-z+\-*/^().,!\[\] ]*")
"""Texts that sympy gets: nothing that names an attribute, a text or an item of anything."""
_DANGEROUS = re.compile(r"[a-z]\.|\.[a-z]|\.\.|\d{4,}!|[!)\]]!|\^[0-9]+\^|\^[0-9][0-9]+|\^[({]")
MAX_EXPRESSION = 1000
"""A longer expression is not looked at; two texts of that length may still be the same."""


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None where there is none, it is not closed, or has no braces."""
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    return _group(text, start + len("\\boxed"))[0]


def same_answer(given: str, truth: str) -> bool:
    """By either rule."""
    return same_by_text(given, truth) or same_by_algebra(given, truth)


# ----------------------------------------------------------------------------------------------------------------------
# By text


def same_by_text(given: str, truth: str) -> bool:
    return _plain(given) == _plain(truth)


def _plain(answer: str) -> str:
    """A text that cannot be read to the end stays as it is."""
    answer = answer.strip()
    if found := _WHOLE_TEXT.search(answer):
        answer = found["inner"].strip()
    try:
        return _normal(answer)
    except ValueError:
        return answer


def _normal(text: str) -> str:
    """Raises:
    ValueError: two units, or a fraction or root without anything behind it.
    """
    for before, after in _DRESSING:
        text = text.replace(before, after)
    text, *units = text.split(r"\text{ ")
    if len(units) > 1:
        raise ValueError("two units")
    text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    if text.endswith(r"\sqrt"):
        raise ValueError("a root of nothing")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))$", r"\\frac{\1}{\2}", text)


def _braced_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{2}` with both braces. Raises ValueError behind a `\frac` that ends the text."""
    first, *parts = text.split(r"\frac")
    if any(not part for part in parts):
        raise ValueError("a fraction of nothing")
    if any(len(part) < 2 and part[0] != "{" for part in parts):
        return text
    made = [first]
    for part in parts:
        if part[0] == "{":
            made.append(part)
        else:
            made.append(f"{{{part[0]}}}{part[1:]}" if part[1] == "{" else f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return r"\frac".join(made)


# ----------------------------------------------------------------------------------------------------------------------
# By algebra


def same_by_algebra(given: str, truth: str) -> bool:
    left, right = _expression(truth), _expression(given)
    if left == right:
        return True
    if not right:
        return False
    wanted, found = _parts(left), _parts(right)
    if len(wanted) != len(found) or (len(wanted) > 1 and (left[0], left[-1]) != (right[0], right[-1])):
        return False
    return bool(wanted) and all(_same_part(a, b) for a, b in zip(wanted, found))


def _same_part(truth: str, given: str) -> bool:
    if _FRACTION.fullmatch(truth) and _FRACTION.fullmatch(given):
        return truth == given  # a fraction is to be given in its lowest terms
    if _is_whole(truth) != _is_whole(given):
        return False
    return _difference_is_zero(truth, given)


def _expression(text: str) -> str:
    """An answer as an expression in lower case without white space and LaTeX."""
    if found := _WHOLE_TEXT.search(text):
        text = found["inner"]
    for before, after in ((r"\%", "%"), (r"\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        text = text.replace(before, after)
    for word, power in _MAGNITUDES.items():
        text = text.replace(word, power)
    for unit in _UNIT:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    number = _number(text)
    if number is not None and abs(number - round(number)) <= 1e-7:
        text = str(round(number))
    if "\\" in text:
        text = from_latex(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7 + 3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def _parts(text: str) -> list[str]:
    """Of a tuple or an interval; else the whole text."""
    text = _without_thousands(text)
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set("()[]") & set(text[1:-1]):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text] if text else []


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def _number(text: str) -> float | None:
    """A finite number, as Python reads it."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None


def _is_whole(text: str) -> bool:
    number = _number(_without_thousands(text))
    return number is not None and abs(number - round(number)) <= 1e-7


def _difference_is_zero(truth: str, given: str) -> bool:
    text = f"({truth})-({given})".replace("**", "^")
    letters = {sign for sign in text.replace("sqrt", "").replace("frac", "") if sign.isalpha()}
    if len(letters) > 2 or len(text) > MAX_EXPRESSION or _DANGEROUS.search(text) or not _READABLE.fullmatch(text):
        return False
    import sympy
    from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr, standard_transformations

    rules = (*standard_transformations, implicit_multiplication_application)
    try:
        return bool(sympy.simplify(parse_expr(text.replace("^", "**"), transformations=rules)) == 0)
    except Exception:  # sympy raises anything at what is no expression, and then it is not an equal one
        return False


def from_latex(text: str) -> str:
    r"""LaTeX as plain text: `\frac{a}{b}` is `a/b`, `\sqrt{a}` is `sqrt(a)`, a name without a meaning is left out."""
    text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    return _spelled(text).strip()


def _spelled(text: str) -> str:
    made, place = "", 0
    while place < len(text):
        found = _MACRO.match(text, place)
        if found is None:
            made += text[place]
            place += 1
            continue
        name, place = found[1], found.end()
        if name == "frac":
            top, place = _argument(text, place)
            bottom, place = _argument(text, place)
            made += f" {_spelled(top)}/{_spelled(bottom)}"
        elif name == "sqrt":
            if text[place : place + 1] == "[" and "]" in text[place:]:
                place = text.index("]", place) + 1
            inner, place = _argument(text, place)
            made += f"sqrt({_spelled(inner)})"
        elif name in _GREEK:
            made += unicodedata.lookup(f"GREEK SMALL LETTER {name}")
        elif name in _FUNCTIONS:
            made += name
        else:
            made += _SIGNS.get(name, "")
    return made.replace("π", "pi").replace("√", "sqrt").replace("∞", "inf").replace("·", "*").replace("×", "*")


def _argument(text: str, place: int) -> tuple[str, int]:
    """What a macro is applied to, and the place behind it: a group, another macro, or one sign."""
    while text[place : place + 1] == " ":
        place += 1
    if text[place : place + 1] == "{":
        inner, end = _group(text, place)
        return ("" if inner is None else inner), end
    found = _MACRO.match(text, place)
    if found is None:
        return text[place : place + 1], place + 1
    end = found.end()
    if text[end : end + 1] == "{":
        end = _group(text, end)[1]
    return text[place:end], end


def _group(text: str, start: int) -> tuple[str | None, int]:
    """(what stands in the braces that open at `start`, the place behind them); None where they are not closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place], place + 1
    return None, len(text)
