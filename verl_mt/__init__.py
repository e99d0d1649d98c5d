"""verl_mt: reinforcement learning of language-model agents over several turns.

What users import most stands here too: `from verl_mt import BaseTool, ToolResponse`. Each name is imported from its
module when it is first asked for, so that `import verl_mt` costs neither torch nor transformers.
"""

import os
from importlib import import_module
from typing import Any

from verl_mt import import_paths

__version__ = "0.1.0"

import_paths.install()

# Read once, when torch is imported. Threads that spin while they wait for each other make everything many times slower
# as soon as another process wants their core (benchmarks/busy_cores.py); those that sleep do not.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_HOMES = {
    # Write a tool, an interaction, a scheduler, a generate function, a reward, a tracker.
    "BaseTool": "tools.base_tool",
    "OpenAIFunctionToolSchema": "tools.schemas",
    "ToolResponse": "tools.schemas",
    "function_tool": "tools.function_tool",
    "BaseInteraction": "interactions.base",
    "MultiTurnScheduler": "rollout.scheduler",
    "GenerateState": "rollout.custom_generate",
    "Sample": "rollout.custom_generate",
    "ORM": "rewards.base",
    "Tracker": "trainer.tracking",
    # Give it a name: `multi_turns["mine"] = MyScheduler`.
    "loss_scales": "rollout.loss_scale",
    "multi_turns": "rollout.scheduler",
    "orms": "rewards.base",
    "samplers": "data.sampler",
    "tool_parsers": "chat.parsers",
    # Run it.
    "check_data": "data_check",
    "train": "api.calls",
    "evaluate_model": "api.calls",
    "examine": "api.calls",
    "fine_tune": "api.calls",
    "Run": "api.runs",
    "Inference": "trainer.inference",
    "PPOTrainer": "trainer.ppo_trainer",
    "build_trainer": "trainer.build",
    "compose": "config.compose",
    # Look at what came of it.
    "ChatTemplate": "chat.template",
    "InferenceEngine": "engines.base",
    "Message": "data.conversation",
    "ScriptedEngine": "engines.scripted",
    "StopReason": "data.trajectory",
    "Trajectory": "data.trajectory",
    "TrajectoryRecord": "data.trajectory",
    "VerlMTError": "errors",
}
"""Name -> the module that it lives in."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
