"""What verl_mt does on this GPU, in one command: tests, training, resume, speed and memory. One JSON of results.

    python benchmarks/gpu/run.py [--out gpu_results] [--only STAGE ...] [--again STAGE ...] [--rehearse]
    python benchmarks/gpu/run.py --table

Stages run one after the other, the most valuable first, each in processes of its own with a limit of three minutes.
`results.json` in the output
folder is written anew behind every stage: a run that was ended goes on with the next stage, and `--again` repeats some.
A stage that fails is recorded with the end of its output, the others run all the same, and the command ends with 1.

`--rehearse` runs all of it on a CPU, small, in minutes: it shows that the commands work, not what they measure. Neither
verl_mt nor Ray nor SGLang need to be installed; `wheels.txt` names the packages that an image with torch and
transformers lacks.

`--table` prints the published results (`benchmarks/measured/gpu.json`): a row for each stage, "never run" where there
is no result. After a run, add its figures to that file and the table to RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 180
PUBLISHED = REPO / "benchmarks" / "measured" / "gpu.json"
_TAIL = 4000
"""Characters of a stage's output that are kept."""
GPU_TESTS = (
    "engines/test_buckets_on_device.py",
    "modeling/test_on_cuda.py",
    "trainer/test_checkpoint.py",
    "workers/test_one_sharded_rank.py",
)
"""Under tests/; those that have the mark `gpu`."""
Command = tuple[str, ...]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One entry of the results."""

    name: str
    what: str
    on_gpu: Command
    in_rehearsal: Command
    read: Callable[[str, Path], Numbers]
    """(what was printed, the folder it ran in) -> numbers."""

    def command(self, rehearse: bool) -> list[str]:
        return [sys.executable, *(self.in_rehearsal if rehearse else self.on_gpu)]


# --- what is read of each


def counts(text: str, folder: Path) -> Numbers:
    """Of pytest's closing line."""
    closing = next((line for line in reversed(text.splitlines()) if " in " in line and re.search(r"\d+ \w+", line)), "")
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", closing)}


