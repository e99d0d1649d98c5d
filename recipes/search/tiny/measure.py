"""What the boxes task reaches, over seeds, and what remains of it when the passages tell nothing.

    python recipes/search/tiny/measure.py --data data/search_boxes --seeds 0 1 2 --out runs/search_boxes

A real retrieval server answers every search. Prints one table and writes `results.json`; each seed's run directory lies
beside it. The shuffled corpus has, for every box, the contents of another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl_mt.config.compose import compose
from verl_mt.data.run_files import read_jsonl_tolerant
from verl_mt.diagnostics.step_metrics import tool_metrics, validation_metrics
from verl_mt.trainer.build import build_trainer, validation_sampling
from verl_mt.trainer.inference import Inference

RECIPE = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def retrieval(corpus: Path) -> Iterator[None]:
    """A retrieval server over `corpus`, named by SEARCH_URL."""
    words = [sys.executable, "-m", "verl_mt.retrieval", "--corpus", str(corpus), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            if "ready: " not in ready:
                raise SystemExit("the retrieval server did not start")
            os.environ["SEARCH_URL"] = ready.split()[-1]
            yield
        finally:
            server.terminate()


def train(folder: Path, overrides: list[str]) -> dict[str, float]:
    """One run, or the rest of one that was interrupted. Returns accuracies before and after, and what it cost."""
    begun, cpu = time.monotonic(), os.times()
    words = [*overrides, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto"]
    trainer = build_trainer(compose(words, "search_boxes", RECIPE / "config"))
    trainer.fit()
    lines = read_jsonl_tolerant(trainer.log.run.path / "metrics.jsonl")
    validated = [line for line in lines if "val/accuracy" in line]
    ended = os.times()
    return {
        "start": validated[0]["val/accuracy"],
        "end": validated[-1]["val/accuracy"],
        "start_greedy": validated[0]["val/accuracy_greedy"],
        "end_greedy": validated[-1]["val/accuracy_greedy"],
        "calls": validated[-1]["val/tool_calls_mean"],
        "truncated": validated[-1]["val/truncated"],
        "wall_s": time.monotonic() - begun,
        "cpu_s": ended.user + ended.system - cpu.user - cpu.system,
    }


def evaluate(model: Path, overrides: list[str]) -> dict[str, float]:
    """A model on the validation questions, sampled, with whatever corpus is served."""
    config = compose([*overrides, f"actor_rollout_ref.model.path={model}"], "search_boxes", RECIPE / "config")
    with Inference(config) as policy:
        groups = policy.roll_out(policy.prompts(), sampling=validation_sampling(config))
    metrics = validation_metrics(groups, "") | tool_metrics([t for g in groups for t in g.trajectories], ["search"])
    return {
        "end": metrics["val/accuracy"],
        "calls": metrics["val/tool_calls_mean"],
        "truncated": metrics["val/truncated"],
        "errors": metrics["tools/search/errors"],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that world.py wrote")
    parser.add_argument("--model", type=Path, default=RECIPE / "tiny" / "checkpoint")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("runs/search_boxes"))
    args, overrides = parser.parse_known_args()
    common = [
        f"data.train_files={args.data}/train.parquet",
        f"data.val_files={args.data}/val.parquet",
        f"actor_rollout_ref.model.path={args.model}",
        f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={RECIPE / 'tiny' / 'tools.yaml'}",
        "trainer.logger=[]",
        *overrides,
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float]] = {}
    if (args.out / "results.json").is_file():
        results = json.loads((args.out / "results.json").read_text())

    def keep(name: str, result: dict[str, float]) -> None:
        results[name] = result
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        print(name, {k: round(v, 3) for k, v in result.items()}, flush=True)

    for seed in args.seeds:
        folder = args.out / f"seed_{seed}"
        with retrieval(args.data / "corpus.jsonl"):
            keep(f"seed {seed}", train(folder, [*common, f"trainer.seed={seed}", f"data.seed={seed}"]))
        with retrieval(args.data / "corpus_shuffled.jsonl"):
            keep(f"seed {seed}, shuffled corpus", evaluate(folder / "hf", common))
    _show(results)


def _show(results: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(key for result in results.values() for key in result))
    table = Table("run", *columns)
    for name, result in results.items():
        table.add_row(name, *(f"{result[c]:.3f}" if c in result else "" for c in columns))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
