"""Rollout tokens per second of the local engine, SGLang, vLLM and transformers' `generate`, and how often caches hit.

    python benchmarks/rollout_throughput.py [--sizes tiny small] [--concurrency 1 16 64] [--repetitions 2]
    python benchmarks/rollout_throughput.py --sizes tiny smollm2 --vllm-python vllm-venv/bin/python
    python benchmarks/rollout_throughput.py --model FOLDER --dtype bfloat16 --concurrency 64     # of a real size

The work is multi-turn: a shared system prompt, groups of 8 samples per prompt, two or three turns of 8 to 48 sampled
tokens, an observation of 8 to 30 tokens after each. `--concurrency C` conversations are under way at once. All sample
at T = 1; engines also return log-probs, `generate` does not.

- local: the in-process engine; a conversation's next turn is asked for as soon as it may be.
- sglang: the colocated engine, in its own process, on the same terms. Needs SGLang beside verl_mt (docs/sglang.md).
- vllm: the same. Needs a Python with vLLM in `--vllm-python` (docs/vllm.md).
- generate: as people use it for this: batches of C conversations in lock-step, left-padded, the whole history
  prefilled again at each turn, everyone waiting for the longest turn. Tokens beyond a turn's end do not count.

Repetitions are interleaved and have prompts of their own, so that no cache holds what an earlier one left; medians. The
hit rate of turn k is `cached_tokens` over prompt tokens, of all k-th turns; `possible` is that of a cache that holds
exactly what the conversation itself has computed before (in the first turn: nothing). CPU seconds are those of all
processes that do the work. An engine that is not installed is left out and named. No GPU is needed. The last line is
for the first size and the largest C, in tokens per second: `rollout at C conversations: local / generate = R...`, with
the other engines behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from local_engine import Conversation, load_model, run_generate
from models import SIZES, VOCAB, make_model, save
from provenance import add_out, write_rows

LENGTH, SYSTEM, GROUP = 512, 90, 8


@dataclass
class Measured:
    """One engine at one concurrency."""

    tokens: int = 0
    """Sampled, per repetition."""
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By turn, as are those below."""
    prompt: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    possible: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / statistics.median(self.seconds)


def make_work(count: int, seed: int, vocabulary: int = VOCAB) -> list[Conversation]:
    """Conversations of a repetition: the same lengths whatever the seed, other tokens."""
    lengths, ids = random.Random(2), random.Random(1000 + seed)
    system = ids.choices(range(vocabulary), k=SYSTEM)
    prompt: list[int] = []
    work = []
    for index in range(count):
        if index % GROUP == 0:
            prompt = system + ids.choices(range(vocabulary), k=lengths.randint(20, 50))
        sizes = [lengths.randint(8, 48) for _ in range(lengths.randint(2, 3))]
        turns = [(size, ids.choices(range(vocabulary), k=lengths.randint(8, 30))) for size in sizes]
        work.append(Conversation(prompt, turns))
    return work


async def converse(engine: Any, name: str, order: int, conversation: Conversation, into: Measured) -> None:
    """All turns of one conversation."""
    from verl_mt.data.requests import GenerationRequest, SamplingParams

    stream = list(conversation.prompt)
    engine.open_session(name, order)
    known = 0
    for turn, (size, observation) in enumerate(conversation.turns):
        request = GenerationRequest(stream, SamplingParams(max_new_tokens=size), f"{name}/{turn}", name)
        output = await engine.generate(request)
        assert output.token_ids is not None and len(output.token_ids) == size
        into.cached[turn] += output.cached_tokens
        into.prompt[turn] += len(stream)
        into.possible[turn] += known
        known = len(stream) + size - 1  # the last token was sampled, and has no keys and values yet
        stream = stream + output.token_ids + observation
    engine.close_session(name)


async def run_engine(engine: Any, work: list[Conversation], concurrency: int, name: str, into: Measured) -> None:
    """`concurrency` conversations at any time."""
    free = asyncio.Semaphore(concurrency)

    async def one(index: int) -> None:
        async with free:
            await converse(engine, f"{name}-{index}", index, work[index], into)

    used, begun = cpu_seconds(engine), time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(len(work))))
    into.seconds.append(time.perf_counter() - begun)
    into.cpu.append(cpu_seconds(engine) - used)


def run_batches(model: Any, work: list[Conversation], concurrency: int, into: Measured) -> None:
    """`generate`, `concurrency` conversations in a batch."""
    used = time.process_time()
    into.seconds.append(
        sum(run_generate(model, work[i : i + concurrency])[0] for i in range(0, len(work), concurrency))
    )
    into.cpu.append(time.process_time() - used)
    for conversation in work:
        length = len(conversation.prompt)
        for turn, (size, observation) in enumerate(conversation.turns):
            into.prompt[turn] += length
            into.cached[turn] += 0
            length += size + len(observation)


def cpu_seconds(engine: Any) -> float:
    """Of this process, and of the process groups that the engine leads."""
    groups, ticks = set(getattr(engine, "pids", [])), 0
    for entry in Path("/proc").iterdir() if groups else ():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) in groups else 0
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def models(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, Any, str]]:
    """Name, module and folder of each; none ends a turn by itself."""
    if args.model:
        model, path = load_model(args.model, args.dtype), folder / "model"
        model.save_pretrained(path)
        for file in Path(args.model).glob("tokenizer*"):
            shutil.copy(file, path)
        yield Path(args.model).name, model, str(path)
        return
    for size in args.sizes:
        model = make_model(size)
        yield size, model, save(model, folder / size)


