"""Faults planted for the doctor: what a user gets wrong, and which check has to say what about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_mt.config_paths import resolve_model_path
from verl_mt.tiny.problems import rows as make_rows
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.calculator import Calculator

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
TOOLS = f"{ROLLOUT}.tool_kwargs.tools_config_file"


class BrokenTool(Calculator):
    async def execute(self, instance_id, parameters, **kwargs):
        raise ConnectionError("connection refused by http://127.0.0.1:9")


class LongTool(Calculator):
    async def execute(self, instance_id, parameters, **kwargs):
        return "1 " * 4000, 0.0, {}


class NoTool(BaseTool):
    def __init__(self, config, tool_schema):
        raise KeyError("api_key")


def raising_reward(data_source, solution_str, ground_truth, extra_info=None):
    raise ZeroDivisionError("no digits in the answer")


@dataclass(frozen=True)
class Fault:
    """Overrides that plant it, and the finding that names it."""

    plant: Callable[[Path], list[str]]
    check: str
    says: str
    status: str = "error"


def tools_file(folder: Path, name: str, **entry: object) -> str:
    file = folder / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [{"class_name": f"{__name__}.{name}", "config": {}, **entry}]}))
    return f"{TOOLS}={file}"


def rows_file(folder: Path, **changed: object) -> str:
    """Eight rows of the default task, changed; None drops a column."""
    file = folder / "rows.jsonl"
    made = [{**row, **changed} for row in make_rows(num_rows=8, seed=0, split="train")]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in made))
    return f"data.train_files={file}"


def tiny_copy(folder: Path, **changed: object) -> Path:
    """The shipped model, its config.json changed."""
    copied = folder / "model"
    shutil.copytree(resolve_model_path("verl_mt://tiny"), copied)
    file = copied / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return copied


def other_run(folder: Path) -> list[str]:
    """An unfinished run of another learning rate is in the way."""
    from verl_mt.config.compose import compose, config_to_yaml

    place = f"trainer.default_local_dir={folder / 'run'}"
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(config_to_yaml(compose([place, f"{ACTOR}.optim.lr=0.5"])))
    return [place]


def read_only(folder: Path) -> list[str]:
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("x")
    return [f"trainer.default_local_dir={folder / 'taken'}"]


def small_vocabulary(folder: Path) -> list[str]:
    """A tokenizer of 768 tokens before 764 embeddings."""
    return [f"{MODEL}.path={tiny_copy(folder, vocab_size=764)}"]


def without_template(folder: Path) -> list[str]:
    copied = tiny_copy(folder)
    (copied / "chat_template.jinja").unlink()
    return [f"{MODEL}.path={copied}"]


def without_weights(folder: Path) -> list[str]:
    copied = tiny_copy(folder)
    (copied / "model.safetensors").unlink()
    return [f"{MODEL}.path={copied}"]


def template_without_tools(folder: Path) -> list[str]:
    file = folder / "plain.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return [f"{MODEL}.custom_chat_template={file}"]


def broken_plugin(folder: Path) -> list[str]:
    file = folder / "plugin.py"
    file.write_text("import a_module_that_nobody_has\n")
    return [f"external_plugins=[{file}]"]


def nameless_interaction(folder: Path) -> list[str]:
    file = folder / "interaction.yaml"
    file.write_text("interaction:\n  - class_name: my.module.Missing\n    config: {}\n")
    return [f"{ROLLOUT}.interaction_config_file={file}"]


FAULTS = {
    "tool parser of another family": Fault(
        lambda folder: [f"{ROLLOUT}.multi_turn.tool_parser=mistral"], "tool calls", "tool_parser=hermes"
    ),
    "model that is nowhere": Fault(
        lambda folder: [f"{MODEL}.path={folder / 'nothing'}"], "model", "no folder"
    ),
    "hub model without network": Fault(
        lambda folder: [f"{MODEL}.path=nobody/has-this-model"], "model", "reachable or in the cache"
    ),
    "model folder without weights": Fault(without_weights, "model", "no weights"),
    "sequences longer than the model's positions": Fault(
        lambda folder: [f"{ROLLOUT}.response_length=100000", f"{ACTOR}.ppo_max_token_len=200000"],
        "model",
        "the model was made for",
    ),
    "adapters on layers that do not exist": Fault(
        lambda folder: [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_target_modules=[query_key_value]"],
        "model",
        "has no query_key_value",
    ),
    "no chat template": Fault(without_template, "chat template", "chat_template"),
    "template that shows no tools": Fault(template_without_tools, "chat template", "tools"),
    "tokenizer of another model": Fault(small_vocabulary, "vocabulary", "768 tokens, the model 764"),
    "stop token that does not exist": Fault(
        lambda folder: [f"{ROLLOUT}.stop_token_ids=[151645]"], "stop tokens", "no tokens of this tokenizer"
    ),
    "sglang is not installed": Fault(
        lambda folder: [f"{ROLLOUT}.name=sglang"], "engine", "SGLang"
    ),
    "GPU that is not there": Fault(lambda folder: ["trainer.device=cuda"], "engine", "no CUDA device"),
    "scripted engine from the command line": Fault(lambda folder: [f"{ROLLOUT}.name=scripted"], "engine", "scripted"),
    "tool that cannot be made": Fault(
        lambda folder: [tools_file(folder, "NoTool")], "tools", "api_key"
    ),
    "tool class that does not exist": Fault(
        lambda folder: [tools_file(folder, "Missing")], "tools", "Missing"
    ),
    "interaction class that does not exist": Fault(nameless_interaction, "interactions", "my.module"),
    "plug-in that does not import": Fault(
        broken_plugin, "plug-ins and trackers", "a_module_that_nobody_has"
    ),
    "reward function that does not exist": Fault(
        lambda folder: ["reward.path=my_rewards:score"], "reward", "my_rewards"
    ),
    "data file that is not there": Fault(
        lambda folder: ["data.train_files=data/nothing.parquet"], "rows", "data/nothing.parquet"
    ),
    "rows without prompts": Fault(lambda folder: [rows_file(folder, prompt=None)], "rows", "prompt"),
    "data source that nobody scores": Fault(
        lambda folder: [rows_file(folder, data_source="my/own")], "prompts", "my/own"
    ),
    "prompts that are all too long": Fault(
        lambda folder: ["data.max_prompt_length=20"], "prompts", "all 16 prompts are longer"
    ),
    "arguments for a tool that is not configured": Fault(
        lambda folder: [rows_file(folder, extra_info={"tools_kwargs": {"browser": {"create_kwargs": {"x": 1}}}})],
        "prompts",
        "browser",
    ),
    "tool whose server is not running": Fault(
        lambda folder: [tools_file(folder, "BrokenTool")], "rollout", "connection refused", status="warning"
    ),
    "tool whose results never fit": Fault(
        lambda folder: [tools_file(folder, "LongTool"), f"{ROLLOUT}.multi_turn.max_tool_response_tokens=2000"],
        "rollout",
        "does not fit",
        status="warning",
    ),
    "reward that raises": Fault(
        lambda folder: [f"reward.path={__name__}:raising_reward"], "rollout", "no digits in the answer"
    ),
    "engine that samples from rounded weights": Fault(
        lambda folder: [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.dtype=bfloat16"],
        "sampling and ratios",
        "dtype=bfloat16",
        status="warning",
    ),
    "key that means nothing": Fault(
        lambda folder: ["reward.overlong_buffer.len=64"], "keys", "unless reward.overlong_buffer.enable=True"
    ),
    "temperature near 0": Fault(
        lambda folder: [f"{ROLLOUT}.temperature=0.05"], "sampling and ratios", "nearly alike", "warning"
    ),
    "more steps than the rows make": Fault(
        lambda folder: ["trainer.total_epochs=1", "trainer.total_training_steps=500"],
        "steps",
        "the rows end after",
        status="warning",
    ),
    "fewer rows than one batch": Fault(
        lambda folder: [rows_file(folder), "trainer.total_epochs=1"], "steps", "is not one step"
    ),
    "warm-up longer than the run": Fault(
        lambda folder: [f"{ACTOR}.optim.lr_warmup_steps=500"], "steps", "is reached never", "warning"
    ),
    "warm-up as a share that is the whole run": Fault(
        lambda folder: [f"{ACTOR}.optim.lr_warmup_steps_ratio=1"], "steps", "by the last one only", "warning"
    ),
    "warm-up of the critic that leaves no time for the actor's": Fault(
        lambda folder: [
            "algorithm.adv_estimator=gae", "trainer.total_training_steps=6", "trainer.critic_warmup=4",
            f"{ACTOR}.optim.lr_warmup_steps=3",
        ],
        "steps", "3 of 2 updates", "warning",
    ),
    "learning rate 0": Fault(lambda folder: [f"{ACTOR}.optim.lr=0"], "steps", "rate is 0", "warning"),
    "unfinished run with another config": Fault(other_run, "run directory", "another config"),
    "directory of somebody else": Fault(read_only, "run directory", "not a run directory"),
}  # fmt: skip

QUICK = ("model that is nowhere", "data file that is not there", "tool parser of another family", "learning rate 0")
"""Found in every run of the tests; the others in CI."""
