"""A model that sees: a picture in the prompt, a tool that answers with a part of it, and one step of training. A
scheduler that shows a part of the picture without being asked stands beside it.

python examples/07_image_tool.py

Needs `pip install verl_mt[multimodal]`. There is no vision model that is both good and tiny, so the conversation is
scripted and the model that is trained has random weights (a Qwen2.5-VL of 60 thousand parameters, made here). What is
shown is real all the same: which tokens stand for which picture, and that sampler and trainer see the same pixels.
"""

import json
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_mt.chat.loading import load_tokenizer
from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.rollout.scheduler import MultiTurnScheduler
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.inference import Inference

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [64, 0, 96, 32]}}\n</tool_call>'


def make_model(folder: Path) -> None:
    """Tokenizer, image processor and random weights of a tiny Qwen2.5-VL."""
    tokenizer = load_tokenizer("verl_mt://tiny")
    vision = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": vision})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(vision)
    size = {"hidden_size": 32, "intermediate_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    eyes = {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "window_size": 16}
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": len(tokenizer), "max_position_embeddings": 4096, **size, **heads, **ends},
        vision_config={**size, **eyes, "fullatt_block_indexes": [1]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():  # Random weights may say anything, but not the token of a picture that there is not.
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_output_embeddings().weight[[start, end, image, video], 0] = -10.0
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=64 * 64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_rows(folder: Path) -> None:
    """Pictures with a small square somewhere, and a data file that names them."""
    rows = []
    for number, color in enumerate(["red", "green", "blue", "yellow"]):
        picture = Image.new("RGB", (96, 64), "white")
        ImageDraw.Draw(picture).rectangle((72, 8, 88, 24), fill=color)
        picture.save(folder / f"{number}.png")
        tools = {"image_zoom_in_tool": {"create_kwargs": {"image": str(folder / f"{number}.png")}}}
        rows.append(
            {
                "prompt": [{"role": "user", "content": "<image>Which colour is the square?"}],
                "images": [f"{number}.png"],
                "data_source": "squares",
                "ground_truth": color,
                "extra_info": {"tools_kwargs": tools},
            }
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class LookCloser(MultiTurnScheduler):
    """No tool: after the first answer the model is shown the upper right part of its picture."""

    def step(self, infer_request, response_choice, current_turn):
        picture = Image.open(infer_request.images[0])
        infer_request.images.append(picture.crop((64, 0, 96, 32)))
        infer_request.messages.append({"role": "user", "content": "<image>Look closer. Which colour is it?"})
        # The rewards, and the run's files, get these in place of the row's.
        return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}


def names_the_color(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def show(console: Console, config: Config, first: str) -> None:
    """One scripted conversation: `first`, and what is said when there is a second picture."""

    def script(request):
        ids = chat.encode_text("It is red." if len(request.media["inputs"]) > 1 else first, neutral=False)
        return ScriptedTurn([*ids, chat.tokenizer.eos_token_id])

    with Inference(config, engine=ScriptedEngine(script)) as policy:
        chat = policy.chat
        ((trajectory,),) = (group.trajectories for group in policy.roll_out(policy.prompts()))
    for message in trajectory.messages:
        console.print(f"[bold]{message['role']}[/]", message["content"], *message.get("tool_calls", []))
    for seen in trajectory.records[0].media:
        grid = seen.tensors["image_grid_thw"][0].tolist()
        console.print(f"tokens {seen.start} to {seen.end - 1} are a picture of {grid[1]} x {grid[2]} patches")


def main() -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        make_rows(folder)
        overrides = [
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"data.train_files={folder / 'rows.jsonl'}",
            f"data.val_files={folder / 'rows.jsonl'}",
            f"reward.path={__file__}:names_the_color",
            "actor_rollout_ref.rollout.name=local",
            "data.max_prompt_length=1024",
        ]
        tool = ["actor_rollout_ref.rollout.tool_kwargs.tools_config_file=tools_configs/image_zoom_in_tool.yaml"]
        scheduler = [
            "actor_rollout_ref.rollout.tool_kwargs.tools_config_file=null",
            f"actor_rollout_ref.rollout.multi_turn.scheduler={__file__}:LookCloser",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        ]
        show(console, compose([*overrides, *tool, "data.val_max_samples=1"]), first=CALL)
        show(console, compose([*overrides, *scheduler, "data.val_max_samples=1"]), first="I cannot tell.")

        small = [
            "data.train_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.response_length=16",
        ]
        run = [f"trainer.default_local_dir={folder / 'run'}", "trainer.logger=[]", "data.val_files=null"]
        trainer = build_trainer(compose([*overrides, *tool, *small, *run, "trainer.total_training_steps=1"]))
        trainer.fit()
        metrics = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
        console.print(f"sampler and trainer differ by at most {metrics['rollout/logprob_diff_max']:.1e} per log-prob")


if __name__ == "__main__":
    main()
