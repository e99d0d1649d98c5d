"""Whatever is sent to an agent's endpoint is answered; a malformed body changes nothing, and the connection stays."""

from __future__ import annotations

import asyncio
import http.client
import json
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from generate_support import CHAT, EOS, merging_tokenizer, roll_out, rows, spelled, turn
from hostile import Unshowable
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.bounds import MAX_BODY_BYTES
from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.requests import SamplingParams
from verl_mt.data.run_files import trajectory_to_row
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.extensions.toolbox.agent.endpoint import AgentServer, ChatRequest, RequestError, read_request
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.runner import RolloutRunner
from verl_mt.rollout.session import SessionContext

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from verl_mt.extensions.toolbox.agent.driver import AgentDriver

pytestmark = pytest.mark.slow  # servers

USER = {"role": "user", "content": "q"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def asking(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages], **fields}


def said(**fields: Any) -> dict[str, Any]:
    return asking({"role": "assistant", "content": "x", **fields})


def called(**function: Any) -> dict[str, Any]:
    return said(tool_calls=[{"id": "c", "type": "function", "function": function}])


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


RAW = {
    "nothing": b"",
    "no JSON": b"hello",
    "half of it": b'{"messages": [',
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "5,000 deep": ('{"messages": ' + nested(5000) + "}").encode(),
    "500 deep": ('{"messages": [{"role": "user", "content": "q"}], "metadata": ' + nested(500) + "}").encode(),
    "a number of 5,000 digits": b'{"messages": [], "n": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}',
    "half a pair in a part": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udc00"}]}]}',
    "half a pair as a key": b'{"messages": [{"role": "user", "content": "q"}], "\\ud800": 1}',
    "half a pair in a tool": b'{"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function", '
    b'"function": {"name": "f", "description": "\\ud800"}}]}',
}
BODIES: dict[str, Any] = {
    "null": None,
    "a text": "messages",
    "a list": [USER],
    "no messages": {},
    "messages: 5": {"messages": 5},
    "messages: object": {"messages": USER},
    "no message": {"messages": []},
    "message: text": {"messages": ["q"]},
    "message: null": {"messages": [None]},
    "role: missing": {"messages": [{"content": "q"}]},
    "role: 5": {"messages": [{"role": 5, "content": "q"}]},
    "role: []": {"messages": [{"role": [], "content": "q"}]},
    "content: 5": {"messages": [{"role": "user", "content": 5}]},
    "content: object": {"messages": [{"role": "user", "content": {"text": "q"}}]},
    "content: [5]": {"messages": [{"role": "user", "content": [5]}]},
    "part without type": {"messages": [{"role": "user", "content": [{"text": "q"}]}]},
    "part of type []": {"messages": [{"role": "user", "content": [{"type": []}]}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    "part text: 5": {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    "name: 5": {"messages": [{"role": "user", "content": "q", "name": 5}]},
    "reasoning_content: 5": said(reasoning_content=5),
    "tool_call_id: []": asking({"role": "tool", "content": "x", "tool_call_id": []}),
    "tool_calls: 5": said(tool_calls=5),
    "tool_calls: object": said(tool_calls=CALL),
    "tool_calls: [5]": said(tool_calls=[5]),
    "tool_calls: [null]": said(tool_calls=[None]),
    "call without function": said(tool_calls=[{"id": "c"}]),
    "function: 5": said(tool_calls=[{"id": "c", "function": 5}]),
    "function name: 5": called(name=5),
    "function without name": called(arguments="{}"),
    "arguments: 5": called(name="f", arguments=5),
    "arguments: list": called(name="f", arguments=[1]),
    "call id: 5": said(tool_calls=[{**CALL, "id": 5}]),
    "stop: 5": asking(stop=5),
    "stop: [5]": asking(stop=[5]),
    "stop: empty": asking(stop=""),
    "stop: object": asking(stop={"a": 1}),
    "tools: 5": asking(tools=5),
    "tools: object": asking(tools={"type": "function"}),
    "tools: [5]": asking(tools=[5]),
    "tools: function 5": asking(tools=[{"type": "function", "function": 5}]),
    "tools: name 5": asking(tools=[{"type": "function", "function": {"name": 5}}]),
    "tools: web search": asking(tools=[{"type": "web_search"}]),
    "tool_choice: 5": asking(tool_choice=5),
    "tool_choice: object": asking(tool_choice={"type": "function", "function": {"name": "f"}}),
    "response_format: 5": asking(response_format=5),
    "response_format: text": asking(response_format="json"),
    "response_format: json": asking(response_format={"type": "json_object"}),
    "stream: text": asking(stream="False"),
    "stream: 5": asking(stream=5),
    "stream_options: 5": asking(stream=True, stream_options=5),
    "include_usage: text": asking(stream=True, stream_options={"include_usage": "yes"}),
    "logprobs: 5": asking(logprobs=5),
    "top_logprobs": asking(top_logprobs=3),
    "max_tokens: 0": asking(max_tokens=0),
    "max_tokens: -1": asking(max_tokens=-1),
    "max_tokens: text": asking(max_tokens="7"),
    "max_tokens: 1.5": asking(max_tokens=1.5),
    "max_tokens: NaN": asking(max_tokens=float("nan")),
    "max_completion_tokens: true": asking(max_completion_tokens=True),
    "n: 2": asking(n=2),
    "n: text": asking(n="2"),
    "n: []": asking(n=[]),
    "unknown field": asking(guided_regex="x"),
}
MALFORMED = RAW | {name: json.dumps(body).encode() for name, body in BODIES.items()}
SEEN: dict[str, tuple[int, Any]] = {}
RETURNED: list[Any] = []
"""What the agent returns instead of its own."""


def speaks(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """A good request, every malformed one of the row behind it, and a good one that goes on; on one connection."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=None)
    connection.connect()
    port = connection.sock.getsockname()[1]
    ids = []

    def ask(body: bytes) -> tuple[int, Any]:
        connection.request("POST", f"{address.path}/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read()
        assert connection.sock is not None and connection.sock.getsockname()[1] == port, "another connection"
        return response.status, json.loads(reply)

    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        for name in row["bodies"] if messages[1:] else ():
            SEEN[name] = ask(MALFORMED[name])
        status, reply = ask(json.dumps({"messages": messages}).encode())
        assert status == 200, reply
        ids.append(reply["id"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "more"}]
    connection.close()
    return RETURNED[0] if RETURNED else {"ids": ids}


def spoken(bodies: list[str], chat: ChatTemplate = CHAT):
    """The trajectory of a conversation with these bodies between its two turns."""
    SEEN.clear()
    (group,) = roll_out(runner_of("speaks", chat, [turn("hello"), turn("are")]), rows("q", chat=chat, bodies=bodies))
    return group.trajectories[0]


def runner_of(agent: str, chat: ChatTemplate, script: list[Any]) -> RolloutRunner:
    engine = ScriptedEngine(script, decode=chat.decode)
    return RolloutRunner(
        context=SessionContext(
            chat=chat, engine=engine, limits=Limits(response_length=3000, max_model_len=4000), parser=None,
            sampling=SamplingParams(max_new_tokens=1), sanity=SanityMonitor(SanityMode.STRICT),
        ),
        reward=load_reward("generate_support.one", timeout_s=600.0),
        driver=AgentDriver(f"{__name__}.{agent}", get_parser("hermes")),
    )  # fmt: skip


def test_every_malformed_body_is_answered_with_400_and_leaves_record_and_connection_as_they_were():
    assert len(MALFORMED) >= 40
    undisturbed = spoken([])
    trajectory = spoken(list(MALFORMED))
    assert trajectory.status == "completed", trajectory.error
    assert {name: status for name, (status, _) in SEEN.items() if status != 400} == {}
    for name, (_, reply) in SEEN.items():
        error = reply["error"]
        assert set(error) == {"message", "type", "code", "param"} and error["type"] == "invalid_request_error", name
        assert isinstance(error["message"], str) and len(error["message"]) > 10, name
    assert trajectory.records == undisturbed.records and trajectory.messages == undisturbed.messages
    assert trajectory.info == undisturbed.info and len(trajectory.records) == 1
    (record,) = trajectory.records
    trained = [i for i, bit in zip(record.token_ids, record.loss_mask) if bit]
    assert trained == [*spelled("hello"), EOS, *spelled("are"), EOS]


def test_a_body_without_end_is_refused_and_without_its_key_nothing_is_told():
    async def go() -> list[tuple[bytes, bytes]]:
        server = AgentServer()

        async def answer(body: Any) -> tuple[int, Any]:
            raise AssertionError("nothing was to be asked")

        url = urlsplit(await server.open(answer))
        size = MAX_BODY_BYTES + 1
        replies = []
        try:
            for line, body in (
                (f"POST {url.path}/chat/completions", b" " * size),
                (f"GET {url.path}/models", b""),
                ("GET /guessed/v1/models", b""),
            ):
                reader, writer = await asyncio.open_connection(url.hostname, url.port)
                head = (
                    f"{line} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                reply = await reader.read()
                replies.append((reply.partition(b"\r\n")[0], reply.rpartition(b"\r\n\r\n")[2]))
                writer.close()
        finally:
            await server.close(url.geturl())
        return replies

    large, known, unknown = asyncio.run(go())
    assert large[0].startswith(b"HTTP/1.1 413") and b"more than 16777216 bytes" in large[1]
    assert known[0].startswith(b"HTTP/1.1 200") and b"policy" in known[1]
    assert unknown[0].startswith(b"HTTP/1.1 404") and b"conversation_over" in unknown[1] and b"policy" not in unknown[1]


def test_messages_that_the_template_refuses_are_told_so_and_leave_the_record_as_it_was(monkeypatch):
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages if message.role == 'narrator' %}{{ raise_exception('no narrators') }}{% endfor %}"
        + tokenizer.chat_template
    )
    chat = ChatTemplate(tokenizer)
    undisturbed = spoken([], chat)
    told = {"role": "narrator", "content": "meanwhile"}
    for name, messages in (("another history", [told]), ("one more", [*undisturbed.messages[:2], told])):
        monkeypatch.setitem(MALFORMED, name, json.dumps({"messages": messages}).encode())
        trajectory = spoken([name], chat)
        assert SEEN[name][0] == 400 and "no narrators" in SEEN[name][1]["error"]["message"]
        assert trajectory.records == undisturbed.records and trajectory.messages == undisturbed.messages


def thinks(row: dict[str, Any], base_url: str, api_key: str) -> None:
    """Asks; asks again with the answer in another history, as it was shown; and with another client's spelling."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=None)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}

    def ask(*messages: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", f"{address.path}/chat/completions", json.dumps(asking(*messages, tools=[tool])))
        reply = json.loads(connection.getresponse().read())
        return reply["choices"][0]["message"]

    first = ask()
    edited = {**first, "content": "edited"}
    SHOWN.extend([first, ask(edited, USER)])
    SHOWN.append(ask({"role": "assistant", "content": "x", "reasoning": "so"}, USER))
    connection.close()


SHOWN: list[dict[str, Any]] = []


def test_reasoning_is_shown_under_one_key_and_comes_back_under_the_one_that_the_template_reads():
    tokenizer = merging_tokenizer()
    template = (files("verl_mt.tiny") / "checkpoint" / "chat_template.jinja").read_text()
    chat = ChatTemplate(tokenizer, chat_template=template.replace("reasoning_content", "thinking"))
    assert chat.capabilities.reasoning_key == "thinking"
    SHOWN.clear()
    said = [turn("<think>\nhm\n</think>\n\nhello") for _ in range(3)]
    (group,) = roll_out(runner_of("thinks", chat, said), rows("q", chat=chat))
    (trajectory,) = group.trajectories
    assert trajectory.error is None
    assert [(m["reasoning_content"], m["content"], "thinking" in m) for m in SHOWN] == [("hm", "hello", False)] * 3
    second, third = (chat.decode(record.token_ids) for record in trajectory.records[1:])
    assert "<think>\nhm\n</think>\n\nedited" in second and "<think>\nso\n</think>\n\nx" in third
    assert [m.get("thinking") for m in trajectory.messages if m["role"] == "assistant"] == ["so", "hm"]


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize("value", [json.loads(nested(900)), endless(), {"answer": [endless()]}])
def test_what_an_agent_returns_must_be_writable(value, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RETURNED", [value])
    trajectory = spoken([])
    assert trajectory.status == "failed" and "what it returned is nested more than 100 levels deep" in trajectory.error
    assert "row 1" in trajectory.error and "agent" not in trajectory.info


@pytest.mark.parametrize("value", ["text", 5, [1.5], {"answer": None}, Unshowable(), b"bytes", float("nan")])
def test_whatever_else_an_agent_returns_reaches_the_row(value, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RETURNED", [value])
    trajectory = spoken([])
    assert trajectory.status == "completed" and trajectory.info["agent"] is value
    json.dumps(trajectory_to_row(trajectory, step=1), allow_nan=False)


@pytest.mark.parametrize("text", ["[1]", "3", '"x"', "null", "no JSON"])
def test_arguments_that_are_no_object_stay_the_text_that_they_are(text):
    (_, message) = read_request(called(name="f", arguments=text)).messages
    assert message["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(("value", "wanted"), [(0, False), (1, True), (False, False), (None, False)])
def test_whether_log_probs_are_wanted_may_be_said_by_a_number(value, wanted):
    assert read_request(asking(logprobs=value)).logprobs is wanted


FIELDS = ["messages", "tools", "tool_choice", "stop", "stream", "stream_options", "n", "logprobs", "max_tokens",
          "max_completion_tokens", "response_format", "top_logprobs", "temperature", "model"]  # fmt: skip
MESSAGE = ["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"]
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("a\ud800")
JSON = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*MESSAGE, "type", "text", "function", "arguments", "id"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(field=st.sampled_from(FIELDS), inside=st.none() | st.sampled_from(MESSAGE), value=JSON)
def test_any_json_in_any_field_is_read_or_refused(field, inside, value):
    body: dict[str, Any] = asking()
    if inside is None:
        body[field] = value
    else:
        body["messages"].append({"role": "assistant", "content": "x", inside: value})
    try:
        read = read_request(json.loads(json.dumps(body)))
    except RequestError as error:
        str(error).encode()
    else:
        assert isinstance(read, ChatRequest)
