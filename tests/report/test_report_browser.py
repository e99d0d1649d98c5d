"""The report in a real browser: what a person clicks, reads and searches."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from page_lab import EVIL, UNLABELLED, WEAK_TEXT, Opened, address, planted_run, prompt_of
from run_lab import Lab, small_run
from tables import before_release

from verl_mt.extensions.inspection.report.__main__ import main
from verl_mt.extensions.inspection.report.html_page import ReportServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Lab:
    return planted_run(tmp_path_factory.mktemp("runs") / "planted")


def facts(page) -> dict[str, str]:
    """The inspector's lines."""
    return dict(
        zip(page.locator(".inspector dt").all_text_contents(), page.locator(".inspector dd").all_text_contents())
    )


def test_the_trained_tokens_of_the_worst_rollout_are_two_clicks_away(browser, run):
    row = json.loads((run.folder / "rollouts" / "step_000004.jsonl").read_text().splitlines()[1])
    record = row["records"][0]
    first = record["loss_mask"].index(1)
    with Opened(browser, address(run)) as page:
        page.get_by_role("link", name="Open the worst rollout").click()
        page.get_by_role("button", name="First trained token").click()
        found = facts(page)
        assert found["id"] == str(record["token_ids"][first])
        assert (found["position"], found["role"], found["turn"]) == (str(first), "assistant", "1")
        assert found["loss mask"] == "1: trained" and found["weight version"] == "3"
        sampler, trainer = (float(found[f"{who} log-prob"].split()[0]) for who in ("sampler's", "trainer's"))
        assert sampler == pytest.approx(record["rollout_log_probs"][first], rel=2e-3)
        assert trainer == pytest.approx(record["old_log_probs"][first], rel=2e-3)
        assert float(found["advantage"]) == record["advantages"][first]
        assert page.locator(".t.trained:visible").count() == sum(record["loss_mask"]) + 1  # and the legend's


def test_arrow_keys_go_from_token_to_token_and_escape_lets_go(browser, run):
    with Opened(browser, address(run) + "#/rollout/0/s000004.00000.01?view=tokens") as page:
        page.wait_for_selector(".stream")
        page.locator(".stream .t").first.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert facts(page)["position"] == "3"
        page.keyboard.press("ArrowLeft")
        assert facts(page)["position"] == "2"
        page.keyboard.press("Escape")
        assert facts(page) == {}


def test_each_planted_oddity_is_found_by_its_filter(browser, run):
    with Opened(browser, address(run) + "#/rollouts") as page:
        for flag, place in (("truncated", 1), ("mismatch", 2), ("edge", 3), ("ratio", 3), ("faults", 4)):
            page.select_option("#f-flag", flag)
            assert page.locator("td.c-id").all_text_contents() == [f"s000004.0000{place // 4}.0{place % 4}"], flag


def test_the_conversation_shows_the_finding_the_clip_and_the_call(browser, run):
    with Opened(browser, address(run) + "#/rollout/0/s000004.00000.02?view=messages") as page:
        page.wait_for_selector(".reading")
        assert "retokenized" in page.locator(".note.warn").inner_text()
        page.get_by_role("button", name="token 9").click()
        assert facts(page)["position"] == "9"
        assert page.locator(".t.mismatch:visible").count() == 2 + 1
        page.goto(address(run) + "#/rollout/0/s000004.00000.03")
        page.wait_for_selector(".t.clipped")
        page.locator(".stream .t.clipped").click()
        assert facts(page)["clipped in the update"].startswith("yes")
        assert float(facts(page)["ratio trainer / sampler"]) == pytest.approx(4, rel=1e-2)
        page.goto(address(run) + "#/rollout/0/s000004.00001.00?view=messages")
        page.wait_for_selector(".call.failed")
        call = page.locator(".call").inner_text()
        assert "the tool's fault" in call and "250 ms" in call and '"query"' in call
        assert page.locator(".group li").count() == 4
        page.locator(".group li").last.get_by_text("read it here").click()
        beside = page.locator(".group li").last.locator("h5").all_text_contents()
        assert beside == ["assistant", "tool · search", "assistant"]


