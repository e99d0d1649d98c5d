"""Which tokens of a trajectory are trained: loss scales as masks, and what is trained on request."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scheduler_lab import CHAT, converse, prompt_of, roll_out, runner_for, said

from verl_mt.algorithms.aggregate import token_weights
from verl_mt.config.compose import compose
from verl_mt.data.batch import HAS_LOG_PROBS, LOSS_MASK, SAMPLED, TRAJECTORY_INDEX, build_batch
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.trajectory import Status, Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler, loss_scale_map
from verl_mt.rollout import loss_scale as scales
from verl_mt.rollout.loss_scale import (
    ContextType,
    LossScale,
    apply_loss_scale,
    load_loss_scale,
    loss_scales,
)
from verl_mt.trainer.build_rollout import loss_scale_of


class Ask(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "U2"})
        return {"infer_request": infer_request}


def two_turns(scale: str | LossScale | None, texts=("A1", "A2"), scheduler=None, **keys):
    scale = load_loss_scale(scale) if isinstance(scale, str) else scale
    turns = [said(text) for text in texts]
    return converse(scheduler or Ask(max_turns=2), turns, loss_scale=scale, **keys)


def trained_text(record) -> str:
    """What is in the loss; `|` where something is not."""
    text, gap = "", False
    for token, bit in zip(record.token_ids, record.loss_mask, strict=True):
        text += ("|" if gap and text else "") + CHAT.decode([token]) if bit else ""
        gap = not bit
    return text


END = "<|im_end|>"


@pytest.mark.cap("C27", "L8")
@pytest.mark.parametrize(
    ("scale", "trained"),
    [
        (None, f"A1{END}|A2{END}"),
        ("default", f"A1{END}|A2{END}"),
        ("last_round", f"A2{END}"),
        ("default+last_round", f"A2{END}"),
    ],
)
def test_layouts_of_the_strategies(scale, trained):
    assert trained_text(two_turns(scale).record) == trained


@pytest.mark.cap("C27", "L8")
def test_all_trains_everything_behind_the_first_token_and_counts_what_nobody_sampled():
    run = two_turns("all")
    assert run.record.loss_mask == [0] + [1] * (len(run.record.token_ids) - 1)
    assert run.trajectory.counters["trained_given_tokens"] == len(run.record.token_ids) - 1 - sum(run.record.sampled)
    assert all(lp == 0.0 for lp, s in zip(run.record.rollout_log_probs, run.record.sampled, strict=True) if not s)
    run.record.check()


@pytest.mark.cap("L8", "C27")
def test_a_message_that_says_loss_false_is_not_trained():
    class Unloved(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["loss"] = False
            infer_request.messages.append({"role": "user", "content": "U2"})
            return {"infer_request": infer_request}

    run = two_turns("default", scheduler=Unloved(max_turns=2))
    assert trained_text(run.record) == f"A2{END}"
    assert len(run.trajectory.records) == 1
    assert run.trajectory.counters["masked_tokens"] == 3


def pieces(scale: str, text: str) -> list[tuple[str, float]]:
    return list(zip(*load_loss_scale(scale).get_loss_scale(text, ContextType.RESPONSE, True), strict=True))


@pytest.mark.cap("C28", "L9")
def test_react_weighs_keys_and_bodies():
    text = "Thought: x\nAction: calc\nAction Input: 1\nObservation: 3\nFinal Answer: 3"
    assert pieces("react", text) == [
        ("Thought:", 1), (" x\n", 1), ("Action:", 2), (" calc\n", 2), ("Action Input:", 2), (" 1\n", 2),
        ("Observation:", 2), (" 3\n", 0), ("Final Answer:", 1), (" 3", 1),
    ]  # fmt: skip


@pytest.mark.cap("C28", "L9")
@pytest.mark.parametrize(
    ("scale", "text", "weights"),
    [
        ("hermes", 'ok <tool_call>{"a":1}</tool_call> done', [1, 2, 1]),
        ("ignore_empty_think", "<think>\n\n</think>\n\nHi", [0, 1]),
        ("hermes+ignore_empty_think", "<think>\n\n</think>\n\nx<tool_call>a</tool_call>", [0, 1, 2]),
        ("ignore_think_prefix", "<think>\nreasoning\n</think>\nanswer", [0, 1]),
        ("default", "anything", [1]),
        ("react", "", [1]),
    ],
)
def test_weights_of_the_shipped_patterns(scale, text, weights):
    found = pieces(scale, text)
    assert [w for _, w in found] == weights
    assert "".join(piece for piece, _ in found) == text


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(PluginError, match=r"unknown loss scale 'lastround'; did you mean 'last_round'\?"):
        load_loss_scale("default+lastround")


REACT = ("Thought: x\nObservation: 3\nFinal Answer: 3", "ok")


@pytest.mark.cap("C28")
def test_a_pattern_takes_what_the_model_wrote_for_the_environment_out_of_the_loss():
    run = two_turns("react", texts=REACT)
    assert trained_text(run.record) == f"Thought: x\nObservation:|Final Answer: 3{END}|ok{END}"
    assert run.trajectory.counters["masked_tokens"] == len(" 3\n")


@pytest.mark.cap("C28")
@pytest.mark.parametrize("kind", ["subclass", "patterns", "method", "json"])
def test_a_loss_scale_of_ones_own_is_registered(kind, monkeypatch, tmp_path):
    patterns = {"Observation:": [1.0, 0.0], "Final Answer:": [1.0, 1.0]}

    class Patterns(LossScale):
        pass

    class Method(LossScale):
        def get_loss_scale(self, context, context_type, is_last_round, **kwargs):
            if context_type != ContextType.RESPONSE or "Observation:" not in context:
                return [context], [1.0]
            head, _, tail = context.partition("Observation:")
            body, _, rest = tail.partition("Final Answer:")
            return [head + "Observation:", body, "Final Answer:" + rest], [1.0, 0.0, 1.0]

    Patterns.patterns = patterns
    made = {"subclass": Patterns, "patterns": patterns, "method": Method, "json": Patterns}[kind]
    if kind == "json":
        file = tmp_path / "patterns.json"
        file.write_text('{"Observation:": [1.0, 0.0], "Final Answer:": [1.0, 1.0]}')
        made = type("FromFile", (LossScale,), {"loss_scale_config": str(file), "__module__": __name__})
    loss_scale_map["mine"] = made
    try:
        run = two_turns("mine", texts=REACT)
    finally:
        del loss_scales["mine"]
    assert trained_text(run.record) == f"Thought: x\nObservation:|Final Answer: 3{END}|ok{END}"


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ((["A"], [1.0, 1.0]), "returned 1 pieces and 2 weights"),
        ((["A"], [1.0]), "pieces that joined are not the text: 1 characters for 2"),
        ((["A1"], ["x"]), "returned the weight 'x', expected a number"),
    ],
)
def test_pieces_that_do_not_fit_fail_the_trajectory_with_both_numbers(returned, complaint):
    class Broken(LossScale):
        def get_loss_scale(self, context, context_type, is_last_round, **kwargs):
            return returned

    run = two_turns(Broken())
    assert run.trajectory.status is Status.FAILED
    assert complaint in run.trajectory.error


def test_mixed_patterns_are_refused(monkeypatch):
    monkeypatch.setitem(loss_scales, "odd", {"a": [1.0], "b": [1.0, 2.0]})
    with pytest.raises(ConfigError, match="give every pattern a list of two weights"):
        load_loss_scale("odd")


class Weighted(LossScale):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def get_loss_scale(self, context, context_type, is_last_round, **kwargs):
        return [context], [self.weight]


@pytest.mark.cap("C29")
def test_weights_are_a_mask_only_and_that_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(scales, "_said", set())
    with caplog.at_level(logging.WARNING):
        masks = [two_turns(Weighted(w)).record.loss_mask for w in (1.0, 2.0, 0.5)]
    assert masks[0] == masks[1] == masks[2]
    assert sum("every weight above 0 counts as 1" in r.message for r in caplog.records) == 1
    losses = []
    for weight in (1.0, 2.0, 0.5):
        trajectory = two_turns(Weighted(weight)).trajectory
        batch = build_batch([replace(trajectory, reward=1.0)], pad_token_id=0)
        losses.append(token_weights(batch[LOSS_MASK], batch[TRAJECTORY_INDEX], mode="token-mean"))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    assert sum(two_turns(Weighted(0.0)).record.loss_mask) == 0


@pytest.mark.cap("C30")
def test_the_default_depends_on_whether_there_are_several_turns():
    several = compose(["actor_rollout_ref.rollout.multi_turn.scheduler=math_tip_trick", *NO_TOOLS])
    single = compose(NO_TOOLS)
    assert type(loss_scale_of(several)) is LossScale
    assert type(loss_scale_of(single)) is scales.LastRound
    named = compose(["actor_rollout_ref.rollout.multi_turn.loss_scale=react", *NO_TOOLS])
    assert type(loss_scale_of(named)) is scales.React


NO_TOOLS = ["actor_rollout_ref.rollout.tool_kwargs.tools_config_file=null"]


@pytest.mark.cap("C32")
def test_a_mask_of_the_schedulers_own_makes_the_loss_scale_ineffective():
    class Masks(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": "U2"})
            ids = response_choice.token_ids
            return {"infer_request": infer_request, "response_token_ids": ids, "response_loss_mask": [1, 0, 1]}

    run = two_turns("last_round", scheduler=Masks(max_turns=2))
    assert trained_text(run.record) == f"A|{END}|A2{END}"


@pytest.mark.cap("C27")
def test_the_last_round_is_the_last_message_even_where_it_went_on():
    class Tip(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            if current_turn == 1:
                infer_request.messages.append({"role": "user", "content": "U2"})
            else:
                infer_request.messages[-1]["content"] += "TIP"
            return {"infer_request": infer_request}

    run = two_turns("last_round", texts=("A1", "A2", "A3"), scheduler=Tip(max_turns=3))
    assert trained_text(run.record) == f"A2|A3{END}"


FEW_SHOT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "two", "loss": False},
    {"role": "user", "content": "3"},
]


@pytest.mark.cap("C31")
def test_assistant_messages_of_the_data_set_are_not_trained_unless_that_is_asked_for():
    prompt = prompt_of(prompt=FEW_SHOT)
    plain = converse(Ask(max_turns=1), [said("three")], prompt=prompt)
    assert trained_text(plain.record) == f"three{END}"
    asked = converse(Ask(max_turns=1), [said("three")], prompt=prompt, train_prompt_assistants=True)
    assert trained_text(asked.record) == f"one{END}|three{END}"
    assert asked.trajectory.counters["trained_given_tokens"] == 4
    for no in (0, np.bool_(False), torch.tensor(False)):
        same = prompt_of(prompt=[m | {"loss": no} if "loss" in m else m for m in FEW_SHOT])
        run = converse(Ask(max_turns=1), [said("three")], prompt=same, train_prompt_assistants=True)
        assert trained_text(run.record) == trained_text(asked.record)
    last = load_loss_scale("last_round")
    both = converse(Ask(max_turns=1), [said("three")], prompt=prompt, train_prompt_assistants=True, loss_scale=last)
    assert trained_text(both.record) == f"three{END}"


@pytest.mark.cap("C31")
def test_tokens_that_nobody_sampled_use_the_trainers_own_log_probs():
    """They have no sampler log-prob: the batch tells the update which ones those are."""
    prompt = prompt_of(prompt=FEW_SHOT)
    run = converse(Ask(max_turns=1), [said("three")], prompt=prompt, train_prompt_assistants=True)
    batch = build_batch([run.trajectory], pad_token_id=0)
    given = batch[LOSS_MASK] & ~batch[SAMPLED]
    assert int(given.sum()) == 4
    assert bool(batch[HAS_LOG_PROBS].all())


def test_a_template_that_rewrites_few_shot_turns_is_refused_where_they_shall_be_trained():
    from toys import FORGETFUL, toy_tokenizer

    from verl_mt.chat.template import ChatTemplate

    chat = ChatTemplate(toy_tokenizer(FORGETFUL))
    few = [*FEW_SHOT[:1], {"role": "assistant", "content": "<think>x</think>one"}, *FEW_SHOT[2:3]]
    run = converse(
        Ask(max_turns=1), [said("three")], chat=chat, prompt=prompt_of(prompt=few, chat=chat),
        train_prompt_assistants=True,
    )  # fmt: skip
    assert "train_prompt_assistants" in run.trajectory.error


def test_loss_scales_work_without_a_scheduler_too():
    from verl_mt.rollout.drivers import ToolLoopDriver

    engine = ScriptedEngine([said(REACT[0])])
    (trajectory,) = roll_out(runner_for(engine, ToolLoopDriver(), loss_scale=load_loss_scale("react")), [prompt_of()])
    assert trained_text(trajectory.records[0]) == f"Thought: x\nObservation:|Final Answer: 3{END}"


def test_a_stretch_of_weight_zero_takes_whole_characters_out_of_the_loss():
    """Tokens of bytes: a character's last byte goes with its first, at both ends of the stretch."""

    class Middle(LossScale):
        def get_loss_scale(self, context, context_type, is_last_round, **kwargs):
            if context_type != ContextType.RESPONSE:
                return [context], [1.0]
            return ["é", "東東", "b🙂"], [1.0, 0.0, 1.0]

    chat = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"), end_token_ids=frozenset())
    record = TrajectoryRecord()
    record.append_given([65], kind="prompt", turn=0)
    sampled = list("é東東b🙂".encode())
    record.append_sampled(sampled, [-1.0] * len(sampled), [0] * len(sampled), turn=1)
    trajectory = Trajectory("t", "p", "g", "e", "toy", 0, records=[record])
    apply_loss_scale(Middle(), chat, trajectory)
    kept = [i for i, bit in zip(record.token_ids, record.loss_mask, strict=True) if bit]
    assert bytes(kept).decode() == "éb🙂"
    assert trajectory.counters["masked_tokens"] == len("東東".encode())
