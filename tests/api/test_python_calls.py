"""Whole runs as one call: `verl_mt.train` and what it returns."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import textwrap
import threading

import pytest
import warm_start

import verl_mt
from verl_mt.config.compose import compose
from verl_mt.errors import CheckpointError, ConfigError, DataError, PluginError, UnknownKeyError, VerlMTError
from verl_mt.trainer.build import build_trainer

SMALL = {
    "rollout__name": "local",
    "total_training_steps": 2,
    "train_batch_size": 4,
    "rollout__n": 2,
    "response_length": 48,
    "system": "Answer as #### N.",
    "logger": [],
    "num_threads": 1,
}


def score(solution_str, ground_truth):
    return float(solution_str.strip().endswith(f"#### {ground_truth}"))


def rows(number=24):
    pairs = random.Random(0).sample([(a, b) for a in range(2, 40) for b in range(2, 40)], number)
    text = "Ada has {} maps and gets {} more. How many maps does Ada have?"
    return [{"prompt": text.format(a, b), "ground_truth": a + b} for a, b in pairs]


def soft(log_probs, old_log_probs, advantages, mask, clip_low, clip_high):
    return -advantages * (log_probs - old_log_probs).exp(), {}


@pytest.fixture(scope="module")
def asked():
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory, asked):
    """A run of local functions, called where an event loop goes on, as in a notebook."""

    def calculator(expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: What to compute
        """
        asked.append(expression)
        return str(sum(map(int, re.findall(r"[+-]?\d+", expression))))

    async def cell():
        return verl_mt.train(
            "verl_mt://tiny",
            rows()[8:],
            validation=rows()[:8],
            tools=[calculator],
            reward=score,
            default_local_dir=str(tmp_path_factory.mktemp("api") / "run"),
            **SMALL,
        )

    return asyncio.run(cell())


@pytest.mark.slow
def test_a_call_trains_with_local_functions_within_a_running_loop(run, asked):
    assert run.finished and run.steps == 2 and asked
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert set(run.curve("reward/mean")) == {1, 2}
    assert set(run.curve("val/accuracy")) == {0, 2}
    assert (run.model / "config.json").is_file() and run.model == run.folder / "hf"
    with pytest.raises(KeyError, match="reward/man is in no line"):
        run.curve("reward/man")


@pytest.mark.slow
def test_a_run_shows_in_one_line_and_in_a_small_table(run):
    assert re.fullmatch(r"Run\('.*run': 2 steps, reward/mean .* -> .*, val/accuracy .*\)", repr(run))
    assert run._repr_html_().count("<tr>") == 5
    assert "not finished" not in repr(run)


@pytest.mark.slow
def test_a_run_measures_its_model_with_its_own_tools(run, asked):
    before = len(asked)
    found = run.evaluate(n=2)
    assert len(found.groups) == 8 and len(found.rollouts) == 16 and len(asked) > before
    assert 0 <= found.accuracy <= 1 and "val/pass_at_2" in found.metrics
    assert "8 prompts, 16 conversations: accuracy" in repr(found)
    assert len(run.evaluate(rows()[:3], val_kwargs__temperature=0).groups) == 3
    saved = found.save(run.folder.parent / "eval")
    assert {file.name for file in saved.iterdir()} == {"metrics.json", "rollouts.jsonl"}


@pytest.mark.slow
def test_a_run_makes_its_report(run):
    page = run.report(run.folder.parent / "page.html", beside=[run.folder])
    assert page.stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_directory_says_what_is_missing_where_the_objects_are_not_given(run):
    with pytest.raises(PluginError, match=r"tools_config_file: 'object:tools\(calculator\)' stands for an object"):
        verl_mt.Run(run.folder).evaluate()
    with pytest.raises(CheckpointError, match=r"is no run directory: it has no config\.yaml"):
        verl_mt.Run(run.folder / "hf")


