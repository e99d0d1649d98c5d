"""What the scheduler tests share: scripted turns over a character tokenizer, and one trajectory through the driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from toys import toy_tokenizer

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.extensions.compat.schedulers.driver import SchedulerDriver
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import RolloutDriver
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.rollout.session import SessionContext

CHAT = ChatTemplate(toy_tokenizer())
EOS = CHAT.tokenizer.eos_token_id
LP = -0.5


def ids_of(text: str) -> list[int]:
    return CHAT.encode_text(text, neutral=False)


def said(text: str, reason: str = "stop", **more: Any) -> tuple:
    """A scripted turn; one that stops ends with its end-of-turn token."""
    ids = [*ids_of(text), *([EOS] if reason == "stop" else [])]
    return ids, None, reason, [LP] * len(ids), *more.values()


def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.endswith(str(ground_truth)))


def context_for(engine, *, limits: Limits | None = None, chat: ChatTemplate = CHAT, **keys: Any) -> SessionContext:
    return SessionContext(
        chat=chat,
        engine=engine,
        limits=limits or Limits(response_length=4000, max_model_len=8000),
        parser=get_parser("hermes"),
        sampling=SamplingParams(max_new_tokens=1),
        sanity=keys.pop("sanity", SanityMonitor(SanityMode.OFF)),
        **keys,
    )


def runner_for(engine, driver: RolloutDriver | MultiTurnScheduler, *, reward: Any = None, **keys: Any) -> RolloutRunner:
    """Reward: a callable of any signature; None = whether the answer ends with the row's ground truth."""
    if isinstance(driver, MultiTurnScheduler):
        driver = SchedulerDriver(driver, timeout_s=keys.pop("timeout_s", 600.0), media=keys.pop("media", frozenset()))
    runner_keys = {k: keys.pop(k) for k in ("max_retries", "max_concurrent", "tools", "interactions") if k in keys}
    loaded = load_reward(f"{__name__}.score", name=None, kwargs={}, timeout_s=600.0)
    if reward is not None:
        from verl_mt.rewards.adapters import adapt

        loaded = adapt(reward, label="test", kwargs={}, timeout_s=600.0)
    return RolloutRunner(context=context_for(engine, **keys), reward=loaded, driver=driver, **runner_keys)


def prompt_of(question: str = "q", *, chat: ChatTemplate = CHAT, index: int = 0, prompt=None, **raw: Any):
    messages = prompt or [{"role": "user", "content": question}]
    row = DataRow(
        prompt=messages,
        data_source="toy",
        ground_truth=raw.get("solution", "yes"),
        extra_info={},
        raw={"prompt": messages, **raw},
        index=index,
        file="toy.jsonl",
    )
    return PromptBuilder(chat, None, 4000, True, "error").build(row)


def roll_out(runner: RolloutRunner, prompts, n: int = 1) -> list[Trajectory]:
    """All trajectories, in the order of the prompts."""

    async def go():
        return [group async for group in runner.run(RolloutPlan(prompts, n, "s1"))]

    groups = sorted(asyncio.run(go()), key=lambda g: g.prompt_id)
    return [t for g in groups for t in g.trajectories]


def converse(scheduler, turns, *, prompt=None, **keys: Any) -> SimpleNamespace:
    """One trajectory of scripted turns; `error` is re-raised as text by the tests that expect none."""
    engine = ScriptedEngine(turns, **keys.pop("engine_keys", {}))
    runner = runner_for(engine, scheduler, **keys)
    (trajectory,) = roll_out(runner, [prompt or prompt_of(chat=keys.get("chat", CHAT))])
    return SimpleNamespace(trajectory=trajectory, engine=engine, record=trajectory.records[-1], runner=runner)


def response(record) -> tuple[list[int], list[int], list[float]]:
    """Ids, mask and log-probs after the prompt."""
    start = record.num_prompt_tokens
    return record.token_ids[start:], record.loss_mask[start:], record.rollout_log_probs[start:]


def trained(record) -> list[int]:
    return [t for t, bit in zip(record.token_ids, record.loss_mask, strict=True) if bit]


class FixedIdsChat(ChatTemplate):
    """Deltas and appended text are given ids: for the pinned layouts."""

    def __init__(self, *, deltas=(), appended=None, texts=None):
        super().__init__(toy_tokenizer())
        self.deltas, self.appended, self.texts = list(deltas), appended or {}, texts or {}

    def delta_ids(self, messages, **_):
        return SimpleNamespace(ids=self.deltas.pop(0), inserted_end=0)

    def continuation_ids(self, text):
        return list(self.appended[text])

    def decode(self, ids):
        return "".join(self.texts.get(i, f"<{i}>") for i in ids)

    def prompt_ids(self, messages, tools=None, *, add_generation_prompt=True):
        return [1, 2, 3]


__all__ = ["replace"]
