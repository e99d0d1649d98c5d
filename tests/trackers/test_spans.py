"""Every trajectory becomes a trace that a collector of OpenTelemetry understands."""

from __future__ import annotations

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from command_lab import fit

from verl_mt.config.compose import compose
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryGroup, TrajectoryRecord
from verl_mt.errors import ConfigError
from verl_mt.extensions.inspection.trackers.spans import SPANS_FILE, OtlpLines, RolloutSpans
from verl_mt.trainer.tracking import Background, TrackedRun

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed (pip install 'verl_mt[otel]')"
)


def trajectory(**more) -> Trajectory:
    """Two turns: the first calls a tool, the second answers."""
    record = TrajectoryRecord()
    record.append_given([1, 2, 3], kind="prompt", turn=0)
    record.append_sampled([4, 5], [-0.1, -0.2], [6, 7], turn=1)
    record.append_given([8], kind="tool", turn=1)
    record.append_sampled([9], [-0.3], [7], turn=2)
    spans = [
        TimeSpan("queue", 10.0, 10.5, 1), TimeSpan("prefill", 10.5, 11.0, 1), TimeSpan("decode", 11.0, 12.0, 1),
        TimeSpan("tool", 12.0, 14.0, 1, "calc"),
        TimeSpan("decode", 14.0, 15.0, 2), TimeSpan("reward", 16.0, 17.0, 2),
    ]  # fmt: skip
    values = {"stop_reason": StopReason.FINISHED, "reward": 0.5, "num_turns": 2} | more
    return Trajectory("t0", "p0", "g0", "e0", "src", 3, records=[record], time_spans=spans, **values)


def group(*trajectories: Trajectory) -> list[TrajectoryGroup]:
    return [TrajectoryGroup("g0", "p0", list(trajectories))]


def spans_of(*trajectories: Trajectory):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    RolloutSpans(exporter, "run").trajectories(4, group(*trajectories))
    return exporter.get_finished_spans()


def test_the_tree_is_trajectory_turn_phase():
    spans = spans_of(trajectory())
    names = {span.context.span_id: span.name for span in spans}
    tree = {(names.get(span.parent.span_id) if span.parent else None, span.name) for span in spans}
    assert tree == {
        (None, "invoke_agent rollout"),
        ("invoke_agent rollout", "turn 1"), ("turn 1", "queue"), ("turn 1", "prefill"), ("turn 1", "decode"),
        ("turn 1", "execute_tool calc"),
        ("invoke_agent rollout", "turn 2"), ("turn 2", "decode"),
        ("invoke_agent rollout", "reward"),
    }  # fmt: skip
    assert len({span.context.trace_id for span in spans}) == 1
    assert spans[0].resource.attributes["service.name"] == "verl_mt"
    assert spans[0].resource.attributes["verl_mt.run"] == "run"


def test_a_span_is_as_long_as_the_phase_and_lies_inside_its_parent():
    spans = {span.name: span for span in spans_of(trajectory())}
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert seconds["execute_tool calc"] == pytest.approx(2.0, abs=1e-6)
    assert seconds["turn 1"] == pytest.approx(4.0, abs=1e-6)
    assert seconds["invoke_agent rollout"] == pytest.approx(7.0, abs=1e-6)
    root = spans["invoke_agent rollout"]
    assert all(root.start_time <= s.start_time <= s.end_time <= root.end_time for s in spans.values())
    # Of the time of day: the trajectory's clock is monotonic.
    assert abs(root.start_time / 1e9 - (time.time() - time.monotonic() + 10.0)) < 1.0


def test_ids_tokens_and_weights_are_attributes():
    spans = {span.name: dict(span.attributes) for span in spans_of(trajectory())}
    root, turn = spans["invoke_agent rollout"], spans["turn 1"]
    for attributes in spans.values():
        assert attributes["verl_mt.trajectory_id"] == "t0" and attributes["verl_mt.step"] == 4
    assert (root["verl_mt.prompt_id"], root["verl_mt.group_id"], root["verl_mt.episode_id"]) == ("p0", "g0", "e0")
    assert (root["verl_mt.reward"], root["verl_mt.stop_reason"], root["verl_mt.row_index"]) == (0.5, "finished", 3)
    assert (turn["gen_ai.usage.input_tokens"], turn["gen_ai.usage.output_tokens"]) == (3, 2)
    assert turn["verl_mt.policy_version"] == 7
    assert spans["turn 2"]["gen_ai.usage.input_tokens"] == 6
    assert spans["execute_tool calc"]["gen_ai.tool.name"] == "calc"


