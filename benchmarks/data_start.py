"""What training data of 10 thousand, 1 million and 10 million rows costs at a start and at a resume.

    python benchmarks/data_start.py [--rows 10000 1000000 10000000] [--group 1048576]

Rows of sums are written as Parquet into a temporary folder, which is removed afterwards (10 million: 0.3 GB). Each
start and each resume (from the middle of the second epoch) is a process of its own: the configuration is composed,
tokenizer and template are loaded, the data is opened by `load_data` as a run does it, its fingerprint compared with
that of the start, and a batch of 256 prompts is drawn and rendered. Seconds are of the data alone (imports,
configuration and tokenizer take as long whatever the rows); memory is the peak of the whole process. On the smallest
file the same is done with all rows loaded, and the rows that are drawn, their ids and all counts are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pyarrow
import pyarrow.parquet
from provenance import add_out, write_rows
from rich.console import Console
from rich.table import Table

from verl_mt.config.compose import compose
from verl_mt.data.fingerprint import difference
from verl_mt.data.sampler import permuted
from verl_mt.rollout.prompts import PromptDraws
from verl_mt.trainer.build_data import load_data
from verl_mt.trainer.build_rollout import build_chat

BATCH = 256
_WRITTEN_AT_ONCE = 100_000


def write(file: Path, num_rows: int, group: int) -> None:
    """Rows in verl's schema; the numbers of a row are its own, so that nothing compresses away."""
    writer, held = None, []
    for start in range(0, num_rows, _WRITTEN_AT_ONCE):
        numbers = range(start, min(start + _WRITTEN_AT_ONCE, num_rows))
        terms = [(k, permuted("terms", num_rows, k)) for k in numbers]
        prompts = [[{"role": "user", "content": f"What is {a} + {b}? Answer after ####."}] for a, b in terms]
        columns = {
            "prompt": prompts,
            "data_source": ["tiny/arithmetic"] * len(terms),
            "reward_model": [{"style": "rule", "ground_truth": str(a + b)} for a, b in terms],
            "extra_info": [{"index": a, "split": "train"} for a, _ in terms],
        }
        held.append(pyarrow.table(columns))
        if sum(map(len, held)) >= group or numbers.stop == num_rows:
            table = pyarrow.concat_tables(held)
            writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
            writer.write_table(table, row_group_size=group)
            held = []
    assert writer is not None
    writer.close()


def measure(file: Path, state: Path, *overrides: str) -> dict[str, Any]:
    """In a process of its own. The first start leaves its fingerprint in `state`; a resume finds it there."""
    config = compose([f"data.train_files={file}", "data.train_max_samples=-1", "data.val_files=null", *overrides])
    chat = build_chat(config)
    resumes = state.exists()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    data = load_data(config, chat, None)
    if resumes:
        saved = json.loads(state.read_text())
        assert difference("data.train_files", saved["rows"], data.fingerprint["data.train_files"]) is None
        data.sampler.load_state_dict(saved["sampler"])
    opened = time.perf_counter() - begun
    first = PromptDraws(data.sampler, data.prompts, lambda row: None).draw(BATCH)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    begun = time.perf_counter()
    second = PromptDraws(data.sampler, data.prompts, lambda row: None).draw(BATCH)
    later = time.perf_counter() - begun
    if not resumes:
        middle = data.sampler.state_dict() | {"position": data.sampler.num_rows * 3 // 2}
        state.write_text(json.dumps({"rows": data.fingerprint["data.train_files"], "sampler": middle}))
    drawn = [(p.row.index, p.row.ground_truth, p.ids) for p in first.prompts + second.prompts]
    return {
        "loaded": data.sampler.num_rows <= config.data.eager_rows,
        "opened_s": opened,
        "seconds": seconds,
        "cpu_s": cpu,
        "later_s": later,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "drawn": hashlib.sha256(repr(drawn).encode()).hexdigest(),
        "counts": {**data.counts, **first.counts, "rows": data.sampler.num_rows},
    }


def in_a_process(*words: object) -> dict[str, Any]:
    """`measure` of these words."""
    done = subprocess.run([sys.executable, __file__, "--measure", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--group", type=int, default=2**20, help="rows of a row group (pyarrow's default: 1,048,576)")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    add_out(parser)
    args = parser.parse_args()
    if args.measure:
        file, state, *overrides = args.measure
        print(json.dumps(measure(Path(file), Path(state), *overrides)))
        return
    table = Table("rows", "what", "file, MB", "opened, s", "with a batch, s", "CPU, s", "next batch, s", "peak, MB")
    last: dict[str, dict[str, Any]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in args.rows:
            file, state = Path(folder) / "rows.parquet", Path(folder) / f"{num_rows}.json"
            write(file, num_rows, args.group)
            for what in ("start", "resume"):
                last[what] = found = in_a_process(file, state)
                rows.append({"rows": num_rows, "what": what, "bytes": file.stat().st_size, **found})
                numbers = (found[k] for k in ("opened_s", "seconds", "cpu_s", "later_s"))
                size = f"{file.stat().st_size / 1e6:.0f}"
                table.add_row(f"{num_rows:,}", what, size, *(f"{n:.2f}" for n in numbers), f"{found['peak_mb']:.0f}")
            if num_rows == min(args.rows):
                one = last["start"]
                other_way = f"data.eager_rows={0 if one['loaded'] else num_rows}"
                other = in_a_process(file, Path(folder) / "other_way.json", other_way)
                assert one["loaded"] != other["loaded"]
                if (one["drawn"], one["counts"]) != (other["drawn"], other["counts"]):
                    raise SystemExit(f"rows that are loaded and rows that are not differ: {one} and {other}")
    console = Console(width=140)
    console.print(table)
    console.print(f"{min(args.rows):,} rows loaded and not loaded: the same rows, ids and counts")
    write_rows(args.out, rows)
    console.print(
        f"data: {args.rows[-1]:,} rows start in {last['start']['seconds']:.1f} s and resume in "
        f"{last['resume']['seconds']:.1f} s, at most {max(v['peak_mb'] for v in last.values()):.0f} MB"
    )


if __name__ == "__main__":
    main()
