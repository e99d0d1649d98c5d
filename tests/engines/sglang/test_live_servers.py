"""SGLang HTTP servers: one that is launched here, and the same one as somebody else's."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from engine_models import request
from live import ROUNDING, Lab, narrow_model, processes_of_group, without_end, worst_difference
from parity import compare
from test_live_contract import changed

from verl_mt.data.requests import VersionSpan
from verl_mt.engines.base import TensorBuckets
from verl_mt.errors import ConfigError, EngineError, EngineGoneError
from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
from verl_mt.workers.weight_sync import LiveWeights, Transport, weight_update_for

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def launched(lab: Lab, run):
    engine = lab.engine("launch_servers=1")
    try:
        run(engine.start())
        yield engine
    finally:
        groups = engine.pids
        run(engine.close())
        assert not any(processes_of_group(group) for group in groups)


@pytest.fixture
def url(launched) -> str:
    """Another one after a restart."""
    return launched._replicas[0]._client.url


@pytest.fixture
def attached_by(launched, lab: Lab, run, url, monkeypatch):
    """An engine over the running server, with more overrides. It has the server's key as a user gives it."""
    monkeypatch.setenv("SGLANG_API_KEY", launched._replicas[0]._client._key)
    made = []

    def make(*overrides):
        made.append(lab.engine(f"servers=[{url}]", *overrides))
        return made[-1]

    yield make
    for engine in made:
        run(engine.close())


@pytest.fixture
def attached(attached_by):
    return attached_by()


@pytest.mark.cap("C15")
def test_greedy_records_are_those_of_the_local_engine(launched, lab: Lab, run):
    run(launched.apply(weight_update_for(launched.capabilities, lab.module, 1)))
    expected = run(lab.greedy_of_local_engine())
    found = run(lab.roll_out(launched, lab.prompts, "greedy", temperature=0.0))
    result = compare(lab.module, expected, found)
    print(result)
    assert result.num_retry_rows >= 20 and result.num_sampled >= 800, result
    assert not result.differences and len(result.ties) <= 1, result


def test_weights_reach_a_server_through_shared_memory(launched, lab: Lab, run):
    prompt, before = lab.prompts[0].ids, lab.module
    for version in (2, 3):
        module = changed(lab.module, 0.2, seed=version)
        run(launched.apply(TensorBuckets(version, LiveWeights(module), bucket_bytes=1 << 20)))
        output = run(launched.generate(request(prompt, temperature=1.0, max_new_tokens=60)))
        assert output.version_spans == [VersionSpan(version, len(output.token_ids))] and output.cached_tokens == 0
        assert worst_difference(module, prompt, output) < ROUNDING
        assert worst_difference(before, prompt, output) > 1e-2
        before = module


def test_a_server_with_other_weights_is_set_back_and_a_second_turn_meets_its_prefix_cache(attached, lab, run):
    run(attached.start())
    stream, cached = list(lab.prompts[3].ids), []
    attached.open_session("s", 0)
    for _ in range(2):
        output = run(attached.generate(request(stream, "s", temperature=1.0, max_new_tokens=10)))
        assert worst_difference(lab.module, stream, output) < ROUNDING
        assert output.version_spans == [VersionSpan(0, len(output.token_ids))]
        cached.append(output.cached_tokens)
        known = len(stream) + len(output.token_ids)
        stream = [*stream, *output.token_ids, 5, 6, 7]
    attached.close_session("s")
    assert cached[1] >= known - len(output.token_ids) - 4


def test_a_server_does_abort_pause_and_refuse_like_the_colocated_engine(attached, lab, run):
    import asyncio

    prompt = lab.prompts[0].ids

    async def go():
        with without_end(attached):
            for deadline_s in (0.2, 0.4, 0.8):  # a busy machine has sampled nothing after the first
                longest = request(prompt, max_new_tokens=250, temperature=4.0, deadline_s=deadline_s)
                cut = await attached.generate(longest)
                if cut.token_ids:
                    break
        await attached.pause("retract")
        held = asyncio.ensure_future(attached.generate(request(prompt)))
        await asyncio.sleep(0.1)
        assert not held.done()
        await attached.resume()
        return cut, await held

    cut, held = run(go())
    assert cut.finish_reason == "abort" and worst_difference(lab.module, prompt, cut, 4.0) < ROUNDING
    assert held.token_ids
    wrong = dict(LiveWeights(lab.module))
    wrong[next(iter(wrong))] = torch.zeros(3)
    with pytest.raises(EngineError, match="weight update"):
        run(attached.apply(TensorBuckets(1, wrong.items())))
    assert run(attached.generate(request(prompt))).token_ids == held.token_ids


