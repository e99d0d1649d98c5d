"""Whatever a scheduler does: the model reads what the messages say, and every sampled token is accounted for."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_lab import CHAT, ids_of, prompt_of, roll_out, runner_for, said

from verl_mt.data.trajectory import Status
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler, RolloutOutput

TEXT = st.text("ab <>/\n", min_size=1, max_size=8)
CUTS = st.tuples(st.just("cut"), st.integers(0, 8), st.text("xyz ", max_size=4))
ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["user", "append", "prefill", "append_user", "edit_first", "drop_last", "rewrite"]), TEXT
    ),
    st.tuples(st.sampled_from(["loss_false", "own_ids"]), TEXT),
    st.tuples(st.just("mask"), st.lists(st.integers(0, 1), min_size=20, max_size=20)),
    CUTS,
)
TURNS = st.tuples(TEXT, st.sampled_from(["stop", "stop", "length"]))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class Script(MultiTurnScheduler):
    """Does one action after each turn; remembers what the model should read next."""

    runs_inline = True

    def __init__(self, actions):
        super().__init__(len(actions) + 1)
        self.actions, self.asked = actions, []

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= self.max_turns

    def step(self, infer_request, response_choice, current_turn):
        name, *values = self.actions[current_turn - 1]
        answer = {"infer_request": infer_request, **self.act(infer_request, response_choice, name, values)}
        self.asked.append(copy.deepcopy(infer_request.messages))
        return answer

    def act(self, request, choice, name, values) -> dict:
        messages, last = request.messages, request.messages[-1]
        if name == "cut":
            last["content"] = last["content"][: values[0]] + values[1]
        elif name == "append":
            last["content"] += values[0]
        elif name == "mask":
            messages.append(user("m"))
            ids = choice.token_ids
            return {"response_token_ids": ids, "response_loss_mask": (values[0] * 9)[: len(ids)]}
        elif name == "own_ids":
            last["content"] += values[0]
            return {"response_token_ids": [*choice.token_ids, *ids_of(values[0])]}
        elif name == "loss_false":
            last["loss"] = False
            messages.append(user(values[0]))
        elif name == "prefill":
            messages += [user("u"), {"role": "assistant", "content": values[0]}]
        elif name == "append_user":
            last["content"] += values[0]
            messages.append(user("u"))
        elif name == "edit_first":
            messages[0]["content"] = values[0]
            messages.append(user("u"))
        elif name == "drop_last":
            messages[-1] = user(values[0])
        elif name == "rewrite":
            request.messages = [user(values[0])]
        else:
            messages.append(user(values[0]))
        return {}


def as_read(messages) -> str:
    """What a model reads: an assistant message at the end, unless it is empty, is unfinished."""
    shown = list(messages)
    if shown[-1]["role"] == "assistant":
        prompt = CHAT.full_text(shown[:-1], add_generation_prompt=True)
        return prompt + shown[-1]["content"]
    return CHAT.full_text(shown, add_generation_prompt=True)


@pytest.mark.slow
@pytest.mark.cap("C16", "C17", "C19", "C20", "C25", "C83")
@given(st.lists(ACTIONS, max_size=4), st.lists(TURNS, min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_the_model_reads_what_the_messages_say_and_no_sampled_token_is_lost_or_trained_twice(actions, turns):
    engine = ScriptedEngine([said(*turn) for turn in turns])
    scheduler = Script(actions)
    (trajectory,) = roll_out(runner_for(engine, scheduler), [prompt_of()])
    assert trajectory.status is not Status.FAILED, trajectory.error
    asked = [[user("q")], *scheduler.asked]
    assert [CHAT.decode(r.input_ids) for r in engine.requests] == [as_read(m) for m in asked]

    sampled = sum(len(ids_of(text)) + (reason == "stop") for text, reason in turns[: len(engine.requests)])
    count = trajectory.counters
    gone = sum(count.get(name, 0) for name in ("cut_tokens", "masked_tokens", "discarded_tokens"))
    assert sum(sum(r.loss_mask) for r in trajectory.records) + gone == sampled
    for record in trajectory.records:
        record.check()
        assert all(s or not bit for s, bit in zip(record.sampled, record.loss_mask, strict=True))
    if not any(a[0] in ("cut", "append", "own_ids", "append_user") for a in actions):
        whole = [ids for r in trajectory.records for ids in _turns(r)]
        assert whole == [said(*turn)[0] for turn in turns[: len(engine.requests)]]


def _turns(record) -> list[list[int]]:
    return [record.token_ids[s.start : s.end] for s in record.turns if s.kind == "assistant"]


class Loop(MultiTurnScheduler):
    """Samples again and again over what its actions leave, and returns the turns that are wanted."""

    runs_inline = True

    def __init__(self, actions, wanted):
        super().__init__()
        self.script, self.wanted = Script(actions), wanted

    async def run(self, infer_request, request_config, **kwargs):
        outputs = []
        for turn in range(1, self.script.max_turns + 1):
            response = await self.infer_engine.infer_async(infer_request)
            choice = response.choices[0]
            messages = infer_request.messages
            if messages[-1]["role"] == "assistant":
                messages[-1]["content"] += choice.message.content
            else:
                messages.append({"role": "assistant", "content": choice.message.content})
            outputs.append(RolloutOutput(response, messages=copy.deepcopy(messages)))
            if turn < self.script.max_turns:
                self.script.step(infer_request, choice, turn)
        return [output for output, wanted in zip(outputs, self.wanted, strict=False) if wanted]


@pytest.mark.slow
@pytest.mark.cap("C9", "C20", "C91")
@given(
    st.lists(st.tuples(st.sampled_from(["user", "rewrite", "drop_last", "prefill"]), TEXT), max_size=3),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(TEXT, min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_each_output_is_a_record_and_what_none_covers_is_counted(actions, wanted, texts):
    num_turns = len(actions) + 1
    wanted[num_turns - 1] = True
    (trajectory,) = roll_out(
        runner_for(ScriptedEngine([said(text) for text in texts]), Loop(actions, wanted)), [prompt_of()]
    )
    assert trajectory.status is not Status.FAILED, trajectory.error
    trained = [r for r in trajectory.records if any(r.loss_mask)]
    assert len(trained) == sum(wanted[:num_turns])
    bits = sum(sum(r.loss_mask) for r in trajectory.records)
    assert bits + trajectory.counters.get("discarded_tokens", 0) == sum(len(t) + 1 for t in texts[:num_turns])
    for record in trajectory.records:
        record.check()
