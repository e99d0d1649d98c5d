"""The formula for step times: worked out by hand, its laws, the fit, and runs that were not used to fit it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm_start
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.errors import ConfigError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "scaling"


@pytest.fixture(scope="module")
def formula():
    """The formula's module, and the scripts `fit` and `step_time`, as they import each other."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield tuple(importlib.import_module(name) for name in ("verl_mt.doctor.step_time", "fit", "step_time"))
    finally:
        sys.path.remove(str(RECIPE))


@pytest.fixture(scope="module")
def model(formula):
    return formula[0].Model(
        parameters=1000, matmul_parameters=800, layers=2, attention_width=16, kv_width=8, bytes_per_parameter=4
    )


def work(formula, **changes):
    plain = {"trajectories": 8, "prompt_tokens": 10, "sampled_tokens": 20, "longest_tokens": 30}
    return formula[0].Work(**{**plain, **changes})


def test_a_step_worked_out_by_hand(formula, model):
    machine = formula[0].Machine(
        step_overhead_s=0.1, layer_overhead_s=0.01, token_overhead_s=0.001, turn_overhead_s=0.05, train_flops=1e4,
        train_attention_flops=1e3, optimizer_bandwidth=500, sync_bandwidth=1000, rest_token_s=0.01,
    )  # fmt: skip
    found = formula[0].predict(model, work(formula, turns=2, calls=1, tool_latency_s=3, samples_per_prompt=2), machine)
    # 30 steps of 0.1 + 2 layers, 8 x 20 tokens, 8 x 2 turns, one wait.
    assert found.rollout_s == pytest.approx(30 * 0.12 + 160 * 0.001 + 16 * 0.05 + 3)
    # 8 x (20 tokens + half a prompt), three times 2 x 800 and 4 x 2 x 16 x 20 operations each; 1000 parameters.
    assert found.update_s == pytest.approx(8 * 25 * 3 * (1600 / 1e4 + 2560 / 1e3) + 2)
    assert found.weights_s == pytest.approx(4) and found.rest_s == pytest.approx(8 * 30 * 0.01)
    assert found.step_s == pytest.approx(found.rollout_s + found.update_s + 4 + 2.4)
    assert (found.waiting_s, found.bottleneck) == (3, "update")


def test_packed_rows_pay_for_what_is_distinct_for_each_segment_and_for_whole_squares(formula, model):
    rates = {"train_flops": 1e4, "train_attention_flops": 1e3, "train_segment_overhead_s": 0.01}
    machine = formula[0].Machine(**rates)
    packed = work(formula, samples_per_prompt=4, packed=True)
    # 8 answers of 20 tokens and 2 prompts of 10; answers attend to 30, prompts to 10.
    attention = 3 * (8 * 20 * 30 + 2 * 10 * 10) * 4 * 2 * 16 / 1e3
    expected = 3 * 180 * 1600 / 1e4 + attention + (8 + 2) * 2 * 0.01
    assert formula[0].predict(model, packed, machine).update_s == pytest.approx(expected)
    # The same tree, counted; then one in which a half of all answers' tokens is another's too.
    counted = dataclasses.replace(packed, tree=(180, 10, 8 * 20 * 30 + 2 * 10 * 10))
    assert formula[0].predict(model, counted, machine).update_s == pytest.approx(expected)
    halved = dataclasses.replace(packed, tree=(100, 10, 8 * 10 * 30 + 2 * 10 * 10), epochs=2)
    attention = 3 * (8 * 10 * 30 + 2 * 10 * 10) * 4 * 2 * 16 / 1e3
    expected = 2 * (3 * 100 * 1600 / 1e4 + attention + 10 * 2 * 0.01)
    assert formula[0].predict(model, halved, machine).update_s == pytest.approx(expected)


def test_samples_of_a_prompt_share_it_among_those_of_their_rank_if_rows_are_packed(formula):
    eight = {"trajectories": 16, "samples_per_prompt": 8}
    assert work(formula, **eight).trained_tokens == work(formula, **eight, packed=True).trained_tokens == 16 * 20 + 20
    assert work(formula, **eight, ranks=4).trained_tokens == 16 * (20 + 10)
    assert work(formula, **eight, ranks=4, packed=True).trained_tokens == 16 * (20 + 10 / 2)


def test_everybody_waits_for_the_trajectory_whose_tokens_and_waits_take_longest(formula, model):
    machine = formula[0].Machine(step_overhead_s=0.1)
    last = ((30.0, 0.0), (25.0, 2.0))
    for latency, expected in ((0.0, 3.0), (0.2, 3.0), (1.0, 4.5)):
        found = formula[0].predict(model, work(formula, last=last, tool_latency_s=latency), machine)
        assert found.rollout_s == pytest.approx(expected)


