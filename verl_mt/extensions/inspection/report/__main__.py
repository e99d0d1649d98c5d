"""`python -m verl_mt.report`: show a run, several runs or a sweep as one HTML page.

python -m verl_mt.report runs/tiny                                # writes runs/tiny/report.html
python -m verl_mt.report runs/tiny runs/tiny-2 --out compare.html # curves of both in each chart
python -m verl_mt.report runs/sweep                               # a folder of runs: settings, seeds, what differs
python -m verl_mt.report runs/tiny --serve                        # on this machine's loopback; follows the run
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_mt.data.temporary_files import temporary
from verl_mt.errors import ConfigError, VerlMTError
from verl_mt.extensions.inspection.report.html_page import build_page, charting_library, serve
from verl_mt.extensions.inspection.report.sweep import collector

MAX_ROLLOUTS = 20_000


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.report", description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="run directories, or one folder that holds them (a sweep)"
    )
    parser.add_argument("--out", help="the file to write; default: report.html in the (first) run directory")
    parser.add_argument("--serve", action="store_true", help="serve it on loopback and follow runs that are written")
    parser.add_argument("--port", type=int, default=0, help="--serve: the port; default: a free one")
    parser.add_argument(
        "--max-rollouts", type=int, default=MAX_ROLLOUTS, help="of each run; of more, whole steps are left out evenly"
    )
    args = parser.parse_args(argv)
    try:
        if args.max_rollouts < 1:
            raise ConfigError(f"--max-rollouts is {args.max_rollouts}, must be at least 1")
        charting_library()
        if args.serve:
            return serve(args.runs, port=args.port, max_rollouts=args.max_rollouts)
        path, summary = write(args.runs, args.out, args.max_rollouts)
        print(f"{path}: {summary}, {path.stat().st_size / 1e6:.1f} MB; open it in a browser")
        return 0
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def write(runs: Sequence[str], out: str | None = None, max_rollouts: int = MAX_ROLLOUTS) -> tuple[Path, str]:
    """Write the page. Returns the file, and in words how much it holds.

    Args:
        runs: run directories, or one folder that holds them.
        out: the file; None = `report.html` in the first of `runs`.

    Raises:
        VerlMTError: no run there, or a file that cannot be written.
    """
    contents = collector(runs, max_rollouts).contents()
    path = Path(out).expanduser() if out else Path(runs[0]).expanduser() / "report.html"
    partial = temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(build_page(contents, title=contents.title))
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error}") from error
    for complaint in contents.complaints:
        print(complaint, file=sys.stderr)
    return path, contents.summary


if __name__ == "__main__":
    sys.exit(main())
