"""OpenTelemetry spans of rollouts: trajectory -> turn -> queue, prefill, decode, tool, interaction; and its reward.

One trace for each trajectory, named after the conventions of OpenTelemetry for generative AI where they have a name
(`gen_ai.*`, https://opentelemetry.io/docs/specs/semconv/gen-ai/), with verl_mt's ids beside them, so that a slow span
leads to its row in `rollouts/`. Made from the times that every trajectory records anyway: nothing is added to what a
rollout does, and no text leaves the run directory.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl_mt.data.trajectory import TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.trainer.tracking import Outcome, TrackedRun, Tracker

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Value = str | int | float | bool


class Exporter(Protocol):
    """What is asked of a `SpanExporter` of the SDK."""

    def export(self, spans: Sequence[ReadableSpan], /) -> Any: ...

    def shutdown(self) -> None: ...


SPANS_FILE = "spans.jsonl"
_MAX_PER_EXPORT = 2000
_IN_TURNS = ("queue", "prefill", "decode", "tool", "interaction")


class RolloutSpans(Tracker):
    """Sends the spans of every trajectory to an exporter of OpenTelemetry's SDK.

    Args:
        exporter: what takes finished spans.
        run_name: the resource's `verl_mt.run`.
    """

    def __init__(self, exporter: Exporter, run_name: str):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._exporter, self._ended = exporter, _Ended()
        resource = Resource.create({"verl_mt.run": run_name})
        if "service.name" not in resource.attributes or str(resource.attributes["service.name"]).startswith("unknown"):
            resource = resource.merge(Resource({"service.name": "verl_mt"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)  # type: ignore[arg-type]
        self._tracer = provider.get_tracer("verl_mt.rollout")

    @classmethod
    def to_file(cls, run: TrackedRun) -> RolloutSpans:
        """To `spans.jsonl` of the run directory."""
        return cls(OtlpLines(run.folder / SPANS_FILE, keep=run.resume_step is not None), run.name)

    @classmethod
    def to_collector(cls, run: TrackedRun) -> RolloutSpans:
        """By OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says.

        Endpoint, headers (they hold secrets) and timeouts come from OpenTelemetry's own environment variables.
        """
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        # It would log every failed attempt; ours are counted, and said once.
        logging.getLogger(trace_exporter.__name__).setLevel(logging.CRITICAL)
        return cls(trace_exporter.OTLPSpanExporter(), run.name)

    def trajectories(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Raises:
        RuntimeError: the exporter could not deliver some of them.
        """
        # Spans carry the time of day; trajectories the monotonic clock.
        offset_s = time.time() - time.monotonic()
        lost = 0
        for group in groups:
            for trajectory in group.trajectories:
                self._trajectory(step, trajectory, offset_s)
            if len(self._ended.spans) >= _MAX_PER_EXPORT:
                lost += self._export()
        lost += self._export()
        if lost:
            raise RuntimeError(f"the exporter did not deliver {lost} spans of step {step}")

    def close(self, outcome: Outcome) -> None:
        self._exporter.shutdown()

    def _export(self) -> int:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans, self._ended.spans = self._ended.spans, []
        delivered = not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS
        return 0 if delivered else len(spans)

    def _trajectory(self, step: int, t: Trajectory, offset_s: float) -> None:
        if not t.time_spans:
            return
        ids: dict[str, Value] = {
            "gen_ai.conversation.id": t.trajectory_id,
            "verl_mt.trajectory_id": t.trajectory_id,
            "verl_mt.group_id": t.group_id,
            "verl_mt.step": step,
        }
        turns: dict[int, list[TimeSpan]] = defaultdict(list)
        for span in t.time_spans:
            if span.phase in _IN_TURNS:
                turns[span.turn].append(span)
        begin, end = _ends(t.time_spans, offset_s)
        root = self._start("invoke_agent rollout", begin, None, ids | _about(t))
        if t.error is not None:
            _mark_error(root, t.error)
        lengths = _turn_tokens(t)
        for number in sorted(turns):
            parts = turns[number]
            first, last = _ends(parts, offset_s)
            turn = self._start(f"turn {number}", first, root, ids | {"verl_mt.turn": number} | lengths.get(number, {}))
            for part in parts:
                self._part(part, turn, ids, offset_s)
            turn.end(last)
        for span in t.time_spans:
            if span.phase not in _IN_TURNS:
                self._part(span, root, ids, offset_s)
        root.end(end)

    def _part(self, span: TimeSpan, parent: Any, ids: Mapping[str, Value], offset_s: float) -> None:
        attributes: dict[str, Value] = {**ids, "verl_mt.turn": span.turn, "verl_mt.phase": span.phase}
        if span.phase == "tool":
            attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": span.name}
        name = {"tool": "execute_tool"}.get(span.phase, span.phase)
        begin, end = _ends([span], offset_s)
        self._start(f"{name} {span.name}".strip(), begin, parent, attributes).end(end)

    def _start(self, name: str, begin_ns: int, parent: Any, attributes: Mapping[str, Value]) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # An empty context: a span that the surrounding program has open is no parent of ours.
        context = Context() if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context=context, attributes=attributes, start_time=begin_ns)


class _Ended:
    """A span processor of the SDK's shape that keeps what ends."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_start(self, span: Any, parent_context: Any = None) -> None: ...

    def _on_ending(self, span: Any) -> None: ...

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class OtlpLines:
    """An exporter that writes OTLP's JSON, one request per line: what a collector's `otlpjsonfile` receiver reads."""

    def __init__(self, path: Path, *, keep: bool):
        self._file = open(path, "a" if keep else "w", encoding="utf-8")  # noqa: SIM115

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.trace.export import SpanExportResult

        message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for resource in message["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:  # OTLP's JSON has them in hex, protobuf's in base64
                            span[key] = base64.b64decode(span[key]).hex()
        self._file.write(json.dumps(message, ensure_ascii=False) + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def _about(t: Trajectory) -> dict[str, Value]:
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": "invoke_agent",
        "verl_mt.prompt_id": t.prompt_id,
        "verl_mt.episode_id": t.episode_id,
        "verl_mt.data_source": t.data_source,
        "verl_mt.row_index": t.row_index,
        "verl_mt.status": str(t.status),
        "verl_mt.stop_reason": None if t.stop_reason is None else str(t.stop_reason),
        "verl_mt.num_turns": t.num_turns,
        "verl_mt.reward": t.reward,
        "gen_ai.usage.output_tokens": t.num_sampled_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}


def _turn_tokens(t: Trajectory) -> dict[int, dict[str, Value]]:
    """Per assistant turn: tokens it read and wrote, and the version of the weights that wrote it."""
    found: dict[int, dict[str, Value]] = {}
    for record in t.records:
        for span in record.turns:
            if span.kind == "assistant" and span.end > span.start:
                found[span.turn] = {
                    "gen_ai.usage.input_tokens": span.start,
                    "gen_ai.usage.output_tokens": span.end - span.start,
                    "verl_mt.policy_version": int(record.policy_versions[span.end - 1]),
                }
    return found


def _mark_error(span: Any, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error.strip().splitlines()[-1]))


def _ends(spans: Sequence[TimeSpan], offset_s: float) -> tuple[int, int]:
    """First start and last end, in nanoseconds of the time of day."""
    begin, end = min(s.start_s for s in spans), max(s.end_s for s in spans)
    return int((begin + offset_s) * 1e9), int((end + offset_s) * 1e9)
