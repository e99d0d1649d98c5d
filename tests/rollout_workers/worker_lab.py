"""What a scripted engine says to the default task, in whatever process it is asked: a call of the calculator, then an
answer, both by the request's seed alone."""

from __future__ import annotations

import random
import re
from functools import cache

from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import compose
from verl_mt.data.requests import GenerationRequest
from verl_mt.engines.scripted import ScriptedTurn
from verl_mt.trainer.build_rollout import build_chat


@cache
def chat() -> ChatTemplate:
    return build_chat(compose([]))


def say(request: GenerationRequest) -> ScriptedTurn:
    rng = random.Random(request.sampling.seed)
    text = chat().decode(request.input_ids)
    asked = re.findall(r"(\d+ *[-+*] *\d+)", text)
    expression = asked[-1] if asked else "1+1"
    if request.request_id.endswith("/1") and rng.random() < 0.7:
        said = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
    else:
        right = eval(expression) if rng.random() < 0.6 else rng.randrange(100)
        said = f"It is so.\n#### {right}"
    ids = chat().tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
    ids = ids[: request.sampling.max_new_tokens]
    return ScriptedTurn(ids, None, "stop", [-rng.random() for _ in ids])
