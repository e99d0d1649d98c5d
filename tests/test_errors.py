"""The text of what foreign code raised or returned can always be had."""

from __future__ import annotations

import pickle
import time

import pytest
from hostile import EXCEPTIONS, Exits, Unshowable, Unspeakable

from verl_mt.bounds import printable
from verl_mt.errors import ConfigError, TemplateError, ToolCallError, error_text, traceback_text, value_text


class Odd:
    def __repr__(self) -> str:
        return ESCAPES


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_exception_s_own_text_is_used_and_its_name_where_it_has_none():
    assert error_text(ValueError("no such row")) == "no such row"
    assert error_text(ValueError("no such row"), named=True) == "ValueError: no such row"
    assert error_text(ValueError()) == error_text(ValueError(), named=True) == "ValueError"


def test_an_exception_whose_text_raises_still_has_one():
    assert error_text(Unspeakable()) == "Unspeakable (its text is unknown: __str__ raised AttributeError)"
    assert error_text(Exits(), named=True) == "Exits (its text is unknown: __str__ raised SystemExit)"


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_a_traceback_can_always_be_had_also_of_a_cause_without_text(name):
    outer = RuntimeError("outer")
    outer.__cause__ = raised(EXCEPTIONS[name])
    text = traceback_text(raised(outer))
    assert name in text and "RuntimeError: outer" in text and "test_errors.py" in text


def test_a_value_whose_repr_raises_is_named_by_its_type_and_a_long_one_is_cut():
    assert value_text(Unshowable()) == "a Unshowable whose __repr__ raised AttributeError"
    assert value_text("x" * 100, limit=10) == "'xxxxxx..."


def test_texts_can_be_written_as_utf_8():
    assert error_text(ValueError("a\ud800b")) == "a\\ud800b"
    assert error_text(ValueError("é")) == "é" and traceback_text(ValueError("a\ud800b")).encode()


ESCAPES = "\x1b]0;pwn\x07\x1b[2J\r\x9b31m\u202e\0"
ESCAPED = r"\x1b]0;pwn\x07\x1b[2J\r\x9b31m\u202e\x00"


def test_texts_of_others_are_cut_and_escaped():
    for text in (error_text(ValueError(ESCAPES)), str(TemplateError(ESCAPES)), printable(ESCAPES), value_text(Odd())):
        assert text == ESCAPED
    assert printable("a\tb\nc é 漢 😀") == "a\tb\nc é 漢 😀"
    begun = time.process_time()
    long = RuntimeError("a" * 10_000_000 + "z" * 10_000_000)
    assert error_text(long) == "a" * 1500 + " ... (19998000 characters left out) ... " + "z" * 500
    assert len(traceback_text(raised(long))) < 20_100 and len(str(ConfigError("x" * 10**6))) < 20_100
    assert time.process_time() - begun < 2.0


def test_what_is_written_for_the_model_is_neither_cut_nor_escaped():
    text = ESCAPES + "x" * 50_000
    assert str(ToolCallError(text)) == error_text(ToolCallError(text), whole=True) == text
    assert error_text(ToolCallError(text)).startswith(ESCAPED)
    assert pickle.loads(pickle.dumps(ToolCallError(text))).args == (text,)


def test_ctrl_c_is_not_swallowed():
    class Interrupted(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        error_text(Interrupted())
