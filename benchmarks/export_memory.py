"""Memory of `python -m verl_mt.export` of a checkpoint that was written in shards: how often it holds the model.

    python benchmarks/export_memory.py [--size large]

Makes a model of random weights (models.py) and a checkpoint as ranks write it, exports it in a process of its own, and
looks at that process's anonymous memory (RssAnon of /proc, not the pages of files that are mapped) every 10 ms. What a
process holds that only imports the same modules is taken off; what is left is divided by the size of the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import add_out, write_rows

IMPORTS = "import verl_mt.trainer.build, verl_mt.export, torch.distributed.checkpoint"


def make(folder: Path, size: str) -> int:
    """A run directory with one sharded checkpoint; returns the bytes of its weights."""
    from models import make_model, save

    from verl_mt.config.compose import compose, config_to_yaml
    from verl_mt.trainer.checkpoint import CheckpointStore
    from verl_mt.workers.actor import ActorWorker
    from verl_mt.workers.sharded_checkpoint import save_shards

    module = make_model(size)
    save(module, folder / "model")
    run = folder / "run"
    run.mkdir()
    overrides = [f"actor_rollout_ref.model.path={folder / 'model'}", f"trainer.default_local_dir={run}"]
    composed = compose(overrides)
    (run / "config.yaml").write_text(config_to_yaml(composed))
    actor = ActorWorker(module, composed.actor_rollout_ref.actor, temperature=1.0, total_steps=1)
    state = {"step": 1, "workers": {"actor": actor.progress()}}
    CheckpointStore(run / "checkpoints").save(
        1, state, score=None, write_more=lambda place: save_shards(actor.tensors(), place)
    )
    return sum(p.numel() * p.element_size() for p in module.parameters())


def peak(command: list[str]) -> int:
    """Bytes of anonymous memory at most; fails as the command does."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    most = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        most = max(most, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
        time.sleep(0.01)
    said = process.communicate()[0]
    if process.returncode:
        raise SystemExit(said)
    return most * 1024


def measure(size: str) -> dict[str, float]:
    """See above."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = make(folder, size)
        idle = peak([sys.executable, "-c", IMPORTS])
        export = ["verl_mt.export", "--checkpoint", str(folder / "run"), "--out", str(folder / "out"), "--trust"]
        used = peak([sys.executable, "-m", *export])
    return {"weights_mb": weights / 2**20, "idle_mb": idle / 2**20, "peak_mb": used / 2**20,
            "held": (used - idle) / weights}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="large")
    add_out(parser)
    args = parser.parse_args()
    found = measure(args.size)
    print(json.dumps(found))
    write_rows(args.out, [{"size": args.size, **found}])
    print(f"export of {found['weights_mb']:.0f} MB in shards: holds the model {found['held']:.2f} times")


if __name__ == "__main__":
    main()