def test_a_server_whose_update_broke_off_takes_the_next_one(attached_by, lab: Lab, run):
    """As after a kill of who sent it: paused, and in an update that nobody ends."""
    first, second, prompt = attached_by(), attached_by(), lab.prompts[0].ids
    run(first.start())
    client = first._replicas[0].serving
    run(client.call("pause_generation", {"mode": "retract"}, 60.0))
    run(client.call("begin_weight_update", {}, 60.0))
    run(second.start())
    for version, module in ((0, lab.module), (8, changed(lab.module, 0.2, seed=8))):
        if version:
            run(second.apply(weight_update_for(second.capabilities, module, version)))
        output = run(second.generate(request(prompt, temperature=1.0)))
        assert output.version_spans == [VersionSpan(version, len(output.token_ids))]
        assert worst_difference(module, prompt, output) < ROUNDING


@pytest.mark.release
def test_a_weight_that_the_first_update_of_a_launched_server_leaves_out_is_an_error(lab: Lab, run):
    """SGLang would sample with its random one."""
    engine = lab.engine("launch_servers=1")
    try:
        assert run(engine.start_without_weights())
        (replica,), left_out = engine._replicas, "model.layers.1.mlp.down_proj.weight"
        sender, client = replica.sender, replica.serving
        sender.shape = replace(sender.shape, weights={k: v for k, v in sender.shape.weights.items() if k != left_out})
        weights = [(name, tensor) for name, tensor in LiveWeights(lab.module) if name != left_out]

        async def update() -> None:
            receiver = await sender.begin(client)
            publisher, arguments = sender.publisher_for(client, receiver, here=True)
            assert await sender.publish(publisher, arguments, TensorBuckets(0, weights), {client: receiver}) == [None]
            await client.call("end_weight_update", {}, 60.0)

        with pytest.raises(
            EngineError, match=r"1 weights that no update sends, such as rank 0: .*layers\.1\.mlp\.down"
        ):
            run(update())
        run(client.call("continue_generation", {}, 60.0))
        run(client.call("begin_weight_update", {}, 60.0))
        run(client.call("end_weight_update", {}, 60.0))  # later updates are not asked
    finally:
        run(engine.close())


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_weights_reach_a_server_over_the_network_and_by_files(attached_by, lab: Lab, run, transport, tmp_path):
    engine = attached_by(f"weight_transport={transport}")
    prompt = lab.prompts[0].ids
    for version in (4, 5):
        module = changed(lab.module, 0.2, seed=version)
        to = Transport(bucket_bytes=1 << 20, folder=tmp_path)
        run(engine.apply(weight_update_for(engine.capabilities, module, version, to)))
        output = run(engine.generate(request(prompt, temperature=1.0, max_new_tokens=60)))
        assert output.version_spans == [VersionSpan(version, len(output.token_ids))] and output.cached_tokens == 0
        assert worst_difference(module, prompt, output) < ROUNDING


def test_a_server_that_wants_another_key_is_refused_and_the_key_is_not_shown(attached_by, run, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "of-another-server")
    with pytest.raises(ConfigError, match=r"wants a key \(401\): put it in the variable SGLANG_API_KEY") as caught:
        run(attached_by().start())
    assert "of-another-server" not in str(caught.value)


def test_another_model_or_too_short_a_context_is_refused_before_any_request(attached, lab, run, tmp_path):
    other = tmp_path / "other"
    narrow_model(other)
    for changes, message in (
        ({"model_path": str(other)}, "was started with another model: .*hidden_size"),
        ({"max_model_len": 4000}, "too few for sequences of 4000"),
    ):
        engine = SGLangEngine(replace(attached._options, **changes))
        with pytest.raises(ConfigError, match=message):
            run(engine.start())
        run(engine.close())


def test_a_killed_server_comes_back_with_the_current_weights_and_one_of_somebody_else_is_waited_for(
    launched, attached, lab, run
):
    prompt, module = lab.prompts[0].ids, changed(lab.module, 0.2, seed=7)
    run(attached.start())
    run(launched.apply(weight_update_for(launched.capabilities, module, 7)))
    (pid,) = launched.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineGoneError):
        run(attached.generate(request(prompt)))
    with pytest.raises(EngineGoneError, match="not ready within"):
        run(attached.generate(request(prompt, deadline_s=2.0)))
    while launched._replicas[0].is_ready:  # the fork's end is told by the process that forked it, which may be busy
        time.sleep(0.02)
    output = run(launched.generate(request(prompt, temperature=1.0)))
    assert output.version_spans == [VersionSpan(7, len(output.token_ids))]
    assert worst_difference(module, prompt, output) < ROUNDING
    assert launched.metrics()["engine/restarts"] == 1 and not processes_of_group(pid)
