"""How much of the GPU's arithmetic the update step uses: achieved FLOP/s over the measured peak of matrix products.

    python benchmarks/mfu.py [--shapes 0.5B 1.5B] [--lengths 4096 8192 16384 32768] [--tokens 32768]

Needs a CUDA device. Models have the shapes of Qwen2.5 0.5B and 1.5B and random weights in bfloat16, with float32 master
weights in the optimizer. A step is `ActorWorker.update` on `--tokens` tokens in rows of one length, an eighth of each
the prompt, GRPO's loss, every sampled token trained: forward, backward, clipping, AdamW. The best of the repetitions.

FLOPs are those that the model needs, 3 times the forward pass's (Chowdhery et al. 2022, PaLM, arXiv:2204.02311,
appendix B): 2 per weight and token in the layers; 2 per weight of the head and *sampled* token; 2 S hidden per token
and layer in causal attention over rows of S tokens. What is recomputed does not count. The peak is the best of products
of two 8192 x 8192 matrices in bfloat16 on the same device, just before.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
VOCAB = 151936


def make_policy(shape: dict[str, int], length: int, device: str, attention: str, vocabulary: int = VOCAB) -> Any:
    """A random Qwen2 in bfloat16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        attn_implementation=attention,
        dtype=torch.bfloat16,
        **shape,
    )
    with torch.device(device):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def make_update_batch(length: int, tokens: int, vocabulary: int) -> Any:
    """Rows of one length in groups of up to 8, with advantages; nothing in common but the prompts."""
    import torch

    from verl_mt.data import batch as columns
    from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord

    generator = torch.Generator().manual_seed(0)
    trajectories, prompt = [], []
    for row in range(max(1, tokens // length)):
        if row % 8 == 0:
            prompt = torch.randint(1, vocabulary, (length // 8,), generator=generator).tolist()
        size = length - len(prompt)
        record = TrajectoryRecord()
        record.append_given(prompt, kind="prompt", turn=0)
        answer = torch.randint(1, vocabulary, (size,), generator=generator).tolist()
        record.append_sampled(answer, [-12.0] * size, [0] * size, turn=1)
        group = f"g{row // 8}"
        made = Trajectory(f"{group}s{row % 8}", prompt_id=group, group_id=group, episode_id=f"e{row}", records=[record])
        made.reward, made.stop_reason = float(row % 2), StopReason.FINISHED
        trajectories.append(made)
    batch = columns.build_batch(trajectories, pad_token_id=0)
    assert batch is not None
    sign_B1 = torch.where(torch.arange(len(batch)) % 2 == 0, -1.0, 1.0).unsqueeze(1)
    batch[columns.ADVANTAGES] = sign_B1 * batch[columns.LOSS_MASK]
    return batch


def flops_of(model: Any, batch: Any) -> float:
    """Of one update; see above."""
    from verl_mt.data import batch as columns

    config = model.config
    in_layers = sum(p.numel() for p in model.model.layers.parameters())
    lengths = batch[columns.ATTENTION_MASK].sum(1).double()
    head = config.hidden_size * config.vocab_size * float(batch[columns.LOSS_MASK].sum())
    attention = 2 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 3 * (2 * in_layers * float(lengths.sum()) + 2 * head + attention)


def seconds_of_update(model: Any, batch: Any, repetitions: int, *, share: bool) -> float:
    """The best."""
    from verl_mt.config.actor import ActorConfig
    from verl_mt.modeling.passes import choose_passes, use_passes
    from verl_mt.workers.actor import ActorWorker

    use_passes(model, choose_passes(model, share_prefixes=share))
    config = ActorConfig(ppo_max_token_len=32768, skip_zero_advantage=False)
    actor = ActorWorker(model, config, temperature=1.0, total_steps=repetitions + 1)
    times = []
    for _ in range(repetitions + 1):
        _wait(model)
        start = time.perf_counter()
        actor.update(batch.clone())
        _wait(model)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def doctors_memory(model: Any, length: int, tokens: int, *, checkpointing: bool) -> float:
    """Bytes of the same update as the doctor computes them: without an engine's cache and other processes."""
    from verl_mt.config.compose import compose
    from verl_mt.extensions.inspection.doctor.findings import Subject
    from verl_mt.extensions.inspection.doctor.resources import Demand

    keys = {
        "actor.ppo_max_token_len": 32768, "model.dtype": "bfloat16", "rollout.n": 1,
        "model.enable_gradient_checkpointing": checkpointing,
        "rollout.prompt_length": length // 8, "rollout.response_length": length - length // 8,
    }  # fmt: skip
    words = [f"actor_rollout_ref.{key}={value}" for key, value in keys.items()]
    words += ["algorithm.adv_estimator=reinforce_plus_plus", f"data.train_batch_size={max(1, tokens // length)}"]
    demand = Demand.of(Subject(compose(words), module=model))
    return demand.peak_bytes - demand.cache_bytes - demand.other_bytes


def _wait(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()


def matmul_peak(device: str, size: int = 8192, repetitions: int = 20) -> float:
    """FLOP/s of a product of two bfloat16 matrices, the best of the repetitions."""
    import torch

    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(repetitions + 3):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        left @ right
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=32768, help="per update")
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "flash_attention_2"))
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--share-prefixes", action="store_true", help="FLOPs then count shared tokens once per row")
    parser.add_argument("--cudnn", action="store_true", help="cuDNN's attention too, which the trainer does without")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the commands, with toy")
    from provenance import add_out, write_rows

    add_out(parser)
    args = parser.parse_args()
    import torch

    torch.backends.cuda.enable_cudnn_sdp(args.cudnn)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("mfu.py measures a GPU, and torch finds no CUDA device; the other benchmarks run without one")
    peak = matmul_peak("cuda") if on_gpu else matmul_peak("cpu", size=256, repetitions=2)
    print(
        f"{torch.cuda.get_device_name() if on_gpu else 'cpu'}, torch {torch.__version__}; matrix products "
        f"{peak / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    rows = []
    for name in args.shapes:
        vocabulary = VOCAB if on_gpu else 1024
        for length in args.lengths:
            model = make_policy(SHAPES[name], length, args.device, args.attention, vocabulary)
            if args.checkpointing:
                model.gradient_checkpointing_enable()
            batch = make_update_batch(length, args.tokens, vocabulary)
            seconds = seconds_of_update(model, batch, args.repetitions, share=args.share_prefixes)
            flops = flops_of(model, batch)
            memory = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
            formula = doctors_memory(model, length, args.tokens, checkpointing=args.checkpointing) / 1e9
            print(
                f"{name}, {len(batch)} rows of {length}: {seconds:.2f} s, {flops / seconds / 1e12:.0f} TFLOP/s, "
                f"MFU {flops / seconds / peak:.1%}, {memory:.1f} GB (by the doctor's formula {formula:.1f})",
                flush=True,
            )
            row = {"shape": name, "rows": len(batch), "length": length, "s": seconds, "TFLOP/s": flops / seconds / 1e12}
            rows.append(
                row | {"MFU": flops / seconds / peak, "GB": memory, "formula GB": formula, "peak TFLOP/s": peak / 1e12}
            )
            del model
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
