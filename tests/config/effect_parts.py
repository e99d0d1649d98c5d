"""What the overrides of `key_effects.py` name: rows, tools, interactions, rewards, functions, files. Small and real."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import tempfile
import time
from pathlib import Path

import yaml
from toys import FORGETFUL, toy_tokenizer
from vision_toys import image_processor, vision_model, vision_tokenizer

from verl_mt.config_paths import resolve_model_path
from verl_mt.data.sampler import ShuffledSampler
from verl_mt.environments.base import Environment
from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, post
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.interactions.base import BaseInteraction
from verl_mt.rewards.base import rewards
from verl_mt.tiny.problems import rows as problems
from verl_mt.tools.calculator import Calculator
from verl_mt.trainer.tracking import Tracker

SEEN: list[object] = []
"""What functions of one's own were given."""


@functools.cache
def folder() -> Path:
    """For files that are made once."""
    return Path(tempfile.mkdtemp(prefix="verl_mt_effects_"))


def other_rows(num_rows, seed, split):
    made = problems(num_rows=num_rows, seed=seed + 1, split=split)
    return [{**row, "other_prompt": "Another question?", "other_label": "77"} for row in made]


def rows_file(kind):
    """JSON Lines whose row 1 is too long, or none."""
    made = [{**row, "index": index} for index, row in enumerate(problems(num_rows=4, seed=0, split="train"))]
    made[1]["prompt"] = [{"role": "user", "content": "9" * 3000}] if kind == "long" else 5
    file = folder() / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(file)


def few_shot(num_rows, seed, split):
    shots = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "#### 1"}]
    return [{**row, "prompt": [*shots, *row["prompt"]]} for row in problems(num_rows=num_rows, seed=seed, split=split)]


def with_control_tokens(num_rows, seed, split):
    made = problems(num_rows=num_rows, seed=seed, split=split)
    return [{**row, "prompt": [{"role": "user", "content": "<|im_end|>"}]} for row in made]


def with_kwargs(num_rows, seed, split):
    """Rows whose simulated user waits for an answer that never comes."""
    made = problems(num_rows=num_rows, seed=seed, split=split)
    return [{**row, "extra_info": {"interaction_kwargs": {"ground_truth": "none"}}} for row in made]


class Backwards(ShuffledSampler):
    """From the last row to the first."""

    def __init__(self, sources, *, seed=0, shuffle=True, start=1):
        super().__init__(sources, seed=seed, shuffle=shuffle)
        self.start = start

    def row_at(self, position):
        return self._rows[-(self.start + position) % len(self._rows)]


def in_maze(num_rows, seed, split):
    return [{**row, "environment": "maze"} for row in problems(num_rows=num_rows, seed=seed, split=split)]


class Maze(Environment):
    def __init__(self, size: int = 9):
        self.size = size

    def reset(self, **row):
        return f"The maze has {self.size} rooms."

    def score(self):
        return 0.5


class Slow(Calculator):
    runs_inline = False
    live = most = 0

    async def execute(self, instance_id, parameters, **kwargs):
        Slow.live += 1
        Slow.most = max(Slow.most, Slow.live)
        try:
            await asyncio.sleep(0.2)
            return await super().execute(instance_id, parameters)
        finally:
            Slow.live -= 1


class Flaky(Calculator):
    """Fails at every first call of a conversation."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.tried: set[str] = set()

    async def execute(self, instance_id, parameters, **kwargs):
        if instance_id not in self.tried:
            self.tried.add(instance_id)
            raise ConnectionError("try again")
        return "2", 0.5, {}


class Long(Calculator):
    async def execute(self, instance_id, parameters, **kwargs):
        return " ".join(map(str, range(60))), 0.5, {}


class Patient(BaseInteraction):
    """Never content; scores every turn."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "again", 0.25, {}


class Sleepy(Patient):
    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(0.3)
        return True, "", 0.25, {}


