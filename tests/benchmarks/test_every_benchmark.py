"""Every command of benchmarks/ runs at its smallest size and ends with the line that benchmarks/README.md documents."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm_script

REPO = Path(__file__).resolve().parents[2]
BENCHMARKS = REPO / "benchmarks"
HAS_TRL = importlib.util.find_spec("trl") is not None
HAS_BROWSER = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
NUMBER = r"[\d,]*\d(?:\.\d+)?(?:e[+-]?\d+)?"
"""Neither `nan` nor `inf`."""
WORDS = r"NAME|WAY|SHAPE|PICTURE|FOLDER"


@dataclass(frozen=True)
class Case:
    """One smallest run.

    Attributes:
        words: `{tmp}` is a folder of the test's own.
        check: what else the output shows: that the compared ways did equal work.
        mode: words behind the script's name in benchmarks/README.md, where a script has several rows.
        out: the file of `--out` has rows.
    """

    script: str
    words: str
    check: Callable[[str], None] = lambda said: None
    mode: str = ""
    marks: tuple[Any, ...] = (pytest.mark.slow,)
    out: bool = True
    installed: bool = True
    error: str = ""
    """What the command says, and ends with, where `installed` is false."""

    @property
    def name(self) -> str:
        return " ".join([self.script, *self.mode.split()])


def says(text: str) -> Callable[[str], None]:
    def check(said: str) -> None:
        assert text in said

    return check


def equal_gradients(said: str) -> None:
    differences = [float(each) for each in re.findall(r"gradients differ by (\S+) at most", said)]
    assert differences and max(differences) < 1e-4


def same_greedy_streams(said: str) -> None:
    assert re.findall(r"greedy streams identical: (\w+)", said) == ["True"] * 3


def the_same_turns(said: str) -> None:
    """A turn in a thousand may differ, where its random number lies within rounding of a boundary."""
    same, turns, apart = re.findall(r"(\d+) of (\d+) turns identical, distance at most (\S+),", said)[0]
    assert int(turns) - int(same) <= 1 and int(turns) > 16 and float(apart) < 1e-5


def a_fraction_of_the_memory(said: str) -> None:
    assert float(re.findall(r"(\d+\.\d)% of naive's memory", said)[0]) < 20, "the recomputed way"


def the_model_once(said: str) -> None:
    assert 0.9 < float(re.findall(r"holds the model (\S+) times", said)[-1]) < 1.5


def as_good_as_exact(said: str) -> None:
    before, after = re.findall(r"bfloat16 ([\d.]+)% off, in float32 (\S+)$", said.strip())[0]
    assert float(after) < 1e-6 < 1e-1 < float(before)


def a_part_of_the_row(said: str) -> None:
    assert 0.4 < float(re.findall(r"2 ranks ([\d.]+),", said)[-1]) < 0.7


def as_docs_scaling_says(said: str) -> None:
    """Within 1 % of the formulas of docs/scaling.md."""
    rows = re.findall(r"^ranks ([\d,]+), fsdp_size ([\d,]+), .*$", said, re.M)
    assert rows == [("8", "8"), ("64", "64"), ("1,024", "1,024"), ("1,024", "8")]
    ratios = [float(ratio) for ratio in re.findall(r" / formula ([\d.e-]+)", said)]
    assert len(ratios) == 12 and all(abs(ratio - 1) < 0.01 for ratio in ratios), said
    assert all(float(calls) == 5 for calls in re.findall(r"calls per pass ([\d.]+)", said))


def every_call_ran(said: str) -> None:
    assert "event loop: 16 conversations, " in said


def few_kernels(said: str) -> None:
    """Where this processor's products in bfloat16 are compiled for each shape."""
    first, then = map(int, re.findall(r"default: (\d+) MiB after 3 passes, (\d+)", said)[0])
    assert then - first < 50 or float(said.split()[-1]) > 2


def as_many_tokens(said: str) -> None:
    ours, theirs = map(int, re.findall(r"trained tokens in all: verl_mt (\d+), TRL (\d+)", said)[0])
    assert ours == pytest.approx(theirs, rel=0.3)  # drawn independently


def nothing_lost(said: str) -> None:
    kills = [int(number) for number in re.findall(r"(\d+) of a ", said.splitlines()[-1])]
    assert sum(kills) >= 1 and said.strip().endswith(", 0 do not hold")


def an_update_costs_more_than_a_copy(said: str) -> None:
    assert all(
        float(ratio) > 1 for ratio in re.findall(r"(?:tensors|broadcast|disk) (\S+?)(?:,|$)", said.splitlines()[-1])
    )


