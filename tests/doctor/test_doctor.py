"""The doctor finds planted faults, says what to do, leaves nothing behind, and raises no alarm over what is shipped."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import warm_start
from command_lab import environment
from doctor_faults import FAULTS, QUICK
from rich.console import Console
from tables import before_release

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError
from verl_mt.extensions.inspection.doctor import resources
from verl_mt.extensions.inspection.doctor.__main__ import main
from verl_mt.extensions.inspection.doctor.checks import CHECKS, examine
from verl_mt.extensions.inspection.doctor.findings import Check, Finding, error, ok, run_checks, show, warning
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.slow  # many configurations

FEW = ("data.train_max_samples=32", "data.val_max_samples=2")
ONE_THREAD = "trainer.num_threads=1"  # nobody looks for a quarter of a second which cores are idle


def findings(overrides: list[str], *names: str) -> list[Finding]:
    """Of the named checks and those that they need; of all where none is named."""
    wanted, checks = set(names), list(CHECKS)
    for check in reversed(checks):
        if check.name in wanted:
            wanted |= set(check.needs)
    return examine(compose([*FEW, ONE_THREAD, *overrides]), [c for c in checks if not names or c.name in wanted])


def one(found: list[Finding], check: str, status: str) -> Finding:
    named = [f for f in found if f.check == check and f.status == status]
    assert named, "\n".join(f"{f.check}: {f.status}: {f.text}" for f in found)
    return named[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAULTS]
)
def test_a_planted_fault_is_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fault = FAULTS[name]
    found = findings(fault.plant(tmp_path), fault.check)
    named = one(found, fault.check, fault.status)
    assert fault.says in f"{named.text} {named.fix}"
    assert [f.check for f in found if f.status == "error"] == [fault.check] * (fault.status == "error")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sampling"),
    [
        (("name=sglang",), "16 engines on 16 devices"),
        (("name=sglang", "tensor_model_parallel_size=4"), "4 engines on 16 devices"),
        (("name=sglang", "launch_servers=3"), "3 engines on 3 devices"),
        (("name=sglang", "servers=[http://a:1,http://b:1]"), "2 servers"),
        (("name=local",), "1 engine on 1 device"),
    ],
)
def test_it_says_how_many_devices_sample(words, sampling):
    ranks = ["trainer.placement=ray", "trainer.nnodes=2", "trainer.n_workers_per_node=8", "trainer.device=cuda"]
    found = one(findings([*ranks, *(f"actor_rollout_ref.rollout.{word}" for word in words)], "time"), "time", "ok")
    assert f"rollout ({sampling}) " in found.text


def test_the_time_of_a_step_is_told_by_the_formula_that_runs_are_compared_with(tmp_path):
    """Within a factor of a few of a step that is then taken, update and rollout each."""
    run = [
        "data.val_files=null", "trainer.total_training_steps=2", "trainer.logger=[]", ONE_THREAD,
        "trainer.export_at_end=False", "data.train_batch_size=4", f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    text = one(findings(run, "time"), "time", "ok").text
    told = {name: float(number) for name, number in re.findall(r"(rollout|update) ([0-9.]+)", text)}
    told["step"] = float(re.search(r"about ([0-9.]+) s a step on cpu", text)[1])
    # On one device nothing but waiting for tools, which the forecast does not know, is beside something else.
    ahead = one(findings([*run, "trainer.max_staleness=2"], "time"), "time", "ok").text
    assert "of which 0.0 beside each other (max_staleness=2)" in ahead and "beside" not in text
    build_trainer(compose(run)).fit()
    *_, last = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    for name in ("step", "rollout", "update"):
        assert 1 / 6 < told[name] / last[f"time/{name}_s"] < 6, (name, told, last[f"time/{name}_s"])


@pytest.mark.parametrize(("ratio", "said"), [(2.0, True), (0.5, False)])
def test_a_cpu_that_is_slower_in_bfloat16_is_told_so_before_a_run(monkeypatch, ratio, said):
    """AVX512-BF16 alone is; with AMX it is the other way round."""
    speeds = {"float32": (1e8 * ratio, 1e10), "bfloat16": (1e8, 1e10)}
    monkeypatch.setattr(resources, "_speed", lambda kind, dtype: speeds[dtype])
    monkeypatch.setattr(resources.torch.cuda, "is_available", lambda: False)
    run = ["actor_rollout_ref.model.dtype=bfloat16", "trainer.device=cpu"]
    found = findings(run, "time")
    assert sum(f.status == "warning" for f in found) == said
    if said:
        warned = one(found, "time", "warning")
        seconds, factor = re.search(r"about ([0-9.]+) s a step, ([0-9.]+) times", warned.text).groups()
        exact = one(findings([*run, "actor_rollout_ref.model.dtype=float32"], "time"), "time", "ok").text
        assert f"about {seconds} s a step" in exact and 1.5 < float(factor) <= 2
        assert "actor_rollout_ref.model.dtype=float32" in warned.fix


def test_an_engine_that_is_not_there_is_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = findings(["actor_rollout_ref.rollout.name=nope.py:Engine"], "engine", "disk", "memory", "time")
    assert "nope.py" in one(found, "engine", "error").text
    assert [f.check for f in found if f.status == "error"] == ["engine"]


@pytest.mark.slow
def test_the_disk_is_compared_with_the_checkpoints_that_are_kept(monkeypatch, tmp_path):
    """A checkpoint of the shipped model is 10.6 MB; one more is on the disk while it is written."""
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 35_000_000}))
    run = [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.rollout_rows=False", "trainer.export_at_end=False"]
    found = one(findings([*run, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null"], "disk"), "disk", "error")
    assert "61 checkpoint(s)" in found.text
    assert "max_actor_ckpt_to_keep" in found.fix
    assert "2 checkpoint(s)" in one(findings([*run, "trainer.max_actor_ckpt_to_keep=1"], "disk"), "disk", "ok").text


def test_memory_that_is_not_there_is_an_error_that_names_what_takes_it(monkeypatch):
    monkeypatch.setattr(resources, "available_memory", lambda: 5e6)
    found = one(findings([], "memory"), "memory", "error")
    assert "activations" in found.text
    assert "ppo_max_token_len" in found.fix


def test_memory_that_caches_files_counts_as_there():
    """A machine that has read much has next to nothing *free*, and all of it to give."""
    if not (meminfo := Path("/proc/meminfo")).is_file():
        pytest.skip("no /proc/meminfo, which says what Linux can give")
    known = dict(line.split()[:2] for line in meminfo.read_text().splitlines())
    assert resources.available_memory() == pytest.approx(1024 * int(known["MemAvailable:"]), rel=0.2)


@pytest.mark.cap("P5", "P7")
@pytest.mark.parametrize(
    "name", ["Qwen-QwQ-32B", before_release("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"), "Kimi-K2-Thinking"]
)
def test_a_template_that_forks_every_turn_makes_several_records(shared_data, name):
    """The doctor measures what the template does with plain turns; it does not believe that its text only grows."""
    file = shared_data / "templates" / f"{name}.jinja"
    template = [
        f"actor_rollout_ref.model.custom_chat_template={file}",
        "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=null",
    ]
    forks = [*template, "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=True"]
    assert one(findings(template, "records"), "records", "ok").text == "one record per conversation"
    found = findings(forks, "records")
    assert one(found, "records", "ok").text.startswith("several records from ")
    assert "rewrites history: three plain turns come back changed" in one(found, "chat template", "ok").text


@pytest.mark.cap("V6")
def test_thinking_that_is_switched_off_is_no_alarm(shared_data, tmp_path, monkeypatch):
    """Qwen3 begins each turn with an empty think block, and does not show it in earlier ones: that is meant."""
    monkeypatch.chdir(tmp_path)
    found = findings(
        [
            f"actor_rollout_ref.model.custom_chat_template={shared_data / 'templates' / 'Qwen-Qwen3-0.6B.jinja'}",
            "actor_rollout_ref.model.template_kwargs={enable_thinking: false}",
            "data.max_prompt_length=1024",
        ],
        "rollout",
    )
    assert not [f for f in found if f.check == "rollout" and f.status != "ok"], found
    assert "earlier turns keep '<think>" in one(found, "rollout", "ok").text


def test_dependants_of_a_failed_check_are_skipped_and_nobody_else():
    def fails(subject):
        raise ConfigError("no such thing")

    def crashes(subject):
        yield ok("so far")
        raise KeyError("surprise")

    checks = [
        Check("a", fails),
        Check("b", lambda s: iter([warning("w", "f")])),
        Check("c", lambda s: iter([ok("never")]), ("a", "b")),
        Check("d", crashes),
        Check("e", lambda s: iter([ok("never")]), ("c",)),
        Check("f", lambda s: iter([error("e", "f"), ok("more")]), ("b",)),
    ]
    found = [(f.check, f.status, f.text) for f in run_checks(checks, None)]
    assert found == [
        ("a", "error", "no such thing"),
        ("b", "warning", "w"),
        ("c", "skipped", "needs a"),
        ("d", "ok", "so far"),
        ("d", "error", "KeyError: 'surprise'"),
        ("e", "skipped", "needs c"),
        ("f", "error", "e"),
        ("f", "ok", "more"),
    ]


def test_what_could_not_be_looked_at_is_one_line_and_a_pipe_is_as_wide_as_it_says(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    skipped = [Finding("skipped", "needs rows", check=name) for name in ("prompts", "rollout", "disk")]
    assert show([error("no such file " * 9, "give one"), *skipped]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split(maxsplit=1)[1].strip() for line in lines if line.startswith("-")] == [
        "not looked at  prompts, rollout, disk (needs rows)"
    ]
    assert lines[-1] == "1 error(s), 0 warning(s), 3 skipped, 0 ok"


def test_every_check_needs_only_earlier_ones():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:place])


def test_a_configuration_that_does_not_compose_is_the_only_thing_that_is_said():
    out = io.StringIO()
    status = main(
        ["trainer.total_steps=3", "actor_rollout_ref.rollout.top_p=0.9"], console=Console(file=out, width=200)
    )
    assert status == 2
    text = out.getvalue()
    assert "total_steps" in text
    assert "1 error(s), 0 warning(s), 0 skipped, 0 ok" in text
    assert len(text.splitlines()) <= 4


@pytest.mark.slow
def test_the_default_task_has_nothing_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    assert main([], console=Console(file=out, width=200)) == 0
    assert "0 error(s), 0 warning(s), 0 skipped" in out.getvalue()
    said = " ".join(out.getvalue().split())
    assert "4 trajectories, 4 finished. Reward of the scripted answer: 0" in said
    assert "Nothing is validated" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "override", "status"),
    [
        (["verl_mt.doctor"], ONE_THREAD, 0),
        (["verl_mt.trainer", "trainer.dry_run=True"], "data.max_prompt_length=20", 2),
        before_release(["verl_mt.doctor"], "data.max_prompt_length=20", 2),
        before_release(["verl_mt.trainer", "trainer.dry_run=True"], ONE_THREAD, 0),
    ],
)
def test_both_commands_print_the_same_list_and_the_exit_status_says_it(tmp_path, words, override, status):
    done = warm_start.run(
        [sys.executable, "-m", *words, override, *FEW], cwd=tmp_path, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "configuration" in done.stdout
    assert ("all 16 prompts are longer" in " ".join(done.stdout.split())) is (status == 2)
    assert "Traceback" not in done.stdout + done.stderr
    assert list(Path(tmp_path).iterdir()) == []