def test_places_are_handed_on_and_every_round_waits(formula, model):
    machine = formula[0].Machine(step_overhead_s=0.1, token_overhead_s=0.01)
    many = work(formula, trajectories=32, concurrency=8, calls=1, tool_latency_s=0.2)
    found = formula[0].predict(model, many, machine)
    rounds, last = 3 * (20 * (0.1 + 8 * 0.01) + 0.2), 30 * 0.1 + 8 * 20 * 0.01 + 0.2
    assert found.rollout_s == pytest.approx(rounds + last) and found.waiting_s == pytest.approx(4 * 0.2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_more_work_never_takes_less_time(formula, model, data):
    rates = data.draw(st.lists(st.floats(0, 0.1), min_size=5, max_size=5))
    names = ("step_overhead_s", "token_overhead_s", "turn_overhead_s", "train_layer_overhead_s", "rest_token_s")
    machine = formula[0].Machine(**dict(zip(names, rates)), engine_flops=1e6, train_flops=1e6)
    numbers = {
        "trajectories": data.draw(st.integers(8, 64)), "concurrency": data.draw(st.integers(1, 8)),
        "calls": data.draw(st.floats(0, 3)), "tool_latency_s": data.draw(st.floats(0, 5)),
    }  # fmt: skip
    before = work(formula, **numbers)
    field = data.draw(
        st.sampled_from(["trajectories", "prompt_tokens", "tool_latency_s", "turns", "observation_tokens"])
    )
    after = dataclasses.replace(before, **{field: getattr(before, field) * 2})
    times = [formula[0].predict(model, w, machine) for w in (before, after)]
    assert times[0].step_s <= times[1].step_s * (1 + 1e-9) and math.isfinite(times[1].step_s)
    assert times[0].rollout_s >= times[0].waiting_s


def test_ranks_divide_the_computation_and_add_the_exchange(formula, model):
    machine = formula[0].Machine(train_flops=1e4, network_bandwidth=1e4)
    one, four = (formula[0].predict(model, work(formula, ranks=n), machine).update_s for n in (1, 4))
    assert four == pytest.approx(one / 4 + 3 * 1000 * 4 * 3 / 4 / 1e4)
    half = dataclasses.replace(model, bytes_per_parameter=2)  # whose gradients are float32 all the same
    one, four = (formula[0].predict(half, work(formula, ranks=n), machine).update_s for n in (1, 4))
    assert four == pytest.approx(one / 4 + 1000 * (2 * 2 + 4) * 3 / 4 / 1e4)


def test_engines_share_the_trajectories_and_the_longest_one_stays_as_long(formula, model):
    machine = formula[0].Machine(step_overhead_s=0.1, token_overhead_s=0.01, sync_bandwidth=1000)
    one, four = (
        formula[0].predict(model, work(formula, trajectories=64, concurrency=32, engines=n), machine) for n in (1, 4)
    )
    # The last 32 with the longest one, 20 tokens of 30 on average, and 32 before them; or 8 and 8 at each of four.
    assert one.rollout_s == pytest.approx(30 * (0.1 + 0.01 * 32 * 20 / 30) + 20 * (0.1 + 0.01 * 32))
    assert four.rollout_s == pytest.approx(30 * (0.1 + 0.01 * 8 * 20 / 30) + 20 * (0.1 + 0.01 * 8))
    assert four.weights_s == one.weights_s == 4
    servers = formula[0].predict(model, work(formula, engines=4, sync_copies=4), machine)
    assert servers.weights_s == 16


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_a_fit_to_times_that_follow_the_formula_predicts_other_work_exactly(formula, seed):
    module, fitting, _ = formula
    rng = np.random.default_rng(seed)
    truth = module.Machine(
        engine_flops=1e9, step_overhead_s=rng.uniform(0.001, 0.01), token_overhead_s=rng.uniform(1e-4, 1e-3),
        train_flops=1e9, train_attention_flops=1e8, train_layer_overhead_s=rng.uniform(0.001, 0.01),
        sync_overhead_s=0.01, rest_token_s=1e-5,
    )  # fmt: skip

    def drawn():
        size = int(rng.integers(1, 10))
        shape = module.Model(10**5 * size, 10**5 * size, size, 32 * size, 16 * size)
        sampled, turns = float(rng.uniform(10, 100)), int(rng.integers(1, 4))
        numbers = {"trajectories": int(rng.integers(8, 100)), "sampled_tokens": sampled, "turns": turns}
        return shape, work(formula, **numbers, longest_tokens=2 * sampled, prompt_tokens=float(rng.uniform(20, 200)))

    pairs = [drawn() for _ in range(30)]
    machine = fitting.fit([module.Observed(m, w, module.predict(m, w, truth)) for m, w in pairs])
    for shape, other in (drawn() for _ in range(5)):
        expected = module.predict(shape, other, truth).step_s
        assert module.predict(shape, other, machine).step_s == pytest.approx(expected, rel=0.02)


def test_no_rate_of_a_fit_is_negative_and_useless_terms_are_zero(formula):
    quantities = [[1.0, 2.0, 5.0], [2.0, 1.0, 5.0], [3.0, 3.0, 5.0], [4.0, 1.0, 5.0]]
    found = formula[1].non_negative(quantities, [2 * q[0] for q in quantities])
    assert found == pytest.approx([2.0, 0.0, 0.0], abs=1e-9)
    assert all(x >= 0 for x in formula[1].non_negative(quantities, [5.0, 4.0, 1.0, 1.0]))


def test_a_machine_survives_its_file_and_unknown_rates_are_refused(formula, tmp_path):
    machine = formula[0].Machine(engine_flops=1e12, step_overhead_s=0.01)
    formula[0].save_machine(machine, tmp_path / "m.json")
    assert formula[0].load_machine(tmp_path / "m.json") == machine
    (tmp_path / "m.json").write_text(json.dumps({"flops": 1}))
    with pytest.raises(ConfigError, match=r"flops not known. It takes engine_flops"):
        formula[0].load_machine(tmp_path / "m.json")
    with pytest.raises(SystemExit, match=r"m\.json: flops not known"):
        formula[2].main(["--machine", str(tmp_path / "m.json"), "--run", str(tmp_path)])


@pytest.mark.slow
def test_the_command_predicts_and_names_the_longest_part(formula, tmp_path, capsys):
    formula[0].save_machine(formula[0].Machine(step_overhead_s=0.01, train_flops=1e10), tmp_path / "m.json")
    words = ["--machine", str(tmp_path / "m.json"), "--model", "verl_mt://tiny", "--trajectories", "64"]
    numbers = ["--prompt-tokens", "100", "--sampled-tokens", "30", "--longest-tokens", "50"]
    formula[2].main([*words, *numbers, "--calls", "1", "--tool-latency", "9"])
    out = capsys.readouterr().out
    assert "rollout 9.50" in out and "longest part: tools" in out and "max_staleness" not in out
    formula[2].main([*words, *numbers, "--calls", "1", "--tool-latency", "9", "--max-staleness", "1"])
    (whole, ahead) = re.findall(r"step ([0-9.]+)", capsys.readouterr().out)
    assert float(ahead) == pytest.approx(float(whole) / 2, abs=0.01)
    formula[0].save_machine(formula[0].Machine(train_segment_overhead_s=0.01), tmp_path / "m.json")
    for padded in ([], ["--padded"]):
        formula[2].main([*words, *numbers, *padded])
        assert ("update 0.00" in capsys.readouterr().out) == bool(padded)
    with pytest.raises(SystemExit):
        formula[2].main([*words, "--prompt-tokens", "100"])
    assert "--sampled-tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_rates_are_fitted_to_a_run_s_own_files_and_tell_its_steps(formula, tmp_path, capsys):
    overrides = [
        "data.val_files=null", "data.train_max_samples=16", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2",
        "trainer.num_threads=1", "trainer.export_at_end=False", "trainer.total_training_steps=4",
        f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.logger=[]",
    ]  # fmt: skip
    warm_start.run([sys.executable, "-m", "verl_mt.trainer", *overrides], check=True, capture_output=True)
    observed = importlib.import_module("observe").observe_run(tmp_path / "run")
    assert [step.work.trajectories for step in observed] == [4] * 3
    for step in observed:
        assert step.work.calls > 0 and step.work.turns > 1 and 0 < step.work.sampled_tokens <= step.work.longest_tokens
        assert step.times.step_s >= step.times.rollout_s + step.times.update_s > 0
    machine = ["--machine", str(tmp_path / "m.json")]
    formula[2].main([*machine, "--fit", str(tmp_path / "run")])
    formula[2].main([*machine, "--run", str(tmp_path / "run")])
    *_, last = capsys.readouterr().out.splitlines()
    assert "predicted (measured); longest part: " in last
    (tmp_path / "run" / "rollouts").rename(tmp_path / "rollouts")
    with pytest.raises(SystemExit, match="no step with times and rollout rows"):
        formula[2].main([*machine, "--run", str(tmp_path / "run")])


@pytest.mark.slow
def test_a_widened_model_computes_the_same(formula, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from verl_mt.config_paths import resolve_model_path

    path = importlib.import_module("lab").widened(tmp_path, hidden=256, layers=6)
    small, large = (AutoModelForCausalLM.from_pretrained(p) for p in (resolve_model_path("verl_mt://tiny"), path))
    ids = torch.randint(0, 760, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, small(ids).logits, atol=1e-4, rtol=0)
    assert large.num_parameters() > 5 * small.num_parameters()


@pytest.mark.slow
@pytest.mark.release
def test_runs_that_were_not_used_in_the_fit_are_predicted_within_25_percent(tmp_path):
    fitted = ["small batch", "default", "in turns", "wide", "wide and deep", "one turn"]
    held_out = ["more samples", "slow tool", "larger model"]
    words = [sys.executable, str(RECIPE / "check.py"), "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run([*words, "--only", *fitted, *held_out], capture_output=True, text=True, cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads((tmp_path / "errors.json").read_text())}
    assert set(rows) == {*fitted, *held_out}
    errors = {name: round(rows[name]["error"], 3) for name in held_out}
    assert done.returncode == 0 and all(abs(error) <= 0.25 for error in errors.values()), (errors, done.stderr[-2000:])
    assert done.stdout.splitlines()[-1].startswith("worst error of a held-out run: ")
    assert rows["slow tool"]["rollout"] > 0.5, "the tool's latency is in the measured time"
