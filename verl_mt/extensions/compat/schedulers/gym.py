"""Episodes: schedulers whose conversation is played in an environment, in this process or behind an OpenEnv server."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import threading
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.user_values import bool_of, number_of
from verl_mt.errors import DataError, PluginError
from verl_mt.extensions.compat.schedulers.base import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.requests import ChatCompletionResponseChoice, RolloutInferRequest
from verl_mt.extensions.compat.schedulers.swift_names import COMPAT
from verl_mt.plugins import Registry, load_object
from verl_mt.user_code import in_daemon_thread

_ENV_KEY = "actor_rollout_ref.rollout.multi_turn.scheduler_kwargs.env"

environments: Registry[Any] = Registry("environment")
envs = COMPAT.names(environments)
"""`envs['mine'] = MyEnv` registers an environment by name."""


class Env:
    """Base of environments that read messages, in ms-swift's manner. Methods may be async or plain.

    An environment that is no subclass is taken for one in Gymnasium's manner: `reset(options=env_config)` returns
    (observation, info), `step(text)` returns (observation, reward, terminated, truncated, info).
    """

    def __init__(self, env_config: dict[str, Any] | None = None):
        self.env_config = env_config or {}

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """(first observation, info, system message or "")."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset(config)")

    async def step(self, action: list[Message]) -> tuple[str, float, bool, dict[str, Any]]:
        """(observation, reward, done, info) after the model's newest message, the last of `action`."""
        raise NotImplementedError(f"{type(self).__name__} must implement step(action)")

    async def close(self) -> None:
        """Called exactly once, whatever ended the episode."""


class GYMScheduler(MultiTurnScheduler):
    """Plays episodes. The first observation is the prompt; each of the model's turns is an action, one that a length
    limit cut too: what it is worth is up to the environment.

    What the environment gave is in `rollout_infos`: `total_reward`, `step_rewards`, `gym_done`, `trajectory_info`
    (`reward.path=gym` scores by the first).

    A subclass may replace `_create_env`, or any of the hooks.

    Args:
        env: registered name, dotted path or `file.py:Name` of the environment; None = the row's `env_config.name`.
        env_config: its argument; the row's `env_config` wins over it.
    """

    def __init__(
        self,
        max_turns: int | None = None,
        *args: Any,
        env: str | None = None,
        env_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(max_turns, *args, **kwargs)
        self.env_config = dict(env_config or {})
        self.env = env
        if env is not None:
            load_object(env, what=_ENV_KEY, registry=environments)
        self._envs: dict[str, Any] = {}
        self._pending_obs: dict[str, Any] = {}
        """What the model reads next; None = nothing is put behind its turn."""
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._trajectory_infos: dict[str, list[dict[str, Any]]] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Make the environments; their first observations are the prompts."""
        for request in requests:
            name = str(request.uuid)
            await self._close_and_remove(name)
            env = self._envs[name] = self._create_env(_row_config(request))
            request.messages, info = await self._reset(env, request)
            self._begin(name, info)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Take the action."""
        name = str(infer_request.uuid)
        env = self._envs.get(name)
        if env is None:
            return {"done": True}
        if response_choice.finish_reason == "abort":
            return {}
        return await self._taken(name, *await self._act(env, infer_request, response_choice))

    async def _act(
        self, env: Any, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice
    ) -> tuple[Any, float, bool, dict[str, Any]]:
        """(observation, reward, done, info) of the turn's action."""
        return await self._step(env, infer_request.messages)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The next observation is a user's turn."""
        observation = self._pending_obs.pop(str(infer_request.uuid), None)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest, reason: str) -> None:
        """Close the environment, where the episode's end has not."""
        await self._close_and_remove(str(infer_request.uuid))

    def _begin(self, uuid: str, info: dict[str, Any]) -> None:
        self._total_rewards[uuid], self._step_rewards[uuid], self._trajectory_infos[uuid] = 0.0, [], [info]

    async def _taken(
        self, uuid: str, observation: Any, reward: float, done: bool, info: dict[str, Any]
    ) -> dict[str, Any]:
        """Keep what an action brought; what `on_turn_end` returns."""
        self._pending_obs[uuid] = None if done else observation
        self._total_rewards[uuid] += reward
        self._step_rewards[uuid].append(reward)
        self._trajectory_infos[uuid].append(info)
        infos = {
            "total_reward": self._total_rewards[uuid],
            "step_rewards": list(self._step_rewards[uuid]),
            "gym_done": done,
            "trajectory_info": list(self._trajectory_infos[uuid]),
        }
        if done:
            await self._close_and_remove(uuid)
        return {"rollout_infos": infos} | ({"done": True} if done else {})

    async def _close_and_remove(self, uuid: str) -> None:
        """Close a trajectory's environment, once, and forget its state; nothing where there is none."""
        env = self._envs.pop(uuid, None)
        for kept in (self._pending_obs, self._total_rewards, self._step_rewards, self._trajectory_infos):
            kept.pop(uuid, None)
        if env is not None:
            await _call(env.close)

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        """An environment for a row's `env_config`."""
        name = env_config.get("name", self.env)
        if name is None:
            raise DataError(f"no environment: give {_ENV_KEY}, or the column env_config with a name")
        kind = load_object(name, what="env_config.name", registry=environments)
        config = {**self.env_config, **env_config}
        if issubclass(kind, Env):
            return kind(config)
        config.pop("name", None)
        return kind(**config)

    async def _reset(self, env: Any, request: RolloutInferRequest) -> tuple[list[Message], dict[str, Any]]:
        """The first prompt. Without a system message of the environment the row's stays; without an observation its
        whole prompt does."""
        if isinstance(env, Env):
            observation, info, system = await _call(env.reset, request)
        else:
            (observation, info), system = await _call(env.reset), ""
        if not observation:
            return request.messages, dict(info or {})
        opening = [m for m in request.messages if m["role"] == "system"]
        if system:
            opening = [{"role": "system", "content": system}]
        return [*opening, {"role": "user", "content": str(observation)}], dict(info or {})

    async def _step(self, env: Any, messages: list[Message]) -> tuple[str, float, bool, dict[str, Any]]:
        if isinstance(env, Env):
            observation, reward, done, info = await _call(env.step, copy.deepcopy(messages))
        else:
            observation, reward, terminated, truncated, info = await _call(env.step, messages[-1]["content"])
            done = bool_of(terminated, "terminated") or bool_of(truncated, "truncated")
        return str(observation), number_of(reward, "the reward"), bool_of(done, "done"), dict(info or {})


