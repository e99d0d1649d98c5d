"""A report in a browser: the page that must not raise, what every view of it is checked for, and a run with everything
in it that the report marks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from run_lab import Lab, small_run

from verl_mt.extensions.inspection.report.__main__ import main
from verl_mt.extensions.inspection.report.summary import describe
from verl_mt.extensions.inspection.report.token_columns import TokenColumns

EVIL = (
    "<script>window.harmed=1</script><img src=x onerror='window.harmed=2'></script><script>window.harmed=3</script>"
    "<svg onload=window.harmed=4><iframe srcdoc='<script>parent.harmed=5</script>'></iframe>{{script}}"
)
"""Text of a run that would do harm as markup."""

WEAK_TEXT = """() => {
    // What has less contrast to what is behind it than WCAG AA asks of text (4.5), colours with transparency mixed.
    const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
    const mixed = (colour, under) => {
        for (const style of [`rgb(${under})`, colour]) { canvas.fillStyle = style; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (c) => c.reduce((sum, v, k) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][k], 0);
    const behind = (node) => (
        node ? mixed(getComputedStyle(node).backgroundColor, behind(node.parentElement)) : [0, 0, 0]);
    const weak = new Set();
    for (const node of document.querySelectorAll("main *, header *")) {
        const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || node.closest("svg, .plot, option, :disabled") || !node.checkVisibility()) continue;
        const under = behind(node);
        const [a, b] = [light(mixed(getComputedStyle(node).color, under)), light(under)].sort((x, y) => y - x);
        const contrast = (a + 0.05) / (b + 0.05);
        if (contrast < 4.5) weak.add(`${node.tagName}.${node.className} ${contrast.toFixed(2)}`);
    }
    return [...weak];
}"""

UNLABELLED = """() => [...document.querySelectorAll("input, select, button, [role=region], [role=group]")]
    .filter((node) => !node.labels?.length && !node.getAttribute("aria-label") && !node.textContent.trim())
    .map((node) => node.outerHTML)"""


class Opened:
    """A page that must not raise, and must not load anything from anywhere."""

    def __init__(self, tab, address: str, *, width: int = 1300, scheme: str = "light"):
        self.page = tab
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.heard = {
            "pageerror": lambda error: self.errors.append(str(error)),
            "console": lambda line: line.type == "error" and self.errors.append(line.text),
            "request": lambda request: self.asked.append(request.url),
        }
        for event, hear in self.heard.items():
            self.page.on(event, hear)
        self.page.goto(address)
        self.page.wait_for_selector("html[data-opened]")

    def __enter__(self):
        return self.page

    def __exit__(self, kind, error, trace):
        self.page.goto("about:blank")  # nothing of this page is left, and what it raised until now is known
        for event, hear in self.heard.items():
            self.page.remove_listener(event, hear)
        if kind is None:
            assert self.errors == []
            allowed = re.compile(r"file:|data:|blob:|about:blank|http://127\.0\.0\.1:")
            assert [url for url in self.asked if not allowed.match(url)] == []


def planted_run(folder: Path) -> Lab:
    """Four steps; planted in the last one: a cut-off rollout, a mismatch, large ratios, a tool that failed."""
    lab = small_run(folder, steps=3, prompts=4, samples=4)
    rows = [lab.row(lab.trajectory(4, p, s), 4) for p in range(4) for s in range(4)]
    rows[1] |= {"status": "truncated", "stop_reason": "response_length", "reward": -1.0}
    rows[2]["sanity"] = {
        "cause": "retokenized", "causes": ["retokenized"], "recorded": "a|b", "rendered": "ab", "start": 9,
        "spans": [{"cause": "retokenized", "start": 9, "end": 11, "recorded": "a|b", "rendered": "ab", "record": 0}],
    }  # fmt: skip
    turns = rows[3]["records"][0]["turns"]
    edge = next(t["end"] for t in turns if t["kind"] == "observation")
    record = rows[3]["records"][0]
    record["old_log_probs"][edge] = record["rollout_log_probs"][edge] + math.log(4)
    record["clipped"] = [edge]
    rows[4]["tool_calls"][0] |= {"failure": "tool", "latency_s": 0.25}
    rows[4]["counters"]["tools/search/errors"] = 1.0
    rows[5] |= {"data_source": "other", "ground_truth": None}
    lab.write(4, rows)
    lab.metrics(4)
    (lab.folder / "metrics.jsonl").write_text(
        "".join(dict.fromkeys((lab.folder / "metrics.jsonl").read_text().splitlines(keepends=True)))
    )
    lab.texts()
    main([str(lab.folder)])
    return lab


def address(lab: Lab) -> str:
    return (lab.folder / "report.html").as_uri()


def prompt_of(lab: Lab, place: int) -> str:
    """What the address calls the prompt of a row of the last step."""
    row = json.loads((lab.folder / "rollouts" / "step_000004.jsonl").read_text().splitlines()[place])
    return describe(row, TokenColumns(), {})[0]["prompt"]
