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
    # Write a tool, an interaction, a tracker. Names of extensions stand in their entry points.
    "BaseTool": "tools.base_tool",
    "OpenAIFunctionToolSchema": "tools.schemas",
    "ToolResponse": "tools.schemas",
    "function_tool": "tools.function_tool",
    "BaseInteraction": "interactions.base",
    "Environment": "environments.base",
    "Done": "environments.base",
    "ToolCallError": "errors",
    "Tracker": "trainer.tracking",
    # Give it a name: `samplers["mine"] = MySampler`.
    "loss_scales": "rollout.loss_scale",
    "samplers": "data.sampler",
    "tool_parsers": "chat.parsers",
    # Run it.
    "train": "api.calls",
    "evaluate_model": "api.calls",
    "examine": "api.calls",
    "fine_tune": "api.calls",
    "Run": "api.runs",
    "Inference": "trainer.inference",
    "PPOTrainer": "trainer.ppo_trainer",
    "build_trainer": "trainer.build",
    "compose": "config.compose",
    "register": "config.hydra_source",
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

__all__ = ["__version__", *_HOMES, *import_paths.moved_names(__name__)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    found = getattr(import_module(f"{__name__}.{home}"), name) if home else import_paths.moved_name(__name__, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
