"""`gym_scheduler`: the conversation is an episode in an environment with `reset`, `step` and `close`."""

from __future__ import annotations

import inspect
from typing import Any

from verl_mt.data.checks import bool_of, number_of
from verl_mt.data.conversation import Message
from verl_mt.data.requests import RequestConfig, RolloutInferRequest, RolloutOutput
from verl_mt.errors import DataError
from verl_mt.plugins import Registry, load_object
from verl_mt.rollout.schedulers.base import MultiTurnScheduler
from verl_mt.user_code import in_daemon_thread

KEY = "actor_rollout_ref.rollout.multi_turn.scheduler_kwargs.env"

envs: Registry[Any] = Registry("environment")
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


class GymScheduler(MultiTurnScheduler):
    """Plays episodes. The first observation is the prompt; each of the model's turns is an action.

    An action that a length limit cut is not taken. The last allowed turn's is: it may earn the reward. What the
    environment gave is in `rollout_infos`: `total_reward`, `step_rewards`, `gym_done`, `trajectory_info`
    (`reward.path=gym` scores by the first).

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
            load_object(env, what=KEY, registry=envs)
        self._open: dict[str, Any] = {}

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> RolloutOutput:
        """One episode."""
        env = self._open[str(infer_request.uuid)] = self._make(infer_request)
        infer_request.messages, infos = await self._reset(env, infer_request)
        info: dict[str, Any] = {"total_reward": 0.0, "step_rewards": [], "gym_done": False, "trajectory_info": [infos]}
        turn = 0
        while True:
            turn += 1
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            output = RolloutOutput(response, rollout_infos=info, whole=True)
            if choice.finish_reason != "stop":
                return output
            observation, reward, done, step_info = await self._step(env, infer_request.messages)
            info["total_reward"] += reward
            info["step_rewards"].append(reward)
            info["trajectory_info"].append(step_info)
            info["gym_done"] = done
            if done or await self._is_over(infer_request, choice, turn):
                return output
            infer_request.messages.append({"role": "user", "content": observation})

    async def on_trajectory_end(self, infer_request: RolloutInferRequest, reason: str) -> None:
        """Close the environment."""
        env = self._open.pop(str(infer_request.uuid), None)
        if env is not None:
            await _call(env.close)

    def _make(self, infer_request: RolloutInferRequest) -> Any:
        own = infer_request.data_dict.get("env_config") or {}
        if not isinstance(own, dict):
            raise DataError(f"column env_config must be a mapping, got {own!r:.100}")
        name = own.get("name", self.env)
        if name is None:
            raise DataError(f"no environment: give {KEY}, or the column env_config with a name")
        kind = load_object(name, what="env_config.name", registry=envs)
        config = {**self.env_config, **{k: v for k, v in own.items() if k != "name"}}
        return kind(config) if issubclass(kind, Env) else kind(**config)

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
            observation, reward, done, info = await _call(env.step, messages)
        else:
            observation, reward, terminated, truncated, info = await _call(env.step, messages[-1]["content"])
            done = bool_of(terminated, "terminated") or bool_of(truncated, "truncated")
        return str(observation), number_of(reward, "the reward"), bool_of(done, "done"), dict(info or {})


async def _call(method: Any, *args: Any) -> Any:
    """Plain methods run in threads: an environment that thinks holds up nobody else."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    return await in_daemon_thread(method, *args)
