"""Kills runs at random moments, and looks whether a prompt was lost, doubled or favoured.

    python benchmarks/kills.py [--kills 200] [--bounds 0 1 4] [--who trainer worker] [--over-sample 1]
                               [--out runs/kills.jsonl]

A trial has a seed. It trains the default task, small, to its end: once in peace, and once killed (SIGKILL, up to three
times, engines twice, at moments that the seed draws from the time that the run in peace took): the trainer, whose
command is then given again, or one of two rollout workers (`worker`), or an engine of SGLang (`engine`, where it is
installed), without which the run goes on by itself. Of both:

- the log of prompts agrees with rollout rows and checkpoint (`python -m verl_mt.prompt_log`), none missing or double;
- the same rows of the data were trained, in the same steps (with `--over-sample`, for bounds above 0, in any);
- no trained token is older than `trainer.max_staleness`, by the rollout rows alone;
- with max_staleness=0 and the trainer killed, which runs deterministically: the same weights, bit for bit.

Over all trials: the lengths of the trained conversations are distributed as in peace (a permutation test of the mean
length and of the share of the longest tenth, pairs of runs with one seed exchanged; policies hardly move, so that they
are of one distribution). The exit status is 1 where anything of this does not hold.

Every trial is a line of `--out`, with its commit and machine; what stands there is not run again.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from provenance import provenance

from verl_mt.data.row_files import read_rows, row_files
from verl_mt.extensions.inspection import prompt_log

STEPS = 6
WORDS = [
    "data.train_batch_size=2", "data.val_files=null", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.response_length=64", "actor_rollout_ref.actor.optim.lr=1e-6",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.logger=[]", "trainer.num_threads=1",
]  # fmt: skip
OF = {
    "trainer": [],
    "worker": ["actor_rollout_ref.rollout.num_workers=2"],
    "engine": ["actor_rollout_ref.rollout.name=sglang"],
}
"""Whom a trial kills -> what its run needs for that."""
_PROCESS = {
    "worker": "verl_mt.rollout_workers.worker",
    "engine": "verl_mt.engines.sglang.processes",
}
_POLL_S = 0.01
_LONGEST_S = 600.0


class Run:
    """One run in a directory of its own."""

    def __init__(self, folder: Path, who: str, bound: int, seed: int, over_sample: float, overrides: Sequence[str]):
        self.folder, self.bound, self.over_sample = folder, bound, over_sample
        self.command = [sys.executable, "-W", "ignore", "-m", "verl_mt.trainer", *WORDS, *OF[who]]
        self.command += [
            f"trainer.seed={seed}",
            f"trainer.max_staleness={bound}",
            f"data.over_sample={over_sample}",
            f"trainer.default_local_dir={folder}",
            *overrides,
        ]
        self.deterministic = bound == 0 and who == "trainer"
        self.command += [f"trainer.deterministic={self.deterministic}"]

    @property
    def finished(self) -> bool:
        return (self.folder / "FINISHED").exists()

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(self.command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def failed(self, how: str) -> SystemExit:
        said = self._log.read_text(errors="replace")[-2000:]
        return SystemExit(f"{' '.join(self.command)} {how}; at the end it said:\n{said}")

    def end(self) -> float:
        """To its end in peace; seconds."""
        begun = time.monotonic()
        if self.start().wait(_LONGEST_S) != 0 or not self.finished:
            raise self.failed("failed")
        return time.monotonic() - begun

    def trained(self) -> list[tuple[int, str, int]]:
        """(step, entry of the data, row) of every prompt that an update has seen, by the rollout rows."""
        rows = ((f.step, row) for f in row_files(self.folder) if f.split == "train" for row in read_rows(f.path))
        in_order = self.over_sample == 1
        return sorted({(step if in_order else 0, row["source"], row["row_index"]) for step, row in rows})

    def oldest(self) -> int:
        """Age of the oldest trained token, by the rollout rows."""
        return max(
            row["trained_version"] - version
            for f in row_files(self.folder)
            if f.split == "train"
            for row in read_rows(f.path)
            if row.get("trained_version") is not None
            for record in row["records"]
            for version, trained in zip(record["policy_versions"], record["loss_mask"])
            if trained
        )

    def lengths(self) -> list[int]:
        """Sampled tokens of every trained conversation."""
        return [
            sum(sum(record["sampled"]) for record in row["records"])
            for f in row_files(self.folder)
            if f.split == "train"
            for row in read_rows(f.path)
        ]


def kill_trainer(run: Run, chance: random.Random, usual_s: float) -> int:
    """At most three times; the same command goes on. Returns how often it was killed."""
    kills = 0
    while not run.finished:
        process, deadline = run.start(), time.monotonic() + chance.uniform(0, usual_s)
        while process.poll() is None and (kills == 3 or time.monotonic() < deadline):
            time.sleep(_POLL_S)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        if process.returncode not in (0, -signal.SIGKILL):
            raise run.failed(f"failed with {process.returncode}")
    return kills


def kill_helpers(run: Run, chance: random.Random, usual_s: float, who: str) -> int:
    """At most three of its rollout workers, or two engines (the third one that dies without having served ends a run),
    one at a time, once it samples; it goes on by itself."""
    kills, process, begun, sampling = 0, run.start(), time.monotonic(), None
    moments = sorted(chance.uniform(0, usual_s / 4) for _ in range(2 if who == "engine" else 3))
    while process.poll() is None:
        if time.monotonic() - begun > _LONGEST_S:
            process.kill()
            raise run.failed("hangs")
        if sampling is None:
            sampling = time.monotonic() if (run.folder / prompt_log.FILE).exists() else None
        elif moments and time.monotonic() - sampling > moments[0]:
            moments.pop(0)
            if there := children(process.pid, _PROCESS[who]):
                os.killpg(chance.choice(there), signal.SIGKILL)
                kills += 1
        time.sleep(_POLL_S)
    if process.returncode != 0:
        raise run.failed(f"failed with {process.returncode}")
    return kills


def children(parent: int, module: str) -> list[int]:
    """Processes of a process that run a module; each leads a group."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if above == parent and module.encode() in words:
            found.append(int(entry.name))
    return found