def later_turns_are_found_in_caches(said: str) -> None:
    """A later turn finds all that its conversation has computed; the first one what others share with it."""
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if re.match(r"\| \d", line)]
    vllm = ["vllm"] if os.environ.get("VERL_MT_VLLM_PYTHON") else []
    assert [row[1] for row in rows] == ["local", "sglang", *vllm, "generate"]
    assert ("vllm: left out, " in said) != bool(vllm)
    possible = [float(rate) for rate in re.findall(r"possible at \d+: (.*)", said)[0].split(", ")]
    for _, engine, *_, rates in rows:
        hit = [float(rate) for rate in rates.split(", ")]
        expected = [0.0, 0.0, 0.0] if engine == "generate" else [0.0, *possible[1:]]
        assert all(found >= least - 0.011 for found, least in zip(hit, expected)), (engine, hit, possible)


ONCE = "--repetitions 1"
SMALL = (
    "data.train_batch_size=2 data.train_max_samples=16 data.val_max_samples=2 actor_rollout_ref.rollout.n=2"
    " actor_rollout_ref.rollout.response_length=48"
)
SGLANG, RAY = (pytest.mark.sglang, pytest.mark.timeout(900)), pytest.mark.ray
CASES = [
    Case("adapter_bytes.py", ""),
    Case("busy_cores.py", f"--size micro --threads 1 --beside 0 --sequences 4 {ONCE}", marks=(pytest.mark.release,)),
    Case("chat_delta.py", "--model verl_mt://tiny --turns 4 --repeats 1"),
    Case("checkpoint_digests.py", f"--megabytes 16 {ONCE}"),
    Case("cpu_kernels.py", f"--prompts 2 {ONCE}", the_same_turns),
    Case("data_start.py", "--rows 300", says("loaded and not loaded: the same rows, ids and counts")),
    Case("driver_cost.py", "--workers 0 1 --tokens 4000 --length 400", marks=(pytest.mark.release,)),
    Case("event_loop_lag.py", "--conversations 16 --seconds 0.1", every_call_ran),
    Case("engines.py", "--engines sglang --ways workers --steps 1 data.train_batch_size=4 data.val_max_samples=4",
         says('"trainer_bytes": '), marks=(*SGLANG, pytest.mark.release)),
    Case("environments_at_once.py", "--count 40 --tool-s 0.1 --turns 2"),
    Case("export_memory.py", "--size medium", the_model_once),
    Case("gpu/colocated_life.py", "--device cpu --shape toy --cycles 2 --tokens 128 --cache-gb 0.001 --expandable",
         says("the engine's allocator settings: none): 0 wrong tensors")),
    Case("fake_ranks.py", "--layers 1", as_docs_scaling_says),
    Case("gpu/run.py", "--rehearse --only mfu-0.5B", says("mfu-0.5B: update step, 0.5B ... ok"), out=False),
    Case("gpu/update_parts.py", "--device cpu --shape toy --length 64 --tokens 256 --only plain fused_adamw",
         says("toy, fused_adamw: ")),
    Case("gradient_accumulation.py", "--micro-batches 16 --tokens 8", as_good_as_exact),
    Case("kernel_caches.py", "--size micro --passes 6", few_kernels),
    Case("kills.py", "data.train_max_samples=32 --kills 1 --bounds 2 --over-sample 1.5 --who trainer worker",
         nothing_lost, marks=(pytest.mark.release,)),
    Case("local_engine.py", f"--size micro --sequences 4 --system-tokens 64 {ONCE}", same_greedy_streams),
    Case("log_prob_memory.py", f"--shapes 1024x50000 --hidden 32 {ONCE}", a_fraction_of_the_memory),
    Case("mfu.py", f"--device cpu --shapes toy --lengths 64 --tokens 256 {ONCE}"),
    Case("new_shapes.py", f"--rows 2 --sequences 1 --layers 1 --vocabulary 768 --dtype float32 {ONCE}"),
    Case("packing.py", f"--rows 4 --prompts 1 {ONCE}", equal_gradients),
    Case("parser_cost.py", "--kilobytes 1 2"),
    Case("peers/trl_grpo.py", "--steps 2 --sizes 4x4", as_many_tokens, installed=HAS_TRL,
         error='pip install "trl=='),
    Case("prefix_sharing.py", f"--rows 4 --group-sizes 2 {ONCE}", equal_gradients),
    Case("replicas.py", "--steps 1 --target 0 data.train_batch_size=4 data.val_max_samples=4",
         marks=(*SGLANG, RAY, pytest.mark.release)),
    Case("report_page.py", "{tmp}/finished-plain", installed=HAS_BROWSER, error="no browser", out=False),
    Case("rollout_rows.py", f"--trajectories 8 --tokens 200 {ONCE}"),
    Case("rollout_throughput.py", f"--sizes tiny --concurrency 8 {ONCE}", later_turns_are_found_in_caches,
         marks=SGLANG),
    Case("sanity_check.py", "--turns 10 20 --repeats 1"),
    Case("sequence_parallel.py", "--tokens 512 --sizes 1 2 --size tiny", a_part_of_the_row),
    Case("staleness.py", f"{SMALL} --bounds 0 --seeds 0 --steps 1", mode="curve"),
    Case("staleness.py", f"{SMALL} --bounds 1 --over --seeds 0 --steps 6"
         " --scales 0.01", mode="waiting", marks=(pytest.mark.release,)),
    Case("staleness.py", f"{SMALL} --seeds 0 --steps 1 --scales 0", mode="tune",
         marks=(pytest.mark.release,)),
    Case("weight_sync.py", "--size tiny --repetitions 2 --bucket-megabytes 1", an_update_costs_more_than_a_copy,
         marks=SGLANG),
    Case("weight_sync.py", "--size tiny --repetitions 2", mode="--replicas",
         marks=(*SGLANG, RAY, pytest.mark.release)),
]  # fmt: skip


