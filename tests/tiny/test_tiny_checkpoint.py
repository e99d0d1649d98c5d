"""The shipped model: loads by name, fits in 4 MB, tokenizes as its own file says, never rewrites history."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import get_json_schema

from verl_mt.config_paths import TINY_MODEL, configs_root, resolve_model_path
from verl_mt.data.conversation import OpenAIFunctionToolSchema
from verl_mt.tiny.problems import rows

pytestmark = pytest.mark.slow  # published templates, commands, many configurations

FOLDER = Path(resolve_model_path(TINY_MODEL))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def declared() -> dict:
    file = configs_root() / "tools_configs" / "calculator.yaml"
    return yaml.safe_load(file.read_text())["tools"][0]["tool_schema"]


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to compute
    """
    return expression


def call(expression: str) -> dict:
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def test_everything_that_ships_is_at_most_4_mb():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4_000_000


def test_the_model_is_a_small_qwen3_in_float32_with_an_end_of_turn(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.num_parameters() == 886_144
    assert model.config.vocab_size == len(tokenizer) == 768
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(FOLDER).eos_token_id == tokenizer.eos_token_id


@pytest.mark.cap("P23")
@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_auto_tokenizer_gives_the_ids_of_tokenizer_json_and_reads_them_back(text):
    auto, file = AutoTokenizer.from_pretrained(FOLDER), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = auto.encode(text, add_special_tokens=False)
    assert ids == file.encode(text, add_special_tokens=False).ids
    normal = file.normalizer.normalize_str(text)
    assert auto.decode(ids, clean_up_tokenization_spaces=False) == normal


def test_digits_are_single_tokens_and_tags_survive_decoding(tokenizer):
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*(4+5)"}}\n</tool_call>'
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_the_yaml_schema_is_what_transformers_makes_of_a_python_function(tokenizer, declared):
    schema = get_json_schema(calculator)
    returned = schema["function"].pop("return")
    assert declared == schema
    assert OpenAIFunctionToolSchema(**declared).to_template() == declared
    messages = rows(1, 0, "val")[0]["prompt"]
    schema["function"]["return"] = returned
    shown = [
        tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
        for tool in (calculator, schema, declared, OpenAIFunctionToolSchema(**declared).to_template())
    ]
    assert len(set(shown)) == 1


def test_prompts_are_short(tokenizer, declared):
    lengths = [
        len(
            tokenizer.apply_chat_template(
                row["prompt"], tools=[declared], add_generation_prompt=True, return_dict=False
            )
        )
        for row in rows(200, 0, "val")
    ]
    assert max(lengths) <= 140 and sum(lengths) / len(lengths) <= 110


TURNS = st.lists(
    st.sampled_from(
        [
            [{"role": "user", "content": "And 3 more?"}, {"role": "assistant", "content": "#### 3"}],
            [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}],
            [call("1+2"), {"role": "tool", "content": "3"}, {"role": "assistant", "content": "#### 3"}],
            [call("1+2"), {"role": "tool", "content": "3"}, {"role": "tool", "content": "\n4 "}, call("8*(2+1)")],
            [{"role": "system", "content": "Be brief."}],
        ]
    ),
    max_size=5,
)


@pytest.mark.cap("P5")
@given(turns=TURNS, with_tools=st.booleans(), with_system=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_template_is_append_only_in_text_and_in_ids(turns, with_tools, with_system):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tools = [get_json_schema(calculator)] if with_tools else None
    system = [{"role": "system", "content": "Answer as #### N."}] if with_system else []
    messages = [*system, {"role": "user", "content": "How many?"}, *(m for turn in turns for m in turn)]

    def render(upto: int, tokenize: bool, prompt: bool):
        return tokenizer.apply_chat_template(
            messages[:upto], tools=tools, tokenize=tokenize, return_dict=False, add_generation_prompt=prompt
        )

    for upto in range(len(system) + 1, len(messages)):
        if messages[upto - 1]["role"] == messages[upto]["role"] == "tool":
            continue  # adjacent tool messages are one turn, closed by its last
        next_is_sampled = messages[upto]["role"] == "assistant"
        for tokenize in (True, False):
            shorter, longer = render(upto, tokenize, next_is_sampled), render(upto + 1, tokenize, False)
            assert longer[: len(shorter)] == shorter


@pytest.mark.cap("P9")
def test_adjacent_tool_messages_are_one_turn(tokenizer):
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "q"},
            call("1"),
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ],
        tokenize=False,
    )
    assert text.endswith(
        "<|im_start|>tool\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


@pytest.mark.cap("P13")
def test_arguments_may_be_a_dict_or_a_json_string(tokenizer):
    as_string = call("1+2")
    as_string["tool_calls"][0]["function"]["arguments"] = '{"expression": "1+2"}'
    user = {"role": "user", "content": "q"}
    rendered = {tokenizer.apply_chat_template([user, turn], tokenize=False) for turn in (call("1+2"), as_string)}
    assert len(rendered) == 1
    assert '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>' in rendered.pop()


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown role: critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)