def training(text: str, folder: Path) -> Numbers:
    """Rewards, seconds and memory of a run, of what it wrote."""
    files = sorted(folder.rglob("metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []
    steps = [row for row in rows if "reward/mean" in row]
    found: Numbers = {"steps": len(steps), **peak(text, folder)}
    if steps:
        found |= {"first reward": steps[0]["reward/mean"], "last reward": steps[-1]["reward/mean"]}
        found["last step"] = steps[-1].get("step")
        found["largest log-prob difference"] = max(row.get("rollout/logprob_diff_max", 0.0) for row in steps)
    validations = {
        name: value for row in rows for name, value in row.items() if name.startswith("val/") and "reward" in name
    }
    return found | dict(sorted(validations.items())[:4])


def peak(text: str, folder: Path) -> Numbers:
    """What `inside` printed at the end."""
    said = re.search(r"^peak memory: ([\d.]+) GB \((.*)\), ([\d.]+) s$", text, re.MULTILINE)
    return {"peak GB": float(said[1]), "of": said[2], "seconds in the trainer": float(said[3])} if said else {}


def lines_with(*marks: str) -> Callable[[str, Path], Numbers]:
    """The printed lines that have one of the marks: benchmarks end with such lines."""

    def read(text: str, folder: Path) -> Numbers:
        return {"lines": [line for line in text.splitlines() if any(mark in line for mark in marks)]}

    return read


# --- what there is


def _train(name: str, device: str, *words: str) -> Command:
    common = (f"trainer.device={device}", f"trainer.default_local_dir={name}", f"trainer.experiment_name={name}")
    return (__file__, "--inside-trainer", *common, "trainer.progress=off", *words)


def _mfu(shape: str, *words: str) -> tuple[Command, Command]:
    script = str(REPO / "benchmarks" / "mfu.py")
    small = ("--device", "cpu", "--shapes", "toy", "--lengths", "64", "--tokens", "256", "--repetitions", "1")
    lengths = ("--lengths", "4096", "32768") if "--checkpointing" in words else ("--lengths", "4096", "8192")
    return (script, "--shapes", shape, *lengths, *words), (script, *small, *words)


def _benchmark(name: str, on_gpu: tuple[str, ...], in_rehearsal: tuple[str, ...]) -> tuple[Command, Command]:
    script = str(REPO / "benchmarks" / name)
    return (script, *on_gpu), (script, *in_rehearsal)


def _runs() -> list[Stage]:
    """Of the trainer."""
    short = (
        "trainer.total_training_steps=2", "trainer.test_freq=-1", "data.train_batch_size=4", "data.val_max_samples=8",
    )  # fmt: skip
    bfloat16 = "actor_rollout_ref.model.dtype=bfloat16"
    # Of the folder of the first run; its name has the number of its last step.
    from_first = "trainer.resume_mode=resume_path", "trainer.resume_from_path=float32/checkpoints/step_{:06d}"
    more, one_more = (
        (*words, *(word.format(steps) for word in from_first), f"trainer.total_training_steps={steps + 5}")
        for words, steps in (((), 60), (short[1:], 2))
    )
    few = ("trainer.total_training_steps=10", "trainer.test_freq=-1")
    offload = (
        "actor_rollout_ref.actor.optimizer_offload=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    )
    ref = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.ref.offload=True")
    table = (
        ("train-float32", "the default task", "float32", (), short),
        ("train-bfloat16", "the default task in bfloat16", "bfloat16", (bfloat16,), (bfloat16, *short)),
        ("resume", "the first run goes on from its checkpoint", "resume", more, one_more),
        ("offload", "optimizer in CPU memory, activations recomputed", "offload", (*offload, *few), (*offload, *short)),
        ("ref-offload", "a KL term, its policy in CPU memory", "ref", (*ref, *few), (*ref, *short)),
    )
    return [
        Stage(name, what, _train(run, "cuda", *words), _train(run, "cpu", *small), training)
        for name, what, run, words, small in table
    ]


def _updates() -> list[Stage]:
    """`mfu.py`."""
    ways = (
        ("", "", ()),
        ("-checkpointing", ", activations recomputed", ("--checkpointing",)),
        ("-prefixes", ", prefixes shared", ("--share-prefixes", "--checkpointing")),
    )
    return [
        Stage(f"mfu-{shape}{suffix}", f"update step, {shape}{said}", *_mfu(shape, *words), lines_with("MFU"))
        for shape in ("0.5B", "1.5B")
        for suffix, said, words in ways
    ]


def _parts() -> list[Stage]:
    """`update_parts.py`."""
    small = ("--device", "cpu", "--shape", "toy", "--length", "64", "--tokens", "256", "--only", "plain")
    table = (
        ("0.5B", (), "fused_adamw"),
        ("1.5B", ("--checkpointing",), "recompute=elementwise"),
    )
    return [
        Stage(
            f"update-parts-{shape}", f"an update by class of kernel, without and with each faster option, {shape}",
            *_benchmark("gpu/update_parts.py", ("--shape", shape, *words), (*small, option, *words)), lines_with("MFU"),
        )
        for shape, words, option in table
    ]  # fmt: skip


def _colocated() -> list[Stage]:
    """`colocated_life.py`."""
    small = ("--device", "cpu", "--shape", "toy", "--cycles", "3", "--tokens", "256", "--cache-gb", "0.001")
    table = (
        ("colocated-life", "200 cycles of a rank and an engine on one GPU, weights by CUDA IPC", ()),
        ("colocated-expandable", "the same with expandable segments", ("--expandable", "--cycles", "20")),
    )
    return [
        Stage(name, what, *_benchmark("gpu/colocated_life.py", words, (*words, *small)), lines_with("wrong tensors"))
        for name, what, words in table
    ]


def _benchmarks() -> list[Stage]:
    """That compare two ways on the device."""
    cuda, once = ("--device", "cuda"), ("--repetitions", "1")
    tokens_and_width = ("--shapes", "64x2000", "--hidden", "16")
    table = (
        (
            "log-prob-memory", "log-probs behind a large vocabulary", "log_prob_memory.py",
            (*cuda, "--dtype", "bfloat16", "--hidden", "896"), tokens_and_width, (" of naive's memory",),
        ),
        (
            "packing", "packed and padded passes", "packing.py",
            (*cuda, "--size", "large"), ("--rows", "8"), ("packed / padded", "gradients differ"),
        ),
        (
            "prefix-sharing", "prefixes once and in every row", "prefix_sharing.py", (*cuda, "--size", "large"),
            ("--rows", "8", "--group-sizes", "4"), ("not shared / shared", "gradients differ"),
        ),
        (
            "new-shapes", "cuDNN's attention among the kernels, and not", "new_shapes.py", cuda,
            ("--rows", "8", "--sequences", "4", "--layers", "2"), ("cuDNN",),
        ),
        (
            "decode", "tokens a second of the local engine, and of generate", "local_engine.py",
            cuda, ("--size", "micro", "--sequences", "4"), ("tokens/s", "local engine / generate"),
        ),
    )  # fmt: skip
    return [
        Stage(name, what, *_benchmark(file, on_gpu, (*small, *once)), lines_with(*marks))
        for name, what, file, on_gpu, small, marks in table
    ]


def _stages() -> list[Stage]:
    pytest = ("-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q")
    # By name: pytest imports what it looks through, and other tests import packages that are not there.
    files = [str(REPO / "tests" / file) for file in GPU_TESTS]
    # Some of them have a twin for the CPU.
    tests = Stage(
        "tests", "the tests marked gpu", (*pytest, "-m", "gpu", *files), (*pytest, "-m", "gpu or slow", *files), counts
    )
    runs = _runs()
    return [*_colocated(), tests, runs[0], *_updates(), *_parts(), *runs[1:], *_benchmarks()]


def table() -> str:
    """The published results as Markdown.

    The file: stage -> {"commit", "card", "date", "figure"}.
    """
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    lines = ["| stage | what | result | commit | card | date |", "|---|---|---|---|---|---|"]
    for stage in _stages():
        found = published.get(stage.name)
        cells = [found[key] for key in ("figure", "commit", "card", "date")] if found else ["never run", "", "", ""]
        lines.append(f"| `{stage.name}` | {stage.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- running them


def run_stage(stage: Stage, folder: Path, rehearse: bool, limit_s: float) -> Numbers:
    """One stage, to its end or its limit; never raises for what the stage does."""
    folder.mkdir(parents=True, exist_ok=True)
    log, start = folder / f"{stage.name}.log", time.monotonic()
    paths = [str(REPO), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            stage.command(rehearse),
            cwd=folder,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    status = "over the limit" if code is None else "ok" if code == 0 else "failed"
    result: Numbers = {"what": stage.what, "status": status, "code": code, "rehearsal": rehearse}
    result["seconds"] = round(time.monotonic() - start, 1)
    result["command"] = stage.command(rehearse)[1:]
    try:
        result["numbers"] = stage.read(text, folder)
    except (ValueError, KeyError, OSError) as error:
        result |= {"status": "failed", "numbers": {}, "unreadable": f"{type(error).__name__}: {error}"}
    if result["status"] != "ok":
        result["output"] = text[-_TAIL:]
    return result


def disabled_by(*command: str) -> str | None:
    """Its output; None where it fails or is not there."""
    try:
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def environment() -> Numbers:
    """The device and the versions."""
    import torch
    import transformers

    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "memory GB": round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1) if gpu else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "commit": disabled_by("git", "rev-parse", "HEAD"),
        "driver": disabled_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
    }


def write(file: Path, results: Numbers) -> None:
    """Whole or not at all."""
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def read_results(file: Path, rehearse: bool) -> Numbers:
    """What an earlier run has left; nothing, if it was a rehearsal and this is none, or the other way round."""
    if not file.is_file():
        return {"stages": {}}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(f"{file} is no JSON ({error}): move it away, or give another --out")
    if any(stage["rehearsal"] != rehearse for stage in found["stages"].values()):
        sys.exit(f"{file} is of {'a run on a GPU' if rehearse else 'a rehearsal'}: give another --out")
    return found


def run_inside_trainer(words: list[str]) -> int:
    """`python -m verl_mt.trainer` in this process; then what it needed is printed."""
    import runpy

    start = time.monotonic()
    sys.argv = ["verl_mt.trainer", *words]
    try:
        runpy.run_module("verl_mt.trainer", run_name="__main__")
    finally:
        import torch

        asked = sorted({"ray", "sglang"} & sys.modules.keys())
        if asked:
            print(f"imported without being asked for: {', '.join(asked)}")
        if torch.cuda.is_available():
            used, of = torch.cuda.max_memory_allocated() / 1e9, "the GPU's"
        else:
            status = Path("/proc/self/status").read_text()
            used, of = int(status.partition("VmHWM:")[2].split()[0]) / 1e6, "the process's"
        print(f"peak memory: {used:.2f} GB ({of}), {time.monotonic() - start:.1f} s")
    return 1 if asked else 0


def main() -> int:
    """The exit status: 0 if every stage of the results is well."""
    if sys.argv[1:2] == ["--inside-trainer"]:
        return run_inside_trainer(sys.argv[2:])
    stages = _stages()
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of results and logs")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="STAGE", help="though it is done")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a stage")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    parser.add_argument("--table", action="store_true", help="print the published results and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table())
        return 0
    out = args.out.resolve()
    results = read_results(out / "results.json", args.rehearse)
    results["environment"] = environment()
    if results["environment"]["device"] == "cpu" and not args.rehearse:
        sys.exit("torch finds no CUDA device; --rehearse runs the same commands on the CPU, small")
    out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        done = results["stages"].get(stage.name, {}).get("status") == "ok"
        if stage.name not in (*args.only, *args.again) or (done and stage.name not in args.again):
            continue
        print(f"{stage.name}: {stage.what} ...", end=" ", flush=True)
        found = results["stages"][stage.name] = run_stage(stage, out / "work", args.rehearse, args.limit)
        write(out / "results.json", results)
        print(f"{found['status']}, {found['seconds']:.0f} s: {json.dumps(found['numbers'])}", flush=True)
    wrong = [name for name, stage in results["stages"].items() if stage["status"] != "ok"]
    missing = [name for name in names if name not in results["stages"]]
    print(f"{out / 'results.json'}: {len(results['stages']) - len(wrong)} of {len(names)} stages are well", end="")
    print("".join(f"; {what}: {', '.join(them)}" for what, them in (("wrong", wrong), ("not run", missing)) if them))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
