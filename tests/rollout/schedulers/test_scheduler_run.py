"""A `run` of one's own: records, outputs, infos, and what happens around it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from scheduler_lab import CHAT, EOS, converse, ids_of, prompt_of, response, roll_out, runner_for, said, trained
from toys import FORGETFUL, toy_tokenizer

from verl_mt.algorithms.advantages import grpo
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.batch import LOSS_MASK, TRAJECTORY_INDEX, build_batch, expand_to_tokens, trajectory_rewards
from verl_mt.data.trajectory import Status, StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineGoneError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler, RequestConfig, RolloutOutput, TrajectoryOver
from verl_mt.extensions.compat.schedulers.driver import SchedulerDriver
from verl_mt.rollout.context import Limits


class Turns(MultiTurnScheduler):
    """A loop of one's own that returns each turn by itself."""

    forget = staticmethod(lambda text: text)

    async def run(self, infer_request, request_config, **kwargs):
        outputs = []
        for turn in range(1, self.max_turns + 1):
            response_ = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response_.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            outputs.append(
                RolloutOutput(
                    response=response_,
                    messages=copy.deepcopy(infer_request.messages),
                    response_token_ids=choice.token_ids,
                    rollout_infos={"turn": turn, "first": 1} if turn == 1 else {"turn": turn},
                )
            )
            if turn < self.max_turns:
                infer_request.messages[-1]["content"] = self.forget(choice.message.content)
                infer_request.messages.append({"role": "user", "content": "u"})
        return outputs


@pytest.mark.cap("C9", "C10", "C20", "C23")
def test_three_outputs_are_three_records_of_one_trajectory():
    run = converse(Turns(max_turns=3), [said("a"), said("b"), said("c")])
    records = run.trajectory.records
    assert [trained(r) for r in records] == [[*ids_of(t), EOS] for t in "abc"]
    for record, request in zip(records, run.engine.requests, strict=True):
        assert record.token_ids[: record.num_prompt_tokens] == request.input_ids
    assert [[m["content"] for m in r.messages] for r in records] == [
        ["q", "a"], ["q", "a", "u", "b"], ["q", "a", "u", "b", "u", "c"],
    ]  # fmt: skip
    assert run.trajectory.info == {"turn": 3, "first": 1, "num_turns": 3}
    assert "discarded_tokens" not in run.trajectory.counters


class Forgetful(Turns):
    forget = staticmethod(lambda text: text.split("</think>")[-1])


@pytest.mark.cap("C18", "C20", "L11")
def test_reasoning_that_is_taken_out_of_the_history_stays_in_its_own_record():
    turns = [said("<think>x</think>a"), said("<think>y</think>b"), said("<think>z</think>c")]
    run = converse(Forgetful(max_turns=3), turns)
    records = run.trajectory.records
    assert [trained(r) for r in records] == [t[0] for t in turns]
    for record in records:
        assert "<think>" not in CHAT.decode(record.token_ids[: record.num_prompt_tokens])
    assert run.trajectory.counters["forks"] == 2


