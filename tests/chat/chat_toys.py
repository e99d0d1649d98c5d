"""Small tokenizers and templates of the chat tests, made here."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Every message in one frame; tool calls are not written."""

TOOL_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools|tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + ' ' + c.function.arguments|tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Tool messages share one user turn; a template variable prefills the generation prompt."""

HEADER_ENDS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}{{ '\n' + m.content }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + c.function.arguments|tojson + '</tool_call>' }}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A turn ends where the next header begins."""

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<s>", "</s>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def byte_tokenizer(template: str, *, eos: str = "</s>", rstrip: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE, lossless, with merges over line ends and with added tokens of both kinds."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), (">", "Ċ"), ("t", "h"), ("th", "e"), ("Ċ", "n"), ("Ġ", "Ċ"), ("e", "l")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    add(backend, eos, rstrip)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


def char_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per character, control tokens of one id each."""
    letters = string.printable
    vocab = {c: i for i, c in enumerate(letters)} | {"<unk>": len(letters)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def add(backend: Tokenizer, eos: str, rstrip: tuple[str, ...] = ()) -> None:
    specials = dict.fromkeys([*SPECIALS, eos])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=t in rstrip) for t in specials])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def assistant(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def sample(ids: list[int], message: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sample", "ids": ids, "message": message}


def env(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"type": "env", "messages": list(messages)}
