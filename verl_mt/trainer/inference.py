"""A policy with its tools, limits and reward, and no training around it: for evaluation, demos and debugging."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from verl_mt.config.checks import check
from verl_mt.config.schema import Config
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.engines.base import InferenceEngine
from verl_mt.modeling.load import load_causal_lm
from verl_mt.plugins import import_plugins
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.tools.registry import ToolSet
from verl_mt.trainer import build, build_data, build_rollout


class Inference(AbstractContextManager["Inference"]):
    """Rolls out prompts exactly as training would.

    Args:
        config: the same config that a trainer gets.
        tools: instead of those that the config's YAML declares.
        engine: samples instead of the one that `rollout.name` asks for; no model is loaded then.

    Raises:
        VerlMTError: what `build_trainer` would refuse.
    """

    def __init__(self, config: Config, *, tools: ToolSet | None = None, engine: InferenceEngine | None = None):
        check(config)
        import_plugins(config.external_plugins)
        build.prepare_process(config)
        self.config = config
        self.num_filtered = 0
        self.chat = build_rollout.build_fitting_chat(config)
        self.tools = tools if tools is not None else build_rollout.build_tools(config)
        build_rollout.check_parser(config, self.chat, self.tools)
        module = _load(config) if engine is None else None
        self.runner = build_rollout.build_runner(config, self.chat, self.tools, module, engine)
        self.stream = RolloutStream(self.runner)
        try:
            self.stream.call(self.runner.context.engine.start())
        except BaseException:
            self.stream.close(self.runner.context.engine.close)
            raise

    def prompts(self) -> list[Prompt]:
        """The prompts of `data.val_files`; `num_filtered` says how many were too long and left out."""
        builder = build_data.build_prompts(self.config, self.chat, self.tools)
        prompts = build_data.load_val_prompts(self.config, builder)
        self.num_filtered = builder.num_filtered
        return prompts

    def roll_out(
        self,
        prompts: list[Prompt],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        name: str = "inference",
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[TrajectoryGroup]:
        """Scored groups, in the order of the prompts. `while_waiting` is called a few times a second.

        Raises:
            ConfigError: a row whose data source has no reward; named before anything is sampled.
        """
        for row in (prompt.row for prompt in prompts):
            build_rollout.require_media(
                self.runner.context.engine, row, rollout_name=self.config.actor_rollout_ref.rollout.name
            )
            self.runner.reward.check(row)
        self.stream.start(RolloutPlan(prompts, n, name, sampling, evaluation=True))
        return self.stream.collect(name, while_waiting)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close(self.runner.context.engine.close)


def _load(config: Config) -> Any:
    model = config.actor_rollout_ref.model
    return load_causal_lm(
        model.path,
        revision=model.revision,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        device=build.device_of(config.trainer.device),
    )
