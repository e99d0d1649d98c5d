"""The rollout driver for slime's `async generate(args, sample, sampling_params)`, named by a dotted path.

The function runs as it was written; only its imports change::

    from verl_mt.rollout.custom_generate import GenerateState, Sample, post

`post` finds the session of the call that it is made in (a context variable), so the engine's answer is recorded before
the function sees it, and what the function returns is checked against the record.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from verl_mt.config.schema import Config
from verl_mt.data.conversation import Message
from verl_mt.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineGoneError,
    PluginError,
    UserCodeError,
    error_text,
)
from verl_mt.extensions.compat.generate.args import ROUTER_HOST, GenerateArgs, args_of, runtime_of, sampling_dict
from verl_mt.extensions.compat.generate.requests import CallConversations
from verl_mt.extensions.compat.generate.returned import settle
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.extensions.toolbox.editing.session import EditableSession, session_of
from verl_mt.plugins import load_object
from verl_mt.rewards.base import RewardFailure, RewardInput, score_all
from verl_mt.rollout.drivers import DriverParts, Episode, RolloutDriver
from verl_mt.user_code import CallTimeout, UserCode, is_async_callable

_GRACE = 0.1
"""Share of its time for a function to end in after it was told that the time is over."""
DEADLINE_S = 120.0
"""Seconds after which a request fails, its repetitions included."""

_GROUP_NAMES = ("group", "samples", "data_source", "data_buffer")
"""Second parameters of functions that roll out more than one sample: slime has such, and hooks for them."""

_CLIENTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


class _Call:
    """One call of the function: where its requests go, across threads."""

    def __init__(self, episode: Episode, conversations: CallConversations):
        self.episode = episode
        self.conversations = conversations
        self.num_tool_turns = 0
        self._loop = asyncio.get_running_loop()

    async def on_rollout_loop(self, coroutine: Any) -> Any:
        """Await something that belongs to the rollout's loop from the function's. Runs on the loop of the function's
        thread. Waits for the rollout's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


_CALL: contextvars.ContextVar[_Call] = contextvars.ContextVar("verl_mt_generate_call")
_OWN: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("verl_mt_conversations", default=())
"""The conversations that this task, or the one that started it, has had."""


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None, action: str = "post"
) -> Any:
    """A JSON POST. To the router's `/generate` it is a turn of this call's conversation; elsewhere it is HTTP.

    Args:
        url: `http://{args.sglang_router_ip}:{args.sglang_router_port}/generate`, or a server of your own.
        payload: for the engine `text` or `input_ids`, `sampling_params`, `return_logprob`.
        max_retries: of an HTTP request whose server is down or busy (4xx is never repeated).
        action: another method than POST, for a server of your own.

    Returns:
        For the engine the shape of SGLang's reply (`api.reply_to`); else the JSON, or the text.

    Raises:
        EngineError: asked outside of a generate function, or not for `/generate`.
        LedgerError: a payload that cannot be served; says why.
        UserCodeError: the HTTP request failed for good.
    """
    address = urlsplit(url)
    if address.hostname != ROUTER_HOST:
        return await http_post(url, payload, max_retries=max_retries, headers=headers, method=action.upper())
    if address.path.rstrip("/") != "/generate":
        raise EngineError(f"{address.path}: of the router only /generate is offered to generate functions")
    call = _current("post to the engine")
    own = _OWN.get()
    number, reply = await call.on_rollout_loop(call.conversations.post(payload, own))
    if number >= 0 and number not in own:
        _OWN.set((*own, number))
    return reply


async def get(url: str) -> Any:
    """The JSON (else the text) of the user's server.

    Raises:
        UserCodeError: no answer, or not a good one.
    """
    try:
        response = await _client().get(url, timeout=DEADLINE_S)
    except httpx.HTTPError as error:
        raise UserCodeError(f"GET {url}: {type(error).__name__}: {error}") from error
    if not response.is_success:
        raise UserCodeError(f"GET {url}: HTTP {response.status_code}: {response.text[:300]}")
    return _content(response)


async def http_post(
    url: str,
    payload: Any,
    *,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    method: str = "POST",
) -> Any:
    """The JSON that a server answers, or its text where it is none.

    What the request itself is to blame for (4xx) is not repeated; a server that is down, busy or broken (no answer,
    429, 5xx) is asked again, later each time, until `max_retries` or `deadline_s` is used up.

    Raises:
        UserCodeError: the last answer, and how often it was asked.
    """
    give_up = time.monotonic() + deadline_s
    client, wait_s = _client(), 0.1
    for attempt in range(1, max_retries + 2):
        left = give_up - time.monotonic()
        try:
            response = await client.request(method, url, json=payload, headers=headers, timeout=max(left, 0.01))
            if response.is_success:
                return _content(response)
            problem = f"HTTP {response.status_code}: {response.text[:300]}"
            if response.status_code < 500 and response.status_code != 429:
                raise UserCodeError(f"{method} {url}: {problem}")
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt > max_retries or time.monotonic() + wait_s >= give_up:
            raise UserCodeError(f"{method} {url}: {problem} ({attempt} attempts, {deadline_s:g} s allowed)")
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, 10.0)
    raise AssertionError("unreachable: the last attempt raises")


