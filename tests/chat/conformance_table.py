"""The published chat templates as test material, and the page docs/templates.md.

`python tests/chat/conformance_table.py` writes the page. `ENDS` is written by hand, independent of the probe.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_mt.chat import ChatTemplate
from verl_mt.chat.parser_fit import suggest_parser
from verl_mt.chat.template import HARMONY
from verl_mt.errors import TemplateError

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "templates.md"

OWN_VOCABULARY = {
    "Qwen-Qwen2.5-7B-Instruct": "qwen2.5",
    "Qwen2.5-Instruct-ort": "qwen2.5",
    "Qwen-Qwen3-0.6B": "qwen3",
    "Qwen3-ort": "qwen3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "ds-r1-distill-qwen",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3.1",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3.1",
    "mistral-common-v3_spm": "mistral-7b-v3",
    "microsoft-Phi-3-mini-4k-instruct": "phi-3-mini",
    "gpt-oss-ort": "gpt-oss",
    "openai-gpt-oss-120b": "gpt-oss",
}

_END_OF_FAMILY = {
    "<|im_end|>": "Bielik Kimi LFM MiMo MiroThinker Nemotron Hermes Qwen SmolLM3 StepFun Step-3.5 phi-4-ort",
    "<｜end▁of▁sentence｜>": "DeepSeek deepseek-r1",
    "<|eot_id|>": "Llama-3.1-8B-Instruct Llama-3.2 Llama-3.3 functionary firefunction",
    "</s>": "mistral Mistral Ministral",
    "<end_of_turn>": "gemma-2 gemma-3",
    "<turn|>": "gemma-4",
    "<|end|>": "Apriel Phi-3 phi-4-mini gpt-oss",
    "<|END_OF_TURN_TOKEN|>": "Cohere",
    "<|end_of_text|>": "granite",
    "<seed:eos>": "Seed",
    "<|message_sep|>": "GigaChat",
    "<|assistant_end|>": "Apertus",
    "<sep>": "Reka",
    "<|user|>": "GLM",
    "": "rwkv",
}
_END_BEFORE_TOOL = {
    "<|observation|>": "GLM",
    "<|tools_suffix|>": "Apertus",
    "<|eom_id|>": "functionary-medium-v3.1",
    "<|call|>": "openai-gpt-oss",
    "<|tool_response>": "google-gemma-4-31B-it gemma-4-ort",
    "": "c4ai-command-r-plus",
}


def _lookup(table: dict[str, str], name: str) -> str | None:
    found = [(len(part), end) for end, parts in table.items() for part in parts.split() if part in name]
    return max(found)[1] if found else None


def end_before_user(name: str) -> str:
    """The literal that ends an assistant turn before a user's; for GLM the header that does."""
    if name.startswith(("SmolLM3", "HuggingFaceTB")):
        return "<|im_end|>"
    end = _lookup(
        _END_OF_FAMILY,
        name.replace("NousResearch-Hermes-3-Llama-3.1-8B", "Hermes").replace("mistral-Devstral", "mistral"),
    )
    assert end is not None, name
    return end


def end_before_tool(name: str) -> str:
    """The same before a tool's result."""
    if name == "google-gemma-4-31B-it-interleaved":
        return "<turn|>"
    end = _lookup(_END_BEFORE_TOOL, name)
    return end_before_user(name) if end is None else end


CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<seed:[a-z_:]+>|</seed:[a-z_:]+>|<sep>"
    r"|</?(?:start_of_turn|end_of_turn|think|tool_call|tool_response|sop)>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|TOOL_CONTENT|ARGS|CALL_ID|THINK|gMASK)\]"
)
"""What looks like a control token in a template's source."""