def test_the_first_thing_of_a_rollout_is_what_was_asked_answered_and_right(browser, run):
    row = json.loads((run.folder / "rollouts" / "step_000004.jsonl").read_text().splitlines()[7])
    with Opened(browser, address(run) + "#/rollout/0/s000004.00001.03") as page:
        page.wait_for_selector(".asked")
        boxes = [box.inner_text() for box in page.locator(".asked .box").all()]
        assert boxes == [row["messages"][1]["content"], row["messages"][-1]["content"], "1"]
        reward = page.locator(".asked .reward").inner_text().split()
        assert reward == ["Reward", "0", "score", "0", "form", "0.75"]
        page.goto(address(run) + "#/rollout/0/s000004.00001.01")
        page.wait_for_function("() => document.querySelector('.asked .truth').textContent.includes('does not say')")


def test_the_question_is_in_view_and_the_tools_are_folded(browser, tmp_path):
    lab = Lab(tmp_path / "run")
    lab.config()
    lab.metrics(1)
    trajectory = lab.trajectory(1, 0, 0, question="How many of them " + "are there " * 60)
    record, old = type(trajectory.records[0])(), trajectory.records[0]
    tools = "<tools>\n" + '{"parameters": "one of many"}\n' * 40 + "</tools>"
    question = trajectory.messages[1]["content"]
    text = f"<|im_start|>system\n{tools}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    record.append_given(lab.vocabulary.encode(text), kind="prompt", turn=0)
    ids = [i for i, bit in zip(old.token_ids, old.sampled) if bit]
    record.append_sampled(ids, [-1.0] * len(ids), [0] * len(ids), turn=1)
    del trajectory.messages[0]
    trajectory.records = [record]
    lab.write(1, [lab.row(trajectory, 1)])
    lab.texts()
    main([str(lab.folder)])
    with Opened(browser, address(lab) + f"#/rollout/0/{trajectory.trajectory_id}?view=tokens") as page:
        page.wait_for_selector(".stream")
        folded = page.locator(".stream .block.folded h4").all_text_contents()
        assert len(folded) == 1 and folded[0].startswith("tools, as the template writes them")
        assert question.strip() in page.locator(".stream .block").nth(1).inner_text().replace("\n", " ")
        page.locator(".folded .unfold").click()
        assert page.locator(".folded").count() == 0


FILTERED = [
    ({"row": "2"}, 16), ({"data": "other"}, 1), ({"stop": "response_length"}, 1), ({"tool": "(none)"}, 0),
    ({"part": "form", "partlow": "0.7"}, 16),
    ({"part": "form", "partlow": "0.2", "parthigh": "0.3", "row": "3"}, 4),
]  # fmt: skip


def test_filters_narrow_to_a_row_a_source_or_a_part_of_the_reward(browser, run):
    with Opened(browser, address(run) + "#/rollouts") as page:
        for chosen, count in FILTERED:
            assert page.locator("th.c-part").count() == 0
            for name, value in chosen.items():
                control = page.locator(f"#f-{name}")
                if control.evaluate("node => node.tagName") == "SELECT":
                    control.select_option(value)
                else:
                    control.fill(value)
            assert page.locator(".count").inner_text() == f"{count} of 64 rollouts", chosen
            if "part" in chosen:
                page.get_by_role("columnheader", name="form").get_by_role("button").click()
                parts = [float(text) for text in page.locator("td.c-part").all_text_contents()]
                assert parts == sorted(parts, reverse=True) and set(parts) <= {0.25, 0.75}
            page.get_by_role("button", name="Clear all").click()


