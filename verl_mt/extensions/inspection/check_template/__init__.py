"""What a chat template can do, before any training step: `verl-mt doctor --only template --model PATH`.

Without `--conversations` it prints a report: whether the template only appends, the roles and tool-call shapes that
it can render, what happens to reasoning, what the sanity check says about sample conversations, and each refused
shape with its cause. With `--conversations FILE.jsonl` it prints those conversations, trained tokens in colour.
`--json` writes one JSON object per line to stdout instead, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from verl_mt.errors import ConfigError, VerlMTError


def main(argv: Sequence[str] | None = None) -> int:
    """`run` under its old name. Returns its exit status."""
    print("python -m verl_mt.check_template is deprecated: write verl-mt doctor --only template", file=sys.stderr)
    return run(sys.argv[1:] if argv is None else argv)


def run(argv: Sequence[str]) -> int:
    """Write the report, or the conversations. Returns the exit status: 0, or 2 for anything that cannot be used (one
    error on stderr)."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-mt doctor --only template",
        description="Say what a chat template can do, or show conversations as ids with the trained tokens marked.",
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="model folder, hub name, or verl_mt://tiny")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file to use instead of the model's template")
    parser.add_argument(
        "--conversations",
        metavar="FILE.jsonl",
        help="one conversation per line: prompt, tools, steps, template_kwargs (as verl_mt.chat.replay takes them)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line on stdout, for programs")
    parser.add_argument(
        "--template-kwargs", metavar="JSON", help='variables of the template: {"enable_thinking": false}'
    )
    parser.add_argument("--revision", help="revision of the hub repository")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of the model's repository")
    return parser


def _run(args: argparse.Namespace) -> None:
    from verl_mt.chat import load_chat
    from verl_mt.extensions.inspection.check_template.report import (
        build_report,
        print_report,
        read_conversations,
        replay_line,
        show,
    )

    chat = load_chat(
        args.model,
        revision=args.revision,
        custom_chat_template=args.chat_template,
        template_kwargs=_template_kwargs(args.template_kwargs),
        trust_remote_code=args.trust_remote_code,
    )
    if args.conversations is None:
        report = build_report(chat, args.model)
        if args.json:
            _write_json(report.to_row())
        else:
            print_report(report)
        return
    for conversation in read_conversations(args.conversations):
        result = replay_line(chat, conversation)
        if args.json:
            _write_json(result.to_row())
        else:
            show(result)


def _template_kwargs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--template-kwargs: {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--template-kwargs: expected a JSON object, got {text!r}")
    return value


def _write_json(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    sys.stdout.flush()
