"""The search recipe: rows and corpora from real files, configs and scripts that compose, the tool on a real row."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_start
from warm_python import warm_python

from verl_mt.config.compose import compose, hydra_main
from verl_mt.data.dataset import load_rows
from verl_mt.data.row_files import read_rows, row_files
from verl_mt.data.trajectory import StopReason
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.extensions.toolbox.retrieval.lexical import read_corpus
from verl_mt.plugins import load_object
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.inference import Inference

REPO = Path(__file__).resolve().parents[2]
RECIPE = REPO / "recipes" / "search"
CONFIGS = sorted((RECIPE / "config").glob("*.yaml"))
sys.path += [str(REPO / "tests" / "retrieval"), str(REPO / "tests" / "tools")]

from retrieval_process import RetrievalProcess  # noqa: E402
from search_service import SearchService, found  # noqa: E402

pytestmark = pytest.mark.slow  # commands, servers, many configurations

_spec = importlib.util.spec_from_file_location("search_prepare", RECIPE / "prepare.py")
assert _spec is not None and _spec.loader is not None
prepare = importlib.util.module_from_spec(_spec)
sys.modules["search_prepare"] = prepare
_spec.loader.exec_module(prepare)


def rows_of(source: Path, out: Path, *flags: str):
    """Prepare and load rows."""
    assert prepare.main(["questions", "--source", str(source), "--out", str(out), *flags]) == 0
    return load_rows(str(out), split="train")[0].rows


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("search_qa.jsonl", ("How many points did the Panthers defense surrender?", ["308"])),
        (
            "NQ-open.dev.jsonl",
            ("when was the last time anyone was on the moon", ["14 December 1972 UTC", "December 1972"]),
        ),
        ("flashrag_nq_test_sample.jsonl", ("who got the first nobel prize in physics", ["Wilhelm Conrad Röntgen"])),
        ("xquad.en.json", ("How many points did the Panthers defense surrender?", ["308"])),
    ],
)
def test_real_questions_become_rows_of_verls_schema(shared_data, tmp_path, name, first):
    rows = rows_of(shared_data / "tasks" / name, tmp_path / "sub" / "rows.parquet", "--limit", "10")
    assert len(rows) == 10
    for index, row in enumerate(rows):
        assert set(row.raw) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [m["role"] for m in row.prompt] == ["system", "user"] and row.need_tools_kwargs
        assert row.extra_info["index"] == index and row.prompt[1]["content"] == row.extra_info["question"]
        assert (
            row.ground_truth == {"target": list(dict.fromkeys(row.ground_truth["target"]))}
            and row.ground_truth["target"]
        )
        given = row.tools_kwargs["search"]["create_kwargs"]
        assert given["ground_truth"] == row.ground_truth and given["data_source"] == row.data_source
    assert (rows[0].extra_info["question"], rows[0].ground_truth["target"]) == first


def test_the_tag_style_explains_the_tags_and_offers_no_tool(shared_data, tmp_path):
    source = shared_data / "tasks" / "NQ-open.dev.jsonl"
    rows = rows_of(source, tmp_path / "rows.parquet", "--style", "tags", "--skip", "2", "--limit", "3")
    assert [row.extra_info["index"] for row in rows] == [2, 3, 4]
    for row in rows:
        (message,) = row.prompt
        assert all(f"<{tag}>" in message["content"] for tag in ("think", "search", "information", "answer"))
        assert message["content"].endswith(f"Question: {row.extra_info['question']}")
        assert not row.need_tools_kwargs and not row.tools_kwargs


@pytest.mark.parametrize(
    ("name", "number", "title"),
    [
        ("search_r1_example_corpus.jsonl", 10, '"Evan Morris"'),
        ("2wikimultihopqa_corpus.json", 6119, '"Teutberga"'),
        ("xquad.en.json", 240, '"Super Bowl 50"'),
        ("search_corpus.jsonl.gz", 6359, '"Super Bowl 50"'),
    ],
)
def test_real_passages_become_a_corpus_with_titles(shared_data, tmp_path, name, number, title):
    out = tmp_path / "corpus.jsonl"
    assert prepare.main(["corpus", "--source", str(shared_data / "tasks" / name), "--out", str(out)]) == 0
    passages = read_corpus(out)
    assert len(passages) == number and passages[0]["contents"].split("\n")[0] == title
    assert len({passage["id"] for passage in passages}) == number


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        (
            "q.jsonl",
            '{"question": "a", "answer": "b"}\n{"question": "a"}',
            "line 2: needs question and one of golden_answers",
        ),
        ("q.jsonl", '{"question": "a", "answer": []}', "line 1, answer: no answer in []"),
        ("q.jsonl", '{"question": "a", "answer": [" "]}', "line 1, answer: no answer in [' ']"),
        ("q.jsonl", '{"query": "a", "answer": "b"}', "it has ['answer', 'query']"),
        ("q.jsonl", '{"question": "a", "ans', "line 1: not JSON"),
        ("q.jsonl", "[1]", "line 1: expected an object, got list"),
        ("q.jsonl", "", "no questions in it"),
        ("q.json", "{}", "expected a list, or SQuAD's"),
        ("q.json", "[", "lines of JSON are .jsonl"),
    ],
)
def test_a_source_without_questions_is_refused_with_its_place(tmp_path, capsys, name, content, part):
    source = tmp_path / name
    source.write_text(content)
    assert prepare.main(["questions", "--source", str(source), "--out", str(tmp_path / "out.parquet")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and str(source) in err and part in err
    assert not (tmp_path / "out.parquet").exists()


def test_a_source_that_is_absent_is_named(tmp_path, capsys, monkeypatch):
    assert prepare.main(["corpus", "--source", "no/such.jsonl", "--out", str(tmp_path / "c.jsonl")]) == 2
    assert "no/such.jsonl does not exist" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare.main(["questions", "--source", "some/hub_set", "--out", str(tmp_path / "out.parquet")]) == 2
    assert "'some/hub_set' is not a file" in (err := capsys.readouterr().err) and "pip install datasets" in err


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_a_config_composes(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(config_name=file.stem, config_dir=file.parent)
    assert "search" in str(config.data.train_files) and config.reward.path


def recorded(script: Path, folder: Path, *words: str) -> list[str]:
    """The `python` commands that a launch script gives."""
    log, python = folder / "commands", folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(log))}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script), *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


def trained_with(command: str):
    """The config of a recorded training command."""
    module, _, arguments = command.removeprefix("-m ").partition(" ")
    assert module == "verl_mt.trainer"
    configs: list = []
    hydra_main(configs.append, argv=shlex.split(arguments))
    return configs[0]


@pytest.mark.cap("C41", "C43", "C44", "V12")
@pytest.mark.parametrize("form", ["tool", "generate"])
def test_a_launch_script_prepares_and_trains(form, tmp_path):
    *prepared, trained = recorded(RECIPE / f"run_qwen2.5-3b_{form}.sh", tmp_path, "trainer.total_epochs=2")
    assert [line.split("--split ")[1].split()[0] for line in prepared] == ["train", "test"]
    assert all(line.startswith(f"{RECIPE / 'prepare.py'} questions ") for line in prepared)
    config = trained_with(trained)
    rollout = config.actor_rollout_ref.rollout
    assert [config.data.train_files, config.data.val_files] == [line.split("--out ")[1] for line in prepared]
    assert config.trainer.total_epochs == 2 and config.actor_rollout_ref.model.path.startswith("Qwen/Qwen2.5-3B")
    if form == "tool":
        assert rollout.tool_kwargs.tools_config_file == "tools_configs/search_tool.yaml"
    else:
        assert rollout.tool_kwargs.tools_config_file is None
        for path, name in ((rollout.custom_generate_function_path, "generate"), (config.reward.path, "reward_func")):
            assert callable(load_object(path, what="script")) and path.endswith(f":{name}")


def call(query: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": {json.dumps(query)}}}}}\n</tool_call>'


LOCAL = [
    "actor_rollout_ref.model.path=verl_mt://tiny", "actor_rollout_ref.model.dtype=float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False", "actor_rollout_ref.rollout.name=local",
    "actor_rollout_ref.rollout.response_length=768",
    "trainer.num_threads=1",
]  # fmt: skip


@pytest.mark.cap("V12", "C42", "C71")
@pytest.mark.parametrize(("answer", "reward"), [("The 308.", 1.0), ("307", 0.0)])
def test_a_scripted_model_searches_and_is_scored_on_a_real_row(shared_data, tmp_path, monkeypatch, answer, reward):
    rows_of(shared_data / "tasks" / "search_qa.jsonl", tmp_path / "rows.parquet", "--limit", "1")
    passage = found("Defense\nThe answer stands here: <answer>307</answer> 308 points.")
    said = [f"<think>?</think>{call('panthers points')}", f"<think>!</think><answer>{answer}</answer>"]
    with SearchService(lambda body: (200, passage)) as service:
        monkeypatch.setenv("SEARCH_URL", service.url)
        overrides = [*LOCAL, f"data.val_files={tmp_path}/rows.parquet", "data.val_max_samples=1"]
        with Inference(compose(["experiment=search_tool_grpo", *overrides])) as policy:
            chat, runner = policy.chat, policy.runner

            def turn(request):
                text = said[int(request.request_id.rpartition("/")[2]) - 1]
                return [*chat.encode_text(text, neutral=False), min(chat.end_token_ids)], None, "stop"

            real = runner.context.engine
            runner.context = replace(runner.context, engine=ScriptedEngine(turn))
            policy.stream.start(RolloutPlan(policy.prompts(), 1, "test"))
            trajectory = policy.stream.collect("test")[0].trajectories[0]
            policy.stream.call(real.close())
    assert [body["queries"] for body in service.bodies] == [["panthers points"]]
    assert trajectory.stop_reason == StopReason.FINISHED and trajectory.reward == reward
    (seen,) = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert seen.startswith("Doc 1(Title: Defense) The answer stands here")
    assert trajectory.counters["tools/search/num_results"] == 1


@pytest.mark.slow
@pytest.mark.cap("V12", "C42", "C54", "C70")
def test_searches_among_real_passages_become_updated_weights(shared_data, tmp_path, monkeypatch):
    """The retrieval server in a process of its own, BM25 over 6,359 real passages and the boxes between them."""
    corpus, boxes = tmp_path / "corpus.jsonl", tmp_path / "boxes"
    warm_start.run([sys.executable, str(RECIPE / "tiny" / "world.py"), "--out", str(boxes)], check=True)
    sources = [str(shared_data / "tasks" / "search_corpus.jsonl.gz"), str(boxes / "corpus.jsonl")]
    assert prepare.main(["corpus", "--source", *sources, "--out", str(corpus)]) == 0
    overrides = [
        f"actor_rollout_ref.model.path={RECIPE / 'tiny' / 'checkpoint'}", f"data.train_files={boxes}/train.parquet",
        f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={RECIPE / 'tiny' / 'tools.yaml'}",
        "data.val_files=null", "data.train_batch_size=4", "data.train_max_samples=16",
        "+reward.kwargs.format_score=0.1", "trainer.total_training_steps=2", "trainer.num_threads=1",
        "trainer.logger=[]", "trainer.save_freq=-1", "trainer.export_at_end=False",
        f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    warm = SimpleNamespace(**vars(subprocess) | {"Popen": warm_start.Popen})
    monkeypatch.setattr(sys.modules[RetrievalProcess.__module__], "subprocess", warm)
    with RetrievalProcess(corpus) as server:
        monkeypatch.setenv("SEARCH_URL", server.url)
        build_trainer(compose(overrides, "search_boxes", RECIPE / "config")).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout/trajectories" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["rollout/trajectories"] == 32 and line["rollout/failed"] == line["rollout/aborted"] == 0
        assert line["tools/search/calls"] > 8 and line["tools/search/errors"] == 0
        assert 0 < line["tools/search/cache_hit_rate"] < 1 and line["actor/grad_norm"] > 0
        assert line["rollout/logprob_diff_max"] < 1e-3
    titles = {passage["contents"].split("\n")[0] for passage in read_corpus(corpus)}
    rows = [row for file in row_files(tmp_path / "run") if file.split == "train" for row in read_rows(file.path)]
    seen = [m["content"] for row in rows for m in row["messages"] if m["role"] == "tool"]
    shown = [text.removeprefix("Doc 1(Title: ").split(") ")[0] for text in seen if text.startswith("Doc 1(Title: ")]
    assert len(shown) > 20 and set(shown) <= titles
    assert any(title.startswith('"') for title in shown), "a wrong number finds a real passage"


@pytest.mark.slow
def test_the_boxes_script_runs_from_data_to_new_weights(tmp_path):
    words = ["bash", str(RECIPE / "run_boxes.sh"), "trainer.total_training_steps=1", "data.val_max_samples=8"]
    words += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=4", "data.train_max_samples=16"]
    words += ["trainer.num_threads=1"]
    environment = warm_python(tmp_path) | {"DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [
        json.loads(text) for text in (tmp_path / "runs" / "search-boxes" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["val/verl_mt/boxes/accuracy_greedy"] > 0.05 and lines[0]["val/tool_calls_mean"] > 0.5
    assert lines[1]["tools/search/errors"] == 0 and lines[1]["actor/grad_norm"] > 0