def test_the_table_says_question_answer_and_truth(browser, run):
    row = json.loads((run.folder / "rollouts" / "step_000004.jsonl").read_text().splitlines()[0])
    with Opened(browser, address(run) + "#/rollouts") as page:
        cells = [page.locator(f"td.c-{name}").first for name in ("question", "answer", "truth")]
        question, answer = row["messages"][1]["content"], row["messages"][-1]["content"]
        assert cells[0].inner_text().rstrip("…") == question[: 119 if len(question) > 120 else 120]
        assert cells[1].inner_text().lstrip("…") == answer[-79:]
        assert cells[2].inner_text() == "0"
        page.fill("#search", row["messages"][3]["content"])
        page.wait_for_function("() => document.getElementById('search-status').textContent.startsWith('1 ')")


def test_the_first_screen_compares_windows_of_steps_and_not_single_ones(browser, tmp_path):
    lab = Lab(tmp_path / "run")
    lab.config()
    lines = [{"step": step, "reward/mean": value} for step, value in enumerate([9, 0, 0, 1, 1, 1, 2, 4, 0], start=1)]
    (lab.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([str(lab.folder)])
    with Opened(browser, address(lab)) as page:
        assert "reward, first 2 → last 2\n4.5 → 2" in page.locator(".run .facts").inner_text()
        assert page.locator(".chart .ends").inner_text() == "mean: 4.5 → 2 (means of 2 steps)"


def test_every_record_of_a_rewritten_history_has_its_own_tokens(browser, tmp_path):
    lab = Lab(tmp_path / "forked")
    lab.config()
    lab.metrics(1)
    first, second = lab.trajectory(1, 0, 0), lab.trajectory(1, 0, 1)
    first.records += lab.trajectory(1, 0, 2).records
    first.records[0].messages = first.messages
    rows = [lab.row(t, 1) for t in (first, second)]
    rows[0]["records"][1]["sampled"].append(0)  # broken: left out, and those behind it are not shifted
    rows[0]["records"].append(rows[0]["records"][0] | {"policy_versions": [7] * len(first.records[0].token_ids)})
    lab.write(1, rows)
    lab.texts()
    main([str(lab.folder)])
    texts = {token_id: text for text, token_id in lab.vocabulary.ids.items()}
    with Opened(browser, address(lab) + f"#/rollout/0/{first.trajectory_id}?view=tokens") as page:
        page.wait_for_selector(".stream")
        assert "record 1: columns of one record differ" in page.locator(".note.bad").inner_text()
        assert "Record 2 of 2" in page.locator("section.record h3").last.inner_text()
        token = page.locator("section.record").last.locator(".t.trained").first
        token.click()
        place = rows[0]["records"][0]["loss_mask"].index(1)
        assert facts(page)["position"] == str(place) and facts(page)["weight version"] == "7"
        page.goto(f"{address(lab)}#/rollout/0/{second.trajectory_id}")
        page.wait_for_function("() => document.querySelectorAll('section.record').length === 0")
        shown = "".join(page.locator(".stream .t").all_text_contents()).replace("↵", "\n")
        assert shown == "".join(texts[i] for i in second.records[0].token_ids)


def test_the_first_screen_says_what_the_collapse_guard_saw(browser, tmp_path):
    lab = small_run(tmp_path / "run", steps=1)
    with open(lab.folder / "metrics.jsonl", "a") as file:
        for step in (5, 6):
            file.write(json.dumps({"step": step, "collapse/signs": 1.0, "collapse/entropy_rise": 1.0}) + "\n")
    main([str(lab.folder)])
    with Opened(browser, address(lab)) as page:
        note = page.locator(".run .note.bad").inner_text()
        assert note == "The collapse guard saw: entropy rise (2 steps, first 5, last 6)."


def test_the_first_screen_says_that_a_run_is_dead_from_the_start(browser, tmp_path):
    lab = small_run(tmp_path / "run", steps=1)
    line = {"step": 3, "collapse/dead_start": 1.0, "collapse/words": "dead from the start: nothing was rewarded"}
    with open(lab.folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    main([str(lab.folder)])
    with Opened(browser, address(lab)) as page:
        note = page.locator(".run .note.bad").inner_text()
        assert "dead start (step 3)." in note and "Step 3: dead from the start: nothing was rewarded" in note


def test_columns_sort_both_ways_and_the_table_has_pages(browser, run):
    with Opened(browser, address(run) + "#/rollouts") as page:
        assert "64 of 64" in page.locator(".count").inner_text()
        heading = page.get_by_role("columnheader", name="reward")
        for wanted in ("descending", "ascending"):
            heading.get_by_role("button").click()
            assert heading.get_attribute("aria-sort") == wanted
            rewards = [float(text) for text in page.locator("td.c-reward").all_text_contents()]
            assert rewards == sorted(rewards, reverse=wanted == "descending")
        page.fill("#f-from", "4")
        page.fill("#f-high", "0")
        assert set(page.locator("td.c-step").all_text_contents()) == {"4"}
        page.get_by_role("button", name="Clear all").click()
        assert "64 of 64" in page.locator(".count").inner_text()


def test_the_timeline_draws_every_conversation_and_the_critical_path(browser, run):
    with Opened(browser, address(run) + "#/rollouts") as page:
        page.get_by_role("link", name="Timeline").click()
        page.wait_for_selector("svg.timeline")
        assert page.locator("svg .lane").count() == 16
        behind = page.locator("svg .lane-back").first.evaluate("node => getComputedStyle(node).fill")
        assert behind == "rgba(0, 0, 0, 0)"  # no black bar
        assert page.locator("svg .phase-tool").count() == 16
        assert page.locator("svg line.path").count() > 0
        assert page.locator("svg .engine").count() == 0
        assert "What held this rollout" in page.locator("main").inner_text()
        page.select_option("#t-step", "2")
        page.wait_for_function("() => location.hash.endsWith('/2')")
        page.locator("svg .lane").first.click()
        page.wait_for_selector(".reading")


SECONDS = 3.13
"""From the begin of a step's conversations to their end, where there are four prompts."""


def ahead_run(folder: Path, *, replicas: Sequence[str] = ()) -> Lab:
    """Step 1 is trained while step 2 is sampled, for which the trainer then waits. The engine samples for step 1, and
    for a validation behind it, in the beginning, and for step 3 at the end.

    Args:
        replicas: which one sampled each turn.
    """
    lab = small_run(folder, steps=3)
    lab.config(max_staleness=1)
    lab.write(1, [lab.row(lab.trajectory(1, 0, 0), 1)], split="val")
    start, third = 2000.0, SECONDS / 3
    for name, begun in (("step_000001", -1.0), ("val_000001", 0.6), ("step_000002", 0.0), ("step_000003", 2.6)):
        path = lab.folder / "rollouts" / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= {"replicas": list(replicas)} if replicas else {}
            for span in row["time_spans"]:
                span |= {edge: span[edge] + start + begun - 1000.0 * int(name[-1]) for edge in ("start_s", "end_s")}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [json.loads(line) for line in (lab.folder / "metrics.jsonl").read_text().splitlines()]
    ahead = {"staleness/trainer_wait_s": third, "staleness/mean": 0.5, "staleness/max": 1.0}
    times = {"time/rollout_s": third, "time/update_s": third, "time/weights_s": third / 4, "time/step_s": 2.4 * third}
    for line in lines:
        line |= ahead | times | {"time/begun_s": start + (line["step"] - 1) * 2.5 * third}
    lines[0]["time/validate_s"] = lines[1]["time/checkpoint_s"] = 0.05 * third
    (lab.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([str(lab.folder)])
    return lab


def test_of_a_run_that_samples_ahead_the_timeline_shows_what_the_trainer_did_meanwhile(browser, tmp_path):
    with Opened(browser, address(ahead_run(tmp_path / "ahead")) + "#/timeline/0/2") as page:
        page.wait_for_selector("svg.timeline")
        bars = page.locator("svg [class^=trainer]")
        did = [bar.get_attribute("data-about").split(": ")[1].split(", ")[0] for bar in bars.all()]
        ended = ["update", "weights", "the rest", "waits for its validation", "checkpoint"]
        assert did == ["waits for its rollout", *ended, "waits for its rollout"]
        places = [float(bar.get_attribute("x")) for bar in bars.all()]
        thirds = [place * 3 / 1000 for place in places]
        assert thirds == pytest.approx([0, 1, 2, 2.25, 2.4, 2.45, 2.5], abs=1e-3)
        assert page.locator("svg .trainer-waits").count() == 3
        text = page.locator("main").inner_text()
        assert "Sampled while earlier steps were trained" in text and "0.5 updates old on average, 1 at most" in text
        assert "critical path" not in text, "nobody waited for most of them"
        page.locator("svg .trainer-works").first.hover()
        assert "trainer, step 1: update" in page.locator(".about").inner_text()


EARLIER, LATER, VALIDATION = ("others", "step 1"), ("others", "step 3"), ("others", "a validation")


@pytest.mark.parametrize(
    ("replicas", "rows"),
    [
        ([], {"engine": [
            (0, *EARLIER), (0.1, "own", "this step and step 1 and a validation"),
            (1.03, "others", "step 1 and a validation"), (1.5, "own", "this step and a validation"),
            (2.13, *VALIDATION), (2.7, *LATER),
        ]}),
        (["rank 10", "rank 9"], {
            "rank 9": [(0.5, *EARLIER), (1.5, "own", "this step and a validation"), (2.13, *VALIDATION)],
            "rank 10": [
                (0, *EARLIER), (0.1, "own", "this step and a validation"), (1.03, *VALIDATION), (2.7, *LATER),
            ],
        }),
    ],
)  # fmt: skip
def test_each_engine_has_a_row_that_says_for_which_steps_it_sampled(browser, tmp_path, replicas, rows):
    with Opened(browser, address(ahead_run(tmp_path / "ahead", replicas=replicas)) + "#/timeline/0/2") as page:
        page.wait_for_selector("svg.timeline")
        found = {}
        for row in page.locator("svg .engine").all():
            name = (
                row.locator(".engine-back")
                .get_attribute("data-about")
                .removesuffix(": nothing that came to these rows")
            )
            found[name] = []
            for bar in row.locator("rect:not(.engine-back)").all():
                whose = re.fullmatch(f"{name}: samples for (.*), .*, from .* on", bar.get_attribute("data-about"))[1]
                kind = bar.get_attribute("class").removeprefix("engine-")
                found[name].append((round(float(bar.get_attribute("x")) * SECONDS / 1000, 3), kind, whose))
        assert list(found.items()) == list(rows.items())
        text = page.locator("main").inner_text()
        assert (
            "below it are the 2 engines (rank 9 and rank 10)" if replicas else "the one below it the engine"
        ) in text
        assert "engine samples for this step" in text and "for others only" in text and "is missing there" not in text
        page.locator("svg .engine-others").last.hover()
        assert "samples for step 3" in page.locator(".about").inner_text()


def test_the_timeline_says_which_steps_the_rows_of_engines_know_nothing_of(browser, tmp_path):
    run = ahead_run(tmp_path / "ahead")
    (run.folder / "rollouts" / "step_000003.jsonl").unlink()
    main([str(run.folder)])
    with Opened(browser, address(run) + "#/timeline/0/2") as page:
        page.wait_for_selector("svg.timeline")
        assert "What engines sampled for step 3 is missing there" in page.locator("main").inner_text()


def test_curves_of_two_runs_are_in_the_same_charts(browser, run, tmp_path):
    other = small_run(tmp_path / "other", steps=2)
    out = tmp_path / "both.html"
    main([str(run.folder), str(other.folder), "--out", str(out)])
    with Opened(browser, out.as_uri()) as page:
        page.wait_for_selector(".chart .plot .trace")
        reward = page.locator(".chart", has=page.get_by_role("heading", name="Reward"))
        assert reward.locator(".plot .trace").count() == 2
        assert page.locator("#run-legend label").all_text_contents() == ["planted", "other"]
        page.get_by_role("checkbox", name="other").uncheck()
        page.wait_for_selector(".chart .plot .trace")
        assert reward.locator(".plot .trace").count() == 1
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.select_option("#f-run", label="other")
        assert "16 of 80" in page.locator(".count").inner_text()


def test_text_of_a_rollout_is_shown_and_never_run(browser, tmp_path):
    lab = Lab(tmp_path / "evil")
    lab.config(note=EVIL)
    lab.metrics(2)
    trajectory = lab.trajectory(1, 0, 0, answer=EVIL)
    trajectory.trajectory_id, trajectory.error, trajectory.info = f"id {EVIL}", EVIL, {EVIL: EVIL}
    trajectory.messages[2]["tool_calls"][0]["function"]["name"] = EVIL
    trajectory.tool_calls[0] |= {"name": EVIL, "arguments": {EVIL: EVIL}}
    trajectory.counters = {f"tools/{EVIL.replace('/', '')}/calls": 1.0}
    trajectory.ground_truth, trajectory.data_source, trajectory.reward_parts = {EVIL: EVIL}, EVIL, {EVIL: 1.0}
    trajectory.messages[1]["content"] = trajectory.messages[4]["content"] = EVIL
    row = lab.row(trajectory, 1)
    row["stop_reason"] = EVIL
    row["time_spans"][0]["name"] = EVIL
    row["sanity"] = {"cause": EVIL, "causes": [EVIL], "start": 0, "spans": [{"start": 0, "end": 1, "recorded": EVIL}]}
    lab.write(1, [row])
    with open(lab.folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, EVIL: 1.0}) + "\n")
    lab.texts()
    main([str(lab.folder)])
    with Opened(browser, address(lab)) as page:
        page.wait_for_selector(".chart .plot svg")
        page.select_option("#any-metric", EVIL)
        page.locator(".own .plot").scroll_into_view_if_needed()
        page.wait_for_selector(".own .plot svg")
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.fill("#search", "window.harmed=3")
        page.wait_for_function("() => document.getElementById('search-status').textContent.startsWith('1 ')")
        page.locator("td.c-id a").click()
        page.wait_for_selector(".reading")
        assert EVIL in page.locator(".reading .role-tool pre").last.inner_text()
        page.get_by_role("button", name="Tokens", exact=True).click()
        page.wait_for_selector(".stream")
        assert "<script>window.harmed=1</script>" in page.locator("main").inner_text()
        kinds = [f"{place} {kind}" for place in (".stream", ".reading") for kind in ("script", "img", "iframe", "svg")]
        assert page.locator(", ".join(kinds)).count() == 0
        page.get_by_role("link", name="Timeline of the step").click()
        page.wait_for_selector("svg.timeline")
        page.get_by_role("link", name="Prompts", exact=True).click()
        page.locator("td.c-question a").click()
        page.wait_for_selector(".sides")
        assert EVIL in page.locator(".asked .box").first.inner_text()
        page.get_by_role("link", name="About", exact=True).click()
        page.wait_for_function("() => document.querySelectorAll('pre').length === 1")  # those of before are gone
        assert EVIL in page.locator("pre").inner_text()
        page.wait_for_timeout(300)
        assert page.evaluate("window.harmed") is None


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "dark"),
        before_release(1300, "light"),
        before_release(390, "light"),
        before_release(1300, "dark"),
    ],
)
def test_every_view_fits_its_width_and_text_stands_out(browser, run, width, scheme):
    with Opened(browser, address(run), width=width, scheme=scheme) as page:
        for view in (
            "",
            "rollouts",
            "rollout/0/s000004.00000.02?view=tokens",
            "rollout/0/s000004.00001.00?view=messages",
            "prompts",
            f"prompt/{prompt_of(run, 4)}?left=0%2Fs000004.00001.00&right=0%2Fs000004.00001.01",
            "timeline/0/4",
            "about",
        ):
            page.goto(f"{address(run)}#/{view}")
            page.wait_for_function("hash => document.querySelector('main').dataset.ready === hash", arg=f"#/{view}")
            page.wait_for_timeout(100)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
            assert page.evaluate(WEAK_TEXT) == [], view
            assert page.evaluate(UNLABELLED) == [], view


