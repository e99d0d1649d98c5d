"""Memory of a process that trains in bfloat16 on a CPU on rows of all lengths, by how many compiled kernels are kept.

    python benchmarks/kernel_caches.py [--model FOLDER] [--passes 30] [--threads 1]

Each setting in a process of its own, on the same rows: forward and backward passes over three rows of 80 to 260 tokens,
packed. Memory is the resident set after `malloc_trim`, so without what the allocator merely has not given back (Linux).
The last line is the growth from the third pass on, 1,024 kernels (the default of torch and oneDNN) to what
`load_causal_lm` sets (above 1: less grows).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from models import make_model
from provenance import add_out, write_rows

from verl_mt.modeling.load import load_causal_lm
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.passes import choose_passes, use_passes

_CAPACITIES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def resident_mib() -> float:
    """Of this process, without what was freed."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(model_folder: str, passes: int, threads: int) -> None:
    """Print the resident set after the third and the last pass, and the CPU seconds of all."""
    torch.set_num_threads(threads)
    model = load_causal_lm(model_folder, dtype="bfloat16")
    use_passes(model, choose_passes(model))
    draw, begun, third = random.Random(0), time.process_time(), 0.0
    for number in range(passes):
        lengths = [draw.randint(80, 260) for _ in range(3)]
        mask_BT = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids_BT = torch.randint(5, model.config.vocab_size, mask_BT.shape) * mask_BT
        wanted_BT = mask_BT.bool() & (torch.arange(max(lengths)) >= 20)
        found = forward_log_probs(model, ids_BT, mask_BT, wanted_BT=wanted_BT, temperature=1.0)
        found.log_probs_BT.sum().backward()
        model.zero_grad(set_to_none=True)
        if number == 2:
            third = resident_mib()
    print(third, resident_mib(), time.process_time() - begun)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a local folder; default: a small one made here")
    parser.add_argument("--size", default="tiny", help="of the one made here, see models.py")
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args()
    if args.child:
        train(args.model, args.passes, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(args.size).save_pretrained(folder)
        words = ["--model", args.model or folder, "--passes", str(args.passes), "--threads", str(args.threads)]
        grown, rows = [], []
        for label, capacity in (("default", "1024"), ("as load_causal_lm sets it", None)):
            rest = {name: value for name, value in os.environ.items() if name not in _CAPACITIES}
            environment = rest | ({} if capacity is None else dict.fromkeys(_CAPACITIES, capacity))
            command = [sys.executable, __file__, "--child", *words]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            third, last, seconds = map(float, done.stdout.split())
            grown.append(last - third)
            rows.append({"kernels": label, "MiB after 3 passes": third, "MiB at the end": last, "CPU s": seconds})
            print(f"{label}: {third:.0f} MiB after 3 passes, {last:.0f} after {args.passes}; {seconds:.1f} CPU s")
    write_rows(args.out, rows)
    print(f"growth, ratio: {max(grown[0], 0.0) / max(grown[1], 1.0):.1f}")


if __name__ == "__main__":
    main()