def _client() -> httpx.AsyncClient:
    """One per event loop: its connections belong to the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        _CLIENTS[loop] = httpx.AsyncClient(limits=httpx.Limits(max_connections=1024))
    return _CLIENTS[loop]


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


async def batched_async_rm(args: Any, samples: Sequence[Sample]) -> list[float]:
    """Scores of samples by the run's reward function, in one call, in their order.

    Raises:
        EngineGoneError: a service that the reward asks is down; the episode starts again.
        UserCodeError: a sample that could not be scored; names it.
    """
    if not samples:
        return []
    reward, call = runtime_of(args).reward, _current("batched_async_rm")
    inputs = [_reward_input(sample, call) for sample in samples]
    results = await call.on_rollout_loop(score_all(reward, inputs))
    for result in results:
        if isinstance(result, RewardFailure) and result.kind == "unavailable":
            call.conversations.lost = EngineGoneError(result.error)
            raise call.conversations.lost
        if isinstance(result, RewardFailure):
            raise UserCodeError(result.error)
    return [scores["score"] for scores in results]


async def async_rm(args: Any, sample: Sample) -> float:
    """Score one sample with the run's reward function."""
    return (await batched_async_rm(args, [sample]))[0]


def load_function(path: str) -> Any:
    """The object at a dotted path, or `file.py:name`.

    Raises:
        PluginError: nothing there.
    """
    return load_object(path, what="load_function")


async def call_tools(text: str) -> tuple[Message, list[Message]]:
    """Run the calls that an assistant turn holds, with the run's own tools, parser, limits and deadlines.

    Args:
        text: the turn, without its end-of-turn token (`chat.turn_text(reply["output_ids"])`).

    Returns:
        The turn as a message with its `tool_calls`, and the tools' answers; no answers where there are no calls.

    Raises:
        ConfigError: no tools are configured.
    """
    call = _current("call_tools")
    tools, parser = call.episode.tools, call.conversations.parser
    if tools is None or parser is None:
        raise ConfigError("call_tools: no tools are configured. Name them in rollout.tool_kwargs.tools_config_file")
    call.num_tool_turns += 1
    chat, turn = call.episode.session.context.chat, call.num_tool_turns
    parsed = parser.parse(text, call.episode.prompt.tools, in_reasoning=chat.prefilled_reasoning)
    parsed = parsed.with_ids(f"call_{turn}_")
    results = await call.on_rollout_loop(tools.run(parsed.actions, turn=turn)) if parsed.actions else []
    lost = [result for result in results if result.failure == "infrastructure"]
    if lost:
        call.conversations.lost = EngineGoneError(f"tool {lost[0].name!r}: {lost[0].text}")
        raise call.conversations.lost
    message: Message = {"role": "assistant", "content": parsed.content if parsed.reasoning is None else text}
    if parsed.calls and not parser.calls_in_content:
        message["tool_calls"] = [one.to_message() for one in parsed.calls]
    return message, [result.to_message() for result in results]