def test_one_that_failed_has_the_status_of_an_error_and_one_without_times_no_span():
    failed = trajectory(stop_reason=StopReason.ERROR, error="Traceback\n  ...\nValueError: no\n", reward=None)
    root = next(s for s in spans_of(failed) if s.name == "invoke_agent rollout")
    assert not root.status.is_ok and root.status.description == "ValueError: no"
    assert "verl_mt.reward" not in root.attributes
    unborn = trajectory()
    unborn.time_spans = []
    assert spans_of(unborn) == ()


def test_the_file_holds_otlp_json_with_ids_in_hex(tmp_path):
    file = tmp_path / SPANS_FILE
    for keep in (False, True):
        spans = RolloutSpans(OtlpLines(file, keep=keep), "run")
        spans.trajectories(1, group(trajectory()))
        spans.close("finished")
    first, _ = [json.loads(line) for line in file.read_text().splitlines()]
    found = first["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert len(found) == 9 and all(len(bytes.fromhex(s["traceId"])) == 16 for s in found)
    roots = [s for s in found if "parentSpanId" not in s]
    assert len(roots) == 1 and {s.get("parentSpanId") for s in found} <= {None, *(s["spanId"] for s in found)}


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP as a collector does, or answers as one that refuses."""

    status = 200
    requests: list = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append((self.path, dict(self.headers), body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def collector(monkeypatch):
    handler = type("Handler", (Collector,), {"requests": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret-of-the-collector")
    yield handler
    server.shutdown()
    server.server_close()


def run_at(folder) -> TrackedRun:
    return TrackedRun(folder, "p", "run", {}, None)


@pytest.mark.slow
def test_a_collector_gets_them_over_http(collector, tmp_path):
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = RolloutSpans.to_collector(run_at(tmp_path))
    spans.trajectories(1, group(trajectory(), trajectory()))
    spans.close("finished")
    ((path, headers, body),) = collector.requests
    assert path == "/v1/traces"
    assert {k.lower(): v for k, v in headers.items()}["authorization"] == "secret-of-the-collector"
    message = ExportTraceServiceRequest()
    message.ParseFromString(gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body)
    assert sum(len(s.spans) for r in message.resource_spans for s in r.scope_spans) == 18


@pytest.mark.slow
def test_a_collector_that_refuses_is_counted_and_said_once(collector, tmp_path, caplog):
    collector.status = 403
    spans = Background(RolloutSpans.to_collector(run_at(tmp_path)), "otel")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            spans.trajectories(step, group(trajectory()))
        spans.close("finished")
    assert spans.failures == 2
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and "did not deliver 9 spans of step 1" in said[0], said


@pytest.mark.parametrize("theirs", ["weave", "mlflow"])
def test_verls_other_backends_are_refused_with_what_there_is(theirs):
    with pytest.raises(ConfigError, match=f"{theirs} is not offered. otel sends spans"):
        compose([f"actor_rollout_ref.rollout.trace.backend={theirs}"])


@pytest.mark.slow
def test_a_run_writes_the_spans_of_training_and_validation(tmp_path):
    fit(
        tmp_path / "run", "actor_rollout_ref.rollout.trace.backend=otel_file", "trainer.total_training_steps=1",
        "trainer.test_freq=-1", "trainer.val_before_train=False",
        "actor_rollout_ref.rollout.val_kwargs.greedy_too=False",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / SPANS_FILE).read_text().splitlines()]
    found = [s for line in lines for r in line["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]
    roots = [s for s in found if s["name"] == "invoke_agent rollout"]
    assert len(roots) == 16 + 4  # 4 prompts x 4 samples, 4 validation prompts
    names = {s["name"].split()[0] for s in found}
    assert {"turn", "decode", "execute_tool", "reward"} <= names
