"""`code_interpreter` on a SandboxFusion service: the model writes a program and sees what it prints."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from uuid import uuid4

import httpx

from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NO_OUTPUT = "no stdout here"
_ANSWER_S = 10.0
"""Seconds that the service has beside those of the program."""


def run_code(
    url: str, code: str, *, timeout: float = 30, memory_limit_mb: int = 1024, language: str = "python", stdin: str = ""
) -> dict[str, Any]:
    """One program on a SandboxFusion service (`POST /run_code`), as the service answers.

    Args:
        timeout: seconds for compiling, and again for running.
        memory_limit_mb: MiB that the program may use.

    Raises:
        httpx.HTTPError: the service cannot be reached, or refuses.
        ValueError: its answer is not a JSON object.
    """
    body = {
        "code": code, "stdin": stdin, "language": language, "compile_timeout": timeout, "run_timeout": timeout,
        "memory_limit_MB": memory_limit_mb, "files": {}, "fetch_files": [],
    }  # fmt: skip
    answer = httpx.post(url, json=body, timeout=2 * timeout + _ANSWER_S)
    answer.raise_for_status()
    found = answer.json()
    if not isinstance(found, dict):
        raise ValueError(f"{url} answered a {type(found).__name__}, not a JSON object")
    return found


class SandboxFusionTool(BaseTool):
    """Runs programs on a SandboxFusion service, as verl's tool of this name does; it gives no reward.

    Args:
        config: verl's settings: `sandbox_fusion_url` (needed), `default_timeout` (30 s), `default_language` (python),
            `memory_limit_mb` (1024), `num_workers` (10): programs at once. `rate_limit` and
            `enable_global_rate_limit`: the smaller of `rate_limit` and `num_workers` holds for this process.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}
        self.sandbox_fusion_url = config.get("sandbox_fusion_url", "")
        if not self.sandbox_fusion_url:
            raise ValueError(f"{self.name}: config needs sandbox_fusion_url, the address of the service's /run_code")
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        limited = config.get("enable_global_rate_limit", True)
        workers = config.get("num_workers", 10)
        self.max_concurrency = min(workers, config.get("rate_limit", 10)) if limited else workers

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """One string, `code`."""
        schema = self.__dict__.get("tool_schema")
        if schema is not None:
            return schema
        code = {"type": "string", "description": "The program to run; print what you want to see"}
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "code_interpreter",
                    "description": "Run a program and see what it prints.",
                    "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
                },
            }
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Nothing is needed; the row's answer is kept for classes derived from this one."""
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": []}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse | str, float, dict[str, Any]]:
        """Run one program: its output and errors; a fixed text where it did not finish.

        Runs on the tool's loop. Waits for the service, in a thread.

        Raises:
            httpx.HTTPError: the service cannot be reached, or refuses.
        """
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = str(parameters.get("code", ""))
        response = await asyncio.to_thread(self.execute_code, instance_id, code, timeout, language)
        return response, 0.0, {}

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """The same, waiting for the service in this thread."""
        found = run_code(
            self.sandbox_fusion_url, code, timeout=timeout, memory_limit_mb=self.memory_limit_mb, language=language
        )
        ran = found.get("run_result") or {}
        if ran.get("status") != "Finished":
            return ToolResponse(text=NO_OUTPUT)
        return ToolResponse(text=f"{ran.get('stdout') or ''}{ran.get('stderr') or ''}")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """The list of rewards that a derived class has noted, none here."""
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory."""
        del self._instance_dict[instance_id]


def process_single_case(
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: float,
    memory_limit_mb: int,
    language: str,
    concurrent_semaphore: threading.Semaphore | None = None,
    fn_name: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """One test case of a program, as verl's scorers and tools ask for it.

    Runs in the caller's thread. Waits for the semaphore, then for the service.

    Returns:
        (True, False, or a negative number where it could not be judged: -1 the service failed, -2 the program did,
        -3 it ran too long, -4 it does not compile), and what is known: `status`, `run_status`, `stdout`, `stderr`,
        `exit_code`, `api_request_error`.

    Raises:
        NotImplementedError: `fn_name`: functions are not called, programs are run.
    """
    if fn_name is not None:
        raise NotImplementedError(f"fn_name={fn_name!r}: write a program that reads stdin and prints its answer")
    known: dict[str, Any] = {
        "case_index": case_index, "input": stdin_data, "expected_output": expected_output, "status": "unknown",
        "api_request_error": None, "run_status": None, "compile_status": None, "stdout": None, "stderr": None,
        "exit_code": None,
    }  # fmt: skip
    try:
        with concurrent_semaphore or threading.Semaphore():
            found = run_code(
                sandbox_fusion_url, generation, timeout=timeout, memory_limit_mb=memory_limit_mb, language=language,
                stdin="" if stdin_data is None else str(stdin_data),
            )  # fmt: skip
    except (httpx.HTTPError, ValueError) as error:
        return -1, known | {"status": "api_error", "api_request_error": str(error)}
    compiled, ran = found.get("compile_result") or {}, found.get("run_result") or {}
    known |= {
        "compile_status": compiled.get("status"), "run_status": ran.get("status"), "stdout": ran.get("stdout") or "",
        "stderr": ran.get("stderr") or "", "exit_code": ran.get("return_code"),
    }  # fmt: skip
    if compiled and compiled.get("status") not in ("Finished", None):
        return -4, known | {"status": "compile_error"}
    if ran.get("status") == "TimeLimitExceeded":
        return -3, known | {"status": "timeout"}
    if ran.get("status") != "Finished" or (ran.get("return_code") or 0) != 0:
        return -2, known | {"status": "runtime_error"}
    if expected_output is None:
        return True, known | {"status": "success"}
    right = known["stdout"].rstrip("\n") == str(expected_output).rstrip("\n")
    return right, known | {"status": "success" if right else "wrong_answer"}
