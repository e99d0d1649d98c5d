"""A vLLM server of the user's, started as docs/vllm.md says: exact requests, and new weights in three ways."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from engine_models import request
from live import LONG, ROUNDING, START_S, Lab, narrow_model, vllm_python, without_end, worst_difference
from test_live_contract import changed

from verl_mt.config_paths import resolve_model_path
from verl_mt.data.requests import VersionSpan
from verl_mt.engines.base import Receiver
from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.sglang.processes import reserve_port
from verl_mt.extensions.cluster.vllm.client import environment_of
from verl_mt.extensions.cluster.vllm.engine import VLLMEngine
from verl_mt.modeling.weights import named_weights
from verl_mt.workers.weight_sync import Transport, weight_update_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
HOT = 2.0
ON_CPU = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill"]
WORKER = "verl_mt.extensions.cluster.vllm.process.ServerWorker"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    reserved = reserve_port()
    port = reserved.getsockname()[1]
    root = str(Path(__file__).resolve().parents[3])
    variables = environment_of(vllm_python(), eager=True)
    # The command `vllm` needs a package of that name, which the CPU build has not.
    command = [vllm_python(), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    words = ["--model", resolve_model_path("verl_mt://tiny"), "--host", "127.0.0.1", "--port", str(port), *ON_CPU]
    words += ["--max-model-len", str(LONG + 200), "--max-num-batched-tokens", "4096", "--worker-extension-cls", WORKER]
    words += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        environment = variables | {"PYTHONPATH": root, "VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen([*command, *words], env=environment, stdout=out, stderr=out, start_new_session=True)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not serves(address):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        reserved.close()
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def serves(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def attached_by(url, lab: Lab, run):
    """An engine over the running server, with more overrides."""
    made = []

    def make(*overrides):
        made.append(lab.engine(f"servers=[{url}]", *overrides, name="vllm"))
        return made[-1]

    yield make
    for engine in made:
        run(engine.close())


def test_ids_and_log_probs_of_a_server_are_exact_and_turns_end_where_the_request_says(attached_by, lab, run):
    engine, prompt = attached_by(), lab.prompts[0].ids
    for temperature in (0.0, 1.7):
        output = run(engine.generate(request(prompt, temperature=temperature, max_new_tokens=40)))
        assert worst_difference(lab.module, prompt, output, temperature) < ROUNDING
        assert output.version_spans == [VersionSpan(0, len(output.token_ids))]
    plain = run(engine.generate(request(prompt, max_new_tokens=60)))
    assert plain.finish_reason == "stop" and plain.token_ids[-1] in lab.chat.stop_token_ids
    stop = lab.chat.decode(plain.token_ids[:10])[-6:-2]
    cut = run(engine.generate(request(prompt, max_new_tokens=60, stop=(stop,))))
    assert cut.finish_reason == "stop" and cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    assert stop in lab.chat.decode(cut.token_ids) and stop not in lab.chat.decode(cut.token_ids[:-1])
    again = run(engine.generate(request([*prompt, *plain.token_ids], "s", max_new_tokens=5)))
    assert again.cached_tokens >= 32, "of an earlier request"
    asks = [request(prompt, temperature=HOT, max_new_tokens=30, seed=seed) for seed in (1, 2, 1)]
    first, other, same = (run(engine.generate(ask)).token_ids for ask in asks)
    assert first == same != other


@pytest.mark.parametrize("transport", ["auto", pytest.param("broadcast", marks=pytest.mark.release), "disk"])
def test_new_weights_reach_a_server_in_the_middle_of_a_turn(attached_by, lab: Lab, run, transport, tmp_path):
    """The model's output layer is its embedding, whose packed copy a plain reload of vLLM's would leave as it was."""
    engine, prompt = attached_by(f"weight_transport={transport}"), lab.prompts[0].ids
    to = Transport(bucket_bytes=1 << 20, folder=tmp_path)
    run(engine.start())
    other = changed(lab.module, 0.05, seed=3)

    async def go():
        task = asyncio.ensure_future(engine.generate(request(prompt, max_new_tokens=LONG, temperature=HOT)))
        await engine.generate(request(prompt, max_new_tokens=4))  # the other turn is sampled meanwhile
        await engine.apply(weight_update_for(engine.capabilities, other, 1, to))
        return await task

    with without_end(engine):
        output = run(go())
        after = run(engine.generate(request(prompt, temperature=1.0, max_new_tokens=60)))
    assert [span.version for span in output.version_spans] in ([0, 1], [0]), "a fast server may have ended the turn"
    assert after.version_spans == [VersionSpan(1, 60)]
    assert worst_difference(other, prompt, after) < ROUNDING
    assert worst_difference(lab.module, prompt, after) > 1e-2
    # Who comes next finds other weights than those of the files, and sets the server back.
    fresh = run(attached_by().generate(request(prompt, temperature=1.0, max_new_tokens=60)))
    assert worst_difference(lab.module, prompt, fresh) < ROUNDING and fresh.version_spans[0].version == 0


def test_a_server_whose_update_broke_off_takes_the_next_one_whole(attached_by, lab: Lab, run):
    """As after a kill of its sender: paused, with a part of the weights of an update that nobody ends."""
    first, second, prompt = attached_by(), attached_by(), lab.prompts[0].ids
    run(first.start())
    client, half = first._replicas[0].serving, changed(lab.module, 0.2, seed=7)
    publisher, arguments = first._replicas[0].sender.publisher_for(client, client.receiver(), here=True)
    run(client.call("pause_generation", {"mode": "retract"}, 60.0))
    run(client.call("begin_weight_update", {}, 60.0))
    made, asked, ask = publisher(*arguments, address="127.0.0.1"), [], client.receiver().call

    def once(name, body, timeout_s):
        asked.append(name)
        if len(asked) > 1:
            raise RuntimeError("the sender is gone")
        ask(name, body, timeout_s)

    async def send():
        return await asyncio.to_thread(made.publish, named_weights(half), 6, 1 << 20, [Receiver(once)])

    assert run(send()) != [None]
    made.close()
    run(second.start())
    for version, module in ((0, lab.module), (8, changed(lab.module, 0.2, seed=8))):
        if version:
            run(second.apply(weight_update_for(second.capabilities, module, version)))
        output = run(second.generate(request(prompt, temperature=1.0)))
        assert output.version_spans == [VersionSpan(version, len(output.token_ids))]
        assert worst_difference(module, prompt, output) < ROUNDING


def test_abort_and_pause_at_a_server(attached_by, lab: Lab, run):
    engine, prompt = attached_by(), lab.prompts[0].ids

    async def go():
        with without_end(engine):
            cut = await engine.generate(request(prompt, max_new_tokens=LONG, temperature=HOT, deadline_s=0.2))
        await engine.pause("retract")
        held = asyncio.ensure_future(engine.generate(request(prompt)))
        await asyncio.sleep(0.1)
        assert not held.done()
        await engine.resume()
        return cut, await held

    cut, held = run(go())
    assert cut.finish_reason == "abort" and held.token_ids
    assert not cut.token_ids or worst_difference(lab.module, prompt, cut, HOT) < ROUNDING


def test_a_server_with_other_settings_is_refused_before_any_request(attached_by, run, tmp_path):
    good = attached_by()._options
    other = tmp_path / "other"
    narrow_model(other)
    for changes, message in (
        ({"dtype": "bfloat16"}, r"runs with --dtype float32\. Start it with --dtype bfloat16"),
        ({"max_model_len": 4000}, "takes sequences of 1400 tokens.*start it with --max-model-len 4000"),
        ({"model_path": str(other)}, "was started with another model: .*hidden_size"),
    ):
        engine = VLLMEngine(replace(good, **changes))
        with pytest.raises(ConfigError, match=message):
            run(engine.start())
        run(engine.close())
