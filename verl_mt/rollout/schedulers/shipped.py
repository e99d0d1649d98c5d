"""The schedulers that ship with the library, and the registry that finds schedulers by name.

- `math_tip_trick` and `math_tip_trick_multi_turn` tell a model that its answer is wrong: inside its own message, or in
  a turn of its own. Both need the row's `solution` (its ground truth stands in for it), and give a tip at most
  `max_tips` times.
- `thinking_tips_scheduler`: the same for models that think, and forget in production what they thought before.
- `tool_call_scheduler`: ReAct. The model writes an action, the result is put behind it, the model goes on writing.
- `gym_scheduler`: the conversation is an episode in an environment with `reset`, `step` and `close`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.requests import ChatCompletionResponseChoice, RequestConfig, RolloutInferRequest, RolloutOutput
from verl_mt.data.user_values import bool_of, number_of
from verl_mt.errors import DataError, ToolCallError
from verl_mt.plugins import Registry, ReplacingNames, load_object
from verl_mt.rewards.base import rewards
from verl_mt.rewards.math_answer import is_right
from verl_mt.rollout.schedulers.base import MultiTurnScheduler
from verl_mt.tools.calculator import calculate
from verl_mt.user_code import in_daemon_thread

_ENV_KEY = "actor_rollout_ref.rollout.multi_turn.scheduler_kwargs.env"


@dataclass(frozen=True)
class SwiftMeanings:
    """What ms-swift means otherwise than the rest of verl_mt; it holds for what its plug-ins import."""

    names: Callable[[Registry[Any]], Any] = ReplacingNames
    """What its registries are: dicts, in which a name that is taken gets the newer plug-in, with a note."""


COMPAT = SwiftMeanings()

environments: Registry[Any] = Registry("environment")
envs = COMPAT.names(environments)
"""`envs['mine'] = MyEnv` registers an environment by name."""

_CALL = re.compile(r"Action:[ \t]*(?P<tool>[^\n]*?)[ \t]*\nAction Input:[ \t]*(?P<input>[^\n]*)")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class _TipsWhenWrong(MultiTurnScheduler):
    tips_prompt: str

    def __init__(self, max_turns: int | None = None, *args: Any, max_tips: int = 1, **kwargs: Any):
        super().__init__(max_turns, *args, **kwargs)
        self.max_tips = max_tips
        # A subclass may do anything; these only compare texts.
        self.runs_inline = type(self).__module__.startswith("verl_mt.")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Over when the answer is right, or no tip is left."""
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        if "solution" not in infer_request.data_dict:
            raise DataError(f"{type(self).__name__} needs the column solution, or a ground truth; the row has neither")
        answer = str(infer_request.messages[-1]["content"])
        return self._num_tips(infer_request) >= self.max_tips or is_right(answer, infer_request.data_dict["solution"])

    def _num_tips(self, infer_request: RolloutInferRequest) -> int:
        return sum(str(message["content"]).count(self.tips_prompt) for message in infer_request.messages)


class MathTipsScheduler(_TipsWhenWrong):
    """`math_tip_trick`: back to where the model was still thinking, with a doubt put into its mouth.

    The message is cut before its answer and the end of its reasoning; the model goes on behind the doubt, in the same
    message. What it wrote up to the cut stays in training; the doubt, and what was cut, does not.
    """

    tips_prompt = " Wait, there must be a mistake in this. Once more, step by step:"

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Cut, and doubt."""
        message = infer_request.messages[-1]
        text = str(message["content"])
        for end in ("<answer>", "</think>"):
            text = text.partition(end)[0]
        message["content"] = text.rstrip() + self.tips_prompt
        return {"infer_request": infer_request}


class MathTipsMultiTurnScheduler(_TipsWhenWrong):
    """`math_tip_trick_multi_turn`: a user's turn says that the answer is wrong."""

    tips_prompt = "That is not the right answer. Look for the mistake and answer again."

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Ask again."""
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(MathTipsMultiTurnScheduler):
    """Asks again when the answer is wrong; the history that the model then reads holds no reasoning.

    Each turn is a record of its own: it is trained as it was sampled, reasoning included, behind the prompt that the
    model really read. All records share the trajectory's reward (`reward.path=thinking_tips`).
    """

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Forget the reasoning, ask again."""
        infer_request.messages = [_without_reasoning(message) for message in infer_request.messages]
        return super().step(infer_request, response_choice, current_turn)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> list[RolloutOutput]:
        """One output per turn."""
        outputs: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice, turn = response.choices[0], len(outputs) + 1
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            outputs.append(
                RolloutOutput(
                    response,
                    messages=copy.deepcopy(infer_request.messages),
                    response_token_ids=choice.token_ids,
                    rollout_infos={"num_turns": turn},
                )
            )
            if choice.finish_reason == "abort" or await self._is_over(infer_request, choice, turn):
                return outputs
            infer_request = self.step(infer_request, choice, turn)["infer_request"]


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {**message, "content": str(message["content"]).rpartition("</think>")[2].lstrip("\n")}