GymScheduler = GYMScheduler
"""The same under the name that the library's pages use."""


async def _call(method: Any, *args: Any) -> Any:
    """Plain methods run in threads: a slow environment delays no other. Runs on the scheduler's loop.
    Waits for the environment."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    return await in_daemon_thread(method, *args)


def _row_config(request: RolloutInferRequest) -> dict[str, Any]:
    """The column `env_config` of a request's row.

    Raises:
        DataError: it is no mapping; or the row asks for a context manager, which nothing calls.
    """
    own = request.data_dict.get("env_config") or {}
    if not isinstance(own, dict):
        raise DataError(f"column env_config must be a mapping, got {own!r:.100}")
    manager = request.data_dict.get("ctx_config")
    if manager:
        raise DataError(
            f"column ctx_config is {manager!r:.100}: context managers are not called. A scheduler's step may rewrite "
            "infer_request.messages, and a new record begins there"
        )
    return own


class OpenEnvWrapper:
    """A connection to an environment behind an OpenEnv server. Its methods block.

    Args:
        env_config: `base_url` of the server, `reset_kwargs` for each reset.

    Raises:
        PluginError: the package openenv is not installed.
    """

    def __init__(self, env_config: dict[str, Any]):
        if importlib.util.find_spec("openenv") is None:
            raise PluginError(
                "OpenEnvScheduler speaks to its server with the package openenv, which is not installed: pip install "
                "openenv. An environment in this process is an Env (gym_scheduler). A scheduler whose _create_env "
                "returns an object with reset, step and close needs no package"
            )
        self.base_url = str(env_config.get("base_url", "http://localhost:8000"))
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """(observation, metadata) as the server gives them."""
        result = self._connected().reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """(observation, reward, done, metadata) as the server gives them; no reward counts 0."""
        result = self._connected().step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """End the connection. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def _connected(self) -> Any:
        if self._client is None:
            from openenv.core.generic_client import GenericEnvClient  # an extra of the user's

            self._client = GenericEnvClient(base_url=self.base_url).sync().__enter__()
        return self._client


class OpenEnvScheduler(GYMScheduler):
    """Plays episodes in environments behind OpenEnv servers: `env_config` of a row names the server (`base_url`), and
    may hold a `system_message` and `reset_kwargs`.

    A subclass may replace `_create_env` (anything with blocking `reset`, `step` and `close` will do), `parse_action`,
    `format_observation`, or the hooks.
    """

    max_concurrent_envs = 4
    """Episodes that begin at once, in all trajectories."""
    env_config_defaults: dict[str, Any] = {}
    """For what a row's `env_config` does not say."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._starting = threading.BoundedSemaphore(self.max_concurrent_envs)

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        """The connection for a row's `env_config`."""
        return OpenEnvWrapper(env_config)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Connect; the first observation is the prompt, behind the row's `system_message`."""
        for request in requests:
            name = str(request.uuid)
            await self._close_and_remove(name)
            config = {**self.env_config_defaults, **self.env_config, **_row_config(request)}
            env = self._envs[name] = self._create_env(config)
            observation, info = await _call(self._reset_one, env)
            system = config.get("system_message")
            opening: list[Message] = [{"role": "system", "content": str(system)}] if system else []
            request.messages = [*opening, {"role": "user", "content": self.format_observation(observation)}]
            self._begin(name, {"metadata": info} if info is not None else {})

    async def _act(
        self, env: Any, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice
    ) -> tuple[Any, float, bool, dict[str, Any]]:
        """Send what the turn says."""
        action = self.parse_action(response_choice.message.content or "")
        observation, reward, done, info = await _call(env.step, action)
        done = bool_of(done, "done")
        shown = None if done else self.format_observation(observation)
        return shown, number_of(reward, "the reward"), done, {"metadata": info} if info is not None else {}

    def parse_action(self, text: str) -> Any:
        """The action that a turn says: its JSON object, in a fence or not; else the text as `message`."""
        text = text.strip()
        lines = text.splitlines()
        if len(lines) > 1 and lines[0].startswith("```") and lines[-1].strip().startswith("```"):
            text = "\n".join(lines[1:-1]).strip()
        try:
            found = json.loads(text)
        except ValueError:
            return {"message": text}
        return found if isinstance(found, dict) else {"message": str(found)}

    def format_observation(self, observation: Any) -> Any:
        """What the model reads of an observation: its JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)

    def _reset_one(self, env: Any) -> Any:
        with self._starting:
            return env.reset()
