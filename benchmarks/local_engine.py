"""The local engine against transformers' `generate`, in one process, on the same model.

    python benchmarks/local_engine.py [--threads 1] [--sequences 128] [--repetitions 3] [--group-size 8]
    python benchmarks/local_engine.py --model FOLDER --dtype bfloat16 --threads 2 --sequences 64    # of a real size

(a) One batch of different prompts of equal length, equal numbers of new tokens: nothing to share, nothing to keep.
(b) Multi-turn work: groups of samples per prompt, three turns of uneven length, an observation after each. `generate`
    runs in lock-step, as people use it for this: left-padded batches, the whole history prefilled again at each turn,
    everyone waiting for the longest turn. Only tokens that belong to a turn count, for both.

(c) Groups of samples again, behind a long system prompt (`--system-tokens`), in the local engine alone, on a CPU: what
    reading a common beginning once (`verl_mt/engines/local/shared_prefix.py`) gains over reading each row's own copy.

Both sample at T = 1; ours also computes the log-probs. Repetitions are interleaved, so that a busy machine hurts both;
medians are compared, and CPU seconds are shown beside. The last lines are the ratios (above 1: the local engine is
faster). On a CPU (a) and (b) use the compiled kernels; `--kernels torch` uses torch's operators, as (c) does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models import VOCAB, make_model
from provenance import add_out, write_rows

PROMPT_TOKENS, NEW_TOKENS, NUM_TURNS = 128, 64, 3


@dataclass
class Conversation:
    """A prompt, and per turn how many tokens the model says and what it is told then."""

    prompt: list[int]
    turns: list[tuple[int, list[int]]]


def equal_work(count: int, vocabulary: int = VOCAB) -> list[Conversation]:
    """(a)"""
    rng = random.Random(1)
    return [Conversation(rng.choices(range(vocabulary), k=PROMPT_TOKENS), [(NEW_TOKENS, [])]) for _ in range(count)]


def multi_turn_work(
    count: int, group_size: int, vocabulary: int = VOCAB, system_tokens: int = 90
) -> list[Conversation]:
    """(b): one system prompt, questions of 20-50 tokens, 1-3 turns of 8-48 tokens, observations of 8-30."""
    rng = random.Random(2)
    system, work = rng.choices(range(vocabulary), k=system_tokens), []
    for index in range(count):
        if index % group_size == 0:
            prompt = system + rng.choices(range(vocabulary), k=rng.randint(20, 50))
        sizes = [rng.randint(8, 48) for _ in range(rng.randint(NUM_TURNS - 1, NUM_TURNS))]
        work.append(
            Conversation(prompt, [(size, rng.choices(range(vocabulary), k=rng.randint(8, 30))) for size in sizes])
        )
    return work


def run_ours(
    model: Any, work: list[Conversation], temperature: float = 1.0, kernels: str = "torch"
) -> tuple[float, list[list[int]]]:
    """Seconds from the first request to the last answer, engine start excluded; and the streams."""
    from verl_mt.data.requests import GenerationRequest, SamplingParams
    from verl_mt.engines.local import LocalEngine, LocalOptions
    from verl_mt.extensions.cpu_kernels.build import build
    from verl_mt.extensions.cpu_kernels.forward import CompiledForward

    options = LocalOptions(max_num_seqs=len(work))
    if kernels == "compiled":
        options = replace(options, forward=partial(CompiledForward, built=build()))

    async def converse(engine: LocalEngine, name: str, conversation: Conversation) -> list[int]:
        stream = list(conversation.prompt)
        for number, (size, observation) in enumerate(conversation.turns):
            sampling = SamplingParams(max_new_tokens=size, temperature=temperature)
            output = await engine.generate(GenerationRequest(stream, sampling, f"{name}/{number}", name))
            assert output.token_ids is not None and len(output.token_ids) == size
            stream = stream + output.token_ids + observation
        engine.close_session(name)
        return stream

    async def go() -> tuple[float, list[list[int]]]:
        engine = LocalEngine(model, end_token_ids=(), options=options)
        start = time.perf_counter()
        streams = await asyncio.gather(*[converse(engine, f"s{i}", c) for i, c in enumerate(work)])
        seconds = time.perf_counter() - start
        await engine.close()
        return seconds, streams

    return asyncio.run(go())


def run_generate(model: Any, work: list[Conversation], temperature: float = 1.0) -> tuple[float, list[list[int]]]:
    """The same work in lock-step batches."""
    import torch

    streams = [list(c.prompt) for c in work]
    start = time.perf_counter()
    for turn in range(max(len(c.turns) for c in work)):
        active = [i for i, c in enumerate(work) if turn < len(c.turns)]
        longest = max(len(streams[i]) for i in active)
        ids = torch.tensor([[0] * (longest - len(streams[i])) + streams[i] for i in active])
        mask = torch.tensor([[0] * (longest - len(streams[i])) + [1] * len(streams[i]) for i in active])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(work[i].turns[turn][0] for i in active),
            **(sampling if temperature else {"do_sample": False}),
        )
        for i, new in zip(active, output[:, longest:].tolist()):
            size, observation = work[i].turns[turn]
            streams[i] += new[:size] + observation
    return time.perf_counter() - start, streams


def load_model(folder: str, dtype: str) -> Any:
    """A model that never ends a turn by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = None, 0
    return model


