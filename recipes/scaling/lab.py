"""What the check of the formula runs with: models of any size that do the default task, a slow tool, a reward."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from verl_mt.config_paths import resolve_model_path
from verl_mt.engines.local import LocalEngine
from verl_mt.tools.calculator import Calculator


class OwnClock:
    """Seconds that a run with the local engine takes on a core of its own, whatever else the machine does: the CPU
    seconds of this process, and those in which conversations are under way and nobody computes (they wait for tools).
    With one thread that is what an ordinary clock says on a quiet machine."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._since: float | None = None
        self._asleep: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._waker: asyncio.Task[None] | None = None

    def __call__(self) -> float:
        since = self._since
        waiting = 0.0 if since is None else max(0.0, time.monotonic() - time.process_time() - since)
        return time.process_time() + self._waited_s + waiting

    def watch(self, engine: LocalEngine) -> None:
        """Count its waits."""
        wait, batcher = engine._wait, engine._batcher

        def timed() -> Any:
            begun = time.monotonic() - time.process_time()
            self._since = begun if batcher.sessions else None
            commands = wait()
            if self._since is not None:
                self._since = None
                self._waited_s += max(0.0, time.monotonic() - time.process_time() - begun)
            return commands

        engine._wait = timed

    async def sleep(self, seconds: float) -> None:
        """By this clock: while others have the core, a tool does not get on either."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._asleep, (self() + seconds, next(self._numbers), future))
        if self._waker is None or self._waker.done():
            self._waker = asyncio.create_task(self._wake())
        await future

    async def _wake(self) -> None:
        while self._asleep:
            now = self()
            while self._asleep and self._asleep[0][0] <= now:
                if not (future := heapq.heappop(self._asleep)[2]).done():
                    future.set_result(None)
            await asyncio.sleep(0.002)


CLOCK: OwnClock | None = None
"""By which tools of this process sleep; None = an ordinary one."""


class SlowCalculator(Calculator):
    """The calculator behind a network, as it were; `config.latency_s` seconds per call."""

    runs_inline = False

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await (asyncio.sleep if CLOCK is None else CLOCK.sleep)(float(self.config["latency_s"]))
        return await super().execute(instance_id, parameters, **kwargs)


def any_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> float:
    """0 or 1 by the text: rewards of a group differ, as those of a model that still learns do."""
    return float(zlib.crc32(f"{solution_str}{extra_info['trajectory_id']}".encode()) % 2)


def widened(folder: Path, *, hidden: int, layers: int) -> str:
    """The shipped model in a larger body: it samples the same tokens, at the cost of the larger body.

    Every matrix is padded with zeros, every added layer writes zeros into the residual stream.

    Args:
        folder: where to write it.
        hidden: a multiple of 128.
        layers: at least 4.
    """
    source = resolve_model_path("verl_mt://tiny")
    small = AutoModelForCausalLM.from_pretrained(source)
    factor = hidden // small.config.hidden_size
    config = Qwen3Config(
        **{
            **small.config.to_dict(),
            "hidden_size": hidden,
            "intermediate_size": small.config.intermediate_size * factor,
            "num_attention_heads": small.config.num_attention_heads * factor,
            "num_key_value_heads": small.config.num_key_value_heads * factor,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "rms_norm_eps": small.config.rms_norm_eps / factor,
        }
    )
    torch.manual_seed(0)
    large = Qwen3ForCausalLM(config)
    weights, old = large.state_dict(), small.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            added = "layers." in name and int(name.split("layers.")[1].split(".")[0]) >= small.config.num_hidden_layers
            if added:
                if "o_proj" in name or "down_proj" in name:
                    tensor.zero_()
                continue
            value = old[name]
            if value.shape[-1] == small.config.hidden_size and value.dim() == 1:
                # The mean of squares is over `factor` times as many numbers.
                value = value / factor**0.5
            tensor.zero_()
            tensor[tuple(slice(size) for size in value.shape)] = value
    large.load_state_dict(weights)
    return _save(large, folder)


def random_model(folder: Path, *, hidden: int, layers: int) -> str:
    """Random weights: a response goes on for as long as it may, as a rule."""
    small = AutoModelForCausalLM.from_pretrained(resolve_model_path("verl_mt://tiny")).config
    config = Qwen3Config(
        **{
            **small.to_dict(),
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 64,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        }
    )
    torch.manual_seed(0)
    return _save(Qwen3ForCausalLM(config), folder)


def _save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model_path("verl_mt://tiny")).save_pretrained(folder)
    return str(folder)
