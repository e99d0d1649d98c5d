"""What attention shapes that a GPU has not seen cost: cuDNN's attention among torch's kernels, and not.

    python benchmarks/new_shapes.py [--device cuda] [--repetitions 3] [--rows 32] [--sequences 32]

Where torch prefers cuDNN's attention (Hopper), cuDNN builds an execution plan for each new shape. Packed rows of
conversations have new shapes in every step, and so has a cache that grows; verl_mt takes the kernel out
(`verl_mt/workers/process.py`). A random model of SmolLM2-135M's shape in `--dtype`, bfloat16 if not given. Each batch
is new to both ways, which take turns: (a) forward and backward of packed rows of 120 to 420 tokens, prefixes shared;
(b) the local engine, prompts of other lengths each time, 48 tokens each. The last lines are the ratios of the medians,
above 1 where the process without cuDNN's attention is faster. On a CPU both ways are the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from provenance import add_out, write_rows

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def make(layers: int, vocabulary: int, dtype: str) -> Any:
    """The model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    config = LlamaConfig(**shape, dtype=getattr(torch, dtype))
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def seconds_of_pass(model: Any, rows: int, seed: int) -> float:
    """Of (a), one batch."""
    import torch
    from training_work import made_batch, train

    from verl_mt.modeling.passes import Passes

    rng = random.Random(seed)
    groups = max(1, rows // 8)
    responses = [[rng.randint(60, 260) for _ in range(rows // groups)] for _ in range(groups)]
    batch = made_batch([rng.randint(40, 120) for _ in range(groups)], responses, system=rng.randint(60, 120))
    return train(model, batch, [torch.arange(len(batch))], Passes(packed=True, share_prefixes=True))


def seconds_of_sampling(model: Any, sequences: int, seed: int) -> float:
    """Of (b), once."""
    from local_engine import Conversation, run_ours

    rng = random.Random(seed)
    prompts = [rng.choices(range(1, model.config.vocab_size), k=rng.randint(80, 240)) for _ in range(sequences)]
    return run_ours(model, [Conversation(prompt, [(48, [])]) for prompt in prompts])[0]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repetitions", type=int, default=3, help="batches per way")
    parser.add_argument("--rows", type=int, default=32, help="of (a)")
    parser.add_argument("--sequences", type=int, default=32, help="of (b)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    add_out(parser)
    args = parser.parse_args()
    import torch

    model = make(args.layers, args.vocabulary, args.dtype).to(args.device)
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    lines, rows = [], []
    for name, what, size in (("passes", seconds_of_pass, args.rows), ("sampling", seconds_of_sampling, args.sequences)):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(args.repetitions + 1):
            # Other shapes for each way: what one has built, the other must not find.
            for turn, cudnn in enumerate((True, False) if number % 2 else (False, True)):
                torch.backends.cuda.enable_cudnn_sdp(cudnn)
                seconds[cudnn].append(what(model, size, 2 * number + turn))
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        for cudnn, taken in seconds.items():
            shown = " ".join(f"{one:.2f}" for one in taken)
            print(
                f"{name}, cuDNN's attention {'on' if cudnn else 'off'}: {shown} s (the first not counted)", flush=True
            )
        rows.append({"what": name, "with cuDNN, s": seconds[True], "without, s": seconds[False]})
        ratio = statistics.median(seconds[True][1:]) / statistics.median(seconds[False][1:])
        lines.append(f"{name}: with cuDNN / without = {ratio:.2f}")
    write_rows(args.out, rows)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
