"""Sampling with several threads on cores that others use too, by what a thread does that waits for the others.

    python benchmarks/busy_cores.py [--model FOLDER --dtype bfloat16] [--threads 2] [--sequences 32] [--beside 0 1]

Threads of one operation meet at its end. By itself GNU's OpenMP lets those that are early spin, which saves a wake-up
where every thread has a core of its own. `import verl_mt` asks for threads that sleep (`OMP_WAIT_POLICY=passive`),
unless the environment has the variable or torch was imported before. Each run is a process of its own, the two ways in
turn, alone and beside one process that is always busy. The last lines are the ratios (above 1: sleeping is
faster).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module

from provenance import add_out, write_rows

WAYS = ("spinning", "sleeping")


def child(args: argparse.Namespace) -> None:
    """Print the tokens per second of one run."""
    for name in ("torch", "verl_mt") if args.child == "spinning" else ("verl_mt", "torch"):
        import_module(name)  # torch's OpenMP reads the environment once, and verl_mt sets it
    import torch
    from local_engine import load_model, multi_turn_work, run_ours
    from models import make_model

    torch.set_num_threads(args.threads)
    model = load_model(args.model, args.dtype) if args.model else make_model(args.size)
    work = multi_turn_work(args.sequences, 8, model.config.vocab_size)
    run_ours(model, work[:4])
    seconds, _ = run_ours(model, work)
    print(sum(size for c in work for size, _ in c.turns) / seconds)


@contextmanager
def beside(busy: int):
    """`busy` processes that only count."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a model; default: a random one of --size")
    parser.add_argument("--size", default="large", help="of benchmarks/models.py; large: 152 M parameters")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of --model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1], help="numbers of busy processes")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    ours = {name: of for name, of in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    words = [sys.executable, __file__, *sys.argv[1:]]
    print(f"{args.threads} threads on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    ratios, rows = {}, []
    for busy in args.beside:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        with beside(busy):
            for _ in range(args.repetitions):
                for way in WAYS:
                    done = subprocess.run(
                        [*words, "--child", way], env=ours, check=True, capture_output=True, text=True
                    )
                    found[way].append(float(done.stdout.split()[-1]))
        where = f"beside {busy} busy process" if busy else "alone"
        rows += [{"busy processes": busy, "threads": way, "tokens per second": of} for way, of in found.items()]
        for way, of in found.items():
            print(f"  {where}, {way}: {statistics.median(of):.1f} tokens/s of {[round(x, 1) for x in of]}", flush=True)
        ratios[where] = statistics.median(found["sleeping"]) / statistics.median(found["spinning"])
    write_rows(args.out, rows)
    for where, ratio in ratios.items():
        print(f"{where}: sleeping / spinning = {ratio:.2f}")


if __name__ == "__main__":
    main()