@pytest.mark.slow
def test_an_interrupted_call_raises_after_its_checkpoint_and_the_same_call_goes_on(tmp_path):
    stop_at = [3]

    def interrupting(solution_str, ground_truth, extra_info):
        stop_at[0] -= 1
        if stop_at[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return random.Random(solution_str).random()

    def call():
        given = {"tools": [], "reward": interrupting, "save_freq": -1, **SMALL}
        return verl_mt.train("verl_mt://tiny", rows(), default_local_dir=str(tmp_path / "run"), **given)

    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 0. The same call goes on .* verl_mt\.Run\("):
        call()
    so_far = verl_mt.Run(tmp_path / "run")
    assert not so_far.finished and "not finished" in repr(so_far)
    with pytest.raises(PluginError, match=r"'object:(data|interrupting)' .* repeat the call"):
        build_trainer(compose(config_name=str(tmp_path / "run" / "config.yaml")))
    done = call()
    assert done.folder == so_far.folder and done.finished and done.steps == 2


@pytest.mark.slow
def test_what_is_wrong_is_raised_and_nothing_exits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownKeyError, match=r"did you mean trainer\.total_training_steps"):
        verl_mt.train("verl_mt://tiny", rows(), total_training_step=3)
    with pytest.raises(ConfigError, match=r"verl_mt\.examine"):
        verl_mt.train("verl_mt://tiny", rows(), dry_run=True, **SMALL)
    with pytest.raises(VerlMTError, match=r"data\.train_files: no file 'absent\.jsonl'"):
        verl_mt.train("verl_mt://tiny", "absent.jsonl", tools=[], reward=score, **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_is_measured_without_a_run():
    given = {name: SMALL[name] for name in ("rollout__name", "response_length", "system")}
    found = verl_mt.evaluate_model(
        "verl_mt://tiny", rows(6), tools="tools_configs/calculator.yaml", reward=score, **given
    )
    assert len(found.groups) == 6
    with pytest.raises(ConfigError, match=r"data\.val_files"):
        verl_mt.evaluate_model("verl_mt://tiny", config_name="ppo_trainer", reward=score, **given)


@pytest.mark.slow
def test_the_doctor_looks_at_the_arguments_of_a_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def broken(solution_str, ground_truth):
        raise KeyError("no such thing")

    good = verl_mt.examine("verl_mt://tiny", rows(), tools=[], reward=score, **SMALL)
    bad = verl_mt.examine("verl_mt://tiny", rows(), tools=[], reward=broken, **SMALL)
    assert good.ok, good
    assert any("no such thing" in text for text in bad.errors)
    assert "error(s)" in str(bad) and not bad.ok
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_doctor_plays_demonstrations_that_are_rows_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (one,) = rows(1)
    answer = {"role": "assistant", "content": f"#### {one['ground_truth']}"}
    demo = {"messages": [{"role": "user", "content": one["prompt"]}, answer]}
    (tmp_path / "demos.jsonl").write_text(json.dumps(demo))
    for demos in ([demo], "demos.jsonl"):
        found = verl_mt.examine("verl_mt://tiny", rows(), tools=[], reward=score, demos=demos, **SMALL)
        assert found.ok and "1 read, 1 played" in [f.text for f in found.findings if f.check == "demonstrations"], found
    with pytest.raises(DataError, match=r"demos, row 1: expected a mapping"):
        verl_mt.examine("verl_mt://tiny", rows(), tools=[], reward=score, demos=["hello"], **SMALL)


@pytest.mark.slow
def test_losses_estimators_and_trackers_are_objects_too(tmp_path):
    logged, estimated = [], []

    class Notes(verl_mt.Tracker):
        def __init__(self, *args, **kwargs):
            pass

        def log(self, step, metrics):
            logged.append(step)

        def close(self, *args, **kwargs):
            pass

    def centred(rewards, groups):
        estimated.append(len(rewards))
        return rewards - rewards.mean()

    keys = {**SMALL, "policy_loss__loss_mode": soft, "adv_estimator": centred, "logger": [Notes]}
    run = verl_mt.train(
        "verl_mt://tiny", rows(), tools=[], reward=score, default_local_dir=str(tmp_path / "run"), **keys
    )
    assert run.finished and logged and estimated == [8, 8, 8]  # the first on made-up rewards


@pytest.mark.slow
def test_a_generate_function_is_an_object_too(tmp_path):
    asked = []

    async def generate(args, sample, sampling_params):
        from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, post

        asked.append(sample.label)
        state, url = GenerateState(args), f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        reply = await post(url, {"input_ids": ids, "sampling_params": sampling_params})
        sample.tokens, sample.response_length = ids + reply["output_ids"], len(reply["output_ids"])
        sample.response = reply["text"]
        return sample

    keys = {**SMALL, "custom_generate_function_path": generate, "default_local_dir": str(tmp_path / "run")}
    assert verl_mt.train("verl_mt://tiny", rows(), reward=score, **keys).finished
    assert len(asked) == 16


@pytest.mark.slow
def test_what_stands_in_main_needs_no_name(tmp_path):
    """As a notebook's cells: nothing that is defined here can be imported by anybody."""
    program = f"""
    import asyncio, verl_mt
    def score(solution_str, ground_truth): return float(len(solution_str) % 2)
    class Teacher(verl_mt.BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs): return True, "well done", 0.5, {{}}
    rows = [{{"prompt": f"{{n}} and 1?", "ground_truth": n + 1}} for n in range(8)]
    async def cell():
        return verl_mt.train("verl_mt://tiny", rows, reward=score, interaction=Teacher, tools=[], **{SMALL!r})
    print(asyncio.run(cell()).steps)
    """
    done = warm_start.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "2"


@pytest.mark.slow
def test_what_holds_a_lock_is_not_sent_to_ranks_and_the_reason_is_said():
    from verl_mt.extensions.cluster.workers.ray_cluster import require_travel

    lock = threading.Lock()

    def locked(log_probs, old_log_probs, advantages, mask, clip_low, clip_high):
        with lock:
            return -advantages * log_probs, {}

    require_travel({"object:soft": soft, "object:f": lambda x: x})
    with pytest.raises(PluginError, match=r"object:locked cannot be sent to the ranks: .*; it holds lock \(lock\)"):
        require_travel({"object:locked": locked})


@pytest.mark.ray
def test_a_local_loss_goes_to_the_ranks_and_tools_with_locks_stay_here(tmp_path):
    lock, scale, asked = threading.Lock(), 1.0, []

    def calculator(expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: What to compute
        """
        with lock:
            asked.append(expression)
        return str(sum(map(int, re.findall(r"[+-]?\d+", expression))))

    def local_loss(log_probs, old_log_probs, advantages, mask, clip_low, clip_high):
        return -scale * advantages * (log_probs - old_log_probs).exp(), {}

    keys = {**SMALL, "trainer__placement": "ray", "trainer__device": "cpu", "policy_loss__loss_mode": local_loss}
    given = {"tools": [calculator], "reward": score, "trainer__n_workers_per_node": 2}
    run = verl_mt.train("verl_mt://tiny", rows(), default_local_dir=str(tmp_path / "run"), **given, **keys)
    assert run.finished and asked

    def locked(log_probs, old_log_probs, advantages, mask, clip_low, clip_high):
        with lock:
            return -advantages * log_probs, {}

    keys = {**keys, "policy_loss__loss_mode": locked}
    with pytest.raises(PluginError, match="object:locked cannot be sent to the ranks"):
        verl_mt.train("verl_mt://tiny", rows(), default_local_dir=str(tmp_path / "other"), **given, **keys)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_cold_start_is_a_call_whose_run_can_be_trained_further(tmp_path):
    demos = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": f"#### {row['ground_truth']}"},
            ]
        }
        for row in rows(8)
    ]
    keys = {"rollout__name": "local", "response_length": 32, "train_batch_size": 4, "logger": []}
    cold = verl_mt.fine_tune("verl_mt://tiny", demos, tmp_path / "cold", reward=score, validation=rows(4), **keys)
    assert cold.folder == tmp_path / "cold" and (cold.model / "config.json").is_file()
    assert cold.curve("val/accuracy")
    run = verl_mt.train(
        cold.model, rows(), tools=[], reward=score, default_local_dir=str(tmp_path / "run"), **{**SMALL, **keys}
    )
    assert run.finished