class ToolCallScheduler(MultiTurnScheduler):
    """Reads `Action:` / `Action Input:` pairs and appends `Observation:` lines to the same message.

    Returns ids and mask of the turn itself, as a scheduler with an environment of its own would: the tool's text is
    never trained. Over when a turn calls nothing.

    Args:
        tools: name -> function of the input's text; a `ToolCallError` is told to the model. None = a calculator.
    """

    def __init__(
        self,
        max_turns: int | None = None,
        *args: Any,
        tools: Mapping[str, Callable[[str], str]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(max_turns, *args, **kwargs)
        self.tools = dict(tools or {"calculator": calculate})
        self.runs_inline = tools is None and type(self) is ToolCallScheduler

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Over without a call."""
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        return not extract_tool_calls(response_choice.message.content or "")

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Run the calls, append what they say."""
        results = [self._run(*call) for call in extract_tool_calls(response_choice.message.content or "")]
        text = "".join(f"\nObservation: {result}" for result in results) + "\n"
        infer_request.messages[-1]["content"] += text
        ids = list(response_choice.token_ids or [])
        observation = self.infer_engine.tokenizer.encode(text, add_special_tokens=False)
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + observation,
            "response_loss_mask": [1] * len(ids) + [0] * len(observation),
            "rollout_infos": {"tool_results": results, "num_turns": current_turn},
        }

    def _run(self, name: str, argument: str) -> str:
        if name not in self.tools:
            return f"<error>there is no tool {name!r}; there is {', '.join(self.tools)}</error>"
        try:
            return str(self.tools[name](argument))
        except ToolCallError as error:
            return f"<error>{error}</error>"


def extract_tool_calls(text: str) -> list[tuple[str, str]]:
    """(tool, input) of every pair, in order; what is written inside `<think>...</think>` is no call."""
    return [(m["tool"], m["input"].strip()) for m in _CALL.finditer(_THOUGHT.sub("", text))]


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
    """Plays episodes. The first observation is the prompt; each of the model's turns is an action.

    An action that a length limit cut is not taken. The last allowed turn's is: it may earn the reward. What the
    environment gave is in `rollout_infos`: `total_reward`, `step_rewards`, `gym_done`, `trajectory_info`
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
        self._pending_obs: dict[str, str] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._trajectory_infos: dict[str, list[dict[str, Any]]] = {}

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Make the environments; their first observations are the prompts."""
        for request in requests:
            name = str(request.uuid)
            own = request.data_dict.get("env_config") or {}
            if not isinstance(own, dict):
                raise DataError(f"column env_config must be a mapping, got {own!r:.100}")
            env = self._envs[name] = self._create_env(own)
            request.messages, info = await self._reset(env, request)
            self._total_rewards[name], self._step_rewards[name], self._trajectory_infos[name] = 0.0, [], [info]

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Take the action."""
        name = str(infer_request.uuid)
        done = False
        if response_choice.finish_reason == "stop":
            observation, reward, done, info = await self._step(self._envs[name], infer_request.messages)
            self._pending_obs[name] = observation
            self._total_rewards[name] += reward
            self._step_rewards[name].append(reward)
            self._trajectory_infos[name].append(info)
        infos = {
            "total_reward": self._total_rewards[name],
            "step_rewards": list(self._step_rewards[name]),
            "gym_done": done,
            "trajectory_info": list(self._trajectory_infos[name]),
        }
        return {"rollout_infos": infos} | ({"done": True} if done else {})

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The next observation is a user's turn."""
        observation = self._pending_obs.pop(str(infer_request.uuid), "")
        infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest, reason: str) -> None:
        """Close the environment."""
        name = str(infer_request.uuid)
        env = self._envs.pop(name, None)
        for kept in (self._pending_obs, self._total_rewards, self._step_rewards, self._trajectory_infos):
            kept.pop(name, None)
        if env is not None:
            await _call(env.close)

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        """An environment for a row's `env_config`."""
        name = env_config.get("name", self.env)
        if name is None:
            raise DataError(f"no environment: give {_ENV_KEY}, or the column env_config with a name")
        kind = load_object(name, what="env_config.name", registry=environments)
        config = {**self.env_config, **{k: v for k, v in env_config.items() if k != "name"}}
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
            observation, reward, done, info = await _call(env.step, copy.deepcopy(messages))
        else:
            observation, reward, terminated, truncated, info = await _call(env.step, messages[-1]["content"])
            done = bool_of(terminated, "terminated") or bool_of(truncated, "truncated")
        return str(observation), number_of(reward, "the reward"), bool_of(done, "done"), dict(info or {})


GymScheduler = GYMScheduler
"""The same under the name that the library's pages use."""


async def _call(method: Any, *args: Any) -> Any:
    """Plain methods run in threads: an environment that thinks holds up nobody else."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    return await in_daemon_thread(method, *args)


schedulers: Registry[Any] = Registry(
    "multi-turn scheduler",
    {
        "math_tip_trick": MathTipsScheduler,
        "math_tip_trick_multi_turn": MathTipsMultiTurnScheduler,
        "thinking_tips_scheduler": ThinkingModelTipsScheduler,
        "tool_call_scheduler": ToolCallScheduler,
        "gym_scheduler": GYMScheduler,
    },
)
multi_turns = COMPAT.names(schedulers)
"""`multi_turns['mine'] = MyScheduler` registers a scheduler by name."""
orms = COMPAT.names(rewards)
"""The rewards of `verl_mt.rewards` as ms-swift's plug-ins see them."""
