"""The command `verl-mt doctor --only template`: report, coloured conversations, JSON lines, bad input."""

from __future__ import annotations

import io
import json
import sys

import pytest
import warm_start
from rich.console import Console
from tables import before_release
from toys import CHATML, toy_tokenizer

from verl_mt.chat import load_chat, replay
from verl_mt.chat.display import GIVEN, TRAINED, render_tokens
from verl_mt.chat.sanity import WARNING
from verl_mt.extensions.inspection.check_template import run as main
from verl_mt.extensions.inspection.check_template.report import build_report, print_report

STRIPS = CHATML.replace("{{ message.content }}", "{{ message.content | trim }}")
NO_TOOL_ROLE = "{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif -%}" + (
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    toy_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chat(model):
    return load_chat(model)


def conversation(chat, *texts, **more):
    """A row whose sampled turns are `texts`, with one user message between two of them."""
    steps = []
    for text in texts:
        steps.append({"type": "sample", "ids": chat.encode_text(text, neutral=False)})
        steps.append({"type": "env", "messages": [{"role": "user", "content": "more"}]})
    return {"prompt": [{"role": "user", "content": "Hi"}], "tools": None, "steps": steps[:-1], **more}


def write(tmp_path, *rows):
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(file)


def test_json_writes_one_line_per_conversation_and_nothing_else(model, chat, tmp_path, capsys):
    rows = [conversation(chat, "A1<|im_end|>", "A2<|im_end|>"), conversation(chat, "A1"), conversation(chat)]
    assert main(["--model", model, "--conversations", write(tmp_path, *rows, ""), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    for row, line in zip(rows, lines):
        assert (line["token_ids"], line["loss_mask"]) == replay(chat.tokenizer, row["prompt"], None, row["steps"])
        assert line["warnings"] == []
    assert sum(lines[0]["loss_mask"]) == 6
    assert chat.decode(lines[2]["token_ids"]).endswith("assistant\n")


def test_an_end_that_had_to_be_inserted_is_a_warning_and_never_trained(model, chat, tmp_path, capsys):
    file = write(tmp_path, conversation(chat, "A1", "A2<|im_end|>"))
    assert main(["--model", model, "--conversations", file, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert sum(line["loss_mask"]) == 5
    assert any("end token" in text for text in line["warnings"])


@pytest.mark.cap("V6")
def test_json_says_what_the_sanity_check_says(model, chat, tmp_path, capsys):
    template = tmp_path / "strips.jinja"
    template.write_text(STRIPS)
    file = write(tmp_path, conversation(chat, " A1<|im_end|>", "A2<|im_end|>"))
    assert main(["--model", model, "--chat-template", str(template), "--conversations", file, "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["warnings"]
    assert text.startswith(WARNING) and "rewrites_history" in text


def test_template_kwargs_of_a_line_reach_the_template(model, chat, tmp_path, capsys):
    template = tmp_path / "kwargs.jinja"
    template.write_text("{{ greeting | default('none') }}" + CHATML)
    rows = [conversation(chat, template_kwargs={"greeting": "hello"}), conversation(chat)]
    args = ["--model", model, "--chat-template", str(template), "--conversations", write(tmp_path, *rows), "--json"]
    assert main([*args, "--template-kwargs", '{"greeting": "hey"}']) == 0
    texts = [chat.decode(json.loads(line)["token_ids"]) for line in capsys.readouterr().out.splitlines()]
    assert [text.partition("<|")[0] for text in texts] == ["hello", "hey"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "expected a JSON object"),
        ({"steps": []}, "prompt: expected a list of messages"),
        ({"prompt": [{"content": "no role"}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "Hi"}], "tools": "add"}, "tools: expected"),
        ({"prompt": [{"role": "user", "content": "Hi"}], "template_kwargs": [1]}, "template_kwargs"),
        ({"prompt": [{"role": "user", "content": "Hi"}], "steps": [{"type": "turn"}]}, "steps[0]: type"),
        ({"prompt": [{"role": "user", "content": "Hi"}], "steps": [{"type": "sample"}]}, "needs ids"),
        ({"prompt": [{"role": "user", "content": "Hi"}], "steps": [{"type": "sample", "ids": [99999]}]}, "99999"),
        ({"prompt": [{"role": "user", "content": "Hi"}], "steps": [{"type": "env", "messages": []}]}, "env needs"),
    ],
)
def test_a_bad_line_is_one_error_that_names_file_and_line(model, chat, tmp_path, capsys, bad, said):
    file = write(tmp_path, conversation(chat, "A1<|im_end|>"), "", bad)
    assert main(["--model", model, "--conversations", file, "--json"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"{file}:3" in error and said in error
    assert len(error.strip().splitlines()) == 1


def test_a_conversation_that_the_template_refuses_names_its_line(model, chat, tmp_path, capsys):
    template = tmp_path / "no_tool_role.jinja"
    template.write_text(NO_TOOL_ROLE)
    row = conversation(chat, "A1<|im_end|>")
    row["steps"].append({"type": "env", "messages": [{"role": "tool", "content": "3"}]})
    file = write(tmp_path, row)
    assert main(["--model", model, "--chat-template", str(template), "--conversations", file]) == 2
    assert f"{file}:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--conversations", "absent.jsonl"], "absent.jsonl"),
        (["--chat-template", "absent.jinja"], "absent.jinja"),
        (["--template-kwargs", "{"], "not JSON"),
        (["--template-kwargs", "[]"], "expected a JSON object"),
    ],
)
def test_a_missing_file_or_a_broken_option_is_one_error(model, capsys, more, said):
    assert main(["--model", model, *more]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and said in output.err


def test_an_absent_model_and_an_empty_file_are_one_error_each(model, tmp_path, capsys):
    assert main(["--model", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    assert main(["--model", model, "--conversations", write(tmp_path, "", "")]) == 2
    assert "holds no line" in capsys.readouterr().err


def test_trained_tokens_are_exactly_the_coloured_ones(chat):
    row = conversation(chat, "A1<|im_end|>", "A2<|im_end|>")
    token_ids, mask = replay(chat, row["prompt"], None, row["steps"])
    text = render_tokens(chat, token_ids, mask)
    assert text.plain == chat.decode(token_ids)
    coloured = [text.plain[s.start : s.end] for s in text.spans if s.style == TRAINED]
    assert coloured == ["A1<|im_end|>", "A2<|im_end|>"]
    assert {span.style for span in text.spans} == {TRAINED, GIVEN}
    with pytest.raises(ValueError, match="must be equal"):
        render_tokens(chat, token_ids, mask[:-1])


def test_conversations_are_printed_with_their_warnings(model, chat, tmp_path, capsys):
    file = write(tmp_path, conversation(chat, "A1", "A2<|im_end|>"))
    assert main(["--model", model, "--conversations", file]) == 0
    output = capsys.readouterr().out
    assert "5 of " in output and "trained on" in output and "warning: " in output


def test_the_report_says_what_a_good_template_can_do(chat):
    report = build_report(chat, "toy")
    assert report.facts["append_only"] and not report.facts["drops_reasoning"]
    assert report.facts["end_tokens"] == ["<|im_end|>"]
    assert set(report.facts["roles"]) >= {"user", "assistant", "tool", "system"}
    assert all(problem is None for problem in report.shapes.values())
    verdicts = {sample.name: sample.verdict for sample in report.samples}
    assert verdicts.pop("a tool result that holds control text") == "neutralised_text"
    assert set(verdicts.values()) == {"clean"}
    console = Console(record=True, width=140, file=io.StringIO())
    print_report(report, console)
    printed = " ".join(console.export_text().split())
    assert "append only" in printed and "tool parser │ hermes (suggested)" in printed


def test_the_report_names_refused_shapes_with_their_cause_and_the_mismatches(model, tmp_path, capsys):
    template = tmp_path / "poor.jinja"
    template.write_text(NO_TOOL_ROLE.replace("{{ m.content }}", "{{ m.content | trim }}"))
    assert main(["--model", model, "--chat-template", str(template), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["shapes"]["tool_result"]["cause"] and "no tools" in report["shapes"]["tool_result"]["text"]
    assert report["shapes"]["user_turn"] is None
    verdicts = {sample["name"]: sample["verdict"] for sample in report["samples"]}
    assert verdicts["a tool call"] == "refused"
    assert verdicts["white space around a turn"] == "rewrites_history"


@pytest.mark.slow
def test_the_command_runs_as_a_module_with_clean_stdout(model, chat, tmp_path):
    file = write(tmp_path, conversation(chat, "A1", "A2<|im_end|>"))
    command = [
        sys.executable,
        "-m",
        "verl_mt.doctor",
        "--only",
        "template",
        "--model",
        model,
        "--conversations",
        file,
        "--json",
    ]
    done = warm_start.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and json.loads(done.stdout)["warnings"]


@pytest.mark.slow
@pytest.mark.cap("P5", "P7", "P11", "P18")
@pytest.mark.parametrize(
    ("tokenizer", "template", "verdicts"),
    [
        (
            "qwen3",
            "Qwen-Qwen3-0.6B",
            {"reasoning, then a user turn": "stripped_reasoning", "two plain turns": "template_default_text"},
        ),
        ("gpt-oss", "openai-gpt-oss-120b", {"two plain turns": "turn_separator", "a tool call": "clean"}),
        (
            "mistral-7b-v3",
            "mistralai-Mistral-Nemo-Instruct-2407",
            {"a tool call, then a user turn": "rewrites_history", "a tool call": "clean"},
        ),
        before_release("qwen2.5", "Qwen-Qwen2.5-7B-Instruct", {"a tool call, then a user turn": "clean"}),
        before_release("qwen2.5", "Qwen-QwQ-32B", {"a tool call": "stripped_reasoning"}),
        before_release("phi-3-mini", "microsoft-Phi-3-mini-4k-instruct", {"two plain turns": "clean"}),
        before_release("llama3.1", "meta-llama-Llama-3.1-8B-Instruct", {"a tool call": "clean"}),
    ],
)
@pytest.mark.filterwarnings("ignore:AutoTokenizer made")
def test_what_the_sanity_check_says_about_published_templates(shared_data, tokenizer, template, verdicts):
    file = shared_data / "templates" / f"{template}.jinja"
    chat = load_chat(str(shared_data / "tokenizers" / tokenizer), custom_chat_template=str(file))
    found = {s.name: s.verdict for s in build_report(chat, template).samples}
    assert {sample: found[sample] for sample in verdicts} == verdicts
