"""What is allowed, runs, and was not meant: keys that were forgotten, rows that are in both files, words of a prompt
that name tools which nobody offers, an answer in the question, a learning rate for a model of another size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from verl_mt.config.schema import DataConfig, explicit_keys
from verl_mt.data.conversation import Message
from verl_mt.data.dataset import DataSource
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, error, ok, warning
from verl_mt.extensions.inspection.doctor.row_contents import doubts, truth_text, words_of
from verl_mt.plugins import listing, suggest
from verl_mt.rollout.drivers import has_own_loop
from verl_mt.rollout.prompts import Prompt

_MODEL = "actor_rollout_ref.model.path"
_SHIPPED = "verl_mt://tiny"
_DEFAULT_TASK = next(f.default for f in fields(DataConfig) if f.name == "train_files")
_SHARE_IN_BOTH = 0.02
"""Of the validation rows: a generator may make one twice."""

_RATES = ((1e6, 3e-6, 3e-4, 2e-3), (1e8, 1e-7, 1e-5, 2e-4), (5e8, 2e-8, 2e-6, 3e-5), (1e10, 1e-8, 1e-6, 2e-5))
"""Parameters, and below which rate nothing happens, with which models of that size usually learn, above which they fall
apart. 1e6: measured with the shipped model (docs/diagnostics.md: 3e-3 ends in zeros). Others: published GRPO and PPO
recipes of full models (DeepSeek-R1 3e-6, DAPO, verl's and TRL's examples 1e-6), and a decade or more around them."""
_ADAPTER_FACTOR = 30.0
"""Low-rank adapters want ten times the rate of the full model (Schulman et al., LoRA Without Regret, 2025)."""
_LARGEST_RATE = 1e-2

_LENGTH = "actor_rollout_ref.rollout.response_length"
_SOLUTION = re.compile(r"(?i)solution|answer|response|completion|rationale|reasoning|worked|explanation|output")
"""Names of columns that hold what a model should write."""
_SENTENCE = re.compile(r"[^.!?\n;]*(?:\.(?=\w)[^.!?\n;]*)*")
_TOOL_WORDS = re.compile(r"(?i)\b(?:tools?|functions?|calls?|calling|invoke)\b")
_QUOTED = r"[`'\"“‘]([A-Za-z_]\w{2,60})(?:\(\w*\))?[`'\"”’]"
_NAMES_TOOLS = tuple(
    map(
        re.compile,
        (
            # the tools `a`, `b` and `c`; call `a`
            r"\b(?i:tools?|functions?|calls?|calling|invoke|use|using)(?:\s+(?:the|an?|are|is|these|named|called))*\s*:?\s*"
            rf"((?:{_QUOTED}(?:\s*,\s*|\s+)(?:(?:and|or|then)\s+)?)*{_QUOTED})",
            rf"({_QUOTED})\s+(?i:tool|function)",
            r"\b(?i:tools|functions)(?:\s+are)?\s*:\s*((?:[a-z_]\w{2,60}(?:\s*,\s*|\s+and\s+))*[a-z_]\w{2,60})\s*$",
            r"(?<![\w<{/.\\$])([A-Za-z]\w*_\w+)(?![\w>}/\\])",
            r"\b(?i:call|calls|calling|invoke)\s+([A-Za-z_]\w{2,60})\s*\(",
            r"\b(?i:tools?|functions?)\s+(?i:named|called)\s+([A-Za-z_]\w{2,60})",
        ),
    )
)
"""In a sentence about tools: what group 1 holds are names of them, with `and` between."""
_GRAMMAR = re.compile(
    r"(?i)(?:tool|function)_?(?:calls?|responses?|name)|name|arguments|parameters|\w*answer\w*|think|json|true|false|null|none"
)
"""Words of the grammars in which calls are written."""


def forgotten(subject: Subject) -> Iterator[Finding]:
    """The model and the rows are the user's own where the rest is. (What the `config.yaml` of a run gave on purpose is
    not known any more.)"""
    config, given = subject.config, explicit_keys(subject.config)
    data, path = config.data, config.actor_rollout_ref.model.path
    if data.train_files == _DEFAULT_TASK and data.train_max_samples < 0:
        yield error(
            "data.train_files is not set: without it the run trains on the default task's made-up arithmetic",
            "name your rows in data.train_files (.parquet, .jsonl or .json). For the default task leave --config-name "
            "out",
        )
    elif data.train_files != _DEFAULT_TASK and path == _SHIPPED and given and _MODEL not in given:
        yield warning(
            f"{_MODEL} is not set: the run would train the shipped model of 0.9M parameters, made for one task, on "
            f"{_named(data.train_files)}",
            f"name your model's folder or hub name; {_MODEL}={_SHIPPED} says that it is meant",
        )
    else:
        yield ok("none: model and rows are named" if _MODEL in given else "none")


def _named(files: Any) -> str:
    return files if isinstance(files, str) else f"{len(files)} data files"


def validation_rows(subject: Subject) -> Iterator[Finding]:
    """What is held out is not trained on."""
    if not subject.val or subject.config.trainer.val_only:
        yield ok("nothing is held out" if not subject.val else "nothing is trained")
        return
    makes_prompts = subject.rollout.environment.is_configured  # then another row is another prompt
    words = (lambda row: repr(row.raw)) if makes_prompts else words_of
    trained = {words(row): row.place for row in subject.train_rows()}
    total = sum(len(source.rows) for source in subject.val)
    both = [(row, place) for s in subject.val for row in s.rows if (place := trained.get(words(row)))]
    if len(both) <= _SHARE_IN_BOTH * total:
        yield ok(f"{len(both)} of {total} prompts are also training prompts" if both else "none is a training row")
        return
    row, place = both[0]
    same = _paths(subject.train) & _paths(subject.val)
    yield warning(
        f"{len(both)} of {total} validation prompts are also training prompts (data.val_files: {row.place} is "
        f"{place} of data.train_files"
        + (f"; both keys name {min(same)}" if same else "")
        + "): accuracy will show what was learnt by heart",
        "hold rows out: give data.val_files rows that are not in data.train_files",
    )


def _paths(sources: Sequence[DataSource]) -> set[str]:
    return {row.file for source in sources for row in source.rows[:1]}


def contents(subject: Subject) -> Iterator[Finding]:
    """Rows differ, have the truth that they need, and no text that a script forgot to fill in."""
    rows = list(subject.train_rows())
    makes_prompts = subject.rollout.environment.is_configured
    found = [] if makes_prompts else [*doubts(rows)]
    for text, fix in found:
        yield warning(text, fix)
    if not found:
        yield ok("the environment reads them" if makes_prompts else f"{len(rows)} rows: no repetitions, no gaps")


def learning_rate(subject: Subject) -> Iterator[Finding]:
    """A rate with which models of this size learn."""
    rate, rank = subject.config.actor_rollout_ref.actor.optim.lr, subject.config.actor_rollout_ref.model.lora_rank
    size = float(sum(p.numel() for p in subject.module.parameters()))
    if rate == 0 or subject.config.trainer.val_only:
        yield ok(f"{rate:g}")
        return
    lowest, usual, highest = _rates(size)
    if rank:
        usual, highest = usual * 10, min(highest * _ADAPTER_FACTOR, _LARGEST_RATE)
    words = f"{size / 1e6:,.1f}M parameters{' behind low-rank adapters' if rank else ''}"
    if lowest <= rate <= highest:
        yield ok(f"{rate:g} for {words}")
        return
    what = "at such a rate a policy falls apart within a few steps" if rate > highest else "nothing will change"
    yield warning(
        f"actor_rollout_ref.actor.optim.lr is {rate:g}, and a model of {words} usually learns with about "
        f"{usual:.0e}: {what}",
        f"set actor_rollout_ref.actor.optim.lr between {lowest:.0e} and {highest:.0e}",
    )


def _rates(size: float) -> tuple[float, float, float]:
    """Lowest, usual and highest rate: between the sizes that are known along straight lines of logarithms."""
    size = min(max(size, _RATES[0][0]), _RATES[-1][0])
    low, high = next((a, b) for a, b in pairwise(_RATES) if size <= b[0])
    share = math.log(size / low[0]) / math.log(high[0] / low[0])
    lowest, usual, highest = (a * (b / a) ** share for a, b in zip(low[1:], high[1:]))
    return lowest, usual, highest


def prompt_words(subject: Subject) -> Iterator[Finding]:
    """The prompts name tools that are offered, and hold neither the answer nor control tokens."""
    found = [
        *_absent_tools(subject),
        *_leaked(subject.prompts),
        *_control_tokens(subject),
        *_long_solutions(subject),
    ]
    yield from found
    if not found:
        yield ok("they name no tool that is not offered, and hold neither the answer nor control tokens")


def _control_tokens(subject: Subject) -> Iterator[Finding]:
    held_out = (row for source in subject.val for row in source.rows)
    rows = [*subject.train_rows(), *held_out]
    having = [(row, found) for row in rows if (found := subject.known_chat.control_text(row.prompt))]
    if having:
        row, found = having[0]
        yield warning(
            f"{len(having)} of {len(rows)} rows hold control tokens in a user's text ({row.place}: "
            f"{listing(map(repr, found))}): the model sees the end of a turn there",
            "take them out of the rows, or set actor_rollout_ref.model.trust_prompts=False to keep them as plain text",
        )


def _absent_tools(subject: Subject) -> Iterator[Finding]:
    if has_own_loop(subject.rollout):
        return  # which offers what it likes
    absent: dict[str, Prompt] = {}
    for prompt in subject.prompts:
        known = set(re.findall(r"\w+", json.dumps(prompt.tools, default=repr)))
        for name in _tools_named(prompt.messages):
            if name not in known:
                absent.setdefault(name, prompt)
    if not absent:
        return
    first = next(iter(absent.values()))
    offered = [schema["function"]["name"] for schema in first.tools]
    hints = "".join({suggest(name, offered) for name in absent}) if len(absent) == 1 else ""
    yield warning(
        f"the system prompt of {first.row.place} names {listing(absent)}, which the run does not "
        f"offer (it offers {listing(offered) if offered else 'no tools'}): a call of it fails{hints}",
        "name the tools as they are called, or add them to actor_rollout_ref.rollout.tool_kwargs.tools_config_file",
    )


def _tools_named(messages: Sequence[Message]) -> list[str]:
    """Names that a system message uses as those of tools."""
    texts = [m["content"] for m in messages if m.get("role") == "system" and isinstance(m.get("content"), str)]
    names = []
    for sentence in (s for text in texts for s in _SENTENCE.findall(text) if _TOOL_WORDS.search(s)):
        for found in (found for pattern in _NAMES_TOOLS for found in pattern.finditer(sentence)):
            names += [name for name in re.findall(r"\b[A-Za-z_]\w{2,}", found[1]) if name not in ("and", "then")]
    return [name for name in dict.fromkeys(names) if not _GRAMMAR.fullmatch(name)]


def _leaked(prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Most prompts hold the row's truth, dressed as an answer."""
    asked = [(p, text) for p in prompts if (text := truth_text(p.row.ground_truth)) is not None]
    held = [(p, where) for p, text in asked if (where := _answer_in(p, text))]
    if not held or len(held) * 2 <= len(asked):
        return
    prompt, where = held[0]
    yield warning(
        f"{len(held)} of {len(asked)} prompts hold their own answer ({prompt.row.place}: "
        f"{where!r}): copying it is all that can be learnt",
        "take the answer out of the prompt column",
    )


