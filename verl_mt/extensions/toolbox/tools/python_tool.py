"""A tool that runs the Python code that the model writes, isolated from this machine."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from verl_mt.errors import ToolCallError
from verl_mt.extensions.toolbox.sandbox import CodeResult, Interpreter, Sandbox, SandboxLimits
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl_mt.tools.settings import ToolSettings, parse_settings
from verl_mt.user_code import in_daemon_thread


class PythonToolSettings(ToolSettings):
    """The entry's `config`."""

    keep_state: bool = False
    """One interpreter per trajectory: variables and files stay from call to call. False = a new one for each call."""
    timeout_s: float = Field(10.0, gt=0)
    """Wall-clock time of one call in seconds."""
    memory_mb: int = Field(512, ge=64)
    """Memory of the interpreter in MiB."""
    disk_mb: int = Field(16, ge=1)
    """All files that the code writes together, in MiB."""
    output_kb: int = Field(64, ge=1)
    """Printed text that is kept, in KiB; `multi_turn.max_tool_response_tokens` cuts what the model gets."""
    concurrency: int | None = Field(None, ge=1)
    """Calls that run at once; null = the number of cores, so that calls do not slow each other into their deadlines."""
    python: str | None = None
    """The interpreter whose installed packages the code may import; null = the trainer's own."""
    readable: list[str] = Field(default_factory=list)
    """Absolute paths that the code may read beside the interpreter's libraries."""


@dataclass
class _State:
    """What one trajectory keeps."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one trajectory run one after the other, in their order."""
    interpreter: Interpreter | None = None
    released: bool = False
    opening: threading.Lock = field(default_factory=threading.Lock)
    """So that no interpreter is started for a trajectory that is over."""


class PythonTool(BaseTool):
    """`python(code)`: what the code prints, and the value of a last line that is an expression.

    An exception is an answer like any other: the model sees the traceback. Code that must be stopped (time, disk, or it
    ended its interpreter) is the model's mistake: an `<error>`, counted in `tools/<name>/model_errors`.

    Metrics: `exceptions`, the share of calls whose code raised.

    Raises:
        ConfigError: an unknown key, or a value out of bounds.
        PluginError: this machine cannot isolate; says what is missing. There is no unsafe fallback.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        self.settings = parse_settings(PythonToolSettings, config)
        super().__init__(config, tool_schema)
        settings = self.settings
        self._states: dict[str, _State] = {}
        self._sandbox = Sandbox(
            SandboxLimits(settings.timeout_s, settings.memory_mb, settings.disk_mb, settings.output_kb),
            python=settings.python,
            readable=tuple(settings.readable),
            keeps_state=settings.keep_state,
        )
        self._sandbox.verify()
        self.max_concurrency = settings.concurrency or len(os.sched_getaffinity(0))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One string, `code`."""
        schema = self.__dict__.get("tool_schema")
        if schema is not None:
            return schema
        kept = " Variables and files stay for your next call." if self.settings.keep_state else ""
        code = {"type": "string", "description": "Python code"}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "python",
                    "description": "Run Python code; returns what it prints and the value of the last expression."
                    + kept,
                    "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
                },
            }
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str | tuple[str, ToolResponse]:
        """An interpreter is started by the first call.

        Raises:
            ValueError: the row has arguments for it, which would do nothing.
        """
        _refuse(kwargs, "create")
        created = await super().create(instance_id, **kwargs)
        self._states[created[0] if isinstance(created, tuple) else created] = _State()
        return created

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any = None, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run `parameters["code"]`.

        Runs on the tool's loop. Waits for the trajectory's earlier call, then for the interpreter, in a thread.

        Raises:
            ToolCallError: it had to be stopped; with what it printed until then.
            ValueError: the row has `execute_kwargs`, which would do nothing.
        """
        _refuse(kwargs, "execute")
        state = self._states[instance_id] if self.settings.keep_state else _State()
        async with state.turn:
            try:
                result = await in_daemon_thread(self._run, state, str(parameters["code"]))
            except asyncio.CancelledError:
                # The thread cannot be cancelled, but it ends with the process that it waits for.
                if state.interpreter is not None:
                    state.interpreter.kill()
                raise
        if result.ending in ("ok", "raised"):
            text = result.output.strip("\n") or "(no output)"
            return ToolResponse(text=text), 0.0, {"exceptions": float(result.ending == "raised")}
        raise self._stopped(result)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the trajectory's interpreter and remove its files. Runs on the tool's loop. Waits for the interpreter's
        end, in a thread."""
        await in_daemon_thread(_end, self._states.pop(instance_id))

    def _run(self, state: _State, code: str) -> CodeResult:
        with state.opening:
            if state.released:
                raise RuntimeError("the trajectory is over")
            if state.interpreter is not None and not state.interpreter.alive:
                state.interpreter.close()
                state.interpreter = None
            if state.interpreter is None:
                state.interpreter = self._sandbox.open()
            interpreter = state.interpreter
        try:
            return interpreter.run(code)
        finally:
            if not self.settings.keep_state:
                interpreter.close()

    def _stopped(self, result: CodeResult) -> ToolCallError:
        lost = " Variables and files of earlier calls are lost." if self.settings.keep_state else ""
        output = result.output.strip("\n")
        error = ToolCallError(f"the code was stopped: {result.detail}.{lost}" + (f"\n{output}" if output else ""))
        error.timed_out = result.ending == "timeout"
        return error


def _end(state: _State) -> None:
    with state.opening:
        state.released = True
        if state.interpreter is not None:
            state.interpreter.close()


def _refuse(kwargs: dict[str, Any], method: str) -> None:
    if kwargs:
        raise ValueError(
            f"the Python tool reads no {method}_kwargs, got {sorted(kwargs)}. Its settings are in the tools file"
        )