def trial(seed: int, bound: int, who: str, over_sample: float, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Whatever does not hold is in `wrong`."""
    place = Path(tempfile.mkdtemp(prefix="kills_"))
    peace, killed = (Run(place / name, who, bound, seed, over_sample, overrides) for name in ("peace", "killed"))
    chance = random.Random(f"{seed}/{bound}/{who}")
    try:
        usual_s = peace.end()
        if who == "trainer":
            kills = kill_trainer(killed, chance, usual_s)
        else:
            kills = kill_helpers(killed, chance, usual_s, who)
        wrong = []
        for name, run in (("peace", peace), ("killed", killed)):
            examined = prompt_log.examine(run.folder)
            if not examined.holds or examined.summary().split(", ")[1] != f"{2 * STEPS} trained":
                wrong.append(f"{name}: {examined.summary()}")
            if (oldest := run.oldest()) > bound:
                wrong.append(f"{name}: a trained token is {oldest} updates old")
        if peace.trained() != killed.trained():
            wrong.append("other prompts, or in other steps")
        same = filecmp.cmp(peace.folder / "hf/model.safetensors", killed.folder / "hf/model.safetensors", shallow=False)
        if peace.deterministic and not same:
            wrong.append("other weights")
        lengths = {"peace": peace.lengths(), "killed": killed.lengths()}
    finally:
        shutil.rmtree(place, ignore_errors=True)
    key = {"seed": seed, "bound": bound, "who": who, "over_sample": over_sample}
    key |= {"overrides": overrides} if overrides else {}
    return {**key, "kills": kills, "wrong": wrong, **lengths}


def p_value(pairs: Sequence[tuple[float, float]], repetitions: int = 9999) -> float:
    """Of the difference of the means of pairs, by exchanging the two of a pair."""
    chance, differences = random.Random(0), [one - other for one, other in pairs]
    seen, more = abs(fmean(differences)) - 1e-12, 0
    for _ in range(repetitions):
        more += abs(fmean([d if chance.random() < 0.5 else -d for d in differences])) >= seen
    return (1 + more) / (1 + repetitions)


def compare_lengths(trials: Sequence[dict[str, Any]]) -> dict[str, float]:
    """p-values; small = killed runs train other lengths."""
    everything = sorted(length for found in trials for length in found["peace"])
    long = everything[int(0.9 * len(everything))]

    def share(lengths: list[int]) -> float:
        return fmean(length >= long for length in lengths)

    return {
        "mean length": p_value([(fmean(t["peace"]), fmean(t["killed"])) for t in trials]),
        f"share of {long} tokens and more": p_value([(share(t["peace"]), share(t["killed"])) for t in trials]),
    }


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value of every run")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4], help="of trainer.max_staleness")
    parser.add_argument("--who", nargs="+", choices=OF, default=["trainer", "worker"])
    parser.add_argument("--over-sample", type=float, default=1.0, help="of trials with a bound above 0")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--out", type=Path, default=Path("runs/kills.jsonl"))
    args = parser.parse_args()
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    trials: list[dict[str, Any]] = []
    for number in count():
        if sum(found["kills"] for found in trials) >= args.kills:
            break
        key: dict[str, Any] = {
            "seed": args.seed + number,
            "bound": args.bounds[number % len(args.bounds)],
            "who": args.who[number // len(args.bounds) % len(args.who)],
        }
        key["over_sample"] = args.over_sample if key["bound"] else 1.0
        key |= {"overrides": args.overrides} if args.overrides else {}
        same = (line for line in known if line | key == line and ("overrides" in line) == ("overrides" in key))
        found = next(same, None)
        if found is None:
            found = trial(**key) | provenance()
            with args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
            words = f"seed {found['seed']}, max_staleness {found['bound']}, {found['who']}: {found['kills']} kills"
            print(f"{words}; {', '.join(found['wrong']) or 'holds'}", flush=True)
        trials.append(found)
    wrong = sum(bool(found["wrong"]) for found in trials)
    # Deterministic runs sample the same again.
    chances = compare_lengths([found for found in trials if found["bound"] or found["who"] != "trainer"] or trials)
    print("; ".join(f"{name}: p = {p:.3f}" for name, p in chances.items()))
    kills = ", ".join(f"{sum(t['kills'] for t in trials if t['who'] == who)} of a {who}" for who in args.who)
    print(f"{kills}; {len(trials)} trials, {wrong} do not hold")
    return int(wrong > 0 or min(chances.values()) < 0.001)


if __name__ == "__main__":
    sys.exit(main())
