"""A user played by a model behind an OpenAI-compatible URL: a real server on loopback, the real client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from scheduler_lab import EOS, prompt_of, roll_out, runner_for, said

from verl_mt.data.trajectory import StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineGoneError, UserCodeError
from verl_mt.extensions.toolbox.interactions.simulated_user import SimulatedUser
from verl_mt.interactions.session import InteractionSession
from verl_mt.rollout.drivers import ToolLoopDriver

pytest.importorskip("openai")

ROW = {"persona": "a baker in a hurry", "goal": "the price of 12 rolls", "name": "user"}


class UserModel:
    """Says its lines in order; a number among them is an HTTP status."""

    def __init__(self, *lines: str | int, wait: Callable[[], object] = lambda: None):
        self.lines, self.wait = list(lines), wait
        self.requests: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = model.answer(self.path, self.headers.get("Authorization"), body)
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Tests print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, key: str | None, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.requests.append({"path": path, "key": key, **body})
            line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.wait()
        with self.lock:
            self.at_once -= 1
        if isinstance(line, int):
            return line, {"error": {"message": "no such model"}}
        message = {"role": "assistant", "content": line}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[UserModel] = []

    def start(*lines: str | int, **kwargs: Any) -> UserModel:
        started.append(UserModel(*lines, **kwargs))
        return started[-1]

    yield start
    for model in started:
        model.server.shutdown()
        model.server.server_close()


def user(model: UserModel, **config: Any) -> SimulatedUser:
    return SimulatedUser({"name": "user", "base_url": model.url, "model": "m", "max_retries": 0, **config})


def talk(interaction: SimulatedUser, *conversations: list[dict[str, Any]], row: dict[str, Any] = ROW) -> list[Any]:
    async def go() -> list[Any]:
        session = InteractionSession(interaction, "t", row, timeout_s=600)
        try:
            return [await session.respond(messages) for messages in conversations]
        finally:
            await session.finish()

    return asyncio.run(go())


OPENING = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "How can I help?"}]


def test_the_user_model_sees_the_conversation_from_the_other_side(serve):
    model = serve("What do 12 rolls cost?")
    messages = [
        {"role": "system", "content": "Secret orders."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "hidden"},
        {"role": "assistant", "content": "How can I help?"},
    ]
    (turn,) = talk(user(model), messages)
    sent = model.requests[0]
    assert (turn.done, turn.text, turn.score) == (False, "What do 12 rolls cost?", 0.0)
    assert turn.extra == {"user_tokens": {"prompt": 7, "completion": 3}}
    assert sent["path"] == "/v1/chat/completions" and sent["model"] == "m"
    assert [m["role"] for m in sent["messages"]] == ["system", "assistant", "user"]
    assert [m["content"] for m in sent["messages"][1:]] == ["Hello", "How can I help?"]
    prompt = sent["messages"][0]["content"]
    assert "a baker in a hurry" in prompt and "the price of 12 rolls" in prompt and "[DONE]" in prompt
    assert "Secret orders" not in str(sent) and "hidden" not in str(sent)


@pytest.mark.parametrize("line, score", [("Thanks! [DONE]", 1.0), ("[GIVE UP] Forget it.", 0.0)])
def test_a_marker_ends_the_conversation_with_its_score(serve, line, score):
    async def go() -> Any:
        session = InteractionSession(user(serve(line)), "t", ROW, timeout_s=600)
        return await session.respond(OPENING), await session.finish()

    turn, final = asyncio.run(go())
    assert turn.done and turn.score == score == final
    assert "[" not in turn.text and turn.text


def test_what_the_user_model_thinks_is_not_said(serve):
    (turn,) = talk(user(serve("<think>I want [DONE] soon</think>\nHow much?")), OPENING)
    assert (turn.done, turn.text) == (False, "How much?")


def test_sampling_settings_and_the_key_are_sent(serve, monkeypatch):
    monkeypatch.setenv("USER_KEY", "k-123")
    model = serve("x")
    talk(user(model, api_key_env="USER_KEY", temperature=0.3, max_tokens=9, extra_body={"top_k": 5}), OPENING)
    sent = model.requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["top_k"], sent["key"]) == (0.3, 9, 5, "Bearer k-123")


@pytest.mark.slow
def test_a_passing_failure_is_tried_again_and_a_lasting_one_aborts_the_trajectory(serve):
    model = serve(503, "back again")
    (turn,) = talk(user(model, max_retries=1), OPENING)
    assert turn.text == "back again" and len(model.requests) == 2
    with pytest.raises(EngineGoneError, match="answered 503"):
        talk(user(serve(503)), OPENING)


def test_a_url_that_nobody_serves_aborts_the_trajectory(serve):
    model = serve("x")
    model.server.shutdown()
    model.server.server_close()
    with pytest.raises(EngineGoneError, match=f"{model.url} does not answer after 1 attempts"):
        talk(user(model), OPENING)


def test_a_refused_request_is_an_error_of_the_configuration(serve):
    with pytest.raises(UserCodeError, match=r"answered 404: .*no such model.*Check model"):
        talk(user(serve(404)), OPENING)


def test_requests_at_once_are_limited(serve):
    model = serve("x", wait=threading.Barrier(2).wait)
    interaction = user(model, max_concurrent=2)

    async def go() -> None:
        sessions = [InteractionSession(interaction, f"t{k}", ROW, timeout_s=600) for k in range(6)]
        await asyncio.gather(*(session.respond(OPENING) for session in sessions))

    asyncio.run(go())
    assert len(model.requests) == 6 and model.most_at_once == 2


@pytest.mark.parametrize(
    "config, row, text",
    [
        ({}, {"name": "user", "goal": "g"}, "set extra_info.interaction_kwargs.persona"),
        ({"system_prompt": "{mood}"}, ROW, "system_prompt names 'mood'.*It has: goal, name, persona"),
    ],
)
def test_a_row_that_lacks_something_is_told_what(serve, config, row, text):
    with pytest.raises(UserCodeError, match=text):
        talk(user(serve("x"), **config), OPENING, row=row)


def test_wrong_settings_are_one_error():
    with pytest.raises(ValueError, match=r"unknown setting 'url'.*base_url is required.*max_tokens.*'9'.*NO_SUCH_KEY"):
        SimulatedUser({"name": "u", "url": "x", "model": "m", "max_tokens": "9", "api_key_env": "NO_SUCH_KEY"})


def test_what_the_user_model_says_is_cut_and_cleaned_like_a_tools_answer(serve):
    model = serve("half \ud800 a sign <|im_end|>" + "and so on " * 200_000, "thank you [DONE]")
    runner = runner_for(ScriptedEngine([said("a"), said("b")]), ToolLoopDriver(), interactions={"user": user(model)})
    prompt = prompt_of("q")
    prompt.row.extra_info["interaction_kwargs"] = ROW
    (trajectory,) = roll_out(runner, [prompt])
    assert trajectory.stop_reason is StopReason.INTERACTION, trajectory.error
    text = trajectory.messages[2]["content"]
    assert text.startswith("half ? a sign <|im_end|>and") and "(truncated)" in text and len(text) < 1000
    assert trajectory.counters["cut_interaction_texts"] == 1 and trajectory.turn_scores == [0.0, 1.0]
    assert trajectory.records[0].token_ids.count(EOS) == 4  # the prompt's and the user's turn, and two sampled ones
