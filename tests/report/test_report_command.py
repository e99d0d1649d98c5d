"""`python -m verl_mt.report`: one file, of whatever there is; what is missing is said."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from run_lab import Lab, small_run

import verl_mt.extensions.inspection.report.collect as collect_module
from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.extensions.inspection.report import html_page
from verl_mt.extensions.inspection.report.__main__ import main
from verl_mt.extensions.inspection.report.collect import collect
from verl_mt.extensions.inspection.report.html_page import ReportServer

pytestmark = pytest.mark.slow  # whole pages

PAGE = Path(html_page.__file__).parent / "page"


def lines_of(contents: html_page.Contents, run: int = 0) -> Iterator[dict[str, Any]]:
    for part in contents.runs[run]["parts"]:
        columns = json.loads(gzip.decompress(contents.blocks[part["lines"]]))
        yield from (dict(zip(columns, values)) for values in zip(*columns.values()))


def problems_of(path: Path) -> str:
    return "\n".join(collect([str(path)], max_rollouts=1000).runs[0]["problems"])


def test_a_whole_run_is_one_file_without_complaints(tmp_path, capsys):
    small_run(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert "32 rollouts" in printed.out and printed.err == ""
    text = (tmp_path / "run" / "report.html").read_text()
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert not re.search(
        r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", re.sub(r"<script.*?</script>", "", text, flags=re.S)
    )


def test_the_served_report_is_told_only_to_who_has_its_token(tmp_path):
    small_run(tmp_path / "run", steps=1)
    with ReportServer([str(tmp_path / "run")]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port

        def status(path: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path)
            return connection.getresponse().status

        root = urlsplit(server.url).path
        (block, *_) = server.contents().blocks
        pages = ["", "manifest.json", f"blob/{block}"]
        assert len(root) > 20 and [status(root + page) for page in pages] == [200] * 3
        assert [status(f"{wrong}{page}") for wrong in ("/", f"/{'x' * (len(root) - 2)}/") for page in pages] == [
            403
        ] * 6
        assert status("/") == 403 and status(f"{root}../etc") == 404
        server.shutdown()


def test_the_policy_of_the_page_allows_its_own_script_and_no_other(tmp_path):
    small_run(tmp_path / "run", steps=1)
    main([str(tmp_path / "run"), "--out", str(tmp_path / "a.html")])
    text = (tmp_path / "a.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert f"script-src 'sha256-{digest}' blob:;" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe-inline' blob" not in policy and "unsafe-eval" not in policy


def test_the_same_run_gives_the_same_file(tmp_path):
    small_run(tmp_path / "run", steps=2)
    for name in ("a.html", "b.html"):
        main([str(tmp_path / "run"), "--out", str(tmp_path / name)])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        small_run(tmp_path / parent / "tiny", steps=1)
    contents = collect([str(tmp_path / p / "tiny") for p in ("a", "b")], max_rollouts=100)
    assert [run["label"] for run in contents.runs] == ["a/tiny", "b/tiny"]


def test_a_run_from_before_the_truth_was_recorded_says_so_once(tmp_path):
    lab = small_run(tmp_path / "run", steps=3)
    for path in (lab.folder / "rollouts").iterdir():
        path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    assert problems_of(lab.folder).count("without the ground truth") == 1


@pytest.mark.parametrize("kind", ["absent", "file", "empty"])
def test_a_path_that_is_no_run_is_one_line_of_error(tmp_path, capsys, kind):
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("")
    elif kind == "empty":
        path.mkdir()
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(path) in error and "not a run directory" in error


def test_without_plotly_the_command_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    small_run(tmp_path / "run", steps=1)
    monkeypatch.setattr(html_page.importlib.util, "find_spec", lambda name: None)
    assert main([str(tmp_path / "run")]) == 2
    assert "pip install 'verl_mt[report]'" in capsys.readouterr().err


def test_a_run_that_is_being_written_shows_what_there_is(tmp_path):
    lab = small_run(tmp_path / "run", steps=3, finished=False)
    with open(lab.folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "reward/me')
    torn = lab.folder / "rollouts" / "step_000003.jsonl"
    torn.write_bytes(torn.read_bytes()[:-200])
    said = problems_of(lab.folder)
    assert "not over" in said
    assert "metrics.jsonl: its last line is cut off" in said
    assert "step_000003.jsonl: its last line is cut off and left out (7 before it are read)" in said
    assert len(list(lines_of(collect([str(lab.folder)], max_rollouts=100)))) == 23


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "token_texts.jsonl", "rollouts"])
def test_what_is_missing_is_named_and_the_rest_is_shown(tmp_path, missing):
    lab = small_run(tmp_path / "run", steps=1)
    path = lab.folder / missing
    path.rename(tmp_path / "gone")
    said = problems_of(lab.folder)
    assert missing in said or (missing == "rollouts" and "no rollout rows" in said)
    assert main([str(lab.folder)]) == 0


def test_rows_of_another_version_are_shown_as_far_as_they_go(tmp_path):
    lab = small_run(tmp_path / "run", steps=1)
    path = lab.folder / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] = {
        "schema_version": 0,
        "trajectory_id": "old",
        "reward": 0.5,
        "messages": [{"role": "user", "content": "hi"}],
    }
    rows[1]["records"][0]["turns"] = [{"kind": "prompt"}]  # no places
    rows[2]["records"][0]["sampled"].pop()
    rows[3]["reward"] = float("nan")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "[1, 2]\n")
    contents = collect([str(lab.folder)], max_rollouts=100)
    said = "\n".join(contents.runs[0]["problems"])
    assert "schema version 0 (this verl_mt writes 2)" in said and "line 9: not a JSON object" in said
    lines = list(lines_of(contents))
    assert [line["id"] for line in lines[:2]] == ["old", rows[1]["trajectory_id"]]
    assert (lines[0]["reward"], lines[3]["reward"], len(lines)) == (0.5, None, 8)
    details = json.loads(gzip.decompress(contents.blocks[contents.runs[0]["parts"][0]["details"]]))
    assert "another form" in details[1]["broken"][0]
    assert "differ in length" in details[2]["broken"][0]
    assert "broken" not in details[4]


def test_a_config_that_is_no_yaml_is_said(tmp_path):
    lab = small_run(tmp_path / "run", steps=1)
    (lab.folder / "config.yaml").write_text("a: [1")
    assert "config.yaml cannot be read" in problems_of(lab.folder)


def test_too_many_rollouts_leave_out_whole_steps_evenly_and_say_so(tmp_path):
    lab = small_run(tmp_path / "run", steps=9, prompts=2, samples=2)
    contents = collect([str(lab.folder)], max_rollouts=20)
    assert [part["step"] for part in contents.runs[0]["parts"]] == [1, 3, 5, 7, 9]
    assert "4 of 9 rollout files are not shown" in contents.runs[0]["problems"][0]


def test_text_of_a_run_cannot_end_the_data_s_script_element(tmp_path):
    lab = Lab(tmp_path / "run</script><script>alert(1)</script>")
    lab.config(note="</script><script>alert(2)</script>")
    lab.metrics(1)
    assert main([str(lab.folder), "--out", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text()
    assert "<script>alert" not in text
    manifest = re.search(r'id="manifest">(.*?)</script>', text, flags=re.S)[1]
    assert "</script><script>alert(2)" in json.loads(manifest)["runs"][0]["config"]


@pytest.mark.parametrize("words", [["--max-rollouts", "0"], ["--serve", "--port", "70000"]])
def test_a_wrong_option_is_one_line_of_error(tmp_path, capsys, words):
    small_run(tmp_path / "run", steps=1)
    assert main([str(tmp_path / "run"), *words]) == 2
    assert words[-2] in capsys.readouterr().err


def test_a_file_that_was_not_changed_is_not_encoded_again(tmp_path, monkeypatch):
    lab = small_run(tmp_path / "run", steps=2)
    with ReportServer([str(lab.folder)]) as server:
        seen: list[int] = []
        encode = collect_module.encode_file
        monkeypatch.setattr(
            collect_module, "encode_file", lambda file, run: seen.append(file.step) or encode(file, run)
        )
        server._read_at = -1e9
        server.contents()
        lab.write(3, [lab.row(lab.trajectory(3, 0, 0), 3)])
        server._read_at = -1e9
        assert server.contents().runs[0]["parts"][-1]["step"] == 3
        assert seen == [3]


def test_scripts_are_short_enough_to_read():
    assert {p.name: n for p in PAGE.iterdir() if (n := p.read_text().count("\n")) > 400} == {}


def test_no_script_of_the_page_makes_markup_from_text():
    for script in PAGE.glob("*.js"):
        code = re.sub(r"//.*", "", script.read_text())
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", code), (
            script
        )


@pytest.mark.slow
def test_an_older_run_takes_the_texts_of_its_tokens_from_its_export(tmp_path):
    from transformers import AutoTokenizer

    lab = small_run(tmp_path / "run", steps=1)
    (lab.folder / "token_texts.jsonl").unlink()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(TINY_MODEL))
    tokenizer.save_pretrained(lab.folder / "hf")
    contents = collect([str(lab.folder)], max_rollouts=100)
    assert "token_texts" not in "".join(contents.runs[0]["problems"])
    texts = json.loads(gzip.decompress(contents.blocks[contents.runs[0]["texts"]]))
    ids = tokenizer("What is 3 + 4?\n<|im_end|>")["input_ids"]
    assert "".join(texts[str(i)] for i in ids) == "What is 3 + 4?\n<|im_end|>"


@pytest.mark.parametrize(
    "text",
    [
        "trainer:\n",
        "trainer: 5\nactor_rollout_ref:\n  mod",
        "trainer: {seed: 1}\nactor_rollout_ref:\n  model: ver",
        "trainer: {seed: 1}\nactor_rollout_ref: {rollout: 3, model: 1}\n",
        "trainer: {day: 2024-13-45}\n",
        "- 1\n",
        "",
    ],
)
@pytest.mark.parametrize("rollouts", [True, False])
def test_a_config_that_is_cut_off_leaves_a_report_of_the_rest(tmp_path, text, rollouts):
    lab = small_run(tmp_path / "run", steps=1, prompts=1)
    (lab.folder / "config.yaml").write_text(text)
    if not rollouts:
        (lab.folder / "rollouts").rename(tmp_path / "gone")
    contents = collect([str(lab.folder)], max_rollouts=100)
    assert len(list(lines_of(contents))) == 2 * rollouts
    assert contents.runs[0]["model"] is None
    assert "config.yaml" in "".join(contents.runs[0]["problems"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_spans", 5),
        ("time_spans", [5]),
        ("time_spans", [{"phase": "tool", "start_s": "x", "end_s": 1.0, "turn": 1}]),
        ("prompt_id", []),
        ("episode_id", []),
        ("num_turns", float("inf")),
        ("messages", 5),
        ("records", [5]),
    ],
)
def test_a_row_that_holds_anything_costs_no_other_row(tmp_path, name, value):
    lab = small_run(tmp_path / "run", steps=1, prompts=2, samples=2)
    path = lab.folder / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0][name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    contents = collect([str(lab.folder)], max_rollouts=100)
    assert [line["id"] for line in lines_of(contents)] == [row["trajectory_id"] for row in rows]
    (critical,) = json.loads(gzip.decompress(contents.blocks[contents.runs[0]["critical"]])).values()
    assert critical["holder"]["phase"] == "decode"


def test_texts_of_another_form_are_left_out(tmp_path):
    lab = small_run(tmp_path / "run", steps=1, prompts=1)
    path = lab.folder / "token_texts.jsonl"
    path.write_text('[1]\n{"5": 7}\n' + path.read_text() + '{"6": "to')
    contents = collect([str(lab.folder)], max_rollouts=100)
    texts = json.loads(gzip.decompress(contents.blocks[contents.runs[0]["texts"]]))
    assert texts == {str(token_id): text for text, token_id in lab.vocabulary.ids.items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["directory", "FIFO", "deep"])
@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "timings.jsonl", "token_texts.jsonl", "rollouts/step_000002.jsonl"]
)
def test_one_file_that_cannot_be_read_costs_no_other(tmp_path, name, kind):
    """A directory, a FIFO (whose reader waits for ever), or 200,000 levels."""
    path = small_run(tmp_path / "run", steps=2).folder / name
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}\n" + '{"step": 1}\n')
    contents = collect([str(tmp_path / "run")], max_rollouts=1000)
    said = "\n".join(contents.runs[0]["problems"])
    if kind != "deep":
        assert f"{path} is a {kind}" in said
    elif path.suffix == ".yaml":
        assert f"{path} cannot be read as YAML: more than 64 levels" in said
    elif name != "token_texts.jsonl":  # whose broken lines are left out without a word
        assert f"{path.name}, line 1: not a JSON object" in said
    assert len(list(lines_of(contents))) >= 8, "the other step is shown"


def test_a_row_of_many_levels_is_shown_cut(tmp_path):
    """Python reads so many, and refuses to write them."""
    lab = small_run(tmp_path / "run", steps=1)
    path = next((lab.folder / "rollouts").glob("step_*"))
    row = json.loads(path.read_text().split("\n")[0])
    row["info"] = "PLACE"
    path.write_text(json.dumps(row).replace('"PLACE"', "[" * 900 + "]" * 900) + "\n")
    assert len(list(lines_of(collect([str(lab.folder)], max_rollouts=1000)))) == 1
