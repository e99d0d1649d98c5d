"""Around a real engine: one event loop for a whole test session, and what a run of the default task needs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_mt import engines
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.requests import SamplingParams
from verl_mt.data.row_files import read_rows, row_files
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.engines.base import EngineSetup, InferenceEngine
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.trainer.build import build_workers
from verl_mt.trainer.build_data import build_prompts, load_val_prompts
from verl_mt.trainer.build_rollout import build_chat, build_runner, build_tools
from verl_mt.workers.worker_group import WorkerGroup

T = TypeVar("T")
START_S = 240.0
"""A start takes 10 s alone and over a minute on a machine that others use."""
ROUNDING = 1e-4
"""Log-probs of two float32 implementations of the tiny model are closer. Which tokens are sampled is chance: of 660
turns the median of the largest differences was 1e-6, two were over 1e-5 and the largest 2.7e-5. Other weights,
left-out adapters and a temperature a tenth off show as 1e-3 and more, which the tests assert beside it."""
LONG = 1200
"""Tokens of a turn that is still sampled when a test cuts it off: vLLM makes over 3,000 a second."""
ROLLOUT = "actor_rollout_ref.rollout."
BOTH = pytest.mark.parametrize(
    "colocated_engine",
    [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)],
    indirect=True,
    scope="session",
)
"""A test runs on each real engine."""
EACH_VLLM_IN_RELEASE = [
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.release]),
]
"""For tests that make their own engines. A start of vLLM takes half a minute: CI has the parts that differ."""


def vllm_python() -> str:
    """The Python with vLLM; a test is skipped where none is named."""
    python = os.environ.get("VERL_MT_VLLM_PYTHON")
    return python or pytest.skip("VERL_MT_VLLM_PYTHON names no Python with vLLM (docs/vllm.md)")


def words_of(name: str) -> list[str]:
    """Overrides of a run with this engine."""
    words = [f"name={name}", f"engine_timeout_s={START_S}", *([f"python={vllm_python()}"] if name == "vllm" else [])]
    return [ROLLOUT + word for word in words]


class Loop:
    """One event loop that outlives a test; an engine lives on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __call__(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = START_S) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))


@dataclass
class Lab:
    """The default task: chat, prompts, policy, and a runner for any engine."""

    config: Config
    chat: ChatTemplate
    prompts: list[Prompt]
    workers: WorkerGroup
    local: RolloutRunner
    greedy: list[TrajectoryGroup] | None = None

    @classmethod
    def make(cls, *overrides: str) -> Lab:
        config = compose(list(overrides))
        torch.manual_seed(0)
        chat, tools = build_chat(config), build_tools(config)
        workers = build_workers(config, total_steps=10)
        prompts = load_val_prompts(config, build_prompts(config, chat, tools))
        return cls(config, chat, prompts, workers, build_runner(config, chat, tools, workers.policy_module))

    @property
    def module(self) -> Any:
        return self.workers.policy_module

    def engine(self, *overrides: str, name: str = "sglang", model: Sequence[str] = ()) -> Any:
        """A real engine for this task, not started."""
        words = [f"name={name}", f"engine_timeout_s={START_S}", "max_num_seqs=128", *overrides]
        if name == "vllm" and not any(word.startswith("servers=") for word in overrides):
            words.append(f"python={vllm_python()}")
        return engines.build(
            EngineSetup(
                compose(
                    [*(ROLLOUT + word for word in words), *(f"actor_rollout_ref.model.{word}" for word in model)]
                ).actor_rollout_ref,
                None,
                end_token_ids=frozenset(self.chat.stop_token_ids),
                decode=self.chat.decode,
                max_model_len=max(LONG + 200, self.local.context.limits.max_model_len),
                deterministic=False,
                seed=0,
            )
        )

    async def greedy_of_local_engine(self) -> list[TrajectoryGroup]:
        """What other engines are compared with; computed once."""
        if self.greedy is None:
            self.greedy = await self.roll_out(self.local.context.engine, self.prompts, "greedy", temperature=0.0)
        return self.greedy

    async def roll_out(
        self, engine: InferenceEngine, prompts: Sequence[Prompt], name: str, *, n: int = 1, temperature: float = 1.0
    ) -> list[TrajectoryGroup]:
        sampling = SamplingParams(max_new_tokens=1, temperature=temperature)
        runner = replace(self.local, context=replace(self.local.context, engine=engine))
        groups = [group async for group in runner.run(RolloutPlan(prompts, n, name, sampling))]
        return sorted(groups, key=lambda group: group.prompt_id)


def narrow_model(folder: Path) -> None:
    """Write a model that differs from the tiny one in its hidden size."""
    tiny = resolve_model_path("verl_mt://tiny")
    shutil.copytree(tiny, folder)
    config = AutoConfig.from_pretrained(tiny, hidden_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def without_end(engine: Any) -> Iterator[None]:
    """No id ends a turn: one that is to be cut off does not happen to end before."""
    options = engine._options
    engine._options = replace(options, end_token_ids=frozenset())
    try:
        yield
    finally:
        engine._options = options


def log_probs(module: Any, prompt: list[int], turn: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(turn), V] log_softmax(logits / T) by one ordinary forward pass."""
    with torch.no_grad():
        logits = module(torch.tensor([prompt + turn])).logits[0].float()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1)[len(prompt) - 1 : -1]


def worst_difference(module: Any, prompt: list[int], output: Any, temperature: float = 1.0) -> float:
    """Largest difference between an engine's log-probs and the module's own."""
    ids = torch.tensor(output.token_ids)[:, None]
    expected = log_probs(module, prompt, output.token_ids, temperature).gather(1, ids)[:, 0]
    return float((expected - torch.tensor(output.log_probs)).abs().max())


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows_of(run: Path) -> list[list[dict[str, Any]]]:
    """The training rows of each step: there is a file for every step of the metrics."""
    files = [file for file in row_files(run) if file.split == "train"]
    assert [file.step for file in files] == [step["step"] for step in metrics_of(run)] != []
    return [list(read_rows(file.path)) for file in files]


def processes_of_group(group: int) -> list[int]:
    """Ids of the processes that belong to a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found