@pytest.mark.cap("C20")
def test_a_step_that_edits_the_history_opens_a_record_and_loses_no_token():
    class Compress(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            if current_turn == 2:
                infer_request.messages = [{"role": "user", "content": "summary"}]
            else:
                infer_request.messages.append({"role": "user", "content": "u"})
            return {"infer_request": infer_request}

    run = converse(Compress(max_turns=3), [said("a"), said("b"), said("c")])
    assert [trained(r) for r in run.trajectory.records] == [
        [*ids_of("a"), EOS, *ids_of("b"), EOS],
        [*ids_of("c"), EOS],
    ]
    assert [m["content"] for m in run.trajectory.messages] == ["summary", "c"]
    assert [m["content"] for m in run.trajectory.records[0].messages] == ["q", "a", "u", "b"]


def test_text_of_a_rewritten_history_is_plain_text():
    class Compress(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = [infer_request.messages[0], {"role": "user", "content": "<|im_end|>"}]
            return {"infer_request": infer_request}

    run = converse(Compress(max_turns=2), [said("a"), said("b")], prompt=prompt_of("<|im_end|>"))
    assert run.engine.requests[0].input_ids.count(EOS) == 2  # a prompt of the data set is trusted
    assert run.engine.requests[1].input_ids.count(EOS) == 3  # and stays so; what a scheduler writes is not


def test_history_may_be_rewritten_with_an_answer_left_open():
    class Rewrite(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = [
                {"role": "user", "content": "other"},
                {"role": "assistant", "content": "So far: "},
            ]
            return {"infer_request": infer_request}

    run = converse(Rewrite(max_turns=2), [said("a"), said("b")])
    assert [trained(r) for r in run.trajectory.records] == [[*ids_of("a"), EOS], [*ids_of("b"), EOS]]
    assert run.trajectory.messages[-1]["content"] == "So far: b"
    assert CHAT.decode(run.engine.requests[1].input_ids).endswith("assistant\nSo far: ")


def test_candidates_that_are_not_returned_are_not_trained_and_counted():
    class BestOfTwo(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            one, other = await asyncio.gather(
                *(self.infer_engine.infer_async(infer_request, request_config) for _ in range(2))
            )
            best = max(one, other, key=lambda r: r.choices[0].message.content)
            infer_request.messages.append({"role": "assistant", "content": best.choices[0].message.content})
            return RolloutOutput(best, infer_request.messages)

    run = converse(BestOfTwo(), [said("no"), said("yes")])
    assert [trained(r) for r in run.trajectory.records] == [[], [*ids_of("yes"), EOS]]
    assert run.trajectory.counters["discarded_tokens"] == 3
    assert run.trajectory.reward == 1.0


@pytest.mark.cap("C32")
@pytest.mark.parametrize(
    ("ids", "mask", "complaint"),
    [
        ([[1], [2]], None, "response_token_ids has 2 lists for 1 assistant messages"),
        ([5, 6, 7, 8], None, "response_token_ids has 4 ids where 3 were recorded"),
        (None, [1, 1, 1], "response_loss_mask needs response_token_ids"),
        ("own", [1, 1], "response_loss_mask has 2 entries for 3 response_token_ids"),
    ],
)
def test_ids_of_an_output_are_held_against_the_record(ids, mask, complaint):
    class Returns(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            response_ = await self.infer_engine.infer_async(infer_request)
            own = response_.choices[0].token_ids
            return RolloutOutput(response_, response_token_ids=own if ids == "own" else ids, response_loss_mask=mask)

    run = converse(Returns(), [said("ab")])
    assert run.trajectory.status is Status.FAILED
    assert complaint in run.trajectory.error


@pytest.mark.cap("C32")
def test_an_outputs_mask_over_a_message_that_went_on():
    class ToolInside(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            first = await self.infer_engine.infer_async(infer_request)
            infer_request.messages.append({"role": "assistant", "content": first.choices[0].message.content + "TOOL"})
            second = await self.infer_engine.infer_async(infer_request)
            infer_request.messages[-1]["content"] += second.choices[0].message.content
            a, b = first.choices[0].token_ids, second.choices[0].token_ids
            ids = [*a, *ids_of("TOOL"), *b]
            return RolloutOutput(second, infer_request.messages, [ids], [[0, 1, 1, *[0] * 4, 1, 1]])

    run = converse(ToolInside(), [said("ab"), said("c")])
    assert response(run.record)[1] == [0, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.cap("C21", "C91")
def test_all_records_of_a_trajectory_share_its_reward_and_weigh_as_one():
    engine = ScriptedEngine(lambda request: said("yes" if request.session_id.endswith("00") else "no"))
    (one, other) = roll_out(runner_for(engine, Turns(max_turns=3)), [prompt_of()], n=2)
    batch = build_batch([one, other], pad_token_id=0)
    assert batch[TRAJECTORY_INDEX].tolist() == [0, 0, 0, 1, 1, 1]
    rewards, groups = trajectory_rewards(batch)
    assert rewards.tolist() == [1.0, 0.0]
    advantages = expand_to_tokens(batch, grpo(rewards, groups))
    for row in range(6):
        assert (advantages[row][batch[LOSS_MASK][row]] > 0).all() == (row < 3)
    assert torch.equal(advantages != 0, batch[LOSS_MASK])


@pytest.mark.cap("C22")
def test_the_reward_gets_all_records_of_each_trajectory_in_order():
    seen = {}

    class Reads(Turns):
        async def run(self, infer_request, request_config, **kwargs):
            if infer_request.messages[0]["content"] == "b":
                response_ = await self.infer_engine.infer_async(infer_request)
                return RolloutOutput(response_)
            return await super().run(infer_request, request_config)

    def reward(completions, **kwargs):
        for name, records in kwargs["trajectory_inputs"].items():
            seen[name] = records
        return [
            float(kwargs["trajectory_inputs"][i][-1]["messages"][-1]["content"] == "3") for i in kwargs["request_id"]
        ]

    def turn(request):
        return said(request.request_id.rpartition("/")[2])

    prompts = [prompt_of("a", solution="s"), prompt_of("b", solution="t")]
    a, b = roll_out(runner_for(ScriptedEngine(turn), Reads(max_turns=3), reward=reward), prompts)
    assert [len(seen[t.trajectory_id]) for t in (a, b)] == [3, 1]
    assert [r["messages"][-1]["content"] for r in seen[a.trajectory_id]] == ["1", "2", "3"]
    assert [r["solution"] for r in seen[a.trajectory_id]] == ["s"] * 3
    assert seen[b.trajectory_id][0]["solution"] == "t"
    assert (a.reward, b.reward) == (1.0, 0.0)


@pytest.mark.cap("C23", "C85")
def test_infos_of_later_turns_win_and_reach_the_reward():
    class Infos(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": "u"})
            infos = {"k": current_turn, **({"once": True} if current_turn == 1 else {})}
            return {"infer_request": infer_request, "rollout_infos": infos}

    seen = []

    def reward(completions, rollout_infos, **kwargs):
        seen.extend(rollout_infos)
        return [0.0] * len(completions)

    converse(Infos(max_turns=3), [said("a"), said("b"), said("c")], reward=reward)
    assert seen == [{"k": 2, "once": True, "num_turns": 3}]


@pytest.mark.cap("C23")
@pytest.mark.parametrize(
    ("infos", "complaint"),
    [({"x": object()}, "rollout_infos['x'] cannot be written as JSON"), ([1], "rollout_infos must be a dict, got [1]")],
)
def test_infos_that_are_no_json_are_refused_by_name(infos, complaint):
    class Infos(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": "u"})
            return {"infer_request": infer_request, "rollout_infos": infos}

    assert complaint in converse(Infos(max_turns=2), [said("a"), said("b")]).trajectory.error


@pytest.mark.cap("C36", "C37", "C82")
def test_the_reward_gets_the_last_answer_and_all_messages():
    class Ask(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": "u"})
            return {"infer_request": infer_request}

    seen = {}

    def reward(completions, **kwargs):
        seen.update(kwargs, completions=completions)
        return [0.0]

    converse(Ask(max_turns=2), [said("a"), said("bc", "length")], reward=reward, limits=Limits(
        1000, 2000, max_tokens_per_turn=2))  # fmt: skip
    assert seen["completions"] == ["bc"]
    assert [m["role"] for m in seen["messages"][0]] == ["user", "assistant", "user", "assistant"]
    assert seen["is_truncated"] == [True]


@pytest.mark.cap("C8")
def test_the_last_choice_holds_a_copy_of_the_conversation():
    held = []

    class Keeps(MultiTurnScheduler):
        def check_finished(self, infer_request, response_choice, current_turn):
            held.append(response_choice)
            return True

        def step(self, *args):
            raise AssertionError

    run = converse(Keeps(), [said("a")])
    assert held[-1].messages == run.trajectory.messages
    held[-1].messages[-1]["content"] = "changed"
    assert run.trajectory.messages[-1]["content"] == "a"


def test_a_run_of_ones_own_may_call_the_bases():
    class Adds(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = [{"role": "user", "content": f"again {current_turn}"}]
            return {"infer_request": infer_request}

        async def run(self, infer_request, request_config, **kwargs):
            output = await super().run(infer_request, request_config, **kwargs)
            output.rollout_infos["mine"] = 1
            return output

    run = converse(Adds(max_turns=3), [said("a"), said("b"), said("c")])
    assert run.trajectory.info == {"mine": 1, "num_turns": 3}
    assert [trained(r) for r in run.trajectory.records] == [[*ids_of(t), EOS] for t in "abc"]


def test_without_room_the_turns_that_were_sampled_count():
    limits = Limits(response_length=30, max_model_len=4000)
    run = converse(Turns(max_turns=9), lambda request: said("abc"), limits=limits)
    assert run.trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert run.trajectory.trainable


def test_a_run_may_catch_the_end_and_return_what_it_has():
    class Catches(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            outputs = []
            try:
                while True:
                    r = await self.infer_engine.infer_async(infer_request)
                    outputs.append(RolloutOutput(r))
                    infer_request.messages += [
                        {"role": "assistant", "content": r.choices[0].message.content},
                        {"role": "user", "content": "u"},
                    ]
            except TrajectoryOver:
                return outputs

    limits = Limits(response_length=4000, max_model_len=4000, max_assistant_turns=2)
    run = converse(Catches(), [said("a"), said("b")], limits=limits)
    assert run.trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert len(run.trajectory.records) == 2


def test_outputs_without_messages_have_those_that_their_records_have_seen():
    class Bare(Turns):
        async def run(self, infer_request, request_config, **kwargs):
            outputs = await super().run(infer_request, request_config, **kwargs)
            for output in outputs:
                output.messages = None
            return outputs

    run = converse(Bare(max_turns=3), [said("a"), said("b"), said("c")])
    assert [[m["content"] for m in r.messages] for r in run.trajectory.records] == [
        ["q", "a"], ["q", "a", "u", "b"], [],
    ]  # fmt: skip


def test_an_engine_that_goes_away_is_not_hidden_by_a_run_that_catches_everything():
    class Swallows(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            try:
                return RolloutOutput(await self.infer_engine.infer_async(infer_request))
            except Exception:
                return "nothing"

    turns = iter([EngineGoneError("gone"), said("yes")])

    def turn(request):
        found = next(turns)
        if isinstance(found, Exception):
            raise found
        return found

    (trajectory,) = roll_out(runner_for(ScriptedEngine(turn), Swallows()), [prompt_of()])
    assert trajectory.counters["retries"] == 1
    assert trajectory.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (RequestConfig(temperature=0.3), "request_config.temperature is 0.3, the run's is 1.0"),
        (RequestConfig(n=2), "request_config.n is 2"),
    ],
)
def test_what_would_make_log_probs_untrue_is_refused(config, complaint):
    class Config(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            return RolloutOutput(await self.infer_engine.infer_async(infer_request, config))

    assert complaint in converse(Config(), [said("a")]).trajectory.error


def test_a_turn_may_be_shorter_and_have_its_own_stop_strings():
    class Config(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            request_config.max_tokens, request_config.stop = 5, ["Obs:"]
            return RolloutOutput(await self.infer_engine.infer_async(infer_request, request_config))

    run = converse(Config(), [said("a")], engine_keys={"decode": CHAT.decode})
    assert run.engine.requests[0].sampling.max_new_tokens == 5
    assert run.engine.requests[0].sampling.stop == ("Obs:",)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (None, "it returned None"),
        ([], "a RolloutOutput or a list of them, got an empty list"),
        ("text", "a RolloutOutput or a list of them, got 'text'"),
        (RolloutOutput(None), "must be one that infer_async returned, got None"),
    ],
)
def test_a_run_that_returns_something_else_is_refused(returned, complaint):
    class Returns(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            await self.infer_engine.infer_async(infer_request)
            return returned

    assert complaint in converse(Returns(), [said("a")]).trajectory.error


@pytest.mark.slow
def test_a_run_that_hangs_fails_its_trajectory_only():
    class Hangs(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            response_ = await self.infer_engine.infer_async(infer_request)
            if infer_request.messages[0]["content"] == "hang":
                while not ended:
                    await asyncio.sleep(0.001)
                driver.timeout_s = 0.2
                await asyncio.sleep(1e6)
            return RolloutOutput(response_)

        def on_trajectory_end(self, infer_request, reason):
            ended.append(reason)

    engine, driver, ended = ScriptedEngine(lambda request: said("yes")), SchedulerDriver(Hangs(), timeout_s=600.0), []
    good, bad = roll_out(runner_for(engine, driver), [prompt_of("good"), prompt_of("hang")])
    assert (good.status, bad.status) == (Status.COMPLETED, Status.FAILED)
    assert "nothing was asked of the engine for 0.2 s" in bad.error


class Ends(MultiTurnScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ended = []

    def step(self, infer_request, response_choice, current_turn):
        if infer_request.messages[0]["content"] == "raise":
            raise RuntimeError("boom")
        infer_request.messages.append({"role": "user", "content": "u"})
        return {"infer_request": infer_request}

    def check_finished(self, infer_request, response_choice, current_turn):
        return response_choice.message.content == "done" or super().check_finished(
            infer_request, response_choice, current_turn
        )

    def on_trajectory_end(self, infer_request, reason):
        self.ended.append((infer_request.uuid, reason, infer_request.messages[-1]["content"]))


@pytest.mark.cap("C90")
@pytest.mark.parametrize(
    ("question", "turns", "reasons"),
    [
        ("q", [said("a"), said("done")], ["scheduler"]),
        ("q", [said("a"), said("b"), said("c")], ["max_assistant_turns"]),
        ("q", [said("abcdefg", "length")], ["max_tokens_per_turn"]),
        ("raise", [said("a")], ["error"]),
        ("q", [said("a"), EngineGoneError("gone"), said("done")], ["engine", "scheduler"]),
    ],
)
def test_the_end_of_a_trajectory_is_told_exactly_once_whatever_it_is(question, turns, reasons):
    left = iter(turns)

    def turn(request):
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    scheduler = Ends(max_turns=3)
    limits = Limits(4000, 8000, max_tokens_per_turn=7)
    roll_out(runner_for(ScriptedEngine(turn), scheduler, limits=limits), [prompt_of(question)])
    assert [reason for _, reason, _ in scheduler.ended] == reasons


@pytest.mark.cap("C90")
def test_the_end_is_told_to_a_hook_that_takes_the_reason_alone():
    reasons = []

    class Older(Ends):
        def on_trajectory_end(self, reason):
            reasons.append(reason)

    converse(Older(max_turns=1), [said("a")])
    assert reasons == ["max_assistant_turns"]


@pytest.mark.cap("C90")
@pytest.mark.parametrize(("question", "told"), [("q", "cannot clean up"), ("raise", "boom")])
def test_an_end_that_raises_fails_the_trajectory_unless_something_else_did(question, told):
    class Messy(Ends):
        def on_trajectory_end(self, infer_request, reason):
            raise RuntimeError("cannot clean up")

    run = converse(Messy(max_turns=2), [said("a"), said("b")], prompt=prompt_of(question))
    assert run.trajectory.status is Status.FAILED
    assert told in run.trajectory.error.splitlines()[-1]


@pytest.mark.cap("C90")
def test_a_cancelled_rollout_ends_its_trajectories_too():
    scheduler = Ends()
    engine = ScriptedEngine(lambda request: said("a"), latency_s=1e6)
    runner = runner_for(engine, scheduler)

    async def go():
        task = asyncio.create_task(anext(runner.run(_plan())))
        while not engine.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _plan():
        from verl_mt.rollout.runner import RolloutPlan

        return RolloutPlan([prompt_of()], 1, "s1")

    asyncio.run(go())
    assert [reason for _, reason, _ in scheduler.ended] == ["cancelled"]


FORGETS = ChatTemplate(toy_tokenizer(FORGETFUL))


def test_the_inference_template_and_a_scheduler_go_together():
    class Ask(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": "u"})
            return {"infer_request": infer_request}

    turns = [said("<think>x</think>a"), said("<think>y</think>b")]
    run = converse(
        Ask(max_turns=2), turns, chat=FORGETS, use_inference_chat_template=True, prompt=prompt_of(chat=FORGETS)
    )
    assert [trained(r) for r in run.trajectory.records] == [t[0] for t in turns]


def test_text_put_into_and_before_answers_is_there_once_where_the_history_is_rewritten_too():
    class Both(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["content"] += " [checked]"
            infer_request.messages += [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Well, "}]
            return {"infer_request": infer_request}

    turns = [said("<think>x</think>a"), said("b")]
    run = converse(
        Both(max_turns=2), turns, chat=FORGETS, use_inference_chat_template=True, prompt=prompt_of(chat=FORGETS)
    )
    assert len(run.trajectory.records) == 2
    text = FORGETS.full_text(run.trajectory.messages)
    assert FORGETS.decode(run.record.token_ids) == text.removesuffix("\n")
    assert text.count("[checked]") == text.count("Well, ") == 1
    assert [trained(r) for r in run.trajectory.records] == [turns[0][0][:-1], turns[1][0]]
