"""A toy chat for tests: one id per character, control tokens are single ids, templates are Python functions."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

END = 1
CONTROL = {0: "<|im_start|>", END: "<|im_end|>"}
MERGED = {2: "Hello"}
"""A token that covers several characters, so that a text has more than one tokenization."""


def encode(text, *, merge=True):
    ids = {piece: token for token, piece in (CONTROL | (MERGED if merge else {})).items()}
    pieces = re.findall("|".join(map(re.escape, ids)) + "|.", text, re.DOTALL)
    return [ids[piece] if piece in ids else ord(piece) + 100 for piece in pieces]


def decode(ids):
    return "".join((CONTROL | MERGED).get(i) or chr(i - 100) for i in ids)


def chatml(messages, tools=None, *, add_generation_prompt=False):
    text = ""
    for m in messages:
        calls = "".join(f"\n<tool_call>\n{json.dumps(c['function'])}\n</tool_call>" for c in m.get("tool_calls", ()))
        text += f"<|im_start|>{m['role']}\n{m.get('content') or ''}{calls}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class ToyChat:
    """The part of `ChatTemplate` that the sanity check and the text deltas use."""

    def __init__(self, template=chatml):
        self.template = template
        self.renders = 0
        self.end_token_ids = frozenset({END})
        self.tokenizer = SimpleNamespace(added_tokens_decoder=CONTROL)

    @property
    def generation_prompt_text(self):
        bare = self.template([user("Hi")])
        return self.template([user("Hi")], add_generation_prompt=True)[len(bare) :]

    @property
    def prefilled_reasoning(self):
        return self.generation_prompt_text.endswith("<think>\n")

    def full_text(self, messages, tools=None, *, add_generation_prompt=False):
        self.renders += 1
        return self.template(messages, tools, add_generation_prompt=add_generation_prompt)

    def full_ids(self, messages, tools=None, *, add_generation_prompt=False):
        return encode(self.full_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def prompt_ids(self, messages, tools=None, *, add_generation_prompt=True):
        return self.full_ids(messages, tools, add_generation_prompt=add_generation_prompt)

    def encode_text(self, text, *, neutral=False):
        return [ord(c) + 100 for c in text] if neutral else encode(text)

    def decode(self, ids):
        return decode(ids)


def stream(*parts):
    """`(token_ids, sampled)` of alternating given and sampled texts (or id lists)."""
    token_ids, sampled = [], []
    for i, part in enumerate(parts):
        ids = encode(part) if isinstance(part, str) else list(part)
        token_ids += ids
        sampled += [i % 2] * len(ids)
    return token_ids, sampled


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}