def run_unshared(model: Any, work: list[Conversation], temperature: float = 1.0) -> tuple[float, list[list[int]]]:
    """`run_ours`, where every row reads its own copy of what it has in common with others."""
    from verl_mt.engines.local import shared_prefix

    worth = shared_prefix.WORTH_SHARING
    shared_prefix.WORTH_SHARING = 1 << 60
    try:
        return run_ours(model, work, temperature)
    finally:
        shared_prefix.WORTH_SHARING = worth


def compare(
    title: str,
    model: Any,
    work: list[Conversation],
    repetitions: int,
    baseline: str = "generate",
    kernels: str = "torch",
) -> dict[str, Any]:
    """Interleaved repetitions; `ratio` says how many times faster than the baseline ours is, by medians."""
    count = sum(size for c in work for size, _ in c.turns)
    sample = work[:: max(1, len(work) // 16)]
    runners = {
        "local engine": partial(run_ours, kernels=kernels),
        baseline: {"generate": run_generate, "unshared": run_unshared}[baseline],
    }
    first, second = (runner(model, sample, temperature=0.0)[1] for runner in runners.values())
    print(
        f"{title}: {len(work)} sequences, {count} tokens to sample; greedy streams identical: {first == second}",
        flush=True,
    )
    wall: dict[str, list[float]] = {name: [] for name in runners}
    cpu: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repetitions):
        for name, runner in runners.items():
            before = time.process_time()
            wall[name].append(runner(model, work)[0])
            cpu[name].append(time.process_time() - before)
    for name, seconds in wall.items():
        median, used = statistics.median(seconds), statistics.median(cpu[name])
        spread = ", ".join(f"{s:.2f}" for s in seconds)
        print(f"  {name:<13} {count / median:6.0f} tokens/s, median {median:.2f} s of [{spread}]; {used:.2f} CPU s")
    ratio = statistics.median(wall[baseline]) / statistics.median(wall["local engine"])
    same, of_cpu = first == second, statistics.median(cpu[baseline]) / statistics.median(cpu["local engine"])
    found = {"work": title, "kernels": kernels, "tokens": count, "same greedy": same, "wall, s": wall, "CPU, s": cpu}
    return {**found, "ratio": ratio, "ratio of CPU s": of_cpu}


def ratios(found: dict[str, Any]) -> str:
    """Of wall time and of CPU time."""
    return f"{found['ratio']:.2f} (CPU {found['ratio of CPU s']:.2f})"


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a model; default: a random one of the shipped model's size")
    parser.add_argument("--size", default="tiny", help="of the random model, see models.py")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of --model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt in (b); 1 = all prompts differ")
    parser.add_argument("--system-tokens", type=int, default=600, help="the system prompt of (c)")
    parser.add_argument("--kernels", default="compiled", choices=("compiled", "torch"), help="on a CPU, of (a) and (b)")
    parser.add_argument("--parts", default="abc", help="which of (a), (b), (c); default: all, on a GPU the first two")
    add_out(parser)
    args = parser.parse_args()
    if not set(args.parts) <= set("abc"):
        parser.error(f"--parts {args.parts}: expected letters of abc")
    if args.dtype != "float32" and not args.model:
        parser.error("--dtype is of --model; the random model is float32")
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    import torch

    torch.set_num_threads(args.threads)
    model = (load_model(args.model, args.dtype) if args.model else make_model(args.size)).to(args.device)
    vocabulary = model.config.vocab_size
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    count, group, closing, found = args.sequences, args.group_size, [], []
    options = {"repetitions": args.repetitions, "kernels": args.kernels if args.device == "cpu" else "torch"}
    if "a" in args.parts:
        found.append(compare("(a) one equal-length batch", model, equal_work(count, vocabulary), **options))
        closing.append(f"(a) one equal-length batch: local engine / generate = {ratios(found[-1])}")
    if "b" in args.parts:
        found.append(compare("(b) multi-turn", model, multi_turn_work(count, group, vocabulary), **options))
        closing.append(f"(b) multi-turn work: local engine / generate = {ratios(found[-1])}")
    if "c" in args.parts and args.device == "cpu":
        work = multi_turn_work(count, group, vocabulary, args.system_tokens)
        found.append(compare("(c) a long system prompt", model, work, args.repetitions, "unshared"))
        shared = found[-1]["ratio"]
        closing.append(f"(c) {args.system_tokens} tokens before every prompt: read once / by every row = {shared:.2f}")
    write_rows(args.out, found)
    print("\n".join(closing))


if __name__ == "__main__":
    main()
