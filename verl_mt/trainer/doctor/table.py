"""The findings as a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_mt.trainer.doctor.findings import Finding

_LOOKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
    "skipped": ("-", "dim"),
}


def show(findings: Sequence[Finding], console: Console | None = None) -> int:
    """Print them. Returns the exit status: 2 with errors, else 0."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=160))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for found in findings:
        word, style = _LOOKS[found.status]
        text = Text(found.text, style="dim" if found.status == "skipped" else "")
        if found.fix:
            text.append(f"\n-> {found.fix}", style="cyan")
        table.add_row(Text(word, style=style), found.check, text)
    console.print(table)
    counts = Counter(found.status for found in findings)
    console.print(
        f"{counts['error']} error(s), {counts['warning']} warning(s), {counts['skipped']} skipped, {counts['ok']} ok"
    )
    return 2 if counts["error"] else 0
