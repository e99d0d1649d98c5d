"""`python -m verl_mt.report SWEEP_DIR`: settings, seeds, keys that differ, costs and failures, on one page."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from finished_runs import Finished, copy_run
from page_lab import EVIL, UNLABELLED, WEAK_TEXT, Opened
from run_lab import small_run

from verl_mt.data.run_files import append_metrics
from verl_mt.extensions.inspection.report.__main__ import main
from verl_mt.extensions.inspection.report.html_page import ReportServer
from verl_mt.extensions.inspection.report.sweep import SweepContents, collector

STEPS = 8
REWARDS = {("grpo", 1): 0.1, ("grpo", 2): 0.2, ("grpo", 3): 0.6, ("rloo", 1): 0.5, ("rloo", 2): 0.7, ("rloo", 10): 0.6}


def job(
    folder: Path, config: dict[str, Any], *, reward: float = 0.5, steps: int = STEPS, finished: bool = True
) -> Path:
    """A run whose reward rises by a hundredth a step, from `reward` on."""
    settings = {"trainer": {"seed": 1, "total_training_steps": STEPS}, "data": {"seed": 0, "train_files": "a.parquet"}}
    settings |= {"actor_rollout_ref": {"model": {"path": "toy"}}, "algorithm": {"adv_estimator": "grpo"}}
    for name, values in config.items():
        settings[name] = settings.get(name, {}) | values
    settings["trainer"] |= {"default_local_dir": str(folder), "experiment_name": folder.name}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for step in range(1, steps + 1):
        numbers = {"reward/mean": reward + step / 100, "time/step_s": 30.0, "time/rollout_s": 20.0}
        numbers |= {"rollout/tokens_per_s": 100.0}
        if step == STEPS:
            numbers |= {"val/accuracy": reward, "time/validate_s": 10.0}
        append_metrics(folder / "metrics.jsonl", {"step": step, **numbers})
    if finished:
        (folder / "FINISHED").write_text("")
    return folder


def seeds(folder: Path) -> Path:
    """Two settings of three seeds. Seed 10 of the second failed at step 3."""
    for (estimator, seed), reward in REWARDS.items():
        own = folder / f"algorithm={estimator}" / f"trainer.seed={seed}"
        config = {"algorithm": {"adv_estimator": estimator}, "trainer": {"seed": seed}}
        over = seed != 10
        job(own, config, reward=reward, steps=STEPS if over else 3, finished=over)
        (own / "trainer.log").write_text("step 3\nMemoryError: too little\nTraceback: see above\n")
    return folder


def shown(folder: Path) -> dict[str, Any]:
    contents = collector([str(folder)], 100).contents()
    assert isinstance(contents, SweepContents)
    return contents.sweep


def test_runs_that_differ_in_seeds_and_names_are_one_setting(tmp_path):
    sweep = shown(seeds(tmp_path))
    assert [job["name"] for job in sweep["jobs"]] == [f"algorithm={e}/trainer.seed={s}" for e, s in REWARDS]
    assert [setting["label"] for setting in sweep["settings"]] == ["adv_estimator=grpo", "adv_estimator=rloo"]
    assert [job["setting"] for job in sweep["jobs"]] == [0, 0, 0, 1, 1, 1]
    assert [job["seed"] for job in sweep["jobs"]] == ["1", "2", "3", "1", "2", "10"]
    assert sweep["keys"] == ["algorithm.adv_estimator"]
    assert [setting["values"] for setting in sweep["settings"]] == [["grpo"], ["rloo"]]
    assert sweep["notes"] == []


@pytest.mark.slow
def test_a_failed_job_is_named_with_its_last_error(tmp_path, capsys):
    seeds(tmp_path)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "report.html: 6 runs, 2 settings" in printed.out
    assert printed.err == "algorithm=rloo/trainer.seed=10: MemoryError: too little\n"
    failed = [job for job in shown(tmp_path)["jobs"] if job["state"] != "finished"]
    assert [(job["name"], job["state"]) for job in failed] == [("algorithm=rloo/trainer.seed=10", "failed")]


def test_running_broken_off_failed_and_finished_jobs_are_told_apart(tmp_path, capsys):
    for seed, name in enumerate(("finished", "running", "failed", "broken", "again", "killed")):
        folder = job(tmp_path / name, {"trainer": {"seed": seed}}, finished=name == "finished")
        (folder / ".lock").write_text("process 1 on here")
    (tmp_path / "failed" / "stderr.log").write_text("error: no\n")
    ended = {"status": "failed", "why": "killed by SIGKILL: nothing on stderr"}
    lines = [
        {**ended, "folder": "again", "ended": 1.0},  # before it was started again, and broken off
        {**ended, "folder": "killed", "ended": time.time() + 1},
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (tmp_path / "running" / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        jobs = {job["name"]: (job["state"], job["error"]) for job in shown(tmp_path)["jobs"]}
    assert jobs == {
        "finished": ("finished", None),
        "running": ("running", None),
        "failed": ("failed", "error: no"),
        "broken": ("broken off", None),
        "again": ("broken off", None),
        "killed": ("failed", "killed by SIGKILL: nothing on stderr"),
    }
    assert main([str(tmp_path)]) == 0
    assert "broken: broken off\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("error: data.train_files: no such file\n", "error: data.train_files: no such file"),
        ("[2026-01-01][INFO] ok\n[2026-01-01][ERROR] died\nbye\n", "[2026-01-01][ERROR] died"),
        ("  torch.OutOfMemoryError: of\nKeyboardInterrupt", "KeyboardInterrupt"),
        ("all is well, no error anywhere\n", None),
        ("x" * 200_000 + "\nValueError: at the end\n", "ValueError: at the end"),
        ("ValueError: " + "x" * 1000, "ValueError: " + "x" * 488 + "…"),
    ],
)
def test_the_last_error_is_found_in_the_log(tmp_path, log, error):
    for seed in (1, 2):
        job(tmp_path / str(seed), {"trainer": {"seed": seed}}, finished=seed == 1)
    (tmp_path / "2" / "stderr.txt").write_text(log)
    assert shown(tmp_path)["jobs"][1]["error"] == error


def test_a_job_that_never_became_a_run_is_listed(tmp_path):
    job(tmp_path / "1", {})
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    (tmp_path / "2" / "trainer.log").write_text("error: no such key\n")
    (tmp_path / "3" / ".hydra").mkdir(parents=True)
    job(tmp_path / "3" / "run", {})  # of a program whose Hydra folder is not the run
    sweep = shown(tmp_path)
    assert len(sweep["settings"]) == 1
    assert [(job["setting"], job["state"], job["error"]) for job in sweep["jobs"]] == [
        (0, "finished", None),
        (None, "failed", "error: no such key"),
        (0, "finished", None),
    ]


def test_jobs_are_found_three_levels_down_and_not_in_runs_hidden_folders_or_links(tmp_path):
    sweep = tmp_path / "sweep"
    for place in ("a/b/c", "a/d", "e", "f/g/h/too_deep", ".hidden/x", "e/inside"):
        job(sweep / place, {"trainer": {"seed": len(place)}})
    (sweep / "link").symlink_to(sweep / "a", target_is_directory=True)
    assert [job["name"] for job in shown(sweep)["jobs"]] == ["a/b/c", "a/d", "e"]


@pytest.mark.parametrize("inside", [(), ("notes.txt",)])
def test_a_folder_without_runs_is_one_line_of_error(tmp_path, capsys, inside):
    for name in inside:
        (tmp_path / name).write_text("")
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "not a run directory" in error and "no run lies in it" in error


def test_a_folder_of_one_run_gives_the_report_of_that_run(tmp_path, capsys):
    small_run(tmp_path / "only", steps=1)
    assert main([str(tmp_path)]) == 0
    assert f"{tmp_path / 'report.html'}: 8 rollouts" in capsys.readouterr().out
    assert '"sweep"' not in (tmp_path / "report.html").read_text().partition('id="manifest">')[2].partition("</")[0]


def test_a_sweep_beside_other_paths_is_one_line_of_error(tmp_path, capsys):
    seeds(tmp_path / "sweep")
    job(tmp_path / "run", {})
    assert main([str(tmp_path / "run"), str(tmp_path / "sweep")]) == 2
    assert "holds 6 runs. Name it alone" in capsys.readouterr().err


def test_labels_take_as_few_keys_as_tell_the_settings_apart(tmp_path):
    settings = [("grpo", 0.2, 1e-6), ("rloo", 0.3, 1e-6), ("grpo", 0.2, 1e-5), ("rloo", 0.3, 1e-5)]
    for number, (estimator, clip, rate) in enumerate(settings):
        actor = {"clip_ratio": clip, "optim": {"lr": rate}}
        job(tmp_path / str(number), {"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {"actor": actor}})
    sweep = shown(tmp_path)
    assert [setting["label"] for setting in sweep["settings"]] == [
        f"adv_estimator={estimator}, lr={rate}" for estimator, _, rate in settings
    ]
    assert len(sweep["keys"]) == 3


def test_labels_are_unique_where_last_parts_and_long_values_are_not(tmp_path):
    for number, (left, right) in enumerate([(1, 1), (1, 2), (2, 1)]):
        job(tmp_path / "n" / str(number), {"actor": {"lr": left}, "critic": {"lr": right}})
    labels = [setting["label"] for setting in shown(tmp_path / "n")["settings"]]
    assert labels == ["actor.lr=1, critic.lr=1", "actor.lr=1, critic.lr=2", "actor.lr=2, critic.lr=1"]
    for number in range(2):
        job(tmp_path / "long" / str(number), {"model": {"path": "x" * 60 + str(number)}})
    labels = [setting["label"] for setting in shown(tmp_path / "long")["settings"]]
    assert labels == [f"path={'x' * 39}… (1)", f"path={'x' * 39}… (2)"]


def test_the_same_seed_twice_counts_once(tmp_path):
    """A sweep that was broken off and begun again in another folder has no second sample of that seed."""
    job(tmp_path / "broken", {}, steps=3, finished=False)
    job(tmp_path / "whole", {})
    job(tmp_path / "other", {"trainer": {"seed": 2}})
    job(tmp_path / "rows", {"data": {"seed": 5}})
    jobs = {job["name"]: job for job in shown(tmp_path)["jobs"]}
    assert {name: job["same_as"] for name, job in jobs.items()} == {
        "broken": "whole",
        "whole": None,
        "other": None,
        "rows": None,
    }
    assert jobs["rows"]["seed"] == "1, data 5" and {job["setting"] for job in jobs.values()} == {0}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"data": {"train_files": "b.parquet"}}, "data.train_files"),
        ({"reward": {"turn_cost": 0.1}}, "reward.turn_cost"),
    ],
)
def test_runs_of_different_tasks_are_said_to_be(tmp_path, config, key):
    job(tmp_path / "1", {})
    job(tmp_path / "2", config)
    (note,) = shown(tmp_path)["notes"]
    assert f"differ in {key}" in note and "measure different things" in note


def test_settings_without_a_common_metric_are_said_to_have_none(tmp_path):
    for number, name in enumerate(("reward/mean", "loss")):
        own = job(tmp_path / name.replace("/", "_"), {"algorithm": {"gamma": number}}, steps=0)
        append_metrics(own / "metrics.jsonl", {"step": 1, name: 0.5, "words": "text"})
    (note,) = shown(tmp_path)["notes"]
    assert "no metric in common" in note


def test_a_broken_line_of_metrics_costs_no_other(tmp_path):
    seeds(tmp_path)
    path = tmp_path / "algorithm=grpo" / "trainer.seed=2" / "metrics.jsonl"
    path.write_text("{broken\n[1]\n" + path.read_text() + '{"step": 9, "rew')
    (found,) = [job for job in shown(tmp_path)["jobs"] if job["problems"]]
    assert found["name"] == "algorithm=grpo/trainer.seed=2" and found["state"] == "finished"
    assert [problem.partition(":")[0] for problem in found["problems"]] == [
        "metrics.jsonl, line 1",
        "metrics.jsonl, line 2",
        "metrics.jsonl",
    ]


def test_a_run_whose_configuration_cannot_be_read_stands_alone(tmp_path):
    for number in range(3):
        job(tmp_path / str(number), {"trainer": {"seed": number}})
    (tmp_path / "1" / "config.yaml").write_text("a: [1")
    sweep = shown(tmp_path)
    assert [setting["label"] for setting in sweep["settings"]] == ["all runs", "1"]
    assert [job["setting"] for job in sweep["jobs"]] == [0, 1, 0] and sweep["keys"] == []
    assert "cannot be read as YAML" in sweep["jobs"][1]["problems"][0]


def see_charts(page) -> None:
    """Curves are drawn when a reader comes to them."""
    page.locator("#curves .plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".chart .plot .trace")


def table(page, heading: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    node = page.locator(f"h2:text-is('{heading}') ~ * table >> nth=0")
    return [row.locator("th, td").all_inner_texts() for row in node.locator("tbody tr").all()]


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
class TestInBrowser:
    """What a reader sees."""

    def test_means_and_intervals_are_those_of_the_seeds(self, browser, tmp_path):
        seeds(tmp_path)
        main([str(tmp_path)])
        with Opened(browser, (tmp_path / "report.html").as_uri()) as page:
            see_charts(page)
            # A quarter of eight steps: the mean of the last two, 0.07 and 0.08 above where the run began.
            own = [REWARDS["grpo", seed] + 0.075 for seed in (1, 2, 3)]
            mean, error = statistics.mean(own), statistics.stdev(own) / 3**0.5
            three, two = table(page, "Final metrics")
            assert three[:3] == ["adv_estimator=grpo", "3", f"{mean:.3f} ± {error:.2g}"]
            assert two[:3] == ["adv_estimator=rloo", "2 of 3", "0.675 (0.575 to 0.775)"]
            assert (three[3], two[3]) == ("0.3 ± 0.15", "0.6 (0.5 to 0.7)"), "the last validation"
            assert table(page, "Keys that differ") == [["algorithm.adv_estimator", "grpo", "rloo"]]
            jobs = table(page, "Jobs")
            assert jobs[0] == [
                "algorithm=grpo/trainer.seed=1", "finished", "adv_estimator=grpo", "1", "8 of 8", "4.17 min", "16,000",
            ]  # fmt: skip
            assert jobs[5][1:] == ["failed", "adv_estimator=rloo", "10", "3 of 8", "90 s", "6,000"]
            assert jobs[6] == ["all jobs", "", "", "", "43", "22.3 min", "86,000"]
            said = page.locator(".note.bad").inner_text()
            assert "1 job failed" in said and "trainer.seed=10: after step 3" in said and "MemoryError" in said
            reward = page.locator(".chart", has=page.get_by_role("heading", name="Reward"))
            assert "adv_estimator=rloo: not every seed has every step" in reward.inner_text()
            lines = reward.locator(".plot").evaluate(
                "node => node.data.map((t) => [t.fill ?? '', [...t.y], [...(t.text || [])]])"
            )
            assert [fill for fill, _, _ in lines] == ["toself", "", "toself", ""]
            begun = [REWARDS["grpo", seed] for seed in (1, 2, 3)]
            centre = [statistics.mean(begun) + step / 100 for step in range(1, STEPS + 1)]
            spread = statistics.stdev(begun) / 3**0.5
            assert lines[1][1] == pytest.approx(centre)
            assert lines[0][1] == pytest.approx([c - spread for c in centre] + [c + spread for c in centre[::-1]])
            assert lines[1][2][0].endswith("3 seeds") and lines[3][2][-1] == ", 2 seeds"
            assert len(lines[2][1]) == 2 * 3, "of fewer than its three seeds the setting has no interval"

    def test_the_final_metrics_sort_by_a_column(self, browser, tmp_path):
        seeds(tmp_path)
        main([str(tmp_path)])
        with Opened(browser, (tmp_path / "report.html").as_uri()) as page:
            for order in (["adv_estimator=rloo", "adv_estimator=grpo"], ["adv_estimator=grpo", "adv_estimator=rloo"]):
                page.get_by_role("button", name="reward").click()
                assert [row[0] for row in table(page, "Final metrics")] == order

    def test_text_of_a_job_is_shown_and_never_run(self, browser, tmp_path):
        name = re.sub("/", "", EVIL)
        sweep = tmp_path / f"sweep{name}"
        for seed in (1, 2):
            job(sweep / f"{name}{seed}", {EVIL: {EVIL: f"{EVIL}{seed}"}}, finished=seed == 1)
        with open(sweep / f"{name}1" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 9, EVIL: 1.0}) + "\n" + "{broken\n")
        (sweep / f"{name}2" / "a.log").write_text(f"ValueError: {EVIL}\n")
        main([str(sweep), "--out", str(tmp_path / "a.html")])
        with Opened(browser, (tmp_path / "a.html").as_uri()) as page:
            see_charts(page)
            page.select_option("#any-metric", EVIL)
            page.locator(".own .plot").scroll_into_view_if_needed()
            page.wait_for_selector(".own .plot svg")
            text = page.locator("main").inner_text()
            assert f"ValueError: {EVIL}" in text and f"{EVIL}1" in text and name in text
            assert page.locator("main script, main img, main iframe, header img").count() == 0
            page.wait_for_timeout(300)
            assert page.evaluate("window.harmed") is None

    @pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark"), (390, "light")])
    @pytest.mark.parametrize("number", [2, 12])
    def test_the_page_fits_its_width_and_text_stands_out(self, browser, tmp_path, width, scheme, number):
        for k in range(number):
            config = {"algorithm": {"adv_estimator": f"estimator_{k}"}, "data": {"train_files": f"{'x' * 90}{k}"}}
            own = job(tmp_path / f"{'long_name_' * 9}{k}", config, finished=k > 0, steps=STEPS if k else 2)
        (own.parent / f"{'long_name_' * 9}0" / "a.log").write_text("ValueError: " + "y" * 400)
        main([str(tmp_path)])
        with Opened(browser, (tmp_path / "report.html").as_uri(), width=width, scheme=scheme) as page:
            see_charts(page)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            assert page.evaluate(WEAK_TEXT) == []
            assert page.evaluate(UNLABELLED) == []

    def test_a_served_sweep_follows_its_jobs(self, browser, tmp_path):
        seeds(tmp_path)
        with ReportServer([str(tmp_path)]) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with Opened(browser, server.url) as page:
                assert "6 jobs, 2 settings, 5 finished" in page.locator("main").inner_text()
                (tmp_path / "algorithm=rloo" / "trainer.seed=10" / "FINISHED").write_text("")
                page.wait_for_function(
                    "() => document.querySelector('main').innerText.includes('6 finished')", timeout=20_000
                )
            server.shutdown()

    def test_real_runs(self, browser, finished: Finished, tmp_path):
        first = finished("plain")
        sweep = tmp_path / "sweep"
        for number, (seed, rate) in enumerate([(0, None), (1, None), (0, 0.5)]):
            own = copy_run(first, sweep / str(number))
            shutil.rmtree(own / "checkpoints")
            config = yaml.safe_load((own / "config.yaml").read_text())
            config["trainer"]["seed"] = seed
            config["actor_rollout_ref"]["actor"]["optim"]["lr"] = rate or 1e-4
            (own / "config.yaml").write_text(yaml.safe_dump(config))
        assert main([str(sweep)]) == 0
        with Opened(browser, (sweep / "report.html").as_uri()) as page:
            see_charts(page)
            assert [row[:2] for row in table(page, "Final metrics")] == [["lr=0.0001", "2"], ["lr=0.5", "1"]]
            assert [row[4] for row in table(page, "Jobs")] == ["4 of 4"] * 3 + ["12"]
            assert all(row[6] != "–" for row in table(page, "Jobs"))
