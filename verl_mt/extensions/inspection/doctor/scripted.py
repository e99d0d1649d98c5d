"""Scripted conversations: prompts of the run go through its real tools, interaction, limits, masks and reward; only the
model is a script."""

from __future__ import annotations

import copy
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from verl_mt.chat.parser_fit import written_call
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.schema import Config
from verl_mt.data.requests import GenerationRequest
from verl_mt.data.trajectory import Trajectory
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import EngineError
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.tools.registry import ToolSet
from verl_mt.trainer import build_rollout

_LIMIT_S = 120.0
_NO_LIMIT = 2**20
"""Tokens: more than any script says."""
_MORE_TURNS = 3
SAME = 1e-9
"""By which rewards may differ that are the same."""
_POSITION = re.compile(r"^[^.]+\.(\d+)\.")


@dataclass(frozen=True)
class Talk:
    """One conversation: a prompt, and what the model says in each of its turns."""

    prompt: Prompt
    turns: Sequence[Sequence[int]]
    """Ids, each with its end of turn. The last turn repeats if more are wanted."""


class Stage:
    """Where talks are played. The tools are opened once and closed once, as in a run."""

    def __init__(self, config: Config, chat: ChatTemplate, tools: ToolSet | None):
        config = copy.deepcopy(config)
        config.trainer.debug_mode = "save"
        engine = ScriptedEngine(self._turn, decode=chat.decode)
        self._talks: dict[str, Sequence[Talk]] = {}
        self._said: Counter[str] = Counter()
        self._runner = build_rollout.build_runner(config, chat, tools, None, engine)
        self._stream = RolloutStream(self._runner)
        self._context = self._runner.context

    def play(
        self, talks: Sequence[Talk], *, samples: int = 1, unlimited: bool = False, more_turns: int = _MORE_TURNS
    ) -> list[Trajectory]:
        """The finished conversations, scored, in the order of the talks.

        Args:
            samples: of each talk.
            unlimited: the run's limits of length do not cut: what is asked about is something else.
            more_turns: unlimited: turns after those of the talk, where the run sets no limit.

        Raises:
            EngineError: not over after two minutes.
        """
        name = f"doctor{len(self._talks) or ''}"
        self._talks[name] = talks
        limits = self._context.limits
        if unlimited:
            # A simulated user who is never content asks again and again.
            turns = limits.max_assistant_turns or max(len(talk.turns) for talk in talks) + more_turns
            limits = replace(
                limits, response_length=_NO_LIMIT, max_model_len=2 * _NO_LIMIT, max_tokens_per_turn=None,
                max_assistant_turns=turns,
            )  # fmt: skip
        elif limits.response_length < 1024:
            # The script is not the model: its answer is short, its call has the length that the arguments have.
            limits = replace(limits, max_tokens_per_turn=None)
        self._runner.context = replace(self._context, limits=limits)
        begun = time.monotonic()

        def watch() -> None:
            if time.monotonic() - begun > _LIMIT_S:
                raise EngineError(f"the rollout on the scripted engine was not over after {_LIMIT_S:.0f} s")

        with _quiet():
            self._stream.start(RolloutPlan([talk.prompt for talk in talks], samples, name))
            groups = self._stream.collect(name, watch)
        return [trajectory for group in groups for trajectory in group.trajectories]

    def close(self) -> None:
        with _quiet():
            self._stream.close(self._context.engine.close)

    def _turn(self, request: GenerationRequest) -> ScriptedTurn:
        talks = self._talks[request.request_id.split(".")[0]]
        found = _POSITION.match(request.request_id)
        turns = talks[int(found[1]) if found else 0].turns
        ids = turns[min(self._said[request.session_id], len(turns) - 1)]
        self._said[request.session_id] += 1
        return ScriptedTurn(ids, None, "stop", [-0.1] * len(ids))


def earned(trajectory: Trajectory) -> float:
    """The reward without what length costs; 0 where there is none."""
    costs = sum(trajectory.reward_parts.get(name, 0.0) for name in ("turn_cost", "token_cost"))
    return 0.0 if trajectory.reward is None else trajectory.reward - costs


@contextmanager
def _quiet() -> Iterator[None]:
    """What a conversation logs is a finding, once; VERL_MT_TRACEBACK=1 shows all of it."""
    log = logging.getLogger("verl_mt")
    before = log.level
    if os.environ.get("VERL_MT_TRACEBACK") != "1":
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def said(chat: ChatTemplate, text: str) -> list[int]:
    """Ids of a turn with this text, its end included."""
    opened = "1</think>" if chat.prefilled_reasoning else ""
    return [*chat.encode_text(f"{opened}{text}", neutral=False), min(chat.stop_token_ids)]


def called(chat: ChatTemplate, tool: dict[str, Any], *, other: bool = False) -> list[int] | None:
    """Ids of a turn that calls a tool with made-up arguments; None where the template writes no calls.

    Args:
        other: with different ones, where its schema leaves a choice.
    """
    written = written_call(chat, tool=tool, arguments=example_arguments(tool, other=other))
    if written is None:
        return None
    closed = "\n</think>\n\n" if chat.prefilled_reasoning and not written.in_reasoning else ""
    return [*chat.encode_text(f"{closed}{written.text}", neutral=False), min(chat.stop_token_ids)]


def example_arguments(schema: dict[str, Any], *, other: bool = False) -> dict[str, Any]:
    """Some arguments that fit a tool's schema; `other`: different ones, where it leaves a choice."""
    parameters = schema["function"].get("parameters") or {}
    required = parameters.get("required") or list(parameters.get("properties") or {})
    known = parameters.get("properties") or {}
    return {name: _example(known[name], other) for name in required if name in known}


def _example(schema: dict[str, Any], other: bool) -> Any:
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][-other]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], other)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items") or {}, other)] * max(1, schema.get("minItems", 1))
    if kind == "object":
        return {name: _example(schema["properties"][name], other) for name in schema.get("required") or ()}
    number = schema.get("minimum", 1) + other
    return {"integer": number, "number": float(number), "boolean": not other}.get(kind, "Paris" if other else "1")
