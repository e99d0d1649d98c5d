"""Tokenizer, template, end of turn, tools, calls that are read back, interactions."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mt.chat.parser_fit import require_parser, written_call
from verl_mt.chat.parsers import get_parser
from verl_mt.interactions.registry import load_interactions
from verl_mt.rollout.limits import is_multi_turn
from verl_mt.trainer import build_rollout
from verl_mt.trainer.doctor.findings import Note, error, ok, warning
from verl_mt.trainer.doctor.subject import Subject

_ROLLOUT = "actor_rollout_ref.rollout"


def template(subject: Subject) -> Iterator[Note]:
    """Tokenizer and chat template load, and can render what the run asks of them."""
    chat = subject.chat = build_rollout.build_chat(subject.config)
    history = chat.capabilities.history
    words = f"rewrites history: {', '.join(history)}" if history else "only appends (measured on three plain turns)"
    yield ok(f"{type(chat.tokenizer).__name__} with {len(chat.tokenizer)} tokens; the template {words}")
    if chat.capabilities.uses_clock:
        yield warning(
            "the chat template reads the clock: the prompts of two days differ, and a resumed run is another one",
            "give the date as actor_rollout_ref.model.template_kwargs, or a custom_chat_template without it",
        )


def stop_tokens(subject: Subject) -> Iterator[Note]:
    """Turns end where the template says, and what ends them besides exists."""
    chat, rollout = subject.known_chat, subject.rollout
    ends = chat.stop_token_ids
    if not ends:
        yield error(
            "neither the template nor the model's generation_config names a token that ends a turn: every turn would "
            "be cut by length",
            f"set {_ROLLOUT}.stop_token_ids, or repair the model folder's generation_config.json (eos_token_id)",
        )
        return
    size = len(chat.tokenizer)
    unknown = [i for i in rollout.stop_token_ids if not 0 <= i < size]
    if unknown:
        yield error(
            f"{_ROLLOUT}.stop_token_ids: {unknown} are no tokens of this tokenizer, which has {size}",
            "give ids of this tokenizer; tokenizer.convert_tokens_to_ids finds them",
        )
    for text in rollout.stop:
        if any(text in chat.decode([i]) for i in ends):
            yield warning(
                f"{_ROLLOUT}.stop holds {text!r}, which is the text of a token that ends turns anyway",
                "leave it out: looking for strings costs time at every token",
            )
    written = ", ".join(f"{chat.decode([i])!r} ({i})" for i in sorted(ends)[:4])
    yield ok(f"a turn ends at {written}")


def tools(subject: Subject) -> Iterator[Note]:
    """The YAML's tools are made."""
    found = subject.tools = build_rollout.build_tools(subject.config)
    if found is None:
        yield ok("none are configured")
        return
    yield ok(", ".join(found.names))


def tool_calls(subject: Subject) -> Iterator[Note]:
    """A call as the template writes it is read back by the parser."""
    rollout, chat = subject.rollout, subject.known_chat
    driven = rollout.custom_generate_function_path or rollout.agent_function_path
    if subject.tools is None or driven or not is_multi_turn(subject.config):
        yield ok("no calls to read" if driven is None else "the function of your own reads them")
        return
    name = rollout.multi_turn.tool_parser
    note = require_parser(chat, name, get_parser(name))
    if note is not None:
        yield warning(note, f"give {_ROLLOUT}.multi_turn.tool_parser that reads the form your model writes")
        return
    written = written_call(chat)
    how = "a grammar that a prompt teaches" if written is None else "a call that the template writes comes back whole"
    yield ok(f"{name}: {how}")


def interactions(subject: Subject) -> Iterator[Note]:
    """The YAML's interactions are made."""
    path = subject.rollout.interaction_config_file
    subject.interactions = load_interactions(path) if path else {}
    yield ok(", ".join(subject.interactions) or "none are configured")
