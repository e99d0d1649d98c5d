"""Where the time of an update goes, by class of kernel, without and with each option for faster updates.

    python benchmarks/gpu/update_parts.py [--shape 0.5B] [--length 4096] [--tokens 32768] [--checkpointing]

The update is that of `mfu.py`, in one process for all options: plain first, then each option alone, then all that go
together. Its time is the best of the repetitions, without the profiler. The shares are of one more update, under
torch.profiler:

- *head*: all that the log-probs behind the hidden states run, forward and backward;
- *optimizer*: its step;
- *products*, *attention*, *elementwise* (all others): by the kernel's name;
- *idle*: the rest of the time.

On a CPU, where operators take the place of kernels, it shows that the command works.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CLASSES = ("products", "attention", "elementwise", "head", "optimizer", "idle")
_RANGES = {"head": re.compile("HeadLogProbs|FusedHead"), "optimizer": re.compile(r"^Optimizer\.step")}
_ATTENTION = re.compile("attention|attn|flash|fmha", re.IGNORECASE)
_PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|matmul|(^|::)(add|b)?mm$", re.IGNORECASE)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy_metric=False": {"entropy_metric": False},
    "fused_head": {"fused_head": True},
    "fused_adamw": {"fused_adamw": True},
    "varlen_attention": {"varlen_attention": True},
    "compile_layers": {"compile_layers": True},
    "recompute=elementwise": {"recompute": "elementwise"},
}


def class_of(name: str, ancestors: list[str]) -> str:
    """Of a kernel (on a CPU, of an operator).

    Args:
        name: its own.
        ancestors: operators and ranges that it ran in.
    """
    for kind, pattern in _RANGES.items():
        if any(pattern.search(each) for each in [name, *ancestors]):
            return kind
    if _ATTENTION.search(name):
        return "attention"
    return "products" if _PRODUCTS.search(name) else "elementwise"


def shares_of(events: Any, wall_us: float, on_gpu: bool) -> dict[str, float]:
    """Class -> its share of the time; kernels of one stream do not overlap."""
    spent: Counter[str] = Counter()
    for event in events:
        if str(event.device_type) != "DeviceType.CPU":
            continue  # what ran on the device hangs below the operator that launched it
        parts = [(k.name, k.duration) for k in event.kernels] if on_gpu else [(event.name, event.self_cpu_time_total)]
        ancestors, above = [event.name], event.cpu_parent
        while above is not None:
            ancestors.append(above.name)
            above = above.cpu_parent
        for name, microseconds in parts:
            spent[class_of(name, ancestors)] += microseconds
    shares = {kind: spent[kind] / wall_us for kind in CLASSES[:-1]}
    return shares | {"idle": max(0.0, 1 - sum(shares.values()))}


def actor_with(model: Any, keys: dict[str, Any], *, updates: int) -> Any:
    """An actor around the model with these options on."""
    from verl_mt.config.actor import ActorConfig
    from verl_mt.extensions.fast_update import recompute, tune
    from verl_mt.modeling.passes import choose_passes, use_passes
    from verl_mt.workers.actor import ActorWorker

    use_passes(model, choose_passes(model, share_prefixes=False))
    keys = dict(keys)
    if keys.pop("recompute", "layers") == "elementwise":
        recompute.recompute_elementwise(model)
    config = ActorConfig(ppo_max_token_len=32768, skip_zero_advantage=False, **keys)
    actor = ActorWorker(model, config, temperature=1.0, total_steps=updates)
    tune.tune_model(model, config, model.device)
    if keys.get("fused_adamw"):
        tune.use_fused_kernel(actor.optimizer)
    return actor


def measure(actor: Any, batch: Any, repetitions: int) -> tuple[float, dict[str, float]]:
    """(seconds of the best update, shares of a profiled one)."""
    from mfu import _wait
    from torch.profiler import ProfilerActivity, profile

    on_gpu = actor.module.device.type == "cuda"

    def seconds() -> float:
        _wait(actor.module)
        start = time.perf_counter()
        actor.update(batch.clone())
        _wait(actor.module)
        return time.perf_counter() - start

    seconds()  # compiles, and makes the optimizer's state
    best = min(seconds() for _ in range(repetitions))
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        wall = seconds()
    return best, shares_of(profiled.events(), wall * 1e6, on_gpu)


def chosen(checkpointing: bool, on_gpu: bool) -> dict[str, dict[str, Any]]:
    """The options that this machine and these settings allow, and all of them that go together."""
    left_out = {"recompute=elementwise"} if not checkpointing else set()
    left_out |= set() if on_gpu else {"varlen_attention"}
    found = {name: keys for name, keys in OPTIONS.items() if name not in left_out}
    together = [keys for name, keys in found.items() if name != "recompute=elementwise"]
    return found | {"all but recompute": {name: value for keys in together for name, value in keys.items()}}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    from mfu import SHAPES, VOCAB, flops_of, make_policy, make_update_batch, matmul_peak
    from provenance import add_out, write_rows

    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=32768, help="per update")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the command, with toy")
    parser.add_argument("--only", nargs="+", choices=list(OPTIONS), help="these options alone")
    add_out(parser)
    args = parser.parse_args()
    import torch

    from verl_mt.modeling import head_log_probs

    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("update_parts.py measures a GPU, and torch finds no CUDA device; --device cpu --shape toy tries it")
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not on_gpu:
        head_log_probs.LOGITS_AT_ONCE = 2**12  # else the head of a toy is not a function that can be told apart
    peak = matmul_peak("cuda") if on_gpu else matmul_peak("cpu", size=256, repetitions=2)
    vocabulary, rows = VOCAB if on_gpu else 1024, []
    batch = make_update_batch(args.length, args.tokens, vocabulary)
    for name, keys in chosen(args.checkpointing, on_gpu).items():
        if args.only and name not in args.only:
            continue
        torch._dynamo.reset()  # what was compiled for the last model would count against the limit of this one
        model = make_policy(SHAPES[args.shape], args.length, args.device, "sdpa", vocabulary)
        if args.checkpointing:
            model.gradient_checkpointing_enable()
        seconds, shares = measure(actor_with(model, keys, updates=args.repetitions + 2), batch, args.repetitions)
        used = flops_of(model, batch) / seconds / peak
        said = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
        print(f"{args.shape}, {name}: {seconds:.2f} s, MFU {used:.1%}; {said}", flush=True)
        rows.append({"shape": args.shape, "option": name, "s": seconds, "MFU": used, **shares})
        del model
        if on_gpu:
            torch.cuda.empty_cache()
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
