"""What the boxes task reaches, over seeds, and what remains of it when the passages tell nothing.

    python recipes/search/tiny/measure.py --data data/search_boxes --seeds 0 1 2 --out runs/search_boxes

A real retrieval server answers every search. Prints one table and writes `results.json`; each seed's run directory lies
beside it. The shuffled corpus has, for every box, the contents of another one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tiny"))  # the calculator's recipe

from results import Results, evaluate, fit

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.trainer.build import build_trainer

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
    results = Results(args.out)

    def configured(*more: str) -> Config:
        return compose([*common, *more], "search_boxes", RECIPE / "config")

    for seed in args.seeds:
        folder = args.out / f"seed_{seed}"
        run = [f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.default_local_dir={folder}"]
        with retrieval(args.data / "corpus.jsonl"):
            results.keep(f"seed {seed}", fit(build_trainer(configured(*run, "trainer.resume_mode=auto"))))
        with retrieval(args.data / "corpus_shuffled.jsonl"):
            trained = configured(f"actor_rollout_ref.model.path={folder / 'hf'}")
            results.keep(f"seed {seed}, shuffled corpus", evaluate(trained))
    results.show()


if __name__ == "__main__":
    main()
