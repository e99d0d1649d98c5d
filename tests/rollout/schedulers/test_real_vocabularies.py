"""Cutting a message back and going on in it, over published vocabularies: bytes, multi-byte characters, spaces."""

from __future__ import annotations

import pytest
from scheduler_lab import converse, prompt_of
from tables import one_of_each
from transformers import AutoTokenizer

from verl_mt.chat.template import ChatTemplate
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler

TEMPLATES = {
    "qwen3": "Qwen-Qwen3-0.6B",
    "llama3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "mistral-7b-v3": "mistral-common-v3_spm",
    "phi-3-mini": "microsoft-Phi-3-mini-4k-instruct",
    "ds-r1-distill-qwen": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
}
TEXT = "<think>Let me see: 12 + 30\n = 42, naïve, 東京 🙂 and   spaces</think>\n\nThe answer is 42."
TIP = " Wait,\nno <|im_end|></s>: 東"


class CutAt(MultiTurnScheduler):
    def __init__(self, place):
        super().__init__(max_turns=2)
        self.place = place

    def step(self, infer_request, response_choice, current_turn):
        self.text = infer_request.messages[-1]["content"]
        infer_request.messages[-1]["content"] = self.text[: self.place] + TIP
        return {"infer_request": infer_request}


@pytest.mark.slow
@pytest.mark.cap("C16", "C17", "C33")
@pytest.mark.parametrize("name", one_of_each(TEMPLATES, lambda name: name in ("mistral-7b-v3", "phi-3-mini")))
def test_a_message_is_cut_at_any_character_and_gone_on_with(name, shared_data):
    template = (shared_data / "templates" / f"{TEMPLATES[name]}.jinja").read_text()
    chat = ChatTemplate(AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name), chat_template=template)
    ids, end = chat.encode_text(TEXT, neutral=False), min(chat.stop_token_ids)
    prompt = prompt_of(chat=chat)
    for place in range(1, len(TEXT), 3):
        scheduler = CutAt(place)
        turns = [([*ids, end], None, "stop", None), ([*ids[:3], end], None, "stop", None)]
        run = converse(scheduler, turns, chat=chat, prompt=prompt)
        assert run.trajectory.error is None
        record, first, read = run.record, len(run.engine.requests[0].input_ids), run.engine.requests[1].input_ids
        sampled = sum(record.sampled[first : len(read)])
        if sampled == 0:  # not even the first token could stay: that is another history
            continue
        assert read[:first] == run.engine.requests[0].input_ids
        assert read[first : first + sampled] == ids[:sampled]
        assert not any(record.loss_mask[first + sampled : len(read)])
        wanted = scheduler.text[:place] + TIP
        assert chat.decode(read[first:]).strip() == wanted.strip(), place
        assert sampled < len(ids) and not wanted.startswith(chat.decode(ids[: sampled + 1])), "more could have stayed"
        control = [i for i in read[first + sampled :] if i in chat.end_token_ids]
        assert control == []