def processes(path: str, args: argparse.Namespace) -> dict[str, Any]:
    """Engines in processes of their own, not started; those that are not installed are named and left out."""
    from verl_mt.config.compose import compose
    from verl_mt.errors import ConfigError
    from verl_mt.extensions.cluster.config import keys_of
    from verl_mt.extensions.cluster.sglang.engine import SGLangEngine
    from verl_mt.extensions.cluster.sglang.options import SGLangOptions
    from verl_mt.extensions.cluster.vllm.engine import VLLMEngine
    from verl_mt.extensions.cluster.vllm.options import VLLMOptions, python_of

    options: dict[str, Any] = {
        "model_path": path, "dtype": args.dtype, "max_model_len": LENGTH, "max_num_seqs": max(args.concurrency),
    }  # fmt: skip
    found: dict[str, Any] = {}
    if find_spec("sglang") is None:
        print(f"sglang: left out, {sys.executable} has no SGLang (docs/sglang.md)")
    else:
        found["sglang"] = SGLangEngine(SGLangOptions(**options))
    words = ["name=vllm", *([f"python={args.vllm_python}"] if args.vllm_python else [])]
    try:
        keys = keys_of(compose([f"actor_rollout_ref.rollout.{word}" for word in words]).actor_rollout_ref.rollout)
        found["vllm"] = VLLMEngine(VLLMOptions(**options, python=python_of(keys)))
    except ConfigError as error:
        print(f"vllm: left out, {error}")
    return found


async def measure(size: str, model: Any, path: str, args: argparse.Namespace) -> dict[tuple[int, str], Measured]:
    """All engines at all concurrencies, for a model."""
    from verl_mt.engines.local import LocalEngine, LocalOptions

    found: dict[tuple[int, str], Measured] = defaultdict(Measured)
    most, vocabulary = max(args.concurrency), model.config.vocab_size
    engines = processes(path, args)
    try:
        for engine in engines.values():
            await engine.start()
            await run_engine(engine, make_work(2, -1, vocabulary), 2, "warm", Measured())
        for number in range(args.repetitions):
            for concurrency in args.concurrency:
                work = make_work(max(args.conversations, concurrency), 100 * number + concurrency, vocabulary)
                name = f"{size}-{number}-{concurrency}"
                for engine_name in ("local", *engines, "generate"):
                    into = found[concurrency, engine_name]
                    into.tokens = sum(size for conversation in work for size, _ in conversation.turns)
                    if engine_name == "generate":
                        await asyncio.to_thread(run_batches, model, work, concurrency, into)
                    elif engine_name in engines:
                        await run_engine(engines[engine_name], work, concurrency, name, into)
                    else:
                        local = LocalEngine(model, end_token_ids=(), options=LocalOptions(max_num_seqs=most))
                        await run_engine(local, work, concurrency, name, into)
                        await local.close()
                    print(f"  {name} {engine_name}: {into.seconds[-1]:.1f} s", flush=True)
    finally:
        for engine in engines.values():
            await engine.close()
    return found


def show(size: str, found: dict[tuple[int, str], Measured]) -> None:
    """A table."""
    print(f"\n{size}\n| conversations | engine | tokens/s | CPU s / 1000 tokens | / generate | hit rate by turn |")
    print("|---|---|---|---|---|---|")
    for (concurrency, name), m in found.items():
        rates = ", ".join(f"{m.cached[turn] / m.prompt[turn]:.2f}" for turn in sorted(m.prompt))
        cpu = 1000 * statistics.median(m.cpu) / m.tokens
        against = m.rate / found[concurrency, "generate"].rate
        print(f"| {concurrency} | {name} | {m.rate:.0f} | {cpu:.2f} | {against:.2f} | {rates} |")
    for (concurrency, name), m in found.items():
        if name == "local":
            rates = ", ".join(f"{m.possible[turn] / m.prompt[turn]:.2f}" for turn in sorted(m.prompt))
            print(f"possible at {concurrency}: {rates}", flush=True)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=[*SIZES], nargs="+", default=["tiny", "small"])
    parser.add_argument("--model", help="a folder with a model, instead of --sizes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of --model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--conversations", type=int, default=4, help="of one repetition, at least; else --concurrency")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--vllm-python", default=os.environ.get("VERL_MT_VLLM_PYTHON"), help="a Python with vLLM")
    parser.add_argument("--threads", type=int, default=1)
    add_out(parser)
    args = parser.parse_args()
    if args.dtype != "float32" and not args.model:
        parser.error("--dtype is of --model; random models are float32")
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    import torch

    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {args.threads} thread(s), load {load:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="rollout_throughput_") as folder:
        results, rows = [], []
        for name, model, path in models(Path(folder), args):
            results.append(asyncio.run(measure(name, model, path, args)))
            show(name, results[-1])
            rows += [
                {"model": name, "conversations": number, "engine": engine, **vars(of)}
                for (number, engine), of in results[-1].items()
            ]
    write_rows(args.out, rows)
    first, most = results[0], max(args.concurrency)
    plain = first[most, "generate"].rate
    ratios = [
        f"{name} / generate = {of.rate / plain:.2f}"
        for (number, name), of in first.items()
        if number == most and name != "generate"
    ]
    print(f"rollout at {most} conversations: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