class Twice(MultiTurnScheduler):
    """Says `word` once, then ends."""

    def __init__(self, max_turns=None, word="again", **kwargs):
        super().__init__(max_turns=max_turns, **kwargs)
        self.word = word

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 2

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": self.word})
        return {"infer_request": infer_request}


async def generate(args, sample, sampling_params):
    """Asks once; remembers the prompt, and a setting of its own."""
    SEEN.append((type(sample.prompt).__name__, getattr(args, "own", None)))
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    tokenizer = GenerateState(args).tokenizer
    text = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    reply = await post(url, {"text": text, "sampling_params": sampling_params, "return_logprob": True})
    said = [item[1] for item in reply["meta_info"]["output_token_logprobs"]]
    sample.tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + said
    sample.response, sample.response_length = reply["text"], len(said)
    sample.rollout_log_probs = [item[0] for item in reply["meta_info"]["output_token_logprobs"]]
    sample.loss_mask, sample.status = [1] * len(said), Sample.Status.COMPLETED
    return sample


async def agent(row, base_url, api_key):
    SEEN.append("agent")
    raise RuntimeError("an agent of one's own was asked")


class Noted(Tracker):
    """Leaves files whose names say what it was told."""

    def __init__(self, run):
        self.folder = run.folder
        (run.folder / f"project_{run.project}").touch()

    def table(self, step, name, table):
        (self.folder / f"table_{name}_{len(table.rows)}").touch()


def constant(data_source, solution_str, ground_truth, extra_info=None, value=0.5):
    return {"score": value, "style": len(solution_str) / 100}


def by_length(data_source, solution_str, ground_truth, extra_info=None, weight=0.01):
    """Differs within groups, whatever a model says."""
    return {"score": weight * len(solution_str), "acc": float(len(solution_str) % 2)}


def slow_reward(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.3)
    return 1.0


rewards["effects_constant"] = constant


def tools_file(name: str) -> str:
    """A YAML file that declares one of the tools above."""
    file = folder() / f"{name}.yaml"
    schema = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "What to compute"}},
                "required": ["expression"],
            },
        },
    }
    entry = {"class_name": f"{__name__}.{name}", "config": {}, "tool_schema": schema}
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    return str(file)


def interaction_file(name: str) -> str:
    file = folder() / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"interaction": [{"class_name": f"{__name__}.{name}", "config": {}}]}))
    return str(file)


def plugin_file() -> str:
    file = folder() / "effects_plugin.py"
    file.write_text("import effect_parts\n\neffect_parts.SEEN.append('plugin')\n")
    return str(file)


def template_file(which: str) -> str:
    """`own`: another header, a variable; `forgetful`: old reasoning goes as soon as anything follows."""
    file = folder() / f"{which}.jinja"
    own = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ prefix or '> ' }}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    file.write_text(own if which == "own" else FORGETFUL)
    return str(file)


def other_model() -> str:
    """The other checkpoint that comes with the repository."""
    return str(Path(__file__).resolve().parents[2] / "recipes" / "search" / "tiny" / "checkpoint")


def model_that_sees() -> str:
    """A checkpoint with a vision tower."""
    place = folder() / "sees"
    if not place.exists():
        for part in (vision_model(), vision_tokenizer(), image_processor()):
            part.save_pretrained(place)
    return str(place)


def other_tokenizer() -> str:
    """A folder with a character tokenizer."""
    place = folder() / "tokenizer"
    if not place.exists():
        toy_tokenizer().save_pretrained(place)
    return str(place)


def model_with_code() -> str:
    """The shipped model under a type of its own, whose code lies beside it."""
    place = folder() / "with_code"
    if not place.exists():
        shutil.copytree(resolve_model_path("verl_mt://tiny"), place)
        config = json.loads((place / "config.json").read_text())
        config |= {
            "model_type": "effects_own",
            "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
        }
        (place / "config.json").write_text(json.dumps(config))
        (place / "own.py").write_text(
            "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
            "class OwnConfig(Qwen3Config):\n    model_type = 'effects_own'\n\n\n"
            "class Own(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
        )
    return str(place)
