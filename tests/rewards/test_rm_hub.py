r"""The rewards of slime's `--rm-type`, with answers worked out from the rules that `rm_hub` states."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads

import pytest

from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.generate.args import ARGS
from verl_mt.extensions.compat.rewards.math_grading import boxed, from_latex, same_by_algebra, same_by_text
from verl_mt.extensions.compat.rewards.rm_hub import RuleReward, dapo, f1
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.rewards import load_reward
from verl_mt.rewards.adapters import adapt
from verl_mt.rewards.contract import RewardInput
from verl_mt.rollout.drivers import DriverParts

SAME_TEXT = [
    (r"\frac12", "0.5"), (r"\dfrac{1}{2}", "1/2"), ("x = 3", "3"), (r"\sqrt3", r"\sqrt{3}"), (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"), (r"\text{east}", "east"), (r"\left( 1, 2 \right)", "(1,2)"), (".5x", "0.5x"),
    (r"\frac1{72}", r"\frac{1}{72}"), (r"10\%", "10"), (r"\$7", "7"),
]  # fmt: skip
OTHER_TEXT = [
    ("0.25", "1/4"),
    ("2/4", "1/2"),
    ("abc=3", "3"),
    (r"5\text{ cm} \text{ m}", "5"),
    (r"\sqrt12", r"2\sqrt3"),
]
SAME_ALGEBRA = [
    (r"2\sqrt{3}", r"\sqrt{12}"), ("x^2+2x+1", "(x+1)^2"), (r"7 \frac{3}{4}", "7.75"), ("1,000", "1000"),
    ("(1, 1/2)", "(1,0.5)"), ("3 million", "3*10^6"), (r"\frac{\pi}{2}", "pi/2"), ("5 meters", "5"), ("YES", "yes"),
    (r"[1,2] \cup [3,4]", "[1,2]U[3,4]"), ("x**2", "x^2"), (r"\{1,2\}", "1,2"),
]  # fmt: skip
OTHER_ALGEBRA = [
    ("2/4", "1/2"), ("3.5-0.5+0*x", "3"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"), ("a+b+c", "c+b+a"),
    ("2^10", "1024.5"), ("", "0"), ("1/0", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "truth"), SAME_TEXT)
def test_answers_that_are_the_same_by_their_text(given, truth):
    assert same_by_text(given, truth)


@pytest.mark.parametrize(("given", "truth"), OTHER_TEXT)
def test_answers_that_are_not_the_same_by_their_text(given, truth):
    assert not same_by_text(given, truth)


@pytest.mark.parametrize(("given", "truth"), SAME_ALGEBRA)
def test_answers_that_are_the_same_by_algebra(given, truth):
    assert same_by_algebra(given, truth)


@pytest.mark.parametrize(("given", "truth"), OTHER_ALGEBRA)
def test_answers_that_are_not_the_same_by_algebra(given, truth):
    assert not same_by_algebra(given, truth)


@pytest.mark.parametrize(
    "text",
    ["a.b", "f(1).g", "99999!", "9**9**9**9", "(3)!!", "2^(99)", "''.x", "x" * 2000, "a[0].b", "__import__('os')"],
)
def test_what_could_name_an_attribute_or_never_end_is_no_expression(text):
    assert not same_by_algebra(text, "1+x")


@pytest.mark.parametrize(
    ("text", "plain"),
    [(r"\frac{\sqrt{2}}{3}", "sqrt(2)/3"), (r"\frac12", "1/2"), (r"2\cdot3", "2*3"), (r"\theta", "θ"),
     (r"\sqrt[3]{2}", "sqrt(2)"), (r"\foo{3}", "{3}"), (r"1\,000", "1 000")],
)  # fmt: skip
def test_latex_as_plain_text(text, plain):
    assert from_latex(text) == plain


@pytest.mark.parametrize(
    ("text", "inner"),
    [(r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed 5", None), (r"\boxed{1", None), ("5", None)],
)
def test_the_last_box_counts_and_has_to_be_closed(text, inner):
    assert boxed(text) == inner


def score(named, response, label=None, **metadata):
    return RuleReward(named)(None, Sample(response=response, label=label, metadata=metadata))


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "expected"),
    [
        ("math", r"so \boxed{\frac12}", "0.5", 1.0),
        ("math", r"so \boxed{1}", r"\boxed{1}", 1.0),
        ("math", "so 1", "1", 0.0),
        ("math", r"\boxed{0}", 0, 0.0),  # an empty label is no answer, and 0 counts as one
        ("deepscaler", r"<think>\boxed{3}</think> it is \boxed{4}", 4, 1.0),
        ("deepscaler", r"<think>\boxed{4}</think> it is 4", "4", 0.0),
        ("deepscaler", r"\boxed{4}", "4", 0.0),  # nothing says that the thought has ended
        ("deepscaler", r"###Response \boxed{4}", "4", 1.0),
        ("f1", "The cat sat", "a cat sat down", 0.8),
        ("f1", "yes indeed", "yes", 0.0),
        ("f1", "Yes.", "yes", 1.0),
        ("boxed_f1", r"long story \boxed{cat}", "cat", 1.0),
        ("gpqa", "The answer is B", "B", 1.0),
        ("gpqa", "The answer is B", "C", 0.0),
        ("gpqa", "<think>A</think> D", "D", 1.0),
        ("gpqa", "I say (C) then", 2, 1.0),
    ],
)
def test_the_score_of_each_rule(rm_type, response, label, expected):
    assert score(rm_type, response, label) == pytest.approx(expected)


def test_dapos_answer_stands_behind_the_last_answer_in_the_last_300_characters():
    assert dapo("Answer: 3\nAnswer: $34$", "34") == {"score": 1.0, "acc": 1.0}
    assert dapo("Answer: 1,234 units<|im_end|>", 1234)["score"] == 1.0
    assert dapo("Answer: 3\n" + "x" * 300, "3") == {"score": -1.0, "acc": 0.0}
    assert dapo("no answer", "3")["score"] == -1.0
    with pytest.raises(ValueError, match=r"whole numbers. The row's label is 'x'"):
        dapo("Answer: 3", "x")


def test_choices_of_a_row_are_letters_and_texts():
    choices = {"choices": ["red fox", "blue whale"]}
    assert score("gpqa", "It is the Blue  whale!", "blue whale", **choices) == 1.0
    assert score("gpqa", "It is the red fox", "blue whale", **choices) == 0.0
    assert score("gpqa", "option B", "blue whale", **choices) == 1.0


def test_a_rows_own_type_comes_first():
    assert score("math", "cat", "cat", rm_type="f1") == 1.0
    assert score(None, r"\boxed{2}", "2", rm_type="math") == 1.0
    assert {score("random", "") for _ in range(200)} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("rm_type", "reason"),
    [("deepscalar", "did you mean 'deepscaler'"), ("ifbench", "a separate package"), ("remote_rm", "kwargs.url")],
)
def test_a_type_that_is_not_here_is_refused_when_the_reward_is_made(rm_type, reason):
    with pytest.raises(ConfigError, match=reason):
        load_reward("rm_hub", kwargs={"rm_type": rm_type})


def test_a_row_without_any_type_fails_alone():
    reward = load_reward("rm_hub")
    items = [
        RewardInput("", "", None, source=Sample(response=r"\boxed{1}", label="1", metadata=metadata))
        for metadata in ({}, {"rm_type": "math"})
    ]
    failed, scored = asyncio.run(reward.score(items))
    assert "Known: math, deepscaler" in failed.error and scored == {"score": 1.0}


@pytest.mark.slow  # the second try waits a second
def test_a_server_is_asked_again_and_its_number_is_the_score():
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = dumps(0.75).encode()
            self.send_response(503 if len(asked) == 1 else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    reward = load_reward("rm_hub", kwargs={"rm_type": "remote_rm", "url": url})
    sample = Sample(prompt="p", response="r", label="l")
    (scored,) = asyncio.run(reward.score([RewardInput("", "", None, source=sample)]))
    server.shutdown()
    assert scored == {"score": 0.75}
    assert asked == [{"prompt": "p", "response": "r", "label": "l"}] * 2


def test_the_overlap_of_words_is_of_their_numbers():
    assert f1("cat cat dog", "cat") == pytest.approx(0.5)


def test_a_function_of_slimes_is_scored_by_the_number_that_reward_key_names():
    def named(args, sample):
        return {"accuracy": 0.25, "length": 3.0}

    class Args:
        reward_key = "accuracy"  # what reward.kwargs.reward_key says, slime's functions find in args

    reward = adapt(named, label="named", kwargs={"reward_key": "accuracy"}, timeout_s=600.0)
    reward.bind(None, DriverParts(shared={ARGS: Args()}))
    (scored,) = asyncio.run(reward.score([RewardInput("", "", None, source=Sample())]))
    assert scored["score"] == 0.25


def test_a_rule_with_several_numbers_is_scored_by_the_one_that_is_named():
    sample = Sample(response="Answer: 4", label="3")
    assert RuleReward("dapo", reward_key="acc")(None, sample)["score"] == 0.0
    with pytest.raises(ConfigError, match="reward_key=length: dapo gives score, acc"):
        RuleReward("dapo", reward_key="length")(None, sample)
