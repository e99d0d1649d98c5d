"""benchmarks/gpu/run.py: what fails is recorded, what is done is not done again, and the commands work."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_script
import warm_start

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve()
SCRIPT = REPO / "benchmarks" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_run"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def python(text: str) -> tuple[str, ...]:
    return ("-c", text)


@pytest.mark.slow
def test_a_stage_that_fails_or_takes_too_long_is_recorded_with_its_output(command, tmp_path):
    def stage(text, read=None):
        read = read or command.lines_with("the la" + "st")  # a traceback shows the command
        return command.Stage("name", "what", python("raise SystemExit(9)"), python(text), read)

    good = command.run_stage(stage("print('first'); print('the last')"), tmp_path, True, 30)
    assert (good["status"], good["numbers"], "output" in good) == ("ok", {"lines": ["the last"]}, False)
    bad = command.run_stage(stage("print('the', 'last'); raise ValueError('no such kernel')"), tmp_path, True, 30)
    assert (bad["status"], bad["code"], bad["numbers"]) == ("failed", 1, {"lines": ["the last"]})
    assert "no such kernel" in bad["output"]
    long = command.run_stage(stage("import time; print('begun', flush=True); time.sleep(60)"), tmp_path, True, 1.0)
    assert (long["status"], long["code"]) == ("over the limit", None) and "begun" in long["output"]
    unread = command.run_stage(stage("print()", read=lambda text, folder: {"x": {}["y"]}), tmp_path, True, 30)
    assert unread["status"] == "failed" and "KeyError" in unread["unreadable"]
    assert command.run_stage(stage(""), tmp_path, False, 30)["code"] == 9


def test_numbers_are_read_where_the_commands_write_them(command, tmp_path):
    assert command.counts("x\n=== 3 failed, 13 passed, 2 skipped in 4.20s ===\n", tmp_path) == {
        "failed": 3, "passed": 13, "skipped": 2,
    }  # fmt: skip
    said = "a\npeak memory: 1.25 GB (the GPU's), 61.0 s\n"
    assert command.peak(said, tmp_path) == {"peak GB": 1.25, "of": "the GPU's", "seconds in the trainer": 61.0}
    assert command.training("", tmp_path) == {"steps": 0}


def test_every_stage_has_a_name_of_its_own_and_both_commands_of_files_that_are_there(command):
    stages = command._stages()
    assert len({stage.name for stage in stages}) == len(stages) == 21
    for stage in stages:
        for words in (stage.on_gpu, stage.in_rehearsal):
            assert words != () and all(Path(word).exists() for word in words if word.startswith(str(REPO)))


def test_the_page_has_the_table_of_published_results(command):
    published = json.loads(command.PUBLISHED.read_text())
    assert published.keys() <= {stage.name for stage in command._stages()}
    assert command.table() in (REPO / "benchmarks" / "RESULTS.md").read_text()


def test_the_tests_stage_names_every_file_that_has_the_mark(command):
    tests = REPO / "tests"
    marked = {file for file in tests.rglob("test_*.py") if "pytest.mark.gpu" in file.read_text() and file != HERE}
    assert marked == {tests / file for file in command.GPU_TESTS}


def test_wheels_are_what_the_project_needs_and_neither_ray_nor_sglang():
    lines = (SCRIPT.parent / "wheels.txt").read_text().splitlines()
    names = {line.partition("==")[0].replace("_", "-") for line in lines if line and not line.startswith("#")}
    assert {"hydra-core", "omegaconf", "tensordict", "pydantic", "jsonschema", "docstring-parser"} <= names
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    assert not names & {"ray", "sglang", "torch", "transformers"}


def test_time_of_an_update_is_told_apart_by_kernels_and_by_what_they_run_in(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import update_parts as parts

    names = {
        "nvjet_hsh_128x256": "products", "sm90_xmma_gemm_bf16bf16": "products", "aten::addmm": "products",
        "flash_fwd_kernel": "attention", "triton_poi_fused_mul_silu": "elementwise", "aten::add": "elementwise",
    }  # fmt: skip
    assert {name: parts.class_of(name, ["aten::linear"]) for name in names} == names
    assert parts.class_of("aten::mm", ["autograd::engine::evaluate_function: _FusedHeadBackward"]) == "head"
    assert parts.class_of("vectorized_elementwise_kernel", ["x", "Optimizer.step#MasterAdamW.step"]) == "optimizer"

    def event(name, microseconds, above=None, on="DeviceType.CPU"):
        return SimpleNamespace(
            name=name, device_type=on, self_cpu_time_total=microseconds, cpu_parent=above,
            kernels=[SimpleNamespace(name=name, duration=2 * microseconds)],
        )  # fmt: skip

    step = event("Optimizer.step#AdamW.step", 5)
    events = [step, event("aten::mul", 10, step), event("aten::mm", 20), event("aten::mm", 99, on="DeviceType.CUDA")]
    for on_gpu, wall in ((False, 100), (True, 200)):
        assert parts.shares_of(events, wall, on_gpu) == pytest.approx(
            {"products": 0.2, "attention": 0, "elementwise": 0, "head": 0, "optimizer": 0.15, "idle": 0.65}
        )


@pytest.mark.slow
def test_stages_that_are_done_are_not_done_again(tmp_path):
    def rehearse(*words):
        out = ("--out", str(tmp_path))
        done = warm_script.run(SCRIPT, *out, *words)
        return done.returncode, done.stdout, json.loads((tmp_path / "results.json").read_text())

    code, printed, results = rehearse("--rehearse", "--only", "log-prob-memory")
    assert code == 0 and "1 of 21 stages are well; not run: colocated-life, colocated-expandable, tests" in printed, (
        printed
    )
    first = results["stages"]["log-prob-memory"]
    assert first["status"] == "ok" and "recomputed" in first["numbers"]["lines"][0]
    assert results["environment"]["torch"] and results["environment"]["device"]
    code, printed, results = rehearse("--rehearse", "--only", "log-prob-memory", "decode")
    assert code == 0 and "log-prob-memory:" not in printed and results["stages"]["log-prob-memory"] == first
    assert "tokens/s" in results["stages"]["decode"]["numbers"]["lines"][0]
    refused = warm_start.run([sys.executable, str(SCRIPT), "--out", str(tmp_path)], capture_output=True, text=True)
    assert refused.returncode and "is of a rehearsal: give another --out" in refused.stderr


@pytest.mark.release
def test_a_run_goes_on_from_the_first_ones_last_step(tmp_path):
    stages = ("--rehearse", "--only", "train-float32", "resume")
    done = warm_script.run(SCRIPT, "--out", str(tmp_path), *stages)
    assert done.returncode == 0, done.stdout
    recorded = json.loads((tmp_path / "results.json").read_text())["stages"]
    first, more = (recorded[name]["numbers"] for name in ("train-float32", "resume"))
    assert (first["steps"], first["last step"], more["steps"], more["last step"]) == (2, 2, 5, 7)
    lines = [json.loads(line) for line in (tmp_path / "work/resume/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 7]


@pytest.mark.slow
def test_the_trainer_runs_without_ray_and_sglang_and_tells_its_memory(tmp_path):
    small = (
        "trainer.total_training_steps=1", "trainer.device=cpu", "data.train_batch_size=2", "data.train_max_samples=16",
        "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.response_length=48",
    )  # fmt: skip
    command = [sys.executable, str(SCRIPT), "--inside-trainer", *small, "trainer.default_local_dir=run"]
    done = warm_start.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "peak memory: " in done.stdout.splitlines()[-1] and "imported without" not in done.stdout