NON_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def generic_tokenizer(source: str, end: str = "", eos: str = "") -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer whose added tokens include every control literal of a template.

    It has merges across line ends and spaces, so that text encoded in the wrong pieces gives other ids.
    """
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [
        ("Ċ", "Ċ"),
        ("Ġ", "Ġ"),
        (">", "Ċ"),
        ("t", "h"),
        ("th", "e"),
        ("Ċ", "n"),
        ("Ġ", "Ċ"),
        ("l", "l"),
        ("e", "ll"),
    ]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    eos = eos or (end if end and "user" not in end else "</s>")
    literals = sorted({*CONTROL.findall(source), eos, "<s>", *([end] if end else [])})
    if "<|channel|>" in literals:
        literals = sorted({*literals, *HARMONY})
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in literals if t not in NON_SPECIAL]
    )
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in literals if t in NON_SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos, chat_template=source)


@cache
def generic_template(file: Path) -> ChatTemplate:
    """One published template on its generic tokenizer."""
    return ChatTemplate(generic_tokenizer(file.read_text(encoding="utf-8"), end_before_user(file.stem)))


def template_files(shared_data: Path) -> list[Path]:
    return sorted((shared_data / "templates").glob("*.jinja"), key=lambda f: f.stem.lower())


PITFALLS = {
    "P10": "The template raises on this order of roles.",
    "P13": "No form of call arguments is rendered correctly: they are escaped, encoded twice, or refused.",
    "P14": "Null content: transformers drops the key and the template needs it.",
    "P15": "The template leaves out the turn that is being answered.",
    "P16": "The template leaves out a message, a call or the tool list without an error, or raises on it.",
    "P18": "The template writes the end of a turn in several forms.",
    "P23": "The tokenizer class gives other ids than the folder's `tokenizer.json`.",
    "P24": "The template cannot run: the sandbox forbids it, or it needs a tool list or its own variable.",
    "P25": "The template does not end: a loop in it is stopped after 3 seconds of processor time.",
    "P26": "A sampled turn is not recorded as the template writes it: the engine stops inside it, or other ids follow.",
}
"""The causes that a refusal can carry."""

_SHAPES = (
    ("user_turn", "user turns"),
    ("system", "system"),
    ("no_tools", "prompt without tools"),
    ("tools", "tool schemas"),
    ("tool_result", "tool results"),
    ("tool_call", "calls in history"),
    ("parallel_calls", "parallel calls"),
    ("text_with_call", "text beside a call"),
)


def template_table(files: list[Path]) -> str:
    """The page: one row per template, each shape supported or refused with its cause."""
    heads = ["template", *(title for _, title in _SHAPES), "arguments", "tool parser", "remarks"]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for file in files:
        rows.append("| " + " | ".join(_row(file)) + " |")
    causes = "\n".join(f"- **{number}**: {text}" for number, text in PITFALLS.items())
    return f"{_INTRODUCTION}\n{causes}\n\n" + "\n".join(rows) + "\n"


def _row(file: Path) -> list[str]:
    try:
        template = generic_template(file)
        capabilities = template.capabilities
        prefilled = template.prefilled_reasoning
    except TemplateError as error:
        return [file.stem, *[f"refused: {error.cause}"] * len(_SHAPES), "", "", str(error.__cause__)[:80]]
    cells = [
        "yes" if capabilities.supports(shape) else f"refused: {capabilities.problems[shape].cause}"
        for shape, _ in _SHAPES
    ]
    remarks = [
        text
        for holds, text in (
            (capabilities.append_only, "append-only"),
            (capabilities.rewrites_calls, "rewrites turns with calls"),
            (capabilities.rewrites_prompt, "tools move to the last user turn"),
            (
                capabilities.drops_reasoning or capabilities.reasoning_content == "dropped_after_user",
                "drops old reasoning",
            ),
            (prefilled, "reasoning is prefilled"),
            (capabilities.merges_tool_messages, "merges tool messages"),
            (capabilities.uses_clock, "shows the date"),
            (capabilities.short_call_ids, "call ids of nine characters"),
            *((key in capabilities.problems, f"sampled {key}s refused: P26") for key in ("answer", "call")),
        )
        if holds
    ]
    return [file.stem, *cells, capabilities.arguments or "", suggest_parser(template) or "", ", ".join(remarks)]


_INTRODUCTION = """# Chat templates

<!-- Written by tests/chat/conformance_table.py; a test compares it with the code. -->

Check your model's chat template before you train:

```bash
verl-mt doctor --only template --model PATH
```

The table below has the results for published templates. Each was probed in transformers' Jinja sandbox, on a small
tokenizer with the template's control tokens.

## Read the table

- `yes`: the template renders this shape, and every token is accounted for exactly.
- `refused`: it does not, for the [cause](#causes) in the cell. If your run needs a refused shape, it stops before its
  first step and names the cause. A run may need user turns, tool schemas, tool results, or a prompt without tools.
- *Calls in history*, *parallel calls* and *text beside a call* are about full renderings only. A rollout keeps the
  model's call as it was sampled. So tool results follow it, even if the template cannot write the call again.
- *Arguments*: the form of call arguments that the template needs.
- *Tool parser*: the [parser](tool_parsers.md) that reads the template's calls.

Remarks:

- *append-only*: the record of three plain turns without reasoning (`verl_mt.chat.replay`) equals the template's
  rendering of the same messages, id by id up to the last end of turn. A template without this remark renders plain
  turns differently than they were sampled, or needs reasoning.
- *drops old reasoning*, *rewrites turns with calls*, *tools move to the last user turn*: the template rewrites history
  in full renderings. Such a template may be append-only too. A rollout never rewrites its record.

With `multi_turn.use_inference_chat_template: True`, a conversation stays in one record only if the template does none
of these three. `python -m verl_mt.doctor` tells you for your run.

## How a template is probed

When a model is loaded, sampled turns are replayed:

- plain answers, answers with reasoning, and an empty answer
- one call and two calls, calls with reasoning or text
- turns after a user turn and after a tool result.

The template's rendering minus the generation prompt stands for the sampled turn. The engine's stop tokens must not cut
it. The tokens that a rollout records behind it must equal the template's, id by id. If your run needs a shape that does
not reproduce, it stops with P26.

## Causes
"""


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else REPO.parent / "shared" / "data"
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(template_table(template_files(data)), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
