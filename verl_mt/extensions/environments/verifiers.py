"""verifiers: its environments and tasksets, played by its own loops. The policy answers their requests.

    env = vf.SingleTurnEnv(dataset=..., rubric=...)     # or vf.load_environment(...), or a taskset
    run, reward, rows = parts(env)

The loop, the tools and the scores are the package's. Your configuration names the three parts by path
(docs/environments.md).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from verl_mt.errors import PluginError, value_text

_NO_PROMPT = [{"role": "user", "content": ""}]
"""Of a task whose conversation its environment begins: the first request replaces it."""
_MOST_TASKS = 1024
"""Rows of a taskset that never ends."""
_REFUSED = "no further turn"
"""In what the endpoint says when a limit of the run has ended the conversation."""
Scored = dict[str, float]


class Parts(NamedTuple):
    """What a run needs."""

    run: Callable[[dict[str, Any], str, str], Awaitable[Scored]]
    """For `rollout.agent_function_path`."""
    reward: Callable[..., Scored]
    """For `reward.path`."""
    rows: Callable[..., list[dict[str, Any]]]
    """For `data.train_files` and `data.val_files`."""


def parts(env: Any, agent: Any = None) -> Parts:
    """The parts of a run that plays an environment of verifiers.

    Args:
        env: an environment of verifiers 0.1 (`SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`, `StatefulToolEnv`, ...), or a
            `Taskset` of verifiers 0.3 and newer (`verifiers.v1`).
        agent: for a `Taskset`: the `AgentConfig` that plays its tasks. None = the `null` harness, as a process of this
            machine: the model's only tools are the task's.

    Raises:
        PluginError: it is none of these.
    """
    if callable(getattr(env, "run_rollout", None)) and callable(getattr(env, "get_dataset", None)):
        source: Any = _Environment(env)
    elif callable(getattr(env, "load", None)):
        source = _Taskset(env, _played_by(agent))
    else:
        raise PluginError(f"{value_text(env, 80)} is neither an environment nor a taskset of verifiers")

    async def run(row: dict[str, Any], base_url: str, api_key: str) -> Scored:
        """Runs on the agents' loop. Waits for the environment, and that for the policy's answers."""
        return await source.play(row["task"], row["split"], base_url, api_key)

    def reward(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Scored:
        # A conversation that a limit ended may have no score.
        return (extra_info or {}).get("rollout_infos", {}).get("agent") or {"score": 0.0}

    def rows(*, num_rows: int, seed: int, split: str) -> list[dict[str, Any]]:
        found = itertools.islice(enumerate(source.prompts(split)), num_rows if num_rows >= 0 else None)
        return [
            {
                "task": number,
                "split": split,
                "prompt": prompt or _NO_PROMPT,
                "data_source": "verifiers",
                "ground_truth": None,
            }
            for number, prompt in found
        ]

    return Parts(run, reward, rows)


class _Environment:
    """An environment of verifiers 0.1."""

    def __init__(self, env: Any):
        import openai

        self._env = env
        self._client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)
        self._datasets: dict[str, Any] = {}

    def prompts(self, split: str) -> Sequence[Any]:
        return [_plain(row["prompt"]) for row in self._rows(split)]

    async def play(self, number: int, split: str, base_url: str, api_key: str) -> Scored:
        from verifiers.clients import OpenAIChatCompletionsClient

        client = OpenAIChatCompletionsClient(self._client.with_options(base_url=base_url, api_key=api_key))
        played = await self._env.run_rollout(dict(self._rows(split)[number]), client, "policy", {})
        _check(played.get("error"))
        return _scores(played["reward"], played.get("metrics"))

    def _rows(self, split: str) -> Any:
        if split not in self._datasets:
            self._datasets[split] = self._env.get_dataset() if split == "train" else self._env.get_eval_dataset()
        return self._datasets[split]


class _Taskset:
    """A taskset of `verifiers.v1`."""

    def __init__(self, taskset: Any, agent: Any):
        self._tasks: Any = None
        self._taskset, self._agent = taskset, agent

    def prompts(self, split: str) -> list[Any]:
        return [_messages(task.data) for task in self._all()]

    async def play(self, number: int, split: str, base_url: str, api_key: str) -> Scored:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var="VERL_MT_POLICY_KEY")  # the address is the secret
        agent = vf.make_agent(self._agent.model_copy(update={"model": "policy", "client": client}))
        trace = await agent.run(self._all()[number])
        _check(*trace.errors[-1:])
        return _scores(trace.reward, trace.metrics)

    def _all(self) -> list[Any]:
        if self._tasks is None:
            self._tasks = list(self._taskset if self._taskset.bounded else self._taskset.take(_MOST_TASKS))
        return self._tasks


def _played_by(agent: Any) -> Any:
    if agent is not None:
        return agent
    import verifiers.v1 as vf

    return vf.AgentConfig.model_validate({"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})


def _check(error: Any = None) -> None:
    """Raises RuntimeError: the environment failed. A limit of the run that ended the conversation is no failure."""
    if error and _REFUSED not in str(error):
        raise RuntimeError(f"verifiers: {error}")


def _scores(reward: Any, metrics: Any) -> Scored:
    named = {name: float(value) for name, value in dict(metrics or {}).items() if isinstance(value, int | float)}
    return {**named, "score": float(reward)}


def _messages(data: Any) -> list[dict[str, Any]]:
    """The first messages of a task."""
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _plain(data.prompt or [])
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *prompt]


def _plain(value: Any) -> Any:
    """Messages of the package as dictionaries, without empty fields."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return (
        {k: v for k, v in value.items() if v is not None}
        if isinstance(value, dict)
        else json.loads(json.dumps(value, default=str))
    )
