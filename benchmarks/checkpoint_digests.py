"""What the digests of a checkpoint cost: saving and loading with them and without.

    python benchmarks/checkpoint_digests.py [--megabytes 256] [--repetitions 5] [--folder FOLDER]

A checkpoint is one `state.pt` of float32 tensors of 16 MB each, flushed to disk as every checkpoint is. "Without" does
the same through the same code with the hashing taken out. The ways take turns, and the smallest time of each counts.
Loading reads from memory what was just written: on a disk that has to be read, the first of the two passes reads it,
and the digest costs less than is said here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from provenance import add_out, write_rows


class NoHash:
    """In the place of SHA-256."""

    def __init__(self, data: bytes = b""):
        pass

    def update(self, data: Any) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        return "0" * 64


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    add_out(parser)
    args = parser.parse_args()
    import torch

    from verl_mt.data import digests
    from verl_mt.trainer import checkpoint
    from verl_mt.trainer.checkpoint import CheckpointStore

    state = {f"tensor {k}": torch.randn(4 * 2**20) for k in range(max(1, args.megabytes // 16))}
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    store = CheckpointStore(folder, keep=1)
    saves: dict[str, list[float]] = {"with": [], "without": []}
    loads: dict[str, list[float]] = {"with": [], "without": []}
    path = folder / "step_000001"
    try:
        for _ in range(args.repetitions):
            with mock.patch.object(digests.hashlib, "sha256", NoHash):
                saves["without"].append(timed(lambda: store.save(1, state, score=None)))
            saves["with"].append(timed(lambda: store.save(1, state, score=None)))
            with mock.patch.object(checkpoint, "damage", lambda *file: None):
                loads["without"].append(timed(lambda: checkpoint.load(path)))
            loads["with"].append(timed(lambda: checkpoint.load(path)))
    finally:
        shutil.rmtree(folder)
    print(f"{args.megabytes} MB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, found in (("save", saves), ("load", loads)):
        print(f"{name}: with digests {min(found['with']):.2f} s, without {min(found['without']):.2f} s")
    write_rows(args.out, [{"what": "save, s", **saves}, {"what": "load, s", **loads}])
    ratios = [min(found["with"]) / min(found["without"]) for found in (saves, loads)]
    print(f"checkpoint digests: save with / without = {ratios[0]:.2f}, load with / without = {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
