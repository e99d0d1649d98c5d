"""The report's prompts in a real browser: one prompt through steps and runs, two samples beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page_lab import Opened, address, planted_run
from run_lab import Lab

from verl_mt.extensions.inspection.report.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Lab:
    return planted_run(tmp_path_factory.mktemp("runs") / "planted")


def marks(page, tag: str) -> list[str]:
    return page.locator(f".sides {tag}").all_text_contents()


def validated(folder: Path, answers: dict[int, list[str]], *, rows: list[int], system: str = "Be brief.") -> Lab:
    """Validations: at each step the answers to the questions of these rows, in their order; an answer of row k is right
    that ends with k."""
    lab = Lab(folder)
    lab.config()
    for step, said in answers.items():
        lab.metrics(step)
        trajectories = [
            lab.trajectory(step, place, 0, question=f"What is in box {row}?", said=text)
            for place, (row, text) in enumerate(zip(rows, said, strict=True))
        ]
        for row, trajectory in zip(rows, trajectories):
            trajectory.ground_truth = str(row)
            trajectory.reward = float(trajectory.messages[-1]["content"].endswith(f" {row}"))
            trajectory.messages[0]["content"] = system
        lab.write(step, [lab.row(t, step) for t in trajectories], "val")
    lab.texts()
    (folder / "FINISHED").write_text("")
    return lab


def test_a_prompt_is_followed_through_the_steps_with_a_diff(browser, tmp_path):
    answers = {0: ["there is a big 9", "1"], 5: ["there is a big 7", "no 1"], 9: ["there is a small 7", "a 5"]}
    lab = validated(tmp_path / "run", answers, rows=[7, 1])
    main([str(lab.folder)])
    with Opened(browser, address(lab)) as page:
        page.get_by_role("link", name="Prompts through the steps").click()
        said = page.locator(".words").inner_text()
        assert said.startswith(
            "0 → 0.5 (+0.5, standard error 0.5) over the 2 prompts in more than one step: 1 better, 0 worse"
        )
        page.fill("#p-text", "box 7")
        assert page.locator("td.c-change").all_text_contents() == ["+1"]
        assert page.locator("td.c-truth").all_text_contents() == ["7"]
        page.locator("td.c-question a").click()
        page.wait_for_selector(".history")
        assert page.locator(".history td.samples a").all_text_contents() == ["0", "1", "1"]
        assert (marks(page, "del")[-1], marks(page, "ins")[-1]) == ("big 9", "small 7")
        earlier = page.get_by_role("button", name="right: Earlier step")
        earlier.focus()
        page.keyboard.press("Enter")
        page.wait_for_function("() => [...document.querySelectorAll('.sides ins')].at(-1)?.textContent === '7'")
        assert marks(page, "del")[-1] == "9"
        page.select_option("#side-right", label="val, step 9, sample 1 of 1: reward 1")
        page.wait_for_function("() => [...document.querySelectorAll('.sides ins')].at(-1)?.textContent === 'small 7'")
        page.get_by_role("button", name="Swap left and right").click()
        page.wait_for_function("() => [...document.querySelectorAll('.sides del')].at(-1)?.textContent === 'small 7'")
        assert page.locator(".both tr.differs th").all_text_contents()[:3] == ["rollout", "step", "reward"]


def test_two_samples_of_a_group_are_compared(browser, run):
    rows = [json.loads(line) for line in (run.folder / "rollouts" / "step_000004.jsonl").read_text().splitlines()]
    with Opened(browser, address(run) + "#/rollout/0/s000004.00002.00") as page:
        page.wait_for_function("() => document.querySelectorAll('.group .compare').length === 3")
        page.get_by_role("link", name="Compare with this one").nth(1).click()
        page.wait_for_selector(".both")
        ids = page.locator(".both tbody tr").first.locator("td").all_text_contents()
        assert ids == ["s000004.00002.00", "s000004.00002.02"]
        for tag, row in (("del", rows[8]), ("ins", rows[10])):
            own = {word for mark in marks(page, tag) for word in mark.split()}
            assert own & set(row["messages"][-1]["content"].split())
        page.locator(".both a").last.click()
        page.wait_for_selector(".reading")
        page.get_by_role("link", name="This prompt", exact=True).click()
        page.wait_for_selector(".both")


def test_two_runs_are_compared_prompt_by_prompt_whatever_the_order_of_their_rows(browser, tmp_path):
    one = validated(tmp_path / "one", {0: ["a 9", "b 9", "c 9"], 5: ["a 7", "b 9", "c 4"]}, rows=[7, 1, 4])
    two = validated(tmp_path / "two", {6: ["b 1", "a 8", "x 6"]}, rows=[1, 7, 6], system="Be clever.")
    out = tmp_path / "both.html"
    assert main([str(one.folder), str(two.folder), "--out", str(out)]) == 0
    with Opened(browser, out.as_uri()) as page:
        page.get_by_role("link", name="Compare the runs prompt by prompt").click()
        said = page.locator(".words").inner_text()
        assert "over the 2 prompts in both one and two: 1 better in two, 1 worse, 0 the same. 2 more are not." in said
        shown = [page.locator(f"td.c-{name}").all_text_contents() for name in ("truth", "before", "after", "change")]
        assert [row[:2] for row in zip(*shown)] == [("7", "1"), ("1", "0"), ("4", "1"), ("6", "–")]
        assert shown[2:] == [["0", "1", "–", "1"], ["−1", "+1", "–", "–"]]
        page.select_option("#p-of", "all")
        assert page.locator("td.c-before").all_text_contents()[:2] == ["0.5", "0"]
        page.locator("td.c-question a").first.click()
        page.wait_for_selector(".both")
        assert "The prompts differ" in page.locator("main").inner_text()
        assert (marks(page, "del")[0], marks(page, "ins")[0]) == ("brief", "clever")
        assert page.locator(".both thead th").all_text_contents() == ["left, one", "right, two"]


def test_rows_that_ask_the_same_are_one_prompt_only_where_the_same_is_right(browser, tmp_path):
    lab = Lab(tmp_path / "run")
    lab.config()
    rows = []
    for place, (question, truth) in enumerate([("Play.", None), ("Play.", None), ("2 + 2?", "4"), ("2 + 2?", "4")]):
        trajectory = lab.trajectory(1, place, 0, question=question)
        trajectory.ground_truth = truth
        rows.append(lab.row(trajectory, 1))
    lab.write(1, rows)
    main([str(lab.folder)])
    with Opened(browser, address(lab) + "#/prompts") as page:
        assert sorted(page.locator("td.c-question").all_text_contents()) == ["2 + 2?", "Play.", "Play."]


def test_a_diff_loses_nothing_and_marks_only_what_differs(browser, run):
    with Opened(browser, address(run)) as page:
        found = page.evaluate("""() => {
            let seed = 1;
            const words = ["a", "bb", " ", "\\n", "7", ".", "a", "a", "a", "a", "a", "a", "a", "a"];
            const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
            const text = () => words.slice(0, random(14)).map(() => words[random(6)]).join("");
            const wrong = [];
            for (let k = 0; k < 3000; k++) {
                const [left, right] = [text(), text()];
                const sides = Diff.words(left, right);
                const whole = sides.map((pieces) => pieces.map((p) => p.text).join(""));
                const same = sides.map((pieces) => pieces.filter((p) => !p.changed));
                const kept = same.map((pieces) => pieces.map((p) => p.text).join("").replace(/\\s/g, ""));
                if (whole[0] !== left || whole[1] !== right || kept[0] !== kept[1]) wrong.push([left, right]);
                if (left === right && sides.flat().some((p) => p.changed && p.text)) wrong.push([left, right]);
            }
            return wrong;
        }""")
        assert found == []
        ways = page.evaluate("""() => [
            ["abcabba", "cbabac"], ["", "ab"], ["ab", ""], ["", ""], ["kitten", "sitting"]].map(
            ([a, b]) => Diff.edits([...a], [...b]).filter(([kind]) => kind !== "same").length)""")
        assert ways == [5, 2, 2, 0, 5]
