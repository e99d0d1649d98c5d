"""Draws `docs/images/concurrency.svg` (`python docs/site/concurrency.py`): threads and processes of a run."""

from __future__ import annotations

from pathlib import Path

from data_flow import EDGE, FILL, INK, SOFT, arrow_head, path, text

OUT = Path(__file__).resolve().parents[1] / "images" / "concurrency.svg"
WIDTH, HEIGHT, BOX, TALL = 960, 585, 196, 76

BOXES = {
    "main": (130, 100, "train", "main thread", "PPOTrainer.step;", "trains, unless ranks do"),
    "rollout": (480, 100, "rollout", "thread rollout", "event loop: runner, drivers,", "sessions, engine clients"),
    "engine": (830, 100, "rollout", "verl_mt-local-engine", "thread: the local engine", "samples, a step at a time"),
    "writers": (130, 275, "data", "rollout rows, tracker …", "threads: write Parquet,", "send metrics"),
    "sanity": (363, 275, "data", "sanity", "thread: the sanity check", "of a finished conversation"),
    "user": (597, 275, "user", "your code", "a loop thread per object,", "a thread per plain call"),
    "helpers": (830, 275, "user", "mcp, sandbox", "threads: MCP clients' loop,", "starter of interpreters"),
    "ranks": (130, 480, "train", "rank processes", "main thread: RankWorker", "collectives between ranks"),
    "engines": (363, 480, "rollout", "engine processes", "SGLang, a loop each", "beside ranks or apart"),
    "workers": (597, 480, "rollout", "rollout workers", "a loop each: runner,", "drivers, your code"),
    "servers": (830, 480, "user", "tool processes", "MCP servers,", "interpreters for model code"),
}
THREADS = (
    "rollout", "verl_mt-local-engine", "rollout rows", "tracker ", "sanity", "mcp", "sandbox",
    "rollout worker, reading", "rollout worker, writing",
)  # fmt: skip
"""Names of threads in the code that the picture shows. A test looks for them."""
ARROWS = (
    ("M230 85 L380 85", "coroutines", 305, 78, False),
    ("M380 115 L230 115", "queue of groups", 305, 131, False),
    ("M580 100 L730 100", "inbox, futures", 655, 93, True),
    ("M130 140 L130 235", "queues", 155, 180, False),
    ("M430 140 L380 235", "executor", 375, 190, True),
    ("M530 140 L580 235", "futures", 582, 190, True),
    ("M697 275 L730 275", "", 0, 0, True),
    ("M30 100 L20 100 L20 480 L30 480", "", 0, 0, False),
    ("M480 140 L480 375 L385 375 L385 440", "socket, HTTP or Ray", 404, 367, True),
    ("M480 375 L575 375 L575 440", "rollout worker, reading and writing: socket; or Ray", 632, 367, False),
    ("M830 315 L830 440", "pipes, HTTP", 868, 375, True),
    ("M230 480 L263 480", "", 0, 0, False),
    ("M463 480 L497 480", "", 0, 0, True),
)


def draw() -> str:
    """The picture as text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Threads and processes of a run, and the queues, pipes and collectives between them">',
        arrow_head(),
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
        f'<rect x="10" y="10" width="{WIDTH - 20}" height="325" rx="10" fill="#fafafa" stroke="{SOFT}"/>',
        text(110, 32, "the trainer's process", 13, SOFT, "600"),
        text(130, 428, "other processes (if used)", 13, SOFT, "600"),
        text(56, 375, "Ray calls", 11, SOFT),
        text(247, 536, "weights: shared memory, CUDA IPC or a broadcast", 11, SOFT),
        text(480, 555, "requests of workers: HTTP or Ray", 11, SOFT),
    ]
    for line, words, x, y, both in ARROWS:
        parts.append(path(line, both))
        if words:
            parts.append(text(x, y, words, 11, SOFT))
    parts += [_box(*box) for box in BOXES.values()]
    return "\n".join([*parts, "</svg>", ""])


def _box(x: int, y: int, kind: str, title: str, *below: str) -> str:
    left, top = x - BOX // 2, y - TALL // 2
    lines = "".join(text(x, y + 6 + 17 * k, words, 11, SOFT) for k, words in enumerate(below))
    return (
        f'<rect x="{left}" y="{top}" width="{BOX}" height="{TALL}" rx="8" fill="{FILL[kind]}" stroke="{EDGE[kind]}" '
        f'stroke-width="1.5"/>{text(x, y - 14, title, 14, INK, "600")}{lines}'
    )


if __name__ == "__main__":
    OUT.write_text(draw())
