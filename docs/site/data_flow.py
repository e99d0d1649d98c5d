"""Draws `docs/images/data_flow.svg` (`python docs/site/data_flow.py`): no library, the same bytes each time."""

from __future__ import annotations

from html import escape
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "images" / "data_flow.svg"
WIDTH, HEIGHT, BOX, TALL = 900, 405, 164, 58
INK, SOFT = "#263238", "#607d8b"
FILL = {"data": "#e8eaf6", "rollout": "#e0f2f1", "user": "#fff3e0", "train": "#fce4ec"}
EDGE = {"data": "#5c6bc0", "rollout": "#26a69a", "user": "#fb8c00", "train": "#ec407a"}

BOXES = {
    "row": (90, 60, "data", "dataset row", "messages, arguments"),
    "prompt": (290, 60, "data", "prompt ids", "chat template, once"),
    "session": (490, 60, "rollout", "RolloutSession", "ids, mask, log-probs"),
    "engine": (705, 60, "rollout", "engine", "local, sglang"),
    "tools": (490, 170, "user", "tools, interaction", "your code"),
    "trajectory": (705, 170, "rollout", "Trajectory", "records, spans, messages"),
    "group": (705, 280, "data", "scored group", "n samples, one prompt"),
    "batch": (490, 280, "train", "batch", "one row per record"),
    "advantages": (290, 280, "train", "advantages", "old, ref log-probs"),
    "loss": (90, 280, "train", "loss", "optimizer step"),
}
ARROWS = (
    ("row", "prompt", False),
    ("prompt", "session", False),
    ("session", "engine", True),
    ("session", "tools", True),
    ("trajectory", "group", False),
    ("group", "batch", False),
    ("batch", "advantages", False),
    ("advantages", "loss", False),
)


def draw() -> str:
    """The picture as text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="The way of a sample: dataset row, prompt, session with engine and tools, trajectory, group, '
        'batch, advantages, loss, weights, engine">',
        arrow_head(),
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
    ]
    parts += [_arrow(*arrow) for arrow in ARROWS]
    # From the end of a conversation down to its trajectory, and from the loss back up to the engine.
    parts.append(path("M552 91 L552 128 L596 128 L596 170 L620 170"))
    parts.append(path("M90 311 L90 385 L845 385 L845 60 L790 60"))
    parts.append(text(467, 377, "new weights, with their version: the next step", 13, SOFT))
    parts += [_box(*box) for box in BOXES.values()]
    return "\n".join([*parts, "</svg>", ""])


def _box(x: int, y: int, kind: str, title: str, below: str) -> str:
    left, top = x - BOX // 2, y - TALL // 2
    return (
        f'<rect x="{left}" y="{top}" width="{BOX}" height="{TALL}" rx="8" fill="{FILL[kind]}" stroke="{EDGE[kind]}" '
        f'stroke-width="1.5"/>{text(x, y - 3, title, 14, INK, "600")}{text(x, y + 16, below, 11, SOFT)}'
    )


def arrow_head() -> str:
    """The end of a `path`."""
    return (
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{SOFT}"/></marker></defs>'
    )


def text(x: int, y: int, words: str, size: int, colour: str, weight: str = "400") -> str:
    """Words around a place."""
    return (
        f'<text x="{x}" y="{y}" font-family="system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif" '
        f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="middle">{escape(words)}</text>'
    )


def _arrow(start: str, end: str, both: bool) -> str:
    (x0, y0), (x1, y1) = BOXES[start][:2], BOXES[end][:2]
    if y0 == y1:
        step = 1 if x1 > x0 else -1
        line = f"M{x0 + step * (BOX // 2 + 2)} {y0} L{x1 - step * (BOX // 2 + 2)} {y1}"
    else:
        line = f"M{x0} {y0 + TALL // 2 + 2} L{x1} {y1 - TALL // 2 - 2}"
    return path(line, both)


def path(line: str, both: bool = False) -> str:
    """A line with an arrow head at its end, or at `both` ends."""
    start = ' marker-start="url(#a)"' if both else ""
    return f'<path d="{line}" fill="none" stroke="{SOFT}" stroke-width="1.6"{start} marker-end="url(#a)"/>'


if __name__ == "__main__":
    OUT.write_text(draw())
