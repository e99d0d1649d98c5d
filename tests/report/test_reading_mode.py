"""A long conversation to read, every metric to draw, and two configurations to compare: in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from page_lab import UNLABELLED, WEAK_TEXT, Opened, address
from run_lab import Lab, small_run

from verl_mt.data.run_files import append_metrics
from verl_mt.data.trajectory import Trajectory, TrajectoryRecord
from verl_mt.extensions.inspection.report.__main__ import main

pytestmark = pytest.mark.slow

TURNS, FAILED = 80, (7, 40, 41)


def long_conversation(lab: Lab) -> Trajectory:
    """80 turns with a call in each but the last; three calls fail."""
    trajectory = lab.trajectory(1, 0, 0)
    record, encode = TrajectoryRecord(), lab.vocabulary.encode
    messages, calls = trajectory.messages[:2], []
    record.append_given(encode("<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"), kind="prompt", turn=0)
    for turn in range(1, TURNS + 1):
        text = f"turn {turn} says {lab.say(12)}"
        ids = encode(f"{text}<|im_end|>")
        record.append_sampled(ids, [-0.5] * len(ids), [0] * len(ids), turn=turn)
        if turn == TURNS:
            messages.append({"role": "assistant", "content": text})
            break
        arguments, number = {"query": lab.say(3)}, f"call_{turn}"
        function = {"id": number, "type": "function", "function": {"name": "search", "arguments": arguments}}
        answer = f"answer {turn}: {lab.say(30)}"
        messages.append({"role": "assistant", "content": text, "tool_calls": [function]})
        messages.append({"role": "tool", "content": answer, "tool_call_id": number, "name": "search"})
        calls.append({
            "turn": turn, "name": "search", "call_id": number, "arguments": arguments,
            "failure": "tool" if turn in FAILED else None, "latency_s": 0.25, "step_reward": 0.0,
        })  # fmt: skip
        record.append_given(
            encode(f"\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n"), kind="observation", turn=turn
        )
    trajectory.messages, trajectory.tool_calls, trajectory.records = messages, calls, [record]
    trajectory.num_turns = TURNS
    return trajectory


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("runs") / "long")
    lab.config()
    lab.metrics(4)
    lab.write(1, [lab.row(long_conversation(lab), 1)])
    lab.texts()
    main([str(lab.folder)])
    return lab


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
def test_a_conversation_of_80_turns_is_read_folded_and_walked(browser, long_run, width, scheme):
    with Opened(
        browser, address(long_run) + "#/rollout/0/s000001.00000.00?view=messages", width=width, scheme=scheme
    ) as page:
        page.wait_for_selector(".reading")
        assert page.locator(".reading > details").count() == 2 + 2 * TURNS - 1
        assert page.locator(".reading").evaluate("node => node.querySelectorAll('*').length") < 2500
        assert "<|im_start|>" not in page.locator(".reading").inner_text()
        assert page.locator(".stream").count() == 0
        button = page.get_by_role("button", name="Next failed call")
        assert button.inner_text() == "Next failed call (3)"
        for place, turn in enumerate((*FAILED, FAILED[0])):
            button.click()
            assert page.locator(".here strong").inner_text() == f"assistant · turn {turn}"
            assert page.locator(".here").evaluate("node => node.getBoundingClientRect().top") < 450
            assert f"({place % 3 + 1} of 3)" in button.inner_text()
        assert "the tool's fault" in page.locator(".here .call.failed").inner_text()
        page.get_by_role("button", name="Fold all", exact=True).click()
        assert page.locator(".reading > details[open]").count() == 0
        assert page.evaluate("document.documentElement.scrollHeight") < 14_000
        if width < 900:
            page.locator(".outline summary").click()
        page.locator(".outline button", has_text="turn 33 says").click()
        assert page.locator(".reading > details[open] strong").all_text_contents() == ["assistant · turn 33"]
        page.get_by_role("button", name="Unfold all").click()
        assert page.locator(".reading > details:not([open])").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate(WEAK_TEXT) == [] and page.evaluate(UNLABELLED) == []
        page.get_by_role("button", name="First trained token").click()
        assert page.locator(".t.chosen").count() == 1 and page.locator(".reading").count() == 0
        page.get_by_role("button", name="Messages", exact=True).click()
        assert page.locator(".reading").count() == 1 and page.locator(".stream").count() == 0


def metrics_run(folder: Path) -> Lab:
    lab = small_run(folder, steps=1)
    for step in range(2, 31):
        append_metrics(
            lab.folder / "metrics.jsonl",
            {
                "step": step, "reward/mean": float(step % 2), "reward/form": 0.5, "reward/answer": 0.25,
                "tools/search/hits": 3.0, "tools/search/calls": 8.0, "tools/search/latency_s": 0.2,
                "val/openai/gsm8k/accuracy": 0.5, "val/math/accuracy": 0.25, "odd/number": 1.0,
            },
        )  # fmt: skip
    return lab


def titles(page) -> list[str]:
    return page.locator("#curves .chart h3").all_text_contents()


def test_every_metric_is_drawn_and_smoothed(browser, tmp_path):
    lab = metrics_run(tmp_path / "run")
    main([str(lab.folder)])
    with Opened(browser, address(lab)) as page:
        page.wait_for_selector(".chart .plot svg")
        assert {"Parts of the reward", "Accuracy per data source", "Tool search", "Time per tool call"} <= set(
            titles(page)
        )
        parts = page.locator("figure", has_text="Parts of the reward").locator(".lines .sign").all_text_contents()
        assert parts == ["answer", "form"]
        sources = page.locator("figure", has_text="share solved, sampled").locator(".lines .sign").all_text_contents()
        assert sources == ["math", "openai/gsm8k"]
        page.fill("#metrics-with", "ODD/")
        assert titles(page)[-1] == "odd/number"
        page.fill("#metrics-with", "search")
        assert titles(page)[-3:] == [f"tools/search/{name}" for name in ("errors", "hits", "latency_s")]
        page.select_option("#smooth", "10")
        page.locator(".chart .plot").first.scroll_into_view_if_needed()
        page.locator(".chart .plot").first.locator("svg.main-svg").first.wait_for()
        assert page.input_value("#metrics-with") == "search" and page.input_value("#smooth") == "10"
        lines = page.locator(".chart .plot").first.evaluate("node => node.data.map((trace) => [...trace.y])")
        assert len(lines) == 2 and set(lines[0][1:]) == {0.0, 1.0} and lines[1][-1] == pytest.approx(0.5)


def test_the_keys_in_which_two_runs_differ_are_a_table(browser, tmp_path):
    labs = [small_run(tmp_path / name, steps=1) for name in ("one", "two")]
    settings = yaml.safe_load((labs[1].folder / "config.yaml").read_text())
    settings["trainer"]["total_training_steps"] = 9
    settings["data"] = {"train_files": "mine.jsonl", "system": None}
    (labs[1].folder / "config.yaml").write_text(yaml.safe_dump(settings))
    out = tmp_path / "both.html"
    assert main([*(str(lab.folder) for lab in labs), "--out", str(out)]) == 0
    with Opened(browser, out.as_uri(), width=390) as page:
        page.get_by_role("link", name="Compare their configurations").click()
        page.wait_for_selector(".settings")
        rows = [row.locator("th, td").all_text_contents() for row in page.locator(".settings tbody tr").all()]
        assert rows == [
            ["trainer.total_training_steps", "4", "9"],
            ["data.system", "not set", "null"],
            ["data.train_files", "not set", "mine.jsonl"],
        ]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
