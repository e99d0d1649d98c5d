"""The tiny model's tokenizer: byte-level BPE with Qwen2's pre-tokenizer (digits one by one) and a ChatML template."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

VOCAB_SIZE = 768
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special: decoding keeps them, as with Qwen."""

TEMPLATE = Path(__file__).with_name("chat_template.jinja")

_CONFIG = {
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": END,
    "model_max_length": 2048,
    "pad_token": PAD,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}


def build_tokenizer(texts: Iterable[str], folder: Path) -> None:
    """Learn the merges and write tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`.

    Args:
        texts: rendered conversations, so that the template's boilerplate costs few tokens.
        folder: exists.
    """
    control = re.compile("|".join(re.escape(token) for token in SPECIAL + TAGS))
    bpe = Tokenizer(models.BPE())
    # Transformers 5 rebuilds normalizer, pre-tokenizer and decoder from the class name and ignores those in
    # tokenizer.json; these are exactly what Qwen2Tokenizer rebuilds.
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((part for text in texts for part in control.split(text) if part), trainer)
    bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the texts gave {bpe.get_vocab_size()} tokens instead of {VOCAB_SIZE}: use more texts")
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