class CustomGenerateDriver(RolloutDriver):
    """Drives every episode with one function.

    Args:
        config: `rollout.custom_generate_*` names the function and its settings.
        args: what the function gets; a copy for every call.

    Raises:
        PluginError: nothing there.
        ConfigError: it is no generate function.
    """

    session_class = EditableSession

    def __init__(self, config: Config, args: GenerateArgs):
        rollout = config.actor_rollout_ref.rollout
        path = rollout.custom_generate_function_path
        assert path is not None
        self._function = _GenerateFunction(path)
        self._code = UserCode(self._function, object, "verl_mt-generate")
        self._args = args
        self._render = config.data.apply_chat_template
        self._prompt_key = config.data.prompt_key

    async def run(self, episode: Episode) -> None:
        """Runs on the rollout's loop. Waits for the function, in its own thread."""
        session = session_of(episode)
        shown = self._shown_prompt(episode)
        text = shown if isinstance(shown, str) and self._render else None
        conversations = CallConversations(session, episode.prompt, text, self._function.trust_text)
        sample, row = self._new_sample(episode, shown), episode.prompt.row
        sampling = sampling_dict(session.context.sampling, session.context.limits)
        token = _CALL.set(_Call(episode, conversations))
        timeout_s = session.context.limits.conversation_s * (1 + _GRACE) + 0.2
        try:
            result = await self._code.call(
                "generate",
                (self._args.copy(), sample, sampling, episode.place.evaluation),
                {},
                timeout_s=timeout_s,
            )
        except DeadlineError:
            raise
        except Exception as error:
            if conversations.lost is not None:
                raise conversations.lost from error
            what = (
                f"gave no Sample within {timeout_s:g} s (rollout.max_seconds)"
                if isinstance(error, CallTimeout)
                else error_text(error, named=True)
            )
            raise UserCodeError(f"generate function {self._function.path}, row {row.index + 1}: {what}") from error
        finally:
            _CALL.reset(token)
            await conversations.close()
        if conversations.lost is not None:
            raise conversations.lost
        episode.outcome = await settle(result, conversations, self._function.path, self._args)

    def _shown_prompt(self, episode: Episode) -> str | list[dict[str, Any]]:
        """What `sample.prompt` is."""
        prompt, chat = episode.prompt, episode.session.context.chat
        if not self._render:
            return prompt.row.raw.get(self._prompt_key, prompt.messages)
        if prompt.truncated:
            return chat.decode(prompt.ids)
        return chat.full_text(prompt.messages, prompt.tools or None, add_generation_prompt=True)

    @staticmethod
    def _new_sample(episode: Episode, shown: str | list[dict[str, Any]]) -> Sample:
        row, place = episode.prompt.row, episode.place
        return Sample(
            group_index=place.group,
            index=place.sample,
            prompt=copy.deepcopy(shown),
            label=copy.deepcopy(row.label),
            metadata=copy.deepcopy(row.metadata),
            session_id=episode.session.trajectory.trajectory_id,
        )


def build(config: Config, parts: DriverParts) -> CustomGenerateDriver:
    """The rollout driver that `rollout.custom_generate_function_path` asks for."""
    return CustomGenerateDriver(config, args_of(config, parts))


class _GenerateFunction:
    """The user's function behind one name, however it takes `evaluation`."""

    def __init__(self, path: str):
        key = "actor_rollout_ref.rollout.custom_generate_function_path"
        self.path = path
        self._function = load_object(path, what=key)
        if not callable(self._function):
            raise PluginError(f"{key}: {path} is {self._function!r:.80}, expected a function")
        if isinstance(self._function, type) or not is_async_callable(self._function):
            raise ConfigError(f"{key}: {path} must be an async function: async def generate(args, sample, params)")
        parameters = inspect.signature(self._function).parameters
        try:
            inspect.signature(self._function).bind(None, None, None)
        except TypeError as error:
            raise ConfigError(
                f"{key}: {path}({', '.join(map(str, parameters.values()))}) cannot be called as "
                f"generate(args, sample, sampling_params[, evaluation]): {error}"
            ) from error
        second = list(parameters)[1]
        if second in _GROUP_NAMES:
            raise ConfigError(
                f"{key}: {path} takes {second}, a group of samples. A whole rollout cannot be replaced. Write "
                "generate(args, sample, sampling_params) for one sample. A reward that compares a group is "
                "reward_func(args, samples)"
            )
        self.trust_text = bool(getattr(self._function, "trust_text", False))
        self._takes_evaluation = "evaluation" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def generate(self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
        extra = {"evaluation": evaluation} if self._takes_evaluation else {}
        return await self._function(args, sample, sampling_params, **extra)


def _current(what: str) -> _Call:
    call = _CALL.get(None)
    if call is None:
        raise EngineError(
            f"{what}: there is no conversation here. It works inside a generate function that the rollout called "
            "(rollout.custom_generate_function_path), in its tasks, and nowhere else"
        )
    return call


def _reward_input(sample: Sample, call: _Call) -> RewardInput:
    row, trajectory = call.episode.prompt.row, call.episode.session.trajectory
    match = call.conversations.match(sample)
    session = match[0].session if match is not None else None
    texts = session.trajectory.turn_texts if session is not None else [sample.response]
    sample.turn_texts = list(texts)
    return RewardInput(
        data_source=row.data_source,
        solution_str="\n".join(texts),
        completion=texts[-1] if texts else "",
        ground_truth=row.ground_truth,
        extra_info={
            **row.extra_info,
            "messages": session.messages if session is not None else [],
            "num_turns": len(texts),
            "rollout_infos": {},
            "trajectory_id": trajectory.trajectory_id,
        },
        row=row.raw,
        source=sample,
        prompt_id=trajectory.prompt_id,
        run=call.episode.place.run,
        decode_response=lambda: sample.response,
    )
