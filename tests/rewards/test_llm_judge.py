"""A judge behind an OpenAI-compatible URL: a real server on loopback, the real client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import JudgeServer

from verl_mt.errors import ConfigError
from verl_mt.extensions.toolbox.rewards.llm_judge import parse_score
from verl_mt.rewards import Reward, RewardFailure, RewardInput, llm_judge, load_reward

pytestmark = pytest.mark.slow  # servers

pytest.importorskip("openai")


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[JudgeServer] = []

    def start(*lines: Any, **kwargs: Any) -> JudgeServer:
        started.append(JudgeServer(*lines, **kwargs))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_judge, "_FIRST_PAUSE_S", 0.01)


def judge(server: JudgeServer, timeout_s: float = 20.0, **settings: Any) -> Reward:
    settings = {"base_url": server.url, "model": "m", "rubric": "be right"} | settings
    return load_reward("llm_judge", kwargs=settings, timeout_s=timeout_s)


def item(answer: str = "It is 4.", **extra: Any) -> RewardInput:
    messages = [
        {"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "<think>hm</think>" + answer},
        {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": answer},
    ]  # fmt: skip
    info = {"index": 3, "trajectory_id": "t3", "messages": messages, "num_turns": 2} | extra
    return RewardInput("x", f"<think>hm</think>{answer}\n{answer}", "4", info, completion=answer)


def score(reward: Reward, *items: RewardInput) -> list[Any]:
    return asyncio.run(reward.score(items))


# ---------------------------------------------------------------- reading the reply


@pytest.mark.parametrize(
    "reply, found",
    [
        ("Score: 7", 7), ("score: 7.5.", 7.5), ("**Score:** 7/10", 7), ("**Score**: 7 out of 10", 7), ("Rating = 3", 3),
        ("The final grade is 8", 8), ("Score (0-10): 6", 6), ("[[9]]", 9), ("Verdict: [[4/10]]", 4), ("7", 7),
        ("**7/10**", 7), ('{"score": 5, "why": "x"}', 5), ('```json\n{"Rating": "6/10"}\n```', 6), ("Score: 0", 0),
        ("Score: 2\nOn reflection, Score: 3", 3), ('It claims {"score": 10}, but: Score: 1', 1),
        ("It says [[10]]. Score: 2", 2), ("Score: 9\n" + json.dumps({"score": 2}), 2),
        ("<think>Score: 9</think>Score: 4", 4), ("Score: -0", 0),
        ("", None), ("good answer", None), ("Score: 11", None), ("Score: -1", None), ("Score: 4/5", None),
        ("Score: 75%", None), ("Score: 7-8", None), ("<think>Score: 9", None), ('{"score": true}', None),
        ('{"score": NaN}', None), ("score is between 0 and 10", None), ("2 of 3 facts are right", None),
        ("Score: 7\nNo: Score: 70", None), ('{"score": ' * 3000, None),
    ],
)  # fmt: skip
def test_the_last_score_of_a_reply_counts(reply, found):
    assert parse_score(reply, 0, 10) == found


@given(st.text(), st.sampled_from(["", "Score: ", '{"score": ', "[["]), st.integers(-5, 15))
def test_a_score_is_always_on_the_scale(text, before, number):
    found = parse_score(f"{text}{before}{number}", 0, 10)
    assert found is None or 0 <= found <= 10


# ---------------------------------------------------------------- asking


def test_the_score_lies_between_the_ends_of_the_scale_and_the_judges_own_number_is_kept(serve):
    assert score(judge(serve("Score: 7")), item()) == [{"score": 0.7, "judge": 7.0}]
    assert score(judge(serve("Score: 2"), scale=[1, 5]), item()) == [{"score": 0.25, "judge": 2.0}]


def test_the_judge_sees_rubric_question_and_answer_and_not_the_thoughts(serve):
    server = serve("Score: 1")
    score(judge(server), item())
    (sent,) = server.requests
    prompt = sent["messages"][0]["content"]
    assert "be right" in prompt and "What is 2 + 2?" in prompt and "It is 4." in prompt
    assert "What is 1 + 1?" not in prompt and "hm" not in prompt and "Sure?" not in prompt
    assert (sent["model"], sent["temperature"], sent["max_tokens"], sent["key"]) == ("m", 0.0, 512, "Bearer none")


def test_a_prompt_of_ones_own_may_name_the_rows_fields_the_truth_and_the_conversation(serve):
    server = serve("Score: 1")
    prompt = "{level}|{ground_truth}|{solution}|{conversation}|{low}-{high}|{{}}"
    score(judge(server, prompt=prompt), item("{rubric}", level="hard"))
    level, truth, solution, conversation, scale, braces = server.requests[0]["messages"][0]["content"].split("|")
    assert (level, truth, scale, braces) == ("hard", "4", "0-10", "{}")
    assert solution == "<think>hm</think>{rubric}\n{rubric}", "what the answer says is not filled in"
    assert conversation.startswith("[user] What is 1 + 1?") and conversation.endswith("[assistant] {rubric}")


def test_an_answer_cannot_close_its_own_fence(serve):
    server = serve("Score: 1")
    score(judge(server, prompt="{rubric}{tag}\n{answer}\n{tag}"), item("a"), item("b"))
    tags = {r["messages"][0]["content"].splitlines()[-1] for r in server.requests}
    assert len(tags) == 2, "the fence depends on what is in it"


def test_the_rubric_comes_from_the_row_else_from_the_file_or_the_text(serve, tmp_path):
    server = serve("Score: 1")
    (tmp_path / "rubric.md").write_text("from the file")
    reward = judge(server, rubric="", rubric_file=str(tmp_path / "rubric.md"), prompt="{rubric}")
    score(reward, item(), item(rubric="from the row"))
    assert {r["messages"][0]["content"] for r in server.requests} == {"from the file", "from the row"}


def test_the_key_comes_from_the_environment_and_further_fields_are_sent(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k-123")
    server = serve("Score: 1")
    score(judge(server, api_key_env="JUDGE_KEY", temperature=0.5, max_tokens=9, extra_body={"top_k": 5}), item())
    sent = server.requests[0]
    assert (sent["key"], sent["temperature"], sent["max_tokens"], sent["top_k"]) == ("Bearer k-123", 0.5, 9, 5)


def test_half_of_a_surrogate_pair_in_an_answer_is_judged_too(serve):
    assert score(judge(serve("Score: 10")), item("\ud83d")) == [{"score": 1.0, "judge": 10.0}]


def test_no_more_trajectories_are_judged_at_once_than_allowed(serve):
    server = serve("Score: 5", wait=threading.Barrier(2).wait)
    assert score(judge(server, max_concurrent=2), *(item() for _ in range(6))) == [{"score": 0.5, "judge": 5.0}] * 6
    assert len(server.requests) == 6 and server.most_at_once == 2


# ---------------------------------------------------------------- when it fails


@pytest.mark.parametrize("status", [500, 503, 429, (429, {"retry-after": "0.05"})])
def test_a_server_that_is_broken_or_busy_is_asked_again(serve, status):
    server = serve(status, status, "Score: 10")
    assert score(judge(server), item()) == [{"score": 1.0, "judge": 10.0}]
    assert len(server.requests) == 3


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a judge; for its deadline only they take time."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def paused(seconds: float, *result: Any) -> Any:
        slept.append(seconds)
        return await sleep(0, *result)

    monkeypatch.setattr(llm_judge, "_FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(llm_judge, "time", SimpleNamespace(monotonic=lambda: sum(slept)))
    monkeypatch.setattr(asyncio, "sleep", paused)
    return slept


def test_a_judge_that_stays_down_is_not_an_answer_worth_nothing(serve, pauses):
    server = serve(503)
    (failure,) = score(judge(server, timeout_s=60.0), item())
    assert isinstance(failure, RewardFailure) and failure.kind == "unavailable"
    assert "row 3 (trajectory t3): the judge at" in failure.error and "answered 503: not now" in failure.error
    kept = [seconds for seconds in pauses if seconds]
    assert kept == sorted(kept) and 60.0 - kept[-1] <= sum(kept) < 60.0
    assert len(server.requests) == len(kept) + 1
    assert f"({len(server.requests)} attempts within reward.timeout_s" in failure.error


def test_a_pause_that_ends_after_the_deadline_is_not_waited_for(serve):
    server = serve((429, {"retry-after": "60"}))
    (failure,) = score(judge(server), item())
    assert failure.kind == "unavailable" and len(server.requests) == 1


@pytest.mark.slow
def test_a_url_that_nobody_serves_and_one_that_hangs_are_unavailable(serve, pauses):
    gone = serve("x")
    gone.close()
    (failure,) = score(judge(gone), item())
    assert failure.kind == "unavailable" and "does not answer: APIConnectionError" in failure.error
    over = threading.Event()
    (failure,) = score(judge(serve("Score: 1", wait=over.wait), request_timeout_s=0.1), item())
    over.set()
    assert failure.kind == "unavailable" and "APITimeoutError" in failure.error


@pytest.mark.parametrize("status", [400, 401, 404, 409])
def test_a_refused_request_is_never_repeated_and_fails_its_trajectory(serve, status):
    server = serve(status)
    (failure,) = score(judge(server), item())
    assert failure.kind == "raised" and len(server.requests) == 1
    assert f"answered {status}: not now. Check model, api_key_env" in failure.error


def test_a_reply_without_a_score_is_asked_for_one_and_then_given_up(serve):
    server = serve("Quite good.", "Score: 6")
    assert score(judge(server), item()) == [{"score": 0.6, "judge": 6.0}]
    said = [m["content"] for m in server.requests[1]["messages"]]
    assert said[1] == "Quite good." and "Score: <a number from 0 to 10>" in said[2]
    server = serve("Quite good.")
    (failure,) = score(judge(server, max_asked=2), item())
    assert failure.kind == "unavailable" and "in 2 replies. The last one: 'Quite good.'" in failure.error


def test_of_a_reply_that_was_cut_no_number_is_taken(serve):
    (failure,) = score(judge(serve("Score: 1", finish="length"), max_asked=1), item())
    assert failure.kind == "unavailable"


def test_one_failure_does_not_touch_the_others(serve):
    server = serve(lambda body: 400 if "bad" in body["messages"][0]["content"] else "Score: 10")
    good, bad, other = score(judge(server), item("fine"), item("bad"), item("fine too"))
    assert good == other == {"score": 1.0, "judge": 10.0} and bad.kind == "raised"


def test_a_row_without_rubric_and_a_prompt_with_an_unknown_field_are_told(serve):
    server = serve("Score: 1")
    (failure,) = score(judge(server, rubric=""), item())
    assert "no rubric: give reward.kwargs.rubric or .rubric_file, or the row's extra_info.rubric" in failure.error
    (failure,) = score(judge(server, prompt="{mood}"), item())
    assert "reward.kwargs.prompt names 'mood'" in failure.error and "conversation" in failure.error
    assert server.requests == []


def test_wrong_settings_are_one_error():
    with pytest.raises(ConfigError) as error:
        load_reward("llm_judge", kwargs={
            "url": "x", "max_tokens": "9", "scale": [5, 5], "api_key_env": "NO_SUCH_KEY", "rubric_file": "/no/such",
            "max_concurrent": 0,
        })  # fmt: skip
    text = str(error.value)
    for part in (
        "unknown setting 'url'", "base_url is required", "model is required", "max_tokens has the wrong type: got '9'",
        "scale is [5, 5]", "NO_SUCH_KEY, which is not in the environment", "there is no such file",
        "max_concurrent is 0",
    ):  # fmt: skip
        assert part in text
    with pytest.raises(ConfigError, match="the key comes from the environment"):
        load_reward("llm_judge", kwargs={"base_url": "x", "model": "m", "api_key": "sk-1"})


def test_the_librarys_own_openai_endpoint_can_be_the_judge():
    pytest.importorskip("uvicorn")
    from verl_mt.extensions.toolbox.agent.endpoint import AgentServer

    async def go() -> list[Any]:
        server, asked = AgentServer(), []

        async def answer(body: dict[str, Any]) -> tuple[int, Any]:
            asked.append(body)
            if len(asked) == 1:
                return 503, {"error": {"message": "later"}}
            message = {"role": "assistant", "content": "Fine. **Score: 8/10**"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return 200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

        url = await server.open(answer)
        try:
            settings = {"base_url": url, "model": "m", "rubric": "be right"}
            return await load_reward("llm_judge", kwargs=settings, timeout_s=600).score([item()])
        finally:
            await server.close(url)

    assert asyncio.run(go()) == [{"score": 0.8, "judge": 8.0}]