def test_a_served_report_follows_the_run_and_keeps_out_other_sites(browser, tmp_path):
    lab = small_run(tmp_path / "live", steps=1, finished=False)
    with ReportServer([str(lab.folder)]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Opened(browser, server.url + "#/rollouts") as page:
            assert "8 of 8" in page.locator(".count").inner_text()
            lab.write(2, [lab.row(lab.trajectory(2, 0, 0, answer="brand new words"), 2)])
            lab.texts()
            page.wait_for_function(
                "() => document.querySelector('.count').textContent.startsWith('9 of 9')", timeout=20_000
            )
            page.fill("#search", "brand new")
            page.wait_for_function("() => document.getElementById('search-status').textContent.startsWith('1 ')")
            stranger = page.request.get(server.url + "manifest.json", headers={"Host": "evil.example:80"})
            assert stranger.status == 403
            assert page.request.get(server.url + "blob/..%2Fconfig.yaml").status == 404
        server.shutdown()


def large_run(folder: Path, number: int) -> Lab:
    """A step's 128 rollouts of about 200 tokens, in each step in another order: blocks are packed one by one, so that
    nothing is smaller for it, and written 50 times faster."""
    lab = Lab(folder)
    lab.config()
    steps, place = -(-number // 128), number - 129
    lab.metrics(steps)
    rows = [lab.row(lab.trajectory(1, k // 8, k % 8, words=42), 1) for k in range(128)]
    assert 190 <= sum(len(row["records"][0]["token_ids"]) for row in rows) / 128 <= 215
    lines = [json.dumps(row) for row in rows]
    needle = json.dumps(lab.row(lab.trajectory(1, 15, 99, answer="a planted needle: zzqx9871", words=42), 1))
    (folder / "rollouts").mkdir()
    for step in range(1, steps + 1):
        lab.random.shuffle(lines)
        own = lines[: min(128, number - 128 * (step - 1))]
        if 128 * (step - 1) < place <= 128 * step:
            own[place - 128 * (step - 1) - 1] = needle
        text = "".join(line.replace("s000001.", f"s{step:06d}.") + "\n" for line in own)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    lab.texts()
    return lab


@pytest.mark.parametrize("number", [before_release(300), before_release(10_000)])
def test_thousands_of_rollouts_open_and_are_searched(browser, tmp_path, number):
    lab = large_run(tmp_path / "big", number)
    begun = time.monotonic()
    assert main([str(lab.folder)]) == 0
    built_s = time.monotonic() - begun
    path = Path(lab.folder / "report.html")
    size = path.stat().st_size / 1e6
    assert size < 2 + 48 * number / 10_000
    with Opened(browser, path.as_uri()) as page:
        opened_s = page.evaluate("Number(document.documentElement.dataset.opened)") / 1000
        page.get_by_role("link", name="Rollouts", exact=True).click()
        assert f"{number} of {number}" in page.locator(".count").inner_text()
        begun = time.monotonic()
        page.fill("#search", "zzqx9871")
        page.wait_for_function(
            "() => document.getElementById('search-status').textContent.startsWith('1 ')", timeout=60_000
        )
        searched_s = time.monotonic() - begun
        page.locator("td.c-id a").click()
        page.wait_for_selector(".reading")
        assert "zzqx9871" in page.locator(".reading").inner_text()
        assert page.locator("dl.facts").inner_text().count("\n") > 6
    print(f"built in {built_s:.1f} s, {size:.1f} MB, opened in {opened_s:.2f} s, searched in {searched_s:.2f} s")