def documented() -> dict[str, str]:
    """`SCRIPT MODE` -> the last line, of the table of benchmarks/README.md."""
    rows = re.findall(
        r"^\| `python benchmarks/(\S+?\.py)([^`]*)` \|.*\| `([^`]+)`", (BENCHMARKS / "README.md").read_text(), re.M
    )
    modes = {script: {case.mode for case in CASES if case.script == script} - {""} for script, _, _ in rows}
    return {
        " ".join([script, *(word for word in words.split()[:1] if word in modes[script])]): line
        for script, words, line in rows
    }


def pattern_of(line: str) -> str:
    """Single capitals are numbers, `NAME` and its like texts, `...` anything."""
    parts = re.split(rf"(\b[A-Z]\b|\b(?:{WORDS})\b|\.\.\.)", line)
    return "".join(
        {"...": ".*"}.get(p)
        or (NUMBER if re.fullmatch("[A-Z]", p) else ".+?" if re.fullmatch(WORDS, p) else re.escape(p))
        for p in parts
    )


@pytest.mark.parametrize("case", [pytest.param(case, marks=case.marks, id=case.name) for case in CASES])
def test_it_runs_and_ends_with_its_documented_line(case, tmp_path, finished):
    words = [*case.mode.split(), *case.words.format(tmp=tmp_path).split()]
    out = tmp_path / ("picture.png" if case.script == "report_page.py" else "out.json")
    if case.script == "report_page.py" and case.installed:
        finished("plain")
    words += ["--out", str(tmp_path / "gpu" if case.script == "gpu/run.py" else out)]
    done = warm_script.run(BENCHMARKS / case.script, *words, cwd=tmp_path)
    if not case.installed:
        assert done.returncode and case.error in done.stderr and "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(pattern_of(documented()[case.name]), last), last
    case.check(done.stdout.strip())
    if case.out:
        kept = (
            [json.loads(line) for line in out.read_text().splitlines()]
            if case.script in ("kills.py", "staleness.py")
            else [json.loads(out.read_text())]
        )
        assert kept and all({"command", "commit", "date", "machine", "versions"} <= each.keys() for each in kept)
        assert str(tmp_path) not in out.read_text()
        assert all(each.get("rows", True) for each in kept)


def test_no_command_of_the_folder_is_missing_here_or_in_the_list():
    commands = {f.relative_to(BENCHMARKS).as_posix() for f in BENCHMARKS.rglob("*.py") if "__main__" in f.read_text()}
    assert commands == {case.script for case in CASES}
    assert set(documented()) == {case.name for case in CASES}


def test_numbers_of_a_documented_line_are_finite():
    pattern = pattern_of("step: A s, NAME: ratio R, ...")
    assert re.fullmatch(pattern, "step: 1,024 s, a way: ratio 1.2e-08, 3 more")
    assert not re.fullmatch(pattern, "step: 1 s, a way: ratio nan, 3 more")
    assert not re.fullmatch(pattern, "step: inf s, a way: ratio 2, 3 more")
