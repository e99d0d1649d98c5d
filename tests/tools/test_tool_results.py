"""What tools return, in one form; over-long texts cut in tokens."""

from __future__ import annotations

import numbers

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.tools.results import ToolResult, encodable, media_note, normalize, numeric_metrics, truncate
from verl_mt.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("s", "s", 0.0, {}),
        ({"a": 1}, '{"a": 1}', 0.0, {}),
        (("x", 0.5), "x", 0.5, {}),
        (("x", None, None), "x", 0.0, {}),
        (("x", True, {"m": 1}), "x", 1.0, {"m": 1}),
        (42, "42", 0.0, {}),
        (None, "None", 0.0, {}),
        ((ToolResponse(text="t"), 1, None), "t", 1.0, {}),
        (("x",), "x", 0.0, {}),
        ({"é": [1, None]}, '{"é": [1, null]}', 0.0, {}),
    ],
)
def test_every_usual_return_value_has_one_meaning(returned, text, reward, metrics):
    response, step_reward, got = normalize(returned)
    assert (response.text, step_reward, got) == (text, reward, metrics)


@pytest.mark.parametrize(
    "returned", [(), ("a", 0, {}, 1), ("a", "high"), ("a", float("nan")), ("a", float("inf")), ("a", 0, [1])]
)
def test_return_values_without_a_meaning_are_type_errors(returned):
    with pytest.raises(TypeError):
        normalize(returned)


@pytest.mark.parametrize(
    ("keep", "text"),
    [("both", "ab...(truncated)...ij"), ("head", "abcd...(truncated)"), ("tail", "(truncated)...ghij")],
)
def test_the_kept_part_is_the_named_one(keep, text):
    assert truncate("abcdefghij", 4, keep, list) == (text, True)
    assert truncate("abcd", 4, keep, list) == ("abcd", False)


def words(text: str) -> list[str]:
    """A tokenizer with long tokens: spaces belong to the word before them."""
    return [w for w in text.replace(" ", " \0").split("\0") if w]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab é\n", max_size=300), st.integers(1, 20), st.sampled_from(["head", "tail", "both"]))
def test_a_cut_text_keeps_at_most_the_limit_and_only_ends_of_the_text(text, limit, keep):
    cut, was_cut = truncate(text, limit, keep, words)
    assert was_cut == (len(words(text)) > limit or len(text) > 16 * limit)
    if not was_cut:
        assert cut == text
        return
    head, _, tail = {
        "head": (cut.removesuffix("...(truncated)"), "", ""),
        "tail": ("", "", cut.removeprefix("(truncated)...")),
    }.get(keep, cut.partition("...(truncated)..."))
    assert text.startswith(head) and text.endswith(tail) and len(head) + len(tail) < len(text)
    assert len(words(head)) + len(words(tail)) <= limit


def test_ten_megabytes_are_cut_without_tokenizing_them():
    seen = 0

    def count(text: str) -> list[str]:
        nonlocal seen
        seen += len(text)
        return list(text)

    for text in ("x" * 10_000_000, "word " * 2_000_000):
        cut, was_cut = truncate(text, 512, "both", count)
        assert was_cut and 500 <= len(cut) - len("...(truncated)...") <= 512
    assert seen < 200_000


def test_lone_surrogates_become_encodable_and_other_text_is_untouched():
    assert encodable("a\ud800b") == "a?b"
    assert encodable("é🙂<|im_end|>") == "é🙂<|im_end|>"


def test_a_result_becomes_a_tool_message():
    result = ToolResult("search", "call_1", "found")
    assert result.to_message() == {"role": "tool", "content": "found", "tool_call_id": "call_1", "name": "search"}


def test_the_note_in_place_of_media_counts_them():
    assert media_note(0, 0) == ""
    assert media_note(1, 0) == "[1 image cannot be shown: text only]"
    assert media_note(2, 1) == "[2 images and 1 video cannot be shown: text only]"


def test_no_memory_address_reaches_the_prompt():
    for returned in (object(), {"image": object()}, [object()]):
        text = normalize(returned)[0].text
        assert "<object object>" in text and "0x" not in text
    assert normalize("free at 0x10")[0].text == "free at 0x10"


def test_tool_response_knows_when_it_is_empty_and_wants_lists_of_media():
    assert ToolResponse().is_empty() and ToolResponse(text="").is_empty()
    assert not ToolResponse(text="x").is_empty() and not ToolResponse(image=["i"]).is_empty()
    assert ToolResponse(text="x").is_text_only() and not ToolResponse(text="x", image=["i"]).is_text_only()
    with pytest.raises(ValueError, match=r"Write \[item\]"):
        ToolResponse.model_validate({"image": "not a list"})


@pytest.mark.parametrize(
    ("text", "arguments", "failed"),
    [('{"a":1}', {"a": 1}, False), ("[1]", {}, True), ("{bad", {}, True), ('"x"', {}, True), ("null", {}, True)],
)
def test_parsed_arguments_say_whether_they_failed(text, arguments, failed):
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, error = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.arguments, error) == (arguments, failed)


def test_every_json_schema_keyword_reaches_the_template():
    queries = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "x-note": "kept"}
    schema = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"query_list": queries},
                "required": ["query_list"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    assert OpenAIFunctionToolSchema.model_validate(schema).to_template() == schema


def test_a_number_or_a_text_of_the_tools_own_raises_nothing():
    class Moody(numbers.Real):
        def __float__(self):
            raise RuntimeError("not today")

    Moody.__abstractmethods__ = frozenset()
    assert numeric_metrics({"moody": Moody(), "fine": 1}) == {"fine": 1.0}
    response, _, _ = normalize(ToolResponse.model_construct(text=5, image=None, video=None))
    assert response.text == "5"
