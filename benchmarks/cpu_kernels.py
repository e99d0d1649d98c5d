"""Rollouts of the default task with the compiled CPU kernels of the local engine, and with torch's operators.

    python benchmarks/cpu_kernels.py [--prompts 64] [--model verl_mt://tiny] [--dtype bfloat16]

Both ways sample the same prompts with the same seeds, eight samples each, tools included. Turns with equal input are
compared token for token. Where a turn differs, the distance says how far the random number of its first different token
lies from a boundary of the cumulative distribution, in probability: the two ways differ only within rounding of one.
CPU seconds are the process's, for all of a rollout: engine, parsing, tools, rewards, sanity check.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from provenance import add_out, write_rows

Turns = dict[tuple[Any, tuple[int, ...]], Any]
"""(seed, input ids) -> output of the engine."""


def rollouts(args: argparse.Namespace, kernels: str, folder: str) -> tuple[float, Turns, Any]:
    """CPU seconds of one step's rollouts after a first one, all turns, and the model."""
    from verl_mt.config.compose import compose
    from verl_mt.engines.local import LocalEngine
    from verl_mt.trainer.build import build_trainer

    keys = {
        "data.train_batch_size": args.prompts,
        "data.val_files": "null",
        "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.model.dtype": args.dtype,
        "actor_rollout_ref.rollout.kernels": kernels,
        "trainer.default_local_dir": folder,
        "trainer.device": "cpu",
        "trainer.num_threads": args.threads,
        "trainer.logger": "[]",
        "trainer.val_before_train": False,
    }
    turns: Turns = {}
    plain = LocalEngine.generate

    async def kept(self: LocalEngine, request: Any) -> Any:
        output = await plain(self, request)
        turns[request.sampling.seed, tuple(request.input_ids)] = output
        return output

    LocalEngine.generate = kept  # type: ignore[method-assign]
    try:
        with closing(build_trainer(compose([f"{key}={value}" for key, value in keys.items()]))) as trainer:
            start = time.process_time()
            trainer.source.begin(0)
            trainer.source.collect(0)
            return time.process_time() - start, turns, trainer.workers.policy_module
    finally:
        LocalEngine.generate = plain  # type: ignore[method-assign]


def distance(model: Any, key: tuple[Any, tuple[int, ...]], one: list[int], two: list[int]) -> float:
    """Of the random number of the first different token from the nearest boundary between the two tokens."""
    import torch

    from verl_mt.engines.local.sampling import BLOCK, uniforms

    seed, prompt = key
    place = next(k for k, (a, b) in enumerate(zip(one, two)) if a != b)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1].double()
    bounds = torch.softmax(logits, 0).cumsum(0)[min(one[place], two[place]) : max(one[place], two[place])]
    return float((bounds - uniforms(seed, place // BLOCK)[place % BLOCK]).abs().min())


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="verl_mt://tiny", help="a model folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    add_out(parser)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    seconds: dict[str, list[float]] = {"compiled": [], "torch": []}
    found: dict[str, Turns] = {}
    model: Any = None
    for number in range(args.repetitions):
        for kernels in seconds:
            with tempfile.TemporaryDirectory() as folder:
                used, found[kernels], model = rollouts(args, kernels, str(Path(folder) / f"run{number}"))
            seconds[kernels].append(used)
    ours, torchs = found["compiled"], found["torch"]
    both = [key for key in ours if key in torchs]
    differ = [key for key in both if ours[key].token_ids != torchs[key].token_ids]
    far = [distance(model.eval(), key, ours[key].token_ids, torchs[key].token_ids) for key in differ]
    pairs = [(ours[k].log_probs, torchs[k].log_probs) for k in both if ours[k].token_ids == torchs[k].token_ids]
    gaps = [abs(x - y) for a, b in pairs for x, y in zip(a, b)]
    apart, mean, beyond = max(gaps), statistics.fmean(gaps), sum(gap > 1e-5 for gap in gaps)
    ratio = statistics.median(seconds["torch"]) / statistics.median(seconds["compiled"])
    same, tokens = len(both) - len(far), sum(len(turn.token_ids) for turn in ours.values())
    row = {"turns": len(both), "same": same, "tokens": tokens, "distances": far, "CPU, s": seconds}
    row |= {"log-probs, most": apart, "log-probs, mean": mean, "log-probs beyond 1e-5": beyond}
    write_rows(args.out, [{**row, "ratio": ratio}])
    print(f"{tokens} tokens; CPU s {seconds}; distances {[f'{x:.1e}' for x in far]}")
    print(f"log-probs differ by {mean:.1e} in the mean; {beyond} of {len(gaps)} by more than 1e-5")
    print(
        f"cpu kernels: {same} of {len(both)} turns identical, distance at most {max(far, default=0):.1e}, log-probs "
        f"within {apart:.1e}, torch / compiled = {ratio:.2f} in CPU"
    )


if __name__ == "__main__":
    main()
