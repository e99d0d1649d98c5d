"""One rollout on the scripted engine: a tool call with made-up arguments, then an answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from verl_mt.chat.mismatch_causes import Cause, closed_opening
from verl_mt.chat.parser_fit import written_call
from verl_mt.data.requests import GenerationRequest
from verl_mt.data.trajectory import Status, Trajectory
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import EngineError
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer import build_rollout
from verl_mt.trainer.doctor.findings import Note, error, ok, warning
from verl_mt.trainer.doctor.subject import Subject

_MAX_PROMPTS, _SAMPLES = 2, 2
_MAX_TURNS_WITH_CALLS = 1
_LIMIT_S = 120.0
_ANSWER = "The answer is 1.\n#### 1"


def rollout(subject: Subject) -> Iterator[Note]:
    """Rows go through tools, interaction, limits, masks and reward as in a run; only the model is a script."""
    found = _roll_out(subject)
    failed = [t for t in found if t.status in (Status.FAILED, Status.ABORTED)]
    if failed:
        reason = (failed[0].error or "no error was recorded").strip().splitlines()[-1]
        yield error(
            f"{len(failed)} of {len(found)} trajectories {failed[0].status}: {reason}",
            "a run would count them and train without them; repair what raised",
        )
        return
    yield from _tools(subject, found)
    idle = [t for t in found if not t.trainable]
    if idle:
        yield error(
            f"{len(idle)} of {len(found)} trajectories have no trained token (stop reason {idle[0].stop_reason})",
            "look at actor_rollout_ref.rollout.multi_turn.loss_scale, and at masks that the generate function sets",
        )
    counted = [cause for t in found if t.sanity for cause in t.sanity["counted"] or ()]
    meant = any(t.sanity and Cause.GENERATION_PROMPT in t.sanity["causes"] for t in found)
    if meant:
        yield ok(
            f"earlier turns keep {closed_opening(subject.known_chat.generation_prompt_text)!r}, which the template's "
            "generation prompt writes and its rendering of finished turns does not show (docs/multiturn.md)"
        )
    if counted:
        yield warning(
            f"the sanity check finds a mismatch: {counted[0]}",
            "python -m verl_mt.check_template --model PATH says why; docs/templates.md what to do",
        )
    stops = Counter(str(t.stop_reason) for t in found)
    rewards = sorted({f"{t.reward:.4g}" for t in found if t.reward is not None})
    yield ok(
        f"{len(found)} trajectories, {', '.join(f'{n} {reason}' for reason, n in stops.items())}; "
        f"reward of the scripted answer: {', '.join(rewards) or 'none'}"
    )


def _tools(subject: Subject, found: list[Trajectory]) -> Iterator[Note]:
    counted: Counter[str] = Counter()
    for trajectory in found:
        counted.update({k: v for k, v in trajectory.counters.items() if k.startswith("tools/")})
    names = subject.tools.names if subject.tools is not None else ()
    for name in names:
        broken, calls = counted[f"tools/{name}/errors"], counted[f"tools/{name}/calls"]
        if broken:
            said = next((_text(m) for t in found for m in t.messages if m["role"] == "tool"), "")
            yield warning(
                f"tool {name}: {broken:.0f} of {calls:.0f} calls failed: {said[:200]}",
                "start the server that it asks, or repair it: a model cannot learn to use a tool that always fails",
            )
    full = [t for t in found if t.stop_reason == "context_full"]
    if full:
        yield warning(
            "the result of the first tool call does not fit into the response: such a conversation ends there",
            "raise actor_rollout_ref.rollout.response_length or max_model_len, or lower "
            "multi_turn.max_tool_response_tokens",
        )


def _roll_out(subject: Subject) -> list[Trajectory]:
    config = subject.scratch_config()
    config.trainer.debug_mode = "save"
    if config.actor_rollout_ref.rollout.response_length < 1024:
        # The script is not the model: its answer is short, its call has the length that the arguments have.
        config.actor_rollout_ref.rollout.max_tokens_per_turn = None
    engine = ScriptedEngine(_Script(subject), decode=subject.known_chat.decode)
    runner = build_rollout.build_runner(config, subject.known_chat, subject.tools, None, engine)
    stream = RolloutStream(runner)
    begun = time.monotonic()

    def watch() -> None:
        if time.monotonic() - begun > _LIMIT_S:
            raise EngineError(f"the rollout on the scripted engine was not over after {_LIMIT_S:.0f} s")

    try:
        stream.start(RolloutPlan(subject.prompts[:_MAX_PROMPTS], _SAMPLES, "doctor"))
        groups = stream.collect("doctor", watch)
    finally:
        stream.close(runner.context.engine.close)
    return [t for group in groups for t in group.trajectories]


class _Script:
    """The first turn of each conversation calls a tool, where there is one; later ones answer."""

    def __init__(self, subject: Subject):
        self._chat = subject.known_chat
        self._turns: Counter[str] = Counter()
        self._end = min(self._chat.stop_token_ids)
        self._call: str | None = None
        if subject.tools is not None and subject.rollout.agent_function_path is None:
            schema = subject.tools.schemas()[0]
            written = written_call(self._chat, tool=schema, arguments=example_arguments(schema))
            self._call = None if written is None else written.text
            if written is not None and not written.in_reasoning and self._chat.prefilled_reasoning:
                self._call = f"\n</think>\n\n{written.text}"

    def __call__(self, request: GenerationRequest) -> ScriptedTurn:
        self._turns[request.session_id] += 1
        text = self._call if self._turns[request.session_id] <= _MAX_TURNS_WITH_CALLS else None
        if text is None:
            text = f"{'1</think>' if self._chat.prefilled_reasoning else ''}{_ANSWER}"
        ids = [*self._chat.encode_text(text, neutral=False), self._end]
        return ScriptedTurn(ids, None, "stop", [-0.1] * len(ids))


def example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Some arguments that fit a tool's schema."""
    parameters = schema["function"].get("parameters") or {}
    required = parameters.get("required") or list(parameters.get("properties") or {})
    return {name: _example(parameters["properties"][name]) for name in required if name in parameters["properties"]}


def _example(schema: dict[str, Any]) -> Any:
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0])
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items") or {})] * max(1, schema.get("minItems", 1))
    if kind == "object":
        return {name: _example(schema["properties"][name]) for name in schema.get("required") or ()}
    return {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1.0), "boolean": True}.get(kind, "1")


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else str(content)