def _answer_in(prompt: Prompt, truth: str) -> str | None:
    """The words in which a message that is not the model's gives the answer away."""
    texts = [m["content"] for m in prompt.messages if m.get("role") != "assistant" and isinstance(m["content"], str)]
    said = (
        r"(?i)(?:####|\b(?:answer|solution|result|label|ground truth)\s*(?::|=|is:?)|\\boxed\{|<answer>)"
        rf"\s*[`'\"*]*{re.escape(truth)}(?![\w.]*\w)"
    )
    return next((found[0] for text in texts if (found := re.search(said, text))), None)


def _long_solutions(subject: Subject) -> Iterator[Finding]:
    """Most rows come with a worked solution, and it is longer than a response may be."""
    limit, lengths = subject.rollout.response_length, []
    for prompt in subject.prompts:
        row, truth = prompt.row, truth_text(prompt.row.ground_truth)
        columns = {**row.extra_info, **row.raw}
        texts = [v for k, v in columns.items() if isinstance(v, str) and truth and truth in v and _SOLUTION.search(k)]
        if texts:
            lengths.append((min(len(subject.known_chat.encode_text(text, neutral=True)) for text in texts), row.place))
    over = [found for found in lengths if found[0] > limit]
    if over and len(over) * 2 > len(lengths):
        yield warning(
            f"the solutions in {len(over)} of {len(lengths)} rows are longer than {_LENGTH}={limit}: "
            f"that of {max(over)[1]} has {max(over)[0]} tokens",
            f"raise {_LENGTH}: an answer that is cut before its end earns nothing",
        )
