"""New weights in a running vLLM, asked through its process alone."""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import verl_mt.extensions.cluster.vllm as package
from verl_mt.config_paths import resolve_model_path
from verl_mt.extensions.cluster.sglang.processes import encode, read_frame
from verl_mt.modeling.weights import named_weights

PYTHON = os.environ.get("VERL_MT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="VERL_MT_VLLM_PYTHON names no Python with vLLM (docs/vllm.md)"),
]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Process:
    """vLLM's process, asked one call at a time."""

    async def start(self, **arguments):
        ours, theirs = socket.socketpair()
        script = Path(package.__file__).with_name("process.py")
        words = [PYTHON, str(script), str(theirs.fileno())]
        environment = {**os.environ, **ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1", "PYTHONSAFEPATH": "1"}
        self.popen = subprocess.Popen(words, pass_fds=(theirs.fileno(),), env=environment, start_new_session=True)
        theirs.close()
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        self.writer.write(encode(arguments))
        frame = await read_frame(self.reader)
        assert frame is not None and frame[1] == "ready", frame

    async def call(self, name, **body):
        self.writer.write(encode((1, name, body)))
        _, kind, result = await read_frame(self.reader)
        assert kind == "ok", result
        return result

    async def sample(self, prompt):
        sampling = {"max_new_tokens": 40, "temperature": 0.7, "stop": [], "stop_token_ids": [], "seed": 1}
        body = {"rid": os.urandom(4).hex(), "input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        return (await self.call("generate", **body))["meta_info"]


def difference(module, prompt, answer):
    """Largest difference between vLLM's log-probs and the module's own."""
    log_probs, ids = map(list, zip(*answer["output_token_logprobs"], strict=True))
    with torch.no_grad():
        logits = module(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    own = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return float((own - torch.tensor(log_probs)).abs().max())


def versions(answer):
    """(version, first token, behind the last token) of each span."""
    return [tuple(span.values()) for span in answer["weight_versions"]]


def test_log_probs_after_an_update_are_those_of_the_new_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    path = resolve_model_path("verl_mt://tiny")
    old = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, old.config.vocab_size, (60,), generator=generator).tolist()
    with torch.no_grad():
        for weight in new.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.2)
    entries, data = [], bytearray()
    for name, tensor in named_weights(new):
        entries.append([name, list(tensor.shape), "float32", len(data)])
        data += tensor.detach().contiguous().numpy().tobytes()
    (tmp_path / "weights").write_bytes(data)

    async def go():
        process = Process()
        try:
            await process.start(
                model=path,
                dtype="float32",
                enforce_eager=True,
                max_model_len=512,
                block_size=32,
                logprobs_mode="processed_logprobs",
            )
            before = [await process.sample(prompt) for _ in range(2)]
            await process.call("pause_generation", mode="retract")
            await process.call("begin_weight_update")
            weights = {"path": str(tmp_path / "weights"), "entries": entries, "weight_version": "7"}
            await process.call("update_weights_from_tensor", **weights)
            await process.call("end_weight_update")
            await process.call("continue_generation")
            return [*before, await process.sample(prompt)]
        finally:
            process.writer.close()
            await asyncio.to_thread(process.popen.wait, 60)

    first, again, after = asyncio.run(go())
    assert [token for _, token in first["output_token_logprobs"]] == [
        token for _, token in again["output_token_logprobs"]
    ]
    assert first["cached_tokens"] == 0 and again["cached_tokens"] == 32
    assert versions(first) == [("default", 0, 40)] and difference(old, prompt, first) < 1e-4
    assert versions(after) == [("7", 0, 40)] and after["cached_tokens"] == 0
    assert difference(new, prompt, after) < 1e-4
    assert difference(old, prompt, after) > 0.1
