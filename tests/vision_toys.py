"""A tiny Qwen2.5-VL with random weights, its tokenizer, processor and chat, all made here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import toy_tokenizer

Image = pytest.importorskip("PIL.Image")

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from verl_mt.extensions.multimodal.chat_template import FrameProcessor, MediaProcessor, ProcessorChat  # noqa: E402

PATCH = 4
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's frame, with tools and tool calls."""


SIZES = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}


def image_processor() -> Any:
    return Qwen2VLImageProcessorPil(**SIZES, min_pixels=64, max_pixels=64 * 12)


def video_processor() -> FrameProcessor:
    return FrameProcessor({**SIZES, "size": {"shortest_edge": 64, "longest_edge": 64 * 12}})


def vision_tokenizer() -> Any:
    tokenizer = toy_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    return tokenizer


def vision_chat(*, videos: bool = True, **keys: Any) -> ProcessorChat:
    media = MediaProcessor(image_processor(), video_processor=video_processor() if videos else None)
    return ProcessorChat(vision_tokenizer(), media=media, **keys)


class HfProcessor(Qwen2_5_VLProcessor):
    """transformers' own processor. Without torchvision it cannot look up the class of the video processor it lacks."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def hf_processor() -> Any:
    return HfProcessor(image_processor=image_processor(), tokenizer=vision_tokenizer(), video_processor=None)


def picture(width: int = 16, height: int = 16, color: tuple[int, int, int] = (200, 10, 10)) -> Any:
    """A picture whose pixels differ from place to place."""
    image = Image.new("RGB", (width, height), color)
    for x in range(0, width, 3):
        image.putpixel((x, (x * 7) % height), (x * 5 % 256, 255 - color[0], 90))
    return image


def vision_model(seed: int = 0) -> Any:
    tokenizer = vision_tokenizer()
    of = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None, "eos_token_id": of("<|im_end|>"), "pad_token_id": 0,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1], "tokens_per_second": 2,
        },
        image_token_id=of("<|image_pad|>"), video_token_id=of("<|video_pad|>"),
        vision_start_token_id=of("<|vision_start|>"), vision_end_token_id=of("<|vision_end|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():  # large enough for an image to matter
        torch.nn.init.normal_(parameter, std=0.5 if "merger" in name else 0.1)
    return model.eval()


def shown(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    """A message of texts, pictures and lists of frames."""
    content = []
    for part in parts:
        kind = "text" if isinstance(part, str) else "video" if isinstance(part, list) else "image"
        content.append({"type": kind, kind: part})
    return {"role": role, "content": content, **more}
