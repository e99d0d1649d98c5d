"""The arithmetic of a rollout as a pure function: pinned lengths, masks and edges."""

from __future__ import annotations

import copy
import warnings

import pytest
from chat_toys import CHATML, TOOL_CHATML, assistant, byte_tokenizer, call, char_tokenizer, env, sample, tool, user
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from verl_mt.chat import ChatTemplate, replay
from verl_mt.errors import DataError


@pytest.fixture(scope="module")
def chars():
    return char_tokenizer()


def said(tokenizer, text: str, end: str = "<|im_end|>") -> dict:
    return sample(tokenizer.encode(text + end, add_special_tokens=False), assistant(text))


@pytest.mark.cap("P1")
def test_the_newline_after_a_sampled_end_of_turn_is_never_trained(chars):
    ids, mask = replay(chars, [user("Hi")], None, [said(chars, "A1"), env(user("U2")), said(chars, "A2")])
    assert (len(ids), len(ids) - 21, sum(mask)) == (49, 28, 6)
    trained = chars.decode([i for i, m in zip(ids, mask) if m])
    assert trained == "A1<|im_end|>A2<|im_end|>"
    assert chars.decode(ids).endswith("A2<|im_end|>")


def test_a_tool_result_costs_its_own_frame(chars):
    steps = [said(chars, "call"), env({"role": "tool", "content": "res"}), said(chars, "done")]
    ids, mask = replay(chars, [user("Hi")], None, steps)
    assert (len(ids), len(ids) - 21, sum(mask)) == (54, 33, 10)


def test_a_dangling_user_message_gets_no_generation_prompt(chars):
    ids, mask = replay(chars, [user("Hi")], None, [said(chars, "A1"), env(user("U2"))])
    assert (len(ids), sum(mask)) == (35, 3)
    assert chars.decode(ids).endswith("U2<|im_end|>\n")


def test_without_steps_the_generation_prompt_ends_the_prompt(chars):
    ids, mask = replay(chars, [user("Hi")], None, [])
    assert len(ids) == 21
    assert not any(mask)
    assert chars.decode(ids).endswith("assistant\n")


def test_adjacent_env_steps_are_one_delta():
    tokenizer = byte_tokenizer(TOOL_CHATML, eos="<|im_end|>")
    turn = sample([40, 41], assistant("x", call("f", {}, "c1"), call("f", {}, "c2")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = replay(tokenizer, [user("q")], None, [turn, env(tool("1", "c1")), env(tool("2", "c2")), turn])
        together = replay(tokenizer, [user("q")], None, [turn, env(tool("1", "c1"), tool("2", "c2")), turn])
    assert apart == together


@pytest.mark.cap("P9")
def test_two_tool_results_share_one_user_turn():
    tokenizer = byte_tokenizer(TOOL_CHATML, eos="<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turn = sample([40, end], assistant("", call("f", {}, "c1"), call("g", {}, "c2")))
    ids, _ = replay(tokenizer, [user("q")], None, [turn, env(tool("R1", "c1"), tool("R2", "c2"))])
    text = tokenizer.decode(ids)
    assert text.endswith(
        "\n<|im_start|>user\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response><|im_end|>\n"
    )


@pytest.mark.cap("P19")
def test_a_cut_turn_followed_by_env_gets_one_end_with_mask_0_and_a_warning(chars):
    with pytest.warns(UserWarning, match="turn 1 lacks its end token"):
        ids, mask = replay(chars, [user("Hi")], None, [said(chars, "A1", end=""), env(user("U2"))])
    assert chars.decode(ids[21:]).startswith("A1<|im_end|>\n<|im_start|>user")
    assert mask[21:25] == [1, 1, 0, 0]


@pytest.mark.cap("P19")
def test_a_cut_last_turn_gets_no_end(chars):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids, mask = replay(chars, [user("Hi")], None, [said(chars, "A1", end="")])
    assert chars.decode(ids[21:]) == "A1"
    assert mask[21:] == [1, 1]


def test_a_cut_turn_that_goes_on_is_one_message(chars):
    ids, mask = replay(chars, [user("Hi")], None, [said(chars, "A", end=""), said(chars, "1")])
    assert chars.decode(ids[21:]) == "A1<|im_end|>"
    assert mask[21:] == [1, 1, 1]


def test_a_finished_turn_followed_by_a_sample_opens_a_new_turn(chars):
    ids, mask = replay(chars, [user("Hi")], None, [said(chars, "A"), said(chars, "B")])
    assert chars.decode(ids[21:]) == "A<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    assert sum(mask) == 4


def test_env_before_the_first_sample_belongs_to_the_prompt_and_is_not_trusted(chars):
    ids, mask = replay(chars, [user("Hi")], None, [env(user("<|im_end|>")), said(chars, "A")])
    end = chars.convert_tokens_to_ids("<|im_end|>")
    assert chars.decode(ids).count("<|im_end|>") == 4
    assert ids.count(end) == 3
    assert sum(mask) == 2


@pytest.mark.cap("P2")
def test_sampled_ids_stay_where_the_text_has_another_encoding():
    backend = Tokenizer(
        models.BPE(
            vocab={"h": 0, "he": 1, "llo": 2, "hello": 3, "e": 4, "l": 5, "o": 6, "lo": 7, "\n": 8, "u": 9},
            merges=[("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo")],
        )
    )
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False, special=True)])
    template = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)
    assert tokenizer.encode("hello") == [3]
    end = tokenizer.eos_token_id
    steps = [sample([1, 2, end], assistant("hello")), env(user("u")), sample([3, end], assistant("hello"))]
    ids, mask = replay(tokenizer, [user("u")], None, steps)
    assert ids == [9, end, 1, 2, end, 9, end, 3, end]
    assert mask == [0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_template_kwargs_reach_every_generation_prompt():
    tokenizer = byte_tokenizer(TOOL_CHATML, eos="<|im_end|>")
    steps = [said(tokenizer, "a"), env(user("u")), said(tokenizer, "b")]
    ids, _ = replay(tokenizer, [user("q")], None, steps, {"enable_thinking": False})
    assert tokenizer.decode(ids).count("assistant\n<think>\n\n</think>\n\n") == 2
    chat = ChatTemplate(tokenizer)
    assert replay(chat, [user("q")], None, steps, {"enable_thinking": False})[0] == ids
    assert replay(chat, [user("q")], None, steps)[0] != ids


def test_nothing_given_is_changed():
    tokenizer = byte_tokenizer(TOOL_CHATML, eos="<|im_end|>")
    prompt = [user("q")]
    steps = [
        sample(
            [40, tokenizer.eos_token_id], {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1}')]}
        ),
        env(tool("<|im_end|>")),
    ]
    before = copy.deepcopy((prompt, steps))
    replay(tokenizer, prompt, [{"type": "function", "function": {"name": "f"}}], steps)
    assert (prompt, steps) == before


def test_a_step_of_another_shape_is_named():
    with pytest.raises(DataError, match=r"steps\[0\].*'tool'"):
        replay(byte_tokenizer(CHATML), [user("q")], None, [{"type": "tool", "messages": []}])
