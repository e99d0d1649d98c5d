"""What is wrong with an input is said in one error, before any training step, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm_start
import yaml
from toys import CHATML

from verl_mt.config.compose import compose, config_from_mapping
from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import VerlMTError
from verl_mt.tiny.problems import rows as make_rows
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.slow  # commands, servers, many configurations

QUICK = (
    "data.train_max_samples=8",
    "data.val_max_samples=2",
    "data.train_batch_size=2",
    "trainer.logger=[]",
    "trainer.num_threads=1",
)
TOOLS = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"
INTERACTION = "actor_rollout_ref.rollout.interaction_config_file"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CALCULATOR = {
    "class_name": "verl_mt.tools.calculator.Calculator",
    "config": {},
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate arithmetic.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    },
}
CALL_OF_CHATML = (
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
)
XML_CALL = (
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def base() -> dict:
    """The default task, small; composed once, because Hydra takes longer than everything else here."""
    return dataclasses.asdict(compose(QUICK))


@pytest.fixture
def refusal(tmp_path, base):
    """The text of the one error that a command ends with; checks that it left nothing behind."""

    def of(*overrides: str) -> str:
        run = tmp_path / "run"
        with pytest.raises(VerlMTError) as caught:
            build_trainer(config_from_mapping(base, [f"trainer.default_local_dir={run}", *overrides]))
        assert not run.exists(), "a refused command leaves a directory behind"
        return str(caught.value)

    return of


def says(text: str, *parts: str) -> None:
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in:\n{text}"


def good_rows(n: int = 4) -> list[dict]:
    return list(make_rows(num_rows=n, seed=0, split="train"))


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tools_yaml(path: Path, *entries: dict) -> Path:
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return path


def changed(entry: dict, **function_keys) -> dict:
    function = entry["tool_schema"]["function"] | function_keys
    return {**entry, "tool_schema": {"type": "function", "function": function}}


@pytest.fixture
def model_copy(tmp_path) -> Path:
    """A copy of the shipped model whose files a test may break."""
    return Path(shutil.copytree(resolve_model_path("verl_mt://tiny"), tmp_path / "model"))


# Tools


def test_a_tool_class_that_does_not_exist(refusal, tmp_path):
    file = tools_yaml(tmp_path / "tools.yaml", {**CALCULATOR, "class_name": "verl_mt.tools.calculator.Calculater"})
    says(refusal(f"{TOOLS}={file}"), str(file), "tools[0]", "'Calculater'", "did you mean 'Calculator'")


def test_a_tool_module_that_does_not_exist(refusal, tmp_path):
    file = tools_yaml(tmp_path / "tools.yaml", {**CALCULATOR, "class_name": "no_such_package.tools.Search"})
    says(refusal(f"{TOOLS}={file}"), str(file), "tools[0]", "'no_such_package'", "installed")


def test_a_tool_without_class_name(refusal, tmp_path):
    file = tools_yaml(tmp_path / "tools.yaml", {"config": {}})
    says(refusal(f"{TOOLS}={file}"), str(file), "tools[0]", "class_name is None")


def test_a_tool_schema_of_another_shape(refusal, tmp_path):
    entry = {**CALCULATOR, "tool_schema": {"name": "calculator"}}
    file = tools_yaml(tmp_path / "tools.yaml", entry)
    says(refusal(f"{TOOLS}={file}"), str(file), "tools[0]", "OpenAI tool schema", "function")


def test_tool_parameters_that_are_no_json_schema(refusal, tmp_path):
    file = tools_yaml(
        tmp_path / "tools.yaml",
        changed(CALCULATOR, parameters={"type": "object", "properties": {"x": {"type": "nummber"}}}),
    )
    says(refusal(f"{TOOLS}={file}"), str(file), "'calculator'", "JSON Schema", "nummber")


def test_two_tools_of_one_name(refusal, tmp_path):
    file = tools_yaml(tmp_path / "tools.yaml", CALCULATOR, CALCULATOR)
    says(refusal(f"{TOOLS}={file}"), str(file), "tools[1]", "'calculator' exists already", "tools[0]", "another")


def test_a_tools_file_that_is_absent(refusal):
    says(refusal(f"{TOOLS}=tools_configs/calculater.yaml"), TOOLS, "no file 'tools_configs/calculater.yaml'")


def test_a_tools_file_that_is_no_yaml(refusal, tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [\n")
    says(refusal(f"{TOOLS}={file}"), str(file), "YAML")


def test_a_tools_file_with_another_key(refusal, tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text("tool:\n  - class_name: x.Y\n")
    says(refusal(f"{TOOLS}={file}"), str(file), "expected the key 'tools'", "['tool']")


def test_tools_with_multi_turn_switched_off(refusal):
    says(refusal(f"{ROLLOUT}.multi_turn=False"), TOOLS, "multi_turn.enable=False", "needs several turns")


def test_tools_with_one_turn_only(refusal):
    says(refusal(f"{ROLLOUT}.multi_turn.max_assistant_turns=1"), "max_assistant_turns is 1", "2 or more")


def test_an_unknown_tool_parser(refusal):
    says(refusal(f"{ROLLOUT}.multi_turn.tool_parser=hermez"), "'hermez'", "did you mean 'hermes'")


def test_a_tool_parser_that_cannot_read_the_calls_of_the_chat_template(refusal, tmp_path):
    file = tmp_path / "xml_calls.jinja"
    file.write_text(CHATML.replace(CALL_OF_CHATML, XML_CALL))
    wrong = refusal(f"{MODEL}.custom_chat_template={file}")
    says(wrong, "tool_parser=hermes cannot read the tool calls", "<function=", "qwen3_coder can", "set ")


def test_an_interaction_file_with_a_missing_class(refusal, tmp_path):
    file = tmp_path / "interactions.yaml"
    file.write_text("interaction:\n  - class_name: verl_mt.interactions.checker.Chequer\n")
    says(refusal(f"{INTERACTION}={file}"), str(file), "interaction[0]", "'Chequer'")


# Data


def test_a_data_file_that_is_absent(refusal, tmp_path):
    says(refusal(f"data.train_files={tmp_path}/none.parquet"), "data.train_files", f"no file '{tmp_path}/none.parquet'")
    says(refusal(f"data.val_files={tmp_path}/none.jsonl"), "data.val_files", f"no file '{tmp_path}/none.jsonl'")


def test_a_data_file_that_is_empty(refusal, tmp_path):
    file = jsonl(tmp_path / "empty.jsonl", [])
    says(refusal(f"data.train_files={file}"), "data.train_files", f"{file} has no rows")
    file = tmp_path / "empty.parquet"
    pq.write_table(pa.Table.from_pylist([], pa.schema([("prompt", pa.string()), ("data_source", pa.string())])), file)
    says(refusal(f"data.train_files={file}"), "data.train_files", f"{file} has no rows")


def test_a_data_file_of_another_format(refusal, tmp_path):
    file = tmp_path / "rows.parquet"
    file.write_text("not parquet")
    says(refusal(f"data.train_files={file}"), str(file), "not a readable parquet file")
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n")
    says(refusal(f"data.train_files={file}"), str(file), ".parquet, .jsonl, .json")


def test_a_broken_line_in_a_data_file(refusal, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", good_rows(2))
    file.write_text(file.read_text() + "{broken\n")
    says(refusal(f"data.train_files={file}"), f"{file}, row 3", "not JSON")


def test_a_line_that_is_nested_too_deep(refusal, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", good_rows(2))
    file.write_text(file.read_text() + '{"prompt": ' + "[" * 3000 + "]" * 3000 + "}\n")
    says(refusal(f"data.train_files={file}"), f"{file}, row 3", "nested too deep")
    file = tmp_path / "rows.json"
    file.write_text("[" * 3000 + "]" * 3000)
    says(refusal(f"data.train_files={file}"), str(file), "nested too deep")


def test_a_prompt_with_half_of_a_surrogate_pair(refusal, tmp_path):
    rows = good_rows(2)
    rows[1]["prompt"][-1]["content"] = "How much is \ud800?"
    file = jsonl(tmp_path / "rows.jsonl", rows)
    says(refusal(f"data.train_files={file}"), f"{file}, row 2", "half of a surrogate pair", "How much is ")


def test_a_message_of_a_role_that_the_template_passes_over(refusal, tmp_path):
    rows = good_rows(3)
    rows[2]["prompt"] = [{"role": "human", "content": "Weight of seal in g?"}]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    template = tmp_path / "template.jinja"
    template.write_text(CHATML.replace("for message in messages", "for message in messages if message.role != 'human'"))
    text = refusal(f"data.train_files={file}", f"{MODEL}.custom_chat_template={template}")
    says(text, f"{file}, row 3", "(role 'human') leaves no trace", "Weight of seal in g?", "did you mean 'user'?")


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_column_that_is_missing(refusal, tmp_path, column):
    rows = good_rows(3)
    rows[1][f"{column}_x"] = rows[1].pop(column)
    file = jsonl(tmp_path / "rows.jsonl", rows)
    says(refusal(f"data.train_files={file}"), f"{file}, row 2", f"column '{column}' is missing", f"{column}_x")


@pytest.mark.parametrize(
    ("column", "value", "part"),
    [
        ("prompt", 5, "expected messages (a list) or a text, got int 5"),
        ("prompt", [{"rolle": "user"}], "expected {role: ..., content: ...}"),
        ("data_source", ["a"], "expected text, got list"),
        ("reward_model", "7", "a mapping with ground_truth"),
        ("extra_info", "x", "must be a mapping"),
    ],
)
def test_a_column_of_the_wrong_type(refusal, tmp_path, column, value, part):
    rows = good_rows(3)
    rows[2][column] = value
    file = jsonl(tmp_path / "rows.jsonl", rows)
    says(refusal(f"data.train_files={file}"), f"{file}, row 3", column, part)


def test_arguments_of_a_tool_that_is_not_configured(refusal, tmp_path):
    rows = good_rows(3)
    rows[1]["extra_info"]["tools_kwargs"] = {"calculater": {"create_kwargs": {"x": 1}}}
    file = jsonl(tmp_path / "rows.jsonl", rows)
    says(refusal(f"data.train_files={file}"), f"{file}, row 2", "tools_kwargs.calculater", "did you mean 'calculator'?")
    says(refusal(f"data.val_files={file}"), f"{file}, row 2")


def test_a_selection_of_tools_that_is_a_text(refusal, tmp_path):
    rows = good_rows(3)
    rows[2]["extra_info"]["tool_selection"] = "calculator"
    file = jsonl(tmp_path / "rows.jsonl", rows)
    text = refusal(f"data.train_files={file}")
    says(text, f"{file}, row 3", "must be a list of tool names", "got 'calculator'", "did you mean ['calculator']?")


def test_an_interaction_that_is_not_configured(refusal, tmp_path):
    rows = good_rows(2)
    rows[0]["extra_info"]["interaction_kwargs"] = {"ground_truth": "1"}
    rows[1]["extra_info"]["interaction_kwargs"] = {"name": "teecher"}
    file, interactions = jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "interactions.yaml"
    entry = {
        "name": "teacher",
        "class_name": "verl_mt.interactions.gsm8k_interaction.Gsm8kInteraction",
        "config": {},
    }
    interactions.write_text(yaml.safe_dump({"interaction": [entry]}))
    text = refusal(f"data.train_files={file}", f"{INTERACTION}={interactions}", "data.val_files=null")
    says(text, f"{file}, row 2", "unknown interaction 'teecher'", "did you mean 'teacher'?")


def test_an_interaction_without_what_it_needs_of_a_row(refusal, tmp_path):
    rows = good_rows(2)
    rows[0]["extra_info"]["interaction_kwargs"] = {"ground_truth": "1"}
    rows[1]["extra_info"]["interaction_kwargs"] = {"query": "what?"}
    file, interactions = jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "interactions.yaml"
    entry = {
        "name": "teacher",
        "class_name": "verl_mt.interactions.gsm8k_interaction.Gsm8kInteraction",
        "config": {},
    }
    interactions.write_text(yaml.safe_dump({"interaction": [entry]}))
    text = refusal(f"data.train_files={file}", f"{INTERACTION}={interactions}", "data.val_files=null")
    says(text, f"{file}, row 2", "interaction 'teacher' needs extra_info.interaction_kwargs.ground_truth")


def test_another_prompt_key(refusal):
    says(refusal("data.prompt_key=question"), "column 'question' is missing", "columns present", "prompt")


def test_an_unknown_data_source_without_a_reward(refusal, tmp_path):
    rows = good_rows(3)
    rows[2]["data_source"] = "verl_mt/arithmetics"
    file = jsonl(tmp_path / "rows.jsonl", rows)
    text = refusal(f"data.train_files={file}")
    says(text, f"{file}, row 3", "'verl_mt/arithmetics'", "did you mean 'verl_mt/arithmetic'", "reward.path")
    says(refusal(f"data.val_files={file}", "data.val_max_samples=-1"), f"{file}, row 3", "reward.path")


def test_a_generator_that_does_not_exist(refusal):
    says(refusal("data.train_files=verl_mt.tiny.problems:row"), "data.train_files", "'row'", "did you mean 'rows'")


def test_weights_that_would_be_ignored(refusal, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", good_rows())
    text = refusal(f"data.train_files={{one:{{path:{file},weight:2}}}}")
    says(text, "data.train_files", "one", "data.mixing=weights")


# Prompts and lengths


def test_a_prompt_over_the_limit_that_is_neither_filtered_nor_cut(refusal, tmp_path):
    rows = good_rows(3)
    rows[1]["prompt"] = [{"role": "user", "content": "9" * 300}]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    text = refusal(f"data.train_files={file}", "data.filter_overlong_prompts=False")
    says(text, f"{file}, row 2", "tokens, data.max_prompt_length is 256", "data.truncation=left|right|middle")


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_a_prompt_of_twenty_megabytes(refusal, tmp_path, truncation):
    rows = good_rows(3)
    rows[1]["prompt"] = [{"role": "user", "content": "two and two? " * 1_600_000}]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    begun = time.process_time()
    cut = f"data.truncation={truncation}"
    text = refusal(f"data.train_files={file}", "data.filter_overlong_prompts=False", cut)
    assert time.process_time() - begun < 20
    says(text, f"{file}, row 2", "characters, far more than data.max_prompt_length=256", "filter_overlong_prompts=True")


def test_a_template_that_loops_for_ever(refusal, tmp_path):
    file = tmp_path / "endless.jinja"
    loop = "{% for i in range(100000) %}"
    file.write_text(CHATML + loop + loop + "{% endfor %}{% endfor %}")
    begun = time.process_time()
    text = refusal(f"{MODEL}.custom_chat_template={file}")
    assert time.process_time() - begun < 20
    says(text, str(file), "was not rendered after 3 s", "a loop in it does not end")


def test_only_prompts_over_the_limit(refusal):
    says(refusal("data.max_prompt_length=16"), "all 8 prompts are longer than data.max_prompt_length=16", "Raise it")


def test_lengths_that_the_model_does_not_have(refusal):
    says(refusal(f"{ROLLOUT}.max_model_len=100000"), "100000", "positions")


# Batches


def test_a_mini_batch_that_does_not_divide_the_batch(refusal):
    text = refusal("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    says(text, "ppo_mini_batch_size (3) does not divide data.train_batch_size (8)", "1, 2, 4, 8")


def test_fewer_rows_than_one_batch(refusal):
    text = refusal("data.train_batch_size=64", "trainer.total_epochs=1")
    says(text, "data.train_batch_size is 64", "only 8 training rows", "Lower the batch size")


# Model and template


def test_a_model_folder_without_a_chat_template(refusal, model_copy):
    (model_copy / "chat_template.jinja").unlink()
    text = refusal(f"{MODEL}.path={model_copy}")
    says(text, str(model_copy), "chat template", "actor_rollout_ref.model.custom_chat_template")


def test_a_template_that_cannot_show_tools(refusal, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    says(refusal(f"{MODEL}.custom_chat_template={file}"), "template", "tool")


def test_a_template_that_is_no_jinja(refusal, tmp_path):
    file = tmp_path / "broken.jinja"
    file.write_text("{% for m in messages %}{{ m.role }")
    says(refusal(f"{MODEL}.custom_chat_template={file}"), "template", "unexpected")


def test_a_model_folder_that_does_not_exist(refusal, tmp_path):
    says(refusal(f"{MODEL}.path={tmp_path}/nothing"), f"{tmp_path}/nothing", "does not exist")


def test_a_model_folder_without_weights(refusal, model_copy):
    (model_copy / "model.safetensors").unlink()
    says(refusal(f"{MODEL}.path={model_copy}"), str(model_copy), "weights")


def test_a_model_folder_whose_config_is_broken(refusal, model_copy):
    (model_copy / "config.json").write_text("{")
    says(refusal(f"{MODEL}.path={model_copy}"), str(model_copy))


def test_weights_that_are_cut_short(refusal, model_copy):
    file = model_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    says(refusal(f"{MODEL}.path={model_copy}"), str(model_copy), "safetensors", "cut short")


@pytest.mark.parametrize("vocab_size", [100, 764])  # below the padding's id, and above it
def test_a_model_with_fewer_embeddings_than_tokens(refusal, model_copy, vocab_size):
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    says(refusal(f"{MODEL}.path={model_copy}"), str(model_copy), f"768 tokens, the model {vocab_size} embeddings")


def test_a_model_folder_without_its_vocabulary(refusal, model_copy):
    (model_copy / "tokenizer.json").unlink()
    says(refusal(f"{MODEL}.path={model_copy}"), str(model_copy), "cannot write text: 'Hello world'", "tokenizer.json")


# Reward, plug-ins, trackers, engine, keys


def test_a_reward_that_does_not_resolve(refusal, tmp_path):
    says(refusal("reward.path=exact_macht"), "reward.path", "'exact_macht'", "did you mean 'exact_match'")
    says(refusal(f"reward.path={tmp_path}/my_reward.py"), "reward.path", f"no file '{tmp_path}/my_reward.py'")


def test_a_plugin_file_that_fails(refusal, tmp_path):
    file = tmp_path / "plugin.py"
    file.write_text("x = 1\nraise RuntimeError('no licence')\n")
    says(refusal(f"external_plugins=[{file}]"), str(file), "line 2", "no licence")


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed(refusal, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)  # import raises ImportError, installed or not
    says(refusal(f"trainer.logger=[{tracker}]"), "trainer.logger", tracker, f"pip install 'verl_mt[{tracker}]'")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.train_bach_size=8", ("data.train_bach_size", "did you mean", "data.train_batch_size")),
        ("trainer.training_steps=8", ("trainer.training_steps", "trainer.total_training_steps")),
        ("trainer.logger=[consol]", ("trainer.logger", "'consol'", "tensorboard")),
        ("actor_rollout_ref.rollout.name=vllm", ("rollout.python", "has no vLLM", "docs/vllm.md")),
        ("actor_rollout_ref.rollout.name=scripted", ("scripted", "Python")),
        ("trainer.n_workers_per_node=2", ("trainer.n_workers_per_node", "placement=ray")),
        ("data.sampler=my.Sampler", ("data.sampler", "my")),
        ("data.sampler_kwargs={key:x}", ("data.sampler_kwargs", "data.sampler")),
        ("algorithm.adv_estimator=gea", ("algorithm.adv_estimator", "gea", "gae", "grpo")),
        (f"{MODEL}.lora_rank=-1", (f"{MODEL}.lora_rank=-1", "at least 0")),
        (f"{MODEL}.lora_rank=1.5", (f"{MODEL}.lora_rank", "1.5")),
    ],
)
def test_a_key_or_value_that_cannot_be(refusal, override, parts):
    says(refusal(override), *parts)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_sglang_where_it_is_not_installed(refusal):
    says(refusal(f"{ROLLOUT}.name=sglang"), "rollout.name", "SGLang is not installed", "local")


def test_determinism_is_refused_where_it_cannot_be_had(refusal):
    says(refusal("trainer.deterministic=True", f"{ROLLOUT}.name=sglang"), "deterministic", "local")


def test_all_problems_of_a_command_are_in_one_error(refusal):
    text = refusal("data.train_bach_size=8", "trainer.total_trainign_steps=3", f"{ROLLOUT}.n=0")
    says(text, "3 problems", "data.train_bach_size", "trainer.total_trainign_steps", f"{ROLLOUT}.n")


def test_adapters_for_layers_that_the_model_has_not(refusal):
    text = refusal(f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[q_proj,query]")
    says(text, f"{MODEL}.lora_target_modules", "'query'", "q_proj", "down_proj", "all-linear")


def test_adapters_without_the_library_for_them(refusal, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a))
    says(refusal(f"{MODEL}.lora_rank=4"), f"{MODEL}.lora_rank", 'pip install "verl_mt[lora]"')


def test_a_checkpoint_of_other_adapters(refusal, tmp_path, base):
    folder = tmp_path / "first"
    values = {"lora_rank": 4, "target_modules": "[q_proj]"}
    overrides = [f"{MODEL}.{key}={value}" for key, value in values.items()]
    trainer = build_trainer(config_from_mapping(base, [f"trainer.default_local_dir={folder}", *overrides]))
    trainer._save()
    trainer.close()
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/step_000000")
    text = refusal(*resume, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj]")
    says(text, "written with lora_rank=4", "says lora_rank=8", "[q_proj]")
    says(refusal(*resume), "lora_rank=4", "says lora_rank=0 (all weights are trained)")


# Where it would write


def test_a_run_directory_that_cannot_be_made(tmp_path, base):
    (tmp_path / "file").write_text("")
    with pytest.raises(VerlMTError, match=r"file/run.*Choose another trainer.default_local_dir"):
        build_trainer(config_from_mapping(base, [f"trainer.default_local_dir={tmp_path}/file/run"]))
    with pytest.raises(VerlMTError, match=r"Choose another trainer.default_local_dir"):
        build_trainer(config_from_mapping(base, [f"trainer.default_local_dir={tmp_path}/file"]))


@pytest.mark.slow
def test_a_folder_of_somebody_else_is_not_touched(tmp_path, base):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(VerlMTError, match="not a run directory"):
        build_trainer(config_from_mapping(base, [f"trainer.default_local_dir={tmp_path}"]))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_checkpoint_that_cannot_be_resumed_leaves_no_new_run(refusal, tmp_path):
    text = refusal("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/none")
    says(text, "resume_from_path", f"{tmp_path}/none")
    damaged = tmp_path / "step_000001"
    damaged.mkdir()
    (damaged / "meta.json").write_text('{"schema_version": 2, "step": 1, "score": null}')
    text = refusal("trainer.resume_mode=resume_path", f"trainer.resume_from_path={damaged}")
    says(text, f"python -m verl_mt.convert_checkpoint {damaged}")


# As a command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.train_files=/nowhere/train.parquet"], ["data.train_files", "/nowhere/train.parquet"]),
        (["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=3"], ["(3) does not divide"]),
        (["actor_rollout_ref.model.custom_chat_template=/nowhere.jinja"], ["custom_chat_template", "/nowhere.jinja"]),
    ],
)
def test_the_command_ends_with_status_2_and_no_traceback(tmp_path, overrides, parts):
    words = [sys.executable, "-m", "verl_mt.trainer", *QUICK, "trainer.experiment_name=bad", *overrides]
    done = warm_start.run(words, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    says(errors[0], *parts)
    assert not (tmp_path / "runs" / "bad").exists()
