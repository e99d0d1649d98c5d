"""The base class of tools. A verl tool runs after `verl.` -> `verl_mt.` in its imports."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, as_tool_schema


class BaseTool:
    """A tool that the model may call.

    One object per process and YAML entry, shared by all trajectories: limits and caches live on it. What belongs to one
    trajectory lives under an `instance_id`, one per trajectory and tool::

        create -> execute, execute, ... -> calc_reward -> release

    `create` runs before the first call (at the start of the trajectory where its row gives `create_kwargs`).
    `calc_reward` and `release` run exactly once for every created instance, whatever happened in between.

    Each method may be `async def` or a plain `def` (which runs in a thread). Calls that the model wrote into one turn
    run concurrently, also on the same instance, unless the class says `in_order = True`.

    Args:
        config: the entry's `config`.
        tool_schema: the entry's `tool_schema`, or a dict of that form. None = what the class's
            `get_openai_tool_schema` returns.

    Raises:
        PluginError: the schema is no OpenAI tool schema.
    """

    runs_inline: bool = False
    """True: no method ever blocks, so all run on the rollout's own loop, without a thread. For cheap pure code only."""

    call_timeout_s: float | None = None
    """Deadline of one call in seconds, where it is shorter than the run's `multi_turn.tool_timeout_s`."""
    max_concurrency: int | None = None
    """Calls that run at once. None, or more than it = the run's `multi_turn.tool_concurrency`. A call's deadline begins
    when it has its slot."""
    in_order: bool = False
    """Calls of one turn to tools that say True run one after the other, in the order written."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None):
        self.config = config
        given = tool_schema or self.get_openai_tool_schema()
        self.tool_schema = as_tool_schema(given, f"tool_schema of {type(self).__name__}")
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema that chat templates show to the model. Override it for a custom schema. A dict
        will do.

        Raises:
            ValueError: neither the YAML entry nor the class has one.
        """
        schema = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no tool schema: give the YAML entry, or the constructor, a tool_schema, "
                "or override get_openai_tool_schema()"
            )
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str | tuple[str, ToolResponse]:
        """Make what one trajectory needs.

        Args:
            instance_id: the id that verl_mt proposes, unique per trajectory and tool. None = choose one.
            kwargs: the row's `extra_info.tools_kwargs[name].create_kwargs`.

        Returns:
            The id to use from now on, alone or with a response, which the model sees before the first call's result.
        """
        return (instance_id or str(uuid4())), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse | str, float, dict[str, Any]]:
        """Run one call.

        Args:
            instance_id: from `create`.
            parameters: the call's arguments, valid by the schema. A copy that the tool may change.
            kwargs: the row's `execute_kwargs`, and `agent_data`, the trajectory as verl's tools know it
                (`verl_mt.tools.agent_data.AgentData`). An `execute` with neither that name nor `**kwargs` gets none.

        Returns:
            (response, step reward, metrics). The reward and the metrics may be left out or None. A response may also be
            a str or a dict (shown as JSON). Numbers among the metrics reach the step's metrics as
            `tools/<name>/<metric>`, the mean per call.

        Raises:
            ToolCallError: the model's mistake. Its text is shown to the model.
            Exception: the tool's failure. The model is told that the tool failed.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement execute(instance_id, parameters, **kwargs)")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The instance's reward when the trajectory is over. kwargs: the row's `calc_reward_kwargs`."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free what `create` made. kwargs: the row's `release_kwargs`."""

    async def close(self) -> None:
        """The run is over: free what belongs to the tool itself (connections, processes). Called once."""


def reads_nested_kwargs(kind: type) -> bool:
    """Whether a `create` of the class mentions `create_kwargs`.

    verl passes the row's arguments flat in one place and as one dict of this name in another, and tools were written
    for either.
    """
    for owner in kind.__mro__:
        code = getattr(owner.__dict__.get("create"), "__code__", None)
        if code is not None and "create_kwargs" in (*code.co_consts, *code.co_varnames):
            return True
    return False
